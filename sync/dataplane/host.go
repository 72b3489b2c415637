package dataplane

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
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

// host holds what the answer of every Service depends on besides the Service itself: the operator's configuration and
// this node.
type host struct {
	nodeName, zone string
	masqueradeAll  bool
	noExternalIPs  bool
	// addresses are the Node object's, with NodeIP in place of those of its family.
	addresses []netip.Addr
	// nodePortAddrs are the addresses at which node ports answer, per family. They include 127.0.0.1 if loopback is set.
	nodePortAddrs ipfamily.Per[[]netip.Addr]
	// pods says how pods are recognized, per family.
	pods     ipfamily.Per[Pods]
	loopback bool
	// secondChance is the setting for Services that do not say it themselves, never SecondChanceDefault.
	secondChance snapshot.SecondChance
	lastResort   bool
	// pingAddrs are the addresses of this node that answer a ping of a Service address; the zero Addr: none does.
	pingAddrs         ipfamily.Per[netip.Addr]
	rejectUnusedPorts bool
	// podsFirst is Config.AsKubeProxy.
	podsFirst bool
	// records is Config.Records.
	records bool
	// keep is Config.ClientAddress, and cannotKeep CannotKeep, or that the Link is Refused. neighbours are the other
	// nodes; nil if there is no device to reach them.
	keep       KeepSetting
	cannotKeep bool
	neighbours map[string]reachable
	// device, index and macs are State's Device, DeviceIndex and NodeMACs.
	device string
	index  int
	macs   []snapshot.MAC
	// settings are the configuration's Lines.
	settings []string
	// ipvs says which Services IPVS schedules. serviceCIDRs, and which parts of them others use, too, are set only if it
	// schedules any.
	ipvs         IPVS
	serviceCIDRs []netip.Prefix
	shared       []netip.Prefix
}

func newHost(cfg Config, s *snapshot.Snapshot, found []Overlap) host {
	cfg.CannotKeep = cfg.CannotKeep || s.Link.Refused
	h := host{
		nodeName:      cfg.NodeName,
		zone:          s.Node.Zone,
		masqueradeAll: cfg.MasqueradeAll,
		noExternalIPs: cfg.NoExternalIPs,
		addresses:     nodeAddrs(cfg.NodeIP, s.Node.Addresses),
		loopback:      localhostNodePorts(cfg),
		secondChance:  cmp.Or(cfg.SecondChance, snapshot.SecondChanceOff),
		lastResort:    cfg.LastResort,
		ipvs:          cfg.IPVS,

		rejectUnusedPorts: cfg.RejectUnusedPorts,
		podsFirst:         cfg.AsKubeProxy,
		records:           cfg.Records,
		settings:          cfg.Lines(),
		keep:              cfg.ClientAddress,
		cannotKeep:        cfg.CannotKeep,
		neighbours:        neighbours(s.Link),
	}
	if !cfg.CannotKeep && cfg.ClientAddress != KeepNone {
		h.device, h.index, h.macs = s.Link.Device, s.Link.Index, macsOf(s.Link)
	}
	if h.ipvs.Mode != IPVSNever {
		h.serviceCIDRs, h.shared = s.ServiceCIDRs, sharedRanges(found)
	}
	for _, f := range ipfamily.All {
		h.nodePortAddrs[f] = nodePortAddrs(cfg, s, f)
		h.pingAddrs[f] = pingAddr(cfg, s, f)
		h.pods[f] = detectPods(cfg.DetectLocal, s.Node.PodCIDRs, f)
	}
	if h.loopback {
		h.nodePortAddrs[ipfamily.IPv4] = append(h.nodePortAddrs[ipfamily.IPv4], localhost)
	}
	return h
}

// equal reports whether every Service gets the same answer on both hosts. Addresses on which no node port answers, such
// as the link-local addresses of new pods' interfaces, make no difference, so they cost nothing.
func (h *host) equal(o *host) bool {
	return h.nodeName == o.nodeName && h.zone == o.zone && h.masqueradeAll == o.masqueradeAll &&
		h.noExternalIPs == o.noExternalIPs && h.secondChance == o.secondChance &&
		h.lastResort == o.lastResort &&
		h.pingAddrs == o.pingAddrs && h.rejectUnusedPorts == o.rejectUnusedPorts && h.podsFirst == o.podsFirst &&
		h.ipvs.equal(&o.ipvs) && slices.Equal(h.serviceCIDRs, o.serviceCIDRs) &&
		h.keep == o.keep && h.cannotKeep == o.cannotKeep && maps.Equal(h.neighbours, o.neighbours) &&
		(h.neighbours == nil) == (o.neighbours == nil) &&
		slices.Equal(h.shared, o.shared) && slices.Equal(h.addresses, o.addresses) && h.pods == o.pods &&
		slices.Equal(h.nodePortAddrs[ipfamily.IPv4], o.nodePortAddrs[ipfamily.IPv4]) &&
		slices.Equal(h.nodePortAddrs[ipfamily.IPv6], o.nodePortAddrs[ipfamily.IPv6])
}

