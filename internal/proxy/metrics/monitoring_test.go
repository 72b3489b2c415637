package metrics

import (
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	dto "github.com/prometheus/client_model/go"
	"go.yaml.in/yaml/v3"
)

// What Prometheus' query language is made of, as far as the chart's monitoring files use it.
var (
	promTokens = regexp.MustCompile(
		`"(?:[^"\\]|\\.)*"|[a-zA-Z_:$][a-zA-Z0-9_:]*|[0-9.]+[a-z]*|\[[^\]]*\]|=~|!~|!=|==|>=|<=|[-+*/(){},=<>]|\S`,
	)
	promWord = regexp.MustCompile(`^[a-zA-Z_:][a-zA-Z0-9_:]*$`)
	// promClauses are followed by labels in parentheses.
	promClauses = []string{"by", "without", "on", "ignoring", "group_left", "group_right"}
	promKnown   = []string{
		"absent",
		"sum",
		"max",
		"count",
		"rate",
		"increase",
		"changes",
		"histogram_quantile",
		"topk",
		"time",
		"label_replace",
		"last_over_time",
	}
	// promSets are operators between results.
	promSets = []string{"and", "or", "unless"}
	// targetLabels are those that Prometheus gives to everything it scrapes.
	targetLabels = []string{"instance", "job"}
)

// query is an expression taken apart: metrics with the labels they are asked by, and all labels that results are
// grouped by.
type query struct {
	metrics map[string][]string
	groups  []string
}

// takeApart is no parser of the language, but strict about what it does not know.
func takeApart(expr string) (query, error) {
	q := query{metrics: map[string][]string{}}
	tokens := promTokens.FindAllString(expr, -1)
	for i := 0; i < len(tokens); i++ {
		word := tokens[i]
		following := ""
		if i+1 < len(tokens) {
			following = tokens[i+1]
		}
		switch {
		case !promWord.MatchString(word) || slices.Contains(promSets, word):
		case slices.Contains(promClauses, word):
			if following != "(" {
				return q, fmt.Errorf("%s without labels", word)
			}
			for i += 2; i < len(tokens) && tokens[i] != ")"; i++ {
				if tokens[i] != "," {
					q.groups = append(q.groups, tokens[i])
				}
			}
		case following == "(" || slices.Contains(promKnown, word):
			if !slices.Contains(promKnown, word) {
				return q, fmt.Errorf("the function %s is not known to this test", word)
			}
		default:
			var labels []string
			if following == "{" {
				for i += 2; i < len(tokens) && tokens[i] != "}"; i += 4 { // label, operator, value, comma
					labels = append(labels, tokens[i])
					if i+3 < len(tokens) && tokens[i+3] == "}" {
						i += 3
						break
					}
				}
			}
			q.metrics[word] = append(q.metrics[word], labels...)
		}
	}
	return q, nil
}

// exposed gives the labels of each name that is shown, those of histograms by their parts.
func exposed(t *testing.T) map[string]map[string]bool {
	out := map[string]map[string]bool{"up": {}} // which Prometheus adds
	add := func(f *dto.MetricFamily, suffix, more string) {
		labels := map[string]bool{}
		for _, l := range labelsOf(f) {
			labels[l] = true
		}
		if more != "" {
			labels[more] = true
		}
		out[f.GetName()+suffix] = labels
	}
	for _, f := range gather(t, everything(t, PerEndpoint)) {
		if f.GetType() == dto.MetricType_HISTOGRAM {
			add(f, "_bucket", "le")
			add(f, "_sum", "")
			add(f, "_count", "")
			continue
		}
		add(f, "", "")
	}
	return out
}

// check holds an expression against what is shown.
func check(t *testing.T, where, expr string, shown map[string]map[string]bool) {
	t.Helper()
	q, err := takeApart(expr)
	if err != nil {
		t.Errorf("%s: %v: %s", where, err, expr)
		return
	}
	if len(q.metrics) == 0 {
		t.Errorf("%s asks for no metric: %s", where, expr)
	}
	all := map[string]bool{}
	for name, labels := range q.metrics {
		has, ok := shown[name]
		if !ok {
			t.Errorf("%s: there is no metric %s", where, name)
		}
		for l := range has {
			all[l] = true
		}
		for _, l := range labels {
			if !has[l] && !slices.Contains(targetLabels, l) {
				t.Errorf("%s: %s has no label %s", where, name, l)
			}
		}
	}
	for _, l := range q.groups {
		if !all[l] && !slices.Contains(targetLabels, l) {
			t.Errorf("%s: none of the metrics has a label %s: %s", where, l, expr)
		}
	}
}

var templateLabel = regexp.MustCompile(`\$labels\.([a-z_]+)`)

