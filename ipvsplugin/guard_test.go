package ipvsplugin

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/sysctl"
	"golang.org/x/sys/unix"
)

const guardListing = `table arp verdict-ipvs {
	set addresses {
		type ipv4_addr
		elements = { 10.96.0.1 }
	}

	chain input {
		type filter hook input priority filter; policy accept;
		arp daddr ip @addresses drop
	}
}
table ip verdict-ipvs {
	set addresses {
		type ipv4_addr
		elements = { 10.96.0.1 }
	}

	chain input {
		type filter hook input priority 110; policy accept;
		ip daddr @addresses reject with tcp reset
		ip daddr @addresses reject
	}

	chain was-0-net.ipv4.vs.conntrack {
	}
}
table ip6 verdict-ipvs {
	set addresses {
		type ipv6_addr
		elements = { fd00:10:96::1 }
	}

	chain input {
		type filter hook input priority 110; policy accept;
		ip6 daddr @addresses reject with tcp reset
		ip6 daddr @addresses reject
	}
}
`

// TestGuardLists has every nft list the guard, and load what it listed.
func TestGuardLists(t *testing.T) {
	h, g := newGuard(t)
	addrs := []netip.Addr{netip.MustParseAddr("10.96.0.1"), netip.MustParseAddr("fd00:10:96::1")}
	labtest.Check(t, g.replace(nil))
	g.notes = []string{sysctl.NoteOf("net.ipv4.vs.conntrack", 0)}
	labtest.Check(t, g.replace([]netip.Addr{netip.MustParseAddr("10.96.0.9")}))
	labtest.Check(t, g.change(addrs, []netip.Addr{netip.MustParseAddr("10.96.0.9")}))
	if notes, err := g.readNotes(); err != nil || !slices.Equal(notes, g.notes) {
		t.Errorf("%q, %v", notes, err)
	}
	for _, n := range labtest.Nfts(t) {
		list := func() string {
			out := labtest.Run(t, h, "", n.Path, "list", "ruleset")
			return strings.ReplaceAll(out, "priority srcnat + 10;", "priority 110;") // as newer ones call it
		}
		if got := list(); tables(got) != tables(guardListing) {
			t.Errorf("%s lists\n%s", n.Path, got)
		}
		labtest.Run(t, h, "flush ruleset\n"+guardListing, n.Path, "-f", "-")
		if got := list(); tables(got) != tables(guardListing) {
			t.Errorf("%s loads and lists\n%s", n.Path, got)
		}
		if same, err := g.holds(map[netip.Addr]bool{addrs[0]: true, addrs[1]: true}); err != nil || !same {
			t.Errorf("what %s loaded is not taken for ours: %v", n.Path, err)
		}
	}
	labtest.Check(t, g.remove())
	labtest.Check(t, g.remove())
	if left := labtest.Run(t, h, "", "nft", "list", "ruleset"); left != "" {
		t.Errorf("left is\n%s", left)
	}
}

// tables sorts the tables of a listing by family.
func tables(listing string) string {
	list := strings.Split("\n"+listing, "\ntable ")
	slices.Sort(list)
	return strings.TrimSpace(strings.Join(list, "\n"))
}

