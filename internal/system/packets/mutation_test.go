package packets_test

import (
	"flag"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/internal/answers/compare"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/packets"
	"github.com/verdict-proxy/verdict/nft/kernel"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
	"github.com/verdict-proxy/verdict/sync/watch"
)

func TestMain(m *testing.M) { labtest.Main(m) }

func prefix(s string) netip.Prefix { return netip.MustParsePrefix(s) }

// world is what a node makes of a manifest.
func world(t *testing.T, path string) (*dataplane.State, []netip.Addr) {
	t.Helper()
	snap, _, err := watch.Load(t.Context(), path, "node-1")
	labtest.Check(t, err)
	addrs := append(slices.Clone(snap.Node.Addresses), netip.MustParseAddr("127.0.0.1"))
	if len(addrs) == 1 { // without a Node object the host has addresses all the same
		addrs = append(addrs, netip.MustParseAddr("192.0.2.11"), netip.MustParseAddr("2001:db8:11::11"))
	}
	addrs = append(addrs, inServiceRange(snap)...)
	snap.Apply(snapshot.Delta{HostAddrs: &addrs})
	state, _ := dataplane.Compute(dataplane.Config{NodeName: "node-1", LocalhostNodePorts: true,
		DetectLocal: dataplane.DetectLocal{ClusterCIDRs: []netip.Prefix{prefix("10.244.0.0/16"),
			prefix("fd00:10:244::/48")}}}, snap)
	return state, addrs
}

// inServiceRange are addresses of a node that are in a range of Services: a cluster IP of each family, as a cache of
// DNS binds one, and an unallocated address.
func inServiceRange(s *snapshot.Snapshot) []netip.Addr {
	addrs := []netip.Addr{netip.MustParseAddr("10.96.200.1"), netip.MustParseAddr("fd00:10:96::c801")}
	for _, f := range ipfamily.All {
		var lowest netip.Addr
		for _, svc := range s.Services {
			for _, a := range svc.ClusterIPs {
				if f.Has(a) && (!lowest.IsValid() || a.Less(lowest)) {
					lowest = a
				}
			}
		}
		if lowest.IsValid() {
			addrs = append(addrs, lowest)
		}
	}
	return addrs
}

// written has Verdict write a State on a host of its own, and reads what the kernel lists of it.
func written(t *testing.T, state *dataplane.State, addrs []netip.Addr) (rules *packets.Rules) {
	t.Helper()
	h := labtest.NewHost(t, labtest.NewNet(t), "node")
	labtest.Check(t, h.Do(func() error {
		b, err := kernel.Open(kernel.Options{})
		if err != nil {
			return err
		}
		defer b.Close()
		if _, err = b.Apply(state, dataplane.Change{}); err != nil {
			return err
		}
		rules, err = packets.ReadNFTables("verdict", &packets.Host{Addrs: addrs})
		return err
	}))
	return rules
}

// harmless are faults that change nothing although packets come there, each with its reason.
var harmless = []struct{ place, what, why string }{
	{"masquerade-node", "rule 1, expression 1 ", "no rule behind masquerades who came by an interface and is no hairpin"},
	{"from-external", "rule 5, expression 1 is missing", "no other value comes there"},
	{"from-external", "rule 4, expression 1 is missing", "the same, in IPv6"},
	{"from-external", "rule", "a protocol that no such Service has, or which is compared in the key, too"},
	{"affinity-lookup", "rule", "the same"},
	{"sticky-pool", "rule", "the same, or pods have one endpoint each here"},
	{"from-sticky-external", "rule 1, expression 0 leads to from-sticky-both", "affinity is remembered by now"},
	{"kinds", "element 06000000", "of other addresses, nothing is refused"},
	{"kinds", "element 16000000", "the same"},
	{"sources", "element 06000000 leads to from-sticky-both", "no frontend there has affinity, nor a cluster IP"},
	{"addresses", "element 7f000001", "of other addresses, nothing is refused"},
	{"addresses", "element c0", "the same"},
	{"addresses", "element cb", "the same"},
	{"addresses", "element 20010db8", "the same"},
	{"addresses", "element 0a600001 has other data", "a cluster IP without endpoints answers no ping, as all here"},
	{"addresses", "element fd00001000960000000000000000000a has", "the same"},
	{"source-kinds", "element 7f000001", "no pod comes there, so all are masqueraded anyway"},
	{"from-cluster-ip", "rule 2, expression 3 leads to masquerade-node", "hairpins are, there, too"},
	{"no-endpoints", "rule 0, expression 1 ", "no UDP Service of examples/cluster.yaml is without endpoints"},
	{"input", "rule", "no endpoint with affinity is on the node itself"},
	{"hairpin", "element c000020ac000020a", "the node's own packets are masqueraded anyway"},
	{"services", "element 0a601405060000000050", "no endpoints: the rule for unused ports rejects it just so"},
	{"services", "element 7f0000010600000079680000 has other data", "the number of its pool, which split finds itself"},
	{"services", "element c000020a0600000079680000 has other data", "the same"},
	{"services", "element 7f00000106000000758", "the same"},
	{"services", "element c000020a06000000758", "the same"},
	{"services", "element 0a6000020600000000500000 has other data", "the same"},
	{"services", "element cb0071010600000000500000 has other data", "the same"},
	{"services", "element 20010db800cb000000000000000000010600000000500000 has other data", "the same"},
	{"outside-services", "element c000020a0600000075810000 has other data", "the pool has no endpoint either way"},
	{"picks", "element 00000002", "of a pool without endpoints, what is found and leads nowhere is dropped just so"},
	{"split-picks", "element 00000002 leads to other-address", "the same"},
	{"from-cluster-ip", "rule 0 is missing", "IPv4 forwarding clears the priority again"},
	{"cluster-ip", "rule 0, expression 0 leads to silent-load", "affinity.yaml's only IPv6 address is the node's, too"},
	{"prerouting", "rule 1 is missing", "the same"},
	{"output", "rule 1 is missing", "the same"},
	{"endpoints", "element 8e813b0006000000", "the endpoint has slot 0, too, which takes what the others would have"},
	{"postrouting", "rule 0, expression 2 is missing", "packets that are not translated match no rule behind"},
	{"pick-1", "rule 0 is missing", "the rule behind takes the only slot"},
	{"pick-1", "rule 0, expression 3 has one more value", "the same"},
	{"uncounted-pick-1", "rule 0 is missing", "the same"},
	{"uncounted-pick-1", "rule 0, expression 3 has one more value", "the same"},
	{"external-services", "element 7f0000010600000075800000 has other data", "only changes give an endpoint elsewhere"},
	{"external-services", "element 7f0000010600000075810000 has other data", "the same"},
	{"external-services", "element c000020a0600000075810000 has other data", "the same"},
	{"external-services", "element 7f0000010600000079680000 has other data", "the same"},
	{"external-services", "element c000020a0600000075800000 has other data", "the same"},
	{"external-services", "element c000020a0600000079680000 has other data", "the same"},
	{"external-services", "element cb0071010600000000500000 has other data", "the same"},
	{"external-services", "element cb0071140600000000500000 has other data", "the same"},
	{"external-services", "element 20010db800cb000000000000000000010600000000500000 has other data", "the same"},
}

