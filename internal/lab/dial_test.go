package lab_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// needNft ends the test where there is no nft, which every machine that is meant to run these tests has.
func needNft(t testing.TB) {
	t.Helper()
	if _, err := exec.LookPath("nft"); err != nil {
		t.Fatal("these tests need the nft command: install the nftables package")
	}
}

// eachFlow runs a test for each protocol and family.
func eachFlow(t *testing.T, f func(t *testing.T, p snapshot.Protocol, family ipfamily.Family)) {
	for _, family := range lab.Families() {
		for _, p := range protocols {
			t.Run(fmt.Sprintf("%s %s", family, p), func(t *testing.T) { f(t, p, family) })
		}
	}
}

// wantOutcome checks an outcome and that it came when it should.
func wantOutcome(t *testing.T, what string, r lab.Result, want lab.Outcome, timeout time.Duration) {
	t.Helper()
	early := r.Latency < timeout
	if r.Outcome != want || early == (want == lab.TimedOut) || r.Err == nil {
		t.Errorf("%s: %s after %v, want %s", what, r, r.Latency, want)
	}
}

// A port that nobody serves refuses: TCP by RST, UDP by an ICMP error, SCTP by an ICMP error for the whole protocol, or
// by ABORT where another port is served.
func TestDialClosedPort(t *testing.T) {
	c := labtest.NewCluster(t, lab.Config{LocalPods: 2})
	_, err := c.Pods[0].Serve(snapshot.SCTP, 8080)
	labtest.Check(t, err)
	eachFlow(t, func(t *testing.T, p snapshot.Protocol, f ipfamily.Family) {
		for _, from := range []*lab.Host{c.Outside, c.Node, c.Node2} {
			for _, to := range []*lab.Host{c.Pods[0], c.Pods[1], c.Node} {
				r := from.Dial(p, netip.AddrPortFrom(to.IP(f), 9), lab.Options{})
				wantOutcome(t, from.Name+" to "+to.Name, r, lab.Refused, time.Second)
			}
		}
	})
}

// Whatever the node answers a packet with is a refusal, wherever the client is; what it drops is silence.
func TestDialFiltered(t *testing.T) {
	needNft(t)
	c := labtest.NewCluster(t, lab.Config{LocalPods: 1, RemotePods: 1})
	verdicts := []struct {
		v4, v6 string
		want   lab.Outcome
	}{
		{"reject", "reject", lab.Refused},
		{"reject with icmp type host-unreachable", "reject with icmpv6 type addr-unreachable", lab.Refused},
		{"reject with icmp type net-unreachable", "reject with icmpv6 type no-route", lab.Refused},
		{"reject with icmp type admin-prohibited", "reject with icmpv6 type admin-prohibited", lab.Refused},
		{"drop", "drop", lab.TimedOut},
	}
	for _, v := range verdicts {
		labtest.Run(t, c.Node, fmt.Sprintf(`
			table inet t
			delete table inet t
			table inet t {
				chain pre { type filter hook prerouting priority 0; ip daddr 10.96.0.1 %[1]s; ip6 daddr fd00:10:96::1 %[2]s; }
				chain out { type filter hook output priority 0; ip daddr 10.96.0.1 %[1]s; ip6 daddr fd00:10:96::1 %[2]s; }
			}`, v.v4, v.v6), "nft", "-f", "-")
		t.Run(v.v6, func(t *testing.T) {
			eachFlow(t, func(t *testing.T, p snapshot.Protocol, f ipfamily.Family) {
				for _, from := range []*lab.Host{c.Outside, c.Pods[0], c.RemotePods[0], c.Node} {
					vip := map[ipfamily.Family]string{ipfamily.IPv4: "10.96.0.1:80", ipfamily.IPv6: "[fd00:10:96::1]:80"}[f]
					timeout := time.Second
					if v.want == lab.TimedOut {
						timeout = 50 * time.Millisecond
					}
					r := from.Dial(p, netip.MustParseAddrPort(vip), lab.Options{Timeout: timeout})
					wantOutcome(t, from.Name, r, v.want, timeout)
				}
			})
		})
	}
}

// An address that nobody has is silence.
func TestDialNobody(t *testing.T) {
	c := labtest.NewCluster(t, lab.Config{LocalPods: 1, RemotePods: 1})
	eachFlow(t, func(t *testing.T, p snapshot.Protocol, f ipfamily.Family) {
		var wg sync.WaitGroup
		for _, from := range []*lab.Host{c.Outside, c.Node, c.Node2, c.Pods[0], c.RemotePods[0]} {
			for _, rs := range [][]netip.Prefix{lab.ServiceRange, lab.ExternalRange} {
				to := netip.AddrPortFrom(lab.Nth(rs[f], 77), 80)
				wg.Go(func() {
					r := from.Dial(p, to, lab.Options{Timeout: 50 * time.Millisecond})
					wantOutcome(t, from.Name+" to "+to.String(), r, lab.TimedOut, 50*time.Millisecond)
				})
			}
		}
		wg.Wait()
	})
}

