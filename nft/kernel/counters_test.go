package kernel

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// openCounters gives the counters of a host.
func openCounters(t testing.TB, h *lab.Host) *Counters {
	t.Helper()
	var c *Counters
	labtest.Check(t, h.Do(func() (err error) {
		c, err = OpenCounters()
		return err
	}))
	t.Cleanup(func() { c.Close() })
	return c
}

// counterKey tells counters of endpoints apart.
type counterKey struct {
	place    dataplane.Place
	endpoint netip.AddrPort
}

// counts reads everything there is, by listing and by key, which must be the same.
type counts struct {
	frontends map[dataplane.Counted]dataplane.FrontendCount
	endpoints map[counterKey]dataplane.EndpointCount
	refused   map[dataplane.Refusal]uint64
}

func countAll(t testing.TB, c *Counters, st *dataplane.State) counts {
	t.Helper()
	out := counts{
		map[dataplane.Counted]dataplane.FrontendCount{},
		map[counterKey]dataplane.EndpointCount{},
		map[dataplane.Refusal]uint64{},
	}
	labtest.Check(t, c.AllFrontends(func(f dataplane.FrontendCount) { out.frontends[f.Counted] = f }))
	byKey := map[dataplane.Counted]dataplane.FrontendCount{}
	labtest.Check(t,
		c.Frontends(slices.Collect(maps.Keys(out.frontends)), func(f dataplane.FrontendCount) { byKey[f.Counted] = f }))
	if !maps.Equal(out.frontends, byKey) {
		t.Errorf("listed %v, read by key %v", out.frontends, byKey)
	}
	members := func(at dataplane.Counted) (out []netip.AddrPort) {
		for _, svc := range st.Services {
			for _, sp := range svc.Ports {
				for i := range sp.Frontends {
					if fe := &sp.Frontends[i]; fe.Key == at.Key {
						pool := fe.Route(dataplane.Node).Pool
						if at.Outside {
							pool = fe.Route(dataplane.Anyone).Pool
						}
						for _, ep := range pool.Endpoints {
							out = append(out, ep.AddrPort)
						}
					}
				}
			}
		}
		return out
	}
	labtest.Check(t, c.Endpoints(slices.Collect(maps.Values(out.frontends)), members, func(e dataplane.EndpointCount) {
		key := counterKey{e.Place, e.Endpoint}
		if _, again := out.endpoints[key]; again {
			t.Errorf("%+v is there twice", e)
		}
		out.endpoints[key] = e
	}))
	refused, err := c.Refused()
	labtest.Check(t, err)
	for _, r := range refused {
		out.refused[r.Refusal] += r.Packets
	}
	return out
}

// TestCountersOfNothing: without tables there is nothing to count, and no error.
func TestCountersOfNothing(t *testing.T) {
	h, _ := host(t)
	c := openCounters(t, h)
	got := countAll(t, c, &dataplane.State{})
	for r, n := range got.refused {
		if n != 0 {
			t.Errorf("%v: %d", r, n)
		}
	}
	affinity, err := c.Remembered("affinity", time.Second)
	if len(got.frontends)+len(got.endpoints) > 0 || affinity != (ipfamily.Per[int]{}) || err != nil {
		t.Errorf("%+v, affinity %v, %v", got, affinity, err)
	}
}

