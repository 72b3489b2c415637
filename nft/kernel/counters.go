package kernel

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/netlink"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// Counters reads the kernel's counters of our tables. It has its own socket, and the kernel serves readers while
// somebody writes, so it delays nobody. It is no error if tables or elements do not exist. It is not safe for
// concurrent use.
type Counters struct{ ownSocket }

// OpenCounters opens them in the network namespace of the calling thread.
func OpenCounters() (*Counters, error) {
	s, err := openSocket()
	if err != nil {
		return nil, err
	}
	return &Counters{s}, nil
}

// ownSocket is the socket of a reader that works beside the writer.
type ownSocket struct {
	conn  *Conn
	netns *os.File
}

// openSocket opens a socket in the network namespace of the calling thread.
func openSocket() (s ownSocket, err error) {
	if s.netns, err = os.Open("/proc/thread-self/ns/net"); err != nil {
		return s, fmt.Errorf("nft: network namespace: %w", err)
	}
	if s.conn, err = Dial(int(s.netns.Fd())); err != nil {
		return s, errors.Join(err, s.netns.Close())
	}
	return s, nil
}

// Close closes the socket.
func (s *ownSocket) Close() error { return errors.Join(s.conn.Close(), s.netns.Close()) }

// ready opens the socket anew if an error has left it of no use.
func (s *ownSocket) ready() error {
	if s.conn.Fresh() == nil {
		return nil
	}
	return s.reopen()
}

func (s *ownSocket) reopen() error {
	conn, err := Dial(int(s.netns.Fd()))
	if err != nil {
		return err
	}
	s.conn.Close() // it may be closed already
	s.conn = conn
	return nil
}

