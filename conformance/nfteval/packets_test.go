package nfteval_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/conformance/nfteval"
	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// ports are those that servers listen on, and that rules look for: what comes back has other ones, and meets no rule.
var ports = []uint16{1001, 1002, 1003}

// anyRules makes up a ruleset: chains of all hooks at any priorities, in two tables, with rules for the ports.
func anyRules(random *rand.Rand, c *lab.Cluster) string {
	var b strings.Builder
	used := map[string]bool{}
	for _, table := range []string{"ip one", "inet two"} {
		fmt.Fprintf(&b, "table %s {\n", table)
		for _, name := range []string{"x", "y"} {
			fmt.Fprintf(&b, "\tchain %s {\n", name)
			anyStatements(random, &b, c, "", random.IntN(4))
			b.WriteString("\t}\n")
		}
		for i := range 4 {
			kind := []string{"filter", "filter", "nat"}[random.IntN(3)]
			hook := []string{"prerouting", "input", "forward", "output", "postrouting"}[random.IntN(5)]
			if kind == "nat" && hook == "forward" {
				continue
			}
			priority := -400 + random.IntN(800)
			if kind == "nat" {
				priority = -190 + random.IntN(400)
			}
			place := fmt.Sprint(kind == "nat", hook, priority)
			if used[place] || priority == -100 || priority == 100 || priority == -200 {
				continue
			}
			used[place] = true
			fmt.Fprintf(&b, "\tchain c%d {\n\t\ttype %s hook %s priority %d;\n", i, kind, hook, priority)
			place = hook
			if kind == "nat" {
				place = "nat " + hook
			}
			anyStatements(random, &b, c, place, 1+random.IntN(5))
			b.WriteString("\t}\n")
		}
		b.WriteString("}\n")
	}
	return b.String()
}

// anyStatements makes up rules for a base chain, or for a chain that is jumped to from anywhere.
func anyStatements(random *rand.Rand, b *strings.Builder, c *lab.Cluster, place string, n int) {
	pod := func() netip.Addr { return c.Pods[random.IntN(len(c.Pods))].IP(ipfamily.IPv4) }
	for range n {
		match := fmt.Sprintf("udp dport %d", ports[random.IntN(len(ports))])
		match += []string{
			"", "", " ct state new", " ct status dnat", " ip saddr 10.244.0.0/16", " ip daddr 192.0.2.0/24", " meta mark 1",
			" ct mark 1",
			" iifname \"veth*\"", " iif 0", " ct state invalid", " fib daddr type local", " ct original proto-dst 1001",
			" iifname lo",
			" iif 0 @ll,48,48 != 0x0", " @ll,48,48 != 0x0", " iifname cni0",
		}[random.IntN(17)]
		verdicts := []string{
			"drop", "accept", "return", "meta mark set 1", "ct mark set 1", "meta mark set meta mark ^ 1", "counter", "continue",
			"meta mark vmap { 0 : continue, 1 : accept }",
		}
		switch place {
		case "nat prerouting", "nat output":
			to := fmt.Sprintf("dnat ip to %s:%d", pod(), ports[random.IntN(len(ports))])
			verdicts = append(verdicts, to, to, fmt.Sprintf("dnat ip to %s", c.Node.IP(ipfamily.IPv4)), "jump x", "goto y")
		case "nat postrouting":
			verdicts = append(verdicts, "masquerade", "masquerade", "snat ip to 192.0.2.10", "jump x")
		case "prerouting":
			verdicts = append(verdicts, "notrack", "jump x", "goto y", "jump y")
		case "input", "forward", "output":
			verdicts = append(verdicts, "reject", "jump x", "goto y", "jump y")
		}
		fmt.Fprintf(b, "\t\t%s %s\n", match, verdicts[random.IntN(len(verdicts))])
	}
}

// sending is a packet of the lab, and the evaluator's question about it.
type sending struct {
	from *lab.Host
	iif  string
	to   netip.AddrPort
}

func sendings(c *lab.Cluster, podLink string) (list []sending) {
	from := []sending{{from: c.Outside, iif: "eth0"}, {from: c.Pods[0], iif: podLink}, {from: c.Node}}
	for _, s := range from {
		for _, to := range []*lab.Host{c.Node, c.Pods[0], c.Pods[1]} {
			for _, port := range ports {
				s.to = netip.AddrPortFrom(to.IP(ipfamily.IPv4), port)
				if s.from != to || s.iif == "" { // what a pod sends to itself is not seen by the node
					list = append(list, s)
				}
			}
		}
	}
	return list
}

