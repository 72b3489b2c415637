package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"
)

func newVerify() *cobra.Command {
	var o objectFlags
	var all, asJSON bool
	cmd := &cobra.Command{
		Use:   "verify",
		Short: "Say whether the kernel holds what it should",
		Long: `Verify reads all of Verdict's tables in the kernel of this node and compares them with what they themselves say they should
hold: every table has a digest of its contents, written in the same transaction as the contents. It also compares sets,
chains and rules with those Verdict writes, and looks for elements that do not fit together. So it needs no objects, and
no flags of verdict run.

With --from PATH, --kubeconfig FILE or --in-cluster it compares with what these objects ask for as well, and counts what
differs by Service; verdict diff shows the lines. It only reads, beside a running proxy, and needs CAP_NET_ADMIN.

Exit status: 0 if all is as it should be, 1 if not, 2 if something went wrong.`,
		Example: `  verdict verify
  verdict verify --in-cluster --hostname-override node-1 --json`,
	}
	f := cmd.Flags()
	f.BoolVar(&all, "all", false, "print all lines, however many there are")
	f.BoolVar(&asJSON, "json", false, "print JSON (docs/ANSWERS.md)")
	o.add(f)
	return comparing(cmd, func(ctx context.Context, cmd *cobra.Command) (same bool, err error) {
		c, err := o.compare(ctx)
		if err != nil {
			return false, err
		}
		if asJSON {
			c.Differences = nil // diff shows them
			return c.Same, writeJSON(cmd.OutOrStdout(), c)
		}
		s := newShow(cmd.OutOrStdout())
		c.printVerify(&s, all)
		return c.Same, s.broken
	})
}

// printVerify shows what is wrong, if anything is.
func (c *comparison) printVerify(s *show, all bool) {
	for _, n := range c.Notes {
		s.line("%s", s.paint(dim, "# "+n))
	}
	s.line("%s", c.describe())
	bounded(s, c.wrongLines(s), maxShown, all)
	var lines []string
	for _, d := range c.Contradictions {
		lines = append(lines, s.paint(red, fmt.Sprintf("! %s %s", d.Family, d.Object)))
	}
	bounded(s, lines, maxShown, all)
	if len(c.Differences) > 0 {
		s.line("%s", s.paint(red, fmt.Sprintf("! %d lines differ from what %s asks for (verdict diff shows them):",
			len(c.Differences), c.Objects)))
		bounded(s, c.summary(s), maxShown, all)
	}
	switch {
	case !c.Same:
		s.line("%s the kernel does not hold what it should", s.paint(red, "wrong:"))
	case c.Objects != "":
		s.line("%s the kernel holds what was written, and what %s asks for: %d Services", s.paint(green, "right:"), c.Objects, c.services)
	default:
		s.line("%s the kernel holds what was written", s.paint(green, "right:"))
	}
}
