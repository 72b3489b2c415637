package reconcile

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// notes is a log that is read.
type notes struct {
	mu    sync.Mutex
	lines []string
}

func (n *notes) Write(line []byte) (int, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.lines = append(n.lines, string(line))
	return len(line), nil
}

// take gives the lines that hold all the words, and forgets every line.
func (n *notes) take(words ...string) (found []string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, line := range n.lines {
		holds := true
		for _, w := range words {
			holds = holds && strings.Contains(line, w)
		}
		if holds {
			found = append(found, line)
		}
	}
	n.lines = nil
	return found
}

// noted gives a backend a loop whose log is read.
func noted(b *fakeBackend) *notes {
	n := &notes{}
	b.loop = &Loop{Log: slog.New(slog.NewTextHandler(n, nil))}
	return n
}

// poison is a port that the kernel does not take.
const poison = 666

var errPoison = errors.New("numerical result out of range")

func poisoned(svc *dataplane.Service) bool {
	for k := range keysOf(svc) {
		if k.Port == poison {
			return true
		}
	}
	return false
}

// refusesPoison refuses all Services with the port, and names at most that many of them at once.
func refusesPoison(atOnce int) func(*dataplane.State) error {
	return func(st *dataplane.State) error {
		r := &dataplane.Refused{Services: map[snapshot.Name]error{}}
		for n, svc := range st.Services {
			if poisoned(svc) && len(r.Services) < atOnce {
				r.Services[n] = errPoison
			}
		}
		if len(r.Services) == 0 {
			return nil
		}
		return fmt.Errorf("a transaction: %w", r)
	}
}

func nameOf(name string) snapshot.Name { return snapshot.Name{Namespace: "default", Name: name} }

// with is a Service with these ports.
func with(name string, ports ...uint16) snapshot.Delta {
	d := service(name)
	svc := d.Services[nameOf(name)]
	svc.Ports = nil
	for _, p := range ports {
		svc.Ports = append(svc.Ports, snapshot.Port{Name: fmt.Sprint("p", p), Protocol: snapshot.TCP, Port: p})
	}
	return d
}

// endpoint is the one endpoint that all ports of a Service have.
func endpoint(name, addr string) snapshot.Delta {
	n := nameOf(name)
	sl := &snapshot.Slice{
		Name:      n,
		Service:   name,
		Endpoints: []snapshot.Endpoint{{Addr: netip.MustParseAddr(addr), Ready: true}},
	}
	for _, p := range []uint16{80, 81, poison} {
		sl.Ports = append(sl.Ports, snapshot.SlicePort{Name: fmt.Sprint("p", p), Protocol: snapshot.TCP, Port: 8080})
	}
	return snapshot.Delta{Slices: map[snapshot.Name]*snapshot.Slice{n: sl}}
}

func gone(name string) snapshot.Delta {
	return snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{nameOf(name): nil}}
}

func merged(deltas ...snapshot.Delta) (all snapshot.Delta) {
	for _, d := range deltas {
		all.Merge(d)
	}
	return all
}

// expectCalls waits for the loop, and compares the calls since a time with "seconds:failed" or "seconds:Services in the
// state".
func expectCalls(t *testing.T, b *fakeBackend, since time.Time, want string) {
	t.Helper()
	synctest.Wait()
	var got []string
	for _, c := range b.calls() {
		what := "failed"
		if !c.failed {
			what = fmt.Sprint(c.services)
		}
		if !c.at.Before(since) {
			got = append(got, fmt.Sprintf("%g:%s", c.at.Sub(since).Seconds(), what))
		}
	}
	b.set(func() { b.applied = nil })
	if s := strings.Join(got, " "); s != want {
		t.Fatalf("calls %q; want %q", s, want)
	}
}

