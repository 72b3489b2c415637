package collector

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/verdict-proxy/verdict/internal/proxy/everywhere"
	"github.com/verdict-proxy/verdict/internal/proxy/status"
	"github.com/verdict-proxy/verdict/internal/system/clock"
	"github.com/verdict-proxy/verdict/internal/system/wake"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// barrier has nodes wait until all nodes hold what the API has of a Service. Waiters of one Service share a reading of
// the API and a question to the nodes, a round.
type barrier struct {
	cluster cluster
	// observe, if not nil, is told the outcome of each wait and how long it took.
	observe func(outcome string, took time.Duration)
	// room bounds the waiters.
	room *everywhere.Room
	// work has a token for each Service that may be taken from turns.
	work chan struct{}

	mu       sync.Mutex
	streams  map[string]*stream
	services map[snapshot.Name]*service
	rounds   map[uint64]*round
	lastID   uint64
	turns    turns
	// pace bounds the questions per second.
	pace  pace
	stats Stats
}

// Stats counts what a collector does.
type Stats struct {
	// Streams is how many nodes are connected, Waiting how many requests wait, and Rounds how many questions are open.
	Streams, Waiting, Rounds int
	// Questions counts lines sent to nodes, Accepted and Refused the connections that showed a token or did not.
	Questions, Accepted, Refused uint64
}

// service is a Service that somebody waits for.
type service struct {
	name snapshot.Name
	// pending wait for a reading of the API that begins after they came.
	pending []*waiter
	rounds  []*round
	// busy says that a worker reads the API for it, or that it waits for its turn, and began is when the last round did.
	busy  bool
	began time.Time
}

// waiter is a request of a node, or of this process.
type waiter struct {
	service *service
	// stream is the node's, and id its number of the request. Without them the waiter is this process's, and reply holds
	// one answer.
	stream *stream
	id     uint64
	reply  chan everywhere.Answer
	begin  time.Time
	until  time.Time
	timer  *time.Timer
	leave  func()
	// deleting are the pods of the Service on the asking node that are being deleted; learned says that they are known.
	// The slices must not say any more that they are ready.
	deleting []podID
	learned  bool
	// round is what it waits for; nil while it is pending. why is what stood in the way so far.
	round *round
	why   string
	done  bool
}

// round is a question to all nodes.
type round struct {
	id   uint64
	goal status.Goal
	// objects are those of state: nothing has changed between two readings with the same.
	objects string
	service *service
	roster  *roster
	// missing has a bit for each node of the roster that has not answered; left counts them. gone are those that are not
	// waited for.
	missing []uint64
	left    int
	gone    []string
	waiters []*waiter
	timer   *time.Timer
}

const (
	// maxWaiters bounds all waiters, maxOfNode those of a node.
	maxWaiters, maxOfNode = 10_000, 512
	// maxOfNodePerSecond bounds how often a node begins to wait, and maxQuestions how many lines all nodes are sent per
	// second, of which a second's worth may be at once: Services take turns for them.
	maxOfNodePerSecond, maxQuestions = 100, 50_000
	// maxRounds bounds the open rounds, and maxOfService those of a Service. A Service gets a round at once if it has
	// none, else one every spacing.
	maxRounds, maxOfService = 1024, 4
	spacing                 = 100 * time.Millisecond
	// settleFirst and settleMost are how long a slice is given to say that a pod is terminating, before it is read again.
	settleFirst, settleMost = 25 * time.Millisecond, 400 * time.Millisecond
	// goneAfter is when it is looked whether nodes that do not answer are gone, and how often.
	goneAfter = time.Second
	// workers is how many Services' objects are read at once, and senders how many goroutines send a question.
	workers, senders = 8, 4
)

func newBarrier(c cluster, observe func(string, time.Duration)) *barrier {
	return &barrier{cluster: c, observe: observe, room: everywhere.NewRoom(maxWaiters),
		work: make(chan struct{}, maxWaiters), streams: map[string]*stream{}, services: map[snapshot.Name]*service{},
		rounds: map[uint64]*round{}, turns: turns{of: map[string][]*service{}}}
}

