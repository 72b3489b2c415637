package benchmark

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/conformance/benchmark/results"
)

// Plan is what is to be measured.
type Plan struct {
	Sizes   []results.Size
	Kinds   []*Kind
	Repeats int
	// Budget is how long it may take in all; zero means no limit. What it does not suffice for is left for the next run.
	Budget time.Duration
	// Programs are those of the control plane, Dir an empty directory for all files.
	Programs Programs
	Dir      string
	// Keep leaves the files there.
	Keep bool
	// Results gets the cells, and is saved after each.
	Results *results.Results
	Save    func() error
	// OnlyPaths leaves the cells out: only what packets cost is measured.
	OnlyPaths bool
	// Say tells of a step that is done, Progress of what is under way; each is one line.
	Say, Progress func(string)
}

// errBudget says that the time is up.
var errBudget = errors.New("the time is up")

// Run measures every cell that is not there yet: all sizes once, from the smallest, then all again, so that a run
// that is broken off has as much of everything as there was time for. In each repeat another proxy is the first. It
// reports whether all is done.
func (p *Plan) Run(ctx context.Context) (complete bool, err error) {
	if p.Budget > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, p.Budget, errBudget)
		defer cancel()
	}
	began, spent := time.Now(), p.Results.Spent
	for repeat := 1; repeat <= p.Repeats; repeat++ {
		for _, size := range p.Sizes {
			err := p.size(ctx, size, repeat, func() error {
				p.Results.Spent = spent + time.Since(began).Seconds()
				return p.Save()
			})
			if errors.Is(context.Cause(ctx), errBudget) {
				return false, nil
			}
			if err != nil {
				return false, err
			}
		}
	}
	return true, nil
}

// missing gives the proxies whose cells are not there, beginning with another in each repeat.
func (p *Plan) missing(size results.Size, repeat int) (missing []*Kind) {
	n := len(p.Kinds)
	for i := range n {
		k := p.Kinds[(i+repeat-1)%n]
		if p.Results.Find(size, k.Name, repeat) == nil && !p.hopeless(size, k.Name) {
			missing = append(missing, k)
		}
	}
	return missing
}

// hopeless says that a proxy did not even start in time in a cluster of this size, or in a smaller one: it is not
// tried again.
func (p *Plan) hopeless(size results.Size, proxy string) bool {
	for _, c := range p.Results.Cells {
		smaller := c.Size.Services <= size.Services && c.Size.Endpoints <= size.Endpoints
		if smaller && c.Proxy == proxy && c.Start != nil && c.Start.Limit {
			return true
		}
	}
	return false
}

// size measures all missing cells of one size and repeat, in one cluster.
func (p *Plan) size(ctx context.Context, size results.Size, repeat int, save func() error) (err error) {
	missing := p.missing(size, repeat)
	if p.OnlyPaths {
		missing = nil
	}
	needsPaths := p.needsPaths(size, repeat)
	if len(missing) == 0 && !needsPaths {
		return nil
	}
	dir := filepath.Join(p.Dir, fmt.Sprintf("%s-%d", size, repeat))
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	if !p.Keep {
		defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	}
	w, err := newWorld(ctx, newCluster(size), p.Programs, dir, func(text string) {
		p.Progress(fmt.Sprintf("%s, repeat %d: %s", size, repeat, text))
	})
	if err != nil && ctx.Err() != nil { // whatever had just begun says how it ended, at length
		err = context.Cause(ctx)
	}
	if err != nil {
		return fmt.Errorf("%s, repeat %d: %w", size, repeat, err)
	}
	defer func() { err = errors.Join(err, w.close()) }()
	if err := p.cells(ctx, w, size, repeat, missing, save); err != nil || !needsPaths {
		return err
	}
	return p.turns(ctx, w, size, repeat, save)
}

// needsPaths says that turns of a size and repeat were not taken yet, or without one of the proxies. They are compared
// round by round, so all are measured again then.
func (p *Plan) needsPaths(size results.Size, repeat int) bool {
	found := p.Results.FindPaths(size, repeat)
	if found == nil {
		return p.Results.Settings.Rounds > 0
	}
	return slices.ContainsFunc(p.Kinds, func(k *Kind) bool {
		return found.Turns[k.Name] == nil && found.Missing[k.Name] == ""
	})
}

// turns measures what packets cost, once all cells of the size and repeat are there.
func (p *Plan) turns(ctx context.Context, w *world, size results.Size, repeat int, save func() error) error {
	p.Progress(fmt.Sprintf("%s, repeat %d, by turns: waiting for the machine to be at rest", size, repeat))
	if err := idle(ctx); err != nil {
		return err
	}
	out, err := p.paths(ctx, w, size, repeat)
	if ctx.Err() != nil { // turns that were broken off are taken again as a whole
		return context.Cause(ctx)
	}
	if err != nil {
		out.Error = err.Error()
	}
	p.Results.Paths = append(slices.DeleteFunc(p.Results.Paths, func(o *results.Paths) bool {
		return o.Size == size && o.Repeat == repeat
	}), out)
	p.Say(results.PathsSummary(out))
	return save()
}

