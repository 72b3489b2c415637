package node

import (
	"bytes"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestOpenLimit: a Service with as many open connections as it may have refuses new ones until some are closed, and so
// it is with a client of a Service, where others are served. Open ones stay, and so do the other family and other
// Services.
func TestOpenLimit(t *testing.T) {
	for _, test := range []struct {
		limits, log string
		family      ipfamily.Family
		// others is what becomes of other clients.
		others lab.Outcome
	}{
		{"open=8", "a Service has as many open connections as its limits allow", ipfamily.IPv4, lab.Refused},
		{"client-open=8", "a client has as many open connections as a Service's limits allow", ipfamily.IPv6, lab.Answered},
	} {
		t.Run(test.limits, func(t *testing.T) {
			n := newShopNode(t, 2, "off")
			n.limit(test.limits)
			var open []*lab.Conn
			at := n.web(test.family)
			hold := func() lab.Outcome {
				c, r := n.Pods[0].Open(snapshot.TCP, at, lab.Options{Timeout: 5 * time.Second})
				if c != nil {
					open = append(open, c)
				}
				return r.Outcome
			}
			for range 8 {
				if o := hold(); o != lab.Answered {
					t.Fatal(o)
				}
			}
			dial := func(from *lab.Host, to netip.AddrPort) lab.Outcome {
				return from.Dial(snapshot.TCP, to, lab.Options{Timeout: 5 * time.Second}).Outcome
			}
			refused := func() bool { return dial(n.Pods[0], at) == lab.Refused }
			testkit.Eventually(t, 20*time.Second, "a refused connection", refused, n.log.String)
			for range 20 {
				if !refused() {
					t.Error("a connection is taken")
				}
			}
			if got := dial(n.Pods[1], at); got != test.others {
				t.Errorf("another client: %v", got)
			}
			for _, f := range lab.Families() {
				other := n.web(f)
				if f == test.family {
					other = netip.AddrPortFrom(lab.Nth(lab.ServiceRange[f], 2), 80)
				}
				if got := dial(n.Pods[0], other); got != lab.Answered {
					t.Errorf("%v: %v", other, got)
				}
			}
			if !strings.Contains(n.log.String(), test.log) {
				t.Error(n.log.String())
			}
			labtest.Check(t, open[0].Close())
			testkit.Eventually(t, 20*time.Second, "a connection in place of the closed one", func() bool {
				return hold() == lab.Answered
			}, n.log.String)
			testkit.Eventually(t, 20*time.Second, "a refused connection again", refused, n.log.String)
		})
	}
}

// limit has the Service shop/web have limits.
func (n *shopNode) limit(limits string) {
	n.t.Helper()
	text, err := os.ReadFile(n.manifest)
	labtest.Check(n.t, err)
	text = bytes.Replace(text, []byte("{name: web, namespace: shop}"),
		[]byte(`{name: web, namespace: shop, annotations: {verdict/limits: "`+limits+`"}}`), 1)
	labtest.Check(n.t, os.WriteFile(n.manifest, text, 0o644))
	testkit.Eventually(n.t, 20*time.Second, "the limits", func() bool {
		set := labtest.Run(n.t, n.Node, "", "nft", "list", "set", "ip", "verdict", "limited-pools")
		return strings.Contains(set, "shop/web")
	}, n.log.String)
}

// TestOverRate: who reads the metrics makes the proxy notice that a rate refuses connections.
func TestOverRate(t *testing.T) {
	n := newShopNode(t, 2, "off")
	n.limit("rate=1")
	testkit.Eventually(t, 30*time.Second, "a word about the rate", func() bool {
		for range 5 {
			n.Pods[0].Dial(snapshot.TCP, n.web(ipfamily.IPv4), lab.Options{Timeout: time.Second})
		}
		n.metric("verdict_service_refused_packets_total")
		return strings.Contains(n.log.String(), "connections to a Service are over its limits")
	}, n.log.String)
}
