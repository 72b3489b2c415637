package blackbox

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// sight is a packet where it was seen.
type sight struct {
	packet
	space *space
	link  string
}

// event is a record that is no packet.
type event struct {
	at    int64
	space *space
	what  fmt.Stringer
}

// evidence is all that is known of a failed connection.
type evidence struct {
	Failure
	// done is closed when the records are gathered.
	done chan struct{}
	// asked is the direction of the client's packets as it sent them.
	asked tuple
	// forward are its directions as it was translated, the last translation last; asked is the first.
	forward []tuple
	packets []sight
	flows   []event
	others  []event
	// owner is the namespace of the client's address; nil if it is not watched.
	owner *space
	// blind says what was not recorded while the connection was under way; empty if all was.
	blind   []string
	spaces  []*space
	objects *objects
	notes   *ring[note]
}

// maxPackets bounds how many packets of one connection are evidence in each namespace: the first beginPackets and the
// last of the others. maxOthers bounds how many other records are.
const (
	maxPackets   = 100
	beginPackets = 20
	maxOthers    = 400
	// slack is how much earlier than the client says its first packet may have left, and how long before a failure began
	// changes matter.
	slack  = 20 * time.Millisecond
	before = 30 * time.Second
	// decides is how long before the end of a connection that was held its last question was sent at most: longer than
	// clients wait for an answer.
	decides = 10 * time.Second
)

func newEvidence(f Failure) *evidence {
	e := &evidence{Failure: f, done: make(chan struct{})}
	e.asked = tupleOf(uint8(f.Protocol), f.Client, f.Server)
	return e
}

// since and until are between when packets of the connection may have been seen.
func (e *evidence) since() int64 { return e.Began.Add(-slack).UnixNano() }
func (e *evidence) until() int64 { return e.Failed.Add(settle).UnixNano() }

// decisive is from when on nothing may be missing: of a connection that was held, from its last question on.
func (e *evidence) decisive() int64 {
	if !e.Held {
		return e.since()
	}
	if asked, _ := e.question(); asked != nil {
		return asked.at
	}
	return max(e.since(), e.Failed.Add(-decides).UnixNano())
}

// number is what translation leaves as it is.
type number struct {
	seq, ack uint32
	flags    uint8
}

// search finds the records of many connections in one walk through the rings.
type search struct {
	spaces  []*space
	tuples  map[tuple]*evidence // of both directions
	numbers map[number]numbered
}

// numbered is the connection that a number is of, and whether its packet goes towards the endpoint.
type numbered struct {
	*evidence
	goes bool
}

// gather finds the records of connections, and says that it has.
func gather(all []*evidence, spaces []*space) {
	if len(all) == 0 {
		return
	}
	s := search{spaces, map[tuple]*evidence{}, map[number]numbered{}}
	s.findClients(all)
	var these, others []*evidence // the others are from the same ports
	for _, e := range all {
		if s.tuples[e.asked] != nil {
			others = append(others, e)
			continue
		}
		these, e.spaces = append(these, e), spaces
		s.add(e, e.asked)
	}
	// A connection may be translated on several nodes, one after the other.
	for known := 0; known < len(s.tuples); {
		known = len(s.tuples)
		s.followFlows()
		s.followEntries(these)
		s.followNumbers()
	}
	s.collect()
	for _, e := range these {
		e.finish()
		close(e.done)
	}
	gather(others, spaces)
}

// add has packets of a direction of a connection found.
func (s *search) add(e *evidence, forward tuple) {
	if _, known := s.tuples[forward]; known {
		return
	}
	e.forward = append(e.forward, forward)
	s.tuples[forward], s.tuples[forward.reversed()] = e, e
}

// findClients finds the port of each client that is known by its address alone: of its first packets to the server,
// the one next to when the client began.
func (s *search) findClients(all []*evidence) {
	var unknown []*evidence
	for _, e := range all {
		if e.asked.from.port == 0 {
			unknown = append(unknown, e)
		}
	}
	if len(unknown) == 0 {
		return
	}
	nearest := map[*evidence]int64{}
	for _, sp := range s.spaces {
		sp.packets.each(func(p *packet) {
			if !p.asks() {
				return
			}
			for _, e := range unknown {
				off := max(p.at-e.Began.UnixNano(), e.Began.UnixNano()-p.at)
				if p.from.addr != e.asked.from.addr && e.asked.from.addr != ([16]byte{}) || p.to != e.asked.to ||
					off > slack.Nanoseconds() {
					continue
				}
				if best, found := nearest[e]; !found || off < best {
					nearest[e], e.asked = off, p.tuple
				}
			}
		})
	}
}

