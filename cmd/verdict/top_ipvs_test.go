package main

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/ipvsplugin"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// TestTopIPVS: of a Service that IPVS schedules, top shows what IPVS says: connections, traffic, weights.
func TestTopIPVS(t *testing.T) {
	f, s, clock := newFakeSampler(4)
	f.scheduled = 2
	f.services(4)
	vs := ipvsplugin.ServiceStatistics{Statistics: ipvsplugin.Statistics{Connections: 30, BytesIn: 4000, ByteRateIn: 1500, ByteRateOut: 2_340_000},
		Destinations: []ipvsplugin.DestinationStatistics{
			{AddrPort: netip.MustParseAddrPort("10.128.0.4:8080"), Weight: 3, Active: 1200, Inactive: 2, Statistics: ipvsplugin.Statistics{Connections: 10}},
			{AddrPort: netip.MustParseAddrPort("10.128.0.5:8080"), Active: 5, Statistics: ipvsplugin.Statistics{Connections: 20, ByteRateOut: 999}},
		}}
	s.ipvs = func(k dataplane.Key) (ipvsplugin.ServiceStatistics, bool, error) {
		return vs, k.String() == "10.0.0.2:80/tcp", nil
	}
	all := []string{"team/web-2:http", "team/web-3:http"}
	labtest.Check(t, s.sample(nil, all, time.Second, true))
	f.count(nft.Services, "web-2", 8)
	vs.Destinations[0].Connections += 8
	clock.Time = clock.Add(2 * time.Second)
	labtest.Check(t, s.sample(nil, all, time.Second, true))
	v := newTopView("node-1", byName, time.Second)
	v.width, v.height = 100, 12
	v.expanded["team/web-2:http"] = true
	v.show(s.detailed(v), nil)
	screen := strings.Join(v.render(&show{}), "\n")
	for _, want := range []string{
		"       4.0             8       ipvs    team/web-2:http  1,205 open, in 1.5 kB/s, out 2.3 MB/s\n",
		"       4.0            18       100%      10.128.0.4:8080  weight 3, 1,200 open, in 0 B/s, out 0 B/s\n",
		"         0            20         0%      10.128.0.5:8080  draining, 5 open, in 0 B/s, out 999 B/s\n",
		"         0             0          2    team/web-3:http\n",
	} {
		if !strings.Contains(screen, want) {
			t.Errorf("the screen shows\n%s\nwant\n%s", screen, want)
		}
	}
	out := s.result(byName, time.Second)
	s.details(&out.Ports[2], byName)
	if p := out.Ports[2]; !p.Scheduled || p.IPVS == nil || p.IPVS.Inactive != 2 || p.IPVS.BytesIn != 4000 || p.Endpoints[0].IPVS.Weight != 3 {
		t.Errorf("%+v", p)
	}
}
