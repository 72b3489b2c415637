package main

import (
	"context"
	"errors"

	"github.com/spf13/cobra"

	"github.com/verdict-proxy/verdict/internal/answers/inspect"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
)

func newVerify() *cobra.Command {
	var o inspect.ObjectFlags
	var all, asJSON, packets bool
	cmd := &cobra.Command{
		Use:   "verify",
		Short: "Check that the kernel holds what was written",
		Long: `Verify reads all of Verdict's tables in the kernel of this node, and compares their contents with the
digests in them, which Verdict writes in the same transactions. It also compares sets, chains and
rules with those that Verdict writes, and looks for elements that do not match each other. It needs
no objects, and no flags of verdict run.

With --from PATH, --kubeconfig FILE or --in-cluster it also compares with what these objects ask
for, and counts the differences by Service; verdict diff shows the lines. It only reads, beside a
running proxy, and needs CAP_NET_ADMIN.

At the end, verify lists what else on this host stops packets of Services, and how to fix it
(docs/TROUBLESHOOTING.md). This does not change the exit status.

With --packets, verify compares where packets go, in place of what is written: it walks every class
of packets through Verdict's rules in the kernel, and through the objects (docs/COMPARE.md).

Exit status: 0 if everything is in sync, 1 if not, 2 if something went wrong.`,
		Example: `  verdict verify
  verdict verify --in-cluster --hostname-override node-1 --json
  verdict verify --packets --kubeconfig /etc/kubernetes/kubelet.conf`,
	}
	f := cmd.Flags()
	f.BoolVar(&all, "all", false, "print all lines, however many there are")
	addJSON(f, &asJSON, "print JSON (docs/ANSWERS.md)")
	f.BoolVar(&packets, "packets", false, "compare what happens to packets, in every class; needs objects")
	o.AddFlags(f)
	return newCompareCommand(cmd, func(ctx context.Context, cmd *cobra.Command) (same bool, err error) {
		if packets {
			return verifyPackets(ctx, cmd, o, asJSON)
		}
		c, err := compareTables(ctx, &o)
		if err != nil {
			return false, err
		}
		short := c.JSON(false) // diff shows the differences
		return c.Same, inspect.Show(cmd.OutOrStdout(), asJSON, short, func(p *terminal.Printer) { c.PrintVerify(p, all) })
	})
}

// verifyPackets walks every class of packets through Verdict's tables and through the objects.
func verifyPackets(ctx context.Context, cmd *cobra.Command, o inspect.ObjectFlags, asJSON bool) (bool, error) {
	if !o.Given() {
		return false, errors.New("--packets needs objects: --from PATH, --kubeconfig FILE or --in-cluster")
	}
	p := packetOptions{objects: o, json: asJSON, onlyVerdict: true}
	return p.run(ctx, cmd)
}
