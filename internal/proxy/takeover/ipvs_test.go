package takeover

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/moby/ipvs"
	vishvananda "github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/ipvshandle"
	"github.com/verdict-proxy/verdict/internal/system/netlink"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// These tests need a kernel with IPVS: internal/lab/guest/matrix -k 6.1 ./internal/proxy/takeover -test.run=IPVS

// needIPVS skips a test if the kernel has no IPVS, which it was asked to load.
func needIPVS(t testing.TB, h *lab.Host) {
	t.Helper()
	_ = exec.Command("modprobe", "ip_vs").Run() // Linux 5.10 does not load it by itself
	inside(t, h, func() error {
		v, err := ipvshandle.Open()
		switch none := errors.Is(err, ipvshandle.ErrMissing); {
		case none && !ipvshandle.Loaded():
			t.Skip("this kernel has no IPVS, built in or to load: no such family of generic netlink, and no /proc/net/ip_vs")
		case none || err == nil && !ipvshandle.Loaded():
			t.Fatalf("half an IPVS: its family is missing: %v; /proc/net/ip_vs: %v", none, ipvshandle.Loaded())
		}
		v.Close()
		return err
	})
}

// at is a virtual service that forwards in turn.
func at(addr string, port, protocol uint16) *ipvs.Service {
	s := ipvshandle.NewService(netip.AddrPortFrom(netip.MustParseAddr(addr), port), protocol)
	s.SchedName = "rr"
	return s
}

// add makes a virtual service with destinations, or adds to one that is there.
func add(h *ipvshandle.Handle, s *ipvs.Service, method uint32, weight int, to ...netip.AddrPort) error {
	return h.Do(func(h *ipvs.Handle) error {
		if err := h.NewService(s); err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("add service %s: %w", ipvshandle.Name(s), err)
		}
		for _, a := range to {
			d := &ipvs.Destination{Address: a.Addr().AsSlice(), Port: a.Port(), ConnectionFlags: method, Weight: weight}
			if err := h.NewDestination(s, d); err != nil && !errors.Is(err, unix.EEXIST) {
				return fmt.Errorf("add destination %s of %s: %w", a, ipvshandle.Name(s), err)
			}
		}
		return nil
	})
}

// addPorts makes a set of ports, or adds to one that is there.
func (s ipsets) addPorts(name string, ports ...uint16) error {
	const create, add, revision, portTo = 2, 9, 4, 5
	port := func(w *netlink.Buffer, typ uint16, p uint16) { w.Big16(typ|unix.NLA_F_NET_BYTEORDER, p) }
	err := s.do(ipsetMessage(create), func(w *netlink.Buffer) {
		w.Attr(ipsetAttrProtocol, ipsetProtocol)
		w.Text(ipsetAttrSetName, name)
		w.Text(ipsetAttrTypeName, "bitmap:port")
		w.Attr(revision, 0)
		w.Attr(ipsetAttrFamily, unix.NFPROTO_UNSPEC)
		m := w.Nest(ipsetAttrData)
		port(w, ipsetAttrPort, 0)
		port(w, portTo, 65535)
		w.Close(m)
	})
	if err != nil {
		return fmt.Errorf("create set %s: %w", name, err)
	}
	for _, p := range ports {
		err := s.do(ipsetMessage(add), func(w *netlink.Buffer) {
			w.Attr(ipsetAttrProtocol, ipsetProtocol)
			w.Text(ipsetAttrSetName, name)
			m := w.Nest(ipsetAttrData)
			port(w, ipsetAttrPort, p)
			w.Close(m)
		})
		if err != nil {
			return fmt.Errorf("add to set %s: %w", name, err)
		}
	}
	return nil
}

// bind puts addresses on kube-ipvs0, which it makes as kube-proxy does: it is never set up.
func bind(addrs ...netip.Addr) error {
	link, err := vishvananda.LinkByName(proxyDevice)
	if err != nil {
		if err := vishvananda.LinkAdd(&vishvananda.Dummy{LinkAttrs: vishvananda.LinkAttrs{Name: proxyDevice}}); err != nil {
			return err
		}
		if link, err = vishvananda.LinkByName(proxyDevice); err != nil {
			return err
		}
	}
	for _, a := range addrs {
		err := vishvananda.AddrAdd(link, &vishvananda.Addr{IPNet: vishvananda.NewIPNet(net.IP(a.AsSlice()))})
		if err != nil && !os.IsExist(err) {
			return fmt.Errorf("bind %s: %w", a, err)
		}
	}
	return nil
}

