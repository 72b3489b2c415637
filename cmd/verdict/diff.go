package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/verdict-proxy/verdict/internal/answers/inspect"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
)

func newDiff() *cobra.Command {
	var o inspect.ObjectFlags
	var all, asJSON bool
	cmd := &cobra.Command{
		Use:   "diff",
		Short: "Show the differences between the kernel and the objects",
		Long: `Diff compares the kernel of this node with what the objects ask for, and prints the differences as
nft would write them: lines with - are in the kernel and should not be, lines with + should be there
and are not. Then it counts them by Service. It ignores which endpoint of a Service has which slot,
and differences that last for less than half a second, as changes may be on their way to the kernel.

The objects come from --from PATH, --kubeconfig FILE, or --in-cluster; the last is the default.
Give flags such as --cluster-cidr the same values as for verdict run; diff takes missing ones from
the settings in the kernel. It only reads, beside a running proxy, and needs CAP_NET_ADMIN.

Exit status: 0 if there is no difference, 1 if there is one, 2 if something went wrong.`,
		Example: `  verdict diff --from examples/cluster.yaml --hostname-override node-1
  verdict diff --kubeconfig /etc/kubernetes/kubelet.conf --all`,
	}
	f := cmd.Flags()
	f.BoolVar(&all, "all", false, fmt.Sprintf("print all lines, not only the first %d", inspect.MaxDiffLines))
	addJSON(f, &asJSON, "print JSON (docs/ANSWERS.md)")
	o.AddFlags(f)
	return newCompareCommand(cmd, func(ctx context.Context, cmd *cobra.Command) (same bool, err error) {
		if !o.Given() {
			o.InCluster = true
		}
		c, err := compareTables(ctx, &o)
		if err != nil {
			return false, err
		}
		text := func(p *terminal.Printer) { c.PrintDiff(p, all) }
		return c.Same, inspect.Show(cmd.OutOrStdout(), asJSON, c.JSON(true), text)
	})
}
