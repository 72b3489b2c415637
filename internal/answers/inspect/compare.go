package inspect

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/internal/proxy/preflight"
	"github.com/verdict-proxy/verdict/internal/proxy/status"
	"github.com/verdict-proxy/verdict/internal/system/clock"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Comparison is the difference between what the kernel holds and what it should hold.
type Comparison struct {
	dataplane.Differences
	// Same is true if nothing differs.
	Same bool
	// Objects names the source of the objects that the kernel is compared with; empty if it is compared only with itself.
	// Services counts the Services that they ask for.
	Objects  string
	Services int
	// Counts sums the Differences up by Service, the largest first.
	Counts []ServiceCount
	// Preflight is what on this host stops packets of Services although the rules are right.
	Preflight []status.Finding
}

// ServiceCount counts the differences of one Service. The name is empty for shared elements.
type ServiceCount struct {
	Service string `json:"service"`
	Missing int    `json:"missing"`
	Extra   int    `json:"extra"`
	Changed int    `json:"changed"`
}

// A difference counts only if it lasts for settleTime, because a change may be on its way to the kernel. While the
// tables are written to continuously, a reading may mix two states: then Compare reads up to maxLooks times.
const (
	settleTime = 500 * time.Millisecond
	maxLooks   = 3
)

// Compare compares the kernel with itself, and with the objects if there are any. It ignores differences that last only
// a moment.
func Compare(ctx context.Context, i reconcile.Inspector, o *ObjectFlags) (*Comparison, error) {
	c, err := compareOnce(ctx, i, o, true)
	for look := 1; err == nil && !c.Same && (look == 1 || !c.Quiet) && look < maxLooks; look++ {
		if clock.Pause(ctx, settleTime); ctx.Err() != nil {
			return nil, ctx.Err()
		}
		before := c
		if c, err = compareOnce(ctx, i, o, false); err == nil {
			c.keepLasting(before)
		}
	}
	return c, err
}

// keepLasting drops differences that the earlier comparison did not have.
func (c *Comparison) keepLasting(before *Comparison) {
	c.Wrong = slices.DeleteFunc(c.Wrong, func(s string) bool { return !slices.Contains(before.Wrong, s) })
	both := func(now, then []dataplane.Difference) []dataplane.Difference {
		seen := map[string]bool{}
		for i := range then {
			seen[diffLine(&then[i])] = true
		}
		return slices.DeleteFunc(now, func(d dataplane.Difference) bool { return !seen[diffLine(&d)] })
	}
	c.Contradictions = both(c.Contradictions, before.Contradictions)
	c.Differences.Differences = both(c.Differences.Differences, before.Differences.Differences)
	c.finish()
}

// diffLine formats a difference as a line of diff.
func diffLine(d *dataplane.Difference) string {
	if d.Wanted {
		return "+ " + d.Line
	}
	return "- " + d.Line
}

// compareOnce reads everything once. With printProblems it also prints what is wrong with the objects.
func compareOnce(ctx context.Context, i reconcile.Inspector, o *ObjectFlags, printProblems bool) (*Comparison, error) {
	c := &Comparison{}
	var wanted *dataplane.State
	var facts *preflight.Facts
	var notes []string
	healthNote := ""
	if o.Given() {
		w, err := o.Wanted(ctx, i, printProblems)
		if err != nil {
			return nil, err
		}
		wanted, notes, healthNote = w.State, w.notes, w.healthNote
		c.Objects, c.Services = w.Objects.Source, len(wanted.Services)
		facts = preflight.FactsOf(w.Objects.Config, w.Objects.Snap)
	} else if settings, err := i.Settings(ctx); err == nil { // a backend that has none tells nothing
		facts = preflight.FactsOfRules(settings)
	}
	if facts != nil {
		facts.SetBackend(i.Name())
		host, err := preflight.Open()
		if err != nil {
			return nil, err
		}
		defer host.Close()
		c.Preflight = host.Look(facts)
	}
	d, err := i.Differences(ctx, wanted)
	if err != nil {
		return nil, err
	}
	c.Differences = *d
	c.Notes = append(notes, d.Notes...)
	if c.finish(); !c.Same && healthNote != "" {
		c.Notes = append(c.Notes, healthNote)
	}
	return c, nil
}

