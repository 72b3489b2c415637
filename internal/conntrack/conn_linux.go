package conntrack

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/ipfamily"
	"github.com/verdict-proxy/verdict/internal/netlink"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Conn is a pair of netlink sockets to the kernel's connection tracking: flows are deleted while the list they are in
// is still being read, so that memory does not follow their number. It is not safe for concurrent use.
type Conn struct {
	lists, deletes *netlink.Conn
	out            netlink.Buffer
	flows          []flow
	// unfiltered says that this kernel, older than 5.8, does not know CTA_FILTER, which it passes over without a word.
	unfiltered bool
}

// Dial opens the sockets in the network namespace that a file descriptor stands for; 0 is the caller's own.
func Dial(netns int) (*Conn, error) {
	lists, err := netlink.Dial(unix.NETLINK_NETFILTER, netns)
	if err != nil {
		return nil, fmt.Errorf("conntrack: %w", err)
	}
	deletes, err := netlink.Dial(unix.NETLINK_NETFILTER, netns)
	if err != nil {
		return nil, fmt.Errorf("conntrack: %w", errors.Join(err, lists.Close()))
	}
	return &Conn{lists: lists, deletes: deletes}, nil
}

// Close closes the sockets.
func (c *Conn) Close() error { return errors.Join(c.lists.Close(), c.deletes.Close()) }

// Load has the kernel load connection tracking, if it is a module and nobody needed it yet: any question for it does
// that. Its sysctls are there from then on.
func Load() error {
	c, err := Dial(0)
	if err != nil {
		return err
	}
	nobody := query{family: ipfamily.IPv4, protocol: snapshot.UDP, addr: netip.IPv4Unspecified(), port: 1}
	if err := errors.Join(c.list(nobody, func([]flow) error { return nil }), c.Close()); err != nil {
		return fmt.Errorf("conntrack: %w", err)
	}
	return nil
}

func (c *Conn) filters() bool { return !c.unfiltered }

// maxDumps bounds how often a list begins again because the kernel found it to be inconsistent.
const maxDumps = 10

// list calls do with the flows that answer a query, one datagram's at a time. A list that was interrupted begins
// again, and then do sees flows twice. If the kernel turns out not to filter, that shows in filters, and what do saw
// may be anything.
func (c *Conn) list(q query, do func([]flow) error) error {
	for range maxDumps {
		err := c.listOnce(q, do)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if q.protocol != 0 && (errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP)) {
			c.unfiltered = true
			return nil
		}
		return err
	}
	return fmt.Errorf("the list was interrupted %d times: %w", maxDumps, unix.EINTR)
}

func (c *Conn) listOnce(q query, do func([]flow) error) error {
	c.out.Reset()
	writeList(&c.out, q)
	if err := c.lists.Ask(c.out.Bytes()); err != nil {
		return err
	}
	for {
		c.flows = c.flows[:0]
		done, err := c.lists.Next(func(body []byte) { c.appendFlow(q, body) })
		if len(c.flows) > 0 {
			if err := do(c.flows); err != nil {
				return err
			}
		}
		if done || err != nil {
			return err
		}
	}
}

// appendFlow keeps a flow of a list.
func (c *Conn) appendFlow(q query, body []byte) {
	if len(body) < netlink.NetfilterLen {
		return
	}
	f, ok := parseFlow(body[netlink.NetfilterLen:])
	if !ok {
		return
	}
	c.unfiltered = c.unfiltered || !q.matches(&f)
	c.flows = append(c.flows, f)
}

// maxDeletes bounds one sendmsg. Each deletion may be refused, and what the kernel says then must fit into a socket's
// receive buffer of default size, where a message takes 768 bytes.
const maxDeletes = 128

// remove deletes flows and says how many the kernel did delete. That one is gone already is no error.
//
// If the socket had no room for all that the kernel refused, all flows were tried, fewer are counted, and the error
// is ENOBUFS.
func (c *Conn) remove(flows []flow) (removed int, err error) {
	var overflow error
	for part := range slices.Chunk(flows, maxDeletes) {
		c.out.Reset()
		for i := range part {
			writeDelete(&c.out, &part[i])
		}
		refused, err := c.deletes.Commit(c.out.Bytes())
		switch {
		case errors.Is(err, unix.ENOBUFS):
			overflow = fmt.Errorf("delete flows: %w", err)
		case err != nil:
			return removed, fmt.Errorf("delete flows: %w", err)
		default:
			removed += len(part) - len(refused)
		}
		for i := range refused {
			if e := &refused[i]; e.Errno != unix.ENOENT {
				return removed, fmt.Errorf("delete flow: %w", e)
			}
		}
	}
	return removed, overflow
}
