package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/spf13/cobra"

	"github.com/verdict-proxy/verdict/conformance/cluster"
	"github.com/verdict-proxy/verdict/conformance/cluster/gateways"
)

// gatewayOptions are the flags of "cluster gateway" and its commands.
type gatewayOptions struct {
	channel, class, report, match string
	runs, weighted                int
}

func newGateway(open opener) *cobra.Command {
	o := gatewayOptions{}
	cmd := &cobra.Command{Use: "gateway", Short: "Test the controller of Gateways on the cluster, which must be up"}
	cmd.PersistentFlags().StringVar(&o.channel, "channel", "standard",
		"definitions of Gateway API: standard or experimental")
	suite := &cobra.Command{Use: "suite [-- FLAG...]", Short: "Run upstream's conformance suite, with flags of its own",
		RunE: func(cmd *cobra.Command, flags []string) error {
			c, err := open(cmd.OutOrStdout())
			if err != nil {
				return err
			}
			return o.suite(cmd.Context(), c, flags)
		}}
	suite.Flags().StringVar(&o.class, "class", "verdict",
		"the GatewayClass: with verdict, clients come from outside; otherwise from a node")
	suite.Flags().StringVar(&o.report, "report", "bin/gateway", "the directory that gets report and output of each run")
	suite.Flags().IntVar(&o.runs, "runs", 1, "how often the suite is run")
	suite.Flags().IntVar(&o.weighted, "weighted", 0, "run the weighted tests so often in place of the suite")
	tell := &cobra.Command{Use: "stories", Short: "Tell stories of Gateways under clients", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := open(cmd.OutOrStdout())
			if err != nil {
				return err
			}
			return o.tell(cmd.Context(), c)
		}}
	tell.Flags().StringVar(&o.match, "run", "", "tell only stories whose names match this regular expression")
	cmd.AddCommand(suite, tell)
	return cmd
}

// tell tells the stories in turn.
func (o *gatewayOptions) tell(ctx context.Context, c *cluster.Cluster) error {
	chosen, err := regexp.Compile(o.match)
	if err != nil {
		return fmt.Errorf("--run: %w", err)
	}
	if err := o.install(ctx, c); err != nil {
		return err
	}
	b := &gateways.Bed{Cluster: c}
	if err := b.Prepare(ctx); err != nil {
		return err
	}
	for _, s := range gateways.All {
		if !chosen.MatchString(s.Name) {
			continue
		}
		text, e := s.Do(ctx, b)
		if e != nil {
			e = fmt.Errorf("%s: %w", s.Name, e)
		}
		c.Log("%s: %s %v", s.Name, text, e)
		err = errors.Join(err, e)
	}
	return err
}

func (o *gatewayOptions) suite(ctx context.Context, c *cluster.Cluster, flags []string) error {
	var err error
	if o.report, err = filepath.Abs(o.report); err == nil {
		err = os.MkdirAll(o.report, 0o755)
	}
	if err != nil {
		return err
	}
	if err := errors.Join(o.install(ctx, c), c.LoadEcho(ctx)); err != nil {
		return err
	}
	suite, err := c.Suite(ctx)
	if err != nil {
		return err
	}
	if o.weighted > 0 {
		return o.once(ctx, c, "weighted", suite, append(flags, "-test.run=^TestWeighted$",
			fmt.Sprintf("-weighted=%d", o.weighted))...)
	}
	failed := 0
	for i := range o.runs {
		name := fmt.Sprintf("run-%02d", i+1)
		if err := o.once(ctx, c, name, suite, append(flags, "-test.run=^TestConformance$")...); err != nil {
			failed++
			c.Log("%s: %v", name, err)
			continue
		}
		c.Log("%s passed", name)
	}
	if failed > 0 {
		return fmt.Errorf("%d of %d runs failed", failed, o.runs)
	}
	return ctx.Err()
}

// install installs Verdict with the controller, and gives load balancers' addresses until ctx ends.
func (o *gatewayOptions) install(ctx context.Context, c *cluster.Cluster) error {
	if err := c.LoadVerdict(ctx, c.Source(), cluster.VerdictImage); err != nil {
		return err
	}
	if err := c.InstallGateway(ctx, cluster.VerdictImage, o.channel); err != nil {
		return err
	}
	for _, name := range []string{"daemonset/verdict", "deployment/verdict-collector"} {
		// Pods of a former image of the same name stay otherwise.
		if _, err := c.Kubectl(ctx, "-n", "kube-system", "rollout", "restart", name); err != nil {
			return err
		}
		if _, err := c.Kubectl(ctx, "-n", "kube-system", "rollout", "status", name, "--timeout=3m"); err != nil {
			return err
		}
	}
	_, err := c.Kubectl(ctx, "wait", "gatewayclass", "--all", "--for=condition=Accepted", "--timeout=1m")
	return errors.Join(err, c.Balance(ctx))
}

// once runs the suite's program, whose output goes to a file.
func (o *gatewayOptions) once(ctx context.Context, c *cluster.Cluster, name, suite string, flags ...string) error {
	out, err := os.Create(filepath.Join(o.report, name+".txt"))
	if err != nil {
		return err
	}
	defer out.Close()
	from := c.Nodes[0].Netns()
	if o.class == "verdict" {
		from = c.Outside()
	}
	version, err := version(ctx, c.Source())
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "nsenter", append([]string{"--net=/run/netns/" + from, suite, "-test.v",
		"-test.timeout=2h", "-conformance-options-file=options.yaml", "-kubeconfig=" + c.Kubeconfig(),
		"-gateway-class=" + o.class, "-version=" + version,
		"-report-output=" + filepath.Join(o.report, name+".yaml")}, flags...)...)
	cmd.Dir = filepath.Join(c.Source(), "conformance", "gateway")
	cmd.Stdout, cmd.Stderr = out, out
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%w: see %s", err, out.Name())
	}
	return nil
}

// version is what the suite's report says of the product.
func version(ctx context.Context, source string) (string, error) {
	out, err := exec.CommandContext(ctx, "git", "-C", source, "describe", "--tags", "--always", "--dirty").Output()
	return strings.TrimSpace(string(out)), err
}
