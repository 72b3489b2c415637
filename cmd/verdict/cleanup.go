package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/verdict-proxy/verdict/internal/answers/inspect"
	"github.com/verdict-proxy/verdict/internal/proxy/backends"
	"github.com/verdict-proxy/verdict/internal/proxy/keeper"
	"github.com/verdict-proxy/verdict/internal/proxy/node"
	"github.com/verdict-proxy/verdict/nft/kernel"
)

// cleanupOptions are what the command line of cleanup says.
type cleanupOptions struct{ stop, stay, json bool }

func newCleanup() *cobra.Command {
	var o cleanupOptions
	cmd := &cobra.Command{
		Use:   "cleanup",
		Short: "Remove everything that Verdict wrote on this node",
		Long: `Cleanup deletes the nftables tables "ip verdict" and "ip6 verdict", and what Verdict wrote with
iptables, of either variant. Two kinds of chains stay: those that rules of others jump to, and
KUBE-FIREWALL, which the kubelet uses, too.

Start kube-proxy first. Established connections continue as long as kube-proxy, or any other program,
has a rule that translates addresses of the same family: their translation is in connection
tracking. Without any such rule, the kernel stops translating packets, and the connections end.

Where IPVS schedules Services, cleanup also removes Verdict's virtual services, routes and guards,
and restores the sysctls; connections over IPVS end. Sysctls that were set for records are restored,
too. The sysctl net.ipv4.conf.all.route_localnet
stays, since others may rely on it. If there is nothing to remove, cleanup reports that and succeeds.

Cleanup refuses while "verdict run" runs in the same network namespace. With --stop it stops that
process first.`,
		Args: noArgs(""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return o.run(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	addJSON(cmd.Flags(), &o.json, "print JSON: what was removed")
	cmd.Flags().BoolVar(&o.stop, "stop", false, `stop "verdict run" first, if it is running here`)
	cmd.Flags().BoolVar(&o.stay, "stay", false, "when done, wait for SIGTERM, as a DaemonSet expects it of its pods")
	return cmd
}

func (o *cleanupOptions) run(ctx context.Context, stdout, stderr io.Writer) error {
	if err := checkHolder(stderr, o.stop); err != nil {
		return err
	}
	removed, err := removeAll(ctx, stderr)
	switch {
	case err == nil && len(removed) == 0:
		fmt.Fprintln(stderr, "verdict: there is nothing to remove")
	case err == nil:
		warnNoRules(ctx, stderr)
	}
	if o.json {
		err = errors.Join(err, inspect.Show(stdout, true, cleanedUp{removed}, nil))
	}
	if err == nil && o.stay {
		fmt.Fprintln(stderr, "verdict: done; waiting to be stopped")
		stayUntilStopped(ctx)
	}
	return err
}

// removeAll evicts a proxy that runs here, removes everything that Verdict wrote, and says what that was.
func removeAll(ctx context.Context, stderr io.Writer) (removed []string, err error) {
	log := slog.New(slog.NewTextHandler(stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	// So long that a proxy which does not hear has been ended meanwhile.
	lease := keeper.Lease{
		Name: node.LeaseName, OwnsTables: kernel.OwnsTables, Log: log, HandOverTimeout: 30 * time.Second,
	}
	err = lease.Evict(ctx, func(ctx context.Context, socket *os.File) error {
		var err error
		removed, err = backends.Remove(ctx, backends.RemoveOptions{Socket: socket, Log: log})
		changed, rerr := node.RestoreSysctls()
		for _, c := range changed {
			removed = append(removed, fmt.Sprintf("%s = %d, which was set for records: it is %d again", c.Name, c.Before, c.Now))
		}
		err = errors.Join(err, rerr)
		for _, what := range removed {
			fmt.Fprintln(stderr, "verdict: removed", what)
		}
		return err
	})
	return removed, err
}

// cleanedUp is what cleanup prints with -o json.
type cleanedUp struct {
	Removed []string `json:"removed"`
}

// checkHolder refuses to work beside a proxy, unless that is to be stopped. It warns if systemd may start it again.
func checkHolder(w io.Writer, stop bool) error {
	holder, err := keeper.Holder(node.LeaseName)
	unit := holder.Unit()
	switch {
	case errors.Is(err, keeper.ErrNoHolder):
	case err != nil && !stop:
		return fmt.Errorf("%w; verdict run may be running without the lease: stop it first, then use --stop", err)
	case !stop && unit != "":
		return fmt.Errorf("verdict run is running here (%s, %s): run systemctl stop %s first", holder, unit, unit)
	case !stop:
		return fmt.Errorf("verdict run is running here (%s): stop it first, or use --stop", holder)
	case unit != "":
		fmt.Fprintf(w, "verdict: systemd may start %s again, which programs everything anew: to prevent that, run "+
			"systemctl stop %s, and verdict cleanup again\n", unit, unit)
	}
	return nil
}

// stayUntilStopped waits for the signal that ends a pod.
func stayUntilStopped(ctx context.Context) {
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	<-ctx.Done()
}
