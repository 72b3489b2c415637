package packets_test

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/packets"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// loaded has nft load rules on a host, and reads what the kernel lists of all its tables.
func loaded(t *testing.T, h *lab.Host, text string, known *packets.Host) (rules *packets.Rules) {
	t.Helper()
	labtest.Run(t, h, "flush ruleset\n"+text, labtest.Nfts(t)[0].Path, "-f", "-")
	labtest.Check(t, h.Do(func() (err error) {
		rules, err = packets.ReadAll(known)
		return err
	}))
	return rules
}

// small are rulesets, each with what happens to packets: an interface, or - for a packet of this host, whose addresses
// are 10.99.0.2 and fd00::2; source, protocol and destination. What begins with "error: " is part of an error.
var small = []struct {
	name, rules string
	asks        map[string]string
}{
	{"accept ends its own base chain only, across tables", `
		table ip a { chain c { type filter hook forward priority 0; accept; }; }
		table inet b { chain c { type filter hook forward priority 1; ip daddr 10.0.0.1 tcp dport 80 drop;
			meta nfproto ipv6 drop; }; }`, map[string]string{
		"eth0 192.0.2.1 tcp 10.0.0.1:80":        "1 drop",
		"eth0 192.0.2.1 udp 10.0.0.1:80":        "1 untouched",
		"eth0 2001:db8::1 udp [2001:db8::2]:80": "1 drop",
		"- 10.99.0.2 tcp 10.0.0.1:80":           "1 untouched",
		"eth0 2001:db8::1 tcp [fd00::2]:80":     "1 untouched",
	}},
	{"policy, jump, goto and return", `
		table ip x {
			chain d { tcp dport 1 return; tcp dport 2 accept; }
			chain e { goto d; drop; }
			chain base { type filter hook input priority 0; policy drop; jump d; tcp dport 3 goto e; tcp dport 1 accept;
				jump e; tcp dport 4 accept; tcp dport 5 reject with tcp reset; udp dport 5 reject with icmp host-unreachable; }
		}`, map[string]string{
		"eth0 192.0.2.1 tcp 10.99.0.2:1": "1 untouched",
		"eth0 192.0.2.1 tcp 10.99.0.2:2": "1 untouched",
		"eth0 192.0.2.1 tcp 10.99.0.2:3": "1 drop",
		"eth0 192.0.2.1 tcp 10.99.0.2:4": "1 untouched",
		"eth0 192.0.2.1 tcp 10.99.0.2:5": "1 reject with tcp reset",
		"eth0 192.0.2.1 udp 10.99.0.2:5": "1 reject with icmp host-unreachable",
		"- 10.99.0.2 tcp 10.99.0.2:6":    "1 drop",
	}},
	{"nat chains run at NAT's priority, and once", `
		table ip x {
			chain before { type filter hook prerouting priority -110; ip daddr 10.1.0.1 meta mark set 1; }
			chain n1 { type nat hook prerouting priority -190; ip daddr 10.1.0.1 tcp dport 1-99 dnat to 10.2.0.1:81; }
			chain n2 { type nat hook prerouting priority 200; tcp dport 80-81 dnat to 10.3.0.1; }
			chain after { type filter hook prerouting priority -50; ip daddr 10.2.0.1 meta mark 1 counter accept;
				ip daddr 10.3.0.1 meta mark 0 accept; drop; }
		}`, map[string]string{
		"eth0 192.0.2.1 tcp 10.1.0.1:80": "1 10.2.0.1:81",
		"eth0 192.0.2.1 tcp 10.4.0.1:80": "1 10.3.0.1:80",
		"eth0 192.0.2.1 tcp 10.4.0.1:79": "1 drop",
		"- 10.99.0.2 tcp 10.1.0.1:80":    "1 untouched",
	}},
	{"this host's packets to itself come back by lo, without NAT", `
		table ip x {
			chain o { type nat hook output priority -100; tcp dport 80 dnat to 10.99.0.2:8080; }
			chain p { type nat hook prerouting priority -100; tcp dport 8080 dnat to 10.99.0.2:9090; }
			chain i { type filter hook input priority 0; iifname lo tcp dport 8080 reject; iif lo tcp dport 8081 drop;
				iif != lo tcp dport 7 drop; @ll,48,48 0x0 udp dport 7 drop; }
			chain l { type filter hook postrouting priority 0; oif lo udp dport 8 drop; oifname != lo drop; }
		}`, map[string]string{
		"- 10.99.0.2 tcp 10.0.0.1:80":       "1 reject with icmp port-unreachable",
		"- 10.99.0.2 tcp 10.99.0.2:8081":    "1 drop",
		"- 10.99.0.2 tcp 10.99.0.2:7":       "1 untouched",
		"- 10.99.0.2 udp 10.99.0.2:7":       "1 drop",
		"- 10.99.0.2 udp 10.99.0.2:8":       "1 drop",
		"eth0 192.0.2.1 tcp 10.99.0.2:8080": "1 10.99.0.2:9090",
		"eth0 192.0.2.1 tcp 10.99.0.2:7":    "1 drop",
		"eth0 192.0.2.1 udp 10.99.0.2:7":    "1 untouched",
		"eth0 192.0.2.1 udp 10.0.0.1:7":     "error: leaves by is not known",
	}},
	{"the connection", `
		table ip x {
			chain raw { type filter hook prerouting priority raw; ct state invalid udp dport 1 drop; }
			chain nat { type nat hook prerouting priority dstnat; udp dport 1-2 dnat to 10.3.0.1;
				udp dport 5 dnat to 10.0.0.1:5; }
			chain f { type filter hook forward priority 0; ct state established,related drop;
				ct state { new, invalid } udp dport 3 drop; meta l4proto udp ct original proto-dst 4 drop; ct status dnat drop; }
		}`, map[string]string{
		"eth0 192.0.2.1 udp 10.0.0.1:1": "1 drop",
		"eth0 192.0.2.1 udp 10.0.0.1:3": "1 drop",
		"eth0 192.0.2.1 udp 10.0.0.1:4": "1 drop",
		"eth0 192.0.2.1 udp 10.0.0.1:5": "1 10.0.0.1:5", // to what it was, which is no translation
		"eth0 192.0.2.1 udp 10.0.0.2:5": "1 drop",
		"eth0 192.0.2.1 udp 10.0.0.2:6": "1 untouched",
	}},
	{"the priority: IPv4 forwarding sets it, IPv6 leaves it", `
		table inet x {
			chain p { type filter hook prerouting priority 0; meta priority set 0x10001; }
			chain f { type filter hook postrouting priority 0; meta priority 0x10001 drop; }
			chain i { type filter hook input priority 0; meta priority 0x10001 tcp dport 9 drop; }
		}`, map[string]string{
		"eth0 192.0.2.1 udp 10.0.0.1:1":        "1 untouched",
		"eth0 192.0.2.1 tcp 10.99.0.2:9":       "1 drop",
		"eth0 2001:db8::1 udp [2001:db8::2]:1": "1 drop",
	}},
	{"sets that rules write to", `
		table ip x {
			set s { type ipv4_addr; flags dynamic,timeout; timeout 1m; size 100; }
			chain f { type filter hook forward priority 0; tcp dport 1-2 update @s { ip saddr };
				tcp dport 2 delete @s { ip saddr }; ip saddr @s drop; tcp dport 3 delete @s { ip saddr } reject; }
		}`, map[string]string{
		"eth0 192.0.2.1 tcp 10.0.0.1:1": "1 drop",
		"eth0 192.0.2.1 tcp 10.0.0.1:2": "1 untouched",
		"eth0 192.0.2.1 tcp 10.0.0.1:3": "1 reject with icmp port-unreachable",
		"eth0 192.0.2.1 udp 10.0.0.1:3": "1 untouched",
	}},
	{"sets", `
		table ip x {
			set r { type ipv4_addr . inet_service; flags interval; elements = { 10.0.0.0/24 . 80-90, 10.0.1.1 . 443 }; }
			set n { type ifname; elements = { "eth0", "veth7" }; }
			map v { type ipv4_addr : verdict; elements = { 192.0.2.9 : drop, * : jump u }; }
			map to { type inet_service : ipv4_addr . inet_service; elements = { 7 : 10.5.0.1 . 70 }; }
			chain u { tcp dport 2 reject; }
			chain f { type filter hook forward priority 0; ip daddr . tcp dport @r drop; iifname != @n tcp dport 1 drop;
				iifname "veth*" tcp dport 3 drop; ip saddr vmap @v; tcp dport < 2 accept;
				tcp flags & (syn | ack) == syn tcp dport 5 reject with tcp reset; tcp dport { 6, 8-9 } drop; }
			chain p { type nat hook prerouting priority dstnat; meta l4proto tcp dnat ip to tcp dport map @to; }
		}`, map[string]string{
		"eth0 192.0.2.1 tcp 10.0.0.77:85": "1 drop",
		"eth0 192.0.2.1 tcp 10.0.0.77:91": "1 untouched",
		"eth0 192.0.2.1 tcp 10.0.1.1:443": "1 drop",
		"eth0 192.0.2.1 tcp 10.9.0.1:1":   "1 untouched",
		"eth1 192.0.2.1 tcp 10.9.0.1:1":   "1 drop",
		"eth0 192.0.2.1 tcp 10.9.0.1:2":   "1 reject with icmp port-unreachable",
		"veth7 192.0.2.1 tcp 10.9.0.1:3":  "1 drop",
		"eth0 192.0.2.9 tcp 10.9.0.1:4":   "1 drop",
		"eth0 192.0.2.1 tcp 10.9.0.1:5":   "1 reject with tcp reset",
		"eth0 192.0.2.1 tcp 10.9.0.1:9":   "1 drop",
		"eth0 192.0.2.1 tcp 10.9.0.1:7":   "1 10.5.0.1:70",
		"eth0 192.0.2.1 udp 10.0.0.77:85": "1 untouched",
		"- 10.99.0.2 tcp 10.0.0.77:85":    "1 untouched",
	}},
	{"lots", `
		table ip x {
			chain a { udp dport 1 numgen random mod 4 vmap { 0 : drop, 1 : goto b, 2 : return }; reject; }
			chain b { jhash ip saddr mod 2 vmap { 0 : accept, 1 : drop }; }
			chain f { type filter hook forward priority 0; jump a; numgen inc mod 10 < 3 drop; }
		}`, map[string]string{
		"eth0 192.0.2.1 udp 10.0.0.1:1": "9/20 drop, 1/4 reject with icmp port-unreachable, 3/10 untouched",
	}},
	{"what is not known is an error once a packet comes to it", `
		table ip x {
			chain f { type filter hook forward priority 0; udp dport 1 limit rate 3/second accept;
				udp dport 2 meta skuid 0 accept; udp dport 3 @th,64,8 7 accept; udp dport 4 ct mark 1 accept;
				udp dport 6 ip dscp cs1 drop; udp dport 7 meta length 7 drop; }
		}`, map[string]string{
		"eth0 192.0.2.1 udp 10.0.0.1:1": "error: ip x f, rule 2: what limit does",
		"eth0 192.0.2.1 udp 10.0.0.1:2": "error: meta key",
		"eth0 192.0.2.1 udp 10.0.0.1:3": "error: payload",
		"eth0 192.0.2.1 udp 10.0.0.1:4": "error: ct key",
		"eth0 192.0.2.1 udp 10.0.0.1:6": "error: payload",
		"eth0 192.0.2.1 udp 10.0.0.1:7": "error: meta key",
		"eth0 192.0.2.1 udp 10.0.0.1:8": "1 untouched",
		"- 10.99.0.2 udp 10.0.0.1:1":    "1 untouched",
	}},
}