// AllFrontends reads the counts of all frontends. It lists the maps, at quadratic cost: beyond about ten thousand
// frontends, use Frontends.
func (c *Counters) AllFrontends(do func(dataplane.FrontendCount)) error {
	if err := c.ready(); err != nil {
		return err
	}
	for _, f := range ipfamily.All {
		pools := map[uint32]nft.Element{}
		err := c.list(f, nft.Pools, func(l nft.Listed) { pools[l.ID()] = l.Element })
		for _, set := range nft.FrontendSets() {
			err = errors.Join(err, c.list(f, set, func(l nft.Listed) { count(&l, pools, do) }))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// count gives what was counted at a frontend. Its pool was read, too, if that is InPools.
func count(l *nft.Listed, pools map[uint32]nft.Element, do func(dataplane.FrontendCount)) {
	pool := l.Element
	if l.InPools() {
		pool = pools[l.PoolID()]
	}
	if count, ok := l.FrontendCount(&pool); ok {
		do(count)
	}
}

// list reads a set. If somebody commits a transaction meanwhile, an element may be missing, or be there twice: it
// will be read again.
func (s *ownSocket) list(f ipfamily.Family, set nft.SetID, do func(nft.Listed)) error {
	err := s.conn.query(listRequest(f, set), func(attrs []byte) { eachElement(f, set, attrs, do) })
	if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EINTR) {
		return fmt.Errorf("nft: list %s %s %s: %w", f.NFT(), nft.TableName, set, err)
	}
	return nil
}

// get looks some elements of a set up.
func (c *Counters) get(f ipfamily.Family, keys []nft.Element, do func(nft.Listed)) error {
	if len(keys) == 0 {
		return nil
	}
	if err := c.conn.getListed(f, keys[0].Set, keys, do); err != nil && !errors.Is(err, unix.ENOENT) {
		return err
	}
	return nil
}

// Frontends reads the counts of some frontends.
func (c *Counters) Frontends(at []dataplane.Counted, do func(dataplane.FrontendCount)) error {
	if err := c.ready(); err != nil {
		return err
	}
	for _, f := range ipfamily.All {
		keys := map[nft.SetID][]nft.Element{}
		for _, a := range at {
			if a.Key.Addr.Is4() == (f == ipfamily.IPv4) {
				for _, key := range nft.FrontendKeys(a) {
					keys[key.Set] = append(keys[key.Set], key)
				}
			}
		}
		pools, indirect, there := map[uint32]nft.Element{}, map[string]bool{}, map[string]bool{}
		for _, set := range nft.FrontendSets() { // Services first
			here := keys[set]
			switch {
			case set.IsUncounted(): // what is not counted is looked for last
				here = slices.DeleteFunc(here, func(e nft.Element) bool { return there[string(e.Key())] })
			default:
				clear(there)
			}
			if set == nft.InsideServices || set == nft.UncountedInsideServices {
				here = slices.DeleteFunc(here, func(e nft.Element) bool { return !indirect[string(e.Key())] })
			}
			found, err := c.frontends(f, here, pools)
			if err != nil {
				return err
			}
			for i := range found {
				there[string(found[i].Key())] = true
				if found[i].IsIndirect() {
					indirect[string(found[i].Key())] = true
				}
				count(&found[i], pools, do)
			}
		}
	}
	return nil
}

// frontends reads some elements of a map of frontends, and their elements of Pools that were not read before.
func (c *Counters) frontends(f ipfamily.Family, keys []nft.Element, pools map[uint32]nft.Element) (
	found []nft.Listed, err error,
) {
	if err := c.get(f, keys, func(l nft.Listed) { found = append(found, l) }); err != nil {
		return nil, err
	}
	var ids []nft.Element
	for i := range found {
		id := found[i].PoolID()
		if _, asked := pools[id]; found[i].InPools() && !asked {
			pools[id] = nft.Element{}
			ids = append(ids, nft.PoolKey(id))
		}
	}
	return found, c.get(f, ids, func(l nft.Listed) { pools[l.ID()] = l.Element })
}

// Endpoints reads the counts of the endpoints of some frontends, as they were read before; of those that share a pool
// once. Members gives the endpoints that a frontend with session affinity may have.
func (c *Counters) Endpoints(of []dataplane.FrontendCount, members func(dataplane.Counted) []netip.AddrPort,
	do func(dataplane.EndpointCount),
) error {
	if err := c.ready(); err != nil {
		return err
	}
	asked := map[uint32]dataplane.Counted{}
	var slots, ends ipfamily.Per[[]nft.Element]
	for i := range of {
		fe, family := &of[i], 0
		if !fe.Key.Addr.Is4() {
			family = 1
		}
		if _, again := asked[fe.Pool]; again {
			continue
		}
		asked[fe.Pool] = fe.Counted
		if !fe.Sticky {
			slots[family] = append(slots[family], nft.CountedSlots(fe.Pool, fe.Key.Protocol, fe.Endpoints)...)
			continue
		}
		for _, ep := range members(fe.Counted) {
			ends[family] = append(ends[family], nft.MemberKey(fe.Pool, ep))
		}
	}
	tell := func(c dataplane.EndpointCount) {
		c.Counted = asked[c.Place.Pool]
		do(c)
	}
	for i, f := range ipfamily.All {
		err := errors.Join(c.get(f, slots[i], func(l nft.Listed) { tell(l.SlotCount()) }),
			c.get(f, ends[i], func(l nft.Listed) { tell(l.MemberCount()) }))
		if err != nil {
			return err
		}
	}
	return nil
}

// Refused reads how many packets rules have rejected or dropped. Packets to frontends without endpoints are counted at
// the frontends, and only those of a refused share here.
func (c *Counters) Refused() ([]dataplane.RefusedCount, error) {
	if err := c.ready(); err != nil {
		return nil, err
	}
	var packets ipfamily.Per[[dataplane.NumRefusals]uint64]
	for i, f := range ipfamily.All {
		for _, kind := range nft.Refusing() {
			err := c.conn.query(rulesRequest(f, nft.ChainID{Kind: kind}.Name()), func(attrs []byte) {
				if refusal, n, ok := refusedBy(kind, attrs); ok {
					packets[i][refusal] += n
				}
			})
			if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EINTR) {
				return nil, fmt.Errorf("nft: count packets refused in %s %s: %w", f.NFT(), nft.TableName, err)
			}
		}
	}
	var out []dataplane.RefusedCount
	for i, f := range ipfamily.All {
		for _, r := range [...]dataplane.Refusal{
			dataplane.RefusedNoEndpoints, dataplane.RefusedSourceRanges, dataplane.RefusedUnusedPort,
			dataplane.RefusedUnallocated, dataplane.RefusedOvertaken, dataplane.RefusedOverLimit,
			dataplane.DroppedOverLimit,
		} {
			out = append(out, dataplane.RefusedCount{Family: f, Refusal: r, Packets: packets[i][r]})
		}
	}
	return out, nil
}

// Limited reads what was over the limits of pools.
func (c *Counters) Limited() (out []dataplane.LimitCount, err error) {
	if err := c.ready(); err != nil {
		return nil, err
	}
	for _, f := range ipfamily.All {
		err = errors.Join(err, c.list(f, nft.LimitedPools, func(l nft.Listed) {
			out = append(out, dataplane.LimitCount{Family: f, Pool: l.ID(), Packets: l.Packets})
		}))
	}
	return out, err
}

// rulesRequest asks for the rules of a chain.
func rulesRequest(f ipfamily.Family, chain string) []byte {
	var w netlink.Buffer
	m := w.Netfilter(netlink.NFTables(unix.NFT_MSG_GETRULE), unix.NLM_F_DUMP, f.NFProto())
	w.Text(unix.NFTA_RULE_TABLE, nft.TableName)
	w.Text(unix.NFTA_RULE_CHAIN, chain)
	w.End(m)
	return w.Bytes()
}

// refusedBy reads a rule of a chain. It counts what it turns away if ok says so.
func refusedBy(chain nft.ChainKind, attrs []byte) (refusal dataplane.Refusal, packets uint64, ok bool) {
	counts, set := false, ""
	for _, e := range netlink.Each(netlink.Find(attrs, unix.NFTA_RULE_EXPRESSIONS)) {
		switch expressionName(e) {
		case "counter":
			counts, packets, _ = counter(e)
		case "lookup":
			if set == "" { // the first set says which packets; others make exceptions
				set = netlink.Find(expressionData(e), unix.NFTA_LOOKUP_SET).Text()
			}
		}
	}
	refusal, ok = nft.Refuses(chain, set)
	return refusal, packets, ok && counts
}

// Remembered counts what rules remember in a set of each family. Kernels before Linux 6.16 do not know the number, so
// the entries are listed. If that takes longer than patience, or if there is no table at the ingress for a set there,
// the family's count is -1.
func (c *Counters) Remembered(set string, patience time.Duration) (counts ipfamily.Per[int], err error) {
	if err := c.ready(); err != nil {
		return counts, err
	}
	id, known := setByName(set)
	if !known {
		return counts, fmt.Errorf("nft: there is no set %s", set)
	}
	deadline := time.Now().Add(patience)
	for i, f := range ipfamily.All {
		n, told, err := c.conn.setCount(f, id)
		if err == nil && !told {
			n, err = c.countRemembered(f, id, deadline)
		}
		switch {
		case errors.Is(err, unix.ENOENT) && id.IsIngress():
			n = -1
		case err != nil && !errors.Is(err, unix.ENOENT):
			return counts, fmt.Errorf("nft: count %s %s: %w", tableText(f, id.IsIngress()), set, err)
		}
		counts[i] = n
	}
	return counts, nil
}

// countRemembered lists them. A list cannot be ended early but with its socket.
func (c *Counters) countRemembered(f ipfamily.Family, set nft.SetID, deadline time.Time) (n int, err error) {
	if err := c.conn.Ask(listRequest(f, set)); err != nil {
		return 0, err
	}
	for done := false; !done; {
		if time.Now().After(deadline) {
			return -1, c.reopen()
		}
		done, err = c.conn.Next(withAttributes(func(attrs []byte) { n += elementsIn(attrs) }))
		if err != nil && !errors.Is(err, unix.EINTR) {
			return 0, err
		}
	}
	return n, nil
}

// elementsIn counts the elements of one message.
func elementsIn(attrs []byte) (n int) {
	for range netlink.Each(netlink.Find(attrs, unix.NFTA_SET_ELEM_LIST_ELEMENTS)) {
		n++
	}
	return n
}

// Fill returns how full the sets of both tables are according to plan, after the last transaction; nil before the
// first. It is safe for concurrent use.
func (b *Backend) Fill() *ipfamily.Per[nft.Fill] { return b.fill.Load() }
