package conntrack

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/netlink"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// connEnd is one end of a TCP connection: where it is, and whom it takes for its other end.
type connEnd struct{ at, peer netip.AddrPort }

// clientEnd is the client's end of a flow.
func (f *flow) clientEnd() connEnd {
	return connEnd{at: f.client, peer: netip.AddrPortFrom(f.frontend.Addr, f.frontend.Port)}
}

// endpointEnd is the endpoint's end.
func (f *flow) endpointEnd() connEnd { return connEnd{at: f.endpoint, peer: f.masquerade} }

// Attributes of linux/netfilter/nfnetlink_conntrack.h that only this file writes.
const (
	ctaNATSrc = 6

	messageCreate = unix.NFNL_SUBSYS_CTNETLINK << 8
	// tcpBeLiberal is IP_CT_TCP_FLAG_BE_LIBERAL of linux/netfilter/nf_conntrack_tcp.h.
	tcpBeLiberal = 0x08
	// statusConfirmed is IPS_CONFIRMED of linux/netfilter/nf_conntrack_common.h.
	statusConfirmed = 1 << 3
	// resetTimeout is in how many seconds the kernel forgets a reset's entry that nobody deletes.
	resetTimeout = 5
)

// maxResets bounds how many ends are reset at a time: each takes a socket.
const maxResets = 64

// resets is a few ends that are being reset.
type resets struct {
	*Conn
	// sources are the addresses that this node uses towards others.
	sources map[netip.Addr]netip.Addr
	list    []resetting
}

// resetting is an end with the socket that asks it.
type resetting struct {
	connEnd
	from netip.AddrPort
	fd   int
}

// reset has the ends of connections reset, though nobody here knows their sequence numbers. A SYN in the peer's name
// makes an end say them (RFC 9293, 3.10.7.4). This node's TCP, which knows no such connection, then takes it for a
// half-open one, and resets it with these numbers (3.5.1). The SYN comes from a socket of this node, to which an entry
// in the table gives the peer's name, as masquerade would. The flow of the connection itself must be deleted before.
//
// The entries are deleted at once: a client may begin a new connection from the same port. An end that answers later
// sends a packet of a connection that is unknown to whoever gets it, and is reset by him. One that has begun a new flow
// meanwhile is left alone.
func (c *Conn) reset(ends []connEnd) (err error) {
	r := &resets{Conn: c, sources: map[netip.Addr]netip.Addr{}}
	for part := range slices.Chunk(ends, maxResets) {
		err = cmp.Or(err, r.few(part))
	}
	if err != nil {
		return fmt.Errorf("reset connections: %w", err)
	}
	return nil
}

func (r *resets) few(ends []connEnd) (err error) {
	r.list = r.list[:0]
	for _, e := range ends {
		s, failed := r.open(e)
		if err = cmp.Or(err, failed); failed == nil {
			r.list = append(r.list, s)
		}
	}
	refused, failed := r.commit((*resetting).writeEntry)
	skip := map[int]bool{}
	for i := range refused {
		skip[int(refused[i].Seq)-1] = true
		if refused[i].Errno != unix.EEXIST {
			err = cmp.Or(err, error(&refused[i]))
		}
	}
	for i, e := range r.list {
		if failed == nil && !skip[i] {
			_ = unix.Connect(e.fd, sockaddr(e.at)) // is in progress, or has failed by now
		}
		_ = unix.SetsockoptLinger(e.fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
		_ = unix.Close(e.fd) // sends nothing, unless somebody else has accepted the connection
	}
	if failed == nil {
		_, failed = r.commit((*resetting).writeDelete) // those that were refused are not there
	}
	return cmp.Or(err, failed)
}

// commit sends a message for each end.
func (r *resets) commit(write func(*resetting, *netlink.Buffer)) ([]netlink.Error, error) {
	if len(r.list) == 0 {
		return nil, nil
	}
	r.out.Reset()
	for i := range r.list {
		write(&r.list[i], &r.out)
	}
	return r.deletes.Commit(r.out.Bytes())
}

// open opens the socket for an end.
func (r *resets) open(e connEnd) (s resetting, err error) {
	s = resetting{connEnd: e}
	source := r.sources[e.at.Addr()]
	if !source.IsValid() {
		if source, err = r.source(e.at); err != nil {
			return s, err
		}
		r.sources[e.at.Addr()] = source
	}
	s.fd, err = unix.Socket(family(source), unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	if err != nil {
		return s, err
	}
	if err = unix.Bind(s.fd, sockaddr(netip.AddrPortFrom(source, 0))); err == nil {
		s.from, err = bound(s.fd)
	}
	if err != nil {
		_ = unix.Close(s.fd)
	}
	return s, err
}

// source returns the address that this node uses towards another one.
func (r *resets) source(to netip.AddrPort) (netip.Addr, error) {
	fd, err := unix.Socket(family(to.Addr()), unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return netip.Addr{}, err
	}
	defer func() { _ = unix.Close(fd) }()
	if err := unix.Connect(fd, sockaddr(to)); err != nil {
		return netip.Addr{}, err
	}
	from, err := bound(fd)
	return from.Addr(), err
}

func family(a netip.Addr) int { return int(ipfamily.Of(a).NFProto()) }

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}

// bound returns the address of a socket.
func bound(fd int) (netip.AddrPort, error) {
	switch a, err := unix.Getsockname(fd); a := a.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(a.Addr), uint16(a.Port)), err
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(a.Addr), uint16(a.Port)), err
	default:
		return netip.AddrPort{}, err
	}
}

// writeEntry writes the request for an entry that gives the socket the peer's name.
func (s *resetting) writeEntry(w *netlink.Buffer) {
	m := w.Netfilter(messageCreate, unix.NLM_F_CREATE|unix.NLM_F_EXCL, ipfamily.Of(s.at.Addr()).NFProto())
	writeTuple(w, ctaTupleOrig, snapshot.TCP, s.from, s.at)
	writeTuple(w, ctaTupleReply, snapshot.TCP, s.at, s.from)
	writeNAT(w, ctaNATSrc, s.peer)
	w.Big32(ctaTimeout, resetTimeout)
	w.Big32(ctaStatus, statusSeenReply|statusAssured|statusConfirmed)
	info, tcp := w.Nest(ctaProtoInfo), w.Nest(ctaProtoInfoTCP)
	w.Attr(ctaProtoInfoTCPState, tcpEstablished)
	for _, flags := range []uint16{ctaProtoInfoTCPFlagsOriginal, ctaProtoInfoTCPFlagsReply} {
		w.Attr(flags, tcpBeLiberal, tcpBeLiberal) // flags, then a mask
	}
	w.Close(tcp)
	w.Close(info)
	w.End(m)
}

func (s *resetting) writeDelete(w *netlink.Buffer) {
	m := w.Netfilter(messageDelete, 0, ipfamily.Of(s.at.Addr()).NFProto())
	writeTuple(w, ctaTupleOrig, snapshot.TCP, s.from, s.at)
	w.End(m)
}
