package conntrack

import (
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// even is a Service with endpoints 10.0.0.1 to 10.0.0.n that asks for even shares.
func even(name, key string, n int) *dataplane.Service {
	list := ""
	for i := range n {
		list += fmt.Sprintf(",10.0.0.%d:80", i+1)
	}
	s := service(name, key+">"+list[1:])
	for _, sp := range s.Ports {
		sp.Rebalance, sp.Cluster = 10*time.Second, &dataplane.Pool{Endpoints: sp.Serving}
	}
	return s
}

// evenTable is a table whose clients connect anew, at random, as soon as they are reset.
type evenTable struct {
	tcpTable
	endpoints int
	dice      *rand.Rand
	resets    []time.Duration
	start     time.Time
	// renews says that each flow has a packet between being listed and being read anew.
	renews bool
}

func (t *evenTable) again(of *flow) (flow, bool, error) {
	f, ok, err := t.tcpTable.again(of)
	if t.renews {
		f.tcp.left = 431999
	}
	return f, ok, err
}

func (t *evenTable) remove(flows []flow) (int, error) {
	n, err := t.tcpTable.remove(flows)
	for _, f := range flows {
		t.resets = append(t.resets, time.Since(t.start))
		if t.endpoints > 0 {
			k := f.frontend
			t.idle(k.String(), t.dice.IntN(t.endpoints), 3600)
		}
	}
	return n, err
}

// idle adds connections that have been idle for some seconds.
func (t *evenTable) idle(frontend string, endpoint int, seconds uint32) *flow {
	f := t.hold(frontend, fmt.Sprintf("10.0.0.%d:80", endpoint+1))
	f.client, f.tcp.left = clientOf(t.dice.IntN(math.MaxInt32), false), 432000-seconds
	return f
}

func (t *evenTable) shares() (n [5]int) {
	for _, f := range t.left() {
		n[f.endpoint.Addr().As4()[3]]++
	}
	return n
}

// rebalance holds connections of two endpoints, gives the Service two more, and waits.
func rebalance(t *testing.T, n int, seconds uint32, change func(*dataplane.Service, *evenTable)) *evenTable {
	table := &evenTable{dice: rand.New(rand.NewPCG(1, 2)), endpoints: 4}
	for i := range n {
		table.idle(webKey, i%2, seconds)
	}
	before, after := even("web", webKey, 2), even("web", webKey, 4)
	if change != nil {
		change(before, table)
		change(after, table)
	}
	r := newReleasing(t, &table.tcpTable, before)
	r.stop()
	r.startOn(table)
	r.apply(before)
	rest(time.Minute)
	table.start = time.Now()
	r.apply(after)
	rest(2 * time.Hour)
	return table
}

// TestRebalance: after endpoints were added, idle connections are ended until no endpoint has more than its share and a
// fifth, a twentieth of them a second at most.
func TestRebalance(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := rebalance(t, 1000, 3600, nil)
		shares := table.shares()
		if most := slices.Max(shares[:]); most > 300 {
			t.Errorf("the shares are %v", shares)
		}
		if n := len(table.resets); n < 400 || n > 1000 {
			t.Errorf("%d connections were ended", n)
		}
		for i, at := range table.resets {
			if i >= 50 && at-table.resets[i-50] < rebalanceEvery {
				t.Fatalf("51 connections were ended within %v", at-table.resets[i-50])
			}
		}
		t.Logf("%d of 1,000 connections were ended within %v: %v", len(table.resets),
			table.resets[len(table.resets)-1].Round(time.Second), shares[1:])
	})
}

