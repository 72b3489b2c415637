package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"
)

// maxDiffLines is how many lines diff shows without --all.
const maxDiffLines = 100

func newDiff() *cobra.Command {
	var o objectFlags
	var all, asJSON bool
	cmd := &cobra.Command{
		Use:   "diff",
		Short: "Show in what the kernel differs from what the objects ask for",
		Long: `Diff compares the kernel of this node with what the objects ask for, and prints what differs as nft would write it: lines
with - are in the kernel and should not be, lines with + should be there and are not. Then it counts by Service. Which
endpoint of a Service has which slot makes no difference. What is on its way from the objects to the kernel does not count
either: a difference has to last for half a second.

The objects come from --from PATH, --kubeconfig FILE, or --in-cluster, which is what counts if nothing else is given. Flags
such as --cluster-cidr are those of verdict run, and have to be the same; those that are not given are taken from the
kernel's rules. It only reads, beside a running proxy, and needs CAP_NET_ADMIN.

Exit status: 0 if there is no difference, 1 if there is one, 2 if something went wrong.`,
		Example: `  verdict diff --from examples/cluster.yaml --hostname-override node-1
  verdict diff --kubeconfig /etc/kubernetes/kubelet.conf --all`,
	}
	f := cmd.Flags()
	f.BoolVar(&all, "all", false, fmt.Sprintf("print all lines, not only the first %d", maxDiffLines))
	f.BoolVar(&asJSON, "json", false, "print JSON (docs/ANSWERS.md)")
	o.add(f)
	return comparing(cmd, func(ctx context.Context, cmd *cobra.Command) (same bool, err error) {
		if !o.given() {
			o.inCluster = true
		}
		c, err := o.compare(ctx)
		if err != nil {
			return false, err
		}
		if asJSON {
			return c.Same, writeJSON(cmd.OutOrStdout(), c)
		}
		s := newShow(cmd.OutOrStdout())
		c.printDiff(&s, all)
		return c.Same, s.broken
	})
}

// printDiff shows the lines that differ.
func (c *comparison) printDiff(s *show, all bool) {
	for _, n := range c.Notes {
		s.line("%s", s.paint(dim, "# "+n))
	}
	if c.Same {
		s.line("%s the kernel holds what %s asks for: %d Services (%s)", s.paint(green, "same:"), c.Objects, c.services, c.describe())
		return
	}
	bounded(s, c.wrongLines(s), maxDiffLines, all)
	var lines []string
	for _, d := range c.Differences {
		colour := red
		if d.Side == "wanted" {
			colour = green
		}
		lines = append(lines, s.paint(colour, d.text))
	}
	bounded(s, lines, maxDiffLines, all)
	if len(c.Services) > 0 {
		s.line("")
		s.line("%s", s.paint(dim, fmt.Sprintf("By Service (kernel: %s)", c.describe())))
		bounded(s, c.summary(s), maxShown, all)
	}
}
