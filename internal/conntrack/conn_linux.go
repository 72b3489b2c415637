package conntrack

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"syscall"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Conn is a pair of netlink sockets to the kernel's connection tracking: flows are deleted while the list they are in is still
// being read, so that memory does not follow their number. It is not safe for concurrent use.
type Conn struct {
	lists, deletes socket
	flows          []flow
	// unfiltered says that this kernel, older than 5.8, does not know CTA_FILTER, which it passes over without a word.
	unfiltered bool
}

// Dial opens the sockets in the network namespace that a file descriptor stands for; 0 is the caller's own.
func Dial(netns int) (*Conn, error) {
	c := &Conn{}
	if err := errors.Join(c.lists.open(netns), c.deletes.open(netns)); err != nil {
		return nil, fmt.Errorf("conntrack: open netlink socket: %w", errors.Join(err, c.Close()))
	}
	return c, nil
}

// Close closes the sockets.
func (c *Conn) Close() error { return errors.Join(c.lists.close(), c.deletes.close()) }

// Load has the kernel load connection tracking, if it is a module and nobody needed it yet: any question for it does that. Its
// sysctls are there from then on.
func Load() error {
	c, err := Dial(0)
	if err != nil {
		return err
	}
	nobody := query{family: unix.AF_INET, protocol: snapshot.UDP, addr: netip.IPv4Unspecified(), port: 1}
	if err := errors.Join(c.list(nobody, func([]flow) error { return nil }), c.Close()); err != nil {
		return fmt.Errorf("conntrack: %w", err)
	}
	return nil
}

func (c *Conn) filters() bool { return !c.unfiltered }

// maxDumps bounds how often a list begins again because the kernel found it to be inconsistent.
const maxDumps = 10

// list calls do with the flows that answer a query, one datagram's at a time. A list that was interrupted begins again, and
// then do sees flows twice. If the kernel turns out not to filter, that shows in filters, and what do saw may be anything.
func (c *Conn) list(q query, do func([]flow) error) error {
	for range maxDumps {
		whole, err := c.listOnce(q, do)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if q.protocol != 0 && (errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP)) {
			c.unfiltered = true
			return nil
		}
		if err != nil || whole {
			return err
		}
	}
	return fmt.Errorf("the list was interrupted %d times: %w", maxDumps, unix.EINTR)
}

// listOnce says whether the list was whole.
func (c *Conn) listOnce(q query, do func([]flow) error) (whole bool, err error) {
	s := &c.lists
	if err := s.drain(nil); err != nil { // the rest of a list that nobody read to its end
		return false, err
	}
	s.out.b = s.out.b[:0]
	s.out.dump(q)
	if err := s.send(); err != nil {
		return false, err
	}
	whole = true
	for done := false; !done; {
		n, err := s.receive(true)
		if err != nil {
			return false, err
		}
		c.flows = c.flows[:0]
		err = eachMessage(s.in[:n], func(h header, body []byte) error {
			if h.seq != s.out.seq {
				return nil
			}
			whole = whole && h.flags&unix.NLM_F_DUMP_INTR == 0
			switch h.typ {
			case unix.NLMSG_DONE:
				done = true
				return h.done(body)
			case unix.NLMSG_ERROR:
				done = true
				return h.refusal(body)
			}
			c.take(q, body)
			return nil
		})
		if err != nil {
			return false, err
		}
		if len(c.flows) > 0 {
			if err := do(c.flows); err != nil {
				return false, err
			}
		}
	}
	return whole, nil
}

// take keeps a flow of a list.
func (c *Conn) take(q query, body []byte) {
	if len(body) < nfgenLen {
		return
	}
	f, ok := parseFlow(body[nfgenLen:])
	if !ok {
		return
	}
	c.unfiltered = c.unfiltered || !q.answers(&f)
	c.flows = append(c.flows, f)
}

// maxDeletes bounds one sendmsg. Each deletion may be refused, and what the kernel says then must fit into a socket's receive
// buffer of default size, where a message takes 768 bytes.
const maxDeletes = 128