// run works until ctx is done.
func (b *barrier) run(ctx context.Context) {
	var all sync.WaitGroup
	defer all.Wait()
	for range workers {
		all.Go(func() {
			for {
				select {
				case <-ctx.Done():
					return
				case <-b.work:
				}
				b.mu.Lock()
				wait := b.pace.take(time.Now(), 0, maxQuestions, maxQuestions)
				b.mu.Unlock()
				clock.Pause(ctx, wait)
				b.start(ctx)
			}
		})
	}
}

// join takes a node's connection, in place of an older one, and asks what is open.
func (b *barrier) join(s *stream) {
	b.mu.Lock()
	old := b.streams[s.node]
	b.streams[s.node] = s
	var asks []*everywhere.Ask
	for _, r := range b.rounds {
		if r.waitsFor(s.node) {
			asks = append(asks, s.ask(r))
		}
	}
	b.stats.Questions += uint64(len(asks))
	b.mu.Unlock()
	if old != nil {
		old.Close()
	}
	for _, a := range asks {
		if s.Send(everywhere.FromCollector{Ask: a}, sendPatience) != nil {
			return // its reader sees that, too
		}
	}
}

// ask is the question of a round for a node.
func (s *stream) ask(r *round) *everywhere.Ask {
	g := r.goal
	if !s.comparable {
		g.Digest = 0
	}
	return everywhere.AskOf(r.id, g)
}

// part forgets a connection that has ended. The node asks again over the next one.
func (b *barrier) part(s *stream) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.streams[s.node] == s {
		delete(b.streams, s.node)
	}
	for _, w := range s.waits {
		b.forget(w)
	}
}

// wait begins a wait.
func (b *barrier) wait(s *stream, asked *everywhere.Wait) {
	n, err := status.ParseName(asked.Service)
	if err != nil || asked.ID == 0 || asked.Milliseconds <= 0 {
		s.Close()
		return
	}
	timeout := min(time.Duration(asked.Milliseconds)*time.Millisecond, everywhere.MaxTimeout)
	b.begin(&waiter{stream: s, id: asked.ID}, n, timeout)
}

// askHere waits as a node does, for this process; an answer without a round says Why, and ends with ctx.
func (b *barrier) askHere(ctx context.Context, n snapshot.Name, timeout time.Duration) everywhere.Answer {
	w := &waiter{reply: make(chan everywhere.Answer, 1), learned: true}
	b.begin(w, n, timeout)
	select {
	case a := <-w.reply:
		return a
	case <-ctx.Done():
		b.abandon(w)
		return everywhere.Answer{Why: ctx.Err().Error()}
	}
}

// begin has a waiter wait for a Service, if there is room.
func (b *barrier) begin(w *waiter, n snapshot.Name, timeout time.Duration) {
	now := time.Now()
	w.begin, w.until, w.why = now, now.Add(timeout), "the API has not been read yet"
	crowded := everywhere.Answer{Why: "too many wait in the cluster"}
	b.mu.Lock() // before Enter: a waiter may lose its place at once, and evict must find it complete
	s, ok := w.stream, true
	if s != nil {
		ok = s.waits[w.id] == nil && len(s.waits) < maxOfNode && s.mayWait(now)
	}
	if ok { // otherwise it would take somebody's place for nothing
		w.leave, ok = b.room.Enter(n.Namespace, func() { b.answer(w, crowded, outcomeCrowded) })
	}
	if !ok {
		w.done = true
		b.count(w, outcomeCrowded)
		b.mu.Unlock()
		b.send(w, crowded)
		return
	}
	if s != nil {
		s.waits[w.id] = w
	}
	svc := b.services[n]
	if svc == nil {
		svc = &service{name: n}
		b.services[n] = svc
	}
	w.service = svc
	svc.pending = append(svc.pending, w)
	w.timer = time.AfterFunc(timeout, func() { b.expire(w) })
	b.schedule(svc)
	b.mu.Unlock()
}

