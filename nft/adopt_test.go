package nft

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
	"github.com/verdict-proxy/verdict/sync/snapshot/snapshottest"
)

// walk is a proxy at work: restarted, refused by its kernel, and with others' hands in its tables.
type walk struct {
	t       *testing.T
	world   snapshottest.Cluster
	snap    *snapshot.Snapshot
	planner *dataplane.Planner
	model   Model
	kernel  *fakeKernel
	// behind gathers the changes that are not in the kernel yet.
	behind dataplane.Change
	step   int
}

func (w *walk) must(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatalf("step %d: %v", w.step, err)
	}
}

// want gives what a kernel holds after one transaction for the state alone.
func (w *walk) want() *fakeKernel {
	var fresh Model
	k := newFakeKernel()
	w.must(k.apply(fresh.Plan(w.planner.State(), dataplane.Change{}, 0)))
	return k
}

func (w *walk) check() {
	w.t.Helper()
	if d := w.kernel.diff(w.want()); d != nil {
		w.t.Fatalf("step %d:\n%s", w.step, strings.Join(d, "\n"))
	}
}

// learn reads the slots that the model has to know before it plans.
func (w *walk) learn(names []snapshot.Name) {
	w.t.Helper()
	unread := w.model.UnknownSlots(names)
	for _, x := range unread {
		for i := range x.Keys {
			e := &x.Keys[i]
			*e = w.kernel[x.Family].sets[e.Set][string(e.Key())]
		}
	}
	if !w.model.SetSlots(unread) {
		w.t.Fatalf("step %d: the kernel does not hold the slots it should", w.step)
	}
}

// change plans and writes what is behind. If refuse is set, the kernel does not take it. Limit bounds the transactions.
func (w *walk) change(refuse bool, limit int) {
	w.t.Helper()
	for first := true; first || !w.behind.Empty(); first = false {
		w.learn(w.behind.Services)
		txn := w.model.Plan(w.planner.State(), w.behind, limit)
		if refuse {
			w.model.Rollback(txn)
			return
		}
		w.must(w.kernel.apply(txn))
		w.behind = txn.Left
	}
	w.check()
}

// restart forgets everything but the kernel.
func (w *walk) restart(meddled bool) {
	w.t.Helper()
	current := w.kernel.diff(w.want()) == nil
	w.model, w.behind = Model{}, dataplane.Change{}
	w.model.Load(w.planner.State())
	found := w.kernel.found(&w.model)
	for i, f := range ipfamily.All { // which Services ask for counters is in no line
		current = current && found[i].Revision.Asked == w.model.Revision(f).Asked
	}
	w.model.AdoptCounting(found)
	stale := w.model.Stale(found)
	if current && stale.Any() || !stale.Any() && !current && !meddled {
		w.t.Fatalf("step %d: stale %v, up to date %v", w.step, stale.Any(), current)
	}
	w.model.Adopt(found, stale)
	if current {
		return
	}
	if meddled { // only who looks at the elements sees what others did to them
		w.correct()
		return
	}
	for i := range found {
		for set := range found[i].Elements { // which is all that anybody reads then
			if !SetID(set).IsContent() {
				continue
			}
			found[i].Elements[set] = slices.DeleteFunc(found[i].Elements[set], func(e Element) bool {
				if SetID(set).IsShared() {
					return !stale.Shared()
				}
				return !stale.Service(e.Service())
			})
		}
	}
	w.must(w.kernel.apply(w.model.Correct(found, stale)))
	w.check()
}

// correct takes the kernel to the state from whatever it holds.
func (w *walk) correct() {
	w.t.Helper()
	before := w.kernel.lines()
	txn := w.model.Correct(w.kernel.found(&w.model), AllStale())
	w.must(w.kernel.apply(txn))
	w.check()
	// What was as it should be was not touched.
	added, replaced, removed := txn.Counts()
	if most := len(before) + len(w.kernel.lines()); txn.Tables[0].Create == nil && added+replaced+removed > most {
		w.t.Fatalf("step %d: %d changes to %d lines", w.step, added+replaced+removed, most)
	}
	if again := w.model.Correct(w.kernel.found(&w.model), AllStale()); !again.Empty() {
		w.t.Fatalf("step %d: a corrected table is corrected again: %+v", w.step, again.Tables)
	} else {
		w.model.Rollback(again)
	}
}

func (k *fakeKernel) lines() []string { return slices.Concat(k[0].lines(), k[1].lines()) }

