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

// TestOpenLimit: a Service with as many open connections as it may have refuses new ones until some are closed. Its
// open ones stay, and so do the other family and other Services.
func TestOpenLimit(t *testing.T) {
	const most = 8
	n := newShopNode(t, 2, "off")
	text, err := os.ReadFile(n.manifest)
	labtest.Check(t, err)
	text = bytes.Replace(text, []byte("{name: web, namespace: shop}"),
		[]byte(`{name: web, namespace: shop, annotations: {verdict/limits: "open=8"}}`), 1)
	labtest.Check(t, os.WriteFile(n.manifest, text, 0o644))
	from, to := n.Pods[0], n.web(ipfamily.IPv4)
	testkit.Eventually(t, 20*time.Second, "the limits", func() bool {
		set := labtest.Run(t, n.Node, "", "nft", "list", "set", "ip", "verdict", "limited-pools")
		return strings.Contains(set, "shop/web")
	}, n.log.String)
	var open []*lab.Conn
	hold := func() lab.Outcome {
		c, r := from.Open(snapshot.TCP, to, lab.Options{Timeout: 5 * time.Second})
		if c != nil {
			open = append(open, c)
		}
		return r.Outcome
	}
	for range most {
		if o := hold(); o != lab.Answered {
			t.Fatal(o)
		}
	}
	refused := func() bool {
		return from.Dial(snapshot.TCP, to, lab.Options{Timeout: 5 * time.Second}).Outcome == lab.Refused
	}
	testkit.Eventually(t, 20*time.Second, "a refused connection", refused, n.log.String)
	for range 20 {
		if !refused() {
			t.Error("a full Service takes a connection")
		}
	}
	for _, at := range []ipfamily.Family{ipfamily.IPv4, ipfamily.IPv6} {
		other := n.web(at)
		if at == ipfamily.IPv4 {
			other = netip.AddrPortFrom(lab.Nth(lab.ServiceRange[at], 2), 80)
		}
		if r := from.Dial(snapshot.TCP, other, lab.Options{Timeout: 5 * time.Second}); r.Outcome != lab.Answered {
			t.Errorf("%v: %v", other, r)
		}
	}
	if !strings.Contains(n.log.String(), "as many open connections as its limits allow") {
		t.Error(n.log.String())
	}
	labtest.Check(t, open[0].Close())
	testkit.Eventually(t, 20*time.Second, "a connection in place of the closed one", func() bool {
		return hold() == lab.Answered
	}, n.log.String)
	testkit.Eventually(t, 20*time.Second, "a refused connection again", refused, n.log.String)
}
