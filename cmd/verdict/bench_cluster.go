package main

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// The made-up cluster's addresses: cluster IPs are counted up in the lower quarter of 10.0.0.0/8, endpoints in the upper half,
// and those that come in the place of others in the quarter between.
const (
	benchClusterIPs = 10 << 24
	benchNewcomers  = benchClusterIPs + 1<<22
	benchEndpoints  = benchClusterIPs + 1<<23
)

// benchConfig is the node's: pods are known by their addresses, as in most clusters.
var benchConfig = dataplane.Config{
	NodeName: "node-0",
	DetectLocal: dataplane.DetectLocal{ClusterCIDRs: []netip.Prefix{
		netip.PrefixFrom(benchAddr(benchEndpoints), 9),
	}},
}

func benchAddr(n uint32) netip.Addr {
	var a [4]byte
	binary.BigEndian.PutUint32(a[:], n)
	return netip.AddrFrom4(a)
}

// benchCluster makes up Services and what happens to them. Services are told apart by their number.
type benchCluster struct {
	services, endpoints int
	nodes               []string
	// newcomers counts the endpoints that took the place of others: each has an address that none had before.
	newcomers uint32
}

const (
	endpointsPerNode = 100
	maxNodes         = 5000 // the most that Kubernetes is made for
)

func newBenchCluster(services, endpoints int) *benchCluster {
	c := &benchCluster{services: services, endpoints: endpoints}
	c.nodes = make([]string, min(max(services*endpoints/endpointsPerNode, 1), maxNodes))
	for i := range c.nodes {
		c.nodes[i] = fmt.Sprint("node-", i)
	}
	return c
}

func (c *benchCluster) name(i int) snapshot.Name {
	return snapshot.Name{Namespace: fmt.Sprint("team-", i%100), Name: fmt.Sprint("service-", i)}
}

func (c *benchCluster) service(i int) *snapshot.Service {
	return &snapshot.Service{
		Name:       c.name(i),
		ClusterIPs: []netip.Addr{benchAddr(benchClusterIPs + uint32(i))},
		Ports:      []snapshot.Port{{Name: "http", Protocol: snapshot.TCP, Port: 80}},
	}
}

func (c *benchCluster) sliceName(i int) snapshot.Name {
	n := c.name(i)
	n.Name += "-x7f2q"
	return n
}

// slice gives the EndpointSlice of a Service as it is at the beginning.
func (c *benchCluster) slice(i int) *snapshot.Slice {
	owner := c.name(i)
	s := &snapshot.Slice{
		Name:      c.sliceName(i),
		Service:   owner.Name,
		Ports:     []snapshot.SlicePort{{Name: "http", Protocol: snapshot.TCP, Port: 8080}},
		Endpoints: make([]snapshot.Endpoint, c.endpoints),
	}
	for e := range s.Endpoints {
		at := i*c.endpoints + e
		s.Endpoints[e] = c.endpoint(benchAddr(benchEndpoints+uint32(at)), at)
	}
	return s
}

func (c *benchCluster) endpoint(a netip.Addr, at int) snapshot.Endpoint {
	return snapshot.Endpoint{Addr: a, Node: c.nodes[at%len(c.nodes)], Ready: true, Serving: true}
}

// all gives everything there is at the beginning.
func (c *benchCluster) all() snapshot.Delta {
	d := snapshot.Delta{
		Services:     make(map[snapshot.Name]*snapshot.Service, c.services),
		Slices:       make(map[snapshot.Name]*snapshot.Slice, c.services),
		Node:         &snapshot.Node{Name: benchConfig.NodeName, Addresses: []netip.Addr{netip.AddrFrom4([4]byte{192, 0, 2, 1})}},
		ServiceCIDRs: &[]netip.Prefix{netip.PrefixFrom(benchAddr(benchClusterIPs), 10)},
	}
	for i := range c.services {
		svc, s := c.service(i), c.slice(i)
		d.Services[svc.Name], d.Slices[s.Name] = svc, s
	}
	return d
}

// elements is how many there are when everything is written: of each Service its frontend, its pool, its cluster IP and its
// slots; of each endpoint on this node one that lets it reach itself; and the Services' range.
func (c *benchCluster) elements() int {
	all := c.services * c.endpoints
	return 3*c.services + all + (all+len(c.nodes)-1)/len(c.nodes) + 1
}

// newcomer gives an endpoint at an address that none had before; after four million they come round.
func (c *benchCluster) newcomer() snapshot.Endpoint {
	c.newcomers++
	return c.endpoint(benchAddr(benchNewcomers+c.newcomers&(1<<22-1)), int(c.newcomers))
}

// replaced gives a slice in which a newcomer has taken the place of the endpoint that was longest there.
func (c *benchCluster) replaced(s *snapshot.Slice) *snapshot.Slice { return c.added(c.removed(s)) }

// added gives a slice with a newcomer more.
func (c *benchCluster) added(s *snapshot.Slice) *snapshot.Slice {
	out := *s
	out.Endpoints = append(s.Endpoints[:len(s.Endpoints):len(s.Endpoints)], c.newcomer())
	return &out
}

// removed gives a slice without the endpoint that was longest there.
func (c *benchCluster) removed(s *snapshot.Slice) *snapshot.Slice {
	out := *s
	out.Endpoints = s.Endpoints[1:]
	return &out
}

// born is the event of a new Service with its slice; gone takes it away again.
func (c *benchCluster) born(i int) snapshot.Delta {
	d := sliceDelta(c.slice(i))
	d.Services = map[snapshot.Name]*snapshot.Service{c.name(i): c.service(i)}
	return d
}

func (c *benchCluster) gone(i int) snapshot.Delta {
	return snapshot.Delta{
		Services: map[snapshot.Name]*snapshot.Service{c.name(i): nil},
		Slices:   map[snapshot.Name]*snapshot.Slice{c.sliceName(i): nil},
	}
}

// sliceDelta is the event of a changed slice.
func sliceDelta(s *snapshot.Slice) snapshot.Delta {
	return snapshot.Delta{Slices: map[snapshot.Name]*snapshot.Slice{s.Name: s}}
}
