package snapshot

import (
	"fmt"
	"net/netip"
	"reflect"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
)

// woken says whether the queue asks to be read, and reads the request.
func woken(q *Queue) bool {
	select {
	case <-q.Wake():
		return true
	default:
		return false
	}
}

func TestQueueWaitsForAllSources(t *testing.T) {
	q := NewQueue(2)
	a := in("x", "a")
	if woken(q) {
		t.Error("woken by nothing")
	}
	q.Put(Delta{Services: map[Name]*Service{a: named(a)}})
	q.Synced()
	if !woken(q) {
		t.Error("not woken")
	}
	if d, ready := q.Take(); ready || !d.Empty() {
		t.Errorf("one source is missing, yet ready %v with %+v", ready, d)
	}
	q.Synced()
	if !woken(q) {
		t.Error("not woken by the last source")
	}
	if d, ready := q.Take(); !ready || d.Services[a] == nil {
		t.Errorf("ready %v with %+v", ready, d)
	}
	if d, ready := q.Take(); !ready || !d.Empty() {
		t.Errorf("taken twice: ready %v with %+v", ready, d)
	}
}

// TestQueueOfAnEmptyCluster: that there is nothing is an answer, and wakes the reader.
func TestQueueOfAnEmptyCluster(t *testing.T) {
	q := NewQueue(1)
	q.Synced()
	if d, ready := q.Take(); !woken(q) || !ready || !d.Empty() {
		t.Errorf("ready %v with %+v", ready, d)
	}
}

func TestQueueMerges(t *testing.T) {
	q := NewQueue(0)
	a, b := in("x", "a"), in("x", "b")
	q.Put(Delta{})
	if woken(q) {
		t.Error("woken by an empty delta")
	}
	q.Put(Delta{Services: map[Name]*Service{a: named(a), b: named(b)}})
	q.Put(Delta{Services: map[Name]*Service{a: nil}})
	q.Put(Delta{Node: &Node{Zone: "1"}})
	q.Put(Delta{Node: &Node{Zone: "2"}})
	if !woken(q) || woken(q) {
		t.Error("several deltas wake the reader exactly once")
	}
	d, _ := q.Take()
	if gone, named := d.Services[a]; !named || gone != nil || d.Services[b] == nil || d.Node.Zone != "2" {
		t.Errorf("got %+v", d)
	}
}

// TestQueueLosesNothing runs sources against one reader. Each source counts its own object up; the reader must never
// see a count go back, and must see the last one without polling.
func TestQueueLosesNothing(t *testing.T) {
	const sources, updates = 8, 500
	synctest.Test(t, func(t *testing.T) {
		q := NewQueue(sources)
		var writers sync.WaitGroup
		for i := range sources {
			writers.Go(func() {
				n := in("x", fmt.Sprint(i))
				for count := range updates {
					q.Put(Delta{Services: map[Name]*Service{n: {Name: n, HealthCheckNodePort: uint16(count + 1)}}})
					if count == updates/2 {
						q.Synced()
					}
				}
			})
		}
		s := New()
		finished := 0
		for finished < sources {
			<-q.Wake() // a wake-up that is lost leaves everybody asleep, which synctest reports
			d, ready := q.Take()
			if !ready {
				continue
			}
			if len(s.Services) == 0 && len(d.Services) != sources {
				t.Errorf("ready with %d of %d sources", len(d.Services), sources)
			}
			for n, svc := range d.Services {
				if before := s.Services[n]; before != nil && before.HealthCheckNodePort >= svc.HealthCheckNodePort {
					t.Errorf("%v went from %d to %d", n, before.HealthCheckNodePort, svc.HealthCheckNodePort)
				}
				if svc.HealthCheckNodePort == updates {
					finished++
				}
			}
			s.Apply(d)
		}
		writers.Wait()
	})
}

// TestQueueCountsWhatWaits: something waits from Put to Ack, and nothing does before it could be taken.
func TestQueueCountsWhatWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begin := time.Now()
		at := func(seconds int) time.Time { return begin.Add(time.Duration(seconds) * time.Second) }
		till := func(seconds int) { time.Sleep(time.Until(at(seconds))) }
		q := NewQueue(1)
		expect := func(since time.Time, services, slices int) {
			t.Helper()
			if got, want := q.Waiting(), (Waiting{since, services, slices}); got != want {
				t.Errorf("after %v: waiting %+v; want %+v", time.Since(begin), got, want)
			}
		}
		a, b := in("x", "a"), in("x", "b")
		slice := func(triggered int, addr string) map[Name]*Slice {
			s := &Slice{Name: a, Triggered: at(triggered)}
			if addr != "" {
				s.Endpoints = []Endpoint{{Addr: netip.MustParseAddr(addr)}}
			}
			return map[Name]*Slice{a: s}
		}
		till(10)
		q.Put(Delta{Services: map[Name]*Service{a: named(a)}, Slices: slice(-5, "10.0.0.1")})
		expect(time.Time{}, 1, 1) // there is nobody yet who could take it
		till(20)
		q.Synced()
		expect(at(20), 1, 1)
		till(30)
		q.Put(Delta{Services: map[Name]*Service{b: nil}, Slices: slice(25, "fd00::1")})
		expect(at(20), 2, 2)
		q.Take()
		expect(at(20), 2, 2) // taken is not settled
		till(40)
		q.Put(Delta{Slices: slice(35, "10.0.0.1")})
		if got, want := q.Ack(Held{}), []Trigger{{at(25), ipfamily.IPv6}}; !reflect.DeepEqual(got, want) {
			t.Errorf("triggers %v; want %v", got, want)
		}
		expect(at(40), 0, 1)
		q.Take()
		till(50)
		q.Put(Delta{Slices: slice(45, "")}) // the transaction failed, and it is taken together with the next
		q.Take()
		expect(at(40), 0, 2)
		want := []Trigger{{at(35), ipfamily.IPv4}, {at(45), ipfamily.IPv4}}
		if got := q.Ack(Held{}); !reflect.DeepEqual(got, want) {
			t.Errorf("triggers %v; want %v", got, want)
		}
		expect(time.Time{}, 0, 0)
		if got := q.Ack(Held{}); got != nil {
			t.Errorf("triggers twice: %v", got)
		}
	})
}

// TestTriggersAreBounded: while nothing is settled, they do not fill the memory.
func TestTriggersAreBounded(t *testing.T) {
	q := NewQueue(0)
	for i := range maxTriggers + 10 {
		n := in("x", fmt.Sprint(i%10))
		q.Put(Delta{Slices: map[Name]*Slice{n: {Name: n, Triggered: time.Now().Add(time.Second)}}})
		if i%3 == 0 {
			q.Take()
		}
	}
	q.Take()
	if n := len(q.Ack(Held{})); n > maxTriggers {
		t.Errorf("%d triggers are kept; want at most %d", n, maxTriggers)
	}
}
