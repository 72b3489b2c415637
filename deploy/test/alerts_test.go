package deploy

import (
	"fmt"
	"maps"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/common/model"
	"github.com/prometheus/common/promslog"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/promql/promqltest"
	"github.com/prometheus/prometheus/rules"
)

// alertCase holds series that make an alert fire, and series that come near to it and must not. A line is a series
// and its values, one a minute, as in promtool's tests: "0x4" is five zeros, "0+2x3" is 0 2 4 6. Each gets the labels
// of a target, unless it has others.
type alertCase struct{ fires, quiet string }

const buildInfo = `verdict_build_info{goversion="go1.26.0",version="v1"} 1x60` + "\n"

// alertCases are by alert.
var alertCases = map[string]alertCase{
	"VerdictAbsent": {fires: `verdict_ready 1x60`, quiet: buildInfo},
	"VerdictGone": {
		// The first series is of the proxy that ends, the second of the kubelet.
		fires: `
verdict_build_info{goversion="go1.26.0",instance="10.0.0.1:10249",version="v1"} 1x9
verdict_build_info{goversion="go1.26.0",instance="10.0.0.2:10249",version="v1"} 1x60
up{instance="10.0.0.1:10250",job="kubelet"} 1x60`,
		// One node is gone as a whole, one proxy restarts with another version, and one is new.
		quiet: `
verdict_build_info{goversion="go1.26.0",instance="10.0.0.1:10249",version="v1"} 1x9
up{instance="10.0.0.1:10249"} 1x9
up{instance="10.0.0.1:10250",job="kubelet"} 1x12
verdict_build_info{goversion="go1.26.0",instance="10.0.0.2:10249",version="v1"} 1x9
verdict_build_info{goversion="go1.26.0",instance="10.0.0.2:10249",version="v2"} _x14 1x46
up{instance="10.0.0.2:10249"} 1x60
verdict_build_info{goversion="go1.26.0",instance="[fd00::1]:10249",version="v2"} _x30 1x30
up{instance="[fd00::1]:10250",job="kubelet"} 1x60`,
	},
	"VerdictNotReady": {
		fires: `verdict_ready 1x9 0x50`,
		quiet: `verdict_ready 0x3 1x9 0x3 1x40`,
	},
	"VerdictChangesWait": {
		fires: `
kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds{ip_family="IPv4"} 1000+60x60
kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family="IPv4"} 1000+60x10 1600x49`,
		quiet: `
kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds{ip_family="IPv4"} 1000+60x60
kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family="IPv4"} 995+60x60`,
	},
	"VerdictTransactionsFail": {
		fires: `verdict_transactions_total{outcome="failed"} 0x9 1+1x50`,
		quiet: `verdict_transactions_total{outcome="failed"} 0x9 1x50
verdict_transactions_total{outcome="written"} 0+100x60`,
	},
	"VerdictServiceQuarantined": {
		fires: `verdict_quarantined_services 0x9 2x50`,
		quiet: `verdict_quarantined_services 0x9 2x3 0x46`,
	},
	"VerdictServicesUnscheduled": {
		fires: `verdict_unscheduled_services 0x9 2x50`,
		quiet: `verdict_unscheduled_services 0x9 2x8 0x41`,
	},
	"VerdictTablesChangedByOthers": {
		fires: `verdict_foreign_changes_total 0x9 1x50`,
		quiet: `verdict_foreign_changes_total 7x60`,
	},
	"VerdictTablesNotOwned": {
		fires: `verdict_owns_tables 1x9 0x50`,
		// A start takes a moment until the first transaction; iptables and old kernels have no such series.
		quiet: buildInfo + `verdict_owns_tables 0x3 1x9 0x3 1x40`,
	},
	"VerdictLedgerIncomplete": {
		fires: `verdict_ledger_missing_records_total 0x9 3x50`,
		quiet: `verdict_ledger_missing_records_total 3x60
verdict_ledger_records_total 0+100x60`,
	},
	"VerdictRestartsOften": {
		// A restarted process counts the same Services again, so its counters look as if it had never ended.
		fires: buildInfo + `
process_start_time_seconds 1000x5 _ 1300x5 _ 1600x5 _ 1900x5 _ 2200x32
kubeproxy_sync_proxy_rules_service_changes_total 100x60`,
		// Another job's processes restart; ours did three times, for new versions, say.
		quiet: buildInfo + `
process_start_time_seconds 1000x5 1300x5 1600x5 1900x42
process_start_time_seconds{instance="other",job="other"} 1000+60x60
kubeproxy_sync_proxy_rules_service_changes_total 0+100x9 0+100x9 0+100x9 0+100x9 0+100x9`,
	},
	"VerdictHealthCheckNodePortFails": {
		fires: `verdict_health_check_node_ports{state="failing"} 0x9 1x50`,
		quiet: `verdict_health_check_node_ports{state="failing"} 0x9 1x3 0x46
verdict_health_check_node_ports{state="open"} 3x60`,
	},
	"VerdictAffinityNearlyFull": {
		fires: `verdict_map_elements{ip_family="IPv4",map="affinity"} 60000x60
verdict_map_max_elements{ip_family="IPv4",map="affinity"} 65536x60`,
		quiet: `verdict_map_elements{ip_family="IPv4",map="affinity"} 58000x60
verdict_map_max_elements{ip_family="IPv4",map="affinity"} 65536x60
verdict_map_elements{ip_family="IPv4",map="endpoints"} 65000x60
verdict_map_max_elements{ip_family="IPv4",map="endpoints"} 65536x60`,
	},
	"VerdictConntrackNearlyFull": {
		fires: `verdict_conntrack_entries 240000x60
verdict_conntrack_max_entries 262144x60`,
		quiet: `verdict_conntrack_entries 230000x60
verdict_conntrack_max_entries 262144x60`,
	},
	"VerdictServiceFillsConntrack": {
		fires: `verdict_conntrack_entries 190000x60
verdict_conntrack_max_entries 262144x60
verdict_conntrack_share{service_name="web",service_namespace="shop"} 0.31x60`,
		// One Service has much of a table with room on one node, and on another a full table is nobody's.
		quiet: `verdict_conntrack_entries 180000x60
verdict_conntrack_max_entries 262144x60
verdict_conntrack_share{service_name="web",service_namespace="shop"} 0.6x60
verdict_conntrack_entries{instance="node-2"} 262144x60
verdict_conntrack_max_entries{instance="node-2"} 262144x60
verdict_conntrack_share{instance="node-2",service_name="web",service_namespace="shop"} 0.29x60`,
	},
	"VerdictMasqueradeNearlyFull": {
		fires: `verdict_conntrack_snat_saturation_percent{address="192.0.2.1",endpoint="10.0.0.1:80"} 93x60`,
		quiet: `verdict_conntrack_snat_saturation_percent{address="192.0.2.1",endpoint="10.0.0.1:80"} 89x60`,
	},
	"VerdictProgrammingSlow": {
		fires: slowProgramming("10", "0x60", "11", "0+10x60"),
		quiet: slowProgramming("1", "0+10x60", "11", "0+10x60"),
	},
	"VerdictClientErrors": {
		fires: buildInfo + `
rest_client_requests_total{code="200",host="a",method="GET"} 0+10x60
rest_client_requests_total{code="<error>",host="a",method="GET"} 0+10x60`,
		quiet: buildInfo + `
rest_client_requests_total{code="200",host="a",method="GET"} 0+100x60
rest_client_requests_total{code="500",host="a",method="GET"} 0+10x60
rest_client_requests_total{code="500",host="a",instance="other",method="GET"} 0+10x60`,
	},
	"VerdictCountersUnread": {
		fires: `verdict_counters_read_failures_total 0x9 0+1x50`,
		quiet: `verdict_counters_read_failures_total 0x9 2x50`,
	},
	"VerdictEndpointsEjected": {
		fires: `verdict_endpoints_ejected{cause="unanswered"} 1+0x60`,
		quiet: `verdict_endpoints_ejected{cause="unanswered"} 0+0x20 1+0x5 0+0x30`,
	},
	"VerdictEvidenceUnread": {
		fires: `verdict_evidence_read_failures_total 0+10x60`,
		quiet: `verdict_evidence_read_failures_total 0+0x30 1+0x30`,
	},
	"VerdictRefusesClients": {
		fires: refused("0+120x60"),
		quiet: refused("0+30x60"),
	},
}