func services(t testing.TB, h *lab.Host) (names []string) {
	t.Helper()
	inside(t, h, func() error {
		h, err := openIPVS()
		if err != nil || h == nil {
			return err
		}
		defer h.Close()
		list, err := h.Services()
		for _, s := range list {
			names = append(names, ipvshandle.Name(s))
		}
		return err
	})
	slices.Sort(names)
	return names
}

// TestIPVSOfOthers removes kube-proxy's virtual services, and none of others: of other addresses, by mark, or with
// destinations that kube-proxy does not make.
func TestIPVSOfOthers(t *testing.T) {
	h := labtest.NewHost(t, labtest.NewNet(t), "node")
	needIPVS(t, h)
	addr := netip.MustParseAddr
	to := []netip.AddrPort{netip.MustParseAddrPort("10.244.1.10:8080"), netip.MustParseAddrPort("10.244.2.10:8080")}
	to6 := []netip.AddrPort{netip.MustParseAddrPort("[fd00:10:244:1::a]:8080")}
	labtest.Check(t, h.AddAddr("lo", netip.MustParsePrefix("192.0.2.10/32")))
	inside(t, h, func() error {
		if err := bind(addr("10.96.0.10"), addr("10.96.0.11"), addr("10.96.0.12"), addr("fd00:10:96::a")); err != nil {
			return err
		}
		s, err := dial(unix.NETLINK_NETFILTER)
		if err != nil {
			return err
		}
		defer s.Close()
		if err := (ipsets{s}).addPorts("KUBE-NODE-PORT-TCP", 30080); err != nil {
			return err
		}
		v, err := openIPVS()
		if err != nil {
			return err
		}
		defer v.Close()
		sticky := at("10.96.0.10", 53, unix.IPPROTO_UDP)
		sticky.Flags = 1
		marked := &ipvs.Service{FWMark: 7, AddressFamily: unix.AF_INET, SchedName: "rr", Netmask: ^uint32(0)}
		for _, s := range []struct {
			*ipvs.Service
			method uint32
			weight int
			to     []netip.AddrPort
		}{
			{at("10.96.0.10", 80, unix.IPPROTO_TCP), ipvs.ConnectionFlagMasq, 1, to},
			{sticky, ipvs.ConnectionFlagMasq, 0, to},
			{at("10.96.0.11", 80, unix.IPPROTO_TCP), ipvs.ConnectionFlagMasq, 1, nil},
			{at("192.0.2.10", 30080, unix.IPPROTO_TCP), ipvs.ConnectionFlagMasq, 1, to},
			{at("fd00:10:96::a", 80, unix.IPPROTO_TCP), ipvs.ConnectionFlagMasq, 1, to6},
			// Others'.
			{at("10.96.0.12", 80, unix.IPPROTO_TCP), ipvs.ConnectionFlagTunnel, 1, to},
			{at("10.96.0.12", 81, unix.IPPROTO_TCP), ipvs.ConnectionFlagMasq, 100, to},
			{at("192.0.2.10", 30080, unix.IPPROTO_UDP), ipvs.ConnectionFlagMasq, 1, to},
			{at("192.0.2.10", 443, unix.IPPROTO_TCP), ipvs.ConnectionFlagMasq, 1, to},
			{at("203.0.113.1", 80, unix.IPPROTO_TCP), ipvs.ConnectionFlagMasq, 1, to},
			{at("203.0.113.1", 30080, unix.IPPROTO_TCP), ipvs.ConnectionFlagMasq, 1, to},
			{marked, ipvs.ConnectionFlagMasq, 1, nil},
		} {
			if err := add(v, s.Service, s.method, s.weight, s.to...); err != nil {
				return err
			}
		}
		return nil
	})
	found := remove(t, h)
	want := []string{"5 virtual services of IPVS", "1 ipset", "the device kube-ipvs0 with 4 addresses"}
	if s := found.Summary(); !slices.Equal(s, want) {
		t.Errorf("found %q, want %q", s, want)
	}
	left := []string{"10.96.0.12:80 tcp", "10.96.0.12:81 tcp", "192.0.2.10:30080 udp", "192.0.2.10:443 tcp",
		"203.0.113.1:30080 tcp",
		"203.0.113.1:80 tcp", "firewall mark 7"}
	if got := services(t, h); !slices.Equal(got, left) {
		t.Errorf("left are %q, want %q", got, left)
	}
	if again := find(t, h); !again.Empty() {
		t.Errorf("afterwards there are %q", again.Summary())
	}
}

