package ipvsplugin

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// table is what a State asks of IPVS: virtual services by key, and which of them each Service has.
type table struct {
	services  map[dataplane.Key]*VirtualService
	byService map[snapshot.Name][]*VirtualService
	// addrs counts virtual services by address, but for those of node ports: the host has those addresses anyway.
	addrs map[netip.Addr]int
}

func newTable() table {
	return table{
		services:  map[dataplane.Key]*VirtualService{},
		byService: map[snapshot.Name][]*VirtualService{},
		addrs:     map[netip.Addr]int{},
	}
}

// replace rebuilds the table from a whole State, and returns the keys that may differ.
func (t *table) replace(st *dataplane.State) map[dataplane.Key]bool {
	touched := map[dataplane.Key]bool{}
	for k := range t.services {
		touched[k] = true
	}
	*t = newTable()
	for n, svc := range st.Services {
		t.add(n, svc, touched)
	}
	return touched
}

// update applies a Change, and returns the keys that may differ. A key may move from one Service to another in one
// Change, so all old keys are removed before new ones are added.
func (t *table) update(st *dataplane.State, change dataplane.Change) map[dataplane.Key]bool {
	touched := map[dataplane.Key]bool{}
	for _, n := range change.Services {
		for _, vs := range t.byService[n] {
			delete(t.services, vs.Key)
			touched[vs.Key] = true
			if vs.Kind != dataplane.NodePort {
				count(t.addrs, vs.Key.Addr, -1)
			}
		}
		delete(t.byService, n)
	}
	for _, n := range change.Services {
		if svc := st.Services[n]; svc != nil {
			t.add(n, svc, touched)
		}
	}
	return touched
}

func (t *table) add(n snapshot.Name, svc *dataplane.Service, touched map[dataplane.Key]bool) {
	list := compile(svc)
	for _, vs := range list {
		t.services[vs.Key] = vs
		touched[vs.Key] = true
		if vs.Kind != dataplane.NodePort {
			count(t.addrs, vs.Key.Addr, 1)
		}
	}
	if len(list) > 0 {
		t.byService[n] = list
	}
}

// compile gives the virtual services of a Service.
func compile(svc *dataplane.Service) (list []*VirtualService) {
	for _, sp := range svc.Ports {
		if sp.Scheduling == nil {
			continue
		}
		pools := map[*dataplane.Pool][]Destination{}
		for i := range sp.Frontends {
			f := &sp.Frontends[i]
			pool := sp.Scheduled(f)
			if pool == nil {
				continue
			}
			if pools[pool] == nil {
				pools[pool] = destinations(pool)
			}
			list = append(list, &VirtualService{
				Key: f.Key, Kind: f.Kind, Service: sp.Name, Config: config(sp), Destinations: pools[pool],
			})
		}
	}
	return list
}

func config(sp *dataplane.ServicePort) Config {
	c := Config{Scheduler: sp.Scheduling.Scheduler}
	if sp.Affinity > 0 {
		c.Flags |= Persistent
		c.Timeout = uint32(sp.Affinity / time.Second)
	}
	if sp.Scheduling.Port {
		c.Flags |= SchedPort
	}
	if sp.Scheduling.Fallback {
		c.Flags |= SchedFallback
	}
	return c
}

func destinations(p *dataplane.Pool) []Destination {
	list := make([]Destination, len(p.Endpoints))
	for i, ep := range p.Endpoints {
		list[i] = Destination{AddrPort: ep.AddrPort, Weight: uint32(ep.Weight)}
	}
	return list
}

// sorted gives the virtual services in the order of their keys.
func (t *table) sorted() []*VirtualService {
	return slices.SortedFunc(maps.Values(t.services), func(a, b *VirtualService) int { return a.Key.Compare(b.Key) })
}
