package node

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"log/slog"
	"syscall"

	"golang.org/x/sync/errgroup"

	"github.com/verdict-proxy/verdict/internal/proxy/config"
	"github.com/verdict-proxy/verdict/internal/proxy/conntrack"
	"github.com/verdict-proxy/verdict/internal/proxy/flows"
	"github.com/verdict-proxy/verdict/internal/system/sysctl"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
	"github.com/verdict-proxy/verdict/sync/watch"
)

// recordNotes remembers in the kernel what recordSysctls were before.
func recordNotes(host sysctl.Host) sysctl.Notes {
	return sysctl.Notes{Table: "verdict-records", Host: host}
}

// recordSysctls are what records need: counters, timestamps and events of connection tracking.
var recordSysctls = []sysctl.Setting{
	{Path: "proc/sys/net/netfilter/nf_conntrack_acct", Value: 1},
	{Path: "proc/sys/net/netfilter/nf_conntrack_timestamp", Value: 1},
	{Path: "proc/sys/net/netfilter/nf_conntrack_events", Value: 1, AtLeast: true},
}

// records records connections to Services.
type records struct {
	*flows.Recorder
	names *flows.Names
	// walker lists flows once the node runs, and own are the ports of the sockets that delete some.
	walker *conntrack.Walker
	own    map[uint32]bool
	// pods are this node's; nil without a cluster.
	pods  *watch.Pods
	notes sysctl.Notes
	log   *slog.Logger
}

// openRecords opens what records connections; nil if the settings ask for none. Then it puts sysctls back that an
// earlier process has set for records.
func openRecords(s *config.Settings, host sysctl.Host, pods *watch.Pods, log *slog.Logger) (_ *records, err error) {
	r := &records{names: flows.NewNames(), own: map[uint32]bool{}, pods: pods, notes: recordNotes(host), log: log}
	if !s.Policy.Records {
		r.restore()
		return nil, nil
	}
	if err := conntrack.Load(); err != nil { // so that its sysctls are there
		return nil, err
	}
	r.Recorder, err = flows.OpenRecorder(flows.RecorderOptions{
		Sink: r.sink, Names: r.names, Own: r.own, Log: log, Sysctl: readConntrack,
		Look: func(ctx context.Context, do func(*conntrack.Flow)) error { return r.walker.Look(ctx, do) },
	})
	if err != nil {
		return nil, err
	}
	return r, nil
}

// setSysctls sets the sysctls, once the Services are programmed.
func (r *records) setSysctls() {
	if r == nil {
		return
	}
	changed, errs := r.notes.Set(recordSysctls)
	logSysctls(r.log, changed)
	if len(errs) > 0 {
		r.log.Warn("records lack counters, times or ends of connections; an init container that is privileged can set the "+
			"sysctls with --init-only", "err", errors.Join(errs...))
	}
}

// podsOf returns the source of this node's pods where objects come from a cluster; else nil.
func podsOf(objects Source, log *slog.Logger) *watch.Pods {
	if k, ok := objects.(*watch.Kubernetes); ok {
		return &watch.Pods{Config: k.Config, NodeName: k.NodeName, Report: reporter(log)}
	}
	return nil
}

func logSysctls(log *slog.Logger, changed []sysctl.Written) {
	for _, c := range changed {
		log.Info("set a sysctl", "name", c.Name, "value", c.Now, "was", c.Before)
	}
}

// restore puts the sysctls back.
func (r *records) restore() {
	changed, err := r.notes.Restore()
	logSysctls(r.log, changed)
	switch {
	case errors.Is(err, fs.ErrPermission) || errors.Is(err, syscall.EROFS):
		r.log.Info("sysctls that were set for records stay set, for lack of rights: verdict cleanup puts them back")
	case err != nil:
		r.log.Warn("failed to put sysctls back that were set for records", "err", err)
	}
}

// sink takes a record. Nothing does more with it yet than to log it, if transactions are logged, too.
func (r *records) sink(record flows.Record) {
	if r.log.Enabled(context.Background(), slog.LevelDebug) {
		text, _ := json.Marshal(record)
		r.log.Debug("record", "record", string(text))
	}
}

// logs says whether rules may log for records.
func (r *records) logs() bool { return r != nil && r.Logs() }

// take takes objects on their way to the proxy.
func (r *records) take(d snapshot.Delta) {
	if r != nil {
		r.names.Take(d)
	}
}

// listeners returns what the loop must call: nothing if r is nil.
func (r *records) listeners() []reconcile.Listener {
	if r == nil {
		return nil
	}
	return []reconcile.Listener{r.Listener()}
}

// run records in a group. Flows that the Walker's users delete by its Conn are released.
func (r *records) run(ctx context.Context, group *errgroup.Group, w *conntrack.Walker, deletes *conntrack.Conn) error {
	if r == nil {
		return nil
	}
	port, err := deletes.Port()
	if err != nil {
		return err
	}
	r.walker, r.own[port] = w, true
	runBeside(ctx, group, r.Run)
	if r.pods != nil {
		group.Go(func() error { return r.pods.Run(ctx, r.names.TakePods) })
	}
	return nil
}

// close closes the socket after run has ended. If no proxy follows, it puts the sysctls back.
func (r *records) close(last bool) error {
	if r == nil {
		return nil
	}
	if last {
		r.restore()
	}
	return r.Close()
}

// RestoreSysctls puts back what a proxy has set for records, in the network namespace of the calling thread.
func RestoreSysctls() (changed []sysctl.Written, err error) {
	return recordNotes(sysctl.Host{}).Restore()
}
