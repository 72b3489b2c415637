package metrics

import (
	"slices"
	"strconv"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// kubeProxy are the metrics that kube-proxy has, with its names, labels, buckets and help.
type kubeProxy struct {
	sync, syncFull, syncPartial     *prometheus.HistogramVec
	lastSynced, lastQueued          *prometheus.GaugeVec
	programming                     *prometheus.HistogramVec
	endpointChanges, serviceChanges prometheus.Counter
	syncFailures                    *prometheus.CounterVec
	healthz, livez                  *prometheus.CounterVec
	conntrackSync                   *prometheus.HistogramVec
	conntrackDeleted                *prometheus.CounterVec
	requests                        *prometheus.CounterVec
	requestDuration                 *prometheus.HistogramVec
	healthchecks                    *prometheus.CounterVec
}

// ipFamily is kube-proxy's label.
const ipFamily = "ip_family"

// syncBuckets are 1 ms to 16 s.
func syncBuckets() []float64 { return prometheus.ExponentialBuckets(0.001, 2, 15) }

// programmingBuckets are those on which the objective for clusters is defined: a quarter of a second to five minutes.
func programmingBuckets() []float64 {
	return slices.Concat(
		prometheus.LinearBuckets(0.25, 0.25, 2), prometheus.LinearBuckets(1, 1, 59),
		prometheus.LinearBuckets(60, 5, 12), prometheus.LinearBuckets(120, 30, 7))
}

// As in kube-proxy since 1.37, a histogram is a native one, too, for whoever asks for that by protobuf: each of its
// buckets is at most a tenth wider than the last, and there are no more than nativeBuckets.
const (
	nativeFactor  = 1.1
	nativeBuckets = 160
)

// maker makes metrics and registers them.
type maker struct{ prometheus.Registerer }

func (m maker) counter(name, help string) prometheus.Counter {
	return promauto.With(m).NewCounter(prometheus.CounterOpts{Name: name, Help: help})
}

func (m maker) counters(name, help string, labels ...string) *prometheus.CounterVec {
	return promauto.With(m).NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
}

func (m maker) gauge(name, help string) prometheus.Gauge {
	return promauto.With(m).NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
}

func (m maker) gauges(name, help string, labels ...string) *prometheus.GaugeVec {
	return promauto.With(m).NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help}, labels)
}

func (m maker) gaugeFunc(name, help string, labels prometheus.Labels, value func() float64) {
	promauto.With(m).NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help, ConstLabels: labels}, value)
}

func (m maker) histograms(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
	return promauto.With(m).NewHistogramVec(prometheus.HistogramOpts{
		Name: name, Help: help, Buckets: buckets,
		NativeHistogramBucketFactor: nativeFactor, NativeHistogramMaxBucketNumber: nativeBuckets,
	}, labels)
}

func (k *kubeProxy) register(registry, slis prometheus.Registerer, o *Options, r *reader) {
	m := maker{registry}
	k.registerSync(m, o)
	m.MustRegister(together{[]scraped{noLocalMetric}, r.sendNoLocal},
		together{[]scraped{atLocalhostMetric}, r.sendAtLocalhost})
	k.healthz = m.counters("kubeproxy_proxy_healthz_total", "Cumulative proxy healthz HTTP status", "code")
	k.livez = m.counters("kubeproxy_proxy_livez_total", "Cumulative proxy livez HTTP status", "code")
	k.conntrackSync = m.histograms("kubeproxy_conntrack_reconciler_sync_duration_seconds",
		"ReconcileConntrackFlowsLatency latency in seconds", syncBuckets(), ipFamily)
	k.conntrackDeleted = m.counters("kubeproxy_conntrack_reconciler_deleted_entries_total",
		"Cumulative conntrack flows deleted by conntrack reconciler", ipFamily)
	k.requests = m.counters("rest_client_requests_total",
		"Number of HTTP requests, partitioned by status code, method, and host.", "code", "method", "host")
	k.requestDuration = m.histograms("rest_client_request_duration_seconds",
		"Request latency in seconds. Broken down by verb, and host.",
		[]float64{0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0}, "verb", "host")
	k.registerSLIs(maker{slis}, o)
	k.zero()
}

