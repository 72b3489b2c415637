package dataplane

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// client is somebody who opens a connection.
type client struct {
	name string
	addr [2]string // IPv4, IPv6
	// iface is the interface its packets come in by; the node's own come in by none.
	iface string
	node  bool
	// in says in which of the ranges a detector may know the client is: "cluster node bridge".
	in string
}

var clients = []client{
	{name: "pod", addr: [2]string{"10.244.1.77", "fd00:244:1::77"}, iface: "cni0", in: "cluster node bridge"},
	{name: "other node's pod", addr: [2]string{"10.244.2.77", "fd00:244:2::77"}, iface: "eth0", in: "cluster"},
	{name: "node", addr: [2]string{"192.168.0.1", "fd00:192::1"}, node: true},
	{name: "outside", addr: [2]string{"203.0.113.9", "2001:db8::9"}, iface: "eth0"},
}

// origin reads State.Pods as a backend must.
func (c *client) origin(st *State, f ipfamily.Family) From {
	pods := ipfamily.Per[Pods]{st.Pods4, st.Pods6}[f]
	switch {
	case pods.CIDR.IsValid() && pods.CIDR.Contains(addr(c.addr[f])),
		pods.Interface != "" && c.iface == pods.Interface,
		pods.InterfacePrefix != "" && strings.HasPrefix(c.iface, pods.InterfacePrefix):
		return Pod
	case c.node:
		return Node
	}
	return Anyone
}

// endpoints is a set of endpoints and, written by hand, the sets that docs/KUBE-PROXY.md#endpoint-sets makes of it. An
// endpoint is l or r (on this node or another), a number, and a state: R ready, T draining, U unready, Z terminating
// and not serving.
type endpoints struct {
	all, cluster, local string
	// any says whether any endpoint is usable.
	any bool
}

var endpointSets = []endpoints{
	{all: ""},
	{all: "l1U r2U", any: false},
	{all: "l1Z r2Z", any: false},
	{all: "r1R", cluster: "r1", any: true},
	{all: "l1R", cluster: "l1", local: "l1", any: true},
	{all: "r1R l2R", cluster: "r1 l2", local: "l2", any: true},
	{all: "r1R l2R l3U r4T", cluster: "r1 l2", local: "l2", any: true},
	{all: "r1R l2T", cluster: "r1", local: "l2", any: true},
	{all: "r1T l2T", cluster: "r1 l2", local: "l2", any: true},
	{all: "r1T", cluster: "r1", any: true},
	{all: "r1T l2U", cluster: "r1", any: true},
	{all: "l1T l2R", cluster: "l2", local: "l2", any: true},
	{all: "l1T r2Z", cluster: "l1", local: "l1", any: true},
}

func (e endpoints) slice(f ipfamily.Family) *snapshot.Slice {
	sl := sliceOf("web", "web-1")
	for _, w := range strings.Fields(e.all) {
		ep := snapshot.Endpoint{Addr: endpointAddr(w, f), Node: map[byte]string{'l': "here", 'r': "there"}[w[0]]}
		switch w[2] {
		case 'R':
			ep.Ready, ep.Serving = true, true
		case 'T':
			ep.Serving, ep.Terminating = true, true
		case 'Z':
			ep.Terminating = true
		}
		sl.Endpoints = append(sl.Endpoints, ep)
	}
	return sl
}

func endpointAddr(word string, f ipfamily.Family) netip.Addr {
	return addr([2]string{"10.244.9." + word[1:2], "fd00:244:9::" + word[1:2]}[f])
}

// answer is what becomes of a connection.
type answer struct {
	pool string // endpoints by word, "reject", "drop" or "pass"
	snat bool
}

func (e endpoints) words(p *Pool, f ipfamily.Family) string {
	if len(p.Endpoints) == 0 {
		return p.Empty.String()
	}
	var out []string
	for _, w := range strings.Fields(e.all) {
		for _, ep := range p.Endpoints {
			if ep.AddrPort == netip.AddrPortFrom(endpointAddr(w, f), 8080) && ep.Local == (w[0] == 'l') {
				out = append(out, w[:2])
			}
		}
	}
	if len(out) != len(p.Endpoints) {
		return fmt.Sprint("strangers in ", p.Endpoints)
	}
	return strings.Join(out, " ")
}

