package ipvsplugin

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/netlink"
	"github.com/verdict-proxy/verdict/internal/system/sysctl"
)

// An address with a local route is the host's: listeners on 0.0.0.0 can be reached at it, it answers ping, and ARP,
// by which it would pull the traffic of a whole network to itself. The guard is against that:
//
//	table arp verdict-ipvs {                             table ip verdict-ipvs {
//		set addresses { type ipv4_addr; }                    set addresses { type ipv4_addr; }
//		chain input {                                        chain input {
//			type filter hook input priority filter;              type filter hook input priority 110;
//			arp daddr ip @addresses drop                         ip daddr @addresses reject with tcp reset
//		}                                                        ip daddr @addresses reject
//	}                                                        }
//
// and table ip6 as table ip. IPVS takes what it schedules out of the input hook at priority 98, so no packet that the
// guard sees is anybody's. A client whose connection IPVS has forgotten learns by the reset that it is over, which no
// ICMP error would tell it. In IPv6 the kernel answers solicitations only for addresses that are on a device. Those
// that are on one are not guarded: they are the host's own, whoever else may use them.
const (
	guardTable = "verdict-ipvs"
	guardSet   = "addresses"
	guardChain = "input"
)

const (
	priorityGuard = 110
	register1     = unix.NFT_REG_1
	ipAddrType    = 7 // as nft calls types of keys
	ip6AddrType   = 8
	maxElements   = 1000 // of one message, whose attributes have 16 bits of length
)

// guard writes our tables. It is for one goroutine at a time.
type guard struct {
	*socket
	// notes are names of chains in table ip, which hold what the next process has to know.
	notes []string
}

var guardFamilies = []byte{unix.NFPROTO_ARP, unix.NFPROTO_IPV4, unix.NFPROTO_IPV6}

// guards says whether a family's table guards an address.
func guards(family byte, a netip.Addr) bool { return a.Is4() == (family != unix.NFPROTO_IPV6) }

// transaction writes messages between the two that make one transaction of them, and commits it.
func (g *guard) transaction(messages func()) error {
	g.out.Reset()
	g.out.Begin()
	messages()
	g.out.Finish()
	refused, err := g.Commit(g.out.Bytes())
	if err == nil && len(refused) > 0 {
		err = &refused[0]
	}
	if err == nil {
		g.messages += g.out.Count()
		g.bytes += g.out.Len()
	}
	return err
}

// message writes a message of nf_tables about the guard's table; its name is the first attribute of every one.
func (g *guard) message(typ, flags uint16, family byte, attrs func()) {
	m := g.out.Netfilter(netlink.NFTables(typ), flags, family)
	g.out.Text(unix.NFTA_TABLE_NAME, guardTable)
	if attrs != nil {
		attrs()
	}
	g.out.End(m)
}

// list is message for a list, as the only one in the buffer, and returns its bytes.
func (g *guard) list(typ uint16, family byte, attrs func()) []byte {
	g.out.Reset()
	g.message(typ, unix.NLM_F_DUMP, family, attrs)
	return g.out.Bytes()
}

// replace makes all tables anew, with these addresses.
func (g *guard) replace(addrs []netip.Addr) error {
	err := g.transaction(func() {
		for _, family := range guardFamilies {
			g.table(family)
			g.message(unix.NFT_MSG_DELTABLE, 0, family, nil)
			g.table(family)
			g.set(family)
			g.chain(family)
			g.rule(family)
		}
		for _, n := range g.notes {
			g.note(n)
		}
		g.elements(unix.NFT_MSG_NEWSETELEM, addrs)
	})
	if err != nil {
		return fmt.Errorf("nft: write table %s: %w", guardTable, err)
	}
	return nil
}

// change adds and removes addresses.
func (g *guard) change(add, remove []netip.Addr) error {
	if len(add)+len(remove) == 0 {
		return nil
	}
	err := g.transaction(func() {
		g.elements(unix.NFT_MSG_DELSETELEM, remove)
		g.elements(unix.NFT_MSG_NEWSETELEM, add)
	})
	if err != nil {
		return fmt.Errorf("nft: change set %s of table %s: %w", guardSet, guardTable, err)
	}
	return nil
}