// TestSmallRulesets asks about small rulesets, each about one thing.
func TestSmallRulesets(t *testing.T) {
	h := labtest.NewHost(t, labtest.NewNet(t), "node")
	known := &packets.Host{Addrs: []netip.Addr{netip.MustParseAddr("10.99.0.2"), netip.MustParseAddr("fd00::2")}}
	for _, s := range small {
		t.Run(s.name, func(t *testing.T) {
			rules := loaded(t, h, s.rules, known)
			for ask, want := range s.asks {
				w := strings.Fields(ask)
				protocol, _ := packets.ParseProtocol(w[2])
				outcomes, err := rules.Walk(packets.Packet{Interface: strings.TrimPrefix(w[0], "-"), Protocol: protocol,
					Source: netip.AddrPortFrom(addr(w[1]), 40000), Destination: netip.MustParseAddrPort(w[3])}, nil, nil)
				var said []string
				for _, o := range outcomes {
					said = append(said, o.Chance.String()+" "+o.Ending.String())
				}
				got := strings.Join(said, ", ")
				part, fails := strings.CutPrefix(want, "error: ")
				if fails != (err != nil) || !fails && got != want || fails && !strings.Contains(err.Error(), part) {
					t.Errorf("%s: %s (%v), want %s", ask, got, err, want)
				}
			}
		})
	}
}

