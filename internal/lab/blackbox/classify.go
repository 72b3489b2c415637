package blackbox

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// rule is one cause: explain says in words how it made a connection fail, or nothing if it did not.
type rule struct {
	cause   string
	explain func(e *evidence) string
}

// rules are in the order in which they are tried: what a packet says comes before what is concluded from packets that
// were not seen.
var rules = []rule{
	{"no way out", noWayOut},
	{"an earlier connection's entry", earlierEntry},
	{"no way to the endpoint", noWayToEndpoint},
	{"no ready endpoint", noReadyEndpoint},
	{"not programmed yet", notProgrammedYet},
	{"no such Service", noSuchService},
	{"rejected while the table changed", tableChanged},
	{"nothing listened", nothingListened},
	{"endpoint prohibits it", prohibited},
	{"released", released},
	{"entry deleted", entryDeleted},
	{"server closed", serverClosed},
	{"accept queue overflowed", overflowed},
	{"not translated", notTranslated},
	{"endpoint was gone", endpointGone},
	{"server was silent", serverSilent},
	{"endpoint was silent", endpointSilent},
	{"connection tracking was full", trackingFull},
	{"lost on the way", lost},
	{"dropped by the client's host", clientDropped},
}

// Causes are all that a failure may have, besides Unexplained.
func Causes() (all []string) {
	for _, r := range rules {
		all = append(all, r.cause)
	}
	return all
}

// classify finds the cause. Rules that conclude from what was not seen are not asked if something was not recorded.
func (e *evidence) classify() (cause, text string) {
	for _, r := range rules {
		if text = r.explain(e); text != "" {
			return r.cause, text
		}
	}
	switch {
	case len(e.blind) > 0:
		return Unexplained, "not everything was recorded: " + strings.Join(e.blind, "; ")
	case len(e.packets) == 0:
		return Unexplained, "no packet of it was seen"
	}
	return Unexplained, fmt.Sprintf("%d packets of it were seen; the last one was %v in %s", len(e.packets),
		&e.packets[len(e.packets)-1].packet, e.packets[len(e.packets)-1].space.name)
}

// refusal is the first RST, or ICMP error, that goes to the client.
func (e *evidence) refusal() *sight {
	return e.first(func(s *sight) bool { return s.icmp != 0 || s.is(rst) && !e.goes(s) })
}

// accepted is the first SYN and ACK that came to where the client is, or was seen at all.
func (e *evidence) accepted() *sight { return e.first(func(s *sight) bool { return s.accepts() }) }

// connected says whether the client was: it has sent data, or was answered.
func (e *evidence) connected() bool {
	return e.Held || e.first(func(s *sight) bool {
		return s.length > 0 && s.is(ack) || s.accepts() && s.from == e.asked.to && e.arrives(s)
	}) != nil
}

// arrives says whether a packet comes to the client's own host.
func (e *evidence) arrives(s *sight) bool { return s.space == e.owner && (!s.out || s.link == "lo") }

// ours says whether a packet was made in the namespace where it was first seen; otherwise it came in by a link.
func (e *evidence) made(s *sight) bool {
	first := e.first(func(o *sight) bool { return o.same(&s.packet) && e.goes(o) == e.goes(s) })
	return first == nil || first.out || first.link == "lo"
}

// byEndpoint says whether a refusal is the endpoint's own: it carries its address, before that is translated back.
func (e *evidence) byEndpoint(s *sight) bool {
	a, translated := e.endpoint()
	if s.icmp != 0 {
		return translated && addrOf(s.via[:]) == a.Addr()
	}
	if translated {
		return e.first(func(o *sight) bool { return o.is(rst) && o.from.to() == a }) != nil
	}
	return false
}

// rejected returns the refusal of a connection that no rule has sent to an endpoint; nil if it was sent to one.
func (e *evidence) rejected() *sight {
	r := e.refusal()
	if _, translated := e.endpoint(); translated || r == nil || e.accepted() != nil {
		return nil
	}
	return r
}

