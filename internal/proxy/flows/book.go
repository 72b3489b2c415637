package flows

import (
	"context"
	"log/slog"
	"net/netip"
	"sync"
	"time"
)

// Defaults of Options.
const (
	DefaultMemory = 32 << 20
	DefaultSeries = 5000
)

// rowBytes is how much of the memory makes room for a row in each minute.
const rowBytes = 8 << 10

// Options say what a Book keeps.
type Options struct {
	// Node is this node's name, for answers.
	Node string
	// Memory bounds the list of records, in bytes; 0 means DefaultMemory. The sums take as much again at most.
	Memory int
	// Series bounds the Totals; 0 means DefaultSeries.
	Series int
	// ClientBits is how many bits are kept of the addresses of clients outside the cluster, of IPv4 and of IPv6; 0 means
	// all.
	ClientBits [2]int
	// File and OTLP are where records are written to besides; empty means nowhere. Run writes them.
	File, OTLP string
	// Log is told of failures; nil means nobody.
	Log *slog.Logger
	// Now is the clock; nil means time.Now.
	Now func() time.Time
}

// source gives a book its records.
type source interface {
	// Losses gives what it has lost. Sampled and Unread are the book's.
	Losses() Losses
	// SetOpen is called when the first reader wants open connections, and when no reader does any more. It must not call
	// the book.
	SetOpen(wanted bool) error
}

// Book keeps the last records, and sums. Its methods may be called concurrently. Make one with NewBook.
type Book struct {
	o       Options
	started time.Time
	// done is closed when Run ends.
	done chan struct{}
	// answers has an element for each answer that is written.
	answers chan struct{}

	mu       sync.Mutex
	recorder source
	list     *list
	sums     sums
	readers  map[*reader]bool
	// opens counts the readers that want open connections, and unread what those that left did not read in time.
	opens           int
	exports         []*export
	sampled, unread uint64
}

// NewBook returns an empty book. It starts nothing.
func NewBook(o Options) *Book {
	if o.Memory == 0 {
		o.Memory = DefaultMemory
	}
	if o.Series == 0 {
		o.Series = DefaultSeries
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	b := &Book{o: o, started: o.Now(), done: make(chan struct{}), answers: make(chan struct{}, maxAnswers),
		list:    newList(o.Memory),
		sums:    sums{most: max(o.Memory/rowBytes, 64), room: o.Memory, totals: newSpill(o.Series, "")},
		readers: map[*reader]bool{}}
	if o.File != "" {
		b.exports = append(b.exports, newExport("file", o.Log, newFile(o.File, fileMiB)))
	}
	if o.OTLP != "" {
		b.exports = append(b.exports, newExport("otlp", o.Log, newCollector(o.OTLP, o.Node)))
	}
	return b
}

// Add adds a record. An open connection is only shown to readers who want that; AddOpen counts it.
func (b *Book) Add(r Record) {
	r.Weight = max(r.Weight, 1)
	uncut := r.Client.Addr
	b.o.cut(&r.Client)
	b.mu.Lock()
	defer b.mu.Unlock()
	if r.End != Open {
		now := b.o.Now()
		b.sums.add(&r, now)
		weight := b.list.weight(&r, uncut, now)
		if weight == 0 {
			b.sampled++
			return
		}
		r.Weight *= weight
		b.list.add(&r)
		for _, e := range b.exports {
			e.offer(&r)
		}
	}
	for reader := range b.readers {
		reader.offer(&r)
	}
}

// BeginLook begins a look at open connections: AddOpen counts them, in place of those of the look before.
func (b *Book) BeginLook() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.sums.turn(b.o.Now())
	b.sums.now.look++
}

// AddOpen adds a connection that a look shows, with its traffic since the last one. If its End is not Open, it is about
// to end, and only its traffic counts.
func (b *Book) AddOpen(r Record) {
	b.o.cut(&r.Client)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.sums.addOpen(&r, b.o.Now())
}

// cut leaves the prefix of the address of a client outside the cluster.
func (o *Options) cut(p *Peer) {
	bits := o.ClientBits[0]
	if p.Addr.Addr().Is6() {
		bits = o.ClientBits[1]
	}
	if bits == 0 || p.name() != "" || p.Node != "" || !p.Addr.IsValid() {
		return
	}
	p.Prefix = netip.PrefixFrom(p.Addr.Addr(), bits).Masked()
	p.Addr = netip.AddrPort{}
}

// SetRecorder names what adds records. Without one, nothing is lost before it reaches the book.
func (b *Book) SetRecorder(r source) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.recorder = r
}

// losses are those of the recorder and of the book.
func (b *Book) losses() (l Losses) {
	b.mu.Lock()
	recorder := b.recorder
	l.Sampled = b.sampled
	b.mu.Unlock()
	if recorder != nil {
		of := recorder.Losses()
		l.Events, l.Refusals = of.Events, of.Refusals
	}
	return l
}

// Total is the sum since the start for a Service and a pair of zones. Service is Others for the Services that there was
// no room for.
type Total struct {
	Service, ClientZone, EndpointZone string
	Connections, Failures             uint64
	Sent, Received                    Traffic
}

// Stats are what metrics show.
type Stats struct {
	// Totals are in no order.
	Totals []Total
	// Losses count in Unread what all readers together did not take in time.
	Losses Losses
	// Exports are the file and the collector, if there are any.
	Exports []ExportStats
}

// Stats returns the sums since the start, and the losses.
func (b *Book) Stats() Stats {
	s := Stats{Losses: b.losses()}
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, r := range b.sums.totals.rows {
		s.Totals = append(s.Totals,
			Total{r.service, r.clientZone, r.endpointZone, r.connections, r.failures, r.sent, r.received})
	}
	s.Losses.Unread = b.unread
	for r := range b.readers {
		s.Losses.Unread += r.lost.Load()
	}
	for _, e := range b.exports {
		s.Exports = append(s.Exports, ExportStats{To: e.to, Written: e.written.Load(), Lost: e.lost.Load()})
	}
	return s
}

// Run writes records to the file and to the collector until ctx is done, and then ends the readers that follow.
func (b *Book) Run(ctx context.Context) {
	defer close(b.done)
	var all sync.WaitGroup
	for _, e := range b.exports {
		all.Go(func() { e.run(ctx) })
	}
	<-ctx.Done()
	all.Wait()
}
