package ipvsplugin

import (
	"errors"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestIPVSAddressesOfOthers: whoever may write a Service writes the addresses of the node's gateway and of another node
// into it. The Service gets its port there, as it does without IPVS, and all else at these addresses is as it was, for
// the node and for its pods.
func TestIPVSAddressesOfOthers(t *testing.T) {
	w := newWorld(t, 2, 0, dataplane.IPVSAuto)
	const port = 6443
	others := []*lab.Host{w.Outside, w.Node2}
	for _, h := range others {
		_, err := h.Serve(snapshot.TCP, port)
		labtest.Check(t, err)
	}
	for name, write := range map[string]func(*snapshot.Service, []netip.Addr){
		"external IPs":            func(s *snapshot.Service, addrs []netip.Addr) { s.ExternalIPs = addrs },
		"load balancer addresses": func(s *snapshot.Service, addrs []netip.Addr) { s.LoadBalancerIPs = addrs },
	} {
		t.Run(name, func(t *testing.T) {
			a := app{number: 1, scheduling: scheduler("rr"), here: ready(0)}
			d := w.delta(a)
			var addrs []netip.Addr
			for _, h := range others {
				addrs = append(addrs, h.IP4, h.IP6)
			}
			write(d.Services[a.name()], addrs)
			w.apply(d)
			w.has("-A -t 10.96.0.1:80 -s rr")
			for _, from := range []*lab.Host{w.Node, w.Pods[1]} {
				for _, h := range others {
					for _, f := range lab.Families() {
						w.stillReaches(from, h, f, port)
						r := from.Dial(snapshot.TCP, netip.AddrPortFrom(h.IP(f), 80), lab.Options{Timeout: patience})
						if r.Endpoint != "pod-1" {
							t.Errorf("%s to the Service at %v: %v", from.Name, h.IP(f), r)
						}
					}
				}
			}
		})
	}
}

// stillReaches checks that a host has what another one serves at an address of its own, and its ping.
func (w *world) stillReaches(from, to *lab.Host, f ipfamily.Family, port uint16) {
	w.t.Helper()
	r := from.Dial(snapshot.TCP, netip.AddrPortFrom(to.IP(f), port), lab.Options{Timeout: patience})
	if r.Endpoint != to.Name {
		w.t.Errorf("%s to port %d of %s at %v: %v", from.Name, port, to.Name, to.IP(f), r)
	}
	if out, err := from.Run("ping", "-c", "1", "-W", "3", to.IP(f).String()); err != nil {
		w.t.Errorf("%s pings %s at %v: %v\n%s", from.Name, to.Name, to.IP(f), err, out)
	}
}

// TestIPVSGateways: of an address by way of which the node has routes nothing is taken, also where the operator lists
// it by mistake.
func TestIPVSGateways(t *testing.T) {
	w := newWorld(t, 1, 0, dataplane.IPVSAuto)
	ip := func(args string) { labtest.Run(t, w.Node, "", "ip", strings.Fields(args)...) }
	good := app{number: 9, scheduling: scheduler("rr"), here: ready(0), external: true}
	w.apply(w.delta(good))
	for n, routes := range [][]string{
		{"route add 198.18.0.0/24 via 203.0.113.1 dev eth0 onlink"},
		{"-6 route add 2001:db8:1::/64 via 2001:db8:cb::2 dev eth0 onlink"},
		{"route add 198.18.2.0/24 nexthop via 192.0.2.20 dev eth0 nexthop via 203.0.113.3 dev eth0 onlink"},
		{"-6 route add 2001:db8:3::/64 nexthop via 2001:db8:2::14 dev eth0 nexthop via 2001:db8:cb::4 dev eth0 onlink"},
		{"route add 198.18.4.0/24 via 203.0.113.5 dev eth0 onlink table 77"},
	} {
		for _, r := range routes {
			ip(r)
		}
		a := app{number: 1 + n, scheduling: scheduler("rr"), here: ready(0), external: true}
		_, err := w.try(w.delta(a))
		refused, ok := err.(*dataplane.Refused)
		if !ok || len(refused.Services) != 1 || !refused.Scheduling || !errors.Is(refused.Services[a.name()], errGateway) {
			t.Errorf("%q: %v", routes, err)
		}
		w.apply(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{a.name(): nil}})
	}
	if r := w.routes(); strings.Contains(r, "203.0.113.1 ") || !strings.Contains(r, "203.0.113.9 ") {
		t.Errorf("routes\n%s", r)
	}
	w.wants()
}

// TestIPVSGivesBack: an address that the operator does not list any more is given back at once, also while somebody is
// connected.
func TestIPVSGivesBack(t *testing.T) {
	w := newWorld(t, 1, 0, dataplane.IPVSAuto)
	a := app{number: 1, scheduling: scheduler("rr"), here: ready(0), external: true}
	w.apply(w.delta(a))
	at := lab.Nth(lab.ExternalRange[0], 1)
	w.has("-A -t " + at.String() + ":80 -s rr")
	w.lacks(lab.Nth(lab.ExternalRange[0], 101).String()) // its external IP
	c, r := w.Outside.Open(snapshot.TCP, netip.AddrPortFrom(at, 80), lab.Options{Timeout: patience})
	if c == nil {
		t.Fatal(r)
	}
	for _, restart := range []bool{false, true} {
		c := w.planner.Config()
		c.IPVS.Addresses = nil
		w.planner.SetConfig(c)
		if restart {
			w.close()
			w.open()
		}
		w.apply()
		w.lacks(at.String())
		w.has("-A -t 10.96.0.1:80 -s rr")
		if r := w.routes(); strings.Contains(r, at.String()) || !strings.Contains(r, "10.96.0.1 ") {
			t.Errorf("routes\n%s", r)
		}
		r := w.Outside.Dial(snapshot.TCP, netip.AddrPortFrom(at, 80), lab.Options{Timeout: patience})
		if r.Endpoint != "pod-1" {
			t.Errorf("the Service there: %v", r)
		}
		w.wants()
		c.IPVS.Addresses = lab.ExternalRange
		w.planner.SetConfig(c)
		w.apply()
		w.has("-A -t " + at.String() + ":80 -s rr")
	}
}

