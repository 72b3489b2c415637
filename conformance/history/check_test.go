package history

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"
)

func newModel(seed uint64) *model {
	return &model{rng: rand.New(rand.NewPCG(seed, 1)), lag: 20_000, steps: 12}
}

// Whatever correct proxies do, they pass, and are no staler than they can have been.
func TestCorrectHistoriesPass(t *testing.T) {
	late, unproven := 0, 0
	for seed := range uint64(60) {
		m := newModel(seed)
		m.lag = 1 + m.rng.Int64N(60_000)
		m.steps = 1 + m.rng.IntN(30)
		h := m.history()
		r := Check(h, Options{Bound: micros(m.lag)})
		if !r.OK() || r.E() > micros(m.lag) {
			t.Fatalf("seed %d, lag %v: e %v, %+v", seed, micros(m.lag), r.E(), r.Violations)
		}
		if r.E() > micros(m.lag)/2 {
			late++
		}
		unproven += r.Unproven
	}
	if late < 20 {
		t.Errorf("only %d of 60 histories were found to be as stale as half of what they may be", late)
	}
	if unproven > 6 {
		t.Errorf("%d endpoints were not seen at rest: the histories are too short to prove anything", unproven)
	}
}

// slowE finds the staleness of removals and additions without any index.
func slowE(h *History) (removed, added time.Duration) {
	services := fold(h)
	for _, c := range h.Conns {
		s := services[c.Service]
		best := int64(-1) // of all versions that could have been seen
		for v, version := range s.versions {
			allowed := c.Outcome == Answered && version.set[c.At] || c.Outcome != Answered && len(version.set) == 0
			if !allowed || version.sent > c.End || c.Outcome == Failed {
				continue
			}
			e := int64(0)
			if v+1 < len(s.versions) {
				e = max(0, c.Begin-s.versions[v+1].acked)
			}
			if best < 0 || e < best {
				best = e
			}
		}
		if c.Outcome == Answered {
			removed = max(removed, micros(best))
		} else {
			added = max(added, micros(best))
		}
	}
	return removed, added
}

// The indexes find what looking at everything finds, of correct and of wrong proxies.
func TestAgreesWithSlowTwin(t *testing.T) {
	for seed := range uint64(30) {
		m := newModel(seed)
		m.steps, m.lose, m.stick = 1+m.rng.IntN(20), seed%3 == 0, seed%4 == 0
		h := m.history()
		for range 20 { // some more at random
			c := &h.Conns[m.rng.IntN(len(h.Conns))]
			s := h.Serves[m.rng.IntN(len(h.Serves))]
			if s.Service == c.Service {
				c.Outcome, c.At, c.Endpoint = Answered, s.Address, s.Endpoint
			}
		}
		r := Check(h, Options{})
		removed, added := slowE(h)
		if r.Removed.Most != max(0, removed) || r.Added.Most != max(0, added) {
			t.Fatalf("seed %d: %v and %v, the slow twin finds %v and %v", seed, r.Removed.Most, r.Added.Most, removed, added)
		}
	}
}

// planted is a fault, how it gets into a history, and what must be found. plant gives false if the history has no place
// for it.
var planted = []struct {
	name  string
	want  Kind
	model func(*model)
	plant func(*rand.Rand, *History) bool
	least time.Duration // of E
}{
	{name: "removal late", want: Late, plant: lateRemoval, least: 200 * time.Millisecond},
	{name: "addition late", want: Late, plant: lateAddition, least: 200 * time.Millisecond},
	{name: "endpoint never used", want: Late, model: func(m *model) { m.ignore, m.steps = true, 2 }},
	{name: "unknown endpoint", want: Stranger, plant: unknownEndpoint},
	{name: "another Service's endpoint", want: Stranger, plant: othersEndpoint},
	{name: "endpoint before it was written", want: Stranger, plant: early},
	{name: "address reused", want: Reused, plant: reuse},
	{name: "last change lost", want: Lost, model: func(m *model) { m.lose = true }},
	{name: "stale at rest", want: Lost, plant: staleAtRest},
	{name: "older version", want: Back, model: func(m *model) { m.stick = true }},
	{name: "affinity broken", want: Affinity, model: func(m *model) { m.forget = true }},
	{name: "connection ends before it begins", want: Disorder, plant: func(r *rand.Rand, h *History) bool {
		c := &h.Conns[r.IntN(len(h.Conns))]
		c.Begin, c.End = c.End+1, c.Begin
		return true
	}},
	{name: "write acknowledged before it was sent", want: Disorder, plant: func(r *rand.Rand, h *History) bool {
		w := &h.Writes[r.IntN(len(h.Writes))]
		w.Sent, w.Acked = w.Acked, w.Sent
		return true
	}},
	{name: "writes swapped", want: Disorder, plant: func(r *rand.Rand, h *History) bool {
		i := 1 + r.IntN(len(h.Writes)-1)
		h.Writes[i], h.Writes[i-1] = h.Writes[i-1], h.Writes[i]
		return h.Writes[i].Service == h.Writes[i-1].Service
	}},
	{name: "answer before the server was there", want: Disorder, plant: func(r *rand.Rand, h *History) bool {
		s := &h.Serves[r.IntN(len(h.Serves))]
		s.At = h.Rest
		return slices.ContainsFunc(h.Conns, func(c Conn) bool { return c.Endpoint == s.Endpoint && c.End < h.Rest })
	}},
	{name: "write after the rest", want: Disorder, plant: func(_ *rand.Rand, h *History) bool {
		h.Rest = h.Writes[len(h.Writes)-1].Acked - 1
		return true
	}},
	{name: "two endpoints of one name", want: Disorder, plant: func(_ *rand.Rand, h *History) bool {
		h.Serves[1].Endpoint = h.Serves[0].Endpoint
		return true
	}},
}

