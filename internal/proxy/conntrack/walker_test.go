package conntrack

import (
	"cmp"
	"context"
	"errors"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/reconcile/reconciletest"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

func newCleaner(t table, report func(SweepResult)) *Cleaner { return NewCleaner(newWalker(t), report) }

func newReleaser(t table, o ReleaserOptions) *Releaser { return NewReleaser(newWalker(t), o) }

// run takes a look by itself, which is not repeated.
func (s *sweep) run(ctx context.Context) SweepResult {
	s.result.Walked = s.walker.takeAlone(ctx, s)
	return s.result
}

func (l *releaseLook) run(ctx context.Context) ReleaseResult {
	return l.result(len(l.due), l.walker.takeAlone(ctx, l))
}

// newUnanswered returns one whose Walker runs until the test ends.
func newUnanswered(t testing.TB, of table) *Unanswered {
	u := NewUnanswered(newWalker(of))
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- u.walker.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	return u
}

// alone is a look that does nothing at its end.
type alone struct{ look }

func (alone) done(context.Context, Walked, time.Duration) bool { return true }

func (w *Walker) takeAlone(ctx context.Context, l look) Walked {
	u := &user{look: alone{l}}
	r := round{table: w.table, narrow: w.table.narrow(), users: []*user{u}}
	r.run(ctx)
	return u.Walked
}

// walkTable is a table of few or of many flows.
type walkTable struct {
	tcpTable
	many bool
	// each is how long each flow of a list takes.
	each time.Duration
	// together has a round begin when all who ask at a time have asked, however busy the machine is.
	together atomic.Bool
}

func (t *walkTable) narrow() bool {
	if t.together.Load() {
		time.Sleep(time.Nanosecond)
	}
	return t.many
}

func (t *walkTable) list(q query, do func([]flow) error) error {
	if t.each == 0 {
		return t.tcpTable.list(q, do)
	}
	return t.tcpTable.list(q, func(flows []flow) error {
		for _, f := range flows {
			time.Sleep(t.each)
			if err := do([]flow{f}); err != nil {
				return err
			}
		}
		return nil
	})
}

// walking is a Walker at work in a bubble of synctest, with a Cleaner and a Releaser.
type walking struct {
	*Walker
	table *walkTable
	loop  *reconciletest.Loop
}

func newWalking(t *testing.T, table *walkTable, services ...*dataplane.Service) *walking {
	w := &walking{newWalker(table), table, nil}
	c, r := NewCleaner(w.Walker, nil), NewReleaser(w.Walker, ReleaserOptions{})
	c.SetTCP(r)
	w.loop = &reconciletest.Loop{Listeners: []reconcile.Listener{c.Listener(), r.Listener()}, Writer: backendFunc(fine)}
	ctx, cancel := context.WithCancel(context.Background())
	go w.Run(ctx)
	t.Cleanup(func() { cancel(); synctest.Wait() })
	w.apply(t, services...)
	rest(time.Minute)
	table.mu.Lock()
	defer table.mu.Unlock()
	table.listed = nil
	return w
}

func (w *walking) apply(t *testing.T, services ...*dataplane.Service) {
	t.Helper()
	change := dataplane.Change{}
	for _, s := range services {
		change.Services = append(change.Services, s.Name)
	}
	_, err := w.loop.Apply(state(services...), change)
	labtest.Check(t, err)
}

const dnsBoth, dnsOne = dnsKey + ">10.0.0.1:53,10.0.0.2:53", dnsKey + ">10.0.0.2:53"

// TestServedTogether: what a transaction makes due for Cleaner and Releaser, and what somebody asks for at the same
// time, takes one list if there are few flows, and one for each protocol if there are many.
func TestServedTogether(t *testing.T) {
	for _, many := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			table := &walkTable{many: many}
			w := newWalking(t, table, service("dns", dnsBoth), web(webBoth))
			u := NewUnanswered(w.Walker)
			table.add(dnsKey, "10.0.0.1:53")
			table.open(webKey, "10.0.0.1:80")
			table.open(webKey, "10.0.0.2:80")
			looked := 0
			labtest.Check(t, w.Look(t.Context(), func(*Flow) { looked++ }))
			rest(time.Minute)
			if table.looks() != 1 || looked != 3 {
				t.Errorf("many %v: %d lists for a look at everything, which got %d flows", many, table.looks(), looked)
			}
			start := time.Now()
			table.mu.Lock()
			table.listed = nil
			table.mu.Unlock()
			table.together.Store(true)
			w.apply(t, service("dns", dnsOne), web(webOne))
			n, err := u.Delete(t.Context(), []netip.AddrPort{netip.MustParseAddrPort("10.0.0.2:80")},
				func(WaitingFlow) bool { return true })
			labtest.Check(t, err)
			rest(10 * time.Millisecond)
			want := []float64{0}
			if many { // one of UDP, and one for each endpoint of TCP
				want = []float64{0, 0, 0}
			}
			table.mu.Lock()
			got := table.since(start)
			table.mu.Unlock()
			if n != 1 || !slices.Equal(got, want) {
				t.Errorf("many %v: %d deleted; lists at %v, want %v", many, n, got, want)
			}
			if rest(900 * time.Millisecond); len(table.left()) != 0 {
				t.Errorf("many %v: left %v", many, table.left())
			}
		})
	}
}

