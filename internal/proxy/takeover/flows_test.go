package takeover

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/netlink"
	verdictnft "github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/nft/kernel"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// world is a cluster whose node has a proxy: kube-proxy's rules in one of its modes, or Verdict. There are two
// Services, with cluster IPs, node ports and load balancer IPs, whose endpoints are all pods.
type world struct {
	*lab.Cluster
	t     testing.TB
	state *dataplane.State

	traffic labtest.Traffic
}

const (
	worldServices = 2
	worldPort     = 80
	worldTarget   = 8080
	worldNodePort = 30080
)

func newWorld(t testing.TB) *world {
	w := &world{Cluster: labtest.NewCluster(t, lab.Config{LocalPods: 2, RemotePods: 1}), t: t}
	w.traffic.Stalls = labtest.WatchStalls(t)
	w.wait(500 * time.Millisecond)
	for _, p := range w.endpoints() {
		for _, protocol := range []snapshot.Protocol{snapshot.TCP, snapshot.UDP} {
			_, err := p.Serve(protocol, worldTarget)
			labtest.Check(t, err)
		}
	}
	s := snapshot.New()
	s.Apply(w.delta())
	var conflicts []dataplane.Conflict
	w.state, conflicts = dataplane.Compute(dataplane.Config{NodeName: "node", LocalhostNodePorts: true,
		DetectLocal: dataplane.DetectLocal{ClusterCIDRs: lab.PodRange}}, s)
	if len(conflicts) > 0 {
		t.Fatal(conflicts)
	}
	return w
}

func (w *world) endpoints() []*lab.Host {
	return append(append([]*lab.Host{}, w.Pods...), w.RemotePods...)
}

// vips gives the addresses of a Service other than the node's.
func vips(i int, f ipfamily.Family) []netip.Addr {
	of := 0
	if f == ipfamily.IPv6 {
		of = 1
	}
	return []netip.Addr{lab.Nth(lab.ServiceRange[of], i+10), lab.Nth(lab.ExternalRange[of], i+10)}
}

func (w *world) delta() snapshot.Delta {
	addrs := []netip.Addr{w.Node.IP4, w.Node.IP6}
	d := snapshot.Delta{HostAddrs: &addrs, ServiceCIDRs: &lab.ServiceRange,
		Node:     &snapshot.Node{Name: "node", Addresses: addrs},
		Services: map[snapshot.Name]*snapshot.Service{}, Slices: map[snapshot.Name]*snapshot.Slice{}}
	for i := range worldServices {
		n := snapshot.Name{Namespace: "default", Name: fmt.Sprintf("web-%d", i)}
		svc := &snapshot.Service{Name: n}
		slice := &snapshot.Slice{Name: n, Service: n.Name}
		for _, f := range lab.Families() {
			svc.ClusterIPs = append(svc.ClusterIPs, vips(i, f)[0])
			svc.LoadBalancerIPs = append(svc.LoadBalancerIPs, vips(i, f)[1])
			for k, p := range w.endpoints() {
				node := "node"
				if k >= len(w.Pods) {
					node = "node2"
				}
				slice.Endpoints = append(slice.Endpoints, snapshot.Endpoint{Addr: p.IP(f), Node: node, Ready: true, Serving: true})
			}
		}
		for _, p := range []snapshot.Protocol{snapshot.TCP, snapshot.UDP} {
			svc.Ports = append(svc.Ports,
				snapshot.Port{Name: p.String(), Protocol: p, Port: worldPort, NodePort: uint16(worldNodePort + i)})
			slice.Ports = append(slice.Ports, snapshot.SlicePort{Name: p.String(), Protocol: p, Port: worldTarget})
		}
		d.Services[n], d.Slices[n] = svc, slice
	}
	return d
}

// verdict opens a backend and has it write its tables.
func (w *world) verdict() *kernel.Backend {
	w.t.Helper()
	var b *kernel.Backend
	inside(w.t, w.Node, func() (err error) { b, err = kernel.Open(kernel.Options{}); return err })
	_, err := b.Apply(w.state, dataplane.Change{})
	labtest.Check(w.t, err)
	return b
}

