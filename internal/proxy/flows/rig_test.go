package flows

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/proxy/conntrack"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/nft/kernel"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/reconcile/reconciletest"
	"github.com/verdict-proxy/verdict/sync/snapshot"
	"github.com/verdict-proxy/verdict/sync/watch"
)

func TestMain(m *testing.M) { labtest.Main(m) }

// The ports of shop/web, and of its endpoint.
const (
	echoPort    = 80 // TCP and UDP: what is sent is sent back
	resetPort   = 81 // the server resets the connection once the client has sent something
	refusedPort = 82 // nobody listens
	silentPort  = 83 // TCP and UDP: a firewall drops what is sent
	sizePort    = 84 // TCP and UDP, for tests with servers of their own
	target      = 8000
)

// rig is a node with a proxy that records. Its Service shop/web has one endpoint, shop/none has none.
type rig struct {
	*lab.Cluster
	t        *testing.T
	server   *lab.Host
	loop     reconciletest.Loop
	snap     *snapshot.Snapshot
	planner  *dataplane.Planner
	recorder *Recorder
	names    *Names
	walker   *conntrack.Walker
	// book gets the records, too.
	book *Book
	// own is what deletes flows for the proxy.
	own *conntrack.Conn

	// stop stops the proxy.
	stop func()

	mu      sync.Mutex
	records []Record
	// also gets each record, if it is not nil.
	also func(*Record)
}

// newRig makes a rig whose endpoint is a remote pod.
func newRig(t *testing.T, sysctls ...string) *rig {
	t.Helper()
	return newRigWith(t, func(c *lab.Cluster) *lab.Host { return c.RemotePods[0] }, sysctls...)
}

func newRigWith(t *testing.T, server func(*lab.Cluster) *lab.Host, sysctls ...string) *rig {
	t.Helper()
	r := &rig{t: t, Cluster: labtest.NewCluster(t, lab.Config{LocalPods: 2, RemotePods: 1}), snap: snapshot.New(),
		names: NewNames(), book: NewBook(Options{})}
	r.server = server(r.Cluster)
	for _, s := range append([]string{"acct=1", "timestamp=1"}, sysctls...) {
		name, value, _ := strings.Cut(s, "=")
		labtest.Check(t, r.Node.Sysctl("net/netfilter/nf_conntrack_"+name, value))
	}
	r.open()
	r.serve()
	r.apply(r.services(true))
	pods := map[snapshot.Name]*watch.Pod{}
	for _, p := range r.Pods {
		pods[snapshot.Name{Namespace: "shop", Name: p.Name}] = &watch.Pod{Addrs: []netip.Addr{p.IP4, p.IP6},
			Workload: "shop/cart"}
	}
	r.names.TakePods(pods)
	return r
}

// open makes the proxy: backend, cleaner and recorder.
func (r *rig) open() {
	r.t.Helper()
	var back *kernel.Backend
	labtest.Check(r.t, r.Node.Do(func() (err error) {
		if back, err = kernel.Open(kernel.Options{}); err != nil {
			return err
		}
		if r.own, err = conntrack.Dial(0); err != nil {
			return err
		}
		port, err := r.own.Port()
		if err != nil {
			return err
		}
		r.recorder, err = OpenRecorder(RecorderOptions{Sink: r.sink, Names: r.names, Own: map[uint32]bool{port: true},
			Opens: r.book, Look: func(ctx context.Context, do func(*conntrack.Flow)) error { return r.walker.Look(ctx, do) },
			Sysctl: r.sysctl, Log: slog.New(slog.NewTextHandler(r.t.Output(), nil))})
		return err
	}))
	r.walker = conntrack.NewWalker(r.own)
	cleaner := conntrack.NewCleaner(r.walker, nil)
	r.loop = reconciletest.Loop{Writer: back, Listeners: []reconcile.Listener{cleaner.Listener(), r.recorder.Listener()}}
	r.planner = dataplane.NewPlanner(dataplane.Config{NodeName: "node", Records: true,
		DetectLocal: dataplane.DetectLocal{ClusterCIDRs: lab.PodRange}})
	ctx, cancel := context.WithCancel(context.Background())
	var all sync.WaitGroup
	all.Go(func() { _ = r.walker.Run(ctx) })
	all.Go(func() { r.recorder.Run(ctx) })
	closers := []interface{ Close() error }{r.recorder, r.own, back}
	r.stop = sync.OnceFunc(func() {
		cancel()
		all.Wait()
		for _, c := range closers {
			c.Close()
		}
	})
	r.t.Cleanup(r.stop)
}

func (r *rig) sysctl(name string) (n int, err error) {
	err = r.Node.Do(func() error {
		text, err := os.ReadFile(filepath.Join("/proc/sys/net/netfilter", name))
		if err == nil {
			n, err = strconv.Atoi(strings.TrimSpace(string(text)))
		}
		return err
	})
	return n, err
}

func (r *rig) sink(record Record) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.also != nil {
		r.also(&record)
		return
	}
	r.records = append(r.records, record)
	r.book.Add(record)
}

