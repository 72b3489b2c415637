package kernel

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/netlink"
	"github.com/verdict-proxy/verdict/nft"
)

// Conn is a netlink socket to nf_tables. It is not safe for concurrent use.
type Conn struct {
	*netlink.Conn
	// tolerant takes a list that was interrupted again and again for what it is worth; torn says that there was one.
	tolerant, torn bool
}

// Dial opens a socket in the network namespace that a file descriptor stands for; 0 is the caller's own.
func Dial(netns int) (*Conn, error) {
	c, err := netlink.Dial(unix.NETLINK_NETFILTER, netns)
	if err != nil {
		return nil, fmt.Errorf("nft: %w", err)
	}
	return &Conn{Conn: c}, nil
}

// inherit uses a socket that OpenSocket made. What a former user left unread in it is thrown away.
func inherit(f *os.File) (*Conn, error) {
	c, err := netlink.Take(f, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("nft: %w", err)
	}
	return &Conn{Conn: c}, nil
}

// OpenSocket opens the netlink socket that a Backend writes by, for a process that is to hold it while Backends come
// and go. The caller closes it; the tables a Backend owns are protected as long as somebody holds it.
func OpenSocket() (*os.File, error) {
	s, err := netlink.Open(unix.NETLINK_NETFILTER, 0)
	if err != nil {
		return nil, fmt.Errorf("nft: %w", err)
	}
	f, err := s.File()
	return f, errors.Join(err, s.Close())
}

// OwnsTables says whether a socket that OpenSocket made owns our tables: one of them, if not both.
func OwnsTables(f *os.File) bool {
	s, err := netlink.Inherit(f, unix.NETLINK_NETFILTER)
	if err != nil {
		return false
	}
	defer s.Close()
	port, err := s.Port()
	if err != nil {
		return false
	}
	reader, err := Dial(0)
	if err != nil {
		return false
	}
	defer reader.Close()
	for _, family := range ipfamily.All {
		if info, err := reader.table(family); err == nil && info.owner == port {
			return true
		}
	}
	return false
}

// Replay sends a batch that a Backend made, to measure what the kernel alone takes for it. It means something only in a
// namespace that holds what the Backend's own did before the batch.
func (c *Conn) Replay(batch []byte) error {
	refused, err := c.Commit(batch)
	if err == nil && len(refused) > 0 {
		e := &refused[0]
		err = fmt.Errorf("message %d and %d more were refused: %w", e.Seq, len(refused)-1, e)
	}
	if err != nil {
		return fmt.Errorf("nft: replay: %w", err)
	}
	return nil
}

// dump asks for all objects of a kind, and calls do with the attributes of each. If somebody commits a transaction
// meanwhile, in any table, objects may be missing: then it calls begin and do anew, from the first one on.
func (c *Conn) dump(request []byte, begin func(), do func(attrs []byte)) error {
	err := c.Dump(request, begin, withAttributes(do))
	if c.tolerant && errors.Is(err, unix.EINTR) {
		c.torn = true
		return nil
	}
	return err
}

// query sends a request and calls do with the attributes of each object in the answer. The error is EINTR if objects
// may be missing from a list.
func (c *Conn) query(request []byte, do func(attrs []byte)) error {
	return c.Query(request, withAttributes(do))
}

func withAttributes(do func(attrs []byte)) func(body []byte) {
	return func(body []byte) { do(body[min(netlink.NetfilterLen, len(body)):]) }
}

// getChunk is how many elements are asked for at once: the kernel answers each in a datagram of its own, and all of
// them have to find room in the socket.
const getChunk = 32

// get reads elements of one set by their keys, and calls do with each that is there.
func (c *Conn) get(f ipfamily.Family, set nft.SetID, keys []nft.Element, do func(nft.Element)) error {
	return c.getListed(f, set, keys, func(l nft.Listed) { do(l.Element) })
}

// getListed is get with what the kernel adds to the elements. In the set of source ranges a key is found in the range
// it lies in.
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
		proto, table := tableAt(f, set.IsIngress())
		m := w.Netfilter(netlink.NFTables(unix.NFT_MSG_GETSETELEM), 0, proto)
		w.Text(unix.NFTA_SET_ELEM_LIST_TABLE, table)
		w.Text(unix.NFTA_SET_ELEM_LIST_SET, set.String())
		list := w.Nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS)
		for i := range keys {
			w.element(f, &keys[i], false)
		}
		w.Close(list)
		w.End(m)
		got := 0
		err := c.query(w.Bytes(), func(attrs []byte) {
			got++
			eachElement(f, set, attrs, do)
		})
		if !errors.Is(err, unix.ENOENT) {
			return err
		}
		if got >= len(keys) {
			return err
		}
		keys = keys[got+1:]
	}
	return nil
}
