package takeover

import (
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/ipvshandle"
)

// ipvsChains are rules of IPVS mode that look into its ipsets.
const ipvsChains = `*nat
:KUBE-SERVICES - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-NODE-PORT - [0:0]
:KUBE-LOAD-BALANCER - [0:0]
:KUBE-MARK-MASQ - [0:0]
-I OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-I PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-I POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A KUBE-SERVICES -m set --match-set KUBE-CLUSTER-IP dst,dst -j KUBE-MARK-MASQ
-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODE-PORT
-A KUBE-SERVICES -m set --match-set KUBE-CLUSTER-IP dst,dst -j ACCEPT
-A KUBE-NODE-PORT -p tcp -m set --match-set KUBE-NODE-PORT-TCP dst -j KUBE-MARK-MASQ
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-POSTROUTING -m comment --comment "Kubernetes endpoints dst ip:port, source ip for solving hairpin purpose" ` +
	`-m set --match-set KUBE-LOOP-BACK dst,dst,src -j MASQUERADE
COMMIT
*filter
:KUBE-FORWARD - [0:0]
:KUBE-NODE-PORT - [0:0]
:KUBE-PROXY-FIREWALL - [0:0]
:KUBE-SOURCE-RANGES-FIREWALL - [0:0]
:KUBE-IPVS-FILTER - [0:0]
:KUBE-IPVS-OUT-FILTER - [0:0]
-I FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
-I INPUT -m comment --comment "kubernetes health check rules" -j KUBE-NODE-PORT
-I INPUT -m comment --comment "kube-proxy firewall rules" -j KUBE-PROXY-FIREWALL
-I FORWARD -m comment --comment "kube-proxy firewall rules" -j KUBE-PROXY-FIREWALL
-I INPUT -m comment --comment "kubernetes ipvs access filter" -j KUBE-IPVS-FILTER
-I OUTPUT -m comment --comment "kubernetes ipvs access filter" -j KUBE-IPVS-OUT-FILTER
-A KUBE-NODE-PORT -m set --match-set KUBE-HEALTH-CHECK-NODE-PORT dst -j ACCEPT
-A KUBE-IPVS-FILTER -m set --match-set KUBE-CLUSTER-IP dst,dst -j RETURN
-A KUBE-IPVS-FILTER -m conntrack --ctstate NEW -m set --match-set KUBE-IPVS-IPS dst -j REJECT
COMMIT
`

// ipvsSets are IPVS mode's ipsets, and two of others with much the same names.
const ipvsSets = `create KUBE-CLUSTER-IP hash:ip,port
create KUBE-LOOP-BACK hash:ip,port,ip
create KUBE-NODE-PORT-TCP bitmap:port range 0-65535
create KUBE-HEALTH-CHECK-NODE-PORT bitmap:port range 0-65535
create KUBE-IPVS-IPS hash:ip
create KUBE-6-CLUSTER-IP hash:ip,port family inet6
create KUBE-6-LOAD-BALANCER-SOURCE-CID hash:ip,port,net family inet6
create KUBE-EXTERNAL-IP hash:net
create KUBE-MINE hash:ip
add KUBE-CLUSTER-IP 10.96.0.10,tcp:80
add KUBE-CLUSTER-IP 10.96.0.10,udp:53
add KUBE-6-CLUSTER-IP fd00:10:96::a,tcp:80
add KUBE-NODE-PORT-TCP 30080
`

// TestSets removes the rules and the ipsets of IPVS mode, all but a set that somebody else's rule looks into.
func TestSets(t *testing.T) {
	if _, err := exec.LookPath("ipset"); err != nil {
		t.Fatal("this test needs ipset: install the package ipset, or run make test, which does")
	}
	for _, v := range []variant{nft, legacy} {
		t.Run(v.String(), func(t *testing.T) {
			h := labtest.NewHost(t, labtest.NewNet(t), "node")
			labtest.Run(t, h, ipvsSets, "ipset", "restore")
			restore(t, h, v, ipfamily.IPv4,
				"*filter\n-A INPUT -m set --match-set KUBE-LOOP-BACK dst,dst,src -j ACCEPT\nCOMMIT\n")
			before := save(t, h, v, ipfamily.IPv4)
			restore(t, h, v, ipfamily.IPv4, ipvsChains)
			found := remove(t, h)
			if s := found.Summary(); !found.HasServices() || len(s) != 2 || s[1] != "7 ipsets" || found.Kept() != nil {
				t.Errorf("found %q, kept %q", s, found.Kept())
			}
			after := save(t, h, v, ipfamily.IPv4)
			after = strings.Replace(after,
				"*nat\n:PREROUTING ACCEPT [0:0]\n:INPUT ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]\n:POSTROUTING ACCEPT [0:0]\nCOMMIT\n",
				"", 1)
			if after != before {
				t.Errorf("before:\n%s\nafter:\n%s", before, after)
			}
			left := strings.Fields(labtest.Run(t, h, "", "ipset", "list", "-n"))
			slices.Sort(left)
			if want := []string{"KUBE-EXTERNAL-IP", "KUBE-LOOP-BACK", "KUBE-MINE"}; !slices.Equal(left, want) {
				t.Errorf("left are the sets %q, want %q", left, want)
			}
			again := find(t, h)
			if want := []string{"ipsets KUBE-LOOP-BACK: rules that stay use them"}; !again.Empty() ||
				!slices.Equal(again.Kept(), want) {
				t.Errorf("afterwards there are %q, kept %q", again.Summary(), again.Kept())
			}
		})
	}
}

// TestMembers reads the sets by which virtual services are told.
func TestMembers(t *testing.T) {
	h := labtest.NewHost(t, labtest.NewNet(t), "node")
	labtest.Run(t, h, ipvsSets, "ipset", "restore")
	own := proxyState{nodePorts: map[ipfamily.Family]map[member]bool{ipfamily.IPv4: {}, ipfamily.IPv6: {}},
		addrPorts: map[member]bool{}}
	inside(t, h, func() error { return (&Found{}).findSets(&own) })
	var got []string
	for m := range own.addrPorts {
		got = append(got, ipvshandle.Name(ipvshandle.NewService(netip.AddrPortFrom(m.addr, m.port), m.protocol)))
	}
	slices.Sort(got)
	want := []string{"10.96.0.10:53 udp", "10.96.0.10:80 tcp", "[fd00:10:96::a]:80 tcp"}
	if !slices.Equal(got, want) || len(own.nodePorts[ipfamily.IPv4]) != 1 ||
		!own.nodePorts[ipfamily.IPv4][member{port: 30080, protocol: 6}] || len(own.nodePorts[ipfamily.IPv6]) != 0 {
		t.Errorf("got %q and ports %v, want %q and 30080", got, own.nodePorts, want)
	}
}
