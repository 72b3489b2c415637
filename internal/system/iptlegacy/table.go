// Package iptlegacy reads the tables of legacy iptables, from before nf_tables, in the kernel's own format. It needs no
// program for that, and changes nothing: asking the kernel for a table creates it, so only existing ones are read.
package iptlegacy

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
)

// Hooks is how many hooks a family has in the kernel, and so how many built-in chains a table may have.
const Hooks = 5

// HookNames are the built-in chains, by hook.
var HookNames = [Hooks]string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"}

// Table is a table in the kernel's format: entries one after the other, each a rule. A built-in chain is a range of
// entries that begins at a hook's offset and ends with its policy. Any other chain begins with an entry that has the
// target ERROR and the chain's name, and ends with a return. The last entry of all is an ERROR, too. Rules jump to
// chains by the offset of their first rule.
type Table struct {
	Family ipfamily.Family
	// Valid has a bit for each hook that has a chain. Hook and Underflow are the offsets of its first entry and of its
	// policy.
	Valid           uint32
	Hook, Underflow [Hooks]uint32
	Entries         []byte
	NumEntries      uint32
}

// layout holds offsets in an entry: struct ipt_entry or ip6t_entry of a 64-bit kernel.
type layout struct {
	// mask is the offset of the masks of the addresses, names that of the names of interfaces, and protocol that of the
	// protocol.
	mask, names, protocol int
	// flags is the offset of the flags, which follow the match and precede its inversion flags. One of them makes a jump a
	// goto.
	flags    int
	gotoFlag byte
	// size is the length of an entry without matches and target.
	size int
	// targetOffset and nextOffset are the offsets of two lengths: of what precedes the target, and of the whole entry.
	targetOffset, nextOffset int
}

var layouts = map[ipfamily.Family]layout{
	ipfamily.IPv4: {mask: 8, names: 16, protocol: 80, flags: 82, gotoFlag: 2, size: 112, targetOffset: 88, nextOffset: 90},
	ipfamily.IPv6: {mask: 32, names: 64, protocol: 128, flags: 131, gotoFlag: 4, size: 168, targetOffset: 140,
		nextOffset: 142},
}

const (
	// HeaderLen is the length of a struct xt_entry_target or xt_entry_match without what follows it: two bytes of length,
	// a name of 29 bytes, and a revision.
	HeaderLen = 32
	nameLen   = 29
	// errorTarget begins a chain; the chain's name follows the header.
	errorTarget = "ERROR"
)

// Entry is a rule of a Table.
type Entry struct {
	Offset, Size uint32
	// Target is the name of the target; empty is the standard one, which is a verdict: where to jump to, or if negative
	// what to do.
	Target  string
	Verdict int32
	// ChainHead is the name of the chain that begins here.
	ChainHead string
	Comment   string
	// Always says that the rule matches every packet.
	Always bool
}

// The verdicts of a standard target that are no jumps.
const (
	Drop   int32 = -1
	Accept int32 = -2
	Return int32 = -5
)

// parse returns the entries of a table.
func (t *Table) parse() ([]Entry, error) {
	var list []Entry
	l := layouts[t.Family]
	for at := 0; at < len(t.Entries); {
		e, err := l.entry(t.Entries[at:])
		if err != nil {
			return nil, fmt.Errorf("entry at %d of %d bytes: %w", at, len(t.Entries), err)
		}
		e.Offset = uint32(at)
		at += int(e.Size)
		list = append(list, e)
	}
	if len(list) == 0 || len(list) != int(t.NumEntries) || list[len(list)-1].ChainHead == "" {
		return nil, fmt.Errorf("%d entries instead of %d, or no end", len(list), t.NumEntries)
	}
	return list, nil
}

// ErrEntry says that an entry's lengths or offsets do not fit the table.
var ErrEntry = errors.New("invalid lengths")

// entry parses the entry that b begins with.
func (l layout) entry(b []byte) (e Entry, err error) {
	if len(b) < l.size {
		return e, ErrEntry
	}
	target := int(binary.NativeEndian.Uint16(b[l.targetOffset:]))
	next := int(binary.NativeEndian.Uint16(b[l.nextOffset:]))
	if target < l.size || next < target+HeaderLen || next > len(b) {
		return e, ErrEntry
	}
	e.Size = uint32(next)
	e.Always = !slices.ContainsFunc(b[:l.flags], func(c byte) bool { return c != 0 }) && b[l.flags]&^l.gotoFlag == 0
	for m := b[l.size:target]; len(m) > 0; {
		n := int(binary.NativeEndian.Uint16(m))
		if n < HeaderLen || n > len(m) {
			return e, ErrEntry
		}
		if name := unix.ByteSliceToString(m[2 : 2+nameLen]); name == "comment" {
			e.Comment = unix.ByteSliceToString(m[HeaderLen:n])
		} else {
			e.Always = false
		}
		m = m[n:]
	}
	t := b[target:next]
	switch e.Target = unix.ByteSliceToString(t[2 : 2+nameLen]); {
	case e.Target == "" && len(t) < HeaderLen+4:
		return e, ErrEntry
	case e.Target == "":
		e.Verdict = int32(binary.NativeEndian.Uint32(t[HeaderLen:]))
	case e.Target == errorTarget:
		e.ChainHead = unix.ByteSliceToString(t[HeaderLen:])
	}
	return e, nil
}

