package nft

import (
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// maxAheadServices bounds how many of the first Services in line may be written before large ones. maxAheadElements
// bounds how large they are together, in multiples of the largest.
const (
	maxAheadServices = 256
	maxAheadElements = 4
)

// PlanAhead plans the small Services among those that wait for large ones. Large Services are written in parts, and
// small ones need not wait for that. It leaves the others, and also those that get an address which one of the others
// has yet to give up. small is how many elements a small Service has at most, before and after. It returns nil unless
// there are both kinds.
func (m *Model) PlanAhead(s *dataplane.State, names []snapshot.Name, small int) *Txn {
	if !m.filled {
		return nil
	}
	free, others := m.small(s, names, small)
	for again := len(others) > 0; again; {
		var left []snapshot.Name
		taking := m.takingAddresses(s, free, others)
		for _, name := range free {
			if taking[name] {
				others = append(others, name)
			} else {
				left = append(left, name)
			}
		}
		again, free = len(left) < len(free), left
	}
	if len(free) == 0 || len(others) == 0 {
		return nil
	}
	p := m.planner()
	p.recount(m.additionalNeeds(s, free), false)
	for _, name := range free {
		p.service(name, compileService(s.Services[name], m.quota()))
	}
	p.txn.Left.Services = others
	p.recountRequests()
	p.structures()
	p.revise()
	return p.txn
}

// small returns the small Services among the first, as many as may go ahead, and all others in their order.
func (m *Model) small(s *dataplane.State, names []snapshot.Name, most int) (small, others []snapshot.Name) {
	room := maxAheadElements * most
	first := names[:min(len(names), maxAheadServices)]
	for _, name := range first {
		n := m.serviceOrEmpty(name).size() + sizeOf(s.Services[name]) + m.serviceOrEmpty(name).rangesChange(s.Services[name])
		if n > min(most, room) {
			others = append(others, name)
			continue
		}
		small, room = append(small, name), room-n
	}
	if len(small) == 0 {
		return nil, names
	}
	return small, append(others, names[len(first):]...)
}

// sizeOf estimates how many elements a Service will have.
func sizeOf(svc *dataplane.Service) (n int) {
	if svc == nil {
		return 0
	}
	limits := slotLimits(svc)
	for _, sp := range svc.Ports {
		limit := limits[ipfamily.Of(sp.Frontends[0].Key.Addr)]
		n += 2 * len(sp.FullClients)
		n += 2*len(sp.Frontends) + mostSlots(sp.Cluster, sp.Hash, limit) + mostSlots(sp.Local, sp.Hash, limit)
		for _, p := range [...]*dataplane.Pool{sp.Cluster, sp.Local} {
			n += len(p.Ejected) + len(p.Kept)
		}
	}
	return n
}

// takingAddresses returns the Services that are to get an address which others still have.
func (m *Model) takingAddresses(s *dataplane.State, names, others []snapshot.Name) map[snapshot.Name]bool {
	who := map[dataplane.Key]snapshot.Name{}
	for _, name := range names {
		if svc := s.Services[name]; svc != nil {
			for _, sp := range svc.Ports {
				for i := range sp.Frontends {
					who[sp.Frontends[i].Key] = name
				}
			}
		}
	}
	out := map[snapshot.Name]bool{}
	for _, name := range others {
		for _, p := range m.serviceOrEmpty(name).ports {
			for i := range p.frontends {
				if n, wanted := who[p.frontends[i].key]; wanted {
					out[n] = true
				}
			}
		}
	}
	return out
}