// A fault takes a whole comparison: of those of a manifest beyond the first most, only some are planted.
var (
	most  = flag.Int("most", 1300, "how many faults TestSeesFaults plants without leaving any out")
	every = flag.Int("every", 100000, "which of the others it plants: each so manieth")
)

const render = "../../../cmd/verdict/testdata/render/"

// TestSeesFaults plants single faults in what the kernel lists, each alone: the comparison with the objects has to find
// all of them.
func TestSeesFaults(t *testing.T) {
	planted, found, unreached, equivalent := 0, 0, 0, 0
	for _, path := range []string{render + "affinity.yaml", render + "local-policies.yaml", render + "zones.yaml",
		"../../../examples/cluster.yaml"} {
		t.Run(filepath.Base(path), func(t *testing.T) {
			state, addrs := world(t, path)
			rules := written(t, state, addrs)
			rules.ForbidLeftovers()
			compareAll := func() *compare.Result {
				r, err := compare.Compare(compare.Input{Host: addrs, State: state,
					Pods:  ipfamily.Per[dataplane.Pods]{state.Pods4, state.Pods6},
					Sides: []compare.Side{compare.NewSide(compare.Verdict, rules)}})
				labtest.Check(t, err)
				return r
			}
			same := func() bool { r := compareAll(); return r.Same == r.Classes }
			reached := func(f packets.Fault) bool {
				defer f.Probe()()
				return compareAll().Unknown > 0
			}
			if !same() {
				t.Fatal("there is a difference without a fault")
			}
			before := planted
			for i, f := range rules.Faults() {
				if f.Unused() || planted-before > *most && i%*every != 0 {
					continue
				}
				undo := f.Plant()
				isFound := !same()
				undo()
				planted++
				switch {
				case isFound:
					found++
				case !reached(f):
					unreached++
				case !isHarmless(f):
					t.Errorf("not found: %s: %s", f.Place, f.What)
				default:
					equivalent++
				}
			}
			if !same() {
				t.Fatal("a fault was not taken out again")
			}
		})
	}
	t.Logf("%d faults planted: %d found, %d where no class comes, %d that change nothing", planted, found, unreached,
		equivalent)
	// Most elements of pool-picks lead to chains of pools that have few frontends, so nobody comes there; and a manifest
	// with few Services leaves most chains unused.
	if reached := planted - unreached; found < reached*5/6 || found < planted*3/10 {
		t.Errorf("only %d of %d faults were found, %d of them where packets come", found, planted, reached)
	}
}

// onlySlot are ends of faults that send the packets of a pool with one slot to a chain for another number of slots. The
// second rule of that chain takes the only slot.
var onlySlot = []string{", not pick-1", ", not uncounted-pick-1", ", not sticky-1"}

func isHarmless(f packets.Fault) bool {
	if slices.ContainsFunc(onlySlot, func(end string) bool { return strings.HasSuffix(f.What, end) }) {
		return true
	}
	for _, h := range harmless {
		if strings.HasSuffix(f.Place, " "+h.place) && strings.HasPrefix(f.What, h.what) {
			return true
		}
	}
	return false
}
