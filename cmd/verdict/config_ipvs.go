package main

import (
	"maps"
	"net/netip"
	"slices"
	"sync"

	"github.com/verdict-proxy/verdict/internal/config"
	"github.com/verdict-proxy/verdict/ipvsplugin"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
	"github.com/verdict-proxy/verdict/sync/watch"
)

// schedulers knows which schedulers of IPVS this kernel has. To ask for one loads IPVS, so they are asked for when a Service wants them.
type schedulers struct {
	// probe is ipvsplugin.Probe, if not nil in a test.
	probe func(schedulers ...string) error

	mu    sync.Mutex
	known map[string]error
}

// missing gives why a scheduler is not to be had, nil if it is. News says that nobody has asked before.
func (s *schedulers) missing(name string) (err error, news bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err, ok := s.known[name]; ok {
		return err, false
	}
	probe := s.probe
	if probe == nil {
		probe = ipvsplugin.Probe
	}
	if s.known == nil {
		s.known = map[string]error{}
	}
	s.known[name] = probe(name)
	return s.known[name], true
}

// schedule leaves to nftables, of the Services in a delta, those that ask for a scheduler which this kernel has not got: that is
// better than not to serve them. It is said once for each scheduler.
func (l *live) schedule(d snapshot.Delta) snapshot.Delta {
	if l.settings.Load().Policy.IPVS.Mode == dataplane.IPVSNever {
		return d
	}
	if l.noIPVS.Load() {
		l.unscheduled(d)
		return d
	}
	copied := false
	for name, svc := range d.Services {
		if svc == nil || svc.Scheduling == nil || svc.Scheduling.Scheduler == "" || svc.Scheduling.Scheduler == snapshot.NFTables {
			continue
		}
		err, news := l.schedulers.missing(svc.Scheduling.Scheduler)
		if err == nil {
			continue
		}
		if news {
			l.log.Error("nftables chooses the endpoints of Services that ask for this scheduler, until this is started again",
				"scheduler", svc.Scheduling.Scheduler, "service", name.String(), "err", err)
			l.events.Emit(watch.Event{Warning: true, Reason: "NoScheduler", Action: "Schedule", Service: name, Note: err.Error()})
		}
		if !copied {
			d.Services, copied = maps.Clone(d.Services), true
		}
		left := *svc
		left.Scheduling = &snapshot.Scheduling{Scheduler: snapshot.NFTables}
		d.Services[name] = &left
	}
	return d
}

// withoutIPVS says that the backend is one that cannot leave the choice of endpoints to IPVS.
func (l *live) withoutIPVS(s *config.Settings) {
	l.noIPVS.Store(true)
	if s.Policy.IPVS.Mode == dataplane.IPVSAlways {
		l.noScheduler.Do(func() {
			l.log.Warn("iptables chooses the endpoints of all Services at random: IPVS schedules only beside nftables")
		})
	}
}

// unscheduled says once that a Service asks for a scheduler that it does not get.
func (l *live) unscheduled(d snapshot.Delta) {
	for name, svc := range d.Services {
		if svc != nil && svc.Scheduling != nil && svc.Scheduling.Scheduler != "" && svc.Scheduling.Scheduler != snapshot.NFTables {
			l.noScheduler.Do(func() {
				l.log.Warn("iptables chooses the endpoints of Services at random, also of those that ask for a scheduler of IPVS",
					"service", name.String(), "scheduler", svc.Scheduling.Scheduler)
			})
		}
	}
}

// probeIPVS gives an error if the operator wants IPVS for all Services, and this kernel has not got it.
func probeIPVS(s *config.Settings) error {
	if s.Policy.IPVS.Mode != dataplane.IPVSAlways {
		return nil
	}
	return ipvsplugin.Probe(s.Policy.IPVS.Default.Scheduler)
}

// countServices has IPVS schedule all Services once there are as many as the operator said, and it can. It is called by the loop.
func (l *live) countServices(t reconcile.Transaction) {
	s := l.settings.Load()
	if l.noIPVS.Load() || s.IPVSServices == 0 || t.Services < s.IPVSServices || s.Policy.IPVS.Mode != dataplane.IPVSAuto || l.many.Swap(true) {
		return
	}
	if err, _ := l.schedulers.missing(s.Policy.IPVS.Default.Scheduler); err != nil {
		l.log.Warn("there are many Services, and IPVS cannot schedule them: nftables goes on", "services", t.Services, "err", err)
		l.many.Store(false)
		return
	}
	l.log.Info("there are many Services: from now on IPVS schedules all of them", "services", t.Services)
	next := tuning{l.policy(), s.MinSyncPeriod}
	go func() { l.tunings <- next }() // who takes it waits for the loop
}

// ipvs gives which Services IPVS schedules, as things are.
func (l *live) ipvs(said dataplane.IPVS) dataplane.IPVS {
	if l.noIPVS.Load() {
		said.Mode = dataplane.IPVSNever
		return said
	}
	if said.Mode == dataplane.IPVSAuto && l.many.Load() {
		said.Mode = dataplane.IPVSAlways
	}
	if said.Mode == dataplane.IPVSAlways {
		err, news := l.schedulers.missing(said.Default.Scheduler)
		if news && err != nil {
			l.log.Error("nftables chooses the endpoints of all Services, until this is started again", "err", err)
		}
		if err != nil {
			said.Mode = dataplane.IPVSAuto
		}
	}
	return said
}

// nodeAddrs gives the node's addresses, best first.
func (l *live) nodeAddrs() []netip.Addr {
	var addrs []netip.Addr
	if said := l.policy().NodeIP; said.IsValid() {
		addrs = append(addrs, said)
	}
	if n := l.node.Load(); n != nil {
		addrs = append(addrs, n.Addresses...)
	}
	return slices.Compact(addrs)
}
