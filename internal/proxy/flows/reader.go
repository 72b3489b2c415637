package flows

import "sync/atomic"

// Bounds of readers.
const (
	// maxReaders bounds those that follow at a time.
	maxReaders = 16
	// maxUnread is how many records wait for one of them, half a megabyte.
	maxUnread = 1024
)

// reader gets new records. One that is too slow loses some, and delays nobody.
type reader struct {
	records chan Record
	lost    atomic.Uint64
	query   query
}

func newReader(most int, q query) *reader { return &reader{records: make(chan Record, most), query: q} }

// offer gives a record to a reader, if it wants it and has room.
func (r *reader) offer(record *Record) {
	if !r.query.wants(record) {
		return
	}
	select {
	case r.records <- *record:
	default:
		r.lost.Add(1)
	}
}

// join adds a reader, and returns the list before its first record; no reader if there are too many. Its caller calls
// leave.
func (b *Book) join(q query) (r *reader, before []block) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.readers) >= maxReaders {
		return nil, nil
	}
	r = newReader(maxUnread, q)
	b.readers[r] = true
	if q.open {
		b.opened(+1)
	}
	return r, b.list.snapshot()
}

func (b *Book) leave(r *reader) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.readers, r)
	b.unread += r.lost.Load()
	if r.query.open {
		b.opened(-1)
	}
}

// opened counts the readers that want open connections. The caller holds mu.
func (b *Book) opened(more int) {
	was := b.opens > 0
	b.opens += more
	if is := b.opens > 0; is != was && b.recorder != nil {
		if err := b.recorder.SetOpen(is); err != nil {
			b.o.Log.Warn("failed to switch records of connections that begin", "on", is, "err", err)
		}
	}
}
