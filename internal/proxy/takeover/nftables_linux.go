package takeover

import (
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/netlink"
)

// proxyTable is kube-proxy's own table in nftables mode, one for each family.
const proxyTable = "kube-proxy"

// verdictDrop is netfilter's NF_DROP.
const verdictDrop = 0

// nftables is a connection to nf_tables.
type nftables struct{ conn }

func openNFTables() (nftables, error) {
	c, err := dial(unix.NETLINK_NETFILTER)
	return nftables{c}, err
}

// proxyTables returns the families that have a kube-proxy table.
func (n nftables) proxyTables() ([]ipfamily.Family, error) {
	objects, err := n.list(netfilter(netlink.NFTables(unix.NFT_MSG_GETTABLE), unix.NFPROTO_UNSPEC), nil)
	if err != nil {
		return nil, fmt.Errorf("nftables: list tables: %w", err)
	}
	var found []ipfamily.Family
	for _, o := range objects {
		if f, ok := ipfamily.OfNFProto(o[0]); ok &&
			netlink.Decode(o[netlink.NetfilterLen:])[unix.NFTA_TABLE_NAME].Text() == proxyTable {
			found = append(found, f)
		}
	}
	return found, nil
}

// tables returns the tables of iptables-nft that have a kube-proxy chain.
func (n nftables) tables() ([]*table, error) {
	objects, err := n.list(netfilter(netlink.NFTables(unix.NFT_MSG_GETCHAIN), unix.NFPROTO_UNSPEC), nil)
	if err != nil {
		return nil, fmt.Errorf("nftables: list chains: %w", err)
	}
	var all []*table
	theirs := map[*table]bool{}
	for _, o := range objects {
		a := netlink.Decode(o[netlink.NetfilterLen:])
		name := a[unix.NFTA_CHAIN_TABLE].Text()
		if f, ok := ipfamily.OfNFProto(o[0]); ok && slices.Contains(tableNames, name) {
			t := n.tableIn(&all, f, name)
			c := parseChain(a)
			t.chains = append(t.chains, c)
			theirs[t] = theirs[t] || isProxyChain(name, c.name)
		}
	}
	return slices.DeleteFunc(all, func(t *table) bool { return !theirs[t] }), nil
}

// tableIn returns a table of a list, and adds it if it is not there.
func (n nftables) tableIn(all *[]*table, f ipfamily.Family, name string) *table {
	for _, t := range *all {
		if t.family == f && t.name == name {
			return t
		}
	}
	t := &table{variant: nft, family: f, name: name}
	t.rules = func(chain string) ([]rule, error) { return n.rules(f, name, chain) }
	*all = append(*all, t)
	return t
}

func parseChain(a netlink.Attributes) chain {
	c := chain{name: a[unix.NFTA_CHAIN_NAME].Text()}
	_, c.builtin = a[unix.NFTA_CHAIN_HOOK]
	_, hasPolicy := a[unix.NFTA_CHAIN_POLICY]
	c.drops = hasPolicy && a[unix.NFTA_CHAIN_POLICY].Big32() == verdictDrop
	return c
}

// rules returns the rules of a chain. It is no error if the chain is gone.
func (n nftables) rules(f ipfamily.Family, table, chain string) ([]rule, error) {
	objects, err := n.list(netfilter(netlink.NFTables(unix.NFT_MSG_GETRULE), f.NFProto()), func(w *netlink.Buffer) {
		w.Text(unix.NFTA_RULE_TABLE, table)
		w.Text(unix.NFTA_RULE_CHAIN, chain)
	})
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return nil, fmt.Errorf("nftables: list rules of %s %s: %w", table, chain, err)
	}
	var list []rule
	for _, o := range objects {
		a := netlink.Decode(o[netlink.NetfilterLen:])
		if a[unix.NFTA_RULE_TABLE].Text() == table && a[unix.NFTA_RULE_CHAIN].Text() == chain {
			list = append(list, parseRule(a))
		}
	}
	return list, nil
}