// A client knows whether its datagram or the answer to it was dropped.
func TestDialLost(t *testing.T) {
	needNft(t)
	c := labtest.NewCluster(t, lab.Config{LocalPods: 1})
	serve(t, c.Pods, 8080)
	for dropped, lost := range map[string]bool{"dport": false, "sport": true} {
		labtest.Run(t, c.Node, fmt.Sprintf(`
			table inet t
			delete table inet t
			table inet t { chain pre { type filter hook prerouting priority 0; udp %s 8080 drop; }; }`, dropped),
			"nft", "-f", "-")
		to := netip.AddrPortFrom(c.Pods[0].IP(ipfamily.IPv4), 8080)
		r := c.Outside.Dial(snapshot.UDP, to, lab.Options{Timeout: 200 * time.Millisecond})
		if r.Outcome != lab.TimedOut || r.Lost != lost {
			t.Errorf("udp %s is dropped: %v; lost is %v, want %v", dropped, r, r.Lost, lost)
		}
	}
}

// The client may choose its address and port, and the port is free again afterwards.
func TestDialFrom(t *testing.T) {
	c := labtest.NewCluster(t, lab.Config{LocalPods: 1})
	serve(t, c.Pods, 8080)
	second := []netip.Prefix{netip.MustParsePrefix("198.51.100.8/32"), netip.MustParsePrefix("2001:db8:64::8/128")}
	for _, a := range second {
		labtest.Check(t, c.Outside.AddAddr("eth0", a))
	}
	eachFlow(t, func(t *testing.T, p snapshot.Protocol, f ipfamily.Family) {
		for range 3 {
			from := netip.AddrPortFrom(second[f].Addr(), 4444)
			// The RST of the connection before may still wait in the server's socket, and take the next SYN with it.
			o := lab.Options{From: from, Timeout: 5 * time.Second}
			r := c.Outside.Dial(p, netip.AddrPortFrom(c.Pods[0].IP(f), 8080), o)
			if r.Outcome != lab.Answered || r.Source != from {
				t.Errorf("%s, want source %s", r, from)
			}
		}
		nobody := netip.AddrPortFrom(lab.Nth(lab.ServiceRange[f], 1), 0)
		r := c.Outside.Dial(p, netip.AddrPortFrom(c.Pods[0].IP(f), 8080), lab.Options{From: nobody})
		if r.Outcome == lab.Answered {
			t.Errorf("from an address that is not the host's own: %s", r)
		}
	})
}

// Hundreds of clients at a time each get their own answer, also next to others that are refused.
func TestDialMany(t *testing.T) {
	needNft(t)
	c := labtest.NewCluster(t, lab.Config{LocalPods: 2})
	serve(t, c.Pods, 8080)
	const reject = "table inet t { chain f { type filter hook forward priority 0; %s th dport 8081 reject; }; }"
	for _, p := range protocols {
		rules := "add table inet t; delete table inet t;" + fmt.Sprintf(reject, "meta l4proto "+p.String())
		labtest.Run(t, c.Node, rules, "nft", "-f", "-")
		t.Run(p.String(), func(t *testing.T) {
			var wg sync.WaitGroup
			var sources sync.Map
			for i := range 800 {
				wg.Go(func() {
					pod := c.Pods[i/2%2]
					to := netip.AddrPortFrom(pod.IP(lab.Families()[i%len(lab.Families())]), 8080)
					want := lab.Answered
					if i%4 == 3 {
						to, want = netip.AddrPortFrom(to.Addr(), 8081), lab.Refused
					}
					r := c.Outside.Dial(p, to, lab.Options{Timeout: 20 * time.Second})
					if r.Outcome != want || want == lab.Answered && (r.Endpoint != pod.Name || r.Destination != to) {
						t.Errorf("%d: %s", i, r)
					}
					flow := [2]netip.AddrPort{r.Source, r.Destination}
					if other, twice := sources.LoadOrStore(flow, i); twice && want == lab.Answered {
						t.Errorf("%d and %d had the same connection: %s", i, other, r)
					}
				})
			}
			wg.Wait()
		})
	}
}

// A kept connection answers for as long as its server lives.
func TestOpen(t *testing.T) {
	c := labtest.NewCluster(t, lab.Config{LocalPods: 1})
	pod := c.Pods[0]
	for _, p := range []snapshot.Protocol{snapshot.TCP, snapshot.UDP} {
		for _, f := range lab.Families() {
			s, err := pod.Serve(p, 8080)
			labtest.Check(t, err)
			conn, r := c.Outside.Open(p, netip.AddrPortFrom(pod.IP(f), 8080), lab.Options{})
			if r.Outcome != lab.Answered || conn.Local() != r.Source {
				t.Fatalf("%s %s: %s", f, p, r)
			}
			for range 3 {
				if again := conn.Ping(0); again.Outcome != lab.Answered || again.Endpoint != "pod-1" || again.Source != r.Source {
					t.Errorf("%s %s: %s", f, p, again)
				}
			}
			labtest.Check(t, s.Close())
			if r := conn.Ping(0); r.Outcome != lab.Refused {
				t.Errorf("%s %s: without a server: %s", f, p, r)
			}
			labtest.Check(t, conn.Close())
			labtest.Check(t, conn.Close())
		}
	}
	if _, err := os.Stat("/proc/net/sctp"); err == nil {
		return // the kernel's SCTP can be kept
	}
	conn, r := c.Outside.Open(snapshot.SCTP, netip.AddrPortFrom(pod.IP4, 8080), lab.Options{})
	if conn != nil || r.Outcome != lab.Failed {
		t.Errorf("opened SCTP: %s", r)
	}
}

