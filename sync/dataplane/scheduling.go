package dataplane

import (
	"net/netip"
	"slices"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// IPVS says which Services are scheduled by IPVS. The zero value says none.
type IPVS struct {
	// Mode says who is.
	Mode IPVSMode
	// Default is how a Service is scheduled that says nothing itself.
	Default Scheduling
}

// IPVSMode says which Services are scheduled by IPVS.
type IPVSMode uint8

// The modes. A Service's annotation goes before all but IPVSNever.
const (
	// IPVSNever: none, whatever they ask for.
	IPVSNever IPVSMode = iota
	// IPVSAuto: those that ask for it.
	IPVSAuto
	// IPVSAlways: all that do not ask for nftables.
	IPVSAlways
)

// scheduling gives how IPVS is to schedule a Service; nil means that it is not to. Services share what is given.
func (h *host) scheduling(svc *snapshot.Service) *Scheduling {
	asked := svc.Scheduling
	switch {
	case h.ipvs.Mode == IPVSNever:
		return nil
	case asked == nil || asked.Scheduler == "":
		if h.ipvs.Mode == IPVSAlways {
			return &h.ipvs.Default
		}
		return nil
	case asked.Scheduler == snapshot.NFTables:
		return nil
	}
	return &Scheduling{Scheduler: asked.Scheduler, Port: asked.Port, Fallback: asked.Fallback}
}

// weigh writes the endpoints' weights into a pool that IPVS schedules.
func (b *builder) weigh(svc *snapshot.Service, pool *Pool) {
	for i := range pool.Endpoints {
		ep := &pool.Endpoints[i]
		at, _ := slices.BinarySearchFunc(b.candidates, ep.AddrPort, func(c candidate, a netip.AddrPort) int { return c.addr.Compare(a) })
		ep.Weight = weight(svc, b.candidates[at].Endpoint)
	}
}

// weight gives an endpoint's share: its own, else that of its node, else 1.
func weight(svc *snapshot.Service, ep *snapshot.Endpoint) uint16 {
	w := ep.Weight
	if w == 0 && svc.Scheduling != nil {
		w = svc.Scheduling.Weights[ep.Node]
	}
	return max(w, 1)
}
