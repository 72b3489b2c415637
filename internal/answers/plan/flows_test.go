package plan

import (
	"bytes"
	"flag"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

var update = flag.Bool("update", false, "write the goldens anew")

// TestFlowsText: what becomes of open connections is told in words, for each kind of change.
func TestFlowsText(t *testing.T) {
	b := newBed(t, 1)
	n := snapshot.Name{Namespace: "shop", Name: "web"}
	svc := &snapshot.Service{Name: n, Affinity: time.Hour, Ports: []snapshot.Port{
		{Name: "http", Protocol: snapshot.TCP, Port: 80}, {Name: "dns", Protocol: snapshot.UDP, Port: 53}},
		ClusterIPs:      []netip.Addr{lab.Nth(lab.ServiceRange[0], 1)},
		LoadBalancerIPs: []netip.Addr{lab.Nth(lab.ExternalRange[0], 1)}}
	slice := func(pods ...*lab.Host) *snapshot.Slice {
		sl := &snapshot.Slice{Name: snapshot.Name{Namespace: "shop", Name: "web-1"}, Service: "web",
			Ports: []snapshot.SlicePort{{Name: "http", Protocol: snapshot.TCP, Port: 5353},
				{Name: "dns", Protocol: snapshot.UDP, Port: 5353}}}
		for _, pod := range pods {
			sl.Endpoints = append(sl.Endpoints, snapshot.Endpoint{Addr: pod.IP4, Node: "node2", Ready: true, Serving: true})
		}
		return sl
	}
	services := func(s *snapshot.Service) map[snapshot.Name]*snapshot.Service {
		return map[snapshot.Name]*snapshot.Service{n: s}
	}
	slices := func(s *snapshot.Slice) map[snapshot.Name]*snapshot.Slice {
		return map[snapshot.Name]*snapshot.Slice{{Namespace: "shop", Name: "web-1"}: s}
	}
	b.apply(snapshot.Delta{Services: services(svc), Slices: slices(slice(b.RemotePods[0]))})
	for _, c := range []struct {
		from *lab.Host
		to   netip.Addr
		n    int
	}{{b.Outside, svc.LoadBalancerIPs[0], 3}, {b.Node2, svc.LoadBalancerIPs[0], 1}, {b.Pods[0], svc.ClusterIPs[0], 2}} {
		for range c.n {
			for _, p := range svc.Ports {
				_, r := c.from.Open(p.Protocol, netip.AddrPortFrom(c.to, p.Port), lab.Options{})
				if r.Outcome != lab.Answered {
					t.Fatal(r)
				}
			}
		}
	}
	other := slices(slice(b.RemotePods[1]))
	drains, ranges, local := *svc, *svc, *svc
	drains.Drain = 30 * time.Second
	ranges.SourceRanges = []netip.Prefix{lab.NodeRange[0]}
	local.ExternalLocal = true
	var out bytes.Buffer
	for _, change := range []struct {
		what string
		snapshot.Delta
	}{
		{"another endpoint", snapshot.Delta{Slices: other}},
		{"another endpoint, and a deadline", snapshot.Delta{Services: services(&drains), Slices: other}},
		{"one more endpoint", snapshot.Delta{Slices: slices(slice(b.RemotePods...))}},
		{"no endpoint", snapshot.Delta{Slices: slices(slice())}},
		{"source ranges", snapshot.Delta{Services: services(&ranges)}},
		{"source ranges and another endpoint", snapshot.Delta{Services: services(&ranges), Slices: other}},
		{"policy Local", snapshot.Delta{Services: services(&local)}},
		{"deleted", snapshot.Delta{Services: services(nil)}},
	} {
		p, _ := b.plan(change.Delta)
		out.WriteString("=== " + change.what + "\n")
		p.Print(terminal.NewPrinter(&out), TextOptions{})
	}
	const golden = "testdata/flows.txt"
	if *update {
		labtest.Check(t, os.WriteFile(golden, out.Bytes(), 0o644))
	}
	want, err := os.ReadFile(golden)
	labtest.Check(t, err)
	if out.String() != string(want) {
		t.Errorf("not as in %s (-update writes it anew):\n%s", golden, labtest.FirstDifference(out.String(), string(want)))
	}
}
