package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/verdict-proxy/verdict/internal/config"
	"github.com/verdict-proxy/verdict/internal/sysctl"
	"github.com/verdict-proxy/verdict/nft/iptshim"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
	"github.com/verdict-proxy/verdict/sync/watch"
)

// live is the configuration of a proxy at work, and follows its file.
type live struct {
	flags *config.Flags
	log   *logger
	// host is where sysctls are.
	host sysctl.Host
	// events, if not nil, take what the cluster's operators should see.
	events *watch.Events
	// tunings take what the node is to go by from now on.
	tunings chan tuning

	settings atomic.Pointer[config.Settings]
	// name is the node's.
	name string
	// said is what was said about the file when it was read last, bad what was wrong with it, and failed why it could not be read.
	said        map[string]bool
	bad, failed string
	// node is the Node as it was seen last, and misfit what was said about it and the settings.
	node   atomic.Pointer[snapshot.Node]
	mu     sync.Mutex
	misfit []string
	// wrote says that the kernel carries Services. Before that, nothing on the host is touched.
	wrote atomic.Bool
	// schedulers are those of IPVS; many says that there were so many Services that it schedules all of them.
	schedulers schedulers
	many       atomic.Bool
	// noIPVS says that the backend cannot leave anything to IPVS; noScheduler is for saying so once.
	noIPVS      atomic.Bool
	noScheduler sync.Once
	// hasPlace says that another proxy can take over from this one.
	hasPlace atomic.Bool
}

// tuning is what may change while a node works.
type tuning struct {
	policy dataplane.Config
	// leastRest is the least time between two transactions.
	leastRest time.Duration
}

// newLive begins with settings, and says what there is to say about them.
func newLive(flags *config.Flags, s *config.Settings, problems []*config.Problem, log *logger) *live {
	l := &live{flags: flags, log: log, tunings: make(chan tuning), said: map[string]bool{}}
	l.settings.Store(s)
	l.say(problems)
	return l
}

// begin is called when the proxy gets its place, which may be long after it was started, and gives the settings. What was set aside
// for a restart is in force now.
func (l *live) begin() *config.Settings {
	if s, problems, ok := l.read(nil); ok {
		l.say(problems)
		l.settings.Store(s)
	}
	s := l.settings.Load()
	l.log.level.Set(s.Log.Level)
	if err := setOOMScore(l.host, s.OOMScoreAdj); err != nil {
		l.log.Info(err.Error())
	}
	return s
}

// source gives what the objects come from. If that is the API server, it takes events, too.
func (l *live) source(s *config.Settings, nodeName string) (source, error) {
	report := reporter(l.log.Logger)
	if s.Manifests != "" {
		return &watch.Files{Path: s.Manifests, NodeName: nodeName, Report: report}, nil
	}
	client, err := watch.Client(s.Client).Config()
	if err != nil {
		return nil, err
	}
	l.events = watch.NewEvents(client, nodeName, report)
	if l.bad != "" {
		l.invalid(l.bad)
	}
	return &watch.Kubernetes{Config: client, NodeName: nodeName, Report: report}, nil
}

// policyName tells the name of the node.
func (l *live) policyName(name string) { l.name = name }

// policy gives what decides about packets.
func (l *live) policy() dataplane.Config {
	p := l.settings.Load().Policy
	p.NodeName, p.IPVS = l.name, l.ipvs(p.IPVS)
	return p
}

// written is told of each transaction. The first one says that all sources can be read and the kernel does what it is
// asked, and by then there is connection tracking.
func (l *live) written(ctx context.Context, t reconcile.Transaction) {
	l.countServices(ctx, t)
	if !l.wrote.Swap(true) {
		setSysctls(l.host, l.settings.Load(), l.log)
	}
}

// maxRefused bounds how many Services get an event after one transaction that they are set aside.
const maxRefused = 20

// refused tells the cluster of Services that are not carried as they are.
func (l *live) refused(r *dataplane.Refused) {
	names := slices.SortedFunc(maps.Keys(r.Services), snapshot.Name.Compare)
	for _, n := range names[:min(maxRefused, len(names))] {
		l.events.Emit(watch.Event{Warning: true, Reason: "FailedToProgram", Action: "Program", Service: n,
			Note: refusedNote(r.Services[n])})
	}
}

