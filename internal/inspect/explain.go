// Package inspect answers questions about a node: what happens to a packet, how the kernel differs from what it should
// hold, and who is connected to. It reads the objects, and reads the kernel only by a reconcile.Inspector.
package inspect

import (
	"context"
	"net/netip"
	"slices"
	"time"

	"github.com/verdict-proxy/verdict/internal/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Explainer explains what happens to a packet.
type Explainer struct {
	// Objects is the source of the objects. They are asked if they are Given.
	Objects *ObjectFlags
	// Inspector, if not nil, reads the kernel of this node, which is then asked too.
	Inspector reconcile.Inspector
	// At, if not zero, is when the kernel held what the Inspector reads.
	At time.Time
	// Interface is the packet's input interface; empty means the one that this host's routes use for answers.
	Interface string
}

// Explain asks the objects, the kernel, or both.
func (x *Explainer) Explain(ctx context.Context, q Question) (*Answer, error) {
	e := explainRun{Explainer: x, q: q}
	if err := e.gather(ctx); err != nil {
		return nil, err
	}
	defer e.routes.close()
	return e.answer(ctx)
}

// explainRun collects what one answer needs.
type explainRun struct {
	*Explainer
	q          Question
	routes     *routes
	settings   *dataplane.Settings
	objects    *Objects
	localAddrs []netip.Addr
	// healthNote explains differences if it is not known which endpoints the proxy has ejected.
	healthNote string
}

// gather reads what the answer needs.
func (e *explainRun) gather(ctx context.Context) (err error) {
	if e.Inspector != nil {
		if e.routes, err = openRoutes(); err != nil {
			return err
		}
		if e.settings, err = e.Inspector.Settings(ctx); err != nil {
			return err
		}
		if e.localAddrs, err = HostAddrs(ctx); err != nil {
			return err
		}
	}
	if e.Objects.Given() {
		if e.objects, err = e.Objects.Load(ctx, e.settings, e.Inspector != nil); err != nil {
			return err
		}
		e.objects.PrintProblems()
		if e.Inspector != nil {
			e.healthNote = e.Objects.addHealth(ctx, e.objects)
		}
		e.localAddrs = e.objects.Snap.HostAddrs
	}
	return nil
}

// family returns the question's family.
func (e *explainRun) family() ipfamily.Family { return ipfamily.Of(e.q.Key.Addr) }

// pods returns how pods are recognized, by the objects' flags or the kernel's rules.
func (e *explainRun) pods() dataplane.Pods {
	if e.objects == nil {
		return e.settings.Pods[e.family()]
	}
	return dataplane.PodsOf(e.objects.Config, e.objects.Snap)[e.family()]
}

func (e *explainRun) answer(ctx context.Context) (*Answer, error) {
	var snap *snapshot.Snapshot
	if e.objects != nil {
		snap = e.objects.Snap
	}
	pods := e.pods()
	s, err := e.q.resolveSender(pods, snap, e.localAddrs, e.routes, e.Interface)
	if err != nil {
		return nil, err
	}
	a := &Answer{routes: e.routes, sender: s, Packet: AskedPacket{StandsFor: s.standsFor,
		Packet: dataplane.Packet{Source: s.addr,
			Destination: e.q.Key.Addr, Port: e.q.Key.Port, Protocol: e.q.Key.Protocol, Interface: s.iface}}}
	if e.objects != nil {
		x := dataplane.Explain(e.objects.Config, snap, dataplane.Question{Source: s.addr, Interface: s.iface, Key: e.q.Key})
		a.fillObjects(x, e.objects, &e.Objects.Policy)
	}
	if e.Inspector != nil {
		t, err := e.Inspector.Trace(ctx, e.packet(s), dataplane.LocalNode{
			Local:   func(a netip.Addr) bool { return slices.Contains(e.localAddrs, a) },
			Bridged: e.routes.bridged})
		if err != nil {
			return nil, err
		}
		a.fillKernel(t)
		if !e.At.IsZero() {
			a.Kernel.From += " at " + e.At.Local().Format(time.DateTime)
		}
		if a.Kernel.Service != nil {
			if why := e.uncountedNote(t.Counted, a.Kernel); why != "" {
				a.Notes = append(a.Notes, why)
			}
		}
	}
	if a.explanation == nil {
		a.Origin = originOf(s, pods, slices.Contains(e.localAddrs, s.addr) || s.addr.IsLoopback(), "the kernel's rules")
	}
	a.compare()
	if !a.Agree() && e.healthNote != "" {
		a.Notes = append(a.Notes, e.healthNote)
	}
	return a, nil
}

// packet returns the first packet of the connection.
func (e *explainRun) packet(s sender) dataplane.Packet {
	p := dataplane.Packet{Source: s.addr, Destination: e.q.Key.Addr, Protocol: e.q.Key.Protocol, Port: e.q.Key.Port,
		Interface: s.iface}
	if local := slices.Contains(e.localAddrs, s.addr) || s.addr.IsLoopback(); p.Interface == "" && !local {
		p.Interface = unknownInterface
	}
	return p
}

// unknownInterface stands for an interface whose name is unknown. No interface can have this name.
const unknownInterface = "?/"
