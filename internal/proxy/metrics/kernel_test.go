package metrics

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/nft/kernel"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

func TestMain(m *testing.M) { labtest.Main(m) }

const (
	atPort   = 80
	atTarget = 8080
)

// node is a proxy on the node of a cluster, with its metrics.
type node struct {
	*Metrics
	t       testing.TB
	cluster *lab.Cluster
	kernel  *kernel.Backend
	backend reconcile.Writer
	planner *dataplane.Planner
	snap    *snapshot.Snapshot
}

// newNode starts a proxy. What another one left in the kernel is taken over.
func newNode(t testing.TB, c *lab.Cluster, o Options) *node {
	t.Helper()
	n := &node{t: t, cluster: c, snap: snapshot.New(), planner: dataplane.NewPlanner(dataplane.Config{NodeName: "node",
		DetectLocal: dataplane.DetectLocal{ClusterCIDRs: lab.PodRange}})}
	var counters *kernel.Counters
	labtest.Check(t, c.Node.Do(func() (err error) {
		if n.kernel, err = kernel.Open(kernel.Options{}); err != nil {
			return err
		}
		counters, err = kernel.OpenCounters()
		return err
	}))
	o.Counters, o.Report = counters, func(err error) { t.Error(err) }
	n.Metrics = New(o)
	n.backend = behind(n.Metrics, n.kernel)
	t.Cleanup(func() {
		n.Stop()
		counters.Close()
		n.kernel.Close()
	})
	addrs := []netip.Addr{c.Node.IP(ipfamily.IPv4), c.Node.IP(ipfamily.IPv6)}
	cidrs := append([]netip.Prefix{}, lab.ServiceRange...)
	n.snap.Apply(
		snapshot.Delta{HostAddrs: &addrs, ServiceCIDRs: &cidrs, Node: &snapshot.Node{Name: "node", Addresses: addrs}},
	)
	return n
}

// apply writes a change, as the loop does: with a look at what others did before.
func (n *node) apply(d snapshot.Delta) dataplane.Receipt {
	n.t.Helper()
	for {
		found, again, err := n.backend.Check()
		labtest.Check(n.t, err)
		if found != nil || again == 0 {
			break
		}
	}
	change, _ := n.planner.Apply(n.snap, n.snap.Apply(d))
	r, err := n.backend.Apply(n.planner.State(), change)
	labtest.Check(n.t, err)
	return r
}

// read reads the counters and gives the connections of each Service port, and of each endpoint.
func (n *node) read() map[string]uint64 {
	n.t.Helper()
	for n.reader.startRead() != nil { // an opening reading may be under way
		time.Sleep(time.Millisecond)
	}
	n.reader.read(make(chan struct{}))
	out := map[string]uint64{}
	p := n.reader.picture()
	for _, s := range p.ports {
		out[s.name.Service.Name] = s.now.connections
		out[s.name.Service.Name+" refused"] = s.now.refused[0] + s.now.refused[1]
		for _, ep := range s.endpoints {
			out[s.name.Service.Name+" "+ep.at.Addr().String()] = ep.connections
		}
	}
	return out
}

// service is one of both families: its endpoints are the first pods, and the first remote ones.
func service(c *lab.Cluster, number, here, there int, affinity time.Duration) snapshot.Delta {
	name := snapshot.Name{Namespace: "default", Name: fmt.Sprintf("s%d", number)}
	svc := &snapshot.Service{
		Name:     name,
		Affinity: affinity,
		Ports:    []snapshot.Port{{Protocol: snapshot.TCP, Port: atPort}},
	}
	d := snapshot.Delta{
		Services: map[snapshot.Name]*snapshot.Service{name: svc},
		Slices:   map[snapshot.Name]*snapshot.Slice{},
	}
	for i, f := range []ipfamily.Family{ipfamily.IPv4, ipfamily.IPv6} {
		svc.ClusterIPs = append(svc.ClusterIPs, lab.Nth(lab.ServiceRange[i], number))
		sl := &snapshot.Slice{Name: snapshot.Name{Namespace: "default", Name: fmt.Sprint(name.Name, i)}, Service: name.Name,
			Ports: []snapshot.SlicePort{{Protocol: snapshot.TCP, Port: atTarget}}}
		for _, pod := range append(append([]*lab.Host{}, c.Pods[:here]...), c.RemotePods[:there]...) {
			sl.Endpoints = append(sl.Endpoints, snapshot.Endpoint{Addr: pod.IP(f), Ready: true, Serving: true})
		}
		d.Slices[sl.Name] = sl
	}
	return d
}

