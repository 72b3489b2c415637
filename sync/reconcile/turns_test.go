package reconcile

import (
	"fmt"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// in moves the objects of a delta to another namespace.
func in(namespace string, d snapshot.Delta) snapshot.Delta {
	out := snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{}}
	for n, svc := range d.Services {
		moved := *svc
		moved.Name.Namespace = namespace
		out.Services[snapshot.Name{Namespace: namespace, Name: n.Name}] = &moved
	}
	return out
}

// costly is a backend that takes long for Services of one namespace.
type costly struct {
	*fakeBackend
	namespace string
	each      time.Duration
	// spent is what they took; served is when each Service was written last.
	spent  time.Duration
	served map[snapshot.Name]time.Time
	calls  int
	mu     sync.Mutex
}

// servedAt says when a Service was written last; callsSoFar and spentSoFar how often something was, and how long it
// took.
func (c *costly) servedAt(namespace, name string) time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.served[snapshot.Name{Namespace: namespace, Name: name}]
}

func (c *costly) callsSoFar() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.calls
}

func (c *costly) spentSoFar() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.spent
}

func (c *costly) Apply(want *dataplane.State, change dataplane.Change) (dataplane.Receipt, error) {
	took := time.Duration(0)
	for _, n := range change.Services {
		if n.Namespace == c.namespace {
			time.Sleep(c.each)
			took += c.each
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	r, err := c.fakeBackend.Apply(want, change)
	c.calls++
	c.spent += took
	for _, n := range change.Services {
		c.served[n] = time.Now()
	}
	return r, err
}

// version is a Service that differs by n.
func version(name string, n int) snapshot.Delta {
	d := service(name)
	d.Services[nameOf(name)].Ports[0].Port = uint16(1000 + n)
	return d
}

// weighty is a version of a Service that counts as one which may take long.
func weighty(name string, n int) snapshot.Delta {
	d := version(name, n)
	for i := range 60 {
		r := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), 32)
		d.Services[nameOf(name)].SourceRanges = append(d.Services[nameOf(name)].SourceRanges, r)
	}
	return d
}

// startCostly runs a loop over a backend that takes long for one namespace.
func startCostly(t *testing.T, each time.Duration) (*costly, *snapshot.Queue) {
	b := &fakeBackend{}
	q, _ := start(t, b)
	c := &costly{fakeBackend: b, namespace: "aaa", each: each, served: map[snapshot.Name]time.Time{}}
	b.loop.Writer = c
	q.Synced()
	synctest.Wait()
	return c, q
}

// TestOneTenantTakesItsShare: who changes something costly all the time gets a share of the time, and his last word;
// others wait for one transaction of his at most.
func TestOneTenantTakesItsShare(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const each = 60 * time.Millisecond
		c, q := startCostly(t, each)
		begin, worst := time.Now(), time.Duration(0)
		const updates = 3000
		for n := range updates {
			q.Put(in("aaa", weighty("a", n)))
			time.Sleep(10 * time.Millisecond)
			put := time.Now()
			q.Put(in("shop", version("b", n)))
			time.Sleep(10 * time.Millisecond)
			if at := c.servedAt("shop", "b"); at.After(put) {
				worst = max(worst, at.Sub(put))
			}
		}
		took := time.Since(begin)
		if most := took/share + credit + 2*each; c.spentSoFar() > most || c.spentSoFar() < took/share/2 {
			t.Errorf("of %v one namespace got %v; want about %v", took, c.spentSoFar(), took/share)
		}
		if worst > 2*each+maxRest {
			t.Errorf("another waited %v for transactions of %v", worst, each)
		}
		time.Sleep(maxPause + time.Second)
		synctest.Wait()
		if c.callsSoFar() == 0 { // also a moment after which the race detector knows that all was written
			t.Fatal("nothing was written")
		}
		svc := c.kernel.Services[snapshot.Name{Namespace: "aaa", Name: "a"}]
		if got := svc.Ports[0].Frontends[0].Key.Port; got != 1000+updates-1 {
			t.Errorf("the last change is not in force, but that of port %d", got)
		}
		if w := q.Waiting(); w != (snapshot.Waiting{}) {
			t.Errorf("waiting: %+v", w)
		}
	})
}

// TestQuietTenantsAreNotHeldUp: after some quiet, several costly changes go at once, and what a whole cluster is in one
// namespace is not slower for that while its changes are cheap.
func TestQuietTenantsAreNotHeldUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, q := startCostly(t, 60*time.Millisecond)
		for n := range 4 {
			q.Put(in("aaa", weighty("a", n)))
			synctest.Wait()
			put := time.Now()
			time.Sleep(200 * time.Millisecond)
			if at := c.servedAt("aaa", "a"); at.Sub(put) > 60*time.Millisecond+maxRest {
				t.Errorf("change %d waited %v", n, at.Sub(put))
			}
		}
		for n := range 500 {
			q.Put(in("cheap", version("a", n)))
			put := time.Now()
			time.Sleep(time.Millisecond)
			synctest.Wait()
			if at := c.servedAt("cheap", "a"); at.Before(put) {
				t.Fatalf("change %d waits", n)
			}
		}
	})
}

