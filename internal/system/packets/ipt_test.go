package packets_test

import (
	"fmt"
	"net/netip"
	"runtime"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/packets"
)

// savedRules are rules of one Service with three endpoints and session affinity, as iptables-save prints them.
const savedRules = `*nat
:PREROUTING ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-SVC-A - [0:0]
:KUBE-SEP-1 - [0:0]
:KUBE-SEP-2 - [0:0]
:KUBE-SEP-3 - [0:0]
:KUBE-RANGE - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-POSTROUTING - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A PREROUTING -m physdev --physdev-in eth9 -j OTHERS
-A POSTROUTING -j KUBE-POSTROUTING
-A KUBE-SERVICES -d 10.96.0.1/32 -p tcp -m tcp --dport 80 -j KUBE-SVC-A
-A KUBE-SERVICES -d 10.96.0.2/32 -p tcp -m tcp --dport 80 -m length --length 40 -j KUBE-SVC-A
-A KUBE-SERVICES -d 10.96.0.3/32 -p tcp -m tcp --dport 80:82 -j KUBE-RANGE
-A KUBE-SERVICES -d 10.96.0.4/32 -p tcp -m tcp --dport 0:82 -j KUBE-RANGE
-A KUBE-RANGE -p tcp -j DNAT --to-destination 10.244.1.3:8080
-A KUBE-SVC-A ! -s 10.244.0.0/16 -d 10.96.0.1/32 -p tcp -m tcp --dport 80 -j KUBE-MARK-MASQ
-A KUBE-SVC-A -m recent --rcheck --seconds 10800 --reap --name KUBE-SEP-2 --mask 255.255.255.255 --rsource -j KUBE-SEP-2
-A KUBE-SVC-A -m statistic --mode random --probability 0.33333333349 -j KUBE-SEP-1
-A KUBE-SVC-A -m statistic --mode random --probability 0.50000000000 -j KUBE-SEP-2
-A KUBE-SVC-A -j KUBE-SEP-3
-A KUBE-SEP-1 -s 10.244.1.1/32 -j KUBE-MARK-MASQ
-A KUBE-SEP-1 -p tcp -m tcp -j DNAT --to-destination 10.244.1.1:8080
-A KUBE-SEP-2 -s 10.244.1.2/32 -j KUBE-MARK-MASQ
-A KUBE-SEP-2 -p tcp -m recent --set --name KUBE-SEP-2 --rsource -m tcp -j DNAT --to-destination 10.244.1.2:8080
-A KUBE-SEP-3 -p tcp -m tcp -j DNAT --to-destination 10.244.1.3:8080
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
-A KUBE-POSTROUTING -j MASQUERADE --random-fully
COMMIT
`

func walkSaved(t *testing.T, from, to string, m packets.Memory) ([]packets.Outcome, error) {
	t.Helper()
	chains, err := packets.ParseChains(ipfamily.Per[[]byte]{[]byte(savedRules)}, &packets.Host{})
	labtest.Check(t, err)
	return chains.Walk(packets.Packet{Source: netip.MustParseAddrPort(from), Destination: netip.MustParseAddrPort(to),
		Protocol: packets.TCP, Interface: "eth0"}, m, nil)
}

// TestChains follows packets through saved rules: exact thirds, a hairpin, and a client that is remembered.
func TestChains(t *testing.T) {
	for _, c := range []struct{ from, to, want string }{
		{"10.244.9.9:1", "10.96.0.1:80", "1/3 10.244.1.1:8080, 1/3 10.244.1.2:8080, " +
			"remembered for 10800 s, 1/3 10.244.1.3:8080"},
		{"10.244.1.1:1", "10.96.0.1:80", "1/3 10.244.1.1:8080, masqueraded, 1/3 10.244.1.2:8080, " +
			"remembered for 10800 s, 1/3 10.244.1.3:8080"},
		{"192.0.2.1:1", "10.96.0.1:81", "1 untouched"},
		{"192.0.2.1:1", "10.96.0.3:82", "1 10.244.1.3:8080"},
		{"192.0.2.1:1", "10.96.0.3:83", "1 untouched"},
		{"192.0.2.1:1", "10.96.0.4:1", "1 10.244.1.3:8080"},
	} {
		outcomes, err := walkSaved(t, c.from, c.to, nil)
		labtest.Check(t, err)
		var words []string
		for _, o := range outcomes {
			words = append(words, fmt.Sprintf("%s %s", o.Chance, o.Ending))
		}
		if got := strings.Join(words, ", "); got != c.want {
			t.Errorf("%s to %s: %s, want %s", c.from, c.to, got, c.want)
		}
		for _, o := range outcomes {
			if o.Memory == nil {
				continue
			}
			again, err := walkSaved(t, c.from, c.to, o.Memory)
			labtest.Check(t, err)
			if len(again) != 1 || again[0].To != o.To || again[0].Chance != packets.Certain {
				t.Errorf("%s is remembered with %s, and gets %v", c.from, o.To, again)
			}
		}
	}
}