// TestQuarantine says that everything but the refused Service is written at once, and that it is told of.
func TestQuarantine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &fakeBackend{judge: refusesPoison(99)}
		log := noted(b)
		var told []Transaction
		listen(b, Listener{Written: func(tr Transaction) {
			told = append(told, tr)
			if list := b.loop.Quarantined(); len(list) != tr.Quarantined {
				t.Errorf("%d quarantined, and the list is %v", tr.Quarantined, list)
			}
		}})
		var hooked []*dataplane.Refused
		listen(b, Listener{Quarantined: func(r *dataplane.Refused) { hooked = append(hooked, r) }})
		startWith(t, b, merged(with("a", 80), with("x", poison), with("c", 80), with("w", poison)))
		begin := time.Now()
		expectCalls(t, b, begin, "0:failed 0:2")
		list := b.loop.Quarantined()
		if len(list) != 2 || list[0].Name != nameOf("w") || list[1].Name != nameOf("x") {
			t.Fatalf("quarantined: %+v", list)
		}
		if x := list[1]; x.Err != errPoison || !x.Since.Equal(begin) || !x.Next.Equal(begin.Add(firstRetry)) {
			t.Errorf("%+v", x)
		}
		if len(hooked) != 1 || len(hooked[0].Services) != 2 || hooked[0].Services[nameOf("x")] != errPoison {
			t.Errorf("the hook was told of %v", hooked)
		}
		if len(told) != 1 || told[0].Quarantined != 2 || told[0].Services != 2 {
			t.Errorf("told of %+v", told)
		}
		if lines := log.take("ERROR"); len(lines) != 2 || !strings.Contains(lines[1], "service=default/x") ||
			!strings.Contains(lines[1], "out of range") || !strings.Contains(lines[1], "retry=1s") {
			t.Errorf("log: %q", lines)
		}
	})
}

// TestRounds says that a kernel which names its refusals one by one is asked until nothing is left to refuse.
func TestRounds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &fakeBackend{judge: refusesPoison(1)}
		q := startWith(t, b, with("a", 80))
		time.Sleep(time.Second)
		q.Put(merged(with("a", 80, 81), with("x", poison), with("y", poison), with("z", poison)))
		expectCalls(t, b, time.Now(), "0:failed 0:failed 0:failed 0:1")
		if n := len(b.loop.Quarantined()); n != 3 {
			t.Errorf("%d are quarantined", n)
		}
	})
}

// TestLastGood says that what was acknowledged of a Service stays, and does so while others change.
func TestLastGood(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &fakeBackend{judge: refusesPoison(99)}
		q := startWith(t, b, merged(with("a", 80), with("x", 80), endpoint("x", "10.1.0.1")))
		synctest.Wait()
		good := b.kernel.Services[nameOf("x")]
		time.Sleep(time.Second)
		q.Put(merged(with("a", 80, 81), with("x", 80, poison), endpoint("x", "10.1.0.2")))
		synctest.Wait()
		if c := b.calls(); !slices.Equal(c[len(c)-1].change.Services, []snapshot.Name{nameOf("a")}) {
			t.Errorf("changed in the end: %v; want the other Service alone", c[len(c)-1].change.Services)
		}
		expectCalls(t, b, time.Now(), "0:failed 0:2")
		if b.kernel.Services[nameOf("x")] != good {
			t.Errorf("the kernel has %+v; want what it had", b.kernel.Services[nameOf("x")])
		}
		time.Sleep(500 * time.Millisecond)
		q.Put(merged(with("a", 80),
			snapshot.Delta{ServiceCIDRs: &[]netip.Prefix{netip.MustParsePrefix("10.96.0.0/12")}}))
		expectCalls(t, b, time.Now(), "0:2")
		if b.kernel.Services[nameOf("x")] != good || len(b.kernel.ServiceCIDRs) != 1 {
			t.Errorf("the kernel has %+v", b.kernel)
		}
		// A port that it has no more is no part of what stays.
		q.Put(with("x", 81, poison))
		synctest.Wait()
		if left := b.kernel.Services[nameOf("x")]; left != nil {
			t.Errorf("the kernel has %+v of a Service whose port has gone", left)
		}
	})
}

