package outlier

import (
	"net/netip"
	"slices"
	"time"

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
	// An unhealthy endpoint is probed after recoverFirst, then after twice as long each time.
	recoverFirst = time.Second
	recoverMost  = time.Minute
	// An endpoint that comes back and fails again within memory must answer for penaltyFirst, then for twice as long.
	memory       = 5 * time.Minute
	penaltyFirst = time.Second
	penaltyMost  = time.Minute
	answerPause  = time.Second
	// A trial ends after trialFirst, then after twice as long each time.
	trialFirst = 10 * time.Second
	// No trial begins this soon after the endpoint was seen to answer a client.
	answeredMemory = time.Minute
	trialMost      = 5 * time.Minute
)

// maxTracked bounds the endpoints that are remembered, like the kernel's set of each family, and maxNamespaceTracked
// those of a namespace: whoever fills the one with dead endpoints of his own must leave room for others.
const (
	maxTracked          = 16384
	maxNamespaceTracked = maxTracked / 8
)

// enoughWaiting is how many clients must wait before an endpoint is ejected on trial.
const enoughWaiting = 2

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

// finding is all that a probe found out.
type finding struct {
	outcome Outcome
	// proven says that another endpoint answered: what this node sends arrives at least there. The fields below matter
	// only for a Silent endpoint if it is false.
	proven bool
	// waiting counts client addresses that wait for the endpoint. answered says that it has answered others meanwhile.
	waiting  int
	answered bool
}

type state uint8

const (
	// cleared endpoints are remembered for their past only.
	cleared state = iota
	// suspected endpoints are probed next.
	suspected
	// unhealthy endpoints are reported, and probed until they answer.
	unhealthy
)

// track is what is known about one endpoint.
//
//	          evidence             probe fails
//	cleared ────────────▶ suspected ────────────▶ unhealthy
//	   ▲                      │ probe accepted        │ probes accepted, or the trial is over
//	   └──────────────────────┴───────────────────────┘
type track struct {
	endpoint netip.AddrPort
	// owner is the namespace that the track counts for.
	owner string
	// ports are those that have the endpoint; never empty while the track is in the machine.
	ports []*dataplane.ServicePort
	local bool
	state state
	// due is when the next probe is due. probing says that one is under way, begun for this track.
	due     time.Time
	probing bool
	// touched is when evidence was read last, or the state changed.
	touched time.Time

	// since is when the first evidence was read, and judged when the endpoint became unhealthy.
	since, judged time.Time
	cause         snapshot.Cause
	probes        int

	// quiet is the current pause after a probe that cleared the endpoint, and quietUntil its end.
	quiet      time.Duration
	quietUntil time.Time

	// pause is the current pause between probes of an unhealthy endpoint. answering is since when all were accepted.
	pause     time.Duration
	answering time.Time
	penalty   time.Duration
	// returned is when the endpoint was unhealthy last.
	returned time.Time

	// answered is when the endpoint was last seen to answer a client though it does not answer this node.
	answered time.Time
	// trialEnd is when a trial ends; zero if the endpoint's state is proven. trial is its length.
	trialEnd time.Time
	trial    time.Duration

	flush flush
	// announced says that it is logged what became of an unhealthy endpoint.
	announced bool
}

// machine decides about endpoints. It does no I/O and reads no clock.
type machine struct {
	tracks map[netip.AddrPort]*track
	// owned counts the tracks of each namespace.
	owned map[string]int
}

func newMachine() *machine {
	return &machine{tracks: map[netip.AddrPort]*track{}, owned: map[string]int{}}
}

// forget removes a track.
func (m *machine) forget(t *track) {
	delete(m.tracks, t.endpoint)
	if m.owned[t.owner]--; m.owned[t.owner] == 0 {
		delete(m.owned, t.owner)
	}
}

// suspect records new evidence. If the endpoint is not known yet, ports are those that have it.
func (m *machine) suspect(now time.Time, endpoint netip.AddrPort, ports []*dataplane.ServicePort) {
	t := m.tracks[endpoint]
	if t == nil {
		if len(ports) == 0 || len(m.tracks) >= maxTracked {
			return
		}
		t = &track{endpoint: endpoint, ports: ports}
		if t.owner = t.namespace(); m.owned[t.owner] >= maxNamespaceTracked {
			return
		}
		m.tracks[endpoint] = t
		m.owned[t.owner]++
	}
	if now.Sub(t.touched) > time.Minute {
		t.quiet = 0
	}
	t.touched = now
	switch t.state {
	case cleared:
		t.state, t.since, t.probes = suspected, now, 0
		t.due = later(now, t.quietUntil)
	case unhealthy:
		t.flush.wanted = true
	}
}

