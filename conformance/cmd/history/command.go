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

	"github.com/verdict-proxy/verdict/conformance/benchmark/results"
	"github.com/verdict-proxy/verdict/conformance/history"
	"github.com/verdict-proxy/verdict/conformance/history/faulty"
	"github.com/verdict-proxy/verdict/conformance/history/recorder"
	"github.com/verdict-proxy/verdict/conformance/testbed"
)

// errWrong says that a history holds a violation, which has been printed.
var errWrong = errors.New("a history holds a violation")

// options are what the command line says.
type options struct {
	proxies  []string
	run      string
	repeat   int
	length   time.Duration
	look     time.Duration
	rate     float64
	seed     uint64
	bound    time.Duration
	minSync  time.Duration
	out      string
	explain  bool
	fresh    bool
	render   bool
	docs     bool
	source   string
	programs string
}

func newCommand() *cobra.Command {
	o := &options{}
	cmd := &cobra.Command{
		Use:   "history",
		Short: "Record what Service proxies make of changes, and check how stale they are",
		Long: `History changes Services in the testbed of the conformance suite while clients connect and proxies or the
API server fail. It writes down what was sent, acknowledged and seen, and checks that afterwards.
docs/evidence/HISTORY.md explains the scenarios, the format and the rules.

Histories are saved in OUT/histories, results after each in OUT/history.json, and an interrupted run
continues there. In the end, and with --render alone, it writes OUT/history.md and a picture beside it.

The exit status is 1 if --bound is given and a history holds a violation, or one was late, and 2 if
something could not run, or if with --explain a failure has no known cause.`,
		Example: `  history --run 'churn|killed' --proxy verdict --repeat 1
  history check bin/history/histories/churn.verdict.1.jsonl.gz --bound 1s`,
		Args: cobra.NoArgs, SilenceUsage: true, SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.main(cmd.Context(), cmd.OutOrStdout()) },
	}
	f := cmd.Flags()
	f.StringArrayVar(&o.proxies, "proxy", []string{"verdict", "kube-proxy-nftables", "kube-proxy-iptables"},
		"a proxy, as the conformance suite names it, or a file; may be repeated")
	f.StringVar(&o.run, "run", "", "only scenarios that match this expression: "+strings.Join(recorder.Names(), ", "))
	f.IntVar(&o.repeat, "repeat", 3, "how often each is recorded")
	f.DurationVar(&o.length, "length", 20*time.Second, "how long Services change")
	f.DurationVar(&o.look, "look", 4*time.Second, "how long clients connect when everything is at rest")
	f.Float64Var(&o.rate, "rate", 20, "how many connections a second each of 6 clients opens to each Service")
	f.Uint64Var(&o.seed, "seed", 1, "decides what is changed, and after which pauses")
	f.DurationVar(&o.bound, "bound", 0, "how stale a connection may be beyond faults; 0 only measures")
	f.DurationVar(&o.minSync, "min-sync-period", 0, "the proxies' minSyncPeriod; at 0 each has its own, which is 1 s in "+
		"kube-proxy")
	f.StringVar(&o.out, "out", "", "a directory for histories, results, tables and the picture (default bin/history)")
	f.BoolVar(&o.explain, "explain", false, "record why connections were refused or had no answer, print causes that no "+
		"scenario expects, and fail if there is none; it takes processor time from what is measured")
	f.BoolVar(&o.fresh, "fresh", false, "begin anew, whatever results there are")
	f.BoolVar(&o.render, "render", false, "record nothing: only write tables and the picture of the results there are")
	f.BoolVar(&o.docs, "docs", false, "also write tables and the picture into docs/evidence/HISTORY.md and docs/images")
	f.StringVar(&o.source, "source", "", "the directory of Verdict's sources; empty means that of the working directory")
	f.StringVar(&o.programs, "programs", "", "take verdict and the peers, already built, from this directory")
	cmd.AddCommand(newCheckCommand(), newFaultyCommand())
	return cmd
}

// newCheckCommand judges files that are there.
func newCheckCommand() *cobra.Command {
	var bound time.Duration
	cmd := &cobra.Command{
		Use: "check FILE...", Short: "Check recorded histories", Args: cobra.MinimumNArgs(1),
		SilenceUsage: true, SilenceErrors: true,
		RunE: func(cmd *cobra.Command, files []string) error {
			wrong := false
			for _, path := range files {
				h, err := history.ReadFile(path)
				if err != nil {
					return err
				}
				r := history.Check(h, history.Options{Bound: bound})
				wrong = wrong || !r.OK()
				fmt.Fprintf(cmd.OutOrStdout(), "%s\n%s", path, r)
			}
			if wrong {
				return errWrong
			}
			return nil
		},
	}
	cmd.Flags().DurationVar(&bound, "bound", 0, "how stale a connection may be beyond faults; 0 only measures")
	return cmd
}

