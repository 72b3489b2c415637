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
	// backend is what chooses the endpoints where IPVS does not.
	backend string
	// probe says why schedulers cannot be had, which loads IPVS; nil if the backend leaves nothing to IPVS.
	probe func(schedulers ...string) error

	// allServices says that there were so many Services that IPVS schedules all of them.
	allServices atomic.Bool
	// warnOnce is for reporting once that schedulers are not heeded.
	warnOnce sync.Once
	mu       sync.Mutex
	probed   map[string]error
}

// schedulerError gives why a scheduler is not to be had, nil if it is. News says that nobody has asked before.
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

// effective gives which Services IPVS schedules, of what the settings say.
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
			c.log.Error("nftables chooses the endpoints of all Services, until this is started again", "err", err)
		}
		if err != nil {
			said.Mode = dataplane.IPVSAuto
		}
	}
	return said
}

// enableAtThreshold has IPVS schedule all Services once there are as many as the settings say, and it can. It says whether that
// is new.
func (c *ipvsChoice) enableAtThreshold(services, enough int, said dataplane.IPVS) bool {
	if c.probe == nil || enough == 0 || services < enough || said.Mode != dataplane.IPVSAuto || c.allServices.Swap(true) {
		return false
	}
	if err, _ := c.schedulerError(said.Default.Scheduler); err != nil {
		c.log.Warn("there are many Services, and IPVS cannot schedule them: nftables goes on",
			"services", services, "err", err)
		c.allServices.Store(false)
		return false
	}
	c.log.Info("there are many Services: from now on IPVS schedules all of them", "services", services)
	return true
}

// warnIgnored reports if the operator wants IPVS for all Services from a backend that leaves nothing to it.
func (c *ipvsChoice) warnIgnored(said dataplane.IPVS) {
	if c.probe == nil && said.Mode == dataplane.IPVSAlways {
		c.warnOnce.Do(func() {
			c.log.Warn(c.backend + " chooses the endpoints of all Services at random: IPVS schedules only beside nftables")
		})
	}
}

// warnSchedulerIgnored reports once that a Service asks such a backend for a scheduler.
func (c *ipvsChoice) warnSchedulerIgnored(d snapshot.Delta) {
	if c.probe != nil {
		return
	}
	for name, svc := range d.Services {
		if svc != nil && svc.AsksForIPVS() {
			c.warnOnce.Do(func() {
				c.log.Warn(c.backend+" chooses the endpoints of Services at random, also of those that ask for a scheduler of IPVS",
					"service", name.String(), "scheduler", svc.Scheduling.Scheduler)
			})
		}
	}
}
