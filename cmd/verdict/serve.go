package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/verdict-proxy/verdict/internal/config"
	"github.com/verdict-proxy/verdict/internal/conntrack"
	"github.com/verdict-proxy/verdict/internal/health"
	"github.com/verdict-proxy/verdict/internal/ipfamily"
	"github.com/verdict-proxy/verdict/internal/metrics"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/nft/kernel"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
	"github.com/verdict-proxy/verdict/sync/watch"
)

// serving says what a node shows of itself. With the zero value it listens nowhere.
type serving struct {
	// mode is kube-proxy's word for what writes the rules: it is what tests and tools of Kubernetes know us as.
	mode string
	// healthz and metrics are where the servers listen; empty means that there is none.
	healthz, metrics string
	// hardFail ends the node if one of them cannot; profiling adds profiles to the metrics.
	hardFail, profiling bool
	// nodePorts has the health check node ports of Services answered.
	nodePorts bool
	// late is how long a change may wait until the node counts as unhealthy; 0 means health.DefaultLate.
	late time.Duration
	// needsNode says that clients are only to be sent to a node that is known as a Node.
	needsNode bool
	// detail says how finely connections are counted, and maxSeries how many series that may take; 0 means
	// metrics.DefaultMaxSeries.
	detail    metrics.Detail
	maxSeries int
	// configz gives what is shown as the configuration.
	configz func() any
	// place, if not nil, says whether another proxy could take over.
	place func() bool
	// logLeftOut, if not nil, counts the lines that the log left out.
	logLeftOut func() uint64
	// emit, if not nil, takes what the cluster's operators should see.
	emit func(watch.Event)
}

// serving gives what the settings ask for.
func (l *live) serving(s *config.Settings) serving {
	v := serving{
		hardFail: s.HardFail, profiling: s.Profiling, nodePorts: true, late: 2 * s.SyncPeriod, needsNode: s.Manifests == "",
		maxSeries: s.MetricsMaxSeries, logLeftOut: l.log.limit.LeftOut,
		emit:  func(e watch.Event) { l.events.Emit(e) },
		place: l.hasPlace.Load,
		configz: func() any {
			d := &l.settings.Load().Document
			return map[string]any{"kubeproxy.config.k8s.io": &d.KubeProxy, "verdict": &d.Verdict}
		},
	}
	if err := v.detail.Set(s.MetricsConnections); err != nil {
		l.log.Error(err.Error()) // the settings were checked
	}
	if s.Healthz.IsValid() {
		v.healthz = s.Healthz.String()
	}
	if s.Metrics.IsValid() {
		v.metrics = s.Metrics.String()
	}
	return v
}

// surface is what others see of a node: its health and its metrics.
type surface struct {
	node     *node
	health   *health.Proxy
	ports    *health.NodePorts
	metrics  *metrics.Metrics
	counters *kernel.Counters
	missing  missing
	servers  []*health.Server
}

// surface makes what the node shows. The loop must not run yet.
func (n *node) surface(queue *snapshot.Queue, loop *reconcile.Loop) (*surface, error) {
	s := &surface{node: n}
	s.health = health.New(health.Options{
		Late: n.serving.late, NeedsNode: n.serving.needsNode, Waiting: queue.Waiting, Missing: s.missing.list,
		Quarantined: func() int { return len(loop.Quarantined()) },
	})
	s.ports = &health.NodePorts{Config: n.config, Healthy: s.health.Healthy, Report: s.portFailed}
	o := metrics.Options{
		Detail: n.serving.detail, MaxSeries: n.serving.maxSeries, Version: version(),
		Waiting: queue.Waiting, Quarantined: loop.Quarantined, Unscheduled: loop.Unscheduled, Ready: s.health.Healthy, NodePorts: s.ports.Ports, Conntrack: tracked,
		Report: reporter(n.log), Place: n.serving.place, LogLeftOut: n.serving.logLeftOut,
	}
	if b := n.tables; b != nil {
		o.Fill, o.Owns = func() []metrics.Fill { return fill(b) }, b.Owns
		o.AffinityShares = func() []metrics.AffinityShare { return affinityShares(b) }
	}
	if n.scheduler != nil {
		o.IPVS = scheduled{n.scheduler}
	}
	if n.serving.metrics != "" && n.tables != nil { // rules of iptables are read for no scrape: that takes too long
		var err error
		if s.counters, err = kernel.OpenCounters(); err != nil {
			return nil, err
		}
		o.Counters = s.counters
	}
	s.metrics = metrics.New(o)
	return s, nil
}

// bind makes the servers, and has those listen without which the node is not to work.
func (s *surface) bind() error {
	v := &s.node.serving
	s.servers = []*health.Server{
		{Name: "health checks", Addr: v.healthz, HardFail: v.hardFail, Log: s.node.log,
			Handler: s.health.Handler(func(p health.Probe, code int) { s.metrics.Answered(p.String(), code) }),
			Failed:  s.failed("FailedToStartProxierHealthcheck", "StartKubeproxy")},
		{Name: "metrics", Addr: v.metrics, HardFail: v.hardFail, Log: s.node.log,
			Handler: s.metrics.Handler(metrics.Pages{Mode: cmp.Or(v.mode, string(config.NFTables)), Config: v.configz, Profiling: v.profiling}),
			Failed:  s.failed("FailedToStartMetricServer", "StartKubeproxy")},
	}
	for _, server := range s.servers {
		if err := server.Bind(); err != nil {
			return err
		}
	}
	return nil
}

