package packets

import (
	"bytes"
	"errors"
	"reflect"
	"slices"
)

// findHashLots finds the hashes by which a rule chooses from a fixed map.
func findHashLots(ops []nfOp) {
	for i := range ops {
		if ops[i].kind != opHash {
			continue
		}
		for k := i + 1; k < len(ops); k++ {
			if op := &ops[k]; op.kind == opLookup && !op.set.dynamic() &&
				ops[i].dest >= op.source && ops[i].dest < op.source+op.n {
				ops[i].isLot = true
				break
			}
		}
	}
}

// prepare finds the lots of a chain's rules, and which rules repeat one.
func (c *nfChain) prepare() {
	for i := len(c.rules) - 1; i >= 0; i-- {
		r := &c.rules[i]
		if r.lot, r.again = lotIn(r.ops), 0; r.lot > 0 && r.ops[len(r.ops)-1].kind == opNAT && i+1 < len(c.rules) &&
			reflect.DeepEqual(r.ops, c.rules[i+1].ops) {
			r.again = c.rules[i+1].again + 1
		}
	}
}

// lotIn returns the place behind the lot of a rule that does nothing before but compare, and behind that nothing but
// look it up and end with what it finds, or if it finds it; 0 if there is none.
func lotIn(ops []nfOp) int {
	lot := slices.IndexFunc(ops, func(op nfOp) bool { return op.kind == opLot || op.isLot })
	if lot < 0 || lot+1 == len(ops) {
		return 0
	}
	for _, op := range ops[:lot] {
		if !slices.Contains([]nfKind{opMeta, opPayload, opBitwise, opByteorder, opCompare}, op.kind) {
			return 0
		}
	}
	at := lot + 1
	if ops[at].kind == opByteorder && ops[at].source == ops[lot].dest && ops[at].dest == ops[lot].dest && at+1 < len(ops) {
		at++
	}
	look, rest := &ops[at], ops[at+1:]
	if look.isMap && len(rest) == 2 && rest[0].kind == opSetMeta && rest[0].source == look.dest &&
		rest[1].kind == opVerdict { // it is the packet's now, and decides later
		rest = nil
	}
	ends := len(rest) == 0
	if len(rest) == 1 {
		ends = look.isMap && rest[0].kind == opNAT || !look.isMap && rest[0].kind == opVerdict
	}
	if !ends || look.kind != opLookup || look.inverted || look.set.dynamic() ||
		ops[lot].dest < look.source || ops[lot].dest >= look.source+look.n {
		return 0
	}
	return lot + 1
}

// draw is what some values of a lot have in common: value is the first, n how many there are, and keys are what the
// expression behind the lot looks up for them, if that is all they are for. They miss if it finds none.
type draw struct {
	value uint32
	n     uint64
	keys  [][]byte
	miss  bool
}

// lot follows everything that a lot may lead to. Those who find nothing by it, and come to the same rule again, are as
// likely to find each element there.
func (w *walker) lot(m *machine, op *nfOp) (result, error) {
	if op.modulus == 0 {
		return noMatch, errors.New("a lot of no values")
	}
	f := &m.stack[m.depth]
	r := &f.chain.rules[f.rule]
	draws, err := w.draws(m, op, r)
	if err != nil {
		return noMatch, err
	}
	start, again, hit, miss := m.chance, 0, Certain, Certain
	if last := draws[len(draws)-1]; last.miss {
		again = r.again
		for range again {
			miss = miss.Times(NewChance(last.n, uint64(op.modulus)))
			hit = hit.Plus(miss)
		}
	}
	for i, d := range slices.Backward(draws) {
		next := m
		if i > 0 {
			next = m.clone()
			w.queue = append(w.queue, next)
		}
		next.chance = start.Times(NewChance(d.n, uint64(op.modulus)))
		if next.alike = d.keys; d.miss {
			next.chance = next.chance.Times(miss)
			next.stack[next.depth].rule += again
		} else {
			next.chance = next.chance.Times(hit)
		}
		next.load(op.dest, native32(d.value+uint32(op.offset)))
	}
	return goOn, nil
}

// keyOf returns the expression behind a lot that looks its value up, and what the key is for each value.
func (m *machine) keyOf(op *nfOp, r *nfRule) (look *nfOp, key func(v uint32) []byte) {
	look = &r.ops[m.op]
	turned := look.kind == opByteorder
	if turned {
		look = &r.ops[m.op+1]
	}
	return look, func(v uint32) []byte {
		m.load(op.dest, native32(v+uint32(op.offset)))
		if turned {
			slices.Reverse(m.regs[op.dest : op.dest+4])
		}
		return m.regs[look.source : look.source+look.n]
	}
}

// draws returns the values of a lot: each, or of those that find the same only one. Those that find nothing are the
// last.
func (w *walker) draws(m *machine, op *nfOp, r *nfRule) (list []draw, err error) {
	if r.lot != m.op {
		for v := range op.modulus {
			list = append(list, draw{value: v, n: 1})
		}
		return list, nil
	}
	look, key := m.keyOf(op, r)
	find := func(v uint32) *nfElement { return look.set.find(key(v)) }
	var keys [][]byte
	if look.set.read != nil {
		for v := range op.modulus {
			keys = append(keys, bytes.Clone(key(v)))
		}
		found, err := w.read(look.set, keys)
		if err != nil {
			return nil, err
		}
		find = func(v uint32) *nfElement { return found[v] }
	}
	miss, at := draw{miss: true}, map[string]int{} // by the data
	for v := range op.modulus {
		e := find(v)
		if e == nil {
			if miss.n++; miss.n == 1 {
				miss.value = v
			}
			continue
		}
		i, known := at[string(e.data)+e.odd]
		if !known || look.isMap && (e.data == nil || e.odd != "") {
			i, list = len(list), append(list, draw{value: v})
			at[string(e.data)+e.odd] = i
		}
		list[i].n++
		if keys != nil && (look.isMap || list[i].n == 1) { // a range has one element for many values
			list[i].keys = append(list[i].keys, keys[v])
		}
	}
	if miss.n > 0 {
		list = append(list, miss)
	}
	return list, nil
}
