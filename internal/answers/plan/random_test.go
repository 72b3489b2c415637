package plan

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/proxy/conntrack"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// names of the random Services.
const randomServices = 4

func (b *bed) one(of int) bool { return b.rand.IntN(of) == 0 }

// randomDelta changes some Services, their slices, or the node.
func (b *bed) randomDelta() snapshot.Delta {
	d := snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{}, Slices: map[snapshot.Name]*snapshot.Slice{}}
	for range 1 + b.rand.IntN(2) {
		i := b.rand.IntN(randomServices)
		n := snapshot.Name{Namespace: "default", Name: fmt.Sprintf("s%d", i)}
		svc := b.snap.Services[n]
		switch {
		case svc == nil:
			d.Services[n] = b.newService(n, i)
			b.randomSlices(d, n)
		case b.one(12):
			d.Services[n] = nil
		case b.one(2):
			b.randomSlices(d, n)
		default:
			d.Services[n] = b.mutate(svc, i)
		}
	}
	if b.one(40) {
		node := b.snap.Node
		node.Zone = []string{"a", "b"}[b.rand.IntN(2)]
		d.Node = &node
	}
	return d
}

func (b *bed) newService(n snapshot.Name, i int) *snapshot.Service {
	s := &snapshot.Service{Name: n, Ports: []snapshot.Port{
		{Name: "t", Protocol: snapshot.TCP, Port: 80, NodePort: uint16(30000 + i)},
		{Name: "u", Protocol: snapshot.UDP, Port: 53, NodePort: uint16(30000 + i)}}}
	for f := range lab.ServiceRange {
		s.ClusterIPs = append(s.ClusterIPs, lab.Nth(lab.ServiceRange[f], 10+i))
		s.LoadBalancerIPs = append(s.LoadBalancerIPs, lab.Nth(lab.ExternalRange[f], 10+i))
	}
	for range 3 {
		s = b.mutate(s, i)
	}
	return s
}

// mutate changes one thing of a Service.
func (b *bed) mutate(old *snapshot.Service, i int) *snapshot.Service {
	s := *old
	s.Ports = slices.Clone(old.Ports)
	switch b.rand.IntN(11) {
	case 0:
		s.ExternalLocal = !s.ExternalLocal
	case 1:
		s.InternalLocal = !s.InternalLocal
	case 2:
		s.Affinity = []time.Duration{0, time.Hour, 10 * time.Second}[b.rand.IntN(3)]
	case 3, 4:
		all := []netip.Prefix{lab.OutsideRange[0], lab.PodRange[0], lab.OutsideRange[1], lab.PodRange[1], lab.NodeRange[0]}
		s.SourceRanges = nil
		for _, r := range all {
			if b.one(2) {
				s.SourceRanges = append(s.SourceRanges, r)
			}
		}
	case 5:
		s.ExternalIPs = nil
		for f := range lab.ExternalRange {
			if b.one(2) { // which others may claim, too
				s.ExternalIPs = append(s.ExternalIPs, lab.Nth(lab.ExternalRange[f], 50+b.rand.IntN(2)))
			}
		}
	case 6:
		s.Drain = []time.Duration{0, time.Second, 2 * time.Second}[b.rand.IntN(3)]
	case 7:
		p := &s.Ports[b.rand.IntN(len(s.Ports))]
		p.Port += []uint16{1, ^uint16(0)}[b.rand.IntN(2)]
	case 8:
		s.ClusterIPs = s.ClusterIPs[:1]
		if b.one(2) {
			s.ClusterIPs = []netip.Addr{lab.Nth(lab.ServiceRange[0], 10+i), lab.Nth(lab.ServiceRange[1], 10+i)}
		}
	case 9:
		for p := range s.Ports {
			s.Ports[p].NodePort = uint16(30000+i) * uint16(b.rand.IntN(2))
		}
	case 10:
		s.Ports[0].Name = []string{"t", "other"}[b.rand.IntN(2)]
	}
	return &s
}

