package kernel

import (
	"context"
	"errors"
	"hash/fnv"
	"log/slog"
	"maps"
	"os"
	"runtime/debug"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/netlink"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// A simulation takes simLength steps at most; another seed is another node.
const (
	simLength  = 250
	simDefault = 2500
	simShort   = 1500
)

var simulations = testkit.NewWalks("TestSimulation", "sim", simLength)

// TestSimulation runs the whole line in one bubble of time: the loop, the queue, the planner and the backend of a node,
// over a kernel in memory. The cluster changes, watches are late and break, transactions are refused, answers are lost,
// the process is killed between two datagrams and started again. A seed always does the same.
func TestSimulation(t *testing.T) {
	everyday := simDefault
	if raceEnabled || testing.Short() {
		everyday = simShort
	}
	simulations.Run(t, everyday, false, func(t *testing.T, w *testkit.Walk) { simulate(t, w, nil) }, simShort,
		simMustSee...)
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
			digests[simulate(t, testkit.NewWalk(seed, testkit.UpTo(simLength)), nil).trace.Sum64()] = true
		}
		if len(digests) > 1 {
			t.Errorf("seed %d: digests %x", seed, slices.Collect(maps.Keys(digests)))
		}
	}
}

// sim is one simulation.
type sim struct {
	*testkit.Walk
	// plant, if not nil, plants a fault: see TestSimulationSeesFaults.
	plant func(*sim)

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

// simulate takes a walk.
func simulate(t *testing.T, w *testkit.Walk, plant func(*sim)) *sim {
	t.Helper()
	s := &sim{Walk: w, plant: plant, trace: fnv.New64a()}
	synctest.Test(t, func(*testing.T) { s.run() })
	return s
}

func (s *sim) run() {
	s.begin()
	for _, step := range s.Steps {
		s.applies = 0
		s.Begin(step)
		s.f.random = s.Rand
		s.take()
		if s.settleDown(); s.Failure != "" {
			break
		}
	}
	if s.Failure == "" {
		s.Begin(testkit.End)
		s.rest()
	}
	s.stop()
}

func (s *sim) begin() {
	s.tastes = simTastes{large: s.Seed%16 == 5, hashes: s.Seed%32 == 7}
	s.world, s.cfg, s.k, s.f = newWalkWorld(s.Rand), simConfig(s.Rand), newSimKernel(), newFaults()
	s.k.counts, s.k.offsets = s.IntN(2) == 0, s.IntN(3) > 0
	s.k.sent = s.sent
	s.k.strict = func(text string) { s.Fail("the backend asks for what cannot be: %s", text) }
	s.k.refuse = s.refuse
	s.f.meddle, s.f.random = s.k.noise, s.Rand
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

// start starts a process, which is told what there is in some order, part of it late.
func (s *sim) start() {
	p := &simProcess{queue: snapshot.NewQueue(1), done: make(chan struct{})}
	s.proc, s.trouble, s.turns.queue = p, time.Now(), p.queue
	s.watch = &simWatch{world: s.world, queue: p.queue, told: snapshot.New(), version: 1 + s.IntN(1000),
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
	s.watch.deliver(s.Rand, true)
	p.queue.Synced()
	if raceEnabled {
		go p.observe(ctx)
	}
	go func() {
		defer close(p.done)
		defer func() {
			if x := recover(); x != nil {
				s.turns.enter()
				s.Fail("panic: %v\n%s", x, debug.Stack())
			}
		}()
		if err := p.loop.Run(ctx); err != nil {
			s.turns.enter()
			s.Fail("the loop ended with %v", err)
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
	b := &Backend{dumpMost: oneOf(s.Rand, dumpMost, 4)}
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
		s.Fail("close: %v", err)
	}
}

// restart ends the process, as a signal or a crash does, and starts another one.
func (s *sim) restart() {
	s.stop()
	s.Count["restarts"]++
	s.start()
}

// settleDown lets the loop come to rest, starts a killed process anew, and looks at what must hold at any time.
func (s *sim) settleDown() {
	s.turns.wait()
	if s.f.dead {
		s.Note("the process is dead")
		s.Count["kills"]++
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
