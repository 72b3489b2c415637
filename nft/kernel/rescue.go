package kernel

import (
	"encoding/binary"
	"net/netip"

	"github.com/verdict-proxy/verdict/internal/ipfamily"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// rescue reads the remembered clients from tables that are about to be replaced, so that the clients keep their
// endpoints. It understands the present layout and layout 1.
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
	sticky, err := c.layout1Pools(f)
	if err != nil {
		return nil, err
	}
	if len(sticky) == 0 {
		return c.Elements(f, nft.Affinity)
	}
	ids := m.PoolIDs(f)
	// The keys of layout 1 are the client's address and an id of the pool.
	entries, err := c.rawElements(f, nft.Affinity.String())
	if err != nil {
		return nil, err
	}
	taken := map[string]bool{}
	for i := range entries {
		e := &entries[i]
		n := f.AddrLen()
		if len(e.key) != n+4 {
			continue
		}
		client, _ := netip.AddrFromSlice(e.key[:n])
		id, ok := ids[sticky[binary.NativeEndian.Uint32(e.key[n:])]]
		if !ok {
			continue
		}
		l := nft.Listed{Element: nft.AffinityElement(id, client), Timeout: e.Timeout, Expires: e.Expires}
		if l.SetData(f, e.data) && !taken[string(l.Key())] {
			taken[string(l.Key())] = true
			out = append(out, l)
		}
	}
	return out, nil
}

// layout1Pools reads what the ids of pools stand for in layout 1, which had them for session affinity alone: its maps
// sticky and outside-sticky, of the years before tables had pools.
func (c *Conn) layout1Pools(f ipfamily.Family) (map[uint32]dataplane.Counted, error) {
	out := map[uint32]dataplane.Counted{}
	for _, name := range [...]string{"sticky", "outside-sticky"} {
		elements, err := c.rawElements(f, name)
		if err != nil {
			return nil, err
		}
		for i := range elements {
			e, ok := nft.ElementFrom(f, nft.Services, elements[i].key, nil, elements[i].data, "", "")
			if ok {
				out[e.PoolID()] = dataplane.Counted{Key: e.FrontendKey(), Outside: name == "outside-sticky"}
			}
		}
	}
	return out, nil
}
