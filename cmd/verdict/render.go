package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/verdict-proxy/verdict/ipvsplugin"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
	"github.com/verdict-proxy/verdict/sync/watch"
)

func newRender() *cobra.Command {
	var policy policyFlags
	var from string
	cmd := &cobra.Command{
		Use:   "render",
		Short: "Print the ruleset for manifests, as nft text",
		Long: `Render prints the nftables ruleset that "verdict run" would write for the same manifests on the node --hostname-override. It
touches no kernel and needs no rights. The output can be loaded with "nft -f", and then lists the same as what run
writes. Node ports are shown at the addresses of the Node object, since the node's interfaces are not at hand.

What is wrong with the manifests goes to standard error; the rest is rendered, and the exit status is 1.`,
		Example: `  verdict render --from examples/cluster.yaml --hostname-override node-1 --cluster-cidr 10.244.0.0/16
  kubectl get svc,endpointslices,nodes -A -o yaml | verdict render --from /dev/stdin --hostname-override node-1`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if from == "" {
				return errors.New("--from is needed: a manifest file, or a directory of manifests")
			}
			config, err := policy.config()
			if err != nil {
				return err
			}
			return render(cmd.OutOrStdout(), config, from)
		},
	}
	f := cmd.Flags()
	f.StringVar(&from, "from", "", "manifest file, or directory of manifests")
	policy.add(f)
	return cmd
}

// render prints the ruleset. Problems with the manifests are shown, and make the exit status 1 in the end.
func render(w io.Writer, config dataplane.Config, from string) error {
	state, problems, err := compute(config, from)
	if err != nil {
		return err
	}
	for _, p := range problems {
		fmt.Fprintln(os.Stderr, "verdict:", p)
	}
	for _, l := range nft.List(state) {
		if err := l.Print(w); err != nil {
			return err
		}
	}
	if err := renderIPVS(w, state); err != nil {
		return err
	}
	if len(problems) > 0 {
		return exitStatus(exitError)
	}
	return nil
}

// renderIPVS prints what IPVS gets, as ipvsadm -Sn lists it, in comments: nft can read the whole text.
func renderIPVS(w io.Writer, state *dataplane.State) error {
	var text bytes.Buffer
	if err := ipvsplugin.Print(&text, state); err != nil || text.Len() == 0 {
		return err
	}
	out := bufio.NewWriter(w)
	out.WriteString("\n# What IPVS gets, as ipvsadm -Sn lists it:\n")
	for line := range strings.Lines(text.String()) {
		out.WriteString("# " + line)
	}
	return out.Flush()
}

// compute gives the state that manifests ask for on a host whose addresses are those of its Node object, and all that is
// wrong with them.
func compute(config dataplane.Config, from string) (*dataplane.State, []error, error) {
	snap, problems, err := watch.Load(from, config.NodeName)
	if err != nil {
		return nil, nil, err
	}
	addrs := assumedAddrs(snap.Node)
	snap.Apply(snapshot.Delta{HostAddrs: &addrs})
	state, conflicts := dataplane.Compute(config, snap)
	for _, c := range conflicts {
		problems = append(problems, errors.New(c.String()))
	}
	return state, problems, nil
}

// assumedAddrs are the addresses a node has as far as its object tells, and the loopback address every host has.
func assumedAddrs(n snapshot.Node) []netip.Addr {
	addrs := append(slices.Clone(n.Addresses), netip.AddrFrom4([4]byte{127, 0, 0, 1}))
	slices.SortFunc(addrs, netip.Addr.Compare)
	return slices.Compact(addrs)
}
