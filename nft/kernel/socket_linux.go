package kernel

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"syscall"

	"github.com/mdlayher/socket"
	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/ipfamily"
)

// wire is a netlink socket. Tests put faults in between.
type wire interface {
	// send sends one datagram. The kernel works it off meanwhile.
	send(b []byte) error
	// recv reads one datagram; if it is not to wait and there is none, EAGAIN.
	recv(b []byte, wait bool) (int, error)
	// room asks for a send buffer of n bytes, and gives the size the socket has then.
	room(n int) (int, error)
	// port is the socket's address, by which the kernel knows a table's owner.
	port() (uint32, error)
	Close() error
}

// netlinkSocket is a wire to the kernel.
type netlinkSocket struct {
	*socket.Conn
	raw syscall.RawConn
}

// openSocket opens a socket in the network namespace that a file descriptor stands for; 0 is the caller's own.
func openSocket(netns int) (*netlinkSocket, error) {
	if netns == 0 || ownNamespace(netns) {
		return newSocket()
	}
	type result struct {
		s   *netlinkSocket
		err error
	}
	opened := make(chan result)
	go func() {
		// The thread ends with this goroutine, since nobody unlocks it: going back to the namespace it comes from may take
		// rights that going to this one does not.
		runtime.LockOSThread()
		if err := unix.Setns(netns, unix.CLONE_NEWNET); err != nil {
			opened <- result{nil, fmt.Errorf("nft: open netlink socket: setns: %w", err)}
			return
		}
		s, err := newSocket()
		opened <- result{s, err}
	}()
	r := <-opened
	return r.s, r.err
}

// ownNamespace says whether the calling thread is in a network namespace already. To go where one is takes CAP_SYS_ADMIN, which a
// proxy has no other need for.
func ownNamespace(netns int) bool {
	var own, other unix.Stat_t
	return unix.Stat("/proc/thread-self/ns/net", &own) == nil && unix.Fstat(netns, &other) == nil &&
		own.Ino == other.Ino && own.Dev == other.Dev
}

func newSocket() (*netlinkSocket, error) {
	c, err := socket.Socket(unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_NETFILTER, "netlink", nil)
	if err != nil {
		return nil, fmt.Errorf("nft: open netlink socket: %w", err)
	}
	if err := c.Bind(&unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return nil, errors.Join(fmt.Errorf("nft: bind netlink socket: %w", err), c.Close())
	}
	for _, option := range []int{unix.NETLINK_EXT_ACK, unix.NETLINK_CAP_ACK} {
		if err := c.SetsockoptInt(unix.SOL_NETLINK, option, 1); err != nil {
			return nil, errors.Join(fmt.Errorf("nft: netlink socket option: %w", err), c.Close())
		}
	}
	return wrapSocket(c)
}

// inheritSocket uses a socket that openSocket made, perhaps in another process. The file stays the caller's.
func inheritSocket(f *os.File) (*netlinkSocket, error) {
	c, err := socket.FileConn(f, "netlink")
	if err != nil {
		return nil, fmt.Errorf("nft: inherited socket: %w", err)
	}
	domain, err := c.GetsockoptInt(unix.SOL_SOCKET, unix.SO_DOMAIN)
	protocol, perr := c.GetsockoptInt(unix.SOL_SOCKET, unix.SO_PROTOCOL)
	if err != nil || perr != nil || domain != unix.AF_NETLINK || protocol != unix.NETLINK_NETFILTER {
		return nil, errors.Join(errors.New("nft: inherited socket: it is no netlink socket to netfilter"), c.Close())
	}
	return wrapSocket(c)
}

func wrapSocket(c *socket.Conn) (*netlinkSocket, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("nft: netlink socket: %w", err), c.Close())
	}
	// A socket that is connected to the kernel gets no message of another process, such as one for the place of the
	// proxy that somebody had sent to this port.
	var cerr error
	err = raw.Control(func(fd uintptr) { cerr = unix.Connect(int(fd), &unix.SockaddrNetlink{Family: unix.AF_NETLINK}) })
	if err := errors.Join(err, cerr); err != nil {
		return nil, errors.Join(fmt.Errorf("nft: connect netlink socket: %w", err), c.Close())
	}
	return &netlinkSocket{c, raw}, nil
}

// OpenSocket opens the netlink socket that a Backend writes by, for a process that is to hold it while Backends come and go. The
// caller closes it; the tables a Backend owns are protected as long as somebody holds it.
func OpenSocket() (*os.File, error) {
	s, err := openSocket(0)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	var dup int
	var derr error
	err = s.raw.Control(func(fd uintptr) { dup, derr = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 3) })
	if err := errors.Join(err, derr); err != nil {
		return nil, fmt.Errorf("nft: netlink socket: %w", err)
	}
	return os.NewFile(uintptr(dup), "netlink"), nil
}

// OwnsTables says whether a socket that OpenSocket made owns our tables: one of them, if not both.
func OwnsTables(f *os.File) bool {
	s, err := inheritSocket(f)
	if err != nil {
		return false
	}
	defer s.Close()
	port, err := s.port()
	if err != nil {
		return false
	}
	reader, err := Dial(0)
	if err != nil {
		return false
	}
	defer reader.Close()
	for _, family := range ipfamily.All {
		if info, err := reader.table(family); err == nil && info.owner == port {
			return true
		}
	}
	return false
}

func (s *netlinkSocket) send(b []byte) error {
	var serr error
	err := s.raw.Write(func(fd uintptr) bool {
		serr = unix.Sendto(int(fd), b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
		return serr != unix.EAGAIN
	})
	return errors.Join(err, serr)
}

func (s *netlinkSocket) recv(b []byte, wait bool) (n int, err error) {
	var rerr error
	err = s.raw.Read(func(fd uintptr) bool {
		n, _, rerr = unix.Recvfrom(int(fd), b, unix.MSG_DONTWAIT)
		return !wait || rerr != unix.EAGAIN
	})
	if err != nil {
		return 0, err
	}
	return n, rerr
}

func (s *netlinkSocket) room(n int) (int, error) {
	if err := s.SetWriteBuffer(n); err != nil {
		return 0, err
	}
	got, err := s.WriteBuffer()
	return got / 2, err // the kernel doubles what is asked for, for its own needs
}

func (s *netlinkSocket) port() (uint32, error) {
	sa, err := s.Getsockname()
	if nl, ok := sa.(*unix.SockaddrNetlink); ok && err == nil {
		return nl.Pid, nil
	}
	return 0, errors.Join(errors.New("nft: netlink socket without an address"), err)
}
