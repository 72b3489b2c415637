package conntrack

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestReset resets both ends of idle connections whose flows are deleted, of clients on the node itself, in pods and
// outside, who are masqueraded, to a server on this node or on another one. What is not deleted stays, and nothing is
// left in the table. The node itself resets: rules do not see packets of connections that have no flow.
func TestReset(t *testing.T) {
	h := newHeld(t)
	labtest.Check(t, h.Node.Sysctl("net/netfilter/nf_conntrack_tcp_loose", "0"))
	conn := open(t, h.Node)
	_, err := h.Pods[0].Serve(snapshot.TCP, 5353)
	labtest.Check(t, err)
	for _, server := range []*lab.Host{h.Pods[0], h.RemotePods[0]} {
		h.serve(0, server)
		var reset, kept []net.Conn
		for _, f := range lab.Families() {
			to := netip.AddrPortFrom(lab.Nth(lab.ServiceRange[f], 1), port).String()
			for i, from := range []*lab.Host{h.RemotePods[1], h.Node, h.Outside, h.Node2} {
				for range 10 {
					c, err := from.DialContext(t.Context(), "tcp", to)
					labtest.Check(t, err)
					defer c.Close()
					_, err = c.Read(make([]byte, 100))
					labtest.Check(t, err)
					if i == 3 {
						kept = append(kept, c)
					} else {
						reset = append(reset, c)
					}
				}
			}
		}
		ends := h.deleteFlows(conn, func(f *flow) bool {
			return f.client.Addr() != h.Node2.IP4 && f.client.Addr() != h.Node2.IP6
		})
		labtest.Check(t, h.Node.Do(func() error { return conn.reset(ends) }))
		for _, c := range reset {
			labtest.Check(t, c.SetReadDeadline(time.Now().Add(10*time.Second)))
			if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("%s: %v reads %v", server.Name, c.LocalAddr(), err)
			}
		}
		testkit.Eventually(t, 10*time.Second, "the server's ends are reset", func() bool {
			return established(t, server) == len(kept)
		})
		for _, c := range kept {
			if _, err := io.WriteString(c, "still here\n"); err != nil {
				t.Error(err)
			}
		}
		if left := h.deleteFlows(conn, func(f *flow) bool { return f.tcp.established }); len(left) != 2*len(kept) {
			t.Errorf("%s: %d ends are left of %d connections", server.Name, len(left), len(kept))
		}
	}
}

// deleteFlows deletes flows to Services, and returns both ends of each.
func (h *held) deleteFlows(c *Conn, which func(*flow) bool) (ends []connEnd) {
	for _, family := range ipfamily.All {
		labtest.Check(h.t, c.list(query{family: family}, func(flows []flow) error {
			var doomed []flow
			for i := range flows {
				if f := &flows[i]; f.releasable() && f.answered && which(f) {
					doomed = append(doomed, *f)
					ends = append(ends, f.clientEnd(), f.endpointEnd())
				}
			}
			_, err := c.remove(doomed)
			return err
		}))
	}
	return ends
}

// established counts the connections of a server.
func established(t testing.TB, h *lab.Host) (n int) {
	const of = ":14E9 "
	for line := range strings.Lines(labtest.Run(t, h, "", "cat", "/proc/net/tcp", "/proc/net/tcp6")) {
		if f := strings.Fields(line); len(f) > 3 && strings.HasSuffix(f[1]+" ", of) && f[3] == "01" {
			n++
		}
	}
	return n
}

// TestResetNobody: ends that are not there, and those whose client has begun anew, are left alone.
func TestResetNobody(t *testing.T) {
	h := newHeld(t)
	conn := open(t, h.Node)
	h.serve(0, h.RemotePods[0])
	h.hold(h.Pods[0], 2, true)
	ends := h.deleteFlows(conn, func(*flow) bool { return true })
	var nobody []connEnd
	for _, e := range ends {
		nobody = append(nobody, connEnd{netip.AddrPortFrom(e.at.Addr(), e.at.Port()+1), e.peer})
	}
	labtest.Check(t, h.Node.Do(func() error { return conn.reset(nobody) }))
	for _, c := range h.clients { // the only endpoint knows the connection
		_, err := io.WriteString(c.conn, "still here\n")
		labtest.Check(t, err)
	}
	labtest.Check(t, h.Node.Do(func() error { return conn.reset(ends) }))
	h.noneReset(h.clients)
	if n := established(t, h.RemotePods[0]); n != len(h.clients) {
		t.Errorf("%d of %d connections are left", n, len(h.clients))
	}
}
