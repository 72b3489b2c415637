package inspect

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/proxy/backends"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/nft/iptshim/xtables"
	"github.com/verdict-proxy/verdict/nft/kernel"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

func TestMain(m *testing.M) {
	os.Setenv("XTABLES_LOCKFILE",
		filepath.Join(os.TempDir(), "verdict-test-xtables.lock")) // the hosts' rules are nobody else's
	labtest.Main(m)
}

// askedCluster is a cluster with random Services, written to its node, and servers in every pod.
type askedCluster struct {
	*lab.Cluster
	t       testing.TB
	r       *rand.Rand
	snap    *snapshot.Snapshot
	config  dataplane.Config
	backend reconcile.Writer
	// packets is how many are asked about and sent.
	packets int
}

const askedPort = 8080

// byNFTables, byIPTablesNFT and byIPTablesLegacy are what writes the rules of an askedCluster.
const (
	byNFTables       = "nftables"
	byIPTablesNFT    = "iptables, nft variant"
	byIPTablesLegacy = "iptables, legacy variant"
)

func newAskedCluster(t testing.TB, seed uint64, conf lab.Config, detect dataplane.DetectLocal,
	by string) *askedCluster {
	t.Helper()
	conf.LocalPods, conf.RemotePods = 3, 3 // the last of each are no endpoints
	c := &askedCluster{Cluster: labtest.NewCluster(t, conf), t: t, packets: 120, r: rand.New(rand.NewPCG(seed, 9)),
		snap:   snapshot.New(),
		config: dataplane.Config{NodeName: "node", DetectLocal: detect, LocalhostNodePorts: true}}
	for _, pod := range slices.Concat(c.Pods, c.RemotePods) {
		for _, p := range protocolNames {
			_, err := pod.Serve(p, askedPort)
			labtest.Check(t, err)
		}
	}
	labtest.Check(t, c.Node.Sysctl("net/ipv4/conf/all/route_localnet", "1"))
	addrs := []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), c.Node.IP(ipfamily.IPv4), c.Node.IP(ipfamily.IPv6)}
	for _, r := range lab.NodePodRange {
		addrs = append(addrs, lab.Nth(r, 1))
	}
	slices.SortFunc(addrs, netip.Addr.Compare)
	cidrs := slices.Clone(lab.ServiceRange)
	d := snapshot.Delta{HostAddrs: &addrs, ServiceCIDRs: &cidrs, Node: &snapshot.Node{Name: "node",
		Addresses: []netip.Addr{c.Node.IP(ipfamily.IPv4), c.Node.IP(ipfamily.IPv6)}, PodCIDRs: lab.NodePodRange},
		Services: map[snapshot.Name]*snapshot.Service{}, Slices: map[snapshot.Name]*snapshot.Slice{}}
	for i := range 24 {
		c.service(i+1, &d)
	}
	c.snap.Apply(d)
	if by == byNFTables {
		labtest.Check(t, c.Node.Do(func() error {
			backend, err := kernel.Open(kernel.Options{})
			if err == nil {
				t.Cleanup(func() { backend.Close() })
			}
			c.backend = backend
			return err
		}))
	} else {
		c.openChains(by)
	}
	c.write(c.snap)
	return c
}

// openChains opens a variant of iptables: a kubelet says which one the node has.
func (c *askedCluster) openChains(by string) {
	c.t.Helper()
	c.packets = 60 // to read all rules for each packet takes its time
	program := map[string]string{byIPTablesNFT: "iptables-nft", byIPTablesLegacy: "iptables-legacy"}[by]
	labtest.Run(c.t, c.Node, "", program, "-w", "5", "-t", "mangle", "-N", "KUBE-IPTABLES-HINT")
	labtest.Check(c.t, c.Node.Do(func() error {
		programs, err := xtables.Find(context.Background())
		if err != nil {
			return err
		}
		if !strings.HasSuffix(program, programs.Variant.String()) {
			return fmt.Errorf("it is %s", programs)
		}
		backend, err := xtables.Open(programs, xtables.Options{Log: slog.New(slog.DiscardHandler)})
		c.t.Cleanup(func() { backend.Close() })
		c.backend = backend
		return err
	}))
}

