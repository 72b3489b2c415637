package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/ipfamily"
	"github.com/verdict-proxy/verdict/nft"
)

// Conn is a netlink socket to nf_tables. It is not safe for concurrent use.
type Conn struct {
	wire    wire
	receive []byte
	// sendMax is the largest datagram that there was room for so far.
	sendMax int
	// stale says that an error may have left something unread in the socket, which is no answer to what is asked next.
	stale bool
	// tolerant takes a list that was interrupted again and again for what it is worth; torn says that there was one.
	tolerant, torn bool
}

// receiveLen holds many messages of a dump: the kernel walks a set from its beginning again for each datagram.
const receiveLen = 256 << 10

// Dial opens a socket in the network namespace that a file descriptor stands for; 0 is the caller's own.
func Dial(netns int) (*Conn, error) {
	s, err := openSocket(netns)
	if err != nil {
		return nil, err
	}
	return newConn(s), nil
}

// inherit uses a socket that OpenSocket made. What a former user left unread in it is thrown away.
func inherit(f *os.File) (*Conn, error) {
	s, err := inheritSocket(f)
	if err != nil {
		return nil, err
	}
	c := newConn(s)
	c.stale = true
	if err := c.fresh(); err != nil {
		return nil, errors.Join(fmt.Errorf("nft: inherited socket: %w", err), c.Close())
	}
	return c, nil
}

// fresh throws away what an error left unread. It fails if the socket is of no use any more.
func (c *Conn) fresh() error {
	for c.stale {
		_, err := c.recv(false)
		switch {
		case errors.Is(err, unix.EAGAIN):
			c.stale = false
		case err != nil && !errors.Is(err, unix.ENOBUFS):
			return err
		}
	}
	return nil
}

func newConn(w wire) *Conn { return &Conn{wire: w, receive: make([]byte, receiveLen)} }

// Close closes the socket. Nothing in the kernel changes by it.
func (c *Conn) Close() error { return c.wire.Close() }

// refusal is the kernel's answer to one message it did not take.
type refusal struct {
	seq    uint32
	errno  unix.Errno
	offset int
	text   string
}

// errTooLarge says that a batch does not fit into the largest datagram this process may send.
type errTooLarge struct{ size, room int }

func (e *errTooLarge) Error() string {
	return fmt.Sprintf("a transaction of %d bytes needs a larger send buffer than the %d bytes this process may have "+
		"(CAP_NET_ADMIN in the initial user namespace, or a higher net.core.wmem_max)", e.size, e.room)
}

func (e *errTooLarge) Unwrap() error { return unix.EMSGSIZE }

// transact sends one batch and gives what the kernel refused of it; nothing refused means that the batch is in. The kernel
// works a batch off while it is being sent, so the answers are all there once the call is back. After an error it is not known
// whether the batch is in, unless it is an *errTooLarge: then it is not.
func (c *Conn) transact(b []byte) ([]refusal, error) {
	if err := errors.Join(c.fresh(), c.makeRoom(len(b))); err != nil {
		return nil, err
	}
	if err := c.send(b); err != nil {
		if errors.Is(err, unix.EMSGSIZE) {
			return nil, &errTooLarge{len(b), c.sendMax}
		}
		c.stale = true
		return nil, err
	}
	refused, err := c.answers()
	c.stale = err != nil
	return refused, err
}

