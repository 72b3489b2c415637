package inspect

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Comparison is what the kernel holds beside what it should hold.
type Comparison struct {
	dataplane.Differences
	// Same says that nothing differs.
	Same bool
	// Objects says where the objects come from that the kernel is compared with; empty if it is compared with itself
	// alone. Services is how many Services they ask for.
	Objects  string
	Services int
	// Counts sum the Differences up by Service, those first that differ most.
	Counts []ServiceCount
}

// ServiceCount is how much differs of a Service; its name is empty for what belongs to none.
type ServiceCount struct {
	Service                 string
	Missing, Extra, Changed int
}

// A difference has to last for settleTime before it is believed: a change may be on its way from the objects to the
// kernel. While the tables are written to all the time, what is read may never have been there at one moment: then it
// is looked at maxLooks times.
const (
	settleTime = 500 * time.Millisecond
	maxLooks   = 3
)

// Compare looks at the kernel, and at the objects if there are any. What differs only for a moment does not count.
func Compare(ctx context.Context, i reconcile.Inspector, o *ObjectFlags) (*Comparison, error) {
	c, err := compareOnce(ctx, i, o, true)
	for look := 1; err == nil && !c.Same && (look == 1 || !c.Quiet) && look < maxLooks; look++ {
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(settleTime):
		}
		before := c
		if c, err = compareOnce(ctx, i, o, false); err == nil {
			c.keep(before)
		}
	}
	return c, err
}

// keep leaves of a comparison what was there before too.
func (c *Comparison) keep(before *Comparison) {
	c.Wrong = slices.DeleteFunc(c.Wrong, func(s string) bool { return !slices.Contains(before.Wrong, s) })
	both := func(now, then []dataplane.Difference) []dataplane.Difference {
		seen := map[string]bool{}
		for i := range then {
			seen[signed(&then[i])] = true
		}
		return slices.DeleteFunc(now, func(d dataplane.Difference) bool { return !seen[signed(&d)] })
	}
	c.Contradictions = both(c.Contradictions, before.Contradictions)
	c.Differences.Differences = both(c.Differences.Differences, before.Differences.Differences)
	c.finish()
}

// signed is a difference as a line of diff.
func signed(d *dataplane.Difference) string {
	if d.Wanted {
		return "+ " + d.Line
	}
	return "- " + d.Line
}

// compareOnce reads everything once; complain has it say what is wrong with the objects.
func compareOnce(ctx context.Context, i reconcile.Inspector, o *ObjectFlags, complain bool) (*Comparison, error) {
	c := &Comparison{}
	var wanted *dataplane.State
	var notes []string
	if o.Given() {
		settings, err := i.Settings(ctx)
		if err != nil {
			return nil, err
		}
		objects, err := o.Load(ctx, settings, true)
		if err != nil {
			return nil, err
		}
		if complain {
			objects.complain()
		}
		for _, flag := range objects.Adopted {
			notes = append(notes, "taken from the kernel's rules: "+flag)
		}
		if !settings.Scheduler { // then nobody is scheduled by it, whatever the objects ask for
			objects.Config.IPVS.Mode = dataplane.IPVSNever
		}
		wanted, _ = dataplane.Compute(objects.Config, objects.Snap)
		c.Objects, c.Services = objects.Source, len(wanted.Services)
	}
	d, err := i.Differences(ctx, wanted)
	if err != nil {
		return nil, err
	}
	c.Differences = *d
	c.Notes = append(notes, d.Notes...)
	c.finish()
	return c, nil
}

// finish counts by Service, and says whether all is the same.
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
