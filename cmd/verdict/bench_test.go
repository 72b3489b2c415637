package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// benchOutput gives what a measurement prints.
func benchOutput(t *testing.T, args ...string) string {
	t.Helper()
	t.Cleanup(func() { nothingLeft(t) })
	var out bytes.Buffer
	root := newRoot()
	root.SetArgs(append([]string{"bench"}, args...))
	root.SetOut(&out)
	root.SetErr(t.Output())
	labtest.Check(t, root.ExecuteContext(t.Context()))
	return out.String()
}

// benchJSON runs a measurement of 50 Services with 3 endpoints, reads its one object into result, and gives it as a map too.
func benchJSON(t *testing.T, result benchResult, args ...string) map[string]any {
	t.Helper()
	out := benchOutput(t, append(args, "--services", "50", "--endpoints", "3", "--json")...)
	d := json.NewDecoder(strings.NewReader(out))
	d.DisallowUnknownFields()
	labtest.Check(t, d.Decode(result))
	if d.More() {
		t.Errorf("more than one object: %s", out)
	}
	var fields map[string]any
	labtest.Check(t, json.Unmarshal([]byte(out), &fields))
	// Of each Service the frontend, the cluster IP and 3 slots; so few endpoints are all on this node, and may reach themselves;
	// the range.
	if got, want := fields["elements"], 50*(3+3)+150+1.0; got != want {
		t.Errorf("%v elements, want %v", got, want)
	}
	for name, want := range map[string]float64{"services": 50, "endpoints": 3} {
		if fields[name] != want {
			t.Errorf("%s is %v, want %v", name, fields[name], want)
		}
	}
	positive(t, fields, "messages", "bytes", "allocations", "allocated_bytes", "rss_bytes", "rss_collected_bytes")
	if kernel, ok := fields["kernel_bytes"].(float64); !ok || kernel < 0 { // so little may be lost in what others do
		t.Errorf("kernel_bytes is %v", fields["kernel_bytes"])
	}
	return fields
}

func positive(t *testing.T, fields map[string]any, names ...string) {
	t.Helper()
	for _, name := range names {
		if v, ok := fields[name].(float64); !ok || v <= 0 {
			t.Errorf("%s is %v", name, fields[name])
		}
	}
}

// object gives an object inside another, with exactly the given fields, which must be positive.
func object(t *testing.T, in map[string]any, name string, fields ...string) map[string]any {
	t.Helper()
	o, ok := in[name].(map[string]any)
	if !ok || len(o) != len(fields) {
		t.Fatalf("%s is %v, want an object with %v", name, in[name], fields)
	}
	positive(t, o, fields...)
	return o
}

// printed gives what people get to see of a result, and looks for numbers in it.
func printed(t *testing.T, r benchResult, numbers ...string) {
	t.Helper()
	var out bytes.Buffer
	b := bench{}
	labtest.Check(t, b.report(&out, r))
	for _, n := range append(numbers, "50 Services with 3 endpoints each", "451 elements") {
		if !strings.Contains(out.String(), n) {
			t.Errorf("%q is not in what is printed:\n%s", n, &out)
		}
	}
	if strings.Contains(out.String(), "\x1b") {
		t.Error("colours are written into what is no terminal")
	}
}

func TestBenchCold(t *testing.T) {
	var r coldResult
	fields := benchJSON(t, &r, "cold", "--rounds", "3")
	steps := []string{"policy", "compile", "encode", "commit", "total"}
	s := object(t, fields, "seconds", steps...)
	slowest := object(t, fields, "slowest_seconds", steps...)
	positive(t, fields, "floor_seconds", "slowest_floor_seconds")
	for _, step := range steps {
		if s[step].(float64) > slowest[step].(float64) {
			t.Errorf("%s: the median %v is more than the slowest %v", step, s[step], slowest[step])
		}
	}
	if r.SlowestFloor < r.Seconds.Commit/20 {
		t.Errorf("the kernel took %v s, and %v s for the same bytes alone: they can't be the same", r.Seconds.Commit, r.SlowestFloor)
	}
	if r.Rounds != 3 || r.Seconds.Commit > r.Slowest.Total || r.Floor > r.SlowestFloor || r.Slowest.Total > 600 {
		t.Errorf("%+v", r)
	}
	printed(t, &r, seconds(r.Seconds.Policy), seconds(r.Seconds.Compile), seconds(r.Seconds.Encode), seconds(r.Seconds.Commit),
		seconds(r.Seconds.Total), seconds(r.Floor), seconds(r.SlowestFloor), size(r.RSS), size(r.Collected), size(r.Kernel),
		size(int64(r.Bytes)), thousands(int(r.Allocations)), thousands(r.Messages)+" messages")
}