// TestIPVSTooLarge: a Service that would have too many virtual services and destinations is carried by nftables, one
// beside it by IPVS, and connections last while it goes from the one to the other.
func TestIPVSTooLarge(t *testing.T) {
	w := newWorld(t, 3, 0, dataplane.IPVSAlways)
	c := w.planner.Config()
	c.IPVS.MaxPerService = 12 // six virtual services with a destination each
	w.planner.SetConfig(c)
	a, b := app{number: 1, here: ready(0)}, app{number: 2, here: ready(0)}
	w.apply(w.both(a, b))
	var conns []*lab.Conn
	for range 2 {
		conn, r := w.Pods[2].Open(snapshot.TCP, vip(1, ipfamily.IPv4), lab.Options{Timeout: patience})
		if conn == nil {
			t.Fatal(r)
		}
		conns = append(conns, conn)
		a.here = ready(0, 1)
		w.apply(w.delta(a))
		for _, conn := range conns {
			if r := conn.Ping(patience); r.Outcome != lab.Answered {
				t.Error(r)
			}
		}
	}
	w.has("-A -t 10.96.0.2:80 -s rr", "-a -t 10.96.0.1:80 -r 10.244.1.10:8080 -m -w 0") // which drains
	w.lacks("10.244.1.11")
	for _, p := range protocols {
		for _, f := range lab.Families() {
			if got := w.count(w.Pods[2], p, vip(1, f), 20); got["pod-1"] == 0 || got["pod-2"] == 0 || len(got) != 2 {
				t.Errorf("%v/%v: %v", vip(1, f), p, got)
			}
		}
	}
}

// TestIPVSClients: a Service with session affinity that asks for IPVS has its clients remembered by nftables, by
// bucket: however many senders there seem to be, IPVS remembers none.
func TestIPVSClients(t *testing.T) {
	w := newWorld(t, 3, 0, dataplane.IPVSAuto)
	w.apply(w.delta(app{number: 1, scheduling: scheduler("rr"), affinity: 24 * time.Hour, here: ready(0, 1)}),
		w.delta(app{number: 2, scheduling: scheduler("rr"), here: ready(0, 1)}))
	labtest.Run(t, w.Outside, "", "ip", "route", "add", "local", "198.18.0.0/15", "dev", "lo")
	to := net.UDPAddrFromAddrPort(vip(1, ipfamily.IPv4))
	labtest.Check(t, w.Outside.Do(func() error {
		for i := range 500 {
			c, err := net.DialUDP("udp", &net.UDPAddr{IP: net.IPv4(198, 18, byte(i>>8), byte(i))}, to)
			if err != nil {
				return err
			}
			if _, err = c.Write([]byte("x")); err != nil {
				return err
			}
			labtest.Check(t, c.Close())
		}
		return nil
	}))
	if out := labtest.Run(t, w.Node, "", "cat", "/proc/net/ip_vs_conn"); strings.Count(out, "\n") > 1 {
		t.Errorf("IPVS remembers\n%.500s", out)
	}
	w.lacks("10.96.0.1:80")
	w.has("-A -t 10.96.0.2:80 -s rr")
	for _, p := range protocols[:2] {
		if got := w.count(w.Pods[2], p, vip(1, ipfamily.IPv4), 10); len(got) != 1 {
			t.Errorf("with affinity %v answer", got)
		}
	}
}

// TestIPVSSourceRanges: source ranges hold at a load balancer address where IPVS chooses, and at one where nftables
// does.
func TestIPVSSourceRanges(t *testing.T) {
	w := newWorld(t, 2, 0, dataplane.IPVSAuto)
	a := app{number: 1, scheduling: scheduler("rr"), here: ready(0), external: true}
	d := w.delta(a)
	unlisted := netip.MustParseAddr("198.18.0.1")
	svc := d.Services[a.name()]
	svc.LoadBalancerIPs = append(svc.LoadBalancerIPs, unlisted)
	svc.SourceRanges = []netip.Prefix{netip.PrefixFrom(w.Outside.IP4, 32)}
	w.apply(d)
	listed := lab.Nth(lab.ExternalRange[0], 1)
	w.has("-A -t " + listed.String() + ":80 -s rr")
	w.lacks(unlisted.String())
	for _, to := range []netip.Addr{listed, unlisted} {
		for from, want := range map[*lab.Host]lab.Outcome{
			w.Outside: lab.Answered, w.Node2: lab.TimedOut, w.Pods[1]: lab.TimedOut,
		} {
			r := from.Dial(snapshot.TCP, netip.AddrPortFrom(to, 80), lab.Options{Timeout: patience})
			if r.Outcome != want {
				t.Errorf("%s to %v: %v, want %v", from.Name, to, r, want)
			}
		}
	}
}
