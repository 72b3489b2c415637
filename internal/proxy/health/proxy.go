// Package health reports how the proxy is: to kubelets and load balancers by /healthz, /livez and /readyz, and to the
// load balancers of single Services by their health check node ports. It judges by the loop's events and the clock.
package health

import (
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// DefaultLate is how long a change may wait for the kernel: twice kube-proxy's default sync period, as there.
const DefaultLate = time.Minute

// Options configure a Proxy. Only Waiting is required.
type Options struct {
	// Late is how long a change may wait, and how long transactions may fail; 0 means DefaultLate.
	Late time.Duration
	// NeedsNode is true if clients may be sent only to a node whose Node object exists.
	NeedsNode bool
	// Waiting returns the time of the oldest change that is not written, as snapshot.Queue does.
	Waiting func() snapshot.Waiting
	// Missing returns what is not listed yet.
	Missing func() []string
	// Quarantined counts the quarantined Services, and Unread the manifests that cannot be read.
	Quarantined, Unread func() int
}

// Proxy is the proxy's state of health. It is safe for concurrent use. Make one with New.
//
//	              first InSync             Late since the oldest change, or the first failure
//	starting ────────────────▶ in force ──────────────────────────────────▶ late
//	   │                           ▲                                          │
//	   │ Late                      └────────────────── InSync ────────────────┘
//	   └──▶ late
//
// It is healthy while it is in force and not late: then the rules are written and recent. It is alive unless it is
// late. A proxy that waits for an API server is neither late nor healthy: a restart would not help.
type Proxy struct {
	o Options

	mu sync.Mutex
	// synced is when the kernel was last in sync; zero if it never was.
	synced time.Time
	// failing is when the current series of failed transactions began.
	failing time.Time
	node    snapshot.Node
}

// New returns a Proxy in state starting.
func New(o Options) *Proxy {
	if o.Late == 0 {
		o.Late = DefaultLate
	}
	return &Proxy{o: o}
}

// Listener connects the Proxy to a loop.
func (p *Proxy) Listener() reconcile.Listener {
	return reconcile.Listener{
		InSync: func(s reconcile.InSync) { p.InSync(s.Snapshot.Node) },
		Failed: func(f reconcile.Failure) {
			if !f.Replan {
				p.Failed()
			}
		},
	}
}

// InSync records that the kernel is in sync, and what is known of the node.
func (p *Proxy) InSync(node snapshot.Node) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.synced, p.failing, p.node = time.Now(), time.Time{}, node
}

// Failed records that a transaction failed.
func (p *Proxy) Failed() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.failing.IsZero() {
		p.failing = time.Now()
	}
}

// Status is the proxy's health at one moment.
type Status struct {
	// Now is the moment. Updated is when the kernel was last in sync; zero if it never was.
	Now, Updated time.Time
	// Late is true if something waits, or fails, for too long.
	Late bool
	// Eligible is true if clients may be sent to the node.
	Eligible bool
	// Missing describes what is wrong with the rules, and Leaving what is wrong with the node.
	Missing []string
	Leaving string
	// Quarantined counts the Services that the kernel refuses, and Unread the manifests that cannot be read.
	Quarantined, Unread int
}

// Healthy reports whether the rules are written and recent enough.
func (s *Status) Healthy() bool { return !s.Updated.IsZero() && !s.Late }

// Alive reports whether there is no reason to restart the proxy.
func (s *Status) Alive() bool { return !s.Late }

// Healthy returns the Healthy of Status.
func (p *Proxy) Healthy() bool {
	s := p.Status()
	return s.Healthy()
}

// Status returns the health now.
func (p *Proxy) Status() Status {
	waiting := p.o.Waiting().Since
	p.mu.Lock()
	defer p.mu.Unlock()
	s := Status{Now: time.Now(), Updated: p.synced, Leaving: p.node.Leaving}
	if p.node.Name == "" && p.o.NeedsNode {
		s.Leaving = "the Node object is unknown"
	}
	s.Eligible = s.Leaving == ""
	if p.o.Quarantined != nil {
		s.Quarantined = p.o.Quarantined()
	}
	if p.o.Unread != nil {
		s.Unread = p.o.Unread()
	}
	for _, trouble := range [...]struct {
		since time.Time
		what  string
	}{{waiting, "changes are pending"}, {p.failing, "the kernel rejects transactions"}} {
		if age := s.Now.Sub(trouble.since); !trouble.since.IsZero() && age >= p.o.Late {
			s.Late = true
			s.Missing = append(s.Missing, fmt.Sprintf("%s since %v", trouble.what, age.Truncate(time.Second)))
		}
	}
	if p.synced.IsZero() {
		s.Missing = append(s.Missing, p.waitingFor())
	}
	return s
}

// waitingFor describes what the first transaction waits for.
func (p *Proxy) waitingFor() string {
	if p.o.Missing != nil {
		if list := p.o.Missing(); len(list) > 0 {
			return "not listed yet: " + strings.Join(list, ", ")
		}
	}
	return "not all Services are programmed yet"
}