// answers reads what was refused of the batch that was just sent.
func (c *Conn) answers() (refused []refusal, err error) {
	var lost error
	for {
		n, err := c.recv(false)
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

// sendMargin is what a datagram takes of the send buffer besides its bytes.
const sendMargin = 64 << 10

// makeRoom makes room for a batch in one datagram.
func (c *Conn) makeRoom(n int) error {
	if n <= c.sendMax {
		return nil
	}
	got, err := c.wire.room(n + sendMargin)
	if err != nil {
		return fmt.Errorf("nft: netlink send buffer: %w", err)
	}
	// Twice what is asked for is what the socket has, and what a small datagram may take of it.
	if c.sendMax = max(2*got-sendMargin, c.sendMax); n > c.sendMax {
		return &errTooLarge{n, c.sendMax}
	}
	return nil
}

func (c *Conn) send(b []byte) error {
	for {
		if err := c.wire.send(b); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// recv reads one datagram into c.receive.
func (c *Conn) recv(wait bool) (int, error) {
	for {
		if n, err := c.wire.recv(c.receive, wait); !errors.Is(err, unix.EINTR) {
			return n, err
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
		whole, err := c.query(request, true, do)
		if err != nil || whole {
			return err
		}
	}
	if c.tolerant {
		c.torn = true
		return nil
	}
	return fmt.Errorf("interrupted %d times by other transactions: %w", maxDumps, unix.EINTR)
}

// query sends a request and calls do with the attributes of each object in the answer. It says whether the answer was whole.
func (c *Conn) query(request []byte, dump bool, do func(attrs []byte)) (whole bool, err error) {
	if err := c.fresh(); err != nil {
		return false, err
	}
	c.stale = true // until all of the answer is read
	if err := c.send(request); err != nil {
		return false, err
	}
	whole = true
	for done := false; !done; {
		n, err := c.recv(true)
		if err != nil {
			return false, err
		}
		err = eachMessage(c.receive[:n], func(h header, body []byte) error {
			whole = whole && h.flags&unix.NLM_F_DUMP_INTR == 0
			switch h.typ {
			case unix.NLMSG_DONE, unix.NLMSG_ERROR:
				done = true
				return endOf(h, body)
			default:
				done = !dump
				if len(body) >= 4 {
					do(body[4:])
				}
			}
			return nil
		})
		c.stale = !done
		if dump && errors.Is(err, unix.EINTR) {
			whole = false
		} else if err != nil {
			return false, err
		}
	}
	return whole, nil
}

// endOf gives the error that the last message of an answer tells of: a list ends with one if something went wrong on the way.
func endOf(h header, body []byte) error {
	if r, ok := parseRefusal(h, body); ok {
		return r.errno
	}
	if h.typ == unix.NLMSG_DONE && len(body) >= 4 {
		if code := int32(binary.NativeEndian.Uint32(body)); code < 0 {
			return unix.Errno(-code)
		}
	}
	return nil
}

// generation gives the number of the last transaction of the network namespace, whoever made it.
func (c *Conn) generation() (uint32, error) {
	var w buffer
	w.reset()
	w.end(w.message(subsystem|unix.NFT_MSG_GETGEN, unix.NLM_F_REQUEST, 0))
	var gen uint32
	_, err := c.query(w.b, false, func(attrs []byte) {
		eachAttr(attrs, func(typ uint16, v []byte) {
			if typ == unix.NFTA_GEN_ID && len(v) == 4 {
				gen = binary.BigEndian.Uint32(v)
			}
		})
	})
	if err != nil {
		return 0, fmt.Errorf("nft: generation: %w", err)
	}
	return gen, nil
}

// getChunk is how many elements are asked for at once: the kernel answers each in a datagram of its own, and all of them have to
// find room in the socket.
const getChunk = 32

// get reads elements of one set by their keys, and calls do with each that is there.
func (c *Conn) get(f ipfamily.Family, set nft.SetID, keys []nft.Element, do func(nft.Element)) error {
	return c.getListed(f, set, keys, func(l nft.Listed) { do(l.Element) })
}

// getListed is get with what the kernel adds to the elements. In the set of source ranges a key is found in the range it lies in.
func (c *Conn) getListed(f ipfamily.Family, set nft.SetID, keys []nft.Element, do func(nft.Listed)) error {
	for len(keys) > 0 {
		n := min(getChunk, len(keys))
		if err := c.getOnce(f, set, keys[:n], do); err != nil {
			return fmt.Errorf("nft: read %s %s %s: %w", f.NFT(), nft.TableName, set, err)
		}
		keys = keys[n:]
	}
	return nil
}

// getOnce asks for a few elements. The kernel stops at the first that is not there and does not say which it was: those
// after the answers that came are asked for again.
func (c *Conn) getOnce(f ipfamily.Family, set nft.SetID, keys []nft.Element, do func(nft.Listed)) error {
	for len(keys) > 0 {
		var w batch
		w.reset()
		m := w.message(subsystem|unix.NFT_MSG_GETSETELEM, unix.NLM_F_REQUEST|unix.NLM_F_ACK, f)
		w.text(unix.NFTA_SET_ELEM_LIST_TABLE, nft.TableName)
		w.text(unix.NFTA_SET_ELEM_LIST_SET, set.String())
		list := w.nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS)
		for i := range keys {
			w.element(f, &keys[i], false)
		}
		w.close(list)
		w.end(m)
		got := 0
		whole, err := c.query(w.b, true, func(attrs []byte) {
			got++
			eachElement(f, set, attrs, do)
		})
		switch {
		case err == nil && whole:
			return nil
		case err == nil:
			return unix.EINTR
		case !errors.Is(err, unix.ENOENT):
			return err
		}
		if got >= len(keys) {
			return err
		}
		keys = keys[got+1:]
	}
	return nil
}
