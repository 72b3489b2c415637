package status

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Services is the answer of a node about its Services.
type Services struct {
	// Status is the node's, without what names Services.
	Status   Status    `json:"status"`
	Services []Service `json:"services"`
	// Next, if not empty, says that there are more: ask for those after that name.
	Next string `json:"next,omitempty"`
}

// State says how a Service fares on a node.
type State string

// The states, the worst first.
const (
	// Rejected: the kernel rejects it; what it accepted of it before stays programmed.
	Rejected State = "rejected"
	// Waiting: a change of it is not programmed yet.
	Waiting State = "waiting"
	// Unaddressed: other Services have all its addresses.
	Unaddressed State = "unaddressed"
	// Refuses and Drops: a port has no endpoint that this node may send to, or one of its backends has none.
	Refuses State = "refuses"
	Drops   State = "drops"
	// Ejects: an endpoint does not answer this node, which sends it nothing new.
	Ejects State = "ejects"
	// Unscheduled: it asks for IPVS, and is programmed without.
	Unscheduled State = "unscheduled"
	// Masquerades: it asks to keep its clients' addresses, and this node masquerades them.
	Masquerades State = "masquerades"
	// Programmed: none of these.
	Programmed State = "programmed"
)

var states = []State{Rejected, Waiting, Unaddressed, Refuses, Drops, Ejects, Unscheduled, Masquerades, Programmed}

// Rank orders states, the worst first.
func (s State) Rank() int { return slices.Index(states, s) }

// Service is a Service on a node.
type Service struct {
	Service string `json:"service"`
	// For names what asked for its backends, as "Gateway edge/db"; empty if nobody said.
	For string `json:"for,omitempty"`
	// Type is LoadBalancer if it has an address of one, else NodePort if it has one, else ClusterIP.
	Type  string `json:"type"`
	State State  `json:"state"`
	// Why explains the State; empty for Programmed.
	Why             string       `json:"why,omitempty"`
	ClusterIPs      []netip.Addr `json:"clusterIPs,omitempty"`
	ExternalIPs     []netip.Addr `json:"externalIPs,omitempty"`
	LoadBalancerIPs []netip.Addr `json:"loadBalancerIPs,omitempty"`
	// Endpoints counts the addresses in the slices of the Service, or of its backends, whatever their state, and Usable
	// those that new connections to its worst port may go to from this node.
	Endpoints int           `json:"endpoints"`
	Usable    int           `json:"usable"`
	Ports     []PortOfState `json:"ports,omitempty"`
	// ClientAddress is kept or masqueraded if the Service is to keep its clients' addresses; empty for others.
	ClientAddress string `json:"clientAddress,omitempty"`
}

// PortOfState is one port of a Service, in all families.
type PortOfState struct {
	Name     string `json:"name,omitempty"`
	Protocol string `json:"protocol"`
	Port     uint16 `json:"port"`
	NodePort uint16 `json:"nodePort,omitempty"`
	// Usable counts the endpoints that new connections may go to, Local those of them on this node, and Ejected those that
	// do not answer it.
	Usable  int `json:"usable"`
	Local   int `json:"local"`
	Ejected int `json:"ejected,omitempty"`
	// By says what chooses the endpoint: the backend, or IPVS with its scheduler.
	By string `json:"by,omitempty"`
}

// is sets the state.
func (s *Service) is(state State, why string) { s.State, s.Why = state, why }

// addresses takes over what the object says; nil says nothing.
func (s *Service) addresses(o *snapshot.Service) {
	s.Type = "ClusterIP"
	if o == nil {
		return
	}
	s.For = o.For()
	s.ClusterIPs, s.ExternalIPs, s.LoadBalancerIPs = o.ClusterIPs, o.ExternalIPs, o.LoadBalancerIPs
	for _, p := range o.Ports {
		s.Ports = append(s.Ports, PortOfState{Name: p.Name, Protocol: p.Protocol.String(), Port: p.Port,
			NodePort: p.NodePort})
		if p.NodePort != 0 {
			s.Type = "NodePort"
		}
	}
	if len(o.LoadBalancerIPs) > 0 {
		s.Type = "LoadBalancer"
	}
}

