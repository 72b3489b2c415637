package ipvsplugin

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// socket is a netlink socket in the network namespace of the thread that opened it. It is for one goroutine at a time.
type socket struct {
	fd  int
	out buffer
	in  []byte
	// messages and bytes count what was sent.
	messages, bytes int
}

// receiveBuffer has room for what the kernel answers to maxBatch messages, of which each takes less than a kilobyte, several times.
const receiveBuffer = 4 << 20

func openSocket(protocol int) (*socket, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return nil, fmt.Errorf("open netlink socket: %w", err)
	}
	s := &socket{fd: fd, in: make([]byte, 64<<10)}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return nil, errors.Join(fmt.Errorf("open netlink socket: %w", err), s.close())
	}
	// Without the right to it the default will do for maxBatch answers.
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, receiveBuffer)
	_ = unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1)
	_ = unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_GET_STRICT_CHK, 1)
	return s, nil
}

func (s *socket) close() error {
	if s == nil {
		return nil
	}
	return unix.Close(s.fd)
}

// maxBatch bounds the messages of one sendmsg, so that the answers fit into a receive buffer of default size even if all of them
// are refused.
const maxBatch = 200

// send sends what is in the buffer.
func (s *socket) send() error {
	err := unix.Sendto(s.fd, s.out.b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
	for errors.Is(err, unix.EINTR) {
		err = unix.Sendto(s.fd, s.out.b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
	}
	if err != nil {
		return fmt.Errorf("netlink: send: %w", err)
	}
	s.messages += int(s.out.seq - s.out.first + 1)
	s.bytes += len(s.out.b)
	return nil
}

// each reads answers to what was sent, until do says that it has the last.
func (s *socket) each(do func(answer) (last bool)) error {
	for {
		n, _, err := unix.Recvfrom(s.fd, s.in, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return fmt.Errorf("netlink: receive: %w", err)
		}
		for a := range answers(s.in[:n]) {
			if int32(a.seq-s.out.first) < 0 { // of a request that was given up
				continue
			}
			if do(a) {
				return nil
			}
		}
	}
}

// refused is what the kernel says against one message of a batch, by its place.
type refused map[int]unix.Errno

// commit sends the messages in the buffer, of which none asks for an answer but the last is made to. The kernel works them off one
// by one before send is back, whatever becomes of those before; it answers those that it refuses, and the last.
func (s *socket) commit() (refused, error) {
	s.out.flag(unix.NLM_F_ACK)
	if err := s.send(); err != nil {
		return nil, err
	}
	r := refused{}
	err := s.each(func(a answer) bool {
		if a.typ == unix.NLMSG_ERROR && a.errno() != 0 {
			r[int(a.seq-s.out.first)] = a.errno()
		}
		return a.ends() && a.seq == s.out.seq
	})
	return r, err
}

// maxDumps bounds how often a list begins again because others changed it meanwhile.
const maxDumps = 10

// dump asks for a list and calls do with each object. If the list was changed meanwhile it begins again, before which it calls
// again.
func (s *socket) dump(typ uint16, header []byte, attrs func(), again func(), do func(body []byte)) error {
	for range maxDumps {
		s.out.begin()
		s.out.message(typ, unix.NLM_F_DUMP, header, attrs)
		if err := s.send(); err != nil {
			return err
		}
		whole, errno := true, unix.Errno(0)
		err := s.each(func(a answer) bool {
			whole = whole && a.flags&unix.NLM_F_DUMP_INTR == 0
			if a.ends() {
				errno = a.errno()
				return true
			}
			do(a.body)
			return false
		})
		switch {
		case err != nil:
			return err
		case errno == unix.EINTR || errno == 0 && !whole:
			again()
		case errno != 0:
			return errno
		default:
			return nil
		}
	}
	return fmt.Errorf("a list was interrupted %d times: %w", maxDumps, unix.EINTR)
}

// get asks one question and gives the answer's body; it holds until the next request. An error of the kernel is an Errno.
func (s *socket) get(typ uint16, header []byte, attrs func()) (body []byte, err error) {
	s.out.begin()
	s.out.message(typ, unix.NLM_F_ACK, header, attrs)
	if err := s.send(); err != nil {
		return nil, err
	}
	errno := unix.Errno(0)
	err = s.each(func(a answer) bool {
		if a.ends() {
			errno = a.errno()
			return true
		}
		body = append([]byte(nil), a.body...)
		return false
	})
	if err == nil && errno != 0 {
		err = errno
	}
	return body, err
}
