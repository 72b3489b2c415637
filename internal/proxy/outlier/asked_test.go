package outlier

import (
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// asking is a port whose Service has its endpoints probed.
func asking(probe string, endpoints ...int) *dataplane.ServicePort {
	sp := port("shop", endpoints...)
	sp.Probe, _ = snapshot.ParseProbe(probe)
	return sp
}

// TestAskedProbes: endpoints that clients use are probed every few seconds. One that dies is ejected without evidence,
// and returns with the first probe that it accepts.
func TestAskedProbes(t *testing.T) {
	run(t, func(w *world) {
		w.busy(asking("tcp", 1, 2))
		if n := w.probed(1); n < 8 || n > 14 {
			t.Errorf("%d probes in a minute", n)
		}
		w.die(1, Silent)
		time.Sleep(8 * time.Second)
		w.want("dead", 1)
		if at := w.deletions(1); len(at) == 0 {
			t.Error("no flows were deleted")
		}
		w.set(1, Accepted)
		time.Sleep(10 * time.Second)
		w.want("it answers probes")
		if n := w.probed(2); n < 8 {
			t.Errorf("the other one was probed %d times", n)
		}
	})
}

// TestAskedProbesRefused: a probe that a policy rejects says nothing, as long as clients are answered. It is repeated
// less and less often.
func TestAskedProbesRefused(t *testing.T) {
	for _, o := range []Outcome{Rejected, Silent, Failed} {
		run(t, func(w *world) {
			w.set(1, o)
			w.busy(asking("tcp", 1, 2))
			time.Sleep(10 * time.Minute)
			w.want("a policy forbids the probe")
			if n := w.probed(1); n < 10 || n > 130 {
				t.Errorf("%v: %d probes in ten minutes", o, n)
			}
		})
	}
}

// TestAskedProbesUnused: nobody probes what no client of this node uses, and everybody as soon as one waits.
func TestAskedProbesUnused(t *testing.T) {
	run(t, func(w *world) {
		w.set(1, Silent)
		w.commit(asking("http:/", 1, 2))
		time.Sleep(5 * time.Minute)
		if n := w.probed(1) + w.probed(2); n > 0 {
			t.Errorf("%d probes", n)
		}
		w.sees(80, 1, 1, 0)
		w.want("it never accepted anybody", 1)
		if w.paths[endpoint(1)] != "" || w.probed(2) > 0 {
			t.Errorf("probed for %q, and the other one %d times", w.paths[endpoint(1)], w.probed(2))
		}
	})
}

// TestAskedHTTP: what an endpoint answers by HTTP decides, whatever it answers clients, and no trial ends it.
func TestAskedHTTP(t *testing.T) {
	run(t, func(w *world) {
		w.busy(asking("http:/healthz", 1, 2))
		if w.paths[endpoint(1)] != "/healthz" {
			t.Errorf("probed for %q", w.paths[endpoint(1)])
		}
		w.set(1, Rejected)
		time.Sleep(8 * time.Second)
		for range 20 {
			w.want("it says so", 1)
			time.Sleep(time.Minute)
		}
		w.set(1, Accepted)
		time.Sleep(time.Minute + time.Second)
		w.want("it is well")
		next := asking("", 1, 2) // nobody asks any more
		w.commit(next)
		before := w.probed(2)
		time.Sleep(time.Minute)
		if n := w.probed(2); n != before {
			t.Errorf("%d more probes", n-before)
		}
	})
}

// resorting is a port whose only endpoints are not ready.
func resorting(namespace string, endpoints ...int) *dataplane.ServicePort {
	sp := port(namespace)
	sp.SecondChance = snapshot.SecondChanceOff
	for _, n := range endpoints {
		sp.Resort = append(sp.Resort, endpoint(n))
	}
	return sp
}

// TestResorts: a last resort is told once it accepts a probe, and no longer when it does not, or when it is none any
// more. Whether there is evidence does not matter.
func TestResorts(t *testing.T) {
	run(t, func(w *world) {
		w.keeps = true
		w.set(2, Silent)
		w.busy(port("shop", 1, 2)) // whom clients use
		w.commit(resorting("shop", 1, 2))
		time.Sleep(100 * time.Millisecond)
		w.want("one accepts", 1)
		if u := w.health[shop].Unhealthy[0]; u.Cause != snapshot.Resort || time.Since(u.Since) > time.Second {
			t.Errorf("told is %+v", u)
		}
		used := resorting("shop", 1, 2)
		used.Cluster.Endpoints = []dataplane.Endpoint{{AddrPort: endpoint(1)}}
		w.commit(used)
		synctest.Wait()
		if s := w.detector.Stats(); s.LastResort != 1 || s.LastResorts != 1 || s.Unhealthy != [2]int{} {
			t.Errorf("%+v", s)
		}
		w.mu.Lock()
		delete(w.health, shop) // as when the Service is deleted and made again at once
		w.mu.Unlock()
		time.Sleep(askEvery)
		w.want("told again", 1)
		w.set(1, Rejected)
		w.set(2, Accepted)
		time.Sleep(20 * time.Second)
		w.want("the other one accepts", 2)
		w.commit(port("shop", 3))
		time.Sleep(time.Second)
		w.want("another one is ready")
		before := w.probed(2)
		time.Sleep(time.Minute)
		if n := w.probed(2); n != before || len(w.detector.machine.tracks) > 0 || w.detector.machine.askedAll > 0 {
			t.Errorf("%d more probes, %d tracks", n-before, len(w.detector.machine.tracks))
		}
		for _, line := range []string{"a last resort is used", "the last resort is over"} {
			if !strings.Contains(w.log.String(), line) {
				t.Errorf("the log has\n%s", &w.log)
			}
		}
		if w.reads.Load() > 250*5 {
			t.Errorf("evidence was read %d times", w.reads.Load())
		}
	})
}

// TestManyAsk: a namespace that asks for very many probes of silent endpoints gets some, and another one waits for none
// of them.
func TestManyAsk(t *testing.T) {
	run(t, func(w *world) {
		w.keeps = true
		for i := range 128 { // as many Services
			sp := resorting("shop")
			sp.Name.Service.Name += strings.Repeat("x", i)
			for n := range dataplane.MaxResort {
				e := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 99, byte(i), byte(n)}), 80)
				w.mu.Lock()
				w.outcomes[e] = Silent
				w.mu.Unlock()
				sp.Resort = append(sp.Resort, e)
			}
			w.detector.Listener().Committed(reconcile.Commit{Before: []*dataplane.Service{nil},
				After: []*dataplane.Service{{Name: sp.Name.Service, Ports: []*dataplane.ServicePort{sp}}}})
		}
		time.Sleep(time.Minute)
		if n := len(w.detector.machine.tracks); n != maxNamespaceAsked {
			t.Errorf("%d tracks", n)
		}
		at := time.Now()
		other := resorting("other", 1)
		w.detector.Listener().Committed(reconcile.Commit{Before: []*dataplane.Service{nil},
			After: []*dataplane.Service{{Name: other.Name.Service, Ports: []*dataplane.ServicePort{other}}}})
		for {
			synctest.Wait()
			w.mu.Lock()
			told := w.health[other.Name.Service] != nil
			w.mu.Unlock()
			if told {
				break
			}
			time.Sleep(10 * time.Millisecond)
			if time.Since(at) > 2*askSpread {
				t.Fatal("the other namespace waits")
			}
		}
		if waited := time.Since(at); waited > askSpread+100*time.Millisecond {
			t.Errorf("the other namespace has waited for %v", waited)
		}
	})
}
