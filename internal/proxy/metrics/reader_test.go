package metrics

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// slowKernel takes its time.
type slowKernel struct {
	*fakeKernel
	takes time.Duration
}

func (k *slowKernel) AllFrontends(do func(dataplane.FrontendCount)) error {
	time.Sleep(k.takes)
	return k.fakeKernel.AllFrontends(do)
}

func (k *slowKernel) Frontends(at []dataplane.Counted, do func(dataplane.FrontendCount)) error {
	time.Sleep(k.takes)
	return k.fakeKernel.Frontends(at, do)
}

func (k *slowKernel) Endpoints(of []dataplane.FrontendCount, members func(dataplane.Counted) []netip.AddrPort,
	do func(dataplane.EndpointCount),
) error {
	time.Sleep(k.takes)
	return k.fakeKernel.Endpoints(of, members, do)
}

// plain is a state of many Services with a few endpoints each.
func plain(services, endpoints int) (*dataplane.State, dataplane.Change) {
	snap := snapshot.New()
	d := snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{}, Slices: map[snapshot.Name]*snapshot.Slice{}}
	for i := range services {
		n := snapshot.Name{Namespace: "default", Name: fmt.Sprintf("service-%d", i)}
		d.Services[n] = &snapshot.Service{
			Name:       n,
			ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 96 + byte(i>>16), byte(i >> 8), byte(i)})},
			Ports:      []snapshot.Port{{Name: "http", Protocol: snapshot.TCP, Port: 80}},
		}
		sl := &snapshot.Slice{
			Name:    n,
			Service: n.Name,
			Ports:   []snapshot.SlicePort{{Name: "http", Protocol: snapshot.TCP, Port: 8080}},
		}
		for e := range endpoints {
			at := i*endpoints + e
			sl.Endpoints = append(sl.Endpoints, snapshot.Endpoint{Ready: true, Serving: true,
				Addr: netip.AddrFrom4([4]byte{10, 128 + byte(at>>16), byte(at >> 8), byte(at)})})
		}
		d.Slices[n] = sl
	}
	planner := dataplane.NewPlanner(dataplane.Config{})
	change, _ := planner.Apply(snap, snap.Apply(d))
	return planner.State(), change
}

// allNew is a commit of a state's Services.
func allNew(st *dataplane.State, r dataplane.Receipt) *reconcile.Commit {
	after := slices.Collect(maps.Values(st.Services))
	return &reconcile.Commit{Before: make([]*dataplane.Service, len(after)), After: after, Receipt: r}
}

// prepared gives a reader of a kernel that holds a state, in which each frontend has counted one connection.
func prepared(k *slowKernel, o Options, services, endpoints int) *reader {
	o.Counters, o.MaxSeries = k, 1<<20
	r := newReader(&o)
	st, change := plain(services, endpoints)
	k.write(changed(st, change), true)
	r.committed(allNew(st, dataplane.Receipt{Full: true}), true)
	for _, e := range k.frontends {
		e.count.Packets++
		k.slots[k.placesOf(e)[0]].endpoint.Packets++
	}
	return r
}

func (p *picture) connections() (atPorts, atEndpoints uint64) {
	for _, s := range p.ports {
		atPorts += s.now.connections
		for _, ep := range s.endpoints {
			atEndpoints += ep.connections
		}
	}
	return atPorts, atEndpoints
}

// TestReadingIsShared: scrapes that come together, or one right after another, show one reading.
func TestReadingIsShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := &slowKernel{newFakeKernel(), 100 * time.Millisecond}
		r := prepared(k, Options{}, 10, 2)
		for range 5 {
			go r.waitFresh()
		}
		r.waitFresh()
		time.Sleep(maxReadingAge - time.Millisecond)
		r.waitFresh()
		if k.listed != 1 {
			t.Errorf("listed %d times; want once", k.listed)
		}
		time.Sleep(time.Millisecond)
		r.waitFresh()
		if k.listed != 2 {
			t.Errorf("listed %d times; want twice", k.listed)
		}
		r.stop()
		time.Sleep(maxReadingAge)
		r.waitFresh()
		if k.listed != 2 {
			t.Error("listed after the end")
		}
	})
}

// TestScrapeIsNotHeldUp: one that takes too long is not waited for, and shown by the next scrape.
func TestScrapeIsNotHeldUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := &slowKernel{newFakeKernel(), 10 * time.Second}
		r := prepared(k, Options{}, 10, 2)
		begin := time.Now()
		r.waitFresh()
		if took := time.Since(begin); took != scrapePatience {
			t.Errorf("waited for %v", took)
		}
		if p := r.picture(); len(p.ports) != 0 {
			t.Error("shown before it was read")
		}
		// Transactions do not wait either.
		st, _ := plain(10, 2)
		before := time.Now()
		r.committed(allNew(st, dataplane.Receipt{}), false)
		if took := time.Since(before); took != 0 {
			t.Errorf("a transaction waited for %v", took)
		}
		time.Sleep(time.Minute)
		p := r.picture()
		if n, _ := p.connections(); n != 10 {
			t.Errorf("%d connections; want 10", n)
		}
	})
}

