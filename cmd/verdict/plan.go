package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/verdict-proxy/verdict/internal/answers/inspect"
	"github.com/verdict-proxy/verdict/internal/answers/plan"
	"github.com/verdict-proxy/verdict/internal/proxy/backends"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
	"github.com/verdict-proxy/verdict/nft/kernel"
	"github.com/verdict-proxy/verdict/sync/watch"
)

// planOptions are what the command line of plan says.
type planOptions struct {
	objects            inspect.ObjectFlags
	files              planFiles
	live               bool
	json, all, verbose bool
	failOn             []string
}

// planFiles are the flags that name a change.
type planFiles struct{ watch.ChangeFiles }

func (p *planFiles) addFlags(f *pflag.FlagSet) {
	f.StringArrayVarP(&p.Apply, "filename", "f", nil,
		"manifests to apply: a file, a directory, or - (standard input); may be repeated")
	f.StringArrayVar(&p.Delete, "delete", nil, "manifests of objects to delete; may be repeated")
	f.StringArrayVar(&p.Gone, "delete-object", nil,
		"an object to delete, KIND/NAMESPACE/NAME as Service/shop/cart; may be repeated")
}

// check checks the flags, and that the files are there, before anybody else is asked. Others says how many more flags
// read standard input.
func (p *planFiles) check(others int) error {
	if len(p.Apply)+len(p.Delete)+len(p.Gone) == 0 {
		return errors.New("there is no change: give -f FILE, --delete FILE or --delete-object KIND/NAMESPACE/NAME")
	}
	for flag, paths := range map[string][]string{"-f": p.Apply, "--delete": p.Delete} {
		for _, path := range paths {
			if path == "-" {
				others++
				continue
			}
			if _, err := os.Stat(path); err != nil {
				return fmt.Errorf("%s: %w", flag, err)
			}
		}
	}
	if others > 1 {
		return errors.New("only one of -f, --delete and --from can be - (standard input)")
	}
	return nil
}

func newPlan() *cobra.Command {
	var o planOptions
	cmd := &cobra.Command{
		Use:   "plan",
		Short: "Show what a change of objects would do on this node",
		Long: `Plan shows what a change of Services, EndpointSlices or the Node would do on this node, and changes
nothing. It shows which elements Verdict would write, which addresses would open, close or answer
differently, which clients source ranges would admit or exclude, each endpoint's chance before and
after, and what would happen to the connections that are open now.

The present objects come from --from PATH, --kubeconfig FILE, or --in-cluster (the default). -f takes
manifests as "kubectl apply" does, and --delete as "kubectl delete" does. A manifest replaces the
whole object, except for fields that the API server allocates or keeps: plan takes these from the
present object. To have the API server complete a manifest:

  kubectl apply --dry-run=server -o yaml -f change.yaml | verdict plan --kubeconfig FILE -f -

If Verdict has programmed this node, plan starts from the kernel's tables and lists the open
connections, which needs CAP_NET_ADMIN; --live=false skips that. docs/PLAN.md explains the answer.
Give flags such as --cluster-cidr the same values as for verdict run; plan takes missing ones from
the settings in the kernel.

Exit status: 0 if nothing changes for packets, 1 if something does, 2 if something went wrong.`,
		Example: `  verdict plan -f change.yaml --kubeconfig /etc/kubernetes/kubelet.conf
  verdict plan --from dump.yaml --hostname-override node-1 -f new/ --delete old.yaml --fail-on cuts`,
	}
	f := cmd.Flags()
	o.files.addFlags(f)
	f.BoolVar(&o.live, "live", true, "look at this node's kernel, if Verdict has programmed it")
	f.BoolVarP(&o.verbose, "verbose", "v", false, "print what is written, element by element")
	f.BoolVar(&o.all, "all", false, "print whole lists")
	addFailOn(f, &o.failOn)
	addJSON(f, &o.json, "print JSON (docs/PLAN.md)")
	o.objects.AddFlags(f)
	return newCompareCommand(cmd, func(ctx context.Context, cmd *cobra.Command) (same bool, err error) {
		p, err := o.plan(ctx)
		if err != nil {
			return false, err
		}
		return !p.Has(o.failOn), inspect.Show(cmd.OutOrStdout(), o.json, p, func(to *terminal.Printer) {
			p.Print(to, plan.TextOptions{All: o.all, Verbose: o.verbose})
		})
	})
}

