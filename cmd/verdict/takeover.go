package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/verdict-proxy/verdict/internal/backends"
	"github.com/verdict-proxy/verdict/internal/takeover"
	"github.com/verdict-proxy/verdict/nft/iptshim"
	"github.com/verdict-proxy/verdict/nft/iptshim/xtables"
)

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
		p.line("kube-proxy is running here, as process %d: remove its DaemonSet, or it will write its rules again", pid)
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

// warnNoRules says so if nobody carries Services any more, now that our tables are gone.
func warnNoRules(ctx context.Context, w io.Writer) {
	if found, err := takeover.Find(ctx, takeover.Own{}); err == nil && !found.HasServices() {
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

// ownRules says which rules of iptables are ours on this node, for commands beside a running proxy. The error says
// that there are no rules of ours at all, so that nobody would carry the Services without kube-proxy's.
func ownRules(ctx context.Context) (takeover.Own, error) {
	if backends.HasTables() {
		return takeover.Own{}, nil
	}
	errNobody := errors.New(
		"there are no rules of Verdict's here, so that nobody would carry the Services: start verdict run first",
	)
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