// TestCountersOfEverything: every frontend and endpoint of a random cluster is found, and the backend knows how full
// its sets are.
func TestCountersOfEverything(t *testing.T) {
	h, b := host(t)
	st, _ := dataplane.Compute(configs["cluster CIDR"], cluster(rand.New(rand.NewPCG(4, 4)), 40, true))
	if b.Fill() != nil {
		t.Error("something is full before anything was written")
	}
	apply(t, b, st)
	got := countAll(t, openCounters(t, h), st)
	want := 0
	for _, svc := range st.Services {
		for _, sp := range svc.Ports {
			for i := range sp.Frontends {
				fe := &sp.Frontends[i]
				want++
				c, ok := got.frontends[dataplane.Counted{Key: fe.Key}]
				if !ok || c.Endpoints != len(fe.Route(dataplane.Node).Pool.Endpoints) || c.Packets != 0 {
					t.Errorf("%v: %+v, %v", fe.Key, c, ok)
				}
				if outside := fe.Route(dataplane.Anyone).Pool; outside != fe.Route(dataplane.Node).Pool {
					c, ok := got.frontends[dataplane.Counted{Key: fe.Key, Outside: true}]
					if ok && c.Endpoints != len(outside.Endpoints) {
						t.Errorf("%v from outside: %+v", fe.Key, c)
					}
				}
			}
		}
	}
	if want == 0 {
		t.Fatal("there is no frontend")
	}
	listed, err := b.List()
	labtest.Check(t, err)
	for i, fill := range b.Fill() {
		for set, f := range fill {
			if n := len(listed[i].Elements[set]); nft.SetID(set).IsContent() && f.Elements != n {
				t.Errorf("%s %s has %d elements; the kernel lists %d", ipfamily.All[i].NFT(), nft.SetID(set), f.Elements, n)
			}
		}
	}
	labtest.Check(t, b.Remove())
	if b.Fill() != nil {
		t.Error("something is full after everything was removed")
	}
}

// connections are as many as there should be: one packet for each.
func connections(t *testing.T, from *lab.Host, to netip.AddrPort, n int, want lab.Outcome) {
	t.Helper()
	for range n {
		if r := dialAsExpected(from, snapshot.TCP, to, want); r.Outcome != want {
			t.Errorf("%s -> %s: %v; want %v", from.Name, to, r, want)
		}
	}
}

// TestCountersCount opens connections of every kind, and finds them in the counters.
func TestCountersCount(t *testing.T) {
	for _, affinity := range []time.Duration{0, time.Hour} {
		t.Run(fmt.Sprintf("affinity %v", affinity), func(t *testing.T) {
			c, _, s, st := one(t, both, func(svc *snapshot.Service) {
				svc.Affinity, svc.ExternalLocal = affinity, true
				svc.SourceRanges = []netip.Prefix{netip.MustParsePrefix("198.51.100.7/32"), lab.NodePodRange[0]}
			})
			counters := openCounters(t, c.Node)
			clusterIP, external := s.frontendOf(c, dataplane.ClusterIP, ipfamily.IPv4), s.frontendOf(c, dataplane.ExternalIP,
				ipfamily.IPv4)
			balancer := s.frontendOf(c, dataplane.LoadBalancerIP, ipfamily.IPv4)
			connections(t, c.Pods[2], clusterIP, 12, lab.Answered)
			connections(t, c.Outside, external, 6, lab.Answered)
			connections(t, c.Node2, balancer, 1, lab.TimedOut)
			connections(t, c.Outside, balancer, 2, lab.Answered)
			connections(t, c.Pods[2], netip.AddrPortFrom(clusterIP.Addr(), 9), 3, lab.Refused)
			connections(t, c.Pods[2], netip.AddrPortFrom(lab.Nth(lab.ServiceRange[0], 99), 80), 1, lab.TimedOut)

			got := countAll(t, counters, st)
			expectCounts(t, got, affinity > 0, map[string]uint64{
				clusterIP.String(): 12, external.String() + " outside": 6, balancer.String() + " outside": 2,
			})
			for r, want := range map[dataplane.Refusal]uint64{
				dataplane.RefusedSourceRanges: 1, dataplane.RefusedUnusedPort: 3, dataplane.RefusedUnallocated: 1,
			} {
				// A packet that is dropped in silence may be sent again.
				if n := got.refused[r]; n < want || n > want && r.Verdict() != dataplane.Drop {
					t.Errorf("%v: %d packets; want %d", r, n, want)
				}
			}
			clients, err := counters.Remembered("affinity", time.Second)
			labtest.Check(t, err)
			want := 0
			if affinity > 0 {
				want = 2 // the pod in one pool, the client from outside in the other
			}
			if clients != (ipfamily.Per[int]{want, 0}) {
				t.Errorf("%v clients are remembered; want %d", clients, want)
			}
			// Kernels before 6.16 do not tell.
			n, err := counters.countRemembered(ipfamily.IPv4, nft.Affinity, time.Now().Add(time.Minute))
			if n != want || err != nil {
				t.Errorf("%d clients are listed, %v; want %d", n, err, want)
			}
			if n, err := counters.countRemembered(ipfamily.IPv4, nft.Affinity, time.Now()); n != -1 || err != nil {
				t.Errorf("without patience: %d clients, %v; want it to be given up", n, err)
			}
			if again := countAll(t, counters, st); !maps.Equal(again.frontends, got.frontends) {
				t.Errorf("after that: %v; want %v", again.frontends, got.frontends)
			}
		})
	}
}

