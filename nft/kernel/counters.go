package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// Counters reads what the kernel has counted in our tables. It has a socket of its own, and the kernel lets everybody read while
// somebody writes: it holds up nobody. That tables or elements are not there is no error. It is not safe for concurrent use.
type Counters struct {
	conn  *Conn
	netns *os.File
}

// OpenCounters opens them in the network namespace of the calling thread.
func OpenCounters() (*Counters, error) {
	netns, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return nil, fmt.Errorf("nft: network namespace: %w", err)
	}
	c := &Counters{netns: netns}
	if c.conn, err = Dial(int(netns.Fd())); err != nil {
		return nil, errors.Join(err, netns.Close())
	}
	return c, nil
}

// Close closes the socket.
func (c *Counters) Close() error { return errors.Join(c.conn.Close(), c.netns.Close()) }

// ready opens the socket anew if an error has left it of no use.
func (c *Counters) ready() error {
	if c.conn.fresh() == nil {
		return nil
	}
	return c.reopen()
}

func (c *Counters) reopen() error {
	conn, err := Dial(int(c.netns.Fd()))
	if err != nil {
		return err
	}
	c.conn.Close() // it may be closed already
	c.conn = conn
	return nil
}

// AllFrontends reads the counts of all frontends. It lists the maps, whose cost is quadratic: with more than some ten thousands it is
// better to name them.
func (c *Counters) AllFrontends(do func(dataplane.FrontendCount)) error {
	if err := c.ready(); err != nil {
		return err
	}
	for _, f := range nft.Families {
		for _, set := range [...]nft.SetID{nft.Services, nft.OutsideServices} {
			// If somebody commits a transaction meanwhile, an element may be missing, or be there twice. It will be read again.
			_, err := c.conn.query(listRequest(f, set), true, func(attrs []byte) {
				eachElement(f, set, attrs, func(l nft.Listed) {
					if count, ok := l.FrontendCount(); ok {
						do(count)
					}
				})
			})
			if err != nil && !errors.Is(err, unix.ENOENT) {
				return fmt.Errorf("nft: count %s %s %s: %w", f, nft.TableName, set, err)
			}
		}
	}
	return nil
}

// bySet are keys by the map they are to be looked up in.
type bySet [len(nft.Families)][nft.NumSets][]nft.Element

func (b *bySet) add(at dataplane.Counted, keys ...nft.Element) {
	i := 0
	if !at.Key.Addr.Is4() {
		i = 1
	}
	if len(keys) > 0 {
		b[i][keys[0].Set] = append(b[i][keys[0].Set], keys...)
	}
}

// read looks all of them up.
func (c *Counters) read(keys *bySet, do func(f nft.Family, l nft.Listed)) error {
	if err := c.ready(); err != nil {
		return err
	}
	for i, f := range nft.Families {
		for set, k := range keys[i] {
			err := c.conn.getListed(f, nft.SetID(set), k, func(l nft.Listed) { do(f, l) })
			if err != nil && !errors.Is(err, unix.ENOENT) {
				return err
			}
		}
	}
	return nil
}

// Frontends reads the counts of some frontends.
func (c *Counters) Frontends(at []dataplane.Counted, do func(dataplane.FrontendCount)) error {
	var keys bySet
	for _, a := range at {
		keys.add(a, nft.FrontendKey(a))
	}
	return c.read(&keys, func(_ nft.Family, l nft.Listed) {
		if count, ok := l.FrontendCount(); ok {
			do(count)
		}
	})
}

// Endpoints reads the counts of the endpoints of some frontends, as they were read before. Members gives the endpoints that a
// frontend with session affinity may have.
func (c *Counters) Endpoints(of []dataplane.FrontendCount, members func(dataplane.Counted) []netip.AddrPort,
	do func(dataplane.EndpointCount),
) error {
	var slots, pools, ends bySet
	for _, fe := range of {
		if fe.Sticky {
			pools.add(fe.Counted, nft.PoolKey(fe.Counted))
		} else {
			slots.add(fe.Counted, nft.SlotKeysOf(fe.Counted, fe.Endpoints)...)
		}
	}
	if err := c.read(&slots, func(_ nft.Family, l nft.Listed) { do(l.SlotCount()) }); err != nil {
		return err
	}
	asked := map[uint32]dataplane.Counted{} // frontends of a port share a pool
	err := c.read(&pools, func(_ nft.Family, l nft.Listed) {
		at := dataplane.Counted{Key: l.FrontendKey(), Outside: l.Set == nft.OutsideSticky}
		if _, again := asked[l.PoolID()]; again {
			return
		}
		asked[l.PoolID()] = at
		for _, ep := range members(at) {
			ends.add(at, nft.MemberKey(l.PoolID(), ep))
		}
	})
	if err != nil {
		return err
	}
	return c.read(&ends, func(_ nft.Family, l nft.Listed) {
		count := l.MemberCount()
		count.Counted = asked[count.Place.Pool]
		do(count)
	})
}

// refusing are the chains whose rules turn packets away that no frontend is responsible for.
var refusing = [...]nft.ChainKind{nft.Prerouting, nft.Output, nft.Frontends}

