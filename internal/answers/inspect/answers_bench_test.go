package inspect

import (
	"context"
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab/benchmark"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/nft/kernel"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// BenchmarkAnswers measures how long each answer takes on a node of 10,000 Services with 10 endpoints each, objects in
// memory.
func BenchmarkAnswers(b *testing.B) {
	h := labtest.NewHost(b, labtest.NewNet(b), "node")
	cluster := benchmark.NewCluster(10000, 10)
	snap := snapshot.New()
	snap.Apply(cluster.All())
	snap.Apply(snapshot.Delta{HostAddrs: &[]netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1})}})
	st, _ := dataplane.Compute(benchmark.NodeConfig, snap)
	do := func(f func() error) { labtest.Check(b, h.Do(f)) }
	var backend *kernel.Backend
	var i *kernel.Inspector
	do(func() (err error) {
		if backend, err = kernel.Open(kernel.Options{}); err != nil {
			return err
		}
		i, err = kernel.Inspect()
		return err
	})
	defer backend.Close()
	defer i.Close()
	_, err := backend.ApplyAll(st, dataplane.Change{})
	labtest.Check(b, err)
	q := Question{Source: benchmark.EndpointAddr(7), Key: dataplane.Key{Addr: benchmark.ClusterIP(5000),
		Protocol: snapshot.TCP, Port: 80}}
	unused := q
	unused.Key.Port = 81
	ask := func(q Question, o *Objects) func() error {
		return func() error {
			e := explainRun{Explainer: &Explainer{Objects: &ObjectFlags{}, Inspector: i}, q: q}
			if err := e.gather(context.Background()); err != nil {
				return err
			}
			defer e.routes.Close()
			e.objects = o
			_, err := e.answer(context.Background())
			return err
		}
	}
	sampler := NewSampler(i)
	for _, bench := range []struct {
		name string
		run  func() error
	}{
		{"explain-live", ask(q, nil)},
		{"explain-live-unused-port", ask(unused, nil)},
		{"explain-both", ask(q, &Objects{Config: benchmark.NodeConfig, Snap: snap})},
		{"verify", func() error { _, err := i.Differences(context.Background(), nil); return err }},
		{"diff", func() error { return benchDiff(i, snap) }},
		{"top-all", func() error { return sampler.Sample(b.Context(), nil, nil, time.Second, true) }},
		{"top-slice", func() error {
			return sampler.Sample(b.Context(), []string{"team-0/service-0:http"}, []string{"team-0/service-0:http"},
				time.Second, false)
		}},
	} {
		b.Run(bench.name, func(b *testing.B) {
			for b.Loop() {
				do(bench.run)
			}
		})
	}
}

// benchDiff is diff without reading the objects.
func benchDiff(i *kernel.Inspector, snap *snapshot.Snapshot) error {
	st, _ := dataplane.Compute(benchmark.NodeConfig, snap)
	d, err := i.Differences(context.Background(), st)
	if err == nil && (d.Differences != nil || d.Wrong != nil) {
		err = errors.New("the kernel does not hold what was written")
	}
	return err
}
