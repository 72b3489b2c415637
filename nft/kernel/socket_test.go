package kernel

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
)

// TestMessagesOfProcesses: no other process can put anything among the kernel's answers.
func TestMessagesOfProcesses(t *testing.T) {
	s, err := newSocket()
	labtest.Check(t, err)
	defer s.Close()
	port, err := s.port()
	labtest.Check(t, err)
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	labtest.Check(t, err)
	defer unix.Close(fd)
	err = unix.Sendto(fd, make([]byte, unix.NLMSG_HDRLEN), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Pid: port})
	if !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("a message to the socket: %v", err)
	}
}
