package metrics

import (
	"cmp"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile/reconciletest"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

// fakeKernel counts as the kernel does: in elements, which begin at 0 whenever they are written anew. It also knows the
// truth.
type fakeKernel struct {
	services  map[snapshot.Name]*dataplane.Service
	frontends map[dataplane.Counted]*fakeElement
	// slots are those of each pool, which frontends share.
	slots map[fakePlace]*fakeElement
	rules ipfamily.Per[[dataplane.NumRefusals]uint64]
	// counting says what there are counters for: 0 is everything, 1 frontends, 2 nothing.
	counting int
	// truth counts everything that happened, by Service port, and by Service port and endpoint, since it was there.
	truth   map[dataplane.PortName]*totals
	truthAt map[string]uint64
	listed  int
	byKey   int
	limited []dataplane.LimitCount
	broken  error
	// meanwhile, if not nil, is what happens once during the next reading.
	meanwhile func()
}

// fakePlace is a place; where clients are remembered, of an endpoint.
type fakePlace struct {
	dataplane.Place
	endpoint netip.AddrPort
}

type fakeElement struct {
	count    dataplane.FrontendCount
	endpoint dataplane.EndpointCount
	name     dataplane.PortName
	// uncounted is an endpoint without a counter.
	uncounted bool
}

func newFakeKernel() *fakeKernel {
	return &fakeKernel{services: map[snapshot.Name]*dataplane.Service{}, frontends: map[dataplane.Counted]*fakeElement{},
		slots: map[fakePlace]*fakeElement{}, truth: map[dataplane.PortName]*totals{}, truthAt: map[string]uint64{}}
}

// write takes the kernel to what some Services should be.
func (k *fakeKernel) write(services map[snapshot.Name]*dataplane.Service, full bool) {
	if full {
		clear(k.frontends)
		clear(k.slots)
		k.rules = ipfamily.Per[[dataplane.NumRefusals]uint64]{}
	}
	for n, svc := range services {
		k.services[n] = svc
		if svc == nil {
			delete(k.services, n)
		}
	}
	want, slots := map[dataplane.Counted]*fakeElement{}, map[fakePlace]*fakeElement{}
	for _, svc := range k.services {
		for _, sp := range svc.Ports {
			pools := map[uint32]*dataplane.Pool{}
			for i := range sp.Frontends {
				fe := &sp.Frontends[i]
				inside, outside := fe.Route(dataplane.Node).Pool, fe.Route(dataplane.Anyone).Pool
				pools[poolOf(sp, inside)], pools[poolOf(sp, outside)] = inside, outside
				k.element(want, dataplane.Counted{Key: fe.Key}, sp, inside)
				if inside != outside {
					k.element(want, dataplane.Counted{Key: fe.Key, Outside: true}, sp, outside)
				}
			}
			for id, pool := range pools {
				k.pool(slots, id, sp, pool)
			}
		}
	}
	k.frontends, k.slots = want, slots
}

// element makes a frontend's element, unless it is there already. It is written anew if it leads to another pool, if
// that gets its first endpoint or loses its last, and if it is counted from now on, or is not any more.
func (k *fakeKernel) element(want map[dataplane.Counted]*fakeElement, at dataplane.Counted, sp *dataplane.ServicePort,
	pool *dataplane.Pool,
) {
	e := &fakeElement{name: sp.Name, count: dataplane.FrontendCount{Counted: at, Endpoints: len(pool.Endpoints),
		Pool: poolOf(sp, pool), Uncounted: k.counting == 2}}
	if len(pool.Endpoints) == 0 {
		e.count.Empty = pool.Empty
	} else {
		e.count.Sticky = sp.Affinity > 0
	}
	if old := k.frontends[at]; old != nil && old.name == e.name {
		was, is := old.count, e.count
		if was.Pool == is.Pool && was.Uncounted == is.Uncounted && was.Empty == is.Empty &&
			(was.Endpoints == 0) == (is.Endpoints == 0) {
			e.count.Packets = was.Packets
		}
	}
	want[at] = e
}

// pool makes the slots of a pool, unless they are there already.
func (k *fakeKernel) pool(
	slots map[fakePlace]*fakeElement,
	id uint32,
	sp *dataplane.ServicePort,
	pool *dataplane.Pool,
) {
	for i, ep := range k.assign(id, pool.Endpoints) {
		place := placeOf(id, sp.Affinity > 0, i, ep.AddrPort)
		s := &fakeElement{name: sp.Name, endpoint: dataplane.EndpointCount{Endpoint: ep.AddrPort, Place: place.Place},
			uncounted: k.counting > 0}
		if old := k.slots[place]; old != nil && old.endpoint.Endpoint == ep.AddrPort && old.name == sp.Name &&
			old.uncounted == s.uncounted {
			s = old
		}
		slots[place] = s
	}
}

func placeOf(pool uint32, sticky bool, slot int, ep netip.AddrPort) fakePlace {
	if sticky {
		return fakePlace{dataplane.Place{Pool: pool, Sticky: true}, ep}
	}
	return fakePlace{Place: dataplane.Place{Pool: pool, Slot: uint32(slot)}}
}

// assign gives each endpoint a slot as package nft does: it keeps the slot it has; those beyond the end move into the
// holes, then the new ones.
func (k *fakeKernel) assign(id uint32, pool []dataplane.Endpoint) []dataplane.Endpoint {
	slots, left := make([]dataplane.Endpoint, len(pool)), slices.Clone(pool)
	take := func(slot int, at netip.AddrPort) {
		if i := slices.IndexFunc(left, func(e dataplane.Endpoint) bool { return e.AddrPort == at }); i >= 0 {
			slots[slot] = left[i]
			left = slices.Delete(left, i, i+1)
		}
	}
	held := func(slot int) netip.AddrPort {
		if s := k.slots[placeOf(id, false, slot, netip.AddrPort{})]; s != nil {
			return s.endpoint.Endpoint
		}
		return netip.AddrPort{}
	}
	for slot := range pool {
		take(slot, held(slot))
	}
	hole := func() int { return slices.IndexFunc(slots, func(e dataplane.Endpoint) bool { return !e.IsValid() }) }
	for slot := len(pool); held(slot).IsValid(); slot++ {
		if h := hole(); h >= 0 {
			take(h, held(slot))
		}
	}
	for len(left) > 0 {
		take(hole(), left[0].AddrPort)
	}
	return slots
}

// poolOf gives some number that is a port's own pool's, in its family.
func poolOf(sp *dataplane.ServicePort, pool *dataplane.Pool) uint32 {
	n := uint32(7 + ipfamily.Of(sp.Frontends[0].Key.Addr))
	for _, c := range sp.Name.String() + sp.Name.Protocol.String() {
		n = n*31 + uint32(c)
	}
	n *= 2
	if pool == sp.Local && pool != sp.Cluster {
		n++
	}
	return n
}

// connect has clients come, to some frontend. What nobody counts is as if it had not happened.
func (k *fakeKernel) connect(r *rand.Rand, at dataplane.Counted, n int) {
	e := k.frontends[at]
	if e.count.Uncounted {
		return
	}
	e.count.Packets += uint64(n)
	t := k.truth[e.name]
	if t == nil {
		t = &totals{}
		k.truth[e.name] = t
	}
	if e.count.Endpoints == 0 {
		t.refused[e.count.Empty] += uint64(n)
		return
	}
	t.connections += uint64(n)
	places := k.placesOf(e)
	for range n {
		if s := k.slots[places[r.IntN(len(places))]]; !s.uncounted {
			s.endpoint.Packets++
			k.truthAt[portText(e.name)+" "+s.endpoint.Endpoint.String()]++
		}
	}
}

// placesOf gives the places of the pool that a frontend leads to.
func (k *fakeKernel) placesOf(e *fakeElement) (out []fakePlace) {
	for place := range k.slots {
		if place.Pool == e.count.Pool {
			out = append(out, place)
		}
	}
	slices.SortFunc(out, func(a, b fakePlace) int {
		return cmp.Or(cmp.Compare(a.Slot, b.Slot), a.endpoint.Compare(b.endpoint))
	})
	return out
}

// pools gives what there is to read of pools.
func (k *fakeKernel) pools() map[uint32]dataplane.FrontendCount {
	out := map[uint32]dataplane.FrontendCount{}
	for _, e := range k.frontends {
		out[e.count.Pool] = e.count
	}
	return out
}

// read gives the reading of a frontend whose pool was read at another time.
func (e *fakeElement) read(pools map[uint32]dataplane.FrontendCount, do func(dataplane.FrontendCount)) {
	if c, ok := pools[e.count.Pool]; ok {
		c.Counted, c.Uncounted, c.Packets = e.count.Counted, e.count.Uncounted, e.count.Packets
		do(c)
	}
}

func (k *fakeKernel) AllFrontends(do func(dataplane.FrontendCount)) error {
	k.listed++
	pools := k.pools()
	k.during()
	for _, e := range k.frontends {
		e.read(pools, do)
	}
	return k.broken
}

func (k *fakeKernel) Frontends(at []dataplane.Counted, do func(dataplane.FrontendCount)) error {
	k.byKey += len(at)
	var found []fakeElement
	for _, a := range at {
		if e := k.frontends[a]; e != nil {
			found = append(found, *e)
		}
	}
	k.during()
	pools := k.pools()
	for i := range found {
		found[i].read(pools, do)
	}
	return k.broken
}

// Endpoints reads each pool once, as the kernel's counters do.
func (k *fakeKernel) Endpoints(of []dataplane.FrontendCount, members func(dataplane.Counted) []netip.AddrPort,
	do func(dataplane.EndpointCount),
) error {
	var counts []dataplane.EndpointCount
	asked := map[uint32]bool{}
	for i := range of {
		fe := &of[i]
		if asked[fe.Pool] {
			continue
		}
		asked[fe.Pool] = true
		var places []fakePlace
		for slot := range fe.Endpoints {
			places = append(places, placeOf(fe.Pool, false, slot, netip.AddrPort{}))
		}
		if fe.Sticky {
			places = nil
			for _, ep := range members(fe.Counted) {
				places = append(places, placeOf(fe.Pool, true, 0, ep))
			}
		}
		for _, place := range places {
			if s := k.slots[place]; s != nil && !s.uncounted {
				c := s.endpoint
				c.Counted = fe.Counted
				counts = append(counts, c)
			}
		}
	}
	k.during()
	for _, c := range counts {
		do(c)
	}
	return k.broken
}

func (k *fakeKernel) Refused() (out []dataplane.RefusedCount, err error) {
	for i := range k.rules {
		for r := dataplane.RefusedSourceRanges; r < dataplane.NumRefusals; r++ {
			out = append(out, dataplane.RefusedCount{Family: ipfamily.All[i], Refusal: r, Packets: k.rules[i][r]})
		}
	}
	return out, k.broken
}

func (k *fakeKernel) Limited() ([]dataplane.LimitCount, error) { return k.limited, k.broken }

func (k *fakeKernel) Remembered(set string, _ time.Duration) (ipfamily.Per[int], error) {
	if set == "kept-flows" {
		return ipfamily.Per[int]{-1, 5}, k.broken // there is none in one family
	}
	return ipfamily.Per[int]{3, 4}, k.broken
}

// randomCluster changes Services of which there are few, so that keys and endpoints move between them.
type randomCluster struct {
	*rand.Rand
	snap    *snapshot.Snapshot
	planner *dataplane.Planner
}

func newRandomCluster(seed uint64) *randomCluster {
	c := &randomCluster{rand.New(rand.NewPCG(seed, 8)), snapshot.New(),
		dataplane.NewPlanner(dataplane.Config{NodeName: "n1"})}
	addrs := []netip.Addr{addr("192.0.2.1"), addr("2001:db8::1")}
	c.snap.Apply(snapshot.Delta{HostAddrs: &addrs, Node: &snapshot.Node{Name: "n1", Addresses: addrs}})
	return c
}

func (c *randomCluster) step() dataplane.Change {
	n := snapshot.Name{Namespace: "ns", Name: string(rune('a' + c.IntN(5)))}
	d := snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{}, Slices: map[snapshot.Name]*snapshot.Slice{}}
	if c.IntN(3) == 0 || c.snap.Services[n] == nil {
		d.Services[n] = nil
		if c.IntN(4) > 0 {
			d.Services[n] = c.service(n)
		}
	}
	for i, pods := range []string{"10.1.0.%d", "fd00:1::%d"} {
		sl := &snapshot.Slice{
			Name:    snapshot.Name{Namespace: "ns", Name: fmt.Sprint(n.Name, i)},
			Service: n.Name,
			Ports: []snapshot.SlicePort{
				{Name: "a", Protocol: snapshot.TCP, Port: 8080}, {Name: "b", Protocol: snapshot.UDP, Port: 53}},
		}
		for p := range 4 {
			if c.IntN(2) == 0 {
				sl.Endpoints = append(
					sl.Endpoints,
					snapshot.Endpoint{Addr: addr(fmt.Sprintf(pods, p+1)), Ready: true, Serving: true,
						Node: fmt.Sprint("n", 1+c.IntN(2))},
				)
			}
		}
		d.Slices[sl.Name] = sl
	}
	change, _ := c.planner.Apply(c.snap, c.snap.Apply(d))
	return change
}

