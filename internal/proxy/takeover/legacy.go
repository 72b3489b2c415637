package takeover

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/verdict-proxy/verdict/internal/system/iptlegacy"
)

// blob is a table of legacy iptables in the kernel's format.
type blob struct{ *iptlegacy.Table }

// table converts the blob to a table with a name. The handle of a rule is its number.
func (b *blob) table(name string) (*table, error) {
	entries, chains, err := b.Chains()
	if err != nil {
		return nil, fmt.Errorf("%s iptables: table %s: %w", b.Family, name, err)
	}
	at := map[uint32]string{} // chains by the offset of their first rule
	for _, c := range chains {
		if !c.Builtin {
			at[entries[c.First].Offset] = c.Name
		}
	}
	t := &table{variant: legacy, family: b.Family, name: name}
	byName := map[string]iptlegacy.Chain{}
	for _, c := range chains {
		t.chains = append(t.chains, chain{c.Name, c.Builtin, c.Drops})
		byName[c.Name] = c
	}
	t.rules = func(chain string) ([]rule, error) {
		c := byName[chain]
		var list []rule
		for i := c.First; i < c.End-1; i++ { // the last is the policy, or the return
			e := &entries[i]
			list = append(list, rule{handle: uint64(i), target: targetName(e, at), comment: e.Comment, always: e.Always})
		}
		return list, nil
	}
	return t, nil
}

// targetName returns a rule's target. at are the chains by the offset of their first rule.
func targetName(e *iptlegacy.Entry, at map[uint32]string) string {
	switch {
	case e.Target != "":
		return e.Target
	case e.Verdict == iptlegacy.Drop:
		return "DROP"
	case e.Verdict >= 0 && uint32(e.Verdict) != e.Next(): // else it only goes on
		return at[uint32(e.Verdict)]
	}
	return ""
}

// without returns the blob without what a plan removes, and for each remaining entry its former number.
func (b *blob) without(p *plan) (*blob, []int, error) {
	entries, chains, err := b.Chains()
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
		if removed[c.Name] && !c.Builtin {
			for i := c.First - 1; i < c.End; i++ {
				gone[i] = true
			}
		}
	}
	out := &blob{&iptlegacy.Table{Family: b.Family, Valid: b.Valid}}
	moved := map[uint32]uint32{} // offset before: offset after; of what is gone, that of what follows it
	var left []int
	for i, e := range entries {
		moved[e.Offset] = uint32(len(out.Entries))
		if !gone[i] {
			left = append(left, i)
			out.Entries = append(out.Entries, b.Entries[e.Offset:e.Offset+e.Size]...)
		}
	}
	out.NumEntries = uint32(len(left))
	for h := range iptlegacy.Hooks {
		out.Hook[h], out.Underflow[h] = b.Hook[h], b.Underflow[h]
		if b.Valid&(1<<h) != 0 {
			out.Hook[h], out.Underflow[h] = moved[b.Hook[h]], moved[b.Underflow[h]]
		}
	}
	if err := out.redirect(entries, left, moved); err != nil {
		return nil, nil, err
	}
	return out, left, b.verify(out, p)
}

// redirect updates the offset of each jump.
func (b *blob) redirect(entries []iptlegacy.Entry, left []int, moved map[uint32]uint32) error {
	for _, i := range left {
		e := &entries[i]
		if e.Target != "" || e.Verdict < 0 {
			continue
		}
		to, ok := moved[uint32(e.Verdict)]
		if e.Offset+e.Size == uint32(e.Verdict) {
			to, ok = moved[e.Offset]+e.Size, true
		}
		if !ok {
			return fmt.Errorf("a rule jumps to %d: %w", e.Verdict, iptlegacy.ErrEntry)
		}
		binary.NativeEndian.PutUint32(b.Entries[b.TargetData(moved[e.Offset]):], to)
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
	entries, chains, err := b.Chains()
	if err != nil {
		return nil, err
	}
	at := map[uint32]string{}
	for _, c := range chains {
		if !c.Builtin {
			at[entries[c.First].Offset] = c.Name
		}
	}
	out := map[string][]ruleText{}
	for _, c := range chains {
		if without[c.Name] {
			continue
		}
		list := make([]ruleText, 0, c.End-c.First)
		for i := c.First; i < c.End; i++ {
			e := &entries[i]
			whole := b.Entries[e.Offset : e.Offset+e.Size]
			t := ruleText{i, targetName(e, at), whole, nil}
			if e.Target == "" && e.Verdict >= 0 {
				verdict := b.TargetData(e.Offset) - e.Offset
				t.before, t.after = whole[:verdict], whole[verdict+4:]
			}
			list = append(list, t)
		}
		out[c.Name] = list
	}
	return out, nil
}
