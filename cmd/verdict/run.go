package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/verdict-proxy/verdict/internal/proxy/config"
	"github.com/verdict-proxy/verdict/internal/proxy/conntrack"
	"github.com/verdict-proxy/verdict/internal/proxy/node"
	"github.com/verdict-proxy/verdict/internal/system/logging"
	"github.com/verdict-proxy/verdict/internal/system/sysctl"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
)

// runOptions are what the command line of run says.
type runOptions struct {
	flags config.Flags
	// out is standard output.
	out io.Writer
}

func newRun() *cobra.Command {
	o := &runOptions{}
	cmd := &cobra.Command{
		Use:   "run",
		Short: "Program the Services of this node",
		Long: `Run keeps the kernel of this node in sync with the objects until it is stopped. Then the Services
stay programmed, and the next run adopts them without writing them again; "verdict cleanup" removes
them. Run needs CAP_NET_ADMIN. It writes nothing before it has seen all objects once.

Objects come from the Kubernetes API: the server of --kubeconfig, or of the cluster run runs in.
With --from PATH they come from a manifest or a directory of manifests (YAML or JSON), which is
watched. If a file cannot be read, its last good version stays in force. Run reads Services,
EndpointSlices, Endpoints, Nodes and ServiceCIDRs, and skips other kinds.

--config takes kube-proxy's configuration file, and most flags are kube-proxy's. A flag overrides
the file. A change of the file takes effect at once, or the log says that it needs a restart.
Invalid values are reported with file, line and field; the rest of the file still applies.
docs/CONFIGURATION.md lists all fields and flags.

Rules are written with nftables if the kernel supports it, otherwise with iptables (--backend,
docs/IPTABLES.md). After a change of the backend, the rules of the old one are removed once all
Services are programmed by the new one.

On Linux 6.9 and later, a netlink socket owns the tables: no other process can change them while it
is open. It stays open while run restarts: systemd keeps it, if the unit has
FileDescriptorStoreMax=2 and Type=notify; otherwise a small parent process does, which also restarts
run after a crash (--keeper). A second run in the same network namespace takes over from the first,
which then stands by.

Once all Services are programmed, run removes what a kube-proxy programmed on this node, in any of
its modes (--takeover); docs/INSTALL.md describes the migration and the way back. Run serves
/healthz, /readyz and /livez at port 10256, and /metrics at 127.0.0.1:10249; see docs/METRICS.md.`,
		Example: `  verdict run --config /var/lib/kube-proxy/config.conf --hostname-override $(NODE_NAME)
  verdict run --kubeconfig /etc/kubernetes/kubelet.conf --cluster-cidr 10.244.0.0/16
  verdict run --from examples/cluster.yaml --hostname-override node-1 \
    --cluster-cidr 10.244.0.0/16,fd00:10:244::/48`,
		Args: noArgs(""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.out = cmd.OutOrStdout()
			return o.run(cmd.Context())
		},
	}
	o.flags.Add(cmd.Flags())
	return cmd
}

// run does what the flags ask for: mostly, to run a proxy.
func (o *runOptions) run(ctx context.Context) error {
	switch {
	case o.flags.Version:
		_, err := fmt.Fprintln(o.out, node.Version())
		return err
	case o.flags.Cleanup:
		cleanup := newCleanup()
		cleanup.SetContext(ctx)
		return cleanup.RunE(cleanup, nil)
	}
	settings, problems, err := config.Load(o.flags.Config, &o.flags, nil)
	if err != nil {
		return err
	}
	switch {
	case o.flags.WriteConfigTo != "":
		return node.WriteConfig(o.flags.WriteConfigTo, settings, problems)
	case o.flags.InitOnly:
		if err := conntrack.Load(); err != nil {
			terminal.Warn(err) // what of its sysctls is missing is told below
		}
		return node.InitOnly(sysctl.Host{}, settings, problems, o.out)
	}
	err = node.Run(ctx, &o.flags, settings, problems, os.Stderr)
	if status := exitStatus(0); err == nil || errors.As(err, &status) || !settings.Log.JSON {
		return err
	}
	last := logging.NewLossy(os.Stderr, func(io.Writer, int) {})
	node.LogFailure(last, settings.Log, err)
	last.Close()
	return exitStatus(statusOf(err))
}
