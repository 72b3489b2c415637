package kernel

import (
	"net/netip"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestCountersWithinTheirBudget lets a cluster outgrow the budget for counters: what comes is not counted, what was
// there is rewritten by Check, a little at a time, and a new process finds nothing to do.
func TestCountersWithinTheirBudget(t *testing.T) {
	h, _ := host(t)
	const budget = 300
	b := open(t, h, Options{Counters: budget})
	snap, planner := snapshot.New(), dataplane.NewPlanner(configs["cluster CIDR"])
	counts := ""
	grow := func(services int) {
		t.Helper()
		change, _ := planner.Apply(snap, snap.Apply(large(services, 2)))
		r, err := b.ApplyAll(planner.State(), change)
		labtest.Check(t, err)
		counts = r.Counted
		for deadline := time.Now().Add(time.Minute); ; {
			found, again, err := b.Check()
			labtest.Check(t, err)
			if found != nil || time.Now().After(deadline) {
				t.Fatalf("%d Services: found %q, and wants to go on in %v", services, found, again)
			}
			if again == 0 {
				break
			}
		}
	}
	expect := func(services int, frontends, endpoints nft.SetID, level string) {
		t.Helper()
		listed, err := b.List()
		labtest.Check(t, err)
		e := &listed[0].Elements
		counted := 0
		for set := range e {
			for _, l := range e[set] {
				if l.Counted {
					counted++
				}
			}
		}
		if len(e[frontends]) != services || len(e[endpoints]) != 2*services || counted > budget || counts != level {
			t.Errorf("%d Services: %d %s, %d %s, %d counters, %s are counted", services, len(e[frontends]), frontends,
				len(e[endpoints]), endpoints, counted, counts)
		}
	}
	grow(90)
	expect(90, nft.Services, nft.Endpoints, dataplane.CountedEndpoints)
	grow(250)
	expect(250, nft.Services, nft.UncountedEndpoints, dataplane.CountedFrontends)
	grow(400)
	expect(400, nft.UncountedServices, nft.UncountedEndpoints, dataplane.CountedNothing)
	quiet(t, b)
	b = open(t, h, Options{Counters: budget})
	r, err := b.Apply(planner.State(), dataplane.Change{})
	if labtest.Check(t, err); !r.Adopted {
		t.Errorf("a new process finds something to do: %+v", r)
	}
	b = open(t, h, Options{})
	_, err = b.ApplyAll(planner.State(), dataplane.Change{})
	labtest.Check(t, err)
	grow(400)
	if counts != dataplane.CountedEndpoints {
		t.Errorf("with a larger budget %s are counted", counts)
	}
}

// TestCountersAsAsked connects to two Services where the budget is not enough for anybody: of the one that asks for
// counters every connection is counted, at its address and at its endpoints, and of the other none. Then they change
// places.
func TestCountersAsAsked(t *testing.T) {
	c, b := proxied(t, lab.Config{LocalPods: 3, RemotePods: 3})
	const budget = 2000
	b.options.Counters, b.model.Counters = budget, budget
	crowd := large(2500, 2)
	for _, svc := range crowd.Services {
		a := svc.ClusterIPs[0].As4()
		a[1] += 3
		svc.ClusterIPs[0] = netip.AddrFrom4(a)
	}
	snap := snapshot.New()
	planner := dataplane.NewPlanner(dataplane.Config{NodeName: "node", DetectLocal: clusterCIDR})
	planner.Apply(snap, snap.Apply(facts(c)))
	planner.Apply(snap, snap.Apply(crowd))
	services := [...]flowService{{number: 1, state: both}, {number: 2, state: both}}
	counters := openCounters(t, c.Node)
	for round, wishes := range [][2]snapshot.Counters{
		{snapshot.CountersFirst, snapshot.CountersByBudget}, {snapshot.CountersNever, snapshot.CountersFirst},
	} {
		var names []snapshot.Name
		for i, s := range services {
			d := s.delta(c)
			d.Services[s.name()].Counters = wishes[i]
			planner.Apply(snap, snap.Apply(d))
			names = append(names, s.name())
		}
		change := dataplane.Change{Services: names}
		if round == 0 {
			change = dataplane.Change{}
		}
		r, err := b.ApplyAll(planner.State(), change)
		labtest.Check(t, err)
		if check(t, b) != nil || r.Counted != dataplane.CountedNothing {
			t.Errorf("by the budget, %s are counted", r.Counted)
		}
		for i, s := range services {
			at := s.frontendOf(c, dataplane.ClusterIP, ipfamily.IPv4)
			connections(t, c.Pods[2], at, 6, lab.Answered)
			want := uint64(0)
			if wishes[i] == snapshot.CountersFirst {
				want = 6
			}
			key := dataplane.Counted{Key: dataplane.Key{Addr: at.Addr(), Protocol: snapshot.TCP, Port: at.Port()}}
			frontend, endpoints := countOf(t, counters, key)
			if frontend != want || endpoints != want {
				t.Errorf("round %d: %s has %d connections, its endpoints %d; want %d", round, s.name(), frontend, endpoints, want)
			}
		}
		quiet(t, b)
	}
}

// countOf gives what was counted at a frontend, and at its endpoints together.
func countOf(t *testing.T, c *Counters, at dataplane.Counted) (frontend, endpoints uint64) {
	t.Helper()
	var of []dataplane.FrontendCount
	labtest.Check(t, c.Frontends([]dataplane.Counted{at}, func(f dataplane.FrontendCount) { of = append(of, f) }))
	if len(of) != 1 {
		t.Fatalf("%v is there %d times", at, len(of))
	}
	labtest.Check(t, c.Endpoints(of, nil, func(e dataplane.EndpointCount) { endpoints += e.Packets }))
	return of[0].Packets, endpoints
}
