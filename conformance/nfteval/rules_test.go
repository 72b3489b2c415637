package nfteval_test

import (
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/verdict-proxy/verdict/conformance/nfteval"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
)

// ask asks with words: "eth0 192.0.2.5 tcp 10.96.100.1:80", or "- 10.99.0.2 ..." for a packet of this host, whose
// address is 10.99.0.2.
func ask(t *testing.T, r *nfteval.Ruleset, words string, state ...nfteval.Update) ([]nfteval.Outcome, error) {
	t.Helper()
	w := strings.Fields(words)
	src, err := netip.ParseAddr(w[1])
	labtest.Check(t, err)
	dst, err := netip.ParseAddrPort(w[3])
	labtest.Check(t, err)
	return r.Ask(nfteval.Question{
		Iif: strings.TrimPrefix(w[0], "-"), Src: netip.AddrPortFrom(src, 40000), Protocol: w[2], Dst: dst,
		Local: []netip.Addr{netip.MustParseAddr("10.99.0.2"), netip.MustParseAddr("fd00::2")}, State: state,
	})
}

// said are outcomes as they print, sorted.
func said(outcomes []nfteval.Outcome) string {
	var list []string
	for _, o := range outcomes {
		list = append(list, o.String())
	}
	slices.Sort(list)
	return strings.Join(list, " | ")
}

// TestMarks asks about a proxy unlike Verdict.
func TestMarks(t *testing.T) {
	text, err := os.ReadFile("testdata/marks.nft")
	labtest.Check(t, err)
	both := "0.5 delivered to 172.16.0.10:8080 | 0.5 delivered to 172.16.1.10:8080"
	masqueraded := "0.5 delivered to 172.16.0.10:8080, masqueraded | 0.5 delivered to 172.16.1.10:8080, masqueraded"
	for name, listing := range listings(t, "marks.nft", string(text)) {
		r := parse(t, listing)
		for words, want := range map[string]string{
			"veth1 172.16.3.3 tcp 10.96.100.1:80": both,
			"veth1 172.16.0.10 tcp 10.96.100.1:80": "0.5 delivered to 172.16.0.10:8080, masqueraded | " +
				"0.5 delivered to 172.16.1.10:8080",
			"eth0 198.51.100.99 tcp 10.96.100.1:80":  masqueraded,
			"eth0 192.0.2.5 tcp 198.51.100.7:80":     masqueraded,
			"eth0 203.0.113.9 tcp 198.51.100.7:80":   masqueraded,
			"eth0 203.0.113.10 tcp 198.51.100.7:80":  "1 dropped",
			"- 10.99.0.2 tcp 198.51.100.7:80":        "1 dropped",
			"veth1 172.16.3.3 tcp 10.96.100.3:80":    "1 refused by icmp port-unreachable",
			"- 10.99.0.2 tcp 10.96.100.3:80":         "1 refused by icmp port-unreachable",
			"veth1 172.16.3.3 tcp 10.96.100.1:81":    "1 refused by icmp port-unreachable",
			"veth1 172.16.3.3 tcp 10.96.200.200:80":  "1 dropped",
			"eth0 198.51.100.99 tcp 10.99.0.2:30080": masqueraded,
			"- 10.99.0.2 tcp 10.99.0.2:30080":        masqueraded,
			"- 10.99.0.2 udp 10.96.100.2:53": "0.25 delivered to 172.16.0.10:53, masqueraded | " +
				"0.25 delivered to 172.16.1.11:53, masqueraded | " +
				"0.5 delivered to 172.16.1.10:53, masqueraded",
			"eth0 198.51.100.99 tcp 10.99.0.2:22":   "1 delivered to 10.99.0.2:22",
			"eth0 2001:db8::1 tcp [2001:db8::2]:22": "1 delivered to [2001:db8::2]:22",
		} {
			got, err := ask(t, r, words)
			if err != nil || said(got) != want {
				t.Errorf("%s: %s: %s (%v), want %s", name, words, said(got), err, want)
			}
		}
		first, err := ask(t, r, "veth1 172.16.3.3 tcp 10.96.100.1:80")
		labtest.Check(t, err)
		for _, o := range first {
			again, err := ask(t, r, "eth0 172.16.3.3 tcp 10.99.0.2:30080", o.Updates...)
			if want := "1 delivered to " + o.To.String() + ", masqueraded"; err != nil || said(again) != want {
				t.Errorf("%s: after %v: %s (%v), want %s", name, o.Updates, said(again), err, want)
			}
		}
	}
}