// mayWait bounds how often a node begins to wait. The caller has locked the barrier's mu.
func (s *stream) mayWait(now time.Time) bool {
	if s.pace.take(now, 0, maxOfNode, maxOfNodePerSecond) > 0 {
		return false
	}
	s.pace.take(now, 1, maxOfNode, maxOfNodePerSecond)
	return true
}

// schedule gives a Service its turn, if somebody waits for it. The caller has locked mu.
func (b *barrier) schedule(svc *service) {
	if svc.busy || len(svc.pending) == 0 {
		return
	}
	svc.busy = true
	pause := time.Duration(0)
	if len(svc.rounds) > 0 {
		pause = spacing - time.Since(svc.began)
	}
	if len(svc.rounds) >= maxOfService || len(b.rounds) >= maxRounds {
		pause = max(pause, spacing)
	}
	b.enqueue(svc, pause)
}

// enqueue lets a worker take a Service, after a pause. The caller has locked mu.
func (b *barrier) enqueue(svc *service, pause time.Duration) {
	if pause > 0 {
		time.AfterFunc(pause, func() {
			b.mu.Lock()
			defer b.mu.Unlock()
			b.enqueue(svc, 0)
		})
		return
	}
	b.turns.add(svc)
	wake.Up(b.work) // there are as many tokens as there can be waiters
}

