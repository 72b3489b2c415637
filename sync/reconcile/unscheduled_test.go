package reconcile

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// by is a Service that asks for a scheduler.
func by(scheduler string, d snapshot.Delta) snapshot.Delta {
	for _, svc := range d.Services {
		svc.Scheduling = &snapshot.Scheduling{Scheduler: scheduler}
	}
	return d
}

// TestUnscheduled says that a Service whose scheduler is refused is carried without, follows its endpoints at the cost
// of one transaction, is tried again when it asks for something else, and gets its scheduler when that is to be had.
func TestUnscheduled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &fakeBackend{judge: refusesLC}
		log := noted(b)
		var told Transaction
		var hooked []snapshot.Name
		listen(b, Listener{Written: func(tr Transaction) { told = tr }})
		listen(b, Listener{Unscheduled: func(r *dataplane.Refused) {
			for n := range r.Services {
				hooked = append(hooked, n)
			}
		}})
		q, _ := start(t, b)
		begin := time.Now()
		q.Put(merged(with("a", 80), by("lc", with("x", 80)), endpoint("x", "10.1.0.1"), by("rr", with("y", 80))))
		q.Synced()
		expectCalls(t, b, begin, "0:failed 0:3")
		x := b.kernel.Services[nameOf("x")].Ports[0]
		if x.Scheduling != nil || len(x.Cluster.Endpoints) != 1 || b.kernel.Services[nameOf("y")].Ports[0].Scheduling == nil {
			t.Errorf("%+v", x)
		}
		if list := b.loop.Unscheduled(); len(list) != 1 || list[0].Name != nameOf("x") || b.loop.Quarantined() != nil ||
			told.Unscheduled != 1 || told.Quarantined != 0 || len(hooked) != 1 {
			t.Errorf("%+v, %+v, %v", list, told, hooked)
		}
		if lines := log.take("WARN"); len(lines) != 1 || !strings.Contains(lines[0], "default/x") ||
			!strings.Contains(lines[0], "ip_vs_lc is missing") {
			t.Errorf("log: %q", lines)
		}
		time.Sleep(100 * time.Millisecond)
		q.Put(endpoint("x", "10.1.0.2"))
		expectCalls(t, b, begin, "0.1:3")
		time.Sleep(100 * time.Millisecond)
		q.Put(by("rr", with("x", 80)))
		expectCalls(t, b, begin, "0.2:3")
		if s := b.kernel.Services[nameOf("x")].Ports[0].Scheduling; s == nil || s.Scheduler != "rr" ||
			b.loop.Unscheduled() != nil {
			t.Errorf("%+v, %+v", s, b.loop.Unscheduled())
		}
	})
}

// TestScheduledLater says how often it is asked whether the scheduler is there by now.
func TestScheduledLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &fakeBackend{judge: refusesLC}
		log := noted(b)
		q, _ := start(t, b)
		begin := time.Now()
		q.Put(by("lc", with("x", 80)))
		q.Synced()
		time.Sleep(10 * time.Second)
		expectCalls(t, b, begin, "0:failed 0:1 1:failed 1:1 3:failed 3:1 7:failed 7:1")
		log.take()
		b.set(func() { b.judge = nil })
		time.Sleep(6 * time.Second)
		expectCalls(t, b, begin, "15:1")
		if lines := log.take("IPVS schedules", "services=1"); len(lines) != 1 ||
			b.kernel.Services[nameOf("x")].Ports[0].Scheduling == nil {
			t.Errorf("log: %q", lines)
		}
	})
}

// TestUnscheduledAndRefused says that a Service which is refused without its scheduler, too, goes back to what was
// acknowledged of it.
func TestUnscheduledAndRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &fakeBackend{judge: func(st *dataplane.State) error {
			if err := refusesLC(st); err != nil {
				return err
			}
			return refusesPoison(1)(st)
		}}
		q, _ := start(t, b)
		begin := time.Now()
		q.Put(by("lc", with("x", 80)))
		q.Synced()
		expectCalls(t, b, begin, "0:failed 0:1")
		good := b.kernel.Services[nameOf("x")]
		time.Sleep(100 * time.Millisecond)
		q.Put(by("lc", with("x", 80, poison)))
		expectCalls(t, b, begin, "0.1:failed 0.1:failed 0.1:1") // a port more may be scheduled otherwise
		if b.kernel.Services[nameOf("x")] != good || len(b.loop.Quarantined()) != 1 || b.loop.Unscheduled() != nil {
			t.Errorf("%+v", b.loop.Quarantined())
		}
		b.set(func() { b.judge = nil })
		time.Sleep(time.Minute)
		synctest.Wait()
		if x := b.kernel.Services[nameOf("x")]; !byLC(x) || !poisoned(x) || b.loop.Quarantined() != nil {
			t.Errorf("%+v", x)
		}
	})
}

// TestTooMuchForIPVS: Services that ask for too much of IPVS are told of and counted like those that the kernel
// refuses, once, and no longer than they do. Where IPVS leaves only some addresses alone, the Service is told, and does
// not count.
func TestTooMuchForIPVS(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &fakeBackend{}
		log := noted(b)
		var told []string
		listen(b, Listener{Unscheduled: func(r *dataplane.Refused) {
			for n, why := range r.Services {
				told = append(told, n.Name+": "+why.Error())
			}
		}})
		q, _ := start(t, b)
		b.loop.Planner.SetConfig(
			dataplane.Config{IPVS: dataplane.IPVS{Mode: dataplane.IPVSAuto, MaxPerService: 3, MaxPerNamespace: 5}},
		)
		expect := func(what, unscheduled, warned string, news ...string) {
			t.Helper()
			synctest.Wait()
			var names []string
			for _, u := range b.loop.Unscheduled() {
				names = append(names, u.Name.Name)
				if u.Err == nil || u.Since.IsZero() {
					t.Errorf("%s: %+v", what, u)
				}
			}
			lines := strings.Join(log.take("WARN"), " ")
			if got := strings.Join(names, " "); got != unscheduled || warned == "" != (lines == "") ||
				!strings.Contains(lines, warned) {
				t.Errorf("%s: without a scheduler %q, want %q; log: %q", what, got, unscheduled, lines)
			}
			slices.Sort(told)
			if !slices.EqualFunc(told, news, strings.HasPrefix) {
				t.Errorf("%s: told %q", what, told)
			}
			told = nil
		}
		q.Put(
			merged(by("lc", with("a", 80)), endpoint("a", "10.1.0.1"), by("lc", with("b", 80, 81)), endpoint("b", "10.1.0.1"),
				by("lc", with("c", 80)), endpoint("c", "10.1.0.1"), by("lc", with("d", 80)), endpoint("d", "10.1.0.1")),
		)
		q.Synced()
		expect(
			"at the start",
			"b d",
			"services=2",
			"b: it asks IPVS for too many",
			"d: with the older Services of its namespace, it asks",
		)
		q.Put(endpoint("b", "10.1.0.2"))
		time.Sleep(time.Second)
		expect("nothing new", "b d", "")
		q.Put(gone("c"))
		time.Sleep(time.Second)
		expect("there is room", "b", "")
		external := by("lc", with("a", 80))
		external.Services[nameOf("a")].ExternalIPs = []netip.Addr{netip.MustParseAddr("198.51.100.1")}
		q.Put(external)
		time.Sleep(time.Second)
		expect("an external IP", "b", "", "a: at an external IP, IPVS would take")
		q.Put(with("b", 80, 81))
		time.Sleep(time.Second)
		expect("it asks no more", "", "")
	})
}
