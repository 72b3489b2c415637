package nft

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// walk is a proxy at work: restarted, refused by its kernel, and with others' hands in its tables.
type walk struct {
	t       *testing.T
	world   world
	snap    *snapshot.Snapshot
	planner *dataplane.Planner
	model   Model
	kernel  *fakeKernel
	minSize uint32
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
	w.must(k.apply(fresh.Plan(w.planner.State(), dataplane.Change{})))
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
	unread := w.model.Unread(names)
	for _, x := range unread {
		for i := range x.Keys {
			e := &x.Keys[i]
			*e = w.kernel[x.Family.index()].sets[e.Set][string(e.Key())]
		}
	}
	if !w.model.Learn(unread) {
		w.t.Fatalf("step %d: the kernel does not hold the slots it should", w.step)
	}
}

// change plans and writes what is behind. If refuse is set, the kernel does not take it.
func (w *walk) change(refuse, inSteps bool) {
	w.t.Helper()
	w.learn(w.behind.Services)
	before := *w.kernel
	txn := w.model.Plan(w.planner.State(), w.behind)
	if refuse {
		w.model.Rollback(txn)
		return
	}
	w.behind = dataplane.Change{}
	if !inSteps {
		w.must(w.kernel.apply(txn))
		w.check()
		return
	}
	complete := before.complete()
	w.model.MakeRoom(txn)
	steps := txn.Split(1 + w.world.r.IntN(8))
	for i, step := range steps {
		if step.Empty() {
			continue
		}
		w.kernel[0].midway, w.kernel[1].midway = i < len(steps)-1, i < len(steps)-1
		if err := w.kernel.apply(step); err != nil {
			w.t.Fatalf("step %d, part %d: %v", w.step, i, err)
		}
		if bad := w.kernel.incomplete(); bad != "" && complete {
			w.t.Fatalf("step %d, part %d: %s", w.step, i, bad)
		}
	}
	w.check()
}

// complete says whether incomplete finds nothing.
func (k *fakeKernel) complete() bool { return k.incomplete() == "" }

// incomplete names a frontend that leads to an endpoint that is not there.
func (k *fakeKernel) incomplete() string {
	for i := range k {
		t := &k[i]
		for set, slots := range map[SetID]SetID{Services: Endpoints, OutsideServices: OutsideEndpoints} {
			for _, e := range t.sets[set] {
				if e.Chain.Kind < numFixedChains {
					continue
				}
				for n := range e.Chain.N {
					slot := e
					slot.addKeyWord(n)
					if _, ok := t.sets[slots][string(slot.Key())]; !ok {
						return fmt.Sprintf("%s: slot %d is not there", e.describe(t.family), n)
					}
				}
			}
		}
	}
	return ""
}

// restart forgets everything but the kernel.
func (w *walk) restart(meddled bool) {
	w.t.Helper()
	current := w.kernel.diff(w.want()) == nil
	w.model, w.behind = Model{minSize: w.minSize, Fixed: w.model.Fixed}, dataplane.Change{}
	w.model.Plan(w.planner.State(), dataplane.Change{})
	if adopted := w.model.Adopt(w.kernel.found(&w.model)); current && !adopted || adopted && !current && !meddled {
		w.t.Fatalf("step %d: adopted %v, up to date %v", w.step, adopted, current)
	}
	if !current { // only who looks at the elements sees what others did to them
		w.correct()
	}
}

// correct takes the kernel to the state from whatever it holds.
func (w *walk) correct() {
	w.t.Helper()
	before := w.kernel.lines()
	txn := w.model.Correct(w.kernel.found(&w.model))
	w.must(w.kernel.apply(txn))
	w.check()
	// What was as it should be was not touched.
	added, replaced, removed := txn.Counts()
	if most := len(before) + len(w.kernel.lines()); txn.Tables[0].Create == nil && added+replaced+removed > most {
		w.t.Fatalf("step %d: %d changes to %d lines", w.step, added+replaced+removed, most)
	}
	if again := w.model.Correct(w.kernel.found(&w.model)); !again.Empty() {
		w.t.Fatalf("step %d: a corrected table is corrected again: %+v", w.step, again.Tables)
	} else {
		w.model.Rollback(again)
	}
}

