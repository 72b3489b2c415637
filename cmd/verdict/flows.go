package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/verdict-proxy/verdict/internal/answers/inspect"
	"github.com/verdict-proxy/verdict/internal/answers/records"
	"github.com/verdict-proxy/verdict/internal/answers/servicemap"
	"github.com/verdict-proxy/verdict/internal/proxy/flows"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
)

// flowsQuestion are the flags that verdict flows and kubectl verdict flows have in common.
type flowsQuestion struct {
	records.Question
	json  bool
	price float64
}

func (o *flowsQuestion) addFlags(f *pflag.FlagSet, limit int) {
	f.BoolVarP(&o.Follow, "follow", "f", false, "go on, with each connection that ends")
	f.BoolVar(&o.Open, "open", false, "with --follow, also connections that begin")
	f.DurationVar(&o.Since, "since", 0, "how far back (default 10m; with --zones 1h, which is as far as sums go)")
	f.StringVar(&o.From, "from", "", "only clients of this pod or workload, NAMESPACE/NAME, or address")
	f.BoolVar(&o.Failed, "failed", false, "only connections that failed")
	f.IntVar(&o.Limit, "limit", limit, "only so many records of a node, the newest; at most "+fmt.Sprint(flows.MaxLines))
	f.BoolVar(&o.Zones, "zones", false, "sum up what crossed zones, by Service and pair of zones")
	f.Float64Var(&o.price, "price", 0, "with --zones, what a GB (10^9 bytes) between zones costs, as 0.02")
	addJSON(f, &o.json, "print JSON lines (docs/FLOWS.md); with --zones one object")
}

// check completes the question, and refuses what makes no sense.
func (o *flowsQuestion) check() error {
	switch {
	case o.Zones && (o.Follow || o.Failed || o.From != ""):
		return errors.New("--zones excludes --follow, --failed and --from")
	case o.Open && !o.Follow:
		return errors.New("--open needs --follow")
	case o.price != 0 && !o.Zones:
		return errors.New("--price needs --zones")
	case o.price < 0:
		return fmt.Errorf("--price: %g is negative", o.price)
	case o.Since < 0:
		return fmt.Errorf("--since: %s is negative", o.Since)
	case o.Limit < 1 || o.Limit > flows.MaxLines:
		return fmt.Errorf("--limit: %d is not within 1 to %d", o.Limit, flows.MaxLines)
	case o.Since == 0 && o.Zones:
		o.Since = flows.Hour * time.Minute
	case o.Since == 0:
		o.Since = 10 * time.Minute
	}
	if o.Zones {
		o.Limit = 0
	}
	return nil
}

// flowsOptions are what the command line of flows says.
type flowsOptions struct {
	flowsQuestion
	metrics, config string
	untilEOF, asMap bool
}

func newFlows() *cobra.Command {
	var o flowsOptions
	cmd := &cobra.Command{
		Use:   "flows [SERVICE]",
		Short: "Show who connected to Services on this node, and how it ended",
		Long: `Flows asks the proxy on this node for its records of connections to Services, or to one, if its
configuration has records: on (docs/FLOWS.md). A line is a connection: when it ended, its client, the
Service and its port, the endpoint, bytes in both directions, how long it lived, and how it ended.
The last line says what is missing.

It finds the proxy's metrics server at --metrics-bind-address, else at that of --config, else at
127.0.0.1:10249. It needs no privileges. "kubectl verdict flows" asks all nodes.`,
		Example: `  verdict flows shop/cart --failed --since 1h
  verdict flows --follow --from shop/web-0
  verdict flows --zones --price 0.02`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error { return o.run(cmd, args) },
	}
	f := cmd.Flags()
	o.addFlags(f, flows.MaxLines)
	f.StringVar(&o.metrics, "metrics-bind-address", "", "address of the proxy's metrics server")
	f.StringVar(&o.config, "config", "", "the proxy's configuration file, which has that address")
	f.BoolVar(&o.untilEOF, "until-eof", false, "end when standard input does")
	f.BoolVar(&o.asMap, "map", false, "print this node's part of the dashboard's service map, as JSON")
	_ = f.MarkHidden("map")
	_ = f.MarkHidden("until-eof") // kubectl verdict's, whose end the node would not notice otherwise
	return cmd
}

func (o *flowsOptions) run(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		if o.Service = args[0]; strings.Count(o.Service, "/") != 1 {
			return fmt.Errorf("%.100q is not NAMESPACE/NAME of a Service", o.Service)
		}
	}
	if err := o.check(); err != nil {
		return err
	}
	addr, err := metricsAddress(o.metrics, o.config)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(cmd.Context())
	defer cancel()
	if !o.Follow {
		ctx, cancel = context.WithTimeout(ctx, 15*time.Second)
		defer cancel()
	}
	if o.untilEOF {
		go func() {
			_, _ = io.Copy(io.Discard, cmd.InOrStdin())
			cancel()
		}()
	}
	p := terminal.NewPrinter(cmd.OutOrStdout())
	switch {
	case o.asMap:
		m, err := servicemap.Read(ctx, addr, o.Since)
		if err != nil {
			return err
		}
		return json.NewEncoder(p).Encode(m)
	case o.Zones:
		return o.printZones(ctx, cmd, addr)
	case o.json:
		return records.Ask(ctx, addr, &o.Question, func(line []byte) error {
			_, err := fmt.Fprintf(cmd.OutOrStdout(), "%s\n", line)
			return err
		})
	}
	return o.print(ctx, p, addr)
}

// print prints a table, and what is missing: below, or with --follow each time that changes.
func (o *flowsOptions) print(ctx context.Context, p *terminal.Printer, addr netip.AddrPort) error {
	table := records.Table{Printer: p}
	var list []*flows.Record // in the order in which the node learned of them
	var answer *flows.Answer
	err := records.Ask(ctx, addr, &o.Question, func(text []byte) error {
		line, err := records.Parse(text)
		switch {
		case err != nil:
			return err
		case !o.Follow && line.Record != nil:
			list = append(list, line.Record)
		case line.Record != nil:
			table.Print("", line.Record)
		case !o.Follow:
			answer = line.Answer
		case line.Answer != nil:
			records.PrintLosses(p, line.Answer)
		}
		return p.Err()
	})
	slices.SortStableFunc(list, func(a, b *flows.Record) int { return a.Time.Compare(b.Time) })
	for _, r := range list {
		table.Print("", r)
	}
	if answer != nil {
		records.PrintLosses(p, answer)
	}
	return errors.Join(err, p.Err())
}

// printZones prints what crossed zones.
func (o *flowsOptions) printZones(ctx context.Context, cmd *cobra.Command, addr netip.AddrPort) error {
	sum := records.NewZoneSum()
	err := records.Ask(ctx, addr, &o.Question, func(text []byte) error {
		line, err := records.Parse(text)
		switch {
		case err != nil:
			return err
		case line.Answer != nil:
			sum.AddNode(line.Answer)
		case line.Sum != nil:
			sum.AddSum(line.Sum)
		}
		return nil
	})
	if err != nil {
		return err
	}
	z := sum.Zones(o.price)
	return inspect.Show(cmd.OutOrStdout(), o.json, z, func(p *terminal.Printer) { z.Print(p, o.price) })
}
