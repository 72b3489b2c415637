package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/signal"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/verdict-proxy/verdict/conformance/benchmark"
	"github.com/verdict-proxy/verdict/conformance/benchmark/results"
	"github.com/verdict-proxy/verdict/conformance/testbed"
)

// options are what the command line says.
type options struct {
	quick    bool
	sizes    []string
	proxies  []string
	repeat   int
	budget   time.Duration
	out      string
	fresh    bool
	render   bool
	docs     bool
	keep     bool
	guest    string
	source   string
	programs map[string]string
	cells    bool
	giant    bool
	paths    bool

	settings results.Settings
}

// The ordinary run, and --quick.
var (
	fullSettings = results.Settings{
		// Three repeats make it 36 changes and 45 s of each rate.
		Method: results.Method, StartLimit: 300, Changes: 12, ChangesLimit: 60, Rates: []float64{100, 1000}, ChurnTime: 15,
		DrainLimit: 60, GiantLimit: 60, Rounds: 8, TurnTime: 0.2,
	}
	quickSettings = results.Settings{
		Method: results.Method, StartLimit: 30, Changes: 5, ChangesLimit: 15, Rates: []float64{100, 1000}, ChurnTime: 5,
		DrainLimit: 10, GiantLimit: 30, Rounds: 8, TurnTime: 0.1,
	}
	fullSizes  = []string{"1000x10", "5000x10", "10000x10", "30000x10", "5000x50", "45000x1", "100000x10"}
	quickSizes = []string{"1000x10", "5000x10"}
	// An emulated API server takes 20 to 50 changes a second.
	guestRates = []float64{10, 100}
)

const (
	fullRepeats = 3
	fullBudget  = 4 * time.Hour
	quickBudget = 5 * time.Minute
)

func newCommand() *cobra.Command {
	o := &options{}
	cmd := &cobra.Command{
		Use:   "benchmark",
		Short: "Measure Service proxies in large clusters beside each other",
		Long: `Benchmark starts a real control plane, fills it with Services, and measures proxies on a node of
their own. It measures from outside, by connections that show when the node's kernel has applied a
write to the API server. docs/evidence/BENCHMARKS.md says what is measured, and what the figures do not say.

Results are saved after each proxy in OUT/results.json, and an interrupted run continues there. At
the end, and with --render alone, benchmark writes OUT/tables.md and plots beside it. The time of
--budget is kept; what does not fit is left for the next run. Every size is measured once before any
is measured twice.

The peers are built from Go modules, which takes some minutes the first time and is not part of the
budget. Benchmark needs root, nft and iptables, changes nothing on the machine, and leaves nothing
behind.`,
		Example: `  benchmark --quick
  benchmark --size 10000x10 --proxy verdict-nftables --proxy kube-proxy-nftables --repeat 1
  benchmark --paths --size 10000x10
  benchmark --guest 6.12 --size 1000x10`,
		Args: cobra.NoArgs, SilenceUsage: true, SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.main(cmd.Context(), cmd.OutOrStdout()) },
	}
	o.addFlags(cmd)
	cmd.AddCommand(newOutagesCommand(), newCompareCommand())
	return cmd
}

func (o *options) addFlags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.BoolVar(&o.quick, "quick", false, "a first picture in five minutes: small sizes, short times, once")
	f.StringArrayVar(&o.sizes, "size", nil, "Services x endpoints of each; may be repeated (default "+
		strings.Join(fullSizes, ", ")+")")
	f.StringArrayVar(&o.proxies, "proxy", nil, "a proxy: "+strings.Join(benchmark.KindNames(), ", ")+
		"; may be repeated (default "+strings.Join(benchmark.DefaultKinds(), ", ")+")")
	f.IntVar(&o.repeat, "repeat", 0, fmt.Sprintf("how often each is measured (default %d, with --quick 1)", fullRepeats))
	f.DurationVar(&o.budget, "budget", 0,
		fmt.Sprintf("how long it may take in all (default %v, with --quick %v)", fullBudget, quickBudget))
	f.StringVar(&o.out, "out", "", "a directory for results, tables and pictures (default bin/bench, with --quick "+
		"bin/bench-quick)")
	f.BoolVar(&o.fresh, "fresh", false, "begin anew, whatever results there are")
	f.BoolVar(&o.render, "render", false, "measure nothing: only write tables and pictures of the results there are")
	f.BoolVar(&o.docs, "docs", false, "also write tables and pictures into docs/evidence/BENCHMARKS.md, "+
		"docs/images and README.md")
	f.BoolVar(&o.giant, "giant", false, "leave out changes: what is measured last, a giant Service in 1,000 at most, "+
		"comes soon")
	f.BoolVar(&o.paths, "paths", false, "measure only what packets cost, by turns on nodes beside each other")
	f.BoolVar(&o.keep, "keep", false, "keep logs and configuration of proxies and control plane, and say where")
	f.StringVar(&o.guest, "guest", "", "measure in a guest with this kernel, which has IPVS: 6.1, 6.12, ...; slow, so "+
		"its figures compare only with each other")
	f.StringVar(&o.source, "source", "", "the directory of Verdict's sources; empty means that of the working directory")
	f.StringToStringVar(&o.programs, "program", nil, "a program that is there already, as NAME=PATH; in a guest, "+
		"where nothing can be built")
	f.BoolVar(&o.cells, "cells", false, "print each result as a line of JSON, for the machine around a guest")
	for _, name := range []string{"program", "cells"} {
		if err := f.MarkHidden(name); err != nil {
			panic(err) // the flag was just made
		}
	}
}

