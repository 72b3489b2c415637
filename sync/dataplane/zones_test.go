package dataplane

import (
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// zoneCandidates are endpoints with some parts each, in zones; sorted by address.
func zoneCandidates(zones []string, parts ...uint32) []candidate {
	out := make([]candidate, len(zones))
	for i, z := range zones {
		a := netip.AddrFrom4([4]byte{10, 244, byte(i >> 8), byte(i)})
		out[i] = candidate{addr: netip.AddrPortFrom(a, 80), Endpoint: &snapshot.Endpoint{Zone: z}, parts: parts[i%len(parts)]}
	}
	return out
}

// TestZonePlan: near endpoints carry their share of the demand, and zones with capacity to spare get the rest.
func TestZonePlan(t *testing.T) {
	for _, c := range []struct {
		title  string
		zone   string
		zones  string
		parts  []uint32
		demand map[string]uint16
		want   string
		counts string
	}{
		{"half of the demand, a quarter of the endpoints", "a", "a b b b", nil, nil, "near 0.50: a 0.50, b 0.50", "3 1 1 1"},
		{"half of the demand, three quarters", "b", "a b b b", nil, nil, "near 1.00: a 0.00, b 1.00", "0 1 1 1"},
		{"by weight", "a", "a b", []uint32{100, 300}, nil, "near 0.50: a 0.50, b 0.50", "1 1"},
		{"as much as it carries", "a", "a b c", nil, nil, "near 1.00: a 1.00, b 0.00, c 0.00", "1 0 0"},
		{"to spare in proportion", "a", "a b b b c c", nil, nil, "near 0.50: a 0.50, b 0.50, c 0.00", "3 1 1 1 0 0"},
		{"demand that is named", "a", "a b b b", nil, map[string]uint16{"a": 1, "b": 3}, "near 1.00: a 1.00, b 0.00",
			"1 0 0 0"},
		{"only one is named", "a", "a a b b", nil, map[string]uint16{"a": 3}, "near 0.67: a 0.67, b 0.33", "2 2 1 1"},
		{"a zone without endpoints", "c", "a a b", nil, nil, "by weight 0.00: a 0.67, b 0.33", "1 1 1"},
		{"with demand", "c", "a a b", nil, map[string]uint16{"c": 2},
			"near 0.00: a 0.83, b 0.17, c 0.00", "5 5 2"},
		{"a zone without demand", "b", "a b", nil, map[string]uint16{"b": 0}, "by weight 0.50: a 0.50, b 0.50", "1 1"},
		{"no zone has demand", "a", "a b", nil, map[string]uint16{"a": 0, "b": 0}, "by weight 0.50: a 0.50, b 0.50", "1 1"},
		{"a zone is unknown", "a", "a -", nil, nil, "near 0.50:  0.50, a 0.50", "1 1"},
		{"only one zone", "a", "a a", []uint32{100, 200}, nil, "near 1.00: a 1.00", "1 2"},
	} {
		if c.parts == nil {
			c.parts = []uint32{100}
		}
		in := zoneCandidates(strings.Fields(strings.ReplaceAll(c.zones, "-", "?")), c.parts...)
		for i := range in {
			in[i].Zone = strings.TrimPrefix(in[i].Zone, "?")
		}
		p := newZonePlan(c.zone, in, c.demand)
		how := "near"
		if p.ByWeight {
			how = "by weight"
		}
		var shares []string
		for _, z := range p.Zones {
			shares = append(shares, fmt.Sprintf("%s %.2f", z.Zone, z.Share))
		}
		if got := fmt.Sprintf("%s %.2f: %s", how, p.Near, strings.Join(shares, ", ")); got != c.want {
			t.Errorf("%s: %s, want %s", c.title, got, c.want)
		}
		if got := strings.Trim(fmt.Sprint(p.divide(in, p.shares(in, partsOf(in)), 1024, 0.5)), "[]"); got != c.counts {
			t.Errorf("%s: counts %s, want %s", c.title, got, c.counts)
		}
	}
}

// randomZones makes endpoints, and the demand of each zone with its sum.
func randomZones(r *rand.Rand) (in []candidate, demand map[string]uint16, all float64) {
	names := []string{"a", "b", "c", "d"}[:1+r.IntN(4)]
	zones, parts := make([]string, 1+r.IntN(1+r.IntN(400))), []uint32{100}
	for i := range zones {
		zones[i] = names[min(r.IntN(len(names)), r.IntN(len(names)))]
	}
	if r.IntN(2) == 0 {
		for range zones {
			parts = append(parts, uint32(100*(1+r.IntN(5))))
		}
	}
	demand = map[string]uint16{}
	for _, z := range names {
		demand[z] = uint16(1 + r.IntN(4))
		all += float64(demand[z])
	}
	return zoneCandidates(zones, parts...), demand, all
}

func partsOf(in []candidate) (parts []uint32) {
	for i := range in {
		parts = append(parts, in[i].parts)
	}
	return parts
}

// TestZonesWithSlowStart: an endpoint that starts slowly gets less of its zone's share, and no other zone gets more.
func TestZonesWithSlowStart(t *testing.T) {
	in := zoneCandidates([]string{"a", "a", "b", "b"}, 100)
	p := newZonePlan("a", in, map[string]uint16{"a": 2, "b": 1})
	if got := fmt.Sprintf("%.3f", p.shares(in, []uint32{100, 300, 200, 200})); got != "[0.188 0.562 0.125 0.125]" {
		t.Errorf("shares %s", got)
	}
}

// TestZonesShareLoad: with the demand that is assumed, each endpoint's load from all zones is the share of its weight:
// within 3 % of it, or over many nodes if shares are too small for slots. As many connections as possible stay near.
func TestZonesShareLoad(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	exact, worst, worstNear, sampled := 0.0, 0.0, 0.0, 0
	for range 60 {
		in, demand, all := randomZones(r)
		limit, parts, zoneParts := max(weightSlots, weightSlotsPerEndpoint*len(in)), 0.0, map[string]float64{}
		for i := range in {
			parts += float64(in[i].parts)
			zoneParts[in[i].Zone] += float64(in[i].parts)
		}
		load, near, wantNear := make([]float64, len(in)), 0.0, 0.0
		several := false
		for zone, n := range demand {
			p, d := newZonePlan(zone, in, demand), float64(n)/all
			wantNear += min(d, zoneParts[zone]/parts)
			nodes, shares := 1, p.shares(in, partsOf(in))
			if fewestCounts(shares, limit) == nil {
				nodes, several = 400, true
			}
			for node := range nodes {
				counts, sum := p.divide(in, shares, limit, nodeOffset(fmt.Sprint("node-", node), PortName{})), 0
				for _, n := range counts {
					sum += n
				}
				if sum > limit+limit/50 {
					t.Fatalf("%d slots, at most %d are allowed", sum, limit)
				}
				for i, n := range counts {
					part := d / float64(nodes) * float64(n) / float64(sum)
					if load[i] += part; in[i].Zone == zone {
						near += part
					}
				}
			}
		}
		worstNear = max(worstNear, math.Abs(near-wantNear))
		for i := range in {
			off := math.Abs(load[i]/(float64(in[i].parts)/parts) - 1)
			if several {
				worst = max(worst, off)
			} else {
				exact = max(exact, off)
			}
		}
		if several {
			sampled++
		}
	}
	t.Logf("off by %.1f %%, with slots by turns %.1f %% (%d of 60 cases); near by %.2f %%", 100*exact, 100*worst, sampled,
		100*worstNear)
	if exact > 0.03 || worst > 0.05 || worstNear > 0.01 || sampled == 0 || sampled == 60 {
		t.Error("off by too much")
	}
}

// TestPreferNear: what a Service with near endpoints has in its pools on a node in the zone a, or another.
func TestPreferNear(t *testing.T) {
	near := func() *snapshot.Scheduling { return &snapshot.Scheduling{PreferNear: true} }
	for _, c := range []struct {
		title  string
		zone   string
		change func(*snapshot.Service, *snapshot.Slice, *Config)
		want   string
	}{
		{"in the small zone", "a", nil, "1:3 2:1 3:1 4:1"},
		{"in the large zone", "b", nil, "2:0 3:0 4:0"},
		{"in another zone", "c", nil, "1:0 2:0 3:0 4:0"},
		{"not asked", "a", func(s *snapshot.Service, _ *snapshot.Slice, _ *Config) { s.Scheduling = nil },
			"1:0 2:0 3:0 4:0"},
		{"hints are ignored", "a", func(_ *snapshot.Service, sl *snapshot.Slice, _ *Config) {
			for i := range sl.Endpoints {
				sl.Endpoints[i].ForZones = []string{sl.Endpoints[i].Zone}
			}
		}, "1:3 2:1 3:1 4:1"},
		{"hints count if the node's zone has no name here", "a", func(s *snapshot.Service, sl *snapshot.Slice, _ *Config) {
			for i := range sl.Endpoints {
				sl.Endpoints[i].ForZones, sl.Endpoints[i].Zone = []string{sl.Endpoints[i].Zone}, ""
			}
		}, "1:0"},
		{"the node's zone is unknown", "", nil, "1:0 2:0 3:0 4:0"},
		{"a hash wins", "a", func(s *snapshot.Service, _ *snapshot.Slice, _ *Config) { s.Scheduling.Scheduler = "hash" },
			"1:0 2:0 3:0 4:0"},
		{"IPVS by turns", "b", func(s *snapshot.Service, _ *snapshot.Slice, cfg *Config) {
			s.Scheduling.Scheduler, cfg.IPVS.Mode = "rr", IPVSAuto
		}, "1:1 2:1 3:1 4:1"},
		{"IPVS by weight", "b", func(s *snapshot.Service, _ *snapshot.Slice, cfg *Config) {
			s.Scheduling.Scheduler, cfg.IPVS.Mode = "wlc", IPVSAuto
		}, "2:1 3:1 4:1"},
		{"one drains", "b", func(_ *snapshot.Service, sl *snapshot.Slice, _ *Config) {
			sl.Endpoints[1].Weight = snapshot.Weight{Given: true}
		}, "3:0 4:0"},
		{"all terminate", "a", func(_ *snapshot.Service, sl *snapshot.Slice, _ *Config) {
			for i := range sl.Endpoints {
				sl.Endpoints[i].Ready, sl.Endpoints[i].Terminating = false, true
			}
		}, "1:3 2:1 3:1 4:1"},
		{"policy Local", "a", func(s *snapshot.Service, sl *snapshot.Slice, _ *Config) { s.InternalLocal = true }, ""},
	} {
		svc := &snapshot.Service{Name: name("web"), ClusterIPs: addrs("10.96.0.1"), Ports: tcp80(0), Scheduling: near()}
		slice := sliceOf("web", "web-1")
		for i, a := range addrs("10.244.9.1 10.244.9.2 10.244.9.3 10.244.9.4") {
			ep := endpoint(a.String(), "here")
			ep.Zone = []string{"a", "b", "b", "b"}[i]
			slice.Endpoints = append(slice.Endpoints, ep)
		}
		cfg := Config{NodeName: "here"}
		if c.change != nil {
			c.change(svc, slice, &cfg)
		}
		s := snapshot.New()
		put(s, svc, slice, snapshot.Node{Name: "here", Zone: c.zone})
		st, _ := Compute(cfg, s)
		port := st.Services[svc.Name].Ports[0]
		if got := poolWeights(port.Cluster); got != c.want {
			t.Errorf("%s: %s, want %s", c.title, got, c.want)
		}
		if len(port.Serving) != 4 {
			t.Errorf("%s: earlier flows may keep %v", c.title, port.Serving)
		}
		if svc.InternalLocal && poolWeights(port.Local) != "1:0 2:0 3:0 4:0" {
			t.Errorf("%s: %s", c.title, poolWeights(port.Local))
		}
	}
}

// poolWeights gives the last byte of each endpoint's address with its weight.
func poolWeights(p *Pool) string {
	var out []string
	for _, ep := range p.Endpoints {
		out = append(out, fmt.Sprintf("%d:%d", ep.Addr().As4()[3], ep.Weight))
	}
	return strings.Join(out, " ")
}

// TestEjectedNearSpills: once a near endpoint is ejected, the others carry less, and what is left goes to other zones.
func TestEjectedNearSpills(t *testing.T) {
	svc := &snapshot.Service{Name: name("web"), ClusterIPs: addrs("10.96.0.1"), Ports: tcp80(0),
		Scheduling: &snapshot.Scheduling{PreferNear: true}}
	slice := sliceOf("web", "web-1")
	for i, a := range addrs("10.244.9.1 10.244.9.2 10.244.9.3 10.244.9.4") {
		ep := endpoint(a.String(), "here")
		ep.Zone = []string{"a", "a", "b", "b"}[i]
		slice.Endpoints = append(slice.Endpoints, ep)
	}
	s := snapshot.New()
	put(s, svc, slice, snapshot.Node{Name: "here", Zone: "a"})
	cfg := Config{NodeName: "here", SecondChance: snapshot.SecondChanceOn}
	for _, c := range []struct {
		unhealthy, want string
		ejected         int
	}{
		{"", "1:0 2:0", 0},
		{"10.244.9.1", "2:4 3:1 4:1", 1}, // a third of the capacity carries two thirds of half of the demand
		{"10.244.9.1 10.244.9.2", "3:0 4:0", 2},
		{"10.244.9.3", "1:0 2:0", 1},
	} {
		h := &snapshot.Health{}
		for _, a := range addrs(c.unhealthy) {
			h.Unhealthy = append(h.Unhealthy, snapshot.Unhealthy{Endpoint: netip.AddrPortFrom(a, 8080),
				Cause: snapshot.Unanswered, Since: time.Unix(1, 0)})
		}
		s.Apply(snapshot.Delta{Health: map[snapshot.Name]*snapshot.Health{svc.Name: h}})
		st, _ := Compute(cfg, s)
		pool := st.Services[svc.Name].Ports[0].Cluster
		if got := poolWeights(pool); got != c.want || len(pool.Ejected) != c.ejected {
			t.Errorf("without %s: %s, want %s; ejected %v", c.unhealthy, got, c.want, pool.Ejected)
		}
		x := Explain(cfg, s, Question{Source: addr("10.244.0.9"), Key: key("10.96.0.1:80")})
		other := 0
		for _, e := range x.Endpoints {
			if e.Reason == ExcludedOtherZone {
				other++
			}
		}
		if x.Zones == nil || x.ZonesIgnored != "" || other != 4-len(pool.Endpoints)-len(pool.Ejected) {
			t.Errorf("without %s: explain has %d endpoints of other zones, %+v", c.unhealthy, other, x)
		}
	}
}

// TestNearEndpointStartsSlowly: the weights that a Service gets by its zones include the slow start of its endpoints.
func TestNearEndpointStartsSlowly(t *testing.T) {
	n := snapshot.Name{Namespace: "a", Name: "web"}
	weights := func(tenths map[int]uint8) (first, second uint16) {
		d := startingDelta(n, &snapshot.Scheduling{PreferNear: true}, 4, tenths)
		for i := range d.Slices[n].Endpoints {
			d.Slices[n].Endpoints[i].Zone = string("aabb"[i])
		}
		d.Node = &snapshot.Node{Name: "n9", Zone: "a"}
		snap := snapshot.New()
		snap.Apply(d)
		st, _ := Compute(Config{}, snap)
		for _, e := range st.Services[n].Ports[0].Cluster.Endpoints {
			switch e.Addr() {
			case startingAddr(0):
				first = max(e.Weight, 1)
			case startingAddr(1):
				second = max(e.Weight, 1)
			}
		}
		return first, second
	}
	if first, second := weights(nil); first != second {
		t.Errorf("weights %d and %d; want equal ones", first, second)
	}
	if first, second := weights(map[int]uint8{1: 2}); second == 0 || second*4 > first {
		t.Errorf("the second endpoint starts with 2 tenths: weights %d and %d", first, second)
	}
}
