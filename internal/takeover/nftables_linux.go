package takeover

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/ipfamily"
)

// proxyTable is kube-proxy's own table in nftables mode, one of each family.
const proxyTable = "kube-proxy"

const nftSubsystem = unix.NFNL_SUBSYS_NFTABLES << 8

// nfgenmsg is the header of nf_tables' and ipset's messages.
func nfgenmsg(family uint8) []byte { return []byte{family, unix.NFNETLINK_V0, 0, 0} }

// nfgenLen is its length.
const nfgenLen = 4

// verdictDrop is netfilter's NF_DROP.
const verdictDrop = 0

// nftables is a connection to nf_tables.
type nftables struct{ *socket }

func openNFTables() (nftables, error) {
	s, err := openSocket(unix.NETLINK_NETFILTER)
	return nftables{s}, err
}

// proxyTables gives the families in which there is a table of kube-proxy's.
func (n nftables) proxyTables() ([]ipfamily.Family, error) {
	objects, err := n.list(nftSubsystem|unix.NFT_MSG_GETTABLE, nfgenmsg(unix.NFPROTO_UNSPEC), nil)
	if err != nil {
		return nil, fmt.Errorf("nftables: list tables: %w", err)
	}
	var found []ipfamily.Family
	for _, o := range objects {
		if f, ok := ipfamily.OfNFProto(o[0]); ok && parseAttributes(o[nfgenLen:]).text(unix.NFTA_TABLE_NAME) == proxyTable {
			found = append(found, f)
		}
	}
	return found, nil
}

// tables gives the tables of iptables-nft that have a chain of kube-proxy's.
func (n nftables) tables() ([]*table, error) {
	objects, err := n.list(nftSubsystem|unix.NFT_MSG_GETCHAIN, nfgenmsg(unix.NFPROTO_UNSPEC), nil)
	if err != nil {
		return nil, fmt.Errorf("nftables: list chains: %w", err)
	}
	var all []*table
	theirs := map[*table]bool{}
	for _, o := range objects {
		a := parseAttributes(o[nfgenLen:])
		name := a.text(unix.NFTA_CHAIN_TABLE)
		if f, ok := ipfamily.OfNFProto(o[0]); ok && slices.Contains(tableNames, name) {
			t := n.tableIn(&all, f, name)
			c := parseChain(a)
			t.chains = append(t.chains, c)
			theirs[t] = theirs[t] || isProxyChain(name, c.name)
		}
	}
	return slices.DeleteFunc(all, func(t *table) bool { return !theirs[t] }), nil
}

// tableIn gives a table of a list, which it is added to if it is not there.
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

func parseChain(a attributes) chain {
	c := chain{name: a.text(unix.NFTA_CHAIN_NAME)}
	_, c.builtin = a[unix.NFTA_CHAIN_HOOK]
	_, hasPolicy := a[unix.NFTA_CHAIN_POLICY]
	c.drops = hasPolicy && a.big(unix.NFTA_CHAIN_POLICY) == verdictDrop
	return c
}

// rules gives the rules of a chain. That it is not there any more is no error.
func (n nftables) rules(f ipfamily.Family, table, chain string) ([]rule, error) {
	objects, err := n.list(nftSubsystem|unix.NFT_MSG_GETRULE, nfgenmsg(f.NFProto()), func(w *buffer) {
		w.text(unix.NFTA_RULE_TABLE, table)
		w.text(unix.NFTA_RULE_CHAIN, chain)
	})
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return nil, fmt.Errorf("nftables: list rules of %s %s: %w", table, chain, err)
	}
	var list []rule
	for _, o := range objects {
		a := parseAttributes(o[nfgenLen:])
		if a.text(unix.NFTA_RULE_TABLE) == table && a.text(unix.NFTA_RULE_CHAIN) == chain {
			list = append(list, parseRule(a))
		}
	}
	return list, nil
}

