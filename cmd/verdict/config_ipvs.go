package main

import (
	"context"
	"maps"
	"net/netip"
	"slices"
	"sync"

	"github.com/verdict-proxy/verdict/internal/config"
	"github.com/verdict-proxy/verdict/internal/metrics"
	"github.com/verdict-proxy/verdict/ipvsplugin"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
	"github.com/verdict-proxy/verdict/sync/watch"
)

// schedulers knows which of IPVS this kernel has for all Services. To ask for one loads IPVS, so it is asked for when it is wanted.
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

// maxUnscheduled bounds how many Services get an event when IPVS does not schedule them.
const maxUnscheduled = 20

// unscheduled tells the cluster of Services whose scheduler is not to be had.
func (l *live) unscheduled(r *dataplane.Refused) {
	names := slices.SortedFunc(maps.Keys(r.Services), snapshot.Name.Compare)
	for _, n := range names[:min(maxUnscheduled, len(names))] {
		l.events.Emit(watch.Event{Warning: true, Reason: "NotScheduled", Action: "Schedule", Service: n,
			Note: "nftables chooses the endpoints: " + r.Services[n].Error()})
	}
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

// leftToChance says once that a Service asks for a scheduler that it does not get from such a backend.
func (l *live) leftToChance(d snapshot.Delta) {
	if !l.noIPVS.Load() {
		return
	}
	for name, svc := range d.Services {
		if svc != nil && svc.AsksForIPVS() {
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
func (l *live) countServices(ctx context.Context, t reconcile.Transaction) {
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
	go func() { // who takes it waits for the loop
		select {
		case l.tunings <- next:
		case <-ctx.Done():
		}
	}()
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

// scheduled reads what IPVS counts, for the metrics.
type scheduled struct{ *ipvsplugin.Backend }

func (s scheduled) Services(do func(dataplane.Key, metrics.IPVSCounts)) error {
	all, err := s.Statistics()
	for i := range all {
		do(all[i].Key, ipvsCounts(&all[i].Statistics))
	}
	return err
}

func (s scheduled) Endpoints(of dataplane.Key, do func(netip.AddrPort, metrics.IPVSEndpoint)) error {
	all, err := s.DestinationStatistics(of)
	for i := range all {
		do(all[i].AddrPort, metrics.IPVSEndpoint{IPVSCounts: ipvsCounts(&all[i].Statistics), Active: all[i].Active})
	}
	return err
}

func ipvsCounts(s *ipvsplugin.Statistics) metrics.IPVSCounts {
	return metrics.IPVSCounts{Connections: s.Connections, Packets: [2]uint64{s.PacketsIn, s.PacketsOut}, Bytes: [2]uint64{s.BytesIn, s.BytesOut}}
}
