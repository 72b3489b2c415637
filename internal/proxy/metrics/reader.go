package metrics

import (
	"errors"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
)

// How the kernel's counters are read.
const (
	// maxReadingAge is how old a reading may be that is shown again.
	maxReadingAge = 5 * time.Second
	// readBudget is how long reading goes on, but for the very first: half of it for frontends, the rest for endpoints.
	// What it did not come to has its turn next time.
	readBudget = 300 * time.Millisecond
	// firstReadBudget is the same for the very first, which has to see everything.
	firstReadBudget = time.Minute
	// scrapePatience is how long a scrape waits for a reading; after that it shows the one before.
	scrapePatience = 600 * time.Millisecond
	// countPatience is how long what rules remember is counted where the kernel does not know how much it is.
	countPatience = 100 * time.Millisecond
	// maxInlineServices is how many Services are entered into the ledger in the goroutine that wrote them.
	maxInlineServices = 16
)

// readLimits are how much is read at once.
type readLimits struct {
	// list is how many frontends are listed; more are read by their keys.
	list int
	// frontends are read by key at a time; of endpoints frontends, the endpoints.
	frontends, endpoints int
}

var usual = readLimits{list: 16384, frontends: 1024, endpoints: 64}

// reader keeps the ledger: it reads the counters when they are asked for, and takes over what transactions write.
// Nothing that a transaction waits for takes longer than a moment.
type reader struct {
	counters Counters
	ipvs     IPVS
	report   func(error)
	portions readLimits
	// moment counts transactions.
	moment atomic.Uint64

	// queue holds what was written, until it is taken over.
	queueMu sync.Mutex
	queue   []ledgerUpdate

	// mu guards the rest. Whoever has it takes over the queue first.
	mu     sync.Mutex
	ledger *ledger
	// scheduled is what IPVS counted.
	scheduled *ipvsLedger
	// noLocal counts, by family, Service ports with policy Local, endpoints, and none of them here.
	noLocal ipfamily.Per[localCount]
	// atLocalhost counts, by family, Service ports with endpoints whose node port answers at localhost.
	atLocalhost ipfamily.Per[int]

	// running is closed when the reading under way ends; nil if there is none.
	running  chan struct{}
	stopped  bool
	readAt   time.Time
	took     time.Duration
	failures int
	told     string
	// remembered counts what rules remember in each of RememberingSets; -1 if that is not known, or if there is no set.
	remembered [len(RememberingSets)]ipfamily.Per[int]
}

// ledgerUpdate is what a transaction wrote: Services before and after.
type ledgerUpdate struct {
	moment        uint64
	before, after []*dataplane.Service
	// full says that everything began to count at 0, found that it is of tables that have counted before us.
	full, adopted bool
}

// unknown says that nothing is known of what rules remember.
var unknown = [len(RememberingSets)]ipfamily.Per[int]{{-1, -1}, {-1, -1}}

func newReader(o *Options) *reader {
	r := &reader{
		counters: o.Counters, report: o.Report, portions: usual, ledger: newLedger(o.Detail, o.MaxSeries),
		scheduled:  newIPVSLedger(),
		remembered: unknown,
	}
	r.ledger.overRate = o.OverRate
	if o.Detail != Off {
		r.ipvs = o.IPVS
	}
	return r
}

// committed takes note of what a transaction wrote. First says that it was the first.
func (r *reader) committed(c *reconcile.Commit, first bool) {
	w := ledgerUpdate{r.moment.Add(1), c.Before, c.After, c.Full, first && !c.Full}
	r.queueMu.Lock()
	r.queue = append(r.queue, w)
	r.queueMu.Unlock()
	switch {
	case w.adopted:
		go r.startRead()
	case len(w.before) > maxInlineServices:
		go r.locked(func() {})
	case r.mu.TryLock():
		r.drainQueue()
		r.mu.Unlock()
	}
}

// locked calls do with everything taken over.
func (r *reader) locked(do func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.drainQueue()
	do()
}

// drainQueue takes over the queue.
func (r *reader) drainQueue() {
	r.queueMu.Lock()
	queue := r.queue
	r.queue = nil
	r.queueMu.Unlock()
	for i := range queue {
		w := &queue[i]
		for i, before := range w.before {
			r.countLocal(before, -1)
			r.countLocal(w.after[i], +1)
		}
		r.ledger.replace(w.before, w.after, w.full, w.moment)
		r.ledger.opening = r.ledger.opening || w.adopted
	}
}

// localCount counts Service ports by the policy that leaves them without an endpoint.
type localCount struct{ internal, external int }

// countLocal counts the ports of a Service for which there are endpoints, but none where policy Local looks for them,
// and those whose node port answers at localhost.
func (r *reader) countLocal(svc *dataplane.Service, by int) {
	for sp := range svc.EachPort() {
		var internal, external, atLocalhost bool
		for i := range sp.Frontends {
			fe := &sp.Frontends[i]
			atLocalhost = atLocalhost || fe.Key.Addr.IsLoopback() && len(fe.Route(dataplane.Node).Pool.Endpoints) > 0
			if pool := fe.Route(dataplane.Anyone).Pool; len(pool.Endpoints) > 0 || pool.Empty != dataplane.Drop {
				continue
			}
			internal = internal || fe.Kind == dataplane.ClusterIP
			external = external || fe.Kind != dataplane.ClusterIP
		}
		family := sp.Family()
		if atLocalhost {
			r.atLocalhost[family] += by
		}
		n := &r.noLocal[family]
		if internal {
			n.internal += by
		}
		if external {
			n.external += by
		}
	}
}

