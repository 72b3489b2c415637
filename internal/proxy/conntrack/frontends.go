// Package conntrack removes flows from the kernel's connection tracking that lead to the wrong endpoint.
//
// The kernel translates a flow once, when it begins. The flow then keeps its endpoint for as long as its client sends,
// even if the endpoint is removed, or if the Service had no endpoints at that moment.
//
// A Cleaner removes such UDP and SCTP flows. It listens to the reconcile loop and learns from each transaction which
// frontends to check. It checks them in its own time: it lists their flows and deletes the stale ones by tuple and id.
//
// TCP connections may outlive the removal of their endpoint, which may serve them to their end. A Releaser deletes only
// those that nobody answers, and those whose Service has a deadline. Unanswered deletes those that an endpoint has not
// answered, and is known not to. The Cleaner deletes those that began before their frontend was there.
//
// All of them get their flows from one Walker, so that the kernel walks its table as seldom as possible.
package conntrack

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// frontends maps each programmed UDP and SCTP frontend to the port that says where its flows may go. It keeps pointers
// into Services, which nobody changes.
type frontends map[dataplane.Key]*dataplane.ServicePort

// replace replaces Services by others in the same order. It returns the frontends whose flows may be stale now, the
// removed ones included, sorted and without duplicates.
func (fs frontends) replace(before, after []*dataplane.Service) []dataplane.Key {
	was := map[dataplane.Key]*dataplane.ServicePort{}
	for _, svc := range before {
		for sp, f := range svc.EachFrontend() {
			if fs[f.Key] == sp { // otherwise another Service already has it
				was[f.Key] = sp
				delete(fs, f.Key)
			}
		}
	}
	var changed []dataplane.Key
	// A key may move from one Service to another: remove all old keys before adding the first new one.
	for _, svc := range after {
		for sp, f := range svc.EachFrontend() {
			if sp.Name.Protocol == snapshot.TCP {
				continue
			}
			fs[f.Key] = sp
			if mayHaveStale(was[f.Key], sp) {
				changed = append(changed, f.Key)
			}
			delete(was, f.Key)
		}
	}
	changed = slices.AppendSeq(changed, maps.Keys(was))
	slices.SortFunc(changed, dataplane.Key.Compare)
	return changed
}

// mayHaveStale says whether a change may have made flows to a frontend stale: the frontend is new, it had no endpoints,
// it passed packets, or an endpoint was removed. Other changes, such as another policy, affect only flows that begin
// later.
func mayHaveStale(before, now *dataplane.ServicePort) bool {
	if before == nil {
		return true
	}
	if passing(before) && !passing(now) {
		return true
	}
	if len(before.Serving) == 0 {
		return len(now.Serving) > 0
	}
	return slices.ContainsFunc(before.Serving, func(e dataplane.Endpoint) bool { return !serves(now, e.AddrPort) })
}

// passing says whether a port has a frontend that passes packets.
func passing(sp *dataplane.ServicePort) bool {
	return slices.ContainsFunc(sp.Frontends, func(fe dataplane.Frontend) bool { return passes(&fe) })
}

// newTCP returns the TCP frontends that Services have and did not have before, or had for another port, or left
// untranslated.
func newTCP(before, after []*dataplane.Service) (added []dataplane.Key) {
	for i, svc := range after {
		was := map[dataplane.PortName][]dataplane.Frontend{}
		for sp := range before[i].EachPort() {
			was[sp.Name] = sp.Frontends
		}
		for sp := range svc.EachPort() {
			if sp.Name.Protocol == snapshot.TCP {
				added = appendNew(added, was[sp.Name], sp.Frontends)
			}
		}
	}
	return added
}

// appendNew appends the keys of after that before does not have, or passes. Both are sorted by key.
func appendNew(to []dataplane.Key, before, after []dataplane.Frontend) []dataplane.Key {
	for i := range after {
		k := after[i].Key
		for len(before) > 0 && before[0].Key.Compare(k) < 0 {
			before = before[1:]
		}
		if len(before) == 0 || before[0].Key != k || passes(&before[0]) && !passes(&after[i]) {
			to = append(to, k)
		}
	}
	return to
}

// leftByKubeProxy says whether kube-proxy leaves a stale flow alone: of other protocols than UDP, of a Service that is
// gone, and to a node port of a Service without endpoints (pkg/proxy/conntrack/cleanup.go in 1.37).
func (fs frontends) leftByKubeProxy(f *flow) bool {
	sp, exists := fs[f.frontend]
	if f.frontend.Protocol != snapshot.UDP || !exists {
		return true
	}
	fe := sp.Frontend(f.frontend)
	return len(sp.Serving) == 0 && fe != nil && fe.Kind == dataplane.NodePort
}

func serves(sp *dataplane.ServicePort, a netip.AddrPort) bool {
	return dataplane.HasEndpoint(sp.Serving, a)
}

// passes says whether a frontend leaves packets alone, those of some clients at least. There may be no frontend.
func passes(fe *dataplane.Frontend) bool {
	return fe != nil && slices.ContainsFunc(fe.Routes, func(r dataplane.Route) bool {
		return len(r.Pool.Endpoints) == 0 && r.Pool.Empty == dataplane.Pass
	})
}

// staleTCP says whether a TCP flow to a frontend of a port must be deleted: it was not translated and nobody has
// answered it. Its client sent the first SYN before the frontend was programmed, and sends the next ones in vain. The
// flow is right if the frontend passes packets, or if IPVS translates them. The port is nil if it is gone.
func staleTCP(f *flow, sp *dataplane.ServicePort) bool {
	if sp == nil || f.zoned || f.translated() || f.answered {
		return false
	}
	fe := sp.Frontend(f.frontend)
	return fe != nil && !passes(fe) && sp.Scheduled(fe) == nil
}

// stale says whether a flow of UDP or SCTP to a checked frontend must be deleted.
//
// If the frontend is programmed, only flows to its serving endpoints are right. A flow that was not translated began
// before the frontend was programmed. If the frontend was removed, its translated flows are stale. An untranslated flow
// belongs to somebody else, such as a process that listens on a former node port.
//
// A flow to an endpoint that serves, though others come first on this node now, is stale once it was answered. Before,
// its client would wait in vain.
//
// In a conntrack zone other than the default one, somebody else tracks packets a second time, as Open vSwitch does. An
// untranslated flow is normal there. So it is at a frontend that passes packets.
func (fs frontends) stale(f *flow) bool {
	sp, exists := fs[f.frontend]
	if !f.translated() && (!exists || f.zoned || passes(sp.Frontend(f.frontend))) {
		return false
	}
	return !exists || !serves(sp, f.endpoint) && (f.answered || !dataplane.HasEndpoint(sp.Finishing, f.endpoint))
}
