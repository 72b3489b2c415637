package metrics

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/proxy/conntrack"
	"github.com/verdict-proxy/verdict/internal/proxy/everywhere"
	"github.com/verdict-proxy/verdict/internal/proxy/flows"
	ledgerfiles "github.com/verdict-proxy/verdict/internal/proxy/ledger"
	"github.com/verdict-proxy/verdict/internal/proxy/outlier"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	dto "github.com/prometheus/client_model/go"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/reconcile/reconciletest"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

var update = flag.Bool("update", false, "write the goldens anew")

// fakeBackend is a kernel that takes everything but what it is told to refuse.
type fakeBackend struct {
	kernel  *fakeKernel
	receipt dataplane.Receipt
	err     error
	found   []string
	// leave, if not nil, says what of a change is left for later; left is what was.
	leave func(snapshot.Name) bool
	left  dataplane.Change
}

func (b *fakeBackend) Apply(want *dataplane.State, change dataplane.Change) (dataplane.Receipt, error) {
	if b.err != nil {
		return b.receipt, b.err
	}
	write := changed(want, change.With(b.left))
	b.left = dataplane.Change{}
	if b.leave != nil {
		for _, n := range slices.SortedFunc(maps.Keys(write), snapshot.Name.Compare) {
			if b.leave(n) {
				b.left.Services = append(b.left.Services, n)
				delete(write, n)
			}
		}
		written := maps.Clone(write)
		for _, n := range b.left.Services {
			write[n] = without(b.kernel.services[n], written)
		}
	}
	b.kernel.write(write, b.receipt.Full)
	r := b.receipt
	r.Left = b.left.Services
	return r, b.err
}

func (b *fakeBackend) Check() ([]string, time.Duration, error) { return b.found, 0, b.err }

func (b *fakeBackend) Remove() error { return nil }

// behind gives what writes by a fake, and tells the Metrics of it.
func behind(m *Metrics, w reconcile.Writer) *reconciletest.Loop {
	return &reconciletest.Loop{Writer: w, Listeners: []reconcile.Listener{m.Listener()}}
}

// world is Metrics with everything that it is told and asks for.
type world struct {
	*Metrics
	kernel      *fakeKernel
	fake        *fakeBackend
	backend     reconcile.Writer
	cluster     *randomCluster
	quarantined []reconcile.Quarantined
	ipvs        *fakeIPVS
}