// cleanup removes Verdict's tables.
func (w *world) cleanup(b *kernel.Backend) {
	w.t.Helper()
	// A packet that is under way in a chain while its table is deleted finds some of the maps empty, and is rejected. So
	// there must be no way into the chains any more.
	inside(w.t, w.Node, func() error {
		n, err := openNFTables()
		if err != nil {
			return err
		}
		defer n.Close()
		var list []deletion
		for _, f := range ipfamily.All {
			for _, c := range []string{"prerouting", "output"} {
				list = append(list, deletion{"rules of verdict " + c, unix.NFT_MSG_DELRULE, f, func(w *netlink.Buffer) {
					w.Text(unix.NFTA_RULE_TABLE, "verdict")
					w.Text(unix.NFTA_RULE_CHAIN, c)
				}})
			}
		}
		return n.commit(list)
	})
	labtest.Check(w.t, b.Remove())
	labtest.Check(w.t, b.Close())
}

// iptablesMode gives what kube-proxy's iptables mode would write for the world's Services.
func (w *world) iptablesMode(f ipfamily.Family) string {
	of, pods := ipfamily.IPv4, lab.PodRange[0]
	if f == ipfamily.IPv6 {
		of, pods = ipfamily.IPv6, lab.PodRange[1]
	}
	var chains, rules strings.Builder
	chain := func(format string, args ...any) string {
		name := fmt.Sprintf(format, args...)
		fmt.Fprintf(&chains, ":%s - [0:0]\n", name)
		return name
	}
	rule := func(format string, args ...any) { fmt.Fprintf(&rules, "-A "+format+"\n", args...) }
	for i := range worldServices {
		for k, protocol := range []string{"tcp", "udp"} {
			hash := strings.Repeat("ABCDEFG"[i:i+1]+"XY"[k:k+1], 8)
			svc, ext := chain("KUBE-SVC-%s", hash), chain("KUBE-EXT-%s", hash)
			match := fmt.Sprintf("-p %s -m %s --dport %d", protocol, protocol, worldPort)
			rule("KUBE-SERVICES -d %s %s -j %s", vips(i, of)[0], match, svc)
			rule("KUBE-SERVICES -d %s %s -j %s", vips(i, of)[1], match, ext)
			rule("KUBE-NODEPORTS -p %s -m %s --dport %d -j %s", protocol, protocol, worldNodePort+i, ext)
			rule("%s -j KUBE-MARK-MASQ", ext)
			rule("%s -j %s", ext, svc)
			rule("%s ! -s %s -d %s %s -j KUBE-MARK-MASQ", svc, pods, vips(i, of)[0], match)
			n := len(w.endpoints())
			for e, p := range w.endpoints() {
				sep := chain("KUBE-SEP-%s%s", hash[:15], "ABCDEFG"[e:e+1])
				random := ""
				if e < n-1 {
					random = fmt.Sprintf("-m statistic --mode random --probability %.10f ", 1/float64(n-e))
				}
				rule("%s %s-j %s", svc, random, sep)
				rule("%s -s %s -j KUBE-MARK-MASQ", sep, p.IP(of))
				rule("%s -p %s -j DNAT --to-destination %s", sep, protocol, netip.AddrPortFrom(p.IP(of), worldTarget))
			}
		}
	}
	rule("KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS")
	return `*nat
:KUBE-SERVICES - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-PROXY-CANARY - [0:0]
` + chains.String() + `-I PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-I OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-I POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
-A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully
` + rules.String() + `COMMIT
*filter
:KUBE-FORWARD - [0:0]
:KUBE-SERVICES - [0:0]
-I FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
-I FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP
-A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT
-A KUBE-FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
COMMIT
`
}

