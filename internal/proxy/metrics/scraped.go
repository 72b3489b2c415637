package metrics

import "github.com/prometheus/client_golang/prometheus"

// scraped is a metric whose values are asked for at each scrape.
type scraped struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
}

func scrapedGauge(name, help string, labels ...string) scraped {
	return scraped{prometheus.NewDesc(name, help, labels, nil), prometheus.GaugeValue}
}

func scrapedCounter(name, help string, labels ...string) scraped {
	return scraped{prometheus.NewDesc(name, help, labels, nil), prometheus.CounterValue}
}

// put sends a value to a scrape.
func (s scraped) put(ch chan<- prometheus.Metric, value float64, labels ...string) {
	ch <- prometheus.MustNewConstMetric(s.desc, s.kind, value, labels...)
}

// together has the values of some metrics sent by one function.
type together struct {
	metrics []scraped
	send    func(chan<- prometheus.Metric)
}

func (s together) Describe(ch chan<- *prometheus.Desc) {
	for _, m := range s.metrics {
		ch <- m.desc
	}
}

func (s together) Collect(ch chan<- prometheus.Metric) { s.send(ch) }
