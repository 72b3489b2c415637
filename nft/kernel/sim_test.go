package kernel

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"hash/fnv"
	"log/slog"
	"maps"
	"math/rand/v2"
	"os"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/netlink"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

var (
	simSeed  = flag.Uint64("sim.seed", 0, "simulate only this seed; 0 means several")
	simFirst = flag.Uint64("sim.first", 1, "the first seed, if several are simulated")
	simSteps = flag.Int("sim.steps", 0, "how many steps to simulate in all; 0 means as many as everyday tests should")
	simOnly  = flag.String("sim.only", "", "take only these steps of the seed, as a failure lists them")
)

// A simulation takes simLength steps at most; another seed is another node.
const (
	simLength  = 250
	simDefault = 2500
	simShort   = 1500
)

// TestSimulation runs the whole line in one bubble of time: the loop, the queue, the planner and the backend of a node,
// over a kernel in memory. The cluster changes, watches are late and break, transactions are refused, answers are lost,
// the process is killed between two datagrams and started again. A seed always does the same. A failure names the seed
// and the fewest steps that still fail.
func TestSimulation(t *testing.T) {
	if *simSeed != 0 {
		s := simulate(t, *simSeed, onlySteps(cmp.Or(*simSteps, simLength)), nil)
		t.Logf("digest %x: %d transactions\n%s", s.trace.Sum64(), s.count["transactions"], s.tally())
		if s.failure != "" {
			t.Fatal(s.describe())
		}
		return
	}
	all := *simSteps
	switch {
	case all > 0:
	case raceEnabled || testing.Short():
		all = simShort
	default:
		all = simDefault
	}
	start, total := time.Now(), map[string]int{}
	for seed, left := *simFirst, all; left > 0; seed, left = seed+1, left-simLength {
		s := simulate(t, seed, allSteps(min(left, simLength)), nil)
		if s.failure != "" {
			t.Fatal(shrink(t, s).describe())
		}
		for name, n := range s.count {
			total[name] += n
		}
		if n := int(seed - *simFirst + 1); n%400 == 0 {
			t.Logf("%d steps in %v", n*simLength, time.Since(start).Round(time.Second))
		}
	}
	took := time.Since(start)
	t.Logf("%d steps in %v, %.0f a second", all, took.Round(time.Millisecond), float64(all)/took.Seconds())
	for _, name := range slices.Sorted(maps.Keys(total)) {
		t.Logf("%8d %s", total[name], name)
	}
	for _, name := range simMustSee {
		if total[name] == 0 && all >= simShort {
			t.Errorf("in %d steps there was not one %q", all, name)
		}
	}
}

// simMustSee lists what even a short simulation meets with.
var simMustSee = []string{"transactions", "in sync", "seen at rest", "kills", "restarts", "quarantined", "breaks",
	"failed transactions", "adopted", "clients"}

// TestSimulationIsDeterministic: a seed that is simulated again sends the same bytes at the same times.
func TestSimulationIsDeterministic(t *testing.T) {
	seeds, times := []uint64{1000, 1001, 1002}, 4
	if raceEnabled { // which takes ten times as long
		seeds, times = seeds[:1], 2
	}
	for _, seed := range seeds {
		digests := map[uint64]bool{}
		for range times {
			digests[simulate(t, seed, allSteps(simLength), nil).trace.Sum64()] = true
		}
		if len(digests) > 1 {
			t.Errorf("seed %d: digests %x", seed, slices.Collect(maps.Keys(digests)))
		}
	}
}

func allSteps(n int) []int {
	steps := make([]int, n)
	for i := range steps {
		steps[i] = i
	}
	return steps
}

// onlySteps reads -sim.only.
func onlySteps(n int) (steps []int) {
	if *simOnly == "" {
		return allSteps(n)
	}
	for word := range strings.SplitSeq(*simOnly, ",") {
		if step, err := strconv.Atoi(word); err == nil {
			steps = append(steps, step)
		}
	}
	return steps
}

