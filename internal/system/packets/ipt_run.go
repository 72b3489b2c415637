package packets

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
)

// iptHook is a built-in chain of a table, in the order in which packets meet them.
type iptHook struct{ table, chain string }

var (
	iptIncoming   = []iptHook{{"raw", "PREROUTING"}, {"mangle", "PREROUTING"}, {"nat", "PREROUTING"}}
	iptLocal      = []iptHook{{"mangle", "INPUT"}, {"filter", "INPUT"}, {"nat", "INPUT"}}
	iptForwarded  = []iptHook{{"mangle", "FORWARD"}, {"filter", "FORWARD"}}
	iptOutgoing   = []iptHook{{"raw", "OUTPUT"}, {"mangle", "OUTPUT"}, {"nat", "OUTPUT"}, {"filter", "OUTPUT"}}
	iptLeaving    = []iptHook{{"mangle", "POSTROUTING"}, {"nat", "POSTROUTING"}}
	iptLoopedBack = []iptHook{{"raw", "PREROUTING"}, {"mangle", "PREROUTING"}, {"mangle", "INPUT"}, {"filter", "INPUT"}}
)

// iptFrame is a place in a chain: the next of the rules that may match.
type iptFrame struct {
	chain *iptChain
	next  int // the first rule that was not tried
}

// iptMachine is the state of one packet on its way.
type iptMachine struct {
	to         netip.AddrPort
	mark       uint32
	iif        string
	translated bool
	masquerade bool
	chance     Chance
	lists      []string
	recalled   bool
	// step is the last rule that looked at the packet, if it is traced.
	step *Step
	// hooks are the chains still to come, the first of them running, and stack where the packet is; stage counts the
	// parts of the way.
	hooks []iptHook
	stage int
	stack []iptFrame
}

type iptWalker struct {
	chains *Chains
	family ipfamily.Family
	packet *Packet
	memory []string
	asked  *Asked
	queue  []*iptMachine
	out    outcomes
	// trace, if not nil, gathers what is not known of rules, which then do not match. Recent is that of Trace.
	trace  *Trace
	recent func(list string, seconds uint32) bool
}

// Walk implements Walker.
func (c *Chains) Walk(p Packet, m Memory, asked *Asked) ([]Outcome, error) {
	w := iptWalker{chains: c, packet: &p, asked: asked}
	w.memory, _ = m.([]string)
	err := w.walk()
	return w.out.sorted(), err
}

// walk follows the packet, and at each lot both ways.
func (w *iptWalker) walk() error {
	w.family = ipfamily.Of(w.packet.Destination.Addr())
	first := &iptMachine{to: w.packet.Destination, iif: w.packet.Interface, chance: Certain, hooks: iptIncoming}
	if first.iif == "" {
		first.hooks = iptOutgoing
	}
	for w.queue = append(w.queue, first); len(w.queue) > 0; {
		m := w.queue[len(w.queue)-1]
		w.queue = w.queue[:len(w.queue)-1]
		if err := w.run(m); err != nil {
			return fmt.Errorf("iptables, %s: %w", w.family, err)
		}
	}
	return nil
}

// run follows a machine to its end.
func (w *iptWalker) run(m *iptMachine) error {
	for {
		if len(m.stack) > 0 {
			ended, err := w.chain(m)
			if ended || err != nil {
				return err
			}
			m.hooks = m.hooks[1:]
		}
		for len(m.hooks) > 0 && len(m.stack) == 0 {
			h := m.hooks[0]
			if c := w.chains.tables[w.family][h.table][h.chain]; c != nil {
				m.stack = []iptFrame{{chain: c}}
			} else {
				m.hooks = m.hooks[1:]
			}
		}
		if len(m.hooks) == 0 && !w.nextStage(m) {
			w.end(m, Ending{})
			return nil
		}
	}
}

// nextStage moves on to the next hooks of the packet's way; false at its end.
func (w *iptWalker) nextStage(m *iptMachine) bool {
	local := w.chains.host.local(m.to.Addr())
	m.stage++
	switch own := w.packet.Interface == ""; {
	case own && m.stage == 1, !own && m.stage == 2 && !local:
		m.hooks = iptLeaving
	case own && m.stage == 2 && local:
		m.hooks, m.iif = iptLoopedBack, loopback
	case !own && m.stage == 1 && local:
		m.hooks = iptLocal
	case !own && m.stage == 1:
		m.hooks = iptForwarded
	default:
		return false
	}
	return true
}

