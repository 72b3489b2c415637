package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/verdict-proxy/verdict/internal/answers/inspect"
	"github.com/verdict-proxy/verdict/internal/proxy/backends"
	"github.com/verdict-proxy/verdict/internal/proxy/config"
	"github.com/verdict-proxy/verdict/internal/proxy/preflight"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
)

// statusOptions are what the command line of status says.
type statusOptions struct {
	healthz, config string
	services        []string
	digests, json   bool
	repeating
}

func newStatus() *cobra.Command {
	var o statusOptions
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show this node's sync status",
		Long: `Status asks the proxy on this node, and shows up to which versions of the API's objects everything is
programmed, which changes wait and for how long, which Services the kernel rejects, which endpoints
are ejected, what else on the host stops packets, and what other programs changed. Nodes with the
same digest have programmed the same (docs/CLUSTER.md). It needs no privileges. "kubectl
verdict status" asks all nodes.

It finds the proxy's health server at --healthz-bind-address, else at that of --config, else at
127.0.0.1:10256. If the proxy does not answer, status reads the settings and ejections in force from
the kernel, which needs CAP_NET_ADMIN, and exits with status 1.

With --wait, it exits with 0 once the node is synced: all Services are programmed, no change is
pending, no transaction fails, and the kernel rejects no Service. After --timeout it exits with 1, and
says why. A proxy that does not answer yet is waited for, too.`,
		Example: `  verdict status
  verdict status --wait --timeout 30s
  verdict status -o json --service shop/cart`,
		Args: noArgs(""),
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd) },
	}
	f := cmd.Flags()
	defer completeServices(cmd, "service")
	addJSON(f, &o.json, "print JSON (docs/CLUSTER.md)")
	o.addProxy(f)
	f.StringSliceVar(&o.services, "service", nil, "add the digest of this Service, NAMESPACE/NAME; may be repeated")
	f.BoolVar(&o.digests, "digests", false, "add the digests of all Services")
	o.addFlags(cmd, "this node is")
	return cmd
}

func (o *statusOptions) run(cmd *cobra.Command) error {
	addr, err := o.address()
	if err != nil {
		return err
	}
	unsynced, err := o.repeating.run(cmd, func(ctx context.Context) (*reading, error) {
		s, err := inspect.LoadStatus(ctx, addr, o.services, o.digests)
		if err != nil {
			return nil, unansweredHint(err)
		}
		return &reading{s.Unsynced(), s.Steady(), func() error {
			return inspect.Show(cmd.OutOrStdout(), o.json, s, func(p *terminal.Printer) { inspect.PrintStatus(p, s) })
		}}, nil
	})
	if err != nil && !o.json && cmd.Context().Err() == nil {
		return errors.Join(err, printInForce(cmd.Context(), cmd.OutOrStdout()))
	}
	if err == nil && unsynced != "" {
		err = errors.New(unsynced)
	}
	return err
}

// addProxy adds the flags by which address finds the proxy.
func (o *statusOptions) addProxy(f *pflag.FlagSet) {
	f.StringVar(&o.healthz, "healthz-bind-address", "", "address of the proxy's health server")
	f.StringVar(&o.config, "config", "", "the proxy's configuration file, which has that address")
}

// unansweredHint adds to an error what to do if nobody listens.
func unansweredHint(err error) error {
	if !errors.Is(err, syscall.ECONNREFUSED) {
		return err
	}
	return fmt.Errorf("%w: is verdict run running? If its health server is elsewhere, --healthz-bind-address or --config "+
		"says where", err)
}

// printInForce prints what the kernel says is in force, where the proxy does not answer.
func printInForce(ctx context.Context, w io.Writer) error {
	i, err := backends.Inspect(ctx, backends.InspectOptions{})
	if err != nil {
		return err
	}
	defer i.Close()
	if present, err := i.Present(ctx); err != nil || !present {
		return err
	}
	settings, err := i.Settings(ctx)
	if err != nil {
		return err
	}
	p := terminal.NewPrinter(w)
	inspect.PrintInForce(p, settings)
	host, err := preflight.Open()
	if err != nil {
		return err
	}
	defer host.Close()
	facts := preflight.FactsOfRules(settings)
	facts.SetBackend(i.Name())
	inspect.PrintPreflight(p, host.Look(facts))
	return p.Err()
}

// address finds the proxy's health server.
func (o *statusOptions) address() (netip.AddrPort, error) {
	return serverAddress("healthz", o.healthz, o.config, func(s *config.Settings) netip.AddrPort { return s.Healthz })
}

// metricsAddress finds the proxy's metrics server, which has the records.
func metricsAddress(flag, file string) (netip.AddrPort, error) {
	return serverAddress("metrics", flag, file, func(s *config.Settings) netip.AddrPort { return s.Metrics })
}

// serverAddress finds a server of the proxy: where its flag says, or else the configuration file.
func serverAddress(name, flag, file string, of func(*config.Settings) netip.AddrPort) (netip.AddrPort, error) {
	if flag != "" {
		addr, err := netip.ParseAddrPort(flag)
		if err != nil {
			return addr, fmt.Errorf("--%s-bind-address: %q is not an address and port such as 127.0.0.1:10256", name, flag)
		}
		return addr, nil
	}
	settings, _, err := config.Load(file, nil, nil)
	if err != nil {
		return netip.AddrPort{}, err
	}
	if !of(settings).IsValid() {
		return netip.AddrPort{}, fmt.Errorf("%s: the proxy does not serve %s (%sBindAddress)", file, name, name)
	}
	return of(settings), nil
}
