package watch

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/verdict-proxy/verdict/internal/system/clip"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// The labels that decide whether an object is for this proxy. kube-proxy's informers select by them on the server.
const (
	labelProxyName = "service.kubernetes.io/service-proxy-name"
	labelHeadless  = corev1.IsHeadlessService
)

// defaultAffinity and maxAffinity are the API's default and limit for clientIP.timeoutSeconds.
const (
	defaultAffinity = 10800 * time.Second
	maxAffinity     = 86400 * time.Second
)

// Limits for one object. Every node programs all of it, whoever wrote it and for whatever purpose; the API server only
// bounds the size of an object, to some 1.5 MB.
const (
	// maxAddresses bounds spec.externalIPs and the addresses of a load balancer, each.
	maxAddresses = 1024
	// maxRanges bounds the source ranges of a load balancer. Lists of whole countries have thousands.
	maxRanges = 16384
	// maxPorts bounds the ports of a Service, and those of a slice.
	maxPorts = 32768
	// maxFrontends bounds addresses times ports, not counting node ports.
	maxFrontends = 131072
)

// truncate cuts a list and reports it. It drops the last entries of the object, so what was served stays served when
// more is added.
func truncate[T any](f *problemList, field string, list []T, most int) []T {
	if len(list) <= most {
		return list
	}
	f.add(field, "%d entries are too many: the first %d count", len(list), most)
	return list[:most]
}

// converter converts API objects into snapshot values, as kube-proxy reads them. It reports an invalid field and skips
// that field alone. Missing fields get the API's defaults, so it accepts both what a server sent and what a person
// wrote.
type converter struct {
	interner
	// pods has slices name the pods of their endpoints.
	pods bool
}

// service returns nil for a Service that is not to be served: headless, ExternalName, another proxy's, or without a
// cluster IP. Last is what the Service was before, nil if that is not known: its values replace those of wrong
// annotations.
func (c *converter) service(o *corev1.Service, last *snapshot.Service) (*snapshot.Service, []*Problem) {
	f := &problemList{object: objectName("Service", nameOf(o))}
	if !isForThisProxy(o) || !validName(f, "metadata.namespace", o.Namespace) || !validName(f, "metadata.name", o.Name) {
		return nil, f.problems()
	}
	spec := &o.Spec
	s := &snapshot.Service{
		Name:          snapshot.Name{Namespace: c.intern(o.Namespace), Name: string([]byte(o.Name))},
		Age:           readAge(o),
		Version:       readVersion(o),
		ClusterIPs:    clusterIPs(f, spec),
		ExternalIPs:   addrs(f, "spec.externalIPs[%d]", spec.ExternalIPs, unicast),
		Affinity:      affinity(f, spec),
		InternalLocal: isLocal(f, "spec.internalTrafficPolicy", ptr.Deref(spec.InternalTrafficPolicy, "")),
		Ports:         c.servicePorts(f, spec.Ports),
	}
	if len(s.ClusterIPs) == 0 {
		return nil, f.problems()
	}
	s.LoadBalancerIPs = loadBalancerIPs(f, o.Status.LoadBalancer.Ingress)
	limitFrontends(f, s)
	s.SourceRanges = sourceRanges(f, spec.LoadBalancerSourceRanges)
	readServiceAnnotations(f, o, s, last)
	// The policy has no meaning for a Service that cannot be reached from outside (ExternallyAccessible in
	// k8s.io/kubernetes).
	balanced := spec.Type == corev1.ServiceTypeLoadBalancer
	external := balanced || spec.Type == corev1.ServiceTypeNodePort || len(spec.ExternalIPs) > 0
	s.ExternalLocal = isLocal(f, "spec.externalTrafficPolicy", spec.ExternalTrafficPolicy) && external
	if s.ExternalLocal && balanced && spec.HealthCheckNodePort != 0 {
		field := func(name string) string { return "spec." + name }
		s.HealthCheckNodePort = port(f, field, "healthCheckNodePort", spec.HealthCheckNodePort)
	}
	return s, f.problems()
}

// limitFrontends drops addresses that would make too many frontends with all ports: external IPs first, and the last
// ones of each list first.
func limitFrontends(f *problemList, s *snapshot.Service) {
	room := maxFrontends/max(len(s.Ports), 1) - len(s.ClusterIPs)
	if n := len(s.LoadBalancerIPs) + len(s.ExternalIPs); n > room {
		f.add("spec.ports", "%d ports at %d addresses are too many: only the first %d addresses are served", len(s.Ports),
			n, room)
	}
	s.LoadBalancerIPs = s.LoadBalancerIPs[:min(len(s.LoadBalancerIPs), room)]
	s.ExternalIPs = s.ExternalIPs[:min(len(s.ExternalIPs), room-len(s.LoadBalancerIPs))]
}