// newFaultyCommand is a wrong proxy, for conformance/testdata.
func newFaultyCommand() *cobra.Command {
	var o faulty.Options
	cmd := &cobra.Command{
		Use: "faulty [flags] -- PROGRAM ARGUMENT...", Short: "Run a proxy that hears of changes late, or not at all",
		Hidden: true, Args: cobra.MinimumNArgs(1), SilenceUsage: true, SilenceErrors: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			o.Command = args
			return faulty.Run(cmd.Context(), o)
		},
	}
	f := cmd.Flags()
	f.DurationVar(&o.Delay, "delay", 0, "how late changes of EndpointSlices arrive")
	f.StringVar(&o.Lose, "lose", "", "after the first changes of EndpointSlices with this suffix, the others are lost")
	f.StringVar(&o.Kubeconfig, "kubeconfig", "", "how to reach the API server")
	return cmd
}

func (o *options) main(ctx context.Context, out io.Writer) error {
	pattern, err := regexp.Compile(o.run)
	if err != nil {
		return fmt.Errorf("--run: %w", err)
	}
	if o.source, err = testbed.Sources(o.source); err != nil {
		return err
	}
	if o.out == "" {
		o.out = filepath.Join(o.source, "bin", "history")
	}
	found, err := o.results()
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	if !o.render {
		err = o.measure(ctx, found, pattern)
	}
	if err = errors.Join(err, o.show(out, found)); err != nil {
		return err
	}
	if o.bound > 0 && found.Wrong() {
		return errWrong
	}
	return nil
}

func (o *options) file(name string) string { return filepath.Join(o.out, name) }

// results gives those that are there, or new ones.
func (o *options) results() (*results.Histories, error) {
	settings := results.HistorySettings{
		Length: o.length.Seconds(), Look: o.look.Seconds(), Rate: o.rate, Seed: o.seed, Bound: o.bound.Seconds(),
		MinSync: o.minSync.Seconds(), Explain: o.explain,
	}
	return results.OpenHistories(o.file("history.json"), settings, results.Earlier{Fresh: o.fresh, Render: o.render})
}

// measure runs the plan, with a directory in memory for what nobody needs afterwards.
func (o *options) measure(ctx context.Context, found *results.Histories, pattern *regexp.Regexp) error {
	return testbed.InMemory("history-", func(dir string) error {
		plan := &recorder.Plan{
			Proxies: o.proxies, Repeats: o.repeat, Run: pattern, Dir: dir, Histories: o.file("histories"), Results: found,
			Unexplained: o.file("unexplained"),
			Programs:    testbed.Programs{Root: o.source, Ready: o.programs},
			Save:        func() error { return found.WriteFile(o.file("history.json")) },
			Say:         func(text string) { fmt.Fprintln(os.Stderr, text) },
		}
		return plan.Measure(ctx)
	})
}

// show writes tables and the picture, and prints the tables.
func (o *options) show(out io.Writer, found *results.Histories) error {
	if len(found.Cells) == 0 {
		return nil
	}
	var tables strings.Builder
	if err := found.WriteTables(&tables, recorder.Names()); err != nil {
		return err
	}
	p := results.Publication{
		Dir: o.out, Tables: tables.String(), File: "history.md",
		Said: "history.json, history.md, the picture and the histories",
		Plot: func() error { _, err := found.WritePlot(o.out, recorder.Names()); return err },
	}
	if o.docs {
		p.Document = func() error { return o.writeDocs(found, p.Tables) }
	}
	return p.Write(out)
}

// writeDocs puts tables and the picture where the documentation has them.
func (o *options) writeDocs(found *results.Histories, tables string) error {
	name, err := found.WritePlot(filepath.Join(o.source, "docs", "images"), recorder.Names())
	if err != nil {
		return err
	}
	tables = fmt.Sprintf("![staleness by scenario](../images/%s)\n\n%s", name, tables)
	return results.UpdateFile(filepath.Join(o.source, "docs", "evidence", "HISTORY.md"), "history", tables)
}
