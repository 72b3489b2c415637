package conntrack

import (
	"cmp"
	"context"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// OpenLimits counts the open connections of the ports that limit them, or those of their clients, and says
// which are full. It looks only while there are such ports.
type OpenLimits struct {
	walker *Walker
	put    func(snapshot.Delta)
	filled func(dataplane.PortName, netip.Addr)

	// mu protects what follows. The map of frontends is never changed, but replaced.
	mu        sync.Mutex
	services  map[snapshot.Name][]*openPort
	frontends map[dataplane.Key]*openPort
	due       time.Time
	// namespaces is how many have Services that limit the connections of each client. LeftOut is for LeftOut.
	namespaces, leftOut int
}

func (p *openPort) anyFull() bool { return p.isFull || len(p.clients) > 0 }

// openPort is a port in one family.
type openPort struct {
	*openState
	keys []dataplane.Key
	// most is how many connections it may have, and clientMost each of its clients; 0 means no limit.
	most, clientMost int
}

// openState is what is known of a port. It outlives the port's changes.
type openState struct {
	port dataplane.PortName
	full snapshot.FullPort
	// isFull is what the last look found, and told that its first time was told. Clients are those that are full, sorted;
	// toldClient is as told.
	isFull, told bool
	clients      []netip.Addr
	toldClient   bool
}

// Connections are counted every openEvery, but not so often that it would take more than a twentieth of the time. A
// full port takes connections again when openSlack of them are closed, or one if it may have few: otherwise each look
// at a busy port would change it. So it is with a client.
const (
	openEvery = 500 * time.Millisecond
	openSlack = 64
)

// openCounters is how many clients have counts of their own, each namespace an equal part of them: beyond, counts are
// too low by one of so many connections of the namespace at most. Of the clients that are full, those with most
// connections are refused, at most clientsOfPort of a port and clientsOfNamespace of a namespace: each is an element of
// the kernel.
const (
	openCounters       = 65536
	clientsOfPort      = 256
	clientsOfNamespace = 4096
)

// NewOpenLimits returns limits without ports. It puts which ports of a Service are full whenever that changes, and
// calls filled when a port is full for the first time, or the client of a port is; the zero Addr is the port.
func NewOpenLimits(w *Walker, put func(snapshot.Delta), filled func(dataplane.PortName, netip.Addr)) *OpenLimits {
	o := &OpenLimits{walker: w, put: put, filled: filled, services: map[snapshot.Name][]*openPort{}}
	w.add(&user{next: o.next, start: o.start, whole: true})
	return o
}

// Listener returns what the loop must call.
func (o *OpenLimits) Listener() reconcile.Listener { return reconcile.Listener{InSync: o.inSync} }

// inSync takes over which ports limit their connections, and at which frontends.
func (o *OpenLimits) inSync(s reconcile.InSync) {
	o.mu.Lock()
	defer o.mu.Unlock()
	names := s.Change.Services
	if s.Change.Globals { // which may give a port other frontends
		for n := range o.services {
			names = append(slices.Clip(names), n)
		}
	}
	changed := false
	for _, n := range names {
		before, now := o.services[n], openPorts(s.State.Services[n], o.services[n])
		if len(before)+len(now) == 0 {
			continue
		}
		if changed = true; len(now) > 0 {
			o.services[n] = now
		} else if delete(o.services, n); slices.ContainsFunc(before, (*openPort).anyFull) {
			o.put(snapshot.Delta{Full: map[snapshot.Name]*snapshot.Full{n: nil}})
		}
	}
	if !changed {
		return
	}
	o.frontends = map[dataplane.Key]*openPort{}
	namespaces := map[string]bool{}
	for name, ports := range o.services {
		for _, p := range ports {
			if p.clientMost > 0 {
				namespaces[name.Namespace] = true
			}
			for _, k := range p.keys {
				o.frontends[k] = p
			}
		}
	}
	o.namespaces = len(namespaces)
	o.walker.wakeUp()
}

// openPorts returns the ports of a Service that limit their open connections, with what is known of them.
func openPorts(svc *dataplane.Service, before []*openPort) (list []*openPort) {
	if svc == nil {
		return nil
	}
	for _, sp := range svc.Ports {
		if sp.Limits.Open == 0 && sp.Limits.ClientOpen == 0 {
			continue
		}
		full := snapshot.FullPort{Port: sp.Name.Port, Protocol: sp.Name.Protocol, Family: sp.Family()}
		p := &openPort{most: int(sp.Limits.Open), clientMost: int(sp.Limits.ClientOpen)}
		for i := range sp.Frontends {
			if sp.Scheduled(&sp.Frontends[i]) == nil { // where IPVS chooses, nobody is refused
				p.keys = append(p.keys, sp.Frontends[i].Key)
			}
		}
		if i := slices.IndexFunc(before, func(o *openPort) bool { return o.full == full }); i >= 0 {
			p.openState = before[i].openState
		} else {
			p.openState = &openState{port: sp.Name, full: full, isFull: sp.Full, clients: sp.FullClients}
		}
		list = append(list, p)
	}
	return list
}

func (o *OpenLimits) next(_, _ time.Time) (due time.Time, any bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.due, len(o.frontends) > 0
}

func (o *OpenLimits) start() look {
	o.mu.Lock()
	defer o.mu.Unlock()
	return &openLook{OpenLimits: o, at: o.frontends, began: time.Now(), counts: map[*openState]int{},
		room: openCounters / max(1, o.namespaces), clients: map[string]heavy[openClient]{}}
}

// LeftOut returns how many clients were full at the last look, and are not refused, since too many are.
func (o *OpenLimits) LeftOut() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.leftOut
}