// TestHeavyChangesFollowLightOnes: a namespace that owes nothing and lets lighter changes go ahead is written right
// after them, even if nothing else ever changes.
func TestHeavyChangesFollowLightOnes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, q := startCostly(t, 0)
		begin := time.Now()
		both := in("aaa", weighty("heavy", 1))
		both.Merge(in("bbb", version("light", 1)))
		q.Put(both)
		time.Sleep(time.Second)
		for _, n := range []snapshot.Name{{Namespace: "aaa", Name: "heavy"}, {Namespace: "bbb", Name: "light"}} {
			if at := c.servedAt(n.Namespace, n.Name); at.Before(begin) {
				t.Errorf("%v is not written", n)
			}
		}
		if w := q.Waiting(); w != (snapshot.Waiting{}) {
			t.Errorf("waiting: %+v", w)
		}
	})
}

// TestHeldChangesKeepTheirOrder: what waits is not lost, the oldest goes first, and the node's own changes never wait.
// Nothing that waits for its turn makes the proxy late.
func TestHeldChangesKeepTheirOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, q := startCostly(t, 400*time.Millisecond)
		q.Put(in("aaa", weighty("a", 0)))
		time.Sleep(time.Second)
		for i := range 20 {
			q.Put(in("aaa", weighty(string(rune('z'-i)), i)))
			time.Sleep(time.Millisecond)
		}
		synctest.Wait()
		if w := q.Waiting(); w.Services == 0 || !w.Since.IsZero() {
			t.Errorf("waiting: %+v", w)
		}
		if c.servedAt("aaa", "z") != (time.Time{}) {
			t.Error("nobody waits")
		}
		calls := c.callsSoFar()
		q.Put(snapshot.Delta{Node: &snapshot.Node{Name: "here", Zone: "a"}})
		time.Sleep(time.Millisecond)
		synctest.Wait()
		if c.callsSoFar() != calls && c.servedAt("aaa", "z") != (time.Time{}) {
			t.Error("a change of the node has let the others go")
		}
		if b := c.loop.snapshot.Node.Zone; b != "a" {
			t.Errorf("the node's zone is %q", b)
		}
		time.Sleep(time.Minute)
		for i := range 20 {
			if c.servedAt("aaa", string(rune('z'-i))).IsZero() {
				t.Errorf("%c was lost", 'z'-i)
			}
		}
	})
}

// TestTurnsAreBounded: one namespace has only so much in a step, the first of it first; what is light goes ahead every
// other time; and nobody who has paid is remembered.
func TestTurnsAreBounded(t *testing.T) {
	var turns fairQueue
	weights := map[string]int{"aaa": 1500, "shop": 3}
	weight := func(o object, _ *snapshot.Delta) int { return weights[o.name.Namespace] }
	now := time.Unix(1000, 0)
	for i := range 100 {
		turns.put(in("aaa", service(fmt.Sprintf("a%02d", i))), now)
	}
	turns.put(in("shop", service("web")), now)
	turns.put(in("shop", service("web")), now)
	names := func(d snapshot.Delta) map[string]int {
		of := map[string]int{}
		for n := range d.Services {
			of[n.Namespace]++
		}
		return of
	}
	if got := names(turns.next(now, weight)); len(got) != 1 || got["shop"] != 1 {
		t.Errorf("first come %v; want what is light", got)
	}
	turns.put(in("shop", service("web")), now)
	d := turns.next(now, weight)
	if got := names(d); got["aaa"] != maxNamespaceWeight/1500 || got["shop"] != 1 {
		t.Errorf("then come %v", got)
	}
	for i := range maxNamespaceWeight / 1500 {
		if _, there := d.Services[snapshot.Name{Namespace: "aaa", Name: fmt.Sprintf("a%02d", i)}]; !there {
			t.Errorf("the one that came as number %d is not among the first", i)
		}
	}
	if heavy := turns.charge(now, 2*time.Second, nil); heavy < time.Second {
		t.Errorf("heavy is %v", heavy)
	}
	turns.put(in("shop", service("web")), now)
	if got := names(turns.next(now, weight)); len(got) != 1 || got["shop"] != 1 {
		t.Errorf("who owes something goes on: %v", got)
	}
	due, any := turns.nextDue()
	if wait := due.Sub(now); !any || wait < 5*time.Second || wait > maxPause {
		t.Errorf("the next turn is in %v", wait)
	}
	weights["aaa"] = 1 << 20
	if got := names(turns.next(due, weight)); got["aaa"] != 1 {
		t.Errorf("what is too large for a step is not alone: %v", got)
	}
	turns.charge(due.Add(time.Hour), time.Hour, nil)
	if at := turns.due("aaa"); at.Sub(due.Add(time.Hour)) > maxPause {
		t.Errorf("after a very long step the next turn is at %v", at)
	}
	turns.charge(due.Add(100*time.Hour), 0, nil)
	if len(turns.paid) != 0 || len(turns.running) != 0 {
		t.Errorf("accounts are left: %v %v", turns.paid, turns.running)
	}
}