// by says who refused.
func by(s *sight) string {
	where := s.space.name
	if !s.out && s.link != "lo" {
		where = fmt.Sprintf("what is behind link %s of %s", s.link, s.space.name)
	}
	if s.icmp != 0 {
		return fmt.Sprintf("%s (ICMP %s)", where, icmpName(s.icmp, s.from.ip().Is4()))
	}
	return where
}

// noWayOut is a client whose host could not send.
func noWayOut(e *evidence) string {
	if len(e.packets) > 0 || !strings.Contains(e.Err, "unreachable") && !strings.Contains(e.Err, "no route") {
		return ""
	}
	return "no packet left the client's host, which had no route to the server" + e.ways(nil)
}

// ways lists what went of the ways to the connection's addresses, in one namespace or in all.
func (e *evidence) ways(in *space) string {
	var all []string
	for i := len(e.others) - 1; i >= 0 && len(all) < 3; i-- {
		c, is := e.others[i].what.(*change)
		if is && c.gone && (in == nil || e.others[i].space == in) {
			all = append(all, fmt.Sprintf("%s: %v since %s", e.others[i].space.name, c, instant(e.others[i].at)))
		}
	}
	if len(all) == 0 {
		return ""
	}
	return "; " + strings.Join(all, "; ")
}

// earlierEntry is a connection from a port whose earlier connection was not answered either: connection tracking keeps
// the entry of that for 120 s, and each SYN prolongs it, so that no rule sees the new one.
func earlierEntry(e *evidence) string {
	if e.accepted() != nil || e.Held {
		return ""
	}
	var earlier event
	for _, o := range e.flows {
		f := o.what.(*flow)
		if f.asked != e.asked {
			continue
		}
		switch {
		case !f.ended && o.at < e.since() && slices.Contains(e.forward, f.sent) && f.sent != f.asked:
			earlier = o
		case o.space == earlier.space && o.at < e.Failed.UnixNano():
			earlier = event{} // it has ended, or another one began
		}
	}
	if earlier.what == nil {
		return ""
	}
	text := fmt.Sprintf("%s had the entry of an earlier connection from the same port, from %s, and sent it to %s",
		earlier.space.name, instant(earlier.at), e.named(earlier.what.(*flow).sent.to.to()))
	if r := e.refusal(); r != nil {
		text += ", which " + by(r) + " refused"
	}
	return text + e.ways(nil)
}

func noWayToEndpoint(e *evidence) string {
	r := e.refusal()
	if r == nil || !r.unreachable() {
		return ""
	}
	if a, translated := e.endpoint(); translated {
		return fmt.Sprintf("%s says that it cannot reach %s%s", by(r), e.named(a), e.ways(nil))
	}
	// What cannot be sent on has no entry that would say where it was to go.
	s, known := e.objects.service(e.Server)
	if !known {
		return ""
	}
	all, _ := e.objects.at(s.Name, e.Server.Addr(), e.moment())
	var to []string
	for _, a := range all[:min(len(all), 8)] {
		to = append(to, fmt.Sprintf("%v (%s)", a.Addr, a.state()))
	}
	return fmt.Sprintf("%s says that it cannot reach the endpoint that it chose, one of %d: %s%s", by(r), len(all),
		strings.Join(to, ", "), e.ways(nil))
}

// lately is how long a change may take until it is programmed and still be on its way.
const lately = 5 * time.Second

func noReadyEndpoint(e *evidence) string {
	r := e.rejected()
	s, known := e.objects.service(e.Server)
	if r == nil || !known {
		return ""
	}
	if ready, _ := e.objects.readyAt(s.Name, e.Server.Addr(), time.Unix(0, r.at)); ready > 0 {
		return ""
	}
	text := fmt.Sprintf("rejected by %s: %s", by(r), e.objects.words(s.Name, e.Server.Addr(), time.Unix(0, r.at)))
	if nodes := e.objects.unready(e.moment()); nodes != "" {
		text += "; " + nodes
	}
	return text
}

