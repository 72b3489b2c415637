package node

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
	"github.com/verdict-proxy/verdict/sync/watch"
)

// nodeObject holds this node's Node object, and reports where it does not match the settings. The data plane follows
// the Node by itself.
type nodeObject struct {
	name   string
	config *configWatcher
	// seen is called for each Node that is new or has changed.
	seen func()
	// records names both sides of connections; nil if none are recorded.
	records *records

	// last is the latest Node. reported lists the mismatches that were reported.
	last     atomic.Pointer[snapshot.Node]
	mu       sync.Mutex
	reported []string
}

// nodeSource passes a source's objects to a nodeObject, too.
type nodeSource struct {
	Source
	node *nodeObject
	ipvs *ipvsChoice
	link *linkAsk
}

// Run runs the source.
func (s *nodeSource) Run(ctx context.Context, sink watch.Sink) error {
	return s.Source.Run(ctx, &nodeSink{sink, s})
}

// nodeSink sees everything on its way to another sink.
type nodeSink struct {
	watch.Sink
	*nodeSource
}

func (s *nodeSink) Put(d snapshot.Delta) {
	if d.Node != nil {
		s.node.observe(d.Node)
		s.node.seen()
	}
	s.ipvs.warnSchedulerIgnored(d)
	s.node.records.take(d)
	s.link.take(d)
	s.Sink.Put(d)
}

func (s *nodeSink) Synced() {
	if s.node.last.Load() == nil {
		advice := "is --hostname-override right?"
		if s.node.config.settings.Load().Manifests != "" {
			advice = "no manifest has a Node of this name"
		}
		s.node.config.log.Error("the Node object does not exist yet: node ports do not answer at its addresses, "+
			"and no endpoint is in its zone ("+advice+")", "node", s.node.name)
	}
	s.link.complete()
	s.Sink.Synced()
}

// observe logs a Node that is new or has changed.
func (o *nodeObject) observe(n *snapshot.Node) {
	last := o.last.Swap(n)
	text := "the Node is known"
	if last != nil {
		text = "the Node has changed"
		if slices.Equal(last.Addresses, n.Addresses) && slices.Equal(last.PodCIDRs, n.PodCIDRs) && last.Zone == n.Zone {
			return
		}
	}
	primary := primaryFamily(o.config.settings.Load().Policy.NodeIP, n.Addresses)
	o.config.log.Info(text, "addresses", list(n.Addresses), "primary", primary.String(),
		"pods", list(n.PodCIDRs), "zone", n.Zone)
	o.reportMismatches()
}

// reportMismatches reports where the settings do not match the Node, unless it was reported before.
func (o *nodeObject) reportMismatches() {
	n := o.last.Load()
	if n == nil {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	found := mismatches(o.config.settings.Load().Policy, n, ipv6Disabled())
	for _, text := range found {
		if !slices.Contains(o.reported, text) {
			o.config.log.Warn(text)
		}
	}
	o.reported = found
}

// addrs returns the node's addresses, the preferred one first.
func (o *nodeObject) addrs() []netip.Addr {
	var addrs []netip.Addr
	if said := o.config.settings.Load().Policy.NodeIP; said.IsValid() {
		addrs = append(addrs, said)
	}
	if n := o.last.Load(); n != nil {
		addrs = append(addrs, n.Addresses...)
	}
	return slices.Compact(addrs)
}

func list[T fmt.Stringer](values []T) string {
	texts := make([]string, len(values))
	for i, v := range values {
		texts[i] = v.String()
	}
	return strings.Join(texts, ",")
}

// primaryFamily returns the family that the node belongs to first: that of its own address if the operator gives
// one, else that of the Node's first address, else IPv4.
func primaryFamily(said netip.Addr, addrs []netip.Addr) ipfamily.Family {
	if !said.IsValid() && len(addrs) > 0 {
		said = addrs[0]
	}
	if !said.IsValid() {
		return ipfamily.IPv4
	}
	return ipfamily.Of(said)
}

// mismatches returns what in the settings does not fit a Node: something is there for one family of addresses, and not
// for its first.
func mismatches(c dataplane.Config, n *snapshot.Node, noIPv6 bool) (found []string) {
	family := primaryFamily(c.NodeIP, n.Addresses)
	add := func(format string, args ...any) { found = append(found, fmt.Sprintf(format, args...)) }
	lacks := func(ranges []netip.Prefix) bool {
		return !slices.ContainsFunc(ranges, func(p netip.Prefix) bool { return family.Has(p.Addr()) })
	}
	switch {
	case len(n.Addresses) == 0 && !c.NodeIP.IsValid():
		add("the Node has no address: node ports answer at none of its own; --bind-address can say what it is")
	case family == ipfamily.IPv6 && noIPv6:
		add("the Node's first address is an IPv6 one, and this host has IPv6 disabled")
	}
	switch d := c.DetectLocal; {
	case d.Mode == dataplane.DetectClusterCIDR && len(d.ClusterCIDRs) == 0:
		add("clusterCIDR is not set: pods cannot be told from others, so nothing that is sent to a cluster IP is masqueraded")
	case d.Mode == dataplane.DetectClusterCIDR && lacks(d.ClusterCIDRs):
		add("the Node is %s first, and clusterCIDR (%s) has no %s range", family, list(d.ClusterCIDRs), family)
	case d.Mode == dataplane.DetectNodeCIDR && len(n.PodCIDRs) == 0:
		add("detectLocalMode is NodeCIDR, and the Node has no podCIDRs yet: until then pods cannot be told from others")
	case d.Mode == dataplane.DetectNodeCIDR && lacks(n.PodCIDRs):
		add("the Node is %s first, and its podCIDRs (%s) have no %s range", family, list(n.PodCIDRs), family)
	}
	ranges := len(c.NodePortAddresses) > 0 && c.NodePortAddresses[0].IsValid()
	if ranges && !c.NodePortPrimary && lacks(c.NodePortAddresses) {
		add("the Node is %s first, and nodePortAddresses (%s) has no %s range: node ports do not answer in %s",
			family, list(c.NodePortAddresses), family, family)
	}
	return found
}

// ipv6Disabled reports whether IPv6 is disabled on this host.
func ipv6Disabled() bool {
	if _, err := os.Stat("/proc/net/if_inet6"); err != nil {
		return true
	}
	text, err := os.ReadFile("/proc/sys/net/ipv6/conf/all/disable_ipv6")
	return err == nil && strings.TrimSpace(string(text)) == "1"
}
