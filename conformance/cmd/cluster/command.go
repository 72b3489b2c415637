package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/verdict-proxy/verdict/conformance/cluster"
	"github.com/verdict-proxy/verdict/conformance/cluster/neighbors"
	"github.com/verdict-proxy/verdict/conformance/testbed"
)

func newCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "cluster", Short: "A real cluster of three nodes on this machine", SilenceUsage: true,
		SilenceErrors: true}
	dir, source := "", ""
	cmd.PersistentFlags().StringVar(&dir, "dir", "", "where the cluster's files are; by default cluster/ of the cache")
	cmd.PersistentFlags().StringVar(&source, "source", "",
		"Verdict's sources; by default those above the working directory")
	open := func(out io.Writer) (*cluster.Cluster, error) {
		if dir == "" {
			var err error
			if dir, err = cluster.Dir(); err != nil {
				return nil, err
			}
		}
		root, err := testbed.Sources(source)
		return cluster.New(dir, root, func(format string, args ...any) {
			fmt.Fprintf(out, time.Now().Format("15:04:05 ")+format+"\n", args...)
		}), err
	}
	cmd.AddCommand(newUp(open), newDown(open), newKubectl(open), newTest(open), newGateway(open), newNeighbors(open))
	return cmd
}

type opener func(out io.Writer) (*cluster.Cluster, error)

func newUp(open opener) *cobra.Command {
	bare, names := false, []string(nil)
	cmd := &cobra.Command{Use: "up", Short: "Start the cluster with Verdict, and wait until all is ready",
		Args: cobra.NoArgs, RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := open(cmd.OutOrStdout())
			if err != nil {
				return err
			}
			beside, err := neighbors.Find(names)
			if err != nil {
				return err
			}
			if err := c.Up(cmd.Context(), neighbors.On(beside)); err != nil || bare {
				return err
			}
			if err := install(cmd.Context(), c); err != nil {
				return err
			}
			for _, n := range beside {
				if err := n.Install(cmd.Context(), c); err != nil {
					return err
				}
			}
			return c.WaitReady(cmd.Context())
		}}
	cmd.Flags().BoolVar(&bare, "bare", false, "without a Service proxy, and without what --neighbor names")
	cmd.Flags().StringSliceVar(&names, "neighbor", nil, "what runs beside the Service proxy: "+
		strings.Join(neighbors.Names(), ", "))
	return cmd
}

func install(ctx context.Context, c *cluster.Cluster) error {
	if err := c.LoadVerdict(ctx, c.Source(), cluster.VerdictImage); err != nil {
		return err
	}
	if err := c.ApplyKubeProxyConfig(ctx, "nftables"); err != nil {
		return err
	}
	err := c.UseVerdict(ctx, cluster.VerdictImage)
	if err == nil {
		c.Log("Verdict is ready on all nodes. Try: cluster kubectl get pods -A -o wide; a node's network is in \"ip netns\"")
	}
	return err
}

func newDown(open opener) *cobra.Command {
	return &cobra.Command{Use: "down", Short: "End the cluster", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := open(cmd.OutOrStdout())
			if err != nil {
				return err
			}
			return c.Down()
		}}
}

func newKubectl(open opener) *cobra.Command {
	return &cobra.Command{Use: "kubectl", Short: "Run kubectl as the cluster's administrator", DisableFlagParsing: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := open(cmd.OutOrStdout())
			if err != nil {
				return err
			}
			out, err := c.Kubectl(cmd.Context(), args...)
			fmt.Fprint(cmd.OutOrStdout(), out)
			return err
		}}
}