func notProgrammedYet(e *evidence) string {
	r := e.rejected()
	s, known := e.objects.service(e.Server)
	if r == nil || !known {
		return ""
	}
	at := time.Unix(0, r.at)
	_, since := e.objects.readyAt(s.Name, e.Server.Addr(), at)
	if ready, _ := e.objects.readyAt(s.Name, e.Server.Addr(), since.Add(-1)); ready > 0 || at.Sub(since) > lately {
		return ""
	}
	return fmt.Sprintf("rejected by %s, which did not know yet: %s", by(r),
		e.objects.words(s.Name, e.Server.Addr(), at))
}

func noSuchService(e *evidence) string {
	r := e.rejected()
	if _, known := e.objects.service(e.Server); r == nil || known || e.objects.empty() {
		return ""
	}
	return fmt.Sprintf("rejected by %s: no Service has %v", by(r), e.Server)
}

// near is how close to a transaction a packet may have met the rules between old and new, and exact how long apart the
// readings may be between which it happened.
const (
	near  = 30 * time.Millisecond
	exact = 100 * time.Millisecond
)

func (c *commit) near(at int64) bool {
	return c.at-c.since <= exact.Nanoseconds() && c.since-near.Nanoseconds() <= at && at <= c.at+near.Nanoseconds()
}

func tableChanged(e *evidence) string {
	r := e.rejected()
	s, known := e.objects.service(e.Server)
	if r == nil || !known {
		return ""
	}
	for _, o := range e.others {
		c, is := o.what.(*commit)
		if is && o.space == r.space && c.near(r.at) {
			return fmt.Sprintf("rejected by %s, although %s: nf_tables' transaction %d there, between %s and %s, was under "+
				"way or just over, and its rules lacked the frontend for that moment", by(r),
				e.objects.words(s.Name, e.Server.Addr(), time.Unix(0, r.at)), c.generation, instant(c.since), instant(c.at))
		}
	}
	return ""
}

func nothingListened(e *evidence) string {
	r := e.refusal()
	if r == nil || e.accepted() != nil || e.Held {
		return ""
	}
	if a, translated := e.endpoint(); translated {
		if e.byEndpoint(r) && (r.icmp == 0 || strings.HasPrefix(icmpName(r.icmp, a.Addr().Is4()), "port")) {
			return fmt.Sprintf("the RST came from the endpoint itself: nothing listened at %s", e.named(a))
		}
		return ""
	}
	// An entry that is confirmed says that no rule has rejected the packet: the host answered itself.
	for _, f := range e.flows {
		if f := f.what.(*flow); !f.ended && f.asked == e.asked {
			return fmt.Sprintf("no rule translated it, and nothing listened at %v on %s", e.Server, by(r))
		}
	}
	return ""
}

func prohibited(e *evidence) string {
	r := e.refusal()
	a, translated := e.endpoint()
	if r == nil || !translated || e.connected() {
		return ""
	}
	if r.icmp != 0 {
		return fmt.Sprintf("%s rejected what was sent to %s", by(r), e.named(a))
	}
	return ""
}

// released is a reset that a node made, and not the endpoint.
func released(e *evidence) string {
	r := e.refusal()
	a, translated := e.endpoint()
	if r == nil || r.icmp != 0 || !translated || e.byEndpoint(r) || !e.connected() || !e.made(r) {
		return ""
	}
	return fmt.Sprintf("reset by %s, where it was released from %s", by(r), e.named(a))
}

// entryDeleted is a connection whose entry somebody deleted, so that its packets met no translation, or too late for
// another endpoint.
func entryDeleted(e *evidence) string {
	for _, o := range e.flows {
		f := o.what.(*flow)
		closes := e.first(func(s *sight) bool { return s.at < o.at && (s.is(rst) || s.is(fin)) })
		if f.ended && f.by != 0 && closes == nil && f.at >= e.since() {
			return fmt.Sprintf("its entry in %s to %s was deleted at %s by the socket %d, %s before it failed", o.space.name,
				e.named(f.sent.to.to()), instant(f.at), f.by, apart(time.Unix(0, f.at), e.Failed))
		}
	}
	return ""
}

