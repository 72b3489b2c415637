// Package run holds proxies to the suite: it writes the objects of cases, sends packets, and judges what came of them.
package run

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/verdict-proxy/verdict/conformance/cases"
	"github.com/verdict-proxy/verdict/conformance/report"
	"github.com/verdict-proxy/verdict/conformance/testbed"
)

// Options say what is run, and how.
type Options struct {
	Programs testbed.Programs
	// Dir is an empty directory for files of the run.
	Dir   string
	Kinds []*testbed.Kind
	// Cases and Stories are those that were chosen.
	Cases   []*cases.Case
	Stories []*cases.Story
	// Parallel is how many senders of the matrix, and how many stories, are at work at a time.
	Parallel, ParallelStories int
	// Slow is how many times as long as a story says a change may take.
	Slow testbed.Slow
	// Progress is told what happens; Verbose has it told of every failure at once.
	Progress *Progress
	Verbose  bool
	// Witness has the listings of the rules asked, too, of proxies whose rules are tables of nftables.
	Witness bool
}

// proxyRun is the run of one proxy.
type proxyRun struct {
	testbed  *testbed.Testbed
	progress *Progress
	parallel int
	verbose  bool

	mu      sync.Mutex
	name    string
	number  int
	results map[string]*report.Case
	listing func() string
	witness *testimonies // nil if the listings are not asked
	// obtain gives another proxy by its name.
	obtain func(ctx context.Context, name string) (*testbed.Kind, string, error)
}

// Run holds all proxies to the cases, one after the other. What was found until an error is in the answer in any case.
func Run(ctx context.Context, o Options) (*report.Run, error) {
	out := &report.Run{Begun: time.Now(), Host: hostWords()}
	results := make(map[string]*report.Case)
	var order []string
	for _, c := range o.Cases {
		order = append(order, c.Name)
	}
	for _, s := range o.Stories {
		order = append(order, s.FullName())
	}
	paths, err := o.Programs.Peers(ctx, "etcd", "kube-apiserver", "kube-controller-manager")
	if err != nil {
		return nil, err
	}
	peers := testbed.Peers{Etcd: paths[0], APIServer: paths[1], ControllerManager: paths[2]}
	o.obtainAll(ctx)
	var errs []error
	for _, kind := range o.Kinds {
		proxy, err := runProxy(ctx, o, kind, peers, results)
		out.Proxies = append(out.Proxies, proxy)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", kind.Name, err))
		}
		if ctx.Err() != nil {
			break
		}
	}
	for _, name := range order {
		if c := results[name]; c != nil {
			out.Cases = append(out.Cases, *c)
		}
	}
	out.Took = time.Since(out.Begun)
	return out, errors.Join(errs...)
}

// obtainAll has all programs built that will be needed: a build in the middle of a run takes the processors for minutes
// from what is measured. A program that cannot be had is an error for whoever needs it, later.
func (o *Options) obtainAll(ctx context.Context) {
	needed := slices.Clone(o.Kinds)
	for _, s := range o.Stories {
		for _, step := range s.Steps {
			if step.Proxy == nil || step.Proxy.As == "" ||
				slices.ContainsFunc(needed, func(k *testbed.Kind) bool { return k.Name == step.Proxy.As }) {
				continue
			}
			if kind, err := testbed.FindKind(step.Proxy.As); err == nil {
				needed = append(needed, kind)
			}
		}
	}
	for _, kind := range needed {
		_, _, _ = kind.Obtain(ctx, o.Programs, o.Dir)
	}
}

func runProxy(
	ctx context.Context,
	o Options,
	kind *testbed.Kind,
	peers testbed.Peers,
	results map[string]*report.Case,
) (p report.Proxy, err error) {
	p = report.Proxy{Name: kind.Name}
	began := time.Now()
	defer func() { p.Took = time.Since(began) }()
	binary, version, err := kind.Obtain(ctx, o.Programs, o.Dir)
	if err != nil {
		return p, err
	}
	p.Version = version
	o.Progress.begin(kind.Name, len(o.Cases)+len(o.Stories))
	dir := filepath.Join(o.Dir, filepath.Base(kind.Name))
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return p, err
	}
	b, err := testbed.Open(ctx, kind, binary, peers, o.Slow, dir)
	if err != nil {
		return p, err
	}
	defer func() { err = errors.Join(err, b.Close()) }()
	o.Progress.say("%s is in force on both nodes", version)
	r := &proxyRun{
		testbed:  b,
		name:     kind.Name,
		progress: o.Progress,
		parallel: o.Parallel,
		verbose:  o.Verbose,
		results:  results,
	}
	r.listing = sync.OnceValue(r.listAll)
	r.obtain = o.obtain
	if o.Witness && kind.Witness {
		r.witness = &testimonies{}
	}
	err = r.matrix(ctx, o.Cases)
	p.Witness = r.witness.report()
	if err != nil {
		return p, err
	}
	if err := b.Record(ctx, filepath.Join(dir, "failures")); err != nil {
		return p, err
	}
	return p, r.stories(ctx, o.Stories, o.ParallelStories)
}

// obtain returns a kind of proxy by its name, and its program.
func (o *Options) obtain(ctx context.Context, name string) (*testbed.Kind, string, error) {
	kind, err := testbed.FindKind(name)
	if err != nil {
		return nil, "", err
	}
	binary, _, err := kind.Obtain(ctx, o.Programs, o.Dir)
	return kind, binary, err
}

// nextNumber gives each Service a number for its external addresses.
func (r *proxyRun) nextNumber() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.number++
	return r.number
}

// done takes a result.
func (r *proxyRun) done(c *report.Case, result *report.Result) {
	r.mu.Lock()
	defer r.mu.Unlock()
	known := r.results[c.Name]
	if known == nil {
		known = c
		known.Results = make(map[string]*report.Result)
		r.results[c.Name] = known
	}
	known.Results[r.name] = result
	r.progress.done(c.Name, result, r.verbose)
}

// listAll lists what all proxies wrote.
func (r *proxyRun) listAll() string {
	var all strings.Builder
	for _, node := range r.testbed.Nodes() {
		all.WriteString(r.testbed.Proxies[node].Listing())
	}
	return all.String()
}

// logs returns what all proxies have logged.
func (r *proxyRun) logs() string {
	var all strings.Builder
	for _, node := range r.testbed.Nodes() {
		fmt.Fprintf(&all, "# %s: log\n%s", node, r.testbed.Proxies[node].Log())
	}
	return all.String()
}

// excerpt gives the lines of a listing that name a Service. The matrix does not change while it is looked at, so one
// listing does for all.
func (r *proxyRun) excerpt(name string) string { return grep(r.listing(), name) }

// grep gives the lines with a word, and the commands that the lines are from.
func grep(listing, word string) string {
	var some []string
	for line := range strings.Lines(listing) {
		if strings.HasPrefix(line, "# node-") || strings.Contains(line, word) {
			some = append(some, strings.TrimRight(line, "\n"))
		}
	}
	return strings.Join(some, "\n")
}
