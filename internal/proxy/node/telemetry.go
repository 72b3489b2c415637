package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/verdict-proxy/verdict/internal/proxy/backends"
	"github.com/verdict-proxy/verdict/internal/proxy/config"
	"github.com/verdict-proxy/verdict/internal/proxy/conntrack"
	"github.com/verdict-proxy/verdict/internal/proxy/everywhere"
	"github.com/verdict-proxy/verdict/internal/proxy/flows"
	"github.com/verdict-proxy/verdict/internal/proxy/health"
	"github.com/verdict-proxy/verdict/internal/proxy/ledger"
	"github.com/verdict-proxy/verdict/internal/proxy/metrics"
	"github.com/verdict-proxy/verdict/internal/proxy/outlier"
	"github.com/verdict-proxy/verdict/internal/proxy/status"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
	"github.com/verdict-proxy/verdict/sync/watch"
)

// serving configures health and metrics. With the zero value, the node listens nowhere.
type serving struct {
	// healthz and metrics are the addresses of the servers; empty means that there is no such server.
	healthz, metrics string
	// hardFail ends the node if a server cannot listen. profiling adds profiles to the metrics server.
	hardFail, profiling bool
	// nodePorts enables the health check node ports of Services.
	nodePorts bool
	// late is how long a change may wait before the node is unhealthy; 0 means health.DefaultLate.
	late time.Duration
	// needsNode is true if clients may be sent only to a node whose Node object exists.
	needsNode bool
	// detail is how finely connections are counted, and maxSeries the limit of series; 0 means metrics.DefaultMaxSeries.
	detail    metrics.Detail
	maxSeries int
	// configz returns the configuration to show.
	configz func() any
	// holdsLease, if not nil, reports whether this proxy holds the lease.
	holdsLease func() bool
	// droppedLines, if not nil, counts the lines that the log dropped.
	droppedLines func() uint64
	// everywhere connects the node to the collector; nil if it does not.
	everywhere *everywhereOptions
	// events sends events to the cluster's operators.
	events clusterEvents
	// publisher, if not nil, writes what this proxy says of the node into the Node object.
	publisher *publisher
	// checks, if not nil, looks at the host.
	checks *hostChecks
}

// servingOf converts the settings.
func servingOf(w *configWatcher, s *config.Settings, events clusterEvents, publisher *publisher, place func() bool,
) (v serving, err error) {
	v = serving{
		hardFail: s.HardFail, profiling: s.Profiling, nodePorts: true, late: 2 * s.SyncPeriod, needsNode: s.Manifests == "",
		maxSeries: s.MetricsMaxSeries, droppedLines: w.log.limit.LeftOut, events: events, holdsLease: place,
		publisher: publisher,
		configz: func() any {
			d := &w.settings.Load().Document
			return map[string]any{"kubeproxy.config.k8s.io": &d.KubeProxy, "verdict": &d.Verdict}
		},
	}
	if err := v.detail.Set(s.MetricsConnections); err != nil {
		w.log.Error(err.Error()) // the settings were checked
	}
	if s.Healthz.IsValid() {
		v.healthz = s.Healthz.String()
	}
	if s.Metrics.IsValid() {
		v.metrics = s.Metrics.String()
	}
	v.everywhere, err = newEverywhere(s)
	return v, err
}

// telemetry is the health and the metrics of a node.
type telemetry struct {
	serving  serving
	name     string
	log      *slog.Logger
	outliers *outliers
	health   *health.Proxy
	status   *status.Tracker
	board    *status.Board
	ports    *health.NodePorts
	metrics  *metrics.Metrics
	counters backends.Counters
	pending  *pendingLists
	servers  []*health.Server
	// everywhere, if not nil, asks the collector and answers it.
	everywhere *everywhere.Agent
	// ledger, if not nil, keeps a history.
	ledger *ledger.Writer
	// pressure says who fills connection tracking; nil unless connections are recorded.
	pressure atomic.Pointer[conntrack.PressureGauge]
	// limits counts open connections; nil with a backend that cannot limit them.
	limits atomic.Pointer[conntrack.OpenLimits]
	// book, if not nil, keeps records of connections.
	book *flows.Book
}