// maxUID is longer than any UID that an API server generates.
const maxUID = 64

// readAge reads when an object was created. It keeps no part of the message that the object came in.
func readAge(o metav1.Object) snapshot.Age {
	a := snapshot.Age{UID: string([]byte(clip.Cut(string(o.GetUID()), maxUID)))}
	if t := o.GetCreationTimestamp(); !t.IsZero() {
		a.Created = t.Unix()
	}
	return a
}

// maxVersion is longer than any resourceVersion that an API server gives.
const maxVersion = 64

// readVersion reads an object's resourceVersion. It keeps no part of the message that the object came in.
func readVersion(o metav1.Object) snapshot.Version {
	return snapshot.Version([]byte(clip.Cut(o.GetResourceVersion(), maxVersion)))
}

// isForThisProxy says whether a Service is to be served, and by this proxy.
func isForThisProxy(o *corev1.Service) bool {
	if _, other := o.Labels[labelProxyName]; other || o.Spec.Type == corev1.ServiceTypeExternalName {
		return false
	}
	return o.Spec.ClusterIP != corev1.ClusterIPNone && !slices.Contains(o.Spec.ClusterIPs, corev1.ClusterIPNone)
}

// clusterIPs reads clusterIPs, or clusterIP if the list is missing, as it is in objects from before dual stack.
func clusterIPs(f *problemList, spec *corev1.ServiceSpec) []netip.Addr {
	if len(spec.ClusterIPs) == 0 {
		if spec.ClusterIP == "" {
			return nil
		}
		if a, ok := f.addr("spec.clusterIP", 0, spec.ClusterIP, servable); ok {
			return []netip.Addr{a}
		}
		return nil
	}
	if spec.ClusterIP != "" && spec.ClusterIP != spec.ClusterIPs[0] {
		f.add("spec.clusterIP", "%s is not the first of clusterIPs: the list counts", quote(spec.ClusterIP))
	}
	ips := make([]netip.Addr, 0, min(len(spec.ClusterIPs), 2))
	for i, text := range spec.ClusterIPs {
		a, ok := f.addr("spec.clusterIPs[%d]", i, text, servable)
		switch {
		case !ok:
		case slices.ContainsFunc(ips, func(b netip.Addr) bool { return a.Is4() == b.Is4() }):
			f.add(indexed("spec.clusterIPs[%d]", i), "%s is a second address of its family: a Service has one of each at most",
				a)
		default:
			ips = append(ips, a)
		}
	}
	return ips
}

// loadBalancerIPs skips the entries whose traffic is meant to go out to the load balancer: those with only a host name,
// and those with ipMode Proxy (KEP-1860).
func loadBalancerIPs(f *problemList, ingress []corev1.LoadBalancerIngress) []netip.Addr {
	var (
		ips   []netip.Addr
		known uniqueSet[netip.Addr]
	)
	for i, in := range truncate(f, "status.loadBalancer.ingress", ingress, maxAddresses) {
		if in.IP == "" || in.IPMode != nil && *in.IPMode != corev1.LoadBalancerIPModeVIP {
			continue
		}
		if a, ok := f.addr("status.loadBalancer.ingress[%d].ip", i, in.IP, servable); ok && !known.addSeen(a) {
			ips = append(ips, a)
		}
	}
	return ips
}

// noSource holds the source ranges of a load balancer whose own ranges are invalid. No packet that could be answered
// has the unspecified address as its source.
var noSource = ipfamily.Per[netip.Prefix]{netip.MustParsePrefix("0.0.0.0/32"), netip.MustParsePrefix("::/128")}