// write writes what objects ask for.
func (c *askedCluster) write(snap *snapshot.Snapshot) {
	c.t.Helper()
	st, _ := dataplane.Compute(c.config, snap)
	_, err := c.backend.Apply(st, dataplane.Change{Services: allNames(st), Globals: true})
	labtest.Check(c.t, err)
}

func allNames(st *dataplane.State) (names []snapshot.Name) {
	for n := range st.Services {
		names = append(names, n)
	}
	slices.SortFunc(names, snapshot.Name.Compare)
	return names
}

func (c *askedCluster) yes() bool { return c.r.IntN(2) == 0 }

// service makes a random Service, of which not all endpoints can be used.
func (c *askedCluster) service(n int, d *snapshot.Delta) {
	name := snapshot.Name{Namespace: "asked", Name: fmt.Sprintf("s%d", n)}
	svc := &snapshot.Service{Name: name, InternalLocal: c.r.IntN(3) == 0, ExternalLocal: c.yes(),
		ExternalFailover: snapshot.ExternalFailover(c.r.IntN(4))}
	if c.r.IntN(3) == 0 {
		svc.Affinity = time.Hour
	}
	for i := range lab.ServiceRange {
		svc.ClusterIPs = append(svc.ClusterIPs, lab.Nth(lab.ServiceRange[i], n))
		svc.LoadBalancerIPs = append(svc.LoadBalancerIPs, lab.Nth(lab.ExternalRange[i], n))
		svc.ExternalIPs = append(svc.ExternalIPs, lab.Nth(lab.ExternalRange[i], 100+n))
	}
	if c.r.IntN(4) == 0 {
		svc.SourceRanges = []netip.Prefix{lab.OutsideRange[0], lab.NodeRange[1]}
	}
	for _, p := range protocolNames {
		svc.Ports = append(svc.Ports, snapshot.Port{Name: p.String(), Protocol: p, Port: 80, NodePort: 30000 + uint16(n)})
	}
	for i, f := range []ipfamily.Family{ipfamily.IPv4, ipfamily.IPv6} {
		sl := &snapshot.Slice{Name: snapshot.Name{Namespace: name.Namespace, Name: fmt.Sprintf("%s-%d", name.Name, i)},
			Service: name.Name}
		for _, p := range protocolNames {
			sl.Ports = append(sl.Ports, snapshot.SlicePort{Name: p.String(), Protocol: p, Port: askedPort})
		}
		for k, pod := range slices.Concat(c.Pods, c.RemotePods[:2]) {
			ep := snapshot.Endpoint{Addr: pod.IP(f), Node: "node", Ready: c.yes()}
			if k >= len(c.Pods) {
				ep.Node = "node2"
			}
			ep.Serving, ep.Terminating = ep.Ready || c.yes(), !ep.Ready && c.yes()
			if c.r.IntN(3) > 0 {
				sl.Endpoints = append(sl.Endpoints, ep)
			}
		}
		d.Slices[sl.Name] = sl
	}
	d.Services[name] = svc
}

// ask asks the kernel of the node, and the objects if there are any.
func (c *askedCluster) ask(q Question, snap *snapshot.Snapshot) *Answer {
	c.t.Helper()
	return c.answer(c.gather(snap), q)
}

// gather reads what every question needs. It takes most of the time of one: questions between which nothing is written
// share it.
func (c *askedCluster) gather(snap *snapshot.Snapshot) *explainRun {
	c.t.Helper()
	e := &explainRun{}
	labtest.Check(c.t, c.Node.Do(func() error {
		i, err := backends.Inspect(context.Background(), backends.InspectOptions{})
		if err != nil {
			return err
		}
		c.t.Cleanup(func() { i.Close() })
		e.Explainer = &Explainer{Objects: &ObjectFlags{}, Inspector: i}
		err = e.gather(context.Background())
		c.t.Cleanup(e.routes.Close)
		return err
	}))
	if snap != nil {
		e.objects = &Objects{Source: "objects", Config: c.config, Snap: snap}
	}
	return e
}

