package metrics

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

// fakeKernel counts as the kernel does: in elements, which begin at 0 whenever they are written anew. It also knows the truth.
type fakeKernel struct {
	services  map[snapshot.Name]*dataplane.Service
	frontends map[dataplane.Counted]*fakeElement
	slots     map[dataplane.Place]*fakeElement
	rules     [2][dataplane.NumRefusals]uint64
	// truth counts everything that happened, by Service port, and by Service port and endpoint, since it was there.
	truth   map[dataplane.PortName]*totals
	truthAt map[string]uint64
	listed  int
	byKey   int
	broken  error
	// meanwhile, if not nil, is what happens once during the next reading.
	meanwhile func()
}

type fakeElement struct {
	count    dataplane.FrontendCount
	endpoint dataplane.EndpointCount
	name     dataplane.PortName
}

func newFakeKernel() *fakeKernel {
	return &fakeKernel{services: map[snapshot.Name]*dataplane.Service{}, frontends: map[dataplane.Counted]*fakeElement{},
		slots: map[dataplane.Place]*fakeElement{}, truth: map[dataplane.PortName]*totals{}, truthAt: map[string]uint64{}}
}

// write takes the kernel to what some Services should be.
func (k *fakeKernel) write(services map[snapshot.Name]*dataplane.Service, full bool) {
	if full {
		clear(k.frontends)
		clear(k.slots)
		k.rules = [2][dataplane.NumRefusals]uint64{}
	}
	for n, svc := range services {
		k.services[n] = svc
		if svc == nil {
			delete(k.services, n)
		}
	}
	want, slots := map[dataplane.Counted]*fakeElement{}, map[dataplane.Place]*fakeElement{}
	for _, svc := range k.services {
		for _, sp := range svc.Ports {
			for i := range sp.Frontends {
				fe := &sp.Frontends[i]
				inside, outside := fe.Route(dataplane.Node).Pool, fe.Route(dataplane.Anyone).Pool
				k.element(want, slots, dataplane.Counted{Key: fe.Key}, sp, inside)
				if inside != outside {
					k.element(want, slots, dataplane.Counted{Key: fe.Key, Outside: true}, sp, outside)
				}
			}
		}
	}
	k.frontends, k.slots = want, slots
}

// element makes a frontend's element and its slots, unless they are there already.
func (k *fakeKernel) element(want map[dataplane.Counted]*fakeElement, slots map[dataplane.Place]*fakeElement, at dataplane.Counted,
	sp *dataplane.ServicePort, pool *dataplane.Pool,
) {
	e := &fakeElement{name: sp.Name, count: dataplane.FrontendCount{Counted: at, Endpoints: len(pool.Endpoints)}}
	if len(pool.Endpoints) == 0 {
		e.count.Empty = pool.Empty
	} else {
		e.count.Sticky = sp.Affinity > 0
	}
	if old := k.frontends[at]; old != nil {
		same := old.count
		same.Packets = 0
		if same == e.count && old.name == e.name {
			e = old
		}
	}
	want[at] = e
	for i, ep := range k.assign(at, pool.Endpoints) {
		place := dataplane.Place{Counted: at, Slot: uint32(i)}
		if e.count.Sticky {
			place = dataplane.Place{Counted: dataplane.Counted{Key: dataplane.Key{Addr: ep.Addr(), Port: ep.Port()}}, Pool: poolOf(sp, pool)}
		}
		s := &fakeElement{name: sp.Name, endpoint: dataplane.EndpointCount{Counted: at, Endpoint: ep.AddrPort, Place: place}}
		if old := k.slots[place]; old != nil && old.endpoint.Endpoint == ep.AddrPort && old.name == sp.Name {
			s = old
		}
		slots[place] = s
	}
}

