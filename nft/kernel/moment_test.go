package kernel

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/ipfamily"
	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// BenchmarkMoments has one Service's pool shrink and grow as fast as the kernel takes it, while clients connect, and
// reports how many of a million connections get no answer, and how many changes there were for each. Every endpoint
// serves all the time, so none should be lost (decision 0031). Either other Services have pools of both sizes, or the
// chains of a size come and go with the change.
func BenchmarkMoments(b *testing.B) {
	b.Run("others have these sizes", func(b *testing.B) { moments(b, 2) })
	b.Run("nobody else has these sizes", func(b *testing.B) { moments(b, 0) })
}

// momentTime is how long one round takes.
const momentTime = 2 * time.Second

func moments(b *testing.B, others int) {
	c, backend := proxied(b, lab.Config{LocalPods: 3, RemotePods: 3})
	alone := endpointState{"one", nil, []condition{ready}}
	states := func(first endpointState) *dataplane.State {
		snap := snapshot.New()
		snap.Apply(facts(c))
		for i, e := range []endpointState{first, alone, both}[:1+others] {
			snap.Apply(flowService{number: 1 + i, state: e}.delta(c))
		}
		st, _ := dataplane.Compute(dataplane.Config{NodeName: "node", DetectLocal: clusterCIDR}, snap)
		return st
	}
	large, small := states(both), states(alone)
	apply(b, backend, large)
	s := flowService{number: 1}
	to := s.frontendOf(c, dataplane.ClusterIP, ipfamily.IPv4)
	var lost atomic.Int64
	// a client whose packet is left alone would wait for minutes
	stop := connect(c, to, 500*time.Millisecond, func(*lab.Host, lab.Result) { lost.Add(1) })
	changes := 0
	for b.Loop() {
		for began := time.Now(); time.Since(began) < momentTime; changes++ {
			next := small
			if changes%2 == 1 {
				next = large
			}
			_, err := backend.ApplyAll(next, dataplane.Change{Services: []snapshot.Name{s.name()}})
			labtest.Check(b, err)
		}
	}
	dials := float64(stop())
	b.ReportMetric(float64(lost.Load())*1e6/dials, "lost/million")
	b.ReportMetric(float64(changes)/dials, "changes/connection")
}
