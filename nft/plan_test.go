package nft

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
	"github.com/verdict-proxy/verdict/sync/snapshot/snapshottest"
)

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

func prefix(s string) netip.Prefix { return netip.MustParsePrefix(s) }

var testConfig = dataplane.Config{
	NodeName:           "node-1",
	LocalhostNodePorts: true,
	PingServices:       true,
	RejectUnusedPorts:  true,
	DetectLocal: dataplane.DetectLocal{ClusterCIDRs: []netip.Prefix{prefix("10.244.0.0/16"),
		prefix("fd00:244::/32")}},
	IPVS: dataplane.IPVS{Mode: dataplane.IPVSAuto},
}

// seeds is how many walks a fuzz test begins with: with 12, every limit meets every budget of counters; that is enough
// for the inner loop.
func seeds() uint64 {
	if testing.Short() {
		return 12
	}
	return 60
}

// newCluster makes a random cluster of few Services that keeps changing.
func newCluster(r *rand.Rand) snapshottest.Cluster {
	return snapshottest.Cluster{Rand: r,
		Options: snapshottest.Options{Services: 4, Endpoints: 5, NodePorts: 3, Asking: true, Weights: true,
			Backends: true}}
}

// Small tables for hashes make random walks short.
func init() { maxServiceSlots = 512 }

// FuzzPlanEqualsFull walks through random changes and says that the transactions, one after the other, leave the kernel
// with what one transaction for the last state alone would leave; that each is one the kernel takes; and that none,
// however small it has to be, and what goes ahead in it, leaves anything that leads nowhere. Few counters make for
// elements that change places.
func FuzzPlanEqualsFull(f *testing.F) {
	for seed := range seeds() {
		f.Add(seed, uint8(30), uint8(seed%3*7), uint8(seed%6*20))
	}
	f.Fuzz(func(t *testing.T, seed uint64, steps, limit, counters uint8) {
		w := newCluster(rand.New(rand.NewPCG(seed, 1)))
		snap, planner := snapshot.New(), dataplane.NewPlanner(testConfig)
		budget := int(counters)
		if counters > 60 { // so that there is a share for who asks
			budget *= 4
		}
		model := Model{Counters: budget}
		kernel := newFakeKernel()
		delta := w.Host()
		for step := range int(steps) {
			change, _ := planner.Apply(snap, snap.Apply(delta))
			refuseSome(w, planner.State(), change.Services)
			for n, left := 0, true; left; n++ {
				txn := planSome(w, &model, planner.State(), change, int(limit))
				if err := kernel.apply(txn); err != nil {
					t.Fatalf("step %d, part %d: %v", step, n, err)
				}
				for i := range kernel {
					if bad := kernel[i].incomplete(); bad != "" {
						t.Fatalf("step %d, part %d: %s", step, n, bad)
					}
				}
				if change = txn.Left; n > 200 {
					t.Fatalf("step %d: no end after %d parts", step, n)
				}
				left = !change.Empty()
			}
			if w.Yes() {
				if err := kernel.apply(model.Recount(2, 100)); err != nil {
					t.Fatalf("step %d: recount: %v", step, err)
				}
			}
			var fresh Model
			want := newFakeKernel()
			if err := want.apply(fresh.Plan(planner.State(), dataplane.Change{}, 0)); err != nil {
				t.Fatalf("step %d: full: %v", step, err)
			}
			if d := kernel.diff(want); d != nil && counters == 0 {
				t.Fatalf("step %d:\n%s", step, strings.Join(d, "\n"))
			}
			if counters > 0 { // what is counted because a Service asks for it is the same, too
				fresh = Model{Counters: budget}
				fresh.Load(planner.State())
				fresh.AdoptCounting(&ipfamily.Per[Found]{{Revision: model.Revision(ipfamily.IPv4)},
					{Revision: model.Revision(ipfamily.IPv6)}})
			}
			for i := range model.tables {
				if len(model.recount) > 0 {
					break
				}
				if model.tables[i].digests != fresh.tables[i].digests || model.tables[i].asked != fresh.tables[i].asked {
					t.Fatalf("step %d: the digests of %s differ", step, ipfamily.All[i])
				}
			}
			delta = w.Step()
		}
	})
}

