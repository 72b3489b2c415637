package iptshim

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// listID names one of the lists of rows: a chain that many Services have rules in.
type listID uint8

const (
	natServices listID = iota
	natNodePorts
	filterServices
	filterExternal
	filterFirewall
	filterNodePorts
	filterClusterIPs
	numLists
)

// row is a Service's rule in a list.
type row struct {
	list listID
	// key is what the row matches, for sorting and for trees: see rowKey.
	key string
	// fallback says that it stands behind others with the same key: it is for those whom they do not match.
	fallback bool
	rule
}

func compareRows(a, b row) int {
	return cmp.Or(strings.Compare(a.key, b.key), strings.Compare(a.owner.Namespace, b.owner.Namespace),
		strings.Compare(a.owner.Name, b.owner.Name),
		falseFirst(a.fallback, b.fallback), strings.Compare(a.before, b.before), strings.Compare(a.after, b.after))
}

// falseFirst puts false before true.
func falseFirst(a, b bool) int {
	switch {
	case a == b:
		return 0
	case b:
		return -1
	}
	return 1
}

// rowKey is address, protocol and port as bytes that sort as they do. Without an address it is for node ports.
func rowKey(a netip.Addr, p snapshot.Protocol, port uint16) string {
	b := make([]byte, 0, 16+3)
	if a.IsValid() {
		b = append(b, a.AsSlice()...)
	}
	return string(append(b, byte(p), byte(port>>8), byte(port)))
}

// compiled is what a Service means in one family.
type compiled struct {
	chains []chain
	rows   []row
	// endpoints is how many it has.
	endpoints int
}

// compiler turns Services of one family into chains and rows.
type compiler struct {
	family ipfamily.Family
	pods   dataplane.Pods
	// nodePorts are the addresses that node ports answer at.
	nodePorts map[netip.Addr]int
}

// service compiles a Service; nil gives nothing.
func (c *compiler) service(s *dataplane.Service) (out compiled) {
	if s == nil {
		return out
	}
	first := ""
	for _, sp := range s.Ports {
		if len(sp.Frontends) > 0 && c.family.Has(sp.Frontends[0].Key.Addr) {
			pc := portCompiler{compiler: c, sp: sp, name: sp.Name.String(), hash: portHash(sp.Name), out: &out}
			pc.compile()
			first = cmp.Or(first, pc.name)
		}
	}
	for _, a := range s.ClusterIPs {
		if c.family.Has(a) {
			for _, p := range [...]snapshot.Protocol{snapshot.TCP, anyOther} {
				before := " -d " + addrText(a)
				if p == snapshot.TCP {
					before += " -p tcp"
				}
				out.rows = append(out.rows, row{filterClusterIPs, rowKey(a, p, 0), false, rule{
					before: before, comment: comment(s.Name.String() + noSuchPort), after: c.reject(p), owner: s.Name}})
			}
		}
	}
	if s.HealthCheckNodePort != 0 && first != "" {
		before, after := portMatch(snapshot.TCP, s.HealthCheckNodePort)
		out.rows = append(out.rows, row{filterNodePorts, rowKey(netip.Addr{}, snapshot.TCP, s.HealthCheckNodePort), false,
			rule{
				before: before, comment: comment(first + " health check node port"), after: after + " -j ACCEPT", owner: s.Name}})
	}
	return out
}

// anyOther stands behind all protocols in the order of rows.
const anyOther snapshot.Protocol = 255

// nodePortAddrs gives the addresses that a Service's node ports answer at, one mention for each port.
func nodePortAddrs(f ipfamily.Family, s *dataplane.Service) (addrs []netip.Addr) {
	if s == nil {
		return nil
	}
	for _, sp := range s.Ports {
		for i := range sp.Frontends {
			if fe := &sp.Frontends[i]; fe.Kind == dataplane.NodePort && f.Has(fe.Key.Addr) {
				addrs = append(addrs, fe.Key.Addr)
			}
		}
	}
	return addrs
}