func serverClosed(e *evidence) string {
	s := e.first(func(s *sight) bool { return (s.is(rst) || s.is(fin)) && !e.goes(s) })
	mine := e.first(func(s *sight) bool { return (s.is(rst) || s.is(fin)) && e.goes(s) })
	if s == nil || !e.connected() && e.accepted() == nil || mine != nil && mine.at < s.at {
		return ""
	}
	how := "closed the connection"
	if s.is(rst) {
		how = "reset the connection"
	}
	a, translated := e.endpoint()
	if !translated {
		a = e.Server
	}
	return fmt.Sprintf("connected, and then the endpoint %s after %s: %s", how, apart(e.Began, time.Unix(0, s.at)),
		e.named(a))
}

// delivered is the last of the client's first packets, where it was seen last.
func (e *evidence) delivered() *sight {
	return e.last(func(s *sight) bool { return s.asks() && e.goes(s) })
}

func overflowed(e *evidence) string {
	d := e.delivered()
	if d == nil {
		return ""
	}
	for _, o := range e.others {
		c, is := o.what.(*count)
		if !is || c.counter > requestQueueFull || o.space != e.host() {
			continue
		}
		a, _ := e.endpoint()
		return fmt.Sprintf("the accept queue of the listener overflowed in %s: %v, at %s", o.space.name, c, e.named(a))
	}
	return ""
}

// host is where the endpoint's address is, or, if that is not watched, where its packets were seen last.
func (e *evidence) host() *space {
	a, translated := e.endpoint()
	if !translated {
		a = e.Server
	}
	for _, s := range slices.Backward(e.spaces) { // the last one that had the address
		if s.owns(a.Addr()) {
			return s
		}
	}
	if d := e.delivered(); d != nil {
		return d.space
	}
	return nil
}

func notTranslated(e *evidence) string {
	d := e.delivered()
	_, known := e.objects.service(e.Server)
	if _, translated := e.endpoint(); translated || d == nil || !known || e.Held || len(e.blind) > 0 {
		return ""
	}
	for _, f := range e.flows {
		if entry := f.what.(*flow); !entry.ended && entry.asked == e.asked && entry.sent == e.asked {
			return fmt.Sprintf("no rule in %s translated it: it went on to %v, and was seen last at link %s of %s",
				f.space.name, e.Server, d.link, d.space.name)
		}
	}
	return ""
}

// question is the last data that the client sent, where it was seen first and last; nil if none was.
func (e *evidence) question() (first, last *sight) {
	last = e.last(func(s *sight) bool { return e.goes(s) && s.length > 0 })
	if last == nil {
		return nil, nil
	}
	return e.first(func(s *sight) bool { return e.goes(s) && s.length > 0 && s.seq == last.seq }), last
}

// answer is the last data that came after the last question, or at all if there is none, where it was seen last.
func (e *evidence) answer() *sight {
	asked, _ := e.question()
	return e.last(func(s *sight) bool {
		return !e.goes(s) && s.length > 0 && s.icmp == 0 && (asked == nil || s.at > asked.at)
	})
}

// serverSilent is a connection that the endpoint's kernel accepted, and its process did not answer.
func serverSilent(e *evidence) string {
	a, translated := e.endpoint()
	if !translated {
		a = e.Server
	}
	_, question := e.question()
	if !e.connected() || e.answer() != nil || len(e.blind) > 0 || e.Held && (question == nil || !e.reached(question)) {
		return ""
	}
	return fmt.Sprintf("the endpoint accepted the connection, and its process sent nothing: %s%s", e.named(a),
		e.ways(e.host()))
}

