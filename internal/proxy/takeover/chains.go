package takeover

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
)

// variant is one of the two iptables implementations that a kernel can have at the same time.
type variant uint8

const (
	// nft is iptables-nft, whose tables are nf_tables' own.
	nft variant = iota
	// legacy is the iptables from before nf_tables.
	legacy
)

func (v variant) String() string { return [...]string{"nft variant", "legacy variant"}[v] }

// table is a table of iptables.
type table struct {
	variant variant
	family  ipfamily.Family
	// name is nat, filter or mangle.
	name   string
	chains []chain
	// rules gives the rules of a chain.
	rules func(chain string) ([]rule, error)
}

// chain is a chain without its rules.
type chain struct {
	name string
	// builtin chains are called by the kernel.
	builtin bool
	// drops says that the policy of a built-in chain is DROP.
	drops bool
}

// rule is what is needed of a rule to tell whose it is.
type rule struct {
	// handle identifies the rule.
	handle uint64
	// target is the chain that the rule jumps to, or its verdict, such as DROP; empty if it is neither.
	target string
	// comment is empty if there is none.
	comment string
	// always says that the rule matches every packet.
	always bool
}

// plan says what to remove of a table, and what has to stay.
type plan struct {
	variant variant
	family  ipfamily.Family
	table   string
	// jumps are rules in built-in chains.
	jumps []jump
	// chains are removed with all their rules.
	chains []string
	// kept are kube-proxy's chains that stay, and why; nil if there are none.
	kept map[string]string
}

// jump is a rule in a built-in chain.
type jump struct {
	chain  string
	handle uint64
	// target is the chain that the rule jumps to.
	target string
}

func (p *plan) empty() bool { return len(p.jumps)+len(p.chains) == 0 }

// hasServices says whether these rules serve Services. KUBE-SERVICES is in both modes, and nobody else makes it.
func (p *plan) hasServices() bool {
	return p.table == "nat" && slices.Contains(p.chains, "KUBE-SERVICES")
}

// newPlan plans the removal for a table. Chains named in stay are kept, with the reason given. The caller's own chains
// count as somebody else's.
func newPlan(t *table, stay map[string]string, own Own) (*plan, error) {
	p := &plan{variant: t.variant, family: t.family, table: t.name, kept: map[string]string{}}
	ownedByProxy := ownedChains(t, own)
	if len(ownedByProxy) == 0 || kubeletsOnly(t.name, ownedByProxy) {
		return p, nil
	}
	var keep func(name, why string)
	keep = func(name, why string) {
		if !ownedByProxy[name] || p.kept[name] != "" {
			return
		}
		p.kept[name] = why
		if name == "KUBE-MARK-MASQ" {
			keep("KUBE-POSTROUTING", "it masquerades what KUBE-MARK-MASQ marks")
		}
	}
	for name, why := range stay {
		keep(name, why)
	}
	var jumps []jump
	for _, c := range t.chains {
		if ownedByProxy[c.name] {
			continue
		}
		rules, err := t.rules(c.name)
		if err != nil {
			return nil, err
		}
		jumps = append(jumps, proxyJumps(t.name, c, rules, ownedByProxy, keep)...)
	}
	if err := p.keepReferenced(t, keep); err != nil {
		return nil, err
	}
	for name := range ownedByProxy {
		if p.kept[name] == "" {
			p.chains = append(p.chains, name)
		}
	}
	slices.Sort(p.chains)
	for _, j := range jumps {
		if p.kept[j.target] == "" {
			p.jumps = append(p.jumps, j)
		}
	}
	return p, nil
}

// ownedChains returns the names of kube-proxy's chains in a table.
func ownedChains(t *table, own Own) map[string]bool {
	names := map[string]bool{}
	for _, c := range t.chains {
		if !c.builtin && isProxyChain(t.name, c.name) && !own.owns(t.variant, t.name, c.name) {
			names[c.name] = true
		}
	}
	return names
}

// kubeletsOnly says whether these are only chains that a kubelet before Kubernetes 1.28 also makes.
func kubeletsOnly(table string, ours map[string]bool) bool {
	if table != "nat" {
		return false
	}
	n := 0
	for _, name := range []string{"KUBE-MARK-MASQ", "KUBE-POSTROUTING"} {
		if ours[name] {
			n++
		}
	}
	return n == len(ours)
}

// proxyJumps inspects the rules of a chain that is not kube-proxy's. It returns kube-proxy's jumps to its own chains,
// and keeps the chains that others need.
func proxyJumps(table string, c chain, rules []rule, ours map[string]bool, keep func(name, why string)) []jump {
	var jumps []jump
	for _, r := range rules {
		switch {
		case !ours[r.target]:
		case c.builtin && jumpComments[r.comment]:
			jumps = append(jumps, jump{c.name, r.handle, r.target})
		default:
			keep(r.target, fmt.Sprintf("a rule in chain %s, which is not kube-proxy's, jumps to it", c.name))
		}
	}
	if table == "filter" && c.builtin && dropsUnmatched(c, rules) {
		for name, what := range accepts[c.name] {
			keep(name, fmt.Sprintf("chain %s drops what no rule accepts, and %s accepts %s", c.name, name, what))
		}
	}
	return jumps
}

// accepts are kube-proxy's chains that accept packets which a firewall in a built-in chain may drop. Without them,
// established connections would end, and load balancers' health checks of the node would fail.
var accepts = map[string]map[string]string{
	"FORWARD": {"KUBE-FORWARD": "established connections"},
	"INPUT":   {"KUBE-NODEPORTS": "health checks", "KUBE-NODE-PORT": "health checks"},
}

// dropsUnmatched says whether a chain drops or rejects what no rule accepted.
func dropsUnmatched(c chain, rules []rule) bool {
	return c.drops || slices.ContainsFunc(rules, func(r rule) bool {
		return r.always && (r.target == "DROP" || r.target == "REJECT")
	})
}

// keepReferenced keeps the chains that kept ones jump to.
func (p *plan) keepReferenced(t *table, keep func(name, why string)) error {
	visited := map[string]bool{}
	for len(visited) < len(p.kept) {
		for _, name := range slices.Sorted(maps.Keys(p.kept)) {
			if visited[name] {
				continue
			}
			visited[name] = true
			rules, err := t.rules(name)
			if err != nil {
				return err
			}
			for _, r := range rules {
				keep(r.target, fmt.Sprintf("chain %s, which stays, jumps to it", name))
			}
		}
	}
	return nil
}

// summary returns a line for each variant and family, such as "iptables rules (nft variant, IPv4): 214 chains in 3
// tables".
func summary(plans []*plan) (lines []string) {
	for _, v := range []variant{nft, legacy} {
		for _, f := range ipfamily.All {
			chains, rules := 0, 0
			var tables []string
			for _, p := range plans {
				if p.variant == v && p.family == f && !p.empty() {
					chains, rules = chains+len(p.chains), rules+len(p.jumps)
					tables = append(tables, p.table)
				}
			}
			if len(tables) > 0 {
				lines = append(lines, fmt.Sprintf("iptables rules (%s, %s): %s and %s that jump to them, in the tables %s", v, f,
					count(chains, "chain"), count(rules, "rule"), strings.Join(tables, ", ")))
			}
		}
	}
	return lines
}

// count returns "1 chain", "2 chains", "2 addresses".
func count(n int, what string) string {
	switch {
	case n == 1:
		return "1 " + what
	case strings.HasSuffix(what, "s"):
		what += "e"
	}
	return fmt.Sprintf("%d %ss", n, what)
}
