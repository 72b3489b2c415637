package conntrack

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/netlink"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Conn holds netlink sockets to the kernel's connection tracking. Flows are deleted while their list is still being
// read, so that memory use does not depend on the number of flows. It is not safe for concurrent use.
type Conn struct {
	lists, deletes *netlink.Conn
	// spare takes the place of lists while that is being read: between two datagrams, there may be another list.
	spare *netlink.Conn
	out   netlink.Buffer
	flows []flow
	// unfiltered says that this kernel is older than 5.8: it ignores CTA_FILTER silently.
	unfiltered bool
	// few is fewFlows, but for tests.
	few uint32
}

// fewFlows is how many flows take less time to list than the kernel takes to walk its buckets: 262,144 in 10 ms, and a
// flow in 2 µs. Up to so many, one list of all takes the place of several.
const fewFlows = 4096

// Dial opens the sockets in the network namespace of a file descriptor; 0 is the caller's own namespace.
func Dial(netns int) (*Conn, error) {
	c := &Conn{few: fewFlows}
	for _, to := range []**netlink.Conn{&c.lists, &c.spare, &c.deletes} {
		var err error
		if *to, err = netlink.Dial(unix.NETLINK_NETFILTER, netns); err != nil {
			return nil, fmt.Errorf("conntrack: %w", errors.Join(err, c.Close()))
		}
	}
	return c, nil
}

// Close closes the sockets.
func (c *Conn) Close() (err error) {
	for _, socket := range []*netlink.Conn{c.lists, c.spare, c.deletes} {
		if socket != nil {
			err = errors.Join(err, socket.Close())
		}
	}
	return err
}

// Load makes the kernel load the connection tracking module if it is not loaded yet. Any request does that. Afterwards
// its sysctls exist.
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

func (c *Conn) narrow() bool {
	if c.unfiltered {
		return false
	}
	n, err := c.count()
	return err != nil || n > c.few
}

// count returns how many flows there are in the network namespace.
func (c *Conn) count() (n uint32, err error) {
	c.out.Reset()
	m := c.out.Netfilter(messageStats, 0, unix.AF_UNSPEC)
	c.out.End(m)
	err = c.deletes.Query(c.out.Bytes(), func(body []byte) {
		if value := netlink.Find(body[min(netlink.NetfilterLen, len(body)):], ctaStatsEntries); len(value) == 4 {
			n = binary.BigEndian.Uint32(value)
		}
	})
	return n, err
}

// maxDumps bounds how often a list restarts because it was inconsistent.
const maxDumps = 10

// list calls do with the flows that match a query, one datagram at a time. At its end, do may call list, once. If the
// kernel interrupts a list, it restarts, and do sees some flows twice. If the kernel turns out not to filter, filters
// returns false from then on, and do may have seen any flows.
func (c *Conn) list(q query, do func([]flow) error) error { return c.listAgain(q, func() {}, do) }

// listAgain is list, and calls begin whenever the list begins.
func (c *Conn) listAgain(q query, begin func(), do func([]flow) error) error {
	for range maxDumps {
		begin()
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
	socket := c.lists
	c.lists, c.spare = c.spare, nil
	defer func() { c.lists, c.spare = socket, c.lists }()
	if err := socket.Ask(c.out.Bytes()); err != nil {
		return err
	}
	for {
		c.flows = c.flows[:0]
		done, err := socket.Next(func(body []byte) { c.appendFlow(q, body) })
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

// appendFlow adds a flow of a list to c.flows.
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

func (c *Conn) again(of *flow) (f flow, ok bool, err error) {
	f, ok, err = c.get(func(m *netlink.Buffer) { m.Attr(ctaTupleReply|unix.NLA_F_NESTED, of.reply...) }, of.frontend.Addr)
	return f, ok && f.identity() == of.identity(), err
}

// Find returns the flow that a client's packets to a destination belong to; false if there is none.
func (c *Conn) Find(p snapshot.Protocol, client, to netip.AddrPort) (f Flow, ok bool, err error) {
	base, ok, err := c.get(func(m *netlink.Buffer) { writeTuple(m, ctaTupleOrig, p, client, to) }, to.Addr())
	if ok {
		f.take(&base)
	}
	return f, ok, err
}

// get asks for one flow by a tuple.
func (c *Conn) get(tuple func(*netlink.Buffer), of netip.Addr) (f flow, ok bool, err error) {
	c.out.Reset()
	m := c.out.Netfilter(messageGet, 0, ipfamily.Of(of).NFProto())
	tuple(&c.out)
	c.out.End(m)
	err = c.deletes.Query(c.out.Bytes(), func(body []byte) {
		if len(body) >= netlink.NetfilterLen {
			f, ok = parseFlow(body[netlink.NetfilterLen:])
		}
	})
	if errors.Is(err, unix.ENOENT) {
		return f, false, nil
	}
	return f, ok, err
}

// maxDeletes bounds one sendmsg. The kernel may reject each deletion, and all its answers must fit into a socket's
// receive buffer of default size, where each takes 768 bytes.
const maxDeletes = 128

// remove deletes flows and returns how many the kernel deleted. A flow that is already gone is no error.
//
// If the kernel's answers do not fit into the socket, all deletions were tried, removed is too low, and the error is
// ENOBUFS.
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
