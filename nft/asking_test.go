package nft

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// counted is a Service for tests of what is counted: with one cluster IP and so many endpoints.
type counted struct {
	namespace, name string
	endpoints       int
	counters        snapshot.Counters
}

// countedState gives the state of some Services, which get addresses by their place.
func countedState(services ...counted) *dataplane.State {
	snap := snapshot.New()
	for i, c := range services {
		s := webService()
		s.Name, s.Counters = snapshot.Name{Namespace: c.namespace, Name: c.name}, c.counters
		s.ClusterIPs = []netip.Addr{netip.AddrFrom4([4]byte{10, 96 + byte(i>>16), byte(i >> 8), byte(i)})}
		slice := &snapshot.Slice{Name: s.Name, Service: c.name,
			Ports: []snapshot.SlicePort{{Name: "a", Protocol: snapshot.TCP, Port: 8080}}}
		for e := range c.endpoints {
			slice.Endpoints = append(slice.Endpoints, snapshot.Endpoint{
				Addr: netip.AddrFrom4([4]byte{10, 128, byte(e >> 8), byte(e)}), Ready: true, Serving: true})
		}
		snap.Apply(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{s.Name: s},
			Slices: map[snapshot.Name]*snapshot.Slice{s.Name: slice}})
	}
	st, _ := dataplane.Compute(testConfig, snap)
	return st
}

// countingKernel is a model with a kernel that holds what it planned.
type countingKernel struct {
	t      *testing.T
	m      Model
	kernel *fakeKernel
}

// write takes the kernel to a state, and gives how many elements the transaction had, and those that were rewritten
// after it.
func (k *countingKernel) write(st *dataplane.State) (written, rewritten int) {
	k.t.Helper()
	size := func(txn *Txn) int {
		if err := k.kernel.apply(txn); err != nil {
			k.t.Fatal(err)
		}
		added, replaced, removed := txn.Counts()
		return added + replaced + removed
	}
	names := slices.Concat(k.m.Names(), sortedNames(st.Services))
	slices.SortFunc(names, snapshot.Name.Compare)
	written = size(k.m.Plan(st, dataplane.Change{Services: slices.Compact(names)}, 0))
	for len(k.m.Recounts(1)) > 0 {
		rewritten += size(k.m.Recount(64, 1024))
	}
	return written, rewritten
}

// of gives what is counted of a Service: its addresses and its endpoints.
func (k *countingKernel) of(namespace, name string) (frontends, endpoints bool) {
	k.t.Helper()
	var pool uint32
	for _, set := range [...]SetID{Services, UncountedServices} {
		for _, e := range k.kernel[0].sets[set] {
			if serviceOf(e.Comment) == namespace+"/"+name {
				pool, frontends = e.PoolID(), set == Services
			}
		}
	}
	for _, e := range k.kernel[0].sets[Endpoints] {
		endpoints = endpoints || e.ID() == pool
	}
	return frontends, endpoints
}

func (k *countingKernel) check(namespace, name string, frontends, endpoints bool) {
	k.t.Helper()
	if f, e := k.of(namespace, name); f != frontends || e != endpoints {
		k.t.Errorf("%s/%s: addresses are counted: %v, endpoints: %v; want %v and %v",
			namespace, name, f, e, frontends, endpoints)
	}
}

// used gives how many counters the kernel holds.
func (k *countingKernel) used() (n int) {
	for i := range k.kernel {
		for _, set := range [...]SetID{Services, OutsideServices, Endpoints, StickyEndpoints} {
			n += len(k.kernel[i].sets[set])
		}
	}
	return n
}

// plain gives Services that ask for nothing.
func plain(n, endpoints int) (out []counted) {
	for i := range n {
		out = append(out, counted{"shop", fmt.Sprintf("plain-%d", i), endpoints, snapshot.CountersByBudget})
	}
	return out
}

