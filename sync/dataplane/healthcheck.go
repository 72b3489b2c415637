package dataplane

import (
	"net/netip"
	"slices"

	"github.com/verdict-proxy/verdict/internal/ipfamily"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// LocalReady counts the addresses of a Service's endpoints on a node that are ready, of each family. Endpoints that
// drain are left out even while they alone serve: by that a load balancer learns to send new clients elsewhere. Traffic
// policies and topology make no difference.
func LocalReady(nodeName string, s *snapshot.Snapshot, n snapshot.Name) (ipv4s, ipv6s int) {
	svc := s.Services[n]
	if svc == nil {
		return 0, 0
	}
	b := builder{host: host{nodeName: nodeName}}
	b.loadSlices(svc, s.Slices[n])
	var counts ipfamily.Per[int]
	for _, f := range ipfamily.All {
		var addrs []netip.Addr
		for i := range svc.Ports {
			b.collectEndpoints(&svc.Ports[i], f)
			for j := range b.candidates {
				if c := &b.candidates[j]; c.local && c.ready() {
					addrs = append(addrs, c.addr.Addr())
				}
			}
		}
		slices.SortFunc(addrs, netip.Addr.Compare)
		counts[f] = len(slices.Compact(addrs))
	}
	return counts[ipfamily.IPv4], counts[ipfamily.IPv6]
}

// HealthCheckAddrs gives where health check node ports listen: at the addresses that node ports answer at, but never at
// 127.0.0.1, where no load balancer is. A range of all addresses of a family stands for itself, as its unspecified
// address.
func HealthCheckAddrs(cfg Config, s *snapshot.Snapshot) []netip.Addr {
	var addrs []netip.Addr
	for _, f := range ipfamily.All {
		all := slices.ContainsFunc(cfg.NodePortAddresses, func(r netip.Prefix) bool { return r.Bits() == 0 && f.Has(r.Addr()) })
		switch {
		case !all:
			addrs = append(addrs, nodePortAddrs(cfg, s, f)...)
		case len(s.HostAddrs) > 0 && !slices.ContainsFunc(s.HostAddrs, f.Has): // the host does not speak it
		case f == ipfamily.IPv4:
			addrs = append(addrs, netip.IPv4Unspecified())
		default:
			addrs = append(addrs, netip.IPv6Unspecified())
		}
	}
	return addrs
}