// TestGuardHolds notices what is missing, and what is too much.
func TestGuardHolds(t *testing.T) {
	h, g := newGuard(t)
	want := map[netip.Addr]bool{}
	var addrs []netip.Addr
	for i := range 3000 { // several messages
		addrs = append(addrs, lab.Nth(lab.ServiceRange[i%2], 1+i))
		want[addrs[i]] = true
	}
	holds := func(expect bool, what string) {
		t.Helper()
		if same, err := g.holds(want); err != nil || same != expect {
			t.Errorf("%s: %v, %v", what, same, err)
		}
	}
	holds(false, "no table")
	labtest.Check(t, g.replace(addrs))
	holds(true, "all there")
	for _, do := range []string{
		"add element ip verdict-ipvs addresses { 192.0.2.1 }",
		"delete element ip6 verdict-ipvs addresses { " + addrs[1].String() + " }",
		"flush chain ip verdict-ipvs input", "delete table arp verdict-ipvs",
		"add element arp verdict-ipvs addresses { 192.0.2.1 }; delete element arp verdict-ipvs addresses { " +
			addrs[0].String() + " }",
	} {
		before, err := g.Generation()
		labtest.Check(t, err)
		labtest.Run(t, h, do, "nft", "-f", "-")
		holds(false, do)
		if after, err := g.Generation(); err != nil || after == before {
			t.Errorf("%s: generation %d, %v", do, after, err)
		}
		labtest.Check(t, g.replace(addrs))
		holds(true, "repaired")
	}
	if err := g.change(nil, []netip.Addr{netip.MustParseAddr("192.0.2.1")}); err == nil {
		t.Error("an address that is not there was removed")
	}
}

func newGuard(t *testing.T) (*lab.Host, *guard) {
	t.Helper()
	h := labtest.NewHost(t, labtest.NewNet(t), "node")
	g := &guard{}
	labtest.Check(t, h.Do(func() (err error) {
		g.socket, err = openSocket(unix.NETLINK_NETFILTER)
		return err
	}))
	t.Cleanup(func() { labtest.Check(t, g.close()) })
	return h, g
}

// TestRoutes adds, moves, finds and removes local routes beside those of others.
func TestRoutes(t *testing.T) {
	h := labtest.NewHost(t, labtest.NewNet(t), "node")
	labtest.Check(t, h.AddAddr("lo", netip.MustParsePrefix("192.0.2.1/32")))
	labtest.Check(t, h.AddAddr("lo", netip.MustParsePrefix("2001:db8::1/128")))
	labtest.Run(t, h, "", "ip", "route", "add", "local", "10.96.0.9", "dev", "lo", "table", "local")
	labtest.Check(t, h.Do(func() error {
		s, err := openSocket(unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		defer s.close()
		n := rtnetlink{s}
		want := map[netip.Addr]netip.Addr{}
		var routes []route
		for i := range 500 {
			to := lab.Nth(lab.ServiceRange[i%2], 10+i)
			want[to] = netip.Addr{}
			routes = append(routes, route{to: to})
		}
		same := func() {
			t.Helper()
			got, err := n.list()
			for to, source := range want {
				if s, there := got[to]; !there || s != source {
					t.Fatalf("route to %s has source %v: %v; want %v", to, s, there, source)
				}
			}
			if err != nil || len(got) != len(want) {
				t.Errorf("%d routes, want %d: %v", len(got), len(want), err)
			}
		}
		add := func() {
			t.Helper()
			if failed, err := n.add(routes); err != nil || len(failed) > 0 {
				t.Fatal(failed, err)
			}
		}
		add()
		same()
		sources := []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}
		for i := range routes {
			routes[i].source = sources[i%2]
			want[routes[i].to] = routes[i].source
		}
		add()
		same()
		for a, takes := range map[string]bool{"10.96.0.10": true, "10.96.0.9": true, "192.0.2.1": true, "10.97.0.1": false,
			"fd00:10:96::b": true, "2001:db8::9": false} {
			if got, err := n.takes(netip.MustParseAddr(a)); err != nil || got != takes {
				t.Errorf("takes in %s: %v, %v", a, got, err)
			}
		}
		bad := netip.MustParseAddr("10.96.1.1")
		failed, err := n.add([]route{{bad, netip.MustParseAddr("192.0.2.99")}})
		if err != nil || len(failed) != 1 || !strings.Contains(failed[bad].Error(), "10.96.1.1") {
			t.Errorf("a source that the host does not have: %v, %v", failed, err)
		}
		labtest.Check(t, n.remove(routes))
		labtest.Check(t, n.remove(routes))
		clear(want)
		same()
		return nil
	}))
	if left := labtest.Run(t, h, "", "ip", "route", "show", "table", "local"); !strings.Contains(left, "10.96.0.9") {
		t.Errorf("left is %s", left)
	}
}