func (c *randomCluster) service(n snapshot.Name) *snapshot.Service {
	number := 1 + c.IntN(4) // two Services may have the same address
	svc := &snapshot.Service{
		Name:          n,
		ClusterIPs:    []netip.Addr{addr(fmt.Sprintf("10.96.0.%d", number)), addr(fmt.Sprintf("fd00::%d", number))},
		ExternalLocal: c.IntN(2) == 0,
		InternalLocal: c.IntN(2) == 0,
		Ports:         []snapshot.Port{{Name: "a", Protocol: snapshot.TCP, Port: 80, NodePort: uint16(30000 + number)}},
	}
	if c.IntN(2) == 0 {
		svc.Ports = append(svc.Ports, snapshot.Port{Name: "b", Protocol: snapshot.UDP, Port: 53})
	}
	if c.IntN(3) == 0 {
		svc.Affinity = time.Hour
	}
	return svc
}

// TestLedgerNeverLies walks at random through transactions, restarts of all counts, connections and readings. What the
// ledger says never falls, and is never more than the truth; and if everything is read before each transaction it is
// the truth.
func TestLedgerNeverLies(t *testing.T) {
	for seed := range uint64(100) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { walk(t, seed) })
	}
}

func walk(t *testing.T, seed uint64) {
	c, k := newRandomCluster(seed), newFakeKernel()
	exact, room := seed%2 == 0, 1000
	if seed%3 == 0 {
		room = 3
	}
	m, fake := New(Options{Detail: PerEndpoint, MaxSeries: room, Counters: k}), &fakeBackend{kernel: k}
	r, backend := m.reader, behind(m, fake)
	if seed%7 == 0 {
		r.portions.list = 0
	}
	read := func() { r.read(make(chan struct{})) }
	w := watcher{t: t, k: k, r: r, loop: backend, exact: exact && room > 100}
	write := func(first bool) {
		full := first && seed%5 > 0 || !first && c.IntN(20) == 0
		if !exact {
			k.counting = max(0, c.IntN(20)-17)
			if seed%4 == 1 {
				fake.leave = func(snapshot.Name) bool { return c.IntN(3) == 0 }
			}
		}
		fake.receipt = dataplane.Receipt{Full: full}
		change := c.step()
		if first && !full { // a former process wrote this, and it has counted since
			k.write(changed(c.planner.State(), change), false)
			k.connectSome(c.Rand, 20)
			clear(k.truth)
			clear(k.truthAt)
		}
		opening := !backend.Filled() && seed%5 == 0
		if _, err := backend.Apply(c.planner.State(), change); err != nil {
			t.Fatal(err)
		}
		if opening {
			if running := r.startRead(); running != nil {
				<-running
			}
		}
		w.gone()
	}
	write(true)
	for step := range 300 {
		switch c.IntN(4) {
		case 0:
			if exact {
				read()
			}
			write(false)
		case 1, 2:
			k.connectSome(c.Rand, 1)
		default:
			if !exact && backend.Filled() && c.IntN(2) == 0 {
				k.meanwhile = func() {
					k.connectSome(c.Rand, 3)
					write(false)
					k.connectSome(c.Rand, 3)
				}
			}
			read()
			w.look(step)
		}
	}
}

