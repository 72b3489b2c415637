// Package inspect answers what is going on on a node: what happens to a packet, in what the kernel differs from what it
// should hold, and who is connected to. It knows the objects, and asks the kernel by a reconcile.Inspector alone.
package inspect

import (
	"context"
	"net/netip"
	"slices"

	"github.com/verdict-proxy/verdict/internal/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Explainer says what happens to a packet.
type Explainer struct {
	// Objects says where the objects come from; they are asked if they are Given.
	Objects *ObjectFlags
	// Inspector, if not nil, reads the kernel of this node, which is asked too.
	Inspector reconcile.Inspector
	// Interface is the one the packet comes in by; empty for the one this host's routes lead back to the sender.
	Interface string
}

// Explain asks the objects, the kernel, or both.
func (x *Explainer) Explain(ctx context.Context, q Question) (*Answer, error) {
	e := explaining{Explainer: x, q: q}
	if err := e.gather(ctx); err != nil {
		return nil, err
	}
	defer e.routes.close()
	return e.answer(ctx)
}

// explaining is an answer on its way.
type explaining struct {
	*Explainer
	q        Question
	routes   *routes
	settings *dataplane.Settings
	objects  *Objects
	here     []netip.Addr
}

// gather reads what the answer needs.
func (e *explaining) gather(ctx context.Context) (err error) {
	if e.Inspector != nil {
		if e.routes, err = openRoutes(); err != nil {
			return err
		}
		if e.settings, err = e.Inspector.Settings(ctx); err != nil {
			return err
		}
		if e.here, err = hostAddrs(ctx); err != nil {
			return err
		}
	}
	if e.Objects.Given() {
		if e.objects, err = e.Objects.Load(ctx, e.settings, e.Inspector != nil); err != nil {
			return err
		}
		e.objects.complain()
		e.here = e.objects.Snap.HostAddrs
	}
	return nil
}

// family is the question's.
func (e *explaining) family() ipfamily.Family { return ipfamily.Of(e.q.Key.Addr) }

// pods says how pods are told from others, as the objects' flags or the kernel's rules have it.
func (e *explaining) pods() dataplane.Pods {
	if e.objects == nil {
		return e.settings.Pods[e.family()]
	}
	return dataplane.PodsOf(e.objects.Config, e.objects.Snap)[e.family()]
}

func (e *explaining) answer(ctx context.Context) (*Answer, error) {
	var snap *snapshot.Snapshot
	if e.objects != nil {
		snap = e.objects.Snap
	}
	pods := e.pods()
	s, err := e.q.place(pods, snap, e.here, e.routes, e.Interface)
	if err != nil {
		return nil, err
	}
	a := &Answer{routes: e.routes, sender: s, Packet: AskedPacket{StandsFor: s.standsFor,
		Packet: dataplane.Packet{Source: s.addr,
			Destination: e.q.Key.Addr, Port: e.q.Key.Port, Protocol: e.q.Key.Protocol, Interface: s.iface}}}
	if e.objects != nil {
		x := dataplane.Explain(e.objects.Config, snap, dataplane.Question{Source: s.addr, Interface: s.iface, Key: e.q.Key})
		a.explain(x, e.objects, &e.Objects.Policy)
	}
	if e.Inspector != nil {
		t, err := e.Inspector.Trace(ctx, e.packet(s), dataplane.LocalNode{
			Local:   func(a netip.Addr) bool { return slices.Contains(e.here, a) },
			Bridged: e.routes.bridged})
		if err != nil {
			return nil, err
		}
		a.traced(t)
		if a.Kernel.Service != nil {
			if why := e.uncountedNote(t.Counted, a.Kernel); why != "" {
				a.Notes = append(a.Notes, why)
			}
		}
	}
	if a.explanation == nil {
		a.Origin = originOf(s, pods, slices.Contains(e.here, s.addr) || s.addr.IsLoopback(), "the kernel's rules")
	}
	a.compare()
	return a, nil
}

// packet gives the first packet of the connection.
func (e *explaining) packet(s sender) dataplane.Packet {
	p := dataplane.Packet{Source: s.addr, Destination: e.q.Key.Addr, Protocol: e.q.Key.Protocol, Port: e.q.Key.Port,
		Interface: s.iface}
	if local := slices.Contains(e.here, s.addr) || s.addr.IsLoopback(); p.Interface == "" && !local {
		p.Interface = unknownInterface
	}
	return p
}

// unknownInterface stands for one whose name is not known. It is no name an interface can have.
const unknownInterface = "?/"