// answer answers a question after gather.
func (c *askedCluster) answer(gathered *explainRun, q Question) (a *Answer) {
	c.t.Helper()
	e := *gathered
	e.q = q
	labtest.Check(c.t, c.Node.Do(func() (err error) {
		a, err = e.answer(context.Background())
		return err
	}))
	return a
}

// packet is a random one to a Service, or near one.
func (c *askedCluster) packet() (q Question, from *lab.Host) {
	hosts := []*lab.Host{c.Pods[0], c.Pods[1], c.RemotePods[2], c.Node, c.Node2, c.Outside}
	from = hosts[c.r.IntN(len(hosts))]
	i, n := c.r.IntN(2), 1+c.r.IntN(24)
	f := []ipfamily.Family{ipfamily.IPv4, ipfamily.IPv6}[i]
	q.Key = dataplane.Key{Protocol: protocolNames[c.r.IntN(3)], Port: 80}
	switch c.r.IntN(10) {
	case 0, 1, 2:
		q.Key.Addr = lab.Nth(lab.ServiceRange[i], n)
	case 3, 4:
		q.Key.Addr = lab.Nth(lab.ExternalRange[i], n)
	case 5:
		q.Key.Addr = lab.Nth(lab.ExternalRange[i], 100+n)
	case 6, 7:
		q.Key.Addr, q.Key.Port = c.Node.IP(f), 30000+uint16(n)
	case 8: // a cluster IP's other port, or nobody's address
		q.Key.Addr, q.Key.Port = lab.Nth(lab.ServiceRange[i], n+c.r.IntN(2)*100), 81
	default: // the node's loopback
		from, f = c.Node, ipfamily.IPv4
		q.Key.Addr, q.Key.Port = netip.AddrFrom4([4]byte{127, 0, 0, 1}), 30000+uint16(n)
	}
	switch q.Source = from.IP(f); {
	case from != c.Node:
	case c.r.IntN(3) == 0 && !q.Key.Addr.IsLoopback(): // from an address like a pod's
		q.Source = lab.Nth(lab.NodePodRange[i], 1)
	default:
		q.Source, q.Word = netip.Addr{}, wordNode
	}
	return q, from
}

// TestExplainLive sends packets where explain was asked about them before: they must end where it says.
func TestExplainLive(t *testing.T) {
	cluster := dataplane.DetectLocal{ClusterCIDRs: lab.PodRange}
	for _, world := range []struct {
		name   string
		conf   lab.Config
		detect dataplane.DetectLocal
	}{
		{"cluster CIDR", lab.Config{}, cluster},
		{"bridge", lab.Config{PodBridge: "cni0"}, dataplane.DetectLocal{Mode: dataplane.DetectBridgeInterface,
			Interface: "cni0"}},
		{"plain bridge", lab.Config{PodBridge: "cni0", PlainBridge: true},
			dataplane.DetectLocal{Mode: dataplane.DetectBridgeInterface, Interface: "cni0"}},
		{"bridge, cluster CIDR", lab.Config{PodBridge: "cni0"}, cluster},
		{"bridge, unknown", lab.Config{PodBridge: "cni0"}, dataplane.DetectLocal{}},
		{"prefix", lab.Config{PodLinkPrefix: "pod"}, dataplane.DetectLocal{Mode: dataplane.DetectInterfaceNamePrefix,
			Interface: "pod"}},
		{"unknown", lab.Config{}, dataplane.DetectLocal{}},
	} {
		for _, by := range []string{byNFTables, byIPTablesNFT, byIPTablesLegacy} {
			t.Run(world.name+"/"+by, func(t *testing.T) {
				explainAndSend(newAskedCluster(t, uint64(len(world.name)), world.conf, world.detect, by))
			})
		}
	}
}