// TestLastGoodGivesWay says that a Service which is quarantined does not keep a key that another Service has got.
func TestLastGoodGivesWay(t *testing.T) {
	vip := netip.MustParseAddr("198.51.100.1")
	key := dataplane.Key{Addr: vip, Protocol: snapshot.TCP, Port: 80}
	x := func(ports ...uint16) snapshot.Delta {
		d := with("x", ports...)
		d.Services[nameOf("x")].ExternalIPs = []netip.Addr{vip}
		return d
	}
	winner := with("w", 80)
	winner.Services[nameOf("w")].LoadBalancerIPs = []netip.Addr{vip}
	for _, together := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			b := &fakeBackend{judge: refusesPoison(99)}
			q, _ := start(t, b)
			owner := func() string {
				synctest.Wait()
				for n, svc := range b.kernel.Services {
					if keysOf(svc)[key] {
						return n.Name
					}
				}
				return ""
			}
			q.Put(x(80))
			q.Synced()
			if got := owner(); got != "x" {
				t.Fatalf("%q answers", got)
			}
			time.Sleep(time.Second)
			if together {
				q.Put(merged(x(80, poison), winner))
			} else {
				q.Put(x(80, poison))
				synctest.Wait()
				q.Put(winner)
			}
			if got := owner(); got != "w" {
				t.Errorf("%q answers; want the winner", got)
			}
			if left := b.kernel.Services[nameOf("x")]; left == nil || len(keysOf(left)) != 1 {
				t.Errorf("of the loser there is %+v; want its cluster IP", left)
			}
			q.Put(gone("w"))
			if got := owner(); got != "" {
				t.Errorf("%q answers; what it gave up does not come back before it is taken", got)
			}
			q.Put(x(80))
			if got := owner(); got != "x" {
				t.Errorf("%q answers in the end", got)
			}
		})
	}
}

// TestTrials says when a refused Service is tried again, and that it comes back when it is taken.
func TestTrials(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &fakeBackend{judge: refusesPoison(99)}
		log := noted(b)
		startWith(t, b, merged(with("a", 80), with("x", poison)))
		begin, want, at := time.Now(), "0:failed 0:1", 0.0
		for wait := 1.0; at+min(wait, 300) < 3600; wait *= 2 {
			at += min(wait, 300)
			want += fmt.Sprintf(" %g:failed %g:1", at, at)
		}
		time.Sleep(time.Hour)
		expectCalls(t, b, begin, want)
		if lines, trials := log.take("ERROR", "default/x"), strings.Count(want, "failed"); len(lines) != trials ||
			!strings.Contains(lines[trials-1], "retry=5m0s") {
			t.Errorf("%d trials, log: %q", trials, lines)
		}
		b.set(func() { b.judge = nil })
		begin = time.Now()
		next := b.loop.Quarantined()[0].Next.Sub(begin)
		time.Sleep(10 * time.Minute)
		expectCalls(t, b, begin, fmt.Sprintf("%g:2", next.Seconds()))
		if list := b.loop.Quarantined(); list != nil {
			t.Errorf("quarantined: %v", list)
		}
		if lines := log.take("INFO", "leaves quarantine", "default/x"); len(lines) != 1 {
			t.Errorf("log: %q", lines)
		}
	})
}

// TestChangeIsTriedAtOnce says that a refused Service which changes is tried at once, and that one which is refused all
// the same is tried again when it would have been.
func TestChangeIsTriedAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &fakeBackend{judge: refusesPoison(99)}
		log := noted(b)
		q := startWith(t, b, merged(with("a", 80), with("x", poison)))
		time.Sleep(100 * time.Second) // tried after 1, 3, 7, 15, 31 and 63 seconds; next after 127
		b.set(func() { b.applied = nil })
		log.take()
		begin := time.Now()
		q.Put(with("a", 80, 81)) // no concern of x
		expectCalls(t, b, begin, "0:1")
		time.Sleep(time.Second)
		q.Put(endpoint("x", "10.1.0.1"))
		expectCalls(t, b, begin, "1:failed 1:1")
		time.Sleep(time.Second)
		q.Put(merged(with("x", poison, 81), with("a", 80)))
		expectCalls(t, b, begin, "2:failed 2:1")
		if lines := log.take("ERROR"); len(lines) > 0 {
			t.Errorf("told again before its time: %q", lines)
		}
		time.Sleep(30 * time.Second)
		expectCalls(t, b, begin, "27:failed 27:1")
		if lines := log.take("ERROR", "retry=2m8s"); len(lines) != 1 {
			t.Errorf("log: %q", lines)
		}
		q.Put(with("x", 81))
		expectCalls(t, b, begin, "32:2")
		if list := b.loop.Quarantined(); list != nil {
			t.Errorf("quarantined: %v", list)
		}
		time.Sleep(time.Hour)
		expectCalls(t, b, begin, "")
	})
}

