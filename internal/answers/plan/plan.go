// Package plan says what a change of objects would do on a node: what Verdict would write, which packets would get
// another answer, and what would become of open connections. It only reads.
package plan

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/verdict-proxy/verdict/internal/answers/inspect"
	"github.com/verdict-proxy/verdict/internal/proxy/conntrack"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/nft/kernel"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
	"github.com/verdict-proxy/verdict/sync/watch"
)

// Input is what a plan is made from.
type Input struct {
	// Objects are the objects now, and Change what would change of them.
	Objects *inspect.Objects
	Change  *watch.ObjectChange
	// Kernel, if not nil, reads our tables on this node. Counters is how many counters they may have; 0 is no limit.
	Kernel   *kernel.Reader
	Counters int
	// Flows, if not nil, lists the open flows of this node.
	Flows *conntrack.Conn
	// EachFlow, if not nil, is called for each flow that was judged, with what happens to its next packet.
	EachFlow func(conntrack.OpenFlow, dataplane.Cause)
}

// Plan is what a change would do. Fields of JSON that say nothing are left out.
type Plan struct {
	Node string `json:"node"`
	// Source says where the objects come from, and Base what the writes are counted against: kernel or objects.
	Source string `json:"source"`
	Base   string `json:"base"`
	// Objects are those that change, Same counts those of the change that stay what they are, and Others those of kinds
	// that a proxy does not read.
	Objects []Object `json:"objects,omitempty"`
	Same    int      `json:"same,omitempty"`
	Others  int      `json:"others,omitempty"`
	// Changes says that something changes for packets or open connections. Effects counts what.
	Changes bool    `json:"changes"`
	Effects Effects `json:"effects"`
	Writes  Writes  `json:"writes"`
	// Globals says what changes for all Services.
	Globals []string `json:"globals,omitempty"`
	// Services are those that change, by name, the first maxServices. MoreServices counts the others.
	Services     []*Service `json:"services,omitempty"`
	MoreServices int        `json:"moreServices,omitempty"`
	// FlowsRead says that open connections were looked at. Flows counts those to Services that change.
	FlowsRead bool `json:"flowsRead"`
	Flows     int  `json:"flows,omitempty"`
	// Conflicts are addresses that several Services claim from now on.
	Conflicts []string `json:"conflicts,omitempty"`
	Notes     []string `json:"notes,omitempty"`

	differences []nft.Difference
}

// Object is an object that changes.
type Object struct {
	Object string `json:"object"`
	Verb   string `json:"verb"`
}

// Effects counts what a change does. Each has a word for --fail-on.
type Effects struct {
	// Opens and Closes are addresses that begin or end to answer; Answers those that answer otherwise, for some senders.
	Opens   int `json:"opens"`
	Closes  int `json:"closes"`
	Answers int `json:"answers"`
	// LetsIn and ShutsOut are ranges of sources.
	LetsIn   int `json:"letsIn"`
	ShutsOut int `json:"shutsOut"`
	// Chances are endpoints whose chance of a new connection changes.
	Chances int `json:"chances"`
	// Settings are settings of Services, and of the node.
	Settings int `json:"settings"`
	// Cuts, Moves, Drains, Stays and Refuses are open connections: see FlowGroup.
	Cuts    int `json:"cuts"`
	Moves   int `json:"moves"`
	Drains  int `json:"drains"`
	Stays   int `json:"stays"`
	Refuses int `json:"refuses"`
	// Forgets are clients that lose their session affinity.
	Forgets int `json:"forgets"`
}

// words are the effects by their words.
func (e *Effects) words() map[string]int {
	return map[string]int{"opens": e.Opens, "closes": e.Closes, "answers": e.Answers, "lets-in": e.LetsIn,
		"shuts-out": e.ShutsOut, "chances": e.Chances, "settings": e.Settings, "cuts": e.Cuts, "moves": e.Moves,
		"drains": e.Drains, "stays": e.Stays, "refuses": e.Refuses,
		"forgets": e.Forgets}
}

