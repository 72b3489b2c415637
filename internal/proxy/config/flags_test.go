package config

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/verdict-proxy/verdict/internal/system/yamltree"
)

// kubeProxyFlags are those that kube-proxy 1.37 has, but for --help.
const kubeProxyFlags = `
bind-address bind-address-hard-fail boot-id-file cleanup cluster-cidr config config-sync-period conntrack-max-per-core
conntrack-min conntrack-tcp-be-liberal conntrack-tcp-timeout-close-wait conntrack-tcp-timeout-established
conntrack-udp-timeout conntrack-udp-timeout-stream detect-local-mode feature-gates healthz-bind-address healthz-port
hostname-override init-only iptables-localhost-nodeports iptables-masquerade-bit iptables-min-sync-period
iptables-sync-period ipvs-exclude-cidrs ipvs-min-sync-period ipvs-scheduler ipvs-strict-arp ipvs-sync-period
ipvs-tcp-timeout ipvs-tcpfin-timeout ipvs-udp-timeout kube-api-burst kube-api-content-type kube-api-qps kubeconfig
log-flush-frequency log-json-info-buffer-size log-json-split-stream log-text-info-buffer-size log-text-split-stream
logging-format machine-id-file masquerade-all master metrics-bind-address metrics-port nodeport-addresses
oom-score-adj pod-bridge-interface pod-interface-name-prefix profiling proxy-mode show-hidden-metrics-for-version v
version vmodule write-config-to
`

// TestFlagNames: all of kube-proxy's flags are there, and some of ours.
func TestFlagNames(t *testing.T) {
	var got []string
	fs := pflag.NewFlagSet("run", pflag.ContinueOnError)
	new(Flags).Add(fs)
	fs.VisitAll(func(f *pflag.Flag) { got = append(got, f.Name) })
	want := append(
		strings.Fields(kubeProxyFlags),
		"from",
		"backend",
		"behavior",
		"iptables-dispatch",
		"iptables-compat",
		"keeper",
		"own-tables",
		"node-condition",
		"startup-taint",
		"takeover",
		"ipvs",
		"ipvs-addresses",
		"counter-memory-mib",
		"everywhere", "everywhere-token", "ledger", "ledger-max-mib",
		"records", "records-memory-mib", "records-file", "records-otlp", "records-client-prefix",
		"ipvs-services",
		"metrics-connections",
		"metrics-max-series",
		"second-chance",
		"last-resort",
		"client-address",
		"ping-services",
		"reject-unused-ports",
	)
	slices.Sort(want)
	if slices.Sort(got); !slices.Equal(got, want) {
		t.Errorf("got %v\nwant %v", got, want)
	}
	for i := range flags {
		for _, name := range flags[i].fields {
			fieldNamed(name)
		}
	}
}