// remove deletes the tables. That there are none is no error.
func (g *guard) remove() error {
	err := g.transaction(func() {
		for _, family := range guardFamilies {
			g.table(family)
			g.message(unix.NFT_MSG_DELTABLE, 0, family, nil)
		}
	})
	if err != nil {
		return fmt.Errorf("nft: delete table %s: %w", guardTable, err)
	}
	return nil
}

func (g *guard) table(family byte) { g.message(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, family, nil) }

func (g *guard) set(family byte) {
	typ, length := uint32(ipAddrType), uint32(4)
	if family == unix.NFPROTO_IPV6 {
		typ, length = ip6AddrType, 16
	}
	g.message(unix.NFT_MSG_NEWSET, unix.NLM_F_CREATE, family, func() {
		g.out.Text(unix.NFTA_SET_NAME, guardSet)
		g.out.Big32(unix.NFTA_SET_FLAGS, 0)
		g.out.Big32(unix.NFTA_SET_KEY_TYPE, typ)
		g.out.Big32(unix.NFTA_SET_KEY_LEN, length)
		g.out.Big32(unix.NFTA_SET_ID, uint32(family)) // an id within the transaction
	})
}

func (g *guard) chain(family byte) {
	hook, priority := uint32(unix.NF_INET_LOCAL_IN), uint32(priorityGuard)
	if family == unix.NFPROTO_ARP {
		hook, priority = 0, 0 // NF_ARP_IN
	}
	g.message(unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, family, func() {
		g.out.Text(unix.NFTA_CHAIN_NAME, guardChain)
		h := g.out.Nest(unix.NFTA_CHAIN_HOOK)
		g.out.Big32(unix.NFTA_HOOK_HOOKNUM, hook)
		g.out.Big32(unix.NFTA_HOOK_PRIORITY, priority)
		g.out.Close(h)
		g.out.Text(unix.NFTA_CHAIN_TYPE, "filter")
	})
}

// note writes a chain without rules and without a hook, whose name says it all.
func (g *guard) note(name string) {
	g.message(unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, unix.NFPROTO_IPV4, func() {
		g.out.Text(unix.NFTA_CHAIN_NAME, name)
	})
}

// where an address stands in the header: of ARP over Ethernet, IPv4, IPv6.
var guardOffsets = map[byte][2]uint32{
	unix.NFPROTO_ARP:  {24, 4},
	unix.NFPROTO_IPV4: {16, 4},
	unix.NFPROTO_IPV6: {24, 16},
}

// rules gives how many rules a table has.
func rules(family byte) int {
	if family == unix.NFPROTO_ARP {
		return 1
	}
	return 2
}

// rule writes the rules of a table.
func (g *guard) rule(family byte) {
	for n := range rules(family) {
		g.message(unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND, family, func() {
			g.out.Text(unix.NFTA_RULE_CHAIN, guardChain)
			list := g.out.Nest(unix.NFTA_RULE_EXPRESSIONS)
			for _, e := range expressions(family, n == 0) {
				g.out.Attr(unix.NFTA_LIST_ELEM|unix.NLA_F_NESTED, marshal(family, e)...)
			}
			g.out.Close(list)
		})
	}
}

// marshal never fails for the expressions of this package: the library refuses only kinds that it does not know.
func marshal(family byte, e expr.Any) []byte {
	data, err := expr.Marshal(family, e)
	if err != nil {
		panic(fmt.Sprintf("ipvsplugin: %T: %v", e, err))
	}
	return data
}

// expressions returns a rule: that for TCP, or that for everything.
func expressions(family byte, tcp bool) []expr.Any {
	at := guardOffsets[family]
	list := []expr.Any{
		&expr.Payload{DestRegister: register1, Base: expr.PayloadBaseNetworkHeader, Offset: at[0], Len: at[1]},
		&expr.Lookup{SourceRegister: register1, SetName: guardSet},
	}
	switch {
	case family == unix.NFPROTO_ARP:
		return append(list, &expr.Verdict{Kind: expr.VerdictDrop})
	case tcp:
		return append(list, &expr.Meta{Key: expr.MetaKeyL4PROTO, Register: register1},
			&expr.Cmp{Op: expr.CmpOpEq, Register: register1, Data: []byte{unix.IPPROTO_TCP}},
			&expr.Reject{Type: unix.NFT_REJECT_TCP_RST})
	}
	port := map[byte]uint8{unix.NFPROTO_IPV4: 3, unix.NFPROTO_IPV6: 4}[family] // port unreachable
	return append(list, &expr.Reject{Type: unix.NFT_REJECT_ICMP_UNREACH, Code: port})
}

