package main

import (
	"errors"
	"log/slog"
	"os"

	"github.com/spf13/cobra"

	"github.com/verdict-proxy/verdict/internal/conntrack"
	"github.com/verdict-proxy/verdict/nft/kernel"
	"github.com/verdict-proxy/verdict/sync/watch"
)

func newRun() *cobra.Command {
	var policy policyFlags
	var from, kubeconfig, logFormat, logLevel string
	cmd := &cobra.Command{
		Use:   "run",
		Short: "Carry Services on this node",
		Long: `Run keeps this node's kernel equal to what the objects ask for, until it is told to stop. What it wrote stays in force
after that; "verdict cleanup" removes it. It needs CAP_NET_ADMIN, and writes nothing before it has seen everything once.

Objects come from --from PATH, a manifest or a directory of manifests (YAML or JSON), which is watched: an edit takes
effect at once, and a file that cannot be read leaves its last good content in force. Without --from they come from the
Kubernetes API: of --kubeconfig, or of the cluster this runs in.

Services, EndpointSlices, Endpoints, Nodes and ServiceCIDRs are looked at; other kinds are passed over.`,
		Example: `  verdict run --from examples/cluster.yaml --node-name node-1 --cluster-cidr 10.244.0.0/16,fd00:10:244::/48
  verdict run --kubeconfig /etc/kubernetes/kubelet.conf --cluster-cidr 10.244.0.0/16`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			log, err := newLog(os.Stderr, logFormat, logLevel)
			if err != nil {
				return err
			}
			if from != "" && kubeconfig != "" {
				return errors.New("--from and --kubeconfig exclude each other")
			}
			n := node{log: log, routeLocalnet: routeLocalnet}
			if n.config, err = policy.config(); err != nil {
				return err
			}
			objects, err := objectSource(from, kubeconfig, n.config.NodeName, log)
			if err != nil {
				return err
			}
			n.sources = []source{objects, &watch.Host{Report: reporter(log)}}
			backend, err := openBackend(kernel.Options{Own: true})
			if err != nil {
				return err
			}
			defer backend.Close()
			n.backend = backend
			if n.flows, err = conntrack.Dial(0); err != nil {
				return err
			}
			defer n.flows.Close()
			log.Info("verdict starts", "node", n.config.NodeName, "from", from)
			return n.run(cmd.Context())
		},
	}
	f := cmd.Flags()
	f.StringVar(&from, "from", "", "manifest file, or directory of manifests, to take the objects from")
	f.StringVar(&kubeconfig, "kubeconfig", "", "kubeconfig file of the API server (default: the cluster this runs in)")
	f.StringVar(&logFormat, "log-format", "text", "text or json")
	f.StringVar(&logLevel, "log-level", "info", "debug (a line for each transaction), info, warn or error")
	policy.add(f)
	return cmd
}

// objectSource gives the source the flags ask for.
func objectSource(from, kubeconfig, nodeName string, log *slog.Logger) (source, error) {
	if from != "" {
		return &watch.Files{Path: from, NodeName: nodeName, Report: reporter(log)}, nil
	}
	config, err := watch.ClientConfig(kubeconfig)
	if err != nil {
		return nil, err
	}
	return &watch.Kubernetes{Config: config, NodeName: nodeName, Report: reporter(log)}, nil
}

// reporter logs what a source finds wrong. Nothing of it stops the proxy.
func reporter(log *slog.Logger) func(error) {
	return func(err error) { log.Warn(err.Error()) }
}