// TestIPVSAdoptedMeanwhile leaves a virtual service alone that Verdict adopted after it was found.
func TestIPVSAdoptedMeanwhile(t *testing.T) {
	h := labtest.NewHost(t, labtest.NewNet(t), "node")
	needIPVS(t, h)
	adopted := at("10.96.0.10", 80, unix.IPPROTO_TCP)
	change := func(f func(*ipvs.Handle) error) {
		inside(t, h, func() error {
			v, err := openIPVS()
			if err != nil {
				return err
			}
			defer v.Close()
			return v.Do(f)
		})
	}
	inside(t, h, func() error { return bind(netip.MustParseAddr("10.96.0.10")) })
	change(func(v *ipvs.Handle) error {
		return errors.Join(v.NewService(adopted), v.NewService(at("10.96.0.10", 81, unix.IPPROTO_TCP)))
	})
	found := find(t, h)
	adopted.Flags = 0x5644 << 16 // Verdict's mark
	change(func(v *ipvs.Handle) error { return v.UpdateService(adopted) })
	inside(t, h, func() error { return found.Remove(t.Context()) })
	if got := services(t, h); !slices.Equal(got, []string{"10.96.0.10:80 tcp"}) {
		t.Errorf("left are %q", got)
	}
}

// forgetSoon has IPVS forget connections that are idle or closed after some seconds, in place of minutes.
func forgetSoon(h *ipvs.Handle) error {
	return h.SetConfig(&ipvs.Config{TimeoutTCPFin: 5 * time.Second, TimeoutUDP: 5 * time.Second})
}

// ipvsMode programs the node as kube-proxy's IPVS mode does. Guests have no iptables: nft writes its tables.
func (w *world) ipvsMode() {
	w.t.Helper()
	for _, p := range []string{"conntrack", "expire_nodest_conn"} {
		labtest.Check(w.t, w.Node.Sysctl("net/ipv4/vs/"+p, "1"))
	}
	inside(w.t, w.Node, func() error {
		v, err := openIPVS()
		if err != nil {
			return err
		}
		defer v.Close()
		if err := v.Do(forgetSoon); err != nil {
			return err
		}
		s, err := dial(unix.NETLINK_NETFILTER)
		if err != nil {
			return err
		}
		defer s.Close()
		for i := range worldServices {
			for _, name := range []string{"KUBE-NODE-PORT-TCP", "KUBE-NODE-PORT-UDP", "KUBE-6-NODE-PORT-TCP",
				"KUBE-6-NODE-PORT-UDP"} {
				if err := (ipsets{s}).addPorts(name, uint16(worldNodePort+i)); err != nil {
					return err
				}
			}
			for _, f := range lab.Families() {
				var to []netip.AddrPort
				for _, p := range w.endpoints() {
					to = append(to, netip.AddrPortFrom(p.IP(f), worldTarget))
				}
				if err := bind(vips(i, f)...); err != nil {
					return err
				}
				frontends := []netip.AddrPort{netip.AddrPortFrom(w.Node.IP(f), uint16(worldNodePort+i))}
				for _, a := range vips(i, f) {
					frontends = append(frontends, netip.AddrPortFrom(a, worldPort))
				}
				for _, a := range frontends {
					for _, protocol := range []uint16{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
						err := add(v, at(a.Addr().String(), a.Port(), protocol), ipvs.ConnectionFlagMasq, 1, to...)
						if err != nil {
							return err
						}
					}
				}
			}
		}
		return nil
	})
	var rules strings.Builder
	for n, f := range lab.Families() {
		var local, hairpin []string
		for i := range worldServices {
			for _, a := range vips(i, f) {
				local = append(local, a.String())
			}
		}
		local = append(local, w.Node.IP(f).String())
		for _, p := range w.Pods {
			hairpin = append(hairpin, fmt.Sprintf("%s . %s", p.IP(f), p.IP(f)))
		}
		fmt.Fprintf(&rules, `
table %[1]s nat {
	chain KUBE-MARK-MASQ { meta mark set meta mark | 0x4000; }
	chain KUBE-SERVICES { %[1]s daddr { %[2]s } %[1]s saddr != %[3]s jump KUBE-MARK-MASQ; }
	chain KUBE-POSTROUTING {
		%[1]s saddr . %[1]s daddr { %[4]s } masquerade
		meta mark & 0x4000 == 0 return
		meta mark set meta mark ^ 0x4000
		masquerade
	}
	chain PREROUTING { type nat hook prerouting priority -100; jump KUBE-SERVICES comment "kubernetes service portals"; }
	chain OUTPUT { type nat hook output priority -100; jump KUBE-SERVICES comment "kubernetes service portals"; }
	chain POSTROUTING { type nat hook postrouting priority 100;
			jump KUBE-POSTROUTING comment "kubernetes postrouting rules"; }
}
table %[1]s filter {
	chain KUBE-IPVS-FILTER { }
	chain INPUT { type filter hook input priority 0; jump KUBE-IPVS-FILTER comment "kubernetes ipvs access filter"; }
}
`, []string{"ip", "ip6"}[n], strings.Join(local, ", "), lab.PodRange[n], strings.Join(hairpin, ", "))
	}
	labtest.Run(w.t, w.Node, rules.String(), "nft", "-f", "-")
}