// refuseSome has pools of some Services refuse a share, or what is over a limit.
func refuseSome(w snapshottest.Cluster, s *dataplane.State, names []snapshot.Name) {
	for _, name := range names {
		if s.Services[name] == nil {
			continue
		}
		for _, sp := range s.Services[name].Ports {
			if w.IntN(3) == 0 {
				sp.Limits.Rate = snapshot.RateLimit{Rate: uint32(w.IntN(3)), Burst: uint32(1 + w.IntN(3))}
				sp.Limits.Client = snapshot.RateLimit{Rate: 5 * uint32(w.IntN(3)), Burst: 50}
				sp.Limits.Drop, sp.Full = w.Yes(), w.Yes()
				sp.FullClients = someClients(w, sp.Family())
			}
			for _, pl := range [...]*dataplane.Pool{sp.Cluster, sp.Local} {
				if len(pl.Endpoints) > 0 && w.IntN(3) == 0 {
					pl.Refused = uint16(1 + w.IntN(dataplane.RefusedOf-1))
				}
			}
		}
	}
}

// someClients returns some of a few clients, sorted.
func someClients(w snapshottest.Cluster, f ipfamily.Family) (list []netip.Addr) {
	for i := range w.IntN(8) {
		if w.Yes() {
			list = append(list, addr([...]string{"192.0.2.", "2001:db8::"}[f]+strconv.Itoa(i)))
		}
	}
	return list
}

// planSome plans a part of a change, now and then only what goes ahead of the rest, and now and then once more.
func planSome(w snapshottest.Cluster, m *Model, s *dataplane.State, change dataplane.Change, limit int) *Txn {
	if change.Globals || w.IntN(3) == 0 {
		return m.Plan(s, change, limit)
	}
	txn := m.PlanAhead(s, change.Services, w.IntN(40))
	switch {
	case txn == nil:
		return m.Plan(s, change, limit)
	case w.IntN(4) == 0: // the kernel did not take it
		m.Rollback(txn)
		return m.Plan(s, change, limit)
	}
	return txn
}

// TestPlanAhead: a small change does not wait for a large one, unless it is to get an address that the large one still
// has.
func TestPlanAhead(t *testing.T) {
	snap := snapshot.New()
	service := func(name, clusterIP string, first, externalIPs int) *snapshot.Service {
		s := webService()
		s.Name.Name, s.ClusterIPs = name, []netip.Addr{addr(clusterIP)}
		for i := range externalIPs {
			s.ExternalIPs = append(s.ExternalIPs, netip.AddrFrom4([4]byte{198, 51, byte((first + i) >> 8), byte(first + i)}))
		}
		return s
	}
	put := func(of ...*snapshot.Service) *dataplane.State {
		d := snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{}}
		for _, s := range of {
			d.Services[s.Name] = s
		}
		snap.Apply(d)
		st, _ := dataplane.Compute(testConfig, snap)
		return st
	}
	names := func(of ...string) (out []snapshot.Name) {
		for _, n := range of {
			out = append(out, snapshot.Name{Namespace: "default", Name: n})
		}
		return out
	}
	var m Model
	kernel := newFakeKernel()
	plan := func(what string, txn *Txn, left ...string) {
		t.Helper()
		if txn == nil {
			t.Fatalf("%s: nothing goes ahead", what)
		}
		if err := kernel.apply(txn); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		if !slices.Equal(txn.Left.Services, names(left...)) {
			t.Errorf("%s: left is %v; want %v", what, txn.Left.Services, left)
		}
	}
	plan("all", m.Plan(put(service("large", "10.96.0.1", 0, 1000), service("small", "10.96.0.2", 0, 0),
		service("taker", "10.96.0.3", 0, 0)),
		dataplane.Change{}, 0))
	st := put(service("large", "10.96.0.1", 1000, 1000), service("small", "10.96.0.2", 3000, 2),
		service("taker", "10.96.0.3", 5, 1))
	plan("ahead", m.PlanAhead(st, names("large", "small", "taker"), 100), "large", "taker")
	if txn := m.PlanAhead(st, names("large", "taker"), 100); txn != nil {
		t.Errorf("%v has gone ahead", txn)
	}
	if txn := m.PlanAhead(st, names("taker"), 100); txn != nil {
		t.Errorf("there is nothing to go ahead of: %v", txn)
	}
	plan("the rest", m.Plan(st, dataplane.Change{Services: names("large", "taker")}, 0))
	want := newFakeKernel()
	if err := want.apply(new(Model).Plan(st, dataplane.Change{}, 0)); err != nil {
		t.Fatal(err)
	}
	if d := kernel.diff(want); d != nil {
		t.Error(strings.Join(d, "\n"))
	}
}