// explainAndSend asks about random packets of a cluster, and sends them.
func explainAndSend(c *askedCluster) {
	t := c.t
	outcomes, bound := map[string]int{}, 0
	var unanswered sync.WaitGroup // the next packet need not wait until it is sure of one that there is no answer
	gathered := c.gather(c.snap)
	q, from := c.packet()
	for range c.packets {
		if c.r.IntN(4) > 0 { // else the same sender comes back
			q, from = c.packet()
		}
		a := c.answer(gathered, q)
		if !a.Agree() {
			t.Fatalf("%+v: %v\n%+v", q, a.Disagreements, a.Kernel)
		}
		unclear := slices.DeleteFunc(slices.Clone(a.Kernel.Unclear), func(text string) bool {
			return strings.Contains(text, "net.bridge.bridge-nf-call-") // of a plain bridge
		})
		if len(unclear) > 0 || a.Notes != nil {
			t.Errorf("%+v: %v %v", q, a.Kernel.Unclear, a.Notes)
		}
		if a.Kernel.Outcome == "endpoint" || a.Kernel.Outcome == "reject" {
			c.send(q, from, a)
		} else {
			q, from := q, from // the loop has others by then
			unanswered.Go(func() { c.send(q, from, a) })
		}
		outcomes[a.Kernel.Outcome]++
		if a.Kernel.Affinity != nil && a.Kernel.Affinity.Endpoint.IsValid() {
			bound++
		}
	}
	unanswered.Wait()
	t.Logf("%v, %d bound to an endpoint", outcomes, bound)
	if outcomes["endpoint"] < c.packets/4 || outcomes["reject"] == 0 || outcomes["drop"] == 0 || bound == 0 {
		t.Errorf("not everything was met: %v, %d bound", outcomes, bound)
	}
}

// send sends the packet that was asked about, and compares.
func (c *askedCluster) send(q Question, from *lab.Host, a *Answer) {
	c.t.Helper()
	to := netip.AddrPortFrom(q.Key.Addr, q.Key.Port)
	want := map[string]lab.Outcome{"endpoint": lab.Answered, "reject": lab.Refused, "drop": lab.TimedOut}[a.Kernel.Outcome]
	// What Verdict leaves alone ends at whoever has the address, if anybody has: not at an endpoint.
	untouched := a.Kernel.Outcome == "untouched"
	timeout := 3 * time.Second
	if want == lab.TimedOut || untouched {
		timeout = 250 * time.Millisecond
	}
	o := lab.Options{Timeout: timeout}
	if from == c.Node && q.Source.IsValid() {
		o.From = netip.AddrPortFrom(q.Source, 0)
	}
	r := from.Dial(q.Key.Protocol, to, o)
	if r.Outcome != want && !(untouched && r.Outcome != lab.Answered) {
		c.t.Errorf("%s -> %s/%s: %v; explain says %s", from.Name, to, q.Key.Protocol, r, a.Kernel.Why)
		return
	}
	if want != lab.Answered {
		return
	}
	i := slices.IndexFunc(a.Kernel.Endpoints, func(e Endpoint) bool { return e.AddrPort() == r.Destination })
	if i < 0 {
		c.t.Errorf("%s -> %s/%s: %v; explain says %+v", from.Name, to, q.Key.Protocol, r, a.Kernel.Endpoints)
	} else if e := a.Kernel.Endpoints[i]; e.Source != r.Source.Addr() {
		c.t.Errorf("%s -> %s/%s: %v; explain says it sees %s (%s)", from.Name, to, q.Key.Protocol, r, e.Source, e.SourceSeen)
	}
}

