// Package snapshot holds what a proxy knows about the cluster at one moment: Services, EndpointSlices, this node, the
// service ranges and this host's addresses, trimmed to what decides where a packet goes.
//
// Objects are values that nobody changes once they are handed over: an update replaces the whole object. A Delta names
// only the objects that differ and moves a Snapshot forward, so the cost of an update follows its size.
//
// Addresses are plain: IPv4 addresses are never in IPv6 notation (::ffff:10.0.0.1), and none has a zone. Sources unmap
// them.
package snapshot

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// Name identifies a namespaced object.
type Name struct {
	Namespace, Name string
}

// String returns "namespace/name".
func (n Name) String() string { return n.Namespace + "/" + n.Name }

// Compare orders names by namespace, then name.
func (n Name) Compare(o Name) int {
	return cmp.Or(strings.Compare(n.Namespace, o.Namespace), strings.Compare(n.Name, o.Name))
}

// Protocol is an IP protocol number as in the IANA registry. The zero value is not a valid protocol.
type Protocol uint8

// The protocols a Service port can have.
const (
	TCP  Protocol = 6
	UDP  Protocol = 17
	SCTP Protocol = 132
)

// The protocols of pings. No Service port has them.
const (
	ICMP   Protocol = 1
	ICMPv6 Protocol = 58
)

// IsPing says whether it is a protocol of pings.
func (p Protocol) IsPing() bool { return p == ICMP || p == ICMPv6 }

// String returns the lower-case name that nft and the Kubernetes tools print.
func (p Protocol) String() string {
	switch p {
	case TCP:
		return "tcp"
	case UDP:
		return "udp"
	case SCTP:
		return "sctp"
	case ICMP:
		return "icmp"
	case ICMPv6:
		return "icmpv6"
	}
	return "unknown"
}

// Service is a v1 Service that has at least one cluster IP. Headless and ExternalName Services are left out.
type Service struct {
	Name Name
	// Age is the object's age.
	Age Age
	// Version is the object's at its last change that is of interest here; empty if unknown.
	Version Version
	// ClusterIPs has one or two addresses, at most one of each family. A family without one is not served at all.
	ClusterIPs []netip.Addr
	// ExternalIPs are spec.externalIPs.
	ExternalIPs []netip.Addr
	// LoadBalancerIPs are the ingress addresses whose ipMode is unset or VIP.
	LoadBalancerIPs []netip.Addr
	// SourceRanges restrict who may use LoadBalancerIPs; masked. Ranges of one family say nothing about the other, and a
	// family with none, or with a range of length zero, is open to everybody.
	SourceRanges []netip.Prefix
	// InternalLocal is internalTrafficPolicy Local.
	InternalLocal bool
	// ExternalLocal is externalTrafficPolicy Local; set only on Services that can be reached from outside.
	ExternalLocal bool
	// Affinity is the ClientIP session affinity timeout, whole seconds; 0 means no affinity.
	Affinity time.Duration
	// HealthCheckNodePort is 0 when there is none.
	HealthCheckNodePort uint16
	// Scheduling is how the Service's annotations want endpoints to be chosen; nil means that there are none.
	Scheduling *Scheduling
	// Counters is what the Service's annotation asks of the budget for counters.
	Counters Counters
	// NoRecords says that its annotation keeps the Service's connections out of records. It changes nothing for a packet.
	NoRecords bool
	// SecondChance is what the Service's annotation asks for.
	SecondChance SecondChance
	// LastResort is what the Service's annotation asks for.
	LastResort LastResort
	// Probe is what the annotation of a Service without a selector asks for.
	Probe Probe
	// Limits are those of new connections.
	Limits Limits
	// Drain is how long TCP connections may last after their endpoint stopped serving, whole seconds; 0 means as long as
	// they like.
	Drain time.Duration
	// Rebalance is for how long a connection must have been idle to be moved to an endpoint that is added, whole seconds;
	// 0 means that none is.
	Rebalance time.Duration
	// ExternalFailover is what the Service's annotation asks for. Without ExternalLocal it means nothing.
	ExternalFailover ExternalFailover
	// ClientAddress is what the Service's annotation asks for. With ExternalLocal it means nothing.
	ClientAddress ClientAddress
	// SlowStart is over what time an endpoint that becomes ready comes to its share of new connections; 0 means at once.
	SlowStart time.Duration
	// Backends are other Services whose endpoints serve the ports; nil means that the Service's own slices do.
	Backends *Backends
	// Local is the name of a Service of the same namespace whose ready endpoints on a node come before all of this
	// Service's there, such as a cache on each node; empty means that there is none.
	Local string
	Ports []Port
}

