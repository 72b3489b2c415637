package reconcile

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// walk is a cluster that changes at random, over a kernel that refuses at random. Names, addresses and ports are few,
// so that Services take keys from each other all the time.
type walk struct {
	*testkit.Walk
	b *fakeBackend
	q *snapshot.Queue
	// cluster is what the queue was told of.
	cluster *snapshot.Snapshot
	// harmless says that no Service gets the port any more.
	harmless bool
	// kernel makes the kernel's choices.
	kernel *rand.Rand
}

var walkNames = []string{"a", "b", "c", "d", "e"}

func (w *walk) addrs(base byte, most int) (out []netip.Addr) {
	for i := range most {
		if w.IntN(2) == 0 {
			out = append(out, netip.AddrFrom4([4]byte{198, 51, 100, base + byte(i)}))
		}
	}
	return out
}

func (w *walk) service(name string) *snapshot.Service {
	svc := service(name).Services[nameOf(name)]
	svc.ExternalIPs, svc.LoadBalancerIPs = w.addrs(0, 3), w.addrs(1, 3)
	svc.ExternalLocal = w.IntN(3) == 0
	svc.Ports = nil
	if w.IntN(3) == 0 {
		svc.Scheduling = &snapshot.Scheduling{Scheduler: []string{"lc", "rr"}[w.IntN(2)]}
	}
	for _, p := range []uint16{80, 81, poison} {
		if w.IntN(2) == 0 || p == poison && (w.harmless || w.IntN(2) == 0) {
			continue
		}
		svc.Ports = append(svc.Ports, snapshot.Port{Name: fmt.Sprint("p", p),
			Protocol: []snapshot.Protocol{snapshot.TCP, snapshot.UDP}[w.IntN(2)], Port: p})
	}
	return svc
}

func (w *walk) delta() snapshot.Delta {
	d := snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{}}
	for range 1 + w.IntN(3) {
		name := walkNames[w.IntN(len(walkNames))]
		switch w.IntN(8) {
		case 0:
			d.Services[nameOf(name)] = nil
		case 1, 2, 3, 4:
			d.Services[nameOf(name)] = w.service(name)
		case 5, 6:
			e := endpoint(name, fmt.Sprintf("10.1.0.%d", w.IntN(4)))
			if w.IntN(4) == 0 {
				e.Slices[nameOf(name)] = nil
			}
			d.Merge(e)
		case 7:
			d.ServiceCIDRs = &[]netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 96, 0, 0}), 8+w.IntN(3))}
		}
	}
	return d
}

// put tells the queue, and remembers what.
func (w *walk) put(d snapshot.Delta) {
	w.cluster.Apply(d)
	w.q.Put(d)
}

// judge is the kernel: it refuses Services with the port, of which it may not name all at once, and now and then
// everything.
func (w *walk) judge(st *dataplane.State) error {
	for n, a := range w.b.loop.want.quarantined {
		switch svc := st.Services[n]; {
		case a.trial && w.kernel.IntN(8) == 0:
			w.Count["unanswered"]++
			return errors.New("no memory, perhaps because of one on trial")
		case a.trial || svc == nil:
		case svc == w.b.kernel.Services[n]:
			w.Count["kept"]++
		default:
			w.Count["cut"]++
		}
	}
	if w.kernel.IntN(6) == 0 {
		return errors.New("no memory")
	}
	if err := refusesLC(st); err != nil {
		w.Count["unscheduled"]++
		return err
	}
	r := &dataplane.Refused{Services: map[snapshot.Name]error{}}
	for n, svc := range st.Services {
		if poisoned(svc) && (len(r.Services) == 0 || w.kernel.IntN(2) == 0) {
			r.Services[n] = errPoison
		}
	}
	if len(r.Services) == 0 {
		return nil
	}
	w.Count["refused"]++
	return errors.Join(errors.New("other words"), r)
}

// byLC says whether a Service asks for the scheduler that the kernel has not got.
func byLC(svc *dataplane.Service) bool {
	return slices.ContainsFunc(svc.Ports,
		func(sp *dataplane.ServicePort) bool { return sp.Scheduling != nil && sp.Scheduling.Scheduler == "lc" })
}

// refusesLC is an IPVS without that scheduler.
func refusesLC(st *dataplane.State) error {
	r := &dataplane.Refused{Services: map[snapshot.Name]error{}, Scheduling: true}
	for n, svc := range st.Services {
		if byLC(svc) {
			r.Services[n] = errors.New("ip_vs_lc is missing")
		}
	}
	if len(r.Services) == 0 {
		return nil
	}
	return r
}