// TestFlagsOverrideTheFile: one that is given does, one that is not does not.
func TestFlagsOverrideTheFile(t *testing.T) {
	const file = head + `
mode: nftables
clusterCIDR: 10.0.0.0/8
nodePortAddresses: [10.0.0.0/8]
hostnameOverride: file
nftables: {masqueradeAll: true, minSyncPeriod: 1s}
logging: {verbosity: 2}
featureGates: {A: true, B: true}
healthzBindAddress: 127.0.0.1:1
conntrack: {min: 7}
`
	for _, row := range []struct {
		args  string
		check func(s *Settings) bool
	}{
		{"", func(s *Settings) bool {
			return s.NodeName == "file" && s.Policy.MasqueradeAll && s.MinSyncPeriod == time.Second && s.Log.Level < 0 &&
				s.Client.Master == ""
		}},
		{"--hostname-override=Flag --cluster-cidr=10.9.0.0/16 --masquerade-all=false -v0 --iptables-min-sync-period=0",
			func(s *Settings) bool {
				return s.NodeName == "flag" && slices.Equal(s.Policy.DetectLocal.ClusterCIDRs, prefixes("10.9.0.0/16")) &&
					!s.Policy.MasqueradeAll &&
					s.MinSyncPeriod == 0 && s.Log.Level == 0 && s.Document.text(yamltree.Path{"conntrack", "min"}) == "7"
			}},
		{"--nodeport-addresses=192.0.2.0/24,fd00::/8 --nodeport-addresses=198.51.100.0/24", func(s *Settings) bool {
			return slices.Equal(s.Policy.NodePortAddresses, prefixes("192.0.2.0/24", "fd00::/8", "198.51.100.0/24"))
		}},
		{"--nodeport-addresses=primary", func(s *Settings) bool {
			return s.Policy.NodePortAddresses == nil && s.Policy.NodePortPrimary
		}},
		{"--nodeport-addresses=primary,10.0.0.0/8", func(s *Settings) bool {
			return slices.Equal(s.Policy.NodePortAddresses, prefixes("10.0.0.0/8")) && s.Policy.NodePortPrimary
		}},
		{"--feature-gates=B=false,C=true --feature-gates=D=true", func(s *Settings) bool {
			return s.Document.text(yamltree.Path{"featureGates"}) == `{"A":true,"B":false,"C":true,"D":true}`
		}},
		{"--healthz-bind-address=0.0.0.0", func(s *Settings) bool { return s.Healthz.String() == "0.0.0.0:10256" }},
		{"--healthz-bind-address=",
			func(s *Settings) bool { return s.Healthz == netip.AddrPort{} && s.KubeProxy().HealthzBindAddress == "" }},
		{"--healthz-port=5", func(s *Settings) bool { return s.Healthz.String() == "127.0.0.1:1" }},
		{"--healthz-port=0", func(s *Settings) bool { return s.Healthz == netip.AddrPort{} }},
		{"--healthz-port=5 --healthz-bind-address=127.0.0.2",
			func(s *Settings) bool { return s.Healthz.String() == "127.0.0.2:5" }},
		{"--metrics-port=5", func(s *Settings) bool { return s.Metrics.String() == "127.0.0.1:5" }},
		{"--master=https://192.0.2.1 --kubeconfig=/k --kube-api-qps=50 --kube-api-burst=100 " +
			"--kube-api-content-type=application/json", func(s *Settings) bool {
			return s.Client == Client{"/k", "https://192.0.2.1", "application/json", "", 50, 100}
		}},
		{"--from=/m --keeper=none --own-tables=false",
			func(s *Settings) bool { return s.Manifests == "/m" && s.Keeper == "none" && !s.OwnTables }},
		{"--proxy-mode=ipvs --ipvs-sync-period=10s --ipvs-min-sync-period=2s", func(s *Settings) bool {
			return s.SyncPeriod == 10*time.Second && s.MinSyncPeriod == 2*time.Second
		}},
		{"--detect-local-mode=InterfaceNamePrefix --pod-interface-name-prefix=cali",
			func(s *Settings) bool { return s.Policy.DetectLocal.Interface == "cali" }},
		{"--detect-local-mode=BridgeInterface --pod-bridge-interface=cni0 --bind-address=192.0.2.1", func(s *Settings) bool {
			return s.Policy.DetectLocal.Interface == "cni0" && s.Policy.NodeIP.IsValid()
		}},
		{"--conntrack-max-per-core=0 --conntrack-tcp-timeout-established=0 --conntrack-tcp-timeout-close-wait=0 " +
			"--conntrack-udp-timeout=1m", func(s *Settings) bool {
			return len(s.Sysctls(1)) == 1
		}},
		{"--iptables-localhost-nodeports=false --profiling --bind-address-hard-fail --oom-score-adj=5 --logging-format=json",
			func(s *Settings) bool {
				return !s.Policy.LocalhostNodePorts && s.Profiling && s.HardFail && s.OOMScoreAdj == 5 && s.Log.JSON
			}},
	} {
		if s, _ := loadText(t, file, strings.Fields(row.args)...); !row.check(s) {
			t.Errorf("%q: %+v", row.args, s)
		}
	}
}

