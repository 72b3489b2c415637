package kernel

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// walkWorld is the cluster as it really is, which nobody sees but through deltas. Its universe is small, so that
// names, addresses and ports collide all the time.
type walkWorld struct {
	services map[snapshot.Name]*snapshot.Service
	slices   map[snapshot.Name]*snapshot.Slice
	node     snapshot.Node
	cidrs    []netip.Prefix
	addrs    []netip.Addr
}

const (
	worldServices = 7
	worldSlices   = 2 // of each Service
	burstServices = 300
)

var (
	worldHosts = []netip.Addr{addr("127.0.0.1"), addr("192.0.2.1"), addr("192.0.2.2"), addr("2001:db8::1"),
		addr("2001:db8::2"), addr("fe80::1")}
	worldCIDRs = []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("10.97.0.0/16"),
		netip.MustParsePrefix(
			"10.96.0.0/12",
		), netip.MustParsePrefix("255.255.255.0/24"), netip.MustParsePrefix("fd00:10:96::/112"),
		netip.MustParsePrefix("fd00:10:96::/64")}
	worldSources = []netip.Prefix{netip.MustParsePrefix("198.51.100.0/25"), netip.MustParsePrefix("198.51.100.0/24"),
		netip.MustParsePrefix("198.51.100.128/25"), netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("0.0.0.0/0"),
		netip.MustParsePrefix(
			"2001:db8:1::/48",
		), netip.MustParsePrefix("2001:db8::/32"), netip.MustParsePrefix("255.255.255.255/32")}
	worldPods = []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24"), netip.MustParsePrefix("10.244.2.0/24"),
		netip.MustParsePrefix("fd00:10:244:1::/64")}
)

func newWalkWorld(r *rand.Rand) *walkWorld {
	w := &walkWorld{services: map[snapshot.Name]*snapshot.Service{}, slices: map[snapshot.Name]*snapshot.Slice{}}
	w.apply(w.hostChange(r))
	for i := range 4 {
		w.apply(w.serviceChange(r, i))
		w.apply(w.sliceChange(r, i, 0))
	}
	return w
}

// apply makes a delta true.
func (w *walkWorld) apply(d snapshot.Delta) snapshot.Delta {
	for n, s := range d.Services {
		if w.services[n] = s; s == nil {
			delete(w.services, n)
		}
	}
	for n, s := range d.Slices {
		if w.slices[n] = s; s == nil {
			delete(w.slices, n)
		}
	}
	if d.Node != nil {
		w.node = *d.Node
	}
	if d.ServiceCIDRs != nil {
		w.cidrs = *d.ServiceCIDRs
	}
	if d.HostAddrs != nil {
		w.addrs = *d.HostAddrs
	}
	return d
}

// snapshot gives all there is to someone who has seen nothing yet, object by object, in any order.
func (w *walkWorld) snapshot(r *rand.Rand) *snapshot.Snapshot {
	var parts []snapshot.Delta
	for _, n := range sortedKeys(w.services) {
		parts = append(parts, snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{n: w.services[n]}})
	}
	for _, n := range sortedKeys(w.slices) {
		parts = append(parts, snapshot.Delta{Slices: map[snapshot.Name]*snapshot.Slice{n: w.slices[n]}})
	}
	parts = append(parts, snapshot.Delta{Node: &w.node, ServiceCIDRs: &w.cidrs, HostAddrs: &w.addrs})
	r.Shuffle(len(parts), func(i, j int) { parts[i], parts[j] = parts[j], parts[i] })
	s := snapshot.New()
	for len(parts) > 0 {
		var d snapshot.Delta
		n := 1 + r.IntN(len(parts))
		for _, p := range parts[:n] {
			d.Merge(p)
		}
		s.Apply(d)
		parts = parts[n:]
	}
	return s
}

// relist gives what a list of everything says to someone who holds an older snapshot: what it lacks, what is gone, and
// duplicates of some of what it has.
func (w *walkWorld) relist(r *rand.Rand, held *snapshot.Snapshot) snapshot.Delta {
	d := snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{}, Slices: map[snapshot.Name]*snapshot.Slice{},
		Node: &w.node, ServiceCIDRs: &w.cidrs, HostAddrs: &w.addrs}
	for n := range held.Services {
		d.Services[n] = nil
	}
	for owner, list := range held.Slices {
		for name := range list {
			d.Slices[snapshot.Name{Namespace: owner.Namespace, Name: name}] = nil
		}
	}
	for _, n := range sortedKeys(w.services) {
		if s := *w.services[n]; held.Services[n] != w.services[n] || r.IntN(2) == 0 {
			d.Services[n] = &s
		} else {
			delete(d.Services, n)
		}
	}
	for _, n := range sortedKeys(w.slices) {
		s := *w.slices[n]
		d.Slices[n] = &s
	}
	return d
}

func sortedKeys[V any](m map[snapshot.Name]V) []snapshot.Name {
	return slices.SortedFunc(maps.Keys(m), snapshot.Name.Compare)
}

