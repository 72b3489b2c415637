package recorder

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/conformance/benchmark"
	"github.com/verdict-proxy/verdict/conformance/benchmark/results"
	"github.com/verdict-proxy/verdict/conformance/history"
	"github.com/verdict-proxy/verdict/conformance/testbed"
)

// Plan makes histories with several proxies, and checks them.
type Plan struct {
	Proxies []string
	Repeats int
	// Run selects scenarios by their names.
	Run      *regexp.Regexp
	Programs testbed.Programs
	// Dir is an empty directory for all files but the histories, which go to Histories, and, with
	// Results.Settings.Explain, the records of failures that nothing explains, which go to Unexplained.
	Dir, Histories, Unexplained string
	// Results get the cells, and are saved after each. Cells that they hold already are not measured again.
	Results *results.Histories
	Save    func() error
	// Say reports one line about a finished history, and what was wrong in it.
	Say func(string)
}

// slow is how many times as long changes may take: all proxies have testbeds, and one of them is at work.
const slow testbed.Slow = 3

// Measure makes all histories that are missing. Each proxy has a testbed of its own, all at the same time, so that they
// can take turns: each scenario is run with one proxy after the other, in an order that changes. It fails in the end if
// a failure has no known cause.
func (p *Plan) Measure(ctx context.Context) (err error) {
	if p.Results.Machine, err = benchmark.ThisMachine(); err != nil {
		return err
	}
	beds := make(map[string]*bed)
	defer func() {
		for _, b := range beds {
			err = errors.Join(err, b.Close())
		}
	}()
	if err := os.MkdirAll(p.Histories, 0o755); err != nil {
		return err
	}
	turn := 0
	for repeat := 1; repeat <= p.Repeats; repeat++ {
		for i := range scenarios {
			if !p.Run.MatchString(scenarios[i].name) {
				continue
			}
			turn++
			for n := range p.Proxies {
				name := p.Proxies[(n+turn)%len(p.Proxies)]
				if err := p.cell(ctx, beds, name, i, repeat); err != nil {
					return fmt.Errorf("%s with %s, repeat %d: %w", scenarios[i].name, name, repeat, err)
				}
			}
		}
	}
	return results.Unexplained(p.Results.Cells, p.Unexplained)
}

// open starts the testbed of a proxy.
func (p *Plan) open(ctx context.Context, kind *testbed.Kind) (*bed, error) {
	paths, err := p.Programs.Peers(ctx, "etcd", "kube-apiserver")
	if err != nil {
		return nil, err
	}
	binary, version, err := kind.Obtain(ctx, p.Programs, p.Dir)
	if err != nil {
		return nil, err
	}
	p.Results.Versions[kind.Name] = version
	dir := filepath.Join(p.Dir, filepath.Base(kind.Name))
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	tb, err := testbed.Open(ctx, kind, binary, testbed.Peers{Etcd: paths[0], APIServer: paths[1]}, slow, dir)
	if err != nil {
		return nil, err
	}
	if p.Results.Settings.Explain {
		if err := tb.Record(ctx, p.Unexplained); err != nil {
			return nil, errors.Join(err, tb.Close())
		}
	}
	b, err := newBed(ctx, tb, seconds(p.Results.Settings.MinSync))
	if err != nil {
		return nil, errors.Join(err, tb.Close())
	}
	b.newer = binary
	if p.needsOlder() {
		if b.older, version, err = kind.Older(ctx, p.Programs, p.Dir); err != nil {
			return nil, errors.Join(err, tb.Close())
		}
		if b.older != "" {
			p.Results.Versions[kind.Name] += ", upgraded from " + version
		}
	}
	return b, nil
}

// needsOlder says whether any scenario that is chosen needs an older version of the proxies.
func (p *Plan) needsOlder() bool {
	return slices.ContainsFunc(scenarios, func(s scenario) bool { return s.older && p.Run.MatchString(s.name) })
}

// expected are the causes that are no news: whether a Service had endpoints, and how late a node knew, is what the
// checker judges.
var expected = []string{"no ready endpoint", "not programmed yet"}

// cell makes one history, unless it is there, checks it, and saves both.
func (p *Plan) cell(ctx context.Context, beds map[string]*bed, proxy string, i, repeat int) error {
	s := &scenarios[i]
	kind, err := testbed.FindKind(proxy)
	if err != nil {
		return err
	}
	if p.Results.Find(s.name, kind.Name, repeat) != nil {
		return nil
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if beds[proxy] == nil {
		if beds[proxy], err = p.open(ctx, kind); err != nil {
			return err
		}
	}
	if s.older && beds[proxy].older == "" {
		p.Say(fmt.Sprintf("%-16s %-20s left out: there is no older version", s.name, kind.Name))
		return nil
	}
	settings := p.Results.Settings
	header := history.Header{
		Proxy: kind.Name, Version: p.Results.Versions[kind.Name], Scenario: s.name,
		Seed:  settings.Seed + uint64(1000*repeat+i),
		Began: time.Now().UTC().Truncate(time.Second), Load: benchmark.Load(),
	}
	failures := beds[proxy].Failures(expected...)
	h, err := beds[proxy].play(ctx, s, Settings{
		Length: seconds(settings.Length), Rate: settings.Rate, Look: seconds(settings.Look),
	}, header, failures)
	if err != nil {
		return err
	}
	name := fmt.Sprintf("%s.%s.%d.jsonl.gz", s.name, filepath.Base(kind.Name), repeat)
	if err := h.WriteFile(filepath.Join(p.Histories, name)); err != nil {
		return err
	}
	report := history.Check(h, history.Options{Bound: seconds(settings.Bound)})
	cell := summary(h, report, repeat)
	causes, unexpected := failures.Causes()
	cell.Causes = causes
	p.Results.Cells = append(p.Results.Cells, cell)
	p.Say(strings.Join(append([]string{cell.String()}, unexpected...), "\n"))
	for _, v := range report.Violations {
		p.Say(v.String())
	}
	return p.Save()
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// summary gives what the table shows of a history.
func summary(h *history.History, r *history.Report, repeat int) *results.HistoryCell {
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
	c := &results.HistoryCell{
		Run:  results.Run{Scenario: h.Header.Scenario, Proxy: h.Header.Proxy, Repeat: repeat},
		Seed: h.Header.Seed, Began: h.Header.Began,
		Load: h.Header.Load, Conns: r.Conns, Writes: r.Writes, Faults: len(h.Faults), Unjudged: r.Unjudged,
		Unanswered: r.Unanswered,
		Removed:    ms(r.Removed.Most), Added: ms(r.Added.Most), Unused: ms(r.Unused.Most), Beyond: ms(r.Beyond()),
		Stale: r.Removed.Conns + r.Added.Conns, Unproven: r.Unproven, Violations: make(map[string]int),
	}
	for kind, n := range r.Counts {
		c.Violations[string(kind)] = n
	}
	return c
}