// stateOf gives the state of one Service with endpoints on the given last bytes of 10.244.1.0.
func stateOf(s *snapshot.Service, endpoints ...int) *dataplane.State {
	snap := snapshot.New()
	slice := &snapshot.Slice{Name: s.Name, Service: s.Name.Name,
		Ports: []snapshot.SlicePort{{Name: "a", Protocol: snapshot.TCP, Port: 8080}}}
	for _, n := range endpoints {
		slice.Endpoints = append(slice.Endpoints,
			snapshot.Endpoint{Addr: addr(fmt.Sprintf("10.244.1.%d", n)), Ready: true, Serving: true})
	}
	snap.Apply(snapshot.Delta{
		Services: map[snapshot.Name]*snapshot.Service{s.Name: s},
		Slices:   map[snapshot.Name]*snapshot.Slice{slice.Name: slice},
	})
	st, _ := dataplane.Compute(testConfig, snap)
	return st
}

func webService() *snapshot.Service {
	return &snapshot.Service{
		Name:       snapshot.Name{Namespace: "default", Name: "web"},
		ClusterIPs: []netip.Addr{addr("10.96.0.1")},
		Ports:      []snapshot.Port{{Name: "a", Protocol: snapshot.TCP, Port: 80}},
	}
}

// TestOneEndpointIsOneSlot counts what one changed endpoint costs, whatever the size of the pool.
func TestOneEndpointIsOneSlot(t *testing.T) {
	many := numbers
	without := func(n, gone int) []int { return slices.DeleteFunc(many(n), func(i int) bool { return i == gone }) }
	for _, c := range []struct {
		name                     string
		before, after            []int
		added, replaced, removed int
	}{
		{"one more", many(10), many(11), 1, 1, 0},
		{"one more, in the same chain", many(100), many(101), 1, 0, 0},
		{"one less, in the same chain", many(100), without(100, 1), 0, 1, 1},
		{"the first gone", many(10), without(10, 1), 0, 2, 1},
		{"the last gone", many(10), without(10, 10), 0, 1, 1},
		{"one for another", many(100), append(without(100, 7), 200), 0, 1, 0},
		{"nothing", many(100), many(100), 0, 0, 0},
		{"the first comes", nil, many(1), 1, 1, 0},
		{"the last goes", many(1), nil, 0, 1, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			var m Model
			m.Plan(stateOf(webService(), c.before...), dataplane.Change{}, 0)
			txn := m.Plan(stateOf(webService(), c.after...), dataplane.Change{Services: []snapshot.Name{webService().Name}}, 0)
			added, replaced, removed := txn.Counts()
			if added != c.added || replaced != c.replaced || removed != c.removed {
				t.Errorf("added %d, replaced %d, removed %d; want %d, %d, %d", added, replaced, removed, c.added, c.replaced,
					c.removed)
			}
		})
	}
}

// affinityElement gives what a client's packet leaves behind in the affinity map.
func affinityElement(id uint32, ep string) *Element {
	e := AffinityElement(id, addr("198.51.100.1"))
	e.setTarget(netip.MustParseAddrPort(ep))
	return &e
}

