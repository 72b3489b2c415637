package compare_test

import (
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/verdict-proxy/verdict/internal/answers/compare"
	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/proxy/config"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/packets"
	"github.com/verdict-proxy/verdict/nft/kernel"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
	"github.com/verdict-proxy/verdict/sync/watch"
)

func TestMain(m *testing.M) { labtest.Main(m) }

// manifest is a file of objects, and what a node makes of it.
type manifest struct {
	name  string
	host  []netip.Addr
	state *dataplane.State
}

func manifests(t testing.TB) (list []manifest) {
	t.Helper()
	list = append(list, load(t, "../../../examples/cluster.yaml",
		"--hostname-override", "node-1", "--cluster-cidr", "10.244.0.0/16,fd00:10:244::/48"))
	files, err := filepath.Glob("../../../cmd/verdict/testdata/render/*.yaml")
	labtest.Check(t, err)
	for _, f := range files {
		text, err := os.ReadFile(f)
		labtest.Check(t, err)
		line, _, _ := strings.Cut(string(text), "\n")
		flags := strings.Fields(strings.TrimPrefix(line, "# flags: "))
		if slices.Contains(flags, "--ipvs-scheduler") {
			continue // IPVS chooses, of which rules say nothing
		}
		list = append(list, load(t, f, flags...))
	}
	if len(list) < 6 {
		t.Fatalf("only %d manifests", len(list))
	}
	return list
}

// load makes a node of a file. The node has the addresses of its Node object, 127.0.0.1, and one of a bridge, among the
// pods', in each family that has a range of pods.
func load(t testing.TB, path string, args ...string) manifest {
	t.Helper()
	var flags config.Flags
	f := pflag.NewFlagSet("render", pflag.ContinueOnError)
	flags.AddPolicy(f)
	labtest.Check(t, f.Parse(args))
	s, _, err := config.Load("", &flags, nil)
	labtest.Check(t, err)
	policy := s.Policy
	policy.NodeName = s.NodeName
	snap, _, err := watch.Load(t.Context(), path, policy.NodeName)
	labtest.Check(t, err)
	addrs := append(slices.Clone(snap.Node.Addresses), netip.MustParseAddr("127.0.0.1"))
	for _, cidr := range policy.DetectLocal.ClusterCIDRs {
		addrs = append(addrs, cidr.Addr().Next())
	}
	snap.Apply(snapshot.Delta{HostAddrs: &addrs})
	m := manifest{name: filepath.Base(path), host: addrs}
	m.state, _ = dataplane.Compute(policy, snap)
	return m
}

// write has Verdict write a State on a host of its own.
func write(t testing.TB, state *dataplane.State) *lab.Host {
	t.Helper()
	h := labtest.NewHost(t, labtest.NewNet(t), "node")
	writeOn(t, h, state)
	return h
}

// writeOn has Verdict write a State on a host.
func writeOn(t testing.TB, h *lab.Host, state *dataplane.State) {
	t.Helper()
	labtest.Check(t, h.Do(func() error {
		b, err := kernel.Open(kernel.Options{})
		if err != nil {
			return err
		}
		t.Cleanup(func() { b.Close() })
		for change := (dataplane.Change{}); ; {
			receipt, err := b.Apply(state, change)
			if err != nil || len(receipt.Left) == 0 {
				return err
			}
			change.Services = receipt.Left
		}
	}))
}

// read reads a table of a host.
func read(t testing.TB, h *lab.Host, table string, addrs []netip.Addr) (r *packets.Rules) {
	t.Helper()
	labtest.Check(t, h.Do(func() (err error) {
		r, err = packets.ReadNFTables(table, &packets.Host{Addrs: addrs})
		return err
	}))
	return r
}

func podsOf(s *dataplane.State) ipfamily.Per[dataplane.Pods] {
	return ipfamily.Per[dataplane.Pods]{s.Pods4, s.Pods6}
}

// report logs what a comparison found.
func report(t testing.TB, r *compare.Result) {
	t.Helper()
	t.Logf("%d destinations, %d classes: %d the same, %d explained, %d unexplained, %d unknown, %d left to IPVS",
		r.Destinations, r.Classes, r.Same, r.Explained, r.Unexplained, r.Unknown, r.Scheduled)
	for _, e := range r.Errors {
		t.Log("error: ", e)
	}
	for _, g := range r.Groups {
		for _, d := range g.Examples[:1] {
			t.Logf("%d x %v %q %s from %s: %s to %s (%s) remembered %q:\n\t%s\n\t%s", g.Count, g.Sides, g.Reason, g.Kind,
				g.Sender, d.Source, d.Destination, d.Service, d.Remembered, d.Outcomes[0], d.Outcomes[1])
		}
	}
}