// newTelemetry creates health and metrics. Servers with hardFail listen at once, so that the node does not start
// without them.
func newTelemetry(n *Node, queue *snapshot.Queue, loop *reconcile.Loop, found *outliers) (_ *telemetry, err error) {
	v := n.serving
	t := &telemetry{serving: v, name: n.Config.NodeName, log: n.Log, outliers: found, ledger: n.Ledger,
		book: n.records.kept(), pending: &pendingLists{}}
	t.health = health.New(health.Options{
		Late: v.late, NeedsNode: v.needsNode, Waiting: queue.Waiting, Missing: t.pending.names,
		Quarantined: func() int { return len(loop.Quarantined()) }, Unread: func() int { return len(n.unread()) },
	})
	st := status.Options{
		Version: BuildInfo().Version, Backend: backendName(n), Node: n.Config.NodeName,
		Progress: queue.Progress, Waiting: queue.Waiting, Quarantined: loop.Quarantined, Ejected: found.ejected,
		Ledger: ledgerEnd(n.Ledger), Unread: n.unread,
	}
	if c := v.checks; c != nil {
		c.overlaps = loop.Overlaps
		st.Preflight = c.findings
	}
	t.status = status.New(st)
	t.board = status.NewBoard(status.BoardOptions{Backend: st.Backend, Status: t.status.Status, Queued: queue.Queued,
		Quarantined: loop.Quarantined, Unscheduled: loop.Unscheduled})
	t.ports = &health.NodePorts{Config: n.Config, Healthy: t.health.Healthy, Report: t.reportPortFailure}
	t.everywhere = v.everywhere.agent(n, t.status)
	if t.ledger != nil && n.Backend.OnSent != nil {
		n.Backend.OnSent(t.ledger.Sent)
	}
	if v.metrics != "" && n.Backend.Counters != nil {
		if t.counters, err = n.Backend.Counters(); err != nil {
			return nil, err
		}
	}
	t.metrics = t.newMetrics(n.Backend, queue, loop)
	t.servers = t.makeServers(backendName(n), loop)
	for _, server := range t.servers {
		if err := server.Bind(); err != nil {
			return nil, errors.Join(err, t.close())
		}
	}
	return t, nil
}

// newMetrics creates the metrics, which ask the parts of a node when somebody reads them.
func (t *telemetry) newMetrics(backend *backends.Opened, queue *snapshot.Queue, loop *reconcile.Loop,
) *metrics.Metrics {
	v := &t.serving
	o := metrics.Options{
		Detail: v.detail, MaxSeries: v.maxSeries, Version: Version(),
		Waiting: queue.Waiting, Progress: queue.Progress, Quarantined: loop.Quarantined, Unscheduled: loop.Unscheduled,
		SlowStarting:    func() int { return countStarting(loop.Starting()) },
		ClientAddresses: t.status.ClientAddresses,
		Ready:           t.health.Healthy, NodePorts: t.ports.Ports,
		Pressure: t.readPressure, LimitsLeftOut: t.limitsLeftOut, OverRate: t.overRate,
		Conntrack: conntrackUsage, Report: reporter(t.log), HoldsLease: v.holdsLease, LogDropped: v.droppedLines,
		Fill: backend.Fill, AffinityShares: backend.AffinityShares, Owns: backend.Owns, IPVS: backend.IPVS,
	}
	if t.everywhere != nil {
		o.Everywhere = t.everywhere.Stats
	}
	if t.ledger != nil {
		o.Ledger = t.ledger.Stats
	}
	if t.book != nil {
		o.Flows = t.book.Stats
	}
	if t.outliers != nil {
		o.Outliers = t.outliers.Stats
	}
	if t.counters != nil {
		o.Counters = t.counters
	}
	return metrics.New(o)
}

