package takeover

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
)

// hooks is how many hooks a family has in the kernel, and so how many built-in chains a table may have.
const hooks = 5

// hookNames are the built-in chains, by hook.
var hookNames = [hooks]string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"}

// blob is a table of legacy iptables in the kernel's format: entries one after the other, each a rule. A built-in chain
// is a range of entries that begins at a hook's offset and ends with its policy. Any other chain begins with an entry
// that has the target ERROR and the chain's name, and ends with a return. The last entry of all is an ERROR, too. Rules
// jump to chains by the offset of their first rule.
type blob struct {
	family ipfamily.Family
	// valid has a bit for each hook that has a chain.
	valid      uint32
	hook       [hooks]uint32
	underflow  [hooks]uint32
	entries    []byte
	numEntries uint32
}

// layout holds offsets in an entry: struct ipt_entry or ip6t_entry of a 64-bit kernel.
type layout struct {
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
	ipfamily.IPv4: {flags: 82, gotoFlag: 2, size: 112, targetOffset: 88, nextOffset: 90},
	ipfamily.IPv6: {flags: 131, gotoFlag: 4, size: 168, targetOffset: 140, nextOffset: 142},
}

const (
	// targetHeader is the length of a struct xt_entry_target or xt_entry_match without what follows it: two bytes of
	// length, a name of 29 bytes, and a revision.
	targetHeader = 32
	nameLen      = 29
	// errorTarget begins a chain; the chain's name follows the header.
	errorTarget = "ERROR"
)

// entry is a rule of a blob.
type entry struct {
	offset, size uint32
	target       string // name of the target; empty is the standard one, which is a verdict
	verdict      int32  // of the standard target: where to jump to, or if negative what to do
	chainHead    string // name of the chain that begins here
	comment      string
	always       bool
}

// parse returns the entries of a blob.
func (b *blob) parse() ([]entry, error) {
	var list []entry
	l := layouts[b.family]
	for at := 0; at < len(b.entries); {
		e, err := l.entry(b.entries[at:])
		if err != nil {
			return nil, fmt.Errorf("entry at %d of %d bytes: %w", at, len(b.entries), err)
		}
		e.offset = uint32(at)
		at += int(e.size)
		list = append(list, e)
	}
	if len(list) == 0 || len(list) != int(b.numEntries) || list[len(list)-1].chainHead == "" {
		return nil, fmt.Errorf("%d entries instead of %d, or no end", len(list), b.numEntries)
	}
	return list, nil
}

var errEntry = errors.New("invalid lengths")

// entry parses the entry that b begins with.
func (l layout) entry(b []byte) (e entry, err error) {
	if len(b) < l.size {
		return e, errEntry
	}
	target := int(binary.NativeEndian.Uint16(b[l.targetOffset:]))
	next := int(binary.NativeEndian.Uint16(b[l.nextOffset:]))
	if target < l.size || next < target+targetHeader || next > len(b) {
		return e, errEntry
	}
	e.size = uint32(next)
	e.always = !slices.ContainsFunc(b[:l.flags], func(c byte) bool { return c != 0 }) && b[l.flags]&^l.gotoFlag == 0
	for m := b[l.size:target]; len(m) > 0; {
		n := int(binary.NativeEndian.Uint16(m))
		if n < targetHeader || n > len(m) {
			return e, errEntry
		}
		if name := unix.ByteSliceToString(m[2 : 2+nameLen]); name == "comment" {
			e.comment = unix.ByteSliceToString(m[targetHeader:n])
		} else {
			e.always = false
		}
		m = m[n:]
	}
	t := b[target:next]
	switch e.target = unix.ByteSliceToString(t[2 : 2+nameLen]); {
	case e.target == "" && len(t) < targetHeader+4:
		return e, errEntry
	case e.target == "":
		e.verdict = int32(binary.NativeEndian.Uint32(t[targetHeader:]))
	case e.target == errorTarget:
		e.chainHead = unix.ByteSliceToString(t[targetHeader:])
	}
	return e, nil
}

// chainSpan is a chain of a blob: entries from first up to, not including, end. The head of a chain that is not built
// in is the entry before first.
type chainSpan struct {
	chain
	first, end int
}

// chains returns the chains of a blob and their entries.
func (b *blob) chains() ([]entry, []chainSpan, error) {
	entries, err := b.parse()
	if err != nil {
		return nil, nil, err
	}
	index := map[uint32]int{}
	for i, e := range entries {
		index[e.offset] = i
	}
	var list []chainSpan
	for h := range hooks {
		if b.valid&(1<<h) == 0 {
			continue
		}
		first, ok1 := index[b.hook[h]]
		policy, ok2 := index[b.underflow[h]]
		if !ok1 || !ok2 || policy < first {
			return nil, nil, fmt.Errorf("chain %s: %w", hookNames[h], errEntry)
		}
		drops := entries[policy].target == "" && entries[policy].verdict == verdictDropLegacy
		list = append(list, chainSpan{chain{hookNames[h], true, drops}, first, policy + 1})
	}
	last := len(entries) - 1
	for i := 0; i < last; i++ {
		if entries[i].chainHead == "" {
			continue
		}
		end := i + 1
		for end < last && entries[end].chainHead == "" {
			end++
		}
		list = append(list, chainSpan{chain{name: entries[i].chainHead}, i + 1, end})
	}
	return entries, list, nil
}

// verdictDropLegacy is DROP in a standard target, where verdicts are negative to tell them from jumps.
const verdictDropLegacy = -1

