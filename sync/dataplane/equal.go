package dataplane

import (
	"slices"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// equal reports whether two Services give every packet the same answer with the same names. Either may be nil.
func (s *Service) equal(o *Service) bool {
	if s == nil || o == nil {
		return s == o
	}
	return s.Name == o.Name && s.Age == o.Age && slices.Equal(s.ClusterIPs, o.ClusterIPs) &&
		slices.Equal(s.SilentClusterIPs, o.SilentClusterIPs) && slices.Equal(s.PingableIPs, o.PingableIPs) &&
		slices.Equal(s.LoadBalancerIPs, o.LoadBalancerIPs) &&
		s.HealthCheckNodePort == o.HealthCheckNodePort && s.OverCapacity == o.OverCapacity && s.Counters == o.Counters &&
		slices.EqualFunc(s.Ports, o.Ports, (*ServicePort).equal)
}

func (sp *ServicePort) equal(o *ServicePort) bool {
	if sp.Name != o.Name || sp.Affinity != o.Affinity || sp.SecondChance != o.SecondChance || sp.Drain != o.Drain ||
		sp.Rebalance != o.Rebalance || sp.Probe != o.Probe || !slices.Equal(sp.Resort, o.Resort) ||
		sp.Limits != o.Limits || sp.Full != o.Full || !slices.Equal(sp.FullClients, o.FullClients) ||
		!equalScheduling(sp.Scheduling, o.Scheduling) || sp.Hash != o.Hash || len(sp.Frontends) != len(o.Frontends) ||
		!sp.Cluster.equal(o.Cluster) || !sp.Local.equal(o.Local) || !slices.Equal(sp.Serving, o.Serving) ||
		!slices.Equal(sp.Finishing, o.Finishing) || !sp.Keep.equal(o.Keep) || sp.NotKept != o.NotKept {
		return false
	}
	for i := range sp.Frontends {
		f, of := &sp.Frontends[i], &o.Frontends[i]
		if f.Key != of.Key || f.Kind != of.Kind || f.Kept != of.Kept || f.NotScheduled != of.NotScheduled ||
			!slices.Equal(f.Sources, of.Sources) || len(f.Routes) != len(of.Routes) {
			return false
		}
		for j, r := range f.Routes {
			if !sp.sameRoute(r, o, of.Routes[j]) {
				return false
			}
		}
	}
	return true
}

// sameRoute compares two routes of ports whose pools are equal: it remains to compare which pool they name.
func (sp *ServicePort) sameRoute(r Route, o *ServicePort, or Route) bool {
	return r.From == or.From && r.SNAT == or.SNAT && sp.which(r.Pool) == o.which(or.Pool)
}

// which says which of the port's pools a route names; a pool that is neither has no endpoints.
func (sp *ServicePort) which(p *Pool) poolName {
	switch {
	case p == sp.Cluster:
		return clusterPool
	case p == sp.Local:
		return localPool
	case p == poolPassing:
		return passingPool
	}
	return rejectingPool
}

func (p *Pool) equal(o *Pool) bool {
	return p == o || p.Empty == o.Empty && p.RetryRefused == o.RetryRefused && p.Refused == o.Refused &&
		slices.Equal(p.Endpoints, o.Endpoints) && slices.EqualFunc(p.Ejected, o.Ejected, equalUnhealthy) &&
		slices.EqualFunc(p.Kept, o.Kept, equalUnhealthy)
}

func equalScheduling(a, b *Scheduling) bool {
	return a == b || a != nil && b != nil && *a == *b
}

func equalUnhealthy(a, b snapshot.Unhealthy) bool {
	return a.Endpoint == b.Endpoint && a.Cause == b.Cause && a.Since.Equal(b.Since) && a.Doubtful == b.Doubtful
}
