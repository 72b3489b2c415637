package kernel

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestSharedRanges: shared ranges come and go in one transaction each, another process adopts them, what others did to
// them is repaired, and the rules lead past the refusals.
func TestSharedRanges(t *testing.T) {
	h, b := host(t)
	st := cart()
	st.ServiceCIDRs = []netip.Prefix{netip.MustParsePrefix("10.96.0.0/12"), netip.MustParsePrefix("fd00:10:96::/108")}
	apply(t, b, st)
	cause := func(to string) dataplane.Cause {
		t.Helper()
		a := addr(to)
		source := map[bool]string{true: "198.51.100.9", false: "2001:db8::9"}[a.Is4()]
		got, err := trace(loadedFrom(t, b), dataplane.Packet{Source: addr(source), Destination: a, Protocol: snapshot.TCP,
			Port: 7, Interface: "eth0"}, dataplane.LocalNode{Addrs: []netip.Addr{addr("10.100.0.1")}})
		labtest.Check(t, err)
		return got.Cause
	}
	leads := func(to string, want dataplane.Cause) {
		t.Helper()
		if got := cause(to); got != want {
			t.Errorf("%s: %v, want %v", to, got, want)
		}
	}
	leads("10.100.0.1", dataplane.NotService)
	leads("10.100.0.2", dataplane.Unallocated)
	leads("10.96.0.1", dataplane.UnusedPort)

	for n, ranges := range []string{"10.100.0.0/16 fd00:10:96::a:0/112", "10.96.0.0/12",
		"10.100.0.0/16 10.101.7.0/24"} {
		st.SharedRanges = nil
		for _, p := range strings.Fields(ranges) {
			st.SharedRanges = append(st.SharedRanges, netip.MustParsePrefix(p))
		}
		r, err := b.Apply(st, dataplane.Change{Globals: true})
		labtest.Check(t, err)
		if r.Full || len(r.Left) > 0 {
			t.Errorf("%s: %+v", ranges, r)
		}
		leads("10.100.0.2", dataplane.NotService)
		leads("10.96.0.1", map[bool]dataplane.Cause{true: dataplane.NotService, false: dataplane.UnusedPort}[n == 1])
	}
	leads("10.101.7.1", dataplane.NotService)
	leads("10.101.8.1", dataplane.Unallocated)

	labtest.Check(t, b.Close())
	b = open(t, h, Options{})
	if r, err := b.Apply(st, dataplane.Change{}); err != nil || r.Added+r.Replaced+r.Removed > 0 {
		t.Errorf("another process writes %+v, %v", r, err)
	}
	labtest.Run(t, h, "", "nft", "delete", "element", "ip", "verdict", "shared-ranges", "{ 10.101.7.0/24 }")
	if found := check(t, b); len(found) == 0 {
		t.Error("a missing range is not found")
	}
	_, err := b.Apply(st, dataplane.Change{})
	labtest.Check(t, err)
	leads("10.101.7.1", dataplane.NotService)

	st.SharedRanges = nil
	_, err = b.Apply(st, dataplane.Change{Globals: true})
	labtest.Check(t, err)
	leads("10.100.0.2", dataplane.Unallocated)
}
