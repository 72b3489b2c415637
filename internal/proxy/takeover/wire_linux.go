package takeover

import (
	"bytes"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/netlink"
)

// conn is a netlink socket in the network namespace of the thread that opened it. It is for one goroutine at a time.
type conn struct{ *netlink.Conn }

func dial(protocol int) (conn, error) {
	c, err := netlink.Dial(protocol, 0)
	return conn{c}, err
}

// opening starts a message with flags, and returns its place.
type opening func(w *netlink.Buffer, flags uint16) int

// netfilter opens a message of nfnetlink.
func netfilter(typ uint16, family uint8) opening {
	return func(w *netlink.Buffer, flags uint16) int { return w.Netfilter(typ, flags, family) }
}

// list asks for all objects of a kind and returns the body of each message, its own header included. attrs may be nil.
func (c conn) list(open opening, attrs func(*netlink.Buffer)) (objects [][]byte, err error) {
	err = c.Dump(request(open, unix.NLM_F_DUMP, attrs), func() { objects = nil }, func(body []byte) {
		objects = append(objects, bytes.Clone(body))
	})
	if err != nil {
		return nil, err
	}
	return objects, nil
}

// do has something done. An error is the kernel's refusal.
func (c conn) do(open opening, attrs func(*netlink.Buffer)) error {
	return c.Query(request(open, 0, attrs), func([]byte) {})
}

func request(open opening, flags uint16, attrs func(*netlink.Buffer)) []byte {
	var w netlink.Buffer
	m := open(&w, flags)
	if attrs != nil {
		attrs(&w)
	}
	w.End(m)
	return w.Bytes()
}