func addFailOn(f *pflag.FlagSet, words *[]string) {
	f.StringSliceVar(words, "fail-on", []string{plan.Any},
		"the effects that make the exit status 1: "+strings.Join(plan.Words(), ", "))
}

// checkFailOn checks the words of --fail-on.
func checkFailOn(words []string) error {
	for _, w := range words {
		if !slices.Contains(plan.Words(), w) {
			return fmt.Errorf("--fail-on: %.100q is none of %s", w, strings.Join(plan.Words(), ", "))
		}
	}
	return nil
}

// plan reads everything and makes the plan.
func (o *planOptions) plan(ctx context.Context) (p *plan.Plan, err error) {
	if !o.objects.Given() {
		o.objects.InCluster = true
	}
	stdin := 0
	if o.objects.From == "-" {
		stdin++
	}
	if err := errors.Join(o.files.check(stdin), checkFailOn(o.failOn)); err != nil {
		return nil, err
	}
	if err := o.objects.Check(); err != nil {
		return nil, err
	}
	q := plan.Question{Objects: &o.objects, Files: o.files.ChangeFiles}
	settings := o.objects.Policy.Settings()
	if q.Counters, err = backends.CountersWithin(settings.CounterMemoryMiB); err != nil {
		return nil, err
	}
	if !o.live {
		return q.Ask(ctx)
	}
	q.Inspector, err = backends.Inspect(ctx, backends.InspectOptions{Settings: settings})
	switch {
	case errors.Is(err, kernel.ErrRights):
		return nil, fmt.Errorf("%w; --live=false plans from the objects alone", err)
	case err != nil:
		return nil, err
	}
	defer func() { err = errors.Join(err, q.Inspector.Close()) }()
	return q.Ask(ctx)
}

// newClusterPlan makes the plugin's plan.
func newClusterPlan(o *clusterOptions) *cobra.Command {
	var files planFiles
	var node, output string
	var all bool
	var failOn []string
	cmd := &cobra.Command{
		Use:   "plan",
		Short: "Show what a change of objects would do on every node",
		Long: `Plan runs "verdict plan" on every node, and adds up the answers. The nodes read the present objects
from the API server.`,
		Example: `  kubectl apply --dry-run=server -o yaml -f change.yaml | kubectl verdict plan -f -
  kubectl verdict plan --delete-object Service/shop/cart --node node-1`,
		Args: noArgs(""),
	}
	f := cmd.Flags()
	files.addFlags(f)
	f.StringVar(&node, "node", "", "print all that this node says")
	f.StringVarP(&output, "output", "o", "text", "text or json")
	f.BoolVar(&all, "all", false, "print whole lists")
	addFailOn(f, &failOn)
	return diffStatus(cmd, func(cmd *cobra.Command, _ []string) (int, error) {
		if err := errors.Join(files.check(0), checkFailOn(failOn)); err != nil {
			return 0, err
		}
		c, _, err := o.open(cmd)
		if err != nil {
			return 0, err
		}
		options := []string{"--fail-on=" + strings.Join(failOn, ",")}
		if node != "" {
			if all {
				options = append(options, "--all")
			}
			to := terminal.NewPrinter(cmd.OutOrStdout())
			code, err := c.PlanOn(cmd.Context(), to, node, files.ChangeFiles, append(options, "-o", output))
			return code, errors.Join(err, to.Err())
		}
		r, err := c.Plan(cmd.Context(), files.ChangeFiles, options)
		if err != nil {
			return 0, err
		}
		show := func(to *terminal.Printer) { r.Print(to, all) }
		return r.Code(), inspect.Show(cmd.OutOrStdout(), output == "json", r, show)
	})
}