// Any is the word that stands for every effect.
const Any = "any"

// Words are those for --fail-on.
func Words() []string {
	return append([]string{Any}, slices.Sorted(maps.Keys((&Effects{}).words()))...)
}

// Has reports whether a plan has one of some effects, which are Words.
func (p *Plan) Has(words []string) bool {
	counts := p.Effects.words()
	return slices.ContainsFunc(words, func(w string) bool { return w == Any && p.Changes || counts[w] > 0 })
}

// maxServices bounds how many Services a Plan describes, and maxListed how many entries each of their lists has.
const (
	maxServices = 1000
	maxListed   = 1000
)

// maker makes a Plan.
type maker struct {
	Input
	out     *Plan
	planner *dataplane.Planner
	// was are what belongs to no Service before the change; before and after the Services that change.
	was           dataplane.State
	change        dataplane.Change
	before, after []*dataplane.Service
	// nodeBefore is the node before the change.
	nodeBefore snapshot.Node
	// held and taken are the Services that have a frontend before and after the change, of those that change.
	held, taken map[dataplane.Key]owner
	healthPorts map[snapshot.Name]healthPort
	forgets     map[snapshot.Name]int
}

// owner is a Service's frontend.
type owner struct {
	name     snapshot.Name
	port     *dataplane.ServicePort
	frontend *dataplane.Frontend
}

// Make makes a plan. It takes over the objects' snapshot, and changes it.
func Make(ctx context.Context, in Input) (*Plan, error) {
	m := &maker{Input: in, out: &Plan{Node: in.Objects.Config.NodeName, Source: in.Objects.Source, Base: "objects"},
		planner: dataplane.NewPlanner(in.Objects.Config)}
	for _, o := range in.Change.Objects {
		m.out.Objects = append(m.out.Objects, Object(o))
	}
	m.out.Same, m.out.Others = in.Change.Same, in.Change.Others
	m.out.Notes = append(m.out.Notes, in.Change.Notes...)
	if m.out.Others > 0 {
		m.note("objects of other kinds: %d. What controllers make of them is not known", m.out.Others)
	}
	snap := in.Objects.Snap
	m.planner.Apply(snap, snapshot.Change{Globals: true})
	base, err := m.base()
	if err != nil {
		return nil, err
	}
	m.apply()
	if err := m.writes(base); err != nil {
		return nil, err
	}
	m.frontends()
	m.globals()
	m.services()
	if err := m.flows(ctx); err != nil {
		return nil, err
	}
	m.finish()
	return m.out, nil
}

func (m *maker) note(format string, args ...any) {
	m.out.Notes = append(m.out.Notes, fmt.Sprintf(format, args...))
}

// apply applies the change to the objects, and decides anew.
func (m *maker) apply() {
	snap, delta := m.Objects.Snap, m.Change.Delta
	m.was, m.nodeBefore = *m.planner.State(), snap.Node
	names := m.concerned()
	m.healthPorts = map[snapshot.Name]healthPort{}
	for _, n := range names {
		m.healthPorts[n] = healthPort{before: m.localReady(n)}
	}
	starts := reconcile.NewStarts(snap, time.Now())
	changed := snap.Apply(delta)
	changed = changed.With(snap.Apply(starts.After(snap, m.planner.State(), changed.Services, time.Now())))
	for _, n := range names {
		h := m.healthPorts[n]
		h.after = m.localReady(n)
		m.healthPorts[n] = h
	}
	var conflicts []dataplane.ConflictSummary
	m.change, conflicts = m.planner.Apply(snap, changed)
	m.before = m.planner.Before()
	for _, n := range m.change.Services {
		m.after = append(m.after, m.planner.State().Services[n])
	}
	for i, c := range conflicts {
		if i == maxListed {
			break
		}
		m.out.Conflicts = append(m.out.Conflicts, c.String())
	}
}

