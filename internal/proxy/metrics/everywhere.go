package metrics

import (
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

var (
	everywhereConnectedMetric = scrapedGauge("verdict_everywhere_connected",
		"1 if the node is connected to the collector.")
	everywhereWaitingMetric = scrapedGauge("verdict_everywhere_waiting",
		"Requests that wait for all nodes on this node.")
	everywhereAnswersMetric = scrapedCounter("verdict_everywhere_answers_total",
		"Answered requests, by outcome.", "outcome")
)

// sendEverywhere shows a node's part in asking whether all nodes have a change.
func (o *Options) sendEverywhere(ch chan<- prometheus.Metric) {
	now := o.Everywhere()
	everywhereConnectedMetric.put(ch, one(now.Connected))
	everywhereWaitingMetric.put(ch, float64(now.Waiting))
	for outcome, n := range now.Answers {
		everywhereAnswersMetric.put(ch, float64(n), outcome)
	}
}

// CollectorStats is what a collector counts.
type CollectorStats struct {
	Leading bool
	// Nodes is how many are connected, Waiting how many requests wait, and Rounds how many questions to all nodes are
	// open.
	Nodes, Waiting, Rounds int
	// Questions counts lines sent to nodes, Accepted and Refused the connections by their tokens.
	Questions, Accepted, Refused uint64
}

// Collector shows what a collector counts. Make one with NewCollector.
type Collector struct {
	registry *prometheus.Registry
	waits    *prometheus.HistogramVec
	// programmed is nil unless AddGateways was called.
	programmed prometheus.Observer
}

// NewCollector returns a Collector that asks for what was counted at each scrape. Outcomes are those of ObserveWait.
func NewCollector(stats func() CollectorStats, outcomes []string) *Collector {
	c := &Collector{registry: prometheus.NewRegistry()}
	c.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		together{[]scraped{collectorLeadingMetric, collectorNodesMetric, collectorWaitingMetric, collectorRoundsMetric,
			collectorQuestionsMetric, collectorConnectionsMetric},
			func(ch chan<- prometheus.Metric) { stats().send(ch) }})
	c.waits = maker{c.registry}.histograms("verdict_collector_wait_duration_seconds",
		"How long requests waited for all nodes, by outcome.", prometheus.ExponentialBuckets(0.005, 2, 14), "outcome")
	for _, o := range outcomes {
		c.waits.WithLabelValues(o)
	}
	return c
}

// ObserveWait counts a request that has ended.
func (c *Collector) ObserveWait(outcome string, took time.Duration) {
	c.waits.WithLabelValues(outcome).Observe(took.Seconds())
}

// Handler serves /metrics, and /healthz, which says that the process works.
func (c *Collector) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(c.registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("ok")) })
	return mux
}

var (
	collectorLeadingMetric = scrapedGauge("verdict_collector_leading", "1 if this collector leads.")
	collectorNodesMetric   = scrapedGauge("verdict_collector_nodes", "Nodes that are connected.")
	collectorWaitingMetric = scrapedGauge("verdict_collector_waiting", "Requests that wait for all nodes.")
	collectorRoundsMetric  = scrapedGauge("verdict_collector_rounds",
		"Questions to all nodes that not all have answered.")
	collectorQuestionsMetric = scrapedCounter("verdict_collector_questions_total",
		"Questions sent, one to each node, since this collector leads.")
	collectorConnectionsMetric = scrapedCounter("verdict_collector_connections_total",
		"Connections since this collector leads, by whether their token was accepted or refused.", "token")
)

func (s CollectorStats) send(ch chan<- prometheus.Metric) {
	collectorLeadingMetric.put(ch, one(s.Leading))
	collectorNodesMetric.put(ch, float64(s.Nodes))
	collectorWaitingMetric.put(ch, float64(s.Waiting))
	collectorRoundsMetric.put(ch, float64(s.Rounds))
	collectorQuestionsMetric.put(ch, float64(s.Questions))
	collectorConnectionsMetric.put(ch, float64(s.Accepted), "accepted")
	collectorConnectionsMetric.put(ch, float64(s.Refused), "refused")
}