// TestQuarantinedIsDeleted says that a Service which is gone is quarantined no more, whether the kernel had something
// of it or not.
func TestQuarantinedIsDeleted(t *testing.T) {
	for _, ports := range [][]uint16{{80}, {poison}} {
		synctest.Test(t, func(t *testing.T) {
			b := &fakeBackend{judge: refusesPoison(99)}
			q := startWith(t, b, merged(with("a", 80), with("x", ports...)))
			synctest.Wait()
			q.Put(with("x", 80, poison))
			synctest.Wait()
			if len(b.loop.Quarantined()) != 1 {
				t.Fatalf("quarantined: %v", b.loop.Quarantined())
			}
			time.Sleep(500 * time.Millisecond)
			q.Put(gone("x"))
			synctest.Wait()
			if list := b.loop.Quarantined(); list != nil || len(b.kernel.Services) != 1 {
				t.Errorf("quarantined: %v; the kernel has %v", list, b.kernel.Services)
			}
			begin := time.Now()
			time.Sleep(time.Hour)
			b.set(func() { b.applied = b.applied[len(b.applied)-1:] })
			expectCalls(t, b, begin.Add(1), "")
			q.Put(with("x", 80))
			expectCalls(t, b, time.Now(), "0:2")
		})
	}
}

// TestOldestAcknowledged says that what counts is what the kernel holds, not what it was asked for in vain.
func TestOldestAcknowledged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &fakeBackend{judge: refusesPoison(99)}
		q := startWith(t, b, merged(with("a", 80), with("x", 80), endpoint("x", "10.1.0.1")))
		synctest.Wait()
		good := b.kernel.Services[nameOf("x")]
		time.Sleep(time.Second)
		b.set(func() { b.refuse = 4 })
		begin := time.Now()
		q.Put(endpoint("x", "10.1.0.2"))
		synctest.Wait()
		q.Put(merged(endpoint("x", "10.1.0.3"), with("b", 80)))
		synctest.Wait()
		q.Put(merged(with("x", 80, poison), gone("b")))
		expectCalls(t, b, begin, "0:failed 0:failed 0:failed")
		q.Put(snapshot.Delta{ServiceCIDRs: &[]netip.Prefix{netip.MustParsePrefix("10.96.0.0/12")}})
		time.Sleep(5 * time.Second)
		synctest.Wait()
		if b.kernel.Services[nameOf("x")] != good || len(b.kernel.ServiceCIDRs) != 1 {
			t.Errorf("the kernel has %+v", b.kernel)
		}
		if list := b.loop.Quarantined(); len(list) != 1 {
			t.Errorf("quarantined: %v", list)
		}
	})
}

