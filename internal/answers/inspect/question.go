package inspect

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/verdict-proxy/verdict/internal/proxy/preflight"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// The words for senders.
const (
	wordNode    = "node"
	wordOutside = "outside"
	wordPod     = "pod"
)

// Question is the packet that explain is asked about.
type Question struct {
	// Source is the sender's address. If it is invalid, Word is node, pod or outside.
	Source netip.Addr
	Word   string
	// Key is the packet's destination.
	Key dataplane.Key
}

// ParseQuestion reads SRC and DST:PORT[/PROTO], or DST/icmp for a ping.
func ParseQuestion(src, dst string) (q Question, err error) {
	if q.Key, err = parseDestination(dst); err != nil {
		return q, err
	}
	switch src {
	case wordNode, wordOutside, wordPod:
		q.Word = src
		return q, nil
	}
	if q.Source, err = netip.ParseAddr(src); err != nil || q.Source.Zone() != "" {
		hint := ""
		if _, perr := netip.ParseAddrPort(src); perr == nil {
			hint = ": the sender's port makes no difference, leave it out"
		}
		return q, fmt.Errorf("SRC: %q is no address, and none of node, pod and outside%s", src, hint)
	}
	q.Source = q.Source.Unmap()
	if q.Source.Is4() != q.Key.Addr.Is4() {
		return q, fmt.Errorf("SRC is %s, and DST %s: both have to be of one family", q.Source, q.Key.Addr)
	}
	return q, nil
}

func parseDestination(dst string) (k dataplane.Key, err error) {
	text, proto, hasProto := strings.Cut(dst, "/")
	if ping := strings.ToLower(proto); ping == "icmp" || ping == "icmpv6" || ping == "ping" {
		return parsePing(text, dst)
	}
	at, err := netip.ParseAddrPort(text)
	if err != nil {
		return k, destinationError(text, dst)
	}
	k.Addr, k.Port, k.Protocol = at.Addr().Unmap(), at.Port(), snapshot.TCP
	if hasProto {
		i := slices.IndexFunc(protocolNames, func(p snapshot.Protocol) bool { return p.String() == strings.ToLower(proto) })
		if i < 0 {
			return k, fmt.Errorf("DST: %q is no protocol of a Service: tcp, udp or sctp", proto)
		}
		k.Protocol = protocolNames[i]
	}
	switch {
	case at.Addr().Zone() != "":
		return k, fmt.Errorf("DST: %q has a zone, and Services have none", dst)
	case k.Port == 0:
		return k, fmt.Errorf("DST: %q: ports begin at 1", dst)
	}
	return k, nil
}

// parsePing reads the address of a ping.
func parsePing(text, dst string) (k dataplane.Key, err error) {
	if at, err := netip.ParseAddrPort(text); err == nil {
		return k, fmt.Errorf("DST: %q: a ping has no port, write %s/icmp", dst, at.Addr())
	}
	k.Addr, err = netip.ParseAddr(strings.TrimSuffix(strings.TrimPrefix(text, "["), "]"))
	if err != nil || k.Addr.Zone() != "" {
		return k, fmt.Errorf("DST: %q is not ADDRESS/icmp, such as 10.96.0.10/icmp", dst)
	}
	k.Addr, k.Protocol = k.Addr.Unmap(), snapshot.ICMP
	if k.Addr.Is6() {
		k.Protocol = snapshot.ICMPv6
	}
	return k, nil
}

var protocolNames = []snapshot.Protocol{snapshot.TCP, snapshot.UDP, snapshot.SCTP}

