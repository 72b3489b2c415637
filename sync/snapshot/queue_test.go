package snapshot

import (
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
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

// TestQueueLosesNothing runs sources against one reader. Each source counts its own object up; the reader must never see a
// count go back, and must see the last one without polling.
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