// TestFlagErrors: a wrong flag is an error at once, whatever the file says. A wrong value in the file that a flag
// overrides is none.
func TestFlagErrors(t *testing.T) {
	for args, want := range map[string]string{
		"--conntrack-min=many": `invalid argument "many" for "--conntrack-min" flag: "many" is ` +
			`not a whole number`,
		"--masquerade-all=perhaps": `invalid argument "perhaps" for ` +
			`"--masquerade-all" flag: "perhaps" is neither true nor false`,
		"--ipvs-udp-timeout=30": `invalid argument "30" for "--ipvs-udp-timeout" ` +
			`flag: "30" is not a duration such as 30s or 1h30m`,
		"--feature-gates=A": `invalid argument "A" for "--feature-gates" flag: "A" is neither NAME=true nor ` +
			`NAME=false`,
		"--keeper=dog": `invalid argument "dog" for "--keeper" flag: "dog" is not one of auto, process, ` +
			`systemd, none`,
		"-v=loud": `invalid argument "loud" for "-v, --v" flag: ` +
			`"loud" is not a whole number`,
		"--healthz-port=99999": `invalid argument "99999" for "--healthz-port" ` +
			`flag: "99999" is not a port`,
		"--nodeport-addresses=all,all": `--nodeport-addresses: "all" is listed twice`,
		"--nodeport-addresses=10.0.0.0/8,10.0.0.0/99": `--nodeport-addresses: "10.0.0.0/99" is not an ` +
			`address range such as 10.244.0.0/16`,
		"--cluster-cidr=10.244.0.0": `--cluster-cidr: "10.244.0.0" is not an address ` +
			`range such as 10.244.0.0/16`,
		"--cluster-cidr=10.244.0.0/16,10.245.0.0/16": `--cluster-cidr: "10.245.0.0/16" is a second ` +
			`range of the same family`,
		"--cluster-cidr=10.1.0.0/16,::ffff:10.0.0.0/104": `--cluster-cidr: "::ffff:10.0.0.0/104" is a second ` +
			`range of the same family`,
		"--detect-local-mode=Magic": `--detect-local-mode: "Magic" is not one of ` +
			`ClusterCIDR, NodeCIDR, BridgeInterface, InterfaceNamePrefix`,
		"--detect-local-mode=BridgeInterface": `--detect-local-mode: BridgeInterface needs a ` +
			`name: detectLocal.bridgeInterface, or --pod-bridge-interface`,
		"--detect-local-mode=BridgeInterface --pod-bridge-interface=a*": `--pod-bridge-interface: "a*" is not an ` +
			`interface name (at most 15 bytes, without spaces, slashes, quotes or stars)`,
		"--proxy-mode=userspace": `--proxy-mode: "userspace" is not one of iptables, ipvs, nftables`,
		"--bind-address=node-1":  `--bind-address: "node-1" is not an IP address`,
		"--metrics-bind-address=localhost:1": `--metrics-bind-address: "localhost:1" is not an IP address with or ` +
			`without a port, such as 127.0.0.1:10249 or ::1`,
		"--hostname-override= ":          `--hostname-override: it is blank`,
		"--iptables-min-sync-period=31s": `--iptables-min-sync-period: 31s is more than the syncPeriod, 30s`,
		"--from=/m --kubeconfig=/k":      `--from and --kubeconfig exclude each other`,
		"--conntrack-min=-1 --oom-score-adj=2000": "--oom-score-adj: 2000 is not within -1000 to 1000\n--conntrack-min: " +
			"-1 is less than 0",
	} {
		f := &Flags{}
		fs := pflag.NewFlagSet("run", pflag.ContinueOnError)
		f.Add(fs)
		split := strings.SplitAfter(args, " --")
		for i := range split {
			split[i] = strings.TrimSuffix(split[i], " --")
			if i > 0 {
				split[i] = "--" + split[i]
			}
		}
		err := fs.Parse(split)
		if err == nil {
			_, _, err = Load("", f, nil)
		}
		if err == nil || err.Error() != want {
			t.Errorf("%q: %v\nwant %s", args, err, want)
		}
	}
	s, said := loadText(t, head+"clusterCIDR: [10.0.0.0/8]\nmode: nftables\n", "--cluster-cidr=10.9.0.0/16")
	if want := "f:3: clusterCIDR: a list is not text; --cluster-cidr is used"; !slices.Equal(said, []string{want}) ||
		len(s.Policy.DetectLocal.ClusterCIDRs) != 1 {
		t.Errorf("it says %v", said)
	}
}

// TestFlagNotes: flags that do nothing, or are deprecated, are answered by a line.
func TestFlagNotes(t *testing.T) {
	_, said := loadText(
		t,
		head+"mode: nftables\n",
		"--healthz-port=1",
		"--vmodule=a=1",
		"--log-text-split-stream",
		"--ipvs-scheduler=rr",
		"--iptables-masquerade-bit=15",
		"--config-sync-period=1h",
		"--feature-gates=Foo=true",
		"--machine-id-file=/etc/machine-id",
	)
	want := []string{
		"--feature-gates: these have no effect: Foo",
		"--config-sync-period: it has no effect: Verdict needs no resync: it handles each change once",
		"--vmodule: it has no effect: all files have the same verbosity",
		"--log-text-split-stream: it has no effect: log lines are not buffered",
		"--machine-id-file: it has no effect: the host is identified by its name",
		"--healthz-port: it is deprecated: give --healthz-bind-address a port",
		"--iptables-masquerade-bit: it has no effect with nftables, which masquerades without a mark",
	}
	for _, w := range want {
		if !slices.Contains(said, w) {
			t.Errorf("it does not say %q, but\n%s", w, strings.Join(said, "\n"))
		}
	}
}

// TestPolicyFlags: commands that only look have those flags that decide about packets.
func TestPolicyFlags(t *testing.T) {
	f := &Flags{}
	fs := pflag.NewFlagSet("render", pflag.ContinueOnError)
	f.AddPolicy(fs)
	var got []string
	fs.VisitAll(func(f *pflag.Flag) { got = append(got, f.Name) })
	want := []string{
		"backend",
		"behavior",
		"bind-address",
		"client-address",
		"cluster-cidr",
		"config",
		"detect-local-mode",
		"feature-gates",
		"hostname-override",
		"iptables-dispatch",
		"iptables-localhost-nodeports",
		"iptables-masquerade-bit",
		"ipvs",
		"ipvs-addresses",
		"ipvs-scheduler",
		"last-resort",
		"masquerade-all",
		"nodeport-addresses",
		"ping-services",
		"pod-bridge-interface",
		"pod-interface-name-prefix",
		"proxy-mode",
		"records",
		"reject-unused-ports",
		"second-chance",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %v", got)
	}
}
