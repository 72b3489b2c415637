package main

import (
	"errors"
	"time"

	"github.com/spf13/cobra"

	"github.com/verdict-proxy/verdict/internal/answers/cluster"
	"github.com/verdict-proxy/verdict/internal/answers/cluster/trial"
	"github.com/verdict-proxy/verdict/internal/answers/inspect"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
)

func newClusterTest(o *clusterOptions) *cobra.Command {
	var t trial.Options
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "test",
		Short: "Make real connections through Services of every kind, from pods on all nodes",
		Long: `Test creates a namespace with a server and two clients on each node, one of them in the node's network,
and Services of every kind: cluster IP, node port, external IP, internalTrafficPolicy and
externalTrafficPolicy Local, session affinity, and one without endpoints; with --load-balancer also
one of that type. It connects from every client to each, over TCP and UDP, in each address family
that the cluster has, and to servers directly. For what fails, it asks "verdict explain" on that
node. Then it removes the namespace, also after Ctrl-C. -n names the namespace, which must not be there.

The pods run the image of Verdict's pods (--image). See docs/CLUSTER.md for the rights that this
takes, and what each case means.

Exit status: 0 all connections are as they should be, 1 some are not, 2 something went wrong, or a node
could not take part.`,
		Example: `  kubectl verdict test
  kubectl verdict test --nodes 3 --load-balancer`,
		Args: noArgs(""),
	}
	f := cmd.Flags()
	f.StringVar(&t.Image, "image", "", "the image of the pods, which must be Verdict's (default: that of its pods)")
	f.IntVar(&t.Nodes, "nodes", 50, "on how many nodes, at most")
	f.DurationVar(&t.Timeout, "timeout", 3*time.Minute, "how long the pods may take to start")
	f.DurationVar(&t.Dial, "dial-timeout", 3*time.Second, "how long a connection may take")
	f.BoolVar(&t.LoadBalancer, "load-balancer", false, "create a Service of type LoadBalancer, too")
	f.BoolVar(&t.Keep, "keep", false, "do not remove the namespace")
	addJSON(f, &asJSON, "print JSON")
	return diffStatus(cmd, o.connected(func(c *cluster.Cluster, _ string, _ []string) (int, error) {
		c.Progress, t.Namespace = nil, o.namespace
		if t.Nodes < 1 {
			return 0, errors.New("--nodes is less than 1")
		}
		said := terminal.NewPrinter(cmd.ErrOrStderr())
		t.Say = func(text string) { said.Line("%s", text) }
		r, err := trial.Run(cmd.Context(), c, t)
		if serr := inspect.Show(cmd.OutOrStdout(), asJSON, r, r.Print); serr != nil {
			return 0, errors.Join(err, serr)
		}
		return r.Code(), err
	}))
}
