package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/verdict-proxy/verdict/conformance/benchmark"
	"github.com/verdict-proxy/verdict/conformance/benchmark/results"
	"github.com/verdict-proxy/verdict/conformance/testbed"
)

// outageOptions are what the command line of benchmark outages says.
type outageOptions struct {
	quick       bool
	proxies     []string
	run         string
	repeat      int
	parallel    int
	length      time.Duration
	connections int
	rate        float64
	out         string
	explain     bool
	fresh       bool
	render      bool
	docs        bool
	source      string
	programs    string
}

// The ordinary run, and --quick. How long a scenario takes decides about its other times.
var (
	fullOutage  = results.OutageSettings{Rate: 50, Held: 1000, Connections: 1000000, ManyRate: 500}
	quickOutage = results.OutageSettings{Rate: 50, Held: 200, ManyRate: 100}

	outageProxies = []string{"verdict", "kube-proxy-nftables"}
)

const (
	fullOutageLength  = time.Minute
	quickOutageLength = 20 * time.Second
)

func newOutagesCommand() *cobra.Command {
	o := &outageOptions{}
	cmd := &cobra.Command{
		Use:   "outages",
		Short: "Measure what clients see when endpoints are dead, refuse or go",
		Long: `Outages opens connections to a Service all the time while something happens to its endpoints, with one
proxy after the other in the testbed of the conformance suite. It counts connections that were opened
and that failed, how long each client waited, and when clients of held connections learnt that these
were lost. docs/evidence/BENCHMARKS.md explains the scenarios.

Results are saved after each scenario in OUT/outages.json, and an interrupted run continues there. In
the end, and with --render alone, it writes OUT/outages.md and a picture beside it.`,
		Example: `  benchmark outages --quick
  benchmark outages --run 'rollout|node-cut' --proxy verdict --repeat 1`,
		Args: cobra.NoArgs, SilenceUsage: true, SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.main(cmd.Context(), cmd.OutOrStdout()) },
	}
	f := cmd.Flags()
	f.BoolVar(&o.quick, "quick", false, "a first picture in ten minutes: short scenarios, few connections, once")
	f.StringArrayVar(&o.proxies, "proxy", outageProxies, "a proxy, as the conformance suite names it; may be repeated")
	f.StringVar(&o.run, "run", "", "only scenarios that match this expression: "+
		strings.Join(benchmark.OutageScenarios(), ", "))
	f.IntVar(&o.repeat, "repeat", 0, fmt.Sprintf("how often each is measured (default %d, with --quick 1)", fullRepeats))
	f.DurationVar(&o.length, "length", 0, fmt.Sprintf("how long clients connect in each scenario; after a quarter of it "+
		"the harm is done, and after as long a client gives up (default %v, with --quick %v)",
		fullOutageLength, quickOutageLength))
	f.IntVar(&o.parallel, "parallel", 10, "how many scenarios run at the same time, of those that do not disturb others")
	f.IntVar(&o.connections, "connections", 0, fmt.Sprintf(
		"how many connections are opened where wrong ejections are counted (default %d, with --quick some thousand)",
		fullOutage.Connections))
	f.Float64Var(&o.rate, "rate", 0, fmt.Sprintf("how many of these are opened a second (default %v, with --quick %v)",
		fullOutage.ManyRate, quickOutage.ManyRate))
	f.StringVar(&o.out, "out", "", "a directory for results, tables and the picture (default bin/outages, with --quick "+
		"bin/outages-quick)")
	f.BoolVar(&o.explain, "explain", false, "record why connections fail, print causes that a scenario does not expect, "+
		"and fail if there is none; scenarios run one by one, and it takes processor time from what is measured, so "+
		"such results are for no table")
	f.BoolVar(&o.fresh, "fresh", false, "begin anew, whatever results there are")
	f.BoolVar(&o.render, "render", false, "measure nothing: only write tables and the picture of the results there are")
	f.BoolVar(&o.docs, "docs", false, "also write tables and the picture into docs/evidence/BENCHMARKS.md and docs/images")
	f.StringVar(&o.source, "source", "", "the directory of Verdict's sources; empty means that of the working directory")
	f.StringVar(&o.programs, "programs", "", "take verdict and the peers, already built, from this directory")
	return cmd
}