func TestBenchChange(t *testing.T) {
	var r changeResult
	fields := benchJSON(t, &r, "change", "--rounds", "20")
	kinds := fields["kinds"].(map[string]any)
	for name, elements := range map[string]float64{
		// A newcomer is on this node, which is the only one here: it may reach itself. So may the one that goes.
		"endpoint_replaced": 1 + 2, "endpoint_added": 2 + 1, "endpoint_removed": 3 + 1,
		"service_added": 3 + 3 + 3, "service_removed": 3 + 3 + 3,
	} {
		k := object(t, kinds, name, "p50_us", "p99_us", "own_p50_us", "floor_p50_us", "messages", "elements", "bytes",
			"allocations", "allocated_bytes")
		p50, p99, own := k["p50_us"].(float64), k["p99_us"].(float64), k["own_p50_us"].(float64)
		if p50 > p99 || own > p99 || p50 > 1e6 {
			t.Errorf("%s: %v", name, k)
		}
		if k["elements"] != elements {
			t.Errorf("%s: %v elements, want %v", name, k["elements"], elements)
		}
	}
	if len(kinds) != numChangeKinds || r.Rounds != 20 {
		t.Errorf("%+v", r)
	}
	for _, k := range r.Kinds.each() {
		printed(t, &r, k.name, micro(k.P50), micro(k.P99), micro(k.OwnP50), micro(k.FloorP50), fmt.Sprint(k.Bytes))
	}
}

func TestBenchRestart(t *testing.T) {
	var r restartResult
	fields := benchJSON(t, &r, "restart", "--rounds", "3", "--changed", "5")
	object(t, fields, "corrected", "seconds", "slowest_seconds", "messages", "elements_written")
	if a := r.Adopted; a.Seconds <= 0 || a.Seconds > a.Slowest || a.Messages != 0 || a.Elements != 0 {
		t.Errorf("adopted: %+v", a)
	}
	if r.Rounds != 3 || r.Changed != 5 || r.Corrected.Elements != 4*5 {
		t.Errorf("%+v", r)
	}
	printed(t, &r, seconds(r.Adopted.Seconds), seconds(r.Corrected.Seconds), seconds(r.Corrected.Slowest), "5 Services changed")
}

func TestBenchChurn(t *testing.T) {
	var r churnResult
	fields := benchJSON(t, &r, "churn", "--rate", "500", "--seconds", "0.6")
	positive(t, fields, "changes", "rate", "seconds", "p50_ms", "p99_ms", "max_ms", "cores", "backlog_max", "transactions",
		"transactions_messages", "transactions_elements", "transactions_bytes")
	for _, name := range []string{"behind", "late_max_ms"} {
		if v, ok := fields[name].(float64); !ok || v < 0 {
			t.Errorf("%s is %v", name, fields[name])
		}
	}
	if r.Changes != 300 || r.Rate != 500 || r.Seconds < 0.59 || r.Seconds > 20 || r.Cores > 64 {
		t.Errorf("%+v", r)
	}
	if r.P50 > r.P99 || r.P99 > r.Max || r.Behind > r.Backlog || r.Backlog > 300 || r.Transactions > 300 {
		t.Errorf("%+v", r)
	}
	printed(t, &r, milli(r.P50), milli(r.P99), milli(r.Max), milli(r.Late), fmt.Sprintf("%.2f", r.Cores), seconds(r.Seconds),
		thousands(r.TxnElements)+" elements", thousands(r.Transactions)+" transactions", "500 changes a second")
}

// Changes that are too many for the rate are put at once; all are carried, in fewer transactions, and all are counted.
func TestBenchChurnMerges(t *testing.T) {
	var r churnResult
	benchJSON(t, &r, "churn", "--rate", "1e6", "--seconds", "0.003")
	if r.Changes != 3000 || r.Transactions >= 3000 || r.Backlog < 2 {
		t.Errorf("%+v", r)
	}
}

func TestBenchFlags(t *testing.T) {
	for args, want := range map[string]string{
		"cold --services 0":                      "--services: 0 is not",
		"cold --services 3000000":                "--services: 3000000 is not",
		"churn --services 100000 --endpoints 42": "--endpoints: 42 is not between 1 and 41",
		"change --endpoints -1":                  "--endpoints: -1 is not",
		"cold --rounds 0":                        "--rounds: 0 is not",
		"change --rounds -3":                     "--rounds: -3 is not",
		"churn --rate 0":                         "--rate: 0 is not",
		"churn --rate NaN":                       "--rate: NaN is not",
		"churn --seconds Inf":                    "--seconds: +Inf is not",
		"cold 10000":                             "unknown command",
	} {
		root := newRoot()
		root.SetArgs(append([]string{"bench"}, strings.Fields(args)...))
		root.SetOut(t.Output())
		root.SetErr(t.Output())
		if err := root.ExecuteContext(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v; want %q", args, err, want)
		}
	}
}

