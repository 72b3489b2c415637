// Package collector asks all nodes whether they hold what the API has of a Service, for nodes that want to know. The
// nodes are connected to it and hear nothing until somebody asks (docs/decisions/0026-everywhere.md).
package collector

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"k8s.io/client-go/rest"

	"github.com/verdict-proxy/verdict/internal/proxy/everywhere"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Options configure a Collector. All but Observe and Lead are required.
type Options struct {
	// Client reaches the API server.
	Client *rest.Config
	// Identity is this process's name: that of its pod.
	Identity string
	// Lease says who leads. DaemonSet has a pod on each node that must answer, and Account is its ServiceAccount.
	Lease, DaemonSet, Account snapshot.Name
	// Listen is where the collector listens while it leads, and Advertise where nodes reach it.
	Listen, Advertise string
	Log               *slog.Logger
	// Observe, if not nil, is told of each wait that ended: one of Outcomes, and how long it took.
	Observe func(outcome string, took time.Duration)
	// Lead, if not nil, runs while this process leads: until ctx is done, when it must return.
	Lead func(ctx context.Context, ask Asker)
}

// Asker waits until all nodes hold what the API has of a Service, ctx is done, or the time is over. The answer says
// whether they do, who is missing, or why that could not be learned. It is safe for concurrent use.
type Asker func(ctx context.Context, service snapshot.Name, timeout time.Duration) everywhere.Answer

// Collector is a process that leads, or waits to. Make one with New.
type Collector struct {
	o       Options
	cluster cluster
	leases  *api
	reviews *api

	mu      sync.Mutex
	leading *barrier
}

// New returns a Collector.
func New(o Options) (*Collector, error) {
	var apis [3]*api
	for i, perSecond := range []int{maxReads, maxReviews, 0} {
		var err error
		if apis[i], err = newAPI(o.Client, perSecond); err != nil {
			return nil, err
		}
	}
	if _, _, err := net.SplitHostPort(o.Advertise); err != nil {
		return nil, fmt.Errorf("the address to advertise: %w", err)
	}
	return &Collector{o: o, cluster: newObjects(apis[0], o.DaemonSet), reviews: apis[1], leases: apis[2]}, nil
}

// Run leads whenever it can, until ctx is done. It fails if it cannot listen.
func (c *Collector) Run(ctx context.Context) error {
	cert, fingerprint, err := newCertificate()
	if err != nil {
		return err
	}
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	e := &elector{api: c.leases, lease: c.o.Lease, identity: c.o.Identity, log: c.o.Log, annotations: map[string]string{
		everywhere.AddressAnnotation: c.o.Advertise, everywhere.FingerprintAnnotation: fingerprint}}
	e.run(ctx, func(ctx context.Context) {
		b := newBarrier(c.cluster, c.o.Observe)
		l, err := listen(ctx, c.o.Listen)
		if err != nil {
			fail(err)
			return
		}
		c.lead(b)
		defer c.lead(nil)
		var all sync.WaitGroup
		defer all.Wait()
		all.Go(func() { b.run(ctx) })
		if c.o.Lead != nil {
			all.Go(func() { c.o.Lead(ctx, b.askHere) })
		}
		if err := newHub(cert, newReviewer(c.reviews, c.o.Account), b, c.o.Log).serve(ctx, l); err != nil {
			fail(err)
		}
	})
	if err := context.Cause(ctx); !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

func (c *Collector) lead(b *barrier) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.leading = b
}

// Stats returns what was counted since this process leads, and whether it does.
func (c *Collector) Stats() (s Stats, leading bool) {
	c.mu.Lock()
	b := c.leading
	c.mu.Unlock()
	if b == nil {
		return s, false
	}
	return b.snapshot(), true
}
