package health

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

func TestMain(m *testing.M) { labtest.Main(m) }

func name(s string) snapshot.Name { return snapshot.Name{Namespace: "default", Name: s} }

func addrs(list string) (out []netip.Addr) {
	for _, s := range strings.Fields(list) {
		out = append(out, netip.MustParseAddr(s))
	}
	return out
}

func addrDelta(list string) snapshot.Delta {
	a := addrs(list)
	return snapshot.Delta{HostAddrs: &a, Node: &snapshot.Node{Name: "here", Addresses: a}}
}

// service is one with a health check node port, which may be 0.
func service(n string, port uint16, clusterIPs string) snapshot.Delta {
	svc := &snapshot.Service{Name: name(n), ClusterIPs: addrs(clusterIPs), ExternalLocal: true, HealthCheckNodePort: port,
		Ports: []snapshot.Port{{Protocol: snapshot.TCP, Port: 80}}}
	return snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{svc.Name: svc}}
}

// endpoints are the Service's: "10.1.0.1" is ready, "-10.1.0.1" drains, and all are here.
func endpoints(svc, list string) snapshot.Delta {
	sl := &snapshot.Slice{
		Name:    name(svc + "-1"),
		Service: svc,
		Ports:   []snapshot.SlicePort{{Protocol: snapshot.TCP, Port: 8080}},
	}
	for _, a := range strings.Fields(list) {
		text, drains := strings.CutPrefix(a, "-")
		sl.Endpoints = append(sl.Endpoints, snapshot.Endpoint{Addr: netip.MustParseAddr(text), Node: "here", Ready: !drains,
			Serving: true, Terminating: drains})
	}
	return snapshot.Delta{Slices: map[snapshot.Name]*snapshot.Slice{sl.Name: sl}}
}

// fakeSockets stands in for the host: it notes what listens, and has ports that are taken.
type fakeSockets struct {
	mu    sync.Mutex
	open  map[string]*fakeListener
	taken map[string]bool
	tries int
}

type fakeListener struct {
	sockets *fakeSockets
	key     string
	closed  chan struct{}
	once    sync.Once
	broken  chan error
}

func (s *fakeSockets) listen(network, addr string) (net.Listener, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.tries++
	key := network + " " + addr
	if s.taken[key] || s.open[key] != nil {
		return nil, &net.OpError{Op: "listen", Net: network, Err: syscall.EADDRINUSE}
	}
	l := &fakeListener{sockets: s, key: key, closed: make(chan struct{}), broken: make(chan error, 1)}
	s.open[key] = l
	return l, nil
}

func (l *fakeListener) Accept() (net.Conn, error) {
	select {
	case err := <-l.broken:
		return nil, err
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *fakeListener) Close() error {
	l.once.Do(func() {
		close(l.closed)
		l.sockets.mu.Lock()
		defer l.sockets.mu.Unlock()
		delete(l.sockets.open, l.key)
	})
	return nil
}

func (l *fakeListener) Addr() net.Addr { return &net.TCPAddr{} }

func (s *fakeSockets) list() string {
	synctest.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	return strings.Join(slices.Sorted(maps.Keys(s.open)), ", ")
}

func (s *fakeSockets) set(change func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change()
}

// running has ports follow the deltas that apply gets, from nothing on, until they are stopped.
func running(t *testing.T, ports *NodePorts) (apply func(...snapshot.Delta), stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- ports.Run(ctx) }()
	snap := snapshot.New()
	apply = func(deltas ...snapshot.Delta) {
		var d snapshot.Delta
		for i := range deltas {
			d.Merge(deltas[i])
		}
		ports.InSync(reconcile.InSync{Snapshot: snap, Change: snap.Apply(d)})
	}
	return apply, func() { cancel(); labtest.Check(t, <-ended) }
}

