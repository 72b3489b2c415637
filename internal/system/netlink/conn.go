package netlink

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Conn exchanges messages with the kernel, which answers a request before the call that sends it returns. It is not
// safe for concurrent use.
type Conn struct {
	// Wire is where datagrams go.
	Wire Wire
	in   []byte
	// most is the largest batch that there was room for so far.
	most int
	// listing says that an answer is read by Next, and torn that objects may be missing from it; stale says that an
	// error may have left something unread, which does not answer the next request.
	listing, torn, stale bool
}

// receiveLen holds whatever the kernel puts into one datagram of a list, and no less should: for each datagram it
// walks a set of nf_tables from its beginning again. A single object may be larger, and gets a larger buffer then.
const receiveLen = 256 << 10

// New returns a Conn over a wire. Unread says that the wire may hold answers to somebody else's requests.
func New(w Wire, unread bool) *Conn {
	return &Conn{Wire: w, in: make([]byte, receiveLen), stale: unread}
}

// Dial opens a socket, as Open does.
func Dial(protocol, netns int) (*Conn, error) {
	s, err := Open(protocol, netns)
	if err != nil {
		return nil, err
	}
	return New(s, false), nil
}

// Take uses a socket that Open made, as Inherit does, and discards what its former user left unread.
func Take(f *os.File, protocol int) (*Conn, error) {
	s, err := Inherit(f, protocol)
	if err != nil {
		return nil, err
	}
	c := New(s, true)
	if err := c.Fresh(); err != nil {
		return nil, errors.Join(fmt.Errorf("netlink: inherited socket: %w", err), c.Close())
	}
	return c, nil
}

// Close closes the socket. Nothing in the kernel changes by that, except that tables may lose their owner.
func (c *Conn) Close() error { return c.Wire.Close() }

// Fresh discards what an error left unread. It fails if the socket is of no use any more.
func (c *Conn) Fresh() error {
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

// begin prepares for a request.
func (c *Conn) begin() error {
	c.stale, c.listing, c.torn = c.stale || c.listing, false, false
	return c.Fresh()
}

// Commit sends messages that ask for no answer as one datagram, and returns what the kernel refused of them; nothing
// refused means that all are in. Whether one refusal undoes the others is a matter of the subsystem. After an error
// it is not known what is in, unless it is a *TooLarge: then nothing is. After ENOBUFS all were tried, and more were
// refused than is returned.
func (c *Conn) Commit(b []byte) ([]Error, error) {
	if err := errors.Join(c.begin(), c.makeRoom(len(b))); err != nil {
		return nil, err
	}
	if err := c.send(b); err != nil {
		if errors.Is(err, unix.EMSGSIZE) {
			return nil, &TooLarge{len(b), c.most}
		}
		c.stale = true
		return nil, err
	}
	refused, err := c.refusals()
	c.stale = err != nil
	return refused, err
}

// refusals reads what was refused of the batch that was just sent.
func (c *Conn) refusals() (refused []Error, err error) {
	var lost error
	for {
		n, err := c.recv(false)
		switch {
		case errors.Is(err, unix.EAGAIN):
			return refused, lost
		case errors.Is(err, unix.ENOBUFS):
			// More was refused than the socket holds. What it does hold has to be read: the next request would take
			// it for its answer.
			lost = err
			continue
		case err != nil:
			return refused, err
		}
		for m, err := range Messages(c.in[:min(n, len(c.in))]) {
			if err != nil {
				return refused, err
			}
			if e := m.refusal(); e != nil {
				refused = append(refused, *e)
			}
		}
	}
}

// SendMargin is what a datagram takes of the send buffer besides its bytes.
const SendMargin = 64 << 10

// makeRoom makes room for a batch in one datagram.
func (c *Conn) makeRoom(n int) error {
	if n <= c.most {
		return nil
	}
	got, err := c.Wire.Room(n + SendMargin)
	if err != nil {
		return fmt.Errorf("netlink: send buffer: %w", err)
	}
	// The socket has twice what was asked for, of which a small datagram may take all.
	if c.most = max(2*got-SendMargin, c.most); n > c.most {
		return &TooLarge{n, c.most}
	}
	return nil
}

// ErrTorn ends a list from which objects may be missing, since others changed what is listed. It is EINTR, as is a
// request that the kernel refuses with that number.
var ErrTorn = fmt.Errorf("others changed what is listed: %w", unix.EINTR)

// Ask sends a request whose answer Next reads. A request that is no dump is made to be acknowledged, which ends the
// answer.
func (c *Conn) Ask(request []byte) error {
	if err := c.begin(); err != nil {
		return err
	}
	if flags := binary.NativeEndian.Uint16(request[6:]); flags&unix.NLM_F_DUMP != unix.NLM_F_DUMP {
		binary.NativeEndian.PutUint16(request[6:], flags|unix.NLM_F_ACK)
	}
	if err := c.send(request); err != nil {
		c.stale = true
		return err
	}
	c.listing = true
	return nil
}

// Next reads one datagram of the answer, and calls do with the body of each object in it, which is valid until do
// returns. Done says that nothing follows; the error is then what the kernel says to the request: an *Error, or
// ErrTorn if others changed a list while it was read, so that objects may be missing. The next request discards
// an answer that is not read to its end.
func (c *Conn) Next(do func(body []byte)) (done bool, err error) {
	n, err := c.recv(true)
	if err == nil {
		done, err = c.objects(n, do)
	}
	if done {
		c.listing = false
	} else if err != nil {
		c.stale, c.listing = true, false
	}
	return done, err
}

// objects calls do with the objects of the datagram that was just read.
func (c *Conn) objects(n int, do func(body []byte)) (done bool, err error) {
	if n > len(c.in) { // what was cut off is lost: the list has to be read again, into a buffer that it fits into
		c.in, c.torn = make([]byte, 2*n), true
		return false, nil
	}
	for m, err := range Messages(c.in[:n]) {
		if err != nil {
			return false, err
		}
		c.torn = c.torn || m.Flags&unix.NLM_F_DUMP_INTR != 0
		if !m.last() {
			do(m.Body)
			continue
		}
		if e := m.refusal(); e != nil {
			return true, e
		}
		if c.torn {
			return true, ErrTorn
		}
		return true, nil
	}
	return false, nil
}

// Query sends a request and calls do with the body of each object in the answer. The error is as that of Next.
func (c *Conn) Query(request []byte, do func(body []byte)) error {
	if err := c.Ask(request); err != nil {
		return err
	}
	for {
		if done, err := c.Next(do); done || err != nil {
			return err
		}
	}
}

// maxDumps bounds how often a list begins again because others changed it.
const maxDumps = 10

// Dump is Query for a list, which it starts over if others change it meanwhile; after too many tries it fails with
// EINTR. It calls begin, if that is not nil, before each try.
func (c *Conn) Dump(request []byte, begin func(), do func(body []byte)) error {
	for range maxDumps {
		if begin != nil {
			begin()
		}
		if err := c.Query(request, do); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
	return fmt.Errorf("interrupted %d times by others: %w", maxDumps, unix.EINTR)
}

// Get is Dump for what has one object at most; nil if there was none.
func (c *Conn) Get(request []byte) (body []byte, err error) {
	err = c.Dump(request, func() { body = nil }, func(b []byte) { body = bytes.Clone(b) })
	return body, err
}

func (c *Conn) send(b []byte) error {
	for {
		if err := c.Wire.Send(b); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// recv reads one datagram into c.in.
func (c *Conn) recv(wait bool) (int, error) {
	for {
		if n, err := c.Wire.Recv(c.in, wait); !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}
