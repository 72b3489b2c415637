package dataplane

import (
	"net/netip"
	"slices"

	"github.com/verdict-proxy/verdict/internal/ipfamily"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// firstOf returns the first prefix of a family, or the zero Prefix.
func firstOf(f ipfamily.Family, prefixes []netip.Prefix) netip.Prefix {
	for _, p := range prefixes {
		if f.Has(p.Addr()) {
			return p
		}
	}
	return netip.Prefix{}
}

// host is what the answer of every Service depends on besides the Service itself: the operator's wishes and this node.
type host struct {
	nodeName, zone string
	masqueradeAll  bool
	noExternalIPs  bool
	// addresses are the Node object's, but for what the operator says.
	addresses []netip.Addr
	// nodePortAddrs, per family, are where node ports answer; 127.0.0.1 is among them if loopback is set.
	nodePortAddrs ipfamily.Per[[]netip.Addr]
	// pods, per family, tell pods from others.
	pods     ipfamily.Per[Pods]
	loopback bool
	// ipvs says which Services IPVS schedules. serviceCIDRs are known only if it schedules any.
	ipvs         IPVS
	serviceCIDRs []netip.Prefix
}

func newHost(cfg Config, s *snapshot.Snapshot) host {
	h := host{
		nodeName:      cfg.NodeName,
		zone:          s.Node.Zone,
		masqueradeAll: cfg.MasqueradeAll,
		noExternalIPs: cfg.NoExternalIPs,
		addresses:     nodeAddrs(cfg.NodeIP, s.Node.Addresses),
		loopback:      localhostNodePorts(cfg),
		ipvs:          cfg.IPVS,
	}
	if h.ipvs.Mode != IPVSNever {
		h.serviceCIDRs = s.ServiceCIDRs
	}
	for _, f := range ipfamily.All {
		h.nodePortAddrs[f] = nodePortAddrs(cfg, s, f)
		h.pods[f] = detectPods(cfg.DetectLocal, s.Node.PodCIDRs, f)
	}
	if h.loopback {
		h.nodePortAddrs[ipfamily.IPv4] = append(h.nodePortAddrs[ipfamily.IPv4], localhost)
	}
	return h
}

// equal says whether every Service gets the same answer on both. Addresses that come and go without being a node
// port's, such as the link-local ones of every new pod's interface, make no difference, and cost nothing by that.
func (h *host) equal(o *host) bool {
	return h.nodeName == o.nodeName && h.zone == o.zone && h.masqueradeAll == o.masqueradeAll &&
		h.noExternalIPs == o.noExternalIPs && h.ipvs.equal(&o.ipvs) && slices.Equal(h.serviceCIDRs, o.serviceCIDRs) &&
		slices.Equal(h.addresses, o.addresses) && h.pods == o.pods &&
		slices.Equal(h.nodePortAddrs[ipfamily.IPv4], o.nodePortAddrs[ipfamily.IPv4]) &&
		slices.Equal(h.nodePortAddrs[ipfamily.IPv6], o.nodePortAddrs[ipfamily.IPv6])
}

// setGlobals writes everything of a State that is no Service's and says whether that changed anything. Kubernetes lets
// ServiceCIDRs overlap.
func (st *State) setGlobals(h *host, serviceCIDRs []netip.Prefix) (changed bool) {
	serviceCIDRs = outermost(slices.Clone(serviceCIDRs))
	changed = st.Pods4 != h.pods[ipfamily.IPv4] || st.Pods6 != h.pods[ipfamily.IPv6] || st.MasqueradeAll != h.masqueradeAll ||
		st.LocalhostNodePorts != h.loopback || !slices.Equal(st.ServiceCIDRs, serviceCIDRs) ||
		!slices.Equal(st.IPVSAddresses, h.ipvs.Addresses)
	st.Pods4, st.Pods6, st.MasqueradeAll = h.pods[ipfamily.IPv4], h.pods[ipfamily.IPv6], h.masqueradeAll
	st.LocalhostNodePorts, st.ServiceCIDRs, st.IPVSAddresses = h.loopback, serviceCIDRs, h.ipvs.Addresses
	return changed
}

// detectPods is kube-proxy's local traffic detector. Like there, only the first range of each family counts; unlike
// there, a Node whose pod ranges are not known yet, or change, is followed rather than waited for or ended on.
func detectPods(d DetectLocal, podCIDRs []netip.Prefix, f ipfamily.Family) Pods {
	switch d.Mode {
	case DetectClusterCIDR:
		return Pods{CIDR: firstOf(f, d.ClusterCIDRs)}
	case DetectNodeCIDR:
		return Pods{CIDR: firstOf(f, podCIDRs)}
	case DetectBridgeInterface:
		return Pods{Interface: d.Interface}
	case DetectInterfaceNamePrefix:
		return Pods{InterfacePrefix: d.Interface}
	}
	return Pods{}
}

var localhost = netip.AddrFrom4([4]byte{127, 0, 0, 1})

// localhostNodePorts says whether IPv4 node ports answer on 127.0.0.1. ::1 never does: the kernel has no route_localnet
// for IPv6. kube-proxy reaches it only by a proxy in user space, behind an alpha feature gate.
func localhostNodePorts(cfg Config) bool {
	unset := len(cfg.NodePortAddresses) == 0 && !cfg.NodePortPrimary
	return cfg.LocalhostNodePorts && (unset || contain(cfg.NodePortAddresses, localhost))
}

// nodeAddrs gives the node's addresses: those of its object, or as kube-proxy's bindAddress has it, in one family what
// the operator says.
func nodeAddrs(said netip.Addr, object []netip.Addr) []netip.Addr {
	if !said.IsValid() {
		return object
	}
	addrs := []netip.Addr{said}
	for _, a := range object {
		if a.Is4() != said.Is4() {
			addrs = append(addrs, a)
		}
	}
	return addrs
}

// nodePortAddrs gives the addresses of one family, other than 127.0.0.1, that node ports answer at.
func nodePortAddrs(cfg Config, s *snapshot.Snapshot, f ipfamily.Family) []netip.Addr {
	var addrs []netip.Addr
	if cfg.NodePortPrimary || len(cfg.NodePortAddresses) == 0 {
		addrs = primaryAddr(nodeAddrs(cfg.NodeIP, s.Node.Addresses), s.HostAddrs, f)
	}
	for _, a := range listedAddrs(cfg.NodePortAddresses, s, f) {
		if !slices.Contains(addrs, a) {
			addrs = append(addrs, a)
		}
	}
	return addrs
}

// primaryAddr gives the node's first address of the family that is on this host, as kube-proxy's "primary" does, with
// two differences. An address that is not on the host, such as a cloud's external one behind NAT, is passed over: no
// packet is ever delivered to it. And a Node that is unknown or has no usable address leaves node ports closed, where
// kube-proxy's list turns empty and so opens them on every address.
func primaryAddr(node, host []netip.Addr, f ipfamily.Family) []netip.Addr {
	for _, a := range node {
		if f.Has(a) && !a.IsLoopback() && (len(host) == 0 || slices.Contains(host, a)) {
			return []netip.Addr{a}
		}
	}
	return nil
}

// listedAddrs gives the host's addresses of the family inside the operator's ranges. Where the host's addresses are
// unknown, as when rendering for another machine, a range of a single address stands for itself.
//
// kube-proxy opens node ports on all addresses of a family the list does not mention, so that an IPv4 list leaves IPv6
// open. A list is a restriction: here such a family has no node ports. All of a family is 0.0.0.0/0 or ::/0.
func listedAddrs(ranges []netip.Prefix, s *snapshot.Snapshot, f ipfamily.Family) []netip.Addr {
	candidates := s.HostAddrs
	if len(candidates) == 0 {
		for _, r := range ranges {
			if r.IsSingleIP() {
				candidates = append(candidates, r.Addr())
			}
		}
	}
	var addrs []netip.Addr
	for _, a := range candidates {
		if f.Has(a) && answersNodePorts(a, ranges, s.ServiceCIDRs) {
			addrs = append(addrs, a)
		}
	}
	return addrs
}

// answersNodePorts says whether a host address may be a node port's.
//
// Never a loopback address, which localhostNodePorts decides about, nor a Service's: what IPVS bound to a dummy device
// would otherwise multiply node ports by cluster IPs. IPv6 link-local addresses only if a range asks for just those: a
// frontend has no scope, so the same address on two links cannot be told apart, and ::/0 is not the wish to answer on
// every pod's link. kube-proxy's IPVS mode leaves them out too; its nftables mode takes every address of type local.
func answersNodePorts(a netip.Addr, ranges, serviceCIDRs []netip.Prefix) bool {
	if a.IsLoopback() || contain(serviceCIDRs, a) {
		return false
	}
	linkLocal := a.Is6() && a.IsLinkLocalUnicast()
	return slices.ContainsFunc(ranges, func(r netip.Prefix) bool {
		return r.Contains(a) && (!linkLocal || r.Addr().IsLinkLocalUnicast())
	})
}

func contain(ranges []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(ranges, func(r netip.Prefix) bool { return r.Contains(a) })
}
