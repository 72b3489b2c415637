package flows

import (
	"bytes"
	"container/heap"
	"iter"
	"maps"
	"strings"
	"time"
)

// Others is the client of a sum that stands for the clients that there was no room for, and the Service of one that
// stands for such Services.
const Others = "others"

// Hour is how long sums are kept.
const Hour = 60

// key is what the connections of a row have in common.
type key struct{ client, clientZone, service, port, endpoint, endpointZone string }

// counts are what a row counts.
type counts struct {
	connections, failures, open uint64
	sent, received              Traffic
}

func (c *counts) add(o *counts) {
	c.connections += o.connections
	c.failures += o.failures
	c.open += o.open
	c.sent.add(o.sent)
	c.received.add(o.received)
}

func (t *Traffic) add(o Traffic) {
	t.Packets += o.Packets
	t.Bytes += o.Bytes
}

// row is the sum of a minute for a key.
type row struct {
	key
	counts
	// rank decides who gives way: what was counted, and that of the row whose place this one took (Space-Saving). placed
	// is the rank by which it lies in its heap.
	rank, placed uint64
	// look is the last one that counted open.
	look uint64
}

// rows is a heap of the rows of a namespace, the one with the least rank first.
type rows []*row

func (h rows) Len() int           { return len(h) }
func (h rows) Less(i, j int) bool { return h[i].placed < h[j].placed }
func (h rows) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *rows) Push(x any)        { *h = append(*h, x.(*row)) }
func (h *rows) Pop() any {
	last := len(*h) - 1
	r := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	return r
}

// least pops the row with the least rank. Ranks only grow, so that only rows that come up are placed anew.
func (h *rows) least() *row {
	for (*h)[0].placed != (*h)[0].rank {
		(*h)[0].placed = (*h)[0].rank
		heap.Fix(h, 0)
	}
	return heap.Pop(h).(*row)
}

// shelf holds rows, and at most a number of them. If there is no room, the least of the namespace with the most rows
// gives way: no namespace pushes out what others have below an equal share.
type shelf struct {
	most   int
	rows   map[key]*row
	groups map[string]*rows
	// order are the groups, to find the largest.
	order []*rows
}

func newShelf(most int) shelf {
	return shelf{most: most, rows: map[key]*row{}, groups: map[string]*rows{}}
}

// row returns the row of a key, and one that gave way to it; nil if none did.
func (s *shelf) row(k key) (r, gone *row) {
	if r = s.rows[k]; r != nil {
		return r, nil
	}
	namespace, _, _ := strings.Cut(k.service, "/")
	group := s.groups[namespace]
	if group == nil {
		group = &rows{}
		s.groups[namespace] = group
		s.order = append(s.order, group)
	}
	r = &row{key: k}
	if len(s.rows) >= s.most {
		largest := group
		for _, g := range s.order {
			if len(*g) > len(*largest) {
				largest = g
			}
		}
		gone = largest.least()
		delete(s.rows, gone.key)
		if largest == group {
			r.rank, r.placed = gone.rank, gone.rank
		}
	}
	s.rows[k] = r
	heap.Push(group, r)
	return r, gone
}

// spill holds sums by Service and pair of zones, in bounded memory. While there are not too many Services, each is
// exact.
type spill struct {
	most int
	// client is that of all rows.
	client string
	rows   map[key]*row
}

func newSpill(most int, client string) spill { return spill{most, client, map[key]*row{}} }

// spillPairs are how many pairs of zones are told apart for the Services that there was no room for.
const spillPairs = 256

// row returns the row to which what a key stands for is added.
func (s *spill) row(k key) *row {
	tries := [...]struct {
		key
		most int
	}{
		{key{s.client, k.clientZone, k.service, "", "", k.endpointZone}, s.most},
		{key{s.client, k.clientZone, Others, "", "", k.endpointZone}, s.most + spillPairs},
		{key{s.client, Others, Others, "", "", Others}, s.most + spillPairs + 1},
	}
	for _, t := range tries {
		if r := s.rows[t.key]; r != nil {
			return r
		}
		if len(s.rows) < t.most {
			s.rows[t.key] = &row{key: t.key}
			return s.rows[t.key]
		}
	}
	return s.rows[tries[0].key] // there is always room for the last
}

// minute are the sums of the minute that runs.
type minute struct {
	at time.Time
	// named are the rows of clients with a name, outside those of others: however many these are, they push out no named
	// one. What gave way is in rest.
	named, outside shelf
	rest           spill
	// look counts the looks at open connections.
	look uint64
}

func newMinute(at time.Time, most int) *minute {
	return &minute{at: at, named: newShelf(most), outside: newShelf(most / 4),
		rest: newSpill(most/4, Others)}
}

// row returns the row for a record.
func (m *minute) row(r *Record) *row {
	k := key{clientZone: r.Client.Zone, service: r.Service, port: r.Port, endpointZone: r.Endpoint.Zone,
		endpoint: r.Endpoint.Pod}
	if k.endpoint == "" && r.Endpoint.Addr.IsValid() {
		k.endpoint = r.Endpoint.Addr.Addr().String()
	}
	var of, gone *row
	if k.client = r.Client.name(); k.client != "" {
		of, gone = m.named.row(k)
	} else {
		k.client = r.Client.where()
		of, gone = m.outside.row(k)
	}
	if gone != nil {
		rest := m.rest.row(gone.key)
		m.forget(gone)
		m.forget(rest)
		rest.add(&gone.counts)
	}
	return of
}

