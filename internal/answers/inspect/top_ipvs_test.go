package inspect

import (
	"io"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestTopIPVS: of a Service that IPVS schedules, top shows what IPVS says: connections, traffic, weights.
func TestTopIPVS(t *testing.T) {
	f, s, clock := newFakeSampler(4)
	f.scheduled = 2
	f.services(4)
	key := dataplane.Key{Addr: netip.MustParseAddr("10.0.0.2"), Protocol: snapshot.TCP, Port: 80}
	f.statistics = []dataplane.SchedulerCount{
		{Frontend: key, SchedulerStatistics: dataplane.SchedulerStatistics{
			Connections: 30, BytesIn: 4000, ByteRateIn: 1500, ByteRateOut: 2_340_000}},
		{Frontend: key, Endpoint: netip.MustParseAddrPort("10.128.0.4:8080"), Weight: 3, Active: 1200, Inactive: 2,
			SchedulerStatistics: dataplane.SchedulerStatistics{Connections: 10}},
		{Frontend: key, Endpoint: netip.MustParseAddrPort("10.128.0.5:8080"), Active: 5,
			SchedulerStatistics: dataplane.SchedulerStatistics{Connections: 20, ByteRateOut: 999}},
	}
	all := []string{"team/web-2:http", "team/web-3:http"}
	labtest.Check(t, s.Sample(t.Context(), nil, all, time.Second, true))
	f.count(nft.Services, "web-2", 8)
	f.statistics[1].Connections += 8
	clock.Time = clock.Add(2 * time.Second)
	labtest.Check(t, s.Sample(t.Context(), nil, all, time.Second, true))
	v := NewTopView("node-1", ByName, time.Second)
	v.Width, v.Height = 100, 12
	v.expanded["team/web-2:http"] = true
	v.Show(s.Detailed(v.order, v.interval, v.expanded), nil)
	screen := strings.Join(v.Render(terminal.NewPrinter(io.Discard)), "\n")
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
	out := s.Result(ByName, time.Second)
	s.Details(&out.Ports[2], ByName)
	if p := out.Ports[2]; !p.Scheduled || p.Scheduler == nil || p.Scheduler.Inactive != 2 ||
		p.Scheduler.BytesIn != 4000 || p.Endpoints[0].Scheduler.Weight != 3 {
		t.Errorf("%+v", p)
	}
}
