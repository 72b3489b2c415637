package main

import (
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/verdict-proxy/verdict/internal/answers/inspect"
	"github.com/verdict-proxy/verdict/internal/proxy/backends"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
)

// topOptions are what the command line of top says.
type topOptions struct {
	interval        time.Duration
	order, service  string
	once, json, all bool
	limit           int
}

func newTop() *cobra.Command {
	var o topOptions
	cmd := &cobra.Command{
		Use:   "top",
		Short: "Show the connections per second of Services, live",
		Long: `Top shows the Service ports of this node with their connections per second, and on demand those of
their endpoints, from the counters in the kernel's maps. Names and ejected endpoints are in the kernel,
too, so top needs no objects. A Service's counter restarts at 0 when its first endpoint is added or
its last one removed, because that replaces its element in the map.

If the proxy answers at 127.0.0.1:10256, the heading shows the Node's name, else the host's, and
Services of Gateways are named with these.

While records are on (docs/FLOWS.md) and the proxy answers at 127.0.0.1:10249, top shows what clients
sent and received a second, too: the average of the last whole minute, since records have no finer
grain.

Keys: up and down (or k and j) select, enter shows and hides the endpoints, s sorts by rate, total
or name, / filters by a part of the name, ? shows all keys, q quits.

Without a terminal, on one that knows no escape sequences (TERM=dumb), with --once or with --json it
prints one sample, taken over --interval.

It only reads, beside a running proxy, and needs CAP_NET_ADMIN. It reads up to 4,096 frontends each
time; if there are more, 2,000 per second: first those on the screen, then the others in turn.`,
		Example: `  verdict top
  verdict top --once --service kube-system/kube-dns
  verdict top --json --interval 10s`,
		Args: noArgs(" (a Service is --service NAMESPACE/NAME)"),
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd) },
	}
	f := cmd.Flags()
	f.DurationVar(&o.interval, "interval", 2*time.Second, "time between two samples, at least 100ms")
	f.StringVar(&o.order, "sort", inspect.ByRate, "rate, total or name")
	f.StringVar(&o.service, "service", "",
		"show only this Service, NAMESPACE/NAME or NAMESPACE/NAME:PORT, with its endpoints")
	f.BoolVar(&o.once, "once", false, "print one sample")
	f.BoolVar(&o.all, "all", false, "with --once, print all service ports, not only the first 20")
	f.IntVar(&o.limit, "limit", 0, "with --once or --json, print only so many service ports, the first by --sort")
	defer completeServices(cmd, "service")
	addJSON(f, &o.json, "print one sample as JSON (docs/ANSWERS.md)")
	return cmd
}

func (o *topOptions) check() error {
	switch {
	case o.interval < 100*time.Millisecond:
		return fmt.Errorf("--interval: %s is less than 100ms", o.interval)
	case !slices.Contains(inspect.Orders, o.order):
		return fmt.Errorf("--sort: %q is not one of %s", o.order, strings.Join(inspect.Orders, ", "))
	case o.limit < 0:
		return fmt.Errorf("--limit: %d is negative", o.limit)
	case o.service != "" && strings.Count(o.service, "/") != 1:
		return fmt.Errorf("--service: %q is not NAMESPACE/NAME, or NAMESPACE/NAME:PORT", o.service)
	}
	return nil
}

func (o *topOptions) run(cmd *cobra.Command) error {
	if err := o.check(); err != nil {
		return err
	}
	i, err := backends.Inspect(cmd.Context(), backends.InspectOptions{})
	if err != nil {
		return err
	}
	defer i.Close()
	t := inspect.Top{Sampler: inspect.NewSampler(i), Service: o.service, Order: o.order, Interval: o.interval}
	t.Sampler.Records, _ = metricsAddress("", "") // without it, top has no traffic
	addr, _ := (&statusOptions{}).address()
	t.Sampler.Health = addr
	out, isFile := cmd.OutOrStdout().(*os.File)
	if o.once || o.json || !isFile || !terminal.Obeys(out) || !terminal.Is(os.Stdin) {
		return o.printOnce(cmd, &t)
	}
	t.Node = inspect.NodeName(cmd.Context(), addr)
	return t.Live(cmd.Context(), os.Stdin, out)
}

// printOnce prints one sample.
func (o *topOptions) printOnce(cmd *cobra.Command, t *inspect.Top) error {
	most := inspect.MaxShown
	switch {
	case o.limit > 0:
		most = o.limit
	case o.json || o.all || o.service != "":
		most = math.MaxInt
	}
	sample, shown, err := t.Once(cmd.Context(), most)
	if err != nil {
		return err
	}
	if o.json {
		sample.Ports = sample.Ports[:shown]
	}
	return inspect.Show(cmd.OutOrStdout(), o.json, sample, func(p *terminal.Printer) { sample.Print(p, shown) })
}