func some[T any](r *rand.Rand, of ...T) (out []T) {
	for _, v := range of {
		if r.IntN(2) == 0 {
			out = append(out, v)
		}
	}
	return out
}

func oneOf[T any](r *rand.Rand, of ...T) T { return of[r.IntN(len(of))] }

func worldName(i int) snapshot.Name {
	return snapshot.Name{Namespace: []string{"default", "other"}[i%2], Name: fmt.Sprintf("s%d", i/2)}
}

// hostChange changes something that all Services depend on.
func (w *walkWorld) hostChange(r *rand.Rand) snapshot.Delta {
	var d snapshot.Delta
	pick := r.IntN(8)
	if w.addrs == nil || pick < 3 {
		list := append(worldHosts[:2:2], some(r, worldHosts[2:]...)...)
		d.HostAddrs = &list
	}
	if w.cidrs == nil || pick == 3 || pick == 4 {
		list := some(r, worldCIDRs...)
		slices.SortFunc(list, netip.Prefix.Compare)
		d.ServiceCIDRs = &list
	}
	if w.node.Name == "" || pick > 4 {
		d.Node = &snapshot.Node{Name: "node-1", Zone: oneOf(r, "", "a", "b"), Addresses: some(r, worldHosts[1:5]...),
			PodCIDRs: some(r, worldPods...)}
	}
	return d
}

// serviceChange gives a Service another spec, or its first.
func (w *walkWorld) serviceChange(r *rand.Rand, i int) snapshot.Delta {
	n := worldName(i)
	at := i
	if r.IntN(8) == 0 {
		at = r.IntN(worldServices) // somebody else's
	}
	both := []netip.Addr{lab.Nth(lab.ServiceRange[0], at+1), lab.Nth(lab.ServiceRange[1], at+1)}
	s := &snapshot.Service{
		Name:          n,
		ClusterIPs:    oneOf(r, both, both, both[:1], both[1:]),
		InternalLocal: r.IntN(3) == 0, ExternalLocal: r.IntN(2) == 0,
		ExternalFailover: snapshot.ExternalFailover(r.IntN(4)),
	}
	if r.IntN(2) == 0 {
		s.Affinity = time.Duration(oneOf(r, 60, 3600, 10800, 1+r.IntN(86400))) * time.Second
	}
	if r.IntN(8) == 0 {
		s.Scheduling = &snapshot.Scheduling{Scheduler: "lc"}
	}
	if r.IntN(2) == 0 {
		k := r.IntN(4)
		s.LoadBalancerIPs = []netip.Addr{lab.Nth(lab.ExternalRange[0], k), lab.Nth(lab.ExternalRange[1], k)}
		s.SourceRanges = some(r, some(r, worldSources...)...)
	}
	if r.IntN(3) == 0 {
		s.ExternalIPs = []netip.Addr{lab.Nth(lab.ExternalRange[0], r.IntN(4)), lab.Nth(lab.ExternalRange[1], r.IntN(4))}
	}
	s.Ports = some(r, snapshot.Port{Name: "a", Protocol: snapshot.TCP, Port: oneOf[uint16](r, 80, 81)},
		snapshot.Port{Name: "b", Protocol: snapshot.UDP, Port: 53},
		snapshot.Port{Name: "b", Protocol: snapshot.TCP, Port: 53},
		snapshot.Port{Name: "c", Protocol: snapshot.SCTP, Port: 9})
	for i := range s.Ports {
		if r.IntN(2) == 0 {
			s.Ports[i].NodePort = 30000 + uint16(r.IntN(8))
		}
	}
	if len(s.ExternalIPs) > 0 && s.InternalLocal {
		s.Backends = worldBackends(n, s.Ports)
	}
	return snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{n: s}}
}

// worldBackends has a Service refer to others of its namespace, which may not be there, may have no such port, or may
// refer to others themselves.
func worldBackends(n snapshot.Name, ports []snapshot.Port) *snapshot.Backends {
	out := &snapshot.Backends{}
	for _, p := range ports {
		of := snapshot.PortBackends{Port: p.Name}
		for i := range 3 {
			of.To = append(of.To, snapshot.Backend{Service: snapshot.Name{Namespace: n.Namespace, Name: worldName(i).Name},
				Port: p.Port, Weight: uint32(1 + i)})
		}
		out.Ports = append(out.Ports, of)
	}
	return out
}

func (w *walkWorld) goneService(i int) snapshot.Delta {
	return snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{worldName(i): nil}}
}

func worldSlice(i, part int) snapshot.Name {
	n := worldName(i)
	n.Name = fmt.Sprintf("%s-%d", n.Name, part)
	return n
}

