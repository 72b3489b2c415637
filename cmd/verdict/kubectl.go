package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/verdict-proxy/verdict/internal/answers/cluster"
	"github.com/verdict-proxy/verdict/internal/answers/inspect"
	"github.com/verdict-proxy/verdict/internal/proxy/node"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
)

// kubectlName is the name under which this program is kubectl's plugin.
const kubectlName = "kubectl-verdict"

// rootFor returns the command that a program of this name is.
func rootFor(program string) *cobra.Command {
	if strings.TrimSuffix(filepath.Base(program), filepath.Ext(program)) == kubectlName {
		return newKubectl()
	}
	return newRoot()
}

// clusterOptions are the flags of all commands of the plugin.
type clusterOptions struct {
	kubeconfig, context, namespace, proxyNamespace, selector string
	timeout                                                  time.Duration
	parallel                                                 int
	// connect replaces the connection to a cluster in tests.
	connect func(kubeconfig, kubeContext string) (cluster.API, cluster.Executor, string, error)
}

func newKubectl() *cobra.Command { return newKubectlWith(cluster.Connect) }

func newKubectlWith(
	connect func(kubeconfig, kubeContext string) (cluster.API, cluster.Executor, string, error),
) *cobra.Command {
	o := &clusterOptions{connect: connect}
	root := &cobra.Command{
		Use:   "kubectl verdict",
		Short: "Ask Verdict's proxies on all nodes",
		Long: `Kubectl verdict asks the proxies of all nodes: it finds the pods of Verdict's DaemonSet and runs
verdict in them, with your own rights. That takes the rights to list nodes and pods, and to create
pods/exec in the namespace of the DaemonSet; explain and wait also read pods, Services and
EndpointSlices, bundle reads logs, and test creates and removes a namespace (docs/CLUSTER.md).

Exit status of status, verify, diff, compare and wait: 0 all nodes are in order, 1 one is not, 2 something
went wrong or a node could not be asked; of plan: 0 nothing changes for packets, 1 something does, 2
likewise. The answers of the others are printed all the same.`,
		SilenceUsage:      true,
		SilenceErrors:     true,
		Version:           node.BuildInfo().Version,
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
		Annotations:       map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl verdict"},
	}
	f := root.PersistentFlags()
	f.StringVar(&o.kubeconfig, "kubeconfig", "", "kubeconfig file (default: as kubectl)")
	f.StringVar(&o.context, "context", "", "context of the kubeconfig file")
	f.StringVarP(&o.namespace, "namespace", "n", "", "namespace of names without one (default: the context's)")
	f.StringVar(&o.proxyNamespace, "verdict-namespace", cluster.DefaultNamespace, "namespace of the DaemonSet")
	f.StringVar(&o.selector, "selector", cluster.DefaultSelector, "label of the DaemonSet's pods")
	f.DurationVar(&o.timeout, "node-timeout", cluster.DefaultTimeout, "how long one node may take")
	f.IntVar(&o.parallel, "parallel", cluster.DefaultParallel, "how many nodes are asked at a time")
	root.AddCommand(newClusterStatus(o), newClusterServices(o), newClusterExplain(o), newClusterCompare(o, "verify"),
		newClusterCompare(o, "diff"), newClusterCompare(o, "compare"), newClusterLog(o), newClusterPlan(o),
		newClusterTop(o), newClusterFlows(o), newClusterBundle(o), newClusterTest(o), newClusterWait(o),
		newClusterDashboard(o), newVersion(), newClusterCompletion())
	setHelp(root)
	completeWords(root)
	return root
}

// open connects to the cluster.
func (o *clusterOptions) open(cmd *cobra.Command) (*cluster.Cluster, string, error) {
	api, exec, namespace, err := o.connect(o.kubeconfig, o.context)
	if err != nil {
		return nil, "", err
	}
	if o.namespace != "" {
		namespace = o.namespace
	}
	c := &cluster.Cluster{API: api, Exec: exec, Namespace: o.proxyNamespace, Selector: o.selector, Timeout: o.timeout,
		Parallel: o.parallel}
	if w, ok := cmd.ErrOrStderr().(*os.File); ok && terminal.Obeys(w) {
		c.Progress = func(done, of int) {
			fmt.Fprintf(w, "\r%d of %d nodes", done, of)
			if done == of {
				fmt.Fprint(w, "\r\x1b[K")
			}
		}
	}
	return c, namespace, nil
}

// connected connects to the cluster before a command runs.
func (o *clusterOptions) connected(run func(c *cluster.Cluster, namespace string, args []string) (int, error),
) func(cmd *cobra.Command, args []string) (int, error) {
	return func(cmd *cobra.Command, args []string) (int, error) {
		c, namespace, err := o.open(cmd)
		if err != nil {
			return 0, err
		}
		return run(c, namespace, args)
	}
}