// TestForgetOnlyTheGone says whose affinity entries go when a sticky Service loses an endpoint, and when it stops being
// sticky.
func TestForgetOnlyTheGone(t *testing.T) {
	sticky := webService()
	sticky.Affinity = time.Hour
	change := dataplane.Change{Services: []snapshot.Name{sticky.Name}}
	var m Model
	m.Plan(stateOf(sticky, 1, 2, 3), dataplane.Change{}, 0)
	var id uint32
	for id = range m.pools {
		break
	}
	check := func(txn *Txn, sweep bool, remembered ...string) {
		t.Helper()
		if txn.Tables[0].Sweep != sweep || txn.Tables[1].Sweep {
			t.Errorf("sweep %v and %v; want %v and false", txn.Tables[0].Sweep, txn.Tables[1].Sweep, sweep)
		}
		for _, ep := range []string{"10.244.1.1:8080", "10.244.1.2:8080", "10.244.1.3:8080", "10.244.1.3:8081"} {
			if got, want := m.Remembers(ipfamily.IPv4, affinityElement(id, ep)), slices.Contains(remembered, ep); got != want {
				t.Errorf("%s is remembered: %v; want %v", ep, got, want)
			}
		}
		if m.Remembers(ipfamily.IPv4, affinityElement(id+1, "10.244.1.1:8080")) {
			t.Error("an endpoint is remembered for a pool that is not there")
		}
	}
	check(m.Plan(stateOf(sticky, 1, 2, 3, 4), change, 0), false, "10.244.1.1:8080", "10.244.1.2:8080", "10.244.1.3:8080")
	check(m.Plan(stateOf(sticky, 1, 3), change, 0), true, "10.244.1.1:8080", "10.244.1.3:8080")
	check(m.Plan(stateOf(webService(), 1, 3), change, 0), true)
	if len(m.pools) != 1 { // that of the cluster IP
		t.Fatalf("pool ids %v are still taken", m.pools)
	}
}

// TestPoolsPart adds the first endpoint on another node to a sticky Service with externalTrafficPolicy Local: nobody is
// forgotten.
func TestPoolsPart(t *testing.T) {
	s := webService()
	s.Affinity, s.ExternalLocal, s.LoadBalancerIPs = time.Hour, true, []netip.Addr{addr("203.0.113.1")}
	state := func(nodes ...string) *dataplane.State {
		snap := snapshot.New()
		slice := &snapshot.Slice{Name: s.Name, Service: s.Name.Name,
			Ports: []snapshot.SlicePort{{Name: "a", Protocol: snapshot.TCP, Port: 8080}}}
		for i, node := range nodes {
			slice.Endpoints = append(slice.Endpoints,
				snapshot.Endpoint{Addr: addr(fmt.Sprintf("10.244.1.%d", i+1)), Node: node, Ready: true, Serving: true})
		}
		snap.Apply(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{s.Name: s},
			Slices: map[snapshot.Name]*snapshot.Slice{slice.Name: slice}})
		st, _ := dataplane.Compute(testConfig, snap)
		return st
	}
	var m Model
	change := dataplane.Change{Services: []snapshot.Name{s.Name}}
	m.Plan(state("node-1", "node-1"), dataplane.Change{}, 0)
	for _, nodes := range [][]string{{"node-1", "node-1", "node-2"}, {"node-1", "node-1"}} {
		m.Plan(state(nodes...), change, 0)
		for id := range m.pools {
			if !m.Remembers(ipfamily.IPv4, affinityElement(id, "10.244.1.2:8080")) {
				t.Errorf("%v: pool %x forgets an endpoint that stays", nodes, id)
			}
		}
	}
}

// TestManyPortsGetAnEndpoint: each of many ports has four frontends, which have the class of its pool themselves. With
// one endpoint more, all of them are replaced, and a limit still bounds each transaction.
func TestManyPortsGetAnEndpoint(t *testing.T) {
	const limit, ports = 100, 300
	svc := webService()
	svc.Ports, svc.ExternalIPs = nil, []netip.Addr{addr("203.0.113.1"), addr("203.0.113.2"), addr("203.0.113.3")}
	slice := &snapshot.Slice{Name: svc.Name, Service: svc.Name.Name}
	for p := range ports {
		name := fmt.Sprint("p", p)
		svc.Ports = append(svc.Ports, snapshot.Port{Name: name, Protocol: snapshot.TCP, Port: uint16(1000 + p)})
		slice.Ports = append(slice.Ports, snapshot.SlicePort{Name: name, Protocol: snapshot.TCP, Port: 8080})
	}
	state := func(endpoints int) *dataplane.State {
		snap, s := snapshot.New(), *slice
		for n := range endpoints {
			s.Endpoints = append(s.Endpoints,
				snapshot.Endpoint{Addr: addr(fmt.Sprintf("10.244.1.%d", n+1)), Ready: true, Serving: true})
		}
		snap.Apply(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{svc.Name: svc},
			Slices: map[snapshot.Name]*snapshot.Slice{s.Name: &s}})
		st, _ := dataplane.Compute(testConfig, snap)
		return st
	}
	var m Model
	m.Plan(state(2), dataplane.Change{}, 0)
	replacedAll := 0
	for left := (dataplane.Change{Services: []snapshot.Name{svc.Name}}); !left.Empty(); {
		txn := m.Plan(state(3), left, limit)
		added, replaced, removed := txn.Counts()
		if n := added + 2*replaced + removed; n > 2*limit {
			t.Errorf("%d elements in one transaction", n)
		}
		replacedAll, left = replacedAll+replaced, txn.Left
	}
	if replacedAll != 4*ports {
		t.Errorf("%d frontends are replaced, want %d", replacedAll, 4*ports)
	}
}