// Wanted is what objects ask for on this node.
type Wanted struct {
	State   *dataplane.State
	Objects *Objects
	notes   []string
	// healthNote explains differences if the proxy did not tell which endpoints start slowly.
	healthNote string
}

// Notes say which flags and ejections were taken from the kernel, and what could not be asked.
func (w *Wanted) Notes() []string {
	if w.healthNote == "" {
		return w.notes
	}
	return append(slices.Clip(w.notes), w.healthNote)
}

// Wanted loads the objects and computes what they ask for. Flags that are not given, and the health of endpoints, are
// taken from what the Inspector reads. PrintProblems writes to standard error what is wrong
// with the objects.
func (o *ObjectFlags) Wanted(ctx context.Context, i reconcile.Inspector, printProblems bool) (*Wanted, error) {
	w, err := o.LoadBeside(ctx, i, printProblems)
	if err != nil {
		return nil, err
	}
	w.State, _ = dataplane.Compute(w.Objects.Config, w.Objects.Snap)
	return w, nil
}

// LoadBeside is Wanted without the State.
func (o *ObjectFlags) LoadBeside(ctx context.Context, i reconcile.Inspector, printProblems bool) (*Wanted, error) {
	settings, err := i.Settings(ctx)
	if err != nil {
		return nil, err
	}
	present, err := i.Present(ctx)
	if err != nil {
		return nil, err
	}
	w := &Wanted{}
	if !present { // then there is nothing to learn from the rules, and no proxy to ask
		settings = nil
	}
	if w.Objects, err = o.Load(ctx, settings, true); err != nil {
		return nil, err
	}
	if printProblems {
		w.Objects.PrintProblems()
	}
	if !present || settings.Config == nil && !settings.Scheduler { // nobody is scheduled by it, whatever objects ask for
		w.Objects.Config.IPVS.Mode = dataplane.IPVSNever
	}
	if !present {
		return w, nil
	}
	w.Objects.takeHealth(settings.Unhealthy)
	w.notes = healthNotes(settings.Unhealthy)
	for _, flag := range w.Objects.Adopted {
		w.notes = append(w.notes, "taken from the kernel: "+flag)
	}
	w.healthNote = o.addSlowStarts(ctx, w.Objects)
	return w, nil
}

// finish counts differences by Service, and sets Same.
func (c *Comparison) finish() {
	all := c.Differences.Differences
	c.Same = len(c.Wrong)+len(c.Contradictions)+len(all) == 0
	sides := map[string]int{}
	for i := range all {
		if all[i].Place != "" {
			sides[all[i].Place]++
		}
	}
	counts := map[snapshot.Name]*ServiceCount{}
	for i := range all {
		d := &all[i]
		n := counts[d.Port.Service]
		if n == nil {
			n = &ServiceCount{}
			if d.Port.Service != (snapshot.Name{}) {
				n.Service = d.Port.Service.String()
			}
			counts[d.Port.Service] = n
		}
		switch pair := sides[d.Place] == 2; {
		case pair && d.Wanted:
			n.Changed++
		case pair:
		case d.Wanted:
			n.Missing++
		default:
			n.Extra++
		}
	}
	c.Counts = nil
	for _, n := range counts {
		c.Counts = append(c.Counts, *n)
	}
	slices.SortFunc(c.Counts, func(a, b ServiceCount) int {
		return cmp.Or(cmp.Compare(b.Missing+b.Extra+b.Changed, a.Missing+a.Extra+a.Changed),
			strings.Compare(a.Service, b.Service))
	})
}
