package metrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/verdict-proxy/verdict/internal/proxy/outlier"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

var (
	ejectedMetric = scrapedGauge("verdict_endpoints_ejected",
		"Endpoints that this node sends no new connections to, by cause: unanswered or refused.", "cause")
	ejectionsMetric = scrapedCounter("verdict_ejections_total", "How often an endpoint was ejected, by cause.", "cause")
	probesMetric    = scrapedCounter("verdict_probes_total",
		"Probes of endpoints, by result: accepted, refused, silent, or failed to be sent.", "result")
	lastResortMetric = scrapedGauge("verdict_last_resort_endpoints",
		"Endpoints that are not ready, and get new connections of this node since their Service has no other.")
	lastResortsMetric       = scrapedCounter("verdict_last_resorts_total", "How often an endpoint became a last resort.")
	unansweredDeletedMetric = scrapedCounter("verdict_unanswered_flows_deleted_total",
		"Flows that an unhealthy endpoint had not answered, and that were deleted so that they choose again.")
	evidenceFailuresMetric = scrapedCounter("verdict_evidence_read_failures_total",
		"Failed readings of the endpoints that do not answer or refuse.")
)

// sendOutliers shows endpoints that do not answer or refuse.
func (o *Options) sendOutliers(ch chan<- prometheus.Metric) {
	now := o.Outliers()
	for c := range now.Ejected {
		ejectedMetric.put(ch, float64(now.Ejected[c]), snapshot.Cause(c).String())
		ejectionsMetric.put(ch, float64(now.Ejections[c]), snapshot.Cause(c).String())
	}
	for result, n := range now.Probes {
		probesMetric.put(ch, float64(n), outlier.Outcome(result).String())
	}
	lastResortMetric.put(ch, float64(now.LastResort))
	lastResortsMetric.put(ch, float64(now.LastResorts))
	unansweredDeletedMetric.put(ch, float64(now.FlowsDeleted))
	evidenceFailuresMetric.put(ch, float64(now.ReadErrors))
}
