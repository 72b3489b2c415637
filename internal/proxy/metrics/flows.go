package metrics

import (
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/verdict-proxy/verdict/internal/proxy/flows"
)

var (
	flowConnectionsMetric = scrapedCounter("verdict_flow_connections_total",
		"Recorded connections that ended, or were rejected or dropped.", flowLabels...)
	flowFailuresMetric = scrapedCounter("verdict_flow_failures_total", "Those of them that failed.", flowLabels...)
	flowBytesMetric    = scrapedCounter("verdict_flow_bytes_total",
		"Bytes of IP packets, from clients (in) and to them (out), also of open connections.",
		append([]string{"direction"}, flowLabels...)...)
	flowLossesMetric = scrapedCounter("verdict_flow_losses_total",
		"What records miss, by kind: events and refusals that the kernel had no room for, sampled (left out of the list, "+
			"but not of the sums), unread (by readers that follow), file and otlp (not exported).", "kind")
	flowExportedMetric = scrapedCounter("verdict_flow_exported_records_total",
		"Records written to the file or sent to the collector.", "to")
)

var flowLabels = []string{"service_namespace", "service_name", "client_zone", "endpoint_zone"}

// sendFlows shows the records of connections.
func (o *Options) sendFlows(ch chan<- prometheus.Metric) {
	s := o.Flows()
	for _, t := range s.Totals {
		namespace, name, ok := strings.Cut(t.Service, "/")
		if !ok {
			namespace, name = others, others
		}
		if t.ClientZone == flows.Others {
			t.ClientZone, t.EndpointZone = others, others
		}
		labels := []string{namespace, name, t.ClientZone, t.EndpointZone}
		flowConnectionsMetric.put(ch, float64(t.Connections), labels...)
		flowFailuresMetric.put(ch, float64(t.Failures), labels...)
		flowBytesMetric.put(ch, float64(t.Sent.Bytes), append([]string{"in"}, labels...)...)
		flowBytesMetric.put(ch, float64(t.Received.Bytes), append([]string{"out"}, labels...)...)
	}
	for kind, n := range map[string]uint64{"events": s.Losses.Events, "refusals": s.Losses.Refusals,
		"sampled": s.Losses.Sampled, "unread": s.Losses.Unread} {
		flowLossesMetric.put(ch, float64(n), kind)
	}
	for _, e := range s.Exports {
		flowLossesMetric.put(ch, float64(e.Lost), e.To)
		flowExportedMetric.put(ch, float64(e.Written), e.To)
	}
}