// Chain is a chain of a table: entries from First up to, not including, End. The head of a chain that is not built in
// is the entry before First; the last one is the policy of a built-in chain, or the return of another one.
type Chain struct {
	Name string
	// Builtin chains are called by the kernel, at the Hook. Drops says that the policy is DROP.
	Builtin, Drops bool
	Hook           int
	First, End     int
}

// Chains returns the entries of a table and its chains.
func (t *Table) Chains() ([]Entry, []Chain, error) {
	entries, err := t.parse()
	if err != nil {
		return nil, nil, err
	}
	index := map[uint32]int{}
	for i, e := range entries {
		index[e.Offset] = i
	}
	var list []Chain
	for h := range Hooks {
		if t.Valid&(1<<h) == 0 {
			continue
		}
		first, ok1 := index[t.Hook[h]]
		policy, ok2 := index[t.Underflow[h]]
		if !ok1 || !ok2 || policy < first {
			return nil, nil, fmt.Errorf("chain %s: %w", HookNames[h], ErrEntry)
		}
		drops := entries[policy].Target == "" && entries[policy].Verdict == Drop
		list = append(list, Chain{HookNames[h], true, drops, h, first, policy + 1})
	}
	last := len(entries) - 1
	for i := 0; i < last; i++ {
		if entries[i].ChainHead == "" {
			continue
		}
		end := i + 1
		for end < last && entries[end].ChainHead == "" {
			end++
		}
		list = append(list, Chain{Name: entries[i].ChainHead, First: i + 1, End: end})
	}
	return entries, list, nil
}

// Next is the offset of the entry behind this one: a verdict that jumps there only goes on.
func (e *Entry) Next() uint32 { return e.Offset + e.Size }

// TargetData returns the offset of what follows the header of a rule's target; of a standard one, this is its verdict.
func (t *Table) TargetData(offset uint32) uint32 {
	before := binary.NativeEndian.Uint16(t.Entries[offset+uint32(layouts[t.Family].targetOffset):])
	return offset + uint32(before) + HeaderLen
}

// Header is what a rule asks of a packet's headers and interfaces. What has a mask of zeroes only is not asked.
type Header struct {
	Source, SourceMask, Destination, DestinationMask []byte
	In, InMask, Out, OutMask                         []byte
	// Protocol is 0 if any will do.
	Protocol uint16
	// Goto says that a jump does not come back, Fragment that only later fragments of a packet match.
	Goto, Fragment bool
	// Inverted has a bit for what must not be so.
	Inverted uint8
}

// The bits of Inverted.
const (
	InvertIn          = 0x01
	InvertOut         = 0x02
	InvertSource      = 0x08
	InvertDestination = 0x10
	InvertProtocol    = 0x40
)

// Header returns what a rule asks of a packet's headers.
func (t *Table) Header(e *Entry) Header {
	l, b := layouts[t.Family], t.Entries[e.Offset:]
	n, name := l.mask/2, unix.IFNAMSIZ
	flags := b[l.flags]
	return Header{
		Source: b[:n], Destination: b[n : 2*n], SourceMask: b[l.mask : l.mask+n], DestinationMask: b[l.mask+n : l.mask+2*n],
		In: b[l.names : l.names+name], Out: b[l.names+name : l.names+2*name],
		InMask: b[l.names+2*name : l.names+3*name], OutMask: b[l.names+3*name : l.names+4*name],
		Protocol: binary.NativeEndian.Uint16(b[l.protocol:]),
		Goto:     flags&l.gotoFlag != 0, Fragment: t.Family == ipfamily.IPv4 && flags&1 != 0, Inverted: b[l.flags+1],
	}
}

// Extension is a match or a target of a rule, with its own data.
type Extension struct {
	Name     string
	Revision uint8
	Data     []byte
}

func extension(b []byte) Extension {
	return Extension{unix.ByteSliceToString(b[2 : 2+nameLen]), b[HeaderLen-1], b[HeaderLen:]}
}

// Extensions returns the matches and the target of a rule.
func (t *Table) Extensions(e *Entry) (matches []Extension, target Extension) {
	l, b := layouts[t.Family], t.Entries[e.Offset:e.Next()]
	at := int(binary.NativeEndian.Uint16(b[l.targetOffset:]))
	for m := b[l.size:at]; len(m) > 0; {
		n := int(binary.NativeEndian.Uint16(m))
		matches = append(matches, extension(m[:n]))
		m = m[n:]
	}
	return matches, extension(b[at:])
}
