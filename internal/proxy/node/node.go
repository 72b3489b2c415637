// Package node runs a proxy. It connects the sources, the sync loop and the kernel with health, metrics, live
// configuration, the keeper and the takeover from kube-proxy.
package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/verdict-proxy/verdict/internal/proxy/backends"
	"github.com/verdict-proxy/verdict/internal/proxy/conntrack"
	"github.com/verdict-proxy/verdict/internal/proxy/ledger"
	"github.com/verdict-proxy/verdict/internal/proxy/outlier"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
	"github.com/verdict-proxy/verdict/sync/watch"
)

// Source supplies objects: a *watch.Files, a *watch.Kubernetes or a *watch.Host.
type Source interface {
	Run(ctx context.Context, sink watch.Sink) error
}

// Node is the proxy of one node, from its sources to the kernel.
type Node struct {
	Config  dataplane.Config
	Sources []Source
	// Backend writes the rules. The caller closes it.
	Backend *backends.Opened
	// Flows is the kernel's connection tracking table, for one Walker. UDP and SCTP flows that a change makes wrong are
	// removed from it.
	Flows *conntrack.Conn
	Log   *slog.Logger
	// Prober probes endpoints that do not answer or refuse. Without it, or if the backend gathers no evidence, all
	// endpoints count as healthy. Without it, TCP connections to endpoints that are gone are left alone.
	Prober outlier.Prober
	// Listeners are called with the loop's events, after the node's own.
	Listeners []reconcile.Listener
	// RouteLocalnet lets the host route its loopback range. It is called once, after the rules that guard it are written.
	RouteLocalnet func() error

	// Ledger, if not nil, keeps a history of what is written.
	Ledger *ledger.Writer
	// records, if not nil, records connections.
	records *records

	// updates, if not nil, delivers replacements of Config and minInterval.
	updates <-chan configUpdate
	// minInterval is the least time between two transactions.
	minInterval time.Duration
	// serving configures health and metrics. With the zero value, the node listens nowhere.
	serving serving
	// stuck, if not nil, is called when a transaction, or a reading of the kernel, takes longer than stuckAfter without
	// an answer of the kernel. It must end the process.
	stuck func(what string)
}

// newCleaner returns what removes flows. Without a releaser it leaves those of TCP alone.
func (n *Node) newCleaner(w *conntrack.Walker, shown *telemetry, r *conntrack.Releaser) *conntrack.Cleaner {
	c := conntrack.NewCleaner(w, func(l conntrack.SweepResult) {
		n.logCleanup(l)
		shown.recordCleanup(l)
	})
	if r != nil {
		c.SetTCP(r)
	}
	c.SetAsKubeProxy(n.Config.AsKubeProxy)
	return c
}

// configUpdate holds what can change while a node runs.
type configUpdate struct {
	policy dataplane.Config
	// minInterval is the least time between two transactions.
	minInterval time.Duration
}

// stuckAfter is when a transaction without an answer counts as stuck. The kubelet restarts the proxy after two minutes,
// too: one until a change is late, and one of failing /livez.
var stuckAfter = 2 * time.Minute