// TestExplainDisagrees asks about objects that the kernel was not told of.
func TestExplainDisagrees(t *testing.T) {
	c := newAskedCluster(t, 3, lab.Config{}, dataplane.DetectLocal{ClusterCIDRs: lab.PodRange}, byNFTables)
	newer := snapshot.New()
	d := snapshot.Delta{HostAddrs: &c.snap.HostAddrs, Node: &c.snap.Node, ServiceCIDRs: &c.snap.ServiceCIDRs,
		Services: map[snapshot.Name]*snapshot.Service{}, Slices: map[snapshot.Name]*snapshot.Slice{}}
	for n, s := range c.snap.Services {
		d.Services[n] = s
	}
	for _, of := range c.snap.Slices {
		for _, s := range of {
			all := *s
			all.Endpoints = slices.Clone(s.Endpoints)
			for i := range all.Endpoints {
				all.Endpoints[i].Ready, all.Endpoints[i].Serving, all.Endpoints[i].Terminating = true, true, false
			}
			d.Slices[s.Name] = &all
		}
	}
	newer.Apply(d)
	agree, differ := 0, 0
	for n := range 24 {
		q := Question{Source: c.Pods[2].IP(ipfamily.IPv4), Key: dataplane.Key{Addr: lab.Nth(lab.ServiceRange[0], n+1),
			Protocol: snapshot.TCP, Port: 80}}
		a := c.ask(q, newer)
		same := len(a.Objects.Endpoints) == len(a.Kernel.Endpoints)
		if same != a.Agree() {
			t.Errorf("%v: the objects have %+v, the kernel %+v; disagreements %v", q.Key, a.Objects.Endpoints,
				a.Kernel.Endpoints, a.Disagreements)
		}
		if same {
			agree++
		} else {
			differ++
		}
	}
	if agree == 0 || differ == 0 {
		t.Errorf("%d agree, %d differ", agree, differ)
	}
	labtest.Check(t, c.backend.Remove())
	q := Question{Word: wordPod, Key: dataplane.Key{Addr: lab.Nth(lab.ServiceRange[0], 1), Protocol: snapshot.TCP,
		Port: 80}}
	if a := c.ask(q, c.snap); a.Agree() || a.Notes == nil || a.Kernel.Outcome != "untouched" {
		t.Errorf("without tables: %+v, notes %v", a.Kernel, a.Notes)
	}
}

// TestExplainPing asks what becomes of pings, and sends them: as the objects and the kernel say, so it is.
func TestExplainPing(t *testing.T) {
	for _, by := range []string{byNFTables, byIPTablesNFT} {
		c := newAskedCluster(t, 5, lab.Config{}, dataplane.DetectLocal{ClusterCIDRs: lab.PodRange}, by)
		seen := map[string]int{}
		for _, pings := range map[string][]bool{byNFTables: {true, false}, byIPTablesNFT: {true}}[by] {
			c.config.PingServices, c.config.RejectUnusedPorts = pings, pings
			c.write(c.snap)
			c.askPings(seen)
		}
		if (seen["answered"] < 10) != (by != byNFTables) || seen["reject"] < 10 || seen["untouched"] < 10 ||
			seen["drop"] < 1 {
			t.Errorf("%s: pings end so: %v", by, seen)
		}
	}
}

// askPings asks what becomes of pings of Services, and sends them.
func (c *askedCluster) askPings(seen map[string]int) {
	gathered := c.gather(c.snap)
	var unanswered sync.WaitGroup // the next ping need not wait until it is sure of one that there is no answer
	defer unanswered.Wait()
	for i, f := range ipfamily.All {
		for n := range 13 { // one more than there are
			for _, to := range []netip.Addr{lab.Nth(lab.ServiceRange[i], 13+n), lab.Nth(lab.ExternalRange[i], 13+n),
				lab.Nth(lab.ExternalRange[i], 113+n)} {
				from := []*lab.Host{c.Pods[2], c.Node, c.Outside}[c.r.IntN(3)]
				q := Question{Source: from.IP(f), Key: dataplane.Key{Addr: to, Protocol: snapshot.ICMP}}
				if f == ipfamily.IPv6 {
					q.Key.Protocol = snapshot.ICMPv6
				}
				a := c.answer(gathered, q)
				want := map[string]lab.Outcome{"answered": lab.Answered, "reject": lab.Refused}[a.Objects.Outcome]
				ping := func(timeout time.Duration) {
					answer := from.Echo(to, timeout).Outcome
					if !a.Agree() || want != 0 && answer != want || want == 0 && answer == lab.Answered {
						c.t.Errorf("%s to %s: %s, but the objects say %q, the kernel %q", from.Name, q.Key, answer, a.Objects.Why,
							a.Kernel.Why)
					}
				}
				if want != 0 {
					ping(time.Second)
				} else {
					unanswered.Go(func() { ping(100 * time.Millisecond) })
				}
				seen[a.Objects.Outcome]++
			}
		}
	}
}