// TestVerdictKeepsObjects walks all classes of the examples through the tables that Verdict wrote. Some pools refuse a
// share.
func TestVerdictKeepsObjects(t *testing.T) {
	for _, m := range manifests(t) {
		t.Run(m.name, func(t *testing.T) {
			for _, svc := range m.state.Services {
				for i, sp := range svc.Ports {
					for _, p := range [...]*dataplane.Pool{sp.Cluster, sp.Local} {
						if len(p.Endpoints) > 0 {
							p.Refused = uint16(i % 2 * 1500)
						}
					}
				}
			}
			rules := read(t, write(t, m.state), "verdict", m.host)
			r, err := compare.Compare(compare.Input{Host: m.host, Pods: podsOf(m.state), State: m.state,
				Sides: []compare.Side{compare.NewSide(compare.Verdict, rules)}})
			labtest.Check(t, err)
			report(t, r)
			if r.Same != r.Classes || r.Classes == 0 && len(m.state.Services) > 0 {
				t.Errorf("%d of %d classes are the same", r.Same, r.Classes)
			}
		})
	}
}

// slotsHost are the addresses of the node of comparedCart.
var slotsHost = []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("192.0.2.10")}

// comparedCart compares what Verdict writes for a Service with so many endpoints. Those with a weight get it.
func comparedCart(t *testing.T, endpoints int, weights ...uint32) *compare.Result {
	t.Helper()
	name := snapshot.Name{Namespace: "shop", Name: "cart"}
	slice := &snapshot.Slice{Name: name, Service: name.Name,
		Ports: []snapshot.SlicePort{{Protocol: snapshot.TCP, Port: 8080}}}
	for i := range endpoints {
		e := snapshot.Endpoint{Addr: netip.AddrFrom4([4]byte{10, 244, byte(1 + i/250), byte(1 + i%250)}), Node: "node-1",
			Ready: true, Serving: true}
		if i < len(weights) {
			e.Weight = snapshot.Weight{Given: true, Parts: weights[i]}
		}
		slice.Endpoints = append(slice.Endpoints, e)
	}
	snap := snapshot.New()
	snap.Apply(snapshot.Delta{HostAddrs: &slotsHost, Slices: map[snapshot.Name]*snapshot.Slice{name: slice},
		Services: map[snapshot.Name]*snapshot.Service{name: {Name: name, Ports: []snapshot.Port{{Protocol: snapshot.TCP,
			Port: 80}}, ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.7")}}}})
	state, _ := dataplane.Compute(dataplane.Config{NodeName: "node-1"}, snap)
	r, err := compare.Compare(compare.Input{Host: slotsHost, Pods: podsOf(state), State: state,
		Sides: []compare.Side{compare.NewSide(compare.Verdict, read(t, write(t, state), "verdict", slotsHost))}})
	labtest.Check(t, err)
	report(t, r)
	return r
}

// TestSlots gives endpoints weights that do not fit into slots: the shares differ by rounding, and nothing else does.
func TestSlots(t *testing.T) {
	r := comparedCart(t, 3, 1009, 2003, 4001)
	if !r.OK() || r.Explained == 0 || len(r.Groups) == 0 || r.Groups[0].Reason != "slots" {
		t.Errorf("%d are explained, %d are not", r.Explained, r.Unexplained)
	}
}

// TestManyEndpoints: every class is walked of a Service whose chain draws up to eight times, in a time that does not
// grow with the number of ways to draw.
func TestManyEndpoints(t *testing.T) {
	for _, n := range []int{41, 200} {
		if r := comparedCart(t, n); r.Same != r.Classes {
			t.Errorf("%d endpoints: %d of %d classes are the same", n, r.Same, r.Classes)
		}
	}
}

// TestLockedNode: rules that refuse by range what is addressed to the node itself, to one beside it, to a pod or to the
// API server are not the same as the objects, nor as a proxy that leaves such packets alone.
func TestLockedNode(t *testing.T) {
	m := load(t, "../../../cmd/verdict/testdata/render/shared-ranges.yaml", "--hostname-override", "node-1",
		"--cluster-cidr", "10.98.0.0/16,fd00:10:244::/48")
	h := write(t, m.state)
	compared := func() *compare.Result {
		r, err := compare.Compare(compare.Input{Host: m.host, Pods: podsOf(m.state), State: m.state,
			Sides: []compare.Side{compare.NewSide(compare.Verdict, read(t, h, "verdict", m.host))}})
		labtest.Check(t, err)
		report(t, r)
		return r
	}
	if r := compared(); r.Same != r.Classes {
		t.Errorf("%d of %d classes are the same", r.Same, r.Classes)
	}
	// Rules like those of an earlier version, which did not ask whose address it is.
	for _, family := range []string{"ip", "ip6"} {
		table := family + " verdict "
		labtest.Run(t, h, "flush chain "+table+"silent-cluster-ip\nadd rule "+table+"silent-cluster-ip counter reject\n"+
			"flush chain "+table+"unallocated\nadd rule "+table+"unallocated counter drop\n", "nft", "-f", "-")
	}
	r := compared()
	differ := map[compare.Kind]bool{}
	for _, g := range r.Groups {
		differ[g.Kind] = differ[g.Kind] || g.Reason == ""
	}
	for _, k := range []compare.Kind{compare.OwnAddress, compare.NeighbourAddress, compare.PodAddress,
		compare.APIServerAddress} {
		if !differ[k] || r.OK() {
			t.Errorf("no class of kind %q differs", k)
		}
	}
}
