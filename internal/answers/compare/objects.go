package compare

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/packets"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// objects is what should happen to packets by the objects: a packets.Walker over a State.
type objects struct {
	state *dataplane.State
	host  []netip.Addr
	// device is that by which packets come in from outside.
	device     string
	frontends  map[packets.Key]frontend
	clusterIPs map[netip.Addr]bool
	balancers  map[netip.Addr]bool
	// own are the endpoints on this node.
	own map[netip.Addr]bool
}

// frontend is one of the State's, with its port.
type frontend struct {
	*dataplane.Frontend
	port *dataplane.ServicePort
}

var protocols = map[snapshot.Protocol]packets.Protocol{
	snapshot.TCP: packets.TCP, snapshot.UDP: packets.UDP, snapshot.SCTP: packets.SCTP,
}

func newObjects(s *dataplane.State, host []netip.Addr) *objects {
	o := &objects{state: s, host: host, frontends: map[packets.Key]frontend{}, clusterIPs: map[netip.Addr]bool{},
		balancers: map[netip.Addr]bool{}, own: map[netip.Addr]bool{}}
	for _, svc := range s.Services {
		for _, a := range svc.ClusterIPs {
			o.clusterIPs[a] = true
		}
		for _, a := range svc.LoadBalancerIPs {
			o.balancers[a] = true
		}
		for _, sp := range svc.Ports {
			for i := range sp.Frontends {
				fe := &sp.Frontends[i]
				o.frontends[packets.Key{Addr: fe.Key.Addr, Protocol: protocols[fe.Key.Protocol], Port: fe.Key.Port}] =
					frontend{fe, sp}
			}
			for _, ep := range sp.Serving {
				if ep.Local {
					o.own[ep.Addr()] = true
				}
			}
		}
	}
	return o
}

// errScheduled says that IPVS chooses the endpoint, of which rules say nothing.
var errScheduled = errors.New("IPVS chooses the endpoint")

// pods says how pods are recognized in a family.
func pods(s *dataplane.State, f ipfamily.Family) dataplane.Pods {
	return [...]dataplane.Pods{s.Pods4, s.Pods6}[f]
}

// Walk implements packets.Walker.
func (o *objects) Walk(p packets.Packet, m packets.Memory, asked *packets.Asked) ([]packets.Outcome, error) {
	fe, found := o.frontends[packets.Key{Addr: p.Destination.Addr(), Protocol: p.Protocol, Port: p.Destination.Port()}]
	if !found {
		return ends(p, o.unserved(p.Destination.Addr(), p.Interface != "" && !o.fromPod(p))), nil
	}
	if asked != nil {
		for _, r := range fe.Sources {
			asked.Intervals = append(asked.Intervals, packets.Interval{First: r.Masked().Addr(), Last: ipfamily.Last(r)})
		}
	}
	if o.divides(p, &fe) {
		return o.divided(p, &fe, m)
	}
	return o.served(p, &fe, m)
}

// divides reports whether a packet is of a client that is divided among nodes, and that no other node has forwarded.
func (o *objects) divides(p packets.Packet, fe *frontend) bool {
	return fe.Keepable() && fe.port.Keep != nil && p.Interface == o.device &&
		!slices.Contains(o.state.NodeMACs, snapshot.MAC(p.MAC))
}

// memory is that of a client: its endpoint, if it has affinity, and its node, if it is divided among nodes.
type memory struct{ endpoint, node netip.AddrPort }

// divided returns the nodes to which a packet is forwarded, and what becomes of it if it is this one.
func (o *objects) divided(p packets.Packet, fe *frontend, m packets.Memory) (out []packets.Outcome, err error) {
	was, again := m.(memory)
	again = again && p.Protocol != packets.TCP // whose first packet begins another connection
	for _, n := range fe.port.Keep.Nodes {
		at, share := netip.AddrPortFrom(n.Addr, 0), packets.NewChance(uint64(n.Weight), fe.port.Keep.Weight())
		if again {
			if share = packets.Certain; was.node != at {
				continue
			}
		}
		switch {
		case n.Weight == 0:
		case !n.Own:
			out = append(out, packets.Outcome{Ending: packets.Ending{Verdict: packets.Forwarded, To: at}, Chance: share,
				Memory: memory{node: at}})
		default:
			here, err := o.served(p, fe, m)
			if err != nil {
				return nil, err
			}
			for _, x := range here {
				known, _ := x.Memory.(memory)
				known.node = at
				x.Chance, x.Memory = x.Chance.Times(share), known
				out = append(out, x)
			}
		}
	}
	slices.SortFunc(out, func(a, b packets.Outcome) int { return a.Ending.Compare(b.Ending) })
	return out, nil
}