// defaults fills in what the command line left open.
func (o *options) defaults() {
	o.settings = fullSettings
	sizes, repeat, budget, out := fullSizes, fullRepeats, fullBudget, "bench"
	if o.quick {
		o.settings, sizes, repeat, budget, out = quickSettings, quickSizes, 1, quickBudget, "bench-quick"
	}
	if o.guest != "" || o.cells {
		o.settings.Rates = guestRates
	}
	if o.giant {
		o.settings.Changes, o.settings.Rates = 0, nil
	}
	proxies := benchmark.DefaultKinds()
	if o.guest != "" {
		out, proxies, sizes = out+"-guest-"+o.guest, benchmark.GuestKinds(), quickSizes[:1]
	}
	if len(o.sizes) == 0 {
		o.sizes = sizes
	}
	if len(o.proxies) == 0 {
		o.proxies = proxies
	}
	if o.repeat == 0 {
		o.repeat = repeat
	}
	if o.budget == 0 {
		o.budget = budget
	}
	if o.out == "" {
		o.out = filepath.Join(o.source, "bin", out)
	}
}

func (o *options) main(ctx context.Context, out io.Writer) error {
	var err error
	if o.source, err = testbed.Sources(o.source); err != nil && o.programs == nil {
		return err
	}
	o.defaults()
	found, err := o.results()
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	switch {
	case o.render:
		err = errors.Join(err, o.show(out, found))
	case o.guest != "":
		err = errors.Join(o.inGuest(ctx, found), o.show(out, found))
	default:
		err = o.inside(ctx, found)
		if !o.cells {
			err = errors.Join(err, o.show(out, found))
		}
	}
	return err
}

func (o *options) file(name string) string { return filepath.Join(o.out, name) }

// results gives those that are there, or new ones.
func (o *options) results() (*results.Results, error) {
	if o.fresh && !o.render {
		return &results.Results{Settings: o.settings}, nil
	}
	r, err := results.ReadFile(o.file("results.json"))
	switch {
	case err != nil:
		return nil, err
	case r == nil && o.render:
		return nil, fmt.Errorf("--render: there is no %s", o.file("results.json"))
	case r == nil:
		return &results.Results{Settings: o.settings}, nil
	case !o.render && !reflect.DeepEqual(r.Settings, o.settings):
		return nil, fmt.Errorf("%s was measured with other settings, or in another way; --fresh begins anew, --out "+
			"leaves it alone", o.file("results.json"))
	case !o.render: // what failed is tried again
		r.Cells = slices.DeleteFunc(r.Cells, func(c *results.Cell) bool { return c.Error != "" })
		r.Paths = slices.DeleteFunc(r.Paths, func(p *results.Paths) bool { return p.Error != "" })
	}
	return r, nil
}

// inside runs with a directory for all files, until the end or a signal. Unless they are to be kept, it is in memory.
func (o *options) inside(ctx context.Context, found *results.Results) error {
	plan := &benchmark.Plan{Repeats: o.repeat, Budget: o.budget, Results: found, Keep: o.keep, OnlyPaths: o.paths}
	for _, text := range o.sizes {
		size, err := results.ParseSize(text)
		if err != nil {
			return fmt.Errorf("--size: %w", err)
		}
		plan.Sizes = append(plan.Sizes, size)
	}
	in := testbed.InMemory
	if o.keep {
		in = testbed.OnDisk
	}
	return in("bench-", func(dir string) error {
		plan.Dir = dir
		return o.run(ctx, plan)
	})
}