// concerned returns the Services that the change names, or whose slices it names, and those that refer to them.
func (m *maker) concerned() []snapshot.Name {
	names := slices.Collect(maps.Keys(m.Change.Delta.Services))
	for n, sl := range m.Change.Delta.Slices {
		if was := m.Objects.Snap.Owner(n); was != (snapshot.Name{}) {
			names = append(names, was)
		}
		if sl != nil {
			names = append(names, snapshot.Name{Namespace: n.Namespace, Name: sl.Service})
		}
	}
	for _, n := range slices.Clone(names) {
		names = slices.AppendSeq(names, m.Objects.Snap.Referrers(n))
	}
	slices.SortFunc(names, snapshot.Name.Compare)
	return slices.Compact(names)
}

// healthPort is how many ready endpoints a Service has on this node, for load balancers that ask.
type healthPort struct{ before, after int }

func (m *maker) localReady(n snapshot.Name) int {
	four, six := dataplane.LocalReady(m.Objects.Config.NodeName, m.Objects.Snap, n)
	return four + six
}

// frontends finds out who has which frontend.
func (m *maker) frontends() {
	index := func(services []*dataplane.Service) map[dataplane.Key]owner {
		out := map[dataplane.Key]owner{}
		for _, svc := range services {
			for sp, f := range svc.EachFrontend() {
				out[f.Key] = owner{svc.Name, sp, f}
			}
		}
		return out
	}
	m.held, m.taken = index(m.before), index(m.after)
}

// globals says what changes for all Services.
func (m *maker) globals() {
	say := func(what string, before, after any) {
		if b, a := fmt.Sprint(before), fmt.Sprint(after); b != a {
			m.out.Globals = append(m.out.Globals, fmt.Sprintf("%s: %s, now %s", what, b, a))
		}
	}
	was, is := &m.was, m.planner.State()
	say("ServiceCIDRs", was.ServiceCIDRs, is.ServiceCIDRs)
	say("what others use of them", was.SharedRanges, is.SharedRanges)
	for i, f := range ipfamily.All {
		say("pods of "+f.String(), podsText([...]dataplane.Pods{was.Pods4, was.Pods6}[i]),
			podsText([...]dataplane.Pods{is.Pods4, is.Pods6}[i]))
		say("the address that answers pings for "+f.String(), addrText(was.PingAddrs[i]), addrText(is.PingAddrs[i]))
	}
	node := m.Objects.Snap.Node
	say("the node's zone", cmp.Or(m.nodeBefore.Zone, "unknown"), cmp.Or(node.Zone, "unknown"))
	say("the node's addresses", m.nodeBefore.Addresses, node.Addresses)
	say("the node leaves", cmp.Or(m.nodeBefore.Leaving, "no"), cmp.Or(node.Leaving, "no"))
	m.out.Effects.Settings += len(m.out.Globals)
}

func addrText(a netip.Addr) string {
	if !a.IsValid() {
		return "none"
	}
	return a.String()
}

func podsText(p dataplane.Pods) string {
	switch {
	case p.Interface != "":
		return "interface " + p.Interface
	case p.InterfacePrefix != "":
		return "interfaces " + p.InterfacePrefix + "*"
	case p.CIDR.IsValid():
		return p.CIDR.String()
	}
	return "not known"
}

// services describes the Services that change.
func (m *maker) services() {
	for i, n := range m.change.Services {
		s := m.service(i, n)
		if s.empty() {
			continue
		}
		if len(m.out.Services) == maxServices {
			m.out.MoreServices++
			continue
		}
		m.out.Services = append(m.out.Services, s)
	}
}

// finish sums up.
func (m *maker) finish() {
	for _, n := range m.out.Effects.words() {
		m.out.Changes = m.out.Changes || n > 0
	}
	slices.Sort(m.out.Notes)
	m.out.Notes = slices.Compact(m.out.Notes)
}
