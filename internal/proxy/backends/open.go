package backends

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"time"

	"github.com/verdict-proxy/verdict/internal/proxy/config"
	"github.com/verdict-proxy/verdict/internal/proxy/ledger"
	"github.com/verdict-proxy/verdict/internal/proxy/metrics"
	"github.com/verdict-proxy/verdict/internal/proxy/takeover"
	"github.com/verdict-proxy/verdict/internal/system/netlink"
	"github.com/verdict-proxy/verdict/internal/system/sysctl"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
)

// OpenOptions are what a backend may have to know to write.
type OpenOptions struct {
	// Settings are those of the proxy, complete.
	Settings *config.Settings
	// Socket, if not nil, is the netlink socket that owns the tables. It belongs to the caller.
	Socket *os.File
	// NodeAddrs gives the node's addresses, best first.
	NodeAddrs func() []netip.Addr
	// Host is where sysctls are.
	Host sysctl.Host
	Log  *slog.Logger
}

// Opened is a backend that can write, and what else the node must know of it. Whatever is nil it does not have.
type Opened struct {
	reconcile.Writer
	// Name is the backend's. Open sets it.
	Name string
	// Mode is what kube-proxy calls it, for those who ask which mode the proxy is in.
	Mode string
	// Owns says whether nobody else can change what it wrote; nil if it cannot prevent that.
	Owns func() bool
	// Named says which of what has kube-proxy's names is written by this one.
	Named takeover.Own
	// ProbeScheduler says why schedulers of IPVS cannot be had. Nil means that it leaves no choice of endpoints to IPVS.
	ProbeScheduler func(schedulers ...string) error
	// KeepSupported says why it cannot keep clients' addresses; nil means that it never can.
	KeepSupported func() error
	// Heard, if not nil, says when the kernel last answered, for transactions of many messages. It is called beside the
	// Writer.
	Heard func() time.Time
	// Run, if not nil, works beside the loop until the context ends.
	Run func(context.Context)
	// Fill tells how full its sets are, and AffinityShares which Services hold most of one that is nearly full.
	Fill           func() []metrics.Fill
	AffinityShares func() []metrics.AffinityShare
	// Counters opens what reads its counters, which may be used beside the Writer, and IPVS reads those of IPVS.
	Counters func() (Counters, error)
	// Evidence opens what reads which endpoints do not answer or refuse, beside the Writer.
	Evidence func() (EvidenceReader, error)
	IPVS     metrics.IPVS
	// Ledger tells a ledger what the kernel holds, and OnSent sets what is called with each batch that the kernel
	// acknowledged, before the loop hears of it. Without them a ledger has no batches.
	Ledger ledger.Source
	OnSent func(func(batch []byte))
	// Close closes it. What was written stays.
	Close func() error
}

// Counters reads what the kernel counts.
type Counters interface {
	metrics.Counters
	io.Closer
}

// EvidenceReader reads what the kernel saw of endpoints that answer, do not answer or refuse; see outlier.Evidence.
type EvidenceReader interface {
	Read() ([]dataplane.Evidence, error)
	Answers() ([]dataplane.Answer, error)
	Forsaken() ([]dataplane.Pair, error)
	Accepted() ([]dataplane.Pair, error)
	io.Closer
}

// RemoveOptions say what is to be removed.
type RemoveOptions struct {
	// Socket, if not nil, is the one that owns the tables, if anybody does.
	Socket *os.File
	// Beside is the backend that has taken over; nil if none has. Then also what a process left that ended in the
	// middle is looked for, and what a kube-proxy at work may have made its own stays.
	Beside *Opened
	Log    *slog.Logger
}

// Final is an error after which no other backend is to be tried.
type Final struct{ error }

func (f Final) Unwrap() error { return f.error }

// named gives the backends that the settings ask for, in the order in which they are tried.
func named(s *config.Settings) ([]Backend, error) {
	if s.Backend == config.Auto || s.Backend == "" {
		return All, nil
	}
	for _, b := range All {
		if b.Name == string(s.Backend) {
			return []Backend{b}, nil
		}
	}
	return nil, fmt.Errorf("there is no backend %q", s.Backend)
}

// Open opens the backend that the settings name. With auto that is the first that can be used here.
func Open(ctx context.Context, o OpenOptions) (opened *Opened, err error) {
	err = first(ctx, o.Settings, func(b Backend) (err error) {
		if opened, err = b.Open(ctx, o); err == nil {
			opened.Name = b.Name
		}
		return err
	}, o.Log)
	return opened, err
}

// Probe says whether Open can open what the settings name. Nothing stays open and nothing is changed.
func Probe(ctx context.Context, s *config.Settings) error {
	return first(ctx, s, func(b Backend) error {
		if b.Probe == nil {
			return nil
		}
		return b.Probe(ctx, s)
	}, slog.New(slog.DiscardHandler))
}

// first tries the backends that the settings ask for until one works.
func first(ctx context.Context, s *config.Settings, try func(Backend) error, log *slog.Logger) error {
	list, err := named(s)
	if err != nil {
		return err
	}
	for i, b := range list {
		failed := try(b)
		if final := (Final{}); failed == nil || errors.As(failed, &final) || ctx.Err() != nil {
			return failed
		}
		switch {
		case len(list) == 1:
			return failed
		case i == 0:
			err = fmt.Errorf("%s cannot be used: %w", b.Name, failed)
		default:
			err = fmt.Errorf("%s; %s cannot be used either: %w", err.Error(), b.Name, failed)
		}
		if i+1 < len(list) {
			log.Info(b.Name+" cannot be used; "+list[i+1].Name+" is tried", "why", failed)
		}
	}
	return err
}

// RemoveOthers removes what other backends than the one that has taken over wrote on this node, before it was
// started with this one. It is called once all Services are programmed.
func RemoveOthers(ctx context.Context, o RemoveOptions) error {
	netlink.AwaitPackets()
	var errs []error
	for _, b := range All {
		if b.Remove == nil || b.Name == o.Beside.Name {
			continue
		}
		removed, err := b.Remove(ctx, o)
		for _, what := range removed {
			o.Log.Info("removed the rules of Verdict's previous backend", "what", what)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// Remove removes what all backends wrote on this node, and names it.
func Remove(ctx context.Context, o RemoveOptions) (removed []string, err error) {
	netlink.AwaitPackets() // a kube-proxy may have programmed the node a moment ago
	var errs []error
	for _, b := range All {
		if b.Remove != nil {
			what, err := b.Remove(ctx, o)
			removed, errs = append(removed, what...), append(errs, err)
		}
	}
	return removed, errors.Join(errs...)
}
