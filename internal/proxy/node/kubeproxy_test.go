package node

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/internal/proxy/takeover"
	"github.com/verdict-proxy/verdict/sync/reconcile"
)

// TestKubeProxyCleanerWaits has the kernel refuse a Service at first: kube-proxy's rules may be what carries it.
func TestKubeProxyCleanerWaits(t *testing.T) {
	var log bytes.Buffer
	s := newKubeProxyCleaner(takeover.Runner{Mode: takeover.Auto, Log: slog.New(slog.NewTextHandler(&log, nil))},
		func(context.Context) error { return nil })
	for _, c := range []struct {
		quarantined int
		ready       bool
	}{{2, false}, {1, false}, {0, true}, {0, true}, {3, true}} {
		s.written(reconcile.Transaction{Quarantined: c.quarantined})
		ready := false
		select {
		case <-s.ready:
			ready = true
		default:
		}
		if ready != c.ready {
			t.Errorf("after a transaction without %d Services: ready is %v", c.quarantined, ready)
		}
	}
	if n := strings.Count(log.String(), "\n"); n != 1 {
		t.Errorf("said %d lines, want one:\n%s", n, log.String())
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	s.runner.Mode = takeover.Never // this process is the machine's own
	s.run(ctx)
}
