package nft

import (
	"fmt"
	"net/netip"
	"runtime"
	"runtime/debug"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// crowded is a Service with many ports and source ranges, its slice, and how many of both there are.
func crowded(name string, clusterIP string, ports, ranges int) *snapshot.Snapshot {
	svc := &snapshot.Service{Name: snapshot.Name{Namespace: "media", Name: name},
		ClusterIPs: []netip.Addr{addr(clusterIP)}, LoadBalancerIPs: []netip.Addr{addr("203.0.113.7")}}
	sl := &snapshot.Slice{Name: snapshot.Name{Namespace: "media", Name: name + "-1"}, Service: name}
	for i := range ports {
		p := snapshot.Port{Name: fmt.Sprint("rtp-", i), Protocol: snapshot.UDP, Port: uint16(1000 + i)}
		svc.Ports = append(svc.Ports, p)
		sl.Ports = append(sl.Ports, snapshot.SlicePort{Name: p.Name, Protocol: p.Protocol, Port: p.Port})
	}
	for i := range ranges {
		svc.SourceRanges = append(svc.SourceRanges,
			netip.PrefixFrom(netip.AddrFrom4([4]byte{20, byte(i >> 7), byte(i << 1), 0}), 24))
	}
	for i := range 2 {
		sl.Endpoints = append(sl.Endpoints,
			snapshot.Endpoint{Addr: netip.AddrFrom4([4]byte{10, 1, 1, byte(i + 1)}), Ready: true, Serving: true})
	}
	s := snapshot.New()
	s.Apply(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{svc.Name: svc},
		Slices: map[snapshot.Name]*snapshot.Slice{sl.Name: sl}})
	return s
}

// edited changes the first port's number of every Service.
func edited(s *snapshot.Snapshot) snapshot.Change {
	d := snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{}}
	for n, was := range s.Services {
		svc := *was
		svc.Ports = slices.Clone(svc.Ports)
		svc.Ports[0].Port = 999 - svc.Ports[0].Port%2
		d.Services[n] = &svc
	}
	return s.Apply(d)
}

// processorTime is what the calling thread has used, whatever else the machine does.
func processorTime(t *testing.T) time.Duration {
	var used unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_THREAD, &used); err != nil {
		t.Fatal(err)
	}
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}

// TestCrowdedServicesCostWhatTheyHave: what a Service costs grows with its ports and ranges, and no faster: ten times
// as many cost about ten times as much, where a search in a loop would make it a hundred times.
func TestCrowdedServicesCostWhatTheyHave(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // which takes more for much than for little
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	plan := func(s *snapshot.Snapshot) {
		p := dataplane.NewPlanner(dataplane.Config{})
		p.Apply(s, snapshot.Change{Globals: true})
		var m Model
		m.Plan(p.State(), dataplane.Change{}, 0)
		change, _ := p.Apply(s, edited(s))
		m.Plan(p.State(), change, 0)
	}
	for what, once := range map[string]func(n int){
		"ports":            func(n int) { plan(crowded("a", "10.96.0.1", n, 10)) },
		"ports and ranges": func(n int) { plan(crowded("a", "10.96.0.1", n, n/2)) },
		"ports that two Services want": func(n int) {
			s, other := crowded("a", "10.96.0.1", n, 0), crowded("b", "10.96.0.2", n, 0)
			s.Apply(snapshot.Delta{Services: other.Services})
			plan(s)
		},
		"ports at another Service's cluster IP": func(n int) {
			s, other := crowded("a", "203.0.113.7", n, 0), crowded("b", "10.96.0.2", n, 0)
			s.Apply(snapshot.Delta{Services: other.Services})
			plan(s)
		},
	} {
		median := func(n int) time.Duration {
			var took []time.Duration
			for range 3 {
				runtime.GC()
				begin := processorTime(t)
				once(n)
				took = append(took, processorTime(t)-begin)
			}
			slices.Sort(took)
			return took[1]
		}
		few, many := median(2_000), median(20_000)
		t.Logf("%s: %v with 2,000, %v with 20,000", what, few, many)
		if many > 30*few {
			t.Errorf("%s: 20,000 cost %v and 2,000 %v: %.0f times as much", what, many, few, float64(many)/float64(few))
		}
	}
}
