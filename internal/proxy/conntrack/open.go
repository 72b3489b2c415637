package conntrack

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// OpenLimits counts the open connections of the ports that limit them, and says which are full. It looks only while
// there are such ports.
type OpenLimits struct {
	walker *Walker
	put    func(snapshot.Delta)
	filled func(dataplane.PortName)

	// mu protects what follows. The map of frontends is never changed, but replaced.
	mu        sync.Mutex
	services  map[snapshot.Name][]*openPort
	frontends map[dataplane.Key]*openPort
	due       time.Time
}

// openPort is a port in one family.
type openPort struct {
	port dataplane.PortName
	full snapshot.FullPort
	keys []dataplane.Key
	most int
	// isFull is what the last look found, and told that its first time was told.
	isFull, told bool
}

// Connections are counted every openEvery, but not so often that it would take more than a twentieth of the time. A
// full port takes connections again when openSlack of them are closed, or one if it may have few: otherwise each look
// at a busy port would change it.
const (
	openEvery = 500 * time.Millisecond
	openSlack = 64
)

// NewOpenLimits returns limits without ports. It puts which ports of a Service are full whenever that changes, and
// calls filled when a port is full for the first time.
func NewOpenLimits(w *Walker, put func(snapshot.Delta), filled func(dataplane.PortName)) *OpenLimits {
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
		} else if delete(o.services, n); slices.ContainsFunc(before, func(p *openPort) bool { return p.isFull }) {
			o.put(snapshot.Delta{Full: map[snapshot.Name]*snapshot.Full{n: nil}})
		}
	}
	if !changed {
		return
	}
	o.frontends = map[dataplane.Key]*openPort{}
	for _, ports := range o.services {
		for _, p := range ports {
			for _, k := range p.keys {
				o.frontends[k] = p
			}
		}
	}
	o.walker.wakeUp()
}

// openPorts returns the ports of a Service that limit their open connections, with what is known of them.
func openPorts(svc *dataplane.Service, before []*openPort) (list []*openPort) {
	if svc == nil {
		return nil
	}
	for _, sp := range svc.Ports {
		if sp.Limits.Open == 0 {
			continue
		}
		p := &openPort{port: sp.Name, most: int(sp.Limits.Open), isFull: sp.Full,
			full: snapshot.FullPort{Port: sp.Name.Port, Protocol: sp.Name.Protocol, Family: sp.Family()}}
		for i := range sp.Frontends {
			if sp.Scheduled(&sp.Frontends[i]) == nil { // where IPVS chooses, nobody is refused
				p.keys = append(p.keys, sp.Frontends[i].Key)
			}
		}
		if i := slices.IndexFunc(before, func(o *openPort) bool { return o.full == p.full }); i >= 0 {
			p.isFull, p.told = before[i].isFull, before[i].told
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
	return &openLook{OpenLimits: o, at: o.frontends, began: time.Now(), counts: map[snapshot.Name][]openCount{}}
}

// openLook counts the connections at some frontends.
type openLook struct {
	*OpenLimits
	at     map[dataplane.Key]*openPort
	began  time.Time
	counts map[snapshot.Name][]openCount
}

type openCount struct {
	port snapshot.FullPort
	n    int
}

func (l *openLook) queries(bool) []query { return everything() }

func (l *openLook) see(_ context.Context, _ *pace, flows []flow) error {
	show(flows, func(f *Flow) {
		p := l.at[f.Frontend]
		if p == nil || f.Frontend.Protocol == snapshot.TCP && f.State >= TCPTimeWait {
			return
		}
		list := l.counts[p.port.Service]
		i := slices.IndexFunc(list, func(c openCount) bool { return c.port == p.full })
		if i < 0 {
			i, list = len(list), append(list, openCount{port: p.full})
		}
		list[i].n++
		l.counts[p.port.Service] = list
	})
	return nil
}

func (l *openLook) done(_ context.Context, w Walked, retry time.Duration) (vain bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.due = l.began.Add(max(openEvery, watchShare*w.Took)); w.Err != nil {
		l.due = time.Now().Add(retry)
		return true
	}
	delta := snapshot.Delta{}
	for name, ports := range l.services {
		changed, full := false, &snapshot.Full{}
		for _, p := range ports {
			if p.judge(l.counts[name]) {
				changed = true
			}
			if p.isFull {
				full.Ports = append(full.Ports, p.full)
			}
			if p.isFull && !p.told {
				p.told = true
				l.filled(p.port)
			}
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

// judge says whether a port has become full, or is full no longer.
func (p *openPort) judge(counts []openCount) (changed bool) {
	n, was := 0, p.isFull
	if i := slices.IndexFunc(counts, func(c openCount) bool { return c.port == p.full }); i >= 0 {
		n = counts[i].n
	}
	if p.isFull = n >= p.most; was && !p.isFull {
		p.isFull = n > p.most-1-p.most/openSlack
	}
	return was != p.isFull
}