// sentences are rulesets, each with what becomes of packets; a text that begins with "error: " is part of the error.
var sentences = []struct {
	name, rules string
	asks        map[string]string
}{
	{"no rules", `table ip x { }`, map[string]string{
		"eth0 192.0.2.1 tcp 10.99.0.2:80": "1 delivered to 10.99.0.2:80",
		"eth0 192.0.2.1 tcp 10.0.0.1:80":  "1 delivered to 10.0.0.1:80",
	}},
	{"accept ends its own base chain only, across tables", `
		table ip a { chain c { type filter hook forward priority 0; accept; }; }
		table inet b { chain c { type filter hook forward priority 1; ip daddr 10.0.0.1 tcp dport 80 drop;
			meta nfproto ipv6 drop; }; }`,
		map[string]string{
			"eth0 192.0.2.1 tcp 10.0.0.1:80":              "1 dropped",
			"eth0 192.0.2.1 udp 10.0.0.1:80":              "1 delivered to 10.0.0.1:80",
			"eth0 2001:db8::1 udp [2001:db8::2]:80":       "1 dropped",
			"- 10.99.0.2 tcp 10.0.0.1:80":                 "1 delivered to 10.0.0.1:80",
			"eth0 2001:db8::1 tcp [fd00::2]:80":           "1 delivered to [fd00::2]:80",
			"lo 2001:db8::1 tcp [2001:db8::2]:80":         "1 dropped",
			"eth0 2001:db8::1 sctp [2001:db8:1::2]:53":    "1 dropped",
			"eth0 192.0.2.1 sctp 10.0.0.1:80":             "1 delivered to 10.0.0.1:80",
			"-  fd00::2 tcp [2001:db8:1::2]:53":           "1 delivered to [2001:db8:1::2]:53",
			"eth0 2001:db8::1 tcp [2001:db8::ffff:2]:443": "1 dropped",
		}},
	{"policy, jump, goto and return", `
		table ip x {
			chain d { tcp dport 1 return; tcp dport 2 accept; }
			chain e { goto d; drop; }
			chain base { type filter hook input priority 0; policy drop; jump d; tcp dport 3 goto e; tcp dport 1 accept;
				jump e; tcp dport 4 accept; tcp dport 5 reject with tcp reset; udp dport 5 reject with icmp host-prohibited; }
		}`, map[string]string{
		"eth0 192.0.2.1 tcp 10.99.0.2:1": "1 delivered to 10.99.0.2:1",
		"eth0 192.0.2.1 tcp 10.99.0.2:2": "1 delivered to 10.99.0.2:2",
		"eth0 192.0.2.1 tcp 10.99.0.2:3": "1 dropped",
		"eth0 192.0.2.1 tcp 10.99.0.2:4": "1 delivered to 10.99.0.2:4",
		"eth0 192.0.2.1 tcp 10.99.0.2:5": "1 refused by tcp reset",
		"eth0 192.0.2.1 udp 10.99.0.2:5": "1 refused by icmp host-prohibited",
		"- 10.99.0.2 tcp 10.99.0.2:6":    "1 dropped",
	}},
	{"nat chains run at NAT's priority, and once", `
		table ip x {
			chain before { type filter hook prerouting priority -110; ip daddr 10.1.0.1 meta mark set 1; }
			chain n1 { type nat hook prerouting priority -190; ip daddr 10.1.0.1 tcp dport 1-99 dnat to 10.2.0.1:81; }
			chain n2 { type nat hook prerouting priority 200; tcp dport 80-81 dnat to 10.3.0.1; }
			chain after { type filter hook prerouting priority -50; ip daddr 10.2.0.1 meta mark 1 counter accept;
				ip daddr 10.3.0.1 meta mark 0 accept; drop; }
		}`, map[string]string{
		"eth0 192.0.2.1 tcp 10.1.0.1:80": "1 delivered to 10.2.0.1:81",
		"eth0 192.0.2.1 tcp 10.4.0.1:80": "1 delivered to 10.3.0.1:80",
		"eth0 192.0.2.1 tcp 10.4.0.1:79": "1 dropped",
		"- 10.99.0.2 tcp 10.1.0.1:80":    "1 delivered to 10.1.0.1:80",
	}},
	{"this host's packets to itself come back by lo, without NAT", `
		table ip x {
			chain o { type nat hook output priority -100; tcp dport 80 dnat to 10.99.0.2:8080; }
			chain p { type nat hook prerouting priority -100; tcp dport 8080 dnat to 10.99.0.2:9090; }
			chain i { type filter hook input priority 0; iifname lo tcp dport 8080 reject; iif lo tcp dport 8081 drop;
				iif != lo tcp dport 7 drop; }
		}`, map[string]string{
		"- 10.99.0.2 tcp 10.0.0.1:80":       "1 refused by icmp port-unreachable",
		"- 10.99.0.2 tcp 10.99.0.2:8081":    "1 dropped",
		"- 10.99.0.2 tcp 10.99.0.2:7":       "1 delivered to 10.99.0.2:7",
		"eth0 192.0.2.1 tcp 10.99.0.2:8080": "1 delivered to 10.99.0.2:9090",
		"eth0 192.0.2.1 tcp 10.99.0.2:7":    "1 dropped",
	}},
	{"conntrack", `
		table ip x {
			chain raw { type filter hook prerouting priority raw; ct state invalid udp dport 1 drop; udp dport 2 notrack; }
			chain nat { type nat hook prerouting priority dstnat; udp dport 1-2 dnat to 10.3.0.1;
				udp dport 5 dnat to 10.0.0.1:5; }
			chain f { type filter hook forward priority 0; ct state established,related drop;
				ct state untracked counter reject; ct state { new, invalid } udp dport 3 drop;
				meta l4proto udp ct original proto-dst 4 drop; ct status dnat drop; }
		}`, map[string]string{
		"eth0 192.0.2.1 udp 10.0.0.1:1": "1 dropped",
		"eth0 192.0.2.1 udp 10.0.0.1:2": "1 refused by icmp port-unreachable",
		"eth0 192.0.2.1 udp 10.0.0.1:3": "1 dropped",
		"eth0 192.0.2.1 udp 10.0.0.1:4": "1 dropped",
		"eth0 192.0.2.1 udp 10.0.0.1:5": "1 delivered to 10.0.0.1:5",
		"eth0 192.0.2.1 udp 10.0.0.2:5": "1 dropped",
		"eth0 192.0.2.1 udp 10.0.0.2:6": "1 delivered to 10.0.0.2:6",
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
		"eth0 192.0.2.1 tcp 10.0.0.77:85":  "1 dropped",
		"eth0 192.0.2.1 tcp 10.0.0.77:91":  "1 delivered to 10.0.0.77:91",
		"eth0 192.0.2.1 tcp 10.0.1.1:443":  "1 dropped",
		"eth0 192.0.2.1 tcp 10.9.0.1:1":    "1 delivered to 10.9.0.1:1",
		"eth1 192.0.2.1 tcp 10.9.0.1:1":    "1 dropped",
		"eth0 192.0.2.1 tcp 10.9.0.1:2":    "1 refused by icmp port-unreachable",
		"veth7 192.0.2.1 tcp 10.9.0.1:3":   "1 dropped",
		"eth0 192.0.2.9 tcp 10.9.0.1:4":    "1 dropped",
		"eth0 192.0.2.1 tcp 10.9.0.1:5":    "1 refused by tcp reset",
		"eth0 192.0.2.1 tcp 10.9.0.1:9":    "1 dropped",
		"eth0 192.0.2.1 tcp 10.9.0.1:7":    "1 delivered to 10.5.0.1:70",
		"eth0 192.0.2.1 udp 10.0.0.77:85":  "1 delivered to 10.0.0.77:85",
		"veth7 192.0.2.1 tcp 10.9.0.1:10":  "1 delivered to 10.9.0.1:10",
		"- 10.99.0.2 tcp 10.0.0.77:85":     "1 delivered to 10.0.0.77:85",
		"veth77 192.0.2.1 tcp 10.9.0.1:10": "1 delivered to 10.9.0.1:10",
	}},
	{"lots", `
		table ip x {
			chain a { udp dport 1 numgen random mod 4 vmap { 0 : drop, 1 : goto b, 2 : return }; reject; }
			chain b { jhash ip saddr mod 2 vmap { 0 : accept, 1 : drop }; }
			chain f { type filter hook forward priority 0; jump a; numgen inc mod 10 < 3 drop; }
		}`, map[string]string{
		"eth0 192.0.2.1 udp 10.0.0.1:1": "0.25 refused by icmp port-unreachable | 0.3 delivered to 10.0.0.1:1 | 0.45 dropped",
	}},
	{"sources", `
		table ip x {
			chain p { type nat hook postrouting priority srcnat; ip daddr 10.0.0.1 snat to 10.99.0.2;
				ip daddr 10.0.0.2 masquerade; }
			chain q { type filter hook postrouting priority 101; ip saddr 10.99.0.2 drop; }
			chain o { type nat hook output priority 0; tcp dport 9 redirect to :99; }
		}`, map[string]string{
		"eth0 192.0.2.1 udp 10.0.0.1:1": "1 dropped",
		"eth0 192.0.2.1 udp 10.0.0.3:1": "1 delivered to 10.0.0.3:1",
		"eth0 192.0.2.1 udp 10.0.0.2:1": "error: ip x q handle",
		"- 10.99.0.9 tcp 10.0.0.3:9":    "1 delivered to 127.0.0.1:99",
	}},
	{"what is not known is an error once a packet comes to it", `
		table ip x {
			chain f {
				type filter hook forward priority 0
				udp dport 1 limit rate 3/second accept
				udp dport 2 meta skuid 0 accept
				udp dport 3 @th,64,8 7 accept
				udp dport 4 oifname "eth1" drop
				udp dport 5 tcp option maxseg size 1 drop
				udp dport 6 ip dscp cs1 drop
				udp dport 7 meta length 7 drop
			}
		}`, map[string]string{
		"eth0 192.0.2.1 udp 10.0.0.1:1": `error: ip x f handle 2: udp dport 1 {"limit"`,
		"eth0 192.0.2.1 udp 10.0.0.1:2": "error: meta skuid",
		"eth0 192.0.2.1 udp 10.0.0.1:3": "error: @th,64,8",
		"eth0 192.0.2.1 udp 10.0.0.1:4": "error: give the question an Oif",
		"eth0 192.0.2.1 udp 10.0.0.1:5": "error: maxseg",
		"eth0 192.0.2.1 udp 10.0.0.1:6": "error: ip dscp",
		"eth0 192.0.2.1 udp 10.0.0.1:7": "error: meta length",
		"eth0 192.0.2.1 udp 10.0.0.1:8": "1 delivered to 10.0.0.1:8",
		"- 10.99.0.2 udp 10.0.0.1:1":    "1 delivered to 10.0.0.1:1",
	}},
	{"an order that is not known is an error if it matters", `
		table ip a { chain c { type filter hook forward priority 0; udp dport 1 drop; udp dport 2 drop; }; }
		table ip b { chain c { type filter hook forward priority 0; udp dport 1 drop; udp dport 2 reject; };
			}`, map[string]string{
		"eth0 192.0.2.1 udp 10.0.0.1:1": "1 dropped",
		"eth0 192.0.2.1 udp 10.0.0.1:2": "error: same priority",
	}},
	{"hooks that are not followed", `
		table netdev n { chain c { type filter hook ingress device lo priority 0; drop; }; }`, map[string]string{
		"lo 192.0.2.1 udp 10.0.0.1:1": "error: hook ingress",
	}},
}

