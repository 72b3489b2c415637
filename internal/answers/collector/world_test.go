package collector

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/verdict-proxy/verdict/internal/proxy/everywhere"
	"github.com/verdict-proxy/verdict/internal/proxy/status"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
	"github.com/verdict-proxy/verdict/sync/watch"
)

// node is what a node has of a proxy: the tracker that follows its loop, and the agent.
type node struct {
	name    string
	tracker *status.Tracker
	agent   *everywhere.Agent
	server  *httptest.Server
	stop    func()

	mu       sync.Mutex
	snap     *snapshot.Snapshot
	progress snapshot.Progress
	// life is how long its tokens are valid, and stopped has it program nothing.
	life    time.Duration
	stopped bool
}

// newNode makes a node that finds its collector by the API.
func newNode(t testing.TB, api *fakeAPI, name string) *node {
	t.Helper()
	n := &node{name: name, snap: snapshot.New(), life: time.Hour}
	n.tracker = status.New(status.Options{Node: name, Quarantined: func() []reconcile.Quarantined { return nil },
		Progress: func() snapshot.Progress {
			n.mu.Lock()
			defer n.mu.Unlock()
			return n.progress
		}})
	leader, err := watch.LeaseAnnotations(api.config(), theLease)
	if err != nil {
		t.Fatal(err)
	}
	n.agent = everywhere.New(everywhere.Options{Node: name, Leader: leader, Holds: n.tracker.Holds,
		Log: slog.New(slog.NewTextHandler(t.Output(), nil)), Token: func() (string, error) {
			n.mu.Lock()
			defer n.mu.Unlock()
			return token(name, time.Now().Add(n.life)), nil
		}})
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { n.agent.Run(ctx) })
	n.server = httptest.NewServer(n.agent)
	n.stop = sync.OnceFunc(func() { cancel(); running.Wait(); n.server.Close() })
	t.Cleanup(n.stop)
	return n
}

// program has the node program what the API has of a Service, up to its version.
func (n *node) program(api *fakeAPI, service snapshot.Name) {
	api.mu.Lock()
	svc, list, version := api.services[service].DeepCopy(), api.slices[service], api.version
	api.mu.Unlock()
	n.apply(svc, list, fmt.Sprint(version))
}

func (n *node) apply(svc *corev1.Service, list []discoveryv1.EndpointSlice, version string) {
	name := snapshot.Name{Namespace: svc.Namespace, Name: svc.Name}
	converted, slices := watch.Objects(svc, list)
	d := snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{name: converted},
		Slices: map[snapshot.Name]*snapshot.Slice{}}
	for slice, s := range slices {
		d.Slices[snapshot.Name{Namespace: name.Namespace, Name: slice}] = s
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.stopped {
		return
	}
	event := reconcile.InSync{Snapshot: n.snap, Change: n.snap.Apply(d)}
	v := snapshot.Version(version)
	n.progress.Programmed = snapshot.Versions{Services: v, Slices: v}
	n.tracker.Listener().InSync(event)
	n.agent.Listener().InSync(event)
}

// answer is what a node's /everywhere says.
type answer struct {
	Service string
	everywhere.Answer
	Seconds float64
	code    int
}

// ask asks a node about a Service.
func (n *node) ask(t testing.TB, service string, timeout time.Duration) answer {
	t.Helper()
	a, err := n.tryAsk(context.Background(), service, timeout)
	if err != nil {
		t.Error(err)
	}
	return a
}

func (n *node) tryAsk(ctx context.Context, service string, timeout time.Duration) (a answer, err error) {
	q := url.Values{"service": {service}, "timeout": {timeout.String()}}
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, n.server.URL+"/everywhere?"+q.Encode(), nil)
	if err != nil {
		return a, err
	}
	got, err := http.DefaultClient.Do(r)
	if err != nil {
		return a, err
	}
	defer got.Body.Close()
	body, err := io.ReadAll(got.Body)
	if a.code = got.StatusCode; err == nil && json.Valid(body) {
		err = json.Unmarshal(body, &a)
	}
	return a, err
}

// newCollector starts a collector, and returns how to stop it. Lead, if there is one, runs while it leads.
func newCollector(t testing.TB, api *fakeAPI, name string, lead ...func(context.Context, Asker)) (c *Collector,
	stop func()) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	l.Close()
	o := Options{Client: api.config(), Identity: name, Lease: theLease, DaemonSet: theDaemonSet,
		Account: snapshot.Name{Namespace: "kube-system", Name: "verdict"}, Listen: address, Advertise: address,
		Log: slog.New(slog.NewTextHandler(t.Output(), nil))}
	if len(lead) > 0 {
		o.Lead = lead[0]
	}
	if c, err = New(o); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		if err := c.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	stop = sync.OnceFunc(func() { cancel(); running.Wait() })
	t.Cleanup(stop)
	return c, stop
}

// connected waits until so many nodes are connected to a collector.
func connected(t testing.TB, c *Collector, nodes int) {
	t.Helper()
	testkit.Eventually(t, 40*time.Second, fmt.Sprint(nodes, " nodes are connected"), func() bool {
		s, leading := c.Stats()
		return leading && s.Streams == nodes
	})
}
