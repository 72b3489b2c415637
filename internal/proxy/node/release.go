package node

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/verdict-proxy/verdict/internal/proxy/conntrack"
	"github.com/verdict-proxy/verdict/internal/proxy/outlier"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
	"github.com/verdict-proxy/verdict/sync/watch"
)

// newReleaser returns what releases TCP connections to endpoints that are gone, and what the loop must call; nothing if
// the node has no Prober.
func (n *Node) newReleaser(w *conntrack.Walker, shown *telemetry) (*conntrack.Releaser, []reconcile.Listener) {
	if n.Prober == nil {
		return nil, nil
	}
	if loose, err := readConntrack("nf_conntrack_tcp_loose"); err == nil && loose == 0 {
		n.Log.Warn("connections to endpoints that are gone may hang: the kernel does not pick up connections in midstream",
			"sysctl", "net.netfilter.nf_conntrack_tcp_loose", "value", loose)
	}
	places := make(chan struct{}, maxReleaseProbes)
	r := conntrack.NewReleaser(w, conntrack.ReleaserOptions{
		Probe: func(ctx context.Context, endpoints []netip.AddrPort) []bool {
			return probeAll(ctx, n.Prober, places, endpoints)
		},
		Timeouts: releaseTimeouts,
		Report: func(r conntrack.ReleaseResult) {
			n.logRelease(r)
			for _, released := range r.Released {
				shown.metrics.ObserveRelease(released.Reason.String(), released.Flows)
			}
		},
	})
	return r, []reconcile.Listener{r.Listener()}
}

// openLimits returns what the loop must call to limit the open connections of Services: nothing with a backend that
// cannot, which gathers no evidence either.
func (n *Node) openLimits(w *conntrack.Walker, queue *snapshot.Queue, shown *telemetry) []reconcile.Listener {
	if n.Backend.Evidence == nil {
		return nil
	}
	events := n.serving.events
	o := conntrack.NewOpenLimits(w, queue.Put, func(p dataplane.PortName, client netip.Addr) {
		who, full := p.String(), "a Service has as many open connections as its limits allow"
		if client.IsValid() {
			who, full = who+"'s client "+client.String(), "a client has as many open connections as a Service's limits allow"
		}
		n.Log.Info(full, "service", who)
		events.Emit(watch.Event{Warning: true, Reason: "LimitReached", Action: "Refuse", Service: p.Service,
			Note: fmt.Sprintf("%s has as many open connections on node %s as limits allow; new ones are refused there",
				who, n.Config.NodeName)})
	})
	shown.limits.Store(o)
	return []reconcile.Listener{o.Listener()}
}

// logRelease logs the result of a look at connections to endpoints that are gone.
func (n *Node) logRelease(r conntrack.ReleaseResult) {
	if r.Err != nil {
		n.Log.Warn("connections to endpoints that are gone may hang for now; it will be tried again", "err", r.Err)
	}
	if r.Reset != nil {
		n.Log.Warn("ends of released connections are reset at their next packet only", "err", r.Reset)
	}
	for _, released := range r.Released {
		what := "released connections to an endpoint that is gone"
		if released.Reason == conntrack.ReleasedRebalance {
			what = "released idle connections to an endpoint that has more than its share"
		}
		n.Log.Info(what, "service", released.Port.String(),
			"endpoint", released.Endpoint, "connections", released.Flows, "reason", released.Reason.String())
	}
}

// maxReleaseProbes is how many endpoints are probed at a time.
const maxReleaseProbes = 32

// probeAll probes endpoints, for a second at most. Those it did not come to count as endpoints that answer. A probe
// takes one of the places, which all calls share.
func probeAll(ctx context.Context, prober outlier.Prober, places chan struct{}, endpoints []netip.AddrPort) []bool {
	answers := make([]bool, len(endpoints))
	late := time.After(time.Second)
	var all sync.WaitGroup
	defer all.Wait()
	for i, e := range endpoints {
		select {
		case places <- struct{}{}:
		case <-late:
			for ; i < len(answers); i++ {
				answers[i] = true
			}
			return answers
		}
		all.Go(func() {
			answers[i] = prober.Probe(ctx, e, outlier.Manner{}) != outlier.Silent
			<-places
		})
	}
	return answers
}

// releaseTimeouts returns the kernel's timeout for an established connection, and the least of those for one with
// unacknowledged data.
func releaseTimeouts() (established, unacknowledged time.Duration) {
	established, unacknowledged = 5*24*time.Hour, 5*time.Minute
	for _, name := range []string{"established", "unacknowledged", "max_retrans"} {
		if seconds, err := readConntrack("nf_conntrack_tcp_timeout_" + name); err == nil {
			t := time.Duration(seconds) * time.Second
			if name == "established" {
				established = t
			}
			unacknowledged = min(unacknowledged, t)
		}
	}
	return established, unacknowledged
}

// readConntrack reads a sysctl of connection tracking.
func readConntrack(name string) (int, error) {
	text, err := os.ReadFile("/proc/sys/net/netfilter/" + name)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(text)))
}
