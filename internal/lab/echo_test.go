package lab_test

import (
	"net/netip"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
)

// TestEcho: hosts answer a ping, what the node answers with an ICMP error is a refusal, and what it drops is silence.
func TestEcho(t *testing.T) {
	needNft(t)
	c := labtest.NewCluster(t, lab.Config{LocalPods: 2})
	refused := map[ipfamily.Family]string{ipfamily.IPv4: "10.96.0.1", ipfamily.IPv6: "fd00:10:96::1"}
	dropped := map[ipfamily.Family]string{ipfamily.IPv4: "10.96.0.2", ipfamily.IPv6: "fd00:10:96::2"}
	rules := "ip daddr 10.96.0.1 reject; ip6 daddr fd00:10:96::1 reject; " +
		"ip daddr 10.96.0.2 drop; ip6 daddr fd00:10:96::2 drop;"
	labtest.Run(t, c.Node, `table inet t {
		chain pre { type filter hook prerouting priority 0; `+rules+` }
		chain out { type filter hook output priority 0; `+rules+` }
	}`, "nft", "-f", "-")
	for _, f := range lab.Families() {
		for _, from := range []*lab.Host{c.Outside, c.Pods[0], c.Node} {
			if r := from.Echo(c.Pods[1].IP(f), 0); r.Outcome != lab.Answered || r.Err != nil {
				t.Errorf("%s to a pod, %v: %v, want an answer", from.Name, f, r)
			}
			wantOutcome(t, from.Name, from.Echo(netip.MustParseAddr(refused[f]), 0), lab.Refused, time.Second)
			const patience = 50 * time.Millisecond
			wantOutcome(t, from.Name, from.Echo(netip.MustParseAddr(dropped[f]), patience), lab.TimedOut, patience)
		}
	}
}