// sourceRanges reads loadBalancerSourceRanges. An invalid range may be of either family, and a family without ranges is
// open to everybody. So that a typing error never opens a Service, it closes each family that has no valid range. So
// does a list that is too long.
func sourceRanges(f *problemList, texts []string) []netip.Prefix {
	var (
		ranges   []netip.Prefix
		families ipfamily.Per[bool]
		bad      bool
		known    uniqueSet[netip.Prefix]
	)
	bad = len(texts) > maxRanges
	for i, text := range truncate(f, "spec.loadBalancerSourceRanges", texts, maxRanges) {
		p, ok := f.prefix("spec.loadBalancerSourceRanges[%d]", i, strings.TrimSpace(text),
			"; a family with no good range is closed")
		if !ok {
			bad = true
			continue
		}
		families[ipfamily.Of(p.Addr())] = true
		if !known.addSeen(p) {
			ranges = append(ranges, p)
		}
	}
	for fam, good := range families {
		if bad && !good {
			ranges = append(ranges, noSource[fam])
		}
	}
	return ranges
}

func affinity(f *problemList, spec *corev1.ServiceSpec) time.Duration {
	switch spec.SessionAffinity {
	case "", corev1.ServiceAffinityNone:
		return 0
	case corev1.ServiceAffinityClientIP:
	default:
		f.add("spec.sessionAffinity", "%s is unknown: write ClientIP or None", quote(string(spec.SessionAffinity)))
		return 0
	}
	c := spec.SessionAffinityConfig
	if c == nil || c.ClientIP == nil || c.ClientIP.TimeoutSeconds == nil {
		return defaultAffinity
	}
	d := time.Duration(*c.ClientIP.TimeoutSeconds) * time.Second
	if d < time.Second || d > maxAffinity {
		f.add("spec.sessionAffinityConfig.clientIP.timeoutSeconds", "%d is not between 1 and 86400: using %d",
			*c.ClientIP.TimeoutSeconds, defaultAffinity/time.Second)
		return defaultAffinity
	}
	return d
}

// isLocal reads a traffic policy.
func isLocal[T ~string](f *problemList, field string, policy T) bool {
	switch string(policy) {
	case "", string(corev1.ServiceInternalTrafficPolicyCluster):
		return false
	case string(corev1.ServiceInternalTrafficPolicyLocal):
		return true
	}
	f.add(field, "%s is unknown: write Cluster or Local", quote(string(policy)))
	return false
}

// portName and portNumber both identify a port of a Service.
type (
	portName struct {
		name     string
		protocol snapshot.Protocol
	}
	portNumber struct {
		number   uint16
		protocol snapshot.Protocol
	}
)

func (c *converter) servicePorts(f *problemList, ports []corev1.ServicePort) []snapshot.Port {
	var (
		out     = make([]snapshot.Port, 0, min(len(ports), maxPorts))
		names   uniqueSet[portName]
		numbers uniqueSet[portNumber]
	)
	ports = truncate(f, "spec.ports", ports, maxPorts)
	for i := range ports {
		p := &ports[i]
		field := func(name string) string { return fmt.Sprintf("spec.ports[%d].%s", i, name) }
		proto, number := protocol(f, field, p.Protocol), port(f, field, "port", p.Port)
		switch {
		case proto == 0 || number == 0 || p.Name != "" && !validName(f, field("name"), p.Name):
			continue
		case names.addSeen(portName{p.Name, proto}):
			f.add(field("name"), "%s is the name of two ports: the first one counts", quote(p.Name))
			continue
		case numbers.addSeen(portNumber{number, proto}):
			f.add(field("port"), "%d/%s is there twice: the first one counts", number, proto)
			continue
		}
		sp := snapshot.Port{Name: c.intern(p.Name), Protocol: proto, Port: number}
		if p.NodePort != 0 {
			sp.NodePort = port(f, field, "nodePort", p.NodePort)
		}
		out = append(out, sp)
	}
	return out
}

// inObject builds a field's path from its name in the part that is being read.
type inObject func(name string) string

// port returns 0 for an invalid port.
func port(f *problemList, field inObject, name string, n int32) uint16 {
	if n < 1 || n > 65535 {
		f.add(field(name), "%d is not a port (1-65535)", n)
		return 0
	}
	return uint16(n)
}

// protocol returns 0 for a protocol that Services cannot have.
func protocol(f *problemList, field inObject, p corev1.Protocol) snapshot.Protocol {
	switch p {
	case "", corev1.ProtocolTCP:
		return snapshot.TCP
	case corev1.ProtocolUDP:
		return snapshot.UDP
	case corev1.ProtocolSCTP:
		return snapshot.SCTP
	}
	f.add(field("protocol"), "%s is unknown: write TCP, UDP or SCTP", quote(string(p)))
	return 0
}