// sliceChange gives a slice other endpoints, or its first.
func (w *walkWorld) sliceChange(r *rand.Rand, i, part int) snapshot.Delta {
	n := worldSlice(i, part)
	s := &snapshot.Slice{Name: n, Service: worldName(i).Name, Ports: []snapshot.SlicePort{
		{Name: "a", Protocol: snapshot.TCP, Port: 8080}, {Name: "b", Protocol: snapshot.UDP, Port: 53},
		{Name: "b", Protocol: snapshot.TCP, Port: oneOf[uint16](r, 53, 54)}, {Name: "c", Protocol: snapshot.SCTP, Port: 9}}}
	if r.IntN(16) == 0 {
		s.Service = worldName(i + 2).Name // of the same namespace
	}
	most := oneOf(r, 0, 2, 4, 4, 6, 30)
	for e := range most {
		if r.IntN(3) > 0 {
			s.Endpoints = append(s.Endpoints, worldEndpoint(r, part, e))
		}
	}
	return snapshot.Delta{Slices: map[snapshot.Name]*snapshot.Slice{n: s}}
}

func worldEndpoint(r *rand.Rand, part, e int) snapshot.Endpoint {
	pods := oneOf(r, lab.NodePodRange, lab.Node2PodRange)[oneOf(r, part, part, part, 1-part)]
	ep := snapshot.Endpoint{Addr: lab.Nth(pods, 10+e), Node: oneOf(r, "node-1", "node-2", "node-2", ""),
		Ready: r.IntN(4) > 0, Serving: r.IntN(4) > 0, Terminating: r.IntN(6) == 0}
	if r.IntN(4) == 0 {
		ep.ForZones, ep.ForNodes = some(r, "a", "b"), some(r, "node-1", "node-2")
	}
	return ep
}

// touched is sliceChange for one endpoint of a slice that is there: it comes, goes or changes its conditions.
func (w *walkWorld) touched(r *rand.Rand, n snapshot.Name) snapshot.Delta {
	s := *w.slices[n]
	s.Endpoints = slices.Clone(s.Endpoints)
	part := int(n.Name[len(n.Name)-1]-'0') % worldSlices
	switch at := r.IntN(len(s.Endpoints) + 1); {
	case at == len(s.Endpoints):
		s.Endpoints = append(s.Endpoints, worldEndpoint(r, part, r.IntN(30)))
	case r.IntN(2) == 0:
		s.Endpoints = slices.Delete(s.Endpoints, at, at+1)
	default:
		e := &s.Endpoints[at]
		e.Ready, e.Serving, e.Terminating = r.IntN(2) == 0, r.IntN(2) == 0, r.IntN(2) == 0
	}
	return snapshot.Delta{Slices: map[snapshot.Name]*snapshot.Slice{n: &s}}
}

// change does one thing to the cluster, and says what.
func (w *walkWorld) change(r *rand.Rand) (what string, d snapshot.Delta) {
	i, part := r.IntN(worldServices), r.IntN(worldSlices)
	switch r.IntN(16) {
	case 0:
		return "host or node", w.apply(w.hostChange(r))
	case 1:
		return "Service goes", w.apply(w.goneService(i))
	case 2, 3, 4:
		return "Service comes or changes", w.apply(w.serviceChange(r, i))
	case 5:
		return "slice goes", w.apply(snapshot.Delta{Slices: map[snapshot.Name]*snapshot.Slice{worldSlice(i, part): nil}})
	case 6, 7, 8:
		return "slice comes or changes", w.apply(w.sliceChange(r, i, part))
	}
	if names := sortedKeys(w.slices); len(names) > 0 {
		return "endpoint", w.apply(w.touched(r, oneOf(r, names...)))
	}
	return "slice comes or changes", w.apply(w.sliceChange(r, i, part))
}

// burst brings so many Services that sets outgrow their first size, or takes them away again.
func (w *walkWorld) burst(come bool) snapshot.Delta {
	d := snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{}, Slices: map[snapshot.Name]*snapshot.Slice{}}
	for i := range burstServices {
		n := snapshot.Name{Namespace: "burst", Name: fmt.Sprintf("b%d-0", i)}
		d.Services[n], d.Slices[n] = nil, nil
		if !come {
			continue
		}
		d.Services[n] = &snapshot.Service{Name: n, ClusterIPs: []netip.Addr{lab.Nth(lab.ServiceRange[0], 1000+i)},
			ExternalIPs: []netip.Addr{lab.Nth(lab.ExternalRange[0], 100+i%100)}, Affinity: time.Duration(i%2) * time.Hour,
			Ports: []snapshot.Port{
				{Protocol: snapshot.TCP, Port: 1000 + uint16(i)},
				{Name: "n", Protocol: snapshot.TCP, Port: 2000 + uint16(i)},
			}}
		s := &snapshot.Slice{Name: n, Service: n.Name, Ports: []snapshot.SlicePort{{Protocol: snapshot.TCP, Port: 80}}}
		for e := range 3 {
			s.Endpoints = append(s.Endpoints,
				snapshot.Endpoint{Addr: lab.Nth(lab.PodRange[0], 2000+3*i+e), Ready: true, Serving: true})
		}
		d.Slices[n] = s
	}
	return w.apply(d)
}
