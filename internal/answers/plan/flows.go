package plan

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/verdict-proxy/verdict/internal/proxy/conntrack"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// What happens to open connections.
const (
	// cuts: the flow is deleted, and the client's next packet is refused.
	cuts = "cuts"
	// moves: the flow is deleted, and the client's next packet goes to an endpoint that serves.
	moves = "moves"
	// drains: the connection stays with its endpoint, which leaves, and is reset when the drain deadline is over.
	drains = "drains"
	// stays: the connection stays with its endpoint, which leaves, as long as that answers.
	stays = "stays"
	// refuses: the connection stays as it is, and a new one of the same client is refused.
	refuses = "refuses"
	// returns: the connection's endpoint had left, and serves again.
	returns = "returns"
)

// FlowGroup are open connections to a port of a Service of which the same becomes for the same reason.
type FlowGroup struct {
	Port string `json:"port"`
	// Fate is cuts, moves, drains, stays, refuses or returns.
	Fate        string `json:"fate"`
	Reason      string `json:"reason"`
	Connections int    `json:"connections"`
	// Clients counts addresses. AtLeast says that there may be more.
	Clients int  `json:"clients"`
	AtLeast bool `json:"atLeast,omitempty"`
	// Endpoints are the first maxNamed that the connections are with, and MoreEndpoints counts the others.
	Endpoints     []string `json:"endpoints,omitempty"`
	MoreEndpoints int      `json:"moreEndpoints,omitempty"`

	clients   map[netip.Addr]struct{}
	endpoints map[netip.AddrPort]struct{}
}

const (
	// maxClients bounds the addresses that are remembered to count clients, and the endpoints of groups.
	maxClients = 1 << 18
	// maxNamed is how many endpoints a group names.
	maxNamed = 5
	// maxGroups bounds the groups of all Services. What does not fit is counted in the effects alone.
	maxGroups = 10000
)

// flowGroups gathers groups.
type flowGroups struct {
	*maker
	groups map[groupKey]*FlowGroup
	// room is how many more addresses may be remembered.
	room    int
	missing int
}

type groupKey struct{ service, port, fate, reason string }

// flows forecasts what becomes of open connections.
func (m *maker) flows(ctx context.Context) error {
	if m.Flows == nil {
		return nil
	}
	g := flowGroups{maker: m, groups: map[groupKey]*FlowGroup{}, room: maxClients}
	err := conntrack.NewForecast(m.before, m.after).Read(ctx, m.Flows, g.judge)
	if errors.Is(err, conntrack.ErrManyFlows) {
		m.note("%v", err)
		err = nil
	}
	if err != nil {
		return fmt.Errorf("open connections: %w", err)
	}
	m.out.FlowsRead = true
	if g.missing > 0 {
		m.note("groups of connections that are not listed: %d", g.missing)
	}
	for key, group := range g.groups {
		group.finish()
		m.serviceOf(key.service).Flows = append(m.serviceOf(key.service).Flows, group)
	}
	for _, s := range m.out.Services {
		slices.SortFunc(s.Flows, func(a, b *FlowGroup) int {
			return cmp.Or(strings.Compare(a.Fate, b.Fate), cmp.Compare(b.Connections, a.Connections),
				strings.Compare(a.Port, b.Port), strings.Compare(a.Reason, b.Reason))
		})
	}
	return nil
}

// serviceOf returns the description of a Service, and adds one if there is none.
func (m *maker) serviceOf(name string) *Service {
	i, found := slices.BinarySearchFunc(m.out.Services, name, func(s *Service, n string) int {
		return strings.Compare(s.Name, n)
	})
	if !found {
		m.out.Services = slices.Insert(m.out.Services, i, &Service{Name: name, Verb: "changed"})
	}
	return m.out.Services[i]
}

// judge sorts one flow into its group.
func (g *flowGroups) judge(f conntrack.OpenFlow) {
	g.out.Flows++
	before, after := g.next(f, f.Before, g.held), g.next(f, f.After, g.taken)
	if g.EachFlow != nil {
		g.EachFlow(f, after.Cause)
	}
	fate, reason := g.fate(&f, before, after)
	if fate == "" {
		return
	}
	e := &g.out.Effects
	switch fate {
	case cuts:
		e.Cuts++
	case moves:
		e.Moves++
	case drains:
		e.Drains++
	case stays:
		e.Stays++
	case refuses:
		e.Refuses++
	}
	sp := cmp.Or(f.Before, f.After)
	key := groupKey{sp.Name.Service.String(), portLabel(sp), fate, reason}
	group := g.groups[key]
	if group == nil {
		if len(g.groups) == maxGroups {
			g.missing++
			return
		}
		group = &FlowGroup{Port: key.port, Fate: fate, Reason: reason, clients: map[netip.Addr]struct{}{},
			endpoints: map[netip.AddrPort]struct{}{}}
		g.groups[key] = group
	}
	group.Connections++
	if _, known := group.clients[f.Client.Addr()]; !known && g.take(group) {
		group.clients[f.Client.Addr()] = struct{}{}
	}
	if _, known := group.endpoints[f.Endpoint]; !known && !f.Untranslated && g.take(group) {
		group.endpoints[f.Endpoint] = struct{}{}
	}
}