// run gets programs and proxies ready, and measures.
func (o *options) run(ctx context.Context, plan *benchmark.Plan) (err error) {
	if plan.Programs = benchmark.Programs(o.programs); plan.Programs == nil {
		if plan.Programs, err = benchmark.Build(ctx, o.source, plan.Dir, o.proxies); err != nil {
			return err
		}
	}
	if o.cells {
		if err := loadIPVS(ctx); err != nil {
			return err
		}
	}
	if err := o.kinds(ctx, plan); err != nil {
		return err
	}
	return o.measure(ctx, plan)
}

// kinds gets the proxies ready. One that is missing here is left out, and the results say why.
func (o *options) kinds(ctx context.Context, plan *benchmark.Plan) error {
	r := plan.Results
	versions := map[string]string{}
	r.LeftOut = map[string]string{}
	reasons := map[string]map[string]string{} // results of an earlier run keep theirs
	maps.Copy(reasons, r.Reasons)
	for _, name := range o.proxies {
		k, err := benchmark.FindKind(name)
		if err != nil {
			return err
		}
		versions[name], err = k.Obtain(ctx, plan.Programs)
		if errors.Is(err, benchmark.ErrMissing) {
			delete(versions, name)
			r.LeftOut[name] = err.Error()
			fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
			continue
		}
		if err != nil {
			return err
		}
		if old := r.Versions[name]; old != "" && old != versions[name] {
			return fmt.Errorf("%s holds results of %s %s, and this is %s; --fresh begins anew, --out leaves it alone",
				o.file("results.json"), name, old, versions[name])
		}
		plan.Kinds = append(plan.Kinds, k)
		if k.Reasons() != nil {
			reasons[name] = k.Reasons()
		}
	}
	if len(plan.Kinds) == 0 {
		return errors.New("no proxy is left")
	}
	if r.Versions == nil {
		r.Versions = map[string]string{}
	}
	maps.Copy(r.Versions, versions)
	if len(reasons) > 0 {
		r.Reasons = reasons
	}
	here, err := benchmark.ThisMachine()
	if err == nil && len(r.Cells)+len(r.Paths) > 0 && !reflect.DeepEqual(r.Machine, here) {
		return fmt.Errorf("%s holds results of another machine, %+v; --fresh begins anew, --out leaves it alone",
			o.file("results.json"), r.Machine)
	}
	r.Machine = here
	return err
}

// measure runs the plan. Broken off, it keeps what it has.
func (o *options) measure(ctx context.Context, plan *benchmark.Plan) error {
	p := newProgress(os.Stderr, !o.cells)
	plan.Say, plan.Progress = p.say, p.show
	saved := len(plan.Results.Cells)
	plan.Save = func() error {
		if !o.cells {
			return plan.Results.WriteFile(o.file("results.json"))
		}
		err := printCells(os.Stdout, plan.Results, saved)
		saved = len(plan.Results.Cells)
		return err
	}
	complete, err := plan.Run(ctx)
	p.show("")
	if err == nil && !complete {
		p.say(fmt.Sprintf("the %v of --budget are over; another run goes on here", o.budget))
	}
	return err
}

// show writes tables and pictures, and prints the tables.
func (o *options) show(out io.Writer, r *results.Results) error {
	if len(r.Cells)+len(r.Paths) == 0 {
		return nil
	}
	var tables strings.Builder
	if err := r.WriteTables(&tables); err != nil {
		return err
	}
	p := results.Publication{
		Dir: o.out, Tables: tables.String(), File: "tables.md", Said: "results.json, tables.md and pictures",
		Plot: func() error { _, err := r.WritePlots(o.out); return err },
	}
	if o.docs {
		p.Document = func() error { return o.writeDocs(r, p.Tables) }
	}
	return p.Write(out)
}

// writeDocs puts tables and pictures where the documentation has them. The README shows the results that have Cilium.
func (o *options) writeDocs(r *results.Results, tables string) error {
	document := filepath.Join(o.source, "docs", "evidence", "BENCHMARKS.md")
	if r.Machine.Guest {
		return results.UpdateFile(document, "guest", tables)
	}
	if slices.Contains(r.Proxies(), "cilium") {
		return errors.Join(
			results.UpdateFile(document, "cilium", tables),
			results.UpdateFile(filepath.Join(o.source, "README.md"), "table", r.ReadmeTable()),
		)
	}
	names, err := r.WritePlots(filepath.Join(o.source, "docs", "images"))
	if err != nil {
		return err
	}
	var pictures strings.Builder
	for _, n := range names {
		fmt.Fprintf(&pictures, "![%s](../images/%s)\n\n", strings.TrimSuffix(n, ".svg"), n)
	}
	return errors.Join(
		results.UpdateFile(document, "pictures", pictures.String()),
		results.UpdateFile(document, "tables", tables),
	)
}
