package testbed

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Kind is a proxy that can be held to the suite: how to get it, to start it and to look at what it wrote.
type Kind struct {
	// Name is that of --proxy.
	Name string `yaml:"name"`
	// Binary is the program. Empty means that build makes it.
	Binary string `yaml:"binary"`
	// Args are its arguments. In them {node} stands for the node's name, {kubeconfig} for a file with the rights of
	// kube-proxy, {config} for a file with Config, {pods} for the ranges of all pods.
	Args []string `yaml:"args"`
	// Config is the content of a file in which the same words stand for the same; empty means that there is none.
	Config string `yaml:"config"`
	// Listings are commands that print what the proxy programmed, run on the node.
	Listings [][]string `yaml:"listings"`
	// Version are the arguments that make the program print its version; empty means --version.
	Version []string `yaml:"version"`
	// Witness says that what the proxy programmed is what the witness reads and asks: tables of nftables, or kube-proxy's
	// chains if iptables-save is among the Listings.
	Witness bool `yaml:"witness"`
	// Like is a known proxy: what the cases say of that one counts for this one, too. Empty means none.
	Like string `yaml:"like"`
	// As is a known proxy, too: this one is to behave as that one, where cases name a difference of it that does not stay.
	As string `yaml:"as"`

	// mode is kube-proxy's word, of which the configuration is made; empty for foreign proxies.
	mode  string
	build func(ctx context.Context, from Programs, dir string) (string, error)
	// older makes an older version of the program; nil if there is none. oldVersion says which one it is.
	older      func(ctx context.Context, from Programs, dir string) (string, error)
	oldVersion string
	// forgetsZone says that the proxy may start without its node's zone, and must be told of it by a change. kube-proxy
	// registers its handler of Node events after the first one may have come (cmd/kube-proxy/app/server.go,
	// NewNodeTopologyConfig in 1.36 and 1.37).
	forgetsZone bool
	// forgetsRanges says that the proxy may start without a rule for addresses that no Service has, and writes it at its
	// next full sync, an hour later, unless a change of the Node makes it sync in full: kube-proxy in mode nftables, when
	// it hears of ServiceCIDRs after its first sync (pkg/proxy/nftables/proxier.go, OnServiceCIDRsChanged, 1.36, 1.37).
	forgetsRanges bool
	// status says that the proxy tells up to which versions it has programmed everything.
	status bool
}

var (
	listNFT      = [][]string{{"nft", "list", "ruleset"}}
	listIPTables = [][]string{{"iptables-save"}, {"ip6tables-save"}}
	listIPVS     = [][]string{{"ipvsadm", "-Sn"}, {"nft", "list", "ruleset"}}
	// What kube-proxy leaves to IPVS it says with iptables and ipset.
	listKubeProxyIPVS = append([][]string{{"ipvsadm", "-Sn"}, {"ipset", "save"}}, listIPTables...)
	runKubeProxy      = []string{"--config={config}", "--v=2"}
)

// kinds are the proxies known by name.
var kinds = slices.Concat([]Kind{
	verdict("verdict", "nftables", listNFT, true),
	verdict("verdict-iptables", "iptables", listIPTables, true, "--backend=iptables"),
	verdict("verdict-ipvs", "ipvs", listIPVS, false),
	asKubeProxy(verdict("verdict-as-kube-proxy", "nftables", listNFT, true, "--behavior=kube-proxy")),
}, kubeProxies("kube-proxy"), kubeProxies("kube-proxy-1.36"))

// ListsChains says that what the proxy programmed is chains of iptables.
func (k *Kind) ListsChains() bool {
	return slices.ContainsFunc(k.Listings, func(c []string) bool { return c[0] == listIPTables[0][0] })
}

func verdict(name, mode string, listings [][]string, witness bool, args ...string) Kind {
	return Kind{
		Name: name, mode: mode, Args: append([]string{"run", "--config={config}"}, args...), Listings: listings,
		Witness: witness, status: true,
		build: buildVerdict, Version: []string{"run", "--version"},
		older: buildOldVerdict, oldVersion: OldCommit,
	}
}

// asKubeProxy has a proxy behave as kube-proxy in mode nftables.
func asKubeProxy(k Kind) Kind {
	k.As = "kube-proxy-nftables"
	return k
}

