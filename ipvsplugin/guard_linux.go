package ipvsplugin

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// An address with a local route is the host's: listeners on 0.0.0.0 can be reached at it, it answers ping, and ARP, by which it
// would pull the traffic of a whole network to itself. The guard is against that:
//
//	table arp verdict-ipvs {                             table ip verdict-ipvs {
//		set addresses { type ipv4_addr; }                    set addresses { type ipv4_addr; }
//		chain input {                                        chain input {
//			type filter hook input priority filter;              type filter hook input priority 110;
//			arp daddr ip @addresses drop                         ip daddr @addresses reject with tcp reset
//		}                                                        ip daddr @addresses reject
//	}                                                        }
//
// and table ip6 as table ip. IPVS takes what it schedules out of the input hook at priority 98, so no packet that the guard sees is
// anybody's. A client whose connection IPVS has forgotten learns by the reset that it is over, which no ICMP error would tell it. In
// IPv6 the kernel answers solicitations only for addresses that are on a device. Those that are on one are not guarded: they are the
// host's own, whoever else may use them.
const (
	guardTable = "verdict-ipvs"
	guardSet   = "addresses"
	guardChain = "input"
	notePrefix = "was-"
)

const (
	nfgenLen      = 4 // of struct nfgenmsg
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

func nfgenmsg(family byte) []byte { return []byte{family, unix.NFNETLINK_V0, 0, 0} }

func nftType(message uint16) uint16 { return unix.NFNL_SUBSYS_NFTABLES<<8 | message }

var guardFamilies = []byte{unix.NFPROTO_ARP, unix.NFPROTO_IPV4, unix.NFPROTO_IPV6}

// guards says whether a family's table guards an address.
func guards(family byte, a netip.Addr) bool { return a.Is4() == (family != unix.NFPROTO_IPV6) }

// transaction writes messages between the two that make one transaction of them, and commits it.
func (g *guard) transaction(messages func()) error {
	g.out.begin()
	mark := []byte{unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, unix.NFNL_SUBSYS_NFTABLES}
	g.out.message(unix.NFNL_MSG_BATCH_BEGIN, 0, mark, nil)
	messages()
	g.out.flag(unix.NLM_F_ACK)
	awaited := g.out.seq
	g.out.message(unix.NFNL_MSG_BATCH_END, 0, mark, nil)
	if err := g.send(); err != nil {
		return err
	}
	var refused unix.Errno
	err := g.each(func(a answer) bool {
		if refused == 0 {
			refused = a.errno()
		}
		return a.seq == awaited || a.seq == g.out.first && a.errno() != 0
	})
	if err == nil && refused != 0 {
		err = refused
	}
	return err
}

// replace makes all tables anew, with these addresses.
func (g *guard) replace(addrs []netip.Addr) error {
	err := g.transaction(func() {
		for _, family := range guardFamilies {
			g.table(family)
			g.out.message(nftType(unix.NFT_MSG_DELTABLE), 0, nfgenmsg(family), func() { g.out.text(unix.NFTA_TABLE_NAME, guardTable) })
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
			g.out.message(nftType(unix.NFT_MSG_DELTABLE), 0, nfgenmsg(family), func() { g.out.text(unix.NFTA_TABLE_NAME, guardTable) })
		}
	})
	if err != nil {
		return fmt.Errorf("nft: delete table %s: %w", guardTable, err)
	}
	return nil
}

func (g *guard) table(family byte) {
	g.out.message(nftType(unix.NFT_MSG_NEWTABLE), unix.NLM_F_CREATE, nfgenmsg(family), func() { g.out.text(unix.NFTA_TABLE_NAME, guardTable) })
}

func (g *guard) set(family byte) {
	typ, length := uint32(ipAddrType), uint32(4)
	if family == unix.NFPROTO_IPV6 {
		typ, length = ip6AddrType, 16
	}
	g.out.message(nftType(unix.NFT_MSG_NEWSET), unix.NLM_F_CREATE, nfgenmsg(family), func() {
		g.out.text(unix.NFTA_SET_TABLE, guardTable)
		g.out.text(unix.NFTA_SET_NAME, guardSet)
		g.out.big32(unix.NFTA_SET_FLAGS, 0)
		g.out.big32(unix.NFTA_SET_KEY_TYPE, typ)
		g.out.big32(unix.NFTA_SET_KEY_LEN, length)
		g.out.big32(unix.NFTA_SET_ID, uint32(family)) // an id within the transaction
	})
}

func (g *guard) chain(family byte) {
	hook, priority := uint32(unix.NF_INET_LOCAL_IN), uint32(priorityGuard)
	if family == unix.NFPROTO_ARP {
		hook, priority = 0, 0 // NF_ARP_IN
	}
	g.out.message(nftType(unix.NFT_MSG_NEWCHAIN), unix.NLM_F_CREATE, nfgenmsg(family), func() {
		g.out.text(unix.NFTA_CHAIN_TABLE, guardTable)
		g.out.text(unix.NFTA_CHAIN_NAME, guardChain)
		g.out.nest(unix.NFTA_CHAIN_HOOK, func() {
			g.out.big32(unix.NFTA_HOOK_HOOKNUM, hook)
			g.out.big32(unix.NFTA_HOOK_PRIORITY, priority)
		})
		g.out.text(unix.NFTA_CHAIN_TYPE, "filter")
	})
}

// note writes a chain without rules and without a hook, whose name says it all.
func (g *guard) note(name string) {
	g.out.message(nftType(unix.NFT_MSG_NEWCHAIN), unix.NLM_F_CREATE, nfgenmsg(unix.NFPROTO_IPV4), func() {
		g.out.text(unix.NFTA_CHAIN_TABLE, guardTable)
		g.out.text(unix.NFTA_CHAIN_NAME, name)
	})
}

// where an address stands in the header: of ARP over Ethernet, IPv4, IPv6.
var guardOffsets = map[byte][2]uint32{unix.NFPROTO_ARP: {24, 4}, unix.NFPROTO_IPV4: {16, 4}, unix.NFPROTO_IPV6: {24, 16}}

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
		g.out.message(nftType(unix.NFT_MSG_NEWRULE), unix.NLM_F_CREATE|unix.NLM_F_APPEND, nfgenmsg(family), func() {
			g.out.text(unix.NFTA_RULE_TABLE, guardTable)
			g.out.text(unix.NFTA_RULE_CHAIN, guardChain)
			g.out.nest(unix.NFTA_RULE_EXPRESSIONS, func() { g.expressions(family, n == 0) })
		})
	}
}

