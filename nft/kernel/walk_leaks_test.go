package kernel

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

var walkSyncs = flag.Int("walk.syncs", 1000, "how many transactions TestLeaks looks at")

// leakSeed is no walk's.
const leakSeed = 1 << 32

// leakRounds is how often everything is taken away and measured, after a first round that fills the kernel's and Go's
// caches.
const leakRounds = 10

// The tolerances. Goroutines and descriptors are counted, and none may be left. The kernel's memory is that of a
// control group which holds this process alone; 256 KiB of it are three elements lost at each of 1,000 transactions,
// or the hash tables of one table at one restart; threads and caches made 30 KiB.
const (
	kernelTolerance = 256 << 10
	heapTolerance   = 2 << 20
)

// usage is what a process and the kernel hold.
type usage struct {
	goroutines, files int
	heap, kernel      int64
}

func (u usage) String() string {
	return fmt.Sprintf("%d goroutines, %d files, heap %d KiB, kernel %d KiB", u.goroutines, u.files, u.heap>>10,
		u.kernel>>10)
}

// TestLeaks has a backend write many small transactions, with restarts, refusals, faults and foreign hands, and then
// take everything away: nothing is left, be it of the first few or of many.
func TestLeaks(t *testing.T) {
	syncs := *walkSyncs
	group, err := labtest.NewMemory(t)
	if err != nil {
		t.Logf("what the kernel keeps is not measured, everything else is: %v", err)
	} else {
		group.Enter(t)
	}
	w := newWalker(t, testkit.NewWalk(leakSeed, nil))
	w.usage = func() usage { return usageNow(t, group) }
	w.leakRound(syncs / leakRounds)
	first := w.empty(usage{})
	t.Logf("at first      %v", first)
	last := first
	for n := range leakRounds {
		w.leakRound(syncs / leakRounds)
		last = w.empty(first)
		t.Logf("after %6d  %v", (n+1)*syncs/leakRounds, last)
	}
	for extra := 0; extra < leakRounds && !last.within(first); extra++ {
		w.leakRound(syncs / leakRounds) // what is lost makes it worse, what others do does not
		last = w.empty(first)
		t.Logf("still         %v", last)
	}
	if !last.within(first) {
		t.Errorf("something is left: at first %v, now %v", first, last)
	}
}

// within says whether no more is held than at another time.
func (u usage) within(before usage) bool {
	return u.goroutines <= before.goroutines && u.files <= before.files && u.heap <= before.heap+heapTolerance &&
		u.kernel <= before.kernel+kernelTolerance
}

// leakRound makes some transactions.
func (w *walker) leakRound(syncs int) {
	w.t.Helper()
	for range syncs {
		w.Begin(w.Step + 1)
		w.faults.random = w.Rand
		w.take(event{do: (*walker).sync})
	}
	w.settle()
}

// sync is a small change, and now and then something worse.
func (w *walker) sync() {
	w.Note("sync")
	switch n := w.Step; {
	case n%500 == 0, n%100 == 50:
		w.restart()
	case n%50 == 7:
		w.poison()
	case n%40 == 3:
		w.foreign()
	case n%10 == 1: // those below begin with clients of what there is
		w.settle()
		switch {
		case n%100 == 31:
			w.trouble()
		case n%100 == 71:
			w.kill()
		default:
			w.remember()
			w.settle()
		}
	default:
		w.see(w.changes(1))
		w.applyAll()
		if found := w.look(); found != nil {
			w.fail("found what nobody did: %q", found)
		}
	}
}

// empty takes everything away, ends the process, and measures what is left, until that is no more than before or does
// not get less. Then another process begins.
func (w *walker) empty(before usage) (u usage) {
	w.t.Helper()
	w.must(w.backend.Remove())
	for _, f := range ipfamily.All {
		for set := range nft.NumSets {
			if left, err := w.eye.Elements(f, set); err != nil || len(left) > 0 {
				w.fail("after Remove %s has %d elements (%v)", set, len(left), err)
			}
		}
	}
	w.close()
	w.backend, w.options = nil, Options{}
	u = measure(w.usage)
	for range 10 {
		if u.within(before) {
			break
		}
		u = measure(w.usage)
	}
	clear(w.handles[:])
	w.renewed = true
	w.begin(w.world.snapshot(w.Rand))
	w.settle()
	return u
}

// measure waits until nothing more is freed. The kernel frees tables and sockets later, by work queues.
func measure(read func() usage) (u usage) {
	for calm := 0; calm < 5; {
		runtime.GC()
		time.Sleep(20 * time.Millisecond)
		now := read()
		calm++
		if now.goroutines != u.goroutines || now.files != u.files || max(now.kernel-u.kernel, u.kernel-now.kernel) > 64<<10 {
			calm = 0
		}
		u = now
	}
	return u
}

// usageNow reads what this process holds, and if it is in a group, what the kernel holds for it.
func usageNow(t *testing.T, group *labtest.Memory) (u usage) {
	t.Helper()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	u.goroutines, u.heap = runtime.NumGoroutine(), int64(m.HeapAlloc)
	files, _ := os.ReadDir("/proc/self/fd")
	u.files = len(files)
	if group != nil {
		u.kernel = group.Kernel(t)
	}
	return u
}

// TestLeaksAreSeen: TestLeaks is worth nothing if its control group does not see what the kernel holds for nf_tables.
func TestLeaksAreSeen(t *testing.T) {
	group, err := labtest.NewMemory(t)
	if err != nil {
		t.Skipf("TestLeaks does without it, too: %v", err)
	}
	group.Enter(t)
	_, b := host(t)
	read := func() usage { return usageNow(t, group) }
	one, _ := dataplane.Compute(configs["unknown"], cluster(rand.New(rand.NewPCG(1, 1)), 1, false))
	many, _ := dataplane.Compute(configs["unknown"], cluster(rand.New(rand.NewPCG(1, 1)), 1000, false))
	apply(t, b, one)
	labtest.Check(t, b.Remove())
	before := measure(read)
	apply(t, b, many)
	full := measure(read)
	labtest.Check(t, b.Remove())
	after := measure(read)
	t.Logf("before %v; with 1,000 Services %v; after %v", before, full, after)
	const least = 1000 * 8 * 64 // Services, elements of each at least, bytes
	switch seen := full.kernel - before.kernel; {
	case linuxBefore(t, 5, 18): // it charges nothing of nf_tables to anybody
	case seen < least:
		t.Errorf("only %d bytes are seen", seen)
	}
	if after.kernel > before.kernel+kernelTolerance {
		t.Errorf("something is left: %v, was %v", after, before)
	}
}