// start takes the next Service, reads the API for those that wait for it, and asks the nodes.
func (b *barrier) start(ctx context.Context) {
	b.mu.Lock()
	svc := b.turns.next()
	if svc == nil {
		b.mu.Unlock()
		return
	}
	if full := len(svc.rounds) >= maxOfService || len(b.rounds) >= maxRounds; full && len(svc.pending) > 0 {
		b.enqueue(svc, spacing)
		b.mu.Unlock()
		return
	}
	batch := svc.pending
	svc.pending = nil
	b.mu.Unlock()
	again := time.Duration(0)
	if len(batch) > 0 {
		again = b.read(ctx, svc, batch)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	svc.busy = false
	switch {
	case again > 0 && len(svc.pending) > 0:
		svc.busy = true
		b.enqueue(svc, again)
	default:
		b.schedule(svc)
	}
	b.tidy(svc)
}

// tidy forgets a Service that nobody waits for. The caller has locked mu.
func (b *barrier) tidy(svc *service) {
	if !svc.busy && len(svc.pending) == 0 && len(svc.rounds) == 0 && b.services[svc.name] == svc {
		delete(b.services, svc.name)
	}
}

// read reads the API for a batch of waiters, and begins a round for those whose slices are up to date. The others are
// pending again, and read says after which pause to look again.
func (b *barrier) read(ctx context.Context, svc *service, batch []*waiter) (again time.Duration) {
	latest := time.Time{}
	for _, w := range batch {
		if w.until.After(latest) {
			latest = w.until
		}
	}
	ctx, cancel := context.WithDeadline(ctx, latest)
	defer cancel()
	state, err := b.cluster.read(ctx, svc.name, askingNodes(batch))
	if err != nil {
		b.postpone(svc, batch, err.Error())
		return settleMost
	}
	if state.nothing != "" {
		for _, w := range batch {
			b.answer(w, everywhere.Answer{Nothing: true, Why: state.nothing}, outcomeNothing)
		}
		return 0
	}
	var settled, unsettled []*waiter
	for _, w := range batch {
		if !w.learned {
			w.deleting, w.learned = state.deleting[w.stream.node], true
		}
		if slices.ContainsFunc(w.deleting, func(p podID) bool { return state.ready[p] }) {
			unsettled = append(unsettled, w)
		} else {
			settled = append(settled, w)
		}
	}
	if len(unsettled) > 0 {
		b.postpone(svc, unsettled, "the EndpointSlices do not say yet that a pod on this node is terminating")
		again = pauseFor(unsettled)
	}
	if len(settled) == 0 {
		return again
	}
	roster, err := b.cluster.roster(ctx)
	if err != nil {
		b.postpone(svc, settled, err.Error())
		return settleMost
	}
	b.ask(svc, settled, state.goal, state.objects, roster)
	return again
}

// askingNodes are the nodes of waiters whose pods that are being deleted are not known yet.
func askingNodes(batch []*waiter) (nodes []string) {
	for _, w := range batch {
		if !w.learned && !slices.Contains(nodes, w.stream.node) {
			nodes = append(nodes, w.stream.node)
		}
	}
	return nodes
}

// pauseFor is short at first.
func pauseFor(waiters []*waiter) time.Duration {
	pause := settleMost
	for _, w := range waiters {
		pause = min(pause, max(settleFirst, time.Since(w.begin)/4))
	}
	return pause
}

// postpone has waiters wait for the next reading.
func (b *barrier) postpone(svc *service, waiters []*waiter, why string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, w := range waiters {
		if !w.done {
			w.why = fmt.Sprintf("%.300s", why)
			svc.pending = append(svc.pending, w)
		}
	}
}

// ask begins a round, or joins one about the same objects.
func (b *barrier) ask(svc *service, waiters []*waiter, goal status.Goal, objects string, ro *roster) {
	b.mu.Lock()
	waiters = slices.DeleteFunc(waiters, func(w *waiter) bool { return w.done })
	if len(waiters) == 0 {
		b.mu.Unlock()
		return
	}
	for _, r := range svc.rounds {
		if r.objects == objects {
			r.add(waiters)
			b.mu.Unlock()
			return
		}
	}
	b.lastID++
	r := newRound(b.lastID, svc, goal, objects, ro)
	r.add(waiters)
	var targets []*stream
	for _, n := range ro.names {
		if s := b.streams[n]; s != nil {
			targets = append(targets, s)
		} else if b.cluster.knownGone(n) {
			r.excuse(n)
		}
	}
	svc.rounds, svc.began = append(svc.rounds, r), time.Now()
	b.rounds[r.id] = r
	b.stats.Questions += uint64(len(targets))
	b.pace.take(svc.began, len(targets), maxQuestions, maxQuestions)
	r.timer = time.AfterFunc(goneAfter, func() { b.lookForGone(r) })
	b.finishIfDone(r)
	b.mu.Unlock()
	sendAll(r, targets)
}

// sendAll sends a round's question to nodes.
func sendAll(r *round, targets []*stream) {
	var lines [2][]byte // by comparable
	line := func(s *stream) []byte {
		i := 0
		if s.comparable {
			i = 1
		}
		if lines[i] == nil {
			lines[i] = encode(everywhere.FromCollector{Ask: s.ask(r)})
		}
		return lines[i]
	}
	jobs := make([][]byte, len(targets))
	for i, s := range targets {
		jobs[i] = line(s)
	}
	var all sync.WaitGroup
	size := (len(targets) + senders - 1) / senders
	for part := range senders {
		first, end := min(part*size, len(targets)), min((part+1)*size, len(targets))
		if first == end {
			continue
		}
		all.Go(func() {
			for i := first; i < end; i++ {
				_ = targets[i].SendLine(jobs[i], sendPatience) // a failure ends the connection
			}
		})
	}
	all.Wait()
}

// have takes a node's answers.
func (b *barrier) have(s *stream, ids []uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, id := range ids {
		if r := b.rounds[id]; r != nil && r.answered(s.node) {
			b.finishIfDone(r)
		}
	}
}

// finishIfDone ends a round that nobody is missing of. The caller has locked mu.
func (b *barrier) finishIfDone(r *round) {
	if r.left > 0 {
		return
	}
	waiters := slices.Clone(r.waiters)
	b.end(r)
	answer := everywhere.Answer{Everywhere: true, Nodes: len(r.roster.names), Gone: len(r.gone),
		GoneNodes: r.gone[:min(len(r.gone), everywhere.MaxNamed)]}
	go func() {
		for _, w := range waiters {
			b.answer(w, answer, outcomeEverywhere)
		}
	}()
}

// end forgets a round. The caller has locked mu.
func (b *barrier) end(r *round) {
	delete(b.rounds, r.id)
	r.timer.Stop()
	if i := slices.Index(r.service.rounds, r); i >= 0 {
		r.service.rounds = slices.Delete(r.service.rounds, i, i+1)
	}
	b.tidy(r.service)
	if r.left == 0 {
		return
	}
	var targets []*stream
	for _, n := range r.missingNodes() {
		if s := b.streams[n]; s != nil {
			targets = append(targets, s)
		}
	}
	drop := encode(everywhere.FromCollector{Drop: r.id})
	go func() {
		for _, s := range targets {
			_ = s.SendLine(drop, sendPatience)
		}
	}()
}

// expire answers a waiter whose time is over.
func (b *barrier) expire(w *waiter) {
	b.mu.Lock()
	answer := everywhere.Answer{Why: w.why}
	if r := w.round; r != nil {
		names := r.missingNodes()
		answer = everywhere.Answer{Nodes: len(r.roster.names), Missing: len(names), Gone: len(r.gone),
			MissingNodes: names[:min(len(names), everywhere.MaxNamed)],
			GoneNodes:    r.gone[:min(len(r.gone), everywhere.MaxNamed)], Why: "not all nodes have answered in time"}
	}
	b.mu.Unlock()
	b.answer(w, answer, outcomeMissing)
}

// cancel takes a request back.
func (b *barrier) cancel(s *stream, id uint64) {
	b.mu.Lock()
	w := s.waits[id]
	b.mu.Unlock()
	if w != nil {
		b.abandon(w)
	}
}

// abandon ends a wait that nobody wants an answer to, unless it has ended.
func (b *barrier) abandon(w *waiter) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !w.done {
		b.forget(w)
		b.count(w, outcomeAbandoned)
	}
}