func (w *iptWalker) end(m *iptMachine, e Ending) {
	if e.Verdict == Untouched {
		if m.translated {
			e.Verdict, e.To, e.Recalled = Sent, m.to, m.recalled
			if n := len(m.lists); n > 0 {
				e.Remembered = w.chains.seconds[m.lists[n-1]]
			}
		}
		e.Masqueraded = m.masquerade
	}
	o := Outcome{Ending: e, Chance: m.chance, Last: m.step}
	if len(m.lists) > 0 {
		o.Memory = m.lists
	}
	w.out.add(o)
}

// maxChainDepth bounds how deep chains may call each other.
const maxChainDepth = 64

// chain runs a built-in chain from where the machine is, and reports whether the packet is at its end. If not, the
// stack is empty.
func (w *iptWalker) chain(m *iptMachine) (ended bool, err error) {
	for len(m.stack) > 0 {
		if len(m.stack) > maxChainDepth {
			return true, errors.New("chains call each other too deep")
		}
		f := &m.stack[len(m.stack)-1]
		i := w.nextRule(m, f)
		if i >= len(f.chain.rules) {
			m.stack = m.stack[:len(m.stack)-1]
			continue
		}
		f.next = i + 1
		ended, err := w.rule(m, f.chain, i)
		if err != nil && w.trace == nil {
			return true, err
		}
		if err != nil {
			w.trace.unclear(err)
		}
		if ended {
			return true, nil
		}
	}
	return false, nil
}

// rule carries out a rule if it matches.
func (w *iptWalker) rule(m *iptMachine, c *iptChain, i int) (ended bool, err error) {
	r := &c.rules[i]
	if w.trace != nil {
		m.step = &Step{Before: m.step, Table: c.table, Chain: c.name, Rule: i, Text: r.text, Later: m.translated}
	}
	matched, err := w.matches(m, r, i)
	if matched && err == nil {
		if m.step != nil {
			m.step.Matched = true
		}
		ended, err = w.target(m, r)
	}
	if err != nil {
		err = fmt.Errorf("%s: %w: %.300s", c.place(i), err, cmp.Or(r.text, r.target))
	}
	return ended, err
}

// place says where a rule is.
func (c *iptChain) place(rule int) string {
	return fmt.Sprintf("table %s, rule %d of chain %s", c.table, rule+1, c.name)
}

// nextRule returns the place of the next rule that may match.
func (w *iptWalker) nextRule(m *iptMachine, f *iptFrame) int {
	if f.chain.index == nil {
		return f.next
	}
	list := f.chain.candidates(m.to, w.packet.Protocol)
	if at, _ := slices.BinarySearch(list, f.next); at < len(list) {
		return list[at]
	}
	return len(f.chain.rules)
}

// matches evaluates a rule's conditions. At a lot, another machine is queued, for which the rule does not match.
func (w *iptWalker) matches(m *iptMachine, r *iptRule, place int) (bool, error) {
	if r.source != nil && w.asked != nil {
		w.asked.add(Interval{r.source.Masked().Addr(), ipfamily.Last(r.source.Prefix)})
	}
	port := m.to.Port()
	switch p := w.packet; {
	case r.proto != 0 && r.proto != p.Protocol, r.port != 0 && (port < r.port || port > max(r.port, r.last)),
		r.dest != nil && r.dest.Contains(m.to.Addr()) == r.dest.inverted,
		r.source != nil && r.source.Contains(p.Source.Addr()) == r.source.inverted:
		return false, nil
	}
	for i := range r.matches {
		if ok, err := w.holds(m, &r.matches[i]); !ok || err != nil {
			return false, err
		}
	}
	if r.unknown != "" {
		return false, fmt.Errorf("what %s does is not known", r.unknown)
	}
	return w.lot(m, r, place)
}

// lot draws a rule's lot, both ways.
func (w *iptWalker) lot(m *iptMachine, r *iptRule, place int) (bool, error) {
	if r.chance.Den == 0 || r.chance == Certain {
		return true, nil
	}
	if r.chance.Num == 0 {
		return false, nil
	}
	other := *m
	other.chance = m.chance.Times(NewChance(r.chance.Den-r.chance.Num, r.chance.Den))
	if m.step != nil {
		step := *m.step
		other.step = &step
	}
	other.lists, other.stack = slices.Clone(m.lists), slices.Clone(m.stack)
	other.stack[len(other.stack)-1].next = place + 1
	w.queue = append(w.queue, &other)
	m.chance = m.chance.Times(r.chance)
	return true, nil
}

