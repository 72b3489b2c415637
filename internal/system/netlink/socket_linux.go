package netlink

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"syscall"
	"time"

	"github.com/mdlayher/netlink"
	"github.com/mdlayher/socket"
	"golang.org/x/sys/unix"
)

// Wire carries datagrams to the kernel and back. A Socket is one; tests put faults in between.
type Wire interface {
	// Send sends one datagram. The kernel processes all of it before Send returns.
	Send(b []byte) error
	// Recv reads one datagram and returns its length, which is larger than b if it did not fit. If there is none it
	// waits for some time, or fails with EAGAIN.
	Recv(b []byte, wait bool) (int, error)
	// Room asks for a send buffer of n bytes, and returns the size that the socket has then.
	Room(n int) (int, error)
	// Port returns the socket's address, by which the kernel knows the owner of a table.
	Port() (uint32, error)
	Close() error
}

// Socket is a netlink socket that receives messages of the kernel only.
type Socket struct {
	base
	raw syscall.RawConn
	// patience is how long Recv waits.
	patience time.Duration
}

// patience is far more than the kernel takes, which answers before a request is sent. Only if an answer got lost
// there is none.
const patience = 10 * time.Second

// base is what a socket that was opened and one that was inherited have in common: a Conn of the netlink library and
// one of the socket library.
type base interface {
	Close() error
	SyscallConn() (syscall.RawConn, error)
	SetReadDeadline(t time.Time) error
	SetReadBuffer(bytes int) error
	SetWriteBuffer(bytes int) error
	WriteBuffer() (int, error)
}

// Open opens a socket of a netlink protocol, such as NETLINK_NETFILTER, in the network namespace that a file
// descriptor stands for; 0 is that of the calling thread.
func Open(protocol, netns int) (*Socket, error) {
	if netns == 0 || ownNamespace(netns) {
		return open(protocol)
	}
	type result struct {
		s   *Socket
		err error
	}
	opened := make(chan result)
	go func() {
		// Nobody unlocks the thread, so it ends with this goroutine. The library would switch it back, which may take
		// rights that entering the other namespace does not.
		runtime.LockOSThread()
		if err := unix.Setns(netns, unix.CLONE_NEWNET); err != nil {
			opened <- result{nil, fmt.Errorf("netlink: open socket: %w", os.NewSyscallError("setns", err))}
			return
		}
		s, err := open(protocol)
		opened <- result{s, err}
	}()
	r := <-opened
	return r.s, r.err
}

// ownNamespace says whether the calling thread is in a network namespace already. Entering one, even that one, takes
// CAP_SYS_ADMIN, which a proxy does not need otherwise.
func ownNamespace(netns int) bool {
	var own, other unix.Stat_t
	return unix.Stat("/proc/thread-self/ns/net", &own) == nil && unix.Fstat(netns, &other) == nil &&
		own.Ino == other.Ino && own.Dev == other.Dev
}

func open(protocol int) (*Socket, error) {
	c, err := netlink.Dial(protocol, nil)
	if err != nil {
		return nil, fmt.Errorf("netlink: open socket: %w", err)
	}
	options := []netlink.ConnOption{netlink.ExtendedAcknowledge, netlink.CapAcknowledge}
	if protocol == unix.NETLINK_ROUTE { // so that the kernel filters lists
		options = append(options, netlink.GetStrictCheck)
	}
	for _, o := range options {
		if err := c.SetOption(o, true); err != nil {
			return nil, errors.Join(fmt.Errorf("netlink: socket option: %w", err), c.Close())
		}
	}
	return connect(c)
}

// Inherit uses a socket that Open made, perhaps in another process. The file stays the caller's.
func Inherit(f *os.File, protocol int) (*Socket, error) {
	c, err := socket.FileConn(f, "netlink")
	if err != nil {
		return nil, fmt.Errorf("netlink: inherited socket: %w", err)
	}
	domain, err := c.GetsockoptInt(unix.SOL_SOCKET, unix.SO_DOMAIN)
	got, perr := c.GetsockoptInt(unix.SOL_SOCKET, unix.SO_PROTOCOL)
	if err != nil || perr != nil || domain != unix.AF_NETLINK || got != protocol {
		err := fmt.Errorf("netlink: inherited socket: it is no netlink socket of protocol %d", protocol)
		return nil, errors.Join(err, c.Close())
	}
	return connect(c)
}

// connect connects a socket to the kernel: then it gets no message of another process, such as one for the process
// that had its port before.
func connect(b base) (*Socket, error) {
	raw, err := b.SyscallConn()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("netlink: socket: %w", err), b.Close())
	}
	var cerr error
	err = raw.Control(func(fd uintptr) { cerr = unix.Connect(int(fd), &unix.SockaddrNetlink{Family: unix.AF_NETLINK}) })
	if err := errors.Join(err, cerr); err != nil {
		return nil, errors.Join(fmt.Errorf("netlink: connect socket: %w", err), b.Close())
	}
	return &Socket{b, raw, patience}, nil
}

// File returns a descriptor of its own for the socket, for Inherit.
func (s *Socket) File() (*os.File, error) {
	var dup int
	var derr error
	err := s.raw.Control(func(fd uintptr) { dup, derr = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 3) })
	if err := errors.Join(err, derr); err != nil {
		return nil, fmt.Errorf("netlink: duplicate socket: %w", err)
	}
	return os.NewFile(uintptr(dup), "netlink"), nil
}

// Send is Wire's.
func (s *Socket) Send(b []byte) error {
	var serr error
	err := s.raw.Write(func(fd uintptr) bool {
		serr = unix.Sendto(int(fd), b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
		return serr != unix.EAGAIN
	})
	return errors.Join(err, serr)
}

// Recv is Wire's. It fails with os.ErrDeadlineExceeded if nothing comes for ten seconds.
func (s *Socket) Recv(b []byte, wait bool) (int, error) {
	n, err := s.recv(b, false)
	if !wait || !errors.Is(err, unix.EAGAIN) {
		return n, err
	}
	if err := s.SetReadDeadline(time.Now().Add(s.patience)); err != nil {
		return 0, err
	}
	n, err = s.recv(b, true)
	return n, errors.Join(err, s.SetReadDeadline(time.Time{}))
}

func (s *Socket) recv(b []byte, wait bool) (n int, err error) {
	var rerr error
	err = s.raw.Read(func(fd uintptr) bool {
		n, _, rerr = unix.Recvfrom(int(fd), b, unix.MSG_DONTWAIT|unix.MSG_TRUNC)
		return !wait || rerr != unix.EAGAIN
	})
	if err != nil {
		return 0, err
	}
	return n, rerr
}

// Room is Wire's.
func (s *Socket) Room(n int) (int, error) {
	if err := s.SetWriteBuffer(n); err != nil {
		return 0, err
	}
	got, err := s.WriteBuffer()
	return got / 2, err // the kernel doubles what is asked for, for its own needs
}

// Port is Wire's.
func (s *Socket) Port() (port uint32, err error) {
	var nerr error
	err = s.raw.Control(func(fd uintptr) {
		var sa unix.Sockaddr
		sa, nerr = unix.Getsockname(int(fd))
		if nl, ok := sa.(*unix.SockaddrNetlink); ok {
			port = nl.Pid
		}
	})
	if err := errors.Join(err, nerr); err != nil {
		return 0, fmt.Errorf("netlink: port of socket: %w", err)
	}
	return port, nil
}