// startRead begins a reading, unless one is under way or was a moment ago, and gives what is closed at its end; nil if
// there is none.
func (r *reader) startRead() (running <-chan struct{}) {
	r.locked(func() {
		// Before the first transaction nobody knows whose the tables are.
		ready := r.counters != nil && !r.stopped && r.moment.Load() > 0
		if r.running == nil && ready && (r.ledger.opening || time.Since(r.readAt) >= maxReadingAge) {
			r.running = make(chan struct{})
			go r.read(r.running)
		}
		running = r.running
	})
	return running
}

// waitFresh waits for a reading that is fresh enough, but not for long.
func (r *reader) waitFresh() {
	running := r.startRead()
	if running == nil {
		return
	}
	patience := time.NewTimer(scrapePatience)
	defer patience.Stop()
	select {
	case <-running:
	case <-patience.C:
	}
}

// stop waits for the reading under way and allows no more: the counters are about to be closed.
func (r *reader) stop() {
	r.mu.Lock()
	r.stopped = true
	running := r.running
	r.mu.Unlock()
	if running != nil {
		<-running
	}
}

// read reads everything that there is time for.
func (r *reader) read(done chan struct{}) {
	defer close(done)
	start := time.Now()
	var opening bool
	r.locked(func() { opening = r.ledger.opening })
	budget := readBudget
	if opening {
		budget = firstReadBudget
	}
	err := errors.Join(r.readRules(), r.readFrontends(opening, start.Add(budget/2)), r.readEndpoints(start.Add(budget)),
		r.readIPVS(start.Add(budget)))
	remembered := unknown
	for i, set := range RememberingSets {
		n, cerr := r.counters.Remembered(set, countPatience)
		if err = errors.Join(err, cerr); err == nil {
			remembered[i] = n
		}
	}
	news := false
	r.locked(func() {
		r.readAt, r.took, r.remembered, r.running = time.Now(), time.Since(start), remembered, nil
		text := ""
		if err != nil {
			r.failures++
			text = err.Error()
		} else if opening {
			r.ledger.opening = false
		}
		news, r.told = text != "" && text != r.told, text
	})
	if news && r.report != nil {
		r.report(err)
	}
}

func (r *reader) readRules() error {
	began := r.moment.Load()
	counts, err := r.counters.Refused()
	if err == nil {
		r.locked(func() { r.ledger.recordRules(counts, began) })
	}
	limited, lerr := r.counters.Limited() // before the frontends, which count these packets, too
	if lerr == nil {
		r.locked(func() { r.ledger.recordLimited(limited, began) })
	}
	return errors.Join(err, lerr)
}

// readFrontends reads all frontends, or as many as there is time for. An opening reading is by key, which misses none.
func (r *reader) readFrontends(opening bool, deadline time.Time) error {
	var total int
	r.locked(func() { total = len(r.ledger.line) })
	if total == 0 {
		return nil
	}
	if total <= r.portions.list && !opening {
		began := r.moment.Load()
		counts := make([]dataplane.FrontendCount, 0, total)
		err := r.counters.AllFrontends(func(c dataplane.FrontendCount) { counts = append(counts, c) })
		r.locked(func() { r.ledger.recordFrontends(counts, began) })
		return err
	}
	for done := 0; done < total && time.Now().Before(deadline); done += r.portions.frontends {
		began := r.moment.Load()
		var at []dataplane.Counted
		r.locked(func() { at = r.ledger.nextFrontends(min(r.portions.frontends, total-done)) })
		counts := make([]dataplane.FrontendCount, 0, len(at))
		err := r.counters.Frontends(at, func(c dataplane.FrontendCount) { counts = append(counts, c) })
		r.locked(func() { r.ledger.recordFrontends(counts, began) })
		if err != nil {
			return err
		}
	}
	return nil
}

// readEndpoints reads the endpoints of those frontends that have counted something, once.
func (r *reader) readEndpoints(deadline time.Time) error {
	var left int
	r.locked(func() { left = len(r.ledger.due) })
	for ; left > 0 && time.Now().Before(deadline); left -= r.portions.endpoints {
		began := r.moment.Load()
		var of []dataplane.FrontendCount
		var members map[dataplane.Counted][]netip.AddrPort
		r.locked(func() { of, members = r.ledger.nextEndpoints(min(r.portions.endpoints, left)) })
		var counts []dataplane.EndpointCount
		err := r.counters.Endpoints(of, func(c dataplane.Counted) []netip.AddrPort { return members[c] },
			func(c dataplane.EndpointCount) { counts = append(counts, c) })
		r.locked(func() {
			r.ledger.recordEndpoints(counts, began)
			if err != nil {
				r.ledger.requeueEndpoints(of)
			}
		})
		if err != nil {
			return err
		}
	}
	return nil
}
