package dataplane

import (
	"net/netip"
	"slices"

	"github.com/verdict-proxy/verdict/internal/ipfamily"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// pingAddr returns the address of this node that answers for the addresses of Services; the zero Addr if there is none.
// It is always there, unlike an address of the interface by which a packet comes in.
func pingAddr(cfg Config, s *snapshot.Snapshot, f ipfamily.Family) netip.Addr {
	if !cfg.PingServices {
		return netip.Addr{}
	}
	for _, a := range primaryAddr(nodeAddrs(cfg.NodeIP, s.Node.Addresses), s.HostAddrs, f) {
		return a
	}
	return netip.Addr{}
}

// edge fills in which addresses of a Service answer a ping, and at which of them unused ports are rejected.
func (b *builder) edge(s *Service) {
	for _, a := range s.ClusterIPs {
		f := ipfamily.Of(a)
		if b.host.pingAddrs[f].IsValid() && !s.serves(ClusterIP, a) {
			s.SilentClusterIPs = append(s.SilentClusterIPs, a)
		}
	}
	for _, sp := range s.Ports {
		for i := range sp.Frontends {
			fe := &sp.Frontends[i]
			f := ipfamily.Of(fe.Key.Addr)
			if fe.Kind != LoadBalancerIP || !b.host.pods[f].Known() {
				continue
			}
			if b.host.rejectUnusedPorts && !slices.Contains(s.LoadBalancerIPs, fe.Key.Addr) {
				s.LoadBalancerIPs = append(s.LoadBalancerIPs, fe.Key.Addr)
			}
			if b.host.pingAddrs[f].IsValid() && fe.Sources == nil && !slices.Contains(s.PingableIPs, fe.Key.Addr) &&
				s.serves(LoadBalancerIP, fe.Key.Addr) {
				s.PingableIPs = append(s.PingableIPs, fe.Key.Addr)
			}
		}
	}
}

// serves reports whether a port has an endpoint for clients from outside at an address.
func (s *Service) serves(k Kind, a netip.Addr) bool {
	for _, sp := range s.Ports {
		for i := range sp.Frontends {
			fe := &sp.Frontends[i]
			if fe.Kind == k && fe.Key.Addr == a && len(fe.Route(Anyone).Pool.Endpoints) > 0 {
				return true
			}
		}
	}
	return false
}