// serve has the endpoint answer at its ports.
func (r *rig) serve() {
	r.t.Helper()
	_, err := r.server.Serve(snapshot.TCP, target+echoPort, target+silentPort)
	labtest.Check(r.t, err)
	_, err = r.server.Serve(snapshot.UDP, target+echoPort, target+silentPort)
	labtest.Check(r.t, err)
	labtest.Run(r.t, r.server, fmt.Sprintf("table inet filter { chain input { type filter hook input priority 0\n"+
		"meta l4proto { tcp, udp } th dport %d drop\n}\n}\n", target+silentPort), "nft", "-f", "-")
	l, err := r.server.Listen("tcp", fmt.Sprintf(":%d", target+resetPort))
	labtest.Check(r.t, err)
	r.t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = c.Read(make([]byte, 1))
			_ = c.(*net.TCPConn).SetLinger(0)
			c.Close()
		}
	}()
}

// services returns the Services, shop/web with or without its endpoint.
func (r *rig) services(endpoint bool) snapshot.Delta {
	web := &snapshot.Service{Name: snapshot.Name{Namespace: "shop", Name: "web"}}
	none := &snapshot.Service{Name: snapshot.Name{Namespace: "shop", Name: "none"}}
	addrs := []netip.Addr{r.Node.IP4, r.Node.IP6}
	d := snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{web.Name: web, none.Name: none},
		Slices: map[snapshot.Name]*snapshot.Slice{}, HostAddrs: &addrs,
		Node: &snapshot.Node{Name: "node", Zone: "a", Addresses: addrs}}
	for i, f := range ipfamily.All {
		web.ClusterIPs = append(web.ClusterIPs, lab.Nth(lab.ServiceRange[i], 1))
		none.ClusterIPs = append(none.ClusterIPs, lab.Nth(lab.ServiceRange[i], 2))
		s := &snapshot.Slice{Name: snapshot.Name{Namespace: "shop", Name: "web-" + f.NFT()}, Service: "web"}
		for _, p := range []uint16{echoPort, resetPort, refusedPort, silentPort, sizePort} {
			for _, proto := range []snapshot.Protocol{snapshot.TCP, snapshot.UDP} {
				name := fmt.Sprintf("%s-%d", proto, p)
				s.Ports = append(s.Ports, snapshot.SlicePort{Name: name, Protocol: proto, Port: target + p})
				if i == 0 {
					web.Ports = append(web.Ports, snapshot.Port{Name: name, Protocol: proto, Port: p})
				}
			}
		}
		if endpoint {
			s.Endpoints = []snapshot.Endpoint{{Addr: r.server.IP(f), Node: "node2", Zone: "b", Pod: "web-1", Ready: true,
				Serving: true}}
		}
		d.Slices[s.Name] = s
	}
	none.Ports = []snapshot.Port{{Name: "http", Protocol: snapshot.TCP, Port: 80}}
	return d
}

func (r *rig) apply(d snapshot.Delta) {
	r.t.Helper()
	r.names.Take(d)
	change, conflicts := r.planner.Apply(r.snap, r.snap.Apply(d))
	if len(conflicts) > 0 {
		r.t.Fatal(conflicts)
	}
	_, err := r.loop.Apply(r.planner.State(), change)
	labtest.Check(r.t, err)
	r.recorder.Listener().Written(reconcile.Transaction{})
}

// web returns a frontend of shop/web.
func web(f ipfamily.Family, port uint16) netip.AddrPort {
	return netip.AddrPortFrom(lab.Nth(lab.ServiceRange[f], 1), port)
}

// expect waits for the only record of a client, and compares what is said of it.
func (r *rig) expect(client netip.AddrPort, p snapshot.Protocol, want string) (found Record) {
	r.t.Helper()
	var said string
	testkit.Eventually(r.t, 90*time.Second, "a record of "+client.String()+": "+want, func() bool {
		r.expire()
		r.mu.Lock()
		defer r.mu.Unlock()
		i := slices.IndexFunc(r.records, func(r Record) bool {
			return r.Client.Addr == client && r.Protocol == strings.ToUpper(p.String())
		})
		if i < 0 {
			return false
		}
		found = r.records[i]
		r.records = slices.Delete(r.records, i, i+1)
		said = strings.TrimSpace(fmt.Sprint(found.End, " ", found.Reason))
		return true
	}, func() string { return fmt.Sprint(r.records) })
	if said != want {
		r.t.Errorf("%s, to %v: %+v; want %s", said, found.Frontend, found, want)
	}
	return found
}

// expire has the kernel remove flows whose time is over: when it lists them, it does.
func (r *rig) expire() {
	r.t.Helper()
	var c *conntrack.Conn
	labtest.Check(r.t, r.Node.Do(func() (err error) {
		c, err = conntrack.Dial(0)
		return err
	}))
	defer c.Close()
	w := conntrack.NewWalker(c)
	ctx, cancel := context.WithCancel(context.Background())
	var run sync.WaitGroup
	run.Go(func() { _ = w.Run(ctx) })
	labtest.Check(r.t, w.Look(ctx, func(*conntrack.Flow) {}))
	cancel()
	run.Wait()
}
