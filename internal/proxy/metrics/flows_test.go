package metrics

import (
	"slices"
	"strings"
	"testing"
)

// TestFlows: the sums and losses of records, with a Service for those that there is no room for.
func TestFlows(t *testing.T) {
	got := series(t, newWorld(Options{}), "verdict_flow_")
	const a, rest = "endpoint_zone=z2,service_name=a,service_namespace=ns",
		"endpoint_zone=_others,service_name=_others,service_namespace=_others"
	for _, want := range []string{
		"connections_total{client_zone=z1," + a + "} 3", "connections_total{client_zone=_others," + rest + "} 9",
		"failures_total{client_zone=z1," + a + "} 1", "bytes_total{client_zone=z1,direction=in," + a + "} 500",
		"bytes_total{client_zone=z1,direction=out," + a + "} 6000", "losses_total{kind=events} 1",
		"losses_total{kind=refusals} 2", "losses_total{kind=sampled} 3", "losses_total{kind=unread} 4",
		"losses_total{kind=otlp} 5", "exported_records_total{to=otlp} 10",
	} {
		if !slices.Contains(got, want) {
			t.Errorf("%s is not among\n%s", want, strings.Join(got, "\n"))
		}
	}
}