// connectSome has clients come to some frontends.
func (k *fakeKernel) connectSome(r *rand.Rand, times int) {
	keys := slices.SortedFunc(maps.Keys(k.frontends),
		func(a, b dataplane.Counted) int { return strings.Compare(fmt.Sprint(a), fmt.Sprint(b)) })
	for range times {
		if len(keys) > 0 {
			k.connect(r, keys[r.IntN(len(keys))], 1+r.IntN(5))
		}
	}
}

// during is what happens after the kernel was read and before the reading is entered.
func (k *fakeKernel) during() {
	if do := k.meanwhile; do != nil {
		k.meanwhile = nil
		do()
	}
}

// without gives what is left of a Service when others have some of its frontends.
func without(svc *dataplane.Service, others map[snapshot.Name]*dataplane.Service) *dataplane.Service {
	if svc == nil {
		return nil
	}
	taken := map[dataplane.Key]bool{}
	for n, o := range others {
		if o == nil || n == svc.Name {
			continue
		}
		for _, sp := range o.Ports {
			for i := range sp.Frontends {
				taken[sp.Frontends[i].Key] = true
			}
		}
	}
	out := *svc
	out.Ports = nil
	for _, sp := range svc.Ports {
		p := *sp
		p.Frontends = slices.DeleteFunc(slices.Clone(sp.Frontends), func(f dataplane.Frontend) bool { return taken[f.Key] })
		if len(p.Frontends) > 0 {
			out.Ports = append(out.Ports, &p)
		}
	}
	return &out
}