// slice returns nil for a slice that is not to be served: headless, of names instead of addresses, or of no Service.
// Last is as for service.
func (c *converter) slice(o *discoveryv1.EndpointSlice, last *snapshot.Slice) (*snapshot.Slice, []*Problem) {
	f := &problemList{object: objectName("EndpointSlice", nameOf(o))}
	if _, headless := o.Labels[labelHeadless]; headless || o.AddressType == discoveryv1.AddressTypeFQDN {
		return nil, nil
	}
	if !validName(f, "metadata.namespace", o.Namespace) || !validName(f, "metadata.name", o.Name) {
		return nil, f.problems()
	}
	owner := o.Labels[discoveryv1.LabelServiceName]
	if owner == "" {
		f.add("metadata.labels["+discoveryv1.LabelServiceName+"]", "missing: it says which Service the slice belongs to")
		return nil, f.problems()
	}
	if o.AddressType != discoveryv1.AddressTypeIPv4 && o.AddressType != discoveryv1.AddressTypeIPv6 {
		f.add("addressType", "%s is unknown: write IPv4 or IPv6", quote(string(o.AddressType)))
		return nil, f.problems()
	}
	s := &snapshot.Slice{
		Name:      snapshot.Name{Namespace: c.intern(o.Namespace), Name: string([]byte(o.Name))},
		Service:   string([]byte(owner)),
		Version:   readVersion(o),
		Ports:     c.slicePorts(f, o.Ports),
		Endpoints: c.endpointsOf(f, o),
	}
	readSliceAnnotations(f, o.Annotations, s, last)
	return s, f.problems()
}

func (c *converter) slicePorts(f *problemList, ports []discoveryv1.EndpointPort) []snapshot.SlicePort {
	ports = truncate(f, "ports", ports, maxPorts)
	out := make([]snapshot.SlicePort, 0, len(ports))
	var names uniqueSet[portName]
	for i := range ports {
		p := &ports[i]
		field := func(name string) string { return fmt.Sprintf("ports[%d].%s", i, name) }
		if p.Port == nil {
			continue // "all ports", which no Service port can ask for
		}
		if p.Name == nil {
			f.add(field("name"), "missing: write the name of the Service's port, or \"\"")
			continue
		}
		if sp, ok := c.slicePort(f, field, &names, *p.Name, ptr.Deref(p.Protocol, ""), *p.Port); ok {
			out = append(out, sp)
		}
	}
	return out
}

// slicePort reads one port of a slice or of a subset. The number 0 means a port that was never resolved.
func (c *converter) slicePort(f *problemList, field inObject, names *uniqueSet[portName],
	name string, asked corev1.Protocol, n int32,
) (snapshot.SlicePort, bool) {
	if n == 0 {
		return snapshot.SlicePort{}, false
	}
	proto, number := protocol(f, field, asked), port(f, field, "port", n)
	if proto == 0 || number == 0 {
		return snapshot.SlicePort{}, false
	}
	if names.addSeen(portName{name, proto}) {
		f.add(field("name"), "%s is the name of two ports: the first one counts", quote(name))
		return snapshot.SlicePort{}, false
	}
	return snapshot.SlicePort{Name: c.intern(name), Protocol: proto, Port: number}, true
}

// endpointsOf reads only the first address of each endpoint, as the API requires of all consumers.
func (c *converter) endpointsOf(f *problemList, o *discoveryv1.EndpointSlice) []snapshot.Endpoint {
	const field = "endpoints[%d].addresses[0]"
	out := make([]snapshot.Endpoint, 0, len(o.Endpoints))
	at := newAddrIndex(len(o.Endpoints))
	for i := range o.Endpoints {
		e := &o.Endpoints[i]
		if len(e.Addresses) == 0 {
			f.add(fmt.Sprintf("endpoints[%d].addresses", i), "an endpoint needs an address")
			continue
		}
		a, ok := f.addr(field, i, e.Addresses[0], unicast)
		if !ok {
			continue
		}
		if a.Is4() != (o.AddressType == discoveryv1.AddressTypeIPv4) {
			f.add(indexed(field, i), "%s is not of the slice's addressType %s", a, o.AddressType)
			continue
		}
		ep := snapshot.Endpoint{
			Addr:        a,
			Node:        c.intern(ptr.Deref(e.NodeName, "")),
			Zone:        c.intern(ptr.Deref(e.Zone, "")),
			Ready:       ptr.Deref(e.Conditions.Ready, true),
			Serving:     ptr.Deref(e.Conditions.Serving, true),
			Terminating: ptr.Deref(e.Conditions.Terminating, false),
		}
		if ref := e.TargetRef; c.pods && ref != nil && ref.Kind == "Pod" {
			ep.Pod = strings.Clone(ref.Name)
		}
		if e.Hints != nil {
			ep.ForZones, ep.ForNodes = c.hints(e.Hints)
		}
		out = addEndpoint(f, field, i, out, at, ep)
	}
	return out
}