// rounds is how many rulesets are made up for packets.
var rounds = flag.Int("rounds", 10, "how many rulesets to make up and send packets through")

// ports are those that servers listen on, and that rules look for: answers have other ones, and meet no rule.
var ports = []uint16{1001, 1002, 1003}

// anyRules makes up a ruleset: chains of all hooks at any priorities, in two tables, with rules for the ports.
func anyRules(random *rand.Rand, c *lab.Cluster) string {
	var b strings.Builder
	used := map[string]bool{}
	for _, table := range []string{"ip one", "inet two"} {
		fmt.Fprintf(&b, "table %s {\n", table)
		for _, name := range []string{"x", "y"} {
			fmt.Fprintf(&b, "\tchain %s {\n%s\t}\n", name, anyStatements(random, c, "", random.IntN(4)))
		}
		for i := range 4 {
			kind, place := "filter", []string{"prerouting", "input", "forward", "output", "postrouting"}[random.IntN(5)]
			priority := -400 + random.IntN(800)
			if hook := place; random.IntN(2) == 0 && hook != "forward" {
				kind, place, priority = "nat", "nat "+hook, -190+random.IntN(400)
			}
			hook := place[strings.LastIndexByte(place, ' ')+1:]
			if at := fmt.Sprint(place, priority); !used[at] && priority != -100 && priority != 100 && priority != -200 {
				used[at] = true
				fmt.Fprintf(&b, "\tchain c%d {\n\t\ttype %s hook %s priority %d;\n%s\t}\n", i, kind, hook, priority,
					anyStatements(random, c, place, 1+random.IntN(5)))
			}
		}
		b.WriteString("}\n")
	}
	return b.String()
}

