package dataplane

import (
	"net/netip"
	"slices"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// LocalReady counts the distinct addresses of a Service's ready endpoints on a node, for each family. Terminating
// endpoints, and those with the weight 0, are not counted even if only they serve: this is how a load balancer learns
// to send new clients elsewhere.
// Traffic policies and topology make no difference. That others refer to too many endpoints is not known here: see
// TooManyBackends.
func LocalReady(nodeName string, s *snapshot.Snapshot, n snapshot.Name) (ipv4s, ipv6s int) {
	svc := s.Services[n]
	if svc == nil {
		return 0, 0
	}
	b := builder{host: host{nodeName: nodeName}}
	b.load(s, svc)
	b.schedule(svc)
	var counts ipfamily.Per[int]
	for _, f := range ipfamily.All {
		var addrs []netip.Addr
		for i := range svc.Ports {
			b.collectEndpoints(&svc.Ports[i], f)
			for j := range b.candidates {
				if c := &b.candidates[j]; c.local && c.ready() && !c.drains() {
					addrs = append(addrs, c.addr.Addr())
				}
			}
		}
		slices.SortFunc(addrs, netip.Addr.Compare)
		counts[f] = len(slices.Compact(addrs))
	}
	return counts[ipfamily.IPv4], counts[ipfamily.IPv6]
}

// HealthCheckAddrs returns the addresses at which health check node ports listen: those of node ports, except
// 127.0.0.1, where no load balancer connects from. A range of all addresses of a family becomes its unspecified
// address.
func HealthCheckAddrs(cfg Config, s *snapshot.Snapshot) []netip.Addr {
	var addrs []netip.Addr
	for _, f := range ipfamily.All {
		all := slices.ContainsFunc(cfg.NodePortAddresses, func(r netip.Prefix) bool {
			return r.Bits() == 0 && f.Has(r.Addr())
		})
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