func (k *kubeProxy) registerSync(m maker, o *Options) {
	k.sync = m.histograms("kubeproxy_sync_proxy_rules_duration_seconds", "SyncProxyRules latency in seconds",
		syncBuckets(), ipFamily)
	k.syncFull = m.histograms("kubeproxy_sync_full_proxy_rules_duration_seconds",
		"SyncProxyRules latency in seconds for full resyncs", syncBuckets(), ipFamily)
	k.syncPartial = m.histograms("kubeproxy_sync_partial_proxy_rules_duration_seconds",
		"SyncProxyRules latency in seconds for partial resyncs", syncBuckets(), ipFamily)
	k.lastSynced = m.gauges("kubeproxy_sync_proxy_rules_last_timestamp_seconds",
		"The last time proxy rules were successfully synced", ipFamily)
	k.lastQueued = m.gauges("kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds",
		"The last time a sync of proxy rules was queued", ipFamily)
	k.programming = m.histograms("kubeproxy_network_programming_duration_seconds",
		"In Cluster Network Programming Latency in seconds", programmingBuckets(), ipFamily)
	k.endpointChanges = m.counter("kubeproxy_sync_proxy_rules_endpoint_changes_total",
		"Cumulative proxy rules Endpoint changes")
	k.serviceChanges = m.counter("kubeproxy_sync_proxy_rules_service_changes_total",
		"Cumulative proxy rules Service changes")
	if o.Waiting != nil {
		m.gaugeFunc("kubeproxy_sync_proxy_rules_endpoint_changes_pending", "Pending proxy rules Endpoint changes", nil,
			func() float64 { return float64(o.Waiting().Slices) })
		m.gaugeFunc("kubeproxy_sync_proxy_rules_service_changes_pending", "Pending proxy rules Service changes", nil,
			func() float64 { return float64(o.Waiting().Services) })
	}
	k.syncFailures = m.counters("kubeproxy_sync_proxy_rules_nftables_sync_failures_total",
		"Cumulative proxy nftables sync failures", ipFamily)
}

// registerSLIs makes what Kubernetes components show at /metrics/slis.
func (k *kubeProxy) registerSLIs(m maker, o *Options) {
	k.healthchecks = m.counters("kubernetes_healthchecks_total", "This metric records the results of all healthcheck.",
		"name", "type", "status")
	if o.Ready != nil {
		m.gaugeFunc("kubernetes_healthcheck", "This metric records the result of a single healthcheck.",
			prometheus.Labels{"name": "rules", "type": "healthz"}, func() float64 { return one(o.Ready()) })
	}
}

// zero has series begin before they count: what appears with a value of 1 looks to Prometheus as if it had always been
// that.
func (k *kubeProxy) zero() {
	for _, f := range families {
		for _, h := range []*prometheus.HistogramVec{k.sync, k.syncFull, k.syncPartial, k.programming, k.conntrackSync} {
			h.WithLabelValues(f)
		}
		for _, c := range []*prometheus.CounterVec{k.syncFailures, k.conntrackDeleted} {
			c.WithLabelValues(f)
		}
		for _, g := range []*prometheus.GaugeVec{k.lastSynced, k.lastQueued} {
			g.WithLabelValues(f)
		}
	}
	for _, code := range []int{200, 503} {
		k.healthz.WithLabelValues(codeText(code))
		k.livez.WithLabelValues(codeText(code))
	}
}

func setBoth(g *prometheus.GaugeVec, value float64) {
	for _, f := range families {
		g.WithLabelValues(f).Set(value)
	}
}

// codeText is an HTTP status as client-go labels it.
func codeText(code int) string {
	if code == 0 {
		return "<error>"
	}
	return strconv.Itoa(code)
}

func one(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

var noLocalMetric = scrapedGauge("kubeproxy_sync_proxy_rules_no_local_endpoints_total",
	"Number of services with a Local traffic policy and no endpoints", "traffic_policy", ipFamily)

// sendNoLocal shows how many Service ports have a policy Local, and endpoints, but none here. It is a gauge, though its
// name in kube-proxy ends like a counter's.
func (r *reader) sendNoLocal(ch chan<- prometheus.Metric) {
	var counts ipfamily.Per[localCount]
	r.locked(func() { counts = r.noLocal })
	for i, f := range families {
		noLocalMetric.put(ch, float64(counts[i].internal), "internal", f)
		noLocalMetric.put(ch, float64(counts[i].external), "external", f)
	}
}

var atLocalhostMetric = scrapedGauge("kubeproxy_nftables_localhost_nodeport_listeners",
	"Number of node ports that answer at localhost, without a listener", ipFamily)

// sendAtLocalhost shows how many node ports answer at localhost. kube-proxy 1.37 has a listener for each, behind a
// feature gate; here the kernel translates, IPv4 alone, and the gauge counts what answers as one of those listeners
// would.
func (r *reader) sendAtLocalhost(ch chan<- prometheus.Metric) {
	var counts ipfamily.Per[int]
	r.locked(func() { counts = r.atLocalhost })
	for i, f := range families {
		atLocalhostMetric.put(ch, float64(counts[i]), f)
	}
}
