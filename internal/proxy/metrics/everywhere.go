package metrics

import (
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// everywhere shows a node's part in asking whether all nodes have a change.
type everywhere struct{ o *Options }

var (
	everywhereConnectedDesc = prometheus.NewDesc("verdict_everywhere_connected",
		"1 if the node is connected to the collector.", nil, nil)
	everywhereWaitingDesc = prometheus.NewDesc("verdict_everywhere_waiting",
		"Requests that wait for all nodes on this node.", nil, nil)
	everywhereAnswersDesc = prometheus.NewDesc("verdict_everywhere_answers_total",
		"Answered requests, by outcome.", []string{"outcome"}, nil)
)

func (everywhere) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{everywhereConnectedDesc, everywhereWaitingDesc, everywhereAnswersDesc} {
		ch <- d
	}
}

func (e everywhere) Collect(ch chan<- prometheus.Metric) {
	now := e.o.Everywhere()
	ch <- prometheus.MustNewConstMetric(everywhereConnectedDesc, prometheus.GaugeValue, one(now.Connected))
	ch <- prometheus.MustNewConstMetric(everywhereWaitingDesc, prometheus.GaugeValue, float64(now.Waiting))
	for outcome, n := range now.Answers {
		ch <- prometheus.MustNewConstMetric(everywhereAnswersDesc, prometheus.CounterValue, float64(n), outcome)
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
}

// NewCollector returns a Collector that asks for what was counted at each scrape. Outcomes are those of ObserveWait.
func NewCollector(stats func() CollectorStats, outcomes []string) *Collector {
	c := &Collector{registry: prometheus.NewRegistry()}
	c.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		collector{stats})
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

type collector struct{ stats func() CollectorStats }

var (
	collectorLeadingDesc = prometheus.NewDesc("verdict_collector_leading", "1 if this collector leads.", nil, nil)
	collectorNodesDesc   = prometheus.NewDesc("verdict_collector_nodes", "Nodes that are connected.", nil, nil)
	collectorWaitingDesc = prometheus.NewDesc("verdict_collector_waiting", "Requests that wait for all nodes.", nil, nil)
	collectorRoundsDesc  = prometheus.NewDesc("verdict_collector_rounds",
		"Questions to all nodes that not all have answered.", nil, nil)
	collectorQuestionsDesc = prometheus.NewDesc("verdict_collector_questions_total",
		"Questions sent, one to each node, since this collector leads.", nil, nil)
	collectorConnectionsDesc = prometheus.NewDesc("verdict_collector_connections_total",
		"Connections since this collector leads, by whether their token was accepted or refused.", []string{"token"}, nil)
)

func (collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{collectorLeadingDesc, collectorNodesDesc, collectorWaitingDesc,
		collectorRoundsDesc, collectorQuestionsDesc, collectorConnectionsDesc} {
		ch <- d
	}
}

func (c collector) Collect(ch chan<- prometheus.Metric) {
	s := c.stats()
	for _, m := range []struct {
		desc   *prometheus.Desc
		kind   prometheus.ValueType
		value  float64
		labels []string
	}{
		{collectorLeadingDesc, prometheus.GaugeValue, one(s.Leading), nil},
		{collectorNodesDesc, prometheus.GaugeValue, float64(s.Nodes), nil},
		{collectorWaitingDesc, prometheus.GaugeValue, float64(s.Waiting), nil},
		{collectorRoundsDesc, prometheus.GaugeValue, float64(s.Rounds), nil},
		{collectorQuestionsDesc, prometheus.CounterValue, float64(s.Questions), nil},
		{collectorConnectionsDesc, prometheus.CounterValue, float64(s.Accepted), []string{"accepted"}},
		{collectorConnectionsDesc, prometheus.CounterValue, float64(s.Refused), []string{"refused"}},
	} {
		ch <- prometheus.MustNewConstMetric(m.desc, m.kind, m.value, m.labels...)
	}
}
