package plan

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/units"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Service is what changes of one Service.
type Service struct {
	Name string `json:"service"`
	// For names what asked for its backends, as "Gateway edge/db"; empty if nobody said, or if it is deleted.
	For string `json:"for,omitempty"`
	// Verb is created, changed or deleted.
	Verb string `json:"verb"`
	// Settings are its settings that change, in words.
	Settings []string `json:"settings,omitempty"`
	// Addresses are those that open, close or answer otherwise, the first maxListed. MoreAddresses counts the others.
	Addresses     []Address `json:"addresses,omitempty"`
	MoreAddresses int       `json:"moreAddresses,omitempty"`
	// Sources are the source ranges of its load balancer addresses, where they change.
	Sources []Sources `json:"sources,omitempty"`
	// Chances are those of its endpoints, where they change.
	Chances []Chances `json:"chances,omitempty"`
	// Flows are the open connections to it that the change concerns.
	Flows []*FlowGroup `json:"flows,omitempty"`
}

func (s *Service) empty() bool {
	return len(s.Settings)+len(s.Addresses)+len(s.Sources)+len(s.Chances)+len(s.Flows) == 0
}

// Address is a frontend that answers otherwise than before.
type Address struct {
	// Key is the address, port and protocol, as 10.96.0.1:80/tcp.
	Key  string `json:"key"`
	Port string `json:"port"`
	Kind string `json:"kind"`
	// From are the senders that get another answer: pods, node, outside. Empty means all.
	From []string `json:"from,omitempty"`
	// Before and After are the answers. Before is empty if the address opens, and After if it closes.
	Before string `json:"before,omitempty"`
	After  string `json:"after,omitempty"`
	// Other is the Service from which it comes or to which it goes.
	Other string `json:"other,omitempty"`
}

// Sources are the source ranges of a family.
type Sources struct {
	Family string `json:"family"`
	// In are ranges that are let in, and Out ranges that are shut out. Everyone says that all sources are let in from now
	// on, and Only that all others than In are shut out.
	In       []string `json:"in,omitempty"`
	Out      []string `json:"out,omitempty"`
	Everyone bool     `json:"everyone,omitempty"`
	Only     bool     `json:"only,omitempty"`
}

// service describes one Service.
func (m *maker) service(i int, n snapshot.Name) *Service {
	before, after := m.before[i], m.after[i]
	s := &Service{Name: n.String(), For: m.Objects.Snap.Services[n].For(), Verb: "changed"}
	switch {
	case before == nil:
		s.Verb = "created"
	case after == nil:
		s.Verb = "deleted"
	}
	m.settings(s, n, before, after)
	m.addresses(s, before, after)
	m.sources(s, before, after)
	m.chances(s, before, after)
	if s.empty() && !before.SamePackets(after) {
		s.Settings = append(s.Settings, "details: pings, unused ports, or endpoints that drain")
	}
	m.out.Effects.Settings += len(s.Settings)
	return s
}

// settings compares what decides about connections beside addresses and endpoints.
func (m *maker) settings(s *Service, n snapshot.Name, before, after *dataplane.Service) {
	say := func(port, what, b, a string) {
		if b != a && len(s.Settings) < maxListed {
			s.Settings = append(s.Settings, strings.TrimSpace(port+" "+what)+": "+b+", now "+a)
		}
	}
	if h := m.healthPorts[n]; before != nil && after != nil {
		say("", "health check node port", portText(before.HealthCheckNodePort), portText(after.HealthCheckNodePort))
		if before.HealthCheckNodePort != 0 && after.HealthCheckNodePort != 0 && (h.before == 0) != (h.after == 0) {
			say("", "load balancers are told of endpoints on this node", fmt.Sprint(h.before), fmt.Sprint(h.after))
		}
	}
	if clients := m.forgets[n]; clients > 0 {
		s.Settings = append(s.Settings, fmt.Sprintf("session affinity: clients whose endpoint its ports forget: %d", clients))
	}
	said := map[string]bool{}
	for _, pair := range portPairs(before, after) {
		b, a := pair[0], pair[1]
		if b == nil || a == nil || said[a.Name.Port+a.Name.Protocol.String()] {
			continue
		}
		count := len(s.Settings)
		port := portLabel(a)
		say(port, "session affinity", spanText(b.Affinity), spanText(a.Affinity))
		say(port, "choice", choiceText(b), choiceText(a))
		say(port, "connections refused for backends without endpoints", refusedText(b), refusedText(a))
		say(port, "second chance", b.SecondChance.String(), a.SecondChance.String())
		say(port, "probe", cmp.Or(b.Probe.String(), "none"), cmp.Or(a.Probe.String(), "none"))
		say(port, "limits", limitsText(b), limitsText(a))
		say(port, "drain deadline", spanText(b.Drain), spanText(a.Drain))
		say(port, "rebalance", spanText(b.Rebalance), spanText(a.Rebalance))
		say(port, "clients' addresses", clientsText(b), clientsText(a))
		said[a.Name.Port+a.Name.Protocol.String()] = len(s.Settings) > count
	}
}