// anyStatements makes up rules for a base chain, or for a chain that is jumped to from anywhere. None asks for a source
// where masquerade may have changed it: to which of the host's addresses, the walk does not know.
func anyStatements(random *rand.Rand, c *lab.Cluster, place string, n int) string {
	one := func(of []string) string { return of[random.IntN(len(of))] }
	matches := []string{"", "", " ct state new", " ct status dnat", " ip daddr 192.0.2.0/24", " meta mark 1",
		" iifname \"veth*\"", " iif 0", " ct state invalid", " fib daddr type local", " ct original proto-dst 1001",
		" iifname lo", " iif 0 @ll,48,48 != 0x0", " @ll,48,48 != 0x0", " iifname cni0"}
	verdicts := []string{"drop", "accept", "return", "meta mark set 1", "meta mark set meta mark ^ 1", "counter",
		"continue", "meta mark vmap { 0 : continue, 1 : accept }"}
	to := []string{fmt.Sprintf("dnat ip to %s", c.Node.IP(ipfamily.IPv4))}
	for _, pod := range c.Pods {
		to = append(to, fmt.Sprintf("dnat ip to %s:%d", pod.IP(ipfamily.IPv4), ports[random.IntN(len(ports))]))
	}
	switch place {
	case "nat prerouting", "nat output":
		verdicts = append(verdicts, one(to), one(to), one(to), "jump x", "goto y")
	case "nat postrouting":
		verdicts = append(verdicts, "masquerade", "masquerade", "jump x")
	case "prerouting":
		verdicts = append(verdicts, "jump x", "goto y", "jump y")
	case "input", "forward", "output":
		verdicts = append(verdicts, "reject", "jump x", "goto y", "jump y")
	}
	if place == "forward" || place == "output" {
		matches = append(matches, " ip saddr 10.244.0.0/16", " ip saddr 10.244.0.0/16")
	}
	var b strings.Builder
	for range n {
		fmt.Fprintf(&b, "\t\tudp dport %d%s %s\n", ports[random.IntN(len(ports))], one(matches), one(verdicts))
	}
	return b.String()
}

