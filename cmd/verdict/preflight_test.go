package main

import (
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/verdict-proxy/verdict/internal/answers/inspect"
	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/proxy/preflight"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/nft/kernel"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// preflightObjects are a Service with one endpoint, remote-1, and a node port.
const preflightObjects = `{apiVersion: v1, kind: Node, metadata: {name: node}, spec: {podCIDR: 10.244.1.0/24},
  status: {addresses: [{type: InternalIP, address: 192.0.2.10}]}}
---
{apiVersion: v1, kind: Service, metadata: {name: web, namespace: shop}, spec: {type: NodePort, clusterIP: 10.96.0.80,
  ports: [{port: 80, nodePort: 30080}]}}
---
{apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, metadata: {name: web-1, namespace: shop,
  labels: {kubernetes.io/service-name: web}}, addressType: IPv4, ports: [{port: 8080, protocol: TCP}],
  endpoints: [{addresses: [10.244.2.10]}]}
`

// hostCase is a state of a host, and what is to be found.
type hostCase struct {
	name string
	// arrange changes the node.
	arrange func(t *testing.T, node *lab.Host)
	// found is the check that finds it; empty if there is nothing to find. Unclear says that it cannot be known.
	found   string
	unclear bool
	// from are those whose packets are stopped: "node", "outside" or both.
	from string
	// by is the device by which those of outside come in, if the routes say another one.
	by string
	// own says that the endpoint is the node itself.
	own bool
}

func withRules(text string) func(t *testing.T, node *lab.Host) {
	return func(t *testing.T, node *lab.Host) {
		labtest.Run(t, node, text, labtest.Nfts(t)[0].Path, "-f", "-")
	}
}

// withManyRules has more rules of another program on a packet's way than are followed.
func withManyRules(t *testing.T, node *lab.Host) {
	withRules("table inet fw {\nchain forward { type filter hook forward priority 10;\n"+
		strings.Repeat("ip saddr 203.0.113.9 drop\n", 10_001)+"}\n}\n")(t, node)
}

func withIPTables(rules ...string) func(t *testing.T, node *lab.Host) {
	return withProgram("iptables-nft", rules)
}

func withLegacy(rules ...string) func(t *testing.T, node *lab.Host) {
	return withProgram("iptables-legacy", rules)
}

func withProgram(iptables string, rules []string) func(t *testing.T, node *lab.Host) {
	return func(t *testing.T, node *lab.Host) {
		for _, r := range rules {
			labtest.Run(t, node, "", iptables, strings.Fields(r)...)
		}
	}
}

// withSecondUplink has the node answer Outside by another device than that by which its packets come in, with a setting
// of the reverse path filter.
func withSecondUplink(filter string) func(t *testing.T, node *lab.Host) {
	return func(t *testing.T, node *lab.Host) {
		labtest.Check(t, node.AddBridge("up1"))
		for _, to := range []string{"128.0.0.0/1", "198.51.100.7/32"} {
			labtest.Check(t, node.AddRoute(lab.Route{To: netip.MustParsePrefix(to), Link: "up1"}))
		}
		labtest.Check(t, node.Sysctl("net/ipv4/conf/all/rp_filter", filter))
	}
}

var hostCases = []hostCase{
	{name: "all is well", arrange: func(*testing.T, *lab.Host) {}},
	{"no default route", func(t *testing.T, node *lab.Host) {
		labtest.Run(t, node, "", "ip", "-4", "route", "del", "default")
	}, preflight.NoRoute, false, "node", "", false},
	{"forwarding is off", func(t *testing.T, node *lab.Host) {
		labtest.Check(t, node.Sysctl("net/ipv4/ip_forward", "0"))
	}, preflight.NoForwarding, false, "outside", "", false},
	{"a firewall drops", withRules(`table inet fw {
		chain forward { type filter hook forward priority 10; policy drop; ct state established,related accept; }
	}`), preflight.ForwardDrop, false, "outside", "", false},
	{"a firewall rejects at its end", withRules(`table ip fw {
		chain rest { ip saddr 10.0.0.0/8 return; reject with icmp admin-prohibited; }
		chain forward { type filter hook forward priority 10; ct state established,related accept; jump rest; }
	}`), preflight.ForwardDrop, false, "outside", "", false},
	{name: "a firewall lets pass what was translated", arrange: withRules(`table inet firewalld {
		chain filter_FORWARD { type filter hook forward priority 10; ct state established,related accept
			ct status dnat accept; reject with icmpx admin-prohibited; }
	}`)},
	{"Docker", withIPTables("-N DOCKER-USER", "-A FORWARD -j DOCKER-USER",
		"-A FORWARD -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT", "-P FORWARD DROP"),
		preflight.ForwardDrop, false, "outside", "", false},
	{name: "Docker with pods accepted", arrange: withIPTables(
		"-A FORWARD -m comment --comment pods -d 10.244.0.0/16 -j ACCEPT",
		"-A FORWARD -s 10.244.0.0/16 -j ACCEPT", "-P FORWARD DROP")},
	{"Docker, in legacy iptables", withLegacy("-N DOCKER-USER", "-A FORWARD -j DOCKER-USER",
		"-A FORWARD -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT", "-P FORWARD DROP"),
		preflight.ForwardDrop, false, "outside", "", false},
	{name: "Docker, in legacy iptables, with pods accepted", arrange: withLegacy("-N DOCKER-USER",
		"-A FORWARD -j DOCKER-USER", "-A DOCKER-USER -m conntrack --ctstate DNAT -j ACCEPT",
		"-A DOCKER-USER -d 10.244.0.0/16 -j ACCEPT", "-A DOCKER-USER -s 10.244.0.0/16 -j ACCEPT", "-P FORWARD DROP")},
	{name: "Docker with what was translated accepted", arrange: withIPTables("-N DOCKER-USER",
		"-A FORWARD -j DOCKER-USER", "-A DOCKER-USER -m conntrack --ctstate DNAT -j ACCEPT", "-P FORWARD DROP")},
	{"legacy iptables reject at their end", withLegacy("-N rest", "-A FORWARD -i lo -j ACCEPT",
		"-A FORWARD -p udp -m udp --dport 8080 -j ACCEPT", "-A FORWARD -p tcp -m tcp --dport 1:79 -j ACCEPT",
		"-A FORWARD -m conntrack --ctstate ESTABLISHED -j ACCEPT", "-A FORWARD ! -s 10.0.0.0/8 -g rest",
		"-A rest -m limit --limit 3/min -j LOG", "-A rest -d 192.0.2.99 -j RETURN", "-A rest -j REJECT"),
		preflight.ForwardDrop, false, "outside", "", false},
	{name: "legacy iptables let pass", arrange: withLegacy("-A FORWARD -m mark ! --mark 0 -j ACCEPT",
		"-A FORWARD -d 10.244.0.0/16 -j MARK --set-xmark 0x40000/0xff0000",
		"-A FORWARD -p tcp -m tcp --dport 80:8080 -m mark --mark 0x40000/0xff0000 -j ACCEPT",
		"-A FORWARD -s 10.244.0.0/16 -j ACCEPT", "-P FORWARD DROP")},
	{name: "a rule of legacy iptables that is not known",
		arrange: withLegacy("-A FORWARD -m length --length 0:9999 -j ACCEPT"), unclear: true, from: "outside"},
	{"a strict reverse path filter", withSecondUplink("1"), preflight.ReversePath, false, "outside", "eth0", false},
	{name: "a rule that is not known", arrange: withRules(`table inet fw {
		chain forward { type filter hook forward priority 10; limit rate 1000/second accept; }
	}`), unclear: true, from: "outside"},
	{"more rules than are followed", withManyRules, preflight.ForwardUnknown, true, "outside", "", false},
	{"rules of a cache that is gone", withIPTables("-t raw -A PREROUTING -d 10.96.0.80 -p tcp --dport 80 -j NOTRACK",
		"-t raw -A OUTPUT -d 10.96.0.80 -p tcp --dport 80 -j NOTRACK"), "", false, "node outside", "", false},
	{"rules of a cache that is gone, in legacy iptables", withLegacy(
		"-t raw -A PREROUTING -d 10.96.0.80 -p tcp --dport 80 -j NOTRACK",
		"-t raw -A OUTPUT -d 10.96.0.80 -p tcp --dport 80 -j NOTRACK"), "", false, "node outside", "", false},
	{"another Service proxy", withLegacy("-N KUBE-EXTERNAL-SERVICES", "-A FORWARD -j KUBE-EXTERNAL-SERVICES"),
		preflight.SecondProxy, false, "", "", false},
	{"a Service proxy of eBPF", func(t *testing.T, node *lab.Host) { labtest.Check(t, node.AddBridge("bpfin.cali")) },
		preflight.SecondProxy, false, "", "", false},
	{"another chain ahead", withRules(`table ip ahead {
		chain pre { type nat hook prerouting priority -110; ip daddr 10.96.0.80 dnat to 192.0.2.99; }
		chain out { type nat hook output priority -110; ip daddr 10.96.0.80 dnat to 192.0.2.99; }
	}`), preflight.NATAhead, false, "node outside", "", false},
}

// ownCases are those of an endpoint on the node's own network.
var ownCases = []hostCase{
	{name: "all is well on the node's own network", arrange: func(*testing.T, *lab.Host) {}, own: true},
	{"a firewall takes little", withRules(`table inet fw {
		chain in { type filter hook input priority 0; policy drop; iif lo accept; ct state established,related accept; }
	}`), preflight.InputDrop, false, "outside", "", true},
	{name: "a firewall takes what comes to the port", arrange: withRules(`table inet fw {
		chain in { type filter hook input priority 0; policy drop; iif lo accept; ct state established,related accept
			tcp dport 8080 accept; }
	}`), own: true},
	{"ufw", withIPTables("-N ufw-user-input", "-A INPUT -i lo -j ACCEPT",
		"-A INPUT -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT", "-A INPUT -j ufw-user-input", "-P INPUT DROP"),
		preflight.InputDrop, false, "outside", "", true},
	{name: "ufw with the port allowed", arrange: withIPTables("-N ufw-user-input", "-A INPUT -i lo -j ACCEPT",
		"-A INPUT -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT", "-A INPUT -j ufw-user-input",
		"-A ufw-user-input -p tcp --dport 8080 -j ACCEPT", "-P INPUT DROP"), own: true},
	{"Tailscale, and a sender in its range", withLegacy("-N ts-input", "-A INPUT -j ts-input",
		"-A ts-input -s 198.51.100.0/24 ! -i tailscale0 -j DROP"), preflight.InputDrop, false, "outside", "", true},
}

// newPreflight writes the Service to the node of a cluster; own says that the endpoint is the node itself.
func newPreflight(t *testing.T, own bool) (c *lab.Cluster, flags []string) {
	t.Helper()
	c = labtest.NewCluster(t, lab.Config{LocalPods: 1, RemotePods: 1})
	objects, server := preflightObjects, c.RemotePods[0]
	if own {
		objects, server = strings.ReplaceAll(objects, server.IP4.String(), c.Node.IP4.String()), c.Node
	}
	_, err := server.Serve(snapshot.TCP, 8080)
	labtest.Check(t, err)
	file := filepath.Join(t.TempDir(), "all.yaml")
	labtest.Check(t, os.WriteFile(file, []byte(objects), 0o644))
	flags = []string{"--from", file, "--hostname-override=node", "--cluster-cidr=10.244.0.0/16"}
	labtest.Check(t, c.Node.Do(func() error {
		var o inspect.ObjectFlags
		f := pflag.NewFlagSet("", pflag.ContinueOnError)
		o.AddFlags(f)
		labtest.Check(t, f.Parse(flags))
		objects, err := o.Load(t.Context(), nil, true)
		if err != nil {
			return err
		}
		backend, err := kernel.Open(kernel.Options{})
		if err != nil {
			return err
		}
		t.Cleanup(func() { backend.Close() })
		st, _ := dataplane.Compute(objects.Config, objects.Snap)
		_, err = backend.Apply(st, dataplane.Change{Services: allNames(st), Globals: true})
		return err
	}))
	return c, flags
}

// onHost runs a command on a host.
func onHost(t *testing.T, h *lab.Host, args ...string) string {
	t.Helper()
	var out string
	labtest.Check(t, h.Do(func() (err error) {
		out, err = command(args...)
		return err
	}))
	return out
}

// TestPreflight: explain does not say that a packet is sent where something else on the host stops it, and says so
// where nothing does; real packets agree. Verify names the same, with what to do.
func TestPreflight(t *testing.T) {
	to := netip.MustParseAddrPort("10.96.0.80:80")
	for _, test := range slices.Concat(hostCases, ownCases) {
		t.Run(test.name, func(t *testing.T) {
			c, flags := newPreflight(t, test.own)
			test.arrange(t, c.Node)
			for from, host := range map[string]*lab.Host{"node": c.Node, "outside": c.Outside} {
				stopped := !test.unclear && strings.Contains(test.from, from)
				if r := host.Dial(snapshot.TCP, to, lab.Options{}); (r.Outcome == lab.Answered) == stopped {
					t.Errorf("from %s: %v", from, r)
				}
				source := map[string]string{"node": "node", "outside": c.Outside.IP4.String()}[from]
				live := []string{"--live"}
				if from == "outside" && test.by != "" {
					live = append(live, "--interface", test.by)
				}
				for _, args := range [][]string{live, append(slices.Clone(live), flags...)} {
					out := onHost(t, c.Node, append([]string{"explain", source, to.String()}, args...)...)
					if strings.Contains(out, "Outcome    stopped: ") != stopped || strings.Contains(out, "Advice ") != stopped ||
						strings.Contains(out, "Outcome    sent to") == stopped {
						t.Errorf("from %s, %q:\n%s", from, args, out)
					}
					unclear := test.unclear && strings.Contains(test.from, from)
					if strings.Contains(out, "Unclear") != unclear {
						t.Errorf("from %s, unclear %v:\n%s", from, unclear, out)
					}
				}
			}
			out := onHost(t, c.Node, append([]string{"verify"}, flags...)...)
			for _, check := range []string{preflight.NoRoute, preflight.NoForwarding, preflight.ForwardDrop,
				preflight.ForwardUnknown, preflight.NATAhead, preflight.NodeAddress, preflight.PortInUse, preflight.PlainBridge,
				preflight.ReversePath, preflight.SecondProxy} {
				if n := strings.Count(out, "\n"+check+" "); (n > 0) != (check == test.found) {
					t.Errorf("verify names %s %d times:\n%s", check, n, out)
				}
			}
			if !strings.Contains(out, "right: ") {
				t.Errorf("verify:\n%s", out)
			}
		})
	}
}

// TestPreflightStart: a proxy names at its start what stops packets on its host, each once, with what to do, and status
// does so while it is there. What it cannot tell of other programs' rules, it names as well.
func TestPreflightStart(t *testing.T) {
	for _, test := range []struct {
		name string
		// arrange changes the node, which is to forward packets or not.
		arrange  func(t *testing.T, node *lab.Host)
		forwards string
		// checks are what the log names, and status what that says.
		checks, status []string
	}{
		{"conflicts", func(t *testing.T, node *lab.Host) {
			_, err := node.Serve(snapshot.TCP, 30080)
			labtest.Check(t, err)
		}, "0", []string{preflight.NoForwarding, preflight.NodeAddress, preflight.PortInUse}, []string{
			"no-forwarding this host forwards no IPv4 packets", "sysctl -w net.ipv4.ip_forward=1",
			"node-address  this host has none of its Node's addresses: 192.0.2.77",
			"port-in-use   a process of this host listens at 30080/tcp, a node port of shop/web"}},
		{"more rules than are followed", withManyRules, "1", []string{preflight.ForwardUnknown, preflight.NodeAddress},
			[]string{"forward-unknown whether another program drops what this host forwards to the pods of 10.244.1.0/24 is " +
				"not known", "nft list ruleset"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := labtest.NewCluster(t, lab.Config{LocalPods: 1, RemotePods: 1})
			labtest.Check(t, c.Node.Sysctl("net/ipv4/ip_forward", test.forwards))
			test.arrange(t, c.Node)
			said := runPreflight(t, c.Node)
			for _, check := range test.checks {
				want := "check=" + check
				testkit.Eventually(t, patience, want, func() bool { return strings.Contains(said(), want) }, said)
				if n := strings.Count(said(), want); n != 1 {
					t.Errorf("%s is said %d times:\n%s", want, n, said())
				}
			}
			status := c.Node.Command("/proc/self/exe", "status")
			status.Env = append(os.Environ(), beVerdict+"=1")
			out, err := status.CombinedOutput()
			labtest.Check(t, err)
			for _, want := range test.status {
				if strings.Count(string(out), want) != 1 {
					t.Errorf("status does not say %q once:\n%s", want, out)
				}
			}
		})
	}
}

// runPreflight runs a proxy on a node until the test ends, and returns what reads its log.
func runPreflight(t *testing.T, node *lab.Host) (said func() string) {
	t.Helper()
	file, log := filepath.Join(t.TempDir(), "all.yaml"), newLog(t)
	labtest.Check(t, os.WriteFile(file, []byte(strings.ReplaceAll(preflightObjects, "192.0.2.10", "192.0.2.77")), 0o644))
	cmd := node.Command("/proc/self/exe", "run", "--from", file, "--hostname-override=node", "--keeper=none",
		"--cluster-cidr=10.244.0.0/16", "--healthz-bind-address=127.0.0.1:10256", "--metrics-bind-address=")
	cmd.Env = append(os.Environ(), beVerdict+"=1")
	cmd.Stdout, cmd.Stderr = log, log
	labtest.Check(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // which says that it was killed
	})
	return func() string {
		text, err := os.ReadFile(log.Name())
		labtest.Check(t, err)
		return string(text)
	}
}
