package takeover

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"
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
	*socket
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
	if v.socket, err = openSocket(unix.NETLINK_GENERIC); err != nil {
		return v, false, err
	}
	objects, err := v.do(unix.GENL_ID_CTRL, []byte{unix.CTRL_CMD_GETFAMILY, 1, 0, 0}, func(w *buffer) {
		w.text(unix.CTRL_ATTR_FAMILY_NAME, "IPVS")
	})
	for _, o := range objects {
		v.id = uint16(parseAttributes(o[genlLen:]).native(unix.CTRL_ATTR_FAMILY_ID))
	}
	if errors.Is(err, unix.ENOENT) {
		return v, false, v.close()
	}
	if err != nil {
		return v, false, errors.Join(fmt.Errorf("ipvs: %w", err), v.close())
	}
	return v, true, nil
}

// genlLen is the length of the header of a message of generic netlink.
const genlLen = 4

func ipvsHeader(command byte) []byte { return []byte{command, 1, 0, 0} }

// services gives all virtual services, without their destinations.
func (v ipvs) services() ([]service, error) {
	objects, err := v.list(v.id, ipvsHeader(ipvsGetService), nil)
	if err != nil {
		return nil, fmt.Errorf("ipvs: list services: %w", err)
	}
	var list []service
	for _, o := range objects {
		list = append(list, parseService(parseAttributes(o[genlLen:]).nested(ipvsAttrService)))
	}
	return list, nil
}

func parseService(a attributes) service {
	s := service{protocol: uint16(a.native(ipvsProtocol)), port: uint16(a.big(ipvsPort)), fwmark: a.native(ipvsFwmark)}
	if v := a[ipvsAddr]; len(v) == 16 {
		if a.native(ipvsFamily) == unix.AF_INET {
			v = v[:4]
		}
		s.addr, _ = netip.AddrFromSlice(v)
	}
	if v := a[ipvsFlags]; len(v) >= 4 {
		s.flags = binary.NativeEndian.Uint32(v)
	}
	return s
}

// key writes what names a virtual service.
func (s *service) key(w *buffer) {
	af, addr := uint16(unix.AF_INET6), s.addr.AsSlice()
	if s.addr.Is4() {
		af = unix.AF_INET
	}
	m := w.nest(ipvsAttrService | unix.NLA_F_NESTED)
	w.attr(ipvsFamily, native16(af)...)
	w.attr(ipvsProtocol, native16(s.protocol)...)
	w.attr(ipvsAddr, append(addr, make([]byte, 16-len(addr))...)...)
	w.attr(ipvsPort, big16(s.port)...)
	w.close(m)
}

// look reads the destinations of a virtual service. That it is gone is no error.
func (v ipvs) look(s *service) error {
	objects, err := v.list(v.id, ipvsHeader(ipvsGetDest), s.key)
	if err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("ipvs: list destinations of %s: %w", s, err)
	}
	s.connections, s.odd = 0, false
	for _, o := range objects {
		d := parseAttributes(o[genlLen:]).nested(ipvsAttrDest)
		s.connections += int(d.native(ipvsActive) + d.native(ipvsInactive))
		s.odd = s.odd || d.native(ipvsForward)&ipvsForwardMask != 0 || int32(d.native(ipvsWeight)) > 1
	}
	return nil
}

// remove deletes a virtual service. That it is gone is no error.
func (v ipvs) remove(s *service) error {
	if _, err := v.do(v.id, ipvsHeader(ipvsDelService), s.key); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("ipvs: delete service %s: %w", s, err)
	}
	return nil
}