// openLook counts the connections at some frontends.
type openLook struct {
	*OpenLimits
	at     map[dataplane.Key]*openPort
	began  time.Time
	counts map[*openState]int
	// clients are those of each namespace that limits them, with counters for so many as room says.
	clients map[string]heavy[openClient]
	room    int
}

// openClient is a client of a port.
type openClient struct {
	of   *openState
	addr netip.Addr
}

func (c openClient) compare(o openClient) int {
	return cmp.Or(c.of.port.Compare(o.of.port), c.addr.Compare(o.addr))
}

func (l *openLook) queries(bool) []query { return everything() }

func (l *openLook) see(_ context.Context, _ *pace, flows []flow) error {
	show(flows, func(f *Flow) {
		if f.Frontend.Protocol != snapshot.TCP || f.State < TCPTimeWait {
			l.count(f.Frontend, f.Client.Addr())
		}
	})
	return nil
}

func (l *openLook) count(at dataplane.Key, client netip.Addr) {
	p := l.at[at]
	if p == nil {
		return
	}
	if l.counts[p.openState]++; p.clientMost == 0 {
		return
	}
	of := p.port.Service.Namespace
	if l.clients[of] == nil {
		l.clients[of] = heavy[openClient]{}
	}
	l.clients[of].add(openClient{p.openState, client}, max(1, l.room))
}

func (l *openLook) done(_ context.Context, w Walked, retry time.Duration) (vain bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.due = l.began.Add(max(openEvery, watchShare*w.Took)); w.Err != nil {
		l.due = time.Now().Add(retry)
		return true
	}
	delta, clients := snapshot.Delta{}, l.fullClients()
	for name, ports := range l.services {
		changed, full := false, &snapshot.Full{Clients: map[snapshot.FullPort][]netip.Addr{}}
		for _, p := range ports {
			changed = p.judge(l.counts[p.openState], clients[p.openState]) || changed
			if p.isFull {
				full.Ports = append(full.Ports, p.full)
			}
			if len(p.clients) > 0 {
				full.Clients[p.full] = p.clients
			}
			l.tell(p)
		}
		if changed {
			snapshot.Put(&delta.Full, name, full)
		}
	}
	if len(delta.Full) > 0 {
		l.put(delta)
	}
	return true
}

// tell says that a port is full, or that a client is, for the first time.
func (l *openLook) tell(p *openPort) {
	if p.isFull && !p.told {
		p.told = true
		l.filled(p.port, netip.Addr{})
	}
	if len(p.clients) > 0 && !p.toldClient {
		p.toldClient = true
		l.filled(p.port, p.clients[0])
	}
}

// fullClients returns the clients of each port that are full and to be refused, sorted, and counts those left out.
func (l *openLook) fullClients() map[*openState][]netip.Addr {
	ports, full := map[*openState]*openPort{}, map[*openState][]netip.Addr{}
	for _, list := range l.services {
		for _, p := range list {
			ports[p.openState] = p
		}
	}
	l.leftOut = 0
	for _, counts := range l.clients {
		maps.DeleteFunc(counts, func(c openClient, n int) bool {
			p := ports[c.of]
			if p == nil {
				return true
			}
			_, was := slices.BinarySearchFunc(p.clients, c.addr, netip.Addr.Compare)
			return !reached(n, p.clientMost, was)
		})
		n := 0
		for _, c := range most(counts, len(counts), openClient.compare) {
			if of := c.Of.of; n < clientsOfNamespace && len(full[of]) < clientsOfPort {
				full[of], n = append(full[of], c.Of.addr), n+1
			} else {
				l.leftOut++
			}
		}
	}
	for _, list := range full {
		slices.SortFunc(list, netip.Addr.Compare)
	}
	return full
}

// judge takes over whether a port with some connections is full, and which of its clients are.
func (p *openPort) judge(n int, clients []netip.Addr) (changed bool) {
	full := reached(n, p.most, p.isFull)
	changed = full != p.isFull || !slices.Equal(clients, p.clients)
	p.isFull, p.clients = full, clients
	return changed
}

// reached says whether n connections are as many as a limit allows, or too near to that for what had reached it.
func reached(n, limit int, had bool) bool {
	return limit > 0 && (n >= limit || had && n > limit-1-limit/openSlack)
}
