package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/benchmark"
	"github.com/verdict-proxy/verdict/internal/proxy/backends"
	"github.com/verdict-proxy/verdict/internal/proxy/config"
	"github.com/verdict-proxy/verdict/internal/proxy/node"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
	"github.com/verdict-proxy/verdict/nft/kernel"
)

func newBench() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure the proxy, from objects to the kernel, in its own network namespaces",
		Long: `Bench generates a cluster and measures the whole path of the proxy, from objects in memory to the
kernel's acknowledgement. Beside it, bench measures the floor: the kernel alone, which gets the same
bytes in another empty namespace.

  verdict bench cold     write everything into an empty kernel
  verdict bench change   change one endpoint or Service at a time in a full kernel
  verdict bench churn    change at a steady rate, through the queue and loop of "verdict run"
  verdict bench restart  start a process on what an earlier one left in the kernel
  verdict bench flow     the kernel's cost of a new connection from this node, and of one that it forwards

The cluster is IPv4. Each Service has one cluster IP, one TCP port and one EndpointSlice, without
node ports, session affinity or topology hints; each node has 100 endpoints. Parsing objects is not
measured.

Bench works in its own network namespaces, changes nothing on the machine and leaves nothing behind.
It needs root or, for other users, unprivileged user namespaces. There, net.core.wmem_max limits the
size of a transaction: a large cluster needs CAP_NET_ADMIN in the initial user namespace.

Memory is reported as:

  resident      VmRSS after the first fill, before and after a garbage collection that returns all
                free memory
  kernel        growth of SUnreclaim, VmallocUsed and Percpu of /proc/meminfo with the first fill:
                elements, hash tables and counters. They count the whole machine, in pages, so that
                1 MB is noise, and so is the work of other processes. 0 means no growth
  allocations   objects and bytes allocated on the heap, whether or not they were freed

Percentiles are exact: the smallest sample that at least so many percent of all samples do not
exceed.`,
	}
	onlyCommands(cmd)
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
	f.IntVar(&b.Services, "services", 10000, "number of Services")
	f.IntVar(&b.Endpoints, "endpoints", 10, "endpoints per Service")
	addJSON(f, &b.json, "print one JSON object")
}

// run takes a measurement where it may be taken, and prints the result.
func (b *bench) run(cmd *cobra.Command, measure func(context.Context) (benchmark.Result, error)) error {
	if err := b.Check(); err != nil {
		return fmt.Errorf("--%w", err)
	}
	status, done, err := lab.Enter()
	switch {
	case err != nil:
		fmt.Fprintln(cmd.ErrOrStderr(), "verdict: bench may not create network namespaces here:", err)
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
	out.Line("%s", out.Paint(terminal.Dim, fmt.Sprintf("%s, Linux %s, %s", node.Version(), node.KernelRelease(),
		terminal.Plural(runtime.NumCPU(), "CPU"))))
	return result.WriteText(out, benchmark.Style{
		Bold: func(text string) string { return out.Paint(terminal.Bold, text) },
		Dim:  func(text string) string { return out.Paint(terminal.Dim, text) },
	})
}

// progressEvery is how often a line tells of progress where none can be written over.
const progressEvery = 5 * time.Second

// progress is a line on a terminal that is written over; elsewhere a line now and then.
type progress struct {
	w    io.Writer
	over bool
	next time.Time
}

func newProgress(w io.Writer) *progress {
	f, ok := w.(*os.File)
	return &progress{w: w, over: ok && terminal.Obeys(f)}
}

func (p *progress) show(text string) {
	if p.over {
		fmt.Fprint(p.w, "\r\x1b[K"+text)
	} else if now := time.Now(); !now.Before(p.next) {
		p.next = now.Add(progressEvery)
		fmt.Fprintln(p.w, text)
	}
}

func (p *progress) clear() {
	if p.over {
		fmt.Fprint(p.w, "\r\x1b[K")
	}
}