// TestGiantService takes a Service with many addresses to the kernel, changes it and takes it away: one endpoint is one
// element, and a limit bounds each transaction.
func TestGiantService(t *testing.T) {
	giant := webService()
	for i := range 400 {
		giant.ExternalIPs = append(giant.ExternalIPs, netip.AddrFrom4([4]byte{198, 51, byte(i >> 8), byte(i)}))
	}
	for p := range 9 {
		giant.Ports = append(giant.Ports, snapshot.Port{Name: "a", Protocol: []Protocol{snapshot.UDP, snapshot.SCTP}[p%2],
			Port: uint16(1000 + p)})
	}
	const limit = 100
	var m Model
	kernel := newFakeKernel()
	change := dataplane.Change{Services: []snapshot.Name{giant.Name}}
	write := func(st *dataplane.State) (parts, elements int) {
		for left := change; parts == 0 || !left.Empty(); parts++ {
			txn := m.Plan(st, left, limit)
			if err := kernel.apply(txn); err != nil {
				t.Fatal(err)
			}
			if bad := kernel[0].incomplete(); bad != "" {
				t.Fatal(bad)
			}
			added, replaced, removed := txn.Counts()
			if n := added + 2*replaced + removed; n > 2*limit {
				t.Errorf("%d elements in one transaction", n)
			}
			elements += added + replaced + removed
			left = txn.Left
		}
		return parts, elements
	}
	if parts, _ := write(stateOf(giant, 1, 2, 3)); parts < 10 {
		t.Errorf("it was written in %d parts", parts)
	}
	if parts, n := write(stateOf(giant, 1, 2, 4)); parts != 1 || n != 1 {
		t.Errorf("one endpoint for another: %d elements in %d parts", n, parts)
	}
	if _, n := write(stateOf(giant, 1, 2)); n != 2 {
		t.Errorf("one endpoint less: %d elements", n)
	}
	if _, n := write(stateOf(webService())); n < 800 || len(kernel[0].sets[Services]) != 1 {
		t.Errorf("%d elements, %d frontends left", n, len(kernel[0].sets[Services]))
	}
}