// tally counts connections as clients see them.
type tally map[string]uint64

// dial opens connections to a Service and notes who answered.
func (y tally) dial(t testing.TB, from *lab.Host, number, times int) {
	t.Helper()
	for i := range times {
		f := i % 2
		r := from.Dial(snapshot.TCP, netip.AddrPortFrom(lab.Nth(lab.ServiceRange[f], number), atPort),
			lab.Options{Timeout: 5 * time.Second})
		name := fmt.Sprintf("s%d", number)
		switch r.Outcome {
		case lab.Answered:
			y[name]++
			y[name+" "+r.Destination.Addr().String()]++
		case lab.Refused:
			y[name+" refused"]++
		default:
			t.Fatalf("%s to %s: %v", from.Name, name, r)
		}
	}
}

func (y tally) compare(t testing.TB, what string, got map[string]uint64) {
	t.Helper()
	for name, want := range y {
		if got[name] != want {
			t.Errorf("%s: %s has %d connections; want %d", what, name, got[name], want)
		}
	}
}

// TestKernelCounts: what is shown is what clients saw, through everything that makes the kernel begin to count anew:
// endpoints that come and go, a foreign hand, and a restart. It never falls.
func TestKernelCounts(t *testing.T) {
	c := labtest.NewCluster(t, lab.Config{LocalPods: 3, RemotePods: 2})
	for _, pod := range append(append([]*lab.Host{}, c.Pods...), c.RemotePods...) {
		_, err := pod.Serve(snapshot.TCP, atTarget)
		labtest.Check(t, err)
	}
	n := newNode(t, c, Options{Detail: PerEndpoint})
	client := c.Pods[2]
	const plain, sticky, empty = 1, 2, 3
	setup := service(c, plain, 2, 1, 0)
	setup.Merge(service(c, sticky, 2, 1, time.Hour))
	setup.Merge(service(c, empty, 0, 0, 0))
	if r := n.apply(setup); !r.Full {
		t.Fatalf("%+v", r)
	}
	seen := tally{}
	before := map[string]uint64{}
	step := func(what string) {
		t.Helper()
		seen.dial(t, client, plain, 12)
		seen.dial(t, client, sticky, 6)
		seen.dial(t, client, empty, 2)
		got := n.read()
		seen.compare(t, what, got)
		for name, was := range before {
			if got[name] < was {
				t.Errorf("%s: %s fell from %d to %d", what, name, was, got[name])
			}
		}
		before = got
	}
	step("at first")
	if r := n.apply(service(c, plain, 2, 2, 0)); r.Full || r.Replaced == 0 {
		t.Errorf("one more endpoint: %+v", r)
	}
	step("one more endpoint")
	n.apply(service(c, sticky, 2, 2, time.Hour))
	step("one more where clients are remembered")
	n.apply(service(c, empty, 1, 0, 0))
	step("an endpoint where there was none")
	n.apply(service(c, empty, 0, 0, 0))
	for _, f := range []ipfamily.Family{ipfamily.IPv4, ipfamily.IPv6} { // its series ends with it
		gone := fmt.Sprintf("s%d %s", empty, c.Pods[0].IP(f))
		delete(seen, gone)
		delete(before, gone)
	}
	step("none again")
	for _, f := range []string{"ip", "ip6"} {
		labtest.Run(t, c.Node, "", "nft", "flush", "table", f, "verdict")
		labtest.Run(t, c.Node, "", "nft", "delete", "table", f, "verdict")
	}
	if r := n.apply(snapshot.Delta{}); !r.Full {
		t.Errorf("after the tables were deleted: %+v", r)
	}
	step("the tables were made anew")

	// The next process adopts what it finds. It begins at 0, as all counters of Prometheus do at a restart, and counts on.
	n.Stop()
	old := n.snap
	n = newNode(t, c, Options{Detail: PerEndpoint})
	everything := snapshot.Delta{Services: old.Services, Slices: map[snapshot.Name]*snapshot.Slice{}}
	for _, slices := range old.Slices {
		for _, sl := range slices {
			everything.Slices[sl.Name] = sl
		}
	}
	if r := n.apply(everything); !r.Adopted {
		t.Fatalf("after a restart: %+v", r)
	}
	for name, v := range n.read() {
		if v != 0 {
			t.Errorf("after a restart %s has %d connections", name, v)
		}
	}
	seen, before = tally{}, map[string]uint64{}
	step("after a restart")
	n.apply(service(c, plain, 1, 2, 0))
	for _, f := range []ipfamily.Family{ipfamily.IPv4, ipfamily.IPv6} { // its series ends with it
		gone := fmt.Sprintf("s%d %s", plain, c.Pods[1].IP(f))
		delete(seen, gone)
		delete(before, gone)
	}
	step("one endpoint less")
}

