package inspect

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab/benchmark"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/nft/kernel"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// fakeCounters are tables in memory whose counters a test sets, and which count what is read. They are asked as an
// Inspector is.
type fakeCounters struct {
	reconcile.Inspector
	tables   ipfamily.Per[nft.Listing]
	revision uint32
	// read counts elements, lists how often a set was listed.
	read, lists int
	failure     error
	// statistics are what IPVS says if somebody asks about what it schedules.
	statistics []dataplane.SchedulerCount
	// scheduled, if not 0, is the number of the Service that IPVS schedules.
	scheduled int
}

func (f *fakeCounters) index(family ipfamily.Family) int {
	if family == ipfamily.IPv6 {
		return 1
	}
	return 0
}

func (f *fakeCounters) Get(family ipfamily.Family, set nft.SetID, keys []nft.Element) ([]nft.Listed, error) {
	f.read += len(keys)
	wanted := map[string]bool{}
	for i := range keys {
		wanted[string(keys[i].Key())] = true
	}
	var out []nft.Listed
	for _, l := range f.tables[f.index(family)].Elements[set] {
		if wanted[string(l.Key())] {
			out = append(out, l)
		}
	}
	return out, f.failure
}

func (f *fakeCounters) List(family ipfamily.Family, set nft.SetID) ([]nft.Listed, bool, error) {
	elements := f.tables[f.index(family)].Elements[set]
	f.read += len(elements)
	f.lists++
	return slices.Clone(elements), true, f.failure
}

func (f *fakeCounters) Revisions() (out ipfamily.Per[nft.Revision], err error) {
	return ipfamily.Per[nft.Revision]{{Number: f.revision}, {Number: f.revision}}, f.failure
}

func (f *fakeCounters) Counters(_ context.Context, ask dataplane.CountersAsked) (*dataplane.Counters, error) {
	c, err := kernel.ReadCounters(f, ask)
	if err == nil && slices.ContainsFunc(ask.Endpoints, func(e dataplane.FrontendCount) bool { return e.Scheduled }) {
		c.Scheduled = f.statistics
	}
	return c, err
}

// count adds to the counters of the elements whose texts hold a text.
func (f *fakeCounters) count(set nft.SetID, text string, n uint64) {
	for i, family := range ipfamily.All {
		s := nft.SetByID(set)
		for k := range f.tables[i].Elements[set] {
			if l := &f.tables[i].Elements[set][k]; strings.Contains(l.Element.Text(family, &s), text) {
				l.Packets += n
			}
		}
	}
}

// countSlot adds to the counter of a slot of the pool that the frontend of a text leads to.
func (f *fakeCounters) countSlot(set nft.SetID, text string, slot uint32, n uint64) {
	for i, family := range ipfamily.All {
		s, pools := nft.SetByID(set), map[uint32]bool{}
		for k := range f.tables[i].Elements[set] {
			if l := &f.tables[i].Elements[set][k]; strings.Contains(l.Element.Text(family, &s), text) {
				pools[l.PoolID()] = true
			}
		}
		for k := range f.tables[i].Elements[nft.Endpoints] {
			if l := &f.tables[i].Elements[nft.Endpoints][k]; pools[l.ID()] && l.Slot() == slot {
				l.Packets += n
			}
		}
	}
}

// services puts Services with two endpoints each into the tables; the first is sticky, the second Local to clients from
// outside.
func (f *fakeCounters) services(n int) {
	snap := snapshot.New()
	d := snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{}, Slices: map[snapshot.Name]*snapshot.Slice{}}
	for i := range n {
		name := snapshot.Name{Namespace: "team", Name: fmt.Sprintf("web-%d", i)}
		svc := &snapshot.Service{Name: name, ClusterIPs: []netip.Addr{benchmark.ClusterIP(i)},
			Ports: []snapshot.Port{{Name: "http", Protocol: snapshot.TCP, Port: 80}}}
		switch i {
		case 0:
			svc.Affinity = time.Hour
		case 1:
			svc.ExternalLocal, svc.ExternalIPs = true, []netip.Addr{netip.MustParseAddr("203.0.113.1")}
		case 3:
			svc.Limits.Open, svc.ExternalIPs = 9, []netip.Addr{netip.MustParseAddr("203.0.113.2")}
		case f.scheduled:
			svc.Scheduling = &snapshot.Scheduling{Scheduler: "lc"}
		}
		sl := &snapshot.Slice{Name: name, Service: name.Name, Ports: []snapshot.SlicePort{{Name: "http",
			Protocol: snapshot.TCP, Port: 8080}}}
		for e := range 2 {
			sl.Endpoints = append(sl.Endpoints, snapshot.Endpoint{Addr: benchmark.EndpointAddr(2*i + e),
				Node: []string{"here", "there"}[e], Ready: true, Serving: true})
		}
		d.Services[name], d.Slices[name] = svc, sl
	}
	snap.Apply(d)
	st, _ := dataplane.Compute(dataplane.Config{NodeName: "here", IPVS: dataplane.IPVS{Mode: dataplane.IPVSAuto}}, snap)
	f.tables = nft.List(st)
	for i := range f.tables {
		for set, elements := range f.tables[i].Elements {
			for k := range elements {
				elements[k].Counted = nft.SetByID(nft.SetID(set)).Counter
			}
		}
	}
	f.revision++
}

