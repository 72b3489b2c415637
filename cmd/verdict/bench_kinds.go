package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/verdict-proxy/verdict/internal/benchmark"
)

func newBenchCold() *cobra.Command {
	var b bench
	var rounds int
	cmd := &cobra.Command{
		Use:   "cold",
		Short: "Everything written into an empty kernel",
		Long: `Cold measures one transaction that brings a whole cluster into an empty kernel. Its steps:

  policy    what should happen to packets is decided from the objects
  compile   what the kernel should hold, and in what order it is written
  encode    that as netlink messages
  commit    the kernel takes them
  floor     the same bytes once more, into another empty namespace: the kernel alone

Each round begins with a collected heap and new namespaces. Medians of all rounds are reported. Memory and allocations are
those of one fill before them, the first of this process, which is not timed.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if rounds < 1 {
				return fmt.Errorf("--rounds: %d is not a positive number", rounds)
			}
			return b.run(cmd, func(ctx context.Context) (benchmark.Result, error) {
				return benchmark.Cold(ctx, b.Options, rounds)
			})
		},
	}
	b.add(cmd)
	cmd.Flags().IntVar(&rounds, "rounds", 5, "how often it is done")
	return cmd
}

func newBenchChange() *cobra.Command {
	var b bench
	var rounds int
	cmd := &cobra.Command{
		Use:   "change",
		Short: "One endpoint or Service changed in a full kernel",
		Long: `Change fills a kernel, then changes one thing at a time and measures from the event, an object in memory that differs,
to the kernel's acknowledgement. A round is one change of each kind, each of another Service by chance:

  endpoint replaced   an endpoint goes, another comes: its slot is written again
  endpoint added      a slot more, and the frontend goes to another chain
  endpoint removed    a slot less, and again another chain
  service added       with its endpoints
  service removed     the one added before

Own is what is not the kernel's: all but the time of the commit. The floor is the kernel alone: when all is done, the same
bytes are given, in the same order, to another namespace with the same content.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if rounds < 1 {
				return fmt.Errorf("--rounds: %d is not a positive number", rounds)
			}
			return b.run(cmd, func(ctx context.Context) (benchmark.Result, error) {
				return benchmark.Change(ctx, b.Options, rounds)
			})
		},
	}
	b.add(cmd)
	cmd.Flags().IntVar(&rounds, "rounds", 1000, "how often each kind is done")
	return cmd
}

func newBenchChurn() *cobra.Command {
	var b bench
	var load benchmark.Load
	cmd := &cobra.Command{
		Use:   "churn",
		Short: "A steady rate of changes",
		Long: `Churn fills a kernel, then puts changes into the queue at a steady rate, by turns an endpoint replaced, added and
removed, each in a Service by chance, while the proxy's own loop carries them to the kernel, as many in one transaction as
have come meanwhile. It measures each change from the moment it is put to the acknowledgement of the transaction that holds
it, or a later change of the same object.

  cores     processor time of this process, in user and kernel mode, by the time that passed; making the changes is
            part of it, the kernel's own threads are not
  behind    changes put and not yet acknowledged when the time was up; those are waited for, and count in the percentiles
  backlog   the most there were at any moment
  late      by how much at most a change was put later than the rate asks for, which says whether the rate was kept`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := load.Check(); err != nil {
				return fmt.Errorf("--%w", err)
			}
			return b.run(cmd, func(ctx context.Context) (benchmark.Result, error) {
				return benchmark.Churn(ctx, b.Options, load)
			})
		},
	}
	b.add(cmd)
	cmd.Flags().Float64Var(&load.Rate, "rate", 1000, "changes a second")
	cmd.Flags().Float64Var(&load.Seconds, "seconds", 60, "how long they come")
	return cmd
}

func newBenchRestart() *cobra.Command {
	var b bench
	var rounds, changed int
	cmd := &cobra.Command{
		Use:   "restart",
		Short: "A new process finds what an old one left in the kernel",
		Long: `Restart measures what a new process takes from objects in memory, that is after the first lists, until the kernel is known
to carry them, in two cases:

  adopted     nothing changed meanwhile: the tables are taken over, and nothing is written
  corrected   --changed Services lost an endpoint and got another one: the tables are read back, and the difference is
              written

Medians of all rounds are reported.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch {
			case rounds < 1:
				return fmt.Errorf("--rounds: %d is not a positive number", rounds)
			case changed < 1 || changed > b.Services:
				return fmt.Errorf("--changed: %d is not between 1 and the number of Services", changed)
			}
			return b.run(cmd, func(ctx context.Context) (benchmark.Result, error) {
				return benchmark.Restart(ctx, b.Options, rounds, changed)
			})
		},
	}
	b.add(cmd)
	cmd.Flags().IntVar(&rounds, "rounds", 5, "how often it is done")
	cmd.Flags().IntVar(&changed, "changed", 10, "Services that change while nobody is there")
	return cmd
}

func newBenchFlow() *cobra.Command {
	var b bench
	var flow benchmark.FlowOptions
	cmd := &cobra.Command{
		Use:   "flow",
		Short: "A new flow that this node sends to a Service",
		Long: `Flow measures what the ruleset costs those who are served: the processor time of the thread that sends the
first packet of a UDP flow, one byte from the node itself to a Service by chance, from the system call until the packet
is out of the node's network namespace and thrown away. It holds connection tracking, routing and the device, which have
their price without any proxy; so the same is measured with the least that could be there:

  conntrack alone   a chain of nat with a rule that never matches: no packet is translated
  one dnat rule     the floor: each packet is translated by one rule, which looks nothing up

With Verdict's tables, in clusters of each of --sizes, where each Service has one UDP port:

  0 Services        packets to addresses that belong to no Service
  Services          written into an empty kernel, all at once; no packet is masqueraded
  grown             the same, but the tables began with 10 Services and grew in ten steps, each by the same factor

and, in the largest of the sizes up to 10,000:

  masqueraded       the node's address is not in the cluster CIDR
  sticky            with session affinity, of which the kernel has an entry already
  external Local    to load balancer addresses, with externalTrafficPolicy Local: they are masqueraded, too

Each of them is in a network namespace of its own, and they are measured by turns, a round after the other. A round
sends the same --flows packets, after connection tracking has forgotten those of the last one. A round that is not timed
goes first; connection tracking is asked after it whether all flows were translated as they should. Rulesets that are
not Verdict's take nft.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := flow.Prepare(); err != nil {
				return fmt.Errorf("--%w", err)
			}
			b.Options = flow.Options
			return b.run(cmd, func(ctx context.Context) (benchmark.Result, error) {
				flow.Options = b.Options
				return benchmark.Flow(ctx, &flow)
			})
		},
	}
	f := cmd.Flags()
	f.IntSliceVar(&flow.Sizes, "sizes", []int{0, 1000, 10000, 100000}, "numbers of Services")
	f.IntVar(&flow.Endpoints, "endpoints", 10, "endpoints of each Service")
	f.IntVar(&flow.Flows, "flows", 8000, "flows of a round")
	f.IntVar(&flow.Rounds, "rounds", 11, "how often each is measured")
	f.BoolVar(&b.json, "json", false, "print one JSON object")
	return cmd
}
