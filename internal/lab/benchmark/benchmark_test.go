package benchmark

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
	"github.com/verdict-proxy/verdict/internal/system/units"
	"github.com/verdict-proxy/verdict/nft/kernel"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

func TestMain(m *testing.M) { labtest.Main(m) }

// small is a cluster of 50 Services with 3 endpoints. All that a test opens must be closed when it ends.
func small(t testing.TB) Options {
	t.Helper()
	t.Cleanup(func() { labtest.NoNamespacesLeft(t) })
	return Options{
		Services:  50,
		Endpoints: 3,
		Open:      func() (*kernel.Backend, error) { return kernel.Open(kernel.Options{Counters: 1 << 20}) },
	}
}

// encoded gives a result as a JSON object.
func encoded(t *testing.T, result any) (fields map[string]any) {
	t.Helper()
	text, err := json.Marshal(result)
	labtest.Check(t, err)
	labtest.Check(t, json.Unmarshal(text, &fields))
	return fields
}

// filled gives a result of the small cluster as a JSON object, with what the first fill must say.
func filled(t *testing.T, result any) map[string]any {
	t.Helper()
	fields := encoded(t, result)
	// Of each Service the frontend, the cluster IP and 3 slots; so few endpoints are all on this node, and may reach
	// themselves; the range.
	if got, want := fields["elements"], 50*(2+3)+150+1.0+float64(2*len(NodeConfig.Lines())); got != want {
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

// text gives what people see of a result, without paint.
func text(t *testing.T, r Result) string {
	t.Helper()
	var out bytes.Buffer
	labtest.Check(t, r.WriteText(&out, Style{}))
	if strings.Contains(out.String(), "\x1b") {
		t.Error("the text is painted")
	}
	return out.String()
}

// printed looks for words in the text of a result of the small cluster.
func printed(t *testing.T, r Result, words ...string) {
	t.Helper()
	out := text(t, r)
	for _, n := range append(words, "50 Services with 3 endpoints each", "421 elements") {
		if !strings.Contains(out, n) {
			t.Errorf("%q is not in what is printed:\n%s", n, out)
		}
	}
}

func TestCold(t *testing.T) {
	r, err := Cold(t.Context(), small(t), 3)
	labtest.Check(t, err)
	fields := filled(t, r)
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
		t.Errorf("the kernel took %v s, and %v s for the same bytes alone: they can't be the same", r.Seconds.Commit,
			r.SlowestFloor)
	}
	if r.Rounds != 3 || r.Seconds.Commit > r.Slowest.Total || r.Floor > r.SlowestFloor || r.Slowest.Total > 600 {
		t.Errorf("%+v", r)
	}
	printed(
		t,
		r,
		inSeconds(r.Seconds.Policy),
		inSeconds(r.Seconds.Compile),
		inSeconds(r.Seconds.Encode),
		inSeconds(r.Seconds.Commit),
		inSeconds(r.Seconds.Total),
		inSeconds(r.Floor),
		inSeconds(r.SlowestFloor),
		units.Bytes(r.RSS),
		units.Bytes(r.Collected),
		units.Bytes(r.Kernel),
		units.Bytes(int64(r.Bytes)),
		units.Thousands(int(r.Allocations)),
		units.Thousands(r.Messages)+" messages",
	)
}

// smallChange are the options of a small measurement, at the size of others and at a smaller one.
func smallChange(t *testing.T, o Options, rounds int) *ChangeOptions {
	t.Helper()
	c := &ChangeOptions{Options: o, Sizes: []int{o.Services, 20, 20}, Rounds: rounds}
	labtest.Check(t, c.Prepare())
	return c
}

func TestChange(t *testing.T) {
	r, err := Change(t.Context(), smallChange(t, small(t), 20))
	labtest.Check(t, err)
	if len(r.Sizes) != 2 || r.Sizes[0].Services != 20 || r.Endpoints != 3 || r.Rounds != 20 {
		t.Fatalf("%+v", r)
	}
	fields := filled(t, &r.Sizes[1])
	kinds := fields["kinds"].(map[string]any)
	for name, elements := range map[string]float64{
		// A newcomer is on this node, which is the only one here: it may reach itself. So may the one that goes.
		"endpoint_replaced": 1 + 2, "endpoint_added": 2 + 1, "endpoint_removed": 3 + 1,
		"service_added": 2 + 3 + 3, "service_removed": 2 + 3 + 3,
	} {
		k := object(t, kinds, name, "p50_us", "p99_us", "own_p50_us", "kernel_p50_us", "floor_p50_us", "messages",
			"elements", "bytes", "allocations", "allocated_bytes")
		p50, p99, own := k["p50_us"].(float64), k["p99_us"].(float64), k["own_p50_us"].(float64)
		if p50 > p99 || own > p99 || p50 > 1e6 {
			t.Errorf("%s: %v", name, k)
		}
		if k["elements"] != elements {
			t.Errorf("%s: %v elements, want %v", name, k["elements"], elements)
		}
	}
	if len(kinds) != numChangeKinds {
		t.Errorf("%+v", r)
	}
	shown := text(t, r)
	for _, k := range r.Sizes[1].Kinds.each() {
		for _, words := range []string{k.name, inMicroseconds(k.P50), inMicroseconds(k.P99), inMicroseconds(k.OwnP50),
			inMicroseconds(k.KernelP50), inMicroseconds(k.FloorP50), fmt.Sprint(k.Bytes)} {
			if !strings.Contains(shown, words) {
				t.Errorf("%q is not in what is printed:\n%s", words, shown)
			}
		}
	}
}

func TestRestart(t *testing.T) {
	r, err := Restart(t.Context(), small(t), 3, 5)
	labtest.Check(t, err)
	fields := filled(t, r)
	object(t, fields, "corrected", "seconds", "slowest_seconds", "messages", "elements_written")
	if a := r.Adopted; a.Seconds <= 0 || a.Seconds > a.Slowest || a.Messages != 0 || a.Elements != 0 {
		t.Errorf("adopted: %+v", a)
	}
	if r.Rounds != 3 || r.Changed != 5 || r.Corrected.Elements != 4*5 {
		t.Errorf("%+v", r)
	}
	printed(t, r, inSeconds(r.Adopted.Seconds), inSeconds(r.Corrected.Seconds), inSeconds(r.Corrected.Slowest),
		"5 Services changed")
}

func TestChurn(t *testing.T) {
	r, err := Churn(t.Context(), small(t), Load{Rate: 500, Seconds: 0.6})
	labtest.Check(t, err)
	fields := filled(t, r)
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
	printed(
		t,
		r,
		inMilliseconds(r.P50),
		inMilliseconds(r.P99),
		inMilliseconds(r.Max),
		inMilliseconds(r.Late),
		fmt.Sprintf("%.2f", r.Cores),
		inSeconds(r.Seconds),
		units.Thousands(r.TxnElements)+" elements",
		units.Thousands(r.Transactions)+" transactions",
		"500 changes a second",
	)
}

// Changes that are too many for the rate are put at once; all are carried, in fewer transactions, and all are counted.
func TestChurnMerges(t *testing.T) {
	r, err := Churn(t.Context(), small(t), Load{Rate: 1e6, Seconds: 0.003})
	labtest.Check(t, err)
	if r.Changes != 3000 || r.Transactions >= 3000 || r.Backlog < 2 {
		t.Errorf("%+v", r)
	}
}

// A measurement that is interrupted ends soon, and leaves nothing.
func TestInterrupted(t *testing.T) {
	flow := FlowOptions{Sizes: []int{20}, Flows: 200, Rounds: 1000000}
	for name, measure := range map[string]func(context.Context, Options) (Result, error){
		"cold":   func(ctx context.Context, o Options) (Result, error) { return Cold(ctx, o, 1000000) },
		"change": func(ctx context.Context, o Options) (Result, error) { return Change(ctx, smallChange(t, o, 1000000)) },
		"churn": func(ctx context.Context, o Options) (Result, error) {
			return Churn(ctx, o, Load{Rate: 1000, Seconds: 3600})
		},
		"flow": func(ctx context.Context, o Options) (Result, error) {
			flow.Options = o
			return Flow(ctx, &flow)
		},
	} {
		for _, after := range []time.Duration{10 * time.Millisecond, time.Second} {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			time.AfterFunc(after, cancel)
			if _, err := measure(ctx, small(t)); !errors.Is(err, context.Canceled) {
				t.Errorf("%s, interrupted after %v, ended with %v", name, after, err)
			}
			labtest.NoNamespacesLeft(t)
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

// TestCluster: everything has an address of its own, in its range, also where there are most.
func TestCluster(t *testing.T) {
	c := NewCluster(MaxServices, MaxEndpoints/MaxServices)
	all := MaxServices * c.endpoints
	seen := map[netip.Addr]bool{}
	once := func(a netip.Addr, in string) {
		if seen[a] || !netip.MustParsePrefix(in).Contains(a) {
			t.Errorf("%v is there twice, or not in %s", a, in)
		}
		seen[a] = true
	}
	for _, i := range []int{0, 1, 1 << 16, MaxServices - 1, MaxServices, 2*MaxServices - 1} {
		once(c.Service(i).ClusterIPs[0], "10.0.0.0/10")
		for _, e := range c.Slice(i).Endpoints {
			once(e.Addr, "10.128.0.0/9")
		}
	}
	for range 3 {
		once(c.newcomer().Addr, "10.64.0.0/10")
	}
	c.newcomers = 1<<22 - 2
	once(c.newcomer().Addr, "10.64.0.0/10")
	if len(c.nodes) != maxNodes || all != MaxEndpoints {
		t.Errorf("%d nodes, %d endpoints", len(c.nodes), all)
	}
}

// TestChurnWatch: a change counts when the state shows it, and those before it count with it.
func TestChurnWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := NewCluster(1, 3)
		w := &churnWatch{waiting: map[snapshot.Name][]churnChange{}}
		first := c.Slice(0)
		second := c.Replaced(first)
		third := c.Added(second)
		for _, s := range []*snapshot.Slice{second, third, c.Removed(third)} {
			w.expect(c.Name(0), churnChange{s, time.Now()})
			time.Sleep(time.Millisecond)
		}
		state := func(s *snapshot.Slice) *dataplane.Service {
			snap := snapshot.New()
			d := SliceDelta(s)
			d.Services = map[snapshot.Name]*snapshot.Service{c.Name(0): c.Service(0)}
			snap.Apply(d)
			st, _ := dataplane.Compute(NodeConfig, snap)
			return st.Services[c.Name(0)]
		}
		w.acknowledge(c.Name(0), state(first), time.Now())
		if w.count != 3 || w.most != 3 {
			t.Errorf("%d changes wait, want 3", w.count)
		}
		w.acknowledge(c.Name(0), state(third), time.Now())
		if w.count != 1 || !slices.Equal(w.samples, []time.Duration{3 * time.Millisecond, 2 * time.Millisecond}) {
			t.Errorf("%d changes wait, samples %v", w.count, w.samples)
		}
		w.acknowledge(c.Name(0), state(c.Removed(third)), time.Now())
		if w.count != 0 || len(w.waiting) != 0 || len(w.samples) != 3 {
			t.Errorf("%d changes wait, samples %v", w.count, w.samples)
		}
	})
}
