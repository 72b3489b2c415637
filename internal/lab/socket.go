package lab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// DialContext connects from inside the host like net.Dialer.DialContext, for network tcp or udp and an address without
// names. It fits http.Transport. The caller closes the connection.
func (h *Host) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	to, err := netip.ParseAddrPort(address)
	if err != nil {
		return nil, &net.OpError{Op: "dial", Net: network, Err: err}
	}
	var p snapshot.Protocol
	switch network {
	case "tcp", "tcp4", "tcp6":
		p = snapshot.TCP
	case "udp", "udp4", "udp6":
		p = snapshot.UDP
	default:
		return nil, &net.OpError{Op: "dial", Net: network, Err: net.UnknownNetworkError(network)}
	}
	return h.connect(ctx, p, netip.AddrPort{}, to)
}

// Listen announces inside the host like net.Listen; the address has no names in it. The caller closes the listener.
func (h *Host) Listen(network, address string) (l net.Listener, err error) {
	if e := h.onThread(func() { l, err = net.Listen(network, address) }); e != nil {
		return nil, e
	}
	return l, err
}

// ListenPacket announces inside the host like net.ListenPacket. The caller closes the connection.
func (h *Host) ListenPacket(network, address string) (c net.PacketConn, err error) {
	if e := h.onThread(func() { c, err = net.ListenPacket(network, address) }); e != nil {
		return nil, e
	}
	return c, err
}

// connect makes a socket inside the host and connects it from the calling goroutine: only the first needs the host's
// thread, so that any number of connections can wait for their answer. An invalid from leaves the choice to the kernel.
// If the socket was made, an error is a *net.OpError whose Source is what the kernel chose.
func (h *Host) connect(ctx context.Context, p snapshot.Protocol, from, to netip.AddrPort) (net.Conn, error) {
	to = unmap(to)
	fd, err := h.socket(p, ipfamily.Of(to.Addr()))
	if err != nil {
		return nil, err
	}
	if err := h.prepare(fd, p, from, to); err != nil {
		unix.Close(fd)
		return nil, err
	}
	err = unix.Connect(fd, sockaddr(to))
	source := localAddr(fd)
	f := os.NewFile(uintptr(fd), "socket") // from here on the runtime's poller waits for it
	defer f.Close()
	if err == unix.EINPROGRESS {
		err = waitConnected(ctx, f)
	}
	if err != nil {
		return nil, &net.OpError{Op: "dial", Net: p.String(), Source: source, Addr: net.TCPAddrFromAddrPort(to),
			Err: os.NewSyscallError("connect", err)}
	}
	return net.FileConn(f)
}

// localAddr returns the address that a socket has; nil if it has none.
func localAddr(fd int) net.Addr {
	switch a, _ := unix.Getsockname(fd); a := a.(type) {
	case *unix.SockaddrInet4:
		return &net.TCPAddr{IP: a.Addr[:], Port: a.Port}
	case *unix.SockaddrInet6:
		return &net.TCPAddr{IP: a.Addr[:], Port: a.Port}
	}
	return nil
}

// socket makes a socket without blocking reads inside the host.
func (h *Host) socket(p snapshot.Protocol, f ipfamily.Family) (fd int, err error) {
	domain, kind := unix.AF_INET, unix.SOCK_STREAM
	if f == ipfamily.IPv6 {
		domain = unix.AF_INET6
	}
	if p == snapshot.UDP {
		kind = unix.SOCK_DGRAM
	}
	e := h.onThread(func() { fd, err = unix.Socket(domain, kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, int(p)) })
	if e != nil {
		return -1, e
	}
	return fd, os.NewSyscallError("socket", err)
}

// prepare binds a socket and lets it hear of all ICMP errors: without RECVERR, UDP and SCTP are only told of those that
// nobody can mend.
func (h *Host) prepare(fd int, p snapshot.Protocol, from, to netip.AddrPort) error {
	if p != snapshot.TCP {
		level, option := recvErr(ipfamily.Of(to.Addr()))
		if err := unix.SetsockoptInt(fd, level, option, 1); err != nil {
			return os.NewSyscallError("setsockopt RECVERR", err)
		}
	}
	switch {
	case p != snapshot.TCP && from.Port() == 0:
		return h.bindNext(fd, from.Addr(), to)
	case !from.IsValid():
		return nil
	case p == snapshot.TCP:
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
			return os.NewSyscallError("setsockopt SO_REUSEADDR", err)
		}
	}
	if err := unix.Bind(fd, sockaddr(unmap(from))); err != nil {
		return fmt.Errorf("bind to %s: %w", from, err)
	}
	return nil
}

