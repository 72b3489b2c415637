package history

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sort"
)

// model makes histories by simulating Services, a proxy on each node that applies each version some time after it took
// effect, and clients. What goes wrong is planted by its fields.
type model struct {
	rng *rand.Rand
	// lag is how long a proxy takes at most after a write was acknowledged, in microseconds.
	lag int64
	// steps is how often each Service is written.
	steps int

	// These are faults. lose has node-a never apply the last version of the first Service.
	lose bool
	// forget has proxies choose anew in spite of affinity, now and then.
	forget bool
	// ignore has node-a never use an endpoint of the first Service until its last version.
	ignore bool
	// stick has node-a go back to an older version in the end.
	stick bool
}

var modelNodes = []string{"node-a", "node-b"}

const (
	modelClients  = 3 // of each node
	modelServices = 3 // the last one has affinity
	modelRest     = 250_000
	modelTimeout  = 2 // seconds
)

// modelService is a Service while the model runs.
type modelService struct {
	name     string
	affinity int
	writes   []Write
	// effects are when each write took effect; applied are when each node applied it.
	effects []int64
	applied map[string][]int64
	pool    []string
}

// history makes one.
func (m *model) history() *History {
	h := &History{Header: Header{Format: Format, Proxy: "model"}}
	var services []*modelService
	last := int64(0)
	for i := range modelServices {
		s := &modelService{name: fmt.Sprintf("s%d", i), applied: make(map[string][]int64)}
		if i == modelServices-1 {
			s.affinity = modelTimeout
		}
		for n := range 5 {
			address := fmt.Sprintf("10.0.%d.%d:80", i, n)
			s.pool = append(s.pool, address)
			h.Serves = append(h.Serves, Serve{Address: address, Endpoint: s.name + "/" + address, Service: s.name})
		}
		m.write(s)
		last = max(last, s.writes[len(s.writes)-1].Acked)
		services = append(services, s)
	}
	h.Rest = last + m.lag + 1
	for i, s := range services {
		m.apply(s)
		h.Writes = append(h.Writes, s.writes...)
		for _, node := range modelNodes {
			h.Conns = append(h.Conns, m.connect(s, node, i == 0 && node == "node-a", h.Rest)...)
		}
	}
	return h
}

// write makes the versions of a Service: first the Service, then its slice again and again.
func (m *model) write(s *modelService) {
	at := m.rng.Int64N(2000)
	for i := range m.steps + 1 {
		w := Write{Sent: at, Acked: at + 100 + m.rng.Int64N(3000), Service: s.name, Affinity: s.affinity}
		if i > 0 {
			w.Affinity, w.Slice = 0, "slice"
			w.Endpoints = m.endpoints(s, i == m.steps)
		}
		s.writes = append(s.writes, w)
		s.effects = append(s.effects, w.Sent+m.rng.Int64N(w.Acked-w.Sent+1))
		at = w.Acked + m.rng.Int64N(40_000)
	}
}

func (m *model) endpoints(s *modelService, last bool) (all []Endpoint) {
	states := []State{Ready, Ready, Ready, Unready, Serving, Terminating}
	if m.rng.IntN(4) == 0 && !last {
		states = states[3:] // scaled to zero
	}
	for _, address := range s.pool {
		if m.rng.IntN(2) == 0 || last {
			all = append(all, Endpoint{address, states[m.rng.IntN(len(states))]})
		}
	}
	if last { // so that there is something to see
		all[0].State = Ready
	}
	return all
}

// apply says when each node has each version: in order, and not before it took effect.
func (m *model) apply(s *modelService) {
	for _, node := range modelNodes {
		at := int64(0)
		for i, w := range s.writes {
			from, to := max(at, s.effects[i]), w.Acked+m.lag
			at = from + m.rng.Int64N(max(1, to-from+1))
			s.applied[node] = append(s.applied[node], at)
		}
	}
}

// sets gives where connections may go after each write.
func (s *modelService) sets() (sets [][]string) {
	for _, w := range s.writes {
		var all []string
		for address := range usable(w.Endpoints) {
			all = append(all, address)
		}
		slices.Sort(all)
		sets = append(sets, all)
	}
	return sets
}

// connect has the clients of a node connect until after the rest.
func (m *model) connect(s *modelService, node string, first bool, rest int64) (all []Conn) {
	sets := s.sets()
	type memory struct {
		address string
		until   int64
	}
	sticky := make(map[string]memory)
	for n := range modelClients {
		client := fmt.Sprintf("%s-%d", node, n)
		for at := m.rng.Int64N(500); at < rest+modelRest; {
			c := Conn{Begin: at, Service: s.name, Client: client, Node: node, Outcome: Refused}
			decided := at + m.rng.Int64N(500)
			c.End = decided + m.rng.Int64N(500)
			at = c.End + m.rng.Int64N(3000)
			set := m.choice(s, sets, node, decided, first, rest)
			if len(set) > 0 {
				chosen := set[m.rng.IntN(len(set))]
				old := sticky[client]
				forget := m.forget && m.rng.IntN(50) == 0
				if s.affinity > 0 && decided < old.until && slices.Contains(set, old.address) && !forget {
					chosen = old.address
				}
				sticky[client] = memory{chosen, decided + int64(s.affinity)*1e6}
				c.Outcome, c.At, c.Endpoint = Answered, chosen, s.name+"/"+chosen
			}
			all = append(all, c)
		}
	}
	return all
}

// choice gives the set that a node's proxy has in force at a time, with the faults of the model.
func (m *model) choice(s *modelService, sets [][]string, node string, at int64, first bool, rest int64) []string {
	applied := s.applied[node]
	v := sort.Search(len(applied), func(i int) bool { return applied[i] > at }) - 1
	switch {
	case v < 0:
		return nil
	case first && m.lose && v == len(sets)-1:
		v--
	case first && m.stick && at > rest:
		v = 0
	case first && m.ignore:
		return slices.DeleteFunc(slices.Clone(sets[v]), func(a string) bool { return a == s.pool[0] && len(sets[v]) > 1 })
	}
	return sets[v]
}