func changed(st *dataplane.State, change dataplane.Change) map[snapshot.Name]*dataplane.Service {
	out := map[snapshot.Name]*dataplane.Service{}
	for _, n := range change.Services {
		out[n] = st.Services[n]
	}
	return out
}

// watcher compares what is shown with what was shown before, and with the truth.
type watcher struct {
	loop   *reconciletest.Loop
	t      *testing.T
	k      *fakeKernel
	r      *reader
	exact  bool
	before map[string]uint64
}

// gone forgets what is not there any more: a Service that comes back, or an endpoint, begins anew.
func (w *watcher) gone() {
	there := map[string]bool{}
	for _, e := range w.k.frontends {
		for _, what := range []string{"connections", "reject", "drop"} {
			there[portText(e.name)+" "+what] = true
		}
	}
	for _, s := range w.k.slots {
		there[portText(s.name)+" "+s.endpoint.Endpoint.String()] = true
	}
	for _, svc := range w.loop.Held() { // some of it may be gone already, while the rest is still to be written
		for _, sp := range svc.Ports {
			for _, what := range []string{"connections", "reject", "drop"} {
				there[portText(sp.Name)+" "+what] = true
			}
			for _, ep := range slices.Concat(sp.Cluster.Endpoints, sp.Local.Endpoints) {
				there[portText(sp.Name)+" "+ep.String()] = true
			}
		}
	}
	maps.DeleteFunc(w.k.truth, func(n dataplane.PortName, _ *totals) bool { return !there[portText(n)+" connections"] })
	maps.DeleteFunc(w.k.truthAt, func(n string, _ uint64) bool { return !there[n] })
	maps.DeleteFunc(w.before, func(n string, _ uint64) bool { return !there[n] && n != others })
}

