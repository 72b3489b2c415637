package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/verdict-proxy/verdict/internal/answers/inspect"
	"github.com/verdict-proxy/verdict/internal/proxy/backends"
	"github.com/verdict-proxy/verdict/internal/proxy/takeover"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
	"github.com/verdict-proxy/verdict/nft/iptshim"
	"github.com/verdict-proxy/verdict/nft/iptshim/xtables"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

func newTakeover() *cobra.Command {
	var dryRun, asJSON bool
	var from inspect.ObjectFlags
	cmd := &cobra.Command{
		Use:   "takeover",
		Short: "Remove what a kube-proxy left on this node",
		Long: `Takeover removes what a kube-proxy programmed on this node, in any of its modes: nftables tables,
chains of iptables (both variants), virtual services of IPVS, ipsets, and the device kube-ipvs0.
It keeps what other programs made, and what they use of kube-proxy's. "verdict run" does the same after
its start, unless it runs with --takeover=never.

It refuses while Verdict has no rules of its own, because nothing would serve the Services then. If
Verdict's rules are those of iptables, which have the same names as kube-proxy's, only kube-proxy's
are removed. No connection is lost: established ones live in connection tracking, and those of IPVS
continue until they end.

With --dry-run, takeover only lists what there is. With objects, it also reports whether the ranges
of Services overlap addresses of nodes, pods or the API server.`,
		Args: noArgs(""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := from.Check(); err != nil {
				return err
			}
			t, err := takeOver(cmd.Context(), dryRun)
			if err == nil && dryRun {
				t.Overlap, err = describeOverlaps(cmd.Context(), &from)
			}
			if t == nil {
				return err
			}
			return errors.Join(err, inspect.Show(cmd.OutOrStdout(), asJSON, t, t.print))
		},
	}
	from.AddFlags(cmd.Flags())
	addJSON(cmd.Flags(), &asJSON, "print JSON")
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "only list what would be removed")
	return cmd
}

// describeOverlaps says where the ranges of Services hold addresses of others.
func describeOverlaps(ctx context.Context, from *inspect.ObjectFlags) (string, error) {
	if !from.Given() {
		return "not looked for: --in-cluster, --kubeconfig FILE or --from PATH say which ranges Services have", nil
	}
	objects, err := from.Load(ctx, nil, true)
	if err != nil {
		return "", err
	}
	objects.PrintProblems()
	found := dataplane.Overlaps(objects.Config, objects.Snap)
	switch {
	case len(objects.Snap.ServiceCIDRs) == 0:
		return "the objects have no ServiceCIDR; Verdict refuses nothing by range", nil
	case len(found) == 0:
		return "none, as far as this host knows", nil
	}
	return fmt.Sprintf("the range of Services %s: %s", dataplane.DescribeOverlaps(found), dataplane.OverlapAdvice), nil
}

// takenOver is what takeover found of a kube-proxy, and did.
type takenOver struct {
	// Running are the processes of a kube-proxy that runs.
	Running []int `json:"running,omitempty"`
	// Removed says that what was Found was removed, but for what is in use by Connections.
	Removed     bool     `json:"removed"`
	Connections int      `json:"connections,omitempty"`
	Found       []string `json:"found,omitempty"`
	// Kept are objects that stay, and why.
	Kept []string `json:"kept,omitempty"`
	// Overlap says where the ranges of Services hold addresses of others; only without removing.
	Overlap string `json:"overlap,omitempty"`
}

// takeOver removes what there is of a kube-proxy, and says what it was and what stays.
func takeOver(ctx context.Context, dryRun bool) (*takenOver, error) {
	own, nobody := ownRules(ctx)
	found, err := takeover.Find(ctx, own)
	if err != nil {
		return nil, err
	}
	t := &takenOver{Running: found.Running(), Found: found.Summary(), Kept: found.Kept()}
	if dryRun || found.Empty() {
		return t, nil
	}
	if nobody != nil {
		return nil, nobody
	}
	if err := found.Remove(ctx); err != nil {
		return nil, err
	}
	t.Removed, t.Connections = true, found.Connections()
	return t, nil
}

// print prints it as text.
func (t *takenOver) print(p *terminal.Printer) {
	for _, pid := range t.Running {
		p.Line("kube-proxy is running here, as process %d: remove its DaemonSet, or it will write its rules again", pid)
	}
	verb := "found"
	switch {
	case len(t.Found) == 0:
		p.Line("kube-proxy left nothing to remove")
	case t.Removed && t.Connections > 0:
		verb = "removed what no connection uses"
	case t.Removed:
		verb = "removed"
	}
	for _, line := range t.Found {
		p.Line("%s: %s", verb, line)
	}
	for _, line := range t.Kept {
		p.Line("stays: %s", line)
	}
	if t.Connections > 0 {
		p.Line("still in use by %s: kube-proxy's virtual services; call this again later, or leave it to verdict run",
			terminal.Plural(t.Connections, "connection"))
	}
	if t.Overlap != "" {
		p.Line("overlap: %s", t.Overlap)
	}
}

// warnNoRules prints a warning if no proxy has programmed this node, after Verdict's tables are removed.
func warnNoRules(ctx context.Context, w io.Writer) {
	if found, err := takeover.Find(ctx, takeover.Own{}); err == nil && !found.HasServices() {
		fmt.Fprintln(w, "verdict: warning: no Service proxy is left on this node; Services are not programmed")
	}
}

// ownRules returns Verdict's own rules of iptables on this node, for commands beside a running proxy. It returns an
// error if there are none: then nothing would serve the Services without kube-proxy's rules.
func ownRules(ctx context.Context) (takeover.Own, error) {
	if backends.HasTables() {
		return takeover.Own{}, nil
	}
	errNobody := errors.New(
		"this node has no rules of Verdict, so no Services would be programmed: start verdict run first")
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
