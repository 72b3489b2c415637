package node

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/verdict-proxy/verdict/internal/proxy/backends"
	"github.com/verdict-proxy/verdict/internal/proxy/preflight"
	"github.com/verdict-proxy/verdict/internal/proxy/status"
	"github.com/verdict-proxy/verdict/internal/proxy/takeover"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// lookEvery is how often a proxy looks for what on its host stops packets of Services.
const lookEvery = time.Minute

// hostChecks looks for what on this host stops packets of Services, and names each once in the log.
type hostChecks struct {
	log *slog.Logger
	// policy returns the settings, and node the Node object, nil while there is none.
	policy func() dataplane.Config
	node   func() *snapshot.Node
	// overlaps returns where the ServiceCIDRs are used by something else; the loop logs that itself.
	overlaps func() []dataplane.Overlap
	// tell tells the cluster's operators of a finding.
	tell func(status.Finding)
	// removes says that this proxy removes what a kube-proxy has programmed, from its first transaction on: that it is
	// there is no news then.
	removes bool
	// ready is closed once all Services are programmed.
	ready func()
	begin chan struct{}

	mu    sync.Mutex
	facts preflight.Facts
	found []status.Finding
	looks int
}

// newHostChecks returns the checks of a proxy.
func newHostChecks(log *slog.Logger, p *proxy, opened *backends.Opened) *hostChecks {
	c := &hostChecks{log: log, policy: p.policy, node: p.object.last.Load, tell: p.events.stopped,
		removes: takeover.Mode(p.config.start().Takeover) == takeover.Auto, begin: make(chan struct{}),
		facts: preflight.Facts{NodePorts: map[preflight.NodePort]snapshot.Name{}, OwnChains: opened.Named.Rules}}
	c.ready = sync.OnceFunc(func() { close(c.begin) })
	return c
}

// listener follows the node ports.
func (c *hostChecks) listener() reconcile.Listener {
	return reconcile.Listener{
		Committed: func(commit reconcile.Commit) {
			c.mu.Lock()
			defer c.mu.Unlock()
			for _, s := range commit.Before {
				if s != nil {
					c.facts.Remove(s)
				}
			}
			for _, s := range commit.After {
				if s != nil {
					c.facts.Add(s)
				}
			}
		},
		Written: func(reconcile.Transaction) { c.ready() },
	}
}

// run looks until the context ends.
func (c *hostChecks) run(ctx context.Context) {
	select {
	case <-ctx.Done():
		return
	case <-c.begin:
	}
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		c.look()
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// look looks once, logs what is new, and what is gone, and tells of what is new.
func (c *hostChecks) look() {
	host, err := preflight.Open()
	if err != nil {
		c.log.Warn("failed to look at this host", "err", err)
		return
	}
	defer host.Close()
	found := host.Look(c.known())
	if c.looks++; c.looks == 1 && c.removes {
		found = slices.DeleteFunc(found, func(f status.Finding) bool { return f.Check == preflight.SecondProxy })
	}
	before := c.replace(found)
	for _, f := range found {
		if !slices.Contains(before, f) {
			c.log.Warn(f.What, "check", f.Check, "advice", f.Advice)
			c.tell(f)
		}
	}
	for _, f := range before {
		if !slices.Contains(found, f) {
			c.log.Info("no longer so: "+f.What, "check", f.Check)
		}
	}
}

// known returns a copy of the facts.
func (c *hostChecks) known() *preflight.Facts {
	policy := c.policy()
	c.mu.Lock()
	defer c.mu.Unlock()
	facts := c.facts.Clone()
	facts.Masquerades = policy.MasqueradeAll
	facts.SetNode(policy, c.node())
	return facts
}

func (c *hostChecks) replace(found []status.Finding) (before []status.Finding) {
	c.mu.Lock()
	defer c.mu.Unlock()
	before, c.found = c.found, found
	return before
}

// findings returns what was found last.
func (c *hostChecks) findings() []status.Finding {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := slices.Clone(c.found)
	if f := preflight.Overlapping(c.overlaps()); f != nil {
		out = append(out, *f)
	}
	return out
}
