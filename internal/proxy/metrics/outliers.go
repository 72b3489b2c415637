package metrics

import "github.com/prometheus/client_golang/prometheus"

// outliers shows endpoints that do not answer or refuse.
type outliers struct{ o *Options }

var (
	ejectedDesc = prometheus.NewDesc("verdict_endpoints_ejected",
		"Endpoints that this node sends no new connections to, by cause: unanswered or refused.", []string{"cause"}, nil)
	ejectionsDesc = prometheus.NewDesc("verdict_ejections_total",
		"How often an endpoint was ejected, by cause.", []string{"cause"}, nil)
	probesDesc = prometheus.NewDesc("verdict_probes_total",
		"Probes of endpoints, by result: accepted, refused, silent, or failed to be sent.", []string{"result"}, nil)
	unansweredDeletedDesc = prometheus.NewDesc("verdict_unanswered_flows_deleted_total",
		"Flows that an unhealthy endpoint had not answered, and that were deleted so that they choose again.", nil, nil)
	evidenceFailuresDesc = prometheus.NewDesc("verdict_evidence_read_failures_total",
		"Failed readings of the endpoints that do not answer or refuse.", nil, nil)
)

func (outliers) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{ejectedDesc, ejectionsDesc, probesDesc, unansweredDeletedDesc,
		evidenceFailuresDesc} {
		ch <- d
	}
}

func (c outliers) Collect(ch chan<- prometheus.Metric) {
	now := c.o.Outliers()
	for _, family := range []struct {
		desc   *prometheus.Desc
		kind   prometheus.ValueType
		values map[string]float64
	}{
		{ejectedDesc, prometheus.GaugeValue, now.Ejected},
		{ejectionsDesc, prometheus.CounterValue, now.Ejections},
		{probesDesc, prometheus.CounterValue, now.Probes},
	} {
		for label, value := range family.values {
			ch <- prometheus.MustNewConstMetric(family.desc, family.kind, value, label)
		}
	}
	ch <- prometheus.MustNewConstMetric(unansweredDeletedDesc, prometheus.CounterValue, float64(now.FlowsDeleted))
	ch <- prometheus.MustNewConstMetric(evidenceFailuresDesc, prometheus.CounterValue, float64(now.ReadFailures))
}
