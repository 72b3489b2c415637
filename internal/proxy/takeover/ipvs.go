package takeover

import (
	"net/netip"

	"github.com/moby/ipvs"
	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/ipvshandle"
)

// service is an IPVS virtual service.
type service struct {
	*ipvs.Service
	// connections counts what IPVS remembers, including closed ones for two minutes.
	connections int
	// foreignDest says that kube-proxy did not make one of the destinations: it forwards by another method than NAT, or
	// has a weight above 1.
	foreignDest bool
}

// at is where it serves; invalid if a firewall mark names it.
func (s *service) at() netip.AddrPort { return ipvshandle.AddrPort(s.Address, s.Port) }

// The flags that kube-proxy sets or gets: persistent, hashed (set by the kernel), and for the scheduler mh that it
// hashes ports.
const proxyFlags = 0x1 | 0x2 | 0x10

// proxyState is what kube-proxy left that identifies its virtual services.
type proxyState struct {
	// dummyAddrs are the addresses on kube-ipvs0; hostAddrs are the others of this host.
	dummyAddrs, hostAddrs map[netip.Addr]bool
	// nodePorts are node ports by family and protocol; addrPorts are members of its sets of addresses and ports.
	nodePorts map[ipfamily.Family]map[member]bool
	addrPorts map[member]bool
}

// addMembers adds the members of a set.
func (f *proxyState) addMembers(s set, members []member) {
	protocol := map[string]uint16{
		"KUBE-NODE-PORT-TCP": unix.IPPROTO_TCP, "KUBE-NODE-PORT-LOCAL-TCP": unix.IPPROTO_TCP,
		"KUBE-NODE-PORT-UDP": unix.IPPROTO_UDP, "KUBE-NODE-PORT-LOCAL-UDP": unix.IPPROTO_UDP,
	}[s.base]
	for _, m := range members {
		switch {
		case protocol != 0:
			f.nodePorts[s.family][member{port: m.port, protocol: protocol}] = true
		case m.addr.IsValid():
			f.addrPorts[m] = true
		}
	}
}

// serviceSets are the sets whose members identify virtual services.
var serviceSets = map[string]bool{
	"KUBE-CLUSTER-IP": true, "KUBE-EXTERNAL-IP": true, "KUBE-EXTERNAL-IP-LOCAL": true, "KUBE-LOAD-BALANCER": true,
	"KUBE-NODE-PORT-TCP": true, "KUBE-NODE-PORT-LOCAL-TCP": true, "KUBE-NODE-PORT-UDP": true,
	"KUBE-NODE-PORT-LOCAL-UDP": true,
	"KUBE-NODE-PORT-SCTP-HASH": true, "KUBE-NODE-PORT-LOCAL-SCTP-HASH": true,
}

// isProxyService says whether kube-proxy made a virtual service: its address is on kube-ipvs0, or kube-proxy's sets
// name it, and it looks like one of kube-proxy's.
func (f *proxyState) isProxyService(s *service) bool {
	if s.FWMark != 0 || s.Flags&^proxyFlags != 0 || s.foreignDest {
		return false
	}
	at := s.at()
	return f.dummyAddrs[at.Addr()] || f.addrPorts[member{at.Addr(), s.Port, s.Protocol}] ||
		f.hostAddrs[at.Addr()] && f.nodePorts[ipfamily.Of(at.Addr())][member{port: s.Port, protocol: s.Protocol}]
}
