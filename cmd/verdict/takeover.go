package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/verdict-proxy/verdict/internal/takeover"
	"github.com/verdict-proxy/verdict/ipvsplugin"
	"github.com/verdict-proxy/verdict/nft/iptshim"
	"github.com/verdict-proxy/verdict/nft/iptshim/xtables"
	"github.com/verdict-proxy/verdict/sync/reconcile"
)

// successor removes what a kube-proxy programmed, once the kernel carries every Service by our tables. It works in the network
// namespace of its process, so it is for verdict run alone.
type successor struct {
	runner takeover.Runner
	ready  chan struct{}
	// leave, if not nil, removes what another backend of ours wrote before this one.
	leave func(context.Context, *slog.Logger) error
	// done says that ready is closed, waits that it was said why it is not.
	done, waits bool
}

func newSuccessor(mode takeover.Mode, log *slog.Logger) *successor {
	return &successor{runner: takeover.Runner{Mode: mode, Log: log}, ready: make(chan struct{})}
}

// written is told of each transaction. As long as the kernel refuses a Service, it may be that kube-proxy's rules carry it.
func (s *successor) written(t reconcile.Transaction) {
	switch {
	case s.done:
	case t.Quarantined == 0:
		s.done = true
		close(s.ready)
	case !s.waits && s.runner.Mode == takeover.Auto:
		s.waits = true
		s.runner.Log.Warn("what kube-proxy may have programmed stays as long as the kernel refuses Services", "refused", t.Quarantined)
	}
}

// run works until the context ends.
func (s *successor) run(ctx context.Context) {
	select {
	case <-ctx.Done():
		return
	case <-s.ready:
	}
	var beside sync.WaitGroup
	if s.leave != nil {
		if err := s.leave(ctx, s.runner.Log); err != nil && ctx.Err() == nil {
			s.runner.Log.Warn("what Verdict wrote before with its other backend is still there; it will be tried again", "err", err)
			beside.Go(func() { s.leaveLater(ctx) })
		}
	}
	s.runner.Run(ctx, s.ready)
	beside.Wait()
}

// leaveAgain is how long a removal that failed waits for the next try.
const leaveAgain = 30 * time.Second

// leaveLater removes what another backend wrote, and tries again until that succeeds.
func (s *successor) leaveLater(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(leaveAgain):
		}
		if s.leave(ctx, s.runner.Log) == nil {
			return
		}
	}
}

// heir decides which virtual services of IPVS go on as ours: those that a kube-proxy left, if it is not at work any more.
type heir struct {
	mode takeover.Mode

	mu    sync.Mutex
	found *takeover.Found
	at    time.Time
}

// lookAgain is how long what was found holds: one transaction may ask about thousands.
const lookAgain = 5 * time.Second

func (h *heir) adopt(vs ipvsplugin.VirtualService) bool {
	if h.mode != takeover.Auto {
		return false
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.found == nil || time.Since(h.at) > lookAgain {
		found, err := takeover.Find(context.Background(), takeover.Own{})
		if err != nil {
			return false
		}
		h.found, h.at = found, time.Now()
	}
	return len(h.found.Running()) == 0 && h.found.Made(netip.AddrPortFrom(vs.Key.Addr, vs.Key.Port), uint8(vs.Key.Protocol))
}

func newTakeover() *cobra.Command {
	var dryRun bool
	cmd := &cobra.Command{
		Use:   "takeover",
		Short: "Remove what a kube-proxy left on this node",
		Long: `Takeover removes what a kube-proxy programmed on this node, in any of its modes: nftables tables, chains of iptables
(both variants), virtual services of IPVS, ipsets, and the device kube-ipvs0. What others made stays, and what of
kube-proxy's they use. "verdict run" does the same after its start, unless it was told --takeover=never.

It refuses as long as there are no rules of Verdict's, which carry the Services then. Where these are iptables', which have the
names of kube-proxy's, only what is not theirs is removed. No connection is lost: those that are
established live in connection tracking, and what IPVS carries goes on until it has ended.

With --dry-run it only says what there is.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return takeOver(cmd.Context(), cmd.OutOrStdout(), dryRun) },
	}
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "say what there is, and leave it")
	return cmd
}

// takeOver removes what there is of a kube-proxy, and says what it was and what stays.
func takeOver(ctx context.Context, w io.Writer, dryRun bool) error {
	own, nobody := ownRules(ctx)
	found, err := takeover.Find(ctx, own)
	if err != nil {
		return err
	}
	p := printer{w: w}
	for _, pid := range found.Running() {
		p.line("kube-proxy is at work here, as process %d: remove its DaemonSet, or it will write its rules again", pid)
	}
	if found.Empty() {
		p.line("there is nothing of kube-proxy's to remove")
	}
	verb := "found"
	if !dryRun && !found.Empty() {
		if nobody != nil {
			return nobody
		}
		if err := found.Remove(ctx); err != nil {
			return err
		}
		verb = "removed"
		if n := found.Connections(); n > 0 {
			verb = "removed as far as no connection needs it"
			defer p.line("IPVS still carries connections (%d): call this again later, or leave it to verdict run", n)
		}
	}
	for _, line := range found.Summary() {
		p.line("%s: %s", verb, line)
	}
	for _, line := range found.Kept() {
		p.line("stays: %s", line)
	}
	return p.err
}

// remarkAlone says so if nobody carries Services any more, now that our tables are gone.
func remarkAlone(ctx context.Context, w io.Writer) {
	if found, err := takeover.Find(ctx, takeover.Own{}); err == nil && !found.Carries() {
		fmt.Fprintln(w, "verdict: no kube-proxy has programmed this node either: nobody carries Services here now")
	}
}

// printer prints lines until it cannot.
type printer struct {
	w   io.Writer
	err error
}

func (p *printer) line(format string, args ...any) {
	if p.err == nil {
		_, p.err = fmt.Fprintf(p.w, format+"\n", args...)
	}
}

// ownRules says which rules of iptables are ours on this node, for commands beside a running proxy. The error says that there are no
// rules of ours at all, so that nobody would carry the Services without kube-proxy's.
func ownRules(ctx context.Context) (takeover.Own, error) {
	if hasTables() {
		return takeover.Own{}, nil
	}
	errNobody := errors.New("there are no rules of Verdict's here, so that nobody would carry the Services: start verdict run first")
	i, err := xtables.Inspect(ctx, iptshim.Options{})
	if err != nil { // without programs there are no rules of ours
		return takeover.Own{}, errNobody
	}
	defer i.Close()
	if ours, err := i.Present(ctx); err != nil || !ours {
		return takeover.Own{}, errors.Join(err, errNobody)
	}
	return takeover.Own{Variant: i.Programs().Variant.String(), Rules: true}, nil
}
