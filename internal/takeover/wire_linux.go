package takeover

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// buffer builds netlink messages one after the other.
type buffer struct {
	b   []byte
	seq uint32
}

// message starts a message with what follows its header, and gives its place, for end.
func (w *buffer) message(typ, flags uint16, header ...byte) int {
	start := len(w.b)
	w.seq++
	w.b = append(w.b, 0, 0, 0, 0)
	w.b = binary.NativeEndian.AppendUint16(w.b, typ)
	w.b = binary.NativeEndian.AppendUint16(w.b, flags|unix.NLM_F_REQUEST)
	w.b = binary.NativeEndian.AppendUint32(w.b, w.seq)
	w.b = append(w.b, 0, 0, 0, 0)
	w.b = append(w.b, header...)
	return start
}

func (w *buffer) end(start int) {
	binary.NativeEndian.PutUint32(w.b[start:], uint32(len(w.b)-start))
}

// attr appends one attribute, padded to four bytes.
func (w *buffer) attr(typ uint16, value ...byte) {
	start := w.nest(typ)
	w.b = append(w.b, value...)
	w.close(start)
	for len(w.b)%4 != 0 {
		w.b = append(w.b, 0)
	}
}

// text appends an attribute that holds a zero-terminated string.
func (w *buffer) text(typ uint16, s string) { w.attr(typ, append([]byte(s), 0)...) }

// nest starts an attribute of attributes and gives its place, for close.
func (w *buffer) nest(typ uint16) int {
	start := len(w.b)
	w.b = append(w.b, 0, 0)
	w.b = binary.NativeEndian.AppendUint16(w.b, typ)
	return start
}

func (w *buffer) close(start int) {
	binary.NativeEndian.PutUint16(w.b[start:], uint16(len(w.b)-start))
}

func native32(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }

func native16(v uint16) []byte { return binary.NativeEndian.AppendUint16(nil, v) }

func big32(v uint32) []byte { return binary.BigEndian.AppendUint32(nil, v) }

func big16(v uint16) []byte { return binary.BigEndian.AppendUint16(nil, v) }

// attributes are those of one level, by type. Of several with one type it holds the last.
type attributes map[uint16][]byte

func parseAttributes(b []byte) attributes {
	a := attributes{}
	eachAttribute(b, func(typ uint16, value []byte) { a[typ] = value })
	return a
}

// eachAttribute walks attributes; types come without flags. It stops at what is no attribute.
func eachAttribute(b []byte, do func(typ uint16, value []byte)) {
	for len(b) >= unix.NLA_HDRLEN {
		n := int(binary.NativeEndian.Uint16(b))
		if n < unix.NLA_HDRLEN || n > len(b) {
			return
		}
		do(binary.NativeEndian.Uint16(b[2:])&^(unix.NLA_F_NESTED|unix.NLA_F_NET_BYTEORDER), b[unix.NLA_HDRLEN:n])
		b = b[min((n+3)&^3, len(b)):]
	}
}

// text gives a string; an attribute that is not there is the empty one.
func (a attributes) text(typ uint16) string { return unix.ByteSliceToString(a[typ]) }

func (a attributes) nested(typ uint16) attributes { return parseAttributes(a[typ]) }

// big gives a number in network order, of 2, 4 or 8 bytes; 0 if it is not there.
func (a attributes) big(typ uint16) uint64 {
	var n uint64
	for _, b := range a[typ][:min(8, len(a[typ]))] {
		n = n<<8 | uint64(b)
	}
	return n
}

// native gives a number of this machine's order; 0 if it is not there.
func (a attributes) native(typ uint16) uint32 {
	switch v := a[typ]; len(v) {
	case 1:
		return uint32(v[0])
	case 2:
		return uint32(binary.NativeEndian.Uint16(v))
	case 4, 8:
		return binary.NativeEndian.Uint32(v)
	}
	return 0
}

// socket is a netlink socket in the network namespace of the thread that opened it. It is for one goroutine at a time.
type socket struct {
	fd  int
	seq uint32
	in  []byte
}