// reject tells the sender that nobody is there. Of ICMP errors the kernel sends one a second to each destination, so
// that most clients of TCP would hang.
func (c *compiler) reject(p snapshot.Protocol) string {
	switch {
	case p == snapshot.TCP:
		return " -j REJECT --reject-with tcp-reset"
	case c.family == ipfamily.IPv4:
		return " -j REJECT --reject-with icmp-port-unreachable"
	}
	return " -j REJECT --reject-with icmp6-port-unreachable"
}

// portCompiler compiles one service port.
type portCompiler struct {
	*compiler
	sp         *dataplane.ServicePort
	name, hash string
	out        *compiled
}

func (c *portCompiler) compile() {
	var internal, external []*dataplane.Frontend
	for i := range c.sp.Frontends {
		if f := &c.sp.Frontends[i]; f.Kind == dataplane.ClusterIP {
			internal = append(internal, f)
		} else {
			external = append(external, f)
		}
	}
	used := map[*dataplane.Pool]bool{}
	for _, f := range c.sp.Frontends {
		for _, r := range f.Routes {
			used[r.Pool] = used[r.Pool] || len(r.Pool.Endpoints) > 0
		}
	}
	first := c.internal(internal)
	if len(external) > 0 {
		c.external(external)
	}
	var endpoints []dataplane.Endpoint
	for _, pool := range [...]*dataplane.Pool{c.sp.Cluster, c.sp.Local} {
		if used[pool] {
			c.pool(pool, first[pool])
			endpoints = append(endpoints, pool.Endpoints...)
		}
	}
	slices.SortFunc(endpoints, func(a, b dataplane.Endpoint) int { return a.AddrPort.Compare(b.AddrPort) })
	endpoints = slices.CompactFunc(endpoints, func(a, b dataplane.Endpoint) bool { return a.AddrPort == b.AddrPort })
	for _, ep := range endpoints {
		c.endpoint(ep.AddrPort)
	}
	c.out.endpoints += len(endpoints)
}

func (c *portCompiler) chain(name string, rules []rule) {
	c.out.chains = append(c.out.chains, chain{NAT, name, rules, c.sp.Name.Service})
}

func (c *portCompiler) rule(before, text, after string) rule {
	return rule{before, comment(text), after, c.sp.Name.Service}
}

// row adds a row for a key. Match, if any, restricts who it is for.
func (c *portCompiler) row(list listID, k dataplane.Key, match, text, target string) {
	before, after := keyMatch(k)
	fallback := match == "" && (list == filterFirewall || list == filterExternal && target == drop)
	c.out.rows = append(c.out.rows, row{list, rowKey(k.Addr, k.Protocol, k.Port), fallback,
		c.rule(orderMatches(match, before), text, after+target)})
}

// poolChain names the chain that chooses from a pool.
func (c *portCompiler) poolChain(p *dataplane.Pool) string {
	if p == c.sp.Local {
		return svlPrefix + c.hash
	}
	return svcPrefix + c.hash
}

// verdict is what a packet gets that a pool without endpoints should answer.
func (c *portCompiler) verdict(p *dataplane.Pool) (text, target string) {
	switch p.Empty {
	case dataplane.Drop:
		return c.name + " has no local endpoints", drop
	case dataplane.Pass:
		return c.name + " passes without local endpoints", " -j RETURN"
	}
	return c.name + " has no endpoints", c.reject(c.sp.Name.Protocol)
}

