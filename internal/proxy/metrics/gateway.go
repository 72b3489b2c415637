package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// GatewayStats is what the controller of Gateway API counts.
type GatewayStats struct {
	// Objects counts what it watches by resource, and Programmed the Gateways that all nodes have programmed.
	Objects    map[string]int
	Programmed int
	// Writes counts its writes by resource and outcome.
	Writes map[[2]string]uint64
}

var (
	gatewayObjectsMetric    = scrapedGauge("verdict_gateway_objects", "Objects of Gateway API.", "resource")
	gatewayProgrammedMetric = scrapedGauge("verdict_gateway_programmed", "Gateways that all nodes have programmed.")
	gatewayWritesMetric     = scrapedCounter("verdict_gateway_writes_total",
		"Writes to the API, by resource and outcome.", "resource", "outcome")
)

// AddGateways shows what the controller of Gateway API counts, too.
func (c *Collector) AddGateways(stats func() GatewayStats) {
	c.registry.MustRegister(together{
		[]scraped{gatewayObjectsMetric, gatewayProgrammedMetric, gatewayWritesMetric},
		func(ch chan<- prometheus.Metric) { stats().send(ch) }})
	c.programmed = maker{c.registry}.histograms("verdict_gateway_programmed_duration_seconds",
		"How long changes of Gateways took until all nodes had programmed them.",
		prometheus.ExponentialBuckets(0.005, 2, 16)).WithLabelValues()
}

// ObserveProgrammed counts a change that all nodes have programmed.
func (c *Collector) ObserveProgrammed(took time.Duration) { c.programmed.Observe(took.Seconds()) }

func (s GatewayStats) send(ch chan<- prometheus.Metric) {
	for resource, n := range s.Objects {
		gatewayObjectsMetric.put(ch, float64(n), resource)
	}
	gatewayProgrammedMetric.put(ch, float64(s.Programmed))
	for w, n := range s.Writes {
		gatewayWritesMetric.put(ch, float64(n), w[0], w[1])
	}
}