func (k *fakeKernel) lines() []string { return slices.Concat(k[0].lines(), k[1].lines()) }

// meddle does what a foreign hand might, and says whether it did anything.
func (w *walk) meddle() {
	t := &w.kernel[w.world.r.IntN(2)]
	for range 1 + w.world.r.IntN(3) {
		set := SetID(w.world.r.IntN(int(NumSets)))
		for key, e := range t.sets[set] {
			switch {
			case set == Affinity:
			case w.world.yes():
				delete(t.sets[set], key)
			case set == Services:
				e.Chain = NoLocalEndpoints.id()
				t.sets[set][key] = e
			case e.DataLen > 0:
				e.data[0]++
				t.sets[set][key] = e
			case set == RevisionSet:
				e.Comment = "nothing of ours"
				t.sets[set][key] = e
			}
			break
		}
	}
	if w.world.r.IntN(4) == 0 {
		e := addrElement(ClusterIPs, addr("192.0.2.77"), 1)
		w.kernel[0].sets[ClusterIPs][string(e.Key())] = e
	}
}

// FuzzRestartAndRepair walks through random changes, refusals, restarts and foreign edits. Whatever happened, the kernel ends
// with what one transaction for the state alone would leave, and nothing is written when that is there already.
func FuzzRestartAndRepair(f *testing.F) {
	for seed := range uint64(60) {
		f.Add(seed, uint8(40), uint8(3*seed))
	}
	f.Fuzz(func(t *testing.T, seed uint64, steps, minSize uint8) {
		w := &walk{t: t, world: world{rand.New(rand.NewPCG(seed, 2))}, snap: snapshot.New(), minSize: uint32(minSize),
			planner: dataplane.NewPlanner(testConfig), model: Model{minSize: uint32(minSize), Fixed: seed%2 == 0}, kernel: newFakeKernel()}
		w.kernel[0].fixed, w.kernel[1].fixed = seed%2 == 0, seed%2 == 0
		w.behind, _ = w.planner.Apply(w.snap, w.snap.Apply(w.world.host()))
		w.change(false, true)
		for w.step = range int(steps) {
			change, _ := w.planner.Apply(w.snap, w.snap.Apply(w.world.step()))
			w.behind.Globals = w.behind.Globals || change.Globals
			w.behind.Services = slices.Compact(slices.SortedFunc(slices.Values(slices.Concat(w.behind.Services, change.Services)),
				snapshot.Name.Compare))
			switch w.world.r.IntN(8) {
			case 0:
				w.change(true, false)
			case 1:
				w.restart(false)
			case 2:
				w.change(false, false)
				w.restart(false)
			case 3:
				w.meddle()
				w.restart(true)
			case 4:
				w.meddle()
				w.learnNothing()
				w.model.Plan(w.planner.State(), w.behind)
				w.behind = dataplane.Change{}
				w.correct()
			case 5:
				w.change(false, true)
			default:
				w.change(false, false)
			}
		}
	})
}

// learnNothing stands for a reader that found the kernel to hold something else: what the model plans then is worthless, but
// what it corrects is not.
func (w *walk) learnNothing() {
	for _, s := range w.model.services {
		s.unread = false
	}
}

// TestStepsHaveRoom replaces all of many frontends in steps: for a while a set holds the old and the new ones. Sets that cannot grow
// are made anew; what was planned can still be taken back, and is made anew only if it has to be.
func TestStepsHaveRoom(t *testing.T) {
	ports := func(first int) *dataplane.State {
		s := webService()
		for p := range 680 {
			s.Ports = append(s.Ports, snapshot.Port{Name: fmt.Sprint(p), Protocol: snapshot.TCP, Port: uint16(first + p)})
		}
		return stateOf(s, 1)
	}
	change := dataplane.Change{Services: []snapshot.Name{webService().Name}}
	for _, fixed := range []bool{false, true} {
		m := Model{Fixed: fixed}
		kernel := newFakeKernel()
		kernel[0].fixed, kernel[1].fixed = fixed, fixed
		if err := kernel.apply(m.Plan(ports(1000), dataplane.Change{})); err != nil {
			t.Fatal(err)
		}
		before := m.Revision(IPv4)
		few := m.Plan(ports(1001), change)
		m.MakeRoom(few)
		if tt := few.Tables[0]; tt.Create != nil || len(tt.Resize) > 0 {
			t.Errorf("fixed %v: room is made for what has it: %+v", fixed, tt)
		}
		m.Rollback(few)
		for _, attempt := range []string{"taken back", "written"} {
			txn := m.Plan(ports(5000), change)
			m.MakeRoom(txn)
			if anew := txn.Tables[0].Create != nil; anew != fixed {
				t.Errorf("fixed %v: made anew: %v", fixed, anew)
			}
			if attempt == "taken back" {
				m.Rollback(txn)
				if got := m.Revision(IPv4); got != before {
					t.Errorf("fixed %v: taken back to %v, not %v", fixed, got, before)
				}
				continue
			}
			for i, step := range txn.Split(100) {
				kernel[0].midway = len(step.Tables[0].Add[RevisionSet]) == 0
				if err := kernel.apply(step); err != nil {
					t.Fatalf("fixed %v, part %d: %v", fixed, i, err)
				}
			}
		}
	}
}