// randomSlices makes some pods endpoints of a Service.
func (b *bed) randomSlices(d snapshot.Delta, n snapshot.Name) {
	for f, word := range []string{"4", "6"} {
		if b.one(6) {
			continue
		}
		sl := &snapshot.Slice{Name: snapshot.Name{Namespace: n.Namespace, Name: n.Name + "-" + word}, Service: n.Name,
			Ports: []snapshot.SlicePort{{Name: "t", Protocol: snapshot.TCP, Port: 5353},
				{Name: "other", Protocol: snapshot.TCP, Port: 5353}, {Name: "u", Protocol: snapshot.UDP, Port: 5353}}}
		for i, pod := range b.pods() {
			ep := snapshot.Endpoint{Addr: pod.IP(lab.Families()[f]), Node: []string{"node", "node2"}[i/2],
				Zone: []string{"a", "b"}[i/2], Ready: true, Serving: true}
			switch b.rand.IntN(6) {
			case 0, 1:
				continue
			case 2:
				ep.Ready, ep.Terminating = false, true
				ep.Serving = b.one(2)
			}
			sl.Endpoints = append(sl.Endpoints, ep)
		}
		d.Slices[sl.Name] = sl
	}
}

// maxOpen is how many connections are open at a time.
const maxOpen = 24

// connect opens connections until there are enough, a few at a time.
func (b *bed) connect() {
	var keys []dataplane.Key
	for _, svc := range b.planner.State().Services {
		for _, sp := range svc.Ports {
			for i := range sp.Frontends {
				keys = append(keys, sp.Frontends[i].Key)
			}
		}
	}
	if len(keys) == 0 {
		return
	}
	slices.SortFunc(keys, dataplane.Key.Compare)
	hosts := append(slices.Clone(b.Pods), b.Outside, b.Node, b.Node2)
	var mu sync.Mutex
	var all sync.WaitGroup
	for range min(6, maxOpen-len(b.conns)) {
		host, k := hosts[b.rand.IntN(len(hosts))], keys[b.rand.IntN(len(keys))]
		all.Go(func() {
			c, r := host.Open(k.Protocol, netip.AddrPortFrom(k.Addr, k.Port), lab.Options{Timeout: shortly})
			mu.Lock()
			defer mu.Unlock()
			if r.Outcome != lab.Answered {
				b.unanswered++
				return
			}
			b.conns = append(b.conns, &open{host: host, conn: c, frontend: k, server: r.Endpoint})
			b.tally["connections"]++
		})
	}
	all.Wait()
}

// shortly is how long an answer that should not come is waited for.
const shortly = 80 * time.Millisecond

// checkConns looks whether open connections fare as predicted.
func (b *bed) checkConns(n int, flows map[flowKey]judged, changed time.Time) {
	var mu sync.Mutex
	var all sync.WaitGroup
	gone := map[*open]bool{}
	for _, o := range b.conns {
		f, ok := flows[flowKey{o.conn.Local(), o.frontend}]
		if ok {
			o.follow(&f, changed)
		} else if o.drain > 0 && b.serves(o) {
			o.raced = true // it was perhaps reset, and its next packet went to the same endpoint
		}
		deleted := ok && f.Fate == conntrack.Deleted && !o.raced
		ends, moves := deleted && !answered(f.next), deleted && answered(f.next) && !b.serves(o)
		all.Go(func() {
			if ends || moves {
				o.awaitDeletion(ends)
			}
			what, wrong := o.check(ok, moves, &f)
			mu.Lock()
			defer mu.Unlock()
			b.tally[what]++
			if what == "cut" || what == newRefused { // a sweep after an earlier change may find the unanswered packet
				b.unanswered++
			}
			if wrong != "" {
				b.t.Errorf("change %d: %s to %v, predicted %d, %v: %s", n, o.host.Name, o.frontend, f.Fate, f.next, wrong)
			}
			gone[o] = what == "cut" || what == "reset" || o.raced || wrong != ""
		})
	}
	all.Wait()
	b.conns = slices.DeleteFunc(b.conns, func(o *open) bool {
		if gone[o] {
			o.conn.Close()
		}
		return gone[o]
	})
	if len(b.conns) == maxOpen && b.one(4) {
		b.conns[0].conn.Close()
		b.conns = b.conns[1:]
	}
	maps.DeleteFunc(b.tally, func(_ string, n int) bool { return n == 0 })
}

// serves reports whether the pod of a connection serves at its address, whatever its port.
func (b *bed) serves(o *open) bool {
	for _, svc := range b.planner.State().Services {
		for _, sp := range svc.Ports {
			if !slices.ContainsFunc(sp.Frontends, func(f dataplane.Frontend) bool { return f.Key == o.frontend }) {
				continue
			}
			for _, pod := range b.pods() {
				at := pod.IP(ipfamily.Of(o.frontend.Addr))
				serves := func(e dataplane.Endpoint) bool { return e.AddrPort.Addr() == at }
				if pod.Name == o.server && slices.ContainsFunc(sp.Serving, serves) {
					return true
				}
			}
		}
	}
	return false
}

