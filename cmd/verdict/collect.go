package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/verdict-proxy/verdict/internal/answers/collector"
	"github.com/verdict-proxy/verdict/internal/gateway"
	"github.com/verdict-proxy/verdict/internal/proxy/config"
	"github.com/verdict-proxy/verdict/internal/proxy/health"
	"github.com/verdict-proxy/verdict/internal/proxy/metrics"
	"github.com/verdict-proxy/verdict/internal/proxy/node"
	"github.com/verdict-proxy/verdict/internal/proxy/status"
	"github.com/verdict-proxy/verdict/sync/watch"
)

// collectOptions are what the command line of collect, or of gateway, says.
type collectOptions struct {
	kubeconfig, identity, lease, daemonSet, account, listen, advertise, metrics string
	json                                                                        bool
	// gateway has the process that leads be the controller of Gateway API, too.
	gateway bool
}

func newCollect() *cobra.Command {
	var o collectOptions
	cmd := &cobra.Command{
		Use:   "collect",
		Short: "Run the collector that answers /everywhere requests",
		Long: `Collect collects the sync status of all nodes for GET /everywhere, which a client asks on a node, for
example in a preStop hook. Every proxy of the cluster is connected to the collector (setting
everywhere). The collector asks them only while a request waits; it sends and watches nothing in
between. It needs no privileges on its host.

Several processes elect a leader by a Lease, in which nodes find its address and the fingerprint of
its certificate. Nodes present the token of their ServiceAccount, which the API server reviews.
docs/CLUSTER.md describes the answers, and the rights that collect needs.`,
		Example: "  verdict collect --advertise-address $(POD_IP) --identity $(POD_NAME)",
		Args:    noArgs(""),
	}
	o.bind(cmd)
	return cmd
}

// bind gives a command the flags.
func (o *collectOptions) bind(cmd *cobra.Command) {
	cmd.RunE = func(cmd *cobra.Command, _ []string) error { return o.run(cmd.Context()) }
	f := cmd.Flags()
	f.StringVar(&o.kubeconfig, "kubeconfig", "", "kubeconfig file of the API server (default: the cluster this runs in)")
	f.StringVar(&o.identity, "identity", "", "name of this process, such as that of its pod (default: the host's name)")
	f.StringVar(&o.lease, "lease", "kube-system/verdict-collector", "the Lease by which one process leads")
	f.StringVar(&o.daemonSet, "daemonset", "kube-system/verdict", "the DaemonSet on whose nodes a change must be")
	f.StringVar(&o.account, "service-account", "kube-system/verdict", "the ServiceAccount of its pods")
	f.StringVar(&o.listen, "bind-address", ":10266", "address and port at which nodes connect")
	f.StringVar(&o.advertise, "advertise-address", "",
		"address at which nodes reach it, with the port if it is not that of --bind-address; required")
	f.StringVar(&o.metrics, "metrics-bind-address", ":10267", "address and port of /metrics and /healthz; empty: disabled")
	f.BoolVar(&o.json, "json-log", false, "write the log as JSON")
	_ = cmd.MarkFlagRequired("advertise-address")
}

// options checks the flags.
func (o *collectOptions) options() (c collector.Options, err error) {
	c = collector.Options{Identity: o.identity, Listen: o.listen, Advertise: o.advertise,
		Log: node.NewLog(os.Stderr, config.Log{JSON: o.json})}
	if c.Identity == "" {
		if c.Identity, err = os.Hostname(); err != nil {
			return c, fmt.Errorf("--identity: %w", err)
		}
	}
	if c.Advertise, err = o.address(); err != nil {
		return c, err
	}
	if c.Lease, err = status.ParseName(o.lease); err != nil {
		return c, fmt.Errorf("--lease: %w", err)
	}
	if c.DaemonSet, err = status.ParseName(o.daemonSet); err != nil {
		return c, fmt.Errorf("--daemonset: %w", err)
	}
	if c.Account, err = status.ParseName(o.account); err != nil {
		return c, fmt.Errorf("--service-account: %w", err)
	}
	c.Client, err = watch.ClientConfig(o.kubeconfig)
	return c, err
}

// address returns the address that nodes are told.
func (o *collectOptions) address() (string, error) {
	if _, err := netip.ParseAddrPort(o.advertise); err == nil {
		return o.advertise, nil
	}
	ip, err := netip.ParseAddr(o.advertise)
	_, port, splitErr := net.SplitHostPort(o.listen)
	if err = errors.Join(err, splitErr); err != nil {
		return "", fmt.Errorf("--advertise-address: %w", err)
	}
	return net.JoinHostPort(ip.String(), port), nil
}

func (o *collectOptions) run(ctx context.Context) error {
	options, err := o.options()
	if err != nil {
		return err
	}
	var c *collector.Collector
	shown := metrics.NewCollector(func() metrics.CollectorStats {
		s, leading := c.Stats()
		return metrics.CollectorStats{Leading: leading, Nodes: s.Streams, Waiting: s.Waiting, Rounds: s.Rounds,
			Questions: s.Questions, Accepted: s.Accepted, Refused: s.Refused}
	}, collector.Outcomes)
	options.Observe = shown.ObserveWait
	if o.gateway {
		controller, err := gateway.New(options.Client, options.Log, shown.ObserveProgrammed)
		if err != nil {
			return err
		}
		options.Lead = controller.Lead
		shown.AddGateways(func() metrics.GatewayStats { return metrics.GatewayStats(controller.Stats()) })
	}
	if c, err = collector.New(options); err != nil {
		return err
	}
	options.Log.Info("starting the collector", "version", node.Version(), "identity", options.Identity,
		"address", options.Advertise, "daemonset", o.daemonSet, "gateways", o.gateway)
	server := health.Server{Name: "metrics", Addr: o.metrics, Log: options.Log, Handler: shown.Handler()}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return c.Run(ctx) })
	group.Go(func() error { return server.Run(ctx) })
	return group.Wait()
}
