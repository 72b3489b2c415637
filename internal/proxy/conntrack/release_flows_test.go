package conntrack

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/nft/kernel"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/reconcile/reconciletest"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// held is a cluster with a proxy in its node, a Releaser at work, and clients that hold connections to a Service.
type held struct {
	*lab.Cluster
	t        testing.TB
	snap     *snapshot.Snapshot
	planner  *dataplane.Planner
	loop     *reconciletest.Loop
	mu       sync.Mutex
	released map[ReleaseReason]int
	clients  []*holder
	// rebalance is what the Service asks for.
	rebalance time.Duration
}

// holder is a client that sends a few bytes each 100 ms unless it only listens, and reads what comes.
type holder struct {
	conn   net.Conn
	quiet  bool
	server string
	ended  chan struct{}
	once   sync.Once
	// err ended the connection, at a time; they are valid once ended is closed.
	err error
	at  time.Time
}

// end records the first error. Only one of reading and writing gets it.
func (c *holder) end(err error) {
	c.once.Do(func() {
		c.err, c.at = err, time.Now()
		close(c.ended)
	})
}

func newHeld(t testing.TB) *held { return newHeldWith(t, 2) }

func newHeldWith(t testing.TB, remote int) *held {
	h := &held{t: t, snap: snapshot.New(), released: map[ReleaseReason]int{},
		Cluster: labtest.NewCluster(t, lab.Config{LocalPods: 1, RemotePods: remote})}
	for _, pod := range h.RemotePods {
		_, err := pod.Serve(snapshot.TCP, 5353)
		labtest.Check(t, err)
	}
	var nft *kernel.Backend
	labtest.Check(t, h.Node.Do(func() (err error) {
		nft, err = kernel.Open(kernel.Options{})
		return err
	}))
	t.Cleanup(func() { nft.Close() })
	h.planner = dataplane.NewPlanner(dataplane.Config{NodeName: "node", SecondChance: snapshot.SecondChanceOn,
		DetectLocal: dataplane.DetectLocal{ClusterCIDRs: lab.PodRange}})
	r := newReleaser(open(t, h.Node), ReleaserOptions{Probe: h.probe, Report: h.report})
	h.loop = &reconciletest.Loop{Writer: nft, Listeners: []reconcile.Listener{r.Listener()}}
	ctx, cancel := context.WithCancel(context.Background())
	var done sync.WaitGroup
	done.Go(func() { h.Node.Do(func() error { return r.walker.Run(ctx) }) })
	t.Cleanup(func() { cancel(); done.Wait() })
	addrs := []netip.Addr{h.Node.IP4, h.Node.IP6}
	h.apply(snapshot.Delta{HostAddrs: &addrs, Node: &snapshot.Node{Name: "node", Addresses: addrs}})
	return h
}