// slowProgramming gives the histogram of programming with two finite buckets; all is over by the second.
func slowProgramming(first, firstValues, second, values string) string {
	const name = `kubeproxy_network_programming_duration_seconds_bucket{ip_family="IPv4",le="%s"} %s` + "\n"
	return fmt.Sprintf(name+name+name, first, firstValues, second, values, "+Inf", values)
}

func refused(values string) string {
	return `verdict_service_refused_packets_total{protocol="TCP",service_name="web",` +
		`service_namespace="shop",service_port="http",` +
		`verdict="reject"} ` + values
}

const (
	alertsFile = chartDir + "/monitoring/prometheus-rules.yaml"
	// namesFile is held against what the program shows by a test of internal/metrics.
	namesFile = "../../internal/proxy/metrics/testdata/names.txt"
)

// TestAlerts has Prometheus itself evaluate each alert, minute by minute for an hour: over series that should make it
// fire, and over some that should not.
func TestAlerts(t *testing.T) {
	groups, problems := rulefmt.ParseFile(alertsFile, false, model.UTF8Validation, parser.NewParser(parser.Options{}),
		promslog.NewNopLogger())
	if problems != nil {
		t.Fatal(problems)
	}
	cases := maps.Clone(alertCases)
	for _, group := range groups.Groups {
		for _, rule := range group.Rules {
			c, ok := cases[rule.Alert]
			if !ok {
				t.Errorf("alert %s has no case that fires and none that does not", rule.Alert)
				continue
			}
			delete(cases, rule.Alert)
			t.Run(rule.Alert, func(t *testing.T) {
				if fired := evaluate(t, rule, c.fires); len(fired) == 0 {
					t.Errorf("it does not fire:\n%s", c.fires)
				} else {
					t.Log(strings.Join(fired, "\n"))
				}
				if fired := evaluate(t, rule, c.quiet); len(fired) > 0 {
					t.Errorf("it fires: %s\n%s", strings.Join(fired, "\n"), c.quiet)
				}
			})
		}
	}
	for alert := range cases {
		t.Errorf("there is no alert %s", alert)
	}
}

