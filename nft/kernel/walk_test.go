package kernel

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Each walk has walkLength steps at most: another seed gives another kind of process, so many short ones see more
// than one long one.
const (
	walkLength  = 500
	walkDefault = 1000
)

var walks = testkit.NewWalks("TestWalk", "walk", walkLength)

// TestWalk lives through what a backend can meet with: objects come and go, the process is restarted and killed, the
// wire breaks, the kernel refuses, others write to our tables. After each step the kernel must hold what the objects
// ask for, and nothing else. The walks run at the same time: the kernel makes those wait whom it refuses something.
func TestWalk(t *testing.T) {
	walks.Run(t, walkDefault, true, walkOnce, 20*walkLength, walkMustSee()...)
}

// walker is one walk.
type walker struct {
	*testkit.Walk
	t     *testing.T
	host  *lab.Host
	world *walkWorld
	burst bool

	// This is the process: what it was told to be, and what it knows.
	cfg     dataplane.Config
	options Options
	snap    *snapshot.Snapshot
	planner *dataplane.Planner
	backend *Backend
	faults  *faults
	// acked is what the backend was last asked for with success.
	acked dataplane.State
	// adopted says that it took what it found in the kernel for what it should be, since all was last seen to be right.
	adopted bool

	// other is what foreign hands write by, eye what the checks read by.
	other, eye *Conn
	// meddled says that others may have changed our tables since they were seen to be right.
	meddled bool
	// refusable says that the kernel may refuse what it is asked for.
	refusable bool
	// renewed says that tables may have been made anew since then.
	renewed bool
	handles ipfamily.Per[uint64]
	// members are the endpoints of sticky pools, clients the affinity entries that must be there.
	members ipfamily.Per[map[member]bool]
	clients ipfamily.Per[map[nft.Element]bool]
	nextIP  int
	// saved is a ruleset that nft listed.
	saved      string
	nftProgram labtest.Nft
	watch      *observer
	// usage is what TestLeaks measures.
	usage func() usage
}

// walkOnce takes one walk.
func walkOnce(t *testing.T, walk *testkit.Walk) {
	w := newWalker(t, walk)
	for _, step := range w.Steps {
		w.Begin(step)
		w.faults.random = w.Rand
		k := w.choose()
		w.Count[k.name]++
		w.Note("%s", k.name)
		w.take(k)
		w.watch.check(w)
	}
	w.end()
}

// take takes one step.
func (w *walker) take(e event) {
	defer time.AfterFunc(5*time.Minute, w.hang).Stop()
	forking.RLock()
	defer forking.RUnlock()
	e.do(w)
}

func newWalker(t *testing.T, walk *testkit.Walk) *walker {
	w := &walker{Walk: walk, t: t, host: labtest.NewHost(t, labtest.NewNet(t), "node"),
		world: newWalkWorld(walk.Rand), faults: newFaults()}
	for i := range w.clients {
		w.clients[i] = map[nft.Element]bool{}
	}
	t.Cleanup(w.forget)
	for _, c := range []**Conn{&w.other, &w.eye} {
		w.must(w.host.Do(func() (err error) {
			*c, err = Dial(0)
			return err
		}))
	}
	w.faults.meddle = w.meddleOnce
	w.begin(w.world.snapshot(w.Rand))
	if w.Seed%4 == 1 {
		w.watch = watchOver(w)
	}
	w.settle()
	return w
}

// close ends the process, and lets go of the socket it would hand on.
func (w *walker) close() {
	if w.backend != nil {
		w.backend.Close()
	}
	if w.options.Socket != nil {
		w.options.Socket.Close()
	}
	w.watch.stop()
}

// forget ends the walk. A test that has ended holds on to what cleaned it up, so the walker forgets everything: a
// million steps are 2,000 tests.
func (w *walker) forget() {
	w.close()
	for _, c := range []*Conn{w.other, w.eye} {
		if c != nil {
			c.Close()
		}
	}
	*w = walker{}
}

// end looks whether all can be taken away.
func (w *walker) end() {
	for name, n := range w.faults.struck {
		w.Count["fault: "+name] += n
	}
	w.must(w.backend.Remove())
	for _, f := range ipfamily.All {
		if info, err := w.eye.table(f); err != nil || info.exists {
			w.fail("after Remove: %+v, %v", info, err)
		}
	}
}

// fail ends the walk.
func (w *walker) fail(format string, args ...any) {
	w.t.Helper()
	w.Fail(format, args...)
	if w.Steps == nil { // it is none of the walks
		w.t.Fatal(w.Story(w.t.Name()))
	}
	w.Stop()
}

func (w *walker) must(err error) {
	w.t.Helper()
	if err != nil {
		w.fail("%v", err)
	}
}

// hang tells of a step that does not end.
func (w *walker) hang() {
	stacks := make([]byte, 1<<20)
	fmt.Fprintf(os.Stderr, "a step hangs\n%s\n%s\n", w.Story("the same flags"), stacks[:runtime.Stack(stacks, true)])
	os.Exit(1)
}