// TestFailsAlone: a sweep that fails does not keep flows from others that are served by the same list.
func TestFailsAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := &walkTable{}
		w := newWalking(t, table, service("dns", dnsBoth))
		table.open(webKey, "10.0.0.1:80")
		u := NewUnanswered(w.Walker)
		table.mu.Lock()
		table.during = func() {
			w.loop.Writer = backendFunc(func(*dataplane.State) (dataplane.Receipt, error) {
				return dataplane.Receipt{}, errTable
			})
			if _, err := w.loop.Apply(state(), dnsChange); !errors.Is(err, errTable) {
				t.Error(err)
			}
		}
		table.mu.Unlock()
		table.together.Store(true)
		w.apply(t, service("dns", dnsOne))
		n, err := u.Delete(t.Context(), []netip.AddrPort{netip.MustParseAddrPort("10.0.0.1:80")},
			func(WaitingFlow) bool { return true })
		if n != 1 || err != nil || table.looks() != 1 {
			t.Errorf("%d deleted with %d lists: %v", n, table.looks(), err)
		}
	})
}

// TestWithinLongList: nobody waits for a long list that somebody else wants, nor rests for it.
func TestWithinLongList(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := &walkTable{many: true}
		w := newWalking(t, table, service("dns", dnsBoth), web(webBoth))
		for range 1000 {
			table.hold(otherKey, "10.0.0.2:80")
		}
		table.each = 10 * time.Millisecond
		ended := time.Duration(0)
		start := time.Now()
		w.Watch(time.Hour, Watcher{func(*Flow) {}, func(began time.Time, err error) { ended = time.Since(began) }})
		rest(time.Second)
		table.open(webKey, "10.0.0.1:80")
		w.apply(t, service("dns", dnsBoth), web(webOne))
		if rest(900 * time.Millisecond); len(table.left()) != 1000 {
			t.Errorf("who opens a connection waits for a long list")
		}
		table.add(dnsKey, "10.0.0.1:53")
		w.apply(t, service("dns", dnsOne), web(webOne))
		if rest(900 * time.Millisecond); len(table.left()) != 1000 {
			t.Errorf("who sends to an endpoint that is gone waits for a long list")
		}
		again := time.Duration(0)
		go func() {
			err := w.Look(t.Context(), func(*Flow) { again = cmp.Or(again, time.Since(start)) })
			if err != nil {
				t.Error(err)
			}
		}()
		if rest(time.Minute); again < ended {
			t.Errorf("a look at everything began after %v, within another one", again)
		}
		if ended < 20*time.Second || ended > 21*time.Second {
			t.Errorf("the list was to take 10 s, and as much for pauses; it took %v of %v", ended, time.Since(start))
		}
	})
}

// TestAskerGone: who asks while nobody walks is not kept when it ends, and its look does not take place.
func TestAskerGone(t *testing.T) {
	table := &walkTable{}
	w := newWalker(table)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := w.Look(ctx, func(*Flow) {}); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	_, err := NewUnanswered(w).Delete(ctx, []netip.AddrPort{netip.MustParseAddrPort("10.0.0.1:80")}, nil)
	if !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	for _, u := range w.all() {
		if _, any := u.next(time.Time{}, time.Time{}); any {
			t.Error("something is due")
		}
	}
}

// TestWatchPace: looks at everything come every period, or as often as a twentieth of the time allows; after failures
// as soon as others.
func TestWatchPace(t *testing.T) {
	for takes, want := range map[time.Duration][]float64{
		time.Millisecond:       {0, 1, 3, 13, 23, 33},
		600 * time.Millisecond: {0, 2.2, 5.4, 29.4}, // with pauses, as long as the lists
	} {
		synctest.Test(t, func(t *testing.T) {
			table := &walkTable{}
			table.takes, table.fails = takes, 2
			w := newWalker(table)
			ctx, cancel := context.WithCancel(context.Background())
			go w.Run(ctx)
			start, failed := time.Now(), 0
			w.Watch(10*time.Second, Watcher{func(*Flow) {}, func(_ time.Time, err error) {
				if err != nil {
					failed++
				}
			}})
			rest(34 * time.Second)
			got := table.since(start)
			for i := range got {
				got[i] = float64(int(got[i]*10)) / 10
			}
			if !slices.Equal(got, want) || failed != 2 {
				t.Errorf("lists of %v at %v, want %v; %d failed", takes, got, want, failed)
			}
			cancel()
			synctest.Wait()
		})
	}
}

