package conntrack

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Pressure says who fills the kernel's table, and how full the ports are that masquerade takes.
type Pressure struct {
	// At is when the flows were looked at; zero before that.
	At time.Time
	// Services are those with most flows, at most pressureServices, and Clients the addresses that began most of all
	// flows, at most pressureClients, with at least so many; the most first.
	Services []Share[snapshot.Name]
	Clients  []Share[netip.Addr]
	// Masquerade is the most saturated source of masqueraded flows; nil if there are none.
	Masquerade *Saturation
}

// Share is how many flows somebody has.
type Share[T any] struct {
	Of    T
	Flows int
}

// Saturation is how many flows of a protocol to an endpoint one address has in the place of clients. Each takes a port.
type Saturation struct {
	masqueraded
	Flows int
}

type masqueraded struct {
	Address  netip.Addr
	Protocol snapshot.Protocol
	Endpoint netip.AddrPort
}

// Percent says how many of the ports are taken that the kernel gives to masqueraded flows. It tries some at random:
// with 97 % taken, one connection of a thousand fails, with 99 % nine of a hundred.
func (s *Saturation) Percent() float64 { return 100 * float64(s.Flows) / masqueradePorts }

const (
	masqueradePorts  = 65536 - 1024
	pressureEvery    = 15 * time.Second
	pressureServices = 20
	pressureClients  = 5
	// pressureCounters bounds the memory for clients, and for addresses that masquerade: each count is too low by one of
	// so many flows in the table at most.
	pressureCounters = 4096
)

// heavy counts the most frequent of many keys, with counters for some: if all are taken, a new key takes one from each.
// So each count is too low by at most one of so many keys as there are counters.
type heavy[K comparable] map[K]int

func (h heavy[K]) add(k K, counters int) {
	if h[k] > 0 || len(h) < counters {
		h[k]++
		return
	}
	maps.DeleteFunc(h, func(k K, n int) bool {
		h[k] = n - 1
		return n == 1
	})
}

// most returns the most frequent keys, the most first.
func most[K comparable](counts map[K]int, atMost int, compare func(K, K) int) []Share[K] {
	var list []Share[K]
	for k, n := range counts {
		list = append(list, Share[K]{k, n})
	}
	slices.SortFunc(list, func(a, b Share[K]) int { return cmp.Or(cmp.Compare(b.Flows, a.Flows), compare(a.Of, b.Of)) })
	return list[:min(atMost, len(list))]
}

// PressureGauge looks at all flows from time to time. Its Pressure may be read by any goroutine.
type PressureGauge struct {
	// service names the Service of a frontend.
	service func(dataplane.Key) (snapshot.Name, bool)

	services    map[snapshot.Name]int
	clients     heavy[netip.Addr]
	masqueraded heavy[masqueraded]

	mu   sync.Mutex
	last Pressure
}

// WatchPressure has a Walker look for pressure from now on. A Cleaner names the Services.
func WatchPressure(w *Walker, c *Cleaner) *PressureGauge {
	g := &PressureGauge{service: c.service}
	g.reset()
	w.Watch(pressureEvery, Watcher{g.flow, g.done})
	return g
}

// Pressure returns what the last look found.
func (g *PressureGauge) Pressure() Pressure {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.last
}

func (g *PressureGauge) reset() {
	g.services, g.clients, g.masqueraded = map[snapshot.Name]int{}, heavy[netip.Addr]{}, heavy[masqueraded]{}
}

func (g *PressureGauge) flow(f *Flow) {
	g.clients.add(f.Client.Addr(), pressureCounters)
	if name, ok := g.service(f.Frontend); ok {
		g.services[name]++
	}
	if at := f.Masquerade.Addr(); at != f.Client.Addr() {
		g.masqueraded.add(masqueraded{at, f.Frontend.Protocol, f.Endpoint}, pressureCounters)
	}
}

func (g *PressureGauge) done(began time.Time, err error) {
	if err == nil {
		p := Pressure{At: began, Services: most(g.services, pressureServices, snapshot.Name.Compare),
			Clients: most(g.clients, pressureClients, netip.Addr.Compare)}
		for _, s := range most(g.masqueraded, 1, func(a, b masqueraded) int { return a.Endpoint.Compare(b.Endpoint) }) {
			p.Masquerade = &Saturation{s.Of, s.Flows}
		}
		g.mu.Lock()
		g.last = p
		g.mu.Unlock()
	}
	g.reset()
}

// service returns the Service that has a frontend in force.
func (c *Cleaner) service(k dataplane.Key) (name snapshot.Name, ok bool) {
	c.mu.Lock()
	sp := c.programmed[k]
	c.mu.Unlock()
	if sp == nil && c.tcp != nil {
		c.tcp.mu.Lock()
		sp = c.tcp.frontend(k)
		c.tcp.mu.Unlock()
	}
	if sp == nil {
		return name, false
	}
	return sp.Name.Service, true
}
