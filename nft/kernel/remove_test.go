package kernel

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// removals is how often TestRemoveRejectsNobody removes the tables: without the two steps of Remove, one in thirty
// rejected a client, on two processors.
const removals = 150

// TestRemoveRejectsNobody removes the tables again and again, while another proxy's rules take what ours leave, and
// clients connect all the time. A packet that passes our rules when the tables go must not find its frontend gone and
// its address still known as a cluster IP.
func TestRemoveRejectsNobody(t *testing.T) {
	c, b, s, st := one(t, both, asIs)
	to := s.frontendOf(c, dataplane.ClusterIP, ipfamily.IPv4)
	labtest.Run(t, c.Node, fmt.Sprintf(`table ip other {
		chain prerouting {
			type nat hook prerouting priority -90
			ip daddr %s tcp dport %d dnat to %s:%d
		}
	}`, to.Addr(), to.Port(), c.Pods[0].IP(ipfamily.IPv4), targetPort), "nft", "-f", "-")
	stop := connect(t, c, to)
	for range removals {
		labtest.Check(t, b.Remove())
		apply(t, b, st)
	}
	t.Logf("%d connections during %d removals", stop(), removals)
}

// TestRemoveInterrupted: whoever removes the tables may be killed when only the rules are gone. The next proxy does not
// take the digests' word for it, and writes the rules again.
func TestRemoveInterrupted(t *testing.T) {
	s := newSite(t, 8, Options{})
	labtest.Check(t, s.backend.eachTable(s.backend.batch.deleteRules))
	s.restart(Options{})
	if r := s.apply(dataplane.Change{}); r.Adopted || r.Full {
		t.Errorf("the rules were written by %+v", r)
	}
	quiet(t, s.backend)
}

// connect has three clients open connections all the time until stop is called, which returns how many there were. Each
// must be answered.
func connect(t *testing.T, c *lab.Cluster, to netip.AddrPort) (stop func() int64) {
	traffic := &labtest.Traffic{Patience: 10 * time.Second,
		Target: func(*rand.Rand) (snapshot.Protocol, netip.AddrPort) { return snapshot.TCP, to }}
	for i, from := range []*lab.Host{c.Outside, c.Node2, c.Pods[2]} {
		traffic.Open(from, uint64(i))
	}
	return func() int64 {
		traffic.Stop()
		traffic.Check(t)
		return traffic.Dials.Load()
	}
}
