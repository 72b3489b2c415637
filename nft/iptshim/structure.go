package iptshim

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// jump is a rule in a chain of iptables' own that leads to one of ours.
type jump struct {
	table    Table
	from, to string
	rule     rule
}

const stateNew = " -m conntrack --ctstate NEW"

func newJump(table Table, from, match, comment, to string) jump {
	return jump{table, from, to, rule{before: match, comment: comment, after: " -j " + to}}
}

// jumps are all of them, in the order in which each is put at the beginning of its chain: the last one is met first.
var jumps = []jump{
	newJump(Filter, "INPUT", stateNew, "kubernetes externally-visible service portals", externalChain),
	newJump(Filter, "FORWARD", stateNew, "kubernetes externally-visible service portals", externalChain),
	newJump(Filter, "INPUT", "", "kubernetes health check service ports", nodePortsChain),
	newJump(Filter, "FORWARD", stateNew, "kubernetes service portals", servicesChain),
	newJump(Filter, "OUTPUT", stateNew, "kubernetes service portals", servicesChain),
	newJump(Filter, "FORWARD", "", "kubernetes forwarding rules", forwardChain),
	newJump(Filter, "INPUT", stateNew, "kubernetes load balancer firewall", firewallChain),
	newJump(Filter, "OUTPUT", stateNew, "kubernetes load balancer firewall", firewallChain),
	newJump(Filter, "FORWARD", stateNew, "kubernetes load balancer firewall", firewallChain),
	newJump(NAT, "OUTPUT", "", "kubernetes service portals", servicesChain),
	newJump(NAT, "PREROUTING", "", "kubernetes service portals", servicesChain),
	newJump(NAT, "POSTROUTING", "", "kubernetes postrouting rules", postroutingChain),
	newJump(Filter, "INPUT", "", "", loopbackChain),
	newJump(Filter, "OUTPUT", "", "", loopbackChain),
}

// structure is what the rules depend on besides Services.
type structure struct {
	pods dataplane.Pods
	// loopback says that IPv4 node ports answer at 127.0.0.1, for which the host routes its loopback range.
	loopback bool
	cidrs    []netip.Prefix
	// shared are the parts of cidrs that others use, too.
	shared []netip.Prefix
}

func structureOf(s *dataplane.State, f ipfamily.Family) structure {
	out := structure{pods: s.Pods4, loopback: s.LocalhostNodePorts && f == ipfamily.IPv4}
	if f == ipfamily.IPv6 {
		out.pods = s.Pods6
	}
	other := func(p netip.Prefix) bool { return !f.Has(p.Addr()) }
	out.cidrs = slices.DeleteFunc(slices.Clone(s.ServiceCIDRs), other)
	out.shared = slices.DeleteFunc(slices.Clone(s.SharedRanges), other)
	return out
}

// wants says whether a jump is among those that this structure has.
func (s structure) wants(j *jump) bool { return j.to != loopbackChain || s.loopback }

// chains gives those that hold nothing of Services.
func (o *Options) chains(s structure) []chain {
	mark := fmt.Sprintf("0x%x", o.mark())
	out := []chain{
		{table: NAT, name: markChain, rules: []rule{{after: " -j MARK --set-xmark " + mark + "/" + mark}}},
		{table: NAT, name: postroutingChain, rules: []rule{
			{after: " -m mark ! --mark " + mark + "/" + mark + " -j RETURN"},
			// The mark is taken off again: a packet that comes through here once more must not be masqueraded twice.
			{after: " -j MARK --set-xmark " + mark + "/0x0"},
			{comment: "kubernetes service traffic requiring SNAT", after: " -j MASQUERADE --random-fully"},
		}},
		{table: Filter, name: forwardChain, rules: o.forward(mark)},
	}
	if s.loopback {
		out = append(out, chain{table: Filter, name: loopbackChain, rules: []rule{{
			before: " ! -s 127.0.0.0/8 -d 127.0.0.0/8", comment: "block incoming localnet connections",
			after: " -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP"}}})
	}
	for _, t := range Tables {
		out = append(out, chain{table: t, name: canaryChain})
	}
	return out
}

// forward accepts what the node forwards for Services, for the sake of hosts that drop the rest.
func (o *Options) forward(mark string) []rule {
	var rules []rule
	if !o.KeepInvalid {
		rules = append(rules, rule{after: " -m conntrack --ctstate INVALID -j DROP"})
	}
	return append(rules,
		rule{comment: "kubernetes forwarding rules", after: " -m mark --mark " + mark + "/" + mark + " -j ACCEPT"},
		rule{comment: "kubernetes forwarding conntrack rule", after: " -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"})
}

// tails gives the rules that stand after the rows of each list. Outside says that some cluster IP is in none of the
// ServiceCIDRs.
func (s structure) tails(nodePorts map[netip.Addr]int, outside bool) (tails [numLists][]rule) {
	const last = "kubernetes service nodeports; NOTE: this must be the last rule in this chain"
	for _, a := range slices.SortedFunc(maps.Keys(nodePorts), netip.Addr.Compare) {
		after := " -j " + nodePortsChain
		if a.IsLoopback() { // a neighbour may send packets with such a destination, too
			after = fromNode + after
		}
		tails[natServices] = append(tails[natServices], rule{before: " -d " + addrText(a), comment: last, after: after})
	}
	// INPUT and FORWARD lead there; but a process on this node may send to an address that is elsewhere.
	tails[filterServices] = []rule{{comment: "kubernetes externally-visible service portals, from this node",
		after: fromNode + " -j " + externalChain}}
	for _, p := range s.shared {
		tails[filterServices] = append(tails[filterServices], rule{before: " -d " + prefixText(p),
			comment: "others use these addresses, too", after: " -j RETURN"})
	}
	unserved := rule{comment: "kubernetes cluster IPs, sent to no endpoint",
		after: toNoEndpoint + " -j " + clusterIPsChain}
	if outside {
		tails[filterServices] = append(tails[filterServices], unserved)
	}
	// An external address may lie in a ServiceCIDR.
	tails[filterClusterIPs] = []rule{{after: " -j " + externalChain}}
	for _, p := range s.cidrs {
		if !outside {
			of := unserved
			of.before = " -d " + prefixText(p)
			tails[filterServices] = append(tails[filterServices], of)
		}
		tails[filterClusterIPs] = append(tails[filterClusterIPs], rule{before: " -d " + prefixText(p),
			comment: "no Service has this cluster IP", after: " -j DROP"})
	}
	return tails
}

// outside counts the cluster IPs of a Service that are in none of the ServiceCIDRs.
func (s structure) outside(f ipfamily.Family, svc *dataplane.Service) (n int) {
	if svc == nil {
		return 0
	}
	for _, a := range svc.ClusterIPs {
		if f.Has(a) && !slices.ContainsFunc(s.cidrs, func(p netip.Prefix) bool { return p.Contains(a) }) {
			n++
		}
	}
	return n
}