// expected is docs/KUBE-PROXY.md#traffic-matrix, line by line.
func expected(
	c *client, kind Kind, internalLocal, externalLocal, masqAll bool, failover snapshot.ExternalFailover, detector string,
	e endpoints,
) answer {
	isPod := detector != "" && strings.Contains(c.in, detector)
	from := func(local, snat bool) answer {
		set, none := e.cluster, "reject"
		if local {
			set = e.local
			if e.any {
				none = "drop"
			}
		}
		if set == "" {
			set = none
		}
		return answer{set, snat}
	}
	if kind == ClusterIP {
		return from(internalLocal, masqAll || detector != "" && !isPod)
	}
	if !externalLocal {
		return from(false, true)
	}
	if outside := !isPod && !c.node; e.local == "" {
		switch {
		case failover == snapshot.FailoverCluster:
			return from(false, true)
		case failover == snapshot.FailoverReject && outside:
			return answer{"reject", false}
		case failover == snapshot.FailoverPass && (outside || !e.any):
			return answer{"pass", false}
		}
	}
	if isPod {
		return from(false, false)
	}
	if c.node {
		return from(false, true)
	}
	return from(true, false)
}

// frontendKeys are where matrixService answers, by family.
var frontendKeys = map[Kind][2]string{
	ClusterIP:      {"10.96.0.10:80", "[fd00:96::10]:80"},
	LoadBalancerIP: {"198.51.100.1:80", "[2001:db8:1::1]:80"},
	ExternalIP:     {"198.51.100.2:80", "[2001:db8:1::2]:80"},
	NodePort:       {"192.168.0.1:30080", "[fd00:192::1]:30080"},
}

func matrixService(internalLocal, externalLocal bool) *snapshot.Service {
	return &snapshot.Service{
		Name:            name("web"),
		ClusterIPs:      addrs("10.96.0.10 fd00:96::10"),
		LoadBalancerIPs: addrs("198.51.100.1 2001:db8:1::1"),
		ExternalIPs:     addrs("198.51.100.2 2001:db8:1::2"),
		InternalLocal:   internalLocal,
		ExternalLocal:   externalLocal,
		Ports:           tcp80(30080),
	}
}

func matrixConfig(masqAll bool, detector string) Config {
	cfg := Config{NodeName: "here", MasqueradeAll: masqAll}
	switch detector {
	case "cluster":
		cfg.DetectLocal.ClusterCIDRs = prefixes("10.244.0.0/16 fd00:244::/32")
	case "node":
		cfg.DetectLocal.Mode = DetectNodeCIDR
	case "bridge":
		cfg.DetectLocal = DetectLocal{Mode: DetectBridgeInterface, Interface: "cni0"}
	}
	return cfg
}

var matrixNode = snapshot.Node{
	Name:      "here",
	Addresses: addrs("192.168.0.1 fd00:192::1"),
	PodCIDRs:  prefixes("10.244.1.0/24 fd00:244:1::/48"),
}

// TestTrafficMatrix asks every client, on every frontend, under every policy and option, for every set of endpoints, in
// both families.
func TestTrafficMatrix(t *testing.T) {
	asked, different := 0, map[answer]int{}
	for _, detector := range []string{"", "cluster", "node", "bridge"} {
		for option := range 8 * 4 {
			masqAll, internalLocal, externalLocal := option&1 > 0, option&2 > 0, option&4 > 0
			failover := snapshot.ExternalFailover(option / 8)
			for _, e := range endpointSets {
				for _, f := range ipfamily.All {
					s := snapshot.New()
					svc := matrixService(internalLocal, externalLocal)
					svc.ExternalFailover = failover
					put(s, matrixNode, svc, e.slice(f))
					st, _ := Compute(matrixConfig(masqAll, detector), s)
					checkInvariants(t, st)
					for kind, keys := range frontendKeys {
						sp, fe := st.frontend(key(keys[f]))
						if fe == nil || fe.Kind != kind {
							t.Fatalf("no %v at %s: %+v", kind, keys[f], fe)
						}
						for i := range clients {
							c := &clients[i]
							r := fe.Route(c.origin(st, f))
							got := answer{e.words(r.Pool, f), r.SNAT}
							want := expected(c, kind, internalLocal, externalLocal, masqAll, failover, detector, e)
							if got != want {
								t.Errorf("%s -> %v %v, detector %q, masqAll %v, Local %v %v, %v, endpoints %q: got %v, want %v",
									c.name, kind, sp.Name, detector, masqAll, internalLocal, externalLocal, failover, e.all, got, want)
							}
							asked++
							different[got]++
						}
					}
				}
			}
		}
	}
	if want := 4 * 8 * 4 * len(endpointSets) * 2 * len(frontendKeys) * len(clients); asked != want || len(different) < 12 {
		t.Errorf("asked %d questions of %d, %d different answers: this is not the matrix", asked, want, len(different))
	}
}

