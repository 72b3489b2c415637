package kernel

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestZones: a near endpoint that has a third of the weights carries two thirds of the half of all demand that comes
// from its zone, and the others get the rest; on a node in the other zone, they get everything.
func TestZones(t *testing.T) {
	const n = 3000
	c, b := proxied(t, lab.Config{LocalPods: 4, RemotePods: 3})
	labtest.Check(t, c.Node.Sysctl("net/netfilter/nf_conntrack_udp_timeout", "1"))
	for i, zone := range []string{"a", "b"} {
		s := flowService{number: i + 1, state: endpointState{"zoned", nil, slices.Repeat([]condition{ready}, 3)}}
		d := s.delta(c)
		d.Services[s.name()].Scheduling = &snapshot.Scheduling{PreferNear: true}
		for _, sl := range d.Slices {
			for i := range sl.Endpoints {
				sl.Endpoints[i].Zone = []string{"a", "b", "b"}[i]
			}
		}
		world := facts(c)
		world.Node.Zone = zone
		snap := snapshot.New()
		snap.Apply(world)
		snap.Apply(d)
		st, _ := dataplane.Compute(dataplane.Config{NodeName: "node", DetectLocal: clusterCIDR}, snap)
		applyOnly(t, b, st, s)
		shares := map[string][]float64{"a": {4. / 6, 1. / 6, 1. / 6}, "b": {0, 1. / 2, 1. / 2}}[zone]
		for _, f := range ipfamily.All {
			at := s.frontendOf(c, dataplane.ClusterIP, f)
			spray(t, c.Pods, f, at, n)
			got := counted(t, b, f, dataplane.Key{Addr: at.Addr(), Protocol: snapshot.UDP, Port: at.Port()})
			total, x := 0, 0.0
			for i, share := range shares {
				k := got[netip.AddrPortFrom(c.RemotePods[i].IP(f), targetPort)]
				if total += k; share > 0 {
					x += (float64(k) - n*share) * (float64(k) - n*share) / (n * share)
				} else if k != 0 {
					t.Errorf("zone %s, %v: endpoint %d in the other zone got %d connections", zone, f, i, k)
				}
			}
			if t.Logf("zone %s, %v: %v, chi-square %.1f", zone, f, got, x); total != n || x > 20 { // once in 20,000 times
				t.Errorf("zone %s, %v: %d of %d connections", zone, f, total, n)
			}
		}
	}
}
