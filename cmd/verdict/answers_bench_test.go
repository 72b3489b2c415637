package main

import (
	"context"
	"net/netip"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/benchmark"
	"github.com/verdict-proxy/verdict/internal/ipfamily"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/nft/kernel"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// BenchmarkAnswers measures how long each answer takes on a node of 10,000 Services with 10 endpoints each, objects in memory.
func BenchmarkAnswers(b *testing.B) {
	h := labtest.NewHost(b, labtest.NewNet(b), "node")
	cluster := benchmark.NewCluster(10000, 10)
	snap := snapshot.New()
	snap.Apply(cluster.All())
	snap.Apply(snapshot.Delta{HostAddrs: &[]netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1})}})
	st, _ := dataplane.Compute(benchmark.NodeConfig, snap)
	do := func(f func() error) { labtest.Check(b, h.Do(f)) }
	var backend *kernel.Backend
	var reader *kernel.Reader
	do(func() (err error) {
		if backend, err = kernel.Open(kernel.Options{}); err != nil {
			return err
		}
		reader, err = kernel.OpenReader()
		return err
	})
	defer backend.Close()
	defer reader.Close()
	_, err := backend.ApplyAll(st, dataplane.Change{})
	labtest.Check(b, err)
	q := asked{source: benchmark.EndpointAddr(7), key: dataplane.Key{Addr: benchmark.ClusterIP(5000), Protocol: snapshot.TCP, Port: 80}}
	unused := q
	unused.key.Port = 81
	ask := func(q asked, o *objects) func() error {
		return func() error {
			e := explaining{o: &explainOptions{live: true}, q: q, reader: reader}
			if err := e.gather(context.Background()); err != nil {
				return err
			}
			e.objects = o
			_, err := e.answer()
			return err
		}
	}
	sampler := newSampler(reader)
	for _, bench := range []struct {
		name string
		run  func() error
	}{
		{"explain-live", ask(q, nil)},
		{"explain-live-unused-port", ask(unused, nil)},
		{"explain-both", ask(q, &objects{config: benchmark.NodeConfig, snap: snap})},
		{"verify", func() error { _, err := (&objectFlags{}).compareOnce(context.Background(), reader, false); return err }},
		{"diff", func() error { return benchDiff(reader, snap) }},
		{"top-all", func() error { return sampler.sample(nil, nil, time.Second, true) }},
		{"top-slice", func() error {
			return sampler.sample([]string{"team-0/service-0:http"}, []string{"team-0/service-0:http"}, time.Second, false)
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
func benchDiff(r *kernel.Reader, snap *snapshot.Snapshot) error {
	st, _ := dataplane.Compute(benchmark.NodeConfig, snap)
	var m nft.Model
	m.Load(st)
	c, err := r.Contents(&m)
	if err != nil {
		return err
	}
	have := ipfamily.Per[nft.Table]{c.Tables[0].Table, c.Tables[1].Table}
	if d := m.Differences(&c.Found, &have); d != nil || c.Wrong != nil {
		return exitStatus(exitDiffers)
	}
	return nil
}