// LocalName is the full name of Local.
func (s *Service) LocalName() Name { return Name{s.Name.Namespace, s.Local} }

// Counters says whether a Service's connections are counted where the budget is not enough for all.
type Counters uint8

const (
	// CountersByBudget counts as far as the budget allows.
	CountersByBudget Counters = iota
	// CountersFirst counts the Service before others, within its share of the budget.
	CountersFirst
	// CountersNever counts nothing.
	CountersNever
)

// Age tells which of two objects is older. The API server sets both fields; the author of an object cannot choose them.
// The zero Age is unknown, as in manifests that a person wrote.
type Age struct {
	// Created is the creation time in seconds since 1970; 0 is unknown.
	Created int64
	// UID orders objects of the same second; empty is unknown.
	UID string
}

// Compare orders the older object first, and those of unknown age last.
func (a Age) Compare(o Age) int {
	return cmp.Or(cmp.Compare(rank(a.Created == 0), rank(o.Created == 0)), cmp.Compare(a.Created, o.Created),
		cmp.Compare(rank(a.UID == ""), rank(o.UID == "")), strings.Compare(a.UID, o.UID))
}

func rank(unknown bool) int {
	if unknown {
		return 1
	}
	return 0
}

// Port is one port of a Service.
type Port struct {
	// Name is empty for the only port of a Service.
	Name     string
	Protocol Protocol
	Port     uint16
	// NodePort is 0 when none is allocated.
	NodePort uint16
}

// Slice is an EndpointSlice, or an Endpoints object read as slices.
type Slice struct {
	Name Name
	// Service is the name of the Service in the same namespace that the slice belongs to.
	Service string
	// Version is the object's at its last change that is of interest here; empty if unknown.
	Version   Version
	Ports     []SlicePort
	Endpoints []Endpoint
	// Triggered is when the event happened for which the controller last changed the slice; zero if the controller did not
	// note it.
	Triggered time.Time
}

// SlicePort maps a Service port, by name and protocol, to the port its endpoints listen on.
type SlicePort struct {
	Name     string
	Protocol Protocol
	// Port is never 0: ports without a number are dropped on reading.
	Port uint16
}

// Endpoint is one backend of a Service.
type Endpoint struct {
	Addr netip.Addr
	// Node is the name of the node it runs on; empty means unknown, which counts as another node.
	Node string
	// Zone is the zone it runs in; empty means unknown.
	Zone string
	// Pod is the name of its pod, in the slice's namespace. It is read only for records, and changes nothing for a packet.
	Pod string
	// ForZones and ForNodes are the topology hints; nil means no hint.
	ForZones, ForNodes []string
	// Ready, Serving and Terminating are the endpoint's conditions with the API's defaults applied.
	Ready, Serving, Terminating bool
	// Weight is the endpoint's share of new connections, from an annotation of its slice.
	Weight Weight
}