func newWorld(o Options) *world {
	w := &world{kernel: newFakeKernel(), cluster: newRandomCluster(1)}
	w.fake = &fakeBackend{kernel: w.kernel}
	o.Version, o.LogDropped = "v1", func() uint64 { return 7 }
	o.Waiting = func() snapshot.Waiting { return snapshot.Waiting{Services: 1, Slices: 2} }
	o.Progress = func() snapshot.Progress {
		return snapshot.Progress{Received: snapshot.Versions{Services: "18", Slices: "20"},
			Programmed: snapshot.Versions{Services: "18", Slices: "odd"}, Waiting: snapshot.Waiting{Since: time.Now()}}
	}
	o.Quarantined = func() []reconcile.Quarantined { return w.quarantined }
	o.Unscheduled = func() []reconcile.Quarantined { return nil }
	o.ClientAddresses = func() (int, int) { return 3, 1 }
	if o.IPVS == nil {
		w.ipvs = &fakeIPVS{
			services:  map[dataplane.Key]dataplane.SchedulerStatistics{},
			endpoints: map[dataplane.Key]map[netip.AddrPort]IPVSEndpoint{},
		}
		o.IPVS = w.ipvs
	}
	o.Ready, o.Owns = func() bool { return true }, func() bool { return true }
	o.HoldsLease = func() bool { return true }
	o.SlowStarting, o.LimitsLeftOut = func() int { return 4 }, func() int { return 5 }
	o.Ledger = func() ledgerfiles.Stats { return ledgerfiles.Stats{Records: 12, Missing: 3, Errors: 1, Bytes: 4096} }
	o.Everywhere = func() everywhere.Stats {
		return everywhere.Stats{Connected: true, Waiting: 2, Answers: map[string]uint64{"everywhere": 3}}
	}
	o.Flows = func() flows.Stats {
		return flows.Stats{Totals: []flows.Total{{Service: "ns/a", ClientZone: "z1", EndpointZone: "z2", Connections: 3,
			Failures: 1, Sent: flows.Traffic{Bytes: 500}, Received: flows.Traffic{Bytes: 6000}},
			{Service: flows.Others, ClientZone: flows.Others, EndpointZone: flows.Others, Connections: 9}},
			Losses:  flows.Losses{Events: 1, Refusals: 2, Sampled: 3, Unread: 4},
			Exports: []flows.ExportStats{{To: "otlp", Written: 10, Lost: 5}}}
	}
	o.Outliers = func() outlier.Stats {
		return outlier.Stats{Ejected: [2]int{snapshot.Refused: 2}, Ejections: [2]uint64{snapshot.Refused: 3},
			Probes: [4]uint64{outlier.Silent: 4}, FlowsDeleted: 5, ReadErrors: 6}
	}
	o.NodePorts = func() (int, int) { return 3, 1 }
	o.Fill = func() []Fill {
		return []Fill{
			{Set: "services", Elements: 5, Size: 1024},
			{Family: ipfamily.IPv6, Set: "affinity", Size: 9},
			{Family: ipfamily.IPv4, Set: "kept-flows", Size: 8}, {Family: ipfamily.IPv6, Set: "kept-flows", Size: 8},
			{Set: "source-ranges"},
		}
	}
	o.AffinityShares = func() []AffinityShare {
		return []AffinityShare{{Service: snapshot.Name{Namespace: "ns", Name: "a"}, Entries: 8}}
	}
	o.Conntrack = func() (int, int, error) { return 7, 1000, nil }
	o.Pressure = func() conntrack.Pressure {
		p := conntrack.Pressure{Masquerade: &conntrack.Saturation{Flows: 32256}}
		p.Masquerade.Address, p.Masquerade.Endpoint = netip.MustParseAddr("192.0.2.7"), netip.MustParseAddrPort("10.1.0.1:80")
		p.Services = []conntrack.Share[snapshot.Name]{{Of: snapshot.Name{Namespace: "ns", Name: "a"}, Flows: 250}}
		p.Clients = []conntrack.Share[netip.Addr]{{Of: netip.MustParseAddr("192.0.2.9"), Flows: 125}}
		return p
	}
	o.Counters = w.kernel
	w.Metrics = New(o)
	w.backend = behind(w.Metrics, w.fake)
	return w
}

// apply writes the change of one step.
func (w *world) apply(t testing.TB, full bool) {
	t.Helper()
	w.fake.receipt = dataplane.Receipt{
		Full:     full,
		Added:    3,
		Replaced: 2,
		Removed:  1,
		Messages: 4,
		Bytes:    500,
		Counted:  dataplane.CountedFrontends,
		Plan:     time.Microsecond,
		Encode:   time.Millisecond,
		Commit:   time.Second,
	}
	r, err := w.backend.Apply(w.cluster.planner.State(), w.cluster.step())
	if err == nil {
		w.written(reconcile.Transaction{Receipt: r, Policy: time.Minute, Total: 2 * time.Second, Services: 9})
	}
}

// everything has everything happen that there is a metric for.
func everything(t testing.TB, detail Detail) *world {
	w := newWorld(Options{Detail: detail, MaxSeries: 4})
	for i := range 9 {
		w.apply(t, i == 0)
	}
	w.fake.err, w.fake.found = errors.New("no"), []string{"a", "b"}
	w.apply(t, false)
	w.backend.Check()
	w.fake.err = nil
	if err := w.reader.readIPVS(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	w.kernel.connectSome(w.cluster.Rand, 200)
	for at := range w.kernel.frontends {
		w.ipvs.connect(at.Key, netip.MustParseAddrPort("10.1.0.1:80"), 3)
	}
	w.kernel.rules[0][dataplane.RefusedUnusedPort] = 5
	now := time.Now()
	w.inSync(
		reconcile.InSync{
			Triggers: []snapshot.Trigger{
				{At: now.Add(-400 * time.Millisecond)},
				{At: now.Add(-2 * time.Second), Family: ipfamily.IPv6},
			},
		},
	)
	n := snapshot.Name{Namespace: "ns", Name: "a"}
	w.CountingSink(snapshot.NewQueue(1)).Put(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{n: nil},
		Slices: map[snapshot.Name]*snapshot.Slice{n: nil, {Name: "x"}: nil}})
	w.ObserveFlows(Flows{Took: time.Second, Judged: ipfamily.Per[int]{9, 8}, Removed: ipfamily.Per[int]{2, 3},
		Failed: true})
	w.ObserveRelease("drain", 3)
	for _, probe := range []string{"healthz", "livez", "readyz"} {
		w.ObserveProbe(probe, 503)
	}
	w.ObserveRequest("GET", "192.0.2.1:6443", 200, time.Second)
	w.ObserveRequest("GET", "192.0.2.1:6443", 0, time.Second)
	w.quarantined = []reconcile.Quarantined{{Name: n, Since: time.Unix(1000, 0)}}
	return w
}