// refusedText says how many connections are refused for backends without endpoints: of all, and with a policy Local if
// that has endpoints.
func refusedText(sp *dataplane.ServicePort) string {
	share := func(p *dataplane.Pool) string {
		if p.Refused == 0 {
			return "none"
		}
		return fmt.Sprintf("%.4g%%", float64(p.Refused)*100/dataplane.RefusedOf)
	}
	text := share(sp.Cluster)
	if local := share(sp.Local); len(sp.Local.Endpoints) > 0 && local != text {
		text += " (with a policy Local " + local + ")"
	}
	return text
}

// clientsText says whether clients from outside keep their addresses, and on which nodes.
func clientsText(sp *dataplane.ServicePort) string {
	kept := slices.ContainsFunc(sp.Frontends, func(f dataplane.Frontend) bool { return f.Kept })
	switch {
	case sp.NotKept != dataplane.KeptOrNotAsked:
		return "masqueraded (" + sp.NotKept.String() + ")"
	case !kept:
		return "by externalTrafficPolicy"
	case !sp.Keep.Divides():
		return "kept, all endpoints are here"
	}
	var names []string
	for _, n := range sp.Keep.Nodes {
		if !n.Own || n.Weight > 0 {
			names = append(names, n.Name)
		}
	}
	return "kept, endpoints on " + strings.Join(names, ", ")
}

func limitsText(sp *dataplane.ServicePort) string { return cmp.Or(sp.Limits.String(), "none") }

func portText(p uint16) string {
	if p == 0 {
		return "none"
	}
	return fmt.Sprint(p)
}

func spanText(d time.Duration) string {
	if d == 0 {
		return "none"
	}
	return units.Span(d)
}

// choiceText says how an endpoint is chosen.
func choiceText(sp *dataplane.ServicePort) string {
	if sp.Scheduling != nil {
		return "IPVS " + sp.Scheduling.Scheduler
	}
	return sp.Hash.String()
}

// portLabel names a port within its Service.
func portLabel(sp *dataplane.ServicePort) string {
	if sp.Name.Port != "" {
		return sp.Name.Port
	}
	return fmt.Sprintf("%d/%s", sp.Frontends[0].Key.Port, sp.Name.Protocol)
}

// portPairs pairs the ports of a Service before and after a change, by name and family. One of a pair may be nil.
func portPairs(before, after *dataplane.Service) (pairs [][2]*dataplane.ServicePort) {
	type id struct {
		name   dataplane.PortName
		family ipfamily.Family
	}
	at := map[id]int{}
	for i, svc := range []*dataplane.Service{before, after} {
		for sp := range svc.EachPort() {
			n, there := at[id{sp.Name, sp.Family()}]
			if !there {
				n = len(pairs)
				at[id{sp.Name, sp.Family()}] = n
				pairs = append(pairs, [2]*dataplane.ServicePort{})
			}
			pairs[n][i] = sp
		}
	}
	return pairs
}

// addresses compares who answers where, and how.
func (m *maker) addresses(s *Service, before, after *dataplane.Service) {
	add := func(a Address) {
		if len(s.Addresses) == maxListed {
			s.MoreAddresses++
			return
		}
		s.Addresses = append(s.Addresses, a)
	}
	for sp, f := range before.EachFrontend() {
		now, there := m.taken[f.Key]
		switch {
		case !there:
			m.out.Effects.Closes++
			add(Address{Key: f.Key.String(), Port: portLabel(sp), Kind: f.Kind.String(), Before: answers(sp, f)})
		case now.name != before.Name:
			add(Address{Key: f.Key.String(), Port: portLabel(sp), Kind: f.Kind.String(), Before: answers(sp, f),
				Other: now.name.String()})
		}
	}
	for sp, f := range after.EachFrontend() {
		was, there := m.held[f.Key]
		a := Address{Key: f.Key.String(), Port: portLabel(sp), Kind: f.Kind.String()}
		switch {
		case !there:
			m.out.Effects.Opens++
			a.After = answers(sp, f)
			add(a)
		case was.name != after.Name:
			m.out.Effects.Answers++
			a.After, a.Other = answers(sp, f), was.name.String()
			add(a)
		default:
			m.otherwise(a, was, sp, f, add)
		}
	}
}

// origins are who may send a packet, as policy tells them apart.
var origins = []struct {
	word string
	from dataplane.From
}{{"pods", dataplane.Pod}, {"node", dataplane.Node}, {"outside", dataplane.Anyone}}

