package main

import (
	"github.com/spf13/cobra"

	"github.com/verdict-proxy/verdict/nft/kernel"
)

func newCleanup() *cobra.Command {
	return &cobra.Command{
		Use:   "cleanup",
		Short: "Remove everything of ours from this node",
		Long: `Cleanup deletes the nftables tables "ip verdict" and "ip6 verdict". Connections that are established go on: their
translation lives in connection tracking. Nothing else is touched; the sysctl net.ipv4.conf.all.route_localnet stays as it
is, since others may rely on it. That there is nothing to remove is no error.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			backend, err := kernel.Open(kernel.Options{})
			if err != nil {
				return err
			}
			defer backend.Close()
			return backend.Remove()
		},
	}
}