func gather(t testing.TB, w *world) []*dto.MetricFamily {
	t.Helper()
	all, err := w.registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	slis, err := w.slis.Gather()
	if err != nil {
		t.Fatal(err)
	}
	return append(all, slis...)
}

// labelsOf gives the labels of all of a family's series, sorted.
func labelsOf(f *dto.MetricFamily) []string {
	labels := map[string]bool{}
	for _, m := range f.Metric {
		for _, l := range m.Label {
			labels[l.GetName()] = true
		}
	}
	return slices.Sorted(maps.Keys(labels))
}

// TestNames: the names, types, labels and help of all metrics. Dashboards and alerts of many clusters rely on them.
func TestNames(t *testing.T) {
	var b strings.Builder
	for _, f := range gather(t, everything(t, PerEndpoint)) {
		if strings.HasPrefix(f.GetName(), "go_") || strings.HasPrefix(f.GetName(), "process_") ||
			f.GetName() == "promhttp_metric_handler_errors_total" {
			continue // these are the library's
		}
		fmt.Fprintf(&b, "%s{%s} %s\n\t%s\n", f.GetName(), strings.Join(labelsOf(f), ","),
			strings.ToLower(f.GetType().String()), f.GetHelp())
	}
	golden := filepath.Join("testdata", "names.txt")
	if *update {
		if err := os.WriteFile(golden, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if b.String() != string(want) {
		t.Errorf("the metrics are others than in %s; if they should be, run go test -update and read the difference:\n%s",
			golden, b.String())
	}
}

// TestLint: names and help are as Prometheus wants them, but for one name of kube-proxy's.
func TestLint(t *testing.T) {
	problems, err := promlint.NewWithMetricFamilies(gather(t, everything(t, PerEndpoint))).Lint()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		if p.Metric != "kubeproxy_sync_proxy_rules_no_local_endpoints_total" {
			t.Errorf("%s: %s", p.Metric, p.Text)
		}
	}
}

// series gives "name{labels} value" for all that has a prefix, sorted; of histograms the count and the sum.
func series(t testing.TB, w *world, prefix string) (out []string) {
	t.Helper()
	for _, f := range gather(t, w) {
		if !strings.HasPrefix(f.GetName(), prefix) {
			continue
		}
		for _, m := range f.Metric {
			var labels []string
			for _, l := range m.Label {
				labels = append(labels, l.GetName()+"="+l.GetValue())
			}
			value := fmt.Sprint(m.GetCounter().GetValue() + m.GetGauge().GetValue())
			if h := m.Histogram; h != nil {
				value = fmt.Sprintf("%d in %.3g", h.GetSampleCount(), h.GetSampleSum())
			}
			out = append(out,
				fmt.Sprintf("%s{%s} %s", strings.TrimPrefix(f.GetName(), prefix), strings.Join(labels, ","), value))
		}
	}
	return out
}

// TestKubeProxyValues: what happened, under kube-proxy's names.
func TestKubeProxyValues(t *testing.T) {
	w := everything(t, Off)
	expect := func(prefix string, want ...string) {
		t.Helper()
		if got := series(t, w, prefix); !slices.Equal(got, want) {
			t.Errorf("%s:\n%s\nwant\n%s", prefix, strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
	}
	both := func(text string) []string {
		return []string{"{ip_family=IPv4} " + text, "{ip_family=IPv6} " + text}
	}
	const rules = "kubeproxy_sync_proxy_rules_"
	expect("kubeproxy_sync_full_proxy_rules_duration_seconds", both("1 in 2")...)
	expect("kubeproxy_sync_partial_proxy_rules_duration_seconds", both("8 in 16")...)
	expect(rules+"nftables_sync_failures_total", both("1")...)
	expect(rules+"endpoint_changes_", "pending{} 2", "total{} 2")
	expect(rules+"service_changes_", "pending{} 1", "total{} 1")
	expect("kubeproxy_conntrack_reconciler_deleted_entries_total", "{ip_family=IPv4} 2", "{ip_family=IPv6} 3")
	expect("kubeproxy_conntrack_reconciler_sync_duration_seconds", both("1 in 1")...)
	expect("kubeproxy_network_programming_duration_seconds", "{ip_family=IPv4} 1 in 0.4", "{ip_family=IPv6} 1 in 2")
	expect(
		"kubeproxy_proxy_",
		"healthz_total{code=200} 0",
		"healthz_total{code=503} 1",
		"livez_total{code=200} 0",
		"livez_total{code=503} 1",
	)
	expect(
		"rest_client_requests_total",
		"{code=200,host=192.0.2.1:6443,method=GET} 1",
		"{code=<error>,host=192.0.2.1:6443,method=GET} 1",
	)
	expect("kubernetes_healthcheck", "{name=rules,type=healthz} 1",
		"s_total{name=rules,status=error,type=healthz} 1", "s_total{name=rules,status=error,type=livez} 1",
		"s_total{name=rules,status=error,type=readyz} 1")
	if n := len(series(t, w, rules+"duration_seconds")); n != 2 {
		t.Errorf("%d histograms of all rounds", n)
	}
	internal, external := 0, 0
	for _, svc := range w.cluster.planner.State().Services {
		for _, sp := range svc.Ports {
			var i, e bool
			for _, fe := range sp.Frontends {
				for _, r := range fe.Routes {
					if len(r.Pool.Endpoints) == 0 && r.Pool.Empty == dataplane.Drop {
						i, e = i || fe.Kind == dataplane.ClusterIP, e || fe.Kind != dataplane.ClusterIP
					}
				}
			}
			internal, external = internal+int(one(i)), external+int(one(e))
		}
	}
	got := [2]int{}
	for _, line := range series(t, w, rules+"no_local_endpoints_total") {
		var n int
		fmt.Sscanf(line[strings.LastIndex(line, " "):], "%d", &n)
		got[int(one(strings.Contains(line, "external")))] += n
	}
	if got != [2]int{internal, external} || internal+external == 0 {
		t.Errorf("no local endpoints: %v; want %d internal and %d external", got, internal, external)
	}
}

// TestLocalhostNodePorts: kube-proxy 1.37 counts its listeners at 127.0.0.1 and ::1; here it is what answers there.
func TestLocalhostNodePorts(t *testing.T) {
	s := snapshot.New()
	put := func(name, clusterIP string, port uint16, endpoints ...netip.Addr) {
		n := snapshot.Name{Namespace: "ns", Name: name}
		svc := &snapshot.Service{Name: n, ClusterIPs: []netip.Addr{netip.MustParseAddr(clusterIP)},
			Ports: []snapshot.Port{{Protocol: snapshot.TCP, Port: 80, NodePort: port}}}
		slice := &snapshot.Slice{Name: n, Service: name, Ports: []snapshot.SlicePort{{Protocol: snapshot.TCP, Port: 80}}}
		for _, a := range endpoints {
			slice.Endpoints = append(slice.Endpoints, snapshot.Endpoint{Addr: a, Ready: true, Serving: true})
		}
		s.Apply(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{n: svc},
			Slices: map[snapshot.Name]*snapshot.Slice{n: slice}})
	}
	put("answers", "10.96.0.1", 30001, netip.MustParseAddr("10.1.0.1"))
	put("empty", "10.96.0.2", 30002)
	put("internal", "10.96.0.3", 0, netip.MustParseAddr("10.1.0.2"))
	r := newReader(&Options{})
	expect := func(want ipfamily.Per[int]) {
		t.Helper()
		if r.drainQueue(); r.atLocalhost != want {
			t.Errorf("%v; want %v", r.atLocalhost, want)
		}
	}
	st, _ := dataplane.Compute(dataplane.Config{LocalhostNodePorts: true}, s)
	for _, svc := range st.Services {
		r.countLocal(svc, +1)
	}
	expect(ipfamily.Per[int]{1, 0})
	for _, svc := range st.Services {
		r.countLocal(svc, -1)
	}
	expect(ipfamily.Per[int]{})
}

// TestNativeHistograms: who asks for them gets sparse buckets besides the classic ones, as from kube-proxy 1.37.
func TestNativeHistograms(t *testing.T) {
	w := everything(t, Off)
	found := 0
	for _, f := range gather(t, w) {
		if f.GetType() != dto.MetricType_HISTOGRAM {
			continue
		}
		for _, m := range f.Metric {
			h := m.GetHistogram()
			if h.Schema == nil || len(h.Bucket) == 0 {
				t.Errorf("%s: schema %v, %d classic buckets", f.GetName(), h.Schema, len(h.Bucket))
			}
			found++
		}
	}
	if found == 0 {
		t.Error("there is no histogram")
	}
}

// TestOwnValues: what happened, under our names.
func TestOwnValues(t *testing.T) {
	w := everything(t, Off)
	expect := func(prefix string, want ...string) {
		t.Helper()
		if got := series(t, w, prefix); !slices.Equal(got, want) {
			t.Errorf("%s:\n%s\nwant\n%s", prefix, strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
	}
	expect(
		"verdict_transactions_total",
		"{outcome=adopted} 0",
		"{outcome=failed} 1",
		"{outcome=full} 1",
		"{outcome=partial} 8",
	)
	expect("verdict_transaction_elements_total", "{change=added} 27", "{change=removed} 9", "{change=replaced} 18")
	expect("verdict_transaction_bytes_total", "{} 4500")
	expect("verdict_transaction_messages_total", "{} 36")
	expect(
		"verdict_transaction_duration_seconds",
		"{phase=commit} 9 in 9",
		"{phase=encode} 9 in 0.009",
		"{phase=plan} 9 in 9e-06",
		"{phase=policy} 9 in 540",
	)
	expect("verdict_start_info", "{how=full} 1")
	expect("verdict_counted_info", "{counted=frontends} 1")
	expect("verdict_services", "{} 9")
	expect("verdict_foreign_", "changes_total{} 2", "check_failures_total{} 1")
	expect(
		"verdict_quarantined_",
		"service_since_timestamp_seconds{service_name=a,service_namespace=ns} 1000",
		"services{} 1",
	)
	expect("verdict_health_check_node_ports", "{state=failing} 1", "{state=open} 3")
	expect(
		"verdict_map_",
		"elements{ip_family=IPv4,map=services} 5",
		"elements{ip_family=IPv4,map=source-ranges} 0",
		"elements{ip_family=IPv6,map=affinity} 4",
		"elements{ip_family=IPv6,map=kept-flows} 5",
		"max_elements{ip_family=IPv4,map=services} 1024",
		"max_elements{ip_family=IPv6,map=affinity} 9",
		"max_elements{ip_family=IPv6,map=kept-flows} 8",
	)
	expect(
		"verdict_conntrack_",
		"client_share{client=192.0.2.9} 0.125",
		"entries{} 7",
		"flows_judged_total{ip_family=IPv4} 9",
		"flows_judged_total{ip_family=IPv6} 8",
		"look_failures_total{} 1",
		"max_entries{} 1000",
		"share{service_name=a,service_namespace=ns} 0.25",
		"snat_saturation_percent{address=192.0.2.7,endpoint=10.1.0.1:80} 50",
	)
	expect("verdict_refused_packets_total",
		"{ip_family=IPv4,reason=over-limit,verdict=drop} 0", "{ip_family=IPv4,reason=over-limit,verdict=reject} 0",
		"{ip_family=IPv4,reason=overtaken,verdict=drop} 0", "{ip_family=IPv4,reason=source-ranges,verdict=drop} 0",
		"{ip_family=IPv4,reason=unallocated,verdict=drop} 0", "{ip_family=IPv4,reason=unused-port,verdict=reject} 5",
		"{ip_family=IPv6,reason=over-limit,verdict=drop} 0", "{ip_family=IPv6,reason=over-limit,verdict=reject} 0",
		"{ip_family=IPv6,reason=overtaken,verdict=drop} 0", "{ip_family=IPv6,reason=source-ranges,verdict=drop} 0",
		"{ip_family=IPv6,reason=unallocated,verdict=drop} 0", "{ip_family=IPv6,reason=unused-port,verdict=reject} 0")
	expect("verdict_readyz_total", "{code=200} 0", "{code=503} 1")
	expect("verdict_service_")
	expect("verdict_endpoint_")
	expect("verdict_series_left_out")
}

// TestConnections: all connections are shown once: at Service ports with a series, or with the others; and no more
// series than there is room for.
func TestConnections(t *testing.T) {
	w := everything(t, PerEndpoint)
	sum := func(lines []string) (n int) {
		for _, l := range lines {
			var v int
			fmt.Sscanf(l[strings.LastIndex(l, " "):], "%d", &v)
			n += v
		}
		return n
	}
	var connections, refused int
	for _, truth := range w.kernel.truth {
		connections += int(truth.connections)
		refused += int(truth.refused[0] + truth.refused[1])
	}
	shown := series(t, w, "verdict_service_connections_total")
	if got := sum(shown); got != connections || len(shown) != 5 ||
		!strings.Contains(strings.Join(shown, "\n"), "service_name=_others,") {
		t.Errorf("%d connections; want %d in 4 series and others:\n%s", got, connections, strings.Join(shown, "\n"))
	}
	if got := sum(series(t, w, "verdict_service_refused_packets_total")); got != refused {
		t.Errorf("%d packets refused at Services; want %d", got, refused)
	}
	if got := sum(series(t, w, "verdict_refused_packets_total")); got != refused+5 {
		t.Errorf("%d packets refused; want %d", got, refused+5)
	}
	endpoints := series(t, w, "verdict_endpoint_connections_total")
	if n := sum(endpoints); len(endpoints) != 4 || n == 0 || n > connections {
		t.Errorf("%d connections to %d endpoints; want 4:\n%s", n, len(endpoints), strings.Join(endpoints, "\n"))
	}
	for _, l := range series(t, w, "verdict_series_left_out") {
		if strings.HasSuffix(l, " 0") {
			t.Errorf("%s, and others were", l)
		}
	}
}

// TestPages asks the metrics server for everything it shows.
func TestPages(t *testing.T) {
	w := everything(t, PerService)
	srv := httptest.NewServer(
		w.Handler(
			Pages{Mode: "nftables", Profiling: true, Config: func() any { return map[string]int{"kubeproxy.config.k8s.io": 1} }},
		),
	)
	defer srv.Close()
	const plain, nosniff = "text/plain; charset=utf-8", "nosniff"
	for _, test := range []struct {
		path, contentType, options string
		code                       int
		body                       string
	}{
		{"/healthz", plain, nosniff, 200, "ok"},
		{"/proxyMode", plain, nosniff, 200, "nftables"},
		{"/configz", "application/json", nosniff, 200, `{"kubeproxy.config.k8s.io":1}`},
		{"/metrics", "text/plain; version=0.0.4; charset=utf-8; escaping=underscores", "", 200, "# HELP "},
		{"/metrics/slis", "text/plain; version=0.0.4; charset=utf-8; escaping=underscores", "", 200,
			"# HELP kubernetes_healthcheck This metric records the result of a single healthcheck."},
		{"/debug/pprof/", "text/html; charset=utf-8", nosniff, 200, "<html>"},
		{"/debug/pprof/cmdline", plain, nosniff, 200, os.Args[0]},
		{"/nothing", plain, nosniff, 404, "404 page not found"},
	} {
		resp, err := http.Get(srv.URL + test.path)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if resp.StatusCode != test.code || !strings.HasPrefix(strings.TrimSpace(string(body)), test.body) {
			t.Errorf("%s: %d %.80q; want %d %q", test.path, resp.StatusCode, body, test.code, test.body)
		}
		if c, o := resp.Header.Get("Content-Type"), resp.Header.Get("X-Content-Type-Options"); c != test.contentType ||
			o != test.options {
			t.Errorf("%s: Content-Type %q, X-Content-Type-Options %q", test.path, c, o)
		}
	}
	quiet := httptest.NewServer(w.Handler(Pages{}))
	defer quiet.Close()
	for path, code := range map[string]int{"/debug/pprof/": 404, "/configz": 200} {
		if resp, err := http.Get(quiet.URL + path); err != nil || resp.StatusCode != code {
			t.Errorf("%s: %v, %v; want %d", path, resp, err, code)
		}
	}
}

// TestStart: the first transaction says how the tables were found.
func TestStart(t *testing.T) {
	for _, test := range []struct {
		receipt dataplane.Receipt
		want    string
	}{{dataplane.Receipt{Full: true}, "full"}, {dataplane.Receipt{Adopted: true}, "adopted"},
		{dataplane.Receipt{Added: 1}, "corrected"}} {
		w := newWorld(Options{})
		w.Stop() // the fake kernel is not to be read while it is written
		if got := series(t, w, "verdict_start_"); !slices.Equal(got, []string{"duration_seconds{} 0"}) {
			t.Errorf("before: %q", got)
		}
		w.fake.receipt = test.receipt
		w.backend.Apply(w.cluster.planner.State(), w.cluster.step())
		w.fake.receipt = dataplane.Receipt{}
		w.backend.Apply(w.cluster.planner.State(), w.cluster.step())
		got := series(t, w, "verdict_start_")
		if len(got) != 2 || got[0] == "duration_seconds{} 0" || got[1] != "info{how="+test.want+"} 1" {
			t.Errorf("%+v: %q", test.receipt, got)
		}
	}
}

func TestDetailIsAFlag(t *testing.T) {
	for text, want := range map[string]Detail{"off": Off, "service": PerService, "endpoint": PerEndpoint} {
		var d Detail
		if err := d.Set(text); err != nil || d != want || d.String() != text || d.Type() == "" {
			t.Errorf("%s: %v, %v", text, d, err)
		}
	}
	var d Detail
	if err := d.Set("all"); err == nil {
		t.Error("all is taken")
	}
}

// TestDocumented: docs/METRICS.md has every metric, with its type and its labels, and no other.
func TestDocumented(t *testing.T) {
	text, err := os.ReadFile("../../../docs/METRICS.md")
	if err != nil {
		t.Fatal(err)
	}
	documented := map[string]string{}
	for line := range strings.Lines(string(text)) {
		cells := strings.Split(line, " | ")
		name, ok := strings.CutPrefix(cells[0], "| `")
		if ok && len(cells) > 3 && slices.Contains([]string{"counter", "gauge", "histogram"}, cells[1]) {
			documented[strings.TrimSuffix(name, "`")] = cells[1] + " " + strings.TrimSpace(cells[2])
		}
	}
	c := NewCollector(func() CollectorStats { return CollectorStats{} }, []string{"missing"})
	c.AddGateways(func() GatewayStats {
		return GatewayStats{Objects: map[string]int{"gateways": 1}, Writes: map[[2]string]uint64{{"services", "written"}: 1}}
	})
	collected, err := c.registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range append(gather(t, everything(t, PerEndpoint)), collected...) {
		name := f.GetName()
		if strings.HasPrefix(name, "go_") || strings.HasPrefix(name, "process_") {
			continue
		}
		labels := strings.Join(labelsOf(f), ", ")
		if labels == "" {
			labels = "–"
		}
		want := strings.ToLower(f.GetType().String()) + " " + labels
		if got := documented[name]; got != want {
			t.Errorf("%s is documented as %q; want %q", name, got, want)
		}
		delete(documented, name)
	}
	for name := range documented {
		t.Errorf("%s is documented, and not shown", name)
	}
}

// TestProgrammedBeforeItChanged: the clock of whoever changed something goes ahead of ours, or ours was set back.
// What is added up must not fall.
func TestProgrammedBeforeItChanged(t *testing.T) {
	w := newWorld(Options{})
	for _, after := range []time.Duration{-time.Second, time.Hour, -time.Second} {
		w.inSync(reconcile.InSync{Triggers: []snapshot.Trigger{{At: time.Now().Add(after)}}})
	}
	for _, f := range gather(t, w) {
		if f.GetName() != "kubeproxy_network_programming_duration_seconds" {
			continue
		}
		for _, m := range f.GetMetric() {
			if h := m.GetHistogram(); h.GetSampleCount() == 3 && h.GetSampleSum() >= 2 && h.GetSampleSum() < 60 {
				return
			}
		}
		t.Errorf("%v", f)
	}
}
