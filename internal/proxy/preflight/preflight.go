// Package preflight finds what on a host stops packets of Services although the objects and the rules are right: a
// missing route, forwarding that is off, rules of other programs. The start of a proxy, status, verify and explain ask
// it. It only reads, and changes nothing.
package preflight

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/proxy/status"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	nl "github.com/verdict-proxy/verdict/internal/system/netlink"
	"github.com/verdict-proxy/verdict/internal/system/packets"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// The checks, by the names that findings have.
const (
	NoRoute      = "no-route"
	NoForwarding = "no-forwarding"
	PlainBridge  = "plain-bridge"
	NodeAddress  = "node-address"
	RangeOverlap = "overlap"
	NATAhead     = "nat-ahead"
	NoTrack      = "notrack"
	ForwardDrop  = "forward-drop"
	// ForwardUnknown is that ForwardDrop could not be asked.
	ForwardUnknown = "forward-unknown"
	InputDrop      = "input-drop"
	PortInUse      = "port-in-use"
	ReversePath    = "reverse-path"
	SecondProxy    = "second-proxy"
)

// Facts are what the checks have to know of the cluster. What is not known is not checked.
type Facts struct {
	// ClusterIPs are one of each family, and Pods a range of pods, if there is any.
	ClusterIPs ipfamily.Per[netip.Addr]
	Pods       ipfamily.Per[netip.Prefix]
	// Masquerades says that all that is sent to cluster IPs is masqueraded.
	Masquerades bool
	// NodeAddrs are those of the Node object.
	NodeAddrs []netip.Addr
	// NodePorts are all node ports, with a Service that has each.
	NodePorts map[NodePort]snapshot.Name
	Overlaps  []dataplane.Overlap
	// OwnChains says that Verdict's own rules are chains with the names of kube-proxy's.
	OwnChains bool
}

// NodePort is a node port of any address.
type NodePort struct {
	Protocol snapshot.Protocol
	Port     uint16
}

// FactsOf returns the facts that objects tell.
func FactsOf(cfg dataplane.Config, s *snapshot.Snapshot) *Facts {
	f := &Facts{Masquerades: cfg.MasqueradeAll, Overlaps: dataplane.Overlaps(cfg, s),
		NodePorts: map[NodePort]snapshot.Name{}}
	f.SetNode(cfg, &s.Node)
	state, _ := dataplane.Compute(cfg, s)
	for _, svc := range state.Services {
		f.Add(svc)
	}
	return f
}

// FactsOfRules returns the facts that the kernel's rules tell.
func FactsOfRules(s *dataplane.Settings) *Facts {
	f := &Facts{Masquerades: s.MasqueradeAll}
	for _, family := range ipfamily.All {
		f.Pods[family] = s.Pods[family].CIDR
	}
	return f
}

// SetNode notes the Node's addresses, and where pods are. The Node may be nil.
func (f *Facts) SetNode(cfg dataplane.Config, n *snapshot.Node) {
	if n == nil {
		n = &snapshot.Node{}
	}
	f.NodeAddrs, f.Pods = n.Addresses, ipfamily.Per[netip.Prefix]{}
	for _, p := range slices.Concat(n.PodCIDRs, cfg.DetectLocal.ClusterCIDRs) {
		if of := ipfamily.Of(p.Addr()); !f.Pods[of].IsValid() {
			f.Pods[of] = p
		}
	}
}

// SetBackend notes the backend that wrote Verdict's rules, by its name.
func (f *Facts) SetBackend(name string) { f.OwnChains = name == "iptables" }

// Clone returns a copy whose node ports are its own.
func (f *Facts) Clone() *Facts {
	out := *f
	out.NodePorts = maps.Clone(f.NodePorts)
	return &out
}

// Add notes a Service.
func (f *Facts) Add(s *dataplane.Service) {
	for _, a := range s.ClusterIPs {
		f.ClusterIPs[ipfamily.Of(a)] = a
	}
	for at := range nodePorts(s) {
		f.NodePorts[at] = s.Name
	}
}

// Remove forgets the node ports of a Service.
func (f *Facts) Remove(s *dataplane.Service) {
	for at := range nodePorts(s) {
		if f.NodePorts[at] == s.Name {
			delete(f.NodePorts, at)
		}
	}
}

func nodePorts(s *dataplane.Service) map[NodePort]bool {
	out := map[NodePort]bool{}
	for _, p := range s.Ports {
		for i := range p.Frontends {
			if fe := &p.Frontends[i]; fe.Kind == dataplane.NodePort {
				out[NodePort{fe.Key.Protocol, fe.Key.Port}] = true
			}
		}
	}
	return out
}