// TestCountsGoOn: when an endpoint comes or goes, the frontends' elements are replaced and go on counting, also if
// another process does it. With the first endpoint they count anew, as refused packets are no connections; so they do
// when the last one goes.
func TestCountsGoOn(t *testing.T) {
	none, two := endpointState{"none", nil, nil}, endpointState{"two", []condition{ready, ready}, nil}
	steps := []struct {
		state endpointState
		want  uint64
	}{{none, 3}, {two, 3}, {both, 6}, {two, 9}, {none, 3}, {both, 3}}
	for name, change := range map[string]func(*snapshot.Service){
		"class in frontends": func(svc *snapshot.Service) { svc.ExternalIPs = nil }, "class in pools": asIs,
	} {
		for _, restart := range []bool{false, true} {
			if restart && name == "class in pools" {
				continue // whose frontends stay as they are, and a process that begins does not know what was before
			}
			t.Run(fmt.Sprintf("%s, restart %v", name, restart), func(t *testing.T) {
				c, b, s, _ := one(t, none, change)
				counters, to := openCounters(t, c.Node), s.frontendOf(c, dataplane.ClusterIP, ipfamily.IPv4)
				at := dataplane.Counted{Key: dataplane.Key{Addr: to.Addr(), Protocol: snapshot.TCP, Port: to.Port()}}
				for _, step := range steps {
					if s.state = step.state; restart {
						b = open(t, c.Node, Options{})
					}
					st := oneState(c, s, change)
					_, err := b.ApplyAll(st, dataplane.Change{Services: []snapshot.Name{s.name()}})
					labtest.Check(t, err)
					answer := lab.Answered
					if step.state.name == none.name {
						answer = lab.Refused
					}
					connections(t, c.Pods[2], to, 3, answer)
					if n := countAll(t, counters, st).frontends[at].Packets; n != step.want {
						t.Errorf("endpoints %s: %d connections are counted, want %d", step.state.name, n, step.want)
					}
				}
			})
		}
	}
}

// expectCounts compares what was counted at frontends, and that it adds up at the endpoints.
func expectCounts(t *testing.T, got counts, sticky bool, want map[string]uint64) {
	t.Helper()
	var total, atEndpoints uint64
	for at, f := range got.frontends {
		name := netip.AddrPortFrom(at.Key.Addr, at.Key.Port).String()
		if at.Outside {
			name += " outside"
		}
		if at.Key.Protocol != snapshot.TCP {
			name = ""
		}
		if f.Packets != want[name] || f.Sticky != sticky {
			t.Errorf("%+v; want %d packets", f, want[name])
		}
		total += f.Packets
	}
	for _, e := range got.endpoints {
		atEndpoints += e.Packets
	}
	if atEndpoints != total {
		t.Errorf("%d connections at frontends, %d at endpoints", total, atEndpoints)
	}
}