// Refused reads how many packets were turned away by rules. Those of frontends without endpoints are counted there.
func (c *Counters) Refused() ([]dataplane.RefusedCount, error) {
	if err := c.ready(); err != nil {
		return nil, err
	}
	var packets [len(nft.Families)][dataplane.NumRefusals]uint64
	for i, f := range nft.Families {
		for _, kind := range refusing {
			_, err := c.conn.query(rulesRequest(f, nft.ChainID{Kind: kind}.Name()), true, func(attrs []byte) {
				if refusal, n, ok := refusedBy(attrs); ok {
					packets[i][refusal] += n
				}
			})
			if err != nil && !errors.Is(err, unix.ENOENT) {
				return nil, fmt.Errorf("nft: count packets refused in %s %s: %w", f, nft.TableName, err)
			}
		}
	}
	var out []dataplane.RefusedCount
	for i, f := range nft.Families {
		for _, r := range [...]dataplane.Refusal{dataplane.RefusedSourceRanges, dataplane.RefusedUnusedPort, dataplane.RefusedUnallocated} {
			out = append(out, dataplane.RefusedCount{IPv6: f == nft.IPv6, Refusal: r, Packets: packets[i][r]})
		}
	}
	return out, nil
}

// rulesRequest asks for the rules of a chain.
func rulesRequest(f nft.Family, chain string) []byte {
	var w buffer
	w.reset()
	m := w.message(subsystem|unix.NFT_MSG_GETRULE, unix.NLM_F_REQUEST|unix.NLM_F_DUMP, f)
	w.text(unix.NFTA_RULE_TABLE, nft.TableName)
	w.text(unix.NFTA_RULE_CHAIN, chain)
	w.end(m)
	return w.b
}

// refusedBy reads a rule that looks at one of our sets and counts what it turns away.
func refusedBy(attrs []byte) (refusal dataplane.Refusal, packets uint64, ok bool) {
	known := false
	eachAttr(attrs, func(typ uint16, v []byte) {
		if typ != unix.NFTA_RULE_EXPRESSIONS {
			return
		}
		eachAttr(v, func(_ uint16, e []byte) {
			switch expressionName(e) {
			case "counter":
				ok, packets, _ = counter(e)
			case "lookup":
				if known { // the first set says which packets; others make exceptions
					return
				}
				eachAttr(expressionData(e), func(typ uint16, v []byte) {
					if typ == unix.NFTA_LOOKUP_SET {
						refusal, known = nft.Refuses(unix.ByteSliceToString(v))
					}
				})
			}
		})
	})
	return refusal, packets, ok && known
}

// Affinity counts the clients that are remembered, in each family. Kernels before Linux 6.16 do not know how many there are. There
// they are listed, which for many takes long: after the time given it is given up, and the family has -1.
func (c *Counters) Affinity(patience time.Duration) (counts [len(nft.Families)]int, err error) {
	if err := c.ready(); err != nil {
		return counts, err
	}
	deadline := time.Now().Add(patience)
	for i, f := range nft.Families {
		n, told, err := c.tells(f)
		if err == nil && !told {
			n, err = c.countAffinity(f, deadline)
		}
		if err != nil && !errors.Is(err, unix.ENOENT) {
			return counts, fmt.Errorf("nft: count %s %s %s: %w", f, nft.TableName, nft.Affinity, err)
		}
		counts[i] = n
	}
	return counts, nil
}

// tells asks the kernel how many clients are remembered. A kernel that does not count does not tell.
func (c *Counters) tells(f nft.Family) (n int, told bool, err error) {
	var w buffer
	w.reset()
	m := w.message(subsystem|unix.NFT_MSG_GETSET, unix.NLM_F_REQUEST, f)
	w.text(unix.NFTA_SET_TABLE, nft.TableName)
	w.text(unix.NFTA_SET_NAME, nft.Affinity.String())
	w.end(m)
	_, err = c.conn.query(w.b, false, func(attrs []byte) {
		eachAttr(attrs, func(typ uint16, v []byte) {
			if typ == nftaSetCount && len(v) == 4 {
				n, told = int(binary.BigEndian.Uint32(v)), true
			}
		})
	})
	return n, told, err
}

// countAffinity lists them. A list cannot be ended early but with its socket.
func (c *Counters) countAffinity(f nft.Family, deadline time.Time) (n int, err error) {
	if err := c.conn.send(listRequest(f, nft.Affinity)); err != nil {
		return 0, err
	}
	for done := false; !done; {
		if time.Now().After(deadline) {
			return -1, c.reopen()
		}
		got, err := c.conn.recv(true)
		if err != nil {
			c.conn.stale = true
			return 0, err
		}
		err = eachMessage(c.conn.receive[:got], func(h header, body []byte) error {
			if done = h.typ == unix.NLMSG_DONE || h.typ == unix.NLMSG_ERROR; done {
				return endOf(h, body)
			}
			n += elementsIn(body)
			return nil
		})
		if err != nil && !errors.Is(err, unix.EINTR) {
			return 0, err
		}
	}
	return n, nil
}

// elementsIn counts the elements of one message.
func elementsIn(body []byte) (n int) {
	if len(body) < 4 {
		return 0
	}
	eachAttr(body[4:], func(typ uint16, list []byte) {
		if typ == unix.NFTA_SET_ELEM_LIST_ELEMENTS {
			eachAttr(list, func(uint16, []byte) { n++ })
		}
	})
	return n
}

// Fill says how full the sets of both tables are, as far as they are planned, after the last transaction; nil before the first. Safe
// for concurrent use.
func (b *Backend) Fill() *[len(nft.Families)]nft.Fill { return b.fill.Load() }
