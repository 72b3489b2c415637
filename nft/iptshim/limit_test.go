package iptshim

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// huge is a Service with many of everything.
func huge(addresses, ports, endpoints, sources int) *dataplane.State {
	snap := large(1, 1)
	n := snapshot.Name{Namespace: "default", Name: "huge"}
	s := &snapshot.Service{Name: n, ClusterIPs: []netip.Addr{addr("10.96.200.1")}}
	for i := range addresses {
		s.LoadBalancerIPs = append(s.LoadBalancerIPs, netip.AddrFrom4([4]byte{203, 0, byte(i >> 8), byte(i)}))
	}
	for i := range sources {
		s.SourceRanges = append(s.SourceRanges,
			netip.PrefixFrom(netip.AddrFrom4([4]byte{198, byte(i >> 15), byte(i >> 7), byte(i << 1)}), 32))
	}
	sl := &snapshot.Slice{Name: n, Service: n.Name}
	for i := range ports {
		name := fmt.Sprint("p", i)
		s.Ports = append(s.Ports, snapshot.Port{Name: name, Protocol: snapshot.TCP, Port: uint16(1000 + i)})
		sl.Ports = append(sl.Ports, snapshot.SlicePort{Name: name, Protocol: snapshot.TCP, Port: uint16(1000 + i)})
	}
	for i := range endpoints {
		sl.Endpoints = append(sl.Endpoints, snapshot.Endpoint{Ready: true, Serving: true,
			Addr: netip.AddrFrom4([4]byte{10, 200, byte(i >> 8), byte(i)})})
	}
	snap.Apply(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{n: s},
		Slices: map[snapshot.Name]*snapshot.Slice{n: sl}})
	st, _ := dataplane.Compute(configs[0], snap)
	return st
}

// TestNothingMultiplies: addresses, endpoints and source ranges of a port add up. A Service of which that is too much
// is not written.
func TestNothingMultiplies(t *testing.T) {
	for _, c := range []struct {
		addresses, ports, endpoints, sources, most int
		tooLarge                                   bool
	}{
		{300, 50, 100, 0, 40_000, false}, {300, 50, 0, 20, 35_000, false}, {300, 50, 10, 200, 50_000, false},
		{200, 10, 100, 200, 10_000, false},
		{1, 1, 5000, 0, 16_000, false}, {1, 1, 12000, 0, 40_000, true}, {1, 100, 200, 0, 70_000, false},
		{1, 1, 0, 40000, 10_000, true}, {1, 110, 200, 0, 70_000, true}, {300, 80, 100, 0, 70_000, true},
	} {
		st := huge(c.addresses, c.ports, c.endpoints, c.sources)
		_, _, rules := New(Options{}).Plan(st, dataplane.Change{}).Counts()
		if rules > c.most {
			t.Errorf("%+v: %d rules", c, rules)
		}
		err := Check(st.Services[snapshot.Name{Namespace: "default", Name: "huge"}])
		var why *TooManyRules
		if errors.As(err, &why) != c.tooLarge || why != nil && why.Family != ipfamily.IPv4 {
			t.Errorf("%+v: %d rules: %v", c, rules, err)
		}
	}
}

// TestEstimate: no Service has more rules than it is taken for.
func TestEstimate(t *testing.T) {
	for seed := range uint64(40) {
		w := newWorld(seed, 30)
		snap := snapshot.New()
		snap.Apply(w.All())
		st, _ := dataplane.Compute(configs[seed%uint64(len(configs))], snap)
		for _, f := range ipfamily.All {
			fm := newFamily(f)
			fm.structure = structureOf(st, f)
			for n, svc := range st.Services {
				made := fm.compiler().service(svc)
				rules, most := len(made.rows), 2 // the unused ports, and the health check node port
				for _, ch := range made.chains {
					rules += len(ch.rules)
				}
				for _, sp := range svc.Ports {
					if f.Has(sp.Frontends[0].Key.Addr) {
						most += estimate(sp)
						if slices.ContainsFunc(sp.Frontends, func(f dataplane.Frontend) bool { return f.Sources != nil }) {
							most += maxRefusals
						}
					}
				}
				if rules > most {
					t.Errorf("seed %d: %v: %d rules, estimated %d", seed, n, rules, most)
				}
			}
		}
	}
}

// TestOneEndpointOfMany: to follow one endpoint of a Service with 10,000 addresses and ports takes less than to write
// all of it.
func TestOneEndpointOfMany(t *testing.T) {
	states := []*dataplane.State{huge(200, 50, 70, 0), huge(200, 50, 71, 0)}
	all, one := time.Hour, time.Hour
	changed := dataplane.Change{Services: []snapshot.Name{{Namespace: "default", Name: "huge"}}}
	for range 3 {
		m := New(Options{})
		start := time.Now()
		m.Plan(states[0], dataplane.Change{})
		all = min(all, time.Since(start))
		for _, i := range []int{1, 0} {
			start = time.Now()
			txn := m.Plan(states[i], changed)
			one = min(one, time.Since(start))
			if _, _, rules := txn.Counts(); rules > 4000 {
				t.Errorf("%d rules are written", rules)
			}
		}
	}
	if t.Logf("all %v, one endpoint %v", all, one); one > all {
		t.Errorf("one endpoint takes %v, everything %v", one, all)
	}
}

// TestStepsOfOneService: what one Service has is written in steps, too, in each of which rules lead only to chains that
// are there by then. The nft variant's time grows by the square of a step.
func TestStepsOfOneService(t *testing.T) {
	const step = 500
	text := string(New(Options{Step: step}).Plan(huge(3, 40, 100, 0), dataplane.Change{}).Text(ipfamily.IPv4))
	known := map[string]bool{}
	for block := range strings.SplitSeq(text, "COMMIT\n") {
		if n := strings.Count(block, "\n"); n > 2*step {
			t.Errorf("a step of %d lines", n)
		}
		for _, line := range strings.Split(block, "\n") {
			if name, declared := strings.CutPrefix(line, ":"); declared {
				known[strings.Fields(name)[0]] = true
			}
			if _, to, jumps := strings.Cut(line, " -j KUBE-"); jumps && !known["KUBE-"+to] {
				t.Fatalf("this rule leads nowhere: %s", line)
			}
		}
	}
}