// TestMerge: lists of TCP and UDP become one, as do those of everything in both families. Narrow ones come first, and
// none is there that another one covers.
func TestMerge(t *testing.T) {
	tcp4, udp4 := query{protocol: snapshot.TCP}, query{protocol: snapshot.UDP}
	tcp6 := query{family: ipfamily.IPv6, protocol: snapshot.TCP}
	udp6 := query{family: ipfamily.IPv6, protocol: snapshot.UDP}
	all := query{both: true}
	dns, port80 := queryFor(key(dnsKey)), query{protocol: snapshot.TCP, endpoint: netip.MustParseAddrPort("0.0.0.0:80")}
	new4 := query{protocol: snapshot.TCP, unanswered: true}
	ends := slices.Collect(func(yield func(netip.AddrPort) bool) {
		for i := byte(1); i <= maxSingleEndpoints; i++ {
			yield(netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, i}), 80))
		}
	})
	few := endpointQueries(slices.Values(ends), false, true)
	other := endpointQueries(slices.Values([]netip.AddrPort{netip.MustParseAddrPort("10.0.0.9:80")}), false, true)
	for i, test := range [][2][]query{
		{nil, nil},
		{{tcp4, tcp4}, {tcp4}},
		{{tcp4, tcp6}, {tcp4, tcp6}},
		{{tcp4, udp6, dns}, {dns, tcp4, udp6}},
		{{udp4, dns}, {udp4}},
		{{tcp4, udp4}, {{}}},
		{{tcp4, udp4, tcp6, udp6, dns}, {all}},
		{{new4, tcp6}, {new4, tcp6}},
		{{new4, tcp4}, {tcp4}},
		{{{}, {family: ipfamily.IPv6}}, {all}},
		{append([]query{all}, few...), {all}},
		{few, few},
		{append(few, other...), {port80}},
		{append(few, tcp4, port80), {tcp4}},
		{append(few, port80), {port80}},
	} {
		if got := merge(test[0]); !slices.Equal(got, test[1]) {
			t.Errorf("%d: %v become %v, want %v", i, test[0], got, test[1])
		}
	}
}

// TestBothFamilies: the kernel lists both families at once.
func TestBothFamilies(t *testing.T) {
	conn := emptyHost(t)
	entries, _ := mixed()
	insert(t, conn, entries...)
	var got ipfamily.Per[int]
	labtest.Check(t, conn.list(query{both: true}, func(flows []flow) error {
		for i := range flows {
			got[ipfamily.Of(flows[i].frontend.Addr)]++
		}
		return nil
	}))
	if half := len(entries) / 2; got != [...]int{half, half} {
		t.Errorf("%v flows of the families, want %d of each", got, half)
	}
}

// TestPortAlone: the kernel lists the flows to endpoints with a port, whatever their addresses, and no others.
func TestPortAlone(t *testing.T) {
	conn := emptyHost(t)
	for i, e := range []string{"10.0.0.1:80", "10.0.0.2:80", "10.0.0.1:81",
		"[fd00::1]:80", "[fd00::2]:80", "[fd00::1]:81"} {
		at := netip.MustParseAddrPort(e)
		k := key("10.96.0.1:9/tcp")
		if at.Addr().Is6() {
			k = key("[fd00:96::1]:9/tcp")
		}
		insert(t, conn, entry{client: clientOf(i, at.Addr().Is6()), frontend: k, endpoint: at})
	}
	for _, f := range ipfamily.All {
		got := 0
		q := query{family: f, protocol: snapshot.TCP, endpoint: netip.AddrPortFrom(unspecified[f], 80)}
		labtest.Check(t, conn.list(q, func(flows []flow) error {
			got += len(flows)
			return nil
		}))
		if got != 2 || !conn.filters() {
			t.Errorf("%v: %d flows to port 80, want 2; the kernel filters: %v", f, got, conn.filters())
		}
	}
}

// TestListWithinList: between two datagrams of a list, there may be another one.
func TestListWithinList(t *testing.T) {
	conn := emptyHost(t)
	var entries []entry
	for i := range 5000 {
		entries = append(entries, entry{client: clientOf(i, false), frontend: key(dnsKey), endpoint: endpoints[0][0]})
	}
	insert(t, conn, entries...)
	outer, inner, datagrams := 0, 0, 0
	labtest.Check(t, conn.list(query{both: true}, func(flows []flow) error {
		outer += len(flows)
		datagrams++
		return conn.list(query{}, func(flows []flow) error {
			inner += len(flows)
			return nil
		})
	}))
	if outer != len(entries) || inner != datagrams*len(entries) || datagrams < 2 {
		t.Errorf("%d flows in %d datagrams, and %d within", outer, datagrams, inner)
	}
}
