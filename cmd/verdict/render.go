package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/verdict-proxy/verdict/internal/answers/inspect"
	"github.com/verdict-proxy/verdict/internal/proxy/backends"
	"github.com/verdict-proxy/verdict/internal/proxy/config"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
	"github.com/verdict-proxy/verdict/ipvsplugin"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/nft/iptshim"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
	"github.com/verdict-proxy/verdict/sync/watch"
)

func newRender() *cobra.Command {
	var policy inspect.Policy
	var from, family, device string
	cmd := &cobra.Command{
		Use:   "render",
		Short: "Print the ruleset for manifests, as nft or iptables-restore text",
		Long: `Render prints the nftables ruleset that "verdict run" would write for the same manifests on the node
--hostname-override. It does not touch the kernel and needs no privileges. "nft -f" can load the
output. Node ports are shown at the addresses of the Node object, because render does not read the
addresses of the node's interfaces. Nor does it know the node's neighbours: with --device NAME, it takes
all other Nodes for neighbours by this Ethernet device, and prints the tables at its ingress; otherwise
Services that keep their clients' addresses are masqueraded.

With --backend=iptables it prints the input of "iptables-restore --noflush" for IPv4, or with
--family=ipv6 the input of "ip6tables-restore --noflush".

Invalid objects are reported on standard error; the rest is rendered, and the exit status is 1. Warnings do not change
it.`,
		Example: `  verdict render --from cluster.yaml --hostname-override node-1 --cluster-cidr 10.244.0.0/16
  kubectl get svc,endpointslices,nodes -A -o yaml |
    verdict render --from - --hostname-override node-1`,
		Args: noArgs(""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if from == "" {
				return errors.New("--from is needed: a manifest file, or a directory of manifests")
			}
			decisions, err := policy.Config()
			if err != nil {
				return err
			}
			r := renderRun{config: decisions, from: from, device: device, out: cmd.OutOrStdout()}
			if r.chains, err = chainsToRender(&policy, family, cmd.Flags().Changed("family")); err != nil {
				return err
			}
			return r.render(cmd.Context())
		},
	}
	f := cmd.Flags()
	f.StringVar(&from, "from", "", "manifest file, directory of manifests, or - (standard input)")
	f.StringVar(&family, "family", "ipv4", "with --backend=iptables: ipv4 or ipv6")
	f.StringVar(&device, "device", "", "the node's Ethernet device, by which all other Nodes are taken for neighbours")
	policy.AddFlags(f)
	return cmd
}

// renderRun is what is to be printed, and where.
type renderRun struct {
	config       dataplane.Config
	from, device string
	out          io.Writer
	// chains, if not nil, says that rules of iptables are to be printed.
	chains *renderChains
}

// renderChains says how rules of iptables are to be printed.
type renderChains struct {
	options iptshim.Options
	family  ipfamily.Family
}

// chainsToRender reads the flags about iptables; nil if nftables is to be printed.
func chainsToRender(policy *inspect.Policy, family string, said bool) (*renderChains, error) {
	s := policy.Settings()
	if s.Backend != config.IPTables {
		if said {
			return nil, errors.New("--family needs --backend=iptables: the nft text contains both families")
		}
		return nil, nil
	}
	c := &renderChains{options: backends.IPTablesOptions(s)}
	switch family {
	case "ipv4":
	case "ipv6":
		c.family = ipfamily.IPv6
	default:
		return nil, fmt.Errorf("--family: %q is neither ipv4 nor ipv6", family)
	}
	return c, nil
}

// render prints the ruleset. Problems with the manifests are shown, and those that are more than warnings make the exit
// status 1 in the end.
func (r *renderRun) render(ctx context.Context) error {
	w, config := r.out, r.config
	if r.chains != nil {
		config.IPVS.Mode, config.CannotKeep = dataplane.IPVSNever, true
	}
	state, problems, err := computeState(ctx, config, r.from, r.device)
	if err != nil {
		return err
	}
	for _, p := range problems {
		terminal.Warn(p)
	}
	if r.chains != nil {
		model := iptshim.New(r.chains.options)
		model.Plan(state, dataplane.Change{})
		_, err = w.Write(model.Full(r.chains.family))
	} else {
		err = renderTables(w, state)
	}
	if err != nil {
		return err
	}
	if slices.ContainsFunc(problems, isSerious) {
		return exitStatus(exitError)
	}
	return nil
}

// isSerious reports whether a problem is more than a warning.
func isSerious(problem error) bool {
	p, ok := errors.AsType[*watch.Problem](problem)
	return !ok || !p.Warning
}

// renderTables prints what is nftables', and what is IPVS'.
func renderTables(w io.Writer, state *dataplane.State) error {
	for _, l := range nft.List(state) {
		if err := l.Print(w); err != nil {
			return err
		}
	}
	return renderIPVS(w, state)
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

// computeState gives the state that manifests ask for on a host whose addresses are those of its Node object, and all
// that is wrong with them. Device is that of inspect.LoadOnLink.
func computeState(ctx context.Context, config dataplane.Config, from, device string) (*dataplane.State, []error,
	error) {
	snap, problems, err := inspect.LoadOnLink(ctx, from, config.NodeName, device)
	if err != nil {
		return nil, nil, err
	}
	if why := inspect.MissingNode(config.NodeName, snap); why != nil {
		terminal.Warn("note:", why)
	}
	addrs := inspect.AssumedAddrs(snap.Node)
	snap.Apply(snapshot.Delta{HostAddrs: &addrs})
	state, conflicts := dataplane.Compute(config, snap)
	for _, c := range dataplane.SummarizeConflicts(conflicts) {
		problems = append(problems, errors.New(c.String()))
	}
	return state, problems, nil
}
