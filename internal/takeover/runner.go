package takeover

import (
	"context"
	"fmt"
	"log/slog"
	"runtime/debug"
	"strings"
	"time"
)

// Mode says what becomes of a kube-proxy's rules.
type Mode string

// The modes.
const (
	// Auto removes them once there are others.
	Auto Mode = "auto"
	// Never leaves them.
	Never Mode = "never"
)

// Runner removes a kube-proxy's rules after the start of whoever takes over from it, and sees whether they stay away.
type Runner struct {
	Mode Mode
	// Own is what has kube-proxy's names and is the caller's.
	Own Own
	Log *slog.Logger

	// find is Find, if not nil in a test.
	find func(context.Context) (leftovers, error)

	// looks is how often it looked, and removed how often something was removed. busy is when there was anything to do for the
	// last time, or the runner began.
	looks, removed int
	busy           time.Time
	// wait is how long the next removal has to wait, since the last one was in vain, and next is when it may be.
	wait time.Duration
	next time.Time
	// warned says that it was told that a kube-proxy is at work; drains that connections of IPVS are waited for.
	warned, drains bool
	// said is what does not have to be said again.
	said map[string]bool
}

// leftovers is a *Found.
type leftovers interface {
	Empty() bool
	Carries() bool
	Running() []int
	Connections() int
	Summary() []string
	Kept() []string
	Remove(context.Context) error
}

const (
	// A kube-proxy at work writes its rules again within seconds, or with the next change of a Service. So there is a look soon,
	// and then some more until it was quiet for so long.
	lookSoon  = 10 * time.Second
	lookEvery = time.Minute
	quiet     = 5 * time.Minute
	// removeMost bounds the fight with one that is at work: each time its rules are back the next removal waits twice as long.
	removeMost = time.Hour
)

// Run waits for ready, which says that the kernel carries every Service by our rules, and removes kube-proxy's. It looks again for
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
	r.said = map[string]bool{}
	r.busy, r.wait = time.Now(), lookEvery
	for after := r.look(ctx); after > 0; after = r.look(ctx) {
		debug.FreeOSMemory() // of large tables of iptables a look leaves hundreds of MB, which the runtime would keep for minutes
		select {
		case <-ctx.Done():
			return
		case <-time.After(after):
		}
	}
}

// look looks once, and gives in how long to look again; 0 is never.
func (r *Runner) look(ctx context.Context) time.Duration {
	r.looks++
	f, err := r.find(ctx)
	if ctx.Err() != nil {
		return 0
	}
	if err != nil {
		r.once(err.Error())
	}
	if r.Mode == Never {
		if !f.Empty() {
			r.Log.Info("kube-proxy's rules are left in place, as told", "what", strings.Join(f.Summary(), "; "))
		}
		return 0
	}
	if r.Own.Rules && len(f.Running()) > 0 { // it writes into the same chains, so that nothing of it is seen
		r.warn(f)
	}
	for _, kept := range f.Kept() {
		r.once("left of what kube-proxy made: " + kept)
	}
	switch now := time.Now(); {
	case f.Empty() && now.Sub(r.busy) >= quiet:
		return 0
	case f.Empty():
	case r.removed > 0 && f.Carries() && !r.mayAgain(f, now):
	default:
		r.remove(ctx, f)
	}
	if r.looks == 1 {
		return lookSoon
	}
	return lookEvery
}

// mayAgain says whether rules that are back are to be removed again. There is no use in it while a kube-proxy is at work.
func (r *Runner) mayAgain(f leftovers, now time.Time) bool {
	r.warn(f)
	r.busy = now
	if len(f.Running()) > 0 || now.Before(r.next) {
		return false
	}
	r.wait = min(2*r.wait, removeMost)
	return true
}

// warn says once that a kube-proxy is at work.
func (r *Runner) warn(f leftovers) {
	if r.warned {
		return
	}
	r.warned = true
	r.Log.Warn("kube-proxy is at work on this node, and writes its rules again: remove its DaemonSet. No connection is lost by it, "+
		"but both do the work", "pids", fmt.Sprint(f.Running()), "what", strings.Join(f.Summary(), "; "))
}

func (r *Runner) remove(ctx context.Context, f leftovers) {
	what := strings.Join(f.Summary(), "; ")
	err := f.Remove(ctx)
	if ctx.Err() != nil {
		return
	}
	r.busy = time.Now()
	if err != nil {
		r.once(err.Error())
		return
	}
	r.removed++
	r.next = r.busy.Add(r.wait)
	drains := f.Connections()
	switch {
	case drains == 0:
		r.Log.Info("removed what kube-proxy made", "what", what)
	case !r.drains:
		r.Log.Info("connections go on over kube-proxy's virtual services of IPVS; these go once they have ended",
			"connections", drains, "what", what)
	}
	r.drains = drains > 0
	if len(f.Running()) > 0 {
		r.warn(f)
	}
}

// once logs a warning that was not logged before.
func (r *Runner) once(text string) {
	if !r.said[text] {
		r.said[text] = true
		r.Log.Warn(text)
	}
}