// begin starts a process that has seen a snapshot.
func (w *walker) begin(s *snapshot.Snapshot) {
	if w.cfg.NodeName == "" || w.IntN(3) == 0 {
		w.cfg = anyConfig(w.Rand)
	}
	w.snap, w.planner, w.acked, w.adopted = s, dataplane.NewPlanner(w.cfg), dataplane.State{}, false
	w.planner.Apply(w.snap, snapshot.Change{})
	w.must(w.host.Do(func() (err error) {
		w.backend, err = Open(w.options)
		return err
	}))
	w.backend.dial, w.backend.dumpMost = w.dial, oneOf(w.Rand, dumpMost, 200)
	w.wrap()
	for _, f := range ipfamily.All {
		info, err := w.eye.table(f)
		w.must(err)
		if w.backend.Owns() && info.exists && info.flags&tablePersist == 0 {
			w.renewed = true // a table that nobody wished to own cannot be claimed
		}
	}
	w.Note("begins with %+v, owns %v", w.options, w.backend.Owns())
}

// anyConfig gives what a process may be told to be.
func anyConfig(r *rand.Rand) dataplane.Config {
	cfg := configs[oneOf(r, "cluster CIDR", "edge", "unknown", "masquerade all", "bridge", "prefix")]
	if r.IntN(4) == 0 {
		cfg.DetectLocal = dataplane.DetectLocal{Mode: dataplane.DetectNodeCIDR}
	}
	cfg.LocalhostNodePorts = r.IntN(2) == 0
	cfg.IPVS.Mode = oneOf(r, dataplane.IPVSNever, dataplane.IPVSAuto)
	return cfg
}

// dial is how the backend opens sockets.
func (w *walker) dial(netns int) (*Conn, error) {
	if err := w.faults.call(); err != nil {
		return nil, err
	}
	if w.faults.dials > 0 {
		w.faults.dials--
		w.faults.harm++
		w.faults.struck["dial fails"]++
		return nil, errors.New("no more sockets")
	}
	c, err := Dial(netns)
	if err == nil {
		c.Wire = &walkWire{Wire: c.Wire, f: w.faults}
	}
	return c, err
}

// wrap puts the faults into the wires the backend has.
func (w *walker) wrap() {
	for _, c := range []*Conn{w.backend.conn, w.backend.reader, w.backend.sweeper} {
		if _, ok := c.Wire.(*walkWire); !ok {
			c.Wire = &walkWire{Wire: c.Wire, f: w.faults}
		}
	}
}

// see gives the process a delta.
func (w *walker) see(d snapshot.Delta) { w.planner.Apply(w.snap, w.snap.Apply(d)) }

// change is what differs in a state from what the backend was last asked for with success.
func (w *walker) change(want *dataplane.State) (c dataplane.Change) {
	for n, s := range want.Services {
		if w.acked.Services[n] != s {
			c.Services = append(c.Services, n)
		}
	}
	for n := range w.acked.Services {
		if want.Services[n] == nil {
			c.Services = append(c.Services, n)
		}
	}
	if w.IntN(8) == 0 { // it may name those that did not change, and who was never there
		c.Services = append(c.Services, some(w.Rand, slices.Collect(maps.Keys(want.Services))...)...)
		c.Services = append(c.Services, snapshot.Name{Namespace: "default", Name: "nobody"})
	}
	slices.SortFunc(c.Services, snapshot.Name.Compare)
	c.Services = slices.Compact(c.Services)
	a, b := w.acked, *want
	c.Globals = a.Services == nil || a.Pods4 != b.Pods4 || a.Pods6 != b.Pods6 || a.MasqueradeAll != b.MasqueradeAll ||
		a.PingAddrs != b.PingAddrs ||
		a.LocalhostNodePorts != b.LocalhostNodePorts || !slices.Equal(a.ServiceCIDRs, b.ServiceCIDRs) ||
		!slices.Equal(a.Settings, b.Settings)
	return c
}

