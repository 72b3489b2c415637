package benchmark

import (
	"fmt"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
)

// BenchmarkCold measures the whole line, from objects in memory to the kernel's acknowledgement, into an empty
// namespace, and beside it the kernel alone, given the same bytes in another empty namespace. Own is all that is not
// the kernel's.
func BenchmarkCold(b *testing.B) {
	for _, services := range testkit.Size([]int{1000, 10000}, []int{1000}) {
		b.Run(fmt.Sprintf("%dx10", services), func(b *testing.B) {
			o := small(b)
			o.Services, o.Endpoints = services, 10
			var own, commit, floor time.Duration
			for b.Loop() {
				round, err := o.coldRound(b.Context())
				labtest.Check(b, err)
				own += round.policy + round.compile + round.encode
				commit, floor = commit+round.commit, floor+round.floor
			}
			for name, d := range map[string]time.Duration{"own-ms": own, "commit-ms": commit, "floor-ms": floor} {
				b.ReportMetric(milliseconds(d)/float64(b.N), name)
			}
		})
	}
}

// BenchmarkOneEndpoint measures one endpoint replaced, from the changed slice to the kernel's acknowledgement, in
// clusters of different size.
func BenchmarkOneEndpoint(b *testing.B) {
	for _, services := range testkit.Size([]int{1000, 10000, 100000}, []int{1000}) {
		b.Run(fmt.Sprint(services), func(b *testing.B) {
			l, err := newLine(small(b))
			labtest.Check(b, err)
			defer func() { labtest.Check(b, l.close()) }()
			cluster := NewCluster(services, 10)
			_, err = l.fill(cluster.All())
			labtest.Check(b, err)
			s := cluster.Slice(services / 2)
			for b.Loop() {
				s = cluster.Replaced(s)
				r, err := l.fill(SliceDelta(s))
				labtest.Check(b, err)
				if written := r.Replaced + r.Added + r.Removed; written < 1 || written > 3 {
					b.Fatalf("%+v", r)
				}
			}
		})
	}
}
