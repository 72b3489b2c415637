package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"os/signal"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/verdict-proxy/verdict/internal/proxy/backends"
	"github.com/verdict-proxy/verdict/internal/proxy/config"
	"github.com/verdict-proxy/verdict/internal/proxy/conntrack"
	"github.com/verdict-proxy/verdict/internal/proxy/keeper"
	"github.com/verdict-proxy/verdict/internal/proxy/outlier"
	"github.com/verdict-proxy/verdict/internal/proxy/takeover"
	"github.com/verdict-proxy/verdict/internal/system/logging"
	"github.com/verdict-proxy/verdict/internal/system/sysctl"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/watch"
)

// LeaseName names the abstract socket that only the active proxy of a network namespace holds.
const LeaseName = "verdict"

// errOrphaned ends a child whose keeper is gone: the supervisor of the keeper starts another one.
var errOrphaned = errors.New("the keeper has exited; stopping, so that a new one can start")

// ExitStatus is an error that is already reported; the process exits with this status.
type ExitStatus int

func (s ExitStatus) Error() string { return fmt.Sprintf("exit status %d", int(s)) }

// Run becomes the keeper, or waits for the lease of this network namespace and runs a proxy until ctx ends. Settings
// and problems are the result of loading the flags. Writing the log to out never blocks.
func Run(ctx context.Context, flags *config.Flags, s *config.Settings, problems []*config.Problem,
	out io.Writer) error {
	if _, err := s.Node(); err != nil {
		return err
	}
	// If the log's reader is gone, that must be an error, and not a signal that ends the process.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE, syscall.SIGHUP) // the configWatcher answers SIGHUP
	lossy := logging.NewLossy(out, func(w io.Writer, lines int) {
		newLogger(w, s.Log).Warn("lost log lines: the reader is too slow, or writing failed", "lines", lines)
	})
	defer lossy.Close()
	log := newLogger(lossy, s.Log)
	held, err := keeper.Inherited()
	if err != nil {
		return err
	}
	mode, err := held.Choose(keeper.Mode(s.Keeper))
	if err != nil {
		return err
	}
	socket := held.Socket
	if socket == nil {
		if socket, err = backends.OpenSocket(); err != nil {
			return err
		}
	}
	if mode == keeper.Process {
		return keep(ctx, held, socket, s, log)
	}
	if held.Restarts == 0 {
		if err := checkStart(ctx, s); err != nil {
			return err
		}
	}
	return holdLease(ctx, held, socket, newConfigWatcher(flags, s, problems, log))
}

// keep runs the keeper.
func keep(ctx context.Context, held *keeper.Inheritance, socket *os.File, s *config.Settings, log *logger) error {
	_ = setOOMScore(sysctl.Host{}, s.OOMScoreAdj) // the child does the same, and complains
	status, err := keeper.Keep(ctx, keeper.Options{Socket: socket, Lease: held.Lease, Log: log.Logger})
	if err == nil && status != 0 {
		err = ExitStatus(status)
	}
	return err
}

// holdLease runs a proxy each time this process gets the lease.
func holdLease(ctx context.Context, held *keeper.Inheritance, socket *os.File, w *configWatcher) error {
	process := ctx
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		select {
		case <-held.Orphaned():
			cancel(errOrphaned)
		case <-ctx.Done():
		}
	}()
	limitMemory(os.DirFS("/"), held.Restarts, w.log)
	go held.Beat(context.Background()) // for as long as this process lives
	var hasLease atomic.Bool
	// A proxy that hands over, or is started again, has a successor.
	ends := func(cause error) bool { return process.Err() != nil || errors.Is(cause, keeper.ErrEvicted) }
	stuck := func(what string) { abort(w.log.Logger, what) }
	lease := keeper.Lease{
		Name: LeaseName, Socket: socket, TakeOver: held.Restarts == 0, OwnsTables: backends.OwnsTables, Log: w.log.Logger,
		Inherited: held, OnHeld: hasLease.Store, OnStuck: stuck,
	}
	err := lease.Run(ctx, func(ctx context.Context, socket *os.File) error {
		if err := held.Keep(socket); err != nil {
			w.log.Warn("the tables will be unprotected during a restart", "err", err)
		}
		return runProxy(ctx, socket, w, lifetime{hasLease.Load, ends})
	})
	switch {
	case errors.Is(err, keeper.ErrEvicted):
		w.log.Info("stopped by another process; all Services stay programmed")
		return nil
	case errors.Is(context.Cause(ctx), errOrphaned):
		return errOrphaned
	}
	return err
}

// checkStart reports whether a proxy could work here, before it asks a working one to stop: objects can be read, and
// rules written. It changes nothing.
func checkStart(ctx context.Context, s *config.Settings) error {
	if s.Manifests != "" {
		if err := watch.CheckFiles(ctx, s.Manifests); err != nil {
			return err
		}
	} else if _, err := watch.Client(s.Client).Config(); err != nil {
		return err
	}
	return backends.Probe(ctx, s)
}