// expressions writes a rule: that for TCP, or that for everything.
func (g *guard) expressions(family byte, tcp bool) {
	at := guardOffsets[family]
	g.payload(at[0], at[1])
	g.expression("lookup", func() {
		g.out.text(unix.NFTA_LOOKUP_SET, guardSet)
		g.out.big32(unix.NFTA_LOOKUP_SREG, register1)
	})
	switch {
	case family == unix.NFPROTO_ARP:
		g.expression("immediate", func() { // drop
			g.out.big32(unix.NFTA_IMMEDIATE_DREG, unix.NFT_REG_VERDICT)
			g.out.nest(unix.NFTA_IMMEDIATE_DATA, func() {
				g.out.nest(unix.NFTA_DATA_VERDICT, func() { g.out.big32(unix.NFTA_VERDICT_CODE, 0) })
			})
		})
	case tcp:
		g.expression("meta", func() {
			g.out.big32(unix.NFTA_META_DREG, register1)
			g.out.big32(unix.NFTA_META_KEY, unix.NFT_META_L4PROTO)
		})
		g.equal(unix.IPPROTO_TCP)
		g.reject(unix.NFT_REJECT_TCP_RST, 0)
	default:
		g.reject(unix.NFT_REJECT_ICMP_UNREACH, map[byte]byte{unix.NFPROTO_IPV4: 3, unix.NFPROTO_IPV6: 4}[family]) // port unreachable
	}
}

func (g *guard) reject(typ uint32, code byte) {
	g.expression("reject", func() {
		g.out.big32(unix.NFTA_REJECT_TYPE, typ)
		g.out.attr(unix.NFTA_REJECT_ICMP_CODE, code)
	})
}

func (g *guard) payload(offset, length uint32) {
	g.expression("payload", func() {
		g.out.big32(unix.NFTA_PAYLOAD_DREG, register1)
		g.out.big32(unix.NFTA_PAYLOAD_BASE, unix.NFT_PAYLOAD_NETWORK_HEADER)
		g.out.big32(unix.NFTA_PAYLOAD_OFFSET, offset)
		g.out.big32(unix.NFTA_PAYLOAD_LEN, length)
	})
}