// TestSlotsCount: what weights and hashes make of a few endpoints counts where a transaction is bounded. A table of a
// hash is written as a whole, so there may be one more.
func TestSlotsCount(t *testing.T) {
	const ports, limit, table = 8, 100, 61
	for _, hash := range []bool{true, false} {
		s, slice := webService(), &snapshot.Slice{Name: snapshot.Name{Namespace: "default", Name: "web"}, Service: "web"}
		s.Ports = nil
		for p := range ports {
			name := fmt.Sprint("p", p)
			s.Ports = append(s.Ports, snapshot.Port{Name: name, Protocol: snapshot.TCP, Port: uint16(1000 + p)})
			slice.Ports = append(slice.Ports, snapshot.SlicePort{Name: name, Protocol: snapshot.TCP, Port: 8080})
		}
		if hash {
			s.Scheduling = &snapshot.Scheduling{Scheduler: snapshot.Hash}
		}
		for i := range 3 {
			e := snapshot.Endpoint{Addr: addr(fmt.Sprintf("10.244.1.%d", 1+i)), Ready: true, Serving: true}
			if !hash && i > 0 {
				e.Weight = snapshot.Weight{Given: true, Parts: snapshot.PartsOf(uint16(997 * i))}
			}
			slice.Endpoints = append(slice.Endpoints, e)
		}
		snap := snapshot.New()
		snap.Apply(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{s.Name: s},
			Slices: map[snapshot.Name]*snapshot.Slice{slice.Name: slice}})
		st, _ := dataplane.Compute(testConfig, snap)
		var m Model
		kernel, all := newFakeKernel(), 0
		check := func(what string, n int) {
			if n > limit+2*table+6 { // the last port's
				t.Errorf("hash %v, %s: %d elements in one transaction", hash, what, n)
			}
		}
		write := func(what string, st *dataplane.State) {
			for change := (dataplane.Change{Services: []snapshot.Name{s.Name}}); ; {
				txn := m.Plan(st, change, limit)
				if err := kernel.apply(txn); err != nil {
					t.Fatal(err)
				}
				added, replaced, removed := txn.Counts()
				check(what, added+replaced+removed)
				all += added
				if change = txn.Left; change.Empty() {
					return
				}
			}
		}
		write("new", st)
		if all < ports*table {
			t.Errorf("hash %v: %d elements in all, so the test says nothing", hash, all)
		}
		sticky := *s
		sticky.Affinity = time.Hour
		snap.Apply(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{s.Name: &sticky}})
		remembered, _ := dataplane.Compute(testConfig, snap)
		write("with affinity", remembered)
		write("without affinity", st)
		for _, level := range []Counting{CountFrontends, CountEndpoints} {
			m.counting, m.recount = level, m.Names()
			for len(m.Recounts(1)) > 0 {
				txn := m.Recount(1, limit)
				if err := kernel.apply(txn); err != nil {
					t.Fatal(err)
				}
				added, replaced, removed := txn.Counts()
				check(fmt.Sprint("counted: ", level), added+replaced+removed)
				all += added
			}
		}
		plain, one := *s, *slice
		plain.Scheduling = nil
		one.Endpoints = slices.Clone(slice.Endpoints[:1])
		snap.Apply(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{s.Name: &plain},
			Slices: map[snapshot.Name]*snapshot.Slice{slice.Name: &one}})
		few, _ := dataplane.Compute(testConfig, snap)
		write("one endpoint", few)
		write("several again", st)
		write("gone", &dataplane.State{})
	}
}

// TestSmallTransactionsEnd: whatever a port is and becomes, transactions take it there, each with something to do,
// however few elements one may have.
func TestSmallTransactionsEnd(t *testing.T) {
	type shape struct {
		affinity   time.Duration
		scheduling *snapshot.Scheduling
		counters   snapshot.Counters
		endpoints  int
	}
	var shapes []shape
	for _, affinity := range []time.Duration{0, time.Hour} {
		for _, scheduling := range []*snapshot.Scheduling{nil, {Scheduler: snapshot.Hash}} {
			for _, counters := range []snapshot.Counters{snapshot.CountersByBudget, snapshot.CountersNever} {
				for _, endpoints := range []int{0, 1, 4} {
					shapes = append(shapes, shape{affinity, scheduling, counters, endpoints})
				}
			}
		}
	}
	state := func(sh shape) *dataplane.State {
		s := webService()
		s.Affinity, s.Scheduling, s.Counters = sh.affinity, sh.scheduling, sh.counters
		s.ExternalIPs = []netip.Addr{addr("203.0.113.1")}
		return stateOf(s, []int{1, 2, 3, 4}[:sh.endpoints]...)
	}
	name := webService().Name
	for _, from := range shapes {
		for _, to := range shapes {
			for _, limit := range []int{1, 5, 30} {
				var m Model
				kernel := newFakeKernel()
				for _, st := range []*dataplane.State{state(from), state(to)} {
					for change, n := (dataplane.Change{Services: []snapshot.Name{name}}), 0; !change.Empty(); n++ {
						txn := m.Plan(st, change, limit)
						if err := kernel.apply(txn); err != nil {
							t.Fatal(err)
						}
						if change = txn.Left; txn.Empty() && !change.Empty() || n > 100 {
							t.Fatalf("from %+v to %+v, %d elements each: transaction %d does nothing", from, to, limit, n)
						}
					}
				}
			}
		}
	}
}

