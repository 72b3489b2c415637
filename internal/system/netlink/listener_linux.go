package netlink

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Listener receives what the kernel sends without being asked: what it multicasts to groups, or sends to a socket that
// has registered. What there is no room for is lost and counted; that never holds the kernel up. Receive is for one
// goroutine; all else is safe for concurrent use.
type Listener struct {
	socket *Socket
	in     []byte
	lost   atomic.Uint64
	// read is SK_MEMINFO_DROPS at the last reading, which wraps.
	read uint32
}

// Listen opens a socket of a netlink protocol in the network namespace of a file descriptor, as Open does, with a
// receive buffer of so many bytes if this process may have it, and a filter that the kernel runs on each message; nil
// lets all pass.
func Listen(protocol, netns, buffer int, filter []unix.SockFilter) (*Listener, error) {
	s, err := Open(protocol, netns)
	if err != nil {
		return nil, err
	}
	var serr error
	err = s.raw.Control(func(fd uintptr) {
		if unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, buffer) != nil {
			serr = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, buffer)
		}
		if len(filter) > 0 && serr == nil {
			serr = unix.SetsockoptSockFprog(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER,
				&unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]})
		}
	})
	if err := errors.Join(err, serr); err != nil {
		return nil, errors.Join(fmt.Errorf("netlink: prepare to listen: %w", err), s.Close())
	}
	return &Listener{socket: s, in: make([]byte, receiveLen)}, nil
}

// Join subscribes to a multicast group, or leaves it.
func (l *Listener) Join(group int, join bool) error {
	option := unix.NETLINK_ADD_MEMBERSHIP
	if !join {
		option = unix.NETLINK_DROP_MEMBERSHIP
	}
	var serr error
	err := l.socket.raw.Control(func(fd uintptr) {
		serr = unix.SetsockoptInt(int(fd), unix.SOL_NETLINK, option, group)
	})
	if err := errors.Join(err, serr); err != nil {
		return fmt.Errorf("netlink: group %d: %w", group, err)
	}
	return nil
}

// PassAll takes the filter away.
func (l *Listener) PassAll() error {
	var serr error
	err := l.socket.raw.Control(func(fd uintptr) {
		serr = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_DETACH_FILTER, 0)
	})
	if err := errors.Join(err, serr); err != nil {
		return fmt.Errorf("netlink: detach filter: %w", err)
	}
	return nil
}

// Register sends messages that ask for no answer, and returns the first refusal. Call it before Receive.
func (l *Listener) Register(b []byte) error {
	refused, err := New(l.socket, false).Commit(b)
	if err == nil && len(refused) > 0 {
		return &refused[0]
	}
	return err
}

// Receive calls do with each message that comes before the deadline, which it then returns
// [os.ErrDeadlineExceeded] for. After Close it returns another error. Messages are valid until do returns.
func (l *Listener) Receive(deadline time.Time, do func(Message)) error {
	if err := l.socket.SetReadDeadline(deadline); err != nil {
		return err
	}
	for {
		n, err := l.socket.recv(l.in, true)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.ENOBUFS):
			l.count()
			continue
		case err != nil:
			return err
		}
		for m, err := range Messages(l.in[:min(n, len(l.in))]) {
			if err != nil {
				break // it was cut off, or is malformed: the next may be whole
			}
			do(m)
		}
		if !time.Now().Before(deadline) { // under load there is always something to read
			l.count()
			return os.ErrDeadlineExceeded
		}
	}
}

// skMeminfo is what SO_MEMINFO gives: SK_MEMINFO_VARS numbers, the last of which are the drops.
type skMeminfo [9]uint32

// count adds what was lost since the last time.
func (l *Listener) count() {
	var info skMeminfo
	size := uint32(unsafe.Sizeof(info))
	var errno syscall.Errno
	err := l.socket.raw.Control(func(fd uintptr) {
		_, _, errno = unix.Syscall6(unix.SYS_GETSOCKOPT, fd, unix.SOL_SOCKET, unix.SO_MEMINFO,
			uintptr(unsafe.Pointer(&info)), uintptr(unsafe.Pointer(&size)), 0)
	})
	if err == nil && errno == 0 {
		drops := info[len(info)-1]
		l.lost.Add(uint64(drops - l.read))
		l.read = drops
	}
}

// Lost returns how many messages there was no room for, as of the last deadline of Receive.
func (l *Listener) Lost() uint64 { return l.lost.Load() }

// Close closes the socket, and ends Receive.
func (l *Listener) Close() error { return l.socket.Close() }
