package kernel

import (
	"fmt"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestClientAddressFlooded: on a link on which every node gets every frame, only the one that a frame is for forwards
// it.
func TestClientAddressFlooded(t *testing.T) {
	s := newSegment(t)
	s.learn(s.service(nil, 1, 2))
	labtest.Run(t, s.Wire, "", "ip", "link", "set", "br0", "type", "bridge", "ageing_time", "0") // it learns no addresses
	seen := s.watch()
	const n = 50
	for _, f := range ipfamily.All {
		s.dial(snapshot.UDP, f, n, true)
	}
	counts := seen()
	if counts[0].first != 2*n || counts[1].forwarded+counts[2].forwarded != 2*n {
		t.Errorf("of %d datagrams from the router, forwarded and forwarded twice are: %v", 2*n, counts)
	}
}

// TestClientAddressForged: a frame with the link-layer address of a node is translated where it comes in, as with
// policy Cluster, and no source range lets it pass that does not let its sender pass.
func TestClientAddressForged(t *testing.T) {
	s := newSegment(t)
	s.learn(s.service(nil, 1))
	router, err := s.Router.Netlink().LinkByName("eth0")
	labtest.Check(t, err)
	ask := func(from snapshot.MAC, wait time.Duration) (source netip.Addr) {
		t.Helper()
		c, err := s.Outside.DialContext(t.Context(), "udp", s.web(ipfamily.IPv4).String())
		labtest.Check(t, err)
		defer c.Close()
		client := netip.AddrPortFrom(s.Outside.IP4, netip.MustParseAddrPort(c.LocalAddr().String()).Port())
		frame := datagram(s.nodes[0].mac[:], from[:], client, s.web(ipfamily.IPv4))
		labtest.Check(t, s.Router.Do(func() error { return sendFrame(router.Attrs().Index, frame) }))
		labtest.Check(t, c.SetDeadline(time.Now().Add(wait)))
		answer := make([]byte, 512)
		k, err := c.Read(answer)
		if err != nil {
			return source
		}
		return netip.MustParseAddrPort(strings.Fields(string(answer[:k]))[1]).Addr()
	}
	own := snapshot.MAC(router.Attrs().HardwareAddr)
	if got := ask(own, patience); got != s.Outside.IP4 {
		t.Errorf("the router's frame: the pod saw %v", got)
	}
	if got := ask(s.nodes[2].mac, patience); got != s.nodes[0].IP4 {
		t.Errorf("a frame with a node's address: the pod saw %v", got)
	}
	s.learn(s.service(func(svc *snapshot.Service) {
		svc.SourceRanges = []netip.Prefix{netip.PrefixFrom(labtest.SegmentAddr(ipfamily.IPv4, 0), 24)} // that of nodes
	}, 1))
	for _, mac := range []snapshot.MAC{own, s.nodes[2].mac} {
		if got := ask(mac, 300*time.Millisecond); got.IsValid() {
			t.Errorf("a sender that no source range permits, as %x: the pod saw %v", mac, got)
		}
	}
}

// TestClientAddressSourceRanges: clients are checked by their own address, where it is translated. The node that
// forwards checks nothing and tracks nothing, and a client that may not pass reaches no pod by any node.
func TestClientAddressSourceRanges(t *testing.T) {
	s := newSegment(t)
	ranges := func(text ...string) {
		s.learn(s.service(func(svc *snapshot.Service) {
			for _, p := range text {
				svc.SourceRanges = append(svc.SourceRanges, netip.MustParsePrefix(p))
			}
		}, 1, 2))
	}
	ranges("198.51.100.7/32", "2001:db8:51::7/128")
	for _, f := range ipfamily.All {
		for _, p := range keepProtocols {
			if by := s.dial(p, f, 40, true); ofNode(by, f, 1) == 0 || ofNode(by, f, 2) == 0 {
				t.Errorf("%s %s: %v", p, f, by)
			}
		}
	}
	ranges("192.0.2.0/24", "2001:db8:2::/64") // that of the nodes, not of the client
	arrived := s.arrivals()
	for node := range s.nodes {
		s.MoveVIP(node)
		for _, f := range ipfamily.All {
			for _, p := range keepProtocols {
				for range 3 { // to different nodes
					if r := s.Outside.Dial(p, s.web(f), lab.Options{Timeout: 50 * time.Millisecond}); r.Outcome != lab.TimedOut {
						t.Errorf("%s %s at %s: %s", p, f, s.nodes[node].Name, r)
					}
				}
			}
		}
		if node == 0 {
			s.tracksNone(0)
		}
	}
	if n := arrived(); n > 0 {
		t.Errorf("%d packets of a client that may not pass have reached pods", n)
	}
}

// arrivals has the pods count what comes to them, and returns what they have counted together.
func (s *segment) arrivals() func() int {
	s.t.Helper()
	for _, p := range s.Pods {
		labtest.Run(s.t, p, `table inet arrivals { chain c { type filter hook prerouting priority raw;
			meta l4proto { tcp, udp, sctp } counter; }; }`, "nft", "-f", "-")
	}
	return func() (sum int) {
		s.t.Helper()
		for _, p := range s.Pods {
			_, text, _ := strings.Cut(labtest.Run(s.t, p, "", "nft", "list", "table", "inet", "arrivals"), "counter packets ")
			var n int
			_, err := fmt.Sscan(text, &n)
			labtest.Check(s.t, err)
			sum += n
		}
		return sum
	}
}

// TestClientAddressAffinity: with session affinity all connections of a client go to one pod, and clients are
// divided.
func TestClientAddressAffinity(t *testing.T) {
	s := newSegment(t)
	s.learn(s.service(func(svc *snapshot.Service) { svc.Affinity = time.Hour }, 1, 2))
	for _, f := range ipfamily.All {
		pods, client := map[string]int{}, s.Outside.IP(f)
		for range 24 {
			client = client.Next()
			labtest.Check(t, s.Outside.AddAddr("eth0", netip.PrefixFrom(client, f.Bits())))
			pod := ""
			for port := range 6 {
				r := s.Outside.Dial(snapshot.TCP, s.web(f), lab.Options{From: netip.AddrPortFrom(client, uint16(20000+7*port))})
				if r.Outcome != lab.Answered || r.Source.Addr() != client || pod != "" && r.Endpoint != pod {
					t.Fatalf("%v, after %q: %s", client, pod, r)
				}
				pod = r.Endpoint
			}
			pods[pod]++
		}
		if pods["pod-b"] == 0 || pods["pod-c"] == 0 {
			t.Errorf("%s: 24 clients go to %v", f, pods)
		}
	}
}

// TestClientAddressReversePaths: it does not matter how nodes check the way back to a sender.
func TestClientAddressReversePaths(t *testing.T) {
	s := newSegment(t)
	s.learn(s.service(nil, 1, 2))
	for _, filter := range []string{"0", "1", "2"} {
		for _, n := range s.nodes {
			for _, device := range []string{"all", "eth0"} {
				labtest.Check(t, n.Sysctl("net/ipv4/conf/"+device+"/rp_filter", filter))
			}
		}
		for _, p := range keepProtocols {
			if by := s.dial(p, ipfamily.IPv4, 40, true); ofNode(by, ipfamily.IPv4, 1) == 0 || ofNode(by, ipfamily.IPv4, 2) == 0 {
				t.Errorf("rp_filter %s, %s: %v", filter, p, by)
			}
		}
	}
}

// TestClientAddressOptions: packets with options of IPv4 keep their client's address, also in fragments.
func TestClientAddressOptions(t *testing.T) {
	s := newSegment(t)
	s.learn(s.service(nil, 1, 2))
	for n := range 20 {
		c, err := s.Outside.DialContext(t.Context(), "udp", s.web(ipfamily.IPv4).String())
		labtest.Check(t, err)
		defer c.Close()
		raw, err := c.(syscall.Conn).SyscallConn()
		labtest.Check(t, err)
		var set error
		labtest.Check(t, raw.Control(func(fd uintptr) { // nothing three times, and the end
			set = unix.SetsockoptString(int(fd), unix.IPPROTO_IP, unix.IP_OPTIONS, "\x01\x01\x01\x00")
		}))
		labtest.Check(t, set)
		labtest.Check(t, c.SetDeadline(time.Now().Add(patience)))
		_, err = c.Write([]byte(strings.Repeat("x", 1+3000*(n%2))))
		labtest.Check(t, err)
		answer := make([]byte, 1<<16)
		k, err := c.Read(answer)
		if err != nil {
			t.Fatal(err)
		}
		if text, _, _ := strings.Cut(string(answer[:k]), "\n"); !strings.Contains(text, " "+s.Outside.IP4.String()+":") {
			t.Errorf("%s", text)
		}
	}
	s.tracksNone(0)
}