// internal writes the rows of cluster IPs, and gives the rules that refuse a share and that masquerade, by the pool
// before which they stand.
func (c *portCompiler) internal(frontends []*dataplane.Frontend) map[*dataplane.Pool][]rule {
	first := map[*dataplane.Pool][]rule{}
	for _, f := range frontends {
		pool := f.Route(dataplane.Anyone).Pool
		if len(pool.Endpoints) == 0 {
			text, target := c.verdict(pool)
			c.row(filterServices, f.Key, "", text, target)
			continue
		}
		before, after := keyMatch(f.Key)
		if pool.Refused > 0 {
			c.row(filterServices, f.Key, "", c.name+someRefused, c.reject(c.sp.Name.Protocol))
			first[pool] = append(first[pool], c.refusedShare(before, after, pool))
		}
		text := c.name + " cluster IP"
		c.row(natServices, f.Key, "", text, " -j "+c.poolChain(pool))
		match, none := "", true
		if last := f.Routes[len(f.Routes)-1]; last.SNAT {
			if match, none = "", false; f.Routes[0].From == dataplane.Pod {
				match, none = podsMatch(c.pods, true)
			}
		}
		if !none {
			first[pool] = append(first[pool], c.rule(orderMatches(match, before), text, after+" -j "+markChain))
		}
	}
	return first
}

// refusedShare leaves as many of some packets as they are as a pool refuses, for rows of the filter table to reject. It
// stands before what marks packets, since what is marked is forwarded.
func (c *portCompiler) refusedShare(before, after string, p *dataplane.Pool) rule {
	return c.rule(before, c.name+someRefused, after+randomly(int(p.Refused), dataplane.RefusedOf)+" -j ACCEPT")
}

// orderMatches puts a match for pods where iptables-save has it: a source before the destination, an interface after
// it.
func orderMatches(pods, key string) string {
	if i := strings.Index(key, " -p "); strings.Contains(pods, " -i ") {
		return key[:i] + pods + key[i:]
	}
	return pods + key
}

// external writes the rows of all other frontends, which have the same routes, and the chain that they lead to.
func (c *portCompiler) external(frontends []*dataplane.Frontend) {
	routes := frontends[0].Routes
	served := slices.ContainsFunc(routes, func(r dataplane.Route) bool { return len(r.Pool.Endpoints) > 0 })
	if served {
		c.chain(extPrefix+c.hash, c.externalRules(routes))
	}
	rest := routes[len(routes)-1].Pool
	text, target := c.verdict(rest)
	passed, firewalled := len(rest.Endpoints) == 0 && rest.Empty == dataplane.Pass, false
	refuses := slices.ContainsFunc(routes, func(r dataplane.Route) bool { return r.Pool.Refused > 0 })
	for _, f := range frontends {
		if served {
			firewalled = c.externalRow(f) || firewalled
		}
		if refuses {
			c.refusedShares(f)
		}
		if served && f.Sources != nil && (refuses || len(rest.Endpoints) == 0 && rest.Empty != dataplane.Drop) &&
			len(f.Sources)*len(frontends) <= maxRefusals { // the firewall leaves them alone, so that they get their answer
			for _, s := range f.Sources {
				c.row(filterFirewall, f.Key, " -s "+prefixText(s), c.name+" loadbalancer IP", " -j RETURN")
			}
		}
		switch {
		case len(rest.Endpoints) > 0 || passed && (served || f.Sources == nil):
		case f.Sources != nil && !served:
			if len(f.Sources)*len(frontends) <= maxRefusals {
				for _, s := range f.Sources {
					c.row(filterExternal, f.Key, " -s "+prefixText(s), text, target)
				}
			}
			c.row(filterExternal, f.Key, "", c.name+notOpen, drop)
		default:
			c.row(filterExternal, f.Key, "", text, target)
		}
	}
	if served {
		c.nodePorts(frontends)
	}
	if firewalled {
		c.firewall(frontends)
	}
}

// refusedShares writes the rows that reject what a frontend's pools refuse. What other routes do not translate, and do
// not reject either, is told apart by the sender.
func (c *portCompiler) refusedShares(f *dataplane.Frontend) {
	reject, text := c.reject(c.sp.Name.Protocol), c.name+someRefused
	if rest := f.Routes[len(f.Routes)-1].Pool; len(rest.Endpoints) > 0 {
		c.row(filterExternal, f.Key, "", text, reject)
		return
	}
	for _, r := range f.Routes {
		switch {
		case r.Pool.Refused == 0:
		case r.From == dataplane.Node:
			c.row(filterExternal, f.Key, "", text, fromNode+reject)
		default:
			if match, none := podsMatch(c.pods, false); !none {
				c.row(filterExternal, f.Key, match, text, reject)
			}
		}
	}
}

