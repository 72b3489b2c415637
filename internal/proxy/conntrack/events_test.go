package conntrack

import (
	"errors"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// listen subscribes on a host.
func listen(t testing.TB, h *lab.Host, ipvs bool) *Events {
	t.Helper()
	var e *Events
	labtest.Check(t, h.Do(func() (err error) {
		e, err = Listen(0)
		return err
	}))
	if ipvs {
		labtest.Check(t, e.WithIPVS())
	}
	t.Cleanup(func() { e.Close() })
	return e
}

// receive returns what events come until there are enough, or none for a while.
func receive(t testing.TB, e *Events, enough int) (got []Flow) {
	t.Helper()
	for wait := 0; len(got) < enough && wait < 100; wait++ {
		err := e.Receive(time.Now().Add(50*time.Millisecond), func(f *Flow, _ bool) { got = append(got, *f) })
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatal(err)
		}
	}
	return got
}

// TestEventsOfTranslatedFlows: an event tells the tuples and who deleted the flow, and the kernel keeps those of flows
// that are not translated to itself. Those of IPVS are translated without the status bit.
func TestEventsOfTranslatedFlows(t *testing.T) {
	for _, ipvs := range []bool{false, true} {
		for _, v6 := range []bool{false, true} {
			h := labtest.NewHost(t, labtest.NewNet(t), "node")
			c := open(t, h)
			e := listen(t, h, ipvs)
			frontend := dataplane.Key{Addr: netip.MustParseAddr("10.96.0.10"), Protocol: snapshot.UDP, Port: 53}
			endpoint := netip.MustParseAddrPort("10.244.0.7:5353")
			if v6 {
				frontend.Addr, endpoint = netip.MustParseAddr("fd00::10"), netip.MustParseAddrPort("[fd00:1::7]:5353")
			}
			to := entry{client: clientOf(2, v6), frontend: frontend, endpoint: endpoint, answered: true, nat: !ipvs}
			plain := entry{client: clientOf(1, v6), frontend: frontend,
				endpoint: netip.AddrPortFrom(frontend.Addr, frontend.Port)}
			insert(t, c, plain, to)
			looked := 0
			labtest.Check(t, newUnanswered(t, c).walker.Look(t.Context(), func(f *Flow) {
				if !f.Translated() {
					return
				}
				if looked++; f.Endpoint != endpoint || f.Client != to.client || f.Left == 0 {
					t.Errorf("a look finds %+v", f)
				}
			}))
			for _, family := range ipfamily.All {
				labtest.Check(t, c.list(query{family: family}, func(flows []flow) error {
					_, err := c.remove(flows)
					return err
				}))
			}
			got := receive(t, e, 1)
			port, err := c.Port()
			labtest.Check(t, err)
			if looked != 1 || len(got) != 1 || got[0].Frontend != frontend || got[0].Endpoint != endpoint ||
				got[0].By != port || !got[0].Answered || e.Lost() != 0 {
				t.Errorf("IPVS %v: a look found %d flows, and events told %+v; the port is %d", ipvs, looked, got, port)
			}
		}
	}
}
