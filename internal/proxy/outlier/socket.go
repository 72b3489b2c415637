package outlier

import (
	"net/netip"

	"golang.org/x/sys/unix"
)

// socket is a TCP socket that is being connected. It is asked and not waited for: a deadline of package net may run out
// before the process has seen that the connection was accepted.
type socket struct{ fd int }

// ended is the outcome of an attempt that needs no socket any more.
type ended Outcome

func (e ended) result() (Outcome, bool) { return Outcome(e), true }
func (ended) close()                    {}

// connect begins to connect to an endpoint.
func connect(to netip.AddrPort) attempt {
	family, addr := unix.AF_INET6, unix.Sockaddr(&unix.SockaddrInet6{Port: int(to.Port()), Addr: to.Addr().As16()})
	if to.Addr().Is4() {
		family, addr = unix.AF_INET, &unix.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()}
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	if err != nil {
		return ended(Failed)
	}
	s := socket{fd}
	if err := unix.Connect(fd, addr); err != nil && err != unix.EINPROGRESS {
		s.close()
		return ended(errnoOutcome(err))
	}
	return s
}

func (s socket) result() (Outcome, bool) {
	p := []unix.PollFd{{Fd: int32(s.fd), Events: unix.POLLOUT}}
	if n, err := unix.Poll(p, 0); err != nil || n == 0 {
		return Failed, false // asked again at the next tick
	}
	errno, err := unix.GetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_ERROR)
	if err != nil {
		return Failed, true
	}
	return errnoOutcome(unix.Errno(errno)), true
}

// close resets the connection, which leaves nothing behind on either side.
func (s socket) close() {
	_ = unix.SetsockoptLinger(s.fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	_ = unix.Close(s.fd)
}

// errnoOutcome returns what the result of a connect means.
func errnoOutcome(err error) Outcome {
	switch err {
	case unix.Errno(0), unix.ECONNRESET: // reset after it was accepted
		return Accepted
	case unix.ECONNREFUSED:
		return Rejected
	case unix.EHOSTUNREACH, unix.ENETUNREACH, unix.ETIMEDOUT:
		return Silent
	}
	return Failed
}
