package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/verdict-proxy/verdict/internal/backends"
	"github.com/verdict-proxy/verdict/internal/benchmark"
	"github.com/verdict-proxy/verdict/internal/config"
	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/terminal"
	"github.com/verdict-proxy/verdict/nft/kernel"
)

func newBench() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure the whole line to the kernel, in a network namespace of its own",
		Long: `Bench makes up a cluster and measures what the proxy takes for it, from objects in memory to the kernel's
acknowledgement, and beside it the floor: the kernel alone, given the same bytes once more in another empty namespace.

  verdict bench cold     everything written into an empty kernel
  verdict bench change   one endpoint or Service changed, again and again, in a full kernel
  verdict bench churn    a steady rate of changes, through the same queue and loop as in "verdict run"
  verdict bench restart  a new process that finds what an old one left in the kernel
  verdict bench flow     what a new connection of this node to a Service takes the kernel

The cluster is IPv4. Each Service has one cluster IP, one TCP port and one EndpointSlice, without node ports, session
affinity or topology hints; there are 100 endpoints to a node. Parsing objects is not part of what is measured.

It works in namespaces of its own, changes nothing on the machine and leaves nothing behind. It needs root or, for other
users, unprivileged user namespaces. There, what fits into one transaction is bounded by net.core.wmem_max: a large
cluster takes CAP_NET_ADMIN in the initial user namespace.

What is reported of memory:

  resident      VmRSS after the first fill, as it comes, and once more after a garbage collection that gives everything back
  kernel        by how much SUnreclaim, VmallocUsed and Percpu of /proc/meminfo grew with the first fill: elements, hash
                tables and counters. They count the whole machine and by pages: 1 MB more or less means nothing, and other
                work on the machine blurs it. 0 means that it did not grow
  allocations   objects and bytes taken from the heap, whether or not they were given back

Percentiles are exact: of all samples sorted, the one that so many percent do not exceed.`,
	}
	cmd.AddCommand(newBenchCold(), newBenchChange(), newBenchChurn(), newBenchRestart(), newBenchFlow())
	return cmd
}

// bench is what all measurements share.
type bench struct {
	benchmark.Options
	json bool
}

func (b *bench) add(cmd *cobra.Command) {
	f := cmd.Flags()
	f.IntVar(&b.Services, "services", 10000, "Services of the cluster")
	f.IntVar(&b.Endpoints, "endpoints", 10, "endpoints of each Service")
	f.BoolVar(&b.json, "json", false, "print one JSON object")
}

// run takes a measurement where it may be taken, and prints the result.
func (b *bench) run(cmd *cobra.Command, measure func(context.Context) (benchmark.Result, error)) error {
	if err := b.Check(); err != nil {
		return fmt.Errorf("--%w", err)
	}
	status, done, err := lab.Enter()
	switch {
	case err != nil:
		fmt.Fprintln(cmd.ErrOrStderr(), "verdict: bench makes network namespaces, which it may not do here:", err)
		return exitStatus(exitUnsupported)
	case done && status != exitOK:
		return exitStatus(status)
	case done:
		return nil
	}
	ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGHUP)
	defer stop()
	p := newProgress(cmd.ErrOrStderr())
	b.Open = func() (*kernel.Backend, error) {
		return backends.OpenCounting(kernel.Options{}, config.DefaultCounterMemoryMiB)
	}
	b.Progress = p.show
	result, err := measure(ctx)
	p.clear()
	if errors.Is(err, context.Canceled) {
		fmt.Fprintln(cmd.ErrOrStderr(), "Interrupted. Nothing is left behind.")
		return exitStatus(exitError)
	}
	if err != nil {
		return err
	}
	if b.json {
		return json.NewEncoder(cmd.OutOrStdout()).Encode(result)
	}
	out := terminal.NewPrinter(cmd.OutOrStdout())
	return result.WriteText(cmd.OutOrStdout(), benchmark.Style{
		Bold: func(text string) string { return out.Paint(terminal.Bold, text) },
		Dim:  func(text string) string { return out.Paint(terminal.Dim, text) },
	})
}

// progress is a line on a terminal that is written over; elsewhere nothing.
type progress struct{ w io.Writer }

func newProgress(w io.Writer) progress {
	if f, ok := w.(*os.File); !ok || !terminal.Is(f) {
		w = io.Discard
	}
	return progress{w}
}

func (p progress) show(text string) { fmt.Fprint(p.w, "\r\x1b[K"+text) }

func (p progress) clear() { fmt.Fprint(p.w, "\r\x1b[K") }
