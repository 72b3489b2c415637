package benchmark

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/verdict-proxy/verdict/conformance/benchmark/results"
	"github.com/verdict-proxy/verdict/conformance/testbed"
)

// OutagePlan measures what clients of a Service see while endpoints of it are dead, refuse or go, with each proxy in
// the testbed of the conformance suite.
type OutagePlan struct {
	Proxies []string
	Repeats int
	// Run selects scenarios by their names; Parallel of those that disturb no other run at the same time.
	Run      *regexp.Regexp
	Parallel int
	Programs testbed.Programs
	// Dir is an empty directory for all files. With Results.Settings.Explain, records of failures that nothing explains
	// go to Unexplained.
	Dir, Unexplained string
	// Results gets the cells, and is saved after each. Cells that it holds already are not measured again.
	Results *results.Outages
	Save    func() error
	// Say reports one line about a finished step.
	Say func(string)

	mu sync.Mutex // of Results
}

// OutageScenarios gives the names of all scenarios.
func OutageScenarios() (names []string) {
	for _, s := range scenarios {
		names = append(names, s.name)
	}
	return names
}

// Measure measures all missing cells: every proxy once, then every proxy again. It fails in the end if a failure of any
// cell has no known cause.
func (p *OutagePlan) Measure(ctx context.Context) error {
	machine, err := ThisMachine()
	if err != nil {
		return err
	}
	p.Results.Machine = machine
	paths, err := p.Programs.Peers(ctx, "etcd", "kube-apiserver")
	if err != nil {
		return err
	}
	peers := testbed.Peers{Etcd: paths[0], APIServer: paths[1]}
	for repeat := 1; repeat <= p.Repeats; repeat++ {
		for _, proxy := range p.Proxies {
			if err := p.proxy(ctx, proxy, repeat, peers); err != nil {
				return fmt.Errorf("%s, repeat %d: %w", proxy, repeat, err)
			}
		}
	}
	return results.Unexplained(p.Results.Cells, p.Unexplained)
}

// missing gives the scenarios that this proxy has not been measured in.
func (p *OutagePlan) missing(proxy string, repeat int) (missing []*scenario) {
	for i := range scenarios {
		s := &scenarios[i]
		if p.Run.MatchString(s.name) && p.Results.Find(s.name, proxy, repeat) == nil {
			missing = append(missing, s)
		}
	}
	return missing
}

// proxy measures one proxy in a testbed of its own.
func (p *OutagePlan) proxy(ctx context.Context, name string, repeat int, peers testbed.Peers) (err error) {
	missing := p.missing(name, repeat)
	if len(missing) == 0 {
		return nil
	}
	kind, err := testbed.FindKind(name)
	if err != nil {
		return err
	}
	binary, version, err := kind.Obtain(ctx, p.Programs, p.Dir)
	if err != nil {
		return err
	}
	p.Results.Versions[name] = version
	dir := filepath.Join(p.Dir, fmt.Sprintf("%s-%d", filepath.Base(kind.Name), repeat))
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	tb, err := testbed.Open(ctx, kind, binary, peers, outageSlow, dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, tb.Close()) }()
	if err := tb.SetMinSyncPeriod(ctx, outageSyncPeriod); err != nil {
		return err
	}
	if p.Results.Settings.Explain {
		if err := tb.Record(ctx, p.Unexplained); err != nil {
			return err
		}
	}
	b, err := newOutageBed(ctx, tb, p.Results.Settings)
	if err != nil {
		return err
	}
	return p.scenarios(ctx, b, missing, repeat)
}

// outageSlow is how many times as long changes may take: the node whose link was cut finds its API server late.
const outageSlow testbed.Slow = 3

// outageSyncPeriod is kube-proxy's default, for all proxies.
const outageSyncPeriod = time.Second

// scenarios runs those that share the testbed first, and then the others one by one.
func (p *OutagePlan) scenarios(ctx context.Context, b *outageBed, all []*scenario, repeat int) error {
	limit := make(chan struct{}, max(1, p.Parallel))
	if p.Results.Settings.Explain { // counters of what the kernel drops are those of a pod, and not of a scenario
		limit = make(chan struct{}, 1)
	}
	errs := make([]error, len(all))
	var wait sync.WaitGroup
	for i, s := range all {
		if !s.alone {
			wait.Go(func() {
				limit <- struct{}{}
				defer func() { <-limit }()
				errs[i] = p.cell(ctx, b, s, repeat)
			})
		}
	}
	wait.Wait()
	for i, s := range all {
		if s.alone {
			errs[i] = p.cell(ctx, b, s, repeat)
		}
	}
	return errors.Join(slices.DeleteFunc(errs, func(err error) bool { return err == nil })...)
}

// cell measures one scenario and saves the result.
func (p *OutagePlan) cell(ctx context.Context, b *outageBed, s *scenario, repeat int) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	cell := &results.Outage{Run: results.Run{Scenario: s.name, Proxy: b.Kind.Name, Repeat: repeat}, Load: Load()}
	cell.Began = time.Now().UTC().Truncate(time.Second)
	unexpected, err := b.play(ctx, s, cell)
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", s.name, err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.Results.Cells = append(p.Results.Cells, cell)
	p.Say(strings.Join(append([]string{cell.String()}, unexpected...), "\n"))
	return p.Save()
}