// nftablesMode gives what kube-proxy's nftables mode would write for the world's Services.
func (w *world) nftablesMode() string {
	var out strings.Builder
	for n, f := range lab.Families() {
		ip := []string{"ip", "ip6"}[n]
		typ := []string{"ipv4_addr", "ipv6_addr"}[n]
		var services, chains, nodePorts, clusterIPs, hairpin []string
		for _, p := range w.Pods {
			for _, protocol := range []string{"tcp", "udp"} {
				hairpin = append(hairpin, fmt.Sprintf("%s . %s . %s . %d", p.IP(f), p.IP(f), protocol, worldTarget))
			}
		}
		for i := range worldServices {
			clusterIPs = append(clusterIPs, vips(i, f)[0].String())
			for _, protocol := range []string{"tcp", "udp"} {
				name := fmt.Sprintf("default/web-%d/%s/%s", i, protocol, protocol)
				services = append(services, fmt.Sprintf("%s . %s . %d : goto service-%s", vips(i, f)[0], protocol, worldPort, name),
					fmt.Sprintf("%s . %s . %d : goto external-%s", vips(i, f)[1], protocol, worldPort, name))
				nodePorts = append(nodePorts, fmt.Sprintf("%s . %d : goto external-%s", protocol, worldNodePort+i, name))
				var to []string
				for e, p := range w.endpoints() {
					to = append(to, fmt.Sprintf("%d : %s . %d", e, p.IP(f), worldTarget))
				}
				chains = append(chains,
					fmt.Sprintf("chain service-%s {\nmeta l4proto %s dnat %s to numgen random mod %d map { %s }\n}", name,
						protocol, ip, len(to), strings.Join(to, ", ")),
					fmt.Sprintf("chain external-%s {\nmeta mark set meta mark | 0x4000\ngoto service-%s\n}", name, name))
			}
		}
		fmt.Fprintf(&out, `table %[1]s kube-proxy {
	%[2]s
	set cluster-ips { type %[3]s; elements = { %[4]s }; }
	set hairpin-connections { type %[3]s . %[3]s . inet_proto . inet_service; elements = { %[8]s }; }
	map service-ips { type %[3]s . inet_proto . inet_service : verdict; elements = { %[5]s }; }
	map service-nodeports { type inet_proto . inet_service : verdict; elements = { %[6]s }; }
	chain nat-prerouting { type nat hook prerouting priority -100; jump services; }
	chain nat-output { type nat hook output priority -100; jump services; }
	chain nat-postrouting { type nat hook postrouting priority 100; jump masquerading; }
	chain services {
		%[1]s daddr @cluster-ips %[1]s saddr != %[7]s meta mark set meta mark | 0x4000
		%[1]s daddr . meta l4proto . th dport vmap @service-ips
		fib daddr type local meta l4proto . th dport vmap @service-nodeports
	}
	chain masquerading {
		meta mark & 0x4000 != 0 meta mark set meta mark ^ 0x4000 masquerade fully-random
		ct status dnat %[1]s saddr . %[1]s daddr . meta l4proto . th dport @hairpin-connections masquerade fully-random
	}
	chain filter-forward { type filter hook forward priority 0; ct state new jump cluster-ips-check; }
	chain cluster-ips-check { %[1]s daddr @cluster-ips reject; }
}
`, ip, strings.Join(chains, "\n"), typ, strings.Join(clusterIPs, ", "), strings.Join(services, ", "),
			strings.Join(nodePorts, ", "),
			lab.PodRange[n], strings.Join(hairpin, ", "))
	}
	return out.String()
}

// modes are the ways in which a kube-proxy can have programmed the node, and how to do that.
var modes = map[string]func(*world){
	"iptables, nft variant": func(w *world) {
		for _, f := range ipfamily.All {
			restore(w.t, w.Node, nft, f, w.iptablesMode(f))
		}
	},
	"iptables, legacy variant": func(w *world) {
		for _, f := range ipfamily.All {
			restore(w.t, w.Node, legacy, f, w.iptablesMode(f))
		}
	},
	"nftables": func(w *world) { labtest.Run(w.t, w.Node, w.nftablesMode(), "nft", "-f", "-") },
}

func (w *world) clients() []*lab.Host { return []*lab.Host{w.Outside, w.Pods[0], w.Node} }

// targets are all the ways to a Service.
func (w *world) targets() []netip.AddrPort {
	var list []netip.AddrPort
	for i := range worldServices {
		for _, f := range lab.Families() {
			for _, a := range vips(i, f) {
				list = append(list, netip.AddrPortFrom(a, worldPort))
			}
			list = append(list, netip.AddrPortFrom(w.Node.IP(f), uint16(worldNodePort+i)))
		}
	}
	return list
}

// wait says how long a client waits for a new connection; over one that it holds, more than one answer may be late.
func (w *world) wait(patience time.Duration) {
	w.traffic.Patience, w.traffic.HeldPatience = patience, 2*patience
}