// holds evaluates one condition.
func (w *iptWalker) holds(m *iptMachine, c *iptMatch) (bool, error) {
	holds := false
	switch c.option {
	case "--mark":
		holds = m.mark&c.mask == c.mark
	case "--ctstate":
		for _, state := range strings.Split(c.value, ",") {
			switch state {
			case "NEW":
				holds = true
			case "DNAT":
				holds = holds || m.to != w.packet.Destination
			case "SNAT":
				holds = holds || m.masquerade
			case "INVALID", "RELATED", "ESTABLISHED", "UNTRACKED":
			default:
				return false, fmt.Errorf("--ctstate %s is not known", state)
			}
		}
	case "--dst-type", "--src-type":
		a := m.to.Addr()
		if c.option == "--src-type" {
			a = w.packet.Source.Addr()
		}
		if c.value != "LOCAL" {
			return false, fmt.Errorf("%s %s is not known", c.option, c.value)
		}
		holds = w.chains.host.local(a)
	case "-i":
		stem, wild := strings.CutSuffix(c.value, "+")
		holds = m.iif == c.value || wild && m.iif != "" && strings.HasPrefix(m.iif, stem)
	case "--rcheck":
		holds = slices.Contains(w.memory, c.value) || slices.Contains(m.lists, c.value) ||
			w.recent != nil && w.recent(c.value, w.chains.seconds[c.value])
		m.recalled = m.recalled || holds
	}
	return holds != c.inverted, nil
}

// target carries a rule out, and reports whether the packet is at its end.
func (w *iptWalker) target(m *iptMachine, r *iptRule) (ended bool, err error) {
	if r.remember != "" {
		m.lists = append(slices.Clip(m.lists), r.remember)
	}
	switch r.target {
	case "":
	case "ACCEPT":
		m.stack = nil
	case "RETURN":
		m.stack = m.stack[:len(m.stack)-1]
	case "DROP":
		w.end(m, Ending{Verdict: Dropped})
		return true, nil
	case "REJECT":
		w.end(m, Ending{Verdict: Rejected, Reject: iptReject(r.value)})
		return true, nil
	case "MARK":
		mark, mask, err := parseMark(r.value)
		if err != nil {
			return true, fmt.Errorf("MARK: %w", err)
		}
		m.mark = m.mark&^mask ^ mark
	case "DNAT":
		to, err := netip.ParseAddrPort(r.value)
		if err != nil {
			return true, fmt.Errorf("DNAT: %w", err)
		}
		m.to, m.translated, m.stack = to, true, nil
	case "MASQUERADE":
		m.masquerade, m.stack = true, nil
	default:
		return false, w.call(m, r)
	}
	return false, nil
}

// call goes to another chain.
func (w *iptWalker) call(m *iptMachine, r *iptRule) error {
	f := &m.stack[len(m.stack)-1]
	if r.call == nil {
		return fmt.Errorf("what the target %s does is not known", r.target)
	}
	if !r.jump {
		*f = iptFrame{chain: r.call}
		return nil
	}
	m.stack = append(slices.Clip(m.stack), iptFrame{chain: r.call})
	return nil
}

// iptReject gives a kind of rejection the name that it has in nf_tables.
func iptReject(with string) string {
	for _, prefix := range []string{"icmp-", "icmp6-"} {
		if kind, ok := strings.CutPrefix(with, prefix); ok {
			return "icmp " + kind
		}
	}
	if with == "tcp-reset" {
		return "tcp reset"
	}
	return with
}

// Mentioned returns what the rules name.
func (c *Chains) Mentioned() *Mentioned {
	m := &Mentioned{}
	for f, tables := range c.tables {
		for _, chains := range tables {
			for _, chain := range chains {
				for i := range chain.rules {
					r := &chain.rules[i]
					switch k, ok := r.key(); {
					case !ok || chain.builtin:
					case k.port == 0:
						m.Addrs = append(m.Addrs, k.addr)
					default:
						m.Keys[f] = append(m.Keys[f], Key{k.addr, k.protocol, k.port})
					}
				}
			}
		}
	}
	return m
}
