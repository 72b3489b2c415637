package benchmark

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// The made-up cluster's addresses: cluster IPs are counted up in the lower quarter of 10.0.0.0/8, endpoints in the
// upper half, and those that come in the place of others in the quarter between.
const (
	firstClusterIP = 10 << 24
	firstNewcomer  = firstClusterIP + 1<<22
	firstEndpoint  = firstClusterIP + 1<<23
)

// NodeConfig is the configuration of the node that is measured: pods are known by their addresses, as in most clusters.
var NodeConfig = dataplane.Config{
	NodeName: "node-0",
	DetectLocal: dataplane.DetectLocal{ClusterCIDRs: []netip.Prefix{
		netip.PrefixFrom(addr(firstEndpoint), 9),
	}},
}

// ClusterIP gives the cluster IP of a Service, EndpointAddr the address of an endpoint; both are numbered from 0.
func ClusterIP(i int) netip.Addr    { return addr(firstClusterIP + uint32(i)) }
func EndpointAddr(i int) netip.Addr { return addr(firstEndpoint + uint32(i)) }

func addr(n uint32) netip.Addr {
	var a [4]byte
	binary.BigEndian.PutUint32(a[:], n)
	return netip.AddrFrom4(a)
}

// Cluster makes up Services and their changes. Services are identified by their number, from 0.
// Create it with NewCluster.
type Cluster struct {
	services, endpoints int
	nodes               []string
	// newcomers counts the endpoints that took the place of others: each has an address that none had before.
	newcomers uint32
}

const (
	endpointsPerNode = 100
	maxNodes         = 5000 // the most that Kubernetes is made for
)

// NewCluster makes up a cluster of Services with as many endpoints each.
func NewCluster(services, endpoints int) *Cluster {
	c := &Cluster{services: services, endpoints: endpoints}
	c.nodes = make([]string, min(max(services*endpoints/endpointsPerNode, 1), maxNodes))
	for i := range c.nodes {
		c.nodes[i] = fmt.Sprint("node-", i)
	}
	return c
}

// Name gives the name of a Service.
func (c *Cluster) Name(i int) snapshot.Name {
	return snapshot.Name{Namespace: fmt.Sprint("team-", i%100), Name: fmt.Sprint("service-", i)}
}

// Service gives a Service with one cluster IP and one TCP port.
func (c *Cluster) Service(i int) *snapshot.Service {
	return &snapshot.Service{
		Name:       c.Name(i),
		ClusterIPs: []netip.Addr{ClusterIP(i)},
		Ports:      []snapshot.Port{{Name: "http", Protocol: snapshot.TCP, Port: 80}},
	}
}

// SliceName gives the name of a Service's only EndpointSlice.
func (c *Cluster) SliceName(i int) snapshot.Name {
	n := c.Name(i)
	n.Name += "-x7f2q"
	return n
}

// Slice gives the EndpointSlice of a Service as it is at the beginning.
func (c *Cluster) Slice(i int) *snapshot.Slice {
	owner := c.Name(i)
	s := &snapshot.Slice{
		Name:      c.SliceName(i),
		Service:   owner.Name,
		Ports:     []snapshot.SlicePort{{Name: "http", Protocol: snapshot.TCP, Port: 8080}},
		Endpoints: make([]snapshot.Endpoint, c.endpoints),
	}
	for e := range s.Endpoints {
		at := i*c.endpoints + e
		s.Endpoints[e] = c.endpoint(EndpointAddr(at), at)
	}
	return s
}

func (c *Cluster) endpoint(a netip.Addr, at int) snapshot.Endpoint {
	return snapshot.Endpoint{Addr: a, Node: c.nodes[at%len(c.nodes)], Ready: true, Serving: true}
}

// All gives the objects of the whole cluster as they are at the beginning: Services, slices, the node and the
// ServiceCIDR.
func (c *Cluster) All() snapshot.Delta {
	d := snapshot.Delta{
		Services: make(map[snapshot.Name]*snapshot.Service, c.services),
		Slices:   make(map[snapshot.Name]*snapshot.Slice, c.services),
		Node: &snapshot.Node{
			Name:      NodeConfig.NodeName,
			Addresses: []netip.Addr{netip.AddrFrom4([4]byte{192, 0, 2, 1})},
		},
		ServiceCIDRs: &[]netip.Prefix{netip.PrefixFrom(addr(firstClusterIP), 10)},
	}
	for i := range c.services {
		svc, s := c.Service(i), c.Slice(i)
		d.Services[svc.Name], d.Slices[s.Name] = svc, s
	}
	return d
}

// elements is how many there are when everything is written: of each Service its frontend, its cluster IP and its
// slots; of each endpoint on this node one that lets it reach itself; and the Services' range.
func (c *Cluster) elements() int {
	all := c.services * c.endpoints
	settings := 2 * len(NodeConfig.Lines()) // in both tables
	return 2*c.services + all + (all+len(c.nodes)-1)/len(c.nodes) + 1 + settings
}

// newcomer gives an endpoint at an address that none had before; after four million they come round.
func (c *Cluster) newcomer() snapshot.Endpoint {
	c.newcomers++
	return c.endpoint(addr(firstNewcomer+c.newcomers&(1<<22-1)), int(c.newcomers))
}

// Replaced gives a slice in which a newcomer has taken the place of the endpoint that was longest there.
func (c *Cluster) Replaced(s *snapshot.Slice) *snapshot.Slice { return c.Added(c.Removed(s)) }

// Added gives a slice with a newcomer more.
func (c *Cluster) Added(s *snapshot.Slice) *snapshot.Slice {
	out := *s
	out.Endpoints = append(s.Endpoints[:len(s.Endpoints):len(s.Endpoints)], c.newcomer())
	return &out
}

// Removed gives a slice without the endpoint that was longest there.
func (c *Cluster) Removed(s *snapshot.Slice) *snapshot.Slice {
	out := *s
	out.Endpoints = s.Endpoints[1:]
	return &out
}

// born is the event of a new Service with its slice; gone takes it away again.
func (c *Cluster) born(i int) snapshot.Delta {
	d := SliceDelta(c.Slice(i))
	d.Services = map[snapshot.Name]*snapshot.Service{c.Name(i): c.Service(i)}
	return d
}

func (c *Cluster) gone(i int) snapshot.Delta {
	return snapshot.Delta{
		Services: map[snapshot.Name]*snapshot.Service{c.Name(i): nil},
		Slices:   map[snapshot.Name]*snapshot.Slice{c.SliceName(i): nil},
	}
}

// SliceDelta is the event of a changed slice.
func SliceDelta(s *snapshot.Slice) snapshot.Delta {
	return snapshot.Delta{Slices: map[snapshot.Name]*snapshot.Slice{s.Name: s}}
}