// setGlobals writes everything in a State that belongs to no Service, and returns whether that changed anything.
// Kubernetes lets ServiceCIDRs overlap.
func (st *State) setGlobals(h *host, serviceCIDRs []netip.Prefix, found []Overlap) (changed bool) {
	serviceCIDRs = outermost(slices.Clone(serviceCIDRs))
	evidence := h.secondChance != snapshot.SecondChanceOff
	changed = st.Evidence != evidence || st.Records != h.records || st.PodsFirst != h.podsFirst ||
		st.Pods4 != h.pods[ipfamily.IPv4] || st.Pods6 != h.pods[ipfamily.IPv6] ||
		st.MasqueradeAll != h.masqueradeAll || st.PingAddrs != h.pingAddrs ||
		st.LocalhostNodePorts != h.loopback || !slices.Equal(st.ServiceCIDRs, serviceCIDRs) ||
		!slices.Equal(st.IPVSAddresses, h.ipvs.Addresses) || !slices.Equal(st.Settings, h.settings) ||
		!slices.Equal(st.SharedRanges, sharedRanges(found)) ||
		st.Device != h.device || st.DeviceIndex != h.index || !slices.Equal(st.NodeMACs, h.macs)
	st.Device, st.DeviceIndex, st.NodeMACs = h.device, h.index, h.macs
	st.Pods4, st.Pods6, st.MasqueradeAll = h.pods[ipfamily.IPv4], h.pods[ipfamily.IPv6], h.masqueradeAll
	st.LocalhostNodePorts, st.ServiceCIDRs, st.IPVSAddresses = h.loopback, serviceCIDRs, h.ipvs.Addresses
	st.PodsFirst, st.SharedRanges = h.podsFirst, sharedRanges(found)
	st.Evidence, st.Records, st.PingAddrs, st.Settings = evidence, h.records, h.pingAddrs, h.settings
	return changed
}

// detectPods is kube-proxy's local traffic detector. As in kube-proxy, only the first range of each family counts.
// Unlike kube-proxy, Verdict follows a Node whose pod ranges are unknown or change: it does not wait or exit.
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

// localhostNodePorts reports whether IPv4 node ports answer on 127.0.0.1. They never answer on ::1, because the kernel
// has no route_localnet for IPv6; kube-proxy reaches ::1 only through a proxy in user space, behind an alpha feature
// gate.
func localhostNodePorts(cfg Config) bool {
	unset := len(cfg.NodePortAddresses) == 0 && !cfg.NodePortPrimary
	return cfg.LocalhostNodePorts && (unset || contain(cfg.NodePortAddresses, localhost))
}

// nodeAddrs returns the node's addresses: those of the Node object, or in the family of override that address, like
// kube-proxy's bindAddress.
func nodeAddrs(override netip.Addr, object []netip.Addr) []netip.Addr {
	if !override.IsValid() {
		return object
	}
	addrs := []netip.Addr{override}
	for _, a := range object {
		if a.Is4() != override.Is4() {
			addrs = append(addrs, a)
		}
	}
	return addrs
}

// nodePortAddrs returns the addresses of one family, other than 127.0.0.1, at which node ports answer.
func nodePortAddrs(cfg Config, s *snapshot.Snapshot, f ipfamily.Family) []netip.Addr {
	var addrs []netip.Addr
	if cfg.NodePortPrimary || len(cfg.NodePortAddresses) == 0 {
		addrs = primaryAddr(nodeAddrs(cfg.NodeIP, s.Node.Addresses), s.HostAddrs, f)
	}
	for _, a := range listedAddrs(cfg, s, f) {
		if !slices.Contains(addrs, a) {
			addrs = append(addrs, a)
		}
	}
	return addrs
}

// primaryAddr returns the node's first address of the family that is on this host, like kube-proxy's "primary", with
// two differences. It skips an address that is not on the host, such as a cloud's external address behind NAT, because
// no packet is ever delivered to it. If the Node is unknown or has no usable address, node ports stay closed;
// kube-proxy's list becomes empty, which opens them on every address.
func primaryAddr(node, host []netip.Addr, f ipfamily.Family) []netip.Addr {
	for _, a := range node {
		if f.Has(a) && !a.IsLoopback() && (len(host) == 0 || slices.Contains(host, a)) {
			return []netip.Addr{a}
		}
	}
	return nil
}

// listedAddrs returns the host's addresses of the family inside the operator's ranges. If the host's addresses are
// unknown, as when rendering for another machine, a range of a single address stands for itself.
//
// If the list does not mention a family, kube-proxy opens node ports on all of its addresses, so an IPv4 list leaves
// IPv6 open. Here a list is a restriction, and such a family has no node ports. 0.0.0.0/0 or ::/0 stands for all of a
// family.
func listedAddrs(cfg Config, s *snapshot.Snapshot, f ipfamily.Family) []netip.Addr {
	ranges, node := cfg.NodePortAddresses, nodeAddrs(cfg.NodeIP, s.Node.Addresses)
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
		// IPVS binds addresses of Services to a dummy device, and node ports would multiply by cluster IPs. But the node's
		// own address may be in their range.
		ofService := contain(s.ServiceCIDRs, a) && !slices.Contains(node, a)
		if f.Has(a) && !ofService && answersNodePorts(a, ranges) {
			addrs = append(addrs, a)
		}
	}
	return addrs
}

// answersNodePorts reports whether node ports may answer at a host address.
//
// They never answer at loopback addresses, about which localhostNodePorts decides. They answer at IPv6 link-local
// addresses only if a range asks for nothing else: a frontend has no scope, so the same address on two links cannot be
// distinguished, and ::/0 does not mean every pod's link. kube-proxy's IPVS mode also excludes them; its nftables mode
// includes every address of type local.
func answersNodePorts(a netip.Addr, ranges []netip.Prefix) bool {
	if a.IsLoopback() {
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
