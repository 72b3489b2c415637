package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/verdict-proxy/verdict/conformance/benchmark"
	"github.com/verdict-proxy/verdict/conformance/benchmark/results"
	"github.com/verdict-proxy/verdict/conformance/testbed"
)

// compareOptions are what the command line of benchmark compare says.
type compareOptions struct {
	sizes   []string
	proxies []string
	limit   time.Duration
	docs    bool
	source  string
}

var (
	compareSizes   = []string{"1000x10", "10000x10", "30000x10"}
	compareProxies = []string{
		"kube-proxy-nftables", "kube-proxy-iptables", "kube-proxy-1.36-nftables", "kube-proxy-1.36-iptables",
	}
)

func newCompareCommand() *cobra.Command {
	o := &compareOptions{}
	cmd := &cobra.Command{
		Use:   "compare",
		Short: `Run "verdict compare" beside real kube-proxies in large clusters`,
		Long: `Compare fills a real control plane with Services of many kinds, has a kube-proxy program all of them
on a node of its own, and then runs "verdict compare" on that node, as before a migration. It prints
a table: how many classes of packets there are, which differ and why, and what the command took.
docs/COMPARE.md says what the classes are.

It needs what the benchmark needs. The exit status is 1 if a difference has no known reason.`,
		Example: `  benchmark compare --size 1000x10
  benchmark compare --size 30000x10 --proxy kube-proxy-nftables --limit 30m`,
		Args: cobra.NoArgs, SilenceUsage: true, SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.main(cmd.Context(), cmd.OutOrStdout()) },
	}
	f := cmd.Flags()
	f.StringArrayVar(&o.sizes, "size", compareSizes, "Services x endpoints of each; may be repeated")
	f.StringArrayVar(&o.proxies, "proxy", compareProxies, "a kube-proxy; may be repeated")
	f.DurationVar(&o.limit, "limit", 15*time.Minute, "how long a proxy may take to program all Services")
	f.BoolVar(&o.docs, "docs", false, "also write the table into docs/evidence/TEST-RUNS.md")
	f.StringVar(&o.source, "source", "", "the directory of Verdict's sources; empty means that of the working directory")
	return cmd
}

func (o *compareOptions) main(ctx context.Context, out io.Writer) (err error) {
	if o.source, err = testbed.Sources(o.source); err != nil {
		return err
	}
	p := newProgress(os.Stderr, true)
	plan := &benchmark.ComparePlan{Limit: o.limit, Say: p.say, Progress: p.show}
	for _, text := range o.sizes {
		size, err := results.ParseSize(text)
		if err != nil {
			return fmt.Errorf("--size: %w", err)
		}
		plan.Sizes = append(plan.Sizes, size)
	}
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	var all []*results.Comparison
	err = testbed.InMemory("compare-", func(dir string) error {
		plan.Dir = dir
		if err := o.prepare(ctx, plan); err != nil {
			return err
		}
		all, err = plan.Run(ctx)
		return err
	})
	p.show("")
	return errors.Join(err, o.show(out, all))
}

// prepare gets the programs ready.
func (o *compareOptions) prepare(ctx context.Context, plan *benchmark.ComparePlan) (err error) {
	if plan.Programs, err = benchmark.Build(ctx, o.source, plan.Dir, o.proxies); err != nil {
		return err
	}
	for _, name := range o.proxies {
		k, err := benchmark.FindKind(name)
		if err != nil {
			return err
		}
		if _, err := k.Obtain(ctx, plan.Programs); err != nil {
			return err
		}
		plan.Kinds = append(plan.Kinds, k)
	}
	return nil
}

// show prints the table, and fails if a difference has no reason.
func (o *compareOptions) show(out io.Writer, all []*results.Comparison) error {
	var table strings.Builder
	if err := results.WriteComparisons(&table, all); err != nil {
		return err
	}
	if o.docs {
		document := filepath.Join(o.source, "docs", "evidence", "TEST-RUNS.md")
		if err := results.UpdateFile(document, "compare", table.String()); err != nil {
			return err
		}
	}
	if _, err := fmt.Fprintf(out, "\n%s\n", table.String()); err != nil {
		return err
	}
	var errs []error
	for _, c := range all {
		if err := c.Unexplained(); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
