package main

import (
	"context"
	"errors"

	"github.com/spf13/cobra"

	"github.com/verdict-proxy/verdict/internal/answers/inspect"
	"github.com/verdict-proxy/verdict/internal/proxy/backends"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
)

// Exit statuses of the commands that compare, which are those of diff(1).
const (
	exitSame = iota
	exitDiffers
	exitTrouble
)

// newCompareCommand gives a command the exit statuses of diff: whatever goes wrong is 2.
func newCompareCommand(
	cmd *cobra.Command,
	run func(ctx context.Context, cmd *cobra.Command) (same bool, err error),
) *cobra.Command {
	trouble := func(err error) error {
		terminal.Warn(err)
		return exitStatus(exitTrouble)
	}
	cmd.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error { return trouble(flagError(cmd, err)) })
	cmd.Args = func(cmd *cobra.Command, args []string) error {
		if err := noArgs("")(cmd, args); err != nil {
			return trouble(err)
		}
		return nil
	}
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		switch same, err := run(cmd.Context(), cmd); {
		case err != nil:
			return trouble(err)
		case !same:
			return exitStatus(exitDiffers)
		}
		return nil
	}
	return cmd
}

// compareTables compares the kernel of this node with what it says itself, and with objects if there are any.
func compareTables(ctx context.Context, o *inspect.ObjectFlags) (c *inspect.Comparison, err error) {
	if err := o.Check(); err != nil {
		return nil, err
	}
	i, err := backends.Inspect(ctx, backends.InspectOptions{Settings: o.Policy.Settings()})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, i.Close()) }()
	return inspect.Compare(ctx, i, o)
}