// TestRules: the alerts use only metrics and labels that exist, say what they mean, and to whom it matters.
func TestRules(t *testing.T) {
	text, err := os.ReadFile("../../../deploy/helm/verdict/monitoring/prometheus-rules.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Groups []struct {
			Name  string
			Rules []struct {
				Alert, Expr, For    string
				Labels, Annotations map[string]string
			}
		}
	}
	decoder := yaml.NewDecoder(strings.NewReader(string(text)))
	decoder.KnownFields(true)
	if err := decoder.Decode(&file); err != nil {
		t.Fatal(err)
	}
	shown, names := exposed(t), map[string]bool{}
	for _, g := range file.Groups {
		for _, r := range g.Rules {
			check(t, r.Alert, r.Expr, shown)
			if r.Alert == "" || names[r.Alert] || r.Annotations["summary"] == "" ||
				!slices.Contains([]string{"critical", "warning", "info"}, r.Labels["severity"]) {
				t.Errorf("%q is there twice, or lacks a summary or a severity", r.Alert)
			}
			names[r.Alert] = true
			for _, text := range r.Annotations {
				for _, m := range templateLabel.FindAllStringSubmatch(text, -1) {
					if !strings.Contains(r.Expr, m[1]) && !slices.Contains(targetLabels, m[1]) {
						t.Errorf("%s: the text has the label %s, which the expression does not name", r.Alert, m[1])
					}
				}
			}
		}
	}
	if len(names) == 0 {
		t.Error("there are no alerts")
	}
}

// TestDashboard: it asks only for metrics and labels that exist, and for all of ours.
func TestDashboard(t *testing.T) {
	text, err := os.ReadFile("../../../deploy/helm/verdict/monitoring/grafana-dashboard.json")
	if err != nil {
		t.Fatal(err)
	}
	var board struct {
		Panels []struct {
			ID      int
			Type    string
			Title   string
			GridPos struct{ X, Y, W, H int }
			Targets []struct{ Expr string }
		}
		Templating struct {
			List []struct {
				Name, Definition string
			}
		}
	}
	if err := json.Unmarshal(text, &board); err != nil {
		t.Fatal(err)
	}
	shown, asked, ids := exposed(t), "", map[int]bool{}
	for i, p := range board.Panels {
		if ids[p.ID] || p.Title == "" || p.GridPos.X+p.GridPos.W > 24 || p.Type != "row" && len(p.Targets) == 0 {
			t.Errorf("panel %q has another's id, no title, no place or no target", p.Title)
		}
		ids[p.ID] = true
		for _, target := range p.Targets {
			check(t, p.Title, target.Expr, shown)
			asked += target.Expr + " "
			for name, labels := range shown {
				of := name + `{instance=~"$instance"`
				if labels["service_namespace"] && strings.Contains(target.Expr, of) &&
					!strings.Contains(target.Expr, of+`,service_namespace=~"$namespace"`) {
					t.Errorf("panel %q does not tell namespaces apart: %s", p.Title, target.Expr)
				}
			}
		}
		for _, o := range board.Panels[:i] {
			if a, b := p.GridPos, o.GridPos; a.X < b.X+b.W && b.X < a.X+a.W && a.Y < b.Y+b.H && b.Y < a.Y+a.H {
				t.Errorf("panels %q and %q lie one on the other", p.Title, o.Title)
			}
		}
	}
	for _, v := range board.Templating.List {
		if inner, ok := strings.CutPrefix(v.Definition, "label_values("); ok {
			name, label, _ := strings.Cut(strings.TrimSuffix(inner, ")"), ", ")
			name, _, _ = strings.Cut(name, "{")
			if has, ok := shown[name]; !ok || !has[label] && !slices.Contains(targetLabels, label) {
				t.Errorf("variable %s: there is no label %s of %s", v.Name, label, name)
			}
		}
	}
	// What is not on the dashboard is either only for alerts, or another view of what is there.
	elsewhere := []string{"verdict_owns_tables", "verdict_place_held", "verdict_foreign_check_failures_total",
		"verdict_conntrack_look_failures_total", "verdict_counters_read_failures_total", "verdict_log_lines_left_out_total",
		"verdict_evidence_read_failures_total"}
	for name := range shown {
		base := strings.TrimSuffix(strings.TrimSuffix(strings.TrimSuffix(name, "_bucket"), "_sum"), "_count")
		if strings.HasPrefix(name, "verdict_") && !strings.Contains(asked, base) && !slices.Contains(elsewhere, name) {
			t.Errorf("%s is not on the dashboard", name)
		}
	}
}

// TestTakeApart: the other tests are worth nothing if this is not.
func TestTakeApart(t *testing.T) {
	for expr, want := range map[string]string{
		`up`:                                 "map[up:[]] []",
		`sum by (a, b) (rate(x{c="d"}[5m]))`: "map[x:[c]] [a b]",
		`x{a=~"$b",c!="}"} / on (e) group_left () y{} > 0.5`:                              "map[x:[a c] y:[]] [e]",
		`histogram_quantile(0.99, sum by (le) (rate(x_bucket[$__rate_interval]))) * 1000`: "map[x_bucket:[]] [le]",
		`time() - max(x)`:                  "map[x:[]] []",
		`changes(x[30m]) > 3 and on (a) y`: "map[x:[] y:[]] [a]",
	} {
		q, err := takeApart(expr)
		if got := fmt.Sprint(q.metrics, " ", q.groups); err != nil || got != want {
			t.Errorf("%s: %s, %v; want %s", expr, got, err, want)
		}
	}
	if _, err := takeApart(`frobnicate(x)`); err == nil {
		t.Error("an unknown function is taken")
	}
}