// TestLightGoesAheadAgain: what is light goes ahead every other time for as long as something heavy waits.
func TestLightGoesAheadAgain(t *testing.T) {
	var turns fairQueue
	weight := func(o object, _ *snapshot.Delta) int {
		return map[string]int{"aaa": maxNamespaceWeight, "shop": 3}[o.name.Namespace]
	}
	now := time.Unix(1000, 0)
	for i := range 9 {
		turns.put(in("aaa", service(fmt.Sprintf("a%02d", i))), now)
	}
	for turn := range 8 {
		turns.put(in("shop", service("web")), now)
		d := turns.next(now, weight)
		if n, want := len(d.Services), 1+turn%2; n != want {
			t.Errorf("turn %d takes %d Services; want %d", turn, n, want)
		}
	}
}

// TestHealthWaitsItsTurn: the health of endpoints waits while its namespace owes time, is taken once, the last word of
// it, and is no change of an object.
func TestHealthWaitsItsTurn(t *testing.T) {
	var turns fairQueue
	now, a := time.Unix(1000, 0), snapshot.Name{Namespace: "aaa", Name: "a"}
	weight := func(object, *snapshot.Delta) int { return maxNamespaceWeight }
	health := func(cause snapshot.Cause) snapshot.Delta {
		return snapshot.Delta{Health: map[snapshot.Name]*snapshot.Health{a: {Unhealthy: []snapshot.Unhealthy{
			{Endpoint: netip.MustParseAddrPort("10.0.0.1:80"), Cause: cause}}}}}
	}
	turns.put(in("aaa", service("a")), now)
	turns.next(now, weight)
	turns.charge(now, 2*time.Second, nil)
	turns.put(health(snapshot.Unanswered), now)
	turns.put(health(snapshot.Refused), now)
	if w := turns.held(); w != (snapshot.Held{}) {
		t.Errorf("waiting objects are %+v; want none", w)
	}
	if d := turns.next(now, weight); !d.Empty() {
		t.Errorf("the namespace owes time, yet %+v is taken", d)
	}
	due, any := turns.nextDue()
	if !any {
		t.Fatal("the health is lost")
	}
	if d := turns.next(due, weight); len(d.Health) != 1 || d.Health[a].Unhealthy[0].Cause != snapshot.Refused {
		t.Errorf("taken is %+v", d)
	}
	if d := turns.next(due, weight); !d.Empty() || len(turns.waiting) != 0 {
		t.Errorf("%+v is taken again, %v waits", d, turns.waiting)
	}
}

// TestHealthReachesTheWriter: a change of health alone is written, and is in sync then.
func TestHealthReachesTheWriter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &fakeBackend{}
		q, _ := start(t, b)
		b.loop.Planner.SetConfig(dataplane.Config{SecondChance: snapshot.SecondChanceOn})
		n, ep := nameOf("a"), netip.MustParseAddrPort("10.0.0.1:80")
		d := service("a")
		d.Slices = map[snapshot.Name]*snapshot.Slice{n: {Name: n, Service: "a",
			Ports: []snapshot.SlicePort{{Name: d.Services[n].Ports[0].Name, Protocol: snapshot.TCP, Port: 80}},
			Endpoints: []snapshot.Endpoint{{Addr: ep.Addr(), Ready: true},
				{Addr: ep.Addr().Next(), Ready: true}}}}
		q.Put(d)
		q.Synced()
		synctest.Wait()
		h := &snapshot.Health{Unhealthy: []snapshot.Unhealthy{{Endpoint: ep}}}
		q.Put(snapshot.Delta{Health: map[snapshot.Name]*snapshot.Health{n: h}})
		synctest.Wait()
		time.Sleep(time.Second)
		if w := q.Waiting(); w != (snapshot.Waiting{}) {
			t.Errorf("%+v waits", w)
		}
		svc := b.loop.Planner.State().Services[n]
		if got := svc.Ports[0].Cluster.Ejected; len(got) != 1 || got[0].Endpoint != ep {
			t.Errorf("ejected are %v", got)
		}
	})
}

// TestTurnsTogether: what came together is written in the same order each time, whatever the order of a map is.
func TestTurnsTogether(t *testing.T) {
	for range 5 {
		q, d := fairQueue{}, snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{}}
		for i := range 20 {
			d.Merge(service(fmt.Sprintf("s%02d", i)))
		}
		q.put(d, time.Now())
		for i, o := range q.waiting[nameOf("s00").Namespace].order {
			if want := nameOf(fmt.Sprintf("s%02d", i)); o.name != want {
				t.Fatalf("number %d is %v, not %v", i, o.name, want)
			}
		}
	}
}
