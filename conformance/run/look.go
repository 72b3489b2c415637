package run

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/conformance/cases"
	"github.com/verdict-proxy/verdict/conformance/testbed"
	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

const (
	// answerTimeout is how long an answer may take on a busy machine, silence how long none may come until a packet
	// counts as dropped. The latter is shorter than the time after which TCP tries again.
	answerTimeout = 2 * time.Second
	silence       = 700 * time.Millisecond
	// maxTries bounds how often is asked until every endpoint has answered: one of four is missed in one of 10^7 cases.
	maxTries = 60
	// stickyTries is how often is asked to see that it is always the same endpoint.
	stickyTries = 6
	// lossTries is how often is asked again when no answer came: a busy machine loses packets.
	lossTries = 3
)

// asked is a look to take.
type asked struct {
	from     string
	to       netip.AddrPort
	protocol snapshot.Protocol
	want     cases.Want
	at       uint16 // the port of the endpoint; 0 means any
	own      uint16 // the port of the sender; 0 means another one each time
}

// seen is what came of it.
type seen struct {
	tries     int
	endpoints map[string]int
	sources   map[string]map[netip.Addr]int // by endpoint
	ports     map[uint16]int
	refused   int
	dropped   int
	errs      []error
}

func newSeen() *seen {
	return &seen{
		endpoints: make(map[string]int),
		sources:   make(map[string]map[netip.Addr]int),
		ports:     make(map[uint16]int),
	}
}

func (s *seen) note(r lab.Result) {
	s.tries++
	switch r.Outcome {
	case lab.Answered:
		s.endpoints[r.Endpoint]++
		if s.sources[r.Endpoint] == nil {
			s.sources[r.Endpoint] = make(map[netip.Addr]int)
		}
		s.sources[r.Endpoint][r.Source.Addr()]++
		s.ports[r.Destination.Port()]++
	case lab.Refused:
		s.refused++
	case lab.TimedOut:
		s.dropped++
	default:
		s.errs = append(s.errs, r.Err)
	}
}

// look asks as often as it takes to know whether it is as wanted.
func look(t *testbed.Topology, slow testbed.Slow, a asked) (s *seen, ok bool) {
	s = newSeen()
	o := lab.Options{Timeout: slow.Times(answerTimeout)}
	if a.want.Outcome == cases.Dropped || a.want.Outcome == cases.Unanswered {
		o.Timeout = silence
	}
	if a.own != 0 {
		f := ipfamily.Of(a.to.Addr())
		o.From = netip.AddrPortFrom(t.Host(a.from).IP(f), a.own)
	}
	lost := 0
	for s.tries < maxTries {
		r := t.Host(a.from).Dial(a.protocol, a.to, o)
		if r.Outcome == lab.TimedOut && o.Timeout != silence && lost < lossTries {
			lost++
			continue
		}
		s.note(r)
		if !s.fits(t, a) {
			return s, false
		}
		if s.enough(a.want) {
			return s, true
		}
	}
	return s, false
}

// fits says that nothing was seen yet that is not wanted.
func (s *seen) fits(t *testbed.Topology, a asked) bool {
	w := a.want
	answered := len(s.endpoints) > 0
	switch {
	case len(s.errs) > 0:
		return false
	case w.Outcome == cases.Refused:
		return !answered && s.dropped == 0
	case w.Outcome == cases.Dropped:
		return !answered && s.refused == 0
	case w.Outcome == cases.Unanswered:
		return !answered
	case s.refused+s.dropped > 0, w.Sticky && len(s.endpoints) > 1:
		return false
	}
	for e := range s.endpoints {
		// Any endpoint will do if none is named.
		if len(w.Endpoints) > 0 && !slices.Contains(w.Endpoints, e) || !s.sourceFits(t, a, e) {
			return false
		}
	}
	for p := range s.ports {
		if a.at != 0 && p != a.at {
			return false
		}
	}
	return true
}

func (s *seen) sourceFits(t *testbed.Topology, a asked, endpoint string) bool {
	word, ok := a.want.Sources[endpoint]
	if !ok {
		return true
	}
	owner := word
	if word == cases.Kept {
		owner = a.from
	}
	for source := range s.sources[endpoint] {
		if !t.Owns(owner, source) {
			return false
		}
	}
	return true
}

// enough says that all that is wanted was seen.
func (s *seen) enough(w cases.Want) bool {
	switch {
	case w.Outcome != cases.Answered:
		return true
	case w.Sticky:
		return s.tries >= stickyTries
	case w.Some:
		return s.tries >= 2*max(1, len(w.Endpoints))
	}
	return len(s.endpoints) >= len(w.Endpoints)
}

// words tells what was seen in the words of cases.Want.
func (s *seen) words(t *testbed.Topology, a asked) string {
	var parts []string
	if len(s.endpoints) > 0 {
		names := slices.Sorted(maps.Keys(s.endpoints))
		part := "one of " + strings.Join(names, ", ")
		if len(names) == 1 {
			part = names[0]
		}
		by := make(map[string][]string)
		for _, e := range names {
			for source := range s.sources[e] {
				word := sourceWord(t, a.from, source)
				by[word] = append(by[word], e)
			}
		}
		for _, word := range slices.Sorted(maps.Keys(by)) {
			part += "; source " + word
			if len(by) > 1 {
				part += " for " + strings.Join(by[word], ", ")
			}
		}
		if a.at != 0 {
			for _, p := range slices.Sorted(maps.Keys(s.ports)) {
				part += fmt.Sprintf("; port %d", p)
			}
		}
		parts = append(parts, part)
	}
	for _, c := range []struct {
		n    int
		word string
	}{{s.refused, "refused"}, {s.dropped, "dropped"}} {
		if c.n > 0 {
			parts = append(parts, c.word)
		}
	}
	for _, err := range s.errs {
		parts = append(parts, err.Error())
	}
	return strings.Join(parts, ", or ")
}

func sourceWord(t *testbed.Topology, from string, source netip.Addr) string {
	if t.Owns(from, source) {
		return cases.Kept
	}
	for _, node := range t.Nodes() {
		if t.Owns(node, source) {
			return node
		}
	}
	return source.String()
}

// labProtocol gives a protocol in the words of the lab.
func labProtocol(p cases.Protocol) snapshot.Protocol {
	return map[cases.Protocol]snapshot.Protocol{cases.TCP: snapshot.TCP, cases.UDP: snapshot.UDP,
		cases.SCTP: snapshot.SCTP}[p]
}