// kubeProxies are the modes of a kube-proxy, which conformance/peers/build knows under a name. What the cases say of
// the newest counts for older ones, too.
func kubeProxies(program string) []Kind {
	all := []Kind{
		{mode: "nftables", Listings: listNFT, Witness: true},
		{mode: "iptables", Listings: listIPTables, Witness: true},
		{mode: "ipvs", Listings: listKubeProxyIPVS},
	}
	for i := range all {
		k := &all[i]
		k.Name, k.Args, k.forgetsZone = program+"-"+k.mode, runKubeProxy, true
		k.forgetsRanges = k.mode == "nftables"
		k.build = peer(program)
		if program == "kube-proxy" {
			k.older, k.oldVersion = peer("kube-proxy-1.36"), "Kubernetes 1.36"
		} else {
			k.Like = "kube-proxy-" + k.mode
		}
	}
	return all
}

func peer(name string) func(context.Context, Programs, string) (string, error) {
	return func(ctx context.Context, from Programs, _ string) (string, error) {
		return first(from.Peers(ctx, name))
	}
}

// KindNames gives the names that FindKind knows.
func KindNames() (names []string) {
	for _, k := range kinds {
		names = append(names, k.Name)
	}
	return names
}

// FindKind gives a proxy by its name, or from a file that describes one.
func FindKind(name string) (*Kind, error) {
	if i := slices.IndexFunc(kinds, func(k Kind) bool { return k.Name == name }); i >= 0 {
		k := kinds[i]
		return &k, nil
	}
	if !strings.ContainsAny(name, "./") {
		return nil, fmt.Errorf("--proxy %s: it is none of %s, and no path of a file", name, strings.Join(KindNames(), ", "))
	}
	return readKind(name)
}

func readKind(path string) (*Kind, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("--proxy: %w", err)
	}
	defer f.Close()
	k := &Kind{}
	d := yaml.NewDecoder(f)
	d.KnownFields(true)
	if err := d.Decode(k); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	switch {
	case k.Name == "":
		return nil, fmt.Errorf("%s: name: it is missing", path)
	case slices.Contains(KindNames(), k.Name):
		return nil, fmt.Errorf("%s: name: %s is a known proxy; choose another", path, k.Name)
	case k.Binary == "":
		return nil, fmt.Errorf("%s: binary: it is missing", path)
	case k.Like != "" && !slices.Contains(KindNames(), k.Like):
		return nil, fmt.Errorf("%s: like: %s is none of %s", path, k.Like, strings.Join(KindNames(), ", "))
	case k.As != "" && !slices.Contains(KindNames(), k.As):
		return nil, fmt.Errorf("%s: as: %s is none of %s", path, k.As, strings.Join(KindNames(), ", "))
	}
	if k.Binary, err = exec.LookPath(k.Binary); err != nil {
		return nil, fmt.Errorf("%s: binary: %w", path, err)
	}
	return k, nil
}

// Obtain gives the program, which it builds if need be, in the directory dir.
func (k *Kind) Obtain(ctx context.Context, from Programs, dir string) (binary, version string, err error) {
	binary = k.Binary
	if binary == "" {
		if binary, err = k.build(ctx, from, dir); err != nil {
			return "", "", err
		}
	}
	flags := k.Version
	if len(flags) == 0 {
		flags = []string{"--version"}
	}
	out, err := exec.CommandContext(ctx, binary, flags...).CombinedOutput()
	if err != nil {
		return "", "", fmt.Errorf("%s %s: %w: %s", binary, strings.Join(flags, " "), err, out)
	}
	version, _, _ = strings.Cut(strings.TrimSpace(string(out)), "\n")
	return binary, version, nil
}

// Older returns an older version of the program, which it builds in the directory dir if need be, and says which one it
// is. The name is empty if there is none.
func (k *Kind) Older(ctx context.Context, from Programs, dir string) (binary, version string, err error) {
	if k.older != nil {
		binary, err = k.older(ctx, from, dir)
	}
	return binary, k.oldVersion, err
}

// Peer reports whether this is a known proxy of somebody else.
func (k *Kind) Peer() bool { return k.mode != "" && !k.status }

// Adjustable says whether stories may change the configuration.
func (k *Kind) Adjustable() bool { return k.mode != "" }

// Knows says whether a list of proxies' names means this one.
func (k *Kind) Knows(names []string) bool {
	return slices.Contains(names, k.Name) || k.Like != "" && slices.Contains(names, k.Like) ||
		k.As != "" && slices.Contains(names, k.As)
}
