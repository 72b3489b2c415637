package snapshot

import (
	"sync"
	"time"
)

// Queue gathers deltas from any number of sources for one reader. What arrives while the reader is busy is merged, so a
// slow reader sees fewer, larger deltas and never an old object after a newer one. Call NewQueue.
//
// It also keeps the book of what is waiting: from Put until the reader, having taken it, calls Ack.
type Queue struct {
	mu      sync.Mutex
	pending Delta
	unready int
	wake    chan struct{}
	made    time.Time

	// put is of what is still in the queue, taken of what the reader has.
	put, taken Waiting
	triggers   struct{ put, taken []Trigger }
}

// Waiting says what has not been settled yet.
type Waiting struct {
	// Since is when the oldest of it came, or when the last source was synced if that is later: before, nobody could have taken
	// it. Zero means that nothing is waiting.
	Since time.Time
	// Services and Slices count changes of objects. One that changed twice counts twice.
	Services, Slices int
}

func (w Waiting) and(o Waiting) Waiting {
	since := w.Since
	if since.IsZero() || !o.Since.IsZero() && o.Since.Before(since) {
		since = o.Since
	}
	return Waiting{since, w.Services + o.Services, w.Slices + o.Slices}
}

// Trigger is the beginning of a change to a slice, somewhere in the cluster.
type Trigger struct {
	At time.Time
	// IPv6 says that the slice holds IPv6 addresses. One that is empty now counts as IPv4.
	IPv6 bool
}

// maxTriggers bounds the triggers that are kept while nothing is settled, which may be for hours. Later ones are left out.
const maxTriggers = 1 << 16

// NewQueue gives a queue that is ready once Synced has been called sources times.
func NewQueue(sources int) *Queue {
	q := &Queue{unready: sources, wake: make(chan struct{}, 1), made: time.Now()}
	q.begin()
	return q
}

// begin begins the time of waiting, if there is a reader: even an empty cluster has to be written once.
func (q *Queue) begin() {
	if q.unready == 0 {
		q.put.Since = time.Now()
	}
}

// Put adds a delta. Safe for concurrent use; each object's deltas must come from one source, in order.
func (q *Queue) Put(d Delta) {
	if d.Empty() {
		return
	}
	q.mu.Lock()
	q.note(&d)
	q.pending.Merge(d)
	q.mu.Unlock()
	q.signal()
}

// note enters a delta into the book.
func (q *Queue) note(d *Delta) {
	if q.unready == 0 && q.put.Since.IsZero() {
		q.put.Since = time.Now()
	}
	q.put.Services += len(d.Services)
	q.put.Slices += len(d.Slices)
	for _, sl := range d.Slices {
		// What happened before there was a queue is no change to us, but part of a first list.
		if sl != nil && sl.Triggered.After(q.made) && len(q.triggers.put)+len(q.triggers.taken) < maxTriggers {
			ipv6 := len(sl.Endpoints) > 0 && sl.Endpoints[0].Addr.Is6()
			q.triggers.put = append(q.triggers.put, Trigger{sl.Triggered, ipv6})
		}
	}
}

// Synced says that one source has delivered its first complete list. Each source calls it once.
func (q *Queue) Synced() {
	q.mu.Lock()
	q.unready--
	q.begin()
	q.mu.Unlock()
	q.signal()
}

// Notify has the reader call Take though nothing came: what it makes of it has changed.
func (q *Queue) Notify() { q.signal() }

// Wake gives a channel that receives whenever Take is worth calling.
func (q *Queue) Wake() <-chan struct{} { return q.wake }

// Take gives what was gathered since the last call, which may be nothing: an empty cluster is an answer too. Until every
// source is synced it gives ready == false and keeps what it has.
func (q *Queue) Take() (d Delta, ready bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.unready > 0 {
		return Delta{}, false
	}
	d, q.pending = q.pending, Delta{}
	q.taken, q.put = q.taken.and(q.put), Waiting{}
	q.triggers.taken = append(q.triggers.taken, q.triggers.put...)
	q.triggers.put = nil
	return d, true
}

// Ack says that whatever was taken so far is in force, but for what the reader holds for later, and gives the
// triggers of that. What is held for later is not late: it only counts as not settled.
func (q *Queue) Ack(held Waiting) []Trigger {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.taken = Waiting{Services: held.Services, Slices: held.Slices}
	triggers := q.triggers.taken
	q.triggers.taken = nil
	return triggers
}

// Waiting gives what was put and is not settled. Safe for concurrent use.
func (q *Queue) Waiting() Waiting {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.taken.and(q.put)
}

func (q *Queue) signal() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}