func (h *held) report(l ReleaseResult) {
	if err := errors.Join(l.Err, l.Reset); err != nil {
		h.t.Error(err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, r := range l.Released {
		h.released[r.Reason] += r.Flows
	}
}

// probe connects once, with a second's patience.
func (h *held) probe(ctx context.Context, endpoints []netip.AddrPort) []bool {
	answers := make([]bool, len(endpoints))
	ctx, cancel := context.WithTimeout(ctx, 400*time.Millisecond)
	defer cancel()
	var all sync.WaitGroup
	for i, e := range endpoints {
		all.Go(func() {
			c, err := h.Node.DialContext(ctx, "tcp", e.String())
			if answers[i] = err == nil || errors.Is(err, syscall.ECONNREFUSED); err == nil {
				c.Close()
			}
		})
	}
	all.Wait()
	return answers
}

func (h *held) apply(d snapshot.Delta) {
	h.t.Helper()
	change, conflicts := h.planner.Apply(h.snap, h.snap.Apply(d))
	if len(conflicts) > 0 {
		h.t.Fatal(conflicts)
	}
	_, err := h.loop.Apply(h.planner.State(), change)
	labtest.Check(h.t, err)
}

// serve makes pods the endpoints of the Service.
func (h *held) serve(drain time.Duration, pods ...*lab.Host) {
	h.t.Helper()
	svc := &snapshot.Service{Name: name("web"), Drain: drain, Rebalance: h.rebalance,
		Ports: []snapshot.Port{{Protocol: snapshot.TCP, Port: port}}}
	d := snapshot.Delta{
		Services: map[snapshot.Name]*snapshot.Service{svc.Name: svc},
		Slices:   map[snapshot.Name]*snapshot.Slice{},
	}
	for i, f := range lab.Families() {
		svc.ClusterIPs = append(svc.ClusterIPs, lab.Nth(lab.ServiceRange[i], 1))
		sl := &snapshot.Slice{Name: name("web-" + f.String()), Service: "web",
			Ports: []snapshot.SlicePort{{Protocol: snapshot.TCP, Port: 5353}}}
		for _, pod := range pods {
			sl.Endpoints = append(sl.Endpoints, snapshot.Endpoint{Addr: pod.IP(f), Ready: true, Serving: true})
		}
		d.Slices[sl.Name] = sl
	}
	h.apply(d)
}

// eject says that a pod does not answer.
func (h *held) eject(pod *lab.Host) {
	health := &snapshot.Health{}
	for _, f := range lab.Families() {
		health.Unhealthy = append(health.Unhealthy, snapshot.Unhealthy{
			Endpoint: netip.AddrPortFrom(pod.IP(f), 5353), Cause: snapshot.Unanswered, Since: time.Now()})
	}
	h.apply(snapshot.Delta{Health: map[snapshot.Name]*snapshot.Health{name("web"): health}})
}

// hold opens connections from a host, in both families. Those that are quiet only listen. The others begin to send once
// all are there: else they would slow down those that still connect.
func (h *held) hold(from *lab.Host, n int, quiet bool) {
	h.t.Helper()
	before := len(h.clients)
	for i := range n {
		to := netip.AddrPortFrom(lab.Nth(lab.ServiceRange[i%len(lab.Families())], 1), port)
		c, err := from.DialContext(h.t.Context(), "tcp", to.String())
		labtest.Check(h.t, err)
		h.t.Cleanup(func() { c.Close() })
		lines := bufio.NewReader(c)
		line, err := lines.ReadString('\n')
		labtest.Check(h.t, err)
		cl := &holder{conn: c, quiet: quiet, server: parseServer(line), ended: make(chan struct{})}
		h.clients = append(h.clients, cl)
		go cl.read(lines)
	}
	for i, cl := range h.clients[before:] {
		if !quiet {
			time.AfterFunc(time.Duration(i)*100*time.Millisecond/time.Duration(n), func() { go cl.send() })
		}
	}
}

func (c *holder) read(lines *bufio.Reader) {
	var buf [512]byte
	for {
		switch _, err := lines.Read(buf[:]); err {
		case nil:
		case io.EOF: // sending got the error, or will get it
			return
		default:
			c.end(err)
			return
		}
	}
}

func (c *holder) send() {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-c.ended:
			return
		case <-tick.C:
			switch _, err := c.conn.Write([]byte("still here\n")); {
			case errors.Is(err, syscall.EPIPE): // reading got the error, and is about to record it
				return
			case err != nil:
				c.end(err)
			}
		}
	}
}

// alike returns those of some clients that are quiet, or those that are not.
func alike(clients []*holder, quiet bool) (list []*holder) {
	for _, c := range clients {
		if c.quiet == quiet {
			list = append(list, c)
		}
	}
	return list
}

// of returns the clients of a server.
func (h *held) of(pod *lab.Host) (list []*holder) {
	for _, c := range h.clients {
		if c.server == pod.Name {
			list = append(list, c)
		}
	}
	return list
}

// cut takes a pod's link down.
func (h *held) cut(pod *lab.Host) {
	h.t.Helper()
	wire := h.Hosts()[0]
	link, err := wire.Netlink().LinkByName(pod.Name)
	labtest.Check(h.t, err)
	labtest.Check(h.t, wire.Netlink().LinkSetDown(link))
}

// allReset waits until clients are reset, and logs how long that took.
func (h *held) allReset(clients []*holder, since time.Time, atMost time.Duration) {
	h.t.Helper()
	deadline := time.After(time.Until(since.Add(atMost)))
	var took []time.Duration
	for _, c := range clients {
		select {
		case <-deadline:
			h.t.Fatalf("%d of %d clients were reset within %v; released %v", len(took), len(clients), atMost, h.released)
		case <-c.ended:
		}
		if !errors.Is(c.err, syscall.ECONNRESET) {
			h.t.Fatal(c.err)
		}
		took = append(took, c.at.Sub(since))
	}
	slices.Sort(took)
	h.t.Logf("%d clients reset: p50 %v, all %v", len(took), took[len(took)/2].Round(time.Millisecond),
		took[len(took)-1].Round(time.Millisecond))
}

// noneReset says that clients are still connected.
func (h *held) noneReset(clients []*holder) {
	h.t.Helper()
	if len(clients) == 0 {
		h.t.Fatal("nobody has this server")
	}
	for _, c := range clients {
		select {
		case <-c.ended:
			h.t.Fatalf("a client was reset: %v", c.err)
		default:
		}
	}
}

