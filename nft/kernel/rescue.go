package kernel

import (
	"encoding/binary"
	"net/netip"
	"strings"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// rescue reads the remembered clients from tables that are about to be replaced, so that the clients keep their
// endpoints. It understands the present layout, and the earlier ones.
func (b *Backend) rescue() (out ipfamily.Per[[]nft.Listed], err error) {
	for i, f := range ipfamily.All {
		if !b.tables[i].exists {
			continue
		}
		if out[i], err = b.reader.rescue(f, &b.model); err != nil {
			return out, err
		}
	}
	return out, nil
}

func (c *Conn) rescue(f ipfamily.Family, m *nft.Model) (out []nft.Listed, err error) {
	was, first, err := c.stickyPools(f)
	if err != nil || len(was) == 0 {
		return nil, err
	}
	entries, err := c.rawElements(f, nft.Affinity.String())
	if err != nil {
		return nil, err
	}
	ids, taken := m.PoolIDs(f), map[string]bool{}
	for i := range entries {
		e := &entries[i]
		l := nft.Listed{Timeout: e.Timeout, Expires: e.Expires}
		var known bool
		switch n := f.AddrLen(); { // with IPv4, the keys of all layouts are of the same length
		case first && len(e.key) == n+4: // the client's address and an id of the pool
			var id uint32
			client, _ := netip.AddrFromSlice(e.key[:n])
			id, known = ids[was[binary.NativeEndian.Uint32(e.key[n:])]]
			l.Element = nft.AffinityElement(id, client)
			known = known && l.SetData(f, e.data)
		case !first && len(e.key) == affinityKey:
			var id uint32
			if id, known = ids[was[binary.NativeEndian.Uint32(e.key)]]; known {
				key := append(native(id), e.key[4:]...)
				l.Element, known = nft.ElementFrom(f, nft.Affinity, key, nil, e.data, "", "")
			}
		}
		if known && !taken[string(l.Key())] {
			taken[string(l.Key())] = true
			out = append(out, l)
		}
	}
	return out, nil
}

// stickyPools reads which frontends with session affinity lead to which ids of pools: these are not the same in all
// layouts. Layout 1, the first, had other names for the maps.
func (c *Conn) stickyPools(f ipfamily.Family) (out map[uint32]dataplane.Counted, first bool, err error) {
	out = map[uint32]dataplane.Counted{}
	for name, outside := range map[string]bool{"sticky": false, "outside-sticky": true,
		nft.StickyServices.String(): false, nft.OutsideStickyServices.String(): true} {
		elements, err := c.rawElements(f, name)
		if err != nil {
			return nil, false, err
		}
		first = first || len(elements) > 0 && !strings.HasSuffix(name, "services")
		for i := range elements {
			e, ok := nft.ElementFrom(f, nft.Services, elements[i].key, nil, elements[i].data, "", "")
			if ok {
				out[e.Number()] = dataplane.Counted{Key: e.FrontendKey(), Outside: outside}
			}
		}
	}
	return out, first, nil
}