// TestKubeProxyFlows holds the 108 answers of kube-proxy's own flow table: three clients at three kinds of frontend of
// three Services, under four options. They are written down, not derived: C and L are the cluster and the local pool, *
// is SNAT.
func TestKubeProxyFlows(t *testing.T) {
	const (
		plain       = "C C* C C*"
		masqueraded = "C* C* C C*"
		snat        = "C* C* C* C*"
		local       = "L L L L"
	)
	services := map[string]struct{ internalLocal, externalLocal bool }{
		"cluster":        {false, false},
		"external local": {false, true},
		"internal local": {true, false},
	}
	// The columns are the options: default; masquerade-all; no detector; masquerade-all and no detector.
	flows := []struct {
		service   string
		kind      Kind
		from      string
		byOptions string
	}{
		{"cluster", ClusterIP, "pod", plain},
		{"cluster", ClusterIP, "node", masqueraded},
		{"cluster", ClusterIP, "outside", masqueraded},
		{"cluster", NodePort, "pod", snat},
		{"cluster", NodePort, "node", snat},
		{"cluster", NodePort, "outside", snat},
		{"cluster", LoadBalancerIP, "pod", snat},
		{"cluster", LoadBalancerIP, "node", snat},
		{"cluster", LoadBalancerIP, "outside", snat},
		{"external local", ClusterIP, "pod", plain},
		{"external local", ClusterIP, "node", masqueraded},
		{"external local", ClusterIP, "outside", masqueraded},
		{"external local", NodePort, "pod", "C C L L"},
		{"external local", NodePort, "node", snat},
		{"external local", NodePort, "outside", local},
		{"external local", LoadBalancerIP, "pod", "C C L L"},
		{"external local", LoadBalancerIP, "node", snat},
		{"external local", LoadBalancerIP, "outside", local},
		{"internal local", ClusterIP, "pod", "L L* L L*"},
		{"internal local", ClusterIP, "node", "L* L* L L*"},
		{"internal local", ClusterIP, "outside", "L* L* L L*"},
		{"internal local", NodePort, "pod", snat},
		{"internal local", NodePort, "node", snat},
		{"internal local", NodePort, "outside", snat},
		{"internal local", LoadBalancerIP, "pod", snat},
		{"internal local", LoadBalancerIP, "node", snat},
		{"internal local", LoadBalancerIP, "outside", snat},
	}
	options := []Config{matrixConfig(false, "cluster"), matrixConfig(true, "cluster"), matrixConfig(false, ""),
		matrixConfig(true, "")}
	pools := map[string]string{"r1 l2": "C", "l2": "L"}
	e := endpoints{all: "r1R l2R"}
	for _, flow := range flows {
		for o, cfg := range options {
			s := snapshot.New()
			p := services[flow.service]
			put(s, matrixNode, matrixService(p.internalLocal, p.externalLocal), e.slice(ipfamily.IPv4))
			st, _ := Compute(cfg, s)
			_, fe := st.frontend(key(frontendKeys[flow.kind][ipfamily.IPv4]))
			for i := range clients {
				if c := &clients[i]; c.name == flow.from {
					r := fe.Route(c.origin(st, ipfamily.IPv4))
					got := pools[e.words(r.Pool, ipfamily.IPv4)]
					if r.SNAT {
						got += "*"
					}
					if want := strings.Fields(flow.byOptions)[o]; got != want {
						t.Errorf("%s -> %v of %s, option %d: got %s, want %s", flow.from, flow.kind, flow.service, o, got, want)
					}
				}
			}
		}
	}
}

// TestPolicyTableIsComplete asks for every combination of conditions, so that rowsFor can never panic on a cluster.
func TestPolicyTableIsComplete(t *testing.T) {
	for option := range 16 {
		for f := range failoverPassAll + 1 {
			if f != noFailover && option&3 != 3 { // then there is none
				continue
			}
			rows := rowsFor(option&1 > 0, option&2 > 0, option&4 > 0, option&8 > 0, f)
			if last := rows[len(rows)-1]; last.from != Anyone {
				t.Errorf("combination %d, %d ends with %v", option, f, last.from)
			}
		}
	}
}