// land has a connection answered by whoever serves an address for its Service.
func land(h *History, c *Conn, address string) bool {
	for _, s := range h.Serves {
		if s.Address == address && s.Service == c.Service {
			c.Outcome, c.At, c.Endpoint = Answered, address, s.Endpoint
			return true
		}
	}
	return false
}

// far finds a connection that began long after a version that allows an address, or nobody, was replaced, while no
// later one allows it.
func far(r *rand.Rand, h *History, want func(s *service, address string) bool) (c *Conn, address string) {
	services := fold(h)
	for range 2000 {
		c = &h.Conns[r.IntN(len(h.Conns))]
		s := services[c.Service]
		for address := range s.spans {
			v := s.last(address, c.End)
			if v <= 0 || !want(s, address) {
				continue
			}
			if at, ok := s.replaced(v); ok && c.Begin > at+201_000 {
				return c, address
			}
		}
	}
	return nil, ""
}

func lateRemoval(r *rand.Rand, h *History) bool {
	c, address := far(r, h, func(_ *service, a string) bool { return a != nobody })
	return c != nil && land(h, c, address)
}

func lateAddition(r *rand.Rand, h *History) bool {
	c, _ := far(r, h, func(_ *service, a string) bool { return a == nobody })
	if c == nil {
		return false
	}
	c.Outcome, c.At, c.Endpoint = Refused, "", ""
	return true
}

func answered(r *rand.Rand, h *History) *Conn {
	for {
		if c := &h.Conns[r.IntN(len(h.Conns))]; c.Outcome == Answered {
			return c
		}
	}
}

func unknownEndpoint(r *rand.Rand, h *History) bool {
	answered(r, h).Endpoint = "somebody"
	return true
}

func othersEndpoint(r *rand.Rand, h *History) bool {
	c := answered(r, h)
	for _, s := range h.Serves {
		if s.Service != c.Service {
			c.At, c.Endpoint = s.Address, s.Endpoint
			return true
		}
	}
	return false
}

// early has a connection answered by an endpoint that is written only later.
func early(r *rand.Rand, h *History) bool {
	services := fold(h)
	for range 5000 {
		c := &h.Conns[r.IntN(len(h.Conns))]
		for address := range services[c.Service].spans {
			if address != nobody && services[c.Service].last(address, c.End) < 0 {
				return land(h, c, address)
			}
		}
	}
	return false
}

// reuse gives an address to another Service's endpoint, which answers a connection to the first.
func reuse(r *rand.Rand, h *History) bool {
	c := answered(r, h)
	h.Serves = append(h.Serves, Serve{At: c.Begin - 1, Address: c.At, Endpoint: "other/again", Service: "other"})
	c.Endpoint = "other/again"
	return c.Begin > 0
}

func staleAtRest(r *rand.Rand, h *History) bool {
	services := fold(h)
	for i := range h.Conns {
		c := &h.Conns[i]
		s := services[c.Service]
		for address, spans := range s.spans {
			if c.Begin > h.Rest && address != nobody && spans[len(spans)-1].to < len(s.versions) {
				return land(h, c, address)
			}
		}
	}
	return false
}