// elements writes the messages that add or delete addresses, in every table that guards them.
func (g *guard) elements(message uint16, addrs []netip.Addr) {
	for _, family := range guardFamilies {
		var of []netip.Addr
		for _, a := range addrs {
			if guards(family, a) {
				of = append(of, a)
			}
		}
		for part := range slices.Chunk(of, maxElements) {
			g.message(message, unix.NLM_F_CREATE, family, func() { g.keys(part) })
		}
	}
}

// keys writes addresses as elements of the set.
func (g *guard) keys(addrs []netip.Addr) {
	g.out.Text(unix.NFTA_SET_ELEM_LIST_SET, guardSet)
	list := g.out.Nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS)
	for _, a := range addrs {
		elem := g.out.Nest(unix.NFTA_LIST_ELEM)
		key := g.out.Nest(unix.NFTA_SET_ELEM_KEY)
		g.out.Attr(unix.NFTA_DATA_VALUE, a.AsSlice()...)
		g.out.Close(key)
		g.out.Close(elem)
	}
	g.out.Close(list)
}

// holds says whether the tables are there, with rules, and exactly these addresses.
func (g *guard) holds(addrs map[netip.Addr]bool) (bool, error) {
	for _, family := range guardFamilies {
		found, want := 0, 0
		request := g.list(unix.NFT_MSG_GETRULE, family, func() { g.out.Text(unix.NFTA_RULE_CHAIN, guardChain) })
		err := g.Dump(request, func() { found = 0 }, func([]byte) { found++ })
		if err == nil {
			for a := range addrs {
				if guards(family, a) {
					want++
				}
			}
			err = g.matches(family, addrs, &want)
		}
		if errors.Is(err, unix.ENOENT) {
			return false, nil
		}
		if err != nil {
			return false, fmt.Errorf("nft: read table %s: %w", guardTable, err)
		}
		if found != rules(family) || want != 0 {
			return false, nil
		}
	}
	return true, nil
}

// matches counts want down for each address in the set that is to be there, and up for each that is not.
func (g *guard) matches(family byte, addrs map[netip.Addr]bool, want *int) error {
	all := *want
	request := g.list(unix.NFT_MSG_GETSETELEM, family, func() { g.out.Text(unix.NFTA_SET_ELEM_LIST_SET, guardSet) })
	return g.Dump(request, func() { *want = all }, func(body []byte) {
		for _, a := range elementsOf(body) {
			if addrs[a] {
				*want--
			} else {
				*want += 1 << 20
			}
		}
	})
}

// elementsOf reads the addresses in one message of a list of elements.
func elementsOf(body []byte) (addrs []netip.Addr) {
	list := netlink.Find(body[min(netlink.NetfilterLen, len(body)):], unix.NFTA_SET_ELEM_LIST_ELEMENTS)
	for _, elem := range netlink.Each(list) {
		key := netlink.Find(elem, unix.NFTA_SET_ELEM_KEY)
		if a, ok := netip.AddrFromSlice(netlink.Find(key, unix.NFTA_DATA_VALUE)); ok {
			addrs = append(addrs, a)
		}
	}
	return addrs
}

// readNotes gives the chains that note wrote; none if there is no table.
func (g *guard) readNotes() (notes []string, err error) {
	request := g.list(unix.NFT_MSG_GETCHAIN, unix.NFPROTO_IPV4, nil)
	err = g.Dump(request, func() { notes = nil }, func(body []byte) {
		a := netlink.Decode(body[min(netlink.NetfilterLen, len(body)):])
		name := a[unix.NFTA_CHAIN_NAME].Text()
		if a[unix.NFTA_CHAIN_TABLE].Text() == guardTable && strings.HasPrefix(name, sysctl.NotePrefix) {
			notes = append(notes, name)
		}
	})
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return nil, fmt.Errorf("nft: list chains: %w", err)
	}
	return notes, nil
}