// TestSentences asks about small rulesets, as every nft lists them.
func TestSentences(t *testing.T) {
	for _, s := range sentences {
		t.Run(s.name, func(t *testing.T) {
			for name, listing := range listings(t, s.name, s.rules) {
				r := parse(t, listing)
				for words, want := range s.asks {
					got, err := ask(t, r, words)
					part, fails := strings.CutPrefix(want, "error: ")
					if fails != (err != nil) || !fails && said(got) != want || fails && !strings.Contains(err.Error(), part) {
						t.Errorf("%s: %s: %s (%v), want %s", name, words, said(got), err, want)
						for _, o := range got {
							t.Log(trace(o))
						}
					}
				}
			}
		})
	}
}

func TestParseErrors(t *testing.T) {
	for text, want := range map[string]string{
		``:                 "read the listing",
		`{"nftables": []}`: "no metainfo",
		`{"nftables": [{"metainfo": {"version": "2", "json_schema_version": 2}}]}`:            "json_schema_version is 2",
		`{"nftables": [{"rule": {"family": "ip", "table": "x", "chain": "c", "handle": 7}}]}`: "handle 7 of chain ip x c",
		`{"nftables": [{"metainfo": {"version": "1", "json_schema_version": 1}}, ` +
			`{"hologram": {"family": "ip", "table": "x"}}]}`: "nftables[1].hologram",
	} {
		if _, err := nfteval.Parse(strings.NewReader(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got error %v, want one with %q", text, err, want)
		}
	}
}

func TestQuestionErrors(t *testing.T) {
	r, err := nfteval.Parse(strings.NewReader(`{"nftables": [{"metainfo": {"version": "1", "json_schema_version": 1}}]}`))
	labtest.Check(t, err)
	four, six := netip.MustParseAddrPort("192.0.2.1:1"), netip.MustParseAddrPort("[2001:db8::1]:1")
	for want, q := range map[string]nfteval.Question{
		"need an address":  {Protocol: "tcp"},
		"one family":       {Protocol: "tcp", Src: four, Dst: six},
		`Protocol "icmp"`:  {Protocol: "icmp", Src: four, Dst: four},
		"is multicast":     {Protocol: "udp", Src: four, Dst: netip.MustParseAddrPort("224.0.0.1:1")},
		"are not of one f": {Protocol: "udp", Src: netip.MustParseAddrPort("[::ffff:192.0.2.1]:1"), Dst: six},
	} {
		if _, err := r.Ask(q); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: got error %v, want one with %q", q, err, want)
		}
	}
}