// served returns what becomes of a packet that this node translates.
func (o *objects) served(p packets.Packet, fe *frontend, m packets.Memory) ([]packets.Outcome, error) {
	if fe.Sources != nil && !contain(fe.Sources, p.Source.Addr()) {
		return ends(p, packets.Dropped), nil
	}
	node, pod := p.Interface == "", o.fromPod(p)
	i := slices.IndexFunc(fe.Routes, func(r dataplane.Route) bool {
		return r.From == dataplane.Anyone || r.From == dataplane.Pod && pod || r.From == dataplane.Node && node
	})
	route := &fe.Routes[i]
	switch {
	case route.Pool == fe.port.Scheduled(fe.Frontend):
		return nil, errScheduled
	case len(route.Pool.Endpoints) > 0:
		return o.endpoints(p, fe, route, m)
	case route.Pool.Empty == dataplane.Drop:
		return ends(p, packets.Dropped), nil
	case route.Pool.Empty == dataplane.Pass:
		return ends(p, packets.Untouched), nil
	}
	return ends(p, packets.Rejected), nil
}

// fromPod says whether a packet comes from a pod.
func (o *objects) fromPod(p packets.Packet) bool {
	known := pods(o.state, ipfamily.Of(p.Destination.Addr()))
	return known.CIDR.IsValid() && known.CIDR.Contains(p.Source.Addr()) ||
		p.Interface != "" && known.HasInterface(p.Interface)
}

// unserved says what happens to packets to an address and a port that no Service has.
func (o *objects) unserved(to netip.Addr, fromOutside bool) packets.Verdict {
	switch {
	case !o.state.Refuses(to, o.host):
		return packets.Untouched
	case o.clusterIPs[to]:
		return packets.Rejected
	case contain(o.state.ServiceCIDRs, to):
		return packets.Dropped
	case o.balancers[to] && fromOutside:
		return packets.Rejected
	}
	return packets.Untouched
}

// ends returns the one outcome of a packet that is sent nowhere.
func ends(p packets.Packet, v packets.Verdict) []packets.Outcome {
	e := packets.Ending{Verdict: v}
	if v == packets.Rejected {
		if e.Reject = "icmp port-unreachable"; p.Protocol == packets.TCP {
			e.Reject = tcpReset
		}
	}
	return []packets.Outcome{{Ending: e, Chance: packets.Certain}}
}

// contain says whether one of the ranges has an address.
func contain(ranges []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(ranges, func(r netip.Prefix) bool { return r.Contains(a) })
}

// endpoints returns the endpoints that a route leads to, with their chances.
func (o *objects) endpoints(p packets.Packet, fe *frontend, r *dataplane.Route, m packets.Memory) ([]packets.Outcome,
	error) {
	total := uint64(0)
	for _, ep := range r.Pool.Endpoints {
		total += uint64(max(ep.Weight, 1))
	}
	served := packets.NewChance(dataplane.RefusedOf-uint64(r.Pool.Refused), dataplane.RefusedOf)
	var refused []packets.Outcome
	if r.Pool.Refused > 0 {
		refused = ends(p, packets.Rejected)
		refused[0].Chance = packets.NewChance(uint64(r.Pool.Refused), dataplane.RefusedOf)
	}
	out := make([]packets.Outcome, 0, len(r.Pool.Endpoints)+1)
	for _, ep := range r.Pool.Endpoints {
		own := ep.Local && ep.Addr() == p.Source.Addr()
		onHost := p.Interface != "" && slices.Contains(o.host, ep.Addr())
		x := packets.Outcome{Ending: packets.Ending{Verdict: packets.Sent, To: ep.AddrPort,
			Masqueraded: !onHost && (own || r.SNAT)}, Chance: served.Times(packets.NewChance(uint64(max(ep.Weight, 1)), total))}
		if fe.port.Affinity > 0 {
			x.Memory, x.Remembered = memory{endpoint: ep.AddrPort}, uint32(fe.port.Affinity/time.Second)
		}
		if was, ok := m.(memory); ok && was.endpoint == ep.AddrPort {
			x.Chance, x.Recalled = served, true
			return append([]packets.Outcome{x}, refused...), nil
		}
		out = append(out, x)
	}
	return append(out, refused...), nil
}

// digest identifies the State, as far as it says what happens to packets.
func (o *objects) digest() (sum [sha256.Size]byte) {
	h := sha256.New()
	s := o.state
	fmt.Fprintln(h, s.Pods4, s.Pods6, s.MasqueradeAll, s.ServiceCIDRs, s.SharedRanges, s.LocalhostNodePorts)
	for _, n := range slices.SortedFunc(maps.Keys(s.Services), snapshot.Name.Compare) {
		svc := s.Services[n]
		fmt.Fprintln(h, n, svc.ClusterIPs, svc.LoadBalancerIPs, svc.HealthCheckNodePort)
		for _, sp := range svc.Ports {
			fmt.Fprintln(h, sp.Name, sp.Affinity, sp.Hash)
			if sp.Keep != nil {
				fmt.Fprintln(h, s.Device, s.NodeMACs, *sp.Keep)
			}
			for i := range sp.Frontends {
				fe := &sp.Frontends[i]
				fmt.Fprintln(h, fe.Key, fe.Kind, fe.Sources)
				for _, r := range fe.Routes {
					fmt.Fprintln(h, r.From, r.SNAT, r.Pool == sp.Local, r.Pool.Empty)
				}
			}
			fmt.Fprintln(h, sp.Cluster.Endpoints, sp.Cluster.Refused, sp.Local.Endpoints, sp.Local.Refused)
		}
	}
	h.Sum(sum[:0])
	return sum
}
