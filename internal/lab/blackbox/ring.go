package blackbox

import "sync"

// ring keeps the last values of those that were added, in memory that never grows. It is safe for concurrent use.
type ring[T any] struct {
	mu     sync.Mutex
	values []T
	added  uint64
}

func newRing[T any](size int) *ring[T] { return &ring[T]{values: make([]T, size)} }

func (r *ring[T]) add(v *T) {
	r.mu.Lock()
	r.values[r.added%uint64(len(r.values))] = *v
	r.added++
	r.mu.Unlock()
}

// each calls do with each value, the oldest first. Nobody adds meanwhile.
func (r *ring[T]) each(do func(*T)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	size := uint64(len(r.values))
	for i := r.added - min(r.added, size); i < r.added; i++ {
		do(&r.values[i%size])
	}
}

// oldest returns the oldest value, and whether older ones were overwritten.
func (r *ring[T]) oldest() (v T, overwritten bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if size := uint64(len(r.values)); r.added > size {
		return r.values[r.added%size], true
	}
	return v, false
}

// total is how many values were added.
func (r *ring[T]) total() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.added
}