// answer answers a waiter, unless that has happened.
func (b *barrier) answer(w *waiter, a everywhere.Answer, outcome string) {
	b.mu.Lock()
	if w.done {
		b.mu.Unlock()
		return
	}
	b.forget(w)
	b.count(w, outcome)
	b.mu.Unlock()
	b.send(w, a)
}

func (b *barrier) send(w *waiter, a everywhere.Answer) {
	if w.stream == nil {
		w.reply <- a
		return
	}
	_ = w.stream.Send(everywhere.FromCollector{Result: &everywhere.Result{ID: w.id, Answer: a}}, sendPatience)
}

// count tells the metrics of a wait that has ended. The caller has locked mu.
func (b *barrier) count(w *waiter, outcome string) {
	if b.observe != nil {
		b.observe(outcome, time.Since(w.begin))
	}
}

// forget takes a waiter out of everything. The caller has locked mu.
func (b *barrier) forget(w *waiter) {
	if w.done {
		return
	}
	w.done = true
	w.timer.Stop()
	w.leave()
	if w.stream != nil {
		delete(w.stream.waits, w.id)
	}
	if i := slices.Index(w.service.pending, w); i >= 0 {
		w.service.pending = slices.Delete(w.service.pending, i, i+1)
	}
	if r := w.round; r != nil {
		if i := slices.Index(r.waiters, w); i >= 0 {
			r.waiters = slices.Delete(r.waiters, i, i+1)
		}
		if len(r.waiters) == 0 && b.rounds[r.id] == r {
			b.end(r)
		}
	}
	b.tidy(w.service)
}

// lookForGone stops waiting for nodes that do not answer because they are gone.
func (b *barrier) lookForGone(r *round) {
	b.mu.Lock()
	silent := r.missingNodes()
	b.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), requestTimeout)
	defer cancel()
	gone := b.cluster.gone(ctx, silent)
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.rounds[r.id] != r {
		return
	}
	for _, n := range gone {
		r.excuse(n)
	}
	r.timer.Reset(goneAfter)
	b.finishIfDone(r)
}

func (b *barrier) countGreeting(accepted bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if accepted {
		b.stats.Accepted++
	} else {
		b.stats.Refused++
	}
}

// snapshot returns what was counted so far.
func (b *barrier) snapshot() Stats {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := b.stats
	s.Streams, s.Rounds, s.Waiting = len(b.streams), len(b.rounds), b.room.Taken()
	return s
}
