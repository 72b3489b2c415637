package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/ipfamily"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/nft/kernel"
)

// topOptions are what the command line of top says.
type topOptions struct {
	interval        time.Duration
	order, service  string
	once, json, all bool
}

func newTop() *cobra.Command {
	var o topOptions
	cmd := &cobra.Command{
		Use:   "top",
		Short: "Show which Services are connected to, how often, live in the terminal",
		Long: `Top shows the service ports of this node with the connections a second that they get, and on demand those of their
endpoints, from the counters in the kernel's maps. Names come from there too, so it needs no objects. A Service whose
element in a map is replaced, since it got endpoints or lost some, counts anew from 0.

Keys: up and down (or k and j) select, enter shows and hides the endpoints, s sorts by rate, total or name, q ends it.

Without a terminal, with --once or with --json it prints one sample, taken over --interval.

It only reads, beside a running proxy, and needs CAP_NET_ADMIN. Up to 4,096 frontends are all read each time; of more, 2,000 a
second: first those on the screen, the others in turn.`,
		Example: `  verdict top
  verdict top --once --service kube-system/kube-dns
  verdict top --json --interval 10s`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return fmt.Errorf("top takes no arguments, and was given %q (a Service is --service NAMESPACE/NAME)", args[0])
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd) },
	}
	f := cmd.Flags()
	f.DurationVar(&o.interval, "interval", 2*time.Second, "time between two samples, at least 100ms")
	f.StringVar(&o.order, "sort", byRate, "rate, total or name")
	f.StringVar(&o.service, "service", "", "show only this Service, NAMESPACE/NAME or NAMESPACE/NAME:PORT, with its endpoints")
	f.BoolVar(&o.once, "once", false, "print one sample")
	f.BoolVar(&o.all, "all", false, "with --once, print all service ports, not only the first 20")
	f.BoolVar(&o.json, "json", false, "print one sample as JSON (docs/ANSWERS.md)")
	return cmd
}

func (o *topOptions) check() error {
	switch {
	case o.interval < 100*time.Millisecond:
		return fmt.Errorf("--interval: %s is less than 100ms", o.interval)
	case !slices.Contains(topOrders, o.order):
		return fmt.Errorf("--sort: %q is none of %s", o.order, strings.Join(topOrders, ", "))
	case o.service != "" && strings.Count(o.service, "/") != 1:
		return fmt.Errorf("--service: %q is not NAMESPACE/NAME, or NAMESPACE/NAME:PORT", o.service)
	}
	return nil
}

func (o *topOptions) run(cmd *cobra.Command) error {
	if err := o.check(); err != nil {
		return err
	}
	r, err := kernel.OpenReader()
	if err != nil {
		return err
	}
	defer r.Close()
	s := newSampler(r)
	s.only = o.service
	out, isFile := cmd.OutOrStdout().(*os.File)
	if o.once || o.json || !isFile || !isTerminal(out) || !isTerminal(os.Stdin) {
		return o.printOnce(cmd, s)
	}
	return o.live(cmd.Context(), s, out)
}

// printOnce prints one sample.
func (o *topOptions) printOnce(cmd *cobra.Command, s *sampler) error {
	if err := s.sample(nil, nil, o.interval, true); err != nil {
		return err
	}
	var expanded []string
	if (s.revisions == ipfamily.Per[nft.Revision]{}) && len(s.ports) == 0 {
		return errors.New("there are no tables of Verdict on this node: nobody carries Services")
	}
	if o.service != "" {
		for name := range s.ports {
			expanded = append(expanded, name)
		}
		if len(expanded) == 0 {
			return fmt.Errorf("--service: the kernel has no frontend of %s", o.service)
		}
		if err := s.sample(nil, expanded, o.interval, true); err != nil {
			return err
		}
	}
	select {
	case <-cmd.Context().Done():
		return cmd.Context().Err()
	case <-time.After(o.interval):
	}
	if err := s.sample(nil, expanded, o.interval, true); err != nil {
		return err
	}
	sample := s.result(o.order, o.interval)
	show := newShow(cmd.OutOrStdout())
	shown := len(sample.Ports)
	if !o.json && !o.all && o.service == "" {
		shown = min(shown, maxShown)
	}
	for i := range sample.Ports[:shown] {
		s.details(&sample.Ports[i], o.order)
	}
	if o.json {
		return writeJSON(cmd.OutOrStdout(), sample)
	}
	printSample(&show, sample, shown)
	return show.broken
}

// printSample prints a table of the first ports of a sample.
func printSample(s *show, sample *topSample, shown int) {
	const wide = 1 << 20
	s.line("%s", s.paint(dim, topLine("CONN/S", "TOTAL", "ENDPOINTS", "SERVICE")))
	for i := range sample.Ports[:shown] {
		p := &sample.Ports[i]
		s.line("%s", portLine("", p))
		for _, l := range endpointLines(p, wide) {
			s.line("%s", l)
		}
	}
	if more := len(sample.Ports) - shown; more > 0 {
		s.line("  and %d more (--all)", more)
	}
	if n := sample.notice(); n != "" {
		s.line("%s", s.paint(red, n))
	}
	s.line("%s", s.paint(dim, fmt.Sprintf("%s connections/s to %d service ports, over %gs",
		rateText(sample.Rate), len(sample.Ports), sample.Interval)))
}

// live shows samples in a terminal until it is told to stop.
func (o *topOptions) live(ctx context.Context, s *sampler, out *os.File) (err error) {
	node, _ := os.Hostname()
	v := newTopView(node, o.order, o.interval)
	t, err := openTerminal(os.Stdin, out)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, t.close()) }()
	resized := make(chan os.Signal, 1)
	signal.Notify(resized, unix.SIGWINCH)
	defer signal.Stop(resized)
	shown := newShow(out)
	keys := t.keys()
	read := func() {
		ports, expanded := v.visible()
		err := s.sample(ports, expanded, o.interval, false)
		v.show(s.detailed(v), err)
	}
	draw := func() error {
		v.width, v.height = t.size()
		return t.draw(v.render(&shown))
	}
	read()
	tick := time.NewTicker(o.interval)
	defer tick.Stop()
	for {
		if err := draw(); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case k, ok := <-keys:
			if !ok || v.key(k) {
				return nil
			}
			if k == "enter" || k == "s" {
				read()
			}
		case <-resized:
		case <-tick.C:
			read()
		}
	}
}

// detailed gives what is known, with the endpoints of the ports that a view shows.
func (s *sampler) detailed(v *topView) *topSample {
	sample := s.result(v.order, v.interval)
	for i := range sample.Ports {
		if v.expanded[sample.Ports[i].Name] {
			s.details(&sample.Ports[i], v.order)
		}
	}
	return sample
}
