package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/verdict-proxy/verdict/internal/backends"
	"github.com/verdict-proxy/verdict/internal/keeper"
	"github.com/verdict-proxy/verdict/internal/node"
	"github.com/verdict-proxy/verdict/nft/kernel"
)

func newCleanup() *cobra.Command {
	var stop bool
	cmd := &cobra.Command{
		Use:   "cleanup",
		Short: "Remove everything that Verdict wrote on this node",
		Long: `Cleanup deletes the nftables tables "ip verdict" and "ip6 verdict", and what Verdict wrote with
iptables, of either variant. Two kinds of chains stay: those that rules of others jump to, and
KUBE-FIREWALL, which the kubelet uses, too. Established connections continue: their translation
lives in connection tracking.

Where IPVS schedules Services, cleanup also removes Verdict's virtual services, routes and guards,
and restores the sysctls; connections over IPVS end. The sysctl net.ipv4.conf.all.route_localnet
stays, since others may rely on it. If there is nothing to remove, cleanup succeeds.

While "verdict run" works in the same network namespace, cleanup refuses, unless --stop tells it to
stop that first.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			holder, err := keeper.Holder(node.LeaseName)
			switch {
			case err != nil && !errors.Is(err, keeper.ErrNoHolder) && !stop:
				return fmt.Errorf("%w; verdict run may be running without the lease: stop it first, then use --stop", err)
			case err == nil && !stop:
				return fmt.Errorf("verdict run is running here (%s): stop it first, or use --stop", holder)
			}
			log := slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), &slog.HandlerOptions{Level: slog.LevelWarn}))
			// So long that a proxy which does not hear has been ended meanwhile.
			lease := keeper.Lease{
				Name: node.LeaseName, OwnsTables: kernel.OwnsTables, Log: log, HandOverTimeout: 30 * time.Second,
			}
			err = lease.Evict(cmd.Context(), func(ctx context.Context, socket *os.File) error {
				removed, err := backends.Remove(ctx, backends.RemoveOptions{Socket: socket, Log: log})
				for _, what := range removed {
					fmt.Fprintln(cmd.ErrOrStderr(), "verdict: removed", what)
				}
				return err
			})
			if err == nil {
				warnNoRules(cmd.Context(), cmd.ErrOrStderr())
			}
			return err
		},
	}
	cmd.Flags().BoolVar(&stop, "stop", false, `stop "verdict run" first, if it is running here`)
	return cmd
}
