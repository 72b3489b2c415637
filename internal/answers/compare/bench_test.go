package compare_test

import (
	"bytes"
	"flag"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/answers/compare"
	"github.com/verdict-proxy/verdict/internal/lab/benchmark"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/packets"
	"github.com/verdict-proxy/verdict/nft/iptshim"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

var benchServices = flag.Int("services", 1000, "how many Services with 10 endpoints each TestScale compares")

// TestScale compares Verdict's tables, kube-proxy's chains and the objects of a large cluster, and says what it took.
func TestScale(t *testing.T) {
	c := benchmark.NewCluster(*benchServices, 10)
	host := []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("192.0.2.10")}
	d := snapshot.Delta{HostAddrs: &host, Node: &snapshot.Node{Name: "node-0", Addresses: host[1:]},
		Services: map[snapshot.Name]*snapshot.Service{}, Slices: map[snapshot.Name]*snapshot.Slice{}}
	for i := range *benchServices {
		svc := c.Service(i)
		svc.Ports[0].NodePort = uint16(30000 + i%2500)
		if i >= 2500 {
			svc.Ports[0].NodePort = 0
		}
		d.Services[svc.Name] = svc
		d.Slices[c.SliceName(i)] = c.Slice(i)
	}
	snap := snapshot.New()
	snap.Apply(d)
	state, _ := dataplane.Compute(benchmark.NodeConfig, snap)
	h := write(t, state)
	begin := processorTime(t)
	side := compare.NewSide(compare.Verdict, read(t, h, "verdict", host))
	readTook := processorTime(t) - begin
	model := iptshim.New(iptshim.Options{Dispatch: iptshim.List})
	model.Plan(state, dataplane.Change{})
	text := ipfamily.Per[[]byte]{saved(model.Full(ipfamily.IPv4)), saved(model.Full(ipfamily.IPv6))}
	begin = processorTime(t)
	chains, err := packets.ParseChains(text, &packets.Host{Addrs: host})
	labtest.Check(t, err)
	parseTook := processorTime(t) - begin
	for _, sides := range [][]compare.Side{{side}, {compare.NewSide(compare.IPTables, chains)}} {
		before := processorTime(t)
		r, err := compare.Compare(compare.Input{Host: host, Pods: podsOf(state), State: state, Sides: sides})
		labtest.Check(t, err)
		report(t, r)
		t.Logf("%d Services, %s: %d rules, %d elements, read in %s or %s, compared in %s of a processor, resident at most %s",
			*benchServices, sides[0].Name, sides[0].Size.Rules, sides[0].Size.Elements, readTook, parseTook,
			processorTime(t)-before, peak())
		if r.Unexplained+r.Unknown > 0 || r.Classes < *benchServices {
			t.Errorf("%d classes: %d unexplained, %d unknown", r.Classes, r.Unexplained, r.Unknown)
		}
	}
}

// processorTime is what this process has taken: others work on the machine, too.
func processorTime(t *testing.T) time.Duration {
	var u unix.Rusage
	labtest.Check(t, unix.Getrusage(unix.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()).Round(time.Millisecond)
}

// saved turns what iptables-restore reads into what iptables-save prints.
func saved(text []byte) []byte {
	for _, table := range []string{"*filter\n", "*nat\n", "*mangle\n"} {
		builtin := table
		for _, chain := range []string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"} {
			builtin += ":" + chain + " ACCEPT [0:0]\n"
		}
		text = bytes.Replace(text, []byte(table), []byte(builtin), 1)
	}
	return bytes.ReplaceAll(text, []byte("\n-I "), []byte("\n-A "))
}

// peak is the memory that this process has had at most.
func peak() string {
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return err.Error()
	}
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			return strings.TrimSpace(value)
		}
	}
	return "unknown"
}
