package main

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/verdict-proxy/verdict/internal/keeper"
	"github.com/verdict-proxy/verdict/ipvsplugin"
	"github.com/verdict-proxy/verdict/nft/kernel"
)

func newCleanup() *cobra.Command {
	var stop bool
	cmd := &cobra.Command{
		Use:   "cleanup",
		Short: "Remove everything of ours from this node",
		Long: `Cleanup deletes the nftables tables "ip verdict" and "ip6 verdict". Connections that are established go on: their
translation lives in connection tracking. Where IPVS schedules Services it also removes Verdict's virtual services, routes and
guards, and puts back the sysctls it found; connections over those end. Nothing else is touched; the sysctl net.ipv4.conf.all.route_localnet stays as it
is, since others may rely on it. That there is nothing to remove is no error.

While "verdict run" is at work in the same network namespace, cleanup refuses, unless it is told to end it (--stop).`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			holder, err := keeper.Holder(placeName)
			switch {
			case err == nil && !stop:
				return fmt.Errorf("verdict run is at work here (%s): stop it first, or give --stop to have it end", holder)
			case err != nil && !errors.Is(err, keeper.ErrNoHolder):
				return err
			}
			seat := keeper.Seat{Name: placeName, Owner: kernel.OwnsTables}
			err = seat.Evict(cmd.Context(), func(_ context.Context, socket *os.File) error { return removeTables(socket) })
			if err == nil {
				remarkAlone(cmd.Context(), cmd.ErrOrStderr())
			}
			return err
		},
	}
	cmd.Flags().BoolVar(&stop, "stop", false, `have "verdict run" end first, if it is at work here`)
	return cmd
}

// removeTables deletes our tables by a socket, which owns them if anybody does, and what IPVS has of ours; nil is any socket.
func removeTables(socket *os.File) error {
	backend, err := kernel.Open(kernel.Options{Socket: socket})
	if err != nil {
		return err
	}
	defer backend.Close()
	scheduler, err := ipvsplugin.New(backend, ipvsplugin.Options{})
	if err != nil {
		return err
	}
	defer scheduler.Close()
	return scheduler.Remove()
}