// only makes a Service whose only endpoint is at an address, and returns where it answers.
func (c *askedCluster) only(n int, endpoint netip.Addr) dataplane.Key {
	c.t.Helper()
	i := 0
	if endpoint.Is6() {
		i = 1
	}
	name := snapshot.Name{Namespace: "asked", Name: fmt.Sprint("only-", n)}
	key := dataplane.Key{Addr: lab.Nth(lab.ServiceRange[i], 200+n), Protocol: snapshot.TCP, Port: 80}
	c.snap.Apply(snapshot.Delta{
		Services: map[snapshot.Name]*snapshot.Service{name: {Name: name, ClusterIPs: []netip.Addr{key.Addr},
			Ports: []snapshot.Port{{Protocol: snapshot.TCP, Port: 80}}}},
		Slices: map[snapshot.Name]*snapshot.Slice{name: {Name: name, Service: name.Name,
			Ports:     []snapshot.SlicePort{{Protocol: snapshot.TCP, Port: askedPort}},
			Endpoints: []snapshot.Endpoint{{Addr: endpoint, Node: "node", Ready: true, Serving: true}}}}})
	c.write(c.snap)
	return key
}

// asksAndDials asks about a connection and makes it: it reaches its endpoint, or explain says why it does not.
func (c *askedCluster) asksAndDials(from *lab.Host, word string, key dataplane.Key, trouble string) {
	c.t.Helper()
	q := Question{Source: from.IP(ipfamily.Of(key.Addr)), Key: key}
	if word != "" {
		q.Source, q.Word = netip.Addr{}, word
	}
	a := c.ask(q, c.snap)
	var out strings.Builder
	a.Print(terminal.NewPrinter(&out), TextOptions{})
	r := from.Dial(key.Protocol, netip.AddrPortFrom(key.Addr, key.Port), lab.Options{Timeout: 300 * time.Millisecond})
	if reached := r.Outcome == lab.Answered; reached != (trouble == "") || reached != (a.Objects.Outcome == "endpoint") ||
		a.Kernel.Outcome != a.Objects.Outcome || !strings.Contains(out.String(), trouble) || !a.Agree() {
		c.t.Errorf("%s to %s: %s; want %q:\n%s", from.Name, key, r, trouble, &out)
	}
}

// TestExplainUnreachable: a connection that no rule can help is not said to be sent, for reasons that real ones meet.
func TestExplainUnreachable(t *testing.T) {
	c := newAskedCluster(t, 6, lab.Config{}, dataplane.DetectLocal{ClusterCIDRs: lab.PodRange}, byNFTables)
	for i, f := range ipfamily.All {
		local, remote := c.only(4*i+1, c.Pods[0].IP(f)), c.only(4*i+2, c.RemotePods[0].IP(f))
		c.asksAndDials(c.Node, wordNode, local, "")
		c.asksAndDials(c.Pods[1], "", remote, "")
		c.asksAndDials(c.Pods[1], "", c.only(4*i+3, local.Addr), "it is the cluster IP of asked/only-")
		c.asksAndDials(c.Pods[1], "", c.only(4*i+4, lab.Nth(lab.ServiceRange[i], 250)), "it is in a ServiceCIDR")
		family := map[ipfamily.Family]string{ipfamily.IPv4: "-4", ipfamily.IPv6: "-6"}[f]
		labtest.Run(t, c.Node, "", "ip", family, "route", "flush", "root", lab.Node2PodRange[i].String())
		labtest.Run(t, c.Node, "", "ip", family, "route", "flush", "exact", "default")
		c.asksAndDials(c.Pods[1], "", remote, "stopped: this host has no route to "+c.RemotePods[0].IP(f).String())
		c.asksAndDials(c.Node, wordNode, local, "stopped: this host has no route to "+local.Addr.String())
		c.asksAndDials(c.Pods[1], "", local, "")
	}
}