// TestAgreesWithMadeUpRules sends packets through rulesets that are made up, and holds what happens to each against the
// walk.
func TestAgreesWithMadeUpRules(t *testing.T) {
	t.Run("routed", func(t *testing.T) { madeUp(t, lab.Config{LocalPods: 2}, "veth1", nil) })
	t.Run("plain bridge", func(t *testing.T) {
		madeUp(t, lab.Config{LocalPods: 2, PodBridge: "cni0", PlainBridge: true}, "cni0", nil)
	})
	t.Run("bridge", func(t *testing.T) {
		if !lab.BridgesCallNetfilter() {
			t.Skip("this kernel has no br_netfilter, or has not loaded it")
		}
		madeUp(t, lab.Config{LocalPods: 2, PodBridge: "cni0"}, "cni0", func(iface string, to netip.Addr) bool {
			return iface == "cni0" && lab.NodePodRange[0].Contains(to)
		})
	})
}

func madeUp(t *testing.T, conf lab.Config, podLink string, bridged func(string, netip.Addr) bool) {
	c := labtest.NewCluster(t, conf)
	hosts := []*lab.Host{c.Node, c.Pods[0], c.Pods[1]}
	for _, h := range hosts {
		_, err := h.Serve(snapshot.UDP, ports...)
		labtest.Check(t, err)
	}
	known := &packets.Host{Addrs: []netip.Addr{c.Node.IP(ipfamily.IPv4), addr("10.244.1.1")}, Bridged: bridged}
	seen := map[packets.Verdict]int{}
	for seed := range *rounds {
		text := anyRules(rand.New(rand.NewPCG(uint64(seed), 1)), c)
		rules := loaded(t, c.Node, text, known)
		next := uint16(20000 + seed*40)
		for _, from := range []struct {
			*lab.Host
			link string
		}{{c.Outside, "eth0"}, {c.Pods[0], podLink}, {c.Node, ""}} {
			for i := range len(hosts) * len(ports) {
				to := netip.AddrPortFrom(hosts[i%len(hosts)].IP(ipfamily.IPv4), ports[i/len(hosts)])
				if from.link == podLink && to.Addr() == from.IP(ipfamily.IPv4) {
					continue // what a pod sends to itself is not seen by the node
				}
				next++
				p := packets.Packet{Source: netip.AddrPortFrom(from.IP(ipfamily.IPv4), next), Destination: to,
					Protocol: packets.UDP, Interface: from.link}
				outcomes, err := rules.Walk(p, nil, nil)
				if err != nil || len(outcomes) != 1 {
					t.Fatalf("seed %d: %v, %v\n%s", seed, outcomes, err, text)
				}
				seen[outcomes[0].Verdict]++
				if got := dialEnding(from.Host, p, outcomes[0]); !fits(p, outcomes[0], got, known.Addrs) {
					t.Errorf("seed %d: %s to %s: the walk says %s, and seen is %s\n%s", seed, p.Source, to, outcomes[0].Ending,
						got, text)
				}
			}
		}
	}
	t.Logf("%v", seen)
}

// dialEnding sends a packet, and waits longer for an answer that has to come.
func dialEnding(from *lab.Host, p packets.Packet, o packets.Outcome) lab.Result {
	timeout := 5 * time.Second
	if o.Verdict == packets.Dropped || toItself(p, o) {
		timeout = 100 * time.Millisecond
	}
	return from.Dial(snapshot.UDP, p.Destination, lab.Options{From: p.Source, Timeout: timeout})
}

// fits reports whether what was seen is an outcome; all destinations answer.
func fits(p packets.Packet, o packets.Outcome, got lab.Result, host []netip.Addr) bool {
	to := p.Destination
	switch o.Verdict {
	case packets.Dropped: // the node's own packets fail at once
		return got.Outcome == lab.TimedOut || got.Outcome == lab.Failed
	case packets.Rejected:
		return got.Outcome == lab.Refused
	case packets.Sent:
		to = o.To
	}
	if toItself(p, o) && p.Interface != "" {
		return got.Outcome == lab.TimedOut
	}
	seenHost := slices.Contains(host, got.Source.Addr())
	return got.Outcome == lab.Answered && got.Destination == to && (seenHost && o.Masqueraded ||
		got.Source.Addr() == p.Source.Addr() && (!o.Masqueraded || seenHost))
}