// parseServer returns the name of the host that wrote a greeting.
func parseServer(line string) string {
	for i := range line {
		if line[i] == ' ' {
			return line[:i]
		}
	}
	return line
}

// cutOff cuts the first server off, and a second later it leaves its Service.
func cutOff(h *held, gone, left *lab.Host) time.Time {
	h.cut(gone)
	time.Sleep(time.Second)
	h.noneReset(h.clients)
	h.serve(0, left)
	return time.Now()
}

// TestHeldConnections holds connections of two servers, one of which leaves in different ways. A tenth of the clients
// only listens.
func TestHeldConnections(t *testing.T) {
	tests := []struct {
		what    string
		clients int
		// leave returns the moment that counts, after which the clients of the first server are reset within some time; 0:
		// never.
		leave  func(*held, *lab.Host, *lab.Host) time.Time
		within time.Duration
		// quiet says that those are reset, too, that only listen.
		quiet bool
	}{
		{"cut off", 1000, cutOff, 15 * time.Second, true},
		{"cut off, counted", 200, cutOff, 15 * time.Second, true},
		{"ejected", 200, func(h *held, gone, left *lab.Host) time.Time {
			h.cut(gone)
			start := time.Now()
			time.Sleep(2 * time.Second)
			h.eject(gone)
			return start
		}, 15 * time.Second, false},
		{"drained", 200, func(h *held, gone, left *lab.Host) time.Time {
			h.serve(3*time.Second, left)
			start := time.Now()
			time.Sleep(2800 * time.Millisecond)
			h.noneReset(h.clients)
			return start
		}, 15 * time.Second, true},
		{"graceful", 200, func(h *held, gone, left *lab.Host) time.Time {
			h.serve(0, left)
			return time.Now()
		}, 0, false},
	}
	for _, test := range tests {
		t.Run(test.what, func(t *testing.T) {
			h := newHeld(t)
			if test.what == "cut off, counted" {
				labtest.Check(t, h.Node.Sysctl("net/netfilter/nf_conntrack_acct", "1"))
			}
			gone, left := h.RemotePods[0], h.RemotePods[1]
			h.serve(0, gone, left)
			h.hold(h.Pods[0], test.clients*9/10, false)
			h.hold(h.Pods[0], test.clients/10, true)
			time.Sleep(time.Second)
			since := test.leave(h, gone, left)
			if test.within > 0 {
				h.allReset(alike(h.of(gone), false), since, test.within)
			} else {
				time.Sleep(12 * time.Second)
				h.noneReset(h.of(gone))
			}
			if test.quiet {
				h.allReset(alike(h.of(gone), true), since, test.within)
			} else {
				h.noneReset(alike(h.of(gone), true))
			}
			h.noneReset(h.of(left))
		})
	}
}

// TestHeldWithoutEndpoints: the Service is left without endpoints. The rules reset its clients.
func TestHeldWithoutEndpoints(t *testing.T) {
	h := newHeld(t)
	h.serve(0, h.RemotePods[0])
	h.hold(h.Pods[0], 20, false)
	h.cut(h.RemotePods[0])
	time.Sleep(3 * time.Second)
	h.serve(0)
	h.allReset(h.clients, time.Now(), 15*time.Second)
}

// BenchmarkRelease looks at the flows of departed endpoints, 100 each, among 250,000 of others.
func BenchmarkRelease(b *testing.B) {
	conn := emptyHost(b)
	entries := make([]entry, 250000)
	endpoint := func(i int) netip.AddrPort { return netip.AddrPortFrom(lab.Nth(lab.NodePodRange[0], 10+i), 80) }
	for i := range entries {
		entries[i] = entry{client: clientOf(i, false), frontend: key("198.51.100.1:443/tcp"), answered: true,
			endpoint: netip.MustParseAddrPort("198.51.100.1:443")}
		if i < 10000 {
			entries[i].frontend, entries[i].endpoint = key(webKey), endpoint(i/100)
		}
	}
	insert(b, conn, entries...)
	for _, n := range []int{1, 10, 100} {
		b.Run(fmt.Sprintf("endpoints=%d", n), func(b *testing.B) {
			var worked time.Duration
			for b.Loop() {
				r := newReleaser(conn, ReleaserOptions{})
				r.mu.inSync = true
				r.programmed.replaceTCP(nil, []*dataplane.Service{web(webKey)}, released)
				for i := range n {
					r.add(goneKey{r.programmed[key(webKey)].Name, endpoint(i)}, time.Now())
				}
				l := r.takeDue().run(b.Context())
				labtest.Check(b, l.Err)
				worked += l.Worked
			}
			b.ReportMetric(float64(worked.Milliseconds())/float64(b.N), "ms/look")
		})
	}
}
