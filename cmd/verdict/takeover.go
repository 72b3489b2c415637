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
		Long: `Takeover removes what a kube-proxy programmed on this node, in any of its modes: nftables tables,
chains of iptables (both variants), virtual services of IPVS, ipsets, and the device kube-ipvs0.
What others made stays, and so does what they use of kube-proxy's. "verdict run" does the same after
its start, unless it runs with --takeover=never.

It refuses while Verdict has no rules of its own, because nothing would serve the Services then. If
Verdict's rules are those of iptables, which have the same names as kube-proxy's, only kube-proxy's
are removed. No connection is lost: established ones live in connection tracking, and those of IPVS
continue until they end.

With --dry-run it only lists what there is.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return takeOver(cmd.Context(), cmd.OutOrStdout(), dryRun) },
	}
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "only list what would be removed")
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
		p.line("kube-proxy left nothing to remove")
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
			verb = "removed what no connection uses"
			defer p.line("%d connections still use kube-proxy's virtual services: call this again later, or leave it to "+
				"verdict run", n)
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

// warnNoRules prints a warning if no proxy has programmed this node, after Verdict's tables are removed.
func warnNoRules(ctx context.Context, w io.Writer) {
	if found, err := takeover.Find(ctx, takeover.Own{}); err == nil && !found.HasServices() {
		fmt.Fprintln(w, "verdict: no kube-proxy has programmed this node either: nobody programs Services here now")
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

// ownRules returns Verdict's own rules of iptables on this node, for commands beside a running proxy. It returns an
// error if there are none: then nothing would serve the Services without kube-proxy's rules.
func ownRules(ctx context.Context) (takeover.Own, error) {
	if backends.HasTables() {
		return takeover.Own{}, nil
	}
	errNobody := errors.New(
		"this node has no rules of Verdict, so no Services would be programmed: start verdict run first",
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