// TestFrontendMovesBetweenPorts: two ports of a Service exchange their numbers. However few elements a transaction may
// have, a frontend of one port goes before it comes back as one of the other.
func TestFrontendMovesBetweenPorts(t *testing.T) {
	service := func(numbers ...uint16) *dataplane.State {
		s := webService()
		s.Ports = nil
		for i, n := range numbers {
			s.Ports = append(s.Ports, snapshot.Port{Name: string(rune('a' + i)), Protocol: snapshot.TCP, Port: n})
		}
		s.ExternalIPs = []netip.Addr{addr("203.0.113.1"), addr("203.0.113.2")}
		return stateOf(s, 1, 2)
	}
	for limit := range 30 {
		var m Model
		kernel := newFakeKernel()
		for _, st := range []*dataplane.State{service(80, 81), service(81, 80), service(80, 81)} {
			for change := (dataplane.Change{Services: []snapshot.Name{webService().Name}}); !change.Empty(); {
				txn := m.Plan(st, change, limit)
				if err := kernel.apply(txn); err != nil {
					t.Fatalf("%d elements each: %v", limit, err)
				}
				change = txn.Left
			}
		}
		if n := len(kernel[0].sets[Services]); n != 6 {
			t.Errorf("%d elements each: %d frontends; want 6", limit, n)
		}
	}
}

// TestLongNames says that a name longer than the kernel's limit for comments is cut, not refused.
func TestLongNames(t *testing.T) {
	s := webService()
	s.Name = snapshot.Name{Namespace: strings.Repeat("n", 63), Name: strings.Repeat("s", 63)}
	l := List(stateOf(s))
	for _, e := range l[0].Elements[Services] {
		if len(e.Comment) != maxComment-1 || !strings.HasPrefix(s.Name.String()+":a", e.Comment) {
			t.Errorf("comment %q of %d bytes", e.Comment, len(e.Comment))
		}
	}
}

// TestStructureIsConstant says that the number of lines that are no elements does not follow the number of Services.
func TestStructureIsConstant(t *testing.T) {
	structure := func(services int) int {
		st, _ := dataplane.Compute(testConfig, manyServices(services))
		n := 0
		for _, l := range List(st) {
			n += len(l.Table.Sets) + len(l.Table.Chains)
		}
		return n
	}
	if a, b := structure(3), structure(3000); a != b {
		t.Errorf("%d sets, maps and chains for 3 Services, %d for 3000", a, b)
	}
}

// manyServices gives Services with one endpoint each.
func manyServices(n int) *snapshot.Snapshot {
	snap := snapshot.New()
	for i := range n {
		s := webService()
		s.Name.Name = fmt.Sprintf("web-%d", i)
		s.ClusterIPs = []netip.Addr{netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)})}
		slice := &snapshot.Slice{Name: s.Name, Service: s.Name.Name,
			Ports:     []snapshot.SlicePort{{Name: "a", Protocol: snapshot.TCP, Port: 8080}},
			Endpoints: []snapshot.Endpoint{{Addr: addr("10.244.1.1"), Ready: true, Serving: true}}}
		snap.Apply(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{s.Name: s},
			Slices: map[snapshot.Name]*snapshot.Slice{s.Name: slice}})
	}
	return snap
}

// TestRecount lets the number of counted elements outgrow the budget: what comes later is not counted, and what was
// there is rewritten a little at a time.
func TestRecount(t *testing.T) {
	m := Model{Counters: 50}
	kernel := newFakeKernel()
	write := func(n int) {
		t.Helper()
		st, _ := dataplane.Compute(testConfig, manyServices(n))
		names := slices.Concat(m.Names(), sortedNames(st.Services))
		if err := kernel.apply(m.Plan(st, dataplane.Change{Services: names}, 0)); err != nil {
			t.Fatal(err)
		}
		for len(m.Recounts(10)) > 0 {
			if err := kernel.apply(m.Recount(10, 15)); err != nil {
				t.Fatal(err)
			}
		}
	}
	check := func(n int, level Counting, sets ...SetID) {
		t.Helper()
		write(n)
		for _, set := range sets {
			if got := len(kernel[0].sets[set]); got != n {
				t.Errorf("%d Services: %s holds %d elements", n, set, got)
			}
		}
		if m.Counting() != level ||
			RevisionOf(slices.Collect(maps.Values(kernel[0].sets[RevisionSet]))).Counted != level.String() {
			t.Errorf("%d Services: %s are counted; want %s", n, m.Counting(), level)
		}
	}
	check(20, CountEndpoints, Services, Endpoints)
	check(26, CountMostEndpoints, Services, UncountedEndpoints)
	check(20, CountMostEndpoints, Services, UncountedEndpoints)
	check(60, CountNothing, UncountedServices, UncountedEndpoints)
	check(12, CountNothing, UncountedServices, UncountedEndpoints)
	check(12, CountEndpoints, Services, Endpoints)
}