// TestTrace shows the way of a packet, with what it found; several ask at the same time.
func TestTrace(t *testing.T) {
	text, err := os.ReadFile("testdata/marks.nft")
	labtest.Check(t, err)
	_, listing := first(listings(t, "marks.nft", string(text)))
	r := parse(t, listing)
	want := []string{
		"prerouting ip proxy nat-in: jump services",
		"prerouting ip proxy services: ip daddr @own ip saddr != 172.16.0.0/12 meta mark set meta mark | 16384 {10.96.100.2}",
		"prerouting ip proxy services: ip daddr . meta l4proto . th dport vmap @fronts {10.96.100.2 . udp . 53 : goto names}",
		"prerouting ip proxy names: meta l4proto udp dnat ip to numgen random mod 4 " +
			"map { 0 : 172.16.0.10 . 53, 1 : 172.16.1.10 . 53, 2 : 172.16.1.10 . 53, 3 : 172.16.1.11 . 53 } " +
			"{1 : 172.16.1.10 . 53}",
		"forward ip proxy on: ct state new jump last",
		"postrouting ip proxy nat-post: jump leaving",
		"postrouting ip proxy leaving: meta mark & 16384 != 0 meta mark set meta mark ^ 16384 masquerade fully-random",
	}
	var group sync.WaitGroup
	for range 8 {
		group.Go(func() {
			outcomes, err := ask(t, r, "eth0 192.0.2.1 udp 10.96.100.2:53")
			if err != nil {
				t.Error(err)
				return
			}
			var got []string
			for _, s := range outcomes[0].Trace {
				got = append(got, s.String())
			}
			if !slices.Equal(got, want) {
				t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
			}
		})
	}
	group.Wait()
}