// BenchmarkScrape measures a scrape over HTTP, in a cluster of 10,000 Services with 10 endpoints each, all of which
// clients have connected to; by how much is shown. Reading is done anew for each.
func BenchmarkScrape(b *testing.B) {
	const services, endpoints = 10000, 10
	c := labtest.NewCluster(b, lab.Config{})
	for _, test := range []struct {
		o      Options
		active bool
	}{
		{Options{Detail: Off}, true},
		{Options{Detail: PerService}, false},
		{Options{Detail: PerService}, true},
		{Options{Detail: PerService, MaxSeries: 1 << 20}, true},
		{Options{Detail: PerEndpoint}, true},
		{Options{Detail: PerEndpoint, MaxSeries: 1 << 20}, true},
	} {
		name := fmt.Sprintf("%s,room=%d,active=%v", test.o.Detail, test.o.MaxSeries, test.active)
		b.Run(name, func(b *testing.B) {
			n := newNode(b, c, test.o)
			b.Cleanup(func() { labtest.Check(b, n.kernel.Remove()) })
			st, change := udp(services, endpoints)
			_, err := n.backend.Apply(st, change)
			labtest.Check(b, err)
			if test.active {
				sendEverywhere(b, c.Node, services, endpoints)
			}
			handler := n.Handler(Pages{})
			var body []byte
			var read time.Duration
			for b.Loop() {
				b.StopTimer()
				n.reader.locked(func() { n.reader.readAt = time.Time{} })
				b.StartTimer()
				body = scrape(handler)
				b.StopTimer()
				for n.reader.startRead() != nil { // it may have gone on after the scrape had lost its patience
					time.Sleep(time.Millisecond)
				}
				n.reader.locked(func() { read += n.reader.took })
				b.StartTimer()
			}
			b.ReportMetric(float64(len(body)), "bytes")
			b.ReportMetric(float64(zipped(body)), "gzip-bytes")
			b.ReportMetric(float64(strings.Count(string(body), "\nverdict_service_connections_total{")), "services")
			b.ReportMetric(float64(strings.Count(string(body), "\nverdict_endpoint_connections_total{")), "endpoints")
			b.ReportMetric(read.Seconds()*1000/float64(b.N), "read-ms")
		})
	}
}

func scrape(h http.Handler) []byte {
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	return w.Body.Bytes()
}

func zipped(body []byte) int {
	var out bytes.Buffer
	z := gzip.NewWriter(&out)
	_, _ = io.Copy(z, bytes.NewReader(body))
	z.Close()
	return out.Len()
}

// udp is plain with UDP, so that one datagram is a connection.
func udp(services, endpoints int) (*dataplane.State, dataplane.Change) {
	st, change := plain(services, endpoints)
	for n, svc := range st.Services {
		sp := *svc.Ports[0]
		sp.Name.Protocol = snapshot.UDP
		sp.Frontends = append([]dataplane.Frontend{}, sp.Frontends...)
		sp.Frontends[0].Key.Protocol = snapshot.UDP
		st.Services[n] = &dataplane.Service{Name: svc.Name, ClusterIPs: svc.ClusterIPs, Ports: []*dataplane.ServicePort{&sp}}
	}
	return st, change
}

// sendEverywhere sends a few datagrams to every Service, from different ports.
func sendEverywhere(b *testing.B, from *lab.Host, services, times int) {
	b.Helper()
	labtest.Check(b, from.Do(func() error {
		for range times {
			conn, err := net.ListenUDP("udp4", nil)
			if err != nil {
				return err
			}
			for i := range services {
				to := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 96 + byte(i>>16), byte(i >> 8), byte(i)}), atPort)
				_, _ = conn.WriteToUDPAddrPort([]byte("x"), to) // that nobody is there does not matter
			}
			conn.Close()
		}
		return nil
	}))
}