// evaluate gives what an alert says when it fires, if it does within an hour of series.
func evaluate(t *testing.T, rule rulefmt.Rule, series string) (fired []string) {
	t.Helper()
	storage := promqltest.LoadedStorage(t, load(t, series))
	defer storage.Close()
	engine := promqltest.NewTestEngineWithOpts(t, promql.EngineOpts{MaxSamples: 1 << 20, Timeout: time.Minute})
	expr, err := parser.NewParser(parser.Options{}).ParseExpr(rule.Expr)
	check(t, err)
	alert := rules.NewAlertingRule(
		rule.Alert,
		expr,
		time.Duration(rule.For),
		time.Duration(rule.KeepFiringFor),
		labels.FromMap(
			rule.Labels,
		),
		labels.FromMap(rule.Annotations),
		labels.EmptyLabels(),
		"",
		true,
		promslog.NewNopLogger(),
	)
	for minute := range 61 {
		at := time.Unix(0, 0).Add(time.Duration(minute) * time.Minute)
		_, err := alert.Eval(t.Context(), 0, at, rules.EngineQueryFunc(engine, storage), &url.URL{}, 0)
		check(t, err)
		alert.ForEachActiveAlert(func(a *rules.Alert) {
			if a.State != rules.StateFiring || len(fired) > 0 {
				return
			}
			fired = append(fired, fmt.Sprintf("minute %d: %s", minute, a.Annotations.Get("summary")))
			a.Annotations.Range(func(l labels.Label) {
				if l.Value == "" || strings.Contains(l.Value, "<no value>") || strings.Contains(l.Value, "error expanding") {
					t.Errorf("%s reads %q", l.Name, l.Value)
				}
			})
		})
	}
	return fired
}

