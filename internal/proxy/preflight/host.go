package preflight

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/packets"
	"github.com/verdict-proxy/verdict/nft"
)

// Host answers questions about the network namespace of the thread that opened it. A nil Host knows nothing.
type Host struct {
	handle *netlink.Handle
	// bridgeCallsHooks tells for each family whether bridges pass their packets to netfilter (br_netfilter).
	bridgeCallsHooks ipfamily.Per[bool]
	addrs            []netip.Addr
	// devices are the indices of the devices that have the addresses.
	devices  map[netip.Addr]int
	forwards ipfamily.Per[bool]
	// others are the rules of other programs, read when they are first asked; unread says why they could not be.
	others *packets.Rules
	unread error
}

// Open opens the network namespace of the calling thread.
func Open() (*Host, error) {
	handle, err := netlink.NewHandle()
	if err != nil {
		return nil, fmt.Errorf("this host's routes: %w", err)
	}
	h := &Host{handle: handle, devices: map[netip.Addr]int{}}
	for i, f := range ipfamily.All {
		h.bridgeCallsHooks[f] = sysctl(bridgeCalls[i]) == "1"
		h.forwards[f] = sysctl(forwarding[i]) != "0"
	}
	list, err := handle.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
		handle.Close()
		return nil, fmt.Errorf("this host's addresses: %w", err)
	}
	for _, a := range list {
		if ip, ok := netip.AddrFromSlice(a.IP); ok {
			h.addrs = append(h.addrs, ip.Unmap())
			h.devices[ip.Unmap()] = a.LinkIndex
		}
	}
	return h, nil
}

// What decides, by family, whether a host forwards packets, and whether bridges show netfilter theirs.
var (
	forwarding  = [...]string{"net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding"}
	bridgeCalls = [...]string{"net.bridge.bridge-nf-call-iptables", "net.bridge.bridge-nf-call-ip6tables"}
)

// sysctl reads a parameter; empty if the kernel has none of this name.
func sysctl(name string) string {
	// As sysctl has it, a slash stands for a dot within a part of the name.
	text, _ := os.ReadFile("/proc/sys/" + strings.NewReplacer(".", "/", "/", ".").Replace(name))
	return strings.TrimSpace(string(text))
}

// Close closes the Host.
func (h *Host) Close() {
	if h == nil {
		return
	}
	h.handle.Close()
	if h.others != nil {
		h.others.Close()
	}
}

// Local reports whether an address is this host's.
func (h *Host) Local(a netip.Addr) bool { return a.IsLoopback() || slices.Contains(h.addrs, a) }

// Route returns the source address and the output interface that this host uses for an address.
func (h *Host) Route(a netip.Addr) (source netip.Addr, iface string, ok bool) {
	source, link, err := h.route(a)
	if err != nil {
		return source, "", false
	}
	return source, link.Name, source.IsValid()
}

func (h *Host) route(a netip.Addr) (source netip.Addr, link netlink.LinkAttrs, err error) {
	if h == nil {
		return source, link, errors.New("this host's routes are not known")
	}
	list, err := h.handle.RouteGet(a.AsSlice())
	if err != nil {
		return source, link, err
	}
	if len(list) == 0 {
		return source, link, errors.New("there is none")
	}
	source, _ = netip.AddrFromSlice(list[0].Src)
	if l, err := h.handle.LinkByIndex(list[0].LinkIndex); err == nil {
		link = *l.Attrs()
	}
	return source.Unmap(), link, nil
}

// Bridged reports whether a packet leaves by the interface that it came in by, and that is a bridge that passes its
// packets to netfilter.
func (h *Host) Bridged(iface string, to netip.Addr) bool {
	return h.sameBridge(iface, to) && h.bridgeCallsHooks[ipfamily.Of(to)]
}

// sameBridge reports whether a packet leaves by the bridge that it came in by.
func (h *Host) sameBridge(iface string, to netip.Addr) bool {
	if _, by, ok := h.Route(to); !ok || by != iface {
		return false
	}
	link, err := h.handle.LinkByName(iface)
	return err == nil && link.Type() == "bridge"
}

// NoHairpin returns the port of a bridge that leads to an address, if the bridge sends nothing back to the port that it
// came by; empty if it does, or if that is not known.
func (h *Host) NoHairpin(bridge string, to netip.Addr) string {
	link, err := h.handle.LinkByName(bridge)
	if err != nil {
		return ""
	}
	family := unix.AF_INET
	if to.Is6() {
		family = unix.AF_INET6
	}
	neighbours, _ := h.handle.NeighList(link.Attrs().Index, family)
	i := slices.IndexFunc(neighbours, func(n netlink.Neigh) bool { return n.IP.Equal(to.AsSlice()) })
	if i < 0 {
		return ""
	}
	learned, _ := h.handle.NeighList(0, unix.AF_BRIDGE)
	for _, l := range learned {
		if l.MasterIndex != link.Attrs().Index || !bytes.Equal(l.HardwareAddr, neighbours[i].HardwareAddr) {
			continue
		}
		port, err := h.handle.LinkByIndex(l.LinkIndex)
		if err != nil {
			continue
		}
		if info, err := h.handle.LinkGetProtinfo(port); err == nil && !info.Hairpin {
			return port.Attrs().Name
		}
	}
	return ""
}

// strict reports whether the kernel drops IPv4 packets that come in by a device by which it would not send the answer.
// Of the settings of all devices and of this one, the greater counts.
func strict(iface string) bool {
	const is = "1"
	all, own := sysctl(reversePathOf("all")), sysctl(reversePathOf(iface))
	return max(all, own) == is
}

// reversePathOf is the parameter of a device; the name of a VLAN's device may have dots.
func reversePathOf(iface string) string {
	return "net.ipv4.conf." + strings.ReplaceAll(iface, ".", "/") + ".rp_filter"
}

// refuses asks the kernel whether its reverse path filter drops a packet that comes in by a device.
func (h *Host) refuses(iface string, source, to netip.Addr) bool {
	if source.Is6() || !strict(iface) {
		return false
	}
	if _, by, ok := h.Route(source); !ok || by == iface {
		return false
	}
	_, err := h.handle.RouteGetWithOptions(to.AsSlice(), &netlink.RouteGetOptions{Iif: iface, SrcAddr: source.AsSlice()})
	return errors.Is(err, unix.EXDEV) || errors.Is(err, unix.EINVAL) // since Linux 6.14, the latter
}

// rules reads what other programs wrote into nf_tables and legacy iptables.
func (h *Host) rules() (*packets.Rules, error) {
	if h.others == nil && h.unread == nil {
		h.others, h.unread = packets.ReadOthers(nft.TableName, &packets.Host{Addrs: h.addrs})
	}
	return h.others, h.unread
}