// TestPortsOpenAndClose follows Services and addresses, with a fake host.
func TestPortsOpenAndClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		host := &fakeSockets{open: map[string]*fakeListener{}, taken: map[string]bool{"tcp4 192.0.2.1:30300": true}}
		var reports []string
		ports := &NodePorts{
			Config: dataplane.Config{NodeName: "here"}, Healthy: func() bool { return true }, Listen: host.listen,
			Report: func(e *ListenError) { reports = append(reports, e.Error()) },
		}
		apply, stop := running(t, ports)
		expect := func(what, want string) {
			t.Helper()
			if got := host.list(); got != want {
				t.Errorf("%s: open are %q; want %q", what, got, want)
			}
			if open, _ := ports.Ports(); open != len(host.open) {
				t.Errorf("%s: %d are open, %d are said to be", what, len(host.open), open)
			}
		}
		apply(service("none", 0, "10.96.0.9"), service("a", 30100, "10.96.0.1"))
		expect("no address is known", "")
		apply(addrDelta("192.0.2.1 2001:db8::1"))
		expect("addresses", "tcp4 192.0.2.1:30100")
		apply(service("b", 30200, "10.96.0.2 fd00::2"))
		expect("both families", "tcp4 192.0.2.1:30100, tcp4 192.0.2.1:30200, tcp6 [2001:db8::1]:30200")
		tries := host.tries
		apply(service("b", 30200, "10.96.0.2 fd00::2"), endpoints("b", "10.1.0.1"))
		expect("nothing that matters", "tcp4 192.0.2.1:30100, tcp4 192.0.2.1:30200, tcp6 [2001:db8::1]:30200")
		if host.tries != tries {
			t.Error("something was opened again")
		}
		apply(service("a", 30200, "10.96.0.1"), service("b", 30100, "10.96.0.2"))
		expect("they change places", "tcp4 192.0.2.1:30100, tcp4 192.0.2.1:30200")
		apply(addrDelta("192.0.2.7"))
		expect("another address", "tcp4 192.0.2.7:30100, tcp4 192.0.2.7:30200")
		ports.SetConfig(
			dataplane.Config{NodeName: "here", NodePortAddresses: []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0")}},
		)
		apply()
		expect("another configuration", "tcp4 0.0.0.0:30100, tcp4 0.0.0.0:30200")
		ports.SetConfig(dataplane.Config{NodeName: "here"})
		apply(addrDelta("192.0.2.1"), service("a", 0, "10.96.0.1"),
			snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{name("b"): nil}})
		expect("no port, and no Service", "")
		if len(reports) > 0 {
			t.Errorf("reported %q", reports)
		}

		apply(service("c", 30300, "10.96.0.3"), service("d", 30400, "10.96.0.4"))
		time.Sleep(time.Hour)
		expect("one is taken", "tcp4 192.0.2.1:30400")
		if _, failing := ports.Ports(); failing != 1 {
			t.Errorf("%d are failing", failing)
		}
		want := []string{
			"health check node port of Service default/c: listen tcp4: address already in use; load balancers assume " +
				"that it has no endpoint on this node",
		}
		if !slices.Equal(reports, want) {
			t.Errorf("reported %q; want %q, once", reports, want)
		}
		if n := host.tries - tries; n < 120 || n > 140 {
			t.Errorf("tried %d times in an hour", n)
		}
		host.set(func() { delete(host.taken, "tcp4 192.0.2.1:30300") })
		time.Sleep(retryMost)
		expect("it is free", "tcp4 192.0.2.1:30300, tcp4 192.0.2.1:30400")

		reports = nil
		host.set(func() { host.open["tcp4 192.0.2.1:30400"].broken <- errors.New("socket is gone") })
		expect("a socket breaks", "tcp4 192.0.2.1:30300, tcp4 192.0.2.1:30400")
		if len(reports) != 1 || !strings.Contains(reports[0], "default/d: socket is gone") {
			t.Errorf("reported %q", reports)
		}
		stop()
		if got := host.list(); got != "" {
			t.Errorf("at the end open are %q", got)
		}
	})
}

// aged gives the Services of a delta a time of creation.
func aged(d snapshot.Delta, created int64) snapshot.Delta {
	for _, svc := range d.Services {
		svc.Age.Created = created
	}
	return d
}

// TestOnePortOfTwoServices: manifests may say so. The oldest has it, and the one that comes second gets it when the
// first goes.
func TestOnePortOfTwoServices(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		host := &fakeSockets{open: map[string]*fakeListener{}}
		reports := 0
		ports := &NodePorts{
			Config: dataplane.Config{NodeName: "here"},
			Listen: host.listen,
			Report: func(*ListenError) { reports++ },
		}
		apply, stop := running(t, ports)
		defer stop()
		apply(addrDelta("192.0.2.1"))
		apply(service("a", 30100, "10.96.0.1"))
		synctest.Wait()
		apply(service("b", 30100, "10.96.0.2"))
		time.Sleep(time.Minute)
		if open, failing := ports.Ports(); open != 1 || failing != 1 || reports != 1 {
			t.Errorf("%d open, %d failing, %d reports", open, failing, reports)
		}
		of := func() string {
			ports.mu.Lock()
			defer ports.mu.Unlock()
			for n, c := range ports.checks {
				if len(c.servers) == 1 && len(c.failed) == 0 {
					return n.Name
				}
			}
			return ""
		}
		apply(aged(service("0", 30100, "10.96.0.3"), 100)) // the others' age is not known
		synctest.Wait()
		if got := of(); got != "0" {
			t.Errorf("the one that was made is not the first, but %q", got)
		}
		apply(aged(service("-", 30100, "10.96.0.4"), 200))
		synctest.Wait()
		if open, failing := ports.Ports(); of() != "0" || open != 1 || failing != 3 {
			t.Errorf("a later one has taken the port: %q; %d open, %d failing", of(), open, failing)
		}
		apply(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{name("0"): nil}})
		synctest.Wait()
		if got := of(); got != "-" {
			t.Errorf("once the first is gone, %q has the port", got)
		}
		apply(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{name("-"): nil}})
		synctest.Wait()
		if got := of(); got != "a" {
			t.Errorf("of two that nobody knows the age of, %q has the port", got)
		}
		apply(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{name("a"): nil}})
		synctest.Wait()
		if open, failing := ports.Ports(); open != 1 || failing != 0 {
			t.Errorf("%d open, %d failing", open, failing)
		}
	})
}

