package snapshot

import (
	"sync"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
)

// Queue collects deltas from any number of sources for one reader. Deltas that arrive while the reader is busy are
// merged, so a slow reader sees fewer, larger deltas and never an old object after a newer one. Call NewQueue.
//
// The queue also counts what is waiting: from Put until the reader, having taken it, calls Ack.
type Queue struct {
	mu       sync.Mutex
	pending  Delta
	unsynced int
	wake     chan struct{}
	created  time.Time

	// queued counts what is still in the queue, taken what the reader has.
	queued, taken Waiting
	triggers      struct{ queued, taken []Trigger }
	// versions are those of everything that was put, that the reader took, and that is programmed.
	versions struct{ put, taken, programmed Versions }
	// held is what the reader holds for later, and unacked says that it has taken something since its
	// last Ack, or that there was none yet.
	held    Held
	unacked bool
}

// Held is what a reader has taken and holds for later. The zero Held is nothing.
type Held struct {
	// Waiting counts them; Since is when the reader took the oldest.
	Waiting
	// Before are the versions up to which the reader had taken everything before the oldest of them.
	Before Versions
}

// none reports whether no object is held.
func (h *Held) none() bool { return h.Services == 0 && h.Slices == 0 }

// Progress describes what the reader has taken.
type Progress struct {
	// Received are the versions up to which the sources have read, and Programmed those up to which everything that they
	// put is in force. Both are empty while unknown.
	Received, Programmed Versions
	// Waiting counts changes that are not in force, including what the reader holds for later.
	Waiting
}

// Waiting counts changes that are not settled yet.
type Waiting struct {
	// Since is when the oldest of them came, or when the last source was synced if that is later: before, nobody could
	// have taken it. Zero means that nothing is waiting.
	Since time.Time
	// Services and Slices count changes of objects. One that changed twice counts twice.
	Services, Slices int
}

func (w Waiting) merge(o Waiting) Waiting {
	return Waiting{Earlier(w.Since, o.Since), w.Services + o.Services, w.Slices + o.Slices}
}

// Earlier returns the earlier of two times, of which either may be zero.
func Earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// Trigger is when a change of a slice began, somewhere in the cluster.
type Trigger struct {
	At time.Time
	// Family is that of the slice's addresses; a slice that is empty now counts as IPv4.
	Family ipfamily.Family
}

// maxTriggers bounds the triggers that are kept while nothing is settled, which may take hours. Later ones are dropped.
const maxTriggers = 1 << 16

// NewQueue returns a queue that is ready once Synced has been called sources times.
func NewQueue(sources int) *Queue {
	q := &Queue{unsynced: sources, unacked: true, wake: make(chan struct{}, 1), created: time.Now()}
	q.startWaiting()
	return q
}

// startWaiting sets the time of waiting once the queue is ready: even an empty cluster has to be programmed once.
func (q *Queue) startWaiting() {
	if q.unsynced == 0 {
		q.queued.Since = time.Now()
	}
}

// Put adds a delta. Safe for concurrent use; each object's deltas must come from one source, in order.
func (q *Queue) Put(d Delta) {
	q.mu.Lock()
	q.versions.put = q.versions.put.Then(d.Versions)
	if d.Empty() {
		q.advance()
		q.mu.Unlock()
		return
	}
	q.account(&d)
	q.pending.Merge(d)
	q.mu.Unlock()
	q.signal()
}

// advance moves the versions of what is programmed up to those of what was put, if nothing is on its way.
func (q *Queue) advance() {
	if q.unsynced == 0 && !q.unacked && q.pending.Empty() && q.held.none() {
		q.versions.programmed = q.versions.put
	}
}

// account counts a delta as waiting.
func (q *Queue) account(d *Delta) {
	if q.unsynced == 0 && q.queued.Since.IsZero() {
		q.queued.Since = time.Now()
	}
	q.queued.Services += len(d.Services)
	q.queued.Slices += len(d.Slices)
	for _, sl := range d.Slices {
		// What happened before there was a queue is no change to us, but part of a first list.
		if sl != nil && sl.Triggered.After(q.created) && len(q.triggers.queued)+len(q.triggers.taken) < maxTriggers {
			t := Trigger{At: sl.Triggered}
			if len(sl.Endpoints) > 0 {
				t.Family = ipfamily.Of(sl.Endpoints[0].Addr)
			}
			q.triggers.queued = append(q.triggers.queued, t)
		}
	}
}

// Synced says that one source has delivered its first complete list. Each source calls it once.
func (q *Queue) Synced() {
	q.mu.Lock()
	q.unsynced--
	q.startWaiting()
	q.mu.Unlock()
	q.signal()
}

// Notify has the reader call Take though nothing came: what it makes of it has changed.
func (q *Queue) Notify() { q.signal() }

// Wake returns a channel that receives whenever Take is worth calling.
func (q *Queue) Wake() <-chan struct{} { return q.wake }

// Take returns what was collected since the last call, which may be nothing: an empty cluster is an answer too. Until
// every source is synced it returns ready == false and keeps what it has.
func (q *Queue) Take() (d Delta, ready bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.unsynced > 0 {
		return Delta{}, false
	}
	d, q.pending = q.pending, Delta{}
	q.versions.taken, q.unacked = q.versions.put, true
	d.Versions = q.versions.taken
	q.taken, q.queued = q.taken.merge(q.queued), Waiting{}
	q.triggers.taken = append(q.triggers.taken, q.triggers.queued...)
	q.triggers.queued = nil
	return d, true
}

// Ack says that whatever was taken so far is in force, but for what the reader holds for later, and gives the
// triggers of that. What is held for later is not late: it only counts as not settled.
func (q *Queue) Ack(held Held) []Trigger {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.taken = Waiting{Services: held.Services, Slices: held.Slices} // without Since: it is not late
	q.held, q.unacked = held, false
	q.versions.programmed = q.versions.taken
	if !held.none() {
		q.versions.programmed = held.Before
	}
	q.advance()
	triggers := q.triggers.taken
	q.triggers.taken = nil
	return triggers
}

// Progress returns what the reader has taken. Safe for concurrent use.
func (q *Queue) Progress() Progress {
	q.mu.Lock()
	defer q.mu.Unlock()
	p := Progress{q.versions.put, q.versions.programmed, q.taken.merge(q.queued)}
	p.Since = Earlier(p.Since, q.held.Since)
	return p
}

// Waiting returns what was put and is not settled. Safe for concurrent use.
func (q *Queue) Waiting() Waiting {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.taken.merge(q.queued)
}

// Queued is Concerns of what nobody has taken yet. It is safe for concurrent use.
func (q *Queue) Queued() (services []*Service, of []Name) {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.pending.Concerns()
}

func (q *Queue) signal() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}
