package inspect

import (
	"net/netip"
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/proxy/config"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

func parsePolicy(t *testing.T, args ...string) (dataplane.Config, error) {
	t.Helper()
	var p Policy
	f := pflag.NewFlagSet("render", pflag.ContinueOnError)
	p.AddFlags(f)
	labtest.Check(t, f.Parse(args))
	return p.Config()
}

// TestPolicyFlags: commands that only look go by the same flags and the same file as run; internal/proxy/config has
// them all.
func TestPolicyFlags(t *testing.T) {
	host, err := os.Hostname()
	labtest.Check(t, err)
	ipvs := dataplane.IPVS{Mode: dataplane.IPVSAuto, Default: dataplane.Scheduling{Scheduler: "rr"}}
	chance, _ := snapshot.ParseSecondChance(config.DefaultSecondChance)
	want := dataplane.Config{NodeName: strings.ToLower(host), LocalhostNodePorts: true, IPVS: ipvs, SecondChance: chance,
		PingServices: true, RejectUnusedPorts: true, ClientAddress: dataplane.KeepNone}
	if got, err := parsePolicy(t); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("without flags: %+v, %v; want %+v", got, err, want)
	}
	want = dataplane.Config{NodeName: "n", MasqueradeAll: true, IPVS: ipvs, SecondChance: snapshot.SecondChanceOff,
		RejectUnusedPorts: true, ClientAddress: dataplane.KeepNone,
		DetectLocal: dataplane.DetectLocal{ClusterCIDRs: []netip.Prefix{netip.MustParsePrefix("10.9.0.0/16")}}}
	file := labtest.ConfigFile(t,
		"mode: nftables\nclusterCIDR: 10.0.0.0/8\nnftables: {masqueradeAll: true}\nhostnameOverride: file\n")
	got, err := parsePolicy(t, "--config", file, "--hostname-override=N", "--cluster-cidr=10.9.0.0/16",
		"--iptables-localhost-nodeports=false", "--second-chance=off", "--ping-services=false")
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("with a file: %+v, %v; want %+v", got, err, want)
	}
	if _, err := parsePolicy(t, "--config", file+"x"); err == nil ||
		err.Error() != file+"x: it cannot be read: no such file or directory" {
		t.Error(err)
	}
	if _, err := parsePolicy(t, "--detect-local-mode=Magic"); err == nil ||
		!strings.HasPrefix(err.Error(), `--detect-local-mode: "Magic" is not one of`) {
		t.Error(err)
	}
}
