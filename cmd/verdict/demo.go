package main

import (
	"errors"
	"fmt"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/demo"
)

func newDemo() *cobra.Command {
	o := demo.Options{StageTime: time.Second}
	var ruleset bool
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "See it work in network namespaces",
		Long: `Demo builds a cluster of network namespaces: two nodes, three backends, a client in a pod and one
outside. It writes manifests for a few Services, runs the proxy on them as "verdict run" does, and
opens real connections over IPv4 and IPv6 while Services are scaled and endpoints drained. It ends
in under 30 seconds and leaves nothing behind.

It needs root or, for other users, unprivileged user namespaces. It changes nothing on the machine
itself and needs no other program. The exit status is 1 if an expectation failed.`,
		Args: noArgs(""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			status, done, err := lab.Enter()
			switch {
			case err != nil:
				fmt.Fprintln(cmd.ErrOrStderr(), "verdict: the demo may not create network namespaces here:", err)
				return exitStatus(exitUnsupported)
			case done && status != exitOK:
				return exitStatus(status)
			case done:
				return nil
			}
			signal.Ignore(syscall.SIGPIPE) // "verdict demo | head" must not end it before it has tidied up
			ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGHUP)
			defer stop()
			o.Out, o.Warnings, o.Ruleset = cmd.OutOrStdout(), cmd.ErrOrStderr(), ruleset
			if err := demo.Run(ctx, o); !errors.Is(err, demo.ErrFailed) {
				return err
			}
			return exitStatus(exitError)
		},
	}
	cmd.Flags().BoolVar(&ruleset, "ruleset", false, "print the ruleset at the end, as nft lists it")
	return cmd
}