// recvErr is the option that makes a socket hear of ICMP errors, with the packets that caused them.
func recvErr(f ipfamily.Family) (level, option int) {
	if f == ipfamily.IPv4 {
		return unix.SOL_IP, unix.IP_RECVERR
	}
	return unix.SOL_IPV6, unix.IPV6_RECVERR
}

// bindNext binds a socket to the port whose turn it is. The kernel would choose at random, now and then a port of
// which conntrack still remembers what used to be done with its packets.
func (h *Host) bindNext(fd int, from netip.Addr, to netip.AddrPort) error {
	if from = from.Unmap(); !from.IsValid() {
		from = netip.IPv4Unspecified()
		if to.Addr().Is6() {
			from = netip.IPv6Unspecified()
		}
	}
	if from.Is6() { // keep it from taking the port of IPv4, too
		if err := unix.SetsockoptInt(fd, unix.SOL_IPV6, unix.IPV6_V6ONLY, 1); err != nil {
			return os.NewSyscallError("setsockopt IPV6_V6ONLY", err)
		}
	}
	var err error
	for range clientPorts {
		a := netip.AddrPortFrom(from, h.ports.next())
		if err = unix.Bind(fd, sockaddr(a)); err != unix.EADDRINUSE {
			if err != nil {
				return fmt.Errorf("bind to %s: %w", a, err)
			}
			return nil
		}
	}
	return os.NewSyscallError("bind", err)
}

// portCounter gives ports to clients one after the other, so that none comes again soon.
type portCounter struct{ n atomic.Uint32 }

// The ports clients get, like those of net.ipv4.ip_local_port_range.
const (
	firstClientPort = 32768
	clientPorts     = 28232
)

func (c *portCounter) next() uint16 { return uint16(firstClientPort + (c.n.Add(1)-1)%clientPorts) }

// waitConnected waits until a socket is connected, refused, or out of time.
func waitConnected(ctx context.Context, f *os.File) error {
	conn, err := f.SyscallConn()
	if err != nil {
		return err
	}
	defer context.AfterFunc(ctx, func() { _ = f.SetWriteDeadline(time.Unix(1, 0)) })()
	var failed error
	err = conn.Write(func(fd uintptr) bool {
		errno, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR)
		if err != nil || errno != 0 {
			failed = errors.Join(err, syscall.Errno(errno))
			return true
		}
		_, err = unix.Getpeername(int(fd))
		return err == nil // otherwise the poller woke us too early
	})
	if err != nil && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return errors.Join(err, failed)
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}

func unmap(a netip.AddrPort) netip.AddrPort { return netip.AddrPortFrom(a.Addr().Unmap(), a.Port()) }

// sourceMessage is the control message that makes a datagram leave with a given source address.
func sourceMessage(a netip.Addr) []byte {
	if a.Is4() {
		return unix.PktInfo4(&unix.Inet4Pktinfo{Spec_dst: a.As4()})
	}
	return unix.PktInfo6(&unix.Inet6Pktinfo{Addr: a.As16()})
}

// destination finds the address a datagram was sent to in the control messages that came with it.
func destination(oob []byte) netip.Addr {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return netip.Addr{}
	}
	for _, m := range messages {
		switch {
		case m.Header.Level == unix.SOL_IP && m.Header.Type == unix.IP_PKTINFO && len(m.Data) >= 12:
			return netip.AddrFrom4([4]byte(m.Data[8:12])) // in_pktinfo: interface, local address, header destination
		case m.Header.Level == unix.SOL_IPV6 && m.Header.Type == unix.IPV6_PKTINFO && len(m.Data) >= 16:
			return netip.AddrFrom16([16]byte(m.Data[:16]))
		}
	}
	return netip.Addr{}
}

// receiveDestinations asks for what destination reads.
func receiveDestinations(c syscall.Conn, f ipfamily.Family) error {
	level, option := unix.SOL_IP, unix.IP_PKTINFO
	if f == ipfamily.IPv6 {
		level, option = unix.SOL_IPV6, unix.IPV6_RECVPKTINFO
	}
	return setOption(c, level, option, 1)
}

func setOption(c syscall.Conn, level, option, value int) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var set error
	if err := raw.Control(func(fd uintptr) { set = unix.SetsockoptInt(int(fd), level, option, value) }); err != nil {
		return err
	}
	return os.NewSyscallError("setsockopt", set)
}
