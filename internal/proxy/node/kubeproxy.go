package node

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/verdict-proxy/verdict/internal/proxy/takeover"
	"github.com/verdict-proxy/verdict/internal/system/clock"
	"github.com/verdict-proxy/verdict/sync/reconcile"
)

// kubeProxyCleaner removes kube-proxy's rules once all Services are programmed. It works in the network namespace of
// its process, so only verdict run uses it.
type kubeProxyCleaner struct {
	runner takeover.Runner
	// removeOthers removes what another of Verdict's backends wrote before.
	removeOthers func(context.Context) error

	ready chan struct{}
	// isReady is true once ready is closed. warned is true once the log has said why it is not.
	isReady, warned bool
}

func newKubeProxyCleaner(runner takeover.Runner, removeOthers func(context.Context) error) *kubeProxyCleaner {
	return &kubeProxyCleaner{runner: runner, removeOthers: removeOthers, ready: make(chan struct{})}
}

// written is called after each transaction. As long as a Service is quarantined, kube-proxy's rules may be what serves
// it.
func (c *kubeProxyCleaner) written(t reconcile.Transaction) {
	switch {
	case c.isReady:
	case t.Quarantined == 0:
		c.isReady = true
		close(c.ready)
	case !c.warned && c.runner.Mode == takeover.Auto:
		c.warned = true
		c.runner.Log.Warn("keeping kube-proxy's rules while the kernel rejects Services",
			"refused", t.Quarantined)
	}
}

// removeRetry is the pause before a failed removal is retried.
const removeRetry = 30 * time.Second

// run removes the rules once they are replaced. It returns when the context ends.
func (c *kubeProxyCleaner) run(ctx context.Context) {
	select {
	case <-ctx.Done():
		return
	case <-c.ready:
	}
	var beside sync.WaitGroup
	if err := c.removeOthers(ctx); err != nil && ctx.Err() == nil {
		c.runner.Log.Warn("failed to remove the rules of Verdict's previous backend; retrying", "err", err)
		beside.Go(func() { c.retry(ctx) })
	}
	c.runner.Run(ctx, c.ready)
	beside.Wait()
}

// retry removes what another backend wrote, until that succeeds.
func (c *kubeProxyCleaner) retry(ctx context.Context) {
	for {
		if clock.Pause(ctx, removeRetry); ctx.Err() != nil {
			return
		}
		if c.removeOthers(ctx) == nil {
			return
		}
	}
}

// reporter logs the errors of a source. None of them stops the proxy.
func reporter(log *slog.Logger) func(error) {
	return func(err error) { log.Warn(err.Error()) }
}