// apply asks the backend for a state once. After an error it looks at what is in the kernel.
func (w *walker) apply(want *dataplane.State) error {
	w.t.Helper()
	var before content
	risky, meddled, harm, first := w.faults.risky(), w.meddled, w.faults.harm, w.acked.Services == nil
	change := w.change(want)
	w.watch.expect(w, want, change)
	mayFail := risky || w.refusable
	known := mayFail
	if known {
		before = w.content()
	}
	r, err := w.backend.Apply(want, change)
	for part := 1; err == nil && len(r.Left) > 0; part++ { // what is in stays in
		// A burst by small datagrams has hundreds of parts. To read all before each would take a fifth of a long walk.
		if known = mayFail && (part < 4 || w.IntN(16) == 0 || !walks.Long(walkDefault)); known {
			before = w.content()
		}
		w.Count["parts"]++
		w.renewed = w.renewed || r.Full
		w.acknowledged() // a port that moves is gone for a moment
		w.ack(want, r.Left)
		var more dataplane.Receipt
		more, err = w.backend.Apply(want, dataplane.Change{})
		r = r.Then(more)
	}
	w.wrap()
	// A backend that has no room for what mends a table makes it anew.
	w.renewed = w.renewed || w.meddled || w.faults.lies > 0 || w.backend.maxElements > 0
	if err == nil {
		w.Note("  applied %d Services: %d added, %d replaced, %d removed, full %v, adopted %v",
			len(change.Services), r.Added, r.Replaced,
			r.Removed, r.Full, r.Adopted)
		if r.Full && !w.renewed && !first {
			w.Count["made anew for larger sets"]++
			w.renewed = true
		}
		w.adopted = w.adopted || r.Adopted
		w.ack(want, nil)
		w.acknowledged()
		return nil
	}
	w.Note("  %v", err)
	var refused *dataplane.Refused
	small := w.faults.most > 0 && errors.Is(err, unix.EMSGSIZE)
	w.renewed = w.renewed || small // what could not be mended will be made anew
	switch isRefusal := errors.As(err, &refused); {
	case isRefusal && !w.refusable && w.faults.lies < 2: // the second lie is about whom to blame
		w.fail("Services are refused that did no wrong: %v", err)
	case !isRefusal && !small && (!risky || harm == w.faults.harm):
		w.fail("Apply failed, and nothing was wrong: %v", err)
	}
	if known && !meddled && !w.meddled {
		w.unchanged(before, want, !errors.As(err, &refused) || w.faults.most > 0)
	}
	return err
}

// ack records what the backend was asked for with success. What it left is as it was before.
func (w *walker) ack(want *dataplane.State, left []snapshot.Name) {
	before := w.acked.Services
	w.acked = *want
	w.acked.Services = maps.Clone(want.Services)
	for _, n := range left {
		if w.acked.Services[n] = before[n]; before[n] == nil {
			delete(w.acked.Services, n)
		}
	}
}

// unchanged looks at the kernel after an Apply that failed.
func (w *walker) unchanged(before content, want *dataplane.State, unclear bool) {
	w.t.Helper()
	now := w.content()
	rest := now.withoutChains(&before)
	switch d := before.difference(&now); {
	case d == "":
		w.Count["failed: all as before"]++
	case w.backend.syncState != stateInSync && before.difference(&rest) == "":
		w.Count["failed: chains of the first part stay"]++
	case unclear && lacking(&now, nft.List(want)) == "":
		w.Count["failed: all in"]++
	case unclear && (w.faults.steps > 0 || w.faults.most > 0 || w.backend.maxElements > 0):
		w.Count["failed: half in"]++
		if bad := now.incomplete(); bad != "" && before.incomplete() == "" {
			w.fail("a transaction stopped midway, and %s", bad)
		}
		w.renewed = true
	default:
		w.fail("Apply failed, and the kernel holds something else:\n%s", d)
	}
}

// maxTries bounds how often an Apply or a Check is tried: each fault makes one of them fail, and there are not many.
const maxTries = 30

// settle brings the kernel to what the process wants, as its loop would, and looks at everything.
func (w *walker) settle() {
	w.t.Helper()
	for round := 1; ; round++ {
		w.applyAll()
		found := w.look()
		if found == nil {
			break
		}
		w.Count["found and repaired"]++
		if !w.meddled && !w.let(found) || round == maxTries {
			w.fail("found what nobody did: %q", found)
		}
	}
	w.faults.disarm()
	askForRoom(w.backend.conn)
	w.verify()
}

// let says whether what was found is only that the backend lost the socket that owned the tables.
func (w *walker) let(found []string) bool {
	return w.faults.harm > 0 && w.options.Own && w.options.Socket == nil &&
		!slices.ContainsFunc(found, func(s string) bool {
			return !strings.Contains(s, "the table's owner is netlink port 0")
		})
}

// unseen says how many transactions were written since the backend looked around, by others.
func (w *walker) unseen() uint32 {
	generation, err := w.eye.Generation()
	w.must(err)
	if w.backend.syncState != stateInSync {
		return 0
	}
	return generation - w.backend.generation
}

// look has the backend look around until it is through, or finds something.
func (w *walker) look() []string {
	w.t.Helper()
	for failed, n := 0, 0; ; n++ {
		found, again, err := w.backend.Check()
		w.wrap()
		if err != nil {
			w.Note("  check: %v", err)
		}
		switch {
		case err != nil && failed == w.faults.harm: // each trouble makes one of them fail, perhaps not the one it strikes in
			w.fail("Check failed, and nothing was wrong: %v", err)
		case err != nil:
			failed++
		case found != nil:
			w.Note("  found %q", found[:min(len(found), 3)])
			return found
		case again == 0 && w.backend.sweep.left == ipfamily.Per[int]{} && w.unseen() == 0:
			return nil
		case again == 0: // as if it were later
			clear(w.backend.sweep.due[:])
		case n == 100000:
			w.fail("Check never ends")
		}
	}
}