// otherwise adds an address that answers some senders otherwise than before.
func (m *maker) otherwise(a Address, was owner, sp *dataplane.ServicePort, f *dataplane.Frontend, add func(Address)) {
	counted := false
	var done []string
	for i, o := range origins {
		before, after := answer(was.port, was.frontend, o.from), answer(sp, f, o.from)
		if before == after || slices.Contains(done, o.word) {
			continue
		}
		a.From, a.Before, a.After = nil, before, after
		for _, other := range origins[i:] {
			if answer(was.port, was.frontend, other.from) == before && answer(sp, f, other.from) == after {
				a.From, done = append(a.From, other.word), append(done, other.word)
			}
		}
		if len(a.From) == len(origins) {
			a.From = nil
		}
		if !counted {
			m.out.Effects.Answers++
			counted = true
		}
		add(a)
	}
}

// answers says what a frontend does with all senders.
func answers(sp *dataplane.ServicePort, f *dataplane.Frontend) string {
	var texts []string
	from := map[string][]string{}
	for _, o := range origins {
		t := answer(sp, f, o.from)
		if from[t] == nil {
			texts = append(texts, t)
		}
		from[t] = append(from[t], o.word)
	}
	if len(texts) == 1 {
		return texts[0]
	}
	for i, t := range texts {
		texts[i] = "from " + strings.Join(from[t], ", ") + " " + t
	}
	return strings.Join(texts, "; ")
}

// answer says what a frontend does with a sender, without its number of endpoints.
func answer(sp *dataplane.ServicePort, f *dataplane.Frontend, from dataplane.From) string {
	r, kept := f.Route(from), f.Kept && from == dataplane.Anyone && sp.Keep.Divides()
	switch {
	case kept && sp.Keep.OwnShare() == 0:
		return "forwarded untranslated to nodes with endpoints"
	case r.Pool == sp.Scheduled(f):
		return "IPVS chooses"
	case len(r.Pool.Endpoints) == 0 && r.Pool.Empty == dataplane.Drop:
		return "dropped, no endpoint on this node"
	case len(r.Pool.Endpoints) == 0 && r.Pool.Empty == dataplane.Pass:
		return "left alone, no endpoint on this node"
	case len(r.Pool.Endpoints) == 0:
		return "rejected, no endpoint"
	}
	text := "endpoints everywhere"
	switch {
	case kept:
		text = "endpoints on this node, and forwarded untranslated to others,"
	case r.Pool == sp.Local:
		text = "endpoints on this node"
	}
	if r.SNAT {
		return text + " see the node's address"
	}
	return text + " see the client's address"
}

// sources compares the source ranges.
func (m *maker) sources(s *Service, before, after *dataplane.Service) {
	for _, f := range ipfamily.All {
		was, had := rangesOf(before, f)
		is, has := rangesOf(after, f)
		if !had || !has || slices.Equal(was, is) && (was == nil) == (is == nil) {
			continue
		}
		x := Sources{Family: f.String(), Everyone: is == nil, Only: was == nil,
			In: textsOf(uncovered(is, was)), Out: textsOf(uncovered(was, is))}
		if x.Everyone {
			m.out.Effects.LetsIn++
			x.Out = nil
		}
		if x.Only {
			m.out.Effects.ShutsOut++
			x.In = textsOf(is)
		}
		if !x.Only && !x.Everyone {
			m.out.Effects.LetsIn += len(x.In)
			m.out.Effects.ShutsOut += len(x.Out)
		}
		s.Sources = append(s.Sources, x)
	}
}

// rangesOf returns a Service's source ranges of a family. It has none if it has no load balancer address.
func rangesOf(svc *dataplane.Service, f ipfamily.Family) (ranges []netip.Prefix, has bool) {
	for _, fe := range svc.EachFrontend() {
		if fe.Kind == dataplane.LoadBalancerIP && f.Has(fe.Key.Addr) {
			ranges, has = fe.Sources, true
		}
	}
	return ranges, has
}

// uncovered returns those of some ranges that no other of a list holds. Both lists are sorted, and none of their ranges
// holds another.
func uncovered(ranges, by []netip.Prefix) (out []netip.Prefix) {
	for _, r := range ranges {
		i, same := slices.BinarySearchFunc(by, r, netip.Prefix.Compare)
		// What holds a range is the last one before it.
		if !same && (i == 0 || by[i-1].Bits() > r.Bits() || !by[i-1].Contains(r.Addr())) {
			out = append(out, r)
		}
	}
	return out
}

func textsOf(ranges []netip.Prefix) (texts []string) {
	for _, r := range ranges {
		texts = append(texts, r.String())
	}
	return texts
}
