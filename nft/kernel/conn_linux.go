package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"syscall"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// Conn is a netlink socket to nf_tables. It is not safe for concurrent use.
type Conn struct {
	nl      *netlink.Conn
	raw     syscall.RawConn
	receive []byte
	sendMax int
}

// receiveLen holds many messages of a dump: the kernel walks a set from its beginning again for each datagram.
const receiveLen = 256 << 10

// Dial opens a socket in the network namespace that a file descriptor stands for; 0 is the caller's own.
func Dial(netns int) (*Conn, error) {
	nl, err := netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{NetNS: netns})
	if err != nil {
		return nil, fmt.Errorf("nft: open netlink socket: %w", err)
	}
	c := &Conn{nl: nl, receive: make([]byte, receiveLen)}
	if c.raw, err = nl.SyscallConn(); err != nil {
		nl.Close()
		return nil, fmt.Errorf("nft: open netlink socket: %w", err)
	}
	for _, o := range []netlink.ConnOption{netlink.ExtendedAcknowledge, netlink.CapAcknowledge} {
		if err := nl.SetOption(o, true); err != nil {
			nl.Close()
			return nil, fmt.Errorf("nft: netlink socket option: %w", err)
		}
	}
	return c, nil
}

// Close closes the socket. Nothing in the kernel changes by it.
func (c *Conn) Close() error { return c.nl.Close() }

// refusal is the kernel's answer to one message it did not take.
type refusal struct {
	seq    uint32
	errno  unix.Errno
	offset int
	text   string
}

// transact sends one batch and gives what the kernel refused of it; nothing refused means that the batch is in. The kernel
// works a batch off while it is being sent, so the answers are all there once the call is back.
func (c *Conn) transact(b []byte) ([]refusal, error) {
	if err := c.growSendBuffer(len(b)); err != nil {
		return nil, err
	}
	if err := c.send(b); err != nil {
		if errors.Is(err, unix.EMSGSIZE) {
			return nil, fmt.Errorf("a transaction of %d bytes needs a larger send buffer than this process may have "+
				"(CAP_NET_ADMIN in the initial user namespace, or a higher net.core.wmem_max): %w", len(b), err)
		}
		return nil, err
	}
	var refused []refusal
	var lost error
	for {
		n, err := c.recv(unix.MSG_DONTWAIT)
		switch {
		case errors.Is(err, unix.EAGAIN):
			return refused, lost
		case errors.Is(err, unix.ENOBUFS):
			// More was refused than the socket holds. What it does hold is still to be read: left there, it would be taken
			// for the answer to the next transaction.
			lost = err
			continue
		case err != nil:
			return refused, err
		}
		err = eachMessage(c.receive[:n], func(h header, body []byte) error {
			if r, ok := parseRefusal(h, body); ok {
				refused = append(refused, r)
			}
			return nil
		})
		if err != nil {
			return refused, err
		}
	}
}

// Replay sends a batch that a Backend made, to measure what the kernel alone takes for it. It means something only in a
// namespace that holds what the Backend's own did before the batch.
func (c *Conn) Replay(batch []byte) error {
	refused, err := c.transact(batch)
	if err == nil && len(refused) > 0 {
		r := &refused[0]
		err = fmt.Errorf("message %d and %d more were refused: %w", r.seq, len(refused)-1, r.errno)
	}
	if err != nil {
		return fmt.Errorf("nft: replay: %w", err)
	}
	return nil
}

// growSendBuffer makes room for a batch in one datagram.
func (c *Conn) growSendBuffer(n int) error {
	if n += 64 << 10; n <= c.sendMax {
		return nil
	}
	if err := c.nl.SetWriteBuffer(n); err != nil {
		return fmt.Errorf("nft: netlink send buffer: %w", err)
	}
	c.sendMax = n
	return nil
}

