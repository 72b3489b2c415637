package packets

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/netlink"
)

// ReadOthers reads the tables of nf_tables, of the families ip, ip6 and inet, that have a chain by which packets come
// in, are sent, forwarded or translated, but for those of a name, and the tables raw, mangle and filter of legacy
// iptables, in the network namespace of the calling thread. A kernel without nf_tables has none of the former.
func ReadOthers(name string, host *Host) (*Rules, error) {
	c, err := netlink.Dial(unix.NETLINK_NETFILTER, 0)
	if err != nil {
		return nil, fmt.Errorf("read nf_tables: %w", err)
	}
	defer c.Close()
	r := reader{Conn: c, digest: sha256.New(), rules: &Rules{host: host}}
	tables, err := r.others(name)
	if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.EOPNOTSUPP) {
		return nil, fmt.Errorf("read nf_tables: %w", err)
	}
	for _, t := range tables {
		if err := r.other(t); err != nil {
			return nil, fmt.Errorf("read table %s of nf_tables: %w", t.name, err)
		}
	}
	if err := r.legacy(); err != nil {
		return nil, err
	}
	r.rules.order()
	return r.rules, nil
}

// ReadAll reads all tables of nf_tables, of the families ip, ip6 and inet, in the network namespace of the calling
// thread.
func ReadAll(host *Host) (*Rules, error) {
	return settled("all tables", host, func(r *reader) error {
		tables, err := r.others("")
		for i := 0; err == nil && i < len(tables); i++ {
			err = r.contents(tables[i])
		}
		return err
	})
}

// others lists the tables, without what is in them.
func (r *reader) others(name string) (tables []*nfTable, err error) {
	var w netlink.Buffer
	w.End(w.Netfilter(netlink.NFTables(unix.NFT_MSG_GETTABLE), unix.NLM_F_DUMP, unix.NFPROTO_UNSPEC))
	err = r.Dump(w.Bytes(), func() { tables = nil }, func(b []byte) {
		if len(b) < netlink.NetfilterLen {
			return
		}
		a := netlink.Decode(b[netlink.NetfilterLen:])
		for _, f := range ipfamily.All {
			t := &nfTable{family: f, both: b[0] == unix.NFPROTO_INET, name: a[unix.NFTA_TABLE_NAME].Text(),
				chains: map[string]*nfChain{}, sets: map[string]*nfSet{}}
			const dormant = 1
			t.dormant = a[unix.NFTA_TABLE_FLAGS].Big32()&dormant != 0
			if (t.both || b[0] == f.NFProto()) && t.name != name && !t.dormant {
				tables = append(tables, t)
			}
		}
	})
	return tables, err
}

// other reads what is in a table, if it is of interest. One that went meanwhile has nothing.
func (r *reader) other(t *nfTable) error {
	if err := r.chains(t); err != nil {
		return err
	}
	concerns := false
	for _, c := range t.chains {
		concerns = concerns || c.base && (c.nat || c.hook == hookForward || c.hook == hookPrerouting || c.hook == hookOutput)
	}
	if !concerns {
		return nil
	}
	for _, read := range []func(*nfTable) error{r.sets, r.ruleset} {
		if err := read(t); err != nil && !errors.Is(err, unix.ENOENT) {
			return err
		}
	}
	r.rules.tables[t.family] = append(r.rules.tables[t.family], t)
	return nil
}

// Crossing is what the chains of one hook do to a packet.
type Crossing struct {
	Verdict Verdict
	// To is the destination that a rule chose, if the packet is Sent on. Untracked says that a rule keeps connection
	// tracking from it, so that nothing translates it.
	To        netip.AddrPort
	Untracked bool
	// By names the chain that decided, and Rule the handle of its rule, 0 for the policy; unset if nothing did. Legacy
	// says that it is a chain of legacy iptables, in which Rule is the number of the rule.
	By     string
	Rule   uint64
	Legacy bool
}

// Forward follows a packet through the forward hook. Before is the destination that it had before a rule elsewhere
// translated it.
func (r *Rules) Forward(p Packet, before netip.AddrPort) (Crossing, error) {
	return r.cross(p, hookForward, before, func(*nfChain) bool { return true })
}

// Translate follows a packet through the chains that see it before those that translate destinations at a priority.
func (r *Rules) Translate(p Packet, priority int32) (Crossing, error) {
	hook := hookPrerouting
	if p.Interface == "" {
		hook = hookOutput
	}
	return r.cross(p, hook, p.Destination, func(c *nfChain) bool {
		return c.at() < natPriority[hook] || c.ahead(priority)
	})
}

func (r *Rules) cross(p Packet, hook int, before netip.AddrPort, only func(*nfChain) bool) (Crossing, error) {
	w := walker{rules: r, family: ipfamily.Of(p.Destination.Addr()), packet: &p, only: only}
	m := w.machine()
	m.hook, m.base, m.origDest, m.origPort = hook, 0, before.Addr(), before.Port()
	m.translated = before != p.Destination
	w.enter(m)
	for w.queue = append(w.queue, m); len(w.queue) > 0 && len(w.out) == 0; {
		next := w.queue[len(w.queue)-1]
		w.queue = w.queue[:len(w.queue)-1]
		if err := w.run(next); err != nil {
			return Crossing{}, err
		}
	}
	c := Crossing{Verdict: w.out[0].Verdict, To: w.out[0].To}
	if c.Verdict == Sent && c.To == p.Destination {
		return Crossing{}, nil
	}
	c.Untracked = w.untracked && c.Verdict == Untouched
	if w.by != nil && (c.Untracked || c.Verdict != Untouched) {
		c.By, c.Rule, c.Legacy = w.by.table.place()+" "+w.by.name, w.handle, w.by.table.legacy
	}
	return c, nil
}

// ahead reports whether a chain translates destinations before those at a priority do.
func (c *nfChain) ahead(priority int32) bool { return c.nat && c.priority < priority }

// place names a table as nft does, or by the program that lists it.
func (t *nfTable) place() string {
	switch {
	case t.legacy:
		return t.family.NFT() + "tables-legacy " + t.name
	case t.both:
		return "inet " + t.name
	case t.ingress:
		return "netdev " + t.name
	}
	return t.family.NFT() + " " + t.name
}

// HasTable reports whether one of the tables of nf_tables has a name.
func (r *Rules) HasTable(name string) bool {
	return r.any(func(t *nfTable) bool { return t.name == name && !t.legacy })
}

// HasChain reports whether one of the tables has a chain.
func (r *Rules) HasChain(name string) bool {
	return r.any(func(t *nfTable) bool { return t.chains[name] != nil })
}

func (r *Rules) any(is func(*nfTable) bool) bool {
	return slices.ContainsFunc(slices.Concat(r.tables[:]...), is)
}

// Translators returns the base chains with rules that translate destinations before those at a priority do.
func (r *Rules) Translators(priority int32) (names []string) {
	for _, hooks := range r.hooks {
		for _, hook := range []int{hookPrerouting, hookOutput} {
			for _, c := range hooks[hook] {
				if name := c.table.place() + " " + c.name; c.ahead(priority) && len(c.rules) > 0 &&
					!slices.Contains(names, name) {
					names = append(names, name)
				}
			}
		}
	}
	return names
}