// openSocket opens a socket of a netlink protocol.
func openSocket(protocol int) (*socket, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return nil, fmt.Errorf("open netlink socket: %w", err)
	}
	s := &socket{fd: fd, in: make([]byte, 256<<10)}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return nil, errors.Join(fmt.Errorf("open netlink socket: %w", err), s.close())
	}
	return s, nil
}

func (s *socket) close() error { return unix.Close(s.fd) }

// answer is one message from the kernel.
type answer struct {
	typ, flags uint16
	seq        uint32
	body       []byte
}

// errno gives what an answer says went wrong, 0 if nothing did.
func (a *answer) errno() int {
	if (a.typ == unix.NLMSG_ERROR || a.typ == unix.NLMSG_DONE) && len(a.body) >= 4 {
		return -int(int32(binary.NativeEndian.Uint32(a.body)))
	}
	return 0
}

// receive reads one datagram and calls do with each message in it.
func (s *socket) receive(flags int, do func(answer)) error {
	n, _, err := unix.Recvfrom(s.fd, s.in, flags)
	for errors.Is(err, unix.EINTR) {
		n, _, err = unix.Recvfrom(s.fd, s.in, flags)
	}
	if err != nil {
		return err
	}
	for b := s.in[:n]; len(b) >= unix.NLMSG_HDRLEN; {
		n := int(binary.NativeEndian.Uint32(b))
		if n < unix.NLMSG_HDRLEN || n > len(b) {
			return fmt.Errorf("netlink message of %d bytes in %d", n, len(b))
		}
		do(answer{binary.NativeEndian.Uint16(b[4:]), binary.NativeEndian.Uint16(b[6:]), binary.NativeEndian.Uint32(b[8:]),
			b[unix.NLMSG_HDRLEN:n]})
		b = b[min((n+3)&^3, len(b)):]
	}
	return nil
}

func (s *socket) send(b []byte) error {
	err := unix.Sendto(s.fd, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
	for errors.Is(err, unix.EINTR) {
		err = unix.Sendto(s.fd, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
	}
	return err
}

// maxLists bounds how often a list begins again because others changed it meanwhile.
const maxLists = 10

// list asks for all objects of a kind and gives the body of each message, its own header included.
func (s *socket) list(typ uint16, header []byte, attrs func(*buffer)) ([][]byte, error) {
	for range maxLists {
		objects, whole, err := s.request(typ, unix.NLM_F_DUMP, header, attrs)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return nil, err
		}
		if err == nil && whole {
			return objects, nil
		}
	}
	return nil, fmt.Errorf("a list was interrupted %d times: %w", maxLists, unix.EINTR)
}

// do has something done, and gives what the kernel has to say to it. An error is an errno.
func (s *socket) do(typ uint16, header []byte, attrs func(*buffer)) ([][]byte, error) {
	objects, _, err := s.request(typ, unix.NLM_F_ACK, header, attrs)
	return objects, err
}

// request sends a request and reads all answers to it.
func (s *socket) request(typ, flags uint16, header []byte, attrs func(*buffer)) (objects [][]byte, whole bool, err error) {
	w := buffer{seq: s.seq}
	m := w.message(typ, flags, header...)
	if attrs != nil {
		attrs(&w)
	}
	w.end(m)
	s.seq = w.seq
	if err := s.send(w.b); err != nil {
		return nil, false, err
	}
	whole = true
	for done := false; !done; {
		failed := s.receive(0, func(a answer) {
			switch {
			case a.seq != s.seq: // of a request that was given up
			case a.typ == unix.NLMSG_ERROR || a.typ == unix.NLMSG_DONE:
				done = true
				if n := a.errno(); n != 0 {
					err = os.NewSyscallError("netlink", unix.Errno(n))
				}
			default:
				whole = whole && a.flags&unix.NLM_F_DUMP_INTR == 0
				objects = append(objects, append([]byte(nil), a.body...))
			}
		})
		if failed != nil {
			return nil, false, failed
		}
	}
	return objects, whole, err
}
