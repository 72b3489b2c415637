package takeover

import (
	"context"
	"fmt"
	"log/slog"
	"runtime/debug"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/clock"
)

// Mode says what happens to a kube-proxy's rules.
type Mode string

// The modes.
const (
	// Auto removes them once ours are programmed.
	Auto Mode = "auto"
	// Never leaves them.
	Never Mode = "never"
)

// Runner removes a kube-proxy's rules after the start of the proxy that takes over, and checks that they do not come
// back.
type Runner struct {
	Mode Mode
	// Own says which chains with kube-proxy's names belong to the caller.
	Own Own
	Log *slog.Logger

	// find is Find, if not nil in a test.
	find func(context.Context) (leftovers, error)

	// checks counts the checks, and removed the removals. lastActive is when there was last anything to do, or when the
	// runner started.
	checks, removed int
	lastActive      time.Time
	// backoff is the delay before the next removal, since the last one was in vain, and nextRemoval is when it may happen.
	backoff     time.Duration
	nextRemoval time.Time
	// warned says that a running kube-proxy was reported; draining that connections of IPVS are still draining.
	warned, draining bool
	// logged holds the warnings that were logged already.
	logged map[string]bool
}

// leftovers is a *Found.
type leftovers interface {
	Empty() bool
	HasServices() bool
	Running() []int
	Connections() int
	Summary() []string
	Kept() []string
	Remove(context.Context) error
}

const (
	// A running kube-proxy writes its rules again within seconds, or with the next change of a Service. So the first
	// recheck is soon, and more follow until nothing happened for quietPeriod.
	firstRecheck    = 10 * time.Second
	recheckInterval = time.Minute
	quietPeriod     = 5 * time.Minute
	// maxBackoff bounds the delay between removals: each time a running kube-proxy writes its rules again, the delay
	// doubles.
	maxBackoff = time.Hour
)

// Run waits for ready, which says that all Services are programmed, and removes kube-proxy's rules. It checks again for
// some minutes, or as long as anything is left. It works in the network namespace of its process.
func (r *Runner) Run(ctx context.Context, ready <-chan struct{}) {
	select {
	case <-ctx.Done():
		return
	case <-ready:
	}
	if r.find == nil {
		r.find = func(ctx context.Context) (leftovers, error) { return Find(ctx, r.Own) }
	}
	r.logged = map[string]bool{}
	r.lastActive, r.backoff = time.Now(), recheckInterval
	for after := r.check(ctx); after > 0; after = r.check(ctx) {
		// of large tables of iptables a look leaves hundreds of MB, which the runtime would keep for minutes
		debug.FreeOSMemory()
		if clock.Pause(ctx, after); ctx.Err() != nil {
			return
		}
	}
}

// check checks once, and returns the delay before the next check; 0 means never.
func (r *Runner) check(ctx context.Context) time.Duration {
	r.checks++
	f, err := r.find(ctx)
	if ctx.Err() != nil {
		return 0
	}
	if err != nil {
		r.warnOnce(err.Error())
	}
	if r.Mode == Never {
		if !f.Empty() {
			r.Log.Info("kube-proxy's rules are kept, as configured", "what", strings.Join(f.Summary(), "; "))
		}
		return 0
	}
	if r.Own.Rules && len(f.Running()) > 0 { // it writes into the same chains, so that nothing of it is seen
		r.warnRunning(f)
	}
	for _, kept := range f.Kept() {
		r.warnOnce("kept from kube-proxy: " + kept)
	}
	switch now := time.Now(); {
	case f.Empty() && now.Sub(r.lastActive) >= quietPeriod:
		return 0
	case f.Empty():
	case r.removed > 0 && f.HasServices() && !r.mayRemoveAgain(f, now):
	default:
		r.remove(ctx, f)
	}
	if r.checks == 1 {
		return firstRecheck
	}
	return recheckInterval
}

// mayRemoveAgain says whether to remove rules that came back. It makes no sense while a kube-proxy is running.
func (r *Runner) mayRemoveAgain(f leftovers, now time.Time) bool {
	r.warnRunning(f)
	r.lastActive = now
	if len(f.Running()) > 0 || now.Before(r.nextRemoval) {
		return false
	}
	r.backoff = min(2*r.backoff, maxBackoff)
	return true
}

// warnRunning warns once about a running kube-proxy.
func (r *Runner) warnRunning(f leftovers) {
	if r.warned {
		return
	}
	r.warned = true
	r.Log.Warn(
		"kube-proxy is running on this node and writes its rules again: remove its DaemonSet. No connection is lost, "+
			"but both proxies do the work", "pids", fmt.Sprint(f.Running()), "what", strings.Join(f.Summary(), "; "))
}

func (r *Runner) remove(ctx context.Context, f leftovers) {
	what := strings.Join(f.Summary(), "; ")
	err := f.Remove(ctx)
	if ctx.Err() != nil {
		return
	}
	r.lastActive = time.Now()
	if err != nil {
		r.warnOnce(err.Error())
		return
	}
	r.removed++
	r.nextRemoval = r.lastActive.Add(r.backoff)
	drains := f.Connections()
	switch {
	case drains == 0:
		r.Log.Info("removed kube-proxy's rules", "what", what)
	case !r.draining:
		r.Log.Info(
			"connections still use kube-proxy's IPVS virtual services, which are removed once the connections have ended",
			"connections", drains, "what", what)
	}
	r.draining = drains > 0
	if len(f.Running()) > 0 {
		r.warnRunning(f)
	}
}

// warnOnce logs a warning that was not logged before.
func (r *Runner) warnOnce(text string) {
	if !r.logged[text] {
		r.logged[text] = true
		r.Log.Warn(text)
	}
}