// TestStepsRefuseWhatTheWholeDoes: of two elements under one key only one replaces what was there. The other is refused by the kernel,
// in steps as well as at once.
func TestStepsRefuseWhatTheWholeDoes(t *testing.T) {
	key := frontendElement(Services, dataplane.Key{Addr: netip.MustParseAddr("10.96.0.1"), Protocol: snapshot.TCP, Port: 80})
	element := func(chain ChainKind) Element {
		e := key
		e.Chain = chain.id()
		return e
	}
	var txn Txn
	txn.Tables[0].Del[Services] = []Element{element(NoEndpoints)}
	txn.Tables[0].Add[Services] = []Element{element(NoLocalEndpoints), element(NoEndpoints)}
	for n := 1; n < 4; n++ {
		deleted := 0
		for _, step := range txn.Split(n) {
			deleted += len(step.Tables[0].Del[Services])
		}
		if deleted != 1 {
			t.Errorf("in steps of %d, one element is deleted %d times", n, deleted)
		}
	}
}

// TestAdoptForgetsSlots: a process whose first transaction failed, and whose cluster then went back to what the kernel holds, must
// not take the slots it planned for those in the kernel.
func TestAdoptForgetsSlots(t *testing.T) {
	change := dataplane.Change{Services: []snapshot.Name{webService().Name}}
	state := stateOf(webService(), 1, 2, 3)
	kernel := newFakeKernel()
	var before, m Model
	if err := kernel.apply(before.Plan(state, dataplane.Change{})); err != nil {
		t.Fatal(err)
	}
	m.Plan(stateOf(webService(), 1, 3), dataplane.Change{})
	m.Rollback(m.Correct(kernel.found(&m)))
	m.Plan(state, change)
	if !m.Adopt(kernel.found(&m)) {
		t.Fatal("not adopted")
	}
	unread := m.Unread(change.Services)
	for _, x := range unread {
		for i := range x.Keys {
			x.Keys[i] = kernel[0].sets[x.Keys[i].Set][string(x.Keys[i].Key())]
		}
	}
	if len(unread) == 0 || !m.Learn(unread) {
		t.Error("what the kernel holds is taken for others' work")
	}
}

// TestDigests says that a digest follows what a table holds, in whatever order it came to hold it.
func TestDigests(t *testing.T) {
	change := dataplane.Change{Services: []snapshot.Name{webService().Name}}
	digest := func(steps ...[]int) Digest {
		var m Model
		for _, endpoints := range steps {
			m.Plan(stateOf(webService(), endpoints...), change)
		}
		return m.Revision(IPv4).Digest
	}
	if digest([]int{1, 2, 3}) != digest([]int{2}, []int{2, 3, 4}, []int{3, 2, 1}) {
		t.Error("two ways to the same endpoints give two digests")
	}
	if digest([]int{1, 2, 3}) == digest([]int{1, 2, 4}) {
		t.Error("other endpoints give the same digest")
	}
	r := Revision{7, digest([]int{1})}
	if got := RevisionOf([]Element{r.element()}); got != r {
		t.Errorf("revision %v is read as %v", r, got)
	}
	if got := RevisionOf([]Element{r.element(), r.element()}); got != (Revision{}) {
		t.Errorf("two revisions are read as %v", got)
	}
}
