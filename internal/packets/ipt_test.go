package packets_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/internal/ipfamily"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/packets"
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
:KUBE-MARK-MASQ - [0:0]
:KUBE-POSTROUTING - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A PREROUTING -m physdev --physdev-in eth9 -j OTHERS
-A POSTROUTING -j KUBE-POSTROUTING
-A KUBE-SERVICES -d 10.96.0.1/32 -p tcp -m tcp --dport 80 -j KUBE-SVC-A
-A KUBE-SERVICES -d 10.96.0.2/32 -p tcp -m tcp --dport 80 -m length --length 40 -j KUBE-SVC-A
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