// begin has clients of all kinds at work until stop is called, which says how they fared. Half of the connections that
// they hold last for so long, the others for all the time.
func (w *world) begin(lifetime time.Duration) (stop func()) {
	targets := w.targets()
	w.traffic.Target = func(random *rand.Rand) (snapshot.Protocol, netip.AddrPort) {
		to := targets[random.IntN(len(targets))]
		return []snapshot.Protocol{snapshot.TCP, snapshot.UDP}[random.IntN(2)], to
	}
	for n, from := range w.clients() {
		w.traffic.Open(from, uint64(n))
		for k, to := range targets {
			w.traffic.Hold(from, to, []time.Duration{lifetime, time.Hour}[(n+k)%2], 5*time.Millisecond)
		}
	}
	return func() {
		w.t.Helper()
		w.traffic.Stop()
		w.t.Log(&w.traffic)
		w.traffic.Check(w.t)
	}
}

// TestNoConnectionIsLost goes from kube-proxy's rules to Verdict and back, again and again, while clients open
// connections and hold old ones, some for all that time. Not one fails.
func TestNoConnectionIsLost(t *testing.T) {
	for name, program := range modes {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			random := rand.New(rand.NewPCG(5, 5))
			rest := func() { time.Sleep(time.Duration(random.IntN(60)) * time.Millisecond) }
			program(w)
			stop := w.begin(400 * time.Millisecond)
			time.Sleep(200 * time.Millisecond)
			for range *rounds {
				b := w.verdict()
				rest()
				if found := remove(t, w.Node); !found.HasServices() {
					t.Errorf("found only %q", found.Summary())
				}
				if left := find(t, w.Node); !left.Empty() {
					t.Errorf("left are %q", left.Summary())
				}
				rest()
				program(w)
				rest()
				w.cleanup(b)
				rest()
			}
			t.Logf("%d times to Verdict and back", *rounds)
			stop()
		})
	}
}

// whose says which proxy translates new connections while there are two: Verdict counts those it did.
func (w *world) whose(b *kernel.Backend) (verdict bool) {
	w.t.Helper()
	count := func() (n uint64) {
		lists, err := b.List()
		labtest.Check(w.t, err)
		for _, l := range lists {
			for _, e := range l.Elements[verdictnft.Endpoints] {
				n += e.Packets
			}
		}
		return n
	}
	const dials = 8
	before := count()
	for i := range dials {
		to := w.targets()[i%len(w.targets())]
		if r := w.Outside.Dial(snapshot.TCP, to, lab.Options{}); r.Outcome != lab.Answered {
			w.t.Errorf("outside to %s: %v", to, r)
		}
	}
	switch n := count() - before; n {
	case 0:
		return false
	case dials:
		return true
	default:
		w.t.Errorf("Verdict translated %d of %d connections", n, dials)
		return true
	}
}

// TestWhoDecides shows which of two proxies translates a new connection while both are there: Verdict, whoever wrote
// its rules last, since its chains have the lower priority.
func TestWhoDecides(t *testing.T) {
	for name, program := range modes {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			program(w)
			b := w.verdict()
			if !w.whose(b) {
				t.Error("beside the rules that were there before, Verdict does not decide")
			}
			remove(t, w.Node)
			if !w.whose(b) {
				t.Error("without other rules, Verdict does not decide")
			}
			program(w)
			if !w.whose(b) {
				t.Error("beside kube-proxy's rules that came back, Verdict does not decide")
			}
			w.cleanup(b)
		})
	}
}

// TestEstablishedConnections: when the tables go, established connections continue as long as another rule of the node
// translates addresses of their family, whoever made it, and end otherwise. "verdict cleanup --help" and
// docs/INSTALL.md say so.
func TestEstablishedConnections(t *testing.T) {
	for _, another := range []bool{true, false} {
		w := newWorld(t)
		b := w.verdict()
		conn, r := w.Outside.Open(snapshot.TCP, w.targets()[0], lab.Options{})
		if r.Outcome != lab.Answered {
			t.Fatalf("with Verdict's tables: %v", r)
		}
		if another {
			const chains = "table ip foreign { chain c { type nat hook postrouting priority 100; " +
				"ip daddr 192.0.2.99 masquerade; }; }\n"
			labtest.Run(t, w.Node, chains, "nft", "-f", "-")
		}
		w.cleanup(b)
		if r := conn.Ping(2 * time.Second); (r.Outcome == lab.Answered) != another {
			t.Errorf("without Verdict's tables, another nat chain is there: %v; the connection says %v", another, r)
		}
		_ = conn.Close()
	}
}
