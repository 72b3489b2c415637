package lab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// DialContext connects from inside the host like net.Dialer.DialContext, for network tcp or udp and an address without names.
// It fits http.Transport. The caller closes the connection.
func (h *Host) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	to, err := netip.ParseAddrPort(address)
	if err != nil {
		return nil, &net.OpError{Op: "dial", Net: network, Err: err}
	}
	var kind int
	switch network {
	case "tcp", "tcp4", "tcp6":
		kind = unix.SOCK_STREAM
	case "udp", "udp4", "udp6":
		kind = unix.SOCK_DGRAM
	default:
		return nil, &net.OpError{Op: "dial", Net: network, Err: net.UnknownNetworkError(network)}
	}
	c, err := h.connect(ctx, kind, netip.AddrPort{}, to)
	if err != nil {
		return nil, &net.OpError{Op: "dial", Net: network, Addr: net.TCPAddrFromAddrPort(to), Err: err}
	}
	return c, nil
}

// Listen announces inside the host like net.Listen; the address has no names in it. The caller closes the listener.
func (h *Host) Listen(network, address string) (l net.Listener, err error) {
	if e := h.inside(func() { l, err = net.Listen(network, address) }); e != nil {
		return nil, e
	}
	return l, err
}

// ListenPacket announces inside the host like net.ListenPacket. The caller closes the connection.
func (h *Host) ListenPacket(network, address string) (c net.PacketConn, err error) {
	if e := h.inside(func() { c, err = net.ListenPacket(network, address) }); e != nil {
		return nil, e
	}
	return c, err
}

// connect makes a socket inside the host and connects it from the calling goroutine: only the first needs the host's thread,
// so that any number of connections can wait for their answer. An invalid from leaves the choice to the kernel.
func (h *Host) connect(ctx context.Context, kind int, from, to netip.AddrPort) (net.Conn, error) {
	to = unmap(to)
	fd, err := h.socket(to.Addr(), kind)
	if err != nil {
		return nil, err
	}
	if err := prepare(fd, kind, from, to); err != nil {
		unix.Close(fd)
		return nil, err
	}
	err = unix.Connect(fd, sockaddr(to))
	f := os.NewFile(uintptr(fd), "socket") // from here on the runtime's poller waits for it
	defer f.Close()
	if err == unix.EINPROGRESS {
		err = waitConnected(ctx, f)
	}
	if err != nil {
		return nil, os.NewSyscallError("connect", err)
	}
	return net.FileConn(f)
}

// socket makes a socket without blocking reads inside the host.
func (h *Host) socket(to netip.Addr, kind int) (fd int, err error) {
	domain := unix.AF_INET
	if to.Is6() {
		domain = unix.AF_INET6
	}
	if e := h.inside(func() { fd, err = unix.Socket(domain, kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0) }); e != nil {
		return -1, e
	}
	return fd, os.NewSyscallError("socket", err)
}

// prepare binds a socket and lets it hear of all ICMP errors: without RECVERR, UDP is only told of ports and protocols
// that nobody serves, not of hosts out of reach.
func prepare(fd, kind int, from, to netip.AddrPort) error {
	if kind == unix.SOCK_DGRAM {
		level, option := unix.SOL_IP, unix.IP_RECVERR
		if to.Addr().Is6() {
			level, option = unix.SOL_IPV6, unix.IPV6_RECVERR
		}
		if err := unix.SetsockoptInt(fd, level, option, 1); err != nil {
			return os.NewSyscallError("setsockopt RECVERR", err)
		}
	}
	if !from.IsValid() {
		return nil
	}
	if kind == unix.SOCK_STREAM {
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
			return os.NewSyscallError("setsockopt SO_REUSEADDR", err)
		}
	}
	if err := unix.Bind(fd, sockaddr(unmap(from))); err != nil {
		return fmt.Errorf("bind to %s: %w", from, err)
	}
	return nil
}

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
func receiveDestinations(c syscall.Conn, f Family) error {
	level, option := unix.SOL_IP, unix.IP_PKTINFO
	if f == IPv6 {
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
