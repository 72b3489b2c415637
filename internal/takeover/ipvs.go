package takeover

import (
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/ipfamily"
)

// service is a virtual service of IPVS.
type service struct {
	addr     netip.Addr
	port     uint16
	protocol uint16
	// fwmark, if not 0, stands in place of the three before.
	fwmark uint32
	flags  uint32
	// connections are those that IPVS remembers, closed ones included, which it does for two minutes.
	connections int
	// odd says that a destination is none that kube-proxy makes: it forwards by another way than NAT, or has a weight above 1.
	odd bool
}

func (s *service) String() string {
	protocol := map[uint16]string{unix.IPPROTO_TCP: "tcp", unix.IPPROTO_UDP: "udp", unix.IPPROTO_SCTP: "sctp"}[s.protocol]
	return fmt.Sprintf("%s %s", netip.AddrPortFrom(s.addr, s.port), protocol)
}

// The flags that kube-proxy sets or gets: persistent, hashed (set by the kernel), and for the scheduler mh that it looks at ports.
const proxyFlags = 0x1 | 0x2 | 0x10

// frontends are what kube-proxy left that tells which virtual services are its own.
type frontends struct {
	// bound are the addresses on kube-ipvs0; local are the others of this host.
	bound, local map[netip.Addr]bool
	// ports are node ports by family and protocol; addressed are members of its sets of addresses and ports.
	ports     map[ipfamily.Family]map[member]bool
	addressed map[member]bool
}

// take adds the members of a set.
func (f *frontends) take(s set, members []member) {
	protocol := map[string]uint16{
		"KUBE-NODE-PORT-TCP": unix.IPPROTO_TCP, "KUBE-NODE-PORT-LOCAL-TCP": unix.IPPROTO_TCP,
		"KUBE-NODE-PORT-UDP": unix.IPPROTO_UDP, "KUBE-NODE-PORT-LOCAL-UDP": unix.IPPROTO_UDP,
	}[s.base]
	for _, m := range members {
		switch {
		case protocol != 0:
			f.ports[s.family][member{port: m.port, protocol: protocol}] = true
		case m.addr.IsValid():
			f.addressed[m] = true
		}
	}
}

// membersTell are the sets that say something about virtual services.
var membersTell = map[string]bool{
	"KUBE-CLUSTER-IP": true, "KUBE-EXTERNAL-IP": true, "KUBE-EXTERNAL-IP-LOCAL": true, "KUBE-LOAD-BALANCER": true,
	"KUBE-NODE-PORT-TCP": true, "KUBE-NODE-PORT-LOCAL-TCP": true, "KUBE-NODE-PORT-UDP": true, "KUBE-NODE-PORT-LOCAL-UDP": true,
	"KUBE-NODE-PORT-SCTP-HASH": true, "KUBE-NODE-PORT-LOCAL-SCTP-HASH": true,
}

// made says whether kube-proxy made a virtual service: its address is on kube-ipvs0, or its sets name it, and it looks like one.
func (f *frontends) made(s *service) bool {
	if s.fwmark != 0 || s.flags&^proxyFlags != 0 || s.odd {
		return false
	}
	return f.bound[s.addr] || f.addressed[member{s.addr, s.port, s.protocol}] ||
		f.local[s.addr] && f.ports[ipfamily.Of(s.addr)][member{port: s.port, protocol: s.protocol}]
}