// parseRule reads a rule that iptables-nft wrote.
func parseRule(a attributes) rule {
	r := rule{handle: a.big(unix.NFTA_RULE_HANDLE), comment: ruleComment(a[unix.NFTA_RULE_USERDATA]), always: true}
	eachAttribute(a[unix.NFTA_RULE_EXPRESSIONS], func(_ uint16, e []byte) {
		expr := parseAttributes(e)
		data := expr.nested(unix.NFTA_EXPR_DATA)
		switch name := expr.text(unix.NFTA_EXPR_NAME); {
		case name == "counter":
		case name == "match" && data.text(unix.NFTA_MATCH_NAME) == "comment":
			r.comment = data.text(unix.NFTA_MATCH_INFO)
		case name == "target":
			r.target = data.text(unix.NFTA_TARGET_NAME)
		case name == "reject":
			r.target = "REJECT"
		case name == "immediate" && data.big(unix.NFTA_IMMEDIATE_DREG) == unix.NFT_REG_VERDICT:
			verdict := data.nested(unix.NFTA_IMMEDIATE_DATA).nested(unix.NFTA_DATA_VERDICT)
			if r.target = verdict.text(unix.NFTA_VERDICT_CHAIN); r.target == "" && verdict.big(unix.NFTA_VERDICT_CODE) == verdictDrop {
				r.target = "DROP"
			}
		default:
			r.always = false
		}
	})
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

// deletion is one message of a transaction that deletes.
type deletion struct {
	what  string
	typ   uint16
	f     ipfamily.Family
	attrs func(*buffer)
}

// deleteTables deletes kube-proxy's own tables in one transaction.
func (n nftables) deleteTables(fs []ipfamily.Family) error {
	var list []deletion
	for _, f := range fs {
		list = append(list, deletion{fmt.Sprintf("table %s (%s)", proxyTable, f), unix.NFT_MSG_DELTABLE, f, func(w *buffer) {
			w.text(unix.NFTA_TABLE_NAME, proxyTable)
		}})
	}
	return n.commit(list)
}

// remove removes chains of iptables-nft in one transaction.
func (n nftables) remove(plans []*plan) error {
	var jumps, rules, chains []deletion
	for _, p := range plans {
		ruleOf := func(chain string, handle uint64) deletion {
			return deletion{fmt.Sprintf("rules of %s %s (%s)", p.table, chain, p.family), unix.NFT_MSG_DELRULE, p.family, func(w *buffer) {
				w.text(unix.NFTA_RULE_TABLE, p.table)
				w.text(unix.NFTA_RULE_CHAIN, chain)
				if handle != 0 {
					w.attr(unix.NFTA_RULE_HANDLE, append(big32(uint32(handle>>32)), big32(uint32(handle))...)...)
				}
			}}
		}
		for _, j := range p.jumps {
			jumps = append(jumps, ruleOf(j.chain, j.handle))
		}
		for _, c := range p.chains { // all rules first: they lead from one of the chains to the next
			rules = append(rules, ruleOf(c, 0))
			chains = append(chains, deletion{fmt.Sprintf("chain %s %s (%s)", p.table, c, p.family), unix.NFT_MSG_DELCHAIN, p.family,
				func(w *buffer) {
					w.text(unix.NFTA_CHAIN_TABLE, p.table)
					w.text(unix.NFTA_CHAIN_NAME, c)
				}})
		}
	}
	return n.commit(slices.Concat(jumps, rules, chains))
}

// stepBytes is what a socket takes without any privilege, by the default of net.core.wmem_max.
const stepBytes = 64 << 10

// commit carries a transaction out. If this process may not send it in one, it goes out in several, which is as good: whatever
// is left in between, a packet finds no way to it or all that it leads to.
func (n nftables) commit(list []deletion) error {
	err := n.transact(list)
	if !errors.Is(err, unix.EMSGSIZE) {
		return err
	}
	for len(list) > 0 {
		step := min(len(list), stepBytes/256)
		if err := n.transact(list[:step]); err != nil {
			return err
		}
		list = list[step:]
	}
	return nil
}

// transact carries out one transaction: all of it, or nothing.
func (n nftables) transact(list []deletion) error {
	if len(list) == 0 {
		return nil
	}
	w := buffer{seq: n.seq}
	bracket := func(typ uint16) {
		w.end(w.message(typ, 0, unix.NFPROTO_UNSPEC, unix.NFNETLINK_V0, 0, unix.NFNL_SUBSYS_NFTABLES))
	}
	bracket(unix.NFNL_MSG_BATCH_BEGIN)
	first := w.seq + 1
	for _, d := range list {
		m := w.message(nftSubsystem|d.typ, 0, nfgenmsg(d.f.NFProto())...)
		d.attrs(&w)
		w.end(m)
	}
	bracket(unix.NFNL_MSG_BATCH_END)
	n.seq = w.seq
	room := len(w.b) + 64<<10
	if unix.SetsockoptInt(n.fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, room) != nil {
		_ = unix.SetsockoptInt(n.fd, unix.SOL_SOCKET, unix.SO_SNDBUF, room) // as much as there may be; send says if it is not enough
	}
	if err := n.send(w.b); err != nil {
		return fmt.Errorf("nftables: send transaction: %w", err)
	}
	// The kernel works a batch off while it is being sent, so its answers are all there.
	var refused error
	for {
		err := n.receive(unix.MSG_DONTWAIT, func(a answer) {
			if errno := a.errno(); errno != 0 && refused == nil {
				what := "transaction"
				if i := int(a.seq) - int(first); i >= 0 && i < len(list) {
					what = list[i].what
				}
				refused = fmt.Errorf("nftables: delete %s: %w", what, unix.Errno(errno))
			}
		})
		switch {
		case errors.Is(err, unix.EAGAIN):
			return refused
		case errors.Is(err, unix.ENOBUFS): // more was refused than the socket holds; the rest is still to be read
			refused = cmp.Or(refused, error(fmt.Errorf("nftables: transaction: %w", err)))
		case err != nil:
			return fmt.Errorf("nftables: transaction: %w", err)
		}
	}
}