// TestUnknownMatch meets a rule with a match that is not known: only the packet that comes there is an error, which
// names it.
func TestUnknownMatch(t *testing.T) {
	_, err := walkSaved(t, "192.0.2.1:1", "10.96.0.2:80", nil)
	if err == nil || !strings.Contains(err.Error(), "--length") || !strings.Contains(err.Error(), "KUBE-SERVICES") {
		t.Errorf("the error is %v", err)
	}
}

// TestChance: what takes more than 64 bits is rounded, and what is Near a short fraction becomes that.
func TestChance(t *testing.T) {
	third, all := packets.NewChance(1, 3), packets.Chance{Den: 1}
	for range 100 {
		all = all.Plus(third.Times(packets.NewChance(1, 100)))
	}
	if all != third {
		t.Errorf("a hundred hundredths of a third are %s", all)
	}
	odd := packets.NewChance(999_999_999_989, 1_000_000_000_039)
	for range 7 {
		odd = odd.Times(odd)
	}
	if f := odd.Float(); f < 0.999999993 || f > 0.999999994 {
		t.Errorf("%s is %v", odd, f)
	}
	for want, c := range map[[2]int]packets.Chance{{1, 1}: odd, {0, 1}: odd.Times(packets.NewChance(1, 1_000_000)),
		{1, 41}: {Num: 687299382055, Den: 28179280429056}, {2, 5}: {Num: 858993459, Den: 1 << 31}} {
		if share, of := c.Short(); [2]int{share, of} != want {
			t.Errorf("%s is about %d of %d, not %d of %d", c, share, of, want[0], want[1])
		}
	}
}

// manyRules are those of so many Services with ten endpoints each, as iptables-save prints them.
func manyRules(services int) string {
	var chains, rules strings.Builder
	chains.WriteString("*nat\n:PREROUTING ACCEPT [0:0]\n:KUBE-SERVICES - [0:0]\n:KUBE-MARK-MASQ - [0:0]\n")
	rules.WriteString("-A PREROUTING -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES\n")
	for i := range services {
		svc, ip := fmt.Sprintf("KUBE-SVC-%016X", i), fmt.Sprintf("10.96.%d.%d", i>>8, i&255)
		comment := fmt.Sprintf("-m comment --comment \"team-%d/service-%05d:http", i%20, i)
		fmt.Fprintf(&chains, ":%s - [0:0]\n", svc)
		fmt.Fprintf(&rules, "-A KUBE-SERVICES -d %s/32 -p tcp %s cluster IP\" -m tcp --dport 80 -j %s\n", ip, comment, svc)
		for e := range 10 {
			sep, addr := fmt.Sprintf("KUBE-SEP-%015X%X", i, e), fmt.Sprintf("10.%d.%d.%d", 128+e, i>>8, i&255)
			fmt.Fprintf(&chains, ":%s - [0:0]\n", sep)
			fmt.Fprintf(&rules, "-A %s %s -> %s:8080\" -m statistic --mode random --probability 0.10000000009 -j %s\n", svc,
				comment, addr, sep)
			fmt.Fprintf(&rules, "-A %s -s %s/32 %s\" -j KUBE-MARK-MASQ\n", sep, addr, comment)
			fmt.Fprintf(&rules, "-A %s -p tcp %s\" -m tcp -j DNAT --to-destination %s:8080\n", sep, comment, addr)
		}
	}
	return chains.String() + rules.String() + "COMMIT\n"
}

// BenchmarkParseChains says what a rule takes: in memory that stays, its text included, and in all that is allocated.
func BenchmarkParseChains(b *testing.B) {
	const services = 1000
	for b.Loop() {
		var before, after runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&before)
		text := ipfamily.Per[[]byte]{[]byte(manyRules(services))}
		built := before
		runtime.ReadMemStats(&built)
		chains, err := packets.ParseChains(text, &packets.Host{})
		if err != nil {
			b.Fatal(err)
		}
		runtime.ReadMemStats(&after)
		allocated := after.TotalAlloc - built.TotalAlloc
		text = ipfamily.Per[[]byte]{}
		runtime.GC()
		runtime.ReadMemStats(&after)
		rules := float64(chains.Size().Rules)
		b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/rules, "B/rule")
		b.ReportMetric(float64(allocated)/rules, "allocated-B/rule")
		runtime.KeepAlive(chains)
	}
}
