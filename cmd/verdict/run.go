package main

import (
	"context"
	"errors"
	"log/slog"
	"os"

	"github.com/spf13/cobra"

	"github.com/verdict-proxy/verdict/internal/conntrack"
	"github.com/verdict-proxy/verdict/internal/keeper"
	"github.com/verdict-proxy/verdict/nft/kernel"
	"github.com/verdict-proxy/verdict/sync/watch"
)

// placeName is the abstract socket that stands for the one proxy of a network namespace.
const placeName = "verdict"

// runOptions are what the command line of run says.
type runOptions struct {
	policy              policyFlags
	from, kubeconfig    string
	logFormat, logLevel string
	keep                keeper.Mode
	own                 bool
}

func newRun() *cobra.Command {
	o := runOptions{keep: keeper.Auto}
	cmd := &cobra.Command{
		Use:   "run",
		Short: "Carry Services on this node",
		Long: `Run keeps this node's kernel equal to what the objects ask for, until it is told to stop. What it wrote stays in force
after that, and the next run takes it over without writing it again; "verdict cleanup" removes it. It needs CAP_NET_ADMIN,
and writes nothing before it has seen everything once.

Objects come from --from PATH, a manifest or a directory of manifests (YAML or JSON), which is watched: an edit takes
effect at once, and a file that cannot be read leaves its last good content in force. Without --from they come from the
Kubernetes API: of --kubeconfig, or of the cluster this runs in.

Services, EndpointSlices, Endpoints, Nodes and ServiceCIDRs are looked at; other kinds are passed over.

On Linux 6.9 and later the tables belong to one netlink socket, and nobody else can change them as long as it is open. It is
kept open while run is restarted: by systemd, if the unit has FileDescriptorStoreMax=1 and Type=notify, else by a small
parent process, which also starts run again if it crashes (--keeper). A second run in the same network namespace takes
over from the first, which then stands by.`,
		Example: `  verdict run --from examples/cluster.yaml --node-name node-1 --cluster-cidr 10.244.0.0/16,fd00:10:244::/48
  verdict run --kubeconfig /etc/kubernetes/kubelet.conf --cluster-cidr 10.244.0.0/16`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd.Context()) },
	}
	f := cmd.Flags()
	f.StringVar(&o.from, "from", "", "manifest file, or directory of manifests, to take the objects from")
	f.StringVar(&o.kubeconfig, "kubeconfig", "", "kubeconfig file of the API server (default: the cluster this runs in)")
	f.StringVar(&o.logFormat, "log-format", "text", "text or json")
	f.StringVar(&o.logLevel, "log-level", "info", "debug (a line for each transaction), info, warn or error")
	f.Var(&o.keep, "keeper", "who holds the netlink socket while this is restarted")
	f.BoolVar(&o.own, "own-tables", true, "let nobody else change the tables, where the kernel can do that (Linux 6.9)")
	o.policy.add(f)
	return cmd
}

// run becomes the keeper, or takes this network namespace's place and carries Services.
func (o *runOptions) run(ctx context.Context) error {
	log, err := newLog(os.Stderr, o.logFormat, o.logLevel)
	if err != nil {
		return err
	}
	if o.from != "" && o.kubeconfig != "" {
		return errors.New("--from and --kubeconfig exclude each other")
	}
	if _, err := o.policy.config(); err != nil {
		return err
	}
	held, err := keeper.Inherited()
	if err != nil {
		return err
	}
	mode, err := held.Choose(o.keep)
	if err != nil {
		return err
	}
	socket := held.Socket
	if socket == nil {
		if socket, err = kernel.OpenSocket(); err != nil {
			return err
		}
	}
	if mode == keeper.Process {
		status, err := keeper.Keep(ctx, keeper.Options{Socket: socket, Log: log})
		if err == nil && status != exitOK {
			err = exitStatus(status)
		}
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		select {
		case <-held.Orphaned():
			cancel(errOrphaned)
		case <-ctx.Done():
		}
	}()
	seat := keeper.Seat{Name: placeName, Socket: socket, Newcomer: held.Restarts == 0, Owner: kernel.OwnsTables, Log: log}
	err = seat.Run(ctx, func(ctx context.Context, socket *os.File) error {
		if err := held.Keep(socket); err != nil {
			log.Warn("the tables will be unprotected while this is restarted", "err", err)
		}
		return o.carry(ctx, socket, log)
	})
	switch {
	case errors.Is(err, keeper.ErrEvicted):
		log.Info("ended, as told")
		return nil
	case errors.Is(context.Cause(ctx), errOrphaned):
		return errOrphaned
	}
	return err
}

// errOrphaned is why a keeper's child ends without its keeper: whoever watches over that one will start another.
var errOrphaned = errors.New("the keeper is gone; ending, so that another one can begin")

// carry carries Services until the context ends.
func (o *runOptions) carry(ctx context.Context, socket *os.File, log *slog.Logger) error {
	n := node{log: log, routeLocalnet: routeLocalnet}
	var err error
	if n.config, err = o.policy.config(); err != nil {
		return err
	}
	objects, err := objectSource(o.from, o.kubeconfig, n.config.NodeName, log)
	if err != nil {
		return err
	}
	n.sources = []source{objects, &watch.Host{Report: reporter(log)}}
	backend, err := openBackend(kernel.Options{Socket: socket, Own: o.own})
	if err != nil {
		return err
	}
	defer backend.Close()
	n.backend = backend
	if n.flows, err = conntrack.Dial(0); err != nil {
		return err
	}
	defer n.flows.Close()
	log.Info("verdict starts", "node", n.config.NodeName, "from", o.from, "owns tables", backend.Owns())
	if err := keeper.Notify("READY=1"); err != nil {
		log.Warn(err.Error())
	}
	return n.run(ctx)
}

// objectSource gives the source the flags ask for.
func objectSource(from, kubeconfig, nodeName string, log *slog.Logger) (source, error) {
	if from != "" {
		return &watch.Files{Path: from, NodeName: nodeName, Report: reporter(log)}, nil
	}
	config, err := watch.ClientConfig(kubeconfig)
	if err != nil {
		return nil, err
	}
	return &watch.Kubernetes{Config: config, NodeName: nodeName, Report: reporter(log)}, nil
}

// reporter logs what a source finds wrong. Nothing of it stops the proxy.
func reporter(log *slog.Logger) func(error) {
	return func(err error) { log.Warn(err.Error()) }
}