// take takes room for an address.
func (g *flowGroups) take(group *FlowGroup) bool {
	if g.room == 0 {
		group.AtLeast = true
		return false
	}
	g.room--
	return true
}

func (g *FlowGroup) finish() {
	g.Clients = len(g.clients)
	list := slices.SortedFunc(maps.Keys(g.endpoints), netip.AddrPort.Compare)
	for _, e := range list[:min(len(list), maxNamed)] {
		g.Endpoints = append(g.Endpoints, e.String())
	}
	g.MoreEndpoints = len(list) - len(g.Endpoints)
}

// next returns what happens to a first packet of a flow's client. Without a frontend, it is NotService.
func (g *flowGroups) next(f conntrack.OpenFlow, sp *dataplane.ServicePort, in map[dataplane.Key]owner,
) dataplane.FrontendAnswer {
	if sp == nil {
		return dataplane.FrontendAnswer{}
	}
	st := g.planner.State()
	pods := ipfamily.Per[dataplane.Pods]{st.Pods4, st.Pods6}[ipfamily.Of(f.Frontend.Addr)]
	return sp.Answer(in[f.Frontend].frontend, f.Client.Addr(),
		dataplane.OriginOf(pods, g.Objects.Snap, f.Client.Addr(), ""))
}

// answered reports whether a packet with some cause goes to an endpoint.
func answered(c dataplane.Cause) bool {
	return c == dataplane.FrontendFound || c == dataplane.FrontendScheduled
}

// fate returns what becomes of a flow, and why; empty if the change does not concern it.
func (g *flowGroups) fate(f *conntrack.OpenFlow, before, after dataplane.FrontendAnswer) (fate, reason string) {
	switch {
	case f.Fate == conntrack.Deleted && answered(after.Cause):
		return moves, whyDeleted(f)
	case f.Fate == conntrack.Deleted && f.After == nil:
		return cuts, refusal(f.Frontend, before, after)
	case f.Fate == conntrack.Deleted:
		return cuts, whyDeleted(f) + "; " + refusal(f.Frontend, before, after)
	case f.Fate == f.Was && (f.Fate != conntrack.Drains || f.Before.Drain == f.After.Drain):
		if !f.Untranslated && answered(before.Cause) && !answered(after.Cause) {
			return refuses, refusal(f.Frontend, before, after)
		}
		return "", ""
	case f.Fate == conntrack.Drains:
		return drains, fmt.Sprintf("their endpoint leaves, and the drain deadline is %v", f.After.Drain)
	case f.Fate == conntrack.Departed && f.After.SecondChance == snapshot.SecondChanceOn:
		return stays, "their endpoint leaves; they are released if nobody answers them"
	case f.Fate == conntrack.Departed:
		return stays, "their endpoint leaves"
	case f.After == nil: // nobody looks after the connections of an address that is gone
		return refuses, refusal(f.Frontend, before, after)
	}
	return returns, "their endpoint serves again"
}

// whyDeleted says why a flow is deleted.
func whyDeleted(f *conntrack.OpenFlow) string {
	if f.Untranslated {
		return "they began before there was an endpoint"
	}
	return "their endpoint leaves"
}

// refusal says why new connections of a client are refused.
func refusal(k dataplane.Key, before, after dataplane.FrontendAnswer) string {
	switch after.Cause {
	case dataplane.SourceRefused:
		if before.Source.IsValid() {
			return before.Source.String() + " leaves the source ranges"
		}
		return "they are in none of the source ranges"
	case dataplane.NoEndpoints:
		return "no endpoint is left"
	case dataplane.NoLocalEndpoints:
		return "no endpoint is on this node, and the traffic policy is Local"
	case dataplane.FailoverPassed:
		return "no endpoint is on this node, and packets are left alone"
	}
	return k.String() + " closes"
}