// TestRebalanceNot: connections stay with an endpoint that has too many of them.
func TestRebalanceNot(t *testing.T) {
	for _, test := range []struct {
		what    string
		seconds uint32
		change  func(*dataplane.Service, *evenTable)
	}{
		{"not asked", 3600, func(s *dataplane.Service, _ *evenTable) { s.Ports[0].Rebalance = 0 }},
		{"not idle for long enough", 10, nil},
		{"session affinity", 3600, func(s *dataplane.Service, _ *evenTable) { s.Ports[0].Affinity = time.Hour }},
		{"a hash", 3600, func(s *dataplane.Service, _ *evenTable) { s.Ports[0].Hash = dataplane.HashAddr }},
		{"IPVS", 3600, func(s *dataplane.Service, _ *evenTable) {
			s.Ports[0].Scheduling = &dataplane.Scheduling{Scheduler: "lc"}
		}},
		{"two pools", 3600, func(s *dataplane.Service, _ *evenTable) { s.Ports[0].Local = s.Ports[0].Cluster }},
		{"a timeout of its own", 432000 - 290, nil},
		{"a request since it was listed", 3600, func(_ *dataplane.Service, t *evenTable) { t.renews = true }},
		{"data on its way", 3600, func(_ *dataplane.Service, t *evenTable) {
			for i := range t.flows {
				t.flows[i].tcp.unacknowledged, t.flows[i].tcp.unreceived = i%2 == 0, i%2 == 1
			}
		}},
		{"closing", 3600, func(_ *dataplane.Service, t *evenTable) {
			for i := range t.flows {
				t.flows[i].tcp.established = false
			}
		}},
	} {
		t.Run(test.what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				table := rebalance(t, 100, test.seconds, test.change)
				if len(table.resets) > 0 {
					t.Errorf("%d connections were ended after %v", len(table.resets), table.resets[0])
				}
				if looks := table.looks(); looks > 100 {
					t.Errorf("%d looks", looks)
				}
			})
		})
	}
}

// TestRebalanceNamespaces: a namespace whose Services all ask for it has its bound, and another one is served beside
// it.
func TestRebalanceNamespaces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := &evenTable{dice: rand.New(rand.NewPCG(1, 2))}
		var before, after []*dataplane.Service
		for i := range 40 {
			k := fmt.Sprintf("10.96.1.%d:80/tcp", i)
			for _, to := range []struct {
				list *[]*dataplane.Service
				n    int
			}{{&before, 2}, {&after, 4}} {
				s := even(fmt.Sprint("s", i), k, to.n)
				if i == 0 {
					s.Name = snapshot.Name{Namespace: "small", Name: "s"}
				}
				for _, sp := range s.Ports {
					sp.Name.Service, sp.Rebalance = s.Name, time.Second
				}
				*to.list = append(*to.list, s)
			}
			for n := range 100 {
				table.idle(k, n%2, 3600)
			}
		}
		r := newReleasing(t, &table.tcpTable, before...)
		r.stop()
		r.startOn(table)
		r.apply(before...)
		rest(time.Minute)
		table.start, table.endpoints = time.Now(), 4
		r.apply(after...)
		rest(10 * time.Second)
		small, others := 0, 0
		for _, told := range r.told {
			if told.Port.Service.Namespace == "small" {
				small += told.Flows
			} else {
				others += told.Flows
			}
		}
		if small < 30 || others > 10*maxMoves {
			t.Errorf("%d connections of the small namespace were ended, and %d of the large one", small, others)
		}
	})
}

// TestExcess compares what may be ended of endpoints with counts of connections.
func TestExcess(t *testing.T) {
	for _, test := range []struct {
		counts, weights []int
		want            []int
	}{
		{[]int{500, 500, 0, 0}, nil, []int{25, 25, 0, 0}},
		{[]int{301, 299, 200, 200}, nil, []int{50, 0, 0, 0}},
		{[]int{300, 300, 200, 200}, nil, []int{0, 0, 0, 0}},
		{[]int{1, 0, 0, 0}, nil, []int{0, 0, 0, 0}},
		{[]int{2, 0, 0, 0}, nil, []int{1, 0, 0, 0}},
		{[]int{750, 250}, []int{3, 1}, []int{0, 0}},
		{[]int{500, 500}, []int{3, 1}, []int{0, 50}},
		{[]int{0, 0}, nil, []int{0, 0}},
	} {
		pool, counts := &dataplane.Pool{}, map[netip.AddrPort]int{}
		for i, n := range test.counts {
			e := dataplane.Endpoint{AddrPort: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), 80)}
			if test.weights != nil {
				e.Weight = uint16(test.weights[i])
			}
			pool.Endpoints, counts[e.AddrPort] = append(pool.Endpoints, e), n
		}
		got := excess(pool, counts)
		for i, e := range pool.Endpoints {
			if got[e.AddrPort] != test.want[i] {
				t.Errorf("%v of %v: %v", test.counts, test.weights, got)
			}
		}
	}
}