// fakeClock is a time that a test moves.
type fakeClock struct{ time.Time }

func (c *fakeClock) now() time.Time { return c.Time }

func newFakeSampler(services int) (*fakeCounters, *Sampler, *fakeClock) {
	f := &fakeCounters{}
	f.services(services)
	c := &fakeClock{time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)}
	s := NewSampler(f)
	s.now = c.now
	return f, s, c
}

// TestTopRates: what is counted between two samples is a rate, of frontends and endpoints, inside and outside, sticky
// or not.
func TestTopRates(t *testing.T) {
	f, s, clock := newFakeSampler(4)
	all := []string{"team/web-0:http", "team/web-1:http", "team/web-2:http"}
	sample := func() *Sample {
		t.Helper()
		labtest.Check(t, s.Sample(t.Context(), nil, all, time.Second, false))
		out := s.Result(ByRate, time.Second)
		for i := range out.Ports {
			s.Details(&out.Ports[i], ByRate)
		}
		return out
	}
	sample()
	clock.Time = clock.Add(2 * time.Second)
	f.count(nft.Services, "web-0", 20)
	f.count(nft.StickyEndpoints, "10.128.0.1 ", 20)
	f.count(nft.Services, "web-1", 4)
	f.count(nft.OutsideServices, "web-1", 6)
	f.countSlot(nft.Services, "web-1", 1, 4)
	f.countSlot(nft.OutsideServices, "web-1", 0, 6)
	f.count(nft.LimitedPools, "web-3", 8)
	out := sample()
	var got []string
	for _, p := range out.Ports {
		line := fmt.Sprintf("%s %.1f %d %d:", p.Name, p.Rate, p.Total, p.Choices)
		if p.OverLimit != nil {
			line += fmt.Sprint(" over limits ", *p.OverLimit)
		}
		for _, e := range p.Endpoints {
			line += fmt.Sprintf(" %s %.1f %d", e.Address, e.Rate, e.Total)
		}
		got = append(got, line)
	}
	want := []string{"team/web-0:http 10.0 20 2: 10.128.0.1 10.0 20 10.128.0.0 0.0 0",
		"team/web-1:http 5.0 10 2: 10.128.0.2 3.0 6 10.128.0.3 2.0 4",
		"team/web-2:http 0.0 0 2: 10.128.0.4 0.0 0 10.128.0.5 0.0 0", "team/web-3:http 0.0 0 2: over limits {4 8}"}
	if !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if out.Rate != 15 {
		t.Errorf("%v connections a second", out.Rate)
	}
	// An element that is replaced begins at 0.
	clock.Time = clock.Add(time.Second)
	f.services(4)
	f.count(nft.Services, "web-0", 3)
	if p := sample().Ports[0]; p.Name != "team/web-0:http" || p.Rate != 3 || p.Total != 3 {
		t.Errorf("after a change: %+v", p)
	}
	// A Service that goes is forgotten, one that comes is seen.
	f.services(2)
	if out := sample(); len(out.Ports) != 2 {
		t.Errorf("%d ports are left", len(out.Ports))
	}
	f.failure = errors.New("gone")
	if err := s.Sample(t.Context(), nil, nil, time.Second, false); err == nil {
		t.Error("an error got lost")
	}
}

