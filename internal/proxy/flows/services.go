package flows

import (
	"net/netip"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// remembered is how long names of what is gone are kept: connections end later than their Service or pod, and the
// kernel tells of an end up to minutes later still.
const remembered = 10 * time.Minute

// services says to which Service a frontend belongs, or belonged a short time ago.
type services struct {
	now map[dataplane.Key]owner
	// gone holds earlier owners.
	gone map[dataplane.Key]owner
	// addrs are the addresses that a Service has for itself, whatever the port.
	addrs map[netip.Addr]snapshot.Name
	// ipvs says that IPVS has scheduled a Service.
	ipvs bool
}

// owner is a port that has a frontend since some time; in gone, until some time.
type owner struct {
	port  *dataplane.ServicePort
	since time.Time
}

func newServices() services {
	return services{now: map[dataplane.Key]owner{}, gone: map[dataplane.Key]owner{}, addrs: map[netip.Addr]snapshot.Name{}}
}

// replace replaces Services by others in the same order.
func (s *services) replace(before, after []*dataplane.Service, t time.Time) {
	was := map[dataplane.Key]owner{}
	for _, svc := range before {
		for sp, f := range svc.EachFrontend() {
			if o := s.now[f.Key]; o.port == sp { // otherwise another Service already has it
				was[f.Key] = o
				delete(s.now, f.Key)
			}
			if s.addrs[f.Key.Addr] == svc.Name {
				delete(s.addrs, f.Key.Addr)
			}
		}
	}
	for _, svc := range after {
		for sp, f := range svc.EachFrontend() {
			o := owner{sp, t}
			if before := was[f.Key]; before.port != nil && before.port.Name == sp.Name {
				o.since = before.since
				delete(was, f.Key)
			}
			s.now[f.Key] = o
			s.ipvs = s.ipvs || sp.Scheduling != nil
			if f.Kind != dataplane.NodePort {
				s.addrs[f.Key.Addr] = svc.Name
			}
		}
	}
	for k, o := range was {
		s.gone[k] = owner{o.port, t}
	}
}

// forget forgets what has been gone for long.
func (s *services) forget(t time.Time) {
	for k, o := range s.gone {
		if t.Sub(o.since) > remembered {
			delete(s.gone, k)
		}
	}
}

// owner returns the port that had a frontend at some time, which may be zero; nil if none is known.
func (s *services) owner(k dataplane.Key, at time.Time) *dataplane.ServicePort {
	now, has := s.now[k]
	if gone, had := s.gone[k]; had && (!has || !at.IsZero() && at.Before(now.since)) {
		return gone.port
	}
	return now.port
}

// rebalanced says whether a connection to an endpoint that the proxy ended was idle, and made room for others: nothing
// is wrong with the endpoint.
func rebalanced(sp *dataplane.ServicePort, endpoint netip.AddrPort) bool {
	return sp.RebalancePool() != nil && dataplane.HasEndpoint(sp.Serving, endpoint) &&
		snapshot.FindUnhealthy(sp.Cluster.Kept, endpoint) == nil && snapshot.FindUnhealthy(sp.Local.Kept, endpoint) == nil
}

// ejected says whether a port has ejected an endpoint.
func ejected(sp *dataplane.ServicePort, endpoint netip.AddrPort) bool {
	return snapshot.FindUnhealthy(sp.Cluster.Ejected, endpoint) != nil ||
		snapshot.FindUnhealthy(sp.Local.Ejected, endpoint) != nil
}