// diffStatus gives a command of the plugin the exit statuses of diff.
func diffStatus(cmd *cobra.Command, run func(cmd *cobra.Command, args []string) (int, error)) *cobra.Command {
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		code, err := run(cmd, args)
		if err != nil {
			fmt.Fprintln(terminal.NewPrinter(cmd.ErrOrStderr()), "verdict:", err)
			code = exitTrouble
		}
		if code != exitSame {
			return exitStatus(code)
		}
		return nil
	}
	return cmd
}

func newClusterStatus(o *clusterOptions) *cobra.Command {
	var asJSON bool
	var again repeating
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show the sync status of every node, and where nodes differ",
		Long: `Status asks every node for its sync status, and compares what they have programmed. With --wait, it
exits with 0 once every node answers, is synced (nothing is pending, failing or quarantined) and has
programmed the same; after --timeout it says which node is not.`,
		Args: noArgs(""),
	}
	addJSON(cmd.Flags(), &asJSON, "print JSON (docs/CLUSTER.md)")
	again.addFlags(cmd, "every node is")
	return diffStatus(cmd, o.connected(func(c *cluster.Cluster, _ string, _ []string) (int, error) {
		if again.wait || again.watch {
			c.Progress = nil
		}
		code := exitSame
		unsynced, err := again.run(cmd, func(ctx context.Context) (*reading, error) {
			r, err := c.Status(ctx)
			if err != nil {
				return nil, err
			}
			code = r.Code()
			return &reading{r.Unsynced(), r.Steady(), func() error {
				return inspect.Show(cmd.OutOrStdout(), asJSON, r, r.Print)
			}}, nil
		})
		if unsynced != "" {
			fmt.Fprintln(terminal.NewPrinter(cmd.ErrOrStderr()), "verdict:", unsynced)
			code = max(code, exitDiffers)
		}
		if again.watch || again.wait && unsynced == "" {
			code = exitSame
		}
		return code, err
	}))
}

func newClusterExplain(o *clusterOptions) *cobra.Command {
	var to, live, asJSON bool
	cmd := &cobra.Command{
		Use:   "explain POD SERVICE[:PORT]",
		Short: "Show where packets from a pod to a Service go, on the pod's node",
		Long: `Explain runs "verdict explain" on the pod's node, for packets from the pod to the Service. The port is
a name or a number; a Service with one port needs none. With --to, it lists the Services that lead to
a pod.`,
		Example: `  kubectl verdict explain shop/web-0 svc/shop/cart:grpc
  kubectl verdict explain --to pod/shop/cart-7d9f`,
		Args: func(cmd *cobra.Command, args []string) error {
			if to {
				return cobra.ExactArgs(1)(cmd, args)
			}
			return cobra.ExactArgs(2)(cmd, args)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			c, namespace, err := o.open(cmd)
			if err != nil {
				return err
			}
			pod, port, err := cluster.ParseRef(args[0], namespace, "pod", "pods", "po")
			if err != nil || port != "" {
				return errors.Join(err, portless(args[0], port))
			}
			if to {
				led, err := c.LeadingTo(cmd.Context(), pod)
				if err != nil {
					return err
				}
				none := fmt.Sprintf("no Service of namespace %s leads to pod %s", pod.Namespace, pod.Name)
				return inspect.Show(cmd.OutOrStdout(), asJSON, led, func(p *terminal.Printer) { cluster.PrintLed(p, none, led) })
			}
			service, port, err := cluster.ParseRef(args[1], namespace, "svc", "service", "services")
			if err != nil {
				return err
			}
			asked, err := c.Resolve(cmd.Context(), pod, service, port)
			if err != nil {
				return err
			}
			return explainOn(cmd, c, asked, live, asJSON)
		},
	}
	o.completeArgs(cmd, podNames, serviceNames)
	cmd.Flags().BoolVar(&to, "to", false, "say which Services lead to the pod")
	cmd.Flags().BoolVar(&live, "live", false, "ask the node's kernel alone, and not the objects")
	addJSON(cmd.Flags(), &asJSON, "print JSON (docs/ANSWERS.md); with --to, a list of Services")
	return cmd
}

// portless is the error of a pod with a port.
func portless(text, port string) error {
	if port == "" {
		return nil
	}
	return fmt.Errorf("%.100q: the pod's port makes no difference, leave it out", text)
}

// explainOn asks one node, and prints what it says.
func explainOn(cmd *cobra.Command, c *cluster.Cluster, a *cluster.Asked, live, asJSON bool) error {
	var options []string
	if asJSON {
		options = append(options, "-o", "json")
	}
	r, err := c.Explain(cmd.Context(), a, live, options...)
	if err != nil {
		return err
	}
	if !asJSON {
		p := terminal.NewPrinter(cmd.OutOrStdout())
		p.Line("on node %s: verdict explain %s %s", r.Node, a.Source, a.Destination)
	}
	return passOn(cmd, &r)
}

// passOn prints what a node said.
func passOn(cmd *cobra.Command, r *cluster.Result) error {
	_, _ = terminal.NewPrinter(cmd.OutOrStdout()).Write(r.Stdout)
	if len(r.Stderr) > 0 {
		_, _ = fmt.Fprintf(terminal.NewPrinter(cmd.ErrOrStderr()), "%s\n", r.Stderr)
	}
	if r.Err != nil {
		return fmt.Errorf("node %s: %w", r.Node, r.Err)
	}
	if r.Code != exitOK {
		return exitStatus(r.Code)
	}
	return nil
}