// look is a Check by a backend that sometimes finds something, sometimes fails, and sometimes is in a hurry.
func (w *walk) look() ([]string, time.Duration, error) {
	switch w.kernel.IntN(10) {
	case 0:
		return []string{"a set is gone", "a rule is new"}, 0, nil
	case 1:
		return nil, 0, errors.New("no buffer space")
	case 2:
		return nil, time.Millisecond, nil
	}
	return nil, 0, nil
}

// settled says what the kernel has when all that can be is in: all but the refused ones, of which it has what it took.
func (w *walk) settled() {
	synctest.Wait()
	poisonous, unscheduled := 0, 0
	for n, svc := range w.b.loop.Planner.State().Services {
		held := w.b.kernel.Services[n]
		if poisoned(svc) {
			if poisonous++; held != nil && poisoned(held) {
				w.Fail("the kernel has %v", n)
			}
			continue
		}
		if byLC(svc) {
			unscheduled++
			svc = svc.Unscheduled()
		}
		if !reflect.DeepEqual(held, svc) {
			w.Fail("the kernel does not have %v", n)
		}
	}
	if n := len(w.b.loop.Quarantined()); n != poisonous {
		w.Fail("%d Services are quarantined; want %d", n, poisonous)
	}
	if n := len(w.b.loop.Unscheduled()); n != unscheduled {
		w.Fail("%d Services lack their scheduler; want %d", n, unscheduled)
	}
}

const walkLength = 200

var walks = testkit.NewWalks("TestWalk", "walk", walkLength)

// TestWalk says that whatever the kernel refuses in between, it comes to hold all that it can be brought to take, and
// in the end what the cluster asks for. What every single State and Change must be, the backend says.
func TestWalk(t *testing.T) {
	walks.Run(t, 40*walkLength, false, func(t *testing.T, one *testkit.Walk) {
		synctest.Test(t, func(t *testing.T) {
			w := &walk{Walk: one, kernel: rand.New(rand.NewPCG(one.Seed, 8)), b: &fakeBackend{}, cluster: snapshot.New()}
			w.b.judge, w.b.look = w.judge, w.look
			w.b.takes = time.Duration(w.Seed%3) * time.Millisecond
			w.q, _ = start(t, w.b)
			w.q.Synced()
			for _, step := range w.Steps {
				w.Begin(step)
				w.put(w.delta())
				w.b.loop.Quarantined() // the race detector has a word on that
				time.Sleep(time.Duration(w.IntN(int(time.Second))) >> w.IntN(12))
				if step%40 == 39 {
					w.calm()
				}
				if w.Failure != "" {
					return
				}
			}
			w.Begin(testkit.End)
			w.end(w.Seed%2 == 0)
		})
	}, 40*walkLength, "refused", "unanswered", "kept", "cut", "unscheduled")
}

// calm ends what is random about the kernel, for long enough that one try gets through.
func (w *walk) calm() {
	w.b.set(func() {
		w.b.judge = func(st *dataplane.State) error { return cmp.Or(refusesLC(st), refusesPoison(1)(st)) }
	})
	time.Sleep(maxRetry + time.Second)
	w.settled()
	w.b.set(func() { w.b.judge = w.judge })
}

// end takes away what the kernel has against the cluster: because the Services change, or because the kernel does.
func (w *walk) end(change bool) {
	if change {
		w.harmless = true
		for _, name := range walkNames {
			w.put(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{nameOf(name): w.service(name)}})
		}
	} else {
		w.b.set(func() { w.b.judge = nil })
	}
	time.Sleep(2 * maxTrialWait)
	w.b.set(func() { w.b.judge, w.b.look = nil, nil }) // nor is anything repaired while the test looks
	time.Sleep(2 * maxTrialWait)
	synctest.Wait()
	want, _ := dataplane.Compute(w.b.loop.Planner.Config(), w.cluster)
	if !reflect.DeepEqual(&w.b.kernel, want) || w.b.loop.Quarantined() != nil || w.b.loop.Unscheduled() != nil {
		w.Fail("the kernel has %+v; want %+v; quarantined: %v", w.b.kernel, want, w.b.loop.Quarantined())
	}
	if w.b.loop.want.state.Services != nil || len(w.b.loop.want.acknowledgedAs) > 0 {
		w.Fail("the loop holds on to what is acknowledged")
	}
}