func portText(n dataplane.PortName) string { return n.String() + "/" + n.Protocol.String() }

func (w *watcher) shown() map[string]uint64 {
	p := w.r.picture()
	out := map[string]uint64{others: p.others.connections + p.others.refused[0] + p.others.refused[1]}
	for _, s := range p.ports {
		name := portText(s.name)
		out[name+" connections"] = s.now.connections
		out[name+" reject"], out[name+" drop"] = s.now.refused[0], s.now.refused[1]
		for _, ep := range s.endpoints {
			out[name+" "+ep.at.String()] = ep.connections
		}
	}
	return out
}

func (w *watcher) look(step int) {
	now := w.shown()
	for name, was := range w.before {
		if now[name] < was {
			w.t.Fatalf("step %d: %s fell from %d to %d", step, name, was, now[name])
		}
	}
	w.before = now
	for n, truth := range w.k.truth {
		name := portText(n)
		for what, want := range map[string]uint64{"connections": truth.connections, "reject": truth.refused[0],
			"drop": truth.refused[1]} {
			if got := now[name+" "+what]; got > want || w.exact && got != want {
				w.t.Fatalf("step %d: %s %s is shown as %d; in truth it is %d", step, name, what, got, want)
			}
		}
	}
	for name, want := range w.k.truthAt {
		if got := now[name]; got > want || w.exact && got != want {
			w.t.Fatalf("step %d: %s is shown as %d; in truth it is %d", step, name, got, want)
		}
	}
}