// parseRule parses a rule that iptables-nft wrote.
func parseRule(a netlink.Attributes) rule {
	r := rule{handle: a[unix.NFTA_RULE_HANDLE].Big64(), comment: ruleComment(a[unix.NFTA_RULE_USERDATA]), always: true}
	for _, e := range netlink.Each(a[unix.NFTA_RULE_EXPRESSIONS]) {
		expr := netlink.Decode(e)
		data := expr.Nested(unix.NFTA_EXPR_DATA)
		switch name := expr[unix.NFTA_EXPR_NAME].Text(); {
		case name == "counter":
		case name == "match" && data[unix.NFTA_MATCH_NAME].Text() == "comment":
			r.comment = data[unix.NFTA_MATCH_INFO].Text()
		case name == "target":
			r.target = data[unix.NFTA_TARGET_NAME].Text()
		case name == "reject":
			r.target = "REJECT"
		case name == "immediate" && data[unix.NFTA_IMMEDIATE_DREG].Big32() == unix.NFT_REG_VERDICT:
			verdict := data.Nested(unix.NFTA_IMMEDIATE_DATA).Nested(unix.NFTA_DATA_VERDICT)
			if r.target = verdict[unix.NFTA_VERDICT_CHAIN].Text(); r.target == "" &&
				verdict[unix.NFTA_VERDICT_CODE].Big32() == verdictDrop {
				r.target = "DROP"
			}
		default:
			r.always = false
		}
	}
	return r
}

// ruleComment finds the comment in a rule's userdata, which libnftnl writes as type, length and value, a byte each.
func ruleComment(b []byte) string {
	const comment = 0
	for len(b) >= 2 && len(b) >= 2+int(b[1]) {
		typ, value := b[0], b[2:2+int(b[1])]
		if typ == comment {
			return unix.ByteSliceToString(value)
		}
		b = b[2+len(value):]
	}
	return ""
}

// deletion is one delete message of a transaction.
type deletion struct {
	what  string
	typ   uint16
	f     ipfamily.Family
	attrs func(*netlink.Buffer)
}

// deleteTables deletes kube-proxy's own tables in one transaction.
func (n nftables) deleteTables(fs []ipfamily.Family) error {
	var list []deletion
	for _, f := range fs {
		list = append(list,
			deletion{fmt.Sprintf("table %s (%s)", proxyTable, f), unix.NFT_MSG_DELTABLE, f, func(w *netlink.Buffer) {
				w.Text(unix.NFTA_TABLE_NAME, proxyTable)
			}})
	}
	return n.commit(list)
}

// remove removes chains of iptables-nft in one transaction.
func (n nftables) remove(plans []*plan) error {
	var jumps, rules, chains []deletion
	for _, p := range plans {
		ruleOf := func(chain string, handle uint64) deletion {
			return deletion{fmt.Sprintf("rules of %s %s (%s)", p.table, chain, p.family), unix.NFT_MSG_DELRULE, p.family,
				func(w *netlink.Buffer) {
					w.Text(unix.NFTA_RULE_TABLE, p.table)
					w.Text(unix.NFTA_RULE_CHAIN, chain)
					if handle != 0 {
						w.Big64(unix.NFTA_RULE_HANDLE, handle)
					}
				}}
		}
		for _, j := range p.jumps {
			jumps = append(jumps, ruleOf(j.chain, j.handle))
		}
		for _, c := range p.chains { // all rules first: they lead from one of the chains to the next
			rules = append(rules, ruleOf(c, 0))
			chains = append(chains,
				deletion{fmt.Sprintf("chain %s %s (%s)", p.table, c, p.family), unix.NFT_MSG_DELCHAIN, p.family,
					func(w *netlink.Buffer) {
						w.Text(unix.NFTA_CHAIN_TABLE, p.table)
						w.Text(unix.NFTA_CHAIN_NAME, c)
					}})
		}
	}
	return n.commit(slices.Concat(jumps, rules, chains))
}

// batchBytes is what a socket accepts without privileges, by the default of net.core.wmem_max.
const batchBytes = 64 << 10

// commit sends a transaction. If this process may not send it at once, it sends several, which is as good: at any point
// in between, a packet finds either no way to a chain or all that the chain leads to.
func (n nftables) commit(list []deletion) error {
	err := n.transact(list)
	if !errors.Is(err, unix.EMSGSIZE) {
		return err
	}
	for len(list) > 0 {
		step := min(len(list), batchBytes/256)
		if err := n.transact(list[:step]); err != nil {
			return err
		}
		list = list[step:]
	}
	return nil
}

// transact sends one transaction: all of it takes effect, or nothing.
func (n nftables) transact(list []deletion) error {
	if len(list) == 0 {
		return nil
	}
	var w netlink.Buffer
	w.Begin()
	first := w.Count() + 1
	for _, d := range list {
		m := w.Netfilter(netlink.NFTables(d.typ), 0, d.f.NFProto())
		d.attrs(&w)
		w.End(m)
	}
	w.Finish()
	refused, err := n.Commit(w.Bytes())
	if len(refused) > 0 {
		what, e := "transaction", &refused[0]
		if i := int(e.Seq) - first; i >= 0 && i < len(list) {
			what = list[i].what
		}
		return fmt.Errorf("nftables: delete %s: %w", what, e)
	}
	if err != nil {
		return fmt.Errorf("nftables: transaction: %w", err)
	}
	return nil
}