// An interrupted measurement ends soon, prints nothing and leaves nothing.
func TestBenchInterrupted(t *testing.T) {
	for _, args := range [][]string{
		{"cold", "--services", "50", "--rounds", "1000000"},
		{"change", "--services", "50", "--rounds", "1000000"},
		{"churn", "--services", "50", "--seconds", "3600"},
	} {
		for _, after := range []time.Duration{10 * time.Millisecond, time.Second} {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			time.AfterFunc(after, cancel)
			var out bytes.Buffer
			root := newRoot()
			root.SetArgs(append([]string{"bench"}, args...))
			root.SetOut(&out)
			root.SetErr(t.Output())
			err := root.ExecuteContext(ctx)
			var status exitStatus
			if !errors.As(err, &status) || status != exitError || out.Len() > 0 {
				t.Errorf("%v, interrupted after %v, ended with %v and printed %q", args, after, err, &out)
			}
			nothingLeft(t)
		}
	}
}

func TestPercentile(t *testing.T) {
	var hundred []time.Duration
	for i := range 100 {
		hundred = append(hundred, time.Duration(i+1))
	}
	for _, c := range []struct {
		of   []time.Duration
		p    int
		want time.Duration
	}{
		{hundred, 50, 50}, {hundred, 99, 99}, {hundred, 100, 100}, {hundred[:1], 50, 1}, {hundred[:1], 99, 1},
		{hundred[:2], 50, 1}, {hundred[:3], 50, 2}, {hundred[:50], 99, 50}, {hundred, 0, 1},
	} {
		if got := percentile(c.of, c.p); got != c.want {
			t.Errorf("percentile %d of %d is %d, want %d", c.p, len(c.of), got, c.want)
		}
	}
}

// TestBenchCluster: everything has an address of its own, in its range, also where there are most.
func TestBenchCluster(t *testing.T) {
	c := newBenchCluster(maxServices, maxEndpoints/maxServices)
	all := maxServices * c.endpoints
	seen := map[netip.Addr]bool{}
	once := func(a netip.Addr, in string) {
		if seen[a] || !netip.MustParsePrefix(in).Contains(a) {
			t.Errorf("%v is there twice, or not in %s", a, in)
		}
		seen[a] = true
	}
	for _, i := range []int{0, 1, 1 << 16, maxServices - 1, maxServices, 2*maxServices - 1} {
		once(c.service(i).ClusterIPs[0], "10.0.0.0/10")
		for _, e := range c.slice(i).Endpoints {
			once(e.Addr, "10.128.0.0/9")
		}
	}
	for range 3 {
		once(c.newcomer().Addr, "10.64.0.0/10")
	}
	c.newcomers = 1<<22 - 2
	once(c.newcomer().Addr, "10.64.0.0/10")
	if len(c.nodes) != maxNodes || all != maxEndpoints {
		t.Errorf("%d nodes, %d endpoints", len(c.nodes), all)
	}
}

// TestChurnWatch: a change counts when the state shows it, and those before it count with it.
func TestChurnWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newBenchCluster(1, 3)
		w := &churnWatch{waiting: map[snapshot.Name][]churnChange{}}
		first := c.slice(0)
		second := c.replaced(first)
		third := c.added(second)
		for _, s := range []*snapshot.Slice{second, third, c.removed(third)} {
			w.expect(c.name(0), churnChange{s, time.Now()})
			time.Sleep(time.Millisecond)
		}
		state := func(s *snapshot.Slice) *dataplane.Service {
			snap := snapshot.New()
			d := sliceDelta(s)
			d.Services = map[snapshot.Name]*snapshot.Service{c.name(0): c.service(0)}
			snap.Apply(d)
			st, _ := dataplane.Compute(benchConfig, snap)
			return st.Services[c.name(0)]
		}
		w.acknowledge(c.name(0), state(first), time.Now())
		if w.count != 3 || w.most != 3 {
			t.Errorf("%d changes wait, want 3", w.count)
		}
		w.acknowledge(c.name(0), state(third), time.Now())
		if w.count != 1 || !slices.Equal(w.samples, []time.Duration{3 * time.Millisecond, 2 * time.Millisecond}) {
			t.Errorf("%d changes wait, samples %v", w.count, w.samples)
		}
		w.acknowledge(c.name(0), state(c.removed(third)), time.Now())
		if w.count != 0 || len(w.waiting) != 0 || len(w.samples) != 3 {
			t.Errorf("%d changes wait, samples %v", w.count, w.samples)
		}
	})
}