// Run runs the node until ctx is done. What the kernel holds stays in force.
func (n *Node) Run(ctx context.Context) (err error) {
	var leastRest atomic.Int64
	leastRest.Store(int64(n.minInterval))
	queue := snapshot.NewQueue(len(n.Sources))
	loop := &reconcile.Loop{Queue: queue, Planner: dataplane.NewPlanner(n.Config), Writer: n.Backend, Log: n.Log,
		LeastRest: func() time.Duration { return time.Duration(leastRest.Load()) }}
	walker := conntrack.NewWalker(n.Flows)
	outliers, err := newOutliers(n, walker, queue)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, outliers.close()) }()
	shown, err := newTelemetry(n, queue, loop, outliers)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, shown.close()) }()
	releaser, listeners := n.newReleaser(walker, shown)
	cleaner := n.newCleaner(walker, shown, releaser)
	if n.records != nil {
		shown.pressure.Store(conntrack.WatchPressure(walker, cleaner))
	}
	// Cleaner and releaser must be the first listeners, since their reading of the flows waits for the commit.
	loop.Listeners = slices.Concat([]reconcile.Listener{cleaner.Listener()}, listeners, shown.listeners(),
		[]reconcile.Listener{n.localnet(loop.Planner)}, n.Listeners, outliers.listeners(), n.records.listeners(),
		n.openLimits(walker, queue, shown))

	group, ctx := errgroup.WithContext(ctx)
	for _, s := range n.Sources {
		sink := shown.sink(s, queue)
		group.Go(func() error { return s.Run(ctx, sink) })
	}
	shown.run(ctx, group)
	group.Go(func() error { return walker.Run(ctx) })
	group.Go(func() error { return outliers.run(ctx) })
	group.Go(func() error { return n.records.run(ctx, group, walker, n.Flows) })
	runBeside(ctx, group, func(ctx context.Context) {
		n.applyUpdates(ctx, func(t configUpdate) {
			leastRest.Store(int64(t.minInterval))
			loop.Planner.SetConfig(t.policy)
			cleaner.SetAsKubeProxy(t.policy.AsKubeProxy)
			shown.ports.SetConfig(t.policy)
			queue.Notify()
		})
	})
	group.Go(func() error { return loop.Run(ctx) })
	runBeside(ctx, group, func(ctx context.Context) { n.watchdog(ctx, loop) })
	return group.Wait()
}

// runBeside runs in a group what cannot fail.
func runBeside(ctx context.Context, group *errgroup.Group, run func(context.Context)) {
	group.Go(func() error {
		run(ctx)
		return nil
	})
}

// localnet lets the host route its loopback range once node ports answer there.
func (n *Node) localnet(planner *dataplane.Planner) reconcile.Listener {
	routed := false
	return reconcile.Listener{Written: func(reconcile.Transaction) {
		if !planner.State().LocalhostNodePorts || routed {
			return
		}
		routed = true
		if err := n.RouteLocalnet(); err != nil {
			n.Log.Warn("node ports will not answer at 127.0.0.1", "err", err)
		}
	}}
}

// watchdog calls stuck if the kernel does not answer the loop. It counts ticks, so that time does not count during
// which this process was stopped.
func (n *Node) watchdog(ctx context.Context, loop *reconcile.Loop) {
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
		busy := n.unanswered(loop)
		if seen++; busy.IsZero() || busy != since {
			since, seen = busy, 0
		}
		if seen == looks {
			n.stuck(fmt.Sprintf("the kernel has not answered since %v", busy.Format(time.RFC3339)))
		}
	}
}

// unanswered returns since when the loop waits for the kernel; zero if it does not. A transaction of many messages is
// not stuck as long as the kernel answers them.
func (n *Node) unanswered(loop *reconcile.Loop) time.Time {
	busy := loop.Busy()
	if busy.IsZero() || n.Backend == nil || n.Backend.Heard == nil {
		return busy
	}
	if heard := n.Backend.Heard(); heard.After(busy) {
		return heard
	}
	return busy
}

// applyUpdates applies updates until the context ends.
func (n *Node) applyUpdates(ctx context.Context, apply func(configUpdate)) {
	for {
		select {
		case <-ctx.Done():
			return
		case t := <-n.updates:
			apply(t)
		}
	}
}

// logCleanup logs the result of a cleanup of flows.
func (n *Node) logCleanup(l conntrack.SweepResult) {
	if l.Err != nil {
		n.Log.Warn("failed to remove stale connection tracking entries; retrying", "err", l.Err)
	}
	if removed := l.Flows[ipfamily.IPv4].Removed + l.Flows[ipfamily.IPv6].Removed; removed > 0 {
		n.Log.Info("removed connection tracking entries to removed endpoints", "flows", removed, "frontends", l.Frontends)
	}
}
