package packets

import (
	"bytes"
	"errors"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/iptlegacy"
)

// legacyPriorities are the priorities of the chains of legacy iptables, of the tables that are read: nat translates at
// -100, behind Verdict, and may be large.
var legacyPriorities = map[string]int32{"raw": -300, "mangle": -150, "filter": 0}

// legacy reads the tables of legacy iptables, which are followed as those of nf_tables are.
func (o *others) legacy() error {
	for _, f := range ipfamily.All {
		names, err := iptlegacy.Names(f)
		if err != nil {
			return err
		}
		for _, name := range names {
			priority, wanted := legacyPriorities[name]
			if !wanted {
				continue
			}
			table, err := iptlegacy.Read(f, name, maxLegacy)
			if err != nil && !errors.Is(err, iptlegacy.ErrLarge) {
				return err
			}
			t := &nfTable{family: f, name: name, legacy: true, chains: map[string]*nfChain{}, sets: map[string]*nfSet{}}
			if err != nil {
				t.tooLarge(table, priority)
			} else if err = o.addLegacy(t, table, priority); err != nil {
				return err
			}
			o.rules.tables[f] = append(o.rules.tables[f], t)
		}
	}
	return nil
}

// tooLarge gives a table that was not read its base chains, through which no packet can be followed.
func (t *nfTable) tooLarge(b *iptlegacy.Table, priority int32) {
	for hook, name := range iptlegacy.HookNames {
		if b.Valid&(1<<hook) != 0 {
			t.chains[name] = &nfChain{table: t, name: name, base: true, hook: uint32(hook), priority: priority,
				unread: ErrTooMany}
		}
	}
}

// addLegacy gives a table the chains of one of legacy iptables. The handle of a rule is its number in its chain, from
// 1.
func (o *others) addLegacy(t *nfTable, b *iptlegacy.Table, priority int32) error {
	entries, spans, err := b.Chains()
	if err != nil {
		return err
	}
	at := map[uint32]*nfChain{} // by the offset of their first rule
	for _, s := range spans {
		c := &nfChain{table: t, name: s.Name, base: s.Builtin, hook: uint32(s.Hook), priority: priority, drops: s.Drops}
		if t.chains[s.Name] = c; !s.Builtin {
			at[entries[s.First].Offset] = c
		}
	}
	for _, s := range spans {
		c := t.chains[s.Name]
		c.load = func() error {
			if o.room -= s.End - 1 - s.First; o.room < 0 {
				return ErrTooMany
			}
			for i := s.First; i < s.End-1; i++ {
				rule := nfRule{handle: uint64(i - s.First + 1), ops: t.legacyOps(b, &entries[i], at)}
				rule.finish(t.family)
				c.rules = append(c.rules, rule)
			}
			c.prepare()
			return nil
		}
	}
	return nil
}

// legacyOps translates a rule. At are the chains by the offset of their first rule.
func (t *nfTable) legacyOps(b *iptlegacy.Table, e *iptlegacy.Entry, at map[uint32]*nfChain) (ops []nfOp) {
	h := b.Header(e)
	if h.Fragment { // no first packet
		return []nfOp{{kind: opVerdict, code: codeBreak}}
	}
	sourceAt, n := ipfamily.Per[int]{12, 8}[t.family], t.family.AddrLen()
	ops = append(ops, compareMasked(nfOp{kind: opPayload, what: baseNetwork, offset: sourceAt, n: n}, h.Source,
		h.SourceMask, h.Inverted&iptlegacy.InvertSource != 0)...)
	ops = append(ops, compareMasked(nfOp{kind: opPayload, what: baseNetwork, offset: sourceAt + n, n: n}, h.Destination,
		h.DestinationMask, h.Inverted&iptlegacy.InvertDestination != 0)...)
	ops = append(ops, compareMasked(nfOp{kind: opMeta, what: unix.NFT_META_IIFNAME}, h.In, h.InMask,
		h.Inverted&iptlegacy.InvertIn != 0)...)
	ops = append(ops, compareMasked(nfOp{kind: opMeta, what: unix.NFT_META_OIFNAME}, h.Out, h.OutMask,
		h.Inverted&iptlegacy.InvertOut != 0)...)
	if h.Protocol != 0 {
		ops = append(ops, compareMasked(nfOp{kind: opMeta, what: unix.NFT_META_L4PROTO}, []byte{byte(h.Protocol)},
			[]byte{0xff}, h.Inverted&iptlegacy.InvertProtocol != 0)...)
	}
	matches, target := b.Extensions(e)
	for _, m := range matches {
		ops = append(ops, compileMatch(m.Name, uint32(m.Revision), m.Data)...)
	}
	if target.Name != "" {
		return append(ops, compileXTarget(target.Name, target.Data))
	}
	switch {
	case e.Verdict == iptlegacy.Drop:
		return append(ops, nfOp{kind: opVerdict, code: codeDrop})
	case e.Verdict == iptlegacy.Accept:
		return append(ops, nfOp{kind: opVerdict, code: codeAccept})
	case e.Verdict == iptlegacy.Return:
		return append(ops, nfOp{kind: opVerdict, code: codeReturn})
	case uint32(e.Verdict) == e.Next(): // it only goes on
		return ops
	}
	jump := nfOp{kind: opVerdict, code: codeJump, chain: at[uint32(e.Verdict)]}
	if h.Goto {
		jump.code = codeGoto
	}
	if jump.chain == nil {
		jump = nfOp{unknown: "a verdict"}
	}
	return append(ops, jump)
}

// compareMasked compares what an expression loads, under a mask; nothing if the mask is empty.
func compareMasked(load nfOp, value, mask []byte, inverted bool) []nfOp {
	n := len(bytes.TrimRight(mask, "\x00"))
	if n == 0 {
		return nil
	}
	op := uint8(unix.NFT_CMP_EQ)
	if inverted {
		op = unix.NFT_CMP_NEQ
	}
	return []nfOp{load, {kind: opBitwise, n: n, data: clone(mask[:n]), high: make([]byte, n)},
		{kind: opCompare, what: op, n: n, data: clone(value[:n])}}
}
