package dataplane

import (
	"net/netip"
	"slices"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
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
		if b.host.pingAddrs[f].IsValid() && !s.serves(a) {
			s.SilentClusterIPs = append(s.SilentClusterIPs, a)
		}
	}
	b.balancers(s)
}

// balancers fills in LoadBalancerIPs and PingableIPs. If one of the addresses is this node's, the balancer gives nodes'
// own addresses to Services, as that of k3s does. Then the others are those of other nodes, and are left alone.
func (b *builder) balancers(s *Service) {
	pingable := map[netip.Addr]bool{}
	var all []netip.Addr
	for _, fe := range s.EachFrontend() {
		f := ipfamily.Of(fe.Key.Addr)
		if fe.Kind != LoadBalancerIP || !b.host.pods[f].Known() {
			continue
		}
		if slices.Contains(b.host.addresses, fe.Key.Addr) {
			return
		}
		before, seen := pingable[fe.Key.Addr]
		if !seen {
			all = append(all, fe.Key.Addr)
		}
		pingable[fe.Key.Addr] = before || b.host.pingAddrs[f].IsValid() && fe.Sources == nil &&
			len(fe.Route(Anyone).Pool.Endpoints) > 0
	}
	for _, a := range all {
		if b.host.rejectUnusedPorts {
			s.LoadBalancerIPs = append(s.LoadBalancerIPs, a)
		}
		if pingable[a] {
			s.PingableIPs = append(s.PingableIPs, a)
		}
	}
}

// serves reports whether a port has an endpoint for clients from outside at a cluster IP.
func (s *Service) serves(clusterIP netip.Addr) bool {
	for _, fe := range s.EachFrontend() {
		if fe.Kind == ClusterIP && fe.Key.Addr == clusterIP && len(fe.Route(Anyone).Pool.Endpoints) > 0 {
			return true
		}
	}
	return false
}
