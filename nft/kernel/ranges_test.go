package kernel

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// listedRanges gives n ranges as the kernel lists them, with their set.
func listedRanges(n int) (set nft.Set, listed []nft.Listed, want []nft.Element) {
	st := &dataplane.State{}
	for i := range n {
		var a [4]byte
		binary.BigEndian.PutUint32(a[:], 10<<24|uint32(i)<<8)
		st.ServiceCIDRs = append(st.ServiceCIDRs, netip.PrefixFrom(netip.AddrFrom4(a), 25))
	}
	l := nft.List(st)[ipfamily.IPv4]
	for id := range nft.NumSets {
		if s := nft.SetByID(id); s.Interval && len(l.Elements[id]) >= n {
			set, listed = s, l.Elements[id]
		}
	}
	for i := range listed {
		want = append(want, listed[i].Element)
	}
	slices.Reverse(listed)
	return set, listed, want
}

// TestSameElements: a range that is gone is named.
func TestSameElements(t *testing.T) {
	set, listed, want := listedRanges(100)
	if len(want) < 100 {
		t.Fatalf("%d ranges", len(want))
	}
	if found := sameElements(ipfamily.IPv4, &set, listed, want); found != nil {
		t.Errorf("all are there: %v", found)
	}
	listed[3].Bits--
	found := sameElements(ipfamily.IPv4, &set, listed, want)
	if len(found) != 1 || !strings.Contains(found[0], "is gone") {
		t.Errorf("one is wider: %v", found)
	}
}

// BenchmarkSameElements compares few ranges and many: ten times as many are to take about ten times as long.
func BenchmarkSameElements(b *testing.B) {
	for _, n := range []int{2000, 20_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			set, listed, want := listedRanges(n)
			for b.Loop() {
				sameElements(ipfamily.IPv4, &set, listed, want)
			}
		})
	}
}
