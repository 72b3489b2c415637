package metrics

import "github.com/prometheus/client_golang/prometheus"

var (
	ejectedMetric = scrapedGauge("verdict_endpoints_ejected",
		"Endpoints that this node sends no new connections to, by cause: unanswered or refused.", "cause")
	ejectionsMetric = scrapedCounter("verdict_ejections_total", "How often an endpoint was ejected, by cause.", "cause")
	probesMetric    = scrapedCounter("verdict_probes_total",
		"Probes of endpoints, by result: accepted, refused, silent, or failed to be sent.", "result")
	unansweredDeletedMetric = scrapedCounter("verdict_unanswered_flows_deleted_total",
		"Flows that an unhealthy endpoint had not answered, and that were deleted so that they choose again.")
	evidenceFailuresMetric = scrapedCounter("verdict_evidence_read_failures_total",
		"Failed readings of the endpoints that do not answer or refuse.")
)

// sendOutliers shows endpoints that do not answer or refuse.
func (o *Options) sendOutliers(ch chan<- prometheus.Metric) {
	now := o.Outliers()
	for m, values := range map[scraped]map[string]float64{ejectedMetric: now.Ejected, ejectionsMetric: now.Ejections,
		probesMetric: now.Probes} {
		for label, value := range values {
			m.put(ch, value, label)
		}
	}
	unansweredDeletedMetric.put(ch, float64(now.FlowsDeleted))
	evidenceFailuresMetric.put(ch, float64(now.ReadFailures))
}
