package dataplane

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

var benchConfig = Config{
	NodeName:    "node-7",
	DetectLocal: DetectLocal{ClusterCIDRs: prefixes("10.128.0.0/9")},
}

func benchName(i int) snapshot.Name {
	return snapshot.Name{Namespace: fmt.Sprint("team-", i%100), Name: fmt.Sprint("service-", i)}
}

func v4(base uint32) netip.Addr {
	return netip.AddrFrom4([4]byte{byte(base >> 24), byte(base >> 16), byte(base >> 8), byte(base)})
}

// benchSlice is the slice of Service i; generation moves one of its endpoints.
func benchSlice(i, endpoints, generation int) *snapshot.Slice {
	owner := benchName(i)
	sl := &snapshot.Slice{
		Name:    snapshot.Name{Namespace: owner.Namespace, Name: owner.Name + "-x7f2q"},
		Service: owner.Name,
		Ports:   []snapshot.SlicePort{{Name: "http", Protocol: snapshot.TCP, Port: 8080}},
	}
	for e := range endpoints {
		a := v4(10<<24 | 1<<23 | uint32(i*endpoints+(e*7)%endpoints)&0x7fffff)
		if e == 0 {
			a = v4(192<<24 | uint32(generation))
		}
		sl.Endpoints = append(sl.Endpoints, snapshot.Endpoint{
			Addr: a, Node: fmt.Sprint("node-", (i+e)%50), Ready: true, Serving: true,
		})
	}
	return sl
}

// benchSnapshot has services of one port with that many endpoints each; every tenth has a node port.
func benchSnapshot(services, endpoints int) *snapshot.Snapshot {
	d := snapshot.Delta{
		Services: make(map[snapshot.Name]*snapshot.Service, services),
		Slices:   make(map[snapshot.Name]*snapshot.Slice, services),
		Node:     &snapshot.Node{Name: "node-7", Addresses: addrs("192.0.2.7")},
	}
	for i := range services {
		svc := &snapshot.Service{
			Name: benchName(i), ClusterIPs: []netip.Addr{v4(10<<24 | uint32(i))},
			Ports: []snapshot.Port{{Name: "http", Protocol: snapshot.TCP, Port: 80}},
		}
		if i%10 == 0 && i < 30000*10 {
			svc.Ports[0].NodePort = uint16(30000 + i/10)
		}
		d.Services[svc.Name] = svc
		sl := benchSlice(i, endpoints, 0)
		d.Slices[sl.Name] = sl
	}
	s := snapshot.New()
	s.Apply(d)
	return s
}

// BenchmarkPlannerStart is the first Apply.
func BenchmarkPlannerStart(b *testing.B) {
	s := benchSnapshot(testkit.Size(10_000, 1_000), 10)
	b.ReportAllocs()
	for b.Loop() {
		NewPlanner(benchConfig).Apply(s, snapshot.Change{Globals: true})
	}
}

// BenchmarkApplyOneSlice replaces one of ten endpoints of one Service.
func BenchmarkApplyOneSlice(b *testing.B) {
	for _, services := range testkit.Size([]int{1_000, 10_000, 100_000}, []int{1_000}) {
		b.Run(fmt.Sprint(services), func(b *testing.B) {
			s := benchSnapshot(services, 10)
			p := NewPlanner(benchConfig)
			p.Apply(s, snapshot.Change{})
			var deltas []snapshot.Delta
			for i := range 2048 {
				sl := benchSlice(i*7919%services, 10, 1+i)
				deltas = append(deltas, snapshot.Delta{Slices: map[snapshot.Name]*snapshot.Slice{sl.Name: sl}})
			}
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				if c, _ := p.Apply(s, s.Apply(deltas[i%len(deltas)])); len(c.Services) != 1 && i < len(deltas) {
					b.Fatal(c)
				}
			}
		})
	}
}