// target are the labels that Prometheus gives to what it scrapes.
var target = map[string]string{"instance": "node-1", "job": "verdict"}

var seriesLine = regexp.MustCompile(`^([a-z_]+)(?:\{(.*)\})? (.*)$`)

// load gives the series as a command of promqltest, after a look whether the program has such metrics with these very
// labels.
func load(t *testing.T, series string) string {
	t.Helper()
	shown := shownMetrics(t)
	text := "load 1m\n"
	for line := range strings.Lines(series) {
		if line = strings.TrimSpace(line); line == "" {
			continue
		}
		parts := seriesLine.FindStringSubmatch(line)
		if parts == nil {
			t.Fatalf("no series: %s", line)
		}
		metric, err := parser.NewParser(parser.Options{}).ParseMetric(parts[1] + "{" + parts[2] + "}")
		check(t, err)
		builder := labels.NewBuilder(metric)
		var own []string
		metric.Range(func(l labels.Label) {
			if l.Name != model.MetricNameLabel && target[l.Name] == "" {
				own = append(own, l.Name)
			}
		})
		if want, ok := shown[parts[1]]; !ok || !slices.Equal(own, want) {
			t.Fatalf("the program shows no %s%q, but %q", parts[1], own, want)
		}
		for name, value := range target {
			if metric.Get(name) == "" {
				builder.Set(name, value)
			}
		}
		text += "  " + builder.Labels().String() + " " + parts[3] + "\n"
	}
	return text
}

// shownMetrics gives the labels, sorted, of each series that the program shows; those of the process come with
// Prometheus' library, and up from Prometheus.
func shownMetrics(t *testing.T) map[string][]string {
	t.Helper()
	text, err := os.ReadFile(namesFile)
	check(t, err)
	shown := map[string][]string{"process_start_time_seconds": nil, "up": nil}
	line := regexp.MustCompile(`(?m)^([a-z_]+)\{(.*)\} (\w+)$`)
	for _, m := range line.FindAllStringSubmatch(string(text), -1) {
		names := strings.FieldsFunc(m[2], func(r rune) bool { return r == ',' })
		shown[m[1]] = names
		if m[3] == "histogram" {
			shown[m[1]+"_sum"], shown[m[1]+"_count"] = names, names
			shown[m[1]+"_bucket"] = slices.Sorted(slices.Values(append(slices.Clone(names), "le")))
		}
	}
	return shown
}

// TestRunbooks: each alert links to a section of docs/TROUBLESHOOTING.md that there is.
func TestRunbooks(t *testing.T) {
	const page = "https://github.com/verdict-proxy/verdict/blob/main/docs/TROUBLESHOOTING.md#"
	anchors := map[string]bool{}
	heading := regexp.MustCompile(`(?m)^#+ (.*)$`)
	for _, m := range heading.FindAllStringSubmatch(readFile(t, "../../docs/TROUBLESHOOTING.md"), -1) {
		plain := regexp.MustCompile(`[^\p{L}\p{N} _-]`).ReplaceAllString(strings.ToLower(m[1]), "")
		anchors[strings.ReplaceAll(plain, " ", "-")] = true
	}
	groups, problems := rulefmt.ParseFile(alertsFile, false, model.UTF8Validation, parser.NewParser(parser.Options{}),
		promslog.NewNopLogger())
	if problems != nil {
		t.Fatal(problems)
	}
	for _, group := range groups.Groups {
		for _, rule := range group.Rules {
			url := rule.Annotations["runbook_url"]
			if anchor, ok := strings.CutPrefix(url, page); !ok || !anchors[anchor] {
				t.Errorf("%s: runbook_url is %q, which is no section", rule.Alert, url)
			}
		}
	}
}
