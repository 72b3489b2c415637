package main

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// policyFlags are what the operator decides. Names and meanings are kube-proxy's.
type policyFlags struct {
	nodeName          string
	clusterCIDR       string
	detectLocalMode   string
	podBridge         string
	podPrefix         string
	nodePortAddresses []string
	masqueradeAll     bool
	localhostNodePort bool
}

func (p *policyFlags) add(f *pflag.FlagSet) {
	f.StringVar(&p.nodeName, "node-name", "",
		"name of this node in the cluster: tells which endpoints are local (default: the host's name, in lower case)")
	f.StringVar(&p.clusterCIDR, "cluster-cidr", "",
		"pods' addresses, one range or one of each family with a comma between; what comes from elsewhere is masqueraded "+
			"on its way to a cluster IP (mode ClusterCIDR)")
	f.StringVar(&p.detectLocalMode, "detect-local-mode", "ClusterCIDR",
		"how pods are told from others: ClusterCIDR, NodeCIDR, BridgeInterface or InterfaceNamePrefix")
	f.StringVar(&p.podBridge, "pod-bridge-interface", "", "the bridge pods are on (mode BridgeInterface)")
	f.StringVar(&p.podPrefix, "pod-interface-name-prefix", "",
		"how the names of pods' interfaces begin (mode InterfaceNamePrefix)")
	f.StringSliceVar(&p.nodePortAddresses, "nodeport-addresses", nil,
		"ranges of this host's addresses that answer on node ports, or \"primary\": the Node object's (default primary)")
	f.BoolVar(&p.masqueradeAll, "masquerade-all", false, "masquerade everything that is sent to a cluster IP")
	f.BoolVar(&p.localhostNodePort, "localhost-nodeports", true,
		"answer on IPv4 node ports at 127.0.0.1 too; sets net.ipv4.conf.all.route_localnet, and guards the loopback range")
}

// config checks the flags and gives what they say. An error names the flag.
func (p *policyFlags) config() (dataplane.Config, error) {
	c := dataplane.Config{MasqueradeAll: p.masqueradeAll, LocalhostNodePorts: p.localhostNodePort}
	var err error
	if c.NodeName, err = p.node(); err != nil {
		return c, err
	}
	if c.DetectLocal, err = p.detectLocal(); err != nil {
		return c, err
	}
	if len(p.nodePortAddresses) == 0 || slices.Equal(p.nodePortAddresses, []string{"primary"}) {
		return c, nil
	}
	if slices.Contains(p.nodePortAddresses, "primary") {
		return c, errors.New("--nodeport-addresses: \"primary\" stands alone, without ranges")
	}
	c.NodePortAddresses, err = parseRanges("--nodeport-addresses", p.nodePortAddresses)
	return c, err
}

func (p *policyFlags) node() (string, error) {
	if p.nodeName != "" {
		return p.nodeName, nil
	}
	host, err := os.Hostname()
	if err != nil {
		return "", fmt.Errorf("--node-name is not given, and the host's name cannot be read: %w", err)
	}
	return strings.ToLower(strings.TrimSpace(host)), nil
}

func (p *policyFlags) detectLocal() (dataplane.DetectLocal, error) {
	var d dataplane.DetectLocal
	switch p.detectLocalMode {
	case "ClusterCIDR":
		if p.clusterCIDR == "" {
			return d, nil
		}
		var err error
		d.ClusterCIDRs, err = parseRanges("--cluster-cidr", strings.Split(p.clusterCIDR, ","))
		return d, err
	case "NodeCIDR":
		d.Mode = dataplane.DetectNodeCIDR
		return d, nil
	case "BridgeInterface":
		d.Mode, d.Interface = dataplane.DetectBridgeInterface, p.podBridge
		return d, interfaceName("--pod-bridge-interface", d.Interface)
	case "InterfaceNamePrefix":
		d.Mode, d.Interface = dataplane.DetectInterfaceNamePrefix, p.podPrefix
		return d, interfaceName("--pod-interface-name-prefix", d.Interface)
	}
	return d, fmt.Errorf("--detect-local-mode: %q is none of ClusterCIDR, NodeCIDR, BridgeInterface, InterfaceNamePrefix",
		p.detectLocalMode)
}

// interfaceName refuses what the kernel refuses as a name; nft would take * and quotes for more than they say.
func interfaceName(flag, name string) error {
	switch {
	case name == "":
		return fmt.Errorf("%s is needed in this --detect-local-mode", flag)
	case len(name) > 15 || strings.ContainsAny(name, "/ \t\n\"\\*"):
		return fmt.Errorf("%s: %q is no interface name (at most 15 bytes, without spaces, slashes, quotes or stars)", flag, name)
	}
	return nil
}

func parseRanges(flag string, texts []string) ([]netip.Prefix, error) {
	var out []netip.Prefix
	for _, t := range texts {
		p, err := netip.ParsePrefix(strings.TrimSpace(t))
		if err != nil || p.Addr().Is4In6() {
			return nil, fmt.Errorf("%s: %q is no range of addresses such as 10.244.0.0/16", flag, t)
		}
		out = append(out, p.Masked())
	}
	return out, nil
}