func (t *telemetry) limitsLeftOut() int {
	if o := t.limits.Load(); o != nil {
		return o.LeftOut()
	}
	return 0
}

func (t *telemetry) readPressure() conntrack.Pressure {
	if g := t.pressure.Load(); g != nil {
		return g.Pressure()
	}
	return conntrack.Pressure{}
}

// backendName returns the name of the backend that writes.
func backendName(n *Node) string { return cmp.Or(n.Backend.Mode, string(config.NFTables)) }

// makeServers creates the servers of health checks and metrics.
func (t *telemetry) makeServers(mode string, loop *reconcile.Loop) []*health.Server {
	v := &t.serving
	checks := http.NewServeMux()
	checks.Handle("/", t.health.Handler(func(p health.Probe, code int) { t.metrics.ObserveProbe(p.String(), code) }))
	found := outlier.New(outlier.Options{}) // nothing is found without evidence
	if t.outliers != nil {
		found = t.outliers.Detector
	}
	checks.Handle("GET /outliers", health.OnlyHost(found))
	checks.Handle("GET /status", health.OnlyHost(t.status))
	checks.Handle("GET /services", health.OnlyHost(t.board))
	if t.everywhere != nil {
		checks.Handle("GET /everywhere", t.everywhere)
	} else {
		checks.HandleFunc("GET /everywhere", everywhere.Off)
	}
	checks.Handle("GET /slow-starts", health.OnlyHost(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		health.AnswerJSON(w, http.StatusOK, reportSlowStarts(loop.Starting()))
	})))
	pages := metrics.Pages{Mode: mode, Config: v.configz, Profiling: v.profiling}
	if t.book != nil {
		pages.Flows = health.OnlyHost(t.book)
	}
	return []*health.Server{
		{Name: "health checks", Addr: v.healthz, HardFail: v.hardFail, Log: t.log, Handler: checks,
			InUse:  "Services are programmed; the pod is not Ready: the kubelet asks the other process, such as kube-proxy",
			Failed: t.failed("FailedToStartProxierHealthcheck", "StartKubeproxy")},
		{Name: "metrics", Addr: v.metrics, HardFail: v.hardFail, Log: t.log,
			Handler: t.metrics.Handler(pages), Failed: t.failed("FailedToStartMetricServer", "StartKubeproxy")},
	}
}

// run serves until ctx is done.
func (t *telemetry) run(ctx context.Context, group *errgroup.Group) {
	for _, server := range t.servers {
		group.Go(func() error { return server.Run(ctx) })
	}
	if t.serving.nodePorts {
		group.Go(func() error { return t.ports.Run(ctx) })
	}
	if p := t.serving.publisher; p != nil {
		runBeside(ctx, group, func(ctx context.Context) { p.run(ctx, t.status.Facts) })
	}
	if c := t.serving.checks; c != nil {
		runBeside(ctx, group, c.run)
	}
	if t.everywhere != nil {
		runBeside(ctx, group, t.everywhere.Run)
	}
	if t.ledger != nil {
		runBeside(ctx, group, t.ledger.Run)
	}
	if t.book != nil {
		runBeside(ctx, group, t.book.Run)
	}
}

// close stops what is left after run has ended.
func (t *telemetry) close() error {
	t.metrics.Stop()
	if t.counters == nil {
		return nil
	}
	return t.counters.Close()
}

// listeners are called with the loop's events.
func (t *telemetry) listeners() []reconcile.Listener {
	list := []reconcile.Listener{t.metrics.Listener(), t.health.Listener(), t.status.Listener(),
		t.board.Listener()}
	if t.serving.nodePorts {
		list = append(list, t.ports.Listener())
	}
	if c := t.serving.checks; c != nil {
		list = append(list, c.listener())
	}
	if p := t.serving.publisher; p != nil { // behind the status, which it reads
		list = append(list, p.listener())
	}
	if t.everywhere != nil { // after the status, which it asks
		list = append(list, t.everywhere.Listener())
	}
	if t.ledger != nil {
		list = append(list, t.ledger.Listener())
	}
	return list
}