// addrIndex maps an address to its index in a list. A nil map means that the list is short enough for a linear search.
type addrIndex map[netip.Addr]int

// linearSearchMax is the length up to which a linear search is faster than a map.
const linearSearchMax = 16

func newAddrIndex(most int) addrIndex {
	if most <= linearSearchMax {
		return nil
	}
	return make(addrIndex, most)
}

// find returns the index of an address in the list.
func (p addrIndex) find(list []snapshot.Endpoint, a netip.Addr) (int, bool) {
	if p != nil {
		i, ok := p[a]
		return i, ok
	}
	i := slices.IndexFunc(list, func(e snapshot.Endpoint) bool { return e.Addr == a })
	return i, i >= 0
}

// addEndpoint keeps one of two endpoints with the same address: the one that is not terminating, else the first.
func addEndpoint(f *problemList, field string, i int, list []snapshot.Endpoint, at addrIndex, e snapshot.Endpoint,
) []snapshot.Endpoint {
	j, again := at.find(list, e.Addr)
	if !again {
		if at != nil {
			at[e.Addr] = len(list)
		}
		return append(list, e)
	}
	f.add(indexed(field, i), "%s is there twice: the endpoint that is not terminating counts, else the first", e.Addr)
	if list[j].Terminating && !e.Terminating {
		list[j] = e
	}
	return list
}

func (c *converter) hints(h *discoveryv1.EndpointHints) (zones, nodes []string) {
	for _, z := range h.ForZones {
		zones = append(zones, z.Name)
	}
	for _, n := range h.ForNodes {
		nodes = append(nodes, n.Name)
	}
	return c.internList(zones), c.internList(nodes)
}

// endpoints reads a v1 Endpoints object as one slice for each subset. The slices' names contain a colon, which no API
// object's name can.
//
//lint:ignore SA1019 manifests still have it
func (c *converter) endpoints(o *corev1.Endpoints) ([]*snapshot.Slice, []*Problem) {
	f := &problemList{object: objectName("Endpoints", nameOf(o))}
	if _, headless := o.Labels[labelHeadless]; headless {
		return nil, nil
	}
	if !validName(f, "metadata.namespace", o.Namespace) || !validName(f, "metadata.name", o.Name) {
		return nil, f.problems()
	}
	var out []*snapshot.Slice
	ns, owner := c.intern(o.Namespace), string([]byte(o.Name))
	for i := range o.Subsets {
		sub := &o.Subsets[i]
		s := &snapshot.Slice{
			Name:    snapshot.Name{Namespace: ns, Name: fmt.Sprintf("%s:%d", owner, i)},
			Service: owner,
			Ports:   make([]snapshot.SlicePort, 0, len(sub.Ports)),
		}
		var names uniqueSet[portName]
		for j, p := range sub.Ports {
			field := func(name string) string { return fmt.Sprintf("subsets[%d].ports[%d].%s", i, j, name) }
			if sp, ok := c.slicePort(f, field, &names, p.Name, p.Protocol, p.Port); ok {
				s.Ports = append(s.Ports, sp)
			}
		}
		at := newAddrIndex(len(sub.Addresses) + len(sub.NotReadyAddresses))
		field := fmt.Sprintf("subsets[%d].addresses[%%d].ip", i)
		s.Endpoints = c.subset(f, field, s.Endpoints, at, sub.Addresses, true)
		field = fmt.Sprintf("subsets[%d].notReadyAddresses[%%d].ip", i)
		s.Endpoints = c.subset(f, field, s.Endpoints, at, sub.NotReadyAddresses, false)
		out = append(out, s)
	}
	return out, f.problems()
}

func (c *converter) subset(f *problemList, field string, list []snapshot.Endpoint, at addrIndex,
	addresses []corev1.EndpointAddress, ready bool,
) []snapshot.Endpoint {
	for i, e := range addresses {
		a, ok := f.addr(field, i, e.IP, unicast)
		if !ok {
			continue
		}
		ep := snapshot.Endpoint{Addr: a, Node: c.intern(ptr.Deref(e.NodeName, "")), Ready: ready, Serving: ready}
		list = addEndpoint(f, field, i, list, at, ep)
	}
	return list
}