// client asks from inside a host.
func client(h *lab.Host) *http.Client {
	return &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{
		DialContext: func(ctx context.Context, network, addr string) (c net.Conn, err error) {
			err = h.Do(func() error {
				c, err = (&net.Dialer{}).DialContext(ctx, network, addr)
				return err
			})
			return c, err
		},
	}}
}

// TestPortsAnswer asks over HTTP, in a network namespace: each family has a count of its own.
func TestPortsAnswer(t *testing.T) {
	h := labtest.NewHost(t, labtest.NewNet(t), "node")
	healthy := true
	var mu sync.Mutex
	ports := &NodePorts{
		Config: dataplane.Config{
			NodeName:          "here",
			NodePortAddresses: []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")},
		},
		Healthy: func() bool { mu.Lock(); defer mu.Unlock(); return healthy },
		Report:  func(e *ListenError) { t.Error(e) },
		Listen: func(network, addr string) (l net.Listener, err error) {
			return l, errors.Join(h.Do(func() error { l, err = net.Listen(network, addr); return err }))
		},
	}
	apply, stop := running(t, ports)
	c := client(h)
	apply(addrDelta("127.0.0.1 ::1"), service("web", 30100, "10.96.0.1 fd00::1"),
		endpoints("web", "10.1.0.1 10.1.0.2 -10.1.0.3 fd00:1::1"))
	testkit.Eventually(t, time.Minute, "two open ports", func() bool { open, _ := ports.Ports(); return open == 2 })
	for _, test := range []struct {
		what    string
		delta   snapshot.Delta
		healthy bool
		at      string
		code    int
		count   int
	}{
		{"two are ready", snapshot.Delta{}, true, "127.0.0.1", 200, 2},
		{"one is ready", snapshot.Delta{}, true, "[::1]", 200, 1},
		{"the proxy is not well", snapshot.Delta{}, false, "127.0.0.1", 503, 2},
		{"all drain", endpoints("web", "-10.1.0.1 -10.1.0.2"), true, "127.0.0.1", 503, 0},
		{"one is back", endpoints("web", "-10.1.0.1 10.1.0.2"), true, "127.0.0.1", 200, 1},
	} {
		mu.Lock()
		healthy = test.healthy
		mu.Unlock()
		apply(test.delta)
		resp, err := c.Post("http://"+test.at+":30100/any/path?x", "", nil)
		labtest.Check(t, err)
		body, err := io.ReadAll(resp.Body)
		labtest.Check(t, err)
		resp.Body.Close()
		want := fmt.Sprintf(
			"{\n\t\"service\": {\n\t\t\"namespace\": \"default\",\n\t\t\"name\": \"web\"\n\t},\n\t\"localEndpoints\": %d,\n"+
				"\t\"serviceProxyHealthy\": %v\n}",
			test.count,
			test.healthy,
		)
		if resp.StatusCode != test.code || string(body) != want {
			t.Errorf("%s: %d %s; want %d %s", test.what, resp.StatusCode, body, test.code, want)
		}
		for header, want := range map[string]string{
			"Content-Type": "application/json", "X-Content-Type-Options": "nosniff",
			"X-Load-Balancing-Endpoint-Weight": fmt.Sprint(test.count),
		} {
			if got := resp.Header.Get(header); got != want {
				t.Errorf("%s: %s is %q; want %q", test.what, header, got, want)
			}
		}
	}
	stop()
	if _, err := c.Get("http://127.0.0.1:30100"); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("after the end: %v", err)
	}
}

// BenchmarkSettled: the cost follows the change, and not the number of Services with a port.
func BenchmarkSettled(b *testing.B) {
	for _, size := range []int{10, 1000} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			ports := &NodePorts{Config: dataplane.Config{NodeName: "here"}}
			snap := snapshot.New()
			var d snapshot.Delta
			for i := range size {
				d.Merge(service(fmt.Sprint("s", i), uint16(30000+i), "10.96.0.1"))
			}
			d.Merge(addrDelta("192.0.2.1"))
			ports.InSync(reconcile.InSync{Snapshot: snap, Change: snap.Apply(d)})
			for b.Loop() {
				ports.InSync(reconcile.InSync{Snapshot: snap, Change: snap.Apply(endpoints("s5", "10.1.0.1 10.1.0.2"))})
			}
		})
	}
}
