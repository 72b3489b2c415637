package metrics

import (
	"errors"
	"maps"
	"net/netip"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// fakeIPVS counts as IPVS does.
type fakeIPVS struct {
	services  map[dataplane.Key]dataplane.SchedulerStatistics
	endpoints map[dataplane.Key]map[netip.AddrPort]IPVSEndpoint
	// asked counts readings of endpoints.
	asked  int
	broken error
}

func (f *fakeIPVS) Services(do func(dataplane.Key, dataplane.SchedulerStatistics)) error {
	for k, c := range f.services {
		do(k, c)
	}
	return f.broken
}

func (f *fakeIPVS) Endpoints(of dataplane.Key, do func(netip.AddrPort, IPVSEndpoint)) error {
	f.asked++
	for at, e := range f.endpoints[of] {
		do(at, e)
	}
	return nil
}

// connect has a frontend count a connection with as many packets to an endpoint.
func (f *fakeIPVS) connect(k dataplane.Key, at netip.AddrPort, packets uint64) {
	c, e := f.services[k], f.endpoints[k][at]
	more := dataplane.SchedulerStatistics{Connections: 1, PacketsIn: packets, PacketsOut: packets, BytesIn: 100 * packets,
		BytesOut: 1000 * packets}
	c.Add(&more)
	e.Add(&more)
	e.Active = 1
	f.services[k] = c
	if f.endpoints[k] == nil {
		f.endpoints[k] = map[netip.AddrPort]IPVSEndpoint{}
	}
	f.endpoints[k][at] = e
}

// TestIPVS: what IPVS counts is added up by Service port over all its frontends, never falls when a frontend or an
// endpoint goes or begins anew, and leaves out what was counted before the first reading.
func TestIPVS(t *testing.T) {
	f := &fakeIPVS{
		services:  map[dataplane.Key]dataplane.SchedulerStatistics{},
		endpoints: map[dataplane.Key]map[netip.AddrPort]IPVSEndpoint{},
	}
	w := newWorld(Options{Detail: PerEndpoint, MaxSeries: 100, IPVS: f})
	n := snapshot.Name{Namespace: "ns", Name: "a"}
	port := dataplane.PortName{Service: n, Port: "p", Protocol: snapshot.TCP}
	ends := []netip.AddrPort{netip.MustParseAddrPort("10.1.0.1:80"), netip.MustParseAddrPort("10.1.0.2:80")}
	pool := &dataplane.Pool{Endpoints: []dataplane.Endpoint{{AddrPort: ends[0]}, {AddrPort: ends[1]}}}
	sp := &dataplane.ServicePort{Name: port, Cluster: pool, Local: &dataplane.Pool{}}
	var keys []dataplane.Key
	for _, a := range []string{"10.96.0.1", "192.0.2.1"} {
		keys = append(keys, dataplane.Key{Addr: addr(a), Protocol: snapshot.TCP, Port: 80})
		sp.Frontends = append(sp.Frontends,
			dataplane.Frontend{Key: keys[len(keys)-1], Routes: []dataplane.Route{{Pool: pool}}})
	}
	w.apply(t, true)
	w.reader.locked(func() {
		w.reader.ledger.replace([]*dataplane.Service{nil},
			[]*dataplane.Service{{Name: n, Ports: []*dataplane.ServicePort{sp}}}, false, 1)
		w.reader.ledger.ports[port].shown = true
	})
	read := func() (s ipvsSample) {
		t.Helper()
		if err := w.reader.readIPVS(time.Now().Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
		w.reader.locked(func() {
			for _, one := range w.reader.scheduled.samples(w.reader.ledger) {
				s = one
			}
		})
		return s
	}
	expect := func(what string, connections, packets uint64, at ...uint64) {
		t.Helper()
		s := read()
		if s.name != port || s.Connections != connections || s.PacketsIn != packets || s.BytesOut != 1000*packets {
			t.Errorf("%s: %+v", what, s)
		}
		for i, want := range at {
			if got := s.endpoints[ends[i]].Connections; got != want {
				t.Errorf("%s: endpoint %d has %d connections, want %d", what, i, got, want)
			}
		}
	}

	f.connect(keys[0], ends[0], 7)
	if s := read(); s.Connections != 0 || len(s.endpoints) != 0 {
		t.Errorf("counted before: %+v", s)
	}
	f.connect(keys[0], ends[0], 1)
	f.connect(keys[0], ends[1], 2)
	f.connect(keys[1], ends[1], 3)
	expect("both frontends", 3, 6, 1, 2)
	if s := read(); s.endpoints[ends[1]].Active != 2 {
		t.Errorf("open: %+v", s.endpoints)
	}
	delete(f.services, keys[1])
	expect("one is gone", 3, 6, 1, 2)
	f.services[keys[1]], f.endpoints[keys[1]] = dataplane.SchedulerStatistics{}, nil
	f.connect(keys[1], ends[0], 5)
	expect("and begins anew", 4, 11, 2, 2)
	delete(f.endpoints[keys[0]], ends[1])
	f.connect(keys[0], ends[1], 1)
	expect("an endpoint comes back", 5, 12, 2, 3)

	for _, ep := range []netip.AddrPort{ends[0], ends[1]} {
		for k := range maps.Keys(f.endpoints) {
			e := f.endpoints[k][ep]
			e.Active = 0
			f.endpoints[k][ep] = e
		}
	}
	read()
	f.asked = 0
	read()
	if f.asked != 0 {
		t.Errorf("nothing was counted, and endpoints are read %d times", f.asked)
	}
	f.broken = errors.New("no")
	if err := w.reader.readIPVS(time.Now()); err == nil {
		t.Error("no error")
	}
	w.reader.locked(func() {
		w.reader.ledger.replace([]*dataplane.Service{{Name: n, Ports: []*dataplane.ServicePort{sp}}},
			[]*dataplane.Service{nil}, false, 2)
	})
	f.broken = nil
	if s := read(); s.Connections != 0 || len(w.reader.scheduled.ports) != 0 {
		t.Errorf("the Service is gone: %+v", s)
	}
}
