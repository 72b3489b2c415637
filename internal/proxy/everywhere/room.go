package everywhere

import "sync"

// Room bounds how many wait at once, and is fair to namespaces: when it is full, a newcomer takes the place of the
// oldest one of the namespace that has the most, unless its own would then have more. It is safe for concurrent
// use.
type Room struct {
	most int

	mu    sync.Mutex
	taken int
	of    map[string][]*place
}

// place is one that waits.
type place struct {
	namespace string
	evict     func()
}

// NewRoom returns a Room with so many places.
func NewRoom(most int) *Room { return &Room{most: most, of: map[string][]*place{}} }

// Enter takes a place, or says that there is none. Leave gives it back; it may be called more than once. If another one
// takes the place, evict is called, from another goroutine than that of Enter.
func (r *Room) Enter(namespace string, evict func()) (leave func(), ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.taken >= r.most {
		most := namespace
		for n, places := range r.of {
			if len(places) > len(r.of[most]) {
				most = n
			}
		}
		if len(r.of[most]) <= len(r.of[namespace])+1 {
			return nil, false // two would take each other's places in turn
		}
		oldest := r.of[most][0]
		r.remove(oldest)
		go oldest.evict()
	}
	p := &place{namespace, evict}
	r.of[namespace] = append(r.of[namespace], p)
	r.taken++
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.remove(p)
	}, true
}

// remove takes a place out, if it is there.
func (r *Room) remove(p *place) {
	places := r.of[p.namespace]
	for i := range places {
		if places[i] != p {
			continue
		}
		r.taken--
		if r.of[p.namespace] = append(places[:i:i], places[i+1:]...); len(places) == 1 {
			delete(r.of, p.namespace)
		}
		return
	}
}

// Taken counts those that wait.
func (r *Room) Taken() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.taken
}
