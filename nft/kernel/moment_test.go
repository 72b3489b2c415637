package kernel

import (
	"flag"
	"fmt"
	"regexp"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

var allChanges = flag.Bool("changes.all", false, "make all changes under clients, and not two of five")

// underLoad returns how many of so many changes a test makes while clients connect. Of ten clients that all of them
// would lose, two fifths lose one 98 times of 100.
func underLoad(all int) int {
	if *allChanges {
		return all
	}
	return all * 2 / 5
}

// moment is a change of a Service, forth and back, between two versions that both answer.
type moment struct {
	name string
	// first are the endpoints in the first version; in the second, there are both.
	first endpointState
	// second makes the other differences.
	second func(*snapshot.Service)
	// others says that other Services have pools of the same sizes, and elements in all maps.
	others bool
	// times is how many changes lost about ten clients, on two processors, before packets were prepared for them.
	times int
}

func moments() []moment {
	alone := endpointState{"one", nil, []condition{ready}}
	same := func(*snapshot.Service) {}
	return []moment{
		{"a pool grows and shrinks", alone, same, true, 30000},
		{"a chain comes and goes", alone, same, false, 4000},
		{"a frontend changes its pool", both, func(s *snapshot.Service) { s.InternalLocal = true }, true, 8000},
		{"session affinity", both, func(s *snapshot.Service) { s.Affinity = time.Hour }, true, 3000},
		{"counters", both, func(s *snapshot.Service) { s.Counters = snapshot.CountersNever }, true, 8000},
	}
}

// TestChangesLoseNobody changes a Service as fast as the kernel takes it, while clients connect all the time. A packet
// that a transaction overtakes reads one map as it was and the next one as it is. It must not be rejected, and not be
// left alone: its connection would be, too, for minutes (decision 0031).
func TestChangesLoseNobody(t *testing.T) {
	for _, m := range moments() {
		t.Run(m.name, func(t *testing.T) {
			c, b := proxied(t, lab.Config{LocalPods: 3, RemotePods: 3})
			s, states := flowService{number: 1}, m.states(c)
			apply(t, b, states[0])
			to := s.frontendOf(c, dataplane.ClusterIP, ipfamily.IPv4)
			stop := connect(t, c, to)
			changes := underLoad(m.times)
			for i := range changes {
				_, err := b.ApplyAll(states[(i+1)%2], dataplane.Change{Services: []snapshot.Name{s.name()}})
				labtest.Check(t, err)
			}
			t.Logf("%d connections during %d changes", stop(), changes)
			quiet(t, b)
		})
	}
}

// TestOvertakenPacketsCount takes away what a change takes away between two lookups. The packets that find only half of
// a Service are dropped, and counted.
func TestOvertakenPacketsCount(t *testing.T) {
	c, _, s, st := one(t, both, asIs)
	counters, to := openCounters(t, c.Node), s.frontendOf(c, dataplane.ClusterIP, ipfamily.IPv4)
	connections(t, c.Pods[2], to, 10, lab.Answered)
	before := countAll(t, counters, st).refused[dataplane.RefusedOvertaken]
	if before != 0 {
		t.Errorf("%d packets are counted although nothing has changed", before)
	}
	for _, gone := range []nft.SetID{nft.Endpoints, nft.Picks} {
		labtest.Run(t, c.Node, "", "nft", "flush", "map", "ip", "verdict", gone.String())
		connections(t, c.Pods[2], to, 1, lab.TimedOut)
		now := countAll(t, counters, st).refused[dataplane.RefusedOvertaken]
		if now <= before {
			t.Errorf("without %s, %d packets are counted, no more than before", gone, now)
		}
		before = now
	}
}

// TestMasqueradeIsOfTheEndpoint has clients from outside choose among all endpoints of a Service with policy Local, as
// packets do that a change of the policy overtakes: who gets one on another node is masqueraded, and answered.
func TestMasqueradeIsOfTheEndpoint(t *testing.T) {
	for _, state := range []endpointState{both, {"remote", nil, []condition{ready}}} {
		t.Run(state.name, func(t *testing.T) {
			c, b, s, _ := one(t, state, func(svc *snapshot.Service) { svc.ExternalLocal = true })
			for _, f := range ipfamily.All {
				to := s.frontendOf(c, dataplane.LoadBalancerIP, f)
				key := fmt.Sprintf("%s . tcp . %d", to.Addr(), to.Port())
				all := labtest.Run(t, c.Node, "", "nft", "get", "element", f.NFT(), "verdict", "inside-services", "{ "+key+" }")
				class := regexp.MustCompile(`" : (\S+)`).FindStringSubmatch(all)[1]
				labtest.Run(t, c.Node, fmt.Sprintf("delete element %[1]s verdict outside-services { %[2]s }\n"+
					"add element %[1]s verdict outside-services { %[2]s : %[3]s }", f.NFT(), key, class), "nft", "-f", "-")
				by := map[bool]int{}
				for range 40 {
					r := c.Outside.Dial(snapshot.TCP, to, lab.Options{})
					if by[r.Source == r.Client]++; r.Outcome != lab.Answered {
						t.Fatalf("%s: %v", to, r)
					}
				}
				if by[false] == 0 || (by[true] > 0) != (state.name == both.name) {
					t.Errorf("%s: %d see the client's address, %d the node's", to, by[true], by[false])
				}
			}
			b.Close()
		})
	}
}

// states returns both versions.
func (m moment) states(c *lab.Cluster) [2]*dataplane.State {
	state := func(first flowService, change func(*snapshot.Service)) *dataplane.State {
		snap := snapshot.New()
		snap.Apply(facts(c))
		d := first.delta(c)
		change(d.Services[first.name()])
		snap.Apply(d)
		if m.others {
			for i, e := range []endpointState{moments()[0].first, both} {
				counted, uncounted := flowService{number: 2 + i, state: e}, flowService{number: 4 + i, state: e}
				snap.Apply(counted.delta(c))
				d = uncounted.delta(c)
				d.Services[uncounted.name()].Counters = snapshot.CountersNever
				snap.Apply(d)
			}
		}
		st, _ := dataplane.Compute(dataplane.Config{NodeName: "node", DetectLocal: clusterCIDR}, snap)
		return st
	}
	return [2]*dataplane.State{state(flowService{number: 1, state: m.first}, func(*snapshot.Service) {}),
		state(flowService{number: 1, state: both}, m.second)}
}
