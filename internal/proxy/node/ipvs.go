package node

import (
	"log/slog"
	"sync"
	"sync/atomic"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// ipvsChoice decides which Services IPVS schedules on this kernel.
type ipvsChoice struct {
	log *slog.Logger
	// missing, if not nil, gets why IPVS does not schedule all Services although it should.
	missing func(note string)
	// backend is the mechanism that chooses the endpoints if IPVS does not.
	backend string
	// probe returns why schedulers are unavailable; it loads IPVS. It is nil if the backend does not support IPVS.
	probe func(schedulers ...string) error

	// allServices is true once there were so many Services that IPVS schedules all of them.
	allServices atomic.Bool
	// warnOnce reports once that schedulers are ignored.
	warnOnce sync.Once
	mu       sync.Mutex
	probed   map[string]error
}

// schedulerError returns why a scheduler is unavailable, or nil. News is true at the first call for this scheduler.
func (c *ipvsChoice) schedulerError(name string) (err error, news bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err, ok := c.probed[name]; ok {
		return err, false
	}
	if c.probed == nil {
		c.probed = map[string]error{}
	}
	c.probed[name] = c.probe(name)
	return c.probed[name], true
}

// effective returns which of the configured Services IPVS can schedule.
func (c *ipvsChoice) effective(said dataplane.IPVS) dataplane.IPVS {
	if c.probe == nil {
		said.Mode = dataplane.IPVSNever
		return said
	}
	if said.Mode == dataplane.IPVSAuto && c.allServices.Load() {
		said.Mode = dataplane.IPVSAlways
	}
	if said.Mode == dataplane.IPVSAlways {
		err, news := c.schedulerError(said.Default.Scheduler)
		if news && err != nil {
			const instead = "nftables chooses the endpoints of all Services until the next start"
			c.log.Warn(instead, "err", err)
			if c.missing != nil {
				c.missing(instead + ": " + err.Error())
			}
		}
		if err != nil {
			said.Mode = dataplane.IPVSAuto
		}
	}
	return said
}

// enableAtThreshold makes IPVS schedule all Services once there are as many as the settings say, if it can. It reports
// whether that is new.
func (c *ipvsChoice) enableAtThreshold(services, enough int, said dataplane.IPVS) bool {
	if c.probe == nil || enough == 0 || services < enough || said.Mode != dataplane.IPVSAuto || c.allServices.Swap(true) {
		return false
	}
	if err, _ := c.schedulerError(said.Default.Scheduler); err != nil {
		c.log.Warn("IPVS cannot schedule the large number of Services: nftables chooses their endpoints",
			"services", services, "err", err)
		c.allServices.Store(false)
		return false
	}
	c.log.Info("IPVS schedules all Services from now on, because of their number (ipvsServices)", "services", services)
	return true
}

// warnIgnored reports if the operator wants IPVS for all Services, and the backend does not support it.
func (c *ipvsChoice) warnIgnored(said dataplane.IPVS) {
	if c.probe == nil && said.Mode == dataplane.IPVSAlways {
		c.warnOnce.Do(func() {
			c.log.Warn(c.backend + " chooses the endpoints of all Services at random: IPVS schedules only beside nftables")
		})
	}
}

// warnSchedulerIgnored reports once that a Service asks for a scheduler, and the backend does not support it.
func (c *ipvsChoice) warnSchedulerIgnored(d snapshot.Delta) {
	if c.probe != nil {
		return
	}
	for name, svc := range d.Services {
		if svc != nil && (svc.AsksForIPVS() || svc.Scheduling != nil && svc.Scheduling.Scheduler == snapshot.Hash) {
			c.warnOnce.Do(func() {
				c.log.Warn(c.backend+" chooses the endpoints of Services at random, also of those that ask for a scheduler",
					"service", name.String(), "scheduler", svc.Scheduling.Scheduler)
			})
		}
	}
}
