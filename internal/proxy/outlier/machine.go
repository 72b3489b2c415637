package outlier

import (
	"cmp"
	"net/netip"
	"slices"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/clock"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// The times of the rules. docs/decisions/0017-second-chance.md gives the reasons.
const (
	// After a probe that clears an endpoint, the next one waits for quietFirst, then twice as long each time.
	quietFirst = time.Second
	quietMost  = 8 * time.Second
	// The same if the probe did not show anything.
	doubtMost = 30 * time.Second
	// Evidence counts for doubtMemory.
	doubtMemory = 10 * time.Second
	// A client that sends its first packet again has waited for resent.
	resent = time.Second
	// Connections to a doubted endpoint may be released once it answered nobody for muteFor.
	muteFor = 3 * time.Second
	// An unhealthy endpoint is probed after recoverFirst, then after twice as long each time.
	recoverFirst = time.Second
	recoverMost  = time.Minute
	// An endpoint that comes back and fails again within memory must answer for penaltyFirst, then for twice as long.
	memory       = 5 * time.Minute
	penaltyFirst = time.Second
	penaltyMost  = time.Minute
	answerPause  = time.Second
	// A trial begins trialFirst after the ejection, then after twice as long each time.
	trialFirst = time.Minute
	trialMost  = 5 * time.Minute
)

// maxTracked bounds the endpoints that are remembered, like the kernel's set of each family, and maxNamespaceTracked
// those of a namespace: whoever fills the one with dead endpoints of his own must leave room for others.
const (
	maxTracked          = 16384
	maxNamespaceTracked = maxTracked / 8
)

// Outcome is the result of a probe.
type Outcome uint8

const (
	// Accepted means that a connection was accepted.
	Accepted Outcome = iota
	// Rejected means that no connection was accepted, and some were refused.
	Rejected
	// Silent means that nothing came back, or only that the endpoint is unreachable.
	Silent
	// Failed means that the probe could not be sent.
	Failed
)

var outcomeNames = [...]string{"accepted", "refused", "silent", "failed"}

func (o Outcome) String() string { return outcomeNames[o] }

type state uint8

const (
	// cleared endpoints are remembered for their past only.
	cleared state = iota
	// suspected endpoints are probed next.
	suspected
	// doubted endpoints have accepted no probe, which may be a policy's doing.
	doubted
	// unhealthy endpoints answer nobody. They are reported, and probed until they answer.
	unhealthy
)

// trackKey names a track: what clients of one Service see of an endpoint says nothing about it in another.
type trackKey struct {
	service  snapshot.Name
	endpoint netip.AddrPort
}

// track is what is known about an endpoint of a Service.
//
//	          evidence             no probe accepted           answers nobody
//	cleared ────────────▶ suspected ───────────────▶ doubted ────────────────▶ unhealthy
//	   ▲                      │ probe accepted           │ probe accepted,        │ anybody answered, or
//	   │                      │                          │ or no evidence         │ the ejection's time is over
//	   └──────────────────────┴──────────────────────────┴────────────────────────┘
type track struct {
	trackKey
	// ports are those of the Service that have the endpoint; never empty while the track is in the machine.
	ports []*dataplane.ServicePort
	state state
	// due is when the next probe is due. probing says that one is under way, begun for this track.
	due     time.Time
	probing bool
	// evidence is when there was more of it than before, saying that cause. touched is that, or when the state changed.
	evidence, touched time.Time
	cause             snapshot.Cause
	// outcome is that of the last probe. mute says that nobody was answered for muteFor, and some were before.
	outcome Outcome
	mute    bool
	// begun is when the last probe began, and ended when the last one that ended did.
	begun, ended time.Time

	// since is when the first evidence was read, and judged when the endpoint became unhealthy.
	since, judged time.Time
	probes        int

	// quiet is the current pause after a probe that did not make the endpoint unhealthy, and quietUntil its end.
	quiet      time.Duration
	quietUntil time.Time

	// pause is the current pause between probes of an unhealthy endpoint. answering is since when all were accepted.
	pause     time.Duration
	answering time.Time
	penalty   time.Duration
	// recovered is when an unhealthy endpoint answered again, and returned when it was unhealthy last.
	recovered, returned time.Time

	// trialEnd is when the ejection ends at the latest, and trial how long it lasts.
	trialEnd time.Time
	trial    time.Duration
	// silence is how long the endpoint had to be silent before the last ejection.
	silence time.Duration
	proof   proof

	// asks says who asks for probes, and path for what path, if by HTTP, which it is once the endpoint is known to have
	// accepted a client. missed is since when probes fail, and used says that it is in a pool as a last resort.
	asks        asks
	path        string
	known, used bool
	missed      time.Time

	flush flush
	// announced says that it is logged what became of an unhealthy endpoint.
	announced bool
}

// machine decides about endpoints. It does no I/O and reads no clock.
type machine struct {
	tracks map[trackKey]*track
	// owned counts the tracks of each namespace.
	owned map[string]int
	// asked counts those whose probes somebody asks for, of each namespace, and askedAll of all.
	asked    map[string]int
	askedAll int
	// began is when the process began to look: just then, it knows nothing of what clients use.
	began time.Time
	// answers is the history of all endpoints, whichever Services they have.
	answers history
}

func newMachine() *machine {
	return &machine{tracks: map[trackKey]*track{}, owned: map[string]int{}, asked: map[string]int{},
		answers: history{of: map[netip.AddrPort]*past{}}}
}

// add returns a new track; nil if there are too many.
func (m *machine) add(k trackKey) *track {
	if ns := k.service.Namespace; len(m.tracks) >= maxTracked || m.owned[ns] >= maxNamespaceTracked {
		return nil
	}
	t := &track{trackKey: k}
	m.tracks[k] = t
	m.owned[t.namespace()]++
	return t
}

// forget removes a track that nobody asks for.
func (m *machine) forget(t *track) {
	delete(m.tracks, t.trackKey)
	if m.owned[t.namespace()]--; m.owned[t.namespace()] == 0 {
		delete(m.owned, t.namespace())
	}
}

// suspect records new evidence. If the endpoint is not known yet, ports are those of the Service that have it.
func (m *machine) suspect(now time.Time, k trackKey, cause snapshot.Cause, ports []*dataplane.ServicePort) {
	t := m.tracks[k]
	if t == nil {
		if len(ports) == 0 {
			return
		}
		if t = m.add(k); t == nil {
			return
		}
		t.ports = ports
	}
	if t.asks == asResort { // which is probed all the time
		return
	}
	if now.Sub(t.touched) > time.Minute {
		t.quiet = 0
	}
	t.touched, t.evidence = now, now
	switch t.state {
	case cleared:
		t.state, t.since, t.probes, t.cause = suspected, now, 0, cause
		t.due = clock.Later(now, t.quietUntil)
		if t.outcome == Rejected || t.outcome == Silent { // it need not be probed again for a client to choose again
			t.state, t.flush.wanted = doubted, true
		}
	case suspected:
		t.cause = cause
	case doubted:
		if t.flush.wanted = true; !t.doubtful() { // what was told stays for the time of the doubt
			t.cause = cause
		}
	case unhealthy:
		t.flush.wanted = true
	}
}

// found records the end of a probe. It reports whether what is known of the endpoint's health has changed.
func (m *machine) found(now time.Time, k trackKey, o Outcome) (changed bool) {
	t := m.tracks[k]
	if t == nil || !t.probing {
		return false // it left the Service meanwhile
	}
	t.probing = false
	t.probes++
	was := t.doubtful()
	t.outcome, t.ended = o, now
	switch {
	case t.asks == asResort:
		return m.foundResort(now, t, o)
	case t.state == unhealthy:
		return m.recheck(now, t, o)
	case o == Accepted:
		t.clear(now, quietMost)
	case o == Failed:
		t.clear(now, doubtMost)
	default:
		first := t.asks == byService && t.missed.IsZero()
		if t.asks == byService && m.missedAgain(now, t, o) {
			return true
		}
		if t.state == suspected {
			t.flush.wanted = true
		}
		t.state, t.touched = doubted, now
		t.quiet = min(max(2*t.quiet, quietFirst), doubtMost)
		if t.due = now.Add(t.quiet); first {
			t.due = now.Add(recoverFirst)
		}
	}
	return t.doubtful() != was
}

// doubtful says that a doubted endpoint is worth telling: it refuses clients and this node, so that it is of no use to
// try it again, or it answers nobody, so that its connections may be released.
func (t *track) doubtful() bool {
	if t.cause == snapshot.Refused {
		return t.state == doubted && t.outcome == Rejected
	}
	return t.state == doubted && t.mute
}

// clear ends a suspicion. Evidence that comes within a pause leads to a probe after it.
func (t *track) clear(now time.Time, most time.Duration) {
	t.state, t.touched, t.due, t.missed, t.proof = cleared, now, time.Time{}, time.Time{}, proof{}
	t.quiet = min(max(2*t.quiet, quietFirst), most)
	t.quietUntil = now.Add(t.quiet)
	if t.asks != unasked {
		t.due = now.Add(askEvery)
		if most == doubtMost {
			t.due = clock.Later(t.due, t.quietUntil)
		}
	}
	t.flush = flush{}
}

// lastAnswer returns since when an endpoint has answered nobody, and how long that must be to mean that it answers
// nobody. It is not known of an endpoint that never answered.
func (m *machine) lastAnswer(t *track) (last time.Time, enough time.Duration, known bool) {
	p := m.answers.of[t.endpoint]
	switch {
	case !t.returned.IsZero() && t.silence > 0 && (p == nil || !p.last.After(t.judged)):
		return t.returned, t.silence, true // nobody was answered since it was ejected
	case p == nil:
		return last, 0, false
	}
	return clock.Later(p.last, t.returned), p.enough(), true
}

// silent says whether an endpoint for which clients wait, or which refuses them, answers nobody, and how long it had to
// be silent for that. Nobody else's word counts: what a policy makes of a client or of a probe does not change what
// others are answered.
func (m *machine) silent(now time.Time, t *track) (enough time.Duration, yes bool) {
	last, enough, known := m.lastAnswer(t)
	waited := last
	if t.cause == snapshot.Unanswered {
		waited = last.Add(resent)
	}
	return enough, known && t.evidence.After(waited) && now.Sub(last) >= enough
}

// fail makes an endpoint unhealthy.
func (m *machine) fail(now time.Time, t *track, silence time.Duration) {
	if t.recovered.IsZero() || now.Sub(t.recovered) >= memory {
		t.penalty = 0
	} else {
		t.penalty = min(max(2*t.penalty, penaltyFirst), penaltyMost)
	}
	if t.returned.IsZero() || now.Sub(t.returned) >= memory {
		t.trial = 0
	}
	t.trial = min(max(2*t.trial, trialFirst), trialMost)
	t.state, t.judged, t.touched, t.silence, t.proof = unhealthy, now, now, silence, proof{}
	t.quiet, t.quietUntil, t.answering, t.missed = 0, time.Time{}, time.Time{}, time.Time{}
	t.pause, t.announced, t.flush = recoverFirst, false, flush{ejected: t.flush.ejected}
	t.due, t.trialEnd = now.Add(t.pause), now.Add(t.trial)
	m.answers.freeze(t.endpoint)
}

// recheck decides about an unhealthy endpoint.
func (m *machine) recheck(now time.Time, t *track, o Outcome) (changed bool) {
	if o == Accepted {
		if t.answering.IsZero() {
			t.answering = now
		}
		left := t.penalty - now.Sub(t.answering)
		if left <= 0 {
			m.answers.forgive(t.endpoint)
			t.recovered = now
			t.comeBack(now)
			return true
		}
		t.due = now.Add(min(left, answerPause))
		return false
	}
	t.answering = time.Time{}
	t.pause = min(2*t.pause, recoverMost)
	t.due = now.Add(t.pause)
	before := t.cause
	switch o {
	case Rejected:
		t.cause = snapshot.Refused
	case Silent:
		t.cause = snapshot.Unanswered
	}
	return t.cause != before
}

// comeBack makes an endpoint healthy again.
func (t *track) comeBack(now time.Time) {
	t.state, t.due, t.trialEnd, t.probing, t.outcome = cleared, time.Time{}, time.Time{}, false, Accepted
	if t.returned, t.touched, t.flush = now, now, (flush{}); t.asks != unasked {
		t.due = now.Add(askEvery)
	}
}

// advance decides about endpoints by the time and the answers to clients, and forgets endpoints. It returns those whose
// health has changed.
func (m *machine) advance(now time.Time) (changed []*track) {
	for _, t := range m.tracks {
		was, p := t.doubtful(), m.answers.of[t.endpoint]
		t.mute = t.outcome == Silent && p != nil && now.Sub(p.last) >= muteFor
		m.advanceAsked(now, t)
		switch {
		case t.state == unhealthy && t.hasTrial() && p != nil && p.last.After(t.judged):
			t.recovered = now
			t.comeBack(now)
			changed = append(changed, t)
		case t.state == unhealthy && t.hasTrial() && !now.Before(t.trialEnd):
			t.comeBack(now)
			changed = append(changed, t)
		case t.state == doubted:
			silence, yes := m.silent(now, t)
			yes = yes && now.Sub(t.proof.found) < proofLasts
			probed := m.probedSince(now, t)
			if yes && !probed && !t.probing {
				t.due = now
			}
			switch {
			case yes && probed:
				m.fail(now, t, silence)
				changed = append(changed, t)
			case now.Sub(clock.Later(t.evidence, t.missed)) >= doubtMemory && !t.probing:
				if t.clear(now, doubtMost); was {
					changed = append(changed, t)
				}
			case t.doubtful() != was:
				changed = append(changed, t)
			}
		case t.state == cleared && t.asks == unasked && !t.probing && now.Sub(t.touched) >= memory:
			m.forget(t)
		}
	}
	return changed
}

// decides says whether an endpoint may be ejected, or come back, with the next answer.
func (m *machine) decides() bool {
	for _, t := range m.tracks {
		if t.asks != asResort && t.state != cleared {
			return true
		}
	}
	return false
}

// next returns when something is to be done, if no evidence comes.
func (m *machine) next() (at time.Time, any bool) {
	earlier := func(t time.Time) {
		if !t.IsZero() && (!any || t.Before(at)) {
			at, any = t, true
		}
	}
	for _, t := range m.tracks {
		if !t.probing {
			earlier(t.due)
		}
		if t.hasTrial() {
			earlier(t.trialEnd)
		}
		earlier(t.flush.due)
	}
	return at, any
}

// Bounds of probes at a time. A namespace may have more than its share while no other waits.
const (
	maxProbes          = 32
	maxNamespaceProbes = 8
	maxAloneProbes     = 24
)

// start returns the endpoints to be probed now, and marks them. The namespace with the fewest probes under way comes
// first, within it the endpoint that has waited longest.
func (m *machine) start(now time.Time) (probe []*track) {
	running, waiting := map[string]int{}, map[string][]*track{}
	total := 0
	for _, t := range m.tracks {
		switch ns := t.namespace(); {
		case t.probing:
			running[ns]++
			total++
		case !t.due.IsZero() && !now.Before(t.due):
			waiting[ns] = append(waiting[ns], t)
		}
	}
	for _, list := range waiting {
		slices.SortFunc(list, func(a, b *track) int {
			return cmp.Or(a.due.Compare(b.due), a.endpoint.Compare(b.endpoint), a.service.Compare(b.service))
		})
	}
	for ; total < maxProbes && len(waiting) > 0; total++ {
		most := maxNamespaceProbes
		if len(waiting) == 1 {
			most = maxAloneProbes
		}
		best := ""
		for ns := range waiting {
			if best == "" || running[ns] < running[best] || running[ns] == running[best] && ns < best {
				best = ns
			}
		}
		if running[best] >= most {
			break
		}
		t := waiting[best][0]
		if waiting[best] = waiting[best][1:]; len(waiting[best]) == 0 {
			delete(waiting, best)
		}
		t.probing, t.begun = true, now
		running[best]++
		probe = append(probe, t)
	}
	return probe
}

// namespace is whose turn a probe takes.
func (t *track) namespace() string { return t.service.Namespace }