// externalRow writes the row of a frontend with an address of its own, and says whether it leads to the firewall chain.
// The rows of node ports nodePorts writes.
func (c *portCompiler) externalRow(f *dataplane.Frontend) (firewalled bool) {
	switch {
	case f.Kind == dataplane.ExternalIP:
		c.row(natServices, f.Key, "", c.name+" external IP", " -j "+extPrefix+c.hash)
	case f.Kind == dataplane.LoadBalancerIP && f.Sources == nil:
		c.row(natServices, f.Key, "", c.name+" loadbalancer IP", " -j "+extPrefix+c.hash)
	case f.Kind == dataplane.LoadBalancerIP:
		c.row(natServices, f.Key, "", c.name+" loadbalancer IP", " -j "+fwPrefix+c.hash)
		c.row(filterFirewall, f.Key, "", c.name+" traffic not accepted by "+fwPrefix+c.hash, drop)
		return true
	case f.Kind != dataplane.NodePort:
		panic("iptshim: no row for a frontend of the kind " + f.Kind.String())
	}
	return false
}

// nodePorts writes the rows of node ports: one for each number, unless another Service has it at some of the addresses.
func (c *portCompiler) nodePorts(frontends []*dataplane.Frontend) {
	byPort := map[uint16][]netip.Addr{}
	var ports []uint16
	for _, f := range frontends {
		if f.Kind != dataplane.NodePort {
			continue
		}
		if byPort[f.Key.Port] == nil {
			ports = append(ports, f.Key.Port)
		}
		byPort[f.Key.Port] = append(byPort[f.Key.Port], f.Key.Addr)
	}
	for _, port := range ports {
		before, after := portMatch(c.sp.Name.Protocol, port)
		key, after := rowKey(netip.Addr{}, c.sp.Name.Protocol, port), after+" -j "+extPrefix+c.hash
		if len(byPort[port]) == len(c.compiler.nodePorts) {
			c.out.rows = append(c.out.rows, row{natNodePorts, key, false, c.rule(before, c.name, after)})
			continue
		}
		for _, a := range byPort[port] {
			c.out.rows = append(c.out.rows, row{natNodePorts, key, false, c.rule(" -d "+addrText(a)+before, c.name, after)})
		}
	}
}

// externalRules are the rows of policy as rules.
func (c *portCompiler) externalRules(routes []dataplane.Route) (rules []rule) {
	destinations := " " + c.name + " external destinations"
	for i, r := range routes {
		match, none, mark, text := "", false, "masquerade traffic for"+destinations, ""
		switch r.From {
		case dataplane.Node:
			match, mark, text = fromNode, "masquerade LOCAL traffic for"+destinations, "route LOCAL traffic for"+destinations
		case dataplane.Pod:
			match, none = podsMatch(c.pods, false)
			mark, text = "masquerade pod traffic for"+destinations, "pod traffic for"+destinations
		}
		before, after := match, ""
		if r.From == dataplane.Node {
			before, after = "", match
		}
		switch {
		case none:
		case len(r.Pool.Endpoints) == 0 && i < len(routes)-1:
			rules = append(rules, c.rule(before, text, after+" -j RETURN"))
		case len(r.Pool.Endpoints) > 0:
			if r.Pool.Refused > 0 {
				rules = append(rules, c.refusedShare(before, after, r.Pool))
			}
			if r.SNAT {
				rules = append(rules, c.rule(before, mark, after+" -j "+markChain))
			}
			rules = append(rules, c.rule(before, text, after+" -j "+c.poolChain(r.Pool)))
		}
	}
	return rules
}