// TestAskForCounters: who asks for counters gets them where others have none, who refuses them has none where others
// have, and who changes that is rewritten, and nobody else.
func TestAskForCounters(t *testing.T) {
	k := &countingKernel{t: t, m: Model{Counters: 640}, kernel: newFakeKernel()}
	with := func(services int, of ...counted) *dataplane.State {
		return countedState(append(of, plain(services, 3)...)...)
	}
	web := func(c snapshot.Counters) counted { return counted{"ops", "web", 9, c} }
	k.write(with(100, web(snapshot.CountersNever)))
	k.check("ops", "web", false, false)
	k.check("shop", "plain-7", true, true)
	if written, rewritten := k.write(with(100, web(snapshot.CountersByBudget))); written > 3*10 || rewritten > 0 {
		t.Errorf("%d elements are written for one Service, and %d later", written, rewritten)
	}
	k.check("ops", "web", true, true)
	k.write(with(700, web(snapshot.CountersByBudget)))
	k.check("ops", "web", false, false)
	if written, rewritten := k.write(with(700, web(snapshot.CountersFirst))); written > 3*10 || rewritten > 0 {
		t.Errorf("%d elements are written for one Service, and %d later", written, rewritten)
	}
	k.check("ops", "web", true, true)
	k.check("shop", "plain-7", false, false)
	big := counted{"ops", "web", 20, snapshot.CountersFirst} // 21 are more than a share
	k.write(with(700, big))
	k.check("ops", "web", false, false)
	k.write(with(700))
	k.write(with(60, web(snapshot.CountersFirst)))
	k.write(with(60, web(snapshot.CountersFirst))) // which sees how much room there is
	k.check("shop", "plain-7", true, true)
	if asked := k.m.requested; len(k.m.requests) != 1 || asked.total != 10 {
		t.Errorf("%d namespaces ask for %d counters", len(k.m.requests), asked.total)
	}
	k.write(with(0))
	if asked := k.m.requested; len(k.m.requests) != 0 || asked.total != 0 || asked.needs != (needs{}) ||
		k.m.needs != (needs{}) {
		t.Errorf("without Services, %d namespaces ask for %+v, and all need %v", len(k.m.requests), asked, k.m.needs)
	}
}

// TestGreedyNamespace: a tenant has 1,000 giants that ask for counters, and more and more small Services that do.
// Others are counted as if he did not ask, an operator's Service in another namespace has what it asks for, and no
// step across a limit rewrites much.
func TestGreedyNamespace(t *testing.T) {
	const budget, share = 6400, 6400 / shares
	base := append([]counted{{"ops", "web", 9, snapshot.CountersFirst}}, plain(3000, 2)...)
	k := &countingKernel{t: t, m: Model{Counters: budget}, kernel: newFakeKernel()}
	check := func(what string) {
		t.Helper()
		k.check("shop", "plain-7", true, false)
		k.check("ops", "web", true, true)
		if used := k.used(); t.Failed() || used > budget {
			t.Fatalf("%s: %d counters are in use", what, used)
		}
	}
	k.write(countedState(base...))
	check("without him")

	giants := slices.Clone(base)
	for i := range 1000 {
		giants = append(giants, counted{"greedy", fmt.Sprintf("giant-%d", i), share, snapshot.CountersFirst})
	}
	k.write(countedState(giants...))
	check("giants")
	k.check("greedy", "giant-7", true, false)
	k.write(countedState(base...))
	check("without giants")

	for _, n := range []int{15, 20, 21, 25, 20, 0, 1000, 999} { // 20 take a share
		small := slices.Clone(base)
		for i := range n {
			small = append(small, counted{"greedy", fmt.Sprintf("small-%d", i), 9, snapshot.CountersFirst})
		}
		_, rewritten := k.write(countedState(small...))
		check(fmt.Sprintf("%d small Services", n))
		if rewritten > 2*share {
			t.Errorf("%d small Services: %d elements are rewritten later", n, rewritten)
		}
		if n > 0 {
			k.check("greedy", "small-0", true, n <= 20)
		}
	}
}

// TestManyNamespacesAsk: where all that ask take more than half of the budget, nobody gets what he asks for, and all
// are counted as if nobody had asked; a process that starts then finds the same.
func TestManyNamespacesAsk(t *testing.T) {
	const budget = 6400
	base := plain(3000, 2)
	k := &countingKernel{t: t, m: Model{Counters: budget}, kernel: newFakeKernel()}
	for _, n := range []int{15, 17, 15} { // each namespace asks for a share
		services := slices.Clone(base)
		for i := range n {
			services = append(services, counted{fmt.Sprintf("team-%d", i), "web", budget/shares - 1, snapshot.CountersFirst})
		}
		st := countedState(services...)
		k.write(st)
		k.check("team-7", "web", true, n <= shares/2)
		if used := k.used(); used > budget {
			t.Errorf("%d namespaces: %d counters are in use", n, used)
		}
		again := Model{Counters: budget}
		again.Load(st)
		found := ipfamily.Per[Found]{{Revision: k.m.Revision(ipfamily.IPv4)}, {Revision: k.m.Revision(ipfamily.IPv6)}}
		again.AdoptCounting(&found)
		for _, f := range ipfamily.All {
			if got, want := again.Revision(f), k.m.Revision(f); got.Counted != want.Counted || got.Asked != want.Asked {
				t.Errorf("%d namespaces: a process that starts holds %v; want %v", n, got, want)
			}
		}
	}
}

