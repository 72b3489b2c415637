package kernel

import (
	"errors"
	"maps"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// event is something that can happen in a step.
type event struct {
	name   string
	weight int
	do     func(*walker)
}

// events are chosen by their weights.
var events = []event{
	{"change", 600, func(w *walker) {
		w.see(w.changes(1))
		w.settle()
	}},
	{"many changes at once", 40, func(w *walker) {
		w.see(w.changes(2 + w.IntN(12)))
		w.settle()
	}},
	{"outage", 40, (*walker).outage},
	{"relist", 40, (*walker).relist},
	{"restart", 40, (*walker).restart},
	{"restart after changes", 30, func(w *walker) {
		w.changes(1 + w.IntN(3)) // which nobody sees
		w.restart()
	}},
	{"faults", 160, (*walker).trouble},
	{"faults in a restart", 40, func(w *walker) {
		w.reopen()
		w.trouble()
	}},
	{"small datagrams", 40, (*walker).small},
	{"kill", 60, (*walker).kill},
	{"foreign hands", 80, (*walker).foreign},
	{"nft", 4, (*walker).nft},
	{"other tables", 20, (*walker).others},
	{"poison", 40, (*walker).poison},
	{"clients", 60, func(w *walker) {
		w.remember()
		w.settle()
	}},
	{"clients of what goes", 30, func(w *walker) {
		w.remember()
		w.see(w.changes(1 + w.IntN(4)))
		if w.IntN(2) == 0 {
			w.settle()
			return
		}
		w.applyAll() // and the process ends before it has looked after them
		w.restart()
	}},
	{"burst", 6, (*walker).bursts},
	{"other config", 10, (*walker).reconfigure},
	{"remove", 4, (*walker).remove},
	{"another process", 10, (*walker).another},
}

// walkMustSee names all that a long run must have had in it.
func walkMustSee() (names []string) {
	for _, k := range events {
		names = append(names, k.name)
	}
	for _, e := range edits {
		names = append(names, "foreign: "+e.name)
	}
	for v := range numVerbs {
		for i := range numIllnesses {
			if i != tooLong || v == verbBatch {
				names = append(names, "fault: "+verbNames[v]+" "+illnessNames[i])
			}
		}
	}
	return append(names, "fault: dial fails", "contended keys", "found and repaired", "refused", "refused in steps",
		"clients", "tables made anew",
		"failed: all as before", "failed: all in", "failed: half in", "large sets seen", "killed", "owned by a held socket",
		"owned by a socket of its own", "orphaned", "owned, and others tried", "adopted")
}

func (w *walker) choose() event {
	all := 0
	for _, k := range events {
		all += k.weight
	}
	n := w.IntN(all)
	for _, k := range events {
		if n -= k.weight; n < 0 {
			return k
		}
	}
	panic("no event")
}

// changes does some things to the cluster.
func (w *walker) changes(n int) (d snapshot.Delta) {
	for range n {
		what, one := w.world.change(w.Rand)
		w.Note("  %s", what)
		d.Merge(one)
	}
	if w.burst && w.IntN(4) == 0 {
		d.Merge(w.toggleBurst())
	}
	return d
}

// applyAll applies until it takes. The cluster does not wait for that.
func (w *walker) applyAll() {
	w.t.Helper()
	for try := 1; w.apply(w.planner.State()) != nil; try++ {
		if try == maxTries {
			w.fail("tried %d times", try)
		}
		if w.IntN(3) == 0 {
			w.see(w.changes(1))
		}
	}
}

// outage lets changes pile up before the backend is told of any.
func (w *walker) outage() {
	for range 2 + w.IntN(6) {
		w.see(w.changes(1 + w.IntN(3)))
	}
	w.settle()
}

// relist misses changes and then sees everything again.
func (w *walker) relist() {
	w.changes(w.IntN(8)) // which nobody sees
	w.see(w.world.relist(w.Rand, w.snap))
	w.settle()
}

// reopen ends the process and starts another, that has not done anything yet.
func (w *walker) reopen() {
	w.t.Helper()
	w.must(w.backend.Close())
	if w.options.Socket != nil && w.IntN(2) == 0 {
		w.must(w.options.Socket.Close())
		w.options.Socket = nil
	}
	if w.options.Socket == nil {
		w.options = Options{Own: w.IntN(3) > 0}
		if w.options.Own && w.IntN(2) == 0 {
			w.must(w.host.Do(func() (err error) {
				w.options.Socket, err = OpenSocket()
				return err
			}))
		}
	}
	if !w.owned() {
		w.Count["orphaned"]++
		for range w.IntN(6) / 3 {
			w.meddleOnce()
		}
	}
	w.begin(w.world.snapshot(w.Rand))
}

// restart is reopen, and lets the process do its work.
func (w *walker) restart() {
	w.t.Helper()
	w.reopen()
	generation, err := w.eye.Generation()
	w.must(err)
	w.settle()
	if after, err := w.eye.Generation(); err == nil && after == generation {
		w.Count["adopted"]++
	}
	switch {
	case w.owned() && w.options.Socket != nil:
		w.Count["owned by a held socket"]++
	case w.owned():
		w.Count["owned by a socket of its own"]++
	}
}

// owned says whether one of our tables belongs to somebody.
func (w *walker) owned() bool {
	for _, f := range ipfamily.All {
		info, err := w.eye.table(f)
		w.must(err)
		if info.owner != 0 {
			return true
		}
	}
	return false
}

// trouble breaks the wires, in the middle of something else.
func (w *walker) trouble() {
	w.see(w.changes(w.IntN(3)))
	if w.IntN(64) == 0 {
		w.see(w.toggleBurst())
	}
	if w.IntN(2) == 0 && !w.meddled {
		w.remember()
	}
	owned := w.owned()
	switch w.IntN(4) {
	case 0:
		if !owned {
			w.meddleOnce()
		}
	case 1:
		w.othersTables() // so that everything is looked at
	}
	for range 1 + w.IntN(3) {
		w.Note("  %s", w.faults.arm(w.Rand, owned))
	}
	if w.IntN(4) == 0 {
		w.faults.dials = 1 + w.IntN(2)
		w.Note("  %d dials fail", w.faults.dials)
	}
	w.settle()
}

// small lets only short datagrams through.
func (w *walker) small() {
	w.see(w.changes(1 + w.IntN(10)))
	if w.IntN(16) == 0 {
		w.see(w.toggleBurst())
	}
	w.faults.most = oneOf(w.Rand, 600, 2000, 8000, 30000, 100000)
	w.Note("  datagrams of %d bytes", w.faults.most)
	askForRoom(w.backend.conn)
	if w.IntN(3) == 0 {
		w.Note("  %s", w.faults.arm(w.Rand, w.owned()))
	}
	for try := 0; try < 3 && w.apply(w.planner.State()) != nil; try++ {
	}
	harm := w.faults.harm
	w.faults.disarm()
	w.faults.harm = harm // a socket that was lost after the commit is found out only now
	askForRoom(w.backend.conn)
	w.backend.maxElements = 0
	w.settle()
}

// kill ends the process somewhere in the middle.
func (w *walker) kill() {
	w.remember()
	w.see(w.changes(1 + w.IntN(6)))
	if w.IntN(4) == 0 {
		w.reopen()
	}
	if w.IntN(4) == 0 {
		w.faults.most = oneOf(w.Rand, 2000, 8000, 30000)
		askForRoom(w.backend.conn)
	}
	w.faults.left = oneOf(w.Rand, w.IntN(6), w.IntN(60))
	w.Note("  killed after %d calls, datagrams of %d bytes", w.faults.left, w.faults.most)
	if w.apply(w.planner.State()) == nil {
		for range 10 {
			if _, _, err := w.backend.Check(); err != nil {
				break
			}
		}
	}
	if w.faults.dead {
		w.Count["killed"]++
	}
	w.faults.disarm()
	w.restart()
}

// foreign lets others write to our tables.
func (w *walker) foreign() {
	if w.owned() {
		w.Count["owned, and others tried"]++
		w.mustNotChange()
		w.settle()
		return
	}
	for range 1 + w.IntN(2) {
		w.meddleOnce()
	}
	switch w.IntN(3) {
	case 0:
		w.see(w.changes(1))
	case 1: // whatever they did, it is seen, if it left a trace
		found := w.look()
		c := w.content()
		if d := lacking(&c, nft.List(w.planner.State())); found == nil && d != "" {
			w.fail("nothing was found:\n%s", d)
		}
	}
	w.settle()
}

// nft has the program of that name write to our tables: it takes them away, or puts back what it once listed.
func (w *walker) nft() {
	if w.saved == "" || w.IntN(2) == 0 {
		w.saved = w.run("", "list", "ruleset")
		w.see(w.changes(1))
		w.settle()
		return
	}
	input := oneOf(w.Rand, "", w.saved, w.saved)
	if !w.nftProgram.LoadsWideUpdates() {
		input = ""
	}
	w.watch.pause()
	w.run("flush ruleset\n"+input, "-f", "-")
	w.saved, w.meddled = "", !w.owned()
	w.settle()
}

// forking keeps programs from being started while others close sockets: for a moment the child has all of them open,
// and what a socket owned would still be owned.
var forking sync.RWMutex

// run runs the newest nft there is: the oldest cannot load all it lists. It may fail where tables are owned.
func (w *walker) run(input string, args ...string) string {
	w.t.Helper()
	forking.RUnlock()
	forking.Lock()
	defer forking.RLock()
	defer forking.Unlock()
	if w.nftProgram.Path == "" {
		list := labtest.Nfts(w.t)
		w.nftProgram = list[len(list)-1]
	}
	out, err := w.host.RunInput(input, w.nftProgram.Path, args...)
	if err != nil && !w.owned() {
		w.fail("%v: %s", err, out)
	}
	return out
}

// others lets others write to tables of theirs, which is no business of ours.
func (w *walker) others() {
	w.othersTables()
	generation, err := w.eye.Generation()
	w.must(err)
	w.settle()
	if now, err := w.eye.Generation(); err != nil || now != generation {
		w.fail("another table is no reason to write: %v", err)
	}
}

// poison asks for what the kernel refuses.
func (w *walker) poison() {
	w.see(w.changes(w.IntN(3)))
	switch {
	case w.IntN(3) == 0:
		w.reopen()
	case !w.owned() && w.IntN(3) == 0:
		w.meddleOnce()
	}
	bad := w.poisoned()
	if len(bad) == 0 {
		w.settle()
		return
	}
	want := w.without(bad, poison)
	w.Note("  poison in %v", bad)
	w.refusable = true
	err := w.apply(want)
	w.refusable = false
	if err == nil && w.meddled { // others took away what the poison is to meet, and nobody has looked since
		if w.look() == nil {
			w.fail("poison, no refusal, and nothing was found")
		}
		w.settle()
		return
	}
	var refused *dataplane.Refused
	if !errors.As(err, &refused) {
		w.fail("poison, and no refusal: %v", err)
	}
	w.Count["refused"]++
	// There is only so much room for answers: of very many, not all are named at once.
	few := len(bad) <= 8 && w.backend.maxElements == 0
	if got := sortedKeys(refused.Services); !slices.Equal(got, bad) && (few || !within(got, bad)) {
		w.fail("%v are refused; poisoned were %v", got, bad)
	}
	if len(bad) > 8 {
		w.settle()
		return
	}
	if w.IntN(3) == 0 {
		w.poisonInSteps(bad)
	}
	left := w.without(bad, func(s *dataplane.Service) *dataplane.Service {
		if w.IntN(3) == 0 {
			return nil
		}
		return w.acked.Services[s.Name].Within(s)
	})
	err = w.apply(left)
	// What others changed before this process began, the revision does not tell: if all else was as it should be, it was
	// adopted. The look that follows must find what is wrong.
	if err == nil && w.adopted && w.meddled && w.look() != nil {
		err = w.apply(left)
	}
	if err != nil {
		w.fail("refused without what was refused: %v", err)
	}
	c := w.content()
	if d := lacking(&c, nft.List(left)); d != "" {
		w.fail("without what was refused:\n%s", d)
	}
	w.settle()
}

// poisonInSteps asks for the same once more, in short datagrams. Those of one step are named at a time.
func (w *walker) poisonInSteps(bad []snapshot.Name) {
	w.Note("  in steps")
	w.faults.most = oneOf(w.Rand, 2000, 8000, 30000)
	askForRoom(w.backend.conn)
	for left := bad; ; {
		w.refusable = true
		err := w.apply(w.without(left, poison))
		w.refusable = false
		if err == nil && len(left) == 0 {
			break
		}
		if errors.Is(err, unix.EMSGSIZE) { // not even the structure fits
			break
		}
		var refused *dataplane.Refused
		if !errors.As(err, &refused) || !within(sortedKeys(refused.Services), left) {
			w.fail("poisoned were %v, and it says %v", left, err)
		}
		w.Count["refused in steps"]++
		left = slices.DeleteFunc(slices.Clone(left), func(n snapshot.Name) bool { return refused.Services[n] != nil })
	}
	w.faults.disarm()
	askForRoom(w.backend.conn)
	w.backend.maxElements = 0
}

// within says whether all of some names are among others.
func within(names, in []snapshot.Name) bool {
	return len(names) > 0 && !slices.ContainsFunc(names, func(n snapshot.Name) bool { return !slices.Contains(in, n) })
}

// poisoned chooses some Services that can be poisoned.
func (w *walker) poisoned() (names []snapshot.Name) {
	st := w.planner.State()
	for _, n := range slices.SortedFunc(maps.Keys(st.Services), snapshot.Name.Compare) {
		if leads(st.Services[n]) && (names == nil || w.IntN(4) == 0) && w.IntN(3) > 0 {
			names = append(names, n)
		}
	}
	return names
}

// without gives the state with others in the place of some Services; nil for none.
func (w *walker) without(names []snapshot.Name, other func(*dataplane.Service) *dataplane.Service) *dataplane.State {
	st := *w.planner.State()
	st.Services = maps.Clone(st.Services)
	for _, n := range names {
		if s := other(st.Services[n]); s != nil {
			st.Services[n] = s
		} else {
			delete(st.Services, n)
		}
	}
	return &st
}

// bursts lets a few hundred Services come or go.
func (w *walker) bursts() {
	d := w.changes(w.IntN(6))
	d.Merge(w.toggleBurst())
	w.see(d)
	w.settle()
}

func (w *walker) toggleBurst() snapshot.Delta {
	w.burst = !w.burst
	w.Note("  burst %v", w.burst)
	return w.world.burst(w.burst)
}

// reconfigure has the process go by another configuration.
func (w *walker) reconfigure() {
	w.cfg = anyConfig(w.Rand)
	w.planner = dataplane.NewPlanner(w.cfg)
	w.planner.Apply(w.snap, snapshot.Change{})
	w.settle()
}

// remove takes everything away.
func (w *walker) remove() {
	w.watch.pause()
	w.must(w.backend.Remove())
	w.renewed, w.acked = true, dataplane.State{}
	w.settle()
}

// another starts a second process beside the first, that may not own what the first owns.
func (w *walker) another() {
	if !w.owned() {
		w.settle()
		return
	}
	before := w.content()
	var b *Backend
	w.must(w.host.Do(func() (err error) {
		b, err = Open(Options{Own: w.IntN(2) == 0})
		return err
	}))
	defer b.Close()
	var owned *Owned
	if _, err := b.ApplyAll(w.planner.State(), w.change(w.planner.State())); !errors.As(err, &owned) {
		w.fail("another process may write: %v", err)
	}
	if err := b.Remove(); !errors.As(err, &owned) {
		w.fail("another process may remove: %v", err)
	}
	now := w.content()
	if d := before.difference(&now); d != "" {
		w.fail("another process changed:\n%s", d)
	}
	w.settle()
}