// destinationError explains what is missing in a destination.
func destinationError(text, dst string) error {
	_, err := netip.ParseAddr(text)
	host, port, perr := net.SplitHostPort(text)
	switch kind := strings.ToLower(text); {
	case kind == "svc" || kind == "service" || kind == "services":
		return fmt.Errorf("DST: %q is a Service, and this command looks up no names: give its ADDRESS:PORT, or ask "+
			"\"kubectl verdict explain POD %s\"", dst, dst)
	case err == nil && strings.Contains(text, ":"):
		return fmt.Errorf("DST: %q has no port: write [%s]:PORT", dst, text)
	case err == nil:
		return fmt.Errorf("DST: %q has no port: write %s:PORT", dst, text)
	case perr != nil:
		return fmt.Errorf("DST: %q is not ADDRESS:PORT, such as 10.96.0.10:53/udp or [fd00::a]:443", dst)
	}
	if _, err := strconv.ParseUint(port, 10, 16); err != nil {
		return fmt.Errorf("DST: %q is no port (1-65535)", port)
	}
	return fmt.Errorf("DST: %q is no address; names are not looked up", host)
}

// sender is the address that sends, and how it was chosen.
type sender struct {
	addr netip.Addr
	// standsFor is the word that was given, if any.
	standsFor string
	// iface is the input interface of its packets: empty if a process on this node sends, or if it is unknown.
	iface string
}

// knownPods is how pods are recognized, and why they are not if they are not.
type knownPods struct {
	dataplane.Pods
	unknown string
}

// resolveSender finds the address that a word stands for, and the input interface of its packets. That is the interface
// that routing uses for answers.
func (q *Question) resolveSender(
	pods knownPods, snap *snapshot.Snapshot, here []netip.Addr, r *preflight.Host, iface string,
) (s sender, err error) {
	s = sender{addr: q.Source, standsFor: q.Word, iface: iface}
	family := ipfamily.Of(q.Key.Addr)
	switch q.Word {
	case wordNode:
		if iface != "" {
			return s, errors.New("--interface: what this node sends comes in by none")
		}
		s.addr, err = q.nodeAddr(snap, here, r)
		return s, err
	case wordOutside:
		s.addr = preflight.Outside[family]
	case wordPod:
		if err := s.assumePod(pods, snap, family); err != nil {
			return s, err
		}
	}
	if slices.Contains(here, s.addr) || s.addr.IsLoopback() {
		s.iface = ""
		if iface != "" {
			return s, fmt.Errorf("--interface: %s is this node's own address: what it sends comes in by none", s.addr)
		}
		return s, nil
	}
	if _, by, ok := r.Route(s.addr); ok && s.iface == "" {
		s.iface = by
	}
	return s, nil
}

// nodeAddr returns the address that this node would send from.
func (q *Question) nodeAddr(snap *snapshot.Snapshot, here []netip.Addr, r *preflight.Host) (netip.Addr, error) {
	if q.Key.Addr.IsLoopback() {
		return q.Key.Addr, nil
	}
	if a, _, ok := r.Route(q.Key.Addr); ok {
		return a, nil
	}
	candidates := slices.Clone(here)
	if snap != nil {
		candidates = slices.Concat(snap.Node.Addresses, here)
	}
	for _, a := range candidates {
		if a.Is4() == q.Key.Addr.Is4() && !a.IsLoopback() && !a.IsLinkLocalUnicast() {
			return a, nil
		}
	}
	return netip.Addr{}, fmt.Errorf(
		"SRC: no address of this node is known that could send to %s; give one, or another --hostname-override", q.Key.Addr)
}

// assumePod chooses an address for a pod: the last one of the pods' range, which most likely is unused.
func (s *sender) assumePod(pods knownPods, snap *snapshot.Snapshot, family ipfamily.Family) error {
	var ranges []netip.Prefix
	switch {
	case pods.CIDR.IsValid():
		ranges = append(ranges, pods.CIDR)
	case pods.Known():
		if s.iface == "" {
			s.iface = cmp.Or(pods.Interface, pods.InterfacePrefix+"0")
		}
		if snap != nil {
			ranges = append(ranges, snap.Node.PodCIDRs...)
		}
		s.addr = preflight.Outside[family]
	default:
		return fmt.Errorf("SRC: pods cannot be told from others here (%s): give an address", pods.unknown)
	}
	for _, p := range ranges {
		if family.Has(p.Addr()) {
			s.addr = preflight.UnusedAddr(p)
			break
		}
	}
	return nil
}