// TestUnansweredTrial says that a transaction which fails as a whole does so without the Services on trial the next
// time, since it may be because of them.
func TestUnansweredTrial(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		refuse := refusesPoison(99)
		b := &fakeBackend{judge: refuse}
		q := startWith(t, b, merged(with("a", 80), with("x", poison)))
		begin := time.Now()
		synctest.Wait()
		b.set(func() {
			b.judge = func(st *dataplane.State) error {
				if refuse(st) != nil {
					return errors.New("no memory")
				}
				return nil
			}
		})
		time.Sleep(10 * time.Second)
		expectCalls(t, b, begin, "0:failed 0:1 1:failed 1.1:1 3:failed 3.1:1 7:failed 7.1:1")
		// For one that has changed, the wait begins anew.
		q.Put(with("x", poison, 81))
		time.Sleep(5 * time.Second)
		expectCalls(t, b, begin, "10:failed 10.1:1 11:failed 11.1:1 13:failed 13.1:1")
		// While the kernel takes nothing at all, there are no trials; one that has changed meanwhile has its turn right
		// after.
		b.set(func() { b.refuse = 3 })
		q.Put(with("a", 80, 81))
		synctest.Wait()
		b.set(func() { b.judge = nil })
		q.Put(with("x", poison))
		time.Sleep(time.Second)
		expectCalls(t, b, begin, "15:failed 15:failed 15.2:failed 15.6:1 15.6:2")
	})
}

// refusesX refuses a Service of that name, whatever it is.
func refusesX(st *dataplane.State) error {
	if st.Services[nameOf("x")] == nil {
		return nil
	}
	return &dataplane.Refused{Services: map[snapshot.Name]error{nameOf("x"): errPoison}}
}

// TestGiveUp says that a Service of which the kernel refuses even what it took before is in nobody's way.
func TestGiveUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &fakeBackend{}
		log := noted(b)
		q := startWith(t, b, merged(with("a", 80), with("x", 80)))
		time.Sleep(time.Second)
		b.set(func() { b.judge = refusesX })
		begin := time.Now()
		q.Put(with("x", 80, 81))
		expectCalls(t, b, begin, "0:failed 0:failed 0:1")
		if lines := log.take("ERROR", "default/x"); len(lines) != 2 ||
			!strings.Contains(lines[1], "nothing of it is programmed") {
			t.Errorf("log: %q", lines)
		}
		// It has not changed, and is refused: there is nothing it could fall back on.
		b.set(func() { b.judge = nil })
		time.Sleep(2 * time.Second)
		expectCalls(t, b, begin, "1:2")
		b.set(func() { b.judge = refusesX })
		q.Put(with("a", 80, 81))
		expectCalls(t, b, begin, "2:failed 2:1")
	})
}

// TestNoProgress says that refusals which name nothing that could be left out are errors like others.
func TestNoProgress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &fakeBackend{judge: func(*dataplane.State) error {
			return &dataplane.Refused{Services: map[snapshot.Name]error{nameOf("nobody"): errPoison, nameOf("x"): errPoison}}
		}}
		q, _ := start(t, b)
		q.Put(merged(with("a", 80), with("x", 80)))
		synctest.Wait()
		begin := time.Now()
		q.Synced()
		time.Sleep(500 * time.Millisecond)
		expectCalls(t, b, begin, "0:failed 0:failed 0.1:failed 0.3:failed")
		b.set(func() { b.judge = nil })
		time.Sleep(400 * time.Millisecond)
		expectCalls(t, b, begin, "0.7:1")
		time.Sleep(500 * time.Millisecond)
		expectCalls(t, b, begin, "1:2")
	})
}

// TestEndIsRefused says that a Service which is gone is not quarantined when the kernel does not let it go.
func TestEndIsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &fakeBackend{}
		q := startWith(t, b, merged(with("a", 80), with("x", 80)))
		synctest.Wait()
		time.Sleep(time.Second)
		begin := time.Now()
		b.set(func() {
			b.applied = nil
			b.judge = func(*dataplane.State) error {
				return &dataplane.Refused{Services: map[snapshot.Name]error{nameOf("x"): errPoison}}
			}
		})
		q.Put(gone("x"))
		time.Sleep(200 * time.Millisecond)
		expectCalls(t, b, begin, "0:failed 0.1:failed")
		if list := b.loop.Quarantined(); list != nil {
			t.Errorf("quarantined: %v", list)
		}
		b.set(func() { b.judge = nil })
		time.Sleep(time.Second)
		expectCalls(t, b, begin, "0.3:1")
	})
}