// Every planted fault is found, and nothing is found without it.
func TestPlantedFaultsAreFound(t *testing.T) {
	for _, p := range planted {
		t.Run(strings.ReplaceAll(p.name, " ", "-"), func(t *testing.T) {
			tried := 0
			for seed := range uint64(12) {
				m := newModel(seed)
				m.steps = 20
				if p.model != nil {
					p.model(m)
				}
				h := m.history()
				if p.plant != nil && !p.plant(m.rng, h) || p.model != nil && !shows(p.name, h) {
					continue
				}
				tried++
				r := Check(h, Options{Bound: micros(m.lag)})
				if r.Counts[p.want] == 0 || r.E() < p.least {
					t.Fatalf("seed %d: e %v, %v; want %s", seed, r.E(), r.Counts, p.want)
				}
				i := slices.IndexFunc(r.Violations, func(v Violation) bool { return v.Kind == p.want })
				if v := r.Violations[i]; v.Text == "" || len(v.Around) == 0 && p.want != Late && !strings.Contains(p.name, "rest") {
					t.Errorf("seed %d: it is not explained: %+v", seed, v)
				}
			}
			if tried < 3 {
				t.Errorf("only %d of 12 histories had the fault", tried)
			}
		})
	}
}

// shows says whether a fault of the proxy could be seen by a client at all.
func shows(name string, h *History) bool {
	s := fold(h)["s0"]
	n := len(s.versions)
	old, last := s.versions[n-2].set, s.versions[n-1].set
	switch name {
	case "last change lost": // the sets differ
		return len(old) != len(last) || slices.ContainsFunc(keys(last), func(a string) bool { return !old[a] })
	case "endpoint never used":
		return last["10.0.0.0:80"] && !old["10.0.0.0:80"] && len(last) > 1
	case "affinity broken":
		s := fold(h)["s2"]
		return len(s.versions[len(s.versions)-1].set) > 1
	}
	return true
}

func keys(set map[string]bool) (all []string) {
	for k := range set {
		all = append(all, k)
	}
	return all
}

// A history with no fault but one has its counts bounded, whatever it holds.
func TestReportIsBounded(t *testing.T) {
	h := newModel(1).history()
	for i := range h.Conns {
		if h.Conns[i].Outcome == Answered {
			h.Conns[i].Endpoint = strings.Repeat("x", maxName)
		}
	}
	r := Check(h, Options{Bound: time.Microsecond})
	if r.Counts[Stranger] < 100 || len(r.Violations) > shown*len(Kinds) {
		t.Errorf("%d strangers, %d violations in full", r.Counts[Stranger], len(r.Violations))
	}
}

// Clocks that stand still while nothing can be heard leave only the rest of a staleness.
func TestFaultsStopTheClock(t *testing.T) {
	h := &History{
		Serves: []Serve{{0, "a", "A", "s"}, {0, "b", "B", "s"}},
		Writes: []Write{
			{Sent: 0, Acked: 10, Service: "s"},
			{Sent: 20, Acked: 30, Service: "s", Slice: "x", Endpoints: []Endpoint{{"a", Ready}}},
			{Sent: 1000, Acked: 1100, Service: "s", Slice: "x", Endpoints: []Endpoint{{"b", Ready}}},
		},
		Conns: []Conn{
			{Begin: 5000, End: 5010, Service: "s", Client: "c", Node: "n", Outcome: Answered, Endpoint: "A", At: "a"},
			{Begin: 6000, End: 6010, Service: "s", Client: "c", Node: "n", Outcome: Failed},
			{Begin: 6000, End: 9000, Service: "s", Client: "c", Node: "n", Outcome: TimedOut}, // and proves nothing
		},
		Faults: []Fault{{From: 1200, To: 3000}, {From: 2000, To: 4000, Node: "n"}, {From: 0, To: 9000, Node: "other"}},
	}
	r := Check(h, Options{})
	if r.Removed.Most != micros(3900) || r.Removed.Beyond != micros(1100) || r.Removed.Conns != 1 || r.Unjudged != 1 ||
		r.Unanswered != 1 || r.Added.Most != 0 {
		t.Errorf("%+v", r)
	}
	if r = Check(h, Options{Bound: micros(1100)}); !r.OK() {
		t.Errorf("within the bound: %+v", r.Violations)
	}
	if r = Check(h, Options{Bound: micros(1099)}); r.Counts[Late] != 1+1 { // it reached a, and did not reach b
		t.Errorf("beyond the bound: %+v", r.Counts)
	}
}