// followFlows adds how conntrack says that connections were translated.
func (s *search) followFlows() {
	for _, sp := range s.spaces {
		sp.flows.each(func(f *flow) {
			e := s.tuples[f.asked]
			if e == nil || f.sent.reversed() == f.asked || f.at < e.since() {
				return
			}
			// The end of an entry may be that of a connection before, and comes after that of a connection that was held.
			if f.ended && e.Held || !f.ended && f.at <= e.until() {
				s.add(e, f.sent)
			}
		})
	}
}

// followEntries adds how connections that were held are still translated: their entries may have begun before the
// recorder, or so long ago that it is overwritten.
func (s *search) followEntries(all []*evidence) {
	for _, e := range all {
		for i := 0; e.Held && i < len(e.forward); i++ {
			for _, sp := range s.spaces {
				if sent, found := sp.translation(e.forward[i]); found {
					s.add(e, sent)
				}
			}
		}
	}
}

// followNumbers adds directions of packets that have the numbers of a known one: they are the same, translated.
func (s *search) followNumbers() {
	tcp := func(p *packet) bool {
		return p.icmp == 0 && p.protocol == unix.IPPROTO_TCP && p.seq|p.ack != 0 && p.flags&rst == 0
	}
	for _, sp := range s.spaces {
		sp.packets.each(func(p *packet) {
			if e := s.tuples[p.tuple]; e != nil && tcp(p) && p.at >= e.since() && p.at <= e.until() {
				s.numbers[number{p.seq, p.ack, p.flags}] = numbered{e, slices.Contains(e.forward, p.tuple)}
			}
		})
	}
	for _, sp := range s.spaces {
		sp.packets.each(func(p *packet) {
			if !tcp(p) || s.tuples[p.tuple] != nil {
				return
			}
			n := s.numbers[number{p.seq, p.ack, p.flags}]
			if n.evidence == nil || p.at < n.since() || p.at > n.until() {
				return
			}
			forward := p.tuple
			if !n.goes {
				forward = p.reversed()
			}
			s.add(n.evidence, forward)
		})
	}
}

// collect copies the records of connections.
func (s *search) collect() {
	for _, sp := range s.spaces {
		seen := map[*evidence]int{}
		sp.packets.each(func(p *packet) {
			if e := s.tuples[p.tuple]; e != nil && p.at >= e.since() && p.at <= e.until() {
				e.keep(sight{packet: *p, space: sp}, seen[e])
				seen[e]++
			}
		})
		sp.flows.each(func(f *flow) {
			if e := s.tuples[f.asked]; e != nil && f.at <= e.until() && len(e.flows) < maxOthers {
				e.flows = append(e.flows, event{f.at, sp, new(*f)})
			}
		})
	}
}

// keep adds a packet that follows as many others in its namespace, instead of the oldest one after the beginning if
// there are too many.
func (e *evidence) keep(p sight, follows int) {
	if follows < maxPackets {
		e.packets = append(e.packets, p)
		return
	}
	first := len(e.packets) - maxPackets
	e.packets[first+beginPackets+(follows-beginPackets)%(maxPackets-beginPackets)] = p
}

// finish adds what is not found by tuples.
func (e *evidence) finish() {
	slices.SortStableFunc(e.packets, func(a, b sight) int { return compare(a.at, b.at) })
	for i := range e.packets {
		e.packets[i].link = e.packets[i].space.link(e.packets[i].packet.link)
	}
	slices.SortStableFunc(e.flows, func(a, b event) int { return compare(a.at, b.at) })
	from := e.Failed.Add(-before).UnixNano()
	for _, s := range e.spaces {
		if s.owns(e.asked.from.ip()) && e.owner == nil {
			e.owner = s
		}
		e.addOthers(s, from)
		e.addBlind(s)
	}
	slices.SortStableFunc(e.others, func(a, b event) int { return compare(a.at, b.at) })
}

// addBlind says what a namespace has not recorded, or no longer has.
func (e *evidence) addBlind(s *space) {
	if p, overwritten := s.packets.oldest(); overwritten && p.at > e.decisive() {
		e.blind = append(e.blind, fmt.Sprintf("packets in %s before %s were overwritten", s.name, instant(p.at)))
	}
	s.mu.Lock()
	began := s.began
	s.mu.Unlock()
	if !began.IsZero() && began.UnixNano() > max(e.decisive(), e.Began.UnixNano()) {
		e.blind = append(e.blind, fmt.Sprintf("it began before the recorder: in %s packets are recorded since %s", s.name,
			instant(began.UnixNano())))
	}
}