// Node is the node this proxy runs on.
type Node struct {
	Name string
	// Zone is the label topology.kubernetes.io/zone; empty means unknown.
	Zone string
	// Addresses are the node's InternalIPs, then its ExternalIPs, in the order of the object.
	Addresses []netip.Addr
	// PodCIDRs are spec.podCIDRs in their order.
	PodCIDRs []netip.Prefix
	// Leaving says why the cluster is about to remove the node, so that load balancers should not send it new clients.
	// Empty means that it stays. It affects no packet: a change of Leaving alone concerns no Service.
	Leaving string
}

// Snapshot is everything known at one moment. The zero value is not ready for use; call New.
type Snapshot struct {
	Services map[Name]*Service
	// Slices are keyed by the Service they belong to, then by the slice's own name. Slices of unknown Services are kept:
	// the Service may come later.
	Slices map[Name]map[string]*Slice
	// Health is what this node found out about endpoints, by Service. Services that are unknown, or have no unhealthy
	// endpoint, have no entry, so an entry lives no longer than its Service.
	Health map[Name]*Health
	// Starting are the endpoints that start slowly, by Service. As with Health, an entry lives no longer than its Service.
	Starting map[Name]*Starting
	// Full are the ports and clients that have as many open connections as they may have, by Service. As with Health, an
	// entry lives no longer than its Service.
	Full map[Name]*Full
	// Node is the zero Node until the object is known.
	Node Node
	// ServiceCIDRs are the ranges Service addresses are allocated from, sorted; nil means unknown, nothing is dropped.
	ServiceCIDRs []netip.Prefix
	// HostAddrs are the unicast addresses on this host's interfaces, sorted, including loopback and link-local ones; nil
	// means unknown. Addresses that Verdict itself binds for IPVS are not among them.
	HostAddrs []netip.Addr
	// HostNetworks say what this host reaches other than by its default route.
	HostNetworks HostNetworks
	// Link is what this host knows of the other nodes as its neighbours. Only a host whose operator or Services have
	// clients' addresses kept has one.
	Link Link

	sliceService map[Name]Name
	referrers    referrers
}

// New returns an empty Snapshot.
func New() *Snapshot {
	return &Snapshot{
		Services:     map[Name]*Service{},
		Slices:       map[Name]map[string]*Slice{},
		Health:       map[Name]*Health{},
		Starting:     map[Name]*Starting{},
		Full:         map[Name]*Full{},
		sliceService: map[Name]Name{},
		referrers:    referrers{},
	}
}

// Delta names the objects that differ from the snapshot before it. The zero Delta changes nothing.
type Delta struct {
	// Services maps a name to its new object, or to nil if the Service is gone.
	Services map[Name]*Service
	// Slices maps a slice's name to its new object, or to nil if the slice is gone.
	Slices map[Name]*Slice
	// Health maps a Service to what this node now knows of its endpoints, or to nil if none is unhealthy. It is ignored
	// if neither the snapshot nor this delta has the Service.
	Health map[Name]*Health
	// Starting maps a Service to its endpoints that now start slowly, or to nil if none does. It is ignored as Health is.
	Starting map[Name]*Starting
	// Full maps a Service to its ports and clients that are full now, or to nil if none is. It is ignored as Health is.
	Full map[Name]*Full
	// Node, ServiceCIDRs, HostAddrs, HostNetworks and Link are nil when they did not change.
	Node         *Node
	ServiceCIDRs *[]netip.Prefix
	HostAddrs    *[]netip.Addr
	HostNetworks *HostNetworks
	Link         *Link
	// Versions say up to which versions the source has read, with this delta. Empty ones say nothing new. A delta may
	// have nothing but Versions: what the source read up to there changed nothing.
	Versions Versions
}

// Empty says whether the delta changes nothing. It may still have Versions.
func (d *Delta) Empty() bool {
	return len(d.Services) == 0 && len(d.Slices) == 0 && len(d.Health) == 0 && len(d.Starting) == 0 &&
		len(d.Full) == 0 && d.Node == nil && d.ServiceCIDRs == nil && d.HostAddrs == nil && d.HostNetworks == nil &&
		d.Link == nil
}