// TestIPVSNoConnectionIsLost is TestNoConnectionIsLost for IPVS mode: what it carries goes on over its virtual
// services, and they and the device go when it has ended.
func TestIPVSNoConnectionIsLost(t *testing.T) {
	needIPVS(t, labtest.NewHost(t, labtest.NewNet(t), "probe"))
	w := newWorld(t)
	w.wait(5 * time.Second) // a machine that is emulated
	w.ipvsMode()
	stop := w.begin(2 * time.Second)
	time.Sleep(time.Second)
	for range 3 {
		b := w.verdict()
		found := remove(t, w.Node)
		if !found.HasServices() || found.Connections() == 0 {
			t.Errorf("found %q with %d connections", found.Summary(), found.Connections())
		}
		left := remove(t, w.Node) // as it goes on until nothing is left
		want := "the device kube-ipvs0 with 8 addresses"
		if s := left.Summary(); left.HasServices() || left.Empty() || s[len(s)-1] != want {
			t.Errorf("left are %q", s)
		}
		for _, f := range ipfamily.All {
			if text := labtest.Run(t, w.Node, "", "nft", "list", "table",
				map[ipfamily.Family]string{ipfamily.IPv4: "ip", ipfamily.IPv6: "ip6"}[f], "filter"); !strings.Contains(text,
				"jump KUBE-IPVS-FILTER") {
				t.Errorf("nothing guards %s any more", proxyDevice)
			}
		}
		w.beginsAtOwnAddress()
		time.Sleep(time.Second)
		labtest.Run(t, w.Node, "", "nft",
			"delete table ip filter; delete table ip6 filter; delete table ip nat; delete table ip6 nat")
		w.ipvsMode()
		time.Sleep(200 * time.Millisecond)
		w.cleanup(b)
		time.Sleep(time.Second)
	}
	b := w.verdict()
	remove(t, w.Node)
	stop()
	w.drain()
	labtest.Check(t, b.Remove())
	labtest.Check(t, b.Close())
}

// beginsAtOwnAddress makes sure that new connections of the node itself do not have a Service's address as their own.
func (w *world) beginsAtOwnAddress() {
	w.t.Helper()
	for _, to := range w.targets() {
		c, r := w.Node.Open(snapshot.TCP, to, lab.Options{Timeout: w.traffic.Patience})
		if c == nil {
			w.t.Errorf("node to %s: %v", to, r)
			continue
		}
		if from := c.Local().Addr(); from != w.Node.IP(ipfamily.Of(to.Addr())) {
			w.t.Errorf("a connection of the node to %s begins at %s", to, from)
		}
		c.Close()
	}
}

// drain waits until IPVS has forgotten all connections, and nothing of kube-proxy's is left.
func (w *world) drain() {
	w.t.Helper()
	start := time.Now()
	for {
		found := remove(w.t, w.Node)
		if left := find(w.t, w.Node); left.Empty() {
			w.t.Logf("IPVS was empty after %v", time.Since(start).Round(time.Second))
			break
		}
		if time.Since(start) > 7*time.Minute {
			w.t.Fatalf("after %v there are %q with %d connections", time.Since(start), found.Summary(), found.Connections())
		}
		time.Sleep(2 * time.Second)
	}
	if left := services(w.t, w.Node); left != nil {
		w.t.Errorf("left are %q", left)
	}
}
