package iptshim

import (
	"maps"
	"slices"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Adopt has the model believe that a family's tables hold what iptables-save printed of them. It comes before the first
// Plan, or before one that names Globals after others have written: that writes what differs, and what is ours and not
// asked for goes. A chain with the name of one of ours is ours, whoever wrote it, so that kube-proxy's are taken over.
func (m *Model) Adopt(f ipfamily.Family, saved *Saved) {
	fm := newFamily(f)
	if was := m.families[f]; was.services != nil {
		*fm = *was
		fm.jumps, fm.referred = map[int]bool{}, map[tableChain]bool{}
	}
	for i, t := range Tables {
		fm.held[i] = map[string]uint64{}
		table := saved.tables[t]
		if table == nil {
			continue
		}
		for name := range table.chains {
			if isOwnOrShared(t, name) {
				c := saved.chain(t, name)
				fm.held[i][name] = c.digest()
			}
		}
		for tc := range saved.referred(t) {
			fm.referred[tc] = true
		}
	}
	for i := range jumps {
		fm.jumps[i] = saved.hasJump(&jumps[i])
	}
	m.families[f], m.filled = fm, false
}

// isOwnOrShared is isOurs with the chain that the kubelet has as well. We write it, and leave it.
func isOwnOrShared(t Table, name string) bool {
	return isOurs(t, name) || t == Filter && name == loopbackChain
}

// hasJump says whether a jump is there.
func (s *Saved) hasJump(j *jump) bool {
	table := s.tables[j.table]
	return table != nil && slices.ContainsFunc(table.chains[j.from],
		func(r savedRule) bool { return r.rule() == j.rule.canonical() })
}

// isJump says whether a rule is one of our jumps.
func isJump(t Table, r *savedRule) bool {
	rule := r.rule()
	return slices.ContainsFunc(jumps, func(j jump) bool {
		return j.table == t && j.from == r.chain && j.rule.canonical() == rule
	})
}

// referred gives the chains of ours that rules of others lead to.
func (s *Saved) referred(t Table) map[tableChain]bool {
	out := map[tableChain]bool{}
	table := s.tables[t]
	if table == nil {
		return out
	}
	for name, rules := range table.chains {
		if isOurs(t, name) {
			continue
		}
		for i := range rules {
			if to := rules[i].target(); isOurs(t, to) && !isJump(t, &rules[i]) {
				out[tableChain{t, to}] = true
			}
		}
	}
	return out
}

// RemovalText gives what iptables-restore --noflush has to be told to take all out that is ours, and kube-proxy's, of
// what iptables-save printed; nil if there is nothing. What rules of others lead to stays: KUBE-MARK-MASQ and
// KUBE-POSTROUTING as they are, other chains empty. KUBE-FIREWALL stays, which is the kubelet's as well, and protects
// the host while its loopback range is routed.
func RemovalText(saved *Saved) []byte {
	w := textWriter{}
	for _, t := range Tables {
		if table := saved.tables[t]; table != nil {
			w.removal(saved, t, table)
		}
	}
	return w.text
}

func (w *textWriter) removal(saved *Saved, t Table, table *savedTable) {
	referred := saved.referred(t)
	stays := map[string]bool{}
	if referred[tableChain{NAT, markChain}] {
		stays[markChain], stays[postroutingChain] = true, true
	}
	var jumps, flush, gone []string
	for _, name := range slices.Sorted(maps.Keys(table.chains)) {
		if isOurs(t, name) && !stays[name] {
			flush = append(flush, name)
			if !referred[tableChain{t, name}] {
				gone = append(gone, name)
			}
		}
		for i := range table.chains[name] {
			r := &table.chains[name][i]
			if to := r.target(); isOurs(t, to) && !stays[to] && isJump(t, r) {
				jumps = append(jumps, "-D "+name+" "+r.line)
			}
		}
	}
	if len(jumps)+len(flush) == 0 {
		return
	}
	nobody := snapshot.Name{}
	w.line(nobody, "*", string(t))
	for _, name := range flush {
		w.line(nobody, ":", name, " - [0:0]")
	}
	for _, j := range jumps {
		w.line(nobody, j)
	}
	for _, name := range gone {
		w.line(nobody, "-X ", name)
	}
	w.line(nobody, "COMMIT")
}