// refusedNote says why. The words of a program may name other Services, which whoever reads the event may not know of:
// only the log has them.
func refusedNote(err error) string {
	if large := (*iptshim.TooManyRules)(nil); errors.As(err, &large) {
		return large.Error()
	}
	return "this node cannot carry the Service as it is; the log of its proxy says why"
}

// maxContested bounds how many Services get an event after one change that they do not answer at an address they claim.
const maxContested = 20

// contested tells the cluster of Services that do not answer at an address they claim. Events are read by whoever may
// read the loser's namespace, so they do not say whose the address is.
func (l *live) contested(contests []dataplane.Contest) {
	for _, c := range contests[:min(maxContested, len(contests))] {
		what := c.Key.String()
		if c.Keys > 1 {
			what += fmt.Sprintf(" and %d more", c.Keys-1)
		}
		l.events.Emit(watch.Event{Warning: true, Reason: "AddressConflict", Action: "Serve", Service: c.Loser.Port.Service,
			Note: "another Service has " + what + " and keeps it; this one does not answer there"})
	}
}

// follow takes in changes of the file until the context ends.
func (l *live) follow(ctx context.Context) {
	if l.flags.Config == "" {
		return
	}
	watch.Changes(ctx, l.flags.Config, func() { l.reload(ctx) }, reporter(l.log.Logger))
}

// read reads the file. What is wrong with it as a whole is said once.
func (l *live) read(last *config.Settings) (*config.Settings, []*config.Problem, bool) {
	s, problems, err := config.Load(l.flags.Config, l.flags, last)
	if err == nil {
		l.failed = ""
		return s, problems, true
	}
	if l.failed != err.Error() {
		l.failed = err.Error()
		l.log.Error("the configuration file is of no use; what was before stays in force", "err", err)
		l.invalid(err.Error())
	}
	return nil, nil, false
}

// say logs what there is to say about the file, if it was not said when it was read last.
func (l *live) say(problems []*config.Problem) {
	said := map[string]bool{}
	var bad []string
	news := false
	for _, p := range problems {
		key := *p
		key.Then = "" // what is done about it is another thing at the start than later
		if !l.said[key.Error()] && !said[key.Error()] {
			l.log.problem(p)
			news = news || p.Severity == config.Bad
		}
		if p.Severity == config.Bad {
			bad = append(bad, p.Error())
		}
		said[key.Error()] = true
	}
	l.said, l.bad = said, strings.Join(bad, "; ")
	if news {
		l.invalid(l.bad)
	}
}

// invalid tells the cluster's operators that the file is wrong: nothing else of it is seen from outside.
func (l *live) invalid(text string) {
	l.events.Emit(watch.Event{Warning: true, Reason: "InvalidConfiguration", Action: "ReadConfiguration", Note: text})
}

// reload reads the file again, and has what changed take effect.
func (l *live) reload(ctx context.Context) {
	before := l.settings.Load()
	s, problems, ok := l.read(before)
	if !ok {
		return
	}
	l.say(problems)
	changes := s.Changes(before)
	if len(changes) == 0 {
		return
	}
	now := map[string]bool{}
	for _, c := range changes {
		switch c.Effect {
		case config.Live:
			now[c.Field] = true
			l.log.Info("the configuration has changed: "+c.Field, "is", c.Now, "was", c.Before)
		case config.Restart:
			l.log.Warn("the configuration has changed: "+c.Field+" takes effect at the next start", "is", c.Now, "was", c.Before)
		default:
			l.log.Info("the configuration has changed: "+c.Field+" has no effect", "is", c.Now, "was", c.Before)
		}
	}
	l.settings.Store(s)
	l.log.level.Set(s.Log.Level)
	l.compareNode()
	if anyOf(now, "conntrack.") && l.wrote.Load() {
		setSysctls(l.host, s, l.log)
	}
	if now["oomScoreAdj"] {
		if err := setOOMScore(l.host, s.OOMScoreAdj); err != nil {
			l.log.Info(err.Error())
		}
	}
	select {
	case l.tunings <- tuning{l.policy(), s.MinSyncPeriod}:
	case <-ctx.Done():
	}
}

func anyOf(fields map[string]bool, section string) bool {
	for f := range fields {
		if strings.HasPrefix(f, section) {
			return true
		}
	}
	return false
}