func (g *guard) equal(b ...byte) {
	g.expression("cmp", func() {
		g.out.big32(unix.NFTA_CMP_SREG, register1)
		g.out.big32(unix.NFTA_CMP_OP, unix.NFT_CMP_EQ)
		g.out.nest(unix.NFTA_CMP_DATA, func() { g.out.attr(unix.NFTA_DATA_VALUE, b...) })
	})
}

func (g *guard) expression(name string, data func()) {
	g.out.nest(unix.NFTA_LIST_ELEM, func() {
		g.out.text(unix.NFTA_EXPR_NAME, name)
		g.out.nest(unix.NFTA_EXPR_DATA, data)
	})
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
			g.out.message(nftType(message), unix.NLM_F_CREATE, nfgenmsg(family), func() {
				g.out.text(unix.NFTA_SET_ELEM_LIST_TABLE, guardTable)
				g.out.text(unix.NFTA_SET_ELEM_LIST_SET, guardSet)
				g.out.nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS, func() {
					for _, a := range part {
						g.out.nest(unix.NFTA_LIST_ELEM, func() {
							g.out.nest(unix.NFTA_SET_ELEM_KEY, func() { g.out.attr(unix.NFTA_DATA_VALUE, a.AsSlice()...) })
						})
					}
				})
			})
		}
	}
}

// holds says whether the tables are there, with rules, and exactly these addresses.
func (g *guard) holds(addrs map[netip.Addr]bool) (bool, error) {
	for _, family := range guardFamilies {
		found, want := 0, 0
		err := g.dump(nftType(unix.NFT_MSG_GETRULE), nfgenmsg(family), func() {
			g.out.text(unix.NFTA_RULE_TABLE, guardTable)
			g.out.text(unix.NFTA_RULE_CHAIN, guardChain)
		}, func() { found = 0 }, func([]byte) { found++ })
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
	return g.dump(nftType(unix.NFT_MSG_GETSETELEM), nfgenmsg(family), func() {
		g.out.text(unix.NFTA_SET_ELEM_LIST_TABLE, guardTable)
		g.out.text(unix.NFTA_SET_ELEM_LIST_SET, guardSet)
	}, func() { *want = all }, func(body []byte) {
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
	if len(body) < nfgenLen {
		return nil
	}
	for typ, list := range attributes(body[nfgenLen:]) {
		if typ != unix.NFTA_SET_ELEM_LIST_ELEMENTS {
			continue
		}
		for _, elem := range attributes(list) {
			for typ, key := range attributes(elem) {
				for _, v := range attributes(key) {
					if a, ok := netip.AddrFromSlice(v); typ == unix.NFTA_SET_ELEM_KEY && ok {
						addrs = append(addrs, a)
					}
				}
			}
		}
	}
	return addrs
}

// readNotes gives the chains that note wrote; none if there is no table.
func (g *guard) readNotes() (notes []string, err error) {
	err = g.dump(nftType(unix.NFT_MSG_GETCHAIN), nfgenmsg(unix.NFPROTO_IPV4), nil, func() { notes = nil }, func(body []byte) {
		if len(body) < nfgenLen {
			return
		}
		var table, name string
		for typ, v := range attributes(body[nfgenLen:]) {
			switch typ {
			case unix.NFTA_CHAIN_TABLE:
				table = v.text()
			case unix.NFTA_CHAIN_NAME:
				name = v.text()
			}
		}
		if table == guardTable && strings.HasPrefix(name, notePrefix) {
			notes = append(notes, name)
		}
	})
	if err != nil {
		return nil, fmt.Errorf("nft: list chains: %w", err)
	}
	return notes, nil
}

// generation gives the number of the last transaction of anybody.
func (g *guard) generation() (uint32, error) {
	body, err := g.get(nftType(unix.NFT_MSG_GETGEN), nfgenmsg(unix.AF_UNSPEC), nil)
	if err != nil {
		return 0, fmt.Errorf("nft: get generation: %w", err)
	}
	for typ, v := range attributes(body[min(nfgenLen, len(body)):]) {
		if typ == unix.NFTA_GEN_ID && len(v) >= 4 {
			return binary.BigEndian.Uint32(v), nil
		}
	}
	return 0, errors.New("nft: get generation: the kernel gives none")
}