// Concerns returns the Services of a delta, and the names of those whose slices it has; both without those that are
// gone, unsorted.
func (d *Delta) Concerns() (services []*Service, of []Name) {
	for _, svc := range d.Services {
		if svc != nil {
			services = append(services, svc)
		}
	}
	for n, sl := range d.Slices {
		if sl != nil {
			of = append(of, Name{n.Namespace, sl.Service})
		}
	}
	return services, of
}

// Merge adds what a later delta says; where both name an object, the later one wins. A Service that goes takes its
// Health, its Starting and its Full along, even if it comes back later.
func (d *Delta) Merge(later Delta) {
	merge(&d.Services, later.Services)
	for n, s := range later.Services {
		if s == nil {
			Put(&d.Health, n, nil)
			Put(&d.Starting, n, nil)
			Put(&d.Full, n, nil)
		}
	}
	merge(&d.Slices, later.Slices)
	merge(&d.Health, later.Health)
	merge(&d.Starting, later.Starting)
	merge(&d.Full, later.Full)
	d.Node = cmp.Or(later.Node, d.Node)
	d.ServiceCIDRs = cmp.Or(later.ServiceCIDRs, d.ServiceCIDRs)
	d.HostAddrs = cmp.Or(later.HostAddrs, d.HostAddrs)
	d.HostNetworks = cmp.Or(later.HostNetworks, d.HostNetworks)
	d.Link = cmp.Or(later.Link, d.Link)
	d.Versions = d.Versions.Then(later.Versions)
}

// Put adds an object to a map of a Delta, which may be nil.
func Put[T any](m *map[Name]*T, n Name, o *T) {
	if *m == nil {
		*m = map[Name]*T{}
	}
	(*m)[n] = o
}

func merge[T any](m *map[Name]*T, later map[Name]*T) {
	if *m == nil && len(later) > 0 {
		*m = make(map[Name]*T, len(later))
	}
	maps.Copy(*m, later)
}

// Change names what may differ between two moments, of a Snapshot or of what follows from it. The zero Change says that
// nothing differs.
type Change struct {
	// Services are sorted and unique. All others are the same as before.
	Services []Name
	// Globals says that what concerns all Services may differ. In a Snapshot that is the node, its addresses, networks and
	// neighbours, and the service ranges.
	Globals bool
}

// Empty reports whether nothing differs.
func (c Change) Empty() bool { return len(c.Services) == 0 && !c.Globals }

// With returns the union of two changes.
func (c Change) With(o Change) Change {
	switch {
	case c.Empty():
		return o
	case o.Empty():
		return c
	}
	names := slices.Concat(c.Services, o.Services)
	slices.SortFunc(names, Name.Compare)
	return Change{slices.Compact(names), c.Globals || o.Globals}
}

// forget forgets a Service, and says whether there was one.
func (s *Snapshot) forget(n Name) bool {
	_, held := s.Services[n]
	delete(s.Services, n)
	delete(s.Health, n)
	delete(s.Starting, n)
	delete(s.Full, n)
	return held
}