// abort ends this process because it is stuck. SIGABRT makes it print its goroutines; SIGKILL follows if that fails.
// The supervisor sees a crash. What the kernel holds stays in force.
func abort(log *slog.Logger, what string) {
	log.Error("stuck; aborting, so that the supervisor restarts it", "why", what)
	pid := os.Getpid()
	time.AfterFunc(5*time.Second, func() { _ = syscall.Kill(pid, syscall.SIGKILL) })
	_ = syscall.Kill(pid, syscall.SIGABRT)
}

// proxy is a Node with what runs beside it on a real host.
type proxy struct {
	config *configWatcher
	object *nodeObject
	ipvs   *ipvsChoice
	keep   *linkAsk
	events clusterEvents
	// apiServer is the address that the settings have for the API server; the zero Addr if they have none.
	apiServer netip.Addr
	// updates delivers configuration updates to the Node.
	updates chan configUpdate
	// programmed is true once all Services are programmed. Nothing else on the host is changed before.
	programmed atomic.Bool
	// ready tells the supervisor so, once.
	ready func()
	// services is the number of Services at the last transaction.
	services atomic.Int64
}

// lifetime is what a proxy knows of those before and after it.
type lifetime struct {
	// hasLease reports whether this proxy holds the lease.
	hasLease func() bool
	// ends reports whether a proxy that was cancelled with a cause has no successor.
	ends func(cause error) bool
}

// runProxy runs a proxy until the context ends. It writes through socket, and does not close it.
func runProxy(ctx context.Context, socket *os.File, w *configWatcher, life lifetime) (err error) {
	log, s := w.log.Logger, w.start()
	name, err := s.Node()
	if err != nil {
		return err
	}
	starting := time.AfterFunc(stuckAfter, func() { abort(log, "the kernel does not answer at the start") })
	defer starting.Stop()
	object := &nodeObject{name: name, config: w}
	opened, err := backends.Open(ctx, backends.OpenOptions{
		Settings: s, Socket: socket, NodeAddrs: object.addrs, Host: w.host, Log: log})
	if err != nil {
		return err
	}
	defer opened.Close()
	keep := newLinkAsk(w, object, opened)
	objects, events, publisher, err := openSource(s, name, life.ends, keep, log)
	if err != nil {
		return err
	}
	object.seen = publisher.nodeSeen
	flows, err := conntrack.Dial(0)
	if err != nil {
		return err
	}
	defer flows.Close()
	v, err := servingOf(w, s, events, publisher, life.hasLease)
	if err != nil {
		return err
	}
	if object.records, err = openRecords(s, name, w.host, podsOf(objects, log), log); err != nil {
		log.Error("connections are not recorded", "err", err)
	}
	defer func() { err = errors.Join(err, object.records.close(life.ends(context.Cause(ctx)))) }()
	choice := &ipvsChoice{log: log, missing: events.missing, backend: opened.Mode, probe: opened.ProbeScheduler}
	p := &proxy{config: w, object: object, keep: keep, events: events, updates: make(chan configUpdate),
		apiServer: apiServer(s), ipvs: choice}
	v.checks = newHostChecks(log, p, opened)
	choice.warnIgnored(s.Policy.IPVS)
	log.Info("starting verdict", "version", Version(), "node", name, "from", s.Manifests, "mode", opened.Mode,
		"owns_tables", opened.Owns != nil)
	defer p.awaitReady(s.Manifests != "", log).Stop()
	starting.Stop()
	return p.run(ctx, cleanerOf(s, socket, opened, log), &Node{
		Config: p.policy(), Backend: opened, Flows: flows, Log: log, RouteLocalnet: RouteLocalnet, Prober: &outlier.TCP{},
		Ledger: newLedger(s, opened, log), serving: v, minInterval: s.MinSyncPeriod, updates: p.updates,
		Sources: []Source{&nodeSource{objects, object, choice, keep}, &watch.Host{Report: reporter(log)}, keep.link},
		stuck:   func(what string) { abort(log, what) },
	})
}

// cleanerOf returns what removes kube-proxy's rules, and those of Verdict's other backends.
func cleanerOf(s *config.Settings, socket *os.File, beside *backends.Opened, log *slog.Logger) *kubeProxyCleaner {
	return newKubeProxyCleaner(takeover.Runner{Mode: takeover.Mode(s.Takeover), Own: beside.Named, Log: log},
		func(ctx context.Context) error {
			return backends.RemoveOthers(ctx, backends.RemoveOptions{Socket: socket, Beside: beside, Log: log})
		})
}

// run runs the node, and everything beside it, until the context ends.
func (p *proxy) run(ctx context.Context, cleaner *kubeProxyCleaner, n *Node) error {
	var beside sync.WaitGroup
	defer beside.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	n.records = p.object.records
	n.Listeners = []reconcile.Listener{p.events.listener(), {Committed: p.keep.committed},
		{Written: func(t reconcile.Transaction) { p.written(ctx, t) }}, {Written: cleaner.written}}
	beside.Go(func() { p.runBackground(ctx, n.Backend, cleaner) })
	if err := n.Run(ctx); err != nil {
		return err
	}
	n.Log.Info("stopped; what is programmed stays in force", "services", p.services.Load())
	return nil
}