// TestReadingBudget: what there was no time for has its turn next, frontends and endpoints alike.
func TestReadingBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const services = 300
		k := &slowKernel{newFakeKernel(), readBudget / 4}
		r := prepared(k, Options{Detail: PerEndpoint}, services, 1)
		r.portions = readLimits{list: services - 1, frontends: 32, endpoints: 8}
		seen := uint64(0)
		for round := 1; ; round++ {
			before := time.Now()
			r.read(make(chan struct{}))
			if took := time.Since(before); took > 2*readBudget {
				t.Fatalf("a reading took %v", took)
			}
			p := r.picture()
			ports, _ := p.connections()
			if ports == services {
				break
			}
			if ports <= seen || round > 10 {
				t.Fatalf("after %d readings %d connections are known, as many as before", round, ports)
			}
			seen = ports
		}
		if k.listed != 0 {
			t.Error("that many frontends were listed")
		}
		for range services / 8 {
			r.read(make(chan struct{}))
		}
		p := r.picture()
		if ports, endpoints := p.connections(); ports != services || endpoints != services {
			t.Errorf("%d connections to ports, %d to endpoints; want %d", ports, endpoints, services)
		}
	})
}

// TestFailedReadings are told once, counted, and made up for.
func TestFailedReadings(t *testing.T) {
	k := &slowKernel{newFakeKernel(), 0}
	var told []string
	r := prepared(k, Options{Detail: PerEndpoint, Report: func(err error) { told = append(told, err.Error()) }}, 3, 1)
	k.broken = errors.New("no kernel")
	for range 3 {
		r.read(make(chan struct{}))
	}
	if p := r.picture(); p.failed != 3 || len(told) != 1 || p.remembered[0] != (ipfamily.Per[int]{-1, -1}) {
		t.Errorf("%v failures, told %q, affinity %v", p.failed, told, p.remembered[0])
	}
	k.broken = nil
	r.read(make(chan struct{}))
	p := r.picture()
	if ports, endpoints := p.connections(); ports != 3 || endpoints != 3 || p.remembered[0] != (ipfamily.Per[int]{3, 4}) {
		t.Errorf("%d and %d connections, affinity %v", ports, endpoints, p.remembered[0])
	}
}

// TestOpeningReading: what a former process's tables have counted is not ours, even if the first reading fails; what
// comes after it is.
func TestOpeningReading(t *testing.T) {
	k := &slowKernel{newFakeKernel(), 0}
	o := Options{Detail: PerEndpoint, Counters: k, MaxSeries: 100}
	r := newReader(&o)
	st, change := plain(3, 1)
	k.write(changed(st, change), true)
	bump := func() {
		for _, e := range k.frontends {
			e.count.Packets += 5
			k.slots[k.placesOf(e)[0]].endpoint.Packets += 5
		}
		k.rules[1][dataplane.RefusedUnusedPort] += 7
	}
	bump()
	if r.startRead() != nil {
		t.Fatal("read before the first transaction")
	}
	k.broken = errors.New("not now")
	r.committed(allNew(st, dataplane.Receipt{Adopted: true}), true)
	for done := false; !done; {
		r.locked(func() { done = r.failures == 1 })
	}
	k.broken = nil
	r.read(make(chan struct{}))
	p := r.picture()
	if ports, endpoints := p.connections(); ports+endpoints+p.refused[1][dataplane.RefusedUnusedPort] != 0 {
		t.Errorf("what was counted before is shown: %+v", p)
	}
	bump()
	r.read(make(chan struct{}))
	p = r.picture()
	if ports, endpoints := p.connections(); ports != 15 || endpoints != 15 ||
		p.refused[1][dataplane.RefusedUnusedPort] != 7 {
		t.Errorf("%d and %d connections; want 15: %+v", ports, endpoints, p)
	}
}

// TestWrittenInParts: the first state may take several transactions. Of new tables all is ours that was counted; of
// tables that were there before us nothing is, whenever their Services come to be known.
func TestWrittenInParts(t *testing.T) {
	for _, full := range []bool{true, false} {
		k := &slowKernel{newFakeKernel(), 0}
		m := New(Options{Detail: PerEndpoint, Counters: k, MaxSeries: 100})
		st, change := plain(3, 1)
		fake := &fakeBackend{kernel: newFakeKernel(), receipt: dataplane.Receipt{Full: full}} // it writes somewhere else
		backend := behind(m, fake)
		k.write(changed(st, change), true)
		bump := func() {
			for _, e := range k.frontends {
				e.count.Packets += 5
				k.slots[k.placesOf(e)[0]].endpoint.Packets += 5
			}
		}
		bump()
		names := change.Services
		for last := range names {
			rest := names[last+1:]
			fake.leave = func(n snapshot.Name) bool { return slices.Contains(rest, n) }
			_, err := backend.Apply(st, change)
			if err != nil || backend.Filled() != (len(rest) == 0) {
				t.Fatalf("%d Services are left: %v, %v", len(rest), err, backend.Filled())
			}
			change, fake.receipt.Full = dataplane.Change{}, false
			if running := m.reader.startRead(); running != nil {
				<-running
			}
			m.reader.locked(func() { m.reader.readAt = time.Time{} })
		}
		m.reader.stop()                    // of the reading that the first transaction asked for, too
		m.reader.read(make(chan struct{})) // that one may have begun before the last Service was known
		bump()
		m.reader.read(make(chan struct{}))
		want := uint64(15)
		if full {
			want = 30
		}
		p := m.reader.picture()
		if ports, endpoints := p.connections(); ports != want || endpoints != want {
			t.Errorf("full %v: %d and %d connections; want %d", full, ports, endpoints, want)
		}
	}
}
