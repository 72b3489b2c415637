package watch

import (
	"maps"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestLink: other nodes are found on the device that has this node's address, with their link-layer addresses. One that
// does not answer any more has failed while another answers, and is back once it answers again. A node behind a router
// has no address on the link. Nothing is put while nobody asks.
func TestLink(t *testing.T) {
	ns, h, here := inNamespace(t)
	if !here {
		return
	}
	far, err := newNamespace(t)
	must(t, err)
	there, err := netlink.NewHandleAt(far, unix.NETLINK_ROUTE)
	must(t, err)
	defer there.Close()
	must(t, h.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}, PeerName: "eth0",
		PeerNamespace: netlink.NsFd(far)}))
	near, err := h.LinkByName("eth0")
	must(t, err)
	peer, err := there.LinkByName("eth0")
	must(t, err)
	must(t, h.AddrAdd(near, addr(t, "192.0.2.2/24")))
	for _, a := range []string{"192.0.2.4/24", "192.0.2.3/24"} {
		must(t, there.AddrAdd(peer, addr(t, a)))
	}
	six := addr(t, "2001:db8::5/64")
	six.Flags = unix.IFA_F_NODAD
	must(t, there.AddrAdd(peer, six))
	mine := addr(t, "2001:db8::2/64")
	mine.Flags = unix.IFA_F_NODAD
	must(t, h.AddrAdd(near, mine))
	must(t, there.LinkSetUp(peer))
	must(t, h.LinkSetUp(near))

	own := ips("203.0.113.1", "192.0.2.2")
	var l *Link
	v := start(t, func(report func(error)) source {
		l = NewLink(func() []netip.Addr { return own }, report)
		l.Namespace = &ns
		return l
	})
	l.SetNodes(map[string][]netip.Addr{"b": ips("192.0.2.3", "2001:db8:9::3"), "c": ips("198.51.100.1", "192.0.2.4"),
		"d": ips("2001:db8::5"), "far": ips("198.51.100.9")})
	if l.Ask(true); v.synced != 0 {
		t.Error("it is synced before it knows what it is asked for")
	}
	mac := snapshot.MAC(peer.Attrs().HardwareAddr)
	v.await("all are known", func() bool {
		n := v.snap.Link.Nodes
		for _, name := range []string{"b", "c", "d"} {
			if m := n[name].MACs; len(m) != 1 || m[0] != mac || n[name].Failed != [2]bool{} {
				return false
			}
		}
		return v.snap.Link.Device == "eth0" && n["b"].Addrs == [2]netip.Addr{own[1].Next()} &&
			n["c"].Addrs[0] == netip.MustParseAddr("192.0.2.4") && n["far"].Addrs == [2]netip.Addr{} && len(n["far"].MACs) == 0
	})
	failed := func(name string) bool { return v.snap.Link.Nodes[name].Failed != [2]bool{} }
	nodes := map[string][]netip.Addr{"b": ips("192.0.2.3"), "c": ips("192.0.2.4"), "d": ips("2001:db8::5"),
		"silent": ips("192.0.2.99")}
	begun := time.Now()
	for range 20 { // news about other nodes are no reason to give up this one sooner
		l.SetNodes(maps.Clone(nodes))
		time.Sleep(time.Millisecond)
	}
	v.await("a node that never answered has failed", func() bool { return failed("silent") && !failed("b") })
	if took := time.Since(begun); took < linkMisses*linkPause {
		t.Errorf("a node had %v to answer %d questions", took, linkMisses)
	}
	must(t, there.AddrDel(peer, addr(t, "192.0.2.3/24")))
	v.await("b has failed, and no other", func() bool { return failed("b") && !failed("c") && !failed("d") })
	if m := v.snap.Link.Nodes["b"].MACs; len(m) != 1 || m[0] != mac {
		t.Errorf("the frames of a node that has failed are not known any more: %v", m)
	}
	must(t, there.AddrAdd(peer, addr(t, "192.0.2.3/24")))
	v.await("b is back", func() bool { return !failed("b") })
	nodes = maps.Clone(nodes)
	nodes["c"] = ips("192.0.2.4", "2001:db8::4")
	l.SetNodes(nodes)
	v.await("c has failed in the family in which it never answered, and in no other", func() bool {
		return v.snap.Link.Nodes["c"].Failed == [2]bool{false, true} && !failed("b") && !failed("d")
	})
	nodes = maps.Clone(nodes)
	nodes["c"] = ips("192.0.2.4")
	l.SetNodes(nodes)
	v.await("c has no address of that family any more", func() bool { return !failed("c") })
	must(t, there.LinkSetDown(peer)) // this host is cut off, or all others are: nobody can know
	v.await("nobody has failed", func() bool { return !failed("b") && !failed("c") && !failed("d") })
	l.Refuse("eth0", near.Attrs().Index)
	v.await("the kernel takes no rules at the device", func() bool { return v.snap.Link.Refused })
	l.Refuse("eth0", near.Attrs().Index-1) // which was another one
	v.await("it may take some", func() bool { return !v.snap.Link.Refused && v.snap.Link.Device == "eth0" })
	l.Ask(false)
	v.await("nothing is known", func() bool { return v.snap.Link.Equal(snapshot.Link{}) })
	if v.synced != 1 || len(v.problems) > 0 {
		t.Errorf("synced %d times, problems %q", v.synced, v.problems)
	}
}
