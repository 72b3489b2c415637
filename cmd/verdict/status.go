package main

import (
	"fmt"
	"net/netip"

	"github.com/spf13/cobra"

	"github.com/verdict-proxy/verdict/internal/config"
	"github.com/verdict-proxy/verdict/internal/inspect"
	"github.com/verdict-proxy/verdict/internal/terminal"
)

// statusOptions are what the command line of status says.
type statusOptions struct {
	healthz, config string
	services        []string
	digests, json   bool
}

func newStatus() *cobra.Command {
	var o statusOptions
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Say how far this node's proxy has come",
		Long: `Status asks the proxy on this node: up to which versions of the API's objects everything is
programmed, what waits and for how long, which Services the kernel rejects, which endpoints are
ejected, what other programs changed, and a digest that is the same on all nodes that have
programmed the same (docs/CLUSTER.md). It needs no privileges. "kubectl verdict status" asks all
nodes.

It finds the proxy's health server at --healthz-bind-address, else at that of --config, else at
127.0.0.1:10256.`,
		Example: `  verdict status
  verdict status -o json --service shop/cart`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd) },
	}
	f := cmd.Flags()
	addJSON(f, &o.json, "print JSON (docs/CLUSTER.md)")
	f.StringVar(&o.healthz, "healthz-bind-address", "", "address of the proxy's health server")
	f.StringVar(&o.config, "config", "", "the proxy's configuration file, which has that address")
	f.StringSliceVar(&o.services, "service", nil, "add the digest of this Service, NAMESPACE/NAME; may be repeated")
	f.BoolVar(&o.digests, "digests", false, "add the digests of all Services")
	return cmd
}

func (o *statusOptions) run(cmd *cobra.Command) error {
	addr, err := o.address()
	if err != nil {
		return err
	}
	s, err := inspect.LoadStatus(cmd.Context(), addr, o.services, o.digests)
	if err != nil {
		return err
	}
	if o.json {
		return inspect.WriteJSON(cmd.OutOrStdout(), s)
	}
	p := terminal.NewPrinter(cmd.OutOrStdout())
	inspect.PrintStatus(p, s)
	return p.Err()
}

// address finds the proxy's health server.
func (o *statusOptions) address() (netip.AddrPort, error) {
	if o.healthz != "" {
		addr, err := netip.ParseAddrPort(o.healthz)
		if err != nil {
			return addr, fmt.Errorf("--healthz-bind-address: %q is not an address and port such as 127.0.0.1:10256", o.healthz)
		}
		return addr, nil
	}
	settings, _, err := config.Load(o.config, nil, nil)
	if err != nil {
		return netip.AddrPort{}, err
	}
	if !settings.Healthz.IsValid() {
		return netip.AddrPort{}, fmt.Errorf("%s: the proxy has no health server (healthzBindAddress)", o.config)
	}
	return settings.Healthz, nil
}
