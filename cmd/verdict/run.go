package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime/debug"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/verdict-proxy/verdict/internal/config"
	"github.com/verdict-proxy/verdict/internal/conntrack"
	"github.com/verdict-proxy/verdict/internal/keeper"
	"github.com/verdict-proxy/verdict/internal/sysctl"
	"github.com/verdict-proxy/verdict/internal/takeover"
	"github.com/verdict-proxy/verdict/nft/kernel"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/watch"
)

// placeName is the abstract socket that stands for the one proxy of a network namespace.
const placeName = "verdict"

// runOptions are what the command line of run says.
type runOptions struct {
	flags config.Flags
	// out is standard output.
	out io.Writer
}

func newRun() *cobra.Command {
	o := &runOptions{}
	cmd := &cobra.Command{
		Use:   "run",
		Short: "Carry Services on this node",
		Long: `Run keeps this node's kernel equal to what the objects ask for, until it is told to stop. What it wrote stays in force
after that, and the next run takes it over without writing it again; "verdict cleanup" removes it. It needs CAP_NET_ADMIN,
and writes nothing before it has seen everything once.

Objects come from the Kubernetes API: of --kubeconfig, or of the cluster this runs in. With --from PATH they come from a
manifest or a directory of manifests (YAML or JSON), which is watched: an edit takes effect at once, and a file that cannot
be read leaves its last good content in force. Services, EndpointSlices, Endpoints, Nodes and ServiceCIDRs are looked at;
other kinds are passed over.

--config takes kube-proxy's configuration file, and the flags are kube-proxy's, but for --from, --backend and those about iptables, --keeper, --own-tables,
--takeover and two about metrics. A flag overrides the file. A change of the file takes effect at once, or the log says what needs a restart; a value that cannot
be meant is told with file, line and field, and changes nothing. docs/CONFIGURATION.md has every field and every flag.

What writes the rules is nftables where the kernel can, else iptables (--backend, docs/IPTABLES.md); after a change of that, the rules of
the other one go once the new ones carry every Service.

On Linux 6.9 and later the tables belong to one netlink socket, and nobody else can change them as long as it is open. It is
kept open while run is restarted: by systemd, if the unit has FileDescriptorStoreMax=2 and Type=notify, else by a small
parent process, which also starts run again if it crashes (--keeper). A second run in the same network namespace takes
over from the first, which then stands by.

Once the kernel carries every Service, what a kube-proxy programmed on this node is removed (--takeover), in whatever mode it
was; docs/INSTALL.md has the way there and back. /healthz, /readyz and /livez are answered at port 10256, /metrics at
127.0.0.1:10249; docs/METRICS.md says what they tell.`,
		Example: `  verdict run --config /var/lib/kube-proxy/config.conf --hostname-override $(NODE_NAME)
  verdict run --kubeconfig /etc/kubernetes/kubelet.conf --cluster-cidr 10.244.0.0/16
  verdict run --from examples/cluster.yaml --hostname-override node-1 --cluster-cidr 10.244.0.0/16,fd00:10:244::/48`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.out = cmd.OutOrStdout()
			return o.run(cmd.Context())
		},
	}
	o.flags.Add(cmd.Flags())
	return cmd
}

// run does what the flags ask for: mostly, to carry Services.
func (o *runOptions) run(ctx context.Context) error {
	switch {
	case o.flags.Version:
		_, err := fmt.Fprintln(o.out, version())
		return err
	case o.flags.Cleanup:
		cleanup := newCleanup()
		cleanup.SetContext(ctx)
		return cleanup.RunE(cleanup, nil)
	}
	settings, problems, err := config.Load(o.flags.Config, &o.flags, nil)
	if err != nil {
		return err
	}
	switch {
	case o.flags.WriteConfigTo != "":
		return writeConfig(o.flags.WriteConfigTo, settings, problems)
	case o.flags.InitOnly:
		if err := conntrack.Load(); err != nil {
			fmt.Fprintln(os.Stderr, "verdict:", err) // what of its sysctls is missing is told below
		}
		return initOnly(sysctl.Host{}, settings, problems, o.out)
	}
	if _, err := settings.Node(); err != nil {
		return err
	}
	// A log whose reader has gone is an error like others, and not a signal that ends the process.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	out := newLossyWriter(os.Stderr, func(w io.Writer, lines int) {
		newLogger(w, settings.Log).Warn("some of the log is lost: it was not read, or could not be written", "lines", lines)
	})
	defer out.close()
	return o.keep(ctx, settings, problems, newLogger(out, settings.Log))
}

