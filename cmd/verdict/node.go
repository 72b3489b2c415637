package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/verdict-proxy/verdict/internal/conntrack"
	"github.com/verdict-proxy/verdict/internal/sysctl"
	"github.com/verdict-proxy/verdict/ipvsplugin"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/nft/kernel"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
	"github.com/verdict-proxy/verdict/sync/watch"
)

// source is where objects come from: a *watch.Files, a *watch.Kubernetes or a *watch.Host.
type source interface {
	Run(ctx context.Context, sink watch.Sink) error
}

// node is the proxy of one node, put together from its sources to the kernel.
type node struct {
	config  dataplane.Config
	sources []source
	backend reconcile.Writer
	// tables, if not nil, is what writes nftables, behind or in place of backend.
	tables *kernel.Backend
	// scheduler, if not nil, is what writes IPVS, before tables.
	scheduler *ipvsplugin.Backend
	// flows is the kernel's connection tracking table, out of which UDP and SCTP flows go that a change leaves wrong.
	flows *conntrack.Conn
	log   *slog.Logger
	// written, if not nil, is told of each transaction.
	written func(reconcile.Transaction)
	// unscheduled, if not nil, is told of Services that are carried without their scheduler.
	unscheduled func(*dataplane.Refused)
	// refused, if not nil, is told of Services that are not carried as they are.
	refused func(*dataplane.Refused)
	// contested, if not nil, is told of Services that claim an address which another one keeps.
	contested func([]dataplane.Contest)
	// tunings, if not nil, gives what is in force from then on in place of config and leastRest.
	tunings <-chan tuning
	// leastRest is the least time between two transactions.
	leastRest time.Duration
	// routeLocalnet lets the host route its loopback range; called once, after the rules that guard it are in.
	routeLocalnet func() error
	// serving says what the node shows of itself.
	serving serving
	// stuck, if not nil, is called when one transaction, or one look at the kernel, has lasted for stuckAfter. It is
	// to end the process.
	stuck func(what string)
}

// stuckAfter is when to give a transaction up. The kubelet does so after two minutes, too: one after which a change
// is late, and six failures of /livez.
var stuckAfter = 2 * time.Minute

// run works until ctx is done, and leaves in the kernel what is there.
func (n *node) run(ctx context.Context) (err error) {
	queue, planner := snapshot.NewQueue(len(n.sources)), dataplane.NewPlanner(n.config)
	loop := reconcile.Loop{Queue: queue, Planner: planner, Log: n.log, Writer: n.backend}
	shown, err := n.surface(queue, &loop)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, shown.close()) }()
	if err := shown.bind(); err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	for _, s := range n.sources {
		sink := shown.sink(s, queue)
		group.Go(func() error { return s.Run(ctx, sink) })
	}
	shown.run(ctx, group)
	cleaner := conntrack.NewCleaner(n.flows, func(l conntrack.Look) {
		n.looked(l)
		shown.looked(l)
	})
	group.Go(func() error { return cleaner.Run(ctx) })
	var leastRest atomic.Int64
	leastRest.Store(int64(n.leastRest))
	loop.LeastRest = func() time.Duration { return time.Duration(leastRest.Load()) }
	group.Go(func() error {
		n.retune(ctx, func(t tuning) {
			leastRest.Store(int64(t.leastRest))
			planner.SetConfig(t.policy)
			shown.retune(t.policy)
			queue.Notify()
		})
		return nil
	})
	routed := false
	written := func(t reconcile.Transaction) {
		if planner.State().LocalhostNodePorts && !routed {
			routed = true
			if err := n.routeLocalnet(); err != nil {
				n.log.Warn("node ports will not answer at 127.0.0.1", "err", err)
			}
		}
		if n.written != nil {
			n.written(t)
		}
	}
	loop.Listeners = append([]reconcile.Listener{cleaner.Listener()}, shown.listeners()...)
	loop.Listeners = append(loop.Listeners, reconcile.Listener{
		Written: written, Unscheduled: n.unscheduled, Quarantined: n.refused, Contested: n.contested})
	group.Go(func() error { return loop.Run(ctx) })
	group.Go(func() error {
		n.watch(ctx, &loop)
		return nil
	})
	return group.Wait()
}

// watch sees to it that the loop gets on, until the context ends. Time does not count in which this process was
// stopped, too.
func (n *node) watch(ctx context.Context, loop *reconcile.Loop) {
	const looks = 20
	tick := time.NewTicker(stuckAfter / looks)
	defer tick.Stop()
	var since time.Time
	for seen := 0; n.stuck != nil; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		busy := loop.Busy()
		if seen++; busy.IsZero() || busy != since {
			since, seen = busy, 0
		}
		if seen == looks {
			n.stuck(fmt.Sprintf("the kernel has not answered since %v", busy.Format(time.RFC3339)))
		}
	}
}

// retune has what changes take effect until the context ends.
func (n *node) retune(ctx context.Context, apply func(tuning)) {
	for {
		select {
		case <-ctx.Done():
			return
		case t := <-n.tunings:
			apply(t)
		}
	}
}

// looked logs a look at the flows.
func (n *node) looked(l conntrack.Look) {
	if l.Err != nil {
		n.log.Warn("wrong flows may be left for now; it will be tried again", "err", l.Err)
	}
	if removed := l.IPv4.Removed + l.IPv6.Removed; removed > 0 {
		n.log.Info("flows to endpoints that are gone were removed", "flows", removed, "frontends", l.Frontends)
	}
}

// routeLocalnet sets the sysctl without which the kernel does not let a packet from 127.0.0.1 leave the host.
func routeLocalnet() error {
	const path = "/proc/sys/net/ipv4/conf/all/route_localnet"
	if v, err := os.ReadFile(path); err == nil && string(v) == "1\n" {
		return nil
	}
	return os.WriteFile(path, []byte("1"), 0o644)
}

// openWithin is openBackend with counters that take so many MiB at most.
func openWithin(o kernel.Options, mib int) (*kernel.Backend, error) {
	cpus, err := sysctl.PossibleCPUs()
	if err != nil {
		return nil, err
	}
	o.Counters = max(mib<<20/(nft.CounterBytes*cpus), 1)
	return openBackend(o)
}

// openBackend opens the kernel of the network namespace the calling thread is in, and makes sure that it is up to it.
func openBackend(o kernel.Options) (*kernel.Backend, error) {
	backend, err := kernel.Open(o)
	if err != nil {
		return nil, err
	}
	if err := backend.Probe(); err != nil {
		return nil, errors.Join(err, backend.Close())
	}
	return backend, nil
}
