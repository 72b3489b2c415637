package results

import (
	"encoding/json"
	"strings"
	"testing"
)

const certificate = `{
	"sides": [{"name": "objects"}, {"name": "kube-proxy-nftables", "size": {"rules": 5000}}],
	"result": {"classes": 300000, "same": 299988, "explained": 10, "unexplained": 1, "unknown": 1,
		"errors": ["no such expression"],
		"groups": [{"reason": "a", "count": 4}, {"reason": "b", "count": 3}, {"reason": "a", "count": 3},
			{"count": 1, "examples": [{"sides": ["objects", "kube-proxy-nftables"], "service": "shop/cart", "sender": "pod",
				"source": "10.0.0.1", "kind": "cluster IP", "destination": "10.96.0.1:80/tcp",
				"outcomes": ["drop", "untouched"]}]}]}
}`

func TestComparisons(t *testing.T) {
	size := Size{Services: 10000, Endpoints: 10}
	all := []*Comparison{
		{Size: size, Proxy: "kube-proxy-nftables", Seconds: 12.3, Processor: 20.1, Memory: 700 << 20,
			Certificate: &Certificate{}},
		{Size: size, Proxy: "kube-proxy-iptables", Start: Wait{Seconds: 900, Limit: true}},
	}
	if err := json.Unmarshal([]byte(certificate), all[0].Certificate); err != nil {
		t.Fatal(err)
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
	err := all[0].Unexplained()
	for _, want := range []string{
		"1 like this: shop/cart, pod from 10.0.0.1 () to cluster IP 10.96.0.1:80/tcp: objects: drop; " +
			"kube-proxy-nftables: untouched",
		"unknown: no such expression",
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("no %q in %v", want, err)
		}
	}
	if err := all[1].Unexplained(); err != nil {
		t.Error(err)
	}
}