// sim is one simulation.
type sim struct {
	seed  uint64
	steps []int
	// plant, if not nil, plants a fault: see TestSimulationSeesFaults.
	plant func(*sim)

	step int
	// r makes the choices of one step, and begins anew with each: steps can be left out without changing the others.
	r      *rand.Rand
	tastes simTastes
	turns  simTurns
	world  *walkWorld
	cfg    dataplane.Config
	k      *simKernel
	f      *faults
	watch  *simWatch
	proc   *simProcess
	// trouble is when something was last wrong with the wires or the process.
	trouble time.Time
	// writer, if not nil, stands between loop and backend: a planted fault.
	writer func(reconcile.Writer) reconcile.Writer
	// lose, if not nil, has the watch lose events: a planted fault.
	lose func(simEvent) bool

	// equal is what was last found equal: what the kernel held and what it should, but for some Services.
	equal struct {
		holds contentSums
		to    *dataplane.State
		but   map[string]bool
	}

	trace interface {
		Write([]byte) (int, error)
		Sum64() uint64
	}
	// applies counts the transactions of a step.
	applies int
	count   map[string]int
	notes   []string
	failure string
	clients int
}

// simProcess is a proxy that runs.
type simProcess struct {
	queue   *snapshot.Queue
	loop    *reconcile.Loop
	backend *Backend
	cancel  context.CancelFunc
	done    chan struct{}
	// filling says that new tables are written in parts, and not complete yet.
	filling bool
}

// simulate takes some steps of a seed.
func simulate(t *testing.T, seed uint64, steps []int, plant func(*sim)) *sim {
	t.Helper()
	s := &sim{seed: seed, steps: steps, plant: plant, trace: fnv.New64a(), count: map[string]int{}}
	synctest.Test(t, func(*testing.T) { s.run() })
	return s
}

func (s *sim) run() {
	s.begin()
	for _, s.step = range s.steps {
		s.applies = 0
		s.r = rand.New(rand.NewPCG(s.seed, uint64(s.step)))
		s.f.random = s.r
		s.take()
		if s.settleDown(); s.failure != "" {
			break
		}
	}
	if s.failure == "" {
		s.step++
		s.r = rand.New(rand.NewPCG(s.seed, 1<<62))
		s.rest()
	}
	s.stop()
}

func (s *sim) begin() {
	s.r = rand.New(rand.NewPCG(s.seed, 1<<63))
	s.tastes = simTastes{large: s.seed%16 == 5, hashes: s.seed%32 == 7}
	s.world, s.cfg, s.k, s.f = newWalkWorld(s.r), simConfig(s.r), newSimKernel(), newFaults()
	s.k.counts, s.k.offsets = s.r.IntN(2) == 0, s.r.IntN(3) > 0
	s.k.sent = s.sent
	s.k.strict = func(text string) { s.fail("the backend asks for what cannot be: %s", text) }
	s.k.refuse = s.refuse
	s.f.meddle, s.f.random = s.k.noise, s.r
	if s.plant != nil {
		s.plant(s)
	}
	s.start()
}

// refuse is what the kernel has against Services with the port.
func (s *sim) refuse(e *nft.Element) unix.Errno {
	switch e.Set {
	case nft.Services, nft.UncountedServices, nft.InsideServices, nft.UncountedInsideServices, nft.OutsideServices,
		nft.UncountedOutsideServices:
		if e.FrontendKey().Port == poisonPort {
			return unix.EINVAL
		}
	}
	return 0
}

func (s *sim) note(format string, args ...any) {
	s.notes = append(s.notes, fmt.Sprintf("step %d: ", s.step)+fmt.Sprintf(format, args...))
}

func (s *sim) fail(format string, args ...any) {
	if s.failure == "" {
		s.failure = fmt.Sprintf("step %d: ", s.step) + fmt.Sprintf(format, args...)
	}
}

// describe says what failed, and how to see it again.
func (s *sim) describe() string {
	var only []string
	for _, step := range s.steps {
		only = append(only, strconv.Itoa(step))
	}
	return fmt.Sprintf("seed %d, %s\nreplay it with: -run 'TestSimulation$' -sim.seed %d -sim.only %s\nlast notes:\n%s",
		s.seed, s.failure, s.seed, strings.Join(only, ","), strings.Join(s.notes[max(0, len(s.notes)-40):], "\n"))
}