// forget takes out of a row what only older looks counted.
func (m *minute) forget(r *row) {
	if r.look != m.look {
		r.open, r.look = 0, m.look
	}
}

// Name is how sums name a peer: by its workload or pod, or else by its prefix or address.
func (p *Peer) Name() string {
	if name := p.name(); name != "" {
		return name
	}
	return p.where()
}

// name is the workload or the pod of a peer; empty for others.
func (p *Peer) name() string {
	if p.Workload != "" {
		return p.Workload
	}
	return p.Pod
}

// where is the prefix or the address of a peer.
func (p *Peer) where() string {
	if p.Prefix.IsValid() {
		return p.Prefix.String()
	}
	return p.Addr.Addr().String()
}

// count adds a record that ended.
func (r *row) count(of *Record) {
	r.connections++
	if of.Failure() {
		r.failures++
	}
	r.carry(of)
}

// carry adds the traffic of a record that is not counted yet.
func (r *row) carry(of *Record) {
	sent, received := of.fresh()
	r.sent.add(sent)
	r.received.add(received)
	r.rank += sent.Bytes + received.Bytes + 1
}

// all are the rows of a minute.
func (m *minute) all() iter.Seq[*row] {
	return func(yield func(*row) bool) {
		for _, rows := range []map[key]*row{m.named.rows, m.outside.rows, m.rest.rows} {
			for _, r := range rows {
				if m.forget(r); !yield(r) {
					return
				}
			}
		}
	}
}

// sum is the form of a row that is shown.
func (r *row) sum(at time.Time) Sum {
	return Sum{Minute: at, Client: r.client, ClientZone: r.clientZone, Service: r.service, Port: r.port,
		Endpoint: r.endpoint, EndpointZone: r.endpointZone, Connections: r.connections, Failures: r.failures,
		Open: r.open, Sent: r.sent, Received: r.received}
}

// pack packs the rows of a minute.
func pack(at time.Time, all iter.Seq[*row]) sealedMinute {
	c, n := newPacker(4<<10), 0
	for r := range all {
		s := r.sum(at)
		c.sum(&s)
		n++
	}
	return sealedMinute{at, bytes.Clone(c.data), n}
}

// fold adds up sums by Service and pair of zones.
func (s *spill) fold(all iter.Seq[*Sum]) iter.Seq[*row] {
	for sum := range all {
		s.row(key{service: sum.Service, clientZone: sum.ClientZone, endpointZone: sum.EndpointZone}).add(&counts{
			sum.Connections, sum.Failures, sum.Open, sum.Sent, sum.Received})
	}
	return maps.Values(s.rows)
}

// sealedMinute are the packed sums of a minute.
type sealedMinute struct {
	at   time.Time
	data []byte
	rows int
}

// each is an iterator of the sums of a minute.
func (m sealedMinute) each(yield func(*Sum) bool) {
	c := newUnpacker(m.data)
	for range m.rows {
		s := Sum{Minute: m.at}
		if c.sum(&s); !yield(&s) {
			return
		}
	}
}

// sums are those of the last hour, and those since the start by Service and pair of zones. It is not safe for
// concurrent use.
type sums struct {
	// most is how many rows of named clients a minute has; it has a quarter as many of others.
	most int
	now  *minute
	// past are the minutes before, in at most room bytes. If all their rows take more, the first folded ones have only
	// those of others.
	past                []sealedMinute
	bytes, room, folded int
	totals              spill
}

// turn begins a minute. If the clock was set back, the minute that runs goes on until the clock has reached it.
func (s *sums) turn(now time.Time) {
	at := now.UTC().Truncate(time.Minute)
	if s.now != nil && !at.After(s.now.at) {
		return
	}
	if s.now != nil {
		s.past = append(s.past, pack(s.now.at, s.now.all()))
		s.bytes += len(s.past[len(s.past)-1].data)
	}
	for len(s.past) > 0 && at.Sub(s.past[0].at) >= Hour*time.Minute {
		s.bytes -= len(s.past[0].data)
		s.past[0] = sealedMinute{}
		s.past, s.folded = s.past[1:], max(0, s.folded-1)
	}
	for ; s.bytes > s.room && s.folded < len(s.past); s.folded++ {
		m := &s.past[s.folded]
		s.bytes -= len(m.data)
		rest := newSpill(s.most/4, Others)
		*m = pack(m.at, rest.fold(m.each))
		s.bytes += len(m.data)
	}
	s.now = newMinute(at, s.most)
}

func (s *sums) add(r *Record, now time.Time) {
	s.turn(now)
	s.now.row(r).count(r)
	s.totals.row(totalKey(r)).count(r)
}

func totalKey(r *Record) key {
	return key{service: r.Service, clientZone: r.Client.Zone, endpointZone: r.Endpoint.Zone}
}

// addOpen adds a connection of a look.
func (s *sums) addOpen(r *Record, now time.Time) {
	s.turn(now)
	of := s.now.row(r)
	of.carry(r)
	s.totals.row(totalKey(r)).carry(r)
	if s.now.forget(of); r.End == Open {
		of.open++
	}
}

// snapshot returns the sums, the oldest minute first. They stay as they are.
func (s *sums) snapshot(now time.Time) []sealedMinute {
	s.turn(now)
	return append(append([]sealedMinute(nil), s.past...), pack(s.now.at, s.now.all()))
}