// table converts the blob to a table with a name. The handle of a rule is its number.
func (b *blob) table(name string) (*table, error) {
	entries, chains, err := b.chains()
	if err != nil {
		return nil, fmt.Errorf("%s iptables: table %s: %w", b.family, name, err)
	}
	at := map[uint32]string{} // chains by the offset of their first rule
	for _, c := range chains {
		if !c.builtin {
			at[entries[c.first].offset] = c.name
		}
	}
	t := &table{variant: legacy, family: b.family, name: name}
	byName := map[string]chainSpan{}
	for _, c := range chains {
		t.chains = append(t.chains, c.chain)
		byName[c.name] = c
	}
	t.rules = func(chain string) ([]rule, error) {
		c := byName[chain]
		var list []rule
		for i := c.first; i < c.end-1; i++ { // the last is the policy, or the return
			e := &entries[i]
			list = append(list, rule{handle: uint64(i), target: e.targetName(at), comment: e.comment, always: e.always})
		}
		return list, nil
	}
	return t, nil
}

// targetName returns a rule's target. at are the chains by the offset of their first rule.
func (e *entry) targetName(at map[uint32]string) string {
	switch {
	case e.target != "":
		return e.target
	case e.verdict == verdictDropLegacy:
		return "DROP"
	case e.verdict >= 0 && uint32(e.verdict) != e.offset+e.size: // else it only goes on
		return at[uint32(e.verdict)]
	}
	return ""
}

// without returns the blob without what a plan removes, and for each remaining entry its former number.
func (b *blob) without(p *plan) (*blob, []int, error) {
	entries, chains, err := b.chains()
	if err != nil {
		return nil, nil, err
	}
	removed := map[string]bool{}
	for _, name := range p.chains {
		removed[name] = true
	}
	gone := make([]bool, len(entries))
	for _, j := range p.jumps {
		gone[j.handle] = true
	}
	for _, c := range chains {
		if removed[c.name] && !c.builtin {
			for i := c.first - 1; i < c.end; i++ {
				gone[i] = true
			}
		}
	}
	out := &blob{family: b.family, valid: b.valid}
	moved := map[uint32]uint32{} // offset before: offset after; of what is gone, that of what follows it
	var left []int
	for i, e := range entries {
		moved[e.offset] = uint32(len(out.entries))
		if !gone[i] {
			left = append(left, i)
			out.entries = append(out.entries, b.entries[e.offset:e.offset+e.size]...)
		}
	}
	out.numEntries = uint32(len(left))
	for h := range hooks {
		out.hook[h], out.underflow[h] = b.hook[h], b.underflow[h]
		if b.valid&(1<<h) != 0 {
			out.hook[h], out.underflow[h] = moved[b.hook[h]], moved[b.underflow[h]]
		}
	}
	if err := out.redirect(entries, left, moved); err != nil {
		return nil, nil, err
	}
	return out, left, b.verify(out, p)
}

// redirect updates the offset of each jump.
func (b *blob) redirect(entries []entry, left []int, moved map[uint32]uint32) error {
	l := layouts[b.family]
	for _, i := range left {
		e := &entries[i]
		if e.target != "" || e.verdict < 0 {
			continue
		}
		to, ok := moved[uint32(e.verdict)]
		if e.offset+e.size == uint32(e.verdict) {
			to, ok = moved[e.offset]+e.size, true
		}
		if !ok {
			return fmt.Errorf("a rule jumps to %d: %w", e.verdict, errEntry)
		}
		at := moved[e.offset]
		at += uint32(binary.NativeEndian.Uint16(b.entries[at+uint32(l.targetOffset):])) + targetHeader
		binary.NativeEndian.PutUint32(b.entries[at:], to)
	}
	return nil
}

// verify parses a blob from without as the kernel will, and checks that each chain is unchanged, except for what the
// plan removes. A mistake here would be one in somebody's firewall.
func (b *blob) verify(out *blob, p *plan) error {
	gone := map[string]bool{}
	for _, name := range p.chains {
		gone[name] = true
	}
	was, err := b.ruleTexts(gone)
	if err != nil {
		return err
	}
	is, err := out.ruleTexts(nil)
	if err != nil {
		return err
	}
	for _, j := range p.jumps {
		was[j.chain] = slices.DeleteFunc(was[j.chain], func(r ruleText) bool { return r.number == int(j.handle) })
	}
	same := len(was) == len(is)
	for name := range was {
		same = same && slices.EqualFunc(was[name], is[name], ruleText.equal)
	}
	if !same {
		return errors.New("the remaining rules would change")
	}
	return nil
}

// ruleText is a rule with the name of the chain it jumps to instead of an offset.
type ruleText struct {
	number        int
	to            string
	before, after []byte
}

func (a ruleText) equal(b ruleText) bool {
	return a.to == b.to && bytes.Equal(a.before, b.before) && bytes.Equal(a.after, b.after)
}

// ruleTexts returns the rules of all chains but some, including the policy of built-in ones.
func (b *blob) ruleTexts(without map[string]bool) (map[string][]ruleText, error) {
	entries, chains, err := b.chains()
	if err != nil {
		return nil, err
	}
	at := map[uint32]string{}
	for _, c := range chains {
		if !c.builtin {
			at[entries[c.first].offset] = c.name
		}
	}
	out := map[string][]ruleText{}
	for _, c := range chains {
		if without[c.name] {
			continue
		}
		list := make([]ruleText, 0, c.end-c.first)
		for i := c.first; i < c.end; i++ {
			e := &entries[i]
			whole := b.entries[e.offset : e.offset+e.size]
			t := ruleText{i, e.targetName(at), whole, nil}
			if e.target == "" && e.verdict >= 0 {
				verdict := binary.NativeEndian.Uint16(whole[layouts[b.family].targetOffset:]) + targetHeader
				t.before, t.after = whole[:verdict], whole[verdict+4:]
			}
			list = append(list, t)
		}
		out[c.name] = list
	}
	return out, nil
}