// assign gives each endpoint a slot as package nft does: it keeps the slot it has; those beyond the end move into the holes, then
// the new ones.
func (k *fakeKernel) assign(at dataplane.Counted, pool []dataplane.Endpoint) []dataplane.Endpoint {
	slots, left := make([]dataplane.Endpoint, len(pool)), slices.Clone(pool)
	take := func(slot int, at netip.AddrPort) {
		if i := slices.IndexFunc(left, func(e dataplane.Endpoint) bool { return e.AddrPort == at }); i >= 0 {
			slots[slot] = left[i]
			left = slices.Delete(left, i, i+1)
		}
	}
	held := func(slot int) netip.AddrPort {
		if s := k.slots[dataplane.Place{Counted: at, Slot: uint32(slot)}]; s != nil {
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

// poolOf gives some number that is a port's own pool's.
func poolOf(sp *dataplane.ServicePort, pool *dataplane.Pool) uint32 {
	n := uint32(7)
	for _, c := range sp.Name.String() + sp.Name.Protocol.String() {
		n = n*31 + uint32(c)
	}
	if pool == sp.Local {
		n++
	}
	return n&0xfffff | 0x56000000
}

// connect has clients come, to some frontend.
func (k *fakeKernel) connect(r *rand.Rand, at dataplane.Counted, n int) {
	e := k.frontends[at]
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
		s := k.slots[places[r.IntN(len(places))]]
		s.endpoint.Packets++
		k.truthAt[portText(e.name)+" "+s.endpoint.Endpoint.String()]++
	}
}

func (k *fakeKernel) placesOf(e *fakeElement) (out []dataplane.Place) {
	if !e.count.Sticky {
		for i := range e.count.Endpoints {
			out = append(out, dataplane.Place{Counted: e.count.Counted, Slot: uint32(i)})
		}
		return out
	}
	for _, sp := range k.services[e.name.Service].Ports {
		for i := range sp.Frontends {
			fe := &sp.Frontends[i]
			if fe.Key != e.count.Key {
				continue
			}
			pool := fe.Route(dataplane.Node).Pool
			if e.count.Outside {
				pool = fe.Route(dataplane.Anyone).Pool
			}
			for _, ep := range pool.Endpoints {
				out = append(out, dataplane.Place{Counted: dataplane.Counted{Key: dataplane.Key{Addr: ep.Addr(), Port: ep.Port()}},
					Pool: poolOf(sp, pool)})
			}
		}
	}
	return out
}

func (k *fakeKernel) AllFrontends(do func(dataplane.FrontendCount)) error {
	k.listed++
	var counts []dataplane.FrontendCount
	for _, e := range k.frontends {
		counts = append(counts, e.count)
	}
	k.during()
	for _, c := range counts {
		do(c)
	}
	return k.broken
}

func (k *fakeKernel) Frontends(at []dataplane.Counted, do func(dataplane.FrontendCount)) error {
	k.byKey += len(at)
	for _, a := range at {
		if e := k.frontends[a]; e != nil {
			do(e.count)
		}
	}
	return k.broken
}

func (k *fakeKernel) Endpoints(of []dataplane.FrontendCount, members func(dataplane.Counted) []netip.AddrPort,
	do func(dataplane.EndpointCount),
) error {
	var counts []dataplane.EndpointCount
	for i := range of {
		e := k.frontends[of[i].Counted]
		if e == nil {
			continue
		}
		for _, place := range k.placesOf(e) {
			c := k.slots[place].endpoint
			if c.Counted = of[i].Counted; place.Pool != 0 {
				if !slices.Contains(members(c.Counted), c.Endpoint) {
					continue
				}
				c.Place.Counted = dataplane.Counted{}
			}
			counts = append(counts, c)
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
			out = append(out, dataplane.RefusedCount{IPv6: i == 1, Refusal: r, Packets: k.rules[i][r]})
		}
	}
	return out, k.broken
}

func (k *fakeKernel) Affinity(time.Duration) ([2]int, error) { return [2]int{3, 4}, k.broken }

// randomCluster changes Services of which there are few, so that keys and endpoints move between them.
type randomCluster struct {
	*rand.Rand
	snap    *snapshot.Snapshot
	planner *dataplane.Planner
}

func newRandomCluster(seed uint64) *randomCluster {
	c := &randomCluster{rand.New(rand.NewPCG(seed, 8)), snapshot.New(), dataplane.NewPlanner(dataplane.Config{NodeName: "n1"})}
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
		sl := &snapshot.Slice{Name: snapshot.Name{Namespace: "ns", Name: fmt.Sprint(n.Name, i)}, Service: n.Name, Ports: []snapshot.SlicePort{
			{Name: "a", Protocol: snapshot.TCP, Port: 8080}, {Name: "b", Protocol: snapshot.UDP, Port: 53}}}
		for p := range 4 {
			if c.IntN(2) == 0 {
				sl.Endpoints = append(sl.Endpoints, snapshot.Endpoint{Addr: addr(fmt.Sprintf(pods, p+1)), Ready: true, Serving: true,
					Node: fmt.Sprint("n", 1+c.IntN(2))})
			}
		}
		d.Slices[sl.Name] = sl
	}
	change, _ := c.planner.Apply(c.snap, c.snap.Apply(d))
	return change
}

func (c *randomCluster) service(n snapshot.Name) *snapshot.Service {
	number := 1 + c.IntN(4) // two Services may have the same address
	svc := &snapshot.Service{Name: n, ClusterIPs: []netip.Addr{addr(fmt.Sprintf("10.96.0.%d", number)), addr(fmt.Sprintf("fd00::%d", number))},
		ExternalLocal: c.IntN(2) == 0, InternalLocal: c.IntN(2) == 0,
		Ports: []snapshot.Port{{Name: "a", Protocol: snapshot.TCP, Port: 80, NodePort: uint16(30000 + number)}}}
	if c.IntN(2) == 0 {
		svc.Ports = append(svc.Ports, snapshot.Port{Name: "b", Protocol: snapshot.UDP, Port: 53})
	}
	if c.IntN(3) == 0 {
		svc.Affinity = time.Hour
	}
	return svc
}

// TestLedgerNeverLies walks at random through transactions, restarts of all counts, connections and readings. What the ledger says
// never falls, and is never more than the truth; and if everything is read before each transaction it is the truth.
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
	r := newReader(&Options{Detail: PerEndpoint, MaxSeries: room, Counters: k})
	read := func() { r.read(make(chan struct{})) }
	w := watcher{t: t, k: k, r: r, exact: exact && room > 100}
	write := func(first bool) {
		full := first && seed%5 > 0 || !first && c.IntN(20) == 0
		change := c.step()
		k.write(changed(c.planner.State(), change), full)
		if first && !full { // a former process wrote this, and it has counted since
			k.connectSome(c.Rand, 20)
			clear(k.truth)
			clear(k.truthAt)
		}
		r.follow(c.planner.State(), change, &dataplane.Receipt{Full: full}, first)
		w.gone()
		if first && !full {
			if running := r.begin(); running != nil {
				<-running
			}
		}
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
			if !exact && c.IntN(2) == 0 {
				k.meanwhile = func() { write(false) }
			}
			read()
			w.look(step)
		}
	}
}

// connectSome has clients come to some frontends.
func (k *fakeKernel) connectSome(r *rand.Rand, times int) {
	keys := slices.SortedFunc(maps.Keys(k.frontends), func(a, b dataplane.Counted) int { return strings.Compare(fmt.Sprint(a), fmt.Sprint(b)) })
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

func changed(st *dataplane.State, change dataplane.Change) map[snapshot.Name]*dataplane.Service {
	out := map[snapshot.Name]*dataplane.Service{}
	for _, n := range change.Services {
		out[n] = st.Services[n]
	}
	return out
}

// watcher compares what is shown with what was shown before, and with the truth.
type watcher struct {
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
		for what, want := range map[string]uint64{"connections": truth.connections, "reject": truth.refused[0], "drop": truth.refused[1]} {
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