// found records the end of a probe. It reports whether the endpoint's health has changed.
func (m *machine) found(now time.Time, endpoint netip.AddrPort, f finding) (changed bool) {
	t := m.tracks[endpoint]
	if t == nil || !t.probing {
		return false // it left all Services meanwhile
	}
	t.probing = false
	t.probes++
	if t.state == unhealthy {
		return t.recheck(now, f)
	}
	return t.judge(now, f)
}

// judge decides about a suspected endpoint.
func (t *track) judge(now time.Time, f finding) (changed bool) {
	if f.answered {
		t.answered = now
	}
	trial := f.waiting >= enoughWaiting && (t.answered.IsZero() || now.Sub(t.answered) > answeredMemory)
	switch {
	case f.outcome == Rejected:
		t.fail(now, snapshot.Refused, false)
	case f.outcome == Silent && (f.proven || trial):
		t.fail(now, snapshot.Unanswered, !f.proven)
	case f.outcome == Accepted:
		t.clear(now, quietMost)
		return false
	default:
		t.clear(now, doubtMost)
		return false
	}
	return true
}

// clear ends a suspicion. Evidence that comes within a pause leads to a probe after it.
func (t *track) clear(now time.Time, most time.Duration) {
	t.state, t.touched, t.due = cleared, now, time.Time{}
	t.quiet = min(max(2*t.quiet, quietFirst), most)
	t.quietUntil = now.Add(t.quiet)
}

// fail makes an endpoint unhealthy.
func (t *track) fail(now time.Time, cause snapshot.Cause, trial bool) {
	again := !t.returned.IsZero() && now.Sub(t.returned) < memory
	if !again {
		t.penalty, t.trial = 0, 0
	} else {
		t.penalty = min(max(2*t.penalty, penaltyFirst), penaltyMost)
	}
	t.state, t.cause, t.judged, t.touched = unhealthy, cause, now, now
	t.quiet, t.quietUntil, t.answering = 0, time.Time{}, time.Time{}
	t.pause, t.announced = recoverFirst, false
	t.trialEnd = time.Time{}
	t.due = now.Add(t.pause)
	if trial {
		t.startTrial(now)
	}
}

func (t *track) startTrial(now time.Time) {
	t.trial = min(max(2*t.trial, trialFirst), trialMost)
	t.trialEnd = now.Add(t.trial)
}

// recheck decides about an unhealthy endpoint.
func (t *track) recheck(now time.Time, f finding) (changed bool) {
	if f.outcome == Accepted {
		if t.answering.IsZero() {
			t.answering = now
		}
		left := t.penalty - now.Sub(t.answering)
		if left <= 0 {
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
	switch f.outcome {
	case Rejected:
		t.cause, t.trialEnd = snapshot.Refused, time.Time{}
	case Silent:
		t.cause = snapshot.Unanswered
		switch {
		case f.proven:
			t.trialEnd = time.Time{}
		case t.trialEnd.IsZero():
			t.startTrial(now) // perhaps policies now forbid what this node sends
		}
	}
	return t.cause != before
}

// comeBack makes an endpoint healthy again.
func (t *track) comeBack(now time.Time) {
	t.state, t.due, t.trialEnd = cleared, time.Time{}, time.Time{}
	t.returned, t.touched, t.flush = now, now, flush{}
}

// advance ends trials and forgets endpoints. It returns the endpoints whose health has changed.
func (m *machine) advance(now time.Time) (changed []*track) {
	for _, t := range m.tracks {
		switch {
		case t.state == unhealthy && !t.trialEnd.IsZero() && !now.Before(t.trialEnd):
			t.comeBack(now)
			t.probing = false
			changed = append(changed, t)
		case t.state == cleared && !t.probing && now.Sub(t.touched) >= memory:
			m.forget(t)
		}
	}
	return changed
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
		earlier(t.trialEnd)
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
			if c := a.due.Compare(b.due); c != 0 {
				return c
			}
			return a.endpoint.Compare(b.endpoint)
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
		t.probing = true
		running[best]++
		probe = append(probe, t)
	}
	return probe
}

// namespace is whose turn a probe takes.
func (t *track) namespace() string { return t.ports[0].Name.Service.Namespace }

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}