func (c *Conn) send(b []byte) error {
	var serr error
	err := c.raw.Write(func(fd uintptr) bool {
		for {
			serr = unix.Sendto(int(fd), b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
			if serr != unix.EINTR {
				return serr != unix.EAGAIN
			}
		}
	})
	return errors.Join(err, serr)
}

// recv reads one datagram. Without MSG_DONTWAIT it waits for one.
func (c *Conn) recv(flags int) (int, error) {
	var n int
	var rerr error
	err := c.raw.Read(func(fd uintptr) bool {
		for {
			n, _, rerr = unix.Recvfrom(int(fd), c.receive, unix.MSG_DONTWAIT)
			if rerr != unix.EINTR {
				return flags&unix.MSG_DONTWAIT != 0 || rerr != unix.EAGAIN
			}
		}
	})
	if err != nil {
		return 0, err
	}
	return n, rerr
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
			return fmt.Errorf("nft: the kernel sent a message of %d bytes in %d", n, len(b))
		}
		h := header{native16(b[4:]), native16(b[6:]), binary.NativeEndian.Uint32(b[8:])}
		if err := do(h, b[unix.NLMSG_HDRLEN:n]); err != nil {
			return err
		}
		b = b[min((n+3)&^3, len(b)):]
	}
	return nil
}

// eachAttr walks attributes; types come without the nested flag. It stops at what is no attribute.
func eachAttr(b []byte, do func(typ uint16, value []byte)) {
	for len(b) >= attrLen {
		n := int(native16(b))
		if n < attrLen || n > len(b) {
			return
		}
		do(native16(b[2:])&^(nestedAttr|unix.NLA_F_NET_BYTEORDER), b[attrLen:n])
		b = b[min((n+3)&^3, len(b)):]
	}
}

// parseRefusal reads a struct nlmsgerr and its attributes. An answer of 0 is an acknowledgement.
func parseRefusal(h header, body []byte) (refusal, bool) {
	const errHeader = 4 + unix.NLMSG_HDRLEN
	if h.typ != unix.NLMSG_ERROR || len(body) < errHeader {
		return refusal{}, false
	}
	r := refusal{
		errno: unix.Errno(-int32(binary.NativeEndian.Uint32(body))),
		seq:   binary.NativeEndian.Uint32(body[4+8:]),
	}
	if r.errno == 0 {
		return refusal{}, false
	}
	rest := body[errHeader:]
	if h.flags&unix.NLM_F_CAPPED == 0 {
		rest = rest[min(max(int(binary.NativeEndian.Uint32(body[4:]))-unix.NLMSG_HDRLEN, 0), len(rest)):]
	}
	eachAttr(rest, func(typ uint16, v []byte) {
		switch {
		case typ == unix.NLMSGERR_ATTR_MSG:
			r.text = unix.ByteSliceToString(v)
		case typ == unix.NLMSGERR_ATTR_OFFS && len(v) == 4:
			r.offset = int(binary.NativeEndian.Uint32(v))
		}
	})
	return r, true
}

// maxDumps bounds how often a dump begins again because somebody committed something meanwhile.
const maxDumps = 10

// dump asks for all objects of a kind, and calls do with the attributes of each. If somebody commits a transaction meanwhile,
// in any table, objects may be missing: then it calls begin and do anew, from the first one on.
func (c *Conn) dump(request []byte, begin func(), do func(attrs []byte)) error {
	for range maxDumps {
		begin()
		whole, err := c.dumpOnce(request, do)
		if err != nil || whole {
			return err
		}
	}
	return fmt.Errorf("interrupted %d times by other transactions: %w", maxDumps, unix.EINTR)
}

// dumpOnce says whether the dump was whole.
func (c *Conn) dumpOnce(request []byte, do func(attrs []byte)) (whole bool, err error) {
	if err := c.send(request); err != nil {
		return false, err
	}
	whole = true
	for done := false; !done; {
		n, err := c.recv(0)
		if err != nil {
			return false, err
		}
		err = eachMessage(c.receive[:n], func(h header, body []byte) error {
			whole = whole && h.flags&unix.NLM_F_DUMP_INTR == 0
			switch h.typ {
			case unix.NLMSG_DONE:
				done = true
			case unix.NLMSG_ERROR:
				done = true
				if r, ok := parseRefusal(h, body); ok {
					return r.errno
				}
			default:
				if len(body) >= 4 {
					do(body[4:])
				}
			}
			return nil
		})
		if errors.Is(err, unix.EINTR) {
			whole = false
		} else if err != nil {
			return false, err
		}
	}
	return whole, nil
}