// TestLedgerKnowsLimits: what frontends counted and a limit refused is no connection, whichever reading knows of it
// first. That a rate refuses is told once.
func TestLedgerKnowsLimits(t *testing.T) {
	at := dataplane.Key{Addr: addr("10.96.0.1"), Protocol: snapshot.TCP, Port: 80}
	pool := &dataplane.Pool{Endpoints: []dataplane.Endpoint{{AddrPort: netip.MustParseAddrPort("10.1.0.1:80")}}}
	sp := &dataplane.ServicePort{Name: dataplane.PortName{Service: snapshot.Name{Name: "a"}}, Cluster: pool,
		Local: &dataplane.Pool{}, Frontends: []dataplane.Frontend{{Key: at, Routes: []dataplane.Route{{Pool: pool}}}}}
	g, told := newLedger(PerService, 10), 0
	g.overRate = func(dataplane.PortName) { told++ }
	svc := &dataplane.Service{Name: sp.Name.Service, Ports: []*dataplane.ServicePort{sp}}
	g.replace([]*dataplane.Service{nil}, []*dataplane.Service{svc}, true, 1)
	for i, step := range []struct {
		over, all uint64
		drop      bool
		want      totals
	}{
		{30, 100, false, totals{70, [2]uint64{30, 0}}},
		{50, 100, false, totals{70, [2]uint64{30, 0}}},
		{50, 130, false, totals{80, [2]uint64{50, 0}}},
		{51, 140, true, totals{89, [2]uint64{50, 1}}},
		{2, 5, true, totals{92, [2]uint64{50, 3}}}, // which began anew
	} {
		sp.Limits.Drop, sp.Limits.Rate.Rate = step.drop, uint32(i/2) // there is no rate at first
		g.recordLimited([]dataplane.LimitCount{{Family: ipfamily.IPv4, Pool: 7, Packets: step.over}}, uint64(i+2))
		g.recordFrontends([]dataplane.FrontendCount{{Counted: dataplane.Counted{Key: at}, Pool: 7, Endpoints: 1,
			Packets: step.all}}, uint64(i+2))
		if got := g.ports[sp.Name].totals; got != step.want {
			t.Errorf("step %d: %+v, want %+v", i, got, step.want)
		}
		if told != min(i/2, 1) {
			t.Errorf("step %d: told %d times", i, told)
		}
	}
	g.recordLimited(nil, 9)
	if len(g.limited) > 0 {
		t.Errorf("pools without limits stay: %v", g.limited)
	}
}