// settings fills in what the command line left open.
func (o *outageOptions) settings() results.OutageSettings {
	s, repeat, length, out := fullOutage, fullRepeats, fullOutageLength, "outages"
	if o.quick {
		s, repeat, length, out = quickOutage, 1, quickOutageLength, "outages-quick"
	}
	if o.length > 0 {
		length = o.length
	}
	s.Length = length.Seconds()
	s.Before, s.Timeout, s.Drain = s.Length/4, s.Length/4, s.Length*5/6
	if o.repeat == 0 {
		o.repeat = repeat
	}
	if o.out == "" {
		o.out = filepath.Join(o.source, "bin", out)
	}
	if o.connections > 0 {
		s.Connections = o.connections
	}
	if o.rate > 0 {
		s.ManyRate = o.rate
	}
	s.Explain = o.explain
	return s
}

func (o *outageOptions) main(ctx context.Context, out io.Writer) error {
	pattern, err := regexp.Compile(o.run)
	if err != nil {
		return fmt.Errorf("--run: %w", err)
	}
	if o.source, err = testbed.Sources(o.source); err != nil {
		return err
	}
	settings := o.settings()
	found, err := o.results(settings)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	if !o.render {
		err = o.measure(ctx, found, pattern)
	}
	return errors.Join(err, o.show(out, found))
}

func (o *outageOptions) file(name string) string { return filepath.Join(o.out, name) }

// results gives those that are there, or new ones.
func (o *outageOptions) results(settings results.OutageSettings) (*results.Outages, error) {
	return results.OpenOutages(o.file("outages.json"), settings, results.Earlier{Fresh: o.fresh, Render: o.render})
}

// measure runs the plan, with a directory in memory for what nobody needs afterwards.
func (o *outageOptions) measure(ctx context.Context, found *results.Outages, pattern *regexp.Regexp) error {
	return testbed.InMemory("outages-", func(dir string) error {
		plan := &benchmark.OutagePlan{
			Proxies: o.proxies, Repeats: o.repeat, Run: pattern, Parallel: o.parallel, Dir: dir, Results: found,
			Unexplained: o.file("unexplained"),
			Programs:    testbed.Programs{Root: o.source, Ready: o.programs},
			Save:        func() error { return found.WriteFile(o.file("outages.json")) },
			Say:         newProgress(os.Stderr, true).say,
		}
		return plan.Measure(ctx)
	})
}

// show writes tables and the picture, and prints the tables.
func (o *outageOptions) show(out io.Writer, found *results.Outages) error {
	if len(found.Cells) == 0 {
		return nil
	}
	var tables strings.Builder
	if err := found.WriteTables(&tables, benchmark.OutageScenarios()); err != nil {
		return err
	}
	p := results.Publication{
		Dir: o.out, Tables: tables.String(), File: "outages.md", Said: "outages.json, outages.md and the picture",
		Plot: func() error { _, err := found.WritePlot(o.out); return err },
	}
	if o.docs {
		p.Document = func() error { return o.writeDocs(found, p.Tables) }
	}
	return p.Write(out)
}

// writeDocs puts tables and the picture where the documentation has them.
func (o *outageOptions) writeDocs(found *results.Outages, tables string) error {
	name, err := found.WritePlot(filepath.Join(o.source, "docs", "images"))
	if err != nil {
		return err
	}
	if name != "" {
		tables = fmt.Sprintf("![connect times](../images/%s)\n\n%s", name, tables)
	}
	return results.UpdateFile(filepath.Join(o.source, "docs", "evidence", "BENCHMARKS.md"), "outages", tables)
}
