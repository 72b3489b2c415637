package inspect

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/verdict-proxy/verdict/internal/proxy/preflight"
	"github.com/verdict-proxy/verdict/internal/proxy/status"
	"github.com/verdict-proxy/verdict/internal/system/packets"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// unreachable is the outcome of a packet that Verdict would send on, and that reaches nobody.
const unreachable = "unreachable"

// judgeReach says of each endpoint why packets that are sent there reach nobody, and of the packet if that holds for
// all of them, or if the packet does not even come to Verdict's rules.
func (e *explainRun) judgeReach(a *Answer) {
	p := e.hostPacket(a)
	var unsent, ahead *status.Finding
	if e.routed() {
		unsent = e.routes.Sent(p)
		if unsent == nil && (a.Kernel.answered() || a.Objects.answered()) {
			var unclear error
			ahead, unclear = e.routes.Before(p)
			a.noteUnclear(unclear)
		}
	}
	for _, v := range []*View{a.Objects, a.Kernel} {
		switch {
		case v == nil:
		case unsent != nil:
			a.stop(v, unsent)
		case ahead != nil && v.answered():
			a.stop(v, ahead)
		default:
			e.judgeEndpoints(a, v, p)
		}
	}
}

// judgeEndpoints is judgeReach, of a packet that comes to Verdict's rules.
func (e *explainRun) judgeEndpoints(a *Answer, v *View, p preflight.Packet) {
	lost := 0
	var by *status.Finding
	for i := range v.Endpoints {
		ep := &v.Endpoints[i]
		var found *status.Finding
		ep.Trouble, found = e.trouble(a, ep, p)
		if ep.Trouble == "" {
			continue
		}
		if found != nil {
			a.noteFinding(found)
		}
		if lost++; lost == 1 {
			by = found
		} else if by != nil && (found == nil || *found != *by) {
			by = nil
		}
	}
	switch {
	case lost == 0 || lost < len(v.Endpoints):
	case by != nil:
		a.stop(v, by)
	default:
		v.Outcome, v.Why = unreachable, "reaches nobody, although it is "+v.Why
	}
}

// stop makes a finding the outcome.
func (a *Answer) stop(v *View, f *status.Finding) {
	a.noteFinding(f)
	v.Outcome, v.Why = unreachable, stoppedWhy(*f)
}

// stoppedWhy is the outcome of a packet that a finding stops.
func stoppedWhy(f status.Finding) string { return stopped + f.What }

const stopped = "stopped: "

// stopped reports whether one finding stops the packet.
func (v *View) stopped() bool { return strings.HasPrefix(v.Why, stopped) }

// noteFinding notes what is found, once for all endpoints: what is to be done about it is the same.
func (a *Answer) noteFinding(f *status.Finding) {
	same := func(o status.Finding) bool { return o.Check == f.Check && o.Advice == f.Advice }
	if !slices.ContainsFunc(a.Preflight, same) {
		a.Preflight = append(a.Preflight, *f)
	}
}

// noteUnclear notes once what is not known of the host.
func (a *Answer) noteUnclear(what error) {
	if v := a.Kernel; what != nil && !slices.Contains(v.Unclear, what.Error()) {
		v.Unclear = append(v.Unclear, what.Error())
	}
}

// answered reports whether a Service sends the packet on.
func (v *View) answered() bool {
	return v != nil && (v.Cause == dataplane.FrontendFound.String() || v.Cause == dataplane.FrontendScheduled.String())
}

// routed reports whether this host's routes are those of the packet.
func (e *explainRun) routed() bool { return e.routes != nil && e.At.IsZero() }

// hostPacket returns the packet as the host sees it.
func (e *explainRun) hostPacket(a *Answer) preflight.Packet {
	protocol, _ := packets.ParseProtocol(a.Packet.Protocol)
	iface := e.packet(a).Interface
	to := netip.AddrPortFrom(a.key.Addr, a.key.Port)
	return preflight.NewPacket(a.sender.addr, to, protocol, iface == "", iface)
}

// trouble says why packets that are sent to an endpoint reach nobody, and what was found if it is of this host; empty
// if nothing is known.
func (e *explainRun) trouble(a *Answer, ep *Endpoint, p preflight.Packet) (string, *status.Finding) {
	if why := serviceAddressText(a.explanation, ep.AddrPort()); why != "" {
		return why, nil
	}
	if !e.routed() {
		return "", nil
	}
	hairpin := ep.sees == dataplane.SourceSeenHairpin
	if hairpin && e.routes.Bridged(a.Packet.Interface, ep.Address) {
		if port := e.routes.NoHairpin(a.Packet.Interface, ep.Address); port != "" {
			return fmt.Sprintf("lost: %s gives nothing back to the port it came from: set hairpin mode of %s",
				a.Packet.Interface, port), nil
		}
	}
	found, unclear := e.routes.After(p, ep.AddrPort(), ep.sees.Node())
	a.noteUnclear(unclear)
	if found != nil {
		return "lost: " + found.What, found
	}
	return "", nil
}

// serviceAddressText says that an endpoint is an address of Services; empty if it is not, or if objects were not asked.
func serviceAddressText(x *dataplane.Explanation, a netip.AddrPort) string {
	if x == nil {
		return ""
	}
	i := slices.IndexFunc(x.Endpoints, func(c dataplane.EndpointDecision) bool { return c.Nowhere && c.AddrPort == a })
	if i < 0 {
		return ""
	}
	whose := "in a ServiceCIDR"
	if owner := x.Endpoints[i].Owner; owner != (snapshot.Name{}) {
		whose = "the cluster IP of " + owner.String()
	}
	return "lost: it is " + whose + ", and a connection is translated once"
}
