package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/verdict-proxy/verdict/conformance/cluster"
)

// gatewayOptions are the flags of "cluster gateway".
type gatewayOptions struct {
	channel, class, report string
	runs, weighted         int
}

func newGateway(open opener) *cobra.Command {
	o := gatewayOptions{}
	cmd := &cobra.Command{Use: "gateway [-- FLAGS]", Short: "Run upstream's conformance suite of Gateway API on the cluster",
		Long: "Run upstream's conformance suite of Gateway API on the cluster, which must be up, with the suite's flags.",
		RunE: func(cmd *cobra.Command, flags []string) error {
			c, err := open(cmd.OutOrStdout())
			if err != nil {
				return err
			}
			return o.run(cmd.Context(), c, flags)
		}}
	cmd.Flags().StringVar(&o.channel, "channel", "standard", "definitions of Gateway API: standard or experimental")
	cmd.Flags().StringVar(&o.class, "class", "verdict",
		"the GatewayClass: with verdict, clients come from outside; otherwise from a node")
	cmd.Flags().StringVar(&o.report, "report", "bin/gateway-conformance", "the directory that gets report and output of each run")
	cmd.Flags().IntVar(&o.runs, "runs", 1, "how often the suite is run")
	cmd.Flags().IntVar(&o.weighted, "weighted", 0, "run the weighted tests so often in place of the suite")
	return cmd
}

func (o *gatewayOptions) run(ctx context.Context, c *cluster.Cluster, flags []string) error {
	var err error
	if o.report, err = filepath.Abs(o.report); err == nil {
		err = os.MkdirAll(o.report, 0o755)
	}
	if err != nil {
		return err
	}
	suite, err := o.prepare(ctx, c)
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

// prepare installs all that the suite needs, and returns its program.
func (o *gatewayOptions) prepare(ctx context.Context, c *cluster.Cluster) (string, error) {
	if err := errors.Join(c.LoadVerdict(ctx, c.Source(), cluster.VerdictImage), c.LoadEcho(ctx)); err != nil {
		return "", err
	}
	if err := c.InstallGateway(ctx, cluster.VerdictImage, o.channel); err != nil {
		return "", err
	}
	for _, name := range []string{"daemonset/verdict", "deployment/verdict-collector"} {
		if _, err := c.Kubectl(ctx, "-n", "kube-system", "rollout", "status", name, "--timeout=3m"); err != nil {
			return "", err
		}
	}
	if err := c.Balance(ctx); err != nil {
		return "", err
	}
	return c.Suite(ctx)
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
