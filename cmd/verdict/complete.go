package main

import (
	"cmp"
	"context"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/verdict-proxy/verdict/internal/answers/inspect"
	"github.com/verdict-proxy/verdict/internal/proxy/backends"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// completionTime bounds how long a shell waits for words.
const completionTime = 2 * time.Second

// senderWords complete SRC.
var senderWords = []string{"node\tthis node", "pod\tsome pod", "outside\tneither"}

// completeExplain completes SRC and DST:PORT.
func (o *explainOptions) complete(cmd *cobra.Command, args []string, begun string) ([]string,
	cobra.ShellCompDirective) {
	switch {
	case o.to != "" || len(args) > 1:
		return nil, cobra.ShellCompDirectiveNoFileComp
	case len(args) == 0:
		return beginning(senderWords, begun), cobra.ShellCompDirectiveNoFileComp
	}
	var words []string
	for key, port := range knownFrontends(cmd.Context(), o.objects.From) {
		to := netip.AddrPortFrom(key.Addr, key.Port).String()
		if key.Protocol != snapshot.TCP {
			to += "/" + key.Protocol.String()
		}
		words = append(words, to+"\t"+port.String())
	}
	return beginning(words, begun), cobra.ShellCompDirectiveNoFileComp
}

// completeServices completes a flag that takes NAMESPACE/NAME of a Service.
func completeServices(cmd *cobra.Command, flag string) {
	_ = cmd.RegisterFlagCompletionFunc(flag, func(cmd *cobra.Command, _ []string, begun string) ([]string,
		cobra.ShellCompDirective) {
		names := map[string]bool{}
		for _, port := range knownFrontends(cmd.Context(), "") {
			names[port.Service.String()] = true
		}
		return beginning(slices.Collect(maps.Keys(names)), begun), cobra.ShellCompDirectiveNoFileComp
	})
}

// beginning returns the words that begin with a text, sorted.
func beginning(words []string, text string) (out []string) {
	for _, w := range words {
		if strings.HasPrefix(w, text) {
			out = append(out, w)
		}
	}
	slices.Sort(out)
	return out
}

// knownFrontends returns where Services answer, by manifests or, if there are none, by the kernel; none if neither can
// be read.
func knownFrontends(ctx context.Context, from string) map[dataplane.Key]dataplane.PortName {
	if ctx == nil { // no command is executed
		ctx = context.Background()
	}
	ctx, cancel := context.WithTimeout(ctx, completionTime)
	defer cancel()
	out := map[dataplane.Key]dataplane.PortName{}
	if from != "" && from != "-" {
		snap, _, err := inspect.LoadManifests(ctx, from, "")
		if err != nil {
			return nil
		}
		state, _ := dataplane.Compute(dataplane.Config{}, snap)
		for _, s := range state.Services {
			for _, p := range s.Ports {
				for i := range p.Frontends {
					out[p.Frontends[i].Key] = p.Name
				}
			}
		}
		return out
	}
	i, err := backends.Inspect(ctx, backends.InspectOptions{})
	if err != nil {
		return nil
	}
	defer i.Close()
	counters, err := i.Counters(ctx, dataplane.CountersAsked{All: true})
	if err != nil {
		return nil
	}
	for _, f := range counters.Frontends {
		if f.Port != (dataplane.PortName{}) {
			out[f.Key] = f.Port
		}
	}
	return out
}

// completeArgs completes the arguments of a command of the plugin: the first by the first function, and so on.
func (o *clusterOptions) completeArgs(cmd *cobra.Command, by ...func(ctx context.Context, namespace string,
	o *clusterOptions, cmd *cobra.Command) []string) {
	cmd.ValidArgsFunction = func(cmd *cobra.Command, args []string, begun string) ([]string, cobra.ShellCompDirective) {
		if len(args) >= len(by) {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		ctx, cancel := context.WithTimeout(cmp.Or(cmd.Context(), context.Background()), completionTime)
		defer cancel()
		namespace, name, qualified := strings.Cut(begun, "/")
		if !qualified {
			namespace, name = "", begun
		}
		words := beginning(by[len(args)](ctx, namespace, o, cmd), name)
		for i := range words {
			if qualified {
				words[i] = namespace + "/" + words[i]
			}
		}
		return words, cobra.ShellCompDirectiveNoFileComp
	}
}

// podNames, serviceNames and nodeNames are what the API has, in a namespace or, if that is empty, the context's.
func podNames(ctx context.Context, namespace string, o *clusterOptions, cmd *cobra.Command) (names []string) {
	c, own, err := o.open(cmd)
	if err != nil {
		return nil
	}
	pods, err := c.API.Pods(ctx, cmp.Or(namespace, own), "")
	if err != nil {
		return nil
	}
	for i := range pods {
		names = append(names, pods[i].Name)
	}
	return names
}

func serviceNames(ctx context.Context, namespace string, o *clusterOptions, cmd *cobra.Command) []string {
	c, own, err := o.open(cmd)
	if err != nil {
		return nil
	}
	names, err := c.ServiceNames(ctx, cmp.Or(namespace, own))
	if err != nil {
		return nil
	}
	return names
}

func nodeNames(ctx context.Context, _ string, o *clusterOptions, cmd *cobra.Command) (names []string) {
	c, _, err := o.open(cmd)
	if err != nil {
		return nil
	}
	nodes, err := c.API.Nodes(ctx)
	if err != nil {
		return nil
	}
	for i := range nodes {
		names = append(names, nodes[i].Name)
	}
	return names
}