// follow takes note of a deadline.
func (o *open) follow(f *judged, changed time.Time) {
	departed := f.Fate == conntrack.Drains || f.Fate == conntrack.Departed
	same := departed && f.After.Drain == o.drain
	if o.drain > 0 && !same && changed.After(o.left.Add(o.drain-time.Second)) {
		o.raced = true // it was perhaps reset before the change
	}
	switch {
	case departed && f.Was == conntrack.Kept:
		o.left, o.drain, o.port, o.late = changed, f.After.Drain, f.After.Name, late
	case departed && o.port.Service == f.After.Name.Service &&
		(o.port == f.After.Name || f.Before.Frontends[0].Key == f.After.Frontends[0].Key):
		o.port = f.After.Name
		if o.drain != f.After.Drain {
			o.drain, o.late = f.After.Drain, afterPause
		}
	default:
		o.raced = o.raced || !o.left.IsZero() && f.After == nil
		o.left, o.drain, o.port = time.Time{}, 0, dataplane.PortName{}
	}
	// A Releaser may know an endpoint from before, when the address was another Service's.
	serves := func(e dataplane.Endpoint) bool { return e.AddrPort == f.Endpoint }
	if f.Frontend.Protocol == snapshot.TCP && f.After != nil && !slices.ContainsFunc(f.After.Serving, serves) {
		o.raced = o.raced || o.left.IsZero()
	}
}

// late is how long after a deadline a connection is reset at the latest, and afterPause the same if the deadline
// changed while a Releaser made the longest of its pauses.
const (
	late       = 6 * time.Second
	afterPause = time.Minute + late
)

// awaitDeletion waits until another pod answers a connection; if it ends, until nobody does, several times. If the
// Cleaner deleted a flow that nobody knew of, awaitCleaner waited for one flow too few.
func (o *open) awaitDeletion(ends bool) {
	silent := 0
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(time.Millisecond) {
		switch r := o.conn.Ping(shortly); {
		case r.Outcome == lab.Answered && r.Endpoint == o.server:
			silent = 0
		case r.Outcome == lab.Answered:
			return
		default:
			if silent++; ends && silent == 3 {
				return
			}
		}
	}
}

// check looks how one connection fares. Without a prediction, the change does not concern it. moves says that
// another pod has to answer now.
func (o *open) check(predicted, moves bool, f *judged) (what, wrong string) {
	timeout := 5 * time.Second // which an answer takes on a busy machine at most
	refused := predicted && f.Fate == conntrack.Deleted && !answered(f.next)
	deadline := o.left.Add(o.drain)
	switch {
	case o.raced:
		return "raced", ""
	case refused:
		timeout = shortly
	case o.drain > 0 && time.Now().After(deadline.Add(o.late)):
		if r := o.conn.Ping(shortly); r.Outcome == lab.Answered {
			return "reset", fmt.Sprintf("it was not reset, %v after its deadline", time.Since(deadline))
		}
		return "reset", ""
	case o.drain > 0 && time.Now().After(deadline.Add(-time.Second)):
		if r := o.conn.Ping(shortly); r.Outcome == lab.Refused {
			return "reset", ""
		}
		return "at its deadline", ""
	}
	r := o.conn.Ping(timeout)
	switch {
	case refused && r.Outcome == lab.Answered:
		return "cut", "it was answered by " + r.Endpoint
	case refused:
		return "cut", ""
	case r.Outcome != lab.Answered:
		return "", "it was not answered: " + r.String()
	case moves && r.Endpoint == o.server:
		return "", "it is still answered by " + r.Endpoint
	case predicted && f.Fate == conntrack.Deleted:
		o.server = r.Endpoint
		return "moved", ""
	case r.Endpoint != o.server:
		return "", "it was answered by " + r.Endpoint + ", no longer by " + o.server
	case predicted && !answered(f.next):
		return o.checkRefused()
	case o.drain > 0:
		return "draining", ""
	case predicted:
		return "kept", ""
	}
	return "not concerned", ""
}

// newRefused is what became of a connection that stays while no new one is let in.
const newRefused = "kept, new ones refused"

// checkRefused looks whether a new connection of the same client is refused.
func (o *open) checkRefused() (what, wrong string) {
	k := o.frontend
	r := o.host.Dial(k.Protocol, netip.AddrPortFrom(k.Addr, k.Port), lab.Options{Timeout: shortly})
	if r.Outcome == lab.Answered && r.Endpoint != "" {
		return "", "a new connection was answered by " + r.Endpoint
	}
	return newRefused, ""
}
