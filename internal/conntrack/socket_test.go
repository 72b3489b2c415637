package conntrack

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"
)

// TestMessagesOfProcesses: no other process can put anything among the kernel's answers.
func TestMessagesOfProcesses(t *testing.T) {
	c, err := Dial(0)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	for _, s := range []*socket{&c.lists, &c.deletes} {
		var port uint32
		err := s.raw.Control(func(fd uintptr) {
			if name, err := unix.Getsockname(int(fd)); err == nil {
				port = name.(*unix.SockaddrNetlink).Pid
			}
		})
		if err != nil || port == 0 {
			t.Fatal(port, err)
		}
		to := &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Pid: port}
		if err := unix.Sendto(fd, make([]byte, unix.NLMSG_HDRLEN), 0, to); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("a message to the socket: %v", err)
		}
	}
}