// keep becomes the keeper, or takes this network namespace's place and carries Services.
func (o *runOptions) keep(ctx context.Context, settings *config.Settings, problems []*config.Problem, log *logger) error {
	held, err := keeper.Inherited()
	if err != nil {
		return err
	}
	mode, err := held.Choose(keeper.Mode(settings.Keeper))
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
		_ = setOOMScore(sysctl.Host{}, settings.OOMScoreAdj) // the child does the same, and complains
		status, err := keeper.Keep(ctx, keeper.Options{Socket: socket, Place: held.Place, Log: log.Logger})
		if err == nil && status != exitOK {
			err = exitStatus(status)
		}
		return err
	}
	if held.Restarts == 0 {
		if err := checkStart(ctx, settings); err != nil {
			return err
		}
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
	heedMemory(os.DirFS("/"), held.Restarts, log)
	go held.Beat(context.Background()) // for as long as this process lives
	live := newLive(&o.flags, settings, problems, log)
	seat := keeper.Seat{
		Name: placeName, Socket: socket, Newcomer: held.Restarts == 0, Owner: kernel.OwnsTables, Log: log.Logger,
		Held: held, Holds: live.hasPlace.Store, Stuck: live.abort,
	}
	err = seat.Run(ctx, func(ctx context.Context, socket *os.File) error {
		if err := held.Keep(socket); err != nil {
			log.Warn("the tables will be unprotected while this is restarted", "err", err)
		}
		return carry(ctx, socket, live)
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

// checkStart says whether a proxy could work here, before one that does is asked to make room: whether there is
// something to read objects from, and something that writes rules. It changes nothing.
func checkStart(ctx context.Context, s *config.Settings) error {
	if s.Manifests != "" {
		if err := watch.CheckFiles(s.Manifests); err != nil {
			return err
		}
	} else if _, err := watch.Client(s.Client).Config(); err != nil {
		return err
	}
	return checkRules(ctx, s)
}

// errOrphaned is why a keeper's child ends without its keeper: whoever watches over that one will start another.
var errOrphaned = errors.New("the keeper is gone; ending, so that another one can begin")

// abort ends this process because it is stuck: by SIGABRT, so that it says what its goroutines are doing, and
// otherwise by SIGKILL. To whoever watches over it, that is a crash. What the kernel holds stays in force.
func (l *live) abort(what string) {
	l.log.Error("stuck; ending, so that it can be started again", "why", what)
	pid := os.Getpid()
	time.AfterFunc(5*time.Second, func() { _ = syscall.Kill(pid, syscall.SIGKILL) })
	_ = syscall.Kill(pid, syscall.SIGABRT)
}

// carry carries Services until the context ends.
func carry(ctx context.Context, socket *os.File, live *live) error {
	log := live.log.Logger
	s := live.begin()
	name, err := s.Node()
	if err != nil {
		return err
	}
	live.policyName(name)
	starting := time.AfterFunc(stuckAfter, func() { live.abort("the kernel does not answer at the start") })
	defer starting.Stop()
	rules, err := openRules(ctx, live, s, socket)
	if err != nil {
		return err
	}
	defer rules.close()
	n := node{log: log, routeLocalnet: routeLocalnet, config: live.policy(), tunings: live.tunings, leastRest: s.MinSyncPeriod,
		backend: rules.backend, tables: rules.tables, scheduler: rules.scheduler}
	objects, err := live.source(s, name)
	if err != nil {
		return err
	}
	n.sources = []source{&nodeWatch{source: objects, live: live}, &watch.Host{Report: reporter(log)}}
	n.serving = live.serving(s)
	n.serving.mode = rules.mode()
	if n.flows, err = conntrack.Dial(0); err != nil {
		return err
	}
	defer n.flows.Close()
	log.Info("verdict starts", "version", version(), "node", name, "from", s.Manifests, "mode", rules.mode(), "owns tables", rules.owns())
	if err := keeper.Notify("READY=1"); err != nil {
		log.Warn(err.Error())
	}
	ctx, cancel := context.WithCancel(ctx)
	var beside sync.WaitGroup
	defer beside.Wait()
	defer cancel()
	if live.events != nil {
		beside.Go(func() {
			if err := live.events.Run(ctx); err != nil {
				log.Warn(err.Error())
			}
		})
	}
	beside.Go(func() { live.follow(ctx) })
	follower := newSuccessor(takeover.Mode(s.Takeover), log)
	follower.runner.Own = rules.own()
	follower.leave = rules.leaveOther
	if rules.compat != nil {
		beside.Go(func() { rules.compat.Run(ctx) })
	}
	beside.Go(func() { follower.run(ctx) })
	n.unscheduled, n.refused, n.contested = live.unscheduled, live.refused, live.contested
	n.stuck = live.abort
	n.written = func(t reconcile.Transaction) {
		live.written(ctx, t)
		follower.written(t)
	}
	starting.Stop()
	live.events.Emit(watch.Event{Reason: "Starting", Action: "StartKubeProxy"})
	return n.run(ctx)
}

// reporter logs what a source finds wrong. Nothing of it stops the proxy.
func reporter(log *slog.Logger) func(error) {
	return func(err error) { log.Warn(err.Error()) }
}

// version says what this is.
func version() string {
	text := "verdict (unknown version)"
	if info, ok := debug.ReadBuildInfo(); ok {
		text = "verdict " + info.Main.Version + " " + info.GoVersion
	}
	return text
}
