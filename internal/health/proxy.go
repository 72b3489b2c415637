// Package health tells others how the proxy is: kubelets and load balancers by /healthz, /livez and /readyz, and the
// load balancers of single Services by their health check node ports. It is told what happens by the loop and decides
// by that and the clock.
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

// Options say how a Proxy judges. All but Waiting may be left out.
type Options struct {
	// Late is how long a change may wait, and how long transactions may fail; 0 means DefaultLate.
	Late time.Duration
	// NeedsNode says that a node whose Node object is unknown is not one to send clients to.
	NeedsNode bool
	// Waiting tells since when there has been something to write, as snapshot.Queue does.
	Waiting func() snapshot.Waiting
	// Missing names what has not been listed yet.
	Missing func() []string
	// Quarantined counts the Services that the kernel refuses.
	Quarantined func() int
}

// Proxy is the proxy's state of health. It is safe for concurrent use. Make one with New.
//
//	              first InSync             Late since the oldest change, or the first failure
//	starting ────────────────▶ in force ──────────────────────────────────▶ late
//	   │                           ▲                                          │
//	   │ Late                      └────────────────── InSync ────────────────┘
//	   └──▶ late
//
// It is healthy while it is in force and not late: then the rules are in, and not much older than what is known. It is
// alive unless it is late. Waiting for an API server that is not there makes it neither late nor healthy: to start it
// again would not help.
type Proxy struct {
	o Options

	mu sync.Mutex
	// synced is when the kernel last held everything; zero if it never did.
	synced time.Time
	// failing is when the first of the transactions failed that failed since.
	failing time.Time
	node    snapshot.Node
}

// New gives a Proxy that is starting.
func New(o Options) *Proxy {
	if o.Late == 0 {
		o.Late = DefaultLate
	}
	return &Proxy{o: o}
}

// Listener gives what a loop has to tell the Proxy.
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

// InSync takes note that the kernel holds everything, and what is known of the node.
func (p *Proxy) InSync(node snapshot.Node) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.synced, p.failing, p.node = time.Now(), time.Time{}, node
}

// Failed takes note that a transaction failed.
func (p *Proxy) Failed() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.failing.IsZero() {
		p.failing = time.Now()
	}
}

// Status is how the proxy is at one moment.
type Status struct {
	// Now is the moment; Updated when the kernel last carried everything, zero if it never did.
	Now, Updated time.Time
	// Late says that something has been waiting, or failing, for too long.
	Late bool
	// Eligible says that clients may be sent to the node.
	Eligible bool
	// Missing says in words what is not as it should be, Leaving what is wrong with the node.
	Missing []string
	Leaving string
	// Quarantined counts the Services that the kernel refuses.
	Quarantined int
}

// Healthy says that the rules are in, and not older than they may be.
func (s *Status) Healthy() bool { return !s.Updated.IsZero() && !s.Late }

// Alive says that there is no reason to start the proxy again.
func (s *Status) Alive() bool { return !s.Late }

// Healthy is that of Status.
func (p *Proxy) Healthy() bool {
	s := p.Status()
	return s.Healthy()
}

// Status judges.
func (p *Proxy) Status() Status {
	waiting := p.o.Waiting().Since
	p.mu.Lock()
	defer p.mu.Unlock()
	s := Status{Now: time.Now(), Updated: p.synced, Leaving: p.node.Leaving}
	if p.node.Name == "" && p.o.NeedsNode {
		s.Leaving = "the Node object is not known"
	}
	s.Eligible = s.Leaving == ""
	if p.o.Quarantined != nil {
		s.Quarantined = p.o.Quarantined()
	}
	for _, trouble := range [...]struct {
		since time.Time
		what  string
	}{{waiting, "changes wait for the kernel"}, {p.failing, "the kernel refuses transactions"}} {
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

// waitingFor says what the first transaction waits for.
func (p *Proxy) waitingFor() string {
	if p.o.Missing != nil {
		if list := p.o.Missing(); len(list) > 0 {
			return "not listed yet: " + strings.Join(list, ", ")
		}
	}
	return "the rules are not in yet"
}