// addOthers adds what happened in a namespace while the connection was under way, and shortly before.
func (e *evidence) addOthers(s *space, from int64) {
	add := func(at int64, what fmt.Stringer) {
		if len(e.others) < maxOthers {
			e.others = append(e.others, event{at, s, what})
		}
	}
	s.changes.each(func(c *change) {
		if c.at >= from && c.at <= e.until() && (c.kind == linkChange || e.concerns(c)) {
			add(c.at, new(*c))
		}
	})
	s.counts.each(func(c *count) {
		if c.at < e.since() || c.since > e.until() {
			return
		}
		if c.counter == packetsLost || c.counter == eventsLost {
			if c.at < e.decisive() {
				return
			}
			e.blind = append(e.blind, fmt.Sprintf("%d %s in %s", c.by, c.counter, s.name))
			return
		}
		add(c.at, new(*c))
	})
	s.commits.each(func(c *commit) {
		if c.at >= e.Began.Add(-time.Second).UnixNano() && c.since <= e.until() {
			add(c.at, new(*c))
		}
	})
}

// concerns says whether a change is about the way to one of the connection's addresses.
func (e *evidence) concerns(c *change) bool {
	return slices.ContainsFunc(e.forward, func(t tuple) bool { return c.about(t.to.ip()) || c.about(t.from.ip()) })
}

func (c *commit) String() string {
	return fmt.Sprintf("nf_tables: transaction %d, after %s", c.generation, instant(c.since))
}

func compare(a, b int64) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

// String lists all records, for a file.
func (e *evidence) String() string {
	type line struct {
		at   int64
		text string
	}
	var lines []line
	for i := range e.packets {
		p := &e.packets[i]
		way := "in"
		if p.out {
			way = "out"
		}
		lines = append(lines, line{p.at, fmt.Sprintf("%s %s %s: %v", p.space.name, p.link, way, &p.packet)})
	}
	for _, o := range slices.Concat(e.flows, e.others) {
		lines = append(lines, line{o.at, fmt.Sprintf("%s: %v", o.space.name, o.what)})
	}
	if e.notes != nil {
		e.notes.each(func(n *note) {
			if n.at.After(e.Began.Add(-before)) && !n.at.After(e.Failed) {
				lines = append(lines, line{n.at.UnixNano(), n.text})
			}
		})
	}
	slices.SortStableFunc(lines, func(a, b line) int { return compare(a.at, b.at) })
	var b strings.Builder
	fmt.Fprintf(&b, "%v\nbegan %s, failed %s\n", &e.Failure, instant(e.Began.UnixNano()), instant(e.Failed.UnixNano()))
	for _, s := range e.blind {
		fmt.Fprintf(&b, "not recorded: %s\n", s)
	}
	if e.objects != nil {
		fmt.Fprintln(&b, e.cluster())
	}
	for _, l := range lines {
		fmt.Fprintf(&b, "%s %s\n", instant(l.at), l.text)
	}
	return b.String()
}

// cluster says how the Service and the endpoint stood.
func (e *evidence) cluster() string {
	var all []string
	if s, known := e.objects.service(e.Server); known {
		all = append(all, e.objects.words(s.Name, e.Server.Addr(), e.moment()))
	}
	if a, translated := e.endpoint(); translated {
		all = append(all, e.named(a))
	}
	if nodes := e.objects.unready(e.moment()); nodes != "" {
		all = append(all, nodes)
	}
	return strings.Join(all, "; ")
}

// moment is the one that counts: when the answer came that refused, or when the client gave up.
func (e *evidence) moment() time.Time {
	if s := e.last(func(s *sight) bool { return s.is(rst) || s.icmp != 0 }); s != nil {
		return time.Unix(0, s.at)
	}
	return e.Failed
}

// endpoint is where the connection was sent in the end; false if it was not translated.
func (e *evidence) endpoint() (a netip.AddrPort, translated bool) {
	for _, t := range e.forward {
		if t.to != e.asked.to {
			a, translated = t.to.to(), true
		}
	}
	return a, translated
}

// named is an endpoint with how it stands in EndpointSlices.
func (e *evidence) named(a netip.AddrPort) string {
	return fmt.Sprintf("%v, %s", a, e.objects.standing(a, e.moment()).words(e.moment()))
}

// first returns the first packet that is so; nil if none is. last returns the last one.
func (e *evidence) first(is func(*sight) bool) *sight {
	for i := range e.packets {
		if is(&e.packets[i]) {
			return &e.packets[i]
		}
	}
	return nil
}

func (e *evidence) last(is func(*sight) bool) *sight {
	for i := len(e.packets) - 1; i >= 0; i-- {
		if is(&e.packets[i]) {
			return &e.packets[i]
		}
	}
	return nil
}

// goes says whether a packet goes towards the endpoint. An ICMP error is about one that did.
func (e *evidence) goes(s *sight) bool { return s.icmp == 0 && slices.Contains(e.forward, s.tuple) }