// TestTopBounded: of many frontends only some are read each time; those on the screen each time, every other one in its
// turn.
func TestTopBounded(t *testing.T) {
	const services = 10000
	f, s, clock := newFakeSampler(services)
	visible := []string{"team/web-7:http", "team/web-9:http"}
	labtest.Check(t, s.Sample(t.Context(), visible, nil, time.Second, false))
	const (
		health = 2            // in each family the few endpoints that are unhealthy
		sets   = 2*8 + health // in each family the frontends' six maps, the pools, and those with limits
	)
	if f.lists != sets || f.read > 2*services+10 {
		t.Errorf("at first %d lists, %d elements", f.lists, f.read)
	}
	f.count(nft.Services, "team/web-7:", 5)
	f.count(nft.Services, "team/web-9999:", 7)
	for range 2*services/keysPerSecond + 1 { // each has a pool of its own
		f.read, f.lists = 0, 0
		clock.Time = clock.Add(time.Second)
		labtest.Check(t, s.Sample(t.Context(), visible, nil, time.Second, false))
		if f.lists != health || f.read > keysPerSecond {
			t.Errorf("then %d lists, %d elements", f.lists, f.read)
		}
		if m := s.ports[visible[1]].frontends[0]; !m.measured || m.at != clock.Time {
			t.Errorf("a visible port was not read: %+v", m)
		}
	}
	for _, m := range s.frontends {
		if !m.measured {
			t.Fatalf("%s was never read again", m.name())
		}
	}
	if _, total := s.ports["team/web-9999:http"].sum(); total != 7 {
		t.Errorf("the last one has %d", total)
	}
	// New ones are seen after a while.
	f.services(services + 1)
	f.lists = 0
	labtest.Check(t, s.Sample(t.Context(), visible, nil, time.Second, false))
	before := f.lists
	clock.Time = clock.Add(relistAfter)
	labtest.Check(t, s.Sample(t.Context(), visible, nil, time.Second, false))
	if before != health || f.lists != 2*health+sets || len(s.ports) != services+1 {
		t.Errorf("%d, then %d lists, and %d ports", before, f.lists, len(s.ports))
	}
}

// TestTopView: what is on the screen, and what keys do.
func TestTopView(t *testing.T) {
	v := NewTopView("node-1", ByRate, 2*time.Second)
	v.Width, v.Height = 64, 12
	s := terminal.NewPrinter(io.Discard)
	screen := func() string { return strings.Join(v.Render(s), "\n") + "\n" }
	if got := screen(); !strings.Contains(got, "reading") || strings.Count(got, "\n") != v.Height {
		t.Errorf("before the first sample:\n%s", got)
	}
	sample := &Sample{Interval: 2, Rate: 1500.5}
	for i := range 30 {
		sample.Ports = append(sample.Ports, PortSample{Name: fmt.Sprintf("team/web-%02d:http", i),
			Rate:  math.Max(0, 1234-float64(i*300)),
			Total: uint64(40000 - i), Choices: i % 3})
	}
	sample.Ports[1].Endpoints = []EndpointSample{{socket: socketOf(netip.MustParseAddrPort("10.244.1.1:8080")), Rate: 700,
		Total: 1000}, {socket: socketOf(netip.MustParseAddrPort("10.244.1.2:8080")), Rate: 234, Total: 900}}
	v.Show(sample, nil)
	v.Key("j")
	v.Key("enter")
	want := `verdict top  node-1  by rate, every 2s  1,501 conn/s  5 of 30 po

    CONN/S         TOTAL  ENDPOINTS  SERVICE
     1,234        40,000       none    team/web-00:http
     934.0        39,999          1  > team/web-01:http
     700.0         1,000        75%      10.244.1.1:8080
     234.0           900        25%      10.244.1.2:8080
     634.0        39,998          2    team/web-02:http
     334.0        39,997       none    team/web-03:http
      34.0        39,996          1    team/web-04:http
         0        39,995          2    team/web-05:http
q quit  ? help  / filter  s sort  enter endpoints
`
	if got := screen(); got != want {
		t.Errorf("the screen shows\n%s", got)
	}
	for _, test := range []struct{ keys, cursor, top string }{
		{"G", "team/web-29:http", "team/web-22:http"}, {"g", "team/web-00:http", "team/web-00:http"}, {"pagedown",
			"team/web-07:http", "team/web-02:http"},
		{"up", "team/web-06:http", "team/web-02:http"}, {"pageup pageup", "team/web-00:http", "team/web-00:http"},
	} {
		for _, k := range strings.Fields(test.keys) {
			v.Key(k)
		}
		got := screen()
		if v.cursor != test.cursor || v.ports()[v.first].Name != test.top || !strings.Contains(got, "> "+test.cursor) {
			t.Errorf("after %s: at %s, from %s on\n%s", test.keys, v.cursor, v.ports()[v.first].Name, got)
		}
	}
	for range Orders {
		v.Key("s")
	}
	if v.order != ByRate || !v.Key("q") || v.Key("x") {
		t.Errorf("sorted by %s", v.order)
	}
	sample.Ports[0].NotCounted, sample.Ports[0].OverLimit = true, &OverLimitSample{Rate: 2.5, Total: 1000}
	if got := screen(); !strings.Contains(got, "\n"+notByWishMany) || !strings.Contains(got, " -             - ") ||
		!strings.Contains(got, "team/web-00:http  1,000 o") {
		t.Errorf("not a word about who does not want to be counted:\n%s", got)
	}
	sample.Counted = dataplane.CountedNothing
	if got := screen(); !strings.Contains(got, "\nnothing is counted") {
		t.Errorf("not a word about counters:\n%s", got)
	}
	v.Show(nil, errors.New("the kernel says no"))
	v.Width, v.Height = 20, 3
	if got := screen(); !strings.Contains(got, "the kernel says no") || strings.Count(got, "\n") != 3 {
		t.Errorf("after an error, on a small screen:\n%s", got)
	}
}