// A kept UDP flow tells when it ends up elsewhere; a TCP connection stays where it is.
func TestOpenMoves(t *testing.T) {
	needNft(t)
	c := labtest.NewCluster(t, lab.Config{LocalPods: 2})
	serve(t, c.Pods, 8080)
	vip := netip.MustParseAddrPort("10.96.0.1:80")
	point := func(to *lab.Host) {
		labtest.Run(t, c.Node, natRules(ipfamily.IPv4, map[*lab.Host]netip.AddrPort{to: vip}, false), "nft", "-f", "-")
	}
	point(c.Pods[0])
	udp, r := c.Outside.Open(snapshot.UDP, vip, lab.Options{})
	if udp == nil {
		t.Fatal(r)
	}
	tcp, r := c.Outside.Open(snapshot.TCP, vip, lab.Options{})
	if tcp == nil {
		t.Fatal(r)
	}
	point(c.Pods[1])
	for _, conn := range []*lab.Conn{udp, tcp} {
		if r := conn.Ping(0); r.Endpoint != "pod-1" {
			t.Errorf("with conntrack's memory: %s", r)
		}
	}
	labtest.Check(t, c.Node.Do(func() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) }))
	if r := udp.Ping(0); r.Endpoint != "pod-2" {
		t.Errorf("UDP without conntrack's memory: %s", r)
	}
	if r := tcp.Ping(100 * time.Millisecond); r.Outcome == lab.Answered {
		t.Errorf("TCP without conntrack's memory: %s", r)
	}
}

// The standard library's servers and clients work across hosts.
func TestDialContext(t *testing.T) {
	c := labtest.NewCluster(t, lab.Config{LocalPods: 1})
	l, err := c.Node.Listen("tcp", ":10256")
	labtest.Check(t, err)
	seen := func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, r.RemoteAddr) }
	server := &http.Server{Handler: http.HandlerFunc(seen)}
	defer server.Close()
	go server.Serve(l)
	transport := &http.Transport{DialContext: c.Outside.DialContext}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport, Timeout: time.Second}
	for _, f := range lab.Families() {
		resp, err := client.Get("http://" + netip.AddrPortFrom(c.Node.IP(f), 10256).String())
		labtest.Check(t, err)
		body, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if seen, _, _ := net.SplitHostPort(string(body)); seen != c.Outside.IP(f).String() {
			t.Errorf("the server saw %s", body)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := c.Outside.DialContext(ctx, "tcp", "10.96.0.1:80"); err == nil || !err.(net.Error).Timeout() {
		t.Errorf("to nobody: %v", err)
	}
	for _, bad := range []string{"localhost:80", "10.0.0.1", ""} {
		if _, err := c.Outside.DialContext(t.Context(), "tcp", bad); err == nil {
			t.Errorf("dialed %q", bad)
		}
	}
	if _, err := c.Outside.DialContext(t.Context(), "unix", "10.0.0.1:80"); err == nil {
		t.Error("dialed network unix")
	}
}

// A thousand ports cost little; a port is served once, and free after Close.
func TestServe(t *testing.T) {
	n := labtest.NewNet(t)
	h := labtest.NewHost(t, n, "a")
	var ports []uint16
	for p := range uint16(1000) {
		ports = append(ports, 20000+p)
	}
	for _, p := range protocols {
		s, err := h.Serve(p, ports...)
		labtest.Check(t, err)
		if _, err := h.Serve(p, 20999); err == nil {
			t.Errorf("served a %s port twice", p)
		}
		for _, port := range []uint16{20000, 20999} {
			to := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port)
			if r := h.Dial(p, to, lab.Options{Timeout: 20 * time.Second}); r.Endpoint != "a" {
				t.Errorf("%s %d: %s", p, port, r)
			}
		}
		labtest.Check(t, s.Close())
		labtest.Check(t, s.Close())
		if r := h.Dial(p, netip.MustParseAddrPort("127.0.0.1:20000"), lab.Options{}); r.Outcome != lab.Refused {
			t.Errorf("%s after Close: %s", p, r)
		}
	}
	if _, err := h.Serve(snapshot.Protocol(1), 80); err == nil {
		t.Error("served ICMP")
	}
}
