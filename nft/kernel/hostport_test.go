package kernel

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// portmapRules are what the CNI plugin portmap 1.10.0 writes for some host ports of a pod: in nf_tables with its
// backend nftables, and with that of iptables.
func portmapRules(iptables bool, pod netip.Addr, ports ...uint16) string {
	var text strings.Builder
	if !iptables {
		text.WriteString(`table ip cni_hostport {
	chain hostports {}
	chain hostip_hostports {}
	chain hostports_all { jump hostip_hostports; jump hostports; }
	chain prerouting { type nat hook prerouting priority -100; fib daddr type local jump hostports_all; }
	chain output { type nat hook output priority -100; fib daddr type local jump hostports_all; }
	chain masquerading { type nat hook postrouting priority 100; }
}
`)
		for _, p := range ports {
			fmt.Fprintf(&text, "add rule ip cni_hostport hostports tcp dport %d dnat to %s:%d\n", p, pod, targetPort)
		}
		fmt.Fprintf(&text, "add rule ip cni_hostport masquerading ip saddr %[1]s ip daddr %[1]s masquerade\n", pod)
		return text.String()
	}
	text.WriteString("*nat\n:CNI-HOSTPORT-DNAT - [0:0]\n:CNI-HOSTPORT-MASQ - [0:0]\n:CNI-HOSTPORT-SETMARK - [0:0]\n" +
		":CNI-DN-83739f19b878602ed7218 - [0:0]\n" +
		"-A PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT\n" +
		"-A OUTPUT -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT\n" +
		"-I POSTROUTING -m comment --comment \"CNI portfwd requiring masquerade\" -j CNI-HOSTPORT-MASQ\n" +
		"-A CNI-HOSTPORT-MASQ -m mark --mark 0x2000/0x2000 -j MASQUERADE\n" +
		"-A CNI-HOSTPORT-SETMARK -j MARK --set-xmark 0x2000/0x2000\n")
	for _, p := range ports {
		fmt.Fprintf(&text, "-A CNI-HOSTPORT-DNAT -p tcp -m multiport --dports %d -j CNI-DN-83739f19b878602ed7218\n"+
			"-A CNI-DN-83739f19b878602ed7218 -s 10.244.1.0/24 -p tcp -m tcp --dport %[1]d -j CNI-HOSTPORT-SETMARK\n"+
			"-A CNI-DN-83739f19b878602ed7218 -p tcp -m tcp --dport %[1]d -j DNAT --to-destination %s:%d\n", p, pod, targetPort)
	}
	return text.String() + "COMMIT\n"
}

// writePortmap has a host hold the rules of portmap.
func writePortmap(t *testing.T, h *lab.Host, variant string, pod netip.Addr, ports ...uint16) {
	t.Helper()
	text := portmapRules(variant != "nftables", pod, ports...)
	if variant == "nftables" {
		labtest.Run(t, h, text, labtest.Nfts(t)[0].Path, "-f", "-")
		return
	}
	labtest.Run(t, h, text, variant+"-restore", "--noflush")
}

// TestHostPorts: a connection to an address and port that a Service has goes to the Service, whether host ports of the
// same were written before or after our tables. One to another host port goes to that pod.
func TestHostPorts(t *testing.T) {
	const freePort = 8088
	for _, variant := range []string{"nftables", "iptables-nft", "iptables-legacy"} {
		for _, before := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, before us %v", variant, before), func(t *testing.T) {
				c, b := proxied(t, lab.Config{LocalPods: 2, RemotePods: 1})
				s := flowService{number: 1, state: endpointState{"here", []condition{ready}, nil}}
				node, other := c.Node.IP(ipfamily.IPv4), c.Pods[1]
				st := oneState(c, s, func(svc *snapshot.Service) { // one frontend more is at the node's own address
					svc.ExternalIPs = append(svc.ExternalIPs, node)
				})
				write := func() { writePortmap(t, c.Node, variant, other.IP(ipfamily.IPv4), nodePorts+1, servicePort, freePort) }
				if before {
					write()
				}
				apply(t, b, st)
				if !before {
					write()
				}
				for name, client := range map[string]*lab.Host{"outside": c.Outside, "pod": c.Pods[0], "node": c.Node} {
					for port, want := range map[uint16]string{
						nodePorts + 1: c.Pods[0].Name, servicePort: c.Pods[0].Name, freePort: other.Name,
					} {
						r := client.Dial(snapshot.TCP, netip.AddrPortFrom(node, port), lab.Options{})
						if r.Endpoint != want || port == freePort && name == "outside" && r.Source.Addr() != client.IP(ipfamily.IPv4) {
							t.Errorf("from %s to port %d: %v; want %s", name, port, r, want)
						}
					}
				}
			})
		}
	}
}

// TestUpgradePriority: tables whose nat chains have the priority of earlier versions are replaced in one transaction,
// and a connection that is open goes on.
func TestUpgradePriority(t *testing.T) {
	c, b, s, st := one(t, both, asIs)
	n := labtest.NewNft(t).Path
	text := "delete table ip verdict\ndelete table ip6 verdict\n"
	for _, f := range ipfamily.All {
		listed := labtest.Run(t, c.Node, "", n, "list", "table", f.NFT(), nft.TableName)
		for _, hook := range []string{"prerouting", "output"} {
			now := fmt.Sprintf("type nat hook %s priority ", hook)
			at := strings.Index(listed, now)
			if at < 0 {
				t.Fatalf("%s has no chain at %s", f, hook)
			}
			rest := listed[at+len(now):]
			listed = listed[:at+len(now)] + "-100" + rest[strings.Index(rest, ";"):]
		}
		text += listed
	}
	b.Close()
	labtest.Run(t, c.Node, text, n, "-f", "-")
	conn, r := c.Outside.Open(snapshot.TCP, s.frontendOf(c, dataplane.NodePort, ipfamily.IPv4), lab.Options{})
	if r.Outcome != lab.Answered {
		t.Fatal(r)
	}
	defer conn.Close()
	b = open(t, c.Node, Options{})
	before, err := b.reader.Generation()
	labtest.Check(t, err)
	result, err := b.Apply(st, dataplane.Change{})
	labtest.Check(t, err)
	if after, err := b.reader.Generation(); err != nil || after != before+1 || !result.Full {
		t.Errorf("generation %d became %d: %+v", before, after, result)
	}
	if again := conn.Ping(3 * time.Second); again.Outcome != lab.Answered || again.Endpoint != r.Endpoint {
		t.Errorf("the connection to %s: %v", r.Endpoint, again)
	}
	quiet(t, b)
}
