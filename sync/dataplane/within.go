package dataplane

import (
	"net/netip"
	"slices"
)

// Within limits a Service to the frontends and cluster IPs that another version of it, now, also has. The result can
// take the place of now in a State in which other Services have received the rest. It is nil if no frontend is left, or
// if either is nil. The Service itself is not changed; if it loses nothing, it is the result.
func (s *Service) Within(now *Service) *Service {
	if s == nil || now == nil {
		return nil
	}
	allowed := map[Key]bool{}
	now.eachClaim(func(k Key, _ Claim) { allowed[k] = true })
	taken := func(f Frontend) bool { return !allowed[f.Key] }
	foreign := func(a netip.Addr) bool { return !slices.Contains(now.ClusterIPs, a) }

	left, all := &Service{Name: s.Name, Age: s.Age, ClusterIPs: s.ClusterIPs, HealthCheckNodePort: s.HealthCheckNodePort,
		OverCapacity: s.OverCapacity, Counters: s.Counters}, true
	if slices.ContainsFunc(s.ClusterIPs, foreign) {
		left.ClusterIPs, all = slices.DeleteFunc(slices.Clone(s.ClusterIPs), foreign), false
	}
	some := func(addrs, allowed []netip.Addr) []netip.Addr {
		gone := func(a netip.Addr) bool { return !slices.Contains(allowed, a) }
		if !slices.ContainsFunc(addrs, gone) {
			return addrs
		}
		all = false
		return slices.DeleteFunc(slices.Clone(addrs), gone)
	}
	left.SilentClusterIPs = some(s.SilentClusterIPs, left.ClusterIPs)
	left.PingableIPs = some(s.PingableIPs, now.PingableIPs)
	left.LoadBalancerIPs = some(s.LoadBalancerIPs, now.LoadBalancerIPs)
	for _, sp := range s.Ports {
		if slices.ContainsFunc(sp.Frontends, taken) {
			less := *sp
			less.Frontends = slices.DeleteFunc(slices.Clone(sp.Frontends), taken)
			sp, all = &less, false
		}
		if len(sp.Frontends) > 0 {
			left.Ports = append(left.Ports, sp)
		}
	}
	switch {
	case all:
		return s
	case len(left.Ports) == 0:
		return nil
	}
	return left
}