// meddle does what a foreign hand might, and says whether it did anything.
func (w *walk) meddle() {
	t := &w.kernel[w.world.IntN(2)]
	for range 1 + w.world.IntN(3) {
		set := SetID(w.world.IntN(int(NumSets)))
		for key, e := range t.sets[set] {
			switch {
			case set == Affinity:
			case w.world.Yes():
				delete(t.sets[set], key)
			case set == Pools:
				e.setPool(NoLocalEndpoints.id(), e.ID())
				t.sets[set][key] = e
			case e.DataLen > 0:
				e.data[0]++
				t.sets[set][key] = e
			case set == RevisionSet, set == DigestSet:
				e.Comment = "nothing of ours"
				t.sets[set][key] = e
			}
			break
		}
	}
	if w.world.IntN(4) == 0 {
		e := kindElement(Addresses, addr("192.0.2.77"), 1)
		w.kernel[0].sets[Addresses][string(e.Key())] = e
	}
}

// FuzzRestartAndRepair walks through random changes, refusals, restarts and foreign edits. Whatever happened, the
// kernel ends with what one transaction for the state alone would leave, and nothing is written when that is there
// already.
func FuzzRestartAndRepair(f *testing.F) {
	for seed := range seeds() {
		f.Add(seed, uint8(40), uint8(seed%5))
	}
	f.Fuzz(func(t *testing.T, seed uint64, steps, limit uint8) {
		w := &walk{t: t, world: newCluster(rand.New(rand.NewPCG(seed, 2))), snap: snapshot.New(),
			planner: dataplane.NewPlanner(testConfig), kernel: newFakeKernel()}
		w.behind, _ = w.planner.Apply(w.snap, w.snap.Apply(w.world.Host()))
		w.change(false, int(limit))
		for w.step = range int(steps) {
			change, _ := w.planner.Apply(w.snap, w.snap.Apply(w.world.Step()))
			w.behind.Globals = w.behind.Globals || change.Globals
			w.behind.Services = slices.Compact(slices.SortedFunc(slices.Values(slices.Concat(w.behind.Services,
				change.Services)),
				snapshot.Name.Compare))
			switch w.world.IntN(8) {
			case 0:
				w.change(true, int(limit))
			case 1:
				w.restart(false)
			case 2:
				w.change(false, 0)
				w.restart(false)
			case 3:
				w.meddle()
				w.restart(true)
			case 4:
				w.meddle()
				w.learnNothing()
				w.model.Plan(w.planner.State(), w.behind, 0)
				w.behind = dataplane.Change{}
				w.correct()
			case 5:
				w.change(false, int(limit))
			default:
				w.change(false, 0)
			}
		}
	})
}

// learnNothing stands for a reader that found the kernel to hold something else: what the model plans then is
// worthless, but what it corrects is not.
func (w *walk) learnNothing() {
	for _, s := range w.model.services {
		s.slotsUnknown = false
	}
}

// TestAdoptForgetsSlots: a process whose first transaction failed, and whose cluster then went back to what the kernel
// holds, must not take the slots it planned for those in the kernel.
func TestAdoptForgetsSlots(t *testing.T) {
	change := dataplane.Change{Services: []snapshot.Name{webService().Name}}
	state := stateOf(webService(), 1, 2, 3)
	kernel := newFakeKernel()
	var before, m Model
	if err := kernel.apply(before.Plan(state, dataplane.Change{}, 0)); err != nil {
		t.Fatal(err)
	}
	m.Load(stateOf(webService(), 1, 3))
	m.Rollback(m.Correct(kernel.found(&m), AllStale()))
	m.Load(state)
	found := kernel.found(&m)
	stale := m.Stale(found)
	if stale.Any() {
		t.Fatal("what is up to date is called stale")
	}
	m.Adopt(found, stale)
	unread := m.UnknownSlots(change.Services)
	for _, x := range unread {
		for i := range x.Keys {
			x.Keys[i] = kernel[0].sets[x.Keys[i].Set][string(x.Keys[i].Key())]
		}
	}
	if len(unread) == 0 || !m.SetSlots(unread) {
		t.Error("what the kernel holds is taken for others' work")
	}
}

// TestDigests says that a digest follows what a table holds, in whatever order it came to hold it.
func TestDigests(t *testing.T) {
	change := dataplane.Change{Services: []snapshot.Name{webService().Name}}
	digest := func(steps ...[]int) Digests {
		var m Model
		for _, endpoints := range steps {
			m.Plan(stateOf(webService(), endpoints...), change, 0)
		}
		return m.tables[0].digests
	}
	if digest([]int{1, 2, 3}) != digest([]int{2}, []int{2, 3, 4}, []int{3, 2, 1}) {
		t.Error("two ways to the same endpoints give two digests")
	}
	if digest([]int{1, 2, 3}) == digest([]int{1, 2, 4}) {
		t.Error("other endpoints give the same digest")
	}
	r := Revision{7, digest([]int{1})[sharedBucket], CountFrontends.String(), Digest{}}
	if got := RevisionOf([]Element{r.element()}); got != r {
		t.Errorf("revision %v is read as %v", r, got)
	}
	if got := RevisionOf([]Element{r.element(), r.element()}); got != (Revision{}) {
		t.Errorf("two revisions are read as %v", got)
	}
}
