package history

import (
	"math"
	"sort"
)

// version is what the API says of a Service between two writes.
type version struct {
	sent, acked int64
	write       int             // which made it; -1 for the one before all
	set         map[string]bool // where new connections may go
}

// span is the versions from <= v < to.
type span struct{ from, to int }

// nobody stands for an address: of connections that no endpoint answered.
const nobody = ""

// service is all that the API said of a Service, in order.
type service struct {
	name     string
	versions []version
	// spans are the versions that allow an address, or nobody, in order.
	spans map[string][]span
	// affinity is the timeout in microseconds that all versions share; 0 if there is none, -1 if it changed.
	affinity int64
	// most is the size of the largest set.
	most int
}

// content is what is written at a time.
type content struct {
	exists, known bool // known says that the Service was there once, so that its affinity is known
	affinity      int
	slices        map[string][]Endpoint
}

func (c *content) apply(w *Write) {
	switch {
	case w.Slice == "":
		c.exists, c.affinity = !w.Gone, w.Affinity
	case w.Gone:
		delete(c.slices, w.Slice)
	default:
		c.slices[w.Slice] = w.Endpoints
	}
}

func (c *content) usable() map[string]bool {
	if !c.exists {
		return nil
	}
	var all []Endpoint
	for _, endpoints := range c.slices {
		all = append(all, endpoints...)
	}
	return usable(all)
}

// fold gives each Service its versions. The writes of each must be in order.
func fold(h *History) map[string]*service {
	all, contents := make(map[string]*service), make(map[string]*content)
	for i := range h.Writes {
		w := &h.Writes[i]
		s, c := all[w.Service], contents[w.Service]
		if s == nil {
			s = &service{name: w.Service, spans: make(map[string][]span)}
			s.add(version{sent: math.MinInt64, acked: math.MinInt64, write: -1})
			c = &content{slices: make(map[string][]Endpoint)}
			all[w.Service], contents[w.Service] = s, c
		}
		c.apply(w)
		if timeout := int64(c.affinity) * 1e6; c.exists && !c.known {
			s.affinity, c.known = timeout, true
		} else if c.exists && s.affinity != timeout {
			s.affinity = -1
		}
		s.add(version{sent: w.Sent, acked: w.Acked, write: i, set: c.usable()})
	}
	return all
}

// add appends a version.
func (s *service) add(v version) {
	n := len(s.versions)
	s.versions = append(s.versions, v)
	s.most = max(s.most, len(v.set))
	if len(v.set) == 0 {
		s.extend(nobody, n)
	}
	for address := range v.set {
		s.extend(address, n)
	}
}

// extend says that a version allows an address.
func (s *service) extend(address string, n int) {
	spans := s.spans[address]
	if last := len(spans) - 1; last >= 0 && spans[last].to == n {
		spans[last].to++
		return
	}
	s.spans[address] = append(spans, span{n, n + 1})
}

// sentBy gives the last version that was sent by a time.
func (s *service) sentBy(at int64) int {
	return sort.Search(len(s.versions), func(i int) bool { return s.versions[i].sent > at }) - 1
}

// last gives the last version that was sent by a time and allows an address; -1 if there is none.
func (s *service) last(address string, at int64) int {
	v, spans := s.sentBy(at), s.spans[address]
	i := sort.Search(len(spans), func(i int) bool { return spans[i].from > v }) - 1
	if i < 0 {
		return -1
	}
	return min(spans[i].to-1, v)
}

// next gives the first version from one on that allows an address; -1 if there is none.
func (s *service) next(address string, from int) int {
	spans := s.spans[address]
	i := sort.Search(len(spans), func(i int) bool { return spans[i].to > from })
	if i == len(spans) {
		return -1
	}
	return max(spans[i].from, from)
}

// stayed says whether all versions of a range, ends included, allow an address.
func (s *service) stayed(address string, from, to int) bool {
	if from > to || s.next(address, from) != from {
		return false
	}
	spans := s.spans[address]
	i := sort.Search(len(spans), func(i int) bool { return spans[i].to > from })
	return to < spans[i].to
}

// final says whether the last version allows an address.
func (s *service) final(address string) bool {
	spans := s.spans[address]
	return len(spans) > 0 && spans[len(spans)-1].to == len(s.versions)
}

// replaced gives when the version after one was acknowledged: from then on, the one is stale. ok is false if there is
// none.
func (s *service) replaced(v int) (at int64, ok bool) {
	if v+1 >= len(s.versions) {
		return 0, false
	}
	return s.versions[v+1].acked, true
}
