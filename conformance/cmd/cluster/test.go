package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/verdict-proxy/verdict/conformance/cluster"
	"github.com/verdict-proxy/verdict/conformance/cluster/stories"
	"github.com/verdict-proxy/verdict/conformance/testbed"
	"github.com/verdict-proxy/verdict/internal/lab/blackbox"
)

// testOptions are the flags of "cluster test".
type testOptions struct {
	run, old, reports, hooks string
	outage                   time.Duration
	rolls                    int
}

func newTest(open opener) *cobra.Command {
	o := testOptions{}
	cmd := &cobra.Command{Use: "test", Short: "Tell stories on the cluster, which must be up, under clients",
		Args: cobra.NoArgs, RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := open(cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			rows, err := o.tell(cmd.Context(), c)
			fmt.Fprint(cmd.OutOrStdout(), stories.Table(rows))
			return err
		}}
	cmd.Flags().StringVar(&o.run, "run", "", "tell only stories whose names match this regular expression")
	cmd.Flags().StringVar(&o.old, "old", testbed.OldCommit, "the commit of the older version")
	cmd.Flags().StringVar(&o.reports, "report", "", "the directory for records of Nodes, EndpointSlices and "+
		"pods, their logs, and failures without a known cause; by default records/TIME of the cluster's files")
	cmd.Flags().DurationVar(&o.outage, "outage", 5*time.Minute, "how long the API server is gone")
	cmd.Flags().StringVar(&o.hooks, "hooks", "", "roll only servers whose hook's name matches this regular expression")
	cmd.Flags().IntVar(&o.rolls, "rolls", 1, "how often servers with each hook are rolled")
	return cmd
}

const oldImage = "localhost/verdict:old"

// tell tells the stories in turn. The error says which ones lost connections or could not be told.
func (o *testOptions) tell(ctx context.Context, c *cluster.Cluster) (rows []stories.Row, err error) {
	chosen, err := regexp.Compile(o.run)
	if err != nil {
		return nil, fmt.Errorf("--run: %w", err)
	}
	hooks, err := regexp.Compile(o.hooks)
	if err != nil {
		return nil, fmt.Errorf("--hooks: %w", err)
	}
	bed := &stories.Bed{Cluster: c, OldImage: oldImage, Outage: o.outage, Reports: o.reports, Hooks: hooks, Rolls: o.rolls}
	if bed.Reports == "" {
		bed.Reports = c.Records(time.Now())
	}
	c.Log("records are in %s", bed.Reports)
	if err := bed.Prepare(ctx); err != nil {
		return nil, errors.Join(err, bed.Close())
	}
	defer func() { err = errors.Join(err, bed.Close()) }()
	for _, s := range stories.Choose(chosen) {
		if s.NeedsOld {
			if err := o.loadOld(ctx, c); err != nil {
				return rows, err
			}
		}
		c.Log("%s", s.Name)
		row := bed.Run(ctx, s)
		rows = append(rows, row)
		c.Log("%d connections, %d failed, %d held ones broke, %s without owner, %v\n%s", row.Connections, row.Failed,
			row.Broken, row.Unowned.Round(time.Millisecond), row.Err, strings.Join(row.Explained, "\n"))
		if row.Err != nil || row.Failed > 0 && !s.Refused {
			err = errors.Join(err, failure(&row))
		}
		if n := row.Causes[blackbox.Unexplained]; n > 0 {
			err = errors.Join(err, fmt.Errorf("%s: %d failures are unexplained: see %s", s.Name, n, bed.Reports))
		}
	}
	return rows, err
}

// failure says whose a story's failure is.
func failure(row *stories.Row) error {
	err := fmt.Errorf("%s: %d connections failed", row.Name, row.Failed)
	if row.OfCluster > 0 {
		err = fmt.Errorf("%w, %d of them since the cluster had no ready endpoint %q", err, row.OfCluster,
			row.WithoutEndpoints)
	}
	return errors.Join(err, row.Err)
}

// loadOld builds the image of the older version from the repository's history.
func (o *testOptions) loadOld(ctx context.Context, c *cluster.Cluster) error {
	dir, err := os.MkdirTemp("", "verdict-old-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if err := (testbed.Programs{Root: c.Source()}).Archive(ctx, o.old, dir); err != nil {
		return fmt.Errorf("--old: %w", err)
	}
	return c.LoadVerdict(ctx, dir, oldImage)
}