// failed returns a function that sends an event, worded as kube-proxy's, about a server that cannot listen.
func (t *telemetry) failed(reason, action string) func(error) {
	return func(err error) {
		t.serving.events.Emit(watch.Event{Warning: true, Reason: reason, Action: action, Note: err.Error()})
	}
}

// overRate tells that a port refuses connections because of its rates.
func (t *telemetry) overRate(p dataplane.PortName) {
	t.log.Info("connections to a Service are over its limits", "service", p.String())
	t.serving.events.Emit(watch.Event{Warning: true, Reason: "LimitReached", Action: "Refuse", Service: p.Service,
		Note: fmt.Sprintf("new connections to %s are over its limits on node %s; these are refused there", p, t.name)})
}

func (t *telemetry) reportPortFailure(e *health.ListenError) {
	t.log.Error("failed to listen at a health check node port", "service", e.Service.String(), "err", e)
	t.serving.events.Emit(watch.Event{Warning: true, Reason: "FailedToStartServiceHealthcheck", Action: "Listen",
		Service: e.Service,
		Note:    fmt.Sprintf("node %s: %v", t.name, e)})
}

// recordCleanup counts the result of a cleanup of flows.
func (t *telemetry) recordCleanup(l conntrack.SweepResult) {
	flows := metrics.Flows{Took: l.Took, Failed: l.Err != nil}
	for f, found := range l.Flows {
		flows.Judged[f], flows.Removed[f] = found.Judged, found.Removed
	}
	t.metrics.ObserveFlows(flows)
}

// unread returns the manifests that cannot be read.
func (n *Node) unread() (list []status.Unread) {
	for _, source := range n.Sources {
		if files, ok := underlying(source).(*watch.Files); ok {
			for _, u := range files.Unread() {
				list = append(list, status.Unread{File: u.File, Since: u.Since, Error: u.Err.Error()})
			}
		}
	}
	return list
}

// underlying returns the source of objects in a nodeSource.
func underlying(s Source) Source {
	if s, ok := s.(*nodeSource); ok {
		return s.Source
	}
	return s
}

// sink returns the sink of a source, and counts its requests.
func (t *telemetry) sink(from Source, queue *snapshot.Queue) watch.Sink {
	name := "objects"
	switch from := underlying(from).(type) {
	case *watch.Kubernetes:
		from.Requested = func(r watch.Request) { t.metrics.ObserveRequest(r.Method, r.Host, r.Code, r.Took) }
		t.pending.addSource(from.Missing)
		return t.metrics.CountingSink(queue)
	case *watch.Files:
		name = "manifests"
	case *watch.Host:
		name = "the host's addresses"
	case *watch.Link:
		name = "the neighbours"
	}
	return syncedSink{t.metrics.CountingSink(queue), t.pending.add(name)}
}

// syncedSink reports the first complete list.
type syncedSink struct {
	watch.Sink
	done func()
}

func (s syncedSink) Synced() {
	s.done()
	s.Sink.Synced()
}

// pendingLists are the resources that have not been listed yet.
type pendingLists struct {
	mu      sync.Mutex
	own     []string
	sources []func() []string
}

// add adds a name. The returned function removes it.
func (m *pendingLists) add(name string) (done func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	i := len(m.own)
	m.own = append(m.own, name)
	return func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.own[i] = ""
	}
}

// addSource adds a function that returns further names.
func (m *pendingLists) addSource(of func() []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.sources = append(m.sources, of)
}

func (m *pendingLists) names() (out []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, more := range m.sources {
		out = append(out, more()...)
	}
	for _, name := range m.own {
		if name != "" {
			out = append(out, name)
		}
	}
	return out
}

// conntrackUsage returns how many connections the kernel tracks, and how many it can.
func conntrackUsage() (entries, most int, err error) {
	read := func(name string) int {
		n, rerr := readConntrack(name)
		err = errors.Join(err, rerr)
		return n
	}
	return read("nf_conntrack_count"), read("nf_conntrack_max"), err
}
