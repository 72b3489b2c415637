package conntrack

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// unansweredCases are flows to dead and to other endpoints; those to be deleted are marked.
func unansweredCases(v6 bool) (dead netip.AddrPort, all []entry, doomed map[netip.AddrPort]bool) {
	addr := func(v4, v6Text string) netip.Addr {
		if v6 {
			return netip.MustParseAddr(v6Text)
		}
		return netip.MustParseAddr(v4)
	}
	web := addr("10.96.0.1", "fd00:10:96::1")
	key := dataplane.Key{Addr: web, Protocol: snapshot.TCP, Port: 80}
	dead = netip.AddrPortFrom(addr("10.244.0.1", "fd00:244::1"), 8080)
	doomed = map[netip.AddrPort]bool{}
	add := func(delete bool, e entry) {
		e.client = clientOf(len(all), v6)
		all, doomed[e.client] = append(all, e), delete
	}
	add(true, entry{frontend: key, endpoint: dead})
	add(true, entry{frontend: key, endpoint: dead})
	add(false, entry{frontend: key, endpoint: dead, answered: true})
	add(false, entry{frontend: key, endpoint: dead, zone: 7})
	add(false, entry{frontend: key, endpoint: netip.AddrPortFrom(dead.Addr(), 8081)})
	add(false, entry{frontend: key, endpoint: netip.AddrPortFrom(addr("10.244.0.2", "fd00:244::2"), 8080)})
	udp := dataplane.Key{Addr: web, Protocol: snapshot.UDP, Port: 80}
	add(false, entry{frontend: udp, endpoint: dead})
	others := dataplane.Key{Addr: addr("10.96.0.2", "fd00:10:96::2"), Protocol: snapshot.TCP, Port: 80}
	add(false, entry{frontend: others, endpoint: dead})
	direct := dataplane.Key{Addr: dead.Addr(), Protocol: snapshot.TCP, Port: dead.Port()}
	add(false, entry{frontend: direct, endpoint: dead})
	return dead, all, doomed
}

// TestDeleteUnanswered deletes exactly the unanswered flows that a Service sent to an endpoint, also if the kernel does
// not filter.
func TestDeleteUnanswered(t *testing.T) {
	for _, unfiltered := range []bool{false, true} {
		for _, v6 := range []bool{false, true} {
			t.Run(fmt.Sprintf("unfiltered=%v ipv6=%v", unfiltered, v6), func(t *testing.T) {
				c := emptyHost(t)
				dead, all, doomed := unansweredCases(v6)
				insert(t, c, all...)
				c.unfiltered = unfiltered
				u := newUnanswered(t, c)
				before := listAll(t, c)
				ids := map[string]bool{}
				n, err := u.Delete(t.Context(), []netip.AddrPort{dead}, func(f WaitingFlow) bool {
					ids[f.ID] = true
					return f.Frontend == all[0].frontend || f.Frontend.Addr == dead.Addr()
				})
				if len(ids) != 3 { // one of them at another frontend
					t.Errorf("%d flows wait", len(ids))
				}
				labtest.Check(t, err)
				gone := removed(t, before, listAll(t, c))
				if n != 2 || len(gone) != 2 {
					t.Errorf("%d deleted; gone are\n%s", n, strings.Join(gone, "\n"))
				}
				left := 0
				for _, keep := range doomed {
					if !keep {
						left++
					}
				}
				if now := len(listAll(t, c)); now != left {
					t.Errorf("%d flows are left, want %d", now, left)
				}
			})
		}
	}
}

// TestDeleteUnansweredOfMany deletes the flows to many dead endpoints: how often the table is walked, and how many
// flows are listed, does not grow with the product of endpoints and flows.
func TestDeleteUnansweredOfMany(t *testing.T) {
	const many = 1000
	dead, cases, _ := unansweredCases(false)
	table := &tcpTable{}
	var endpoints []netip.AddrPort
	for i := range many {
		e := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 245, byte(i >> 8), byte(i)}), dead.Port())
		endpoints = append(endpoints, e)
		for n := range 2 {
			table.flows = append(table.flows, flow{frontend: cases[0].frontend, endpoint: e,
				client: clientOf(2*i+n, false), answered: n == 1})
		}
	}
	seen := 0
	u := newUnanswered(t, table)
	n, err := u.Delete(t.Context(), endpoints, func(WaitingFlow) bool {
		seen++
		return true
	})
	if err != nil || n != many || seen != many || len(table.flows) != many {
		t.Errorf("%d deleted of %d, %d left: %v", n, seen, len(table.flows), err)
	}
	if lists := len(table.listed); lists != 1 {
		t.Errorf("the table was walked %d times for %d endpoints", lists, many)
	}
}

// BenchmarkDeleteUnanswered walks a table of 100,000 flows for one endpoint.
func BenchmarkDeleteUnanswered(b *testing.B) {
	c := emptyHost(b)
	dead, all, _ := unansweredCases(false)
	many := make([]entry, 0, 100_000)
	for i := range cap(many) {
		e := all[5]
		e.client, e.answered = clientOf(1000+i, false), true
		many = append(many, e)
	}
	insert(b, c, append(many, all...)...)
	u := newUnanswered(b, c)
	for b.Loop() {
		_, err := u.Delete(b.Context(), []netip.AddrPort{dead}, func(WaitingFlow) bool { return false })
		labtest.Check(b, err)
	}
}