// node converts a Node; the result is never nil.
func (c *converter) node(o *corev1.Node) (*snapshot.Node, []*Problem) {
	f := &problemList{object: objectName("Node", snapshot.Name{Name: o.Name})}
	n := &snapshot.Node{Name: string([]byte(o.Name)), Zone: c.intern(o.Labels[corev1.LabelTopologyZone])}
	var known uniqueSet[netip.Addr]
	for _, kind := range []corev1.NodeAddressType{corev1.NodeInternalIP, corev1.NodeExternalIP} {
		for i, na := range o.Status.Addresses {
			if na.Type != kind {
				continue
			}
			if a, ok := f.addr("status.addresses[%d].address", i, na.Address, valid); ok && !known.addSeen(a) {
				n.Addresses = append(n.Addresses, a)
			}
		}
	}
	field, cidrs := "spec.podCIDRs[%d]", o.Spec.PodCIDRs
	if len(cidrs) == 0 && o.Spec.PodCIDR != "" {
		field, cidrs = "spec.podCIDR", []string{o.Spec.PodCIDR}
	}
	n.PodCIDRs = prefixes(f, field, cidrs)
	n.Leaving = leavingReason(o)
	return n, f.problems()
}

// taintToBeDeleted is the taint that the cluster autoscaler puts on a node before it drains and deletes it.
const taintToBeDeleted = "ToBeDeletedByClusterAutoscaler"

// leavingReason says why a node is about to be removed, by the rules of kube-proxy's health check.
func leavingReason(o *corev1.Node) string {
	if !o.DeletionTimestamp.IsZero() {
		return "the Node is being deleted"
	}
	for i := range o.Spec.Taints {
		if o.Spec.Taints[i].Key == taintToBeDeleted {
			return "the Node has the taint " + taintToBeDeleted
		}
	}
	return ""
}

// serviceCIDR returns the ranges of one object in their order; the result is never nil.
func (c *converter) serviceCIDR(o *networkingv1.ServiceCIDR) (*[]netip.Prefix, []*Problem) {
	f := &problemList{object: objectName("ServiceCIDR", snapshot.Name{Name: o.Name})}
	p := prefixes(f, "spec.cidrs[%d]", o.Spec.CIDRs)
	return &p, f.problems()
}

// mergePrefixes returns all ranges, sorted and unique; nil if there are none.
func mergePrefixes(lists []*[]netip.Prefix) []netip.Prefix {
	var all []netip.Prefix
	for _, l := range lists {
		all = append(all, *l...)
	}
	slices.SortFunc(all, netip.Prefix.Compare)
	return slices.Compact(all)
}

var (
	errName    = errors.New("a name has letters, digits, '-' and '.' only")
	errMissing = errors.New("missing")
)

// validName says whether a name is safe to use. It allows less than the API server does, because names end up in
// comments in the kernel, in metrics and in texts for nft, where a quotation mark or a line feed would inject a
// command.
func validName(f *problemList, field, s string) bool {
	if err := checkName(s); err != nil {
		f.add(field, "%w", err)
		return false
	}
	return true
}

// checkName is validName without a list of problems.
func checkName(s string) error {
	switch {
	case s == "":
		return errMissing
	case len(s) > 253:
		return fmt.Errorf("%s is longer than 253 characters", quote(s))
	}
	for i := range len(s) {
		b := s[i]
		if (b < 'a' || b > 'z') && (b < 'A' || b > 'Z') && (b < '0' || b > '9') && b != '-' && b != '.' {
			return fmt.Errorf("%s: %w", quote(s), errName)
		}
	}
	return nil
}

// uniqueSet finds duplicates. Nearly every list has one value, which needs no map.
type uniqueSet[T comparable] struct {
	first T
	count int
	more  map[T]struct{}
}

// addSeen adds v and says whether it was in the set already.
func (s *uniqueSet[T]) addSeen(v T) bool {
	if s.count == 0 {
		s.first, s.count = v, 1
		return false
	}
	if _, again := s.more[v]; again || v == s.first {
		return true
	}
	if s.more == nil {
		s.more = map[T]struct{}{}
	}
	s.more[v] = struct{}{}
	s.count++
	return false
}

func nameOf(o metav1.Object) snapshot.Name {
	return snapshot.Name{Namespace: o.GetNamespace(), Name: o.GetName()}
}
