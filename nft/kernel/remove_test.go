package kernel

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/ipfamily"
	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// removals is how often TestRemoveRejectsNobody removes the tables: without the two steps of Remove, one in some
// twenty rejected a client, on two processors.
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
	var clients sync.WaitGroup
	var dials atomic.Int64
	end := make(chan struct{})
	for _, from := range []*lab.Host{c.Outside, c.Node2, c.Pods[2]} {
		clients.Go(func() {
			for {
				select {
				case <-end:
					return
				default:
				}
				if r := from.Dial(snapshot.TCP, to, lab.Options{Timeout: 10 * time.Second}); r.Outcome != lab.Answered {
					t.Errorf("%s, after %d connections: %v", from.Name, dials.Load(), r)
				}
				dials.Add(1)
			}
		})
	}
	for range removals {
		labtest.Check(t, b.Remove())
		apply(t, b, st)
	}
	close(end)
	clients.Wait()
	t.Logf("%d connections during %d removals", dials.Load(), removals)
}
