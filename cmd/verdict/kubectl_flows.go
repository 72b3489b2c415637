package main

import (
	"encoding/json"
	"net/netip"
	"strings"

	"github.com/spf13/cobra"

	"github.com/verdict-proxy/verdict/internal/answers/cluster"
	"github.com/verdict-proxy/verdict/internal/answers/inspect"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
)

// nodeRecords is how many records the plugin asks a node for, unless --limit says otherwise.
const nodeRecords = 1000

// newClusterFlows makes the plugin's flows.
func newClusterFlows(o *clusterOptions) *cobra.Command {
	var q flowsQuestion
	cmd := &cobra.Command{
		Use:   "flows [SERVICE]",
		Short: "Show who connected to Services on all nodes, and how it ended",
		Long: `Flows runs "verdict flows" on every node, and merges the records by time: each line has the node that
recorded the connection, which is the client's, or the one that packets from outside reach first.
Below, each node says what its records miss, and nodes without an answer are named. Records must be
on (docs/FLOWS.md).`,
		Example: `  kubectl verdict flows shop/cart --failed --since 1h
  kubectl verdict flows --follow --from shop/web-0
  kubectl verdict flows --zones --price 0.02`,
		Args: cobra.MaximumNArgs(1),
	}
	o.completeArgs(cmd, serviceNames)
	q.addFlags(cmd.Flags(), nodeRecords)
	return diffStatus(cmd, o.connected(func(c *cluster.Cluster, namespace string, args []string) (int, error) {
		if err := q.check(); err != nil {
			return 0, err
		}
		if len(args) > 0 {
			service, _, err := cluster.ParseRef(args[0], namespace, "svc", "service", "services")
			if err != nil {
				return 0, err
			}
			q.Service = service.Namespace + "/" + service.Name
		}
		if _, err := netip.ParseAddr(q.From); err != nil && q.From != "" && !strings.Contains(q.From, "/") {
			q.From = namespace + "/" + q.From
		}
		if q.Zones {
			z, err := c.Zones(cmd.Context(), &q.Question, q.price)
			if err != nil {
				return 0, err
			}
			return z.Code(), inspect.Show(cmd.OutOrStdout(), q.json, z, func(p *terminal.Printer) { z.Print(p, q.price) })
		}
		to := &cluster.Flows{JSON: json.NewEncoder(cmd.OutOrStdout())}
		if !q.json {
			to.Printer = terminal.NewPrinter(cmd.OutOrStdout())
		}
		ask := c.Flows
		if q.Follow {
			c.Progress, ask = nil, c.FollowFlows
		}
		err := ask(cmd.Context(), &q.Question, to)
		return to.Code(), err
	}))
}
