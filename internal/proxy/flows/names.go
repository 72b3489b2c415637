package flows

import (
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/verdict-proxy/verdict/sync/snapshot"
	"github.com/verdict-proxy/verdict/sync/watch"
)

// Names knows whose an address is: by the EndpointSlices, this node's pods, and the Node. Take and TakePods may be
// called at any time, and take no time: what they are given is read when somebody asks for a name.
type Names struct {
	mu    sync.Mutex
	taken []snapshot.Delta
	pods  []map[snapshot.Name]*watch.Pod

	// What follows is the recorder's.
	endpoints, local directory
	node             snapshot.Node
	host             map[netip.Addr]bool
	// off are the Services whose connections are left out, and by says what asked for the backends of others.
	off       map[snapshot.Name]bool
	by        map[snapshot.Name]string
	forgotten time.Time
}

// NewNames returns Names that know nothing yet.
func NewNames() *Names {
	return &Names{endpoints: newDirectory(), local: newDirectory(), off: map[snapshot.Name]bool{},
		by: map[snapshot.Name]string{}}
}

// Take takes objects on their way to the proxy. It changes none.
func (n *Names) Take(d snapshot.Delta) {
	if len(d.Services)+len(d.Slices) == 0 && d.Node == nil && d.HostAddrs == nil {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.taken = append(n.taken, snapshot.Delta{Services: maps.Clone(d.Services), Slices: maps.Clone(d.Slices), Node: d.Node,
		HostAddrs: d.HostAddrs}) // whose maps are about to be merged with others
}

// TakePods takes pods of this node; a nil pod is gone.
func (n *Names) TakePods(pods map[snapshot.Name]*watch.Pod) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.pods = append(n.pods, pods)
}

// settle reads what was taken, and forgets what has been gone for long.
func (n *Names) settle(t time.Time) {
	n.mu.Lock()
	taken, pods := n.taken, n.pods
	n.taken, n.pods = nil, nil
	n.mu.Unlock()
	for _, d := range taken {
		for name, svc := range d.Services {
			if delete(n.off, name); svc != nil && svc.NoRecords {
				n.off[name] = true
			}
			if delete(n.by, name); svc.For() != "" {
				n.by[name] = svc.For()
			}
		}
		for name, s := range d.Slices {
			n.takeSlice(name, s, t)
		}
		if d.Node != nil {
			n.node = *d.Node
		}
		if d.HostAddrs != nil {
			n.host = map[netip.Addr]bool{}
			for _, a := range *d.HostAddrs {
				n.host[a] = true
			}
		}
	}
	for _, change := range pods {
		for name, p := range change {
			if p == nil {
				n.local.replace(name, nil, nil, t)
				continue
			}
			peer := Peer{Pod: name.String(), Workload: p.Workload}
			n.local.replace(name, p.Addrs, slices.Repeat([]Peer{peer}, len(p.Addrs)), t)
		}
	}
	if t.Sub(n.forgotten) > time.Minute {
		n.forgotten = t
		n.endpoints.forget(t)
		n.local.forget(t)
	}
}

func (n *Names) takeSlice(name snapshot.Name, s *snapshot.Slice, t time.Time) {
	var addrs []netip.Addr
	var peers []Peer
	if s != nil {
		for i := range s.Endpoints {
			e := &s.Endpoints[i]
			peer := Peer{Node: e.Node, Zone: e.Zone}
			if e.Pod != "" {
				peer.Pod = snapshot.Name{Namespace: name.Namespace, Name: e.Pod}.String()
			}
			addrs, peers = append(addrs, e.Addr), append(peers, peer)
		}
	}
	n.endpoints.replace(name, addrs, peers, t)
}

// client names the sender of a connection. A node's address is that of many pods, so only this node's own pods are
// named.
func (n *Names) client(a netip.AddrPort) Peer {
	p := Peer{}
	if known := n.local.at[a.Addr()]; known != nil {
		p = known.Peer
		p.Node, p.Zone = n.node.Name, n.node.Zone
	} else if n.host[a.Addr()] {
		p.Node, p.Zone = n.node.Name, n.node.Zone
	} else if known := n.endpoints.at[a.Addr()]; known != nil {
		p.Node, p.Zone = known.Node, known.Zone
	}
	p.Addr = a
	return p
}

// endpoint names an endpoint.
func (n *Names) endpoint(a netip.AddrPort) Peer {
	p := Peer{}
	if known := n.endpoints.at[a.Addr()]; known != nil {
		p = known.Peer
	}
	if pod := n.local.at[a.Addr()]; pod != nil && (p.Pod == "" || p.Pod == pod.Pod) {
		p.Pod, p.Workload = pod.Pod, pod.Workload
	}
	p.Addr = a
	return p
}

// directory knows whose addresses are by the objects that have them.
type directory struct {
	at map[netip.Addr]*named
	of map[snapshot.Name][]netip.Addr
}

// named is who has an address. Several objects may say so; gone is when the last of them was.
type named struct {
	Peer
	objects int
	gone    time.Time
}

func newDirectory() directory {
	return directory{map[netip.Addr]*named{}, map[snapshot.Name][]netip.Addr{}}
}

// replace replaces what an object says of addresses. One that two pods have is neither's.
func (d *directory) replace(object snapshot.Name, addrs []netip.Addr, peers []Peer, t time.Time) {
	before := d.of[object]
	for _, a := range before {
		if e := d.at[a]; e != nil {
			if e.objects--; e.objects == 0 {
				e.gone = t
			}
		}
	}
	for i, a := range addrs {
		e := d.at[a]
		if e == nil || e.objects == 0 {
			e = &named{Peer: peers[i]}
			d.at[a] = e
		}
		e.objects++
		if e.Pod != peers[i].Pod {
			e.Pod, e.Workload = "", ""
		}
	}
	if len(addrs) == 0 {
		delete(d.of, object)
		return
	}
	d.of[object] = addrs
}

// forget forgets addresses that nobody has had for long.
func (d *directory) forget(t time.Time) {
	for a, e := range d.at {
		if e.objects == 0 && t.Sub(e.gone) > remembered {
			delete(d.at, a)
		}
	}
}