// Apply applies one delta to the snapshot and returns the Services that it may concern, those that refer to others that
// changed included. It is no error to delete what the snapshot does not hold.
func (s *Snapshot) Apply(d Delta) Change {
	s.reserve(&d)
	touched := make(map[Name]struct{}, max(len(d.Services), len(d.Slices)))
	for n, svc := range d.Services {
		s.referrers.replace(s.Services[n], svc, touched)
		if svc != nil {
			s.Services[n] = svc
		} else if !s.forget(n) {
			continue
		}
		touched[n] = struct{}{}
	}
	for n, sl := range d.Slices {
		s.applySlice(n, sl, touched)
	}
	s.referrers.addTo(touched)
	for n, h := range d.Health {
		applyOf(s, s.Health, n, h, h != nil && len(h.Unhealthy) > 0, touched)
	}
	for n, st := range d.Starting {
		applyOf(s, s.Starting, n, st, st != nil && len(st.Endpoints) > 0, touched)
	}
	for n, f := range d.Full {
		applyOf(s, s.Full, n, f, !f.empty(), touched)
	}
	var c Change
	if d.Node != nil {
		c.Globals = !d.Node.equal(s.Node)
		s.Node = *d.Node
	}
	if d.ServiceCIDRs != nil && !slices.Equal(*d.ServiceCIDRs, s.ServiceCIDRs) {
		s.ServiceCIDRs, c.Globals = *d.ServiceCIDRs, true
	}
	if d.HostAddrs != nil && !slices.Equal(*d.HostAddrs, s.HostAddrs) {
		s.HostAddrs, c.Globals = *d.HostAddrs, true
	}
	if d.HostNetworks != nil { // a route comes with every pod, which changes nothing for Services
		was := s.HostNetworks.Overlapping(s.ServiceCIDRs)
		s.HostNetworks = *d.HostNetworks
		c.Globals = c.Globals || !was.Equal(s.HostNetworks.Overlapping(s.ServiceCIDRs))
	}
	if d.Link != nil && !d.Link.Equal(s.Link) {
		s.Link, c.Globals = *d.Link, true
	}
	if len(touched) > 0 {
		c.Services = slices.AppendSeq(make([]Name, 0, len(touched)), maps.Keys(touched))
		slices.SortFunc(c.Services, Name.Compare)
	}
	return c
}

// Owner returns the Service that a slice belongs to, the zero Name if the slice is not known.
func (s *Snapshot) Owner(slice Name) Name { return s.sliceService[slice] }

// reserve allocates maps for a first delta, because maps that grow are copied again and again.
func (s *Snapshot) reserve(d *Delta) {
	if len(s.Services) == 0 && len(d.Services) > 0 {
		s.Services = make(map[Name]*Service, len(d.Services))
	}
	if len(s.sliceService) == 0 && len(d.Slices) > 0 {
		s.Slices = make(map[Name]map[string]*Slice, len(d.Services))
		s.sliceService = make(map[Name]Name, len(d.Slices))
	}
}

// applySlice stores one slice under its Service. A slice may move to another Service: both are touched.
func (s *Snapshot) applySlice(n Name, sl *Slice, touched map[Name]struct{}) {
	before, held := s.sliceService[n]
	if held {
		touched[before] = struct{}{}
	}
	if sl == nil {
		if held {
			s.dropSlice(n, before)
		}
		return
	}
	owner := Name{Namespace: n.Namespace, Name: sl.Service}
	if held && before != owner {
		s.dropSlice(n, before)
	}
	touched[owner] = struct{}{}
	if s.Slices[owner] == nil {
		s.Slices[owner] = make(map[string]*Slice, 1)
	}
	s.Slices[owner][n.Name] = sl
	s.sliceService[n] = owner
}

// applyOf stores what is known of a Service's endpoints, if it says something and the Service is known.
func applyOf[T any](s *Snapshot, held map[Name]*T, n Name, is *T, says bool, touched map[Name]struct{}) {
	if says && s.Services[n] != nil {
		held[n] = is
	} else if _, was := held[n]; was {
		delete(held, n)
	} else {
		return
	}
	touched[n] = struct{}{}
}

func (s *Snapshot) dropSlice(n, owner Name) {
	delete(s.sliceService, n)
	delete(s.Slices[owner], n.Name)
	if len(s.Slices[owner]) == 0 {
		delete(s.Slices, owner)
	}
}

// equal says whether both mean the same to every Service.
func (n Node) equal(o Node) bool {
	return n.Name == o.Name && n.Zone == o.Zone &&
		slices.Equal(n.Addresses, o.Addresses) && slices.Equal(n.PodCIDRs, o.PodCIDRs)
}
