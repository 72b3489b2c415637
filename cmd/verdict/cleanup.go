package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/verdict-proxy/verdict/internal/keeper"
	"github.com/verdict-proxy/verdict/internal/takeover"
	"github.com/verdict-proxy/verdict/ipvsplugin"
	"github.com/verdict-proxy/verdict/nft/iptshim/xtables"
	"github.com/verdict-proxy/verdict/nft/kernel"
)

func newCleanup() *cobra.Command {
	var stop bool
	cmd := &cobra.Command{
		Use:   "cleanup",
		Short: "Remove everything of ours from this node",
		Long: `Cleanup deletes the nftables tables "ip verdict" and "ip6 verdict", and what Verdict wrote with iptables, of either variant. Chains
that rules of others jump to stay, and so does KUBE-FIREWALL, which is the kubelet's, too. Connections that are established go on: their
translation lives in connection tracking. Where IPVS schedules Services it also removes Verdict's virtual services, routes and
guards, and puts back the sysctls it found; connections over those end. Nothing else is touched; the sysctl net.ipv4.conf.all.route_localnet stays as it
is, since others may rely on it. That there is nothing to remove is no error.

While "verdict run" is at work in the same network namespace, cleanup refuses, unless it is told to end it (--stop).`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			holder, err := keeper.Holder(placeName)
			switch {
			case err != nil && !errors.Is(err, keeper.ErrNoHolder) && !stop:
				return fmt.Errorf("%w; verdict run may be at work without it: stop it first, then give --stop", err)
			case err == nil && !stop:
				return fmt.Errorf("verdict run is at work here (%s): stop it first, or give --stop to have it end", holder)
			}
			log := slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), &slog.HandlerOptions{Level: slog.LevelWarn}))
			// So long that a proxy which does not hear has been ended meanwhile.
			seat := keeper.Seat{Name: placeName, Owner: kernel.OwnsTables, Log: log, Patience: 30 * time.Second}
			err = seat.Evict(cmd.Context(), func(ctx context.Context, socket *os.File) error {
				return errors.Join(removeTables(socket), removeChains(ctx, cmd.ErrOrStderr()))
			})
			if err == nil {
				remarkAlone(cmd.Context(), cmd.ErrOrStderr())
			}
			return err
		},
	}
	cmd.Flags().BoolVar(&stop, "stop", false, `have "verdict run" end first, if it is at work here`)
	return cmd
}

// removeChains removes what Verdict wrote with iptables. The chains have kube-proxy's names: while one is at work, it may have made them
// its own, and they are left to it.
func removeChains(ctx context.Context, w io.Writer) error {
	if found, err := takeover.Find(ctx, takeover.Own{}); err == nil && len(found.Running()) > 0 {
		fmt.Fprintf(w, "verdict: kube-proxy is at work here, as process %d: chains of iptables are left to it\n", found.Running()[0])
		return nil
	}
	removed, err := xtables.RemoveOwn(ctx, false, slog.New(slog.NewTextHandler(w, nil)))
	for _, what := range removed {
		fmt.Fprintln(w, "verdict: removed", what)
	}
	return err
}

// removeTables deletes our tables by a socket, which owns them if anybody does, and what IPVS has of ours; nil is any socket. Where the
// kernel has no nf_tables there are none.
func removeTables(socket *os.File) error {
	backend, err := kernel.Open(kernel.Options{Socket: socket})
	if err != nil {
		return err
	}
	defer backend.Close()
	var lacks *kernel.Unsupported
	if errors.As(backend.Probe(), &lacks) && !hasTables() {
		return nil
	}
	scheduler, err := ipvsplugin.New(backend, ipvsplugin.Options{})
	if err != nil {
		return err
	}
	defer scheduler.Close()
	return scheduler.Remove()
}
