package takeover

import (
	"errors"
	"fmt"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/ipfamily"
	"github.com/verdict-proxy/verdict/internal/netlink"
)

// Commands and attributes of IPVS: include/uapi/linux/ip_vs.h.
const (
	ipvsDelService = 3
	ipvsGetService = 4
	ipvsGetDest    = 8

	ipvsAttrService = 1
	ipvsAttrDest    = 2

	// Within ipvsAttrService.
	ipvsFamily   = 1
	ipvsProtocol = 2
	ipvsAddr     = 3
	ipvsPort     = 4
	ipvsFwmark   = 5
	ipvsFlags    = 7

	// Within ipvsAttrDest.
	ipvsForward  = 3
	ipvsWeight   = 4
	ipvsActive   = 7
	ipvsInactive = 8

	// ipvsForwardMask has the bits of a destination's flags that say how it forwards; none of them is NAT.
	ipvsForwardMask = 0x7
)

// ipvs is a connection to IPVS.
type ipvs struct {
	conn
	id uint16 // of its family of generic netlink
}

// openIPVS gives false if IPVS is not in this kernel: to ask for it would load it.
func openIPVS() (v ipvs, ok bool, err error) {
	if _, err := os.Stat("/proc/thread-self/net/ip_vs"); err != nil {
		return v, false, nil
	}
	return dialIPVS()
}

// dialIPVS is openIPVS, and loads IPVS if it has to.
func dialIPVS() (v ipvs, ok bool, err error) {
	if v.conn, err = dial(unix.NETLINK_GENERIC); err != nil {
		return v, false, err
	}
	v.id, err = v.Family("IPVS")
	if errors.Is(err, unix.ENOENT) {
		return v, false, v.Close()
	}
	if err != nil {
		return v, false, errors.Join(fmt.Errorf("ipvs: %w", err), v.Close())
	}
	return v, true, nil
}

// command opens a message with a command.
func (v ipvs) command(c byte) opening {
	return func(w *netlink.Buffer, flags uint16) int { return w.Generic(v.id, flags, c) }
}

// services returns all virtual services, without their destinations.
func (v ipvs) services() ([]service, error) {
	objects, err := v.list(v.command(ipvsGetService), nil)
	if err != nil {
		return nil, fmt.Errorf("ipvs: list services: %w", err)
	}
	var list []service
	for _, o := range objects {
		list = append(list, parseService(netlink.Decode(o[netlink.GenericLen:]).Nested(ipvsAttrService)))
	}
	return list, nil
}

func parseService(a netlink.Attributes) service {
	s := service{protocol: a[ipvsProtocol].Native16(), port: a[ipvsPort].Big16(), fwmark: a[ipvsFwmark].Native32(),
		flags: a[ipvsFlags].Native32()}
	if v := a[ipvsAddr]; len(v) == 16 {
		if a[ipvsFamily].Native16() == unix.AF_INET {
			v = v[:4]
		}
		s.addr, _ = netip.AddrFromSlice(v)
	}
	return s
}

// key encodes the key of a virtual service.
func (s *service) key(w *netlink.Buffer) {
	m := w.Nest(ipvsAttrService)
	w.Native16(ipvsFamily, uint16(ipfamily.Of(s.addr).NFProto()))
	w.Native16(ipvsProtocol, s.protocol)
	addr := s.addr.AsSlice()
	w.Attr(ipvsAddr, append(addr, make([]byte, 16-len(addr))...)...)
	w.Big16(ipvsPort, s.port)
	w.Close(m)
}

// readDestinations reads the destinations of a virtual service. It is no error if it is gone.
func (v ipvs) readDestinations(s *service) error {
	objects, err := v.list(v.command(ipvsGetDest), s.key)
	if err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("ipvs: list destinations of %s: %w", s, err)
	}
	s.connections, s.foreignDest = 0, false
	for _, o := range objects {
		d := netlink.Decode(o[netlink.GenericLen:]).Nested(ipvsAttrDest)
		s.connections += int(d[ipvsActive].Native32() + d[ipvsInactive].Native32())
		s.foreignDest = s.foreignDest || d[ipvsForward].Native32()&ipvsForwardMask != 0 || int32(d[ipvsWeight].Native32()) > 1
	}
	return nil
}

// remove deletes a virtual service. It is no error if it is gone.
func (v ipvs) remove(s *service) error {
	if err := v.do(v.command(ipvsDelService), s.key); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("ipvs: delete service %s: %w", s, err)
	}
	return nil
}
