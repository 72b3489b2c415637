// Package netlink is how Verdict talks to the kernel: one Buffer that builds messages, one Socket, one Conn that
// asks, lists and commits, one Error. Nothing in it knows what the messages are about, but for the headers that
// several callers share.
package netlink

import (
	"encoding/binary"
	"fmt"
	"iter"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// Message is one message from the kernel. Body is what follows the header, and valid until the next datagram is read.
type Message struct {
	Type, Flags uint16
	Seq         uint32
	// Port is the address of the socket that caused the message; 0 if none did.
	Port uint32
	Body []byte
}

// Messages walks the messages of a datagram. If one is malformed the last thing it gives is an error.
func Messages(b []byte) iter.Seq2[Message, error] {
	return func(yield func(Message, error) bool) {
		for b := b; len(b) >= HeaderLen; {
			n := int(binary.NativeEndian.Uint32(b))
			if n < HeaderLen || n > len(b) {
				yield(Message{}, fmt.Errorf("netlink: a message of %d bytes in a datagram with %d left", n, len(b)))
				return
			}
			m := Message{
				Type: binary.NativeEndian.Uint16(b[4:]), Flags: binary.NativeEndian.Uint16(b[6:]),
				Seq: binary.NativeEndian.Uint32(b[8:]), Port: binary.NativeEndian.Uint32(b[12:]), Body: b[HeaderLen:n],
			}
			if !yield(m, nil) {
				return
			}
			b = b[min(align(n), len(b)):]
		}
	}
}

// last says whether nothing follows the message in the answer to a request.
func (m *Message) last() bool { return m.Type == unix.NLMSG_DONE || m.Type == unix.NLMSG_ERROR }

// Error is the kernel's refusal of one message.
type Error struct {
	// Errno is the error number; Is and As find it.
	Errno unix.Errno
	// Seq is the number of the message in its Buffer, from 1 on.
	Seq uint32
	// Offset is where in the message the kernel points to, in bytes from its start; 0 if it does not say.
	Offset int
	// Text is what the kernel says in words, or empty.
	Text string
}

func (e *Error) Error() string {
	if e.Text != "" {
		return e.Text + ": " + e.Errno.Error()
	}
	return e.Errno.Error()
}

func (e *Error) Unwrap() error { return e.Errno }

// refusal reads what a message says went wrong: it answers a request, or ends a list. An acknowledgement gives nil.
func (m *Message) refusal() *Error {
	if !m.last() || len(m.Body) < 4 {
		return nil
	}
	errno := -int32(binary.NativeEndian.Uint32(m.Body))
	if errno <= 0 {
		return nil
	}
	e := &Error{Errno: unix.Errno(errno), Seq: m.Seq}
	if m.Type == unix.NLMSG_ERROR && len(m.Body) >= 4+HeaderLen {
		e.extend(m.Flags, m.Body[4:])
	}
	return e
}

// extend reads the header of the refused message, and the attributes that follow it. Unless the kernel caps its
// answer, the whole message stands in between.
func (e *Error) extend(flags uint16, refused []byte) {
	e.Seq = binary.NativeEndian.Uint32(refused[8:])
	rest := refused[HeaderLen:]
	if flags&unix.NLM_F_CAPPED == 0 {
		length := min(uint64(binary.NativeEndian.Uint32(refused)), uint64(len(refused)))
		rest = refused[max(min(align(int(length)), len(refused)), HeaderLen):]
	}
	d, err := netlink.NewAttributeDecoder(rest)
	if err != nil {
		return
	}
	for d.Next() {
		switch d.Type() {
		case unix.NLMSGERR_ATTR_MSG:
			e.Text = d.String()
		case unix.NLMSGERR_ATTR_OFFS:
			e.Offset = int(d.Uint32())
		}
	}
}

// TooLarge says that a batch does not fit into the largest datagram that this process may send. Nothing of it was sent.
type TooLarge struct {
	// Size is the length of the batch, Room that of the largest datagram, in bytes.
	Size, Room int
}

func (e *TooLarge) Error() string {
	return fmt.Sprintf("a transaction of %d bytes needs a larger send buffer than the %d bytes this process may have "+
		"(CAP_NET_ADMIN in the initial user namespace, or a higher net.core.wmem_max)", e.Size, e.Room)
}

func (e *TooLarge) Unwrap() error { return unix.EMSGSIZE }
