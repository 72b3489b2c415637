package lab

import (
	"errors"
	"net/netip"
)

// Attachment describes how a host is wired to its gateway, as a pod is to its node.
type Attachment struct {
	// Link is the gateway's end of the link. The host's own end is eth0.
	Link string
	// Bridge is a bridge of the gateway that Link becomes a port of, and that has the addresses of Gateways. Empty means
	// that there is none: Link gets these addresses, and the gateway a route to the host.
	Bridge string
	// Addrs are the host's addresses, Gateways those of the gateway: as many, in the same order of families.
	Addrs, Gateways []netip.Addr
}

// Attach wires a host to a gateway, its only neighbour and default route. The addresses are usable after WaitReady of
// both.
func (h *Host) Attach(gateway *Host, a Attachment) error {
	if err := Link(End{h, "eth0"}, End{gateway, a.Link}, LinkOptions{}); err != nil {
		return err
	}
	if a.Bridge != "" {
		if err := gateway.AddPort(a.Bridge, a.Link); err != nil {
			return err
		}
	}
	for i, addr := range a.Addrs {
		own, via := hostRange(addr), a.Gateways[i]
		err := errors.Join(h.addAddr("eth0", own), h.AddRoute(Route{To: defaultRange(addr), Via: via, Link: "eth0"}))
		if a.Bridge == "" {
			err = errors.Join(err, gateway.addAddr(a.Link, hostRange(via)), gateway.AddRoute(Route{To: own, Link: a.Link}))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// defaultRange returns the range of all addresses of a family.
func defaultRange(a netip.Addr) netip.Prefix {
	if a.Is4() {
		return everywhere[0]
	}
	return everywhere[1]
}