// newClusterCompare makes verify, diff and compare.
func newClusterCompare(o *clusterOptions, name string) *cobra.Command {
	var all, asJSON bool
	cmd := &cobra.Command{Use: name, Args: noArgs("")}
	cmd.Short = map[string]string{
		"verify":  "Check on every node that the kernel holds what was written",
		"diff":    "Show on every node the differences between the kernel and the objects",
		"compare": "Check on every node that Verdict, kube-proxy and the objects do the same with every packet",
	}[name]
	addJSON(cmd.Flags(), &asJSON, "print JSON: the answer of each node")
	cmd.Flags().BoolVar(&all, "all", false, "print all lines, however many there are")
	return diffStatus(cmd, o.connected(func(c *cluster.Cluster, _ string, _ []string) (int, error) {
		if asJSON {
			a, err := c.CompareJSON(cmd.Context(), name)
			if err != nil {
				return 0, err
			}
			return a.Code(), inspect.Show(cmd.OutOrStdout(), true, a, nil)
		}
		p := terminal.NewPrinter(cmd.OutOrStdout())
		code, err := c.Compare(cmd.Context(), p, name, all)
		return code, errors.Join(err, p.Err())
	}))
}

func newClusterTop(o *clusterOptions) *cobra.Command {
	var interval time.Duration
	var all, asJSON bool
	cmd := &cobra.Command{
		Use:   "top",
		Short: "Show the connections per second of Services, from all nodes",
		Args:  noArgs(""),
	}
	cmd.Flags().DurationVar(&interval, "interval", 2*time.Second, "time between the two samples, at least 100ms")
	cmd.Flags().BoolVar(&all, "all", false, "print all service ports")
	addJSON(cmd.Flags(), &asJSON, "print JSON")
	return diffStatus(cmd, o.connected(func(c *cluster.Cluster, _ string, _ []string) (int, error) {
		c.Timeout += interval
		top, err := c.Top(cmd.Context(), cluster.TopOptions{Interval: interval, All: all})
		if err != nil {
			return 0, err
		}
		return top.Code(), inspect.Show(cmd.OutOrStdout(), asJSON, top, func(p *terminal.Printer) { top.Print(p, all) })
	}))
}

func newClusterWait(o *clusterOptions) *cobra.Command {
	var timeout, every time.Duration
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "wait SERVICE",
		Short: "Wait until every node has programmed what the API has of a Service now",
		Long: `Wait reads the Service and its EndpointSlices from the API, and asks every node until each has
programmed that, or something newer. It does not check ingress proxies, nor load balancers
outside of the cluster.`,
		Example: "  kubectl verdict wait shop/cart --timeout 30s",
		Args:    cobra.ExactArgs(1),
	}
	o.completeArgs(cmd, serviceNames)
	cmd.Flags().DurationVar(&timeout, "timeout", time.Minute, "how long to wait")
	cmd.Flags().DurationVar(&every, "interval", 500*time.Millisecond, "how often the nodes that are left are asked")
	addJSON(cmd.Flags(), &asJSON, "print JSON")
	return diffStatus(cmd, o.connected(func(c *cluster.Cluster, namespace string, args []string) (int, error) {
		c.Progress = nil
		service, _, err := cluster.ParseRef(args[0], namespace, "svc", "service", "services")
		if err != nil {
			return 0, err
		}
		ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
		defer cancel()
		begin := time.Now()
		nodes, left, err := c.Wait(ctx, service, every)
		if asJSON && (err == nil || errors.Is(err, cluster.ErrBehind)) {
			code := exitSame
			if err != nil {
				code = exitDiffers
			}
			return code, inspect.Show(cmd.OutOrStdout(), true, waited{nodes, time.Since(begin).Seconds(), left}, nil)
		}
		return printWaited(terminal.NewPrinter(cmd.OutOrStdout()), nodes, left, time.Since(begin), err)
	}))
}

// waited is what wait prints with -o json.
type waited struct {
	Nodes   int               `json:"nodes"`
	Seconds float64           `json:"seconds"`
	Left    []cluster.Waiting `json:"left,omitempty"`
}

// printWaited prints what came of a wait, and returns the exit status.
func printWaited(p *terminal.Printer, nodes int, left []cluster.Waiting, took time.Duration, err error) (int, error) {
	if !errors.Is(err, cluster.ErrBehind) {
		if err == nil {
			p.Line("%s have programmed it, after %v", terminal.Plural(nodes, "node"),
				took.Round(10*time.Millisecond))
		}
		return exitSame, err
	}
	p.Line("%d of %s have not programmed it:", len(left), terminal.Plural(nodes, "node"))
	for _, l := range left {
		p.Line("  %s: %s", l.Node, l.Why)
	}
	return exitDiffers, nil
}
