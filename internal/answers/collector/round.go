package collector

import (
	"encoding/json"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/verdict-proxy/verdict/internal/proxy/status"
)

// podID is the UID of a pod.
type podID = types.UID

// Outcomes are the values of the label of counted waits: all nodes have it; some do not, or the API could not be read
// in time; there is nothing to wait for; there was no room; whoever asked went away.
var Outcomes = []string{outcomeEverywhere, outcomeMissing, outcomeNothing, outcomeCrowded, outcomeAbandoned}

const (
	outcomeEverywhere = "everywhere"
	outcomeMissing    = "missing"
	outcomeNothing    = "nothing"
	outcomeCrowded    = "crowded"
	outcomeAbandoned  = "abandoned"
)

// encode makes a line of a message, of types for which that cannot fail.
func encode(message any) []byte {
	line, err := json.Marshal(message)
	if err != nil {
		panic(err)
	}
	return append(line, '\n')
}

func newRound(id uint64, svc *service, goal status.Goal, objects string, ro *roster) *round {
	r := &round{id: id, goal: goal, objects: objects, service: svc, roster: ro, left: len(ro.names),
		missing: make([]uint64, (len(ro.names)+63)/64)}
	for i := range ro.names {
		r.missing[i/64] |= 1 << (i % 64)
	}
	return r
}

// add adds waiters.
func (r *round) add(waiters []*waiter) {
	for _, w := range waiters {
		w.round = r
	}
	r.waiters = append(r.waiters, waiters...)
}

// waitsFor reports whether a node has not answered yet.
func (r *round) waitsFor(node string) bool {
	i, ok := r.roster.index[node]
	return ok && r.missing[i/64]&(1<<(i%64)) != 0
}

// answered notes that a node holds the goal, and reports whether it was waited for.
func (r *round) answered(node string) bool {
	if !r.waitsFor(node) {
		return false
	}
	i := r.roster.index[node]
	r.missing[i/64] &^= 1 << (i % 64)
	r.left--
	return true
}

// excuse stops waiting for a node that is gone.
func (r *round) excuse(node string) {
	if r.answered(node) {
		r.gone = append(r.gone, node)
	}
}

// missingNodes are those that are waited for, by name.
func (r *round) missingNodes() (names []string) {
	if r.left == 0 {
		return nil
	}
	for i, n := range r.roster.names {
		if r.missing[i/64]&(1<<(i%64)) != 0 {
			names = append(names, n)
		}
	}
	return names
}

// turns are the Services that wait for a worker. Namespaces take turns, so that one with many Services does not hold up
// the others.
type turns struct {
	of    map[string][]*service
	order []string
}

func (t *turns) add(s *service) {
	n := s.name.Namespace
	if len(t.of[n]) == 0 {
		t.order = append(t.order, n)
	}
	t.of[n] = append(t.of[n], s)
}

// next takes the Service whose turn it is; nil if there is none.
func (t *turns) next() *service {
	if len(t.order) == 0 {
		return nil
	}
	n := t.order[0]
	t.order = t.order[1:]
	list := t.of[n]
	if t.of[n] = list[1:]; len(list) == 1 {
		delete(t.of, n)
	} else {
		t.order = append(t.order, n)
	}
	return list[0]
}

// pace bounds how often something happens, on average.
type pace struct{ full time.Time }

// take takes n of burst, which fill up at a rate per second, and returns how long to wait until they had been there; at
// most 0 if they were. Only n of 0 leaves everything as it is.
func (p *pace) take(now time.Time, n, burst, perSecond int) time.Duration {
	each := time.Second / time.Duration(perSecond)
	if p.full.Before(now) {
		p.full = now
	}
	full := p.full.Add(time.Duration(n) * each)
	wait := full.Sub(now) - time.Duration(burst)*each
	p.full = full
	return wait
}
