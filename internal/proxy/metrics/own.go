package metrics

import (
	"runtime"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// verdictMetrics are the metrics that only we have.
type verdictMetrics struct {
	start           *prometheus.GaugeVec
	startDuration   prometheus.Gauge
	services        prometheus.Gauge
	counted         *prometheus.GaugeVec
	transactions    *prometheus.CounterVec
	elements        *prometheus.CounterVec
	messages, bytes prometheus.Counter
	duration        *prometheus.HistogramVec
	foreignChanges  prometheus.Counter
	checkFailures   prometheus.Counter
	flowsJudged     *prometheus.CounterVec
	lookFailures    prometheus.Counter
	released        *prometheus.CounterVec
	readyz          *prometheus.CounterVec
}

// phases are those of a transaction.
var phases = [...]string{"policy", "plan", "encode", "commit"}

// phaseBuckets are 10 µs to 10 s: a change of one endpoint takes some 20 µs, the first transaction of a large cluster
// seconds.
func phaseBuckets() []float64 { return prometheus.ExponentialBuckets(1e-5, 4, 11) }

func (w *verdictMetrics) register(registry prometheus.Registerer, o *Options) {
	m := maker{registry}
	m.gaugeFunc("verdict_build_info", "1, with the version of this program in its labels.",
		prometheus.Labels{"version": o.Version, "goversion": runtime.Version()}, func() float64 { return 1 })
	w.start = m.gauges("verdict_start_info",
		"1, with what the start did to the tables as a label: adopted as they were, corrected, or written in full.", "how")
	w.startDuration = m.gauge(
		"verdict_start_duration_seconds",
		"Time from the start until all Services were programmed; 0 until then.",
	)
	w.services = m.gauge("verdict_services", "Programmed Services.")
	w.counted = m.gauges(
		"verdict_counted_info",
		"1, with what the kernel counts within counterMemoryMiB: endpoints (and frontends), most-endpoints, "+
			"frontends, most-frontends, or nothing.",
		"counted",
	)
	w.transactions = m.counters(
		"verdict_transactions_total",
		"Transactions, by outcome: full (everything was rewritten), partial, adopted (there was "+
			"nothing to write), failed.",
		"outcome",
	)
	w.elements = m.counters(
		"verdict_transaction_elements_total",
		"Elements of maps and sets written, by change.",
		"change",
	)
	w.messages = m.counter("verdict_transaction_messages_total", "Netlink messages sent in transactions.")
	w.bytes = m.counter("verdict_transaction_bytes_total", "Bytes sent in transactions.")
	w.duration = m.histograms(
		"verdict_transaction_duration_seconds",
		"Duration of a transaction, by phase: policy (deciding), plan (comparing), encode, commit (the kernel).",
		phaseBuckets(),
		"phase",
	)
	w.foreignChanges = m.counter(
		"verdict_foreign_changes_total",
		"Changes by other programs to Verdict's tables that were repaired.",
	)
	w.checkFailures = m.counter("verdict_foreign_check_failures_total", "Failed checks for changes by other programs.")
	w.flowsJudged = m.counters("verdict_conntrack_flows_judged_total",
		"Tracked UDP and SCTP flows that were examined after a change.", ipFamily)
	w.lookFailures = m.counter(
		"verdict_conntrack_look_failures_total",
		"Failed reads of tracked flows, which were retried.",
	)
	w.readyz = m.counters("verdict_readyz_total", "Responses of /readyz, by HTTP status.", "code")
	w.released = m.counters("verdict_connections_released_total",
		"TCP connections to endpoints that are gone or dead that were released, so that their clients are reset.", "reason")
	w.registerFuncs(m, o)
	w.initSeries()
}

func (w *verdictMetrics) registerFuncs(m maker, o *Options) {
	if o.Ready != nil {
		m.gaugeFunc("verdict_ready", "1 if all Services are programmed and no change has been pending for too long.", nil,
			func() float64 { return one(o.Ready()) })
	}
	if o.Owns != nil {
		m.gaugeFunc("verdict_owns_tables", "1 if no other process can change Verdict's tables; absent where none can.",
			nil,
			func() float64 { return one(o.Owns()) })
	}
	if o.HoldsLease != nil {
		m.gaugeFunc("verdict_place_held",
			"1 if another proxy can take over; 0 while a process that is not a proxy holds the lease's name.", nil,
			func() float64 { return one(o.HoldsLease()) })
	}
	if o.NodePorts != nil {
		for state, value := range map[string]func() int{
			"open":    func() int { open, _ := o.NodePorts(); return open },
			"failing": func() int { _, failing := o.NodePorts(); return failing },
		} {
			m.gaugeFunc(
				"verdict_health_check_node_ports",
				"Sockets of health check node ports, by state: open, or failing to open.",
				prometheus.Labels{"state": state},
				func() float64 { return float64(value()) },
			)
		}
	}
	if o.Quarantined != nil {
		m.MustRegister(quarantine{o})
	}
	if o.Progress != nil {
		m.MustRegister(progress{o})
	}
	if o.Unscheduled != nil {
		m.gaugeFunc("verdict_unscheduled_services",
			"Services whose endpoints nftables chooses because IPVS rejects them.", nil,
			func() float64 { return float64(len(o.Unscheduled())) })
	}
	if o.LogDropped != nil {
		m.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "verdict_log_lines_left_out_total", Help: "Log lines dropped by the rate limit.",
		}, func() float64 { return float64(o.LogDropped()) }))
	}
	if o.Conntrack != nil {
		m.MustRegister(conntrack{o})
	}
	registerCollectors(m, o)
}