// firewall writes the chain that lets only some sources through. All load balancer addresses of a port have the same.
func (c *portCompiler) firewall(frontends []*dataplane.Frontend) {
	var sources []netip.Prefix
	for _, f := range frontends {
		if f.Sources != nil {
			sources = f.Sources
		}
	}
	var rules []rule
	for _, s := range sources {
		rules = append(rules, c.rule(" -s "+prefixText(s), c.name+" loadbalancer IP", " -j "+extPrefix+c.hash))
	}
	rules = append(rules, c.rule("", "other traffic to "+c.name+" will be dropped by "+firewallChain, ""))
	c.chain(fwPrefix+c.hash, rules)
}

// recentMask is all of an address, as every rule of xt_recent has it.
func (c *compiler) recentMask() string {
	if c.family == ipfamily.IPv4 {
		return " --mask 255.255.255.255 --rsource"
	}
	return " --mask ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff --rsource"
}

// pool writes the chain that chooses an endpoint, behind other rules: who was here before goes where it was, all others
// to any of them.
func (c *portCompiler) pool(p *dataplane.Pool, first []rule) {
	type choice struct {
		text, chain string
		share       int
	}
	choices, left := make([]choice, len(p.Endpoints)), 0
	for i, ep := range p.Endpoints {
		choices[i] = choice{ep.AddrPort.String(), endpointChain(c.sp.Name, ep.AddrPort), ep.Share()}
		left += ep.Share()
	}
	slices.SortFunc(choices, func(a, b choice) int { return strings.Compare(a.text, b.text) })
	rules := first
	if c.sp.Affinity > 0 {
		seconds := strconv.Itoa(int(c.sp.Affinity / time.Second))
		for _, ch := range choices {
			rules = append(rules, c.rule("", c.name+" -> "+ch.text,
				" -m recent --rcheck --seconds "+seconds+" --reap --name "+ch.chain+c.recentMask()+" -j "+ch.chain))
		}
	}
	for i, ch := range choices {
		after := " -j " + ch.chain
		if i < len(choices)-1 {
			after = randomly(ch.share, left) + after
		}
		left -= ch.share
		rules = append(rules, c.rule("", c.name+" -> "+ch.text, after))
	}
	c.chain(c.poolChain(p), rules)
}

// randomly matches a share of n packets.
func randomly(share, n int) string {
	return " -m statistic --mode random --probability " + probability(share, n)
}

// probability gives a share of n as the kernel has it, which counts in parts of 2^31, and iptables-save prints it.
func probability(share, n int) string {
	const one = 1 << 31
	p, _ := strconv.ParseFloat(fmt.Sprintf("%.10f", float64(share)/float64(n)), 64)
	return fmt.Sprintf("%.11f", float64(uint32(p*one+0.5))/one)
}

// endpoint writes the chain of an endpoint.
func (c *portCompiler) endpoint(ep netip.AddrPort) {
	name, protocol := endpointChain(c.sp.Name, ep), c.sp.Name.Protocol.String()
	recent := ""
	if c.sp.Affinity > 0 {
		recent = " -m recent --set --name " + name + c.recentMask()
	}
	c.chain(name, []rule{
		c.rule(" -s "+addrText(ep.Addr()), c.name, " -j "+markChain),
		c.rule(" -p "+protocol, c.name, recent+" -m "+protocol+" -j DNAT --to-destination "+ep.String()),
	})
}

// maxRefusals is up to how many rules, which are source ranges times addresses, a port without endpoints tells those
// who may use it that it has none. Beyond that they get no answer, as all others.
const maxRefusals = 256

// notOpen is said of load balancer addresses with source ranges and without endpoints.
const notOpen = " is not open to everybody"

// someRefused is said of service ports of which some backends have no endpoints, so that their share is refused.
const someRefused = " has backends without endpoints"

const drop = " -j DROP"

// noSuchPort is said of cluster IPs, for the ports that the Service does not have.
const noSuchPort = " has no such port"