// cells measures the missing cells of one size and repeat.
func (p *Plan) cells(
	ctx context.Context, w *world, size results.Size, repeat int, missing []*Kind, save func() error,
) error {
	for _, k := range missing {
		p.Progress(fmt.Sprintf("%s, repeat %d: waiting for the machine to be at rest", size, repeat))
		if err := idle(ctx); err != nil {
			return err
		}
		c := &results.Cell{
			Size:   size,
			Proxy:  k.Name,
			Repeat: repeat,
			Began:  time.Now().UTC().Truncate(time.Second),
			Load:   Load(),
		}
		began := time.Now()
		err := p.cell(ctx, w, k, c)
		c.Took = time.Since(began).Round(time.Millisecond).Seconds()
		if ctx.Err() != nil { // a cell that was broken off is measured again as a whole
			return context.Cause(ctx)
		}
		if err != nil {
			c.Error = err.Error()
		}
		p.Results.Cells = append(p.Results.Cells, c)
		p.Say(summary(c))
		if err := errors.Join(save(), w.store.compact(ctx)); err != nil {
			return err
		}
	}
	return nil
}

// cell measures one proxy from its start to its end, on a node of its own.
func (p *Plan) cell(ctx context.Context, w *world, k *Kind, c *results.Cell) (err error) {
	step := func(text string) {
		p.Progress(fmt.Sprintf("%s, repeat %d, %s: %s", c.Size, c.Repeat, c.Proxy, text))
	}
	step("making a node")
	if k.program == ciliumAgent {
		if err := w.prepareAgents(ctx, k); err != nil {
			return err
		}
	}
	n, err := w.newNode(k)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.close()) }()
	s := p.Results.Settings
	step("start")
	if c.Start, err = n.first(ctx, seconds(s.StartLimit)); err != nil || c.Start.Limit {
		return err
	}
	if err := sleep(ctx, settle); err != nil {
		return err
	}
	c.Memory = &results.Memory{Resident: n.usage.resident(), Kernel: n.usage.kernel()}
	defer func() {
		if c.Giant == nil {
			c.Memory.Peak = n.usage.highest()
		}
	}()
	if err := n.wrote(k); err != nil {
		return err
	}
	// Before the churn, after which a proxy may have work left for a long time.
	step("restarts")
	if c.Restart, err = n.again(ctx, seconds(s.StartLimit)); err != nil || c.Restart.Limit {
		return err
	}
	if c.Away, err = n.away(ctx, seconds(s.StartLimit)); err != nil || c.Away.Limit {
		return err
	}
	return p.changes(ctx, n, c, step)
}

// changes measures single changes, all rates and, in a small cluster, the giant in a proxy that has started.
func (p *Plan) changes(ctx context.Context, n *node, c *results.Cell, step func(string)) (err error) {
	s := p.Results.Settings
	rest := func() error {
		step("waiting for rest")
		_, err := n.calm(ctx, time.Now(), seconds(s.DrainLimit))
		return err
	}
	if err := rest(); err != nil {
		return err
	}
	step("single changes")
	if c.Change, err = n.changes(ctx, s.Changes, seconds(s.ChangesLimit)); err != nil {
		return err
	}
	for _, rate := range s.Rates {
		if err := rest(); err != nil {
			return err
		}
		step(fmt.Sprintf("%v changes a second", rate))
		churn, err := n.churn(ctx, rate, seconds(s.ChurnTime), seconds(s.DrainLimit))
		if err != nil {
			return err
		}
		c.Churn = append(c.Churn, *churn)
	}
	if c.Size.Services > giantMost || n.kind.reasons[results.TitleGiant] != "" {
		return nil
	}
	if err := rest(); err != nil {
		return err
	}
	step("a giant Service")
	c.Memory.Peak = n.usage.highest()
	c.Giant, err = n.giant(ctx, seconds(s.GiantLimit))
	return err
}

// settle is how long a proxy that has just started is left alone.
const settle = 2 * time.Second

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// summary is a line about a cell.
func summary(c *results.Cell) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%-9s %-24s %3.0f s ", c.Size, c.Proxy, c.Took)
	if c.Start != nil {
		fmt.Fprintf(&b, "  start %s", results.WaitText(*c.Start))
	}
	if c.Change != nil && len(c.Change.Milliseconds) > 0 {
		fmt.Fprintf(&b, "  change %s", results.Milliseconds(results.Percentile(c.Change.Milliseconds, 0.5)))
	}
	for _, ch := range c.Churn {
		fmt.Fprintf(
			&b,
			"  at %v/s %s, %.2f cores",
			ch.Rate,
			results.Milliseconds(results.Percentile(ch.Milliseconds, 0.5)),
			ch.Cores,
		)
	}
	if c.Restart != nil {
		fmt.Fprintf(&b, "  restart %s", results.WaitText(*c.Restart))
	}
	if c.Away != nil {
		fmt.Fprintf(&b, "  after a change %s", results.WaitText(*c.Away))
	}
	if c.Giant != nil {
		fmt.Fprintf(
			&b,
			"  giant %s, deleted %s",
			results.WaitText(c.Giant.Created.Wait),
			results.WaitText(c.Giant.Deleted.Wait),
		)
	}
	if c.Error != "" {
		fmt.Fprintf(&b, "  failed: %s", results.Shortened(c.Error))
	}
	return b.String()
}