// apiServer returns the address that the settings have for the API server.
func apiServer(s *config.Settings) netip.Addr {
	if s.Manifests != "" {
		return netip.Addr{}
	}
	return watch.Client(s.Client).Server()
}

// longestStart is when a proxy counts as ready that has not programmed all Services of its manifests: systemd would
// kill it after 90 seconds. Nobody waits for the Services of an API server, which may be started by a unit that waits
// for the proxy.
const longestStart = 30 * time.Second

// awaitReady has ready tell the supervisor that the proxy works, and calls it at once if objects come from an API
// server.
func (p *proxy) awaitReady(manifests bool, log *slog.Logger) *time.Timer {
	p.ready = sync.OnceFunc(func() {
		if err := keeper.Notify("READY=1"); err != nil {
			log.Warn(err.Error())
		}
	})
	if !manifests {
		p.ready()
	}
	return time.AfterFunc(longestStart, p.ready)
}

// openSource returns the source of the objects. An API server also accepts events, and what the settings have the
// publisher write; ends is for that.
func openSource(s *config.Settings, nodeName string, ends func(error) bool, keep *linkAsk, log *slog.Logger) (Source,
	clusterEvents, *publisher, error) {
	report := reporter(log)
	if s.Manifests != "" {
		if s.NodeCondition || s.StartupTaint != "" {
			log.Warn("nodeCondition and startupTaint have no effect: the objects come from files")
		}
		return &watch.Files{Path: s.Manifests, NodeName: nodeName, Nodes: keep.link.SetNodes, Report: report,
			Notice: func(text string) { log.Info(text) }}, clusterEvents{}, nil, nil
	}
	client, err := watch.Client(s.Client).Config()
	if err != nil {
		return nil, clusterEvents{}, nil, err
	}
	events := clusterEvents{watch.NewEvents(client, nodeName, report)}
	objects := &watch.Kubernetes{Config: client, NodeName: nodeName, PodNames: s.Policy.Records, Report: report,
		Nodes: keep.link.SetNodes, NodesWanted: keep.wanted}
	if !s.NodeCondition && s.StartupTaint == "" {
		return objects, events, nil, nil
	}
	writer, err := watch.NewNodeWriter(client, nodeName)
	if err != nil {
		return nil, clusterEvents{}, nil, err
	}
	return objects, events, newPublisher(s, writer.Apply, ends, log), nil
}

// runBackground runs everything beside the node, until the context ends.
func (p *proxy) runBackground(ctx context.Context, opened *backends.Opened, cleaner *kubeProxyCleaner) {
	var all sync.WaitGroup
	defer all.Wait()
	if p.events.Events != nil {
		all.Go(func() {
			if err := p.events.Run(ctx); err != nil {
				p.config.log.Warn(err.Error())
			}
		})
	}
	if p.config.invalid != "" {
		p.events.invalid(p.config.invalid)
	}
	p.events.Emit(watch.Event{Reason: "Starting", Action: "StartKubeProxy"})
	all.Go(func() { p.config.run(ctx, p.listener(ctx)) })
	all.Go(func() { cleaner.run(ctx) })
	if opened.Run != nil {
		all.Go(func() { opened.Run(ctx) })
	}
}

// policy returns what decides about packets.
func (p *proxy) policy() dataplane.Config {
	policy := p.config.settings.Load().Policy
	policy.NodeName, policy.IPVS = p.object.name, p.ipvs.effective(policy.IPVS)
	policy.APIServer, policy.Records = p.apiServer, p.object.records.logs()
	policy.CannotKeep = p.keep.unable()
	return policy
}

// listener applies changes of the settings.
func (p *proxy) listener(ctx context.Context) configListener {
	return configListener{
		invalid: p.events.invalid,
		changed: func(s *config.Settings, fields map[string]bool) {
			p.object.reportMismatches()
			p.keep.decide()
			if anyInSection(fields, "conntrack.") && p.programmed.Load() {
				setSysctls(p.config.host, s, p.config.log)
			}
			p.sendUpdate(ctx)
		},
	}
}

// sendUpdate sends the current settings to the node.
func (p *proxy) sendUpdate(ctx context.Context) {
	select {
	case p.updates <- configUpdate{p.policy(), p.config.settings.Load().MinSyncPeriod}:
	case <-ctx.Done():
	}
}

// written is called after each transaction. After the first one, all sources were read, the kernel accepts rules, and
// connection tracking is loaded.
func (p *proxy) written(ctx context.Context, t reconcile.Transaction) {
	s := p.config.settings.Load()
	p.services.Store(int64(t.Services))
	if p.ipvs.enableAtThreshold(t.Services, s.IPVSServices, s.Policy.IPVS) {
		go p.sendUpdate(ctx) // who takes it waits for the loop
	}
	if !p.programmed.Swap(true) {
		p.ready()
		setSysctls(p.config.host, s, p.config.log)
		p.object.records.setSysctls()
	}
}
