package main

import (
	"fmt"

	"github.com/spf13/cobra"
)

// newClusterLog makes the plugin's log.
func newClusterLog(o *clusterOptions) *cobra.Command {
	var services []string
	var since string
	var elements, asJSON bool
	cmd := &cobra.Command{
		Use:   "log NODE",
		Short: "List what was written on a node, when and why",
		Long: `Log runs "verdict log" in the node's pod, which reads the ledger that the proxy keeps there if its
configuration has one (docs/LEDGER.md).`,
		Example: "  kubectl verdict log node-1 --since 10m --service shop/cart",
		Args:    cobra.ExactArgs(1),
	}
	o.completeArgs(cmd, nodeNames)
	f := cmd.Flags()
	f.StringSliceVar(&services, "service", nil, "only what concerns this Service, NAMESPACE/NAME; may be repeated")
	f.StringVar(&since, "since", "", "only what is not older: a duration such as 10m, or a time")
	f.BoolVar(&elements, "elements", false, "list the elements that were written")
	addJSON(f, &asJSON, "print a line of JSON for each record (docs/LEDGER.md)")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		var options []string
		if since != "" {
			options = append(options, "--since="+since)
		}
		for _, s := range services {
			options = append(options, "--service="+s)
		}
		if elements {
			options = append(options, "--elements")
		}
		if asJSON {
			options = append(options, "--json")
		}
		c, _, err := o.open(cmd)
		if err != nil {
			return err
		}
		r, err := c.Log(cmd.Context(), args[0], options)
		if err != nil {
			return err
		}
		return passOn(cmd, &r)
	}
	return cmd
}

// kubectlCompletion is what kubectl runs to complete the arguments of the plugin.
const kubectlCompletion = `#!/bin/sh
exec kubectl-verdict __complete "$@"
`

// newClusterCompletion makes what has kubectl complete the plugin's arguments.
func newClusterCompletion() *cobra.Command {
	return &cobra.Command{
		Use:   "completion",
		Short: "Print the script by which kubectl completes the plugin's arguments",
		Long: `Completion prints a script. kubectl, which completes the names of plugins itself, runs it to
complete their arguments, if a directory of your PATH has it under the name kubectl_complete-verdict.`,
		Example: `  kubectl verdict completion > ~/.local/bin/kubectl_complete-verdict
  chmod +x ~/.local/bin/kubectl_complete-verdict`,
		Args: noArgs(""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprint(cmd.OutOrStdout(), kubectlCompletion)
			return err
		},
	}
}