// remove deletes flows and says how many the kernel did delete. That one is gone already is no error.
//
// If the socket had no room for all that the kernel refused, all flows were tried, fewer are counted, and the error
// is ENOBUFS.
func (c *Conn) remove(flows []flow) (removed int, err error) {
	s := &c.deletes
	var unheard error
	for len(flows) > 0 {
		n := min(len(flows), maxDeletes)
		if err := s.drain(nil); err != nil {
			return removed, err
		}
		s.out.b = s.out.b[:0]
		for i := range flows[:n] {
			s.out.remove(&flows[i])
		}
		if err := s.send(); err != nil {
			return removed, err
		}
		// The kernel works all messages off before send is back, and answers only those that it refuses.
		refused := 0
		err := s.drain(func(h header, body []byte) error {
			refused++
			if err := h.refusal(body); !errors.Is(err, unix.ENOENT) {
				return err
			}
			return nil
		})
		switch {
		case errors.Is(err, unix.ENOBUFS):
			unheard = fmt.Errorf("delete flows: %w", err)
		case err != nil:
			return removed + n - refused, fmt.Errorf("delete flow: %w", err)
		default:
			removed += n - refused
		}
		flows = flows[n:]
	}
	return removed, unheard
}

// socket is one netlink socket with its buffers.
type socket struct {
	nl  *netlink.Conn
	raw syscall.RawConn
	in  []byte
	out buffer
}

// receiveLen is as long as the kernel ever makes a datagram of a list.
const receiveLen = 64 << 10

func (s *socket) open(netns int) (err error) {
	if s.nl, err = netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{NetNS: netns}); err != nil {
		return err
	}
	s.in = make([]byte, receiveLen)
	if s.raw, err = s.nl.SyscallConn(); err != nil {
		return err
	}
	// Connected to the kernel, it gets no message of another process.
	var cerr error
	kernel := &unix.SockaddrNetlink{Family: unix.AF_NETLINK}
	err = s.raw.Control(func(fd uintptr) { cerr = unix.Connect(int(fd), kernel) })
	return errors.Join(err, cerr, s.nl.SetOption(netlink.CapAcknowledge, true))
}

func (s *socket) close() error {
	if s.nl == nil {
		return nil
	}
	return s.nl.Close()
}

func (s *socket) send() error {
	var serr error
	err := s.raw.Write(func(fd uintptr) bool {
		for {
			serr = unix.Sendto(int(fd), s.out.b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
			if serr != unix.EINTR {
				return serr != unix.EAGAIN
			}
		}
	})
	return errors.Join(err, serr)
}

// receive reads one datagram, and waits for it if asked to.
func (s *socket) receive(wait bool) (n int, err error) {
	rerr := s.raw.Read(func(fd uintptr) bool {
		for {
			n, _, err = unix.Recvfrom(int(fd), s.in, unix.MSG_DONTWAIT)
			if err != unix.EINTR {
				return !wait || err != unix.EAGAIN
			}
		}
	})
	if rerr != nil {
		return 0, rerr
	}
	return n, err
}

// drain reads all there is, and calls do, if it is not nil, with each message. It gives the first error; ENOBUFS says
// that there was more.
func (s *socket) drain(do func(h header, body []byte) error) error {
	var first error
	for {
		n, err := s.receive(false)
		switch {
		case errors.Is(err, unix.EAGAIN):
			return first
		case errors.Is(err, unix.ENOBUFS): // there was no room for all of it; the rest is still there
			if first == nil && do != nil {
				first = err
			}
			continue
		case err != nil:
			return err
		case do == nil:
			continue
		}
		err = eachMessage(s.in[:n], func(h header, body []byte) error {
			if err := do(h, body); first == nil {
				first = err
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
}

// header is the part of a struct nlmsghdr that answers need.
type header struct {
	typ, flags uint16
	seq        uint32
}

// eachMessage walks the messages of a datagram.
func eachMessage(b []byte, do func(h header, body []byte) error) error {
	for len(b) >= unix.NLMSG_HDRLEN {
		n := int(binary.NativeEndian.Uint32(b))
		if n < unix.NLMSG_HDRLEN || n > len(b) {
			return fmt.Errorf("the kernel sent a message of %d bytes in %d", n, len(b))
		}
		h := header{
			typ: binary.NativeEndian.Uint16(b[4:]), flags: binary.NativeEndian.Uint16(b[6:]), seq: binary.NativeEndian.Uint32(b[8:]),
		}
		if err := do(h, b[unix.NLMSG_HDRLEN:n]); err != nil {
			return err
		}
		b = b[min((n+3)&^3, len(b)):]
	}
	return nil
}

// refusal reads a struct nlmsgerr; an answer of 0 is an acknowledgement.
func (h header) refusal(body []byte) error {
	if h.typ != unix.NLMSG_ERROR || len(body) < 4 {
		return fmt.Errorf("the kernel sent a message of type %d that nobody asked for", h.typ)
	}
	return h.done(body)
}

// done reads the number that ends a list: 0, or what went wrong on the way.
func (h header) done(body []byte) error {
	if len(body) < 4 {
		return nil
	}
	if e := -int32(binary.NativeEndian.Uint32(body)); e > 0 {
		return unix.Errno(e)
	}
	return nil
}
