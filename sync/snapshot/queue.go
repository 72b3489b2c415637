package snapshot

import "sync"

// Queue gathers deltas from any number of sources for one reader. What arrives while the reader is busy is merged, so a
// slow reader sees fewer, larger deltas and never an old object after a newer one. Call NewQueue.
type Queue struct {
	mu      sync.Mutex
	pending Delta
	unready int
	wake    chan struct{}
}

// NewQueue gives a queue that is ready once Synced has been called sources times.
func NewQueue(sources int) *Queue {
	return &Queue{unready: sources, wake: make(chan struct{}, 1)}
}

// Put adds a delta. Safe for concurrent use; each object's deltas must come from one source, in order.
func (q *Queue) Put(d Delta) {
	if d.Empty() {
		return
	}
	q.mu.Lock()
	q.pending.Merge(d)
	q.mu.Unlock()
	q.signal()
}

// Synced says that one source has delivered its first complete list. Each source calls it once.
func (q *Queue) Synced() {
	q.mu.Lock()
	q.unready--
	q.mu.Unlock()
	q.signal()
}

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
	return d, true
}

func (q *Queue) signal() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}