// run serves until ctx is done.
func (s *surface) run(ctx context.Context, group *errgroup.Group) {
	for _, server := range s.servers {
		group.Go(func() error { return server.Run(ctx) })
	}
	if s.node.serving.nodePorts {
		group.Go(func() error { return s.ports.Run(ctx) })
	}
}

// close ends what is left once run has ended.
func (s *surface) close() error {
	s.metrics.Stop()
	if s.counters == nil {
		return nil
	}
	return s.counters.Close()
}

// failed gives what tells the cluster of a server that cannot listen, with kube-proxy's words.
func (s *surface) failed(reason, action string) func(error) {
	return func(err error) { s.emit(watch.Event{Warning: true, Reason: reason, Action: action, Note: err.Error()}) }
}

func (s *surface) portFailed(e *health.ListenError) {
	s.node.log.Error("failed to listen at a health check node port", "service", e.Service.String(), "err", e)
	s.emit(watch.Event{Warning: true, Reason: "FailedToStartServiceHealthcheck", Action: "Listen", Service: e.Service,
		Note: fmt.Sprintf("node %s: %v", s.node.config.NodeName, e)})
}

func (s *surface) emit(e watch.Event) {
	if s.node.serving.emit != nil {
		s.node.serving.emit(e)
	}
}

// listeners hear what the loop does.
func (s *surface) listeners() []reconcile.Listener {
	list := []reconcile.Listener{s.metrics.Listener(), s.health.Listener()}
	if s.node.serving.nodePorts {
		list = append(list, s.ports.Listener())
	}
	return list
}

// retune has another policy count.
func (s *surface) retune(policy dataplane.Config) { s.ports.SetConfig(policy) }

// looked is told of a look at the flows.
func (s *surface) looked(l conntrack.Look) {
	s.metrics.Looked(metrics.Flows{Took: l.Took, Failed: l.Err != nil,
		Judged: ipfamily.Per[int]{l.IPv4.Judged, l.IPv6.Judged}, Removed: ipfamily.Per[int]{l.IPv4.Removed, l.IPv6.Removed}})
}

// sink gives where a source is to put what it sees, and has its requests counted.
func (s *surface) sink(from source, queue *snapshot.Queue) watch.Sink {
	if w, ok := from.(*nodeWatch); ok {
		from = w.source
	}
	name := "objects"
	switch from := from.(type) {
	case *watch.Kubernetes:
		from.Requested = func(r watch.Request) { s.metrics.Requested(r.Method, r.Host, r.Code, r.Took) }
		s.missing.parts(from.Missing)
		return s.metrics.Before(queue)
	case *watch.Files:
		name = "manifests"
	case *watch.Host:
		name = "the host's addresses"
	}
	return synced{s.metrics.Before(queue), s.missing.part(name)}
}

// synced is a sink that takes note of the first complete list.
type synced struct {
	watch.Sink
	done func()
}

func (s synced) Synced() {
	s.done()
	s.Sink.Synced()
}

// missing is what has not been listed yet.
type missing struct {
	mu    sync.Mutex
	names []string
	more  []func() []string
}

// part adds something, until what it gives is called.
func (m *missing) part(name string) (done func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	i := len(m.names)
	m.names = append(m.names, name)
	return func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.names[i] = ""
	}
}

// parts adds what somebody else knows.
func (m *missing) parts(of func() []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.more = append(m.more, of)
}

func (m *missing) list() (out []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, more := range m.more {
		out = append(out, more()...)
	}
	for _, name := range m.names {
		if name != "" {
			out = append(out, name)
		}
	}
	return out
}

// fill says how full the kernel's sets are.
func fill(b *kernel.Backend) (out []metrics.Fill) {
	tables := b.Fill()
	if tables == nil {
		return nil
	}
	for i, f := range ipfamily.All {
		for set, size := range tables[i] {
			if id := nft.SetID(set); id.IsContent() || id == nft.Affinity {
				out = append(out, metrics.Fill{IPv6: f == ipfamily.IPv6, Set: id.String(), Elements: size.Elements, Size: size.Size})
			}
		}
	}
	return out
}

// affinityShares says who fills a map of remembered clients that is nearly full.
func affinityShares(b *kernel.Backend) (out []metrics.AffinityShare) {
	for _, s := range b.AffinityShares() {
		out = append(out, metrics.AffinityShare(s))
	}
	return out
}

// tracked says how many connections the kernel tracks, and how many it can.
func tracked() (entries, most int, err error) {
	read := func(name string) int {
		text, rerr := os.ReadFile("/proc/sys/net/netfilter/" + name)
		n, nerr := strconv.Atoi(strings.TrimSpace(string(text)))
		if rerr != nil {
			nerr = rerr
		}
		err = errors.Join(err, nerr)
		return n
	}
	return read("nf_conntrack_count"), read("nf_conntrack_max"), err
}
