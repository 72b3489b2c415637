package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/verdict-proxy/verdict/internal/lab/benchmark"
)

func newBenchCold() *cobra.Command {
	var b bench
	var rounds int
	cmd := &cobra.Command{
		Use:   "cold",
		Short: "Write everything into an empty kernel",
		Long: `Cold measures one transaction that writes a whole cluster into an empty kernel. Its phases:

  policy    decide from the objects what should happen to packets
  compile   derive what the kernel should hold, and the order of writing it
  encode    encode that as netlink messages
  commit    wait until the kernel has applied them
  floor     write the same bytes into another empty namespace: the kernel alone

Each round starts with a collected heap and new namespaces. The medians of all rounds are reported.
Memory and allocations are those of one earlier fill, the first of this process, which is not timed.`,
		Args: noArgs(""),
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
	cmd.Flags().IntVar(&rounds, "rounds", 5, "number of rounds")
	return cmd
}

func newBenchChange() *cobra.Command {
	var b bench
	var change benchmark.ChangeOptions
	cmd := &cobra.Command{
		Use:   "change",
		Short: "Change one endpoint or Service at a time in a full kernel",
		Long: `Change fills a kernel with clusters of each of --sizes, changes one object at a time in each, and
measures from the event, an object in memory that differs, to the kernel's acknowledgement. A round
has one change of each kind, each of a random Service:

  endpoint replaced   one endpoint goes, another comes: its slot is rewritten
  endpoint added      one slot more, and the pool has another size
  endpoint removed    one slot less, and the pool has another size
  service added       a Service with its endpoints
  service removed     the Service that was added before

"Kernel" is the commit, "own" is everything else. The floor is the kernel alone: afterwards, the
same bytes are written in the same order into another namespace with the same content.`,
		Args: noArgs(""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := change.Prepare(); err != nil {
				return fmt.Errorf("--%w", err)
			}
			b.Options = change.Options
			return b.run(cmd, func(ctx context.Context) (benchmark.Result, error) {
				change.Options = b.Options
				return benchmark.Change(ctx, &change)
			})
		},
	}
	f := cmd.Flags()
	f.IntSliceVar(&change.Sizes, "sizes", []int{1000, 10000, 100000}, "numbers of Services")
	f.IntVar(&change.Endpoints, "endpoints", 10, "endpoints per Service")
	f.IntVar(&change.Rounds, "rounds", 300, "number of changes of each kind")
	addJSON(f, &b.json, "print one JSON object")
	return cmd
}

func newBenchChurn() *cobra.Command {
	var b bench
	var load benchmark.Load
	cmd := &cobra.Command{
		Use:   "churn",
		Short: "Apply changes at a steady rate",
		Long: `Churn fills a kernel, then queues changes at a steady rate: in turn, an endpoint of a random Service
is replaced, added and removed. The proxy's own loop applies them, and puts all changes that are
pending into one transaction. Churn measures each change from the moment it is queued to the
acknowledgement of the transaction that contains it, or a later change of the same object.

  cores     processor time of this process, in user and kernel mode, divided by the elapsed time.
            It includes making the changes, and excludes the kernel's own threads
  behind    changes that were not acknowledged when the time was up; churn waits for them, and the
            percentiles include them
  backlog   the largest number of unacknowledged changes at any moment
  late      the largest delay of queueing a change, compared with the rate`,
		Args: noArgs(""),
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
	cmd.Flags().Float64Var(&load.Rate, "rate", 1000, "changes per second")
	cmd.Flags().Float64Var(&load.Seconds, "seconds", 60, "duration")
	return cmd
}

func newBenchRestart() *cobra.Command {
	var b bench
	var rounds, changed int
	cmd := &cobra.Command{
		Use:   "restart",
		Short: "Start a process on what an earlier one left in the kernel",
		Long: `Restart measures how long a new process takes from objects in memory, as after the first lists,
until it knows that the kernel has all Services, in two cases:

  adopted     nothing has changed: the process adopts the tables and writes nothing
  corrected   in --changed Services an endpoint was replaced: the process reads the tables and
              writes the difference

The medians of all rounds are reported.`,
		Args: noArgs(""),
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
	cmd.Flags().IntVar(&rounds, "rounds", 5, "number of rounds")
	cmd.Flags().IntVar(&changed, "changed", 10, "Services that change while no process runs")
	return cmd
}

const flowHelp = `Flow measures what a ruleset costs clients: the processor time of the thread that sends the first
packet of a UDP flow, of one byte, from the system call until the packet has left the node and is
discarded. That includes connection tracking, routing and the devices, which cost the same without
a proxy. There are five paths:

  from the node     by a process of the node itself, to a random Service, and straight to an endpoint
  forwarded         by a client whose packets the node forwards, to both as well
  established       one packet more of a flow from that client to a Service, which was answered

Beside Verdict's tables, flow measures:

  conntrack alone   a nat chain with a rule that never matches: no packet is translated
  one dnat rule     the floor: one rule translates each packet to a Service, without a lookup
  kube-proxy        the rules that kube-proxy writes for the same Services in mode nftables, with at
                    most 10,000 Services. --kube-proxy names its program

With Verdict's tables, in clusters of each of --sizes, in which each Service has one UDP port:

  0 Services        packets to addresses that belong to no Service
  Services          written into an empty kernel at once; no packet is masqueraded
  grown             the same, but the tables grew from 10 Services in ten steps, each by the same
                    factor

and, in the largest of the sizes up to 10,000:

  masqueraded       the addresses of node and client are not in the cluster CIDR
  sticky            with session affinity, of which the kernel already has an entry
  external Local    to load balancer addresses with externalTrafficPolicy Local; from the node
                    masqueraded, too

Each has network namespaces of its own for client, node and what is behind it, and they are measured
in turn, round after round. In a round, each path gets the same --flows packets after all connection
tracking entries were removed. An untimed round comes first, in which flow checks in connection
tracking that all flows were translated as expected. The first two rulesets need nft.`

func newBenchFlow() *cobra.Command {
	var b bench
	var flow benchmark.FlowOptions
	cmd := &cobra.Command{
		Use:   "flow",
		Short: "Open flows to Services and endpoints",
		Long:  flowHelp,
		Args:  noArgs(""),
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
	f.IntVar(&flow.Endpoints, "endpoints", 10, "endpoints per Service")
	f.IntVar(&flow.Flows, "flows", 8000, "flows per round")
	f.IntVar(&flow.Rounds, "rounds", 11, "number of rounds")
	f.StringVar(&flow.KubeProxy, "kube-proxy", "", "program of kube-proxy; empty means the one in the PATH, if any")
	addJSON(f, &b.json, "print one JSON object")
	return cmd
}