// TestAgreesWithPackets loads rulesets that are made up, asks the evaluator, and sends the packets.
func TestAgreesWithPackets(t *testing.T) {
	t.Run("routed", func(t *testing.T) { agreesWithPackets(t, lab.Config{LocalPods: 2}, "veth1", nil) })
	t.Run("plain bridge", func(t *testing.T) {
		agreesWithPackets(t, lab.Config{LocalPods: 2, PodBridge: "cni0", PlainBridge: true}, "cni0", nil)
	})
	t.Run("bridge", func(t *testing.T) {
		if !lab.BridgesCallNetfilter() {
			t.Skip("this kernel has no br_netfilter, or has not loaded it")
		}
		agreesWithPackets(t, lab.Config{LocalPods: 2, PodBridge: "cni0"}, "cni0", lab.NodePodRange[:1])
	})
}

func agreesWithPackets(t *testing.T, conf lab.Config, podLink string, bridged []netip.Prefix) {
	c := labtest.NewCluster(t, conf)
	for _, h := range []*lab.Host{c.Node, c.Pods[0], c.Pods[1]} {
		_, err := h.Serve(snapshot.UDP, ports...)
		labtest.Check(t, err)
	}
	local := []netip.Addr{c.Node.IP(ipfamily.IPv4), netip.MustParseAddr("10.244.1.1")}
	nft := labtest.Nfts(t)[0]
	seen := map[nfteval.Verdict]int{}
	for seed := range *rounds {
		random := rand.New(rand.NewPCG(uint64(seed), 1))
		text := anyRules(random, c)
		labtest.Run(t, c.Node, "flush ruleset\n"+text, nft.Path, "-f", "-")
		r := parse(t, list(t, c.Node, nft))
		for i, s := range sendings(c, podLink) {
			client := netip.AddrPortFrom(s.from.IP(ipfamily.IPv4), uint16(20000+seed*40+i))
			q := nfteval.Question{Iif: s.iif, Src: client, Dst: s.to, Protocol: "udp", Local: local}
			if s.iif == podLink {
				q.Bridged = bridged
			}
			outcomes, err := r.Ask(q)
			if err != nil && strings.Contains(err.Error(), "was masqueraded, and as what is not known") {
				continue
			}
			labtest.Check(t, err)
			if len(outcomes) != 1 {
				t.Fatalf("there are no lots, and still %v", outcomes)
			}
			seen[outcomes[0].Verdict]++
			timeout := 5 * time.Second // for an answer that has to come
			if outcomes[0].Verdict == nfteval.Dropped || ownAddress(outcomes[0], client) {
				timeout = 100 * time.Millisecond
			}
			result := s.from.Dial(snapshot.UDP, s.to, lab.Options{From: client, Timeout: timeout})
			if err := disagrees(outcomes[0], result, client); err != nil {
				t.Errorf("seed %d: from %s to %s: %v\n%s%s", seed, client, s.to, err, trace(outcomes[0]), text)
			}
		}
	}
	t.Logf("%v", seen)
}

// ownAddress says that a packet comes back to the pod that sent it, which takes nothing that says to come from itself.
func ownAddress(o nfteval.Outcome, client netip.AddrPort) bool {
	return o.Verdict == nfteval.Delivered && o.Translated && o.To.Addr() == client.Addr() &&
		lab.PodRange[0].Contains(client.Addr()) &&
		!o.Masqueraded && !o.Source.IsValid()
}

// disagrees holds what was seen against what the evaluator said.
func disagrees(o nfteval.Outcome, got lab.Result, client netip.AddrPort) error {
	ok := false
	switch o.Verdict {
	case nfteval.Dropped: // the node's own packets fail at once
		ok = got.Outcome == lab.TimedOut || got.Outcome == lab.Failed
	case nfteval.Refused:
		ok = got.Outcome == lab.Refused
	case nfteval.Delivered:
		source := client.Addr()
		if o.Source.IsValid() {
			source = o.Source
		}
		if ownAddress(o, client) {
			ok = got.Outcome == lab.TimedOut
			break
		}
		ok = got.Outcome == lab.Answered && got.Destination == o.To
		if !o.Masqueraded {
			ok = ok && got.Source.Addr() == source
		} else if ok && got.Source.Addr() == client.Addr() {
			ok = client.Addr() == netip.MustParseAddr("192.0.2.10") || client.Addr() == netip.MustParseAddr("10.244.1.1")
		}
	}
	if ok {
		return nil
	}
	return fmt.Errorf("nfteval: %v, seen %s", o, got)
}
