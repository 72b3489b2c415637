// Package inspect answers questions about a node: what happens to a packet, how the kernel differs from what it should
// hold, and who is connected to. It reads the objects, and reads the kernel only by a reconcile.Inspector.
package inspect

import (
	"context"
	"net/netip"
	"reflect"
	"slices"
	"time"

	"github.com/verdict-proxy/verdict/internal/proxy/preflight"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
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
	// Records is the address of the proxy's metrics server, which is asked for connections that failed, too; zero: it is
	// not asked.
	Records netip.AddrPort
	// Interface is the packet's input interface; empty means the one that this host's routes use for answers.
	Interface string
}

// Explain asks the objects, the kernel, or both. An endpoint may be ejected or come back between the two questions to
// the kernel: if its answer is another one than the objects', and the settings or the health of endpoints are others
// now, it is asked again.
func (x *Explainer) Explain(ctx context.Context, q Question) (*Answer, error) {
	e := explainRun{Explainer: x, q: q}
	if err := e.gather(ctx); err != nil {
		return nil, err
	}
	defer e.routes.Close()
	for look := 1; ; look++ {
		a, err := e.answer(ctx)
		if err != nil || a.Agree() || look == maxLooks {
			return a, err
		}
		now, err := e.Inspector.Settings(ctx)
		if err != nil {
			return nil, err
		}
		if reflect.DeepEqual(now, e.settings) {
			return a, nil
		}
		e.settings = now
		e.objects.takeHealth(now.Unhealthy)
	}
}

// explainRun collects what one answer needs.
type explainRun struct {
	*Explainer
	q        Question
	routes   *preflight.Host
	settings *dataplane.Settings
	// present says that the kernel has something of Verdict.
	present    bool
	objects    *Objects
	localAddrs []netip.Addr
	// healthNote explains differences if it is not known which endpoints start slowly.
	healthNote string
}

// gather reads what the answer needs.
func (e *explainRun) gather(ctx context.Context) (err error) {
	if e.Inspector != nil {
		if e.routes, err = preflight.Open(); err != nil {
			return err
		}
		if e.present, err = e.Inspector.Present(ctx); err != nil {
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
			e.objects.takeHealth(e.settings.Unhealthy)
			e.healthNote = e.Objects.addSlowStarts(ctx, e.objects)
		}
		e.localAddrs = e.objects.Snap.HostAddrs
	}
	return nil
}

// config returns the objects' configuration, as far as the backend that is installed here carries it out.
func (e *explainRun) config() dataplane.Config {
	c := e.objects.Config
	if e.present && e.Inspector.Name() == "iptables" { // docs/IPTABLES.md
		c.PingServices, c.RejectUnusedPorts, c.LastResort = false, false, false
	}
	return c
}

// family returns the question's family.
func (e *explainRun) family() ipfamily.Family { return ipfamily.Of(e.q.Key.Addr) }

// pods returns how pods are recognized, by the objects' flags or the kernel's rules.
func (e *explainRun) pods() knownPods {
	unknown := "--cluster-cidr is not given"
	switch {
	case e.Inspector == nil:
	case !e.present && e.objects == nil:
		unknown = "Verdict has programmed nothing on this node"
	case !e.present:
		unknown = "Verdict has programmed nothing on this node, and " + unknown
	default:
		unknown = "the proxy was started without --cluster-cidr"
	}
	if e.objects == nil {
		return knownPods{e.settings.Pods[e.family()], unknown}
	}
	return knownPods{dataplane.PodsOf(e.objects.Config, e.objects.Snap)[e.family()], unknown}
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
	a := &Answer{routes: e.routes, sender: s, key: e.q.Key, Packet: AskedPacket{s.addr, s.standsFor, e.q.Key.Addr,
		e.q.Key.Port, e.q.Key.Protocol.String(), s.iface}}
	if e.objects != nil {
		x := dataplane.Explain(e.config(), snap, dataplane.Question{Source: s.addr, Interface: s.iface, Key: e.q.Key})
		a.fillObjects(x, e.objects, &e.Objects.Policy, pods.unknown)
	}
	if e.Inspector != nil {
		t, err := e.Inspector.Trace(ctx, e.packet(a), dataplane.LocalNode{Addrs: e.localAddrs, Bridged: e.routes.Bridged})
		if err != nil {
			return nil, err
		}
		a.fillKernel(t)
		if !e.At.IsZero() {
			a.Kernel.From += " at " + e.At.Local().Format(time.DateTime)
		}
		if a.Kernel.Service != nil && t.Cause != dataplane.ForwardedToNode { // which nothing counts
			if why := e.uncountedNote(t, a.Kernel); why != "" {
				a.Notes = append(a.Notes, why)
			}
		}
	}
	if a.explanation == nil {
		a.Origin = originOf(s, pods, slices.Contains(e.localAddrs, s.addr) || s.addr.IsLoopback(), "the kernel's rules")
	}
	a.compare()
	e.judgeReach(a)
	a.Notes = append(a.Notes, e.ejectionNotes(a)...)
	if !a.Agree() && e.healthNote != "" {
		a.Notes = append(a.Notes, e.healthNote)
	}
	a.Failures = e.lastFailures(ctx, a)
	return a, nil
}

// ejectionNotes says which endpoints of the Service are ejected, of any of its ports, if both sides were asked: the
// kernel says so itself.
func (e *explainRun) ejectionNotes(a *Answer) []string {
	if !a.Compared() || a.explanation.Port == nil {
		return nil
	}
	name := a.explanation.Port.Name.Service
	var list []dataplane.EndpointHealth
	for _, h := range e.settings.Unhealthy {
		if h.Port.Service == name {
			list = append(list, h)
		}
	}
	return healthNotes(list)
}

// packet returns the first packet of the connection.
func (e *explainRun) packet(a *Answer) dataplane.Packet {
	s := a.sender
	p := dataplane.Packet{Source: s.addr, Destination: e.q.Key.Addr, Protocol: e.q.Key.Protocol, Port: e.q.Key.Port,
		Interface: s.iface}
	if local := slices.Contains(e.localAddrs, s.addr) || s.addr.IsLoopback(); p.Interface == "" && !local {
		p.Interface = unknownInterface
	}
	x := a.explanation
	if e.settings != nil && len(e.settings.NodeMACs) > 0 && x != nil &&
		(x.Origin.Pod || e.objects.Snap.Link.HasAddr(s.addr)) {
		p.MAC = e.settings.NodeMACs[0] // by the link, another node sends it
	}
	return p
}

// unknownInterface stands for an interface whose name is unknown. No interface can have this name.
const unknownInterface = "?/"
