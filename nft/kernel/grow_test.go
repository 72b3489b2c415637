package kernel

import (
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/netlink"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestListedWhileGrowing lists sets that have just grown, while the kernel moves their elements to new buckets. Each
// element is listed once, and all are where the kernel tells how many there are.
func TestListedWhileGrowing(t *testing.T) {
	_, first := host(t)
	apply(t, first, &dataplane.State{})
	_, told, err := first.reader.setCount(ipfamily.IPv4, nft.Services)
	labtest.Check(t, err)
	for range 10 {
		_, b := host(t)
		snap, planner := snapshot.New(), dataplane.NewPlanner(configs["cluster CIDR"])
		for n := 10; n < 3000; n = n * 3 / 2 {
			change, _ := planner.Apply(snap, snap.Apply(large(n, 2)))
			_, err := b.ApplyAll(planner.State(), change)
			labtest.Check(t, err)
			for _, set := range []nft.SetID{nft.Services, nft.Endpoints, nft.Services} {
				listed, err := b.reader.Elements(ipfamily.IPv4, set)
				labtest.Check(t, err)
				seen := map[string]bool{}
				for _, l := range listed {
					seen[string(l.Key())] = true
				}
				if want := b.model.Count(ipfamily.IPv4, set); len(seen) != len(listed) || told && len(seen) != want {
					t.Errorf("%d elements of %s are listed, %d different ones; want %d", len(listed), set, len(seen), want)
				}
			}
		}
		labtest.Check(t, b.Remove())
	}
}

// TestSweepWhileGrowing looks for a client of an endpoint that is gone, while the kernel moves the map's entries to
// new buckets: as many lists as were ordered lack that client. The map is listed again until a list is whole.
func TestSweepWhileGrowing(t *testing.T) {
	delta := large(2, 1)
	for _, svc := range delta.Services {
		svc.Affinity = time.Hour
	}
	_, b := host(t)
	snap, planner := snapshot.New(), dataplane.NewPlanner(configs["cluster CIDR"])
	planner.Apply(snap, snap.Apply(delta))
	_, err := b.ApplyAll(planner.State(), dataplane.Change{})
	labtest.Check(t, err)
	check(t, b)
	gone := netip.MustParseAddrPort("192.0.2.1:80")
	for of, id := range b.model.PoolIDs(ipfamily.IPv4) {
		switch name, _ := b.model.ServiceOf(id); {
		case of.Outside:
		case name.Name == "service-0":
			remember(t, b, id, gone, 1)
		default:
			remember(t, b, id, netip.AddrPortFrom(delta.Slices[name].Endpoints[0].Addr, 8080), 10)
		}
	}
	wire := &torn{Wire: b.sweeper.Wire, without: gone.Addr(), left: sweepsPerTransaction}
	b.sweeper.Wire = wire
	b.sweep.schedule(0, sweepsPerTransaction, time.Now())
	for b.sweep.left[0] > 0 {
		clear(b.sweep.due[:]) // as if it were later
		check(t, b)
	}
	left, err := b.reader.Elements(ipfamily.IPv4, nft.Affinity)
	labtest.Check(t, err)
	if len(left) != 10 || wire.left > 0 {
		t.Errorf("%d clients are remembered, and %d lists were to be torn still; want 10 and 0", len(left), wire.left)
	}
}

// torn is a wire to a kernel that moves a map's entries while it lists them: in place of an entry it lists another
// one twice.
type torn struct {
	netlink.Wire
	without netip.Addr
	left    int
}

func (w *torn) Recv(b []byte, wait bool) (int, error) {
	n, err := w.Wire.Recv(b, wait)
	var other, lacking []byte
	for m := range netlink.Messages(b[:max(n, 0)]) {
		if m.Type == unix.NLMSG_DONE || m.Type == unix.NLMSG_ERROR {
			continue
		}
		list := netlink.Find(m.Body[netlink.NetfilterLen:], unix.NFTA_SET_ELEM_LIST_ELEMENTS)
		for _, elem := range netlink.Each(list) {
			p := parseElement(elem)
			if addr := netip.AddrFrom4([4]byte(p.data)); addr == w.without {
				lacking = elem
			} else {
				other = elem
			}
		}
	}
	if lacking != nil && w.left > 0 {
		w.left--
		copy(lacking, other)
	}
	return n, err
}