// Look runs all checks. What cannot be read is not reported: a check that fails has found nothing.
func (h *Host) Look(f *Facts) (found []status.Finding) {
	add := func(one *status.Finding) {
		if one != nil && !slices.Contains(found, *one) {
			found = append(found, *one)
		}
	}
	for _, family := range ipfamily.All {
		service := f.ClusterIPs[family]
		if !service.IsValid() && !f.Pods[family].IsValid() {
			continue
		}
		if _, _, err := h.route(service); service.IsValid() && err != nil {
			add(noRoute(service, err))
		}
		if !h.forwards[family] {
			add(noForwarding(family))
		}
		add(h.podBridge(f, family))
		add(h.forwardDrop(f, family))
	}
	add(h.nodeAddress(f))
	for _, a := range f.NodeAddrs {
		add(h.nodeReversePath(f, a))
	}
	add(h.secondProxy(f))
	for _, c := range h.natAhead() {
		add(&status.Finding{Check: NATAhead, What: fmt.Sprintf("the chain %s translates connections before Verdict does", c),
			Advice: adviceNATAhead})
	}
	add(Overlapping(f.Overlaps))
	for _, one := range h.portsInUse(f) {
		add(&one)
	}
	return found
}

// Overlapping is the finding that others use addresses in the range of Services; nil if nobody does.
func Overlapping(found []dataplane.Overlap) *status.Finding {
	text := dataplane.DescribeOverlaps(found)
	if text == "" {
		return nil
	}
	return &status.Finding{Check: RangeOverlap, What: "the range of Services overlaps addresses that others use: " + text,
		Advice: dataplane.OverlapAdvice}
}

// podBridge finds a bridge of pods that does not show netfilter its packets.
func (h *Host) podBridge(f *Facts, family ipfamily.Family) *status.Finding {
	pods := f.Pods[family]
	if !pods.IsValid() || h.bridgeCallsHooks[family] || f.Masquerades {
		return nil
	}
	_, iface, ok := h.Route(UnusedAddr(pods))
	if !ok || !h.sameBridge(iface, UnusedAddr(pods)) {
		return nil
	}
	return plainBridge(iface, family)
}

// forwardDrop asks whether rules of others let pass what comes from outside to a pod. That they are too many to say is
// found, too.
func (h *Host) forwardDrop(f *Facts, family ipfamily.Family) *status.Finding {
	pods := f.Pods[family]
	if !pods.IsValid() || !h.forwards[family] {
		return nil
	}
	outside := Outside[family]
	_, iface, ok := h.Route(outside)
	if !ok {
		return nil
	}
	const port = 80
	p := NewPacket(outside, netip.AddrPortFrom(outside, port), packets.TCP, false, iface)
	stop, unclear := h.After(p, netip.AddrPortFrom(UnusedAddr(pods), port), false)
	switch {
	case errors.Is(unclear, packets.ErrTooMany):
		return &status.Finding{Check: ForwardUnknown,
			What: fmt.Sprintf("whether another program drops what this host forwards to the pods of %s is not known: "+
				"there are too many rules to follow a packet through, more than %d", pods, packets.MaxRules),
			Advice: "see in nft list ruleset and iptables-legacy-save whether the chains of the hook forward accept the " +
				"pods' range; addresses that are in a set need one rule, and are followed"}
	case stop == nil || stop.Check != ForwardDrop:
		return nil
	}
	what, _, _ := strings.Cut(stop.What, " from ")
	stop.What = fmt.Sprintf("%s to the pods of %s", what, pods)
	return stop
}

// Outside are addresses that no host has. They stand for a sender that is neither a pod nor this node (RFC 7600, RFC
// 6666).
var Outside = ipfamily.Per[netip.Addr]{netip.MustParseAddr("192.0.0.8"), netip.MustParseAddr("100::8")}

// UnusedAddr returns an address of a range that most likely nobody has: the second last, since the last one may be a
// broadcast address.
func UnusedAddr(p netip.Prefix) netip.Addr {
	if p.IsSingleIP() {
		return p.Addr()
	}
	return ipfamily.Last(p).Prev()
}

// nodeAddress finds a Node none of whose addresses of a family is this host's.
func (h *Host) nodeAddress(f *Facts) *status.Finding {
	var absent []string
	for _, family := range ipfamily.All {
		of := slices.DeleteFunc(slices.Clone(f.NodeAddrs), func(a netip.Addr) bool { return !family.Has(a) })
		if len(of) == 0 || slices.ContainsFunc(of, h.Local) {
			continue
		}
		for _, a := range of {
			absent = append(absent, a.String())
		}
	}
	if absent == nil {
		return nil
	}
	return &status.Finding{Check: NodeAddress,
		What: "this host has none of its Node's addresses: " + strings.Join(absent, ", "),
		Advice: "node ports do not answer there: is --hostname-override right, and does the kubelet's --node-ip name an " +
			"address of this host?"}
}

