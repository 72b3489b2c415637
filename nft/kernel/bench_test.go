package kernel

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// large gives a cluster of Services with one cluster IP and one port, each with a slice of endpoints.
func large(services, endpoints int) snapshot.Delta {
	d := snapshot.Delta{
		Services: make(map[snapshot.Name]*snapshot.Service, services),
		Slices:   make(map[snapshot.Name]*snapshot.Slice, services),
	}
	for i := range services {
		n := snapshot.Name{Namespace: "default", Name: fmt.Sprintf("service-%d", i)}
		d.Services[n] = &snapshot.Service{
			Name:       n,
			ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 96 + byte(i>>16), byte(i >> 8), byte(i)})},
			Ports:      []snapshot.Port{{Name: "http", Protocol: snapshot.TCP, Port: 80}},
		}
		s := &snapshot.Slice{
			Name:    n,
			Service: n.Name,
			Ports:   []snapshot.SlicePort{{Name: "http", Protocol: snapshot.TCP, Port: 8080}},
		}
		for e := range endpoints {
			at := i*endpoints + e
			s.Endpoints = append(s.Endpoints, snapshot.Endpoint{
				Addr: netip.AddrFrom4(
					[4]byte{10, 128 + byte(at>>16), byte(at >> 8), byte(at)},
				), Node: fmt.Sprintf("node-%d", at%100),
				Ready: true, Serving: true})
		}
		d.Slices[n] = s
	}
	return d
}

// benchHost gives a namespace of its own; it is closed when the benchmark ends.
func benchHost(b *testing.B) (*lab.Host, *Backend) {
	b.StopTimer()
	defer b.StartTimer()
	return host(b)
}

// balanced is large, where each Service has an address of a load balancer, an external address and a node port besides.
func balanced(services, endpoints int) snapshot.Delta {
	d := large(services, endpoints)
	for i := range services {
		svc := d.Services[snapshot.Name{Namespace: "default", Name: fmt.Sprintf("service-%d", i)}]
		svc.LoadBalancerIPs = []netip.Addr{netip.AddrFrom4([4]byte{172, 16 + byte(i>>16), byte(i >> 8), byte(i)})}
		svc.ExternalIPs = []netip.Addr{netip.AddrFrom4([4]byte{172, 24 + byte(i>>16), byte(i >> 8), byte(i)})}
		svc.Ports[0].NodePort = 20000 + uint16(i)
	}
	return d
}

// BenchmarkLoadBalancers writes Services with four frontends into an empty kernel, and then replaces one endpoint.
func BenchmarkLoadBalancers(b *testing.B) {
	delta := balanced(testkit.Size(10000, 1000), 10)
	var cold, change time.Duration
	var first, last dataplane.Receipt
	for b.Loop() {
		_, back := benchHost(b)
		snap, planner := snapshot.New(), dataplane.NewPlanner(configs["cluster CIDR"])
		node := []netip.Addr{netip.MustParseAddr("192.0.2.1")}
		delta.HostAddrs = &node
		start := time.Now()
		all, _ := planner.Apply(snap, snap.Apply(delta))
		r, err := back.ApplyAll(planner.State(), all)
		labtest.Check(b, err)
		cold, first = cold+time.Since(start), r
		n := snapshot.Name{Namespace: "default", Name: "service-500"}
		s := *snap.Slices[n][n.Name]
		s.Endpoints = slices.Clone(s.Endpoints)
		s.Endpoints[3].Addr = netip.MustParseAddr("10.200.0.1")
		start = time.Now()
		one, _ := planner.Apply(snap, snap.Apply(snapshot.Delta{Slices: map[snapshot.Name]*snapshot.Slice{n: &s}}))
		last, err = back.ApplyAll(planner.State(), one)
		labtest.Check(b, err)
		change += time.Since(start)
	}
	b.ReportMetric(cold.Seconds()*1000/float64(b.N), "cold-ms")
	b.ReportMetric(float64(change.Microseconds())/float64(b.N), "endpoint-us")
	b.ReportMetric(float64(first.Added), "elements")
	b.ReportMetric(float64(first.Bytes), "bytes")
	b.ReportMetric(float64(last.Replaced+last.Added+last.Removed), "elements-an-endpoint")
}

// BenchmarkSizes gives a Service another number of endpoints, in turns with the number that all others have: one that
// one more Service has, and one that nobody has. The kernel goes through all pools then, and through all endpoints if
// the number is new (decision 0031).
func BenchmarkSizes(b *testing.B) {
	const most, others, nobody = 10, 9, 7
	for _, services := range testkit.Size([]int{10000, 100000}, []int{1000}) {
		_, back := host(b)
		snap, planner := snapshot.New(), dataplane.NewPlanner(configs["cluster CIDR"])
		delta := large(services, most)
		planner.Apply(snap, snap.Apply(delta))
		// resize changes a Service, and returns how long that took.
		resize := func(service, endpoints int) time.Duration {
			n := snapshot.Name{Namespace: "default", Name: fmt.Sprintf("service-%d", service)}
			s := *delta.Slices[n]
			s.Endpoints = s.Endpoints[:endpoints]
			d := snapshot.Delta{Slices: map[snapshot.Name]*snapshot.Slice{n: &s}}
			change, _ := planner.Apply(snap, snap.Apply(d))
			start := time.Now()
			_, err := back.ApplyAll(planner.State(), change)
			labtest.Check(b, err)
			return time.Since(start)
		}
		resize(1, others) // fills the tables
		for name, size := range map[string]int{"others": others, "nobody": nobody} {
			b.Run(fmt.Sprint(services, "/", name), func(b *testing.B) {
				var took time.Duration
				for b.Loop() {
					took += resize(0, size)
					b.StopTimer()
					resize(0, most)
					b.StartTimer()
				}
				b.ReportMetric(float64(took.Microseconds())/float64(b.N), "us/change")
			})
		}
	}
}

// BenchmarkPlanInParts plans a first state in transactions of a bounded size. What a Service costs should not depend
// on how many there are, nor on how many transactions they take.
func BenchmarkPlanInParts(b *testing.B) {
	for _, services := range testkit.Size([]int{5000, 20000}, []int{1000}) {
		snap := snapshot.New()
		snap.Apply(large(services, 10))
		st, _ := dataplane.Compute(configs["cluster CIDR"], snap)
		for _, most := range []int{16384, 65536} {
			b.Run(fmt.Sprint(services, "/", most), func(b *testing.B) {
				parts := 0
				for b.Loop() {
					var m nft.Model
					left := dataplane.Change{}
					for again := true; again; parts++ {
						left = m.Plan(st, left, most).Left
						again = !left.Empty()
					}
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*services), "ns/Service")
				b.ReportMetric(float64(parts)/float64(b.N), "transactions")
			})
		}
	}
}
