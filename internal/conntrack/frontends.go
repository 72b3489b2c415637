// Package conntrack removes UDP and SCTP flows that the kernel goes on translating as nobody would today: a flow is
// translated once, when it begins, and keeps its endpoint for as long as its client keeps sending, even when the
// endpoint is gone or the Service had none at that moment. TCP ends by itself and is never touched.
//
// A Cleaner stands around a backend, learns from each transaction which frontends are worth a look, and looks at them
// in its own time: it has the kernel list their flows, and deletes those that are wrong by tuple and id.
package conntrack

import (
	"net/netip"
	"slices"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// frontends says where the flows of each UDP and SCTP frontend that is programmed may go. It keeps pointers into
// Services, which nobody changes.
type frontends map[dataplane.Key]*dataplane.ServicePort

// replace replaces Services by others, in the same order, and gives the frontends whose flows may be wrong now:
// sorted and unique, those that are gone among them.
func (fs frontends) replace(before, after []*dataplane.Service) []dataplane.Key {
	was := map[dataplane.Key]*dataplane.ServicePort{}
	for _, svc := range before {
		eachFrontend(svc, func(k dataplane.Key, sp *dataplane.ServicePort) {
			if fs[k] == sp { // otherwise another Service has got it already
				was[k] = sp
				delete(fs, k)
			}
		})
	}
	var changed []dataplane.Key
	// A key may have gone from one Service to another: all are taken out before the first is put in.
	for _, svc := range after {
		eachFrontend(svc, func(k dataplane.Key, sp *dataplane.ServicePort) {
			fs[k] = sp
			if mayHaveStale(was[k], sp) {
				changed = append(changed, k)
			}
			delete(was, k)
		})
	}
	for k := range was {
		changed = append(changed, k)
	}
	slices.SortFunc(changed, dataplane.Key.Compare)
	return changed
}

// eachFrontend calls do for every UDP and SCTP frontend of a Service, which may be nil.
func eachFrontend(svc *dataplane.Service, do func(dataplane.Key, *dataplane.ServicePort)) {
	if svc == nil {
		return
	}
	for _, sp := range svc.Ports {
		if sp.Name.Protocol == snapshot.TCP {
			continue
		}
		for i := range sp.Frontends {
			do(sp.Frontends[i].Key, sp)
		}
	}
}

// mayHaveStale says whether flows to a frontend that were right before, or none of ours, may be wrong now: it is new,
// it had no endpoints, or an endpoint has left. Whatever else changes, policies among it, is for flows that are yet
// to begin.
func mayHaveStale(before, now *dataplane.ServicePort) bool {
	if before == nil {
		return true
	}
	if len(before.Serving) == 0 {
		return len(now.Serving) > 0
	}
	return slices.ContainsFunc(before.Serving, func(e dataplane.Endpoint) bool { return !serves(now, e.AddrPort) })
}

func serves(sp *dataplane.ServicePort, a netip.AddrPort) bool {
	_, found := slices.BinarySearchFunc(sp.Serving, a, func(e dataplane.Endpoint, a netip.AddrPort) int {
		return e.AddrPort.Compare(a)
	})
	return found
}

// stale says whether a flow to a frontend worth a look has to go.
//
// A frontend that is carried has no right flows but those to its serving endpoints; those that were never translated
// began before it was carried. One that is carried no more leaves behind what was translated for it; what was not is
// somebody else's, such as a process that listens at what used to be a node port.
//
// In a conntrack zone other than the default one, somebody else tracks packets a second time, as Open vSwitch does:
// there it is no wonder that one goes by untranslated.
func (fs frontends) stale(f *flow) bool {
	sp, exists := fs[f.frontend]
	if (!exists || f.zoned) && !f.translated() {
		return false
	}
	return !exists || !serves(sp, f.endpoint)
}
