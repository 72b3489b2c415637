package flows

import (
	"net/netip"
	"time"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// pair is the two sides of a connection, as packets between them have them behind the translation.
type pair struct {
	protocol snapshot.Protocol
	from, to netip.AddrPort
}

// recent remembers when pairs were seen, for at least memory and at most twice as long, or until there are too many.
type recent struct {
	now, before map[pair]time.Time
	since       time.Time
	memory      time.Duration
}

// maxRecent bounds how many pairs are remembered, twice.
const maxRecent = 1 << 15

// see notes that a pair was seen, and returns when it was before; zero if it was not.
func (r *recent) see(p pair, t time.Time) (last time.Time) {
	last = r.last(p)
	if t.Sub(r.since) > r.memory || len(r.now) >= maxRecent {
		r.now, r.before, r.since = nil, r.now, t
	}
	if r.now == nil {
		r.now = map[pair]time.Time{}
	}
	r.now[p] = t
	return last
}

// last returns when a pair was last seen; zero if it was not.
func (r *recent) last(p pair) time.Time {
	if t, ok := r.now[p]; ok {
		return t
	}
	return r.before[p]
}
