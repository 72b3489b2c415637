//go:build peers

package compare_test

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/answers/compare"
	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/control"
	"github.com/verdict-proxy/verdict/internal/lab/control/peers"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/packets"
)

const proxyConfig = `apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: %s
hostnameOverride: node-1
clusterCIDR: 10.244.0.0/16,fd00:10:244::/48
nodePortAddresses: [192.0.2.10/32, "2001:db8:2::10/128", 127.0.0.0/8, 10.244.0.1/32]
clientConnection: {kubeconfig: %q, qps: 1000, burst: 1000}
conntrack: {maxPerCore: 0, min: 0}
metricsBindAddress: 127.0.0.1:10249
healthzBindAddress: 127.0.0.1:10256
oomScoreAdj: 0
`

// nodeAddrs are the node's, one of a bridge among them.
var nodeAddrs = []string{"192.0.2.10/32", "2001:db8:2::10/128", "10.244.0.1/32", "fd00:10:244::1/128"}

// TestKubeProxy has real kube-proxies of two versions and both modes program the same objects, and compares every class
// of packets with the objects. Every difference must have a reason, and Verdict itself must have none.
func TestKubeProxy(t *testing.T) {
	plane, host, programs := peers.Start(t, "../../..", nodeAddrs, "kube-proxy", "kube-proxy-1.36")
	peers.Create(t, plane.Client)
	m := load(t, peers.ReadBack(t, plane.Client), "--hostname-override", "node-1", "--cluster-cidr",
		"10.244.0.0/16,fd00:10:244::/48", "--nodeport-addresses",
		"192.0.2.10/32,2001:db8:2::10/128,127.0.0.0/8,10.244.0.1/32")
	ours := compare.NewSide(compare.Verdict, read(t, write(t, m.state), "verdict", m.host))
	for version, program := range map[string]string{"1.37": programs[0], "1.36": programs[1]} {
		for _, mode := range []string{"nftables", "iptables"} {
			t.Run(mode+" "+version, func(t *testing.T) {
				side := settled(t, host, plane, program, mode, m.host)
				r, err := compare.Compare(compare.Input{Host: m.host, Pods: podsOf(m.state), State: m.state,
					Sides: []compare.Side{ours, side}})
				labtest.Check(t, err)
				report(t, r)
				t.Logf("kube-proxy: %+v, Verdict: %+v", side.Size, ours.Size)
				if r.Unexplained+r.Unknown > 0 || r.Same < 1000 {
					t.Errorf("%d classes are unexplained, %d unknown", r.Unexplained, r.Unknown)
				}
			})
		}
	}
}

// TestAsKubeProxy: told to behave as kube-proxy, Verdict does with every class of packets what kube-proxy 1.37 does in
// the same mode.
func TestAsKubeProxy(t *testing.T) {
	plane, host, programs := peers.Start(t, "../../..", nodeAddrs, "kube-proxy")
	peers.Create(t, plane.Client)
	file := peers.ReadBack(t, plane.Client)
	const mode = "nftables"
	m := load(t, file, "--hostname-override", "node-1", "--cluster-cidr", "10.244.0.0/16,fd00:10:244::/48",
		"--nodeport-addresses", "192.0.2.10/32,2001:db8:2::10/128,127.0.0.0/8,10.244.0.1/32",
		"--proxy-mode", mode, "--behavior", "kube-proxy")
	ours := compare.NewSide(compare.Verdict, read(t, write(t, m.state), "verdict", m.host))
	r, err := compare.Compare(compare.Input{Host: m.host, Pods: podsOf(m.state), State: m.state,
		Sides: []compare.Side{ours, settled(t, host, plane, programs[0], mode, m.host)}})
	labtest.Check(t, err)
	report(t, r)
	if r.Same != r.Classes || r.Same < 1000 {
		t.Errorf("mode %s: %d of %d classes are the same", mode, r.Same, r.Classes)
	}
}

// settled has a kube-proxy program the node, ends it, and reads what it wrote.
func settled(t *testing.T, h *lab.Host, plane *control.Plane, program, mode string, addrs []netip.Addr) compare.Side {
	t.Helper()
	dir := t.TempDir()
	config := filepath.Join(dir, "config.conf")
	labtest.Check(t, os.WriteFile(config, []byte(fmt.Sprintf(proxyConfig, mode, plane.Kubeconfig())), 0o600))
	proxy := control.NewProcess(h, filepath.Join(dir, "log"), program, "--config="+config)
	labtest.Check(t, proxy.Start())
	defer func() { _ = proxy.Kill() }()
	deadline := time.Now().Add(5 * time.Minute)
	for last := ""; time.Now().Before(deadline); time.Sleep(3 * time.Second) {
		side := sideOf(t, h, mode, addrs)
		digest := fmt.Sprint(side.Digest)
		for _, k := range side.Mentioned.Keys[0] {
			if k.Addr == peers.Last.Addr && digest == last {
				return side
			}
		}
		last = digest
	}
	t.Fatalf("kube-proxy has not programmed the node:\n%s", proxy.Tail())
	return compare.Side{}
}

// sideOf reads what a kube-proxy programmed.
func sideOf(t *testing.T, h *lab.Host, mode string, addrs []netip.Addr) compare.Side {
	t.Helper()
	if mode == "nftables" {
		return compare.NewSide(compare.NFTables, read(t, h, "kube-proxy", addrs))
	}
	var text ipfamily.Per[[]byte]
	for f, program := range []string{"iptables-nft-save", "ip6tables-nft-save"} {
		out, err := h.Run(program)
		labtest.Check(t, err)
		text[f] = []byte(out)
	}
	chains, err := packets.ParseChains(text, &packets.Host{Addrs: addrs})
	labtest.Check(t, err)
	return compare.NewSide(compare.IPTables, chains)
}