// endpointGone is an endpoint without a way to it any more.
func endpointGone(e *evidence) string {
	a, translated := e.endpoint()
	if !translated || !e.Held && (e.delivered() == nil || e.accepted() != nil) {
		return ""
	}
	for i := len(e.others) - 1; i >= 0; i-- {
		o := e.others[i]
		c, is := o.what.(*change)
		if is && c.gone && c.about(a.Addr()) && c.prefix.IsSingleIP() && o.at < e.Failed.UnixNano() && e.stays(o) {
			return fmt.Sprintf("it was translated to %s; in %s the %v since %s", e.named(a), o.space.name, c, instant(o.at))
		}
	}
	for _, s := range e.spaces {
		s.mu.Lock()
		gone := s.gone
		s.mu.Unlock()
		if !gone.IsZero() && gone.Before(e.Failed) && s.owns(a.Addr()) {
			return fmt.Sprintf("it was translated to %s; its namespace %s is gone since %s", e.named(a), s.name,
				gone.Format("15:04:05.000"))
		}
	}
	return ""
}

// stays says whether what went has not come back before the failure.
func (e *evidence) stays(gone event) bool {
	g := gone.what.(*change)
	return !slices.ContainsFunc(e.others, func(o event) bool {
		c, is := o.what.(*change)
		return is && o.space == gone.space && o.at > gone.at && c.kind == g.kind && c.prefix == g.prefix && !c.gone &&
			o.at < e.Failed.UnixNano()
	})
}

func endpointSilent(e *evidence) string {
	a, translated := e.endpoint()
	if !translated {
		a = e.Server
	}
	d := e.delivered()
	if d == nil || e.accepted() != nil || len(e.blind) > 0 || !e.reached(d) {
		return ""
	}
	return fmt.Sprintf("its first packet came to %s, seen last at link %s of %s, and nothing answered there", e.named(a),
		d.link, d.space.name)
}

// reached says whether a packet was seen where the endpoint is.
func (e *evidence) reached(d *sight) bool {
	h := e.host()
	return h != nil && h.owns(d.to.ip()) &&
		(d.space == h && !d.out || h.packets.total() == 0 && d.out && strings.HasPrefix(h.name, d.space.name+"/"))
}

func trackingFull(e *evidence) string {
	for _, o := range e.others {
		if c, is := o.what.(*count); is && (c.counter == conntrackDrop || c.counter == conntrackInsertFailed) &&
			e.refusal() == nil && e.accepted() == nil {
			return fmt.Sprintf("connection tracking of %s dropped packets: %v", o.space.name, c)
		}
	}
	return ""
}

// lost says where the first packet, or the last question of a connection that was held, or its answer was seen last.
func lost(e *evidence) string {
	s, what := e.delivered(), "the first packet"
	a := e.last(func(s *sight) bool { return s.accepts() })
	if e.Held {
		what = "the last question"
		_, s = e.question()
		a = e.answer()
	}
	if s == nil || e.refusal() != nil || len(e.blind) > 0 {
		return ""
	}
	if a != nil {
		if e.arrives(a) {
			return ""
		}
		s, what = a, "the answer"
	}
	if s.out {
		return fmt.Sprintf("%s left %s by link %s as %v, and came nowhere: it was lost on that link, or is outside of what "+
			"is watched%s", what, s.space.name, s.link, s.tuple, e.ways(s.space))
	}
	return fmt.Sprintf("%s came to %s by link %s as %v, and left it by none: it was dropped there%s", what, s.space.name,
		s.link, s.tuple, e.ways(s.space))
}

func clientDropped(e *evidence) string {
	if len(e.packets) > 0 || e.owner == nil || len(e.blind) > 0 || e.Held || e.asked.from.port == 0 {
		return ""
	}
	return fmt.Sprintf("no packet left %s by any link: its own rules, or its routes, dropped them%s", e.owner.name,
		e.ways(e.owner))
}
