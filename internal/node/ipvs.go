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

	// many says that there were so many Services that IPVS schedules all of them.
	many atomic.Bool
	// ignored is for reporting once that schedulers are not heeded.
	ignored sync.Once
	mu      sync.Mutex
	known   map[string]error
}

// missing gives why a scheduler is not to be had, nil if it is. News says that nobody has asked before.
func (c *ipvsChoice) missing(name string) (err error, news bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err, ok := c.known[name]; ok {
		return err, false
	}
	if c.known == nil {
		c.known = map[string]error{}
	}
	c.known[name] = c.probe(name)
	return c.known[name], true
}

// possible gives which Services IPVS schedules, of what the settings say.
func (c *ipvsChoice) possible(said dataplane.IPVS) dataplane.IPVS {
	if c.probe == nil {
		said.Mode = dataplane.IPVSNever
		return said
	}
	if said.Mode == dataplane.IPVSAuto && c.many.Load() {
		said.Mode = dataplane.IPVSAlways
	}
	if said.Mode == dataplane.IPVSAlways {
		err, news := c.missing(said.Default.Scheduler)
		if news && err != nil {
			c.log.Error("nftables chooses the endpoints of all Services, until this is started again", "err", err)
		}
		if err != nil {
			said.Mode = dataplane.IPVSAuto
		}
	}
	return said
}

// count has IPVS schedule all Services once there are as many as the settings say, and it can. It says whether that
// is new.
func (c *ipvsChoice) count(services, enough int, said dataplane.IPVS) bool {
	if c.probe == nil || enough == 0 || services < enough || said.Mode != dataplane.IPVSAuto || c.many.Swap(true) {
		return false
	}
	if err, _ := c.missing(said.Default.Scheduler); err != nil {
		c.log.Warn("there are many Services, and IPVS cannot schedule them: nftables goes on",
			"services", services, "err", err)
		c.many.Store(false)
		return false
	}
	c.log.Info("there are many Services: from now on IPVS schedules all of them", "services", services)
	return true
}

// warnIgnored reports if the operator wants IPVS for all Services from a backend that leaves nothing to it.
func (c *ipvsChoice) warnIgnored(said dataplane.IPVS) {
	if c.probe == nil && said.Mode == dataplane.IPVSAlways {
		c.ignored.Do(func() {
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
			c.ignored.Do(func() {
				c.log.Warn(c.backend+" chooses the endpoints of Services at random, also of those that ask for a scheduler of IPVS",
					"service", name.String(), "scheduler", svc.Scheduling.Scheduler)
			})
		}
	}
}