// TestExplainHairpin: a pod behind a bridge reaches itself through its Service only if the bridge sends it back.
func TestExplainHairpin(t *testing.T) {
	for _, plain := range []bool{false, true} {
		c := newAskedCluster(t, 7, lab.Config{PodBridge: "cni0", PlainBridge: plain},
			dataplane.DetectLocal{ClusterCIDRs: lab.PodRange}, byNFTables)
		for i, f := range ipfamily.All {
			key := c.only(i+1, c.Pods[0].IP(f))
			c.asksAndDials(c.Pods[0], "", key, "")
			var ports []string
			for line := range strings.Lines(labtest.Run(t, c.Node, "", "ip", "-o", "link", "show", "master", "cni0")) {
				port, _, _ := strings.Cut(strings.Fields(line)[1], "@")
				ports = append(ports, port)
			}
			for _, hairpin := range []string{"off", "on"} {
				for _, port := range ports {
					labtest.Run(t, c.Node, "", "ip", "link", "set", port, "type", "bridge_slave", "hairpin", hairpin)
				}
				trouble := ""
				if hairpin == "off" && !plain {
					trouble = "lost: cni0 gives nothing back to the port it came from: set hairpin mode of "
				}
				c.asksAndDials(c.Pods[0], "", key, trouble)
				c.asksAndDials(c.Pods[1], "", key, "")
			}
		}
	}
}

// TestExplainNotCounted asks about a Service while the budget for counters is enough, not for endpoints, and for
// nothing: explain says why it has no numbers.
func TestExplainNotCounted(t *testing.T) {
	c := newAskedCluster(t, 3, lab.Config{}, dataplane.DetectLocal{ClusterCIDRs: lab.PodRange}, byNFTables)
	frontends := 0
	for _, table := range c.backend.(*kernel.Backend).Fill() {
		frontends += table[nft.Services].Elements + table[nft.InsideServices].Elements +
			table[nft.OutsideServices].Elements
	}
	at := dataplane.Key{Addr: lab.Nth(lab.ServiceRange[0], 1), Protocol: snapshot.TCP, Port: 80}
	q := Question{Source: c.Pods[2].IP(ipfamily.IPv4), Key: at}
	const first, never = snapshot.CountersFirst, snapshot.CountersNever
	for _, test := range []struct {
		counters int
		wish     snapshot.Counters
		counted  bool
		note     []string
	}{
		{0, 0, true, nil},
		{frontends, 0, true, []string{notCounted(dataplane.CountedFrontends)}},
		{1, 0, false, []string{notCounted(dataplane.CountedNothing)}},
		{0, never, false, []string{notByWish}},
		{1, never, false, []string{notByWish}},
		{1, first, false, []string{notCounted(dataplane.CountedNothing) + notDespite}},
	} {
		for name, s := range c.snap.Services {
			if slices.Contains(s.ClusterIPs, q.Key.Addr) {
				svc := *s
				svc.Counters = test.wish
				c.snap.Apply(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{name: &svc}})
			}
		}
		st, _ := dataplane.Compute(c.config, c.snap)
		labtest.Check(t, c.Node.Do(func() error {
			backend, err := kernel.Open(kernel.Options{Counters: test.counters})
			if err != nil {
				return err
			}
			defer backend.Close()
			if _, err := backend.ApplyAll(st, dataplane.Change{}); err != nil {
				return err
			}
			for again := time.Duration(1); again > 0 && err == nil; {
				_, again, err = backend.Check()
			}
			return err
		}))
		a := c.ask(q, c.snap)
		if counted := a.Kernel.Service.Connections != nil; !slices.Equal(a.Notes, test.note) || counted != test.counted {
			t.Errorf("%d counters, wish %v: the Service is counted: %v, notes %q; want %q",
				test.counters, test.wish, counted, a.Notes, test.note)
		}
	}
}
