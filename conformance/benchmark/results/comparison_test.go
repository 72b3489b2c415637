package results

import (
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/internal/compare"
	"github.com/verdict-proxy/verdict/internal/packets"
)

func TestComparisons(t *testing.T) {
	size := Size{Services: 10000, Endpoints: 10}
	all := []*Comparison{
		{Size: size, Proxy: "kube-proxy-nftables", Seconds: 12.3, Processor: 20.1, Memory: 700 << 20,
			Certificate: &compare.Certificate{
				Sides: []compare.CertificateSide{{Name: "objects"}, {Name: "kube-proxy-nftables", Size: packets.Size{Rules: 5000}}},
				Result: &compare.Result{Classes: 300000, Same: 299988, Explained: 10, Unexplained: 1, Unknown: 1, Groups: []compare.Group{
					{Reason: "a", Count: 4}, {Reason: "b", Count: 3}, {Reason: "a", Count: 3}, {Count: 1},
				}},
			}},
		{Size: size, Proxy: "kube-proxy-iptables", Start: Wait{Seconds: 900, Limit: true}},
	}
	var b strings.Builder
	if err := WriteComparisons(&b, all); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"| 10,000 x 10 | kube-proxy-nftables | 5,000 | 300,000 | 299,988 | 7 `a`, 3 `b`, 1 `?` | 2 | 12 s / 20 s | 700 MiB |",
		"| 10,000 x 10 | kube-proxy-iptables | not programmed within 900 s |",
	} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %q in\n%s", want, b.String())
		}
	}
}