// A connection may see any version from when it was sent, and the old one until the new one is acknowledged.
func TestBoundaries(t *testing.T) {
	base := func(begin, end int64, endpoint, at string) *History {
		h := &History{
			Serves: []Serve{{0, "a", "A", "s"}, {0, "b", "B", "s"}},
			Writes: []Write{
				{Sent: 0, Acked: 10, Service: "s"},
				{Sent: 20, Acked: 30, Service: "s", Slice: "x", Endpoints: []Endpoint{{"a", Ready}, {"b", Unready}}},
				{Sent: 100, Acked: 200, Service: "s", Slice: "x", Endpoints: []Endpoint{{"a", Serving}, {"b", Ready}}},
				{Sent: 300, Acked: 400, Service: "s", Slice: "x", Endpoints: []Endpoint{{"a", Serving}}},
			},
			Conns: []Conn{{Begin: begin, End: end, Service: "s", Client: "c", Node: "n", Outcome: Answered,
				Endpoint: endpoint, At: at}},
		}
		if endpoint == "" {
			h.Conns[0].Outcome = Refused
		}
		return h
	}
	for _, c := range []struct {
		begin, end   int64
		endpoint, at string
		e            int64
		kind         Kind
	}{
		{90, 99, "B", "b", 0, Stranger}, // not sent yet
		{90, 100, "B", "b", 0, ""},
		{200, 210, "A", "a", 0, ""},
		{201, 210, "A", "a", 1, ""},
		{290, 300, "A", "a", 0, ""}, // the fallback may be in force
		{450, 460, "B", "b", 50, ""},
		{450, 460, "A", "a", 0, ""}, // nobody is ready, and A serves still
		{30, 40, "", "", 0, ""},
		{45, 46, "", "", 15, ""},
	} {
		r := Check(base(c.begin, c.end, c.endpoint, c.at), Options{})
		if r.E() != micros(c.e) || (c.kind == "") != r.OK() || c.kind != "" && r.Counts[c.kind] != 1 {
			t.Errorf("%d to %d at %q: e %v, %v; want %d, %q", c.begin, c.end, c.endpoint, r.E(), r.Counts, c.e, c.kind)
		}
	}
}

// Who moves when its endpoint went, when the time is over, or when nobody can tell in which order, breaks nothing.
func TestAffinity(t *testing.T) {
	second := int64(1e6)
	base := func() *History {
		return &History{
			Serves: []Serve{{0, "a", "A", "s"}, {0, "b", "B", "s"}},
			Writes: []Write{
				{Sent: 0, Acked: 10, Service: "s", Affinity: 2},
				{Sent: 20, Acked: 30, Service: "s", Slice: "x", Endpoints: []Endpoint{{"a", Ready}, {"b", Ready}}},
			},
			Conns: []Conn{
				{Begin: second, End: second + 10, Service: "s", Client: "c", Node: "n", Outcome: Answered, Endpoint: "A", At: "a"},
				{Begin: 2 * second, End: 2*second + 10, Service: "s", Client: "c", Node: "n", Outcome: Answered, Endpoint: "B",
					At: "b"},
			},
		}
	}
	without := Write{Sent: second + 100, Acked: second + 200, Service: "s", Slice: "x",
		Endpoints: []Endpoint{{"b", Ready}}}
	for name, c := range map[string]struct {
		change func(*History)
		broken int
	}{
		"moved":         {func(*History) {}, 1},
		"endpoint went": {func(h *History) { h.Writes = append(h.Writes, without) }, 0},
		"endpoint went and came": {func(h *History) {
			with := h.Writes[1]
			with.Sent, with.Acked = second+300, second+400
			h.Writes = append(h.Writes, without, with)
		}, 0},
		"too late":       {func(h *History) { h.Conns[1].End = 3*second + 1 }, 0},
		"just in time":   {func(h *History) { h.Conns[1].End = 3*second - 1 }, 1},
		"at once":        {func(h *History) { h.Conns[0].End = 2*second + 5 }, 0},
		"another client": {func(h *History) { h.Conns[1].Client = "d" }, 0},
		"another node":   {func(h *History) { h.Conns[1].Node = "m" }, 0},
		"no affinity":    {func(h *History) { h.Writes[0].Affinity = 0 }, 0},
	} {
		h := base()
		c.change(h)
		if r := Check(h, Options{}); r.Counts[Affinity] != c.broken || len(r.Counts) != c.broken {
			t.Errorf("%s: %+v", name, r.Violations)
		}
	}
}

// BenchmarkCheck shows that the time grows with the size of a history, and not with its square.
func BenchmarkCheck(b *testing.B) {
	for _, steps := range []int{50, 500, 5000} {
		m := newModel(1)
		m.steps = steps
		h := m.history()
		b.Run(fmt.Sprintf("conns=%d", len(h.Conns)), func(b *testing.B) {
			for b.Loop() {
				Check(h, Options{})
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(len(h.Conns)), "ns/conn")
		})
	}
}