// TestTopFilter: a filter shows some ports, help explains the keys, and a narrow screen keeps the names.
func TestTopFilter(t *testing.T) {
	v := NewTopView("node-1", ByName, time.Second)
	s := terminal.NewPrinter(io.Discard)
	screen := func() string { return strings.Join(v.Render(s), "\n") + "\n" }
	press := func(keys ...string) {
		for _, k := range keys {
			if v.Key(k) {
				t.Errorf("%q ends top", k)
			}
		}
	}
	ports := []PortSample{{Name: "shop/cart:grpc", Total: 5}, {Name: "shop/web:http"}, {Name: "kube/dns:q"}}
	v.Show(&Sample{Ports: ports}, nil)
	press("/", "q", "\x7f", "s", "h", "o", "p")
	if got := screen(); strings.Contains(got, "kube/dns") || !strings.Contains(got, "> shop/cart") ||
		!strings.Contains(got, "/shop_") {
		t.Errorf("while typing:\n%s", got)
	}
	press("enter", "j")
	if got := screen(); !strings.Contains(got, "> shop/web") || v.order != ByName {
		t.Errorf("with the filter:\n%s", got)
	}
	press("/", "x")
	if got := screen(); strings.Contains(got, "shop/web:http") {
		t.Errorf("no port has this name:\n%s", got)
	}
	press("esc")
	if got := screen(); !strings.Contains(got, "kube/dns") {
		t.Errorf("without the filter:\n%s", got)
	}
	v.Width = 40
	if got := screen(); !strings.Contains(got, "shop/cart:grpc") || strings.Contains(got, "TOTAL") {
		t.Errorf("at 40 columns:\n%s", got)
	}
	press("?")
	if got := screen(); !strings.Contains(got, "sort by rate") || strings.Contains(got, "shop/") {
		t.Errorf("help:\n%s", got)
	}
	for line := range strings.Lines(screen()) {
		if len(strings.TrimSuffix(line, "\n")) > v.Width {
			t.Errorf("%q is wider than the screen", line)
		}
	}
	press("?")
	if got := screen(); !strings.Contains(got, "shop/web") {
		t.Errorf("after help:\n%s", got)
	}
	press("/", "w", "e", "b", "enter", "?", "esc")
	if got := screen(); !strings.Contains(got, "shop/web") || strings.Contains(got, "shop/cart") {
		t.Errorf("esc in the help does more than close it:\n%s", got)
	}
	press("esc")
	if got := screen(); !strings.Contains(got, "shop/cart") {
		t.Errorf("esc does not remove the filter:\n%s", got)
	}
}

// TestTopNames: a Service is known by its name, whatever words that holds; what has no name is known by its address.
func TestTopNames(t *testing.T) {
	f, s, _ := newFakeSampler(2)
	for i := range f.tables {
		for _, set := range nft.FrontendSets() {
			for n := range f.tables[i].Elements[set] {
				if l := &f.tables[i].Elements[set][n]; l.Comment == "team/web-0:http" {
					l.Comment = "default/tcp-echo:http"
				} else {
					l.Comment = ""
				}
			}
		}
	}
	labtest.Check(t, s.Sample(t.Context(), nil, nil, time.Second, true))
	var got []string
	for _, p := range s.Result(ByName, time.Second).Ports {
		got = append(got, p.Name+"|"+p.Service+"|"+p.Port)
	}
	want := []string{"10.0.0.1:80/tcp|10.0.0.1:80/tcp|", "203.0.113.1:80/tcp|203.0.113.1:80/tcp|",
		"default/tcp-echo:http|default/tcp-echo|http"}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}