// nodeReversePath asks whether the kernel takes what clients outside send to an address of the Node: it comes in by the
// device that has the address, and goes on to a pod.
func (h *Host) nodeReversePath(f *Facts, a netip.Addr) *status.Finding {
	link, err := h.handle.LinkByIndex(h.devices[a])
	if err != nil || link.Attrs().Flags&net.FlagLoopback != 0 || link.Type() == "dummy" {
		return nil
	}
	to := a
	if pods := f.Pods[ipfamily.Of(a)]; pods.IsValid() {
		to = UnusedAddr(pods)
	}
	return h.reversePath(link.Attrs().Name, Outside[ipfamily.Of(a)], to)
}

// otherDevices are devices that other Service proxies make, for what they translate, and nobody else.
var otherDevices = map[string]string{"kube-ipvs0": "kube-proxy in mode ipvs", "kube-dummy-if": "kube-router",
	"bpfin.cali": "Calico in eBPF mode", "ovn-k8s-mp0": "OVN-Kubernetes"}

// secondProxy finds what another Service proxy has programmed here. The chains in question are only those of a
// kube-proxy: Verdict has others for programs that need them, and takeover may keep some.
func (h *Host) secondProxy(f *Facts) *status.Finding {
	var what []string
	for _, name := range slices.Sorted(maps.Keys(otherDevices)) {
		if _, err := h.handle.LinkByName(name); err == nil {
			what = append(what, fmt.Sprintf("the device %s of %s", name, otherDevices[name]))
		}
	}
	if rules, err := h.rules(); err == nil {
		if rules.HasTable("kube-proxy") {
			what = append(what, "kube-proxy's table of nf_tables")
		}
		if !f.OwnChains && rules.HasChain("KUBE-EXTERNAL-SERVICES") {
			what = append(what, "kube-proxy's chains of iptables")
		}
	}
	if what == nil {
		return nil
	}
	return &status.Finding{Check: SecondProxy,
		What: "another Service proxy has programmed this host: " + strings.Join(what, ", "),
		Advice: "some connections to Services may be its own: run one or the other; verdict takeover removes what a " +
			"kube-proxy has left"}
}

// natAhead returns the chains of others that translate destinations before Verdict does.
func (h *Host) natAhead() []string {
	rules, err := h.rules()
	if err != nil {
		return nil
	}
	return rules.Translators(nft.DNATPriority)
}

// maxPorts bounds how many node ports in use are named.
const maxPorts = 20

// portsInUse finds processes that listen at node ports.
func (h *Host) portsInUse(f *Facts) (found []status.Finding) {
	if len(f.NodePorts) == 0 {
		return nil
	}
	at := map[NodePort]bool{}
	for _, p := range []snapshot.Protocol{snapshot.TCP, snapshot.UDP} {
		for _, bound := range listeners(p) {
			// What listens at loopback alone is reached there as before.
			if _, is := f.NodePorts[NodePort{p, bound.Port()}]; is && !bound.Addr().IsLoopback() {
				at[NodePort{p, bound.Port()}] = true
			}
		}
	}
	for port := range at {
		found = append(found, status.Finding{Check: PortInUse,
			What: fmt.Sprintf("a process of this host listens at %d/%s, a node port of %s", port.Port, port.Protocol,
				f.NodePorts[port]),
			Advice: "connections to that port go to the Service, and never to the process: move one of them"})
	}
	slices.SortFunc(found, func(a, b status.Finding) int { return cmp.Compare(a.What, b.What) })
	return found[:min(len(found), maxPorts)]
}

// listeners returns where processes wait for clients.
func listeners(protocol snapshot.Protocol) (at []netip.AddrPort) {
	c, err := nl.Dial(unix.NETLINK_SOCK_DIAG, 0)
	if err != nil {
		return nil
	}
	defer c.Close()
	// A listening TCP socket, or a UDP socket without a peer, which is closed in TCP's words (net/tcp_states.h).
	number, state := byte(unix.IPPROTO_TCP), byte(10)
	if protocol == snapshot.UDP {
		number, state = unix.IPPROTO_UDP, 7
	}
	const byFamily, requestLen, messageLen = 20, 56, 24
	for _, family := range []byte{unix.AF_INET, unix.AF_INET6} {
		header := make([]byte, requestLen)
		header[0], header[1] = family, number
		binary.NativeEndian.PutUint32(header[4:], 1<<state)
		var w nl.Buffer
		w.End(w.Message(byFamily, unix.NLM_F_DUMP, header...))
		_ = c.Dump(w.Bytes(), func() {}, func(b []byte) {
			if len(b) < messageLen {
				return
			}
			n := map[byte]int{unix.AF_INET: 4, unix.AF_INET6: 16}[family]
			a, _ := netip.AddrFromSlice(b[8 : 8+n])
			at = append(at, netip.AddrPortFrom(a.Unmap(), uint16(b[4])<<8|uint16(b[5])))
		})
	}
	return at
}
