package dataplane

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Overlap is a ServiceCIDR in which something other than Services has addresses.
type Overlap struct {
	// Range is the ServiceCIDR, Used what else is used, and By who uses it.
	Range, Used netip.Prefix
	By          UsedBy
	// Shared is the part of Range in which nothing is refused for that reason: all of it, if nobody knows where else in
	// it others of the kind are.
	Shared netip.Prefix
}

// UsedBy says what has addresses in a ServiceCIDR.
type UsedBy string

// What may have addresses there.
const (
	UsedByNode      UsedBy = "this node's address"
	UsedByNodes     UsedBy = "the nodes' network"
	UsedByPods      UsedBy = "pods"
	UsedByNetwork   UsedBy = "a network of this host"
	UsedByRoute     UsedBy = "a route of this host"
	UsedByAPIServer UsedBy = "the API server's address"
	UsedByUnknown   UsedBy = "perhaps one of the many routes of this host"
)

func (o Overlap) String() string {
	return fmt.Sprintf("%s overlaps %s (%s)", o.Range, o.Used, o.By)
}

// MaxSharedRanges bounds the parts of a ServiceCIDR in which nothing is refused. If there would be more, it is all of
// it.
const MaxSharedRanges = 64

// KubernetesService is the Service of the API server, which alone writes the slice of the same name. Others may have
// slices of that Service, too, and are not asked.
var KubernetesService = snapshot.Name{Namespace: "default", Name: "kubernetes"}

// Overlaps returns what other than Services has addresses in the ServiceCIDRs, as far as this host knows, sorted. It
// need not know: other nodes' addresses are not looked for one by one. Where the node's own address is in a range, so
// are the others', wherever they are; and no tenant can write what is asked here.
func Overlaps(cfg Config, s *snapshot.Snapshot) (out []Overlap) {
	ranges := outermost(slices.Clone(s.ServiceCIDRs))
	node := nodeAddrs(cfg.NodeIP, s.Node.Addresses)
	if len(node) == 0 {
		node = s.HostAddrs
	}
	nets := s.HostNetworks.Overlapping(ranges)
	for _, r := range ranges {
		f := finder{r: r}
		for _, a := range node {
			used, by := single(a), UsedByNode
			if i := slices.IndexFunc(nets.Own, func(p netip.Prefix) bool { return p.Contains(a) }); i >= 0 {
				used, by = nets.Own[i], UsedByNodes
			}
			f.add(used, by, true)
		}
		for _, p := range cfg.DetectLocal.ClusterCIDRs {
			f.add(p, UsedByPods, false)
		}
		for _, p := range s.Node.PodCIDRs {
			// Unless the range of all pods is known, those of other nodes may be anywhere.
			f.add(p, UsedByPods, !contain(cfg.DetectLocal.ClusterCIDRs, p.Addr()))
		}
		for _, p := range nets.Own {
			f.add(p, UsedByNetwork, false)
		}
		for _, p := range nets.Routes {
			f.add(p, UsedByRoute, false)
		}
		if nets.TooMany {
			f.add(r, UsedByUnknown, true)
		}
		if svc := s.Services[KubernetesService]; svc == nil || !slices.Contains(svc.ClusterIPs, cfg.APIServer) {
			f.add(single(cfg.APIServer), UsedByAPIServer, false)
		}
		if slice := s.Slices[KubernetesService][KubernetesService.Name]; slice != nil {
			for _, ep := range slice.Endpoints {
				f.add(single(ep.Addr), UsedByAPIServer, false)
			}
		}
		out = append(out, f.found...)
	}
	return out
}

func single(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// finder collects what overlaps one range.
type finder struct {
	r     netip.Prefix
	found []Overlap
}

// add records that something is used. All says that it may be one of many, which may be anywhere.
func (f *finder) add(p netip.Prefix, by UsedBy, all bool) {
	// A network is also a route, and has a route to each pod in it.
	known := func(o Overlap) bool { return o.Shared.Bits() <= p.Bits() && o.Shared.Contains(p.Addr()) }
	if !p.IsValid() || !p.Overlaps(f.r) || slices.ContainsFunc(f.found, known) {
		return
	}
	o := Overlap{Range: f.r, Used: p.Masked(), By: by, Shared: f.r}
	if !all && p.Bits() > f.r.Bits() {
		o.Shared = o.Used
	}
	f.found = append(f.found, o)
}

// sharedRanges returns the parts of the ServiceCIDRs in which nothing is refused; sorted, none inside another.
func sharedRanges(found []Overlap) []netip.Prefix {
	var all []netip.Prefix
	for len(found) > 0 {
		r, n := found[0].Range, 0
		var of []netip.Prefix
		for n < len(found) && found[n].Range == r {
			of = append(of, found[n].Shared)
			n++
		}
		if of = outermost(of); len(of) > MaxSharedRanges {
			of = []netip.Prefix{r}
		}
		all, found = append(all, of...), found[n:]
	}
	return all
}

// shownOverlaps is how many overlaps of a list DescribeOverlaps names.
const shownOverlaps = 4

// DescribeOverlaps says in words what overlaps; empty if nothing does.
func DescribeOverlaps(found []Overlap) string {
	texts := make([]string, 0, shownOverlaps)
	for _, o := range found[:min(len(found), shownOverlaps)] {
		texts = append(texts, o.String())
	}
	text := strings.Join(texts, "; ")
	if more := len(found) - shownOverlaps; more > 0 {
		text += fmt.Sprintf("; and %d more", more)
	}
	return text
}

// OverlapAdvice says what to do about overlaps.
const OverlapAdvice = "Verdict refuses nothing there, so that nobody is cut off, and sends unused addresses and " +
	"ports of Services on; give Services a range that nothing else uses"

// Refuses reports whether packets to an address of a Service, or of a ServiceCIDR, may be turned away if no frontend
// takes them: it is not this host's, whose addresses are given, and not shared.
func (st *State) Refuses(a netip.Addr, host []netip.Addr) bool {
	return !contain(st.SharedRanges, a) && !slices.Contains(host, a)
}