func (s *sim) tally() string {
	var out []string
	for _, name := range slices.Sorted(maps.Keys(s.count)) {
		out = append(out, fmt.Sprintf("%8d %s", s.count[name], name))
	}
	return strings.Join(out, "\n")
}

// start starts a process, which is told what there is in some order, part of it late.
func (s *sim) start() {
	p := &simProcess{queue: snapshot.NewQueue(1), done: make(chan struct{})}
	s.proc, s.trouble, s.turns.queue = p, time.Now(), p.queue
	s.watch = &simWatch{world: s.world, queue: p.queue, told: snapshot.New(), version: 1 + s.r.IntN(1000),
		versions: map[simObject]int{}, lose: s.lose, turns: &s.turns}
	s.f.dead, s.f.left, s.f.dials = false, -1, 0
	p.backend = s.newBackend()
	var w reconcile.Writer = p.backend
	if s.writer != nil {
		w = s.writer(w)
	}
	w = &countingWriter{w, s}
	p.loop = &reconcile.Loop{Queue: p.queue, Planner: dataplane.NewPlanner(s.cfg), Writer: w,
		Log: slog.New(slog.DiscardHandler), Listeners: []reconcile.Listener{s.listener()}}
	ctx, cancel := context.WithCancel(context.Background())
	p.cancel = cancel
	s.watch.happened(snapshot.Delta{Services: s.world.services, Slices: s.world.slices, Node: &s.world.node,
		ServiceCIDRs: &s.world.cidrs, HostAddrs: &s.world.addrs})
	s.watch.deliver(s.r, true)
	p.queue.Synced()
	if raceEnabled {
		go p.observe(ctx)
	}
	go func() {
		defer close(p.done)
		defer func() {
			if x := recover(); x != nil {
				s.turns.enter()
				s.fail("panic: %v\n%s", x, debug.Stack())
			}
		}()
		if err := p.loop.Run(ctx); err != nil {
			s.turns.enter()
			s.fail("the loop ended with %v", err)
		}
	}()
	s.turns.wait()
}

// maxApplies is more transactions than a step takes, however little each may hold.
const maxApplies = 50_000

// countingWriter ends a loop that never comes to rest, which no time would.
type countingWriter struct {
	reconcile.Writer
	s *sim
}

func (w *countingWriter) Apply(want *dataplane.State, change dataplane.Change) (dataplane.Receipt, error) {
	w.s.turns.enter()
	if w.s.applies++; w.s.applies > maxApplies {
		panic("there is no end of transactions")
	}
	return w.Writer.Apply(want, change)
}

// newBackend opens a backend over wires to the kernel in memory.
func (s *sim) newBackend() *Backend {
	netns, err := os.Open(os.DevNull)
	if err != nil {
		panic(err)
	}
	b := &Backend{dumpMost: oneOf(s.r, dumpMost, 4)}
	b.netns, b.dial = netns, func(int) (*Conn, error) {
		s.turns.enter()
		if s.f.dials > 0 {
			s.f.dials--
			s.f.harm++
			return nil, unix.EMFILE
		}
		return &Conn{Conn: netlink.New(&simSocket{&walkWire{Wire: &simWire{k: s.k}, f: s.f}, &s.turns}, false)}, nil
	}
	if err := b.openSockets(); err != nil {
		panic(err)
	}
	return b
}

// stop ends the process. Nothing is taken away by that.
func (s *sim) stop() {
	s.proc.cancel()
	s.turns.end()
	<-s.proc.done
	if err := s.proc.backend.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
		s.fail("close: %v", err)
	}
}

// restart ends the process, as a signal or a crash does, and starts another one.
func (s *sim) restart() {
	s.stop()
	s.count["restarts"]++
	s.start()
}

// settleDown lets the loop come to rest, starts a killed process anew, and looks at what must hold at any time.
func (s *sim) settleDown() {
	s.turns.wait()
	if s.f.dead {
		s.note("the process is dead")
		s.count["kills"]++
		s.restart()
	}
	if s.f.harm > 0 {
		s.f.harm = 0
		s.trouble = time.Now()
	}
	s.checkAlways()
}

// pass lets time pass.
func (s *sim) pass(d time.Duration) {
	s.turns.pass(d)
}
