package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/verdict-proxy/verdict/conformance/cluster"
	"github.com/verdict-proxy/verdict/conformance/cluster/neighbors"
)

func newNeighbors(open opener) *cobra.Command {
	var proxies, add []string
	cmd := &cobra.Command{Use: "neighbors", Short: "Send connections to Services beside the cluster's neighbors",
		Args: cobra.NoArgs, RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := open(cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			results, err := besides(cmd.Context(), c, add, proxies)
			fmt.Fprint(cmd.OutOrStdout(), neighbors.Table(results))
			return err
		}}
	cmd.Flags().StringSliceVar(&proxies, "proxy", neighbors.Proxies, "the Service proxies, in turn")
	cmd.Flags().StringSliceVar(&add, "add", nil, "install these neighbors first, which must not be CNI plugins")
	return cmd
}

// besides installs further neighbors, and has each proxy in turn do the same beside all of them. The error says which
// one lost connections.
func besides(ctx context.Context, c *cluster.Cluster, add, proxies []string) (results []*neighbors.Result, err error) {
	if err := addNeighbors(ctx, c, add); err != nil {
		return nil, err
	}
	bed, err := neighbors.NewBed(ctx, c)
	if err != nil {
		return nil, err
	}
	names, err := bed.Versions(ctx)
	if err != nil {
		return nil, err
	}
	for _, proxy := range proxies {
		if err := bed.Use(ctx, proxy); err != nil {
			return results, fmt.Errorf("%s: %w", proxy, err)
		}
		r, e := bed.Run(ctx, proxy)
		if e != nil {
			return results, fmt.Errorf("%s: %w", proxy, e)
		}
		r.Neighbors = names
		results = append(results, r)
		if r.Failed+r.WrongSource > 0 {
			err = errors.Join(err, fmt.Errorf("%s: %d connections failed, %d lost the client's address", proxy, r.Failed,
				r.WrongSource))
		}
	}
	return results, err
}

func addNeighbors(ctx context.Context, c *cluster.Cluster, names []string) error {
	found, err := neighbors.Find(names)
	if err != nil {
		return err
	}
	for _, n := range found {
		if n.Network {
			return fmt.Errorf("--add: %s is a CNI plugin: start the cluster with --neighbor %s", n.Name, n.Name)
		}
		if err := errors.Join(n.Install(ctx, c), c.AddNeighbor(n.Name)); err != nil {
			return fmt.Errorf("%s: %w", n.Name, err)
		}
	}
	return nil
}
