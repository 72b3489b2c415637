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
	w.startDuration = m.gauge("verdict_start_duration_seconds",
		"Time from the start until all Services were programmed; 0 until then.")
	w.services = m.gauge("verdict_services", "Programmed Services.")
	w.counted = m.gauges("verdict_counted_info",
		"1, with what the kernel counts within counterMemoryMiB: endpoints (and frontends), most-endpoints, "+
			"frontends, most-frontends, or nothing.", "counted")
	w.transactions = m.counters("verdict_transactions_total",
		"Transactions, by outcome: full (everything was rewritten), partial, adopted (there was "+
			"nothing to write), failed.", "outcome")
	w.elements = m.counters("verdict_transaction_elements_total", "Elements of maps and sets written, by change.",
		"change")
	w.messages = m.counter("verdict_transaction_messages_total", "Netlink messages sent in transactions.")
	w.bytes = m.counter("verdict_transaction_bytes_total", "Bytes sent in transactions.")
	w.duration = m.histograms("verdict_transaction_duration_seconds",
		"Duration of a transaction, by phase: policy (deciding), plan (comparing), encode, commit (the kernel).",
		phaseBuckets(), "phase")
	w.foreignChanges = m.counter("verdict_foreign_changes_total",
		"Changes by other programs to Verdict's tables that were repaired.")
	w.checkFailures = m.counter("verdict_foreign_check_failures_total", "Failed checks for changes by other programs.")
	w.flowsJudged = m.counters("verdict_conntrack_flows_judged_total",
		"Tracked UDP and SCTP flows that were examined after a change.", ipFamily)
	w.lookFailures = m.counter("verdict_conntrack_look_failures_total",
		"Failed reads of tracked flows, which were retried.")
	w.readyz = m.counters("verdict_readyz_total", "Responses of /readyz, by HTTP status.", "code")
	w.released = m.counters("verdict_connections_released_total",
		"TCP connections to endpoints that are gone, dead or overloaded that were released, which resets them.", "reason")
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
			m.gaugeFunc("verdict_health_check_node_ports",
				"Sockets of health check node ports, by state: open, or failing to open.", prometheus.Labels{"state": state},
				func() float64 { return float64(value()) })
		}
	}
	if o.Quarantined != nil {
		m.MustRegister(together{[]scraped{quarantinedMetric, quarantinedSinceMetric}, o.sendQuarantined})
	}
	if o.Progress != nil {
		m.MustRegister(together{[]scraped{programmedVersionMetric, receivedVersionMetric, lagMetric}, o.sendProgress})
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
		m.MustRegister(together{[]scraped{conntrackMetric, conntrackMostMetric}, o.sendConntrack})
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
	if o.ClientAddresses != nil {
		for state, value := range map[string]func() int{
			"kept":        func() int { kept, _ := o.ClientAddresses(); return kept },
			"masqueraded": func() int { _, masqueraded := o.ClientAddresses(); return masqueraded },
		} {
			m.gaugeFunc("verdict_client_address_services",
				"Services that are to keep their clients' addresses, by state: kept, or masqueraded on this node nevertheless.",
				prometheus.Labels{"state": state}, func() float64 { return float64(value()) })
		}
	}
	if o.LimitsLeftOut != nil {
		m.gaugeFunc("verdict_full_clients_left_out",
			"Clients with as many open connections as a Service's limits allow that may open more, since too many have.",
			nil, func() float64 { return float64(o.LimitsLeftOut()) })
	}
	if o.Ledger != nil {
		m.MustRegister(together{[]scraped{ledgerRecordsMetric, ledgerMissingMetric, ledgerErrorsMetric, ledgerBytesMetric},
			o.sendLedger})
	}
	if o.Flows != nil {
		m.MustRegister(together{[]scraped{flowConnectionsMetric, flowFailuresMetric, flowBytesMetric, flowLossesMetric,
			flowExportedMetric}, o.sendFlows})
	}
	if o.Everywhere != nil {
		m.MustRegister(together{[]scraped{everywhereConnectedMetric, everywhereWaitingMetric, everywhereAnswersMetric},
			o.sendEverywhere})
	}
	if o.Pressure != nil {
		m.MustRegister(together{[]scraped{shareMetric, clientShareMetric, saturationMetric}, o.sendPressure})
	}
	if o.Outliers != nil {
		m.MustRegister(together{[]scraped{ejectedMetric, ejectionsMetric, probesMetric, unansweredDeletedMetric,
			evidenceFailuresMetric}, o.sendOutliers})
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
	for _, reason := range []string{"unanswered", "drain", "rebalance"} {
		w.released.WithLabelValues(reason)
	}
	for _, code := range []int{200, 503} {
		w.readyz.WithLabelValues(codeText(code))
	}
}

// maxNamed bounds how many are shown by name.
const maxNamed = 50

var (
	quarantinedMetric = scrapedGauge("verdict_quarantined_services",
		"Services that the kernel rejects; their last accepted version stays programmed.")
	quarantinedSinceMetric = scrapedGauge("verdict_quarantined_service_since_timestamp_seconds",
		"When the kernel first rejected a Service; for the first 50 by name.", "service_namespace", "service_name")
)

// sendQuarantined shows the Services that the kernel refuses: how many, and the first of them by name.
func (o *Options) sendQuarantined(ch chan<- prometheus.Metric) {
	list := o.Quarantined()
	quarantinedMetric.put(ch, float64(len(list)))
	for _, s := range list[:min(maxNamed, len(list))] {
		quarantinedSinceMetric.put(ch, seconds(s.Since), s.Name.Namespace, s.Name.Name)
	}
}

var (
	programmedVersionMetric = scrapedGauge("verdict_programmed_resource_version",
		"The resourceVersion up to which everything that the API server sent is programmed, or quarantined.", "resource")
	receivedVersionMetric = scrapedGauge("verdict_received_resource_version",
		"The resourceVersion up to which the API server has sent everything.", "resource")
	lagMetric = scrapedGauge("verdict_programming_lag_seconds",
		"Age of the oldest change that was received and is not programmed; 0 if there is none.")
)

// sendProgress shows up to which versions of the API's objects everything is programmed.
func (o *Options) sendProgress(ch chan<- prometheus.Metric) {
	is := o.Progress()
	for m, versions := range map[scraped]snapshot.Versions{
		programmedVersionMetric: is.Programmed, receivedVersionMetric: is.Received} {
		m.putVersion(ch, "services", versions.Services)
		m.putVersion(ch, "endpointslices", versions.Slices)
	}
	lag := 0.0
	if !is.Since.IsZero() {
		lag = max(0, time.Since(is.Since).Seconds())
	}
	lagMetric.put(ch, lag)
}

// putVersion shows a version, unless it is unknown or no number.
func (s scraped) putVersion(ch chan<- prometheus.Metric, resource string, v snapshot.Version) {
	if n, err := strconv.ParseFloat(string(v), 64); err == nil && v.Ordered() {
		s.put(ch, n, resource)
	}
}

var (
	conntrackMetric     = scrapedGauge("verdict_conntrack_entries", "Connections that the kernel tracks, of all kinds.")
	conntrackMostMetric = scrapedGauge("verdict_conntrack_max_entries",
		"Maximum number of tracked connections; beyond that the kernel drops packets.")
)

// sendConntrack shows how full the kernel's connection tracking is.
func (o *Options) sendConntrack(ch chan<- prometheus.Metric) {
	entries, most, err := o.Conntrack()
	if err != nil { // the kernel has not loaded it
		return
	}
	conntrackMetric.put(ch, float64(entries))
	conntrackMostMetric.put(ch, float64(most))
}

var (
	shareMetric = scrapedGauge("verdict_conntrack_share",
		"Share of a Service's connections in the most that the kernel tracks, of the 20 Services with most; absent unless "+
			"connections are recorded, as the next two.", "service_namespace", "service_name")
	clientShareMetric = scrapedGauge("verdict_conntrack_client_share",
		"Share of a client's connections in the most that the kernel tracks, of the 5 clients with most.", "client")
	saturationMetric = scrapedGauge("verdict_conntrack_snat_saturation_percent",
		"Ports taken of those that an address has for masqueraded connections to one endpoint; of the address and "+
			"endpoint with most.", "address", "endpoint")
)

// sendPressure shows who fills connection tracking.
func (o *Options) sendPressure(ch chan<- prometheus.Metric) {
	p := o.Pressure()
	_, most, err := o.Conntrack()
	if err != nil || most <= 0 {
		return
	}
	for _, s := range p.Services {
		shareMetric.put(ch, float64(s.Flows)/float64(most), s.Of.Namespace, s.Of.Name)
	}
	for _, c := range p.Clients {
		clientShareMetric.put(ch, float64(c.Flows)/float64(most), c.Of.String())
	}
	if s := p.Masquerade; s != nil {
		saturationMetric.put(ch, s.Percent(), s.Address.String(), s.Endpoint.String())
	}
}
