package outlier

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// asks says who asks for probes of an endpoint that nobody suspects.
type asks uint8

const (
	// unasked: nobody.
	unasked asks = iota
	// byService: its Service has a probe. It is healthy until two probes in a row fail, as long as clients use it.
	byService
	// asResort: it is not ready, and its Service has no other. It is unhealthy until it accepts a probe.
	asResort
)

// askEvery is the pause between probes of an endpoint that accepts them, as long as the kernel remembers that it has
// answered a client.
const askEvery = 5 * time.Second

// askSpread is over what time nodes divide the first probes of a last resort that none of their clients has used.
const askSpread = 5 * time.Second

// maxAsked bounds the endpoints whose probes somebody asks for, and maxNamespaceAsked those of a namespace.
const (
	maxAsked          = maxTracked / 2
	maxNamespaceAsked = 256
)

// eachAsked calls do for each endpoint of a port whose probes somebody asks for, perhaps twice.
func eachAsked(sp *dataplane.ServicePort, do func(netip.AddrPort, asks)) {
	switch {
	case len(sp.Resort) > 0:
		for _, e := range sp.Resort {
			do(e, asResort)
		}
	case sp.Probe.Asked && watches(sp):
		eachEndpoint(sp, func(e netip.AddrPort) { do(e, byService) })
	}
}

// askFor has the endpoints of a Service probed that ask for it, and no others of those tracks that its earlier version
// had.
func (d *Detector) askFor(name snapshot.Name, svc *dataplane.Service, had map[*track]bool) {
	asked, now := map[*track]bool{}, time.Now()
	eachPort(svc, func(sp *dataplane.ServicePort) {
		eachAsked(sp, func(e netip.AddrPort, why asks) {
			t := d.machine.ask(now, trackKey{name, e}, why)
			if t == nil {
				return
			}
			if asked[t] = true; why == byService {
				t.path = sp.Probe.Path
			}
			if !slices.Contains(t.ports, sp) {
				t.ports = append(t.ports, sp)
			}
		})
	})
	for t := range had {
		if t.asks != unasked && !asked[t] {
			if t.used {
				d.log(t).Info("the last resort is over: its Service has a usable endpoint again, or is gone")
			}
			d.machine.unask(t)
		}
	}
}

// ask has an endpoint probed. It returns nil if there are too many, or if it must not be probed.
func (m *machine) ask(now time.Time, k trackKey, why asks) *track {
	t := m.tracks[k]
	if t != nil && t.asks == why {
		return t
	}
	if t != nil && t.asks != unasked {
		m.unask(t)
		t = m.tracks[k]
	}
	ns := k.service.Namespace
	if m.askedAll >= maxAsked || m.asked[ns] >= maxNamespaceAsked || !mayProbe(k.endpoint.Addr()) {
		return nil
	}
	if t == nil {
		if t = m.add(k); t == nil {
			return nil
		}
	}
	m.askedAll, m.asked[ns] = m.askedAll+1, m.asked[ns]+1
	t.asks, t.touched = why, now
	switch {
	case why == asResort:
		t.state, t.judged, t.since, t.due, t.pause = unhealthy, now, now, now, recoverFirst/2
		if m.answers.of[k.endpoint] == nil && now.Sub(m.began) >= askSpread {
			t.due = now.Add(rand.N(askSpread)) // nobody here used it, as on most nodes
		}
		t.probing, t.penalty, t.flush = false, 0, flush{}
	case t.state == cleared && t.due.IsZero():
		t.due = now.Add(askEvery)
	}
	return t
}

// unask ends that. What was a last resort is forgotten, and all else goes on as evidence has it.
func (m *machine) unask(t *track) {
	m.askedAll--
	if m.asked[t.namespace()]--; m.asked[t.namespace()] == 0 {
		delete(m.asked, t.namespace())
	}
	why := t.asks
	if t.asks, t.path, t.missed = unasked, "", (time.Time{}); t.state == cleared {
		t.due = time.Time{}
	}
	if why == asResort {
		m.forget(t)
	}
}

// foundResort records the end of a probe of a last resort. It reports whether it is used from now on, or no longer.
func (m *machine) foundResort(now time.Time, t *track, o Outcome) (changed bool) {
	if t.state == unhealthy {
		return m.recheck(now, t, o)
	}
	if t.touched = now; o == Accepted || o == Failed {
		t.due = now.Add(askEvery)
		return false
	}
	m.fail(now, t, 0)
	return true
}

// missedAgain records that an endpoint which is not unhealthy failed a probe. It reports whether that makes it so: it
// is the second one in a row, and no client was answered since the first, as clients are whom a policy allows what it
// forbids this node. What an answer by HTTP means, the probe alone decides.
func (m *machine) missedAgain(now time.Time, t *track, o Outcome) bool {
	first := t.missed.IsZero()
	p := m.answers.of[t.endpoint]
	switch {
	case first && t.state == cleared: // no client has seen a refusal
		t.since, t.cause = now, snapshot.Unanswered
	case first || !m.answers.at.After(t.missed): // not read since
	case !t.byHTTP() && p != nil && p.last.After(t.missed):
		first = true
	default:
		if t.cause = snapshot.Unanswered; o == Rejected {
			t.cause = snapshot.Refused
		}
		m.fail(now, t, 0)
		return true
	}
	if first {
		t.missed = now
	}
	return false
}

// byHTTP says whether an endpoint is probed by HTTP: only once it has accepted a client of this node. Else whoever may
// write Services could have nodes ask any address for anything.
func (t *track) byHTTP() bool { return t.path != "" && t.known }

// manner returns how an endpoint is probed. All nodes probe a last resort, whether they use it or not.
func (t *track) manner() (how Manner) {
	if how.Gently = t.asks == asResort; t.byHTTP() {
		how.Path = t.path
	}
	return how
}

// hasTrial says whether an ejection ends after a time, or with a client's answer, whatever probes say: a policy may
// forbid a connection, but does not make up an answer. Whether a last resort is one, probes alone decide, too.
func (t *track) hasTrial() bool { return t.asks != asResort && !t.byHTTP() }

// advanceAsked puts off probes of endpoints that no client of this node uses.
func (m *machine) advanceAsked(now time.Time, t *track) {
	if t.asks != byService {
		return
	}
	p := m.answers.of[t.endpoint]
	if t.known = t.known || p != nil; p == nil && t.state == cleared && !t.probing && !now.Before(t.due) {
		t.due = now.Add(askEvery)
	}
}

// checkResort tells that an endpoint is now used as a last resort, or no longer.
func (d *Detector) checkResort(t *track) {
	was := t.used
	t.used = t.asks == asResort && slices.ContainsFunc(t.ports, func(sp *dataplane.ServicePort) bool {
		return dataplane.HasEndpoint(sp.Cluster.Endpoints, t.endpoint) ||
			dataplane.HasEndpoint(sp.Local.Endpoints, t.endpoint)
	})
	switch {
	case t.used && !was:
		d.stats.LastResorts++
		d.o.LastResort(t.service, t.endpoint)
		d.log(t).Warn("a last resort is used: the endpoint is not ready, but accepts connections, and no other is usable")
	case was && !t.used:
		d.log(t).Info("a last resort does not answer any more")
	}
}