// ports adds what is programmed of each port.
func (s *Service) ports(programmed *dataplane.Service, backend string) {
	for i := range s.Ports {
		p := &s.Ports[i]
		if programmed != nil {
			for _, sp := range programmed.Ports {
				if sp.Name.Port == p.Name && sp.Name.Protocol.String() == p.Protocol {
					p.add(sp, backend)
				}
			}
		}
		if i == 0 || p.Usable < s.Usable {
			s.Usable = p.Usable
		}
	}
}

// add adds one family.
func (p *PortOfState) add(sp *dataplane.ServicePort, backend string) {
	pool := usedPool(sp)
	p.Usable += len(pool.Endpoints)
	p.Ejected += len(pool.Ejected)
	for i := range pool.Endpoints {
		if pool.Endpoints[i].Local {
			p.Local++
		}
	}
	if p.By = backend; sp.Scheduling != nil {
		p.By = "ipvs " + sp.Scheduling.Scheduler
	}
}

// usedPool is the larger of a port's pools: one that no route leads to is empty.
func usedPool(sp *dataplane.ServicePort) *dataplane.Pool {
	if len(sp.Local.Endpoints) > len(sp.Cluster.Endpoints) {
		return sp.Local
	}
	return sp.Cluster
}

// judge finds the state of what is programmed.
func (s *Service) judge(programmed *dataplane.Service) {
	if programmed == nil {
		s.is(Unaddressed, "other Services have its addresses")
		return
	}
	var none []string
	verdict, ejected, refused := Drops, 0, uint16(0)
	for _, sp := range programmed.Ports {
		pool := usedPool(sp)
		ejected += len(pool.Ejected)
		refused = max(refused, pool.Refused)
		if len(pool.Endpoints) > 0 {
			continue
		}
		none = append(none, strings.TrimPrefix(sp.Name.Port+" ", " ")+
			ipfamily.Of(sp.Frontends[0].Key.Addr).String())
		if slices.ContainsFunc(sp.Frontends, func(f dataplane.Frontend) bool {
			return f.Route(dataplane.Anyone).Pool.Empty == dataplane.Reject
		}) {
			verdict = Refuses
		}
	}
	where := ""
	if len(none) > 0 && len(none) < len(programmed.Ports) {
		where = " at " + strings.Join(none, ", ")
	}
	switch {
	case programmed.NotScheduled() == dataplane.TooManyBackends:
		s.is(Refuses, programmed.NotScheduled().String())
	case len(none) > 0 && verdict == Refuses:
		s.is(Refuses, "no endpoint"+where)
	case len(none) > 0:
		s.is(Drops, "no endpoint on this node"+where)
	case refused > 0:
		s.is(Refuses, fmt.Sprintf("%.4g%% of connections: backends without endpoints",
			float64(refused)*100/dataplane.RefusedOf))
	case ejected > 0:
		s.is(Ejects, fmt.Sprintf("%d ejected", ejected))
	}
}

// clients takes over whether what is programmed keeps its clients' addresses.
func (s *Service) clients(programmed *dataplane.Service) {
	switch why := programmed.NotKept(); {
	case why != dataplane.KeptOrNotAsked:
		if s.ClientAddress = "masqueraded"; s.State == Programmed {
			s.is(Masquerades, why.Text())
		}
	case programmed.Keeps():
		s.ClientAddress = "kept"
	}
}

// Short returns a copy without what names Services, but for why transactions fail.
func (s Status) Short() Status {
	s.Quarantined.Services, s.Ejected.Endpoints, s.Recent, s.Digests = nil, nil, nil, nil
	s.Preflight, s.Unread, s.Ledger, s.Drift.Last = nil, nil, nil, nil
	if s.ClientAddresses != nil {
		s.ClientAddresses = &ClientAddresses{Kept: s.ClientAddresses.Kept, Masqueraded: s.ClientAddresses.Masqueraded}
	}
	return s
}
