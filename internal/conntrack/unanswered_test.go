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
				u := NewUnanswered(c)
				a, err := u.Answers(t.Context(), dead)
				labtest.Check(t, err)
				if len(a.Answered) != 1 || len(a.Waiting) != 1 {
					t.Errorf("%d flows are answered, and %v wait", len(a.Answered), a.Waiting)
				}
				before := listAll(t, c)
				n, err := u.Delete(t.Context(), dead, func(k dataplane.Key) bool {
					return k == all[0].frontend || k.Addr == dead.Addr()
				})
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
	u := NewUnanswered(c)
	for b.Loop() {
		if _, err := u.Delete(b.Context(), dead, func(dataplane.Key) bool { return false }); err != nil {
			b.Fatal(err)
		}
	}
}