// registerCollectors registers what belongs to parts that may be off.
func registerCollectors(m maker, o *Options) {
	if o.SlowStarting != nil {
		m.gaugeFunc("verdict_endpoints_starting_slowly",
			"Endpoints that do not get all of their share of new connections yet, because their Service has a slow start.",
			nil, func() float64 { return float64(o.SlowStarting()) })
	}
	if o.Ledger != nil {
		m.MustRegister(changes{o})
	}
	if o.Everywhere != nil {
		m.MustRegister(everywhere{o})
	}
	if o.Outliers != nil {
		m.MustRegister(outliers{o})
	}
}

// initSeries has series begin before they count.
func (w *verdictMetrics) initSeries() {
	for _, outcome := range []string{"full", "partial", "adopted", "failed"} {
		w.transactions.WithLabelValues(outcome)
	}
	for _, change := range []string{"added", "replaced", "removed"} {
		w.elements.WithLabelValues(change)
	}
	for _, phase := range phases {
		w.duration.WithLabelValues(phase)
	}
	for _, f := range families {
		w.flowsJudged.WithLabelValues(f)
	}
	for _, reason := range []string{"unanswered", "drain"} {
		w.released.WithLabelValues(reason)
	}
	for _, code := range []int{200, 503} {
		w.readyz.WithLabelValues(codeText(code))
	}
}

// quarantine shows the Services that the kernel refuses: how many, and the first of them by name.
type quarantine struct{ o *Options }

// maxNamed bounds how many are shown by name.
const maxNamed = 50

var (
	quarantinedDesc = prometheus.NewDesc("verdict_quarantined_services",
		"Services that the kernel rejects; their last accepted version stays programmed.", nil, nil)
	quarantinedSinceDesc = prometheus.NewDesc(
		"verdict_quarantined_service_since_timestamp_seconds",
		"When the kernel first rejected a Service; for the first 50 by name.",
		[]string{"service_namespace", "service_name"},
		nil,
	)
)

func (quarantine) Describe(ch chan<- *prometheus.Desc) {
	ch <- quarantinedDesc
	ch <- quarantinedSinceDesc
}

func (q quarantine) Collect(ch chan<- prometheus.Metric) {
	list := q.o.Quarantined()
	ch <- prometheus.MustNewConstMetric(quarantinedDesc, prometheus.GaugeValue, float64(len(list)))
	for _, s := range list[:min(maxNamed, len(list))] {
		ch <- prometheus.MustNewConstMetric(quarantinedSinceDesc, prometheus.GaugeValue, seconds(s.Since), s.Name.Namespace,
			s.Name.Name)
	}
}

// progress shows up to which versions of the API's objects everything is programmed.
type progress struct{ o *Options }

var (
	programmedVersionDesc = prometheus.NewDesc("verdict_programmed_resource_version",
		"The resourceVersion up to which everything that the API server sent is programmed, or quarantined.",
		[]string{"resource"}, nil)
	receivedVersionDesc = prometheus.NewDesc("verdict_received_resource_version",
		"The resourceVersion up to which the API server has sent everything.", []string{"resource"}, nil)
	lagDesc = prometheus.NewDesc("verdict_programming_lag_seconds",
		"Age of the oldest change that was received and is not programmed; 0 if there is none.", nil, nil)
)

func (progress) Describe(ch chan<- *prometheus.Desc) {
	ch <- programmedVersionDesc
	ch <- receivedVersionDesc
	ch <- lagDesc
}

func (p progress) Collect(ch chan<- prometheus.Metric) {
	is := p.o.Progress()
	for _, v := range []struct {
		desc     *prometheus.Desc
		versions snapshot.Versions
	}{{programmedVersionDesc, is.Programmed}, {receivedVersionDesc, is.Received}} {
		collectVersion(ch, v.desc, "services", v.versions.Services)
		collectVersion(ch, v.desc, "endpointslices", v.versions.Slices)
	}
	lag := 0.0
	if !is.Since.IsZero() {
		lag = max(0, time.Since(is.Since).Seconds())
	}
	ch <- prometheus.MustNewConstMetric(lagDesc, prometheus.GaugeValue, lag)
}

// collectVersion shows a version, unless it is unknown or no number.
func collectVersion(ch chan<- prometheus.Metric, desc *prometheus.Desc, resource string, v snapshot.Version) {
	if !v.Ordered() {
		return
	}
	n, err := strconv.ParseFloat(string(v), 64)
	if err != nil {
		return
	}
	ch <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, n, resource)
}

// conntrack shows how full the kernel's connection tracking is.
type conntrack struct{ o *Options }

var (
	conntrackDesc = prometheus.NewDesc(
		"verdict_conntrack_entries",
		"Connections that the kernel tracks, of all kinds.",
		nil,
		nil,
	)
	conntrackMostDesc = prometheus.NewDesc("verdict_conntrack_max_entries",
		"Maximum number of tracked connections; beyond that the kernel drops packets.", nil, nil)
)

func (conntrack) Describe(ch chan<- *prometheus.Desc) {
	ch <- conntrackDesc
	ch <- conntrackMostDesc
}

func (c conntrack) Collect(ch chan<- prometheus.Metric) {
	entries, most, err := c.o.Conntrack()
	if err != nil { // the kernel has not loaded it
		return
	}
	ch <- prometheus.MustNewConstMetric(conntrackDesc, prometheus.GaugeValue, float64(entries))
	ch <- prometheus.MustNewConstMetric(conntrackMostDesc, prometheus.GaugeValue, float64(most))
}
