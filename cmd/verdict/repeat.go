package main

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/verdict-proxy/verdict/internal/system/clock"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
)

// askEvery is how often --wait and --watch ask again.
const askEvery = 500 * time.Millisecond

// repeating are the flags by which status asks again and again.
type repeating struct {
	wait, watch bool
	timeout     time.Duration
}

// reading is one answer of status.
type reading struct {
	// unsynced says why not everything is programmed; empty if it is.
	unsynced string
	// steady is what is new in an answer worth printing, as JSON.
	steady any
	show   func() error
}

func (r *repeating) addFlags(cmd *cobra.Command, whom string) {
	f := cmd.Flags()
	f.BoolVar(&r.wait, "wait", false, "wait until "+whom+" synced: nothing is pending, failing or quarantined")
	f.DurationVar(&r.timeout, "timeout", time.Minute, "how long --wait waits")
	f.BoolVar(&r.watch, "watch", false, "print the status again whenever it changes, until Ctrl-C")
	cmd.MarkFlagsMutuallyExclusive("wait", "watch")
}

// run asks once, or as the flags say. It returns why not everything was synced in time; empty if it was, or without
// --wait.
func (r *repeating) run(cmd *cobra.Command, ask func(context.Context) (*reading, error)) (unsynced string, err error) {
	switch {
	case r.wait:
		return r.await(cmd.Context(), ask)
	case r.watch:
		return "", r.follow(cmd, ask)
	}
	answer, err := ask(cmd.Context())
	if err != nil {
		return "", err
	}
	return "", answer.show()
}

// await asks until everything is synced, and prints the last answer. That nobody answers is a reason to ask again.
func (r *repeating) await(ctx context.Context, ask func(context.Context) (*reading, error)) (string, error) {
	limited, cancel := context.WithTimeout(ctx, r.timeout)
	defer cancel()
	var last *reading
	why := ""
	for {
		answer, err := ask(limited)
		switch {
		case err == nil:
			last, why = answer, answer.unsynced
		case limited.Err() == nil || why == "":
			last, why = nil, err.Error()
		}
		if err == nil && why == "" {
			return "", last.show()
		}
		if clock.Pause(limited, askEvery); limited.Err() != nil {
			break
		}
	}
	if err := ctx.Err(); err != nil {
		return "", err
	}
	if last != nil {
		if err := last.show(); err != nil {
			return "", err
		}
	}
	return fmt.Sprintf("not synced within %v: %s", r.timeout, why), nil
}

// follow prints each answer that differs from the one before, until the context ends.
func (r *repeating) follow(cmd *cobra.Command, ask func(context.Context) (*reading, error)) error {
	out, errs := terminal.NewPrinter(cmd.OutOrStdout()), terminal.NewPrinter(cmd.ErrOrStderr())
	before := ""
	for {
		answer, err := ask(cmd.Context())
		if cmd.Context().Err() != nil {
			return nil
		}
		now := fmt.Sprint(err)
		if err == nil {
			text, err := json.Marshal(answer.steady)
			if err != nil {
				return err
			}
			now = string(text)
		}
		switch {
		case now == before:
		case err != nil:
			errs.Line("verdict: %s", err)
		default:
			if before != "" {
				out.Line("")
			}
			if err := answer.show(); err != nil {
				return err
			}
		}
		before = now
		if clock.Pause(cmd.Context(), askEvery); cmd.Context().Err() != nil {
			return nil
		}
	}
}