// TestAskedMeanwhile: a Service's wish changes while there is no process. The next one does not take the tables for
// what they should be.
func TestAskedMeanwhile(t *testing.T) {
	for _, wishes := range [][2]snapshot.Counters{
		{snapshot.CountersByBudget, snapshot.CountersNever},
		{snapshot.CountersNever, snapshot.CountersByBudget},
		{snapshot.CountersNever, snapshot.CountersFirst},
	} {
		var was, is Model
		was.Load(countedState(append(plain(10, 2), counted{"ops", "web", 3, wishes[0]})...))
		is.Load(countedState(append(plain(10, 2), counted{"ops", "web", 3, wishes[1]})...))
		var found ipfamily.Per[Found]
		for i, f := range ipfamily.All {
			found[i] = Found{Revision: was.Revision(f), Digests: was.Digests(f)}
			found[i].Revision.Number = 7
		}
		if !is.Stale(&found).All() {
			t.Errorf("from %v to %v: nothing is stale", wishes[0], wishes[1])
		}
	}
}

// TestAskedInParts: a large Service's wish changes, and the process ends when a part of it is written. The next one
// does not take the tables for what they should be, whatever the Service asks for by then.
func TestAskedInParts(t *testing.T) {
	state := func(wish snapshot.Counters, ports int) *dataplane.State {
		s := webService()
		s.Counters = wish
		slice := &snapshot.Slice{Name: s.Name, Service: s.Name.Name}
		port := s.Ports[0]
		s.Ports = nil
		for i := range ports {
			port.Name, port.Port = fmt.Sprintf("p%d", i), uint16(80+i)
			s.Ports = append(s.Ports, port)
			slice.Ports = append(slice.Ports, snapshot.SlicePort{Name: port.Name, Protocol: snapshot.TCP, Port: 8080})
		}
		for e := range 20 {
			slice.Endpoints = append(slice.Endpoints, snapshot.Endpoint{
				Addr: netip.AddrFrom4([4]byte{10, 128, 0, byte(e)}), Ready: true, Serving: true})
		}
		snap := snapshot.New()
		snap.Apply(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{s.Name: s},
			Slices: map[snapshot.Name]*snapshot.Slice{s.Name: slice}})
		st, _ := dataplane.Compute(testConfig, snap)
		return st
	}
	mixed := 0
	for _, wishes := range [][2]snapshot.Counters{
		{snapshot.CountersByBudget, snapshot.CountersNever}, {snapshot.CountersNever, snapshot.CountersByBudget},
	} {
		before, now := state(wishes[0], 3), state(wishes[1], 2)
		for limit := 1; ; limit += 4 {
			var m Model
			m.Load(before)
			txn := m.Plan(now, dataplane.Change{Services: sortedNames(now.Services)}, limit)
			if len(txn.Left.Services) == 0 {
				break
			}
			var found ipfamily.Per[Found]
			for i, f := range ipfamily.All {
				found[i] = Found{Revision: m.Revision(f), Digests: m.Digests(f)}
			}
			held := m.services[txn.Left.Services[0]]
			if !slices.ContainsFunc(held.ports, func(p *port) bool { return p.counting != m.quota().of(held) }) {
				continue
			}
			mixed++
			for _, next := range []*dataplane.State{state(wishes[0], len(held.ports)), state(wishes[1], len(held.ports))} {
				var is Model
				is.Load(next)
				if !is.Stale(&found).All() {
					t.Errorf("from %v to %v, %d elements: not everything is stale", wishes[0], wishes[1], limit)
				}
			}
			m.Plan(now, dataplane.Change{Services: txn.Left.Services}, 0)
			var is Model
			if is.Load(now); is.Revision(ipfamily.IPv4).Asked != m.Revision(ipfamily.IPv4).Asked {
				t.Errorf("%d elements: when all is written, the tables are not what a new process wants", limit)
			}
		}
	}
	if mixed == 0 {
		t.Error("no Service was written in part")
	}
}
