package packets

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
)

// The hooks, by the kernel's numbers.
const (
	hookPrerouting = iota
	hookInput
	hookForward
	hookOutput
	hookPostrouting
	// hookIngress is that of the family netdev, which is before all others.
	hookIngress
)

// natPriority is where connection tracking translates, whatever the priority of a nat chain is.
var natPriority = [5]int32{hookPrerouting: -100, hookOutput: -100, hookInput: 100, hookPostrouting: 100}

// conntrackPriority is where connection tracking begins.
const conntrackPriority = -200

// order sorts the base chains by hook and priority.
func (r *Rules) order() {
	for f, tables := range r.tables {
		for _, t := range tables {
			if t.dormant {
				continue
			}
			for _, c := range t.chains {
				if c.base && (c.hook < hookIngress || c.devices != nil) {
					r.hooks[f][c.hook] = append(r.hooks[f][c.hook], c)
				}
			}
		}
		for h := range r.hooks[f] {
			slices.SortFunc(r.hooks[f][h], func(a, b *nfChain) int {
				return compareLists([]int32{a.at(), a.priority}, []int32{b.at(), b.priority}, a.name, b.name)
			})
		}
	}
}

func compareLists(a, b []int32, nameA, nameB string) int {
	if c := slices.Compare(a, b); c != 0 {
		return c
	}
	return bytes.Compare([]byte(nameA), []byte(nameB))
}

// at is the priority at which a base chain sees packets.
func (c *nfChain) at() int32 {
	if c.nat {
		return natPriority[c.hook]
	}
	return c.priority
}

// update is an element that a rule added to a dynamic set, or took out of it.
type update struct {
	gone      bool
	set       *nfSet
	key, data string
	timeout   uint64
	// ingress says that it is about the node of a flow, and not about its endpoint.
	ingress bool
}

// frame is a place in a chain.
type frame struct {
	chain *nfChain
	rule  int
}

// maxDepth is how deep chains may call each other, by the kernel's limit.
const maxDepth = 16

// maxSteps bounds the rules on one packet's way; the kernel accepts no circle, but a list may have one.
const maxSteps = 1 << 16

// machine is the state of one packet on its way.
type machine struct {
	regs      [registerBytes]byte
	network   [40]byte
	transport [16]byte
	// origDest and origPort are the destination that the packet came with.
	origDest   netip.Addr
	origPort   uint16
	mark, prio uint32
	iif        string
	translated bool
	masquerade bool
	recalled   bool
	// natDone says that connection tracking has decided about the address in question: a nat chain sees no packet twice.
	natDone, looped bool
	// untracked says that connection tracking leaves the packet alone: no nat chain sees it.
	untracked bool
	chance    Chance
	updates   []update
	// alike are the keys that lead to what the next lookup finds, if a lot chose among them.
	alike [][]byte
	// step is the last rule that looked at the packet, if it is traced, and later says that it is behind its first hook.
	step  *Step
	later bool

	// hook and base say which base chain runs; stack and depth where in it the packet is, and op which expression is next.
	hook, base, op int
	stack          [maxDepth]frame
	// steps counts the rules on the way.
	steps int
	depth int
}

// clone returns a copy for another lot.
func (m *machine) clone() *machine {
	other := *m
	if m.step != nil {
		step := *m.step
		other.step = &step
	}
	return &other
}

// walker follows one packet.
type walker struct {
	rules  *Rules
	family ipfamily.Family
	packet *Packet
	memory []update
	asked  *Asked
	queue  []*machine
	out    outcomes
	// only, if not nil, says which base chains of the first hook are run, and that no other hook is. By is the chain of
	// the last rule that refused or translated the packet.
	only func(*nfChain) bool
	by   *nfChain
	// handle is that of the rule, 0 for the policy of a chain, and untracked says that the rule keeps connection tracking
	// from the packet.
	handle    uint64
	untracked bool
	// trace, if not nil, gathers what is not known of rules, which then do not match.
	trace *Trace
}

// Walk implements Walker.
func (r *Rules) Walk(p Packet, m Memory, asked *Asked) ([]Outcome, error) {
	w := walker{rules: r, packet: &p, asked: asked}
	w.memory, _ = m.([]update)
	err := w.walk()
	return w.out.sorted(), err
}

// walk follows the packet, and at each lot all that it may be.
func (w *walker) walk() error {
	w.family = ipfamily.Of(w.packet.Destination.Addr())
	for w.queue = append(w.queue, w.machine()); len(w.queue) > 0; {
		m := w.queue[len(w.queue)-1]
		w.queue = w.queue[:len(w.queue)-1]
		if err := w.run(m); err != nil {
			return err
		}
	}
	return nil
}

// machine builds the packet.
func (w *walker) machine() *machine {
	p := w.packet
	m := &machine{origDest: p.Destination.Addr(), origPort: p.Destination.Port(), iif: p.Interface, chance: Certain}
	if w.family == ipfamily.IPv4 {
		m.network[9] = byte(p.Protocol)
	} else {
		m.network[6] = byte(p.Protocol)
	}
	copy(m.network[w.sourceAt():], p.Source.Addr().AsSlice())
	binary.BigEndian.PutUint16(m.transport[0:], p.Source.Port())
	w.setDestination(m, p.Destination)
	const syn, echo, echoV6 = 2, 8, 128
	switch p.Protocol {
	case TCP:
		m.transport[tcpFlagsAt] = syn
		binary.BigEndian.PutUint32(m.transport[4:], 1)
	case ICMP:
		m.transport[0] = echo
	case ICMPv6:
		m.transport[0] = echoV6
	}
	if m.hook = hookIngress; p.Interface == "" {
		m.hook = hookOutput
	}
	w.enter(m)
	return m
}

func (w *walker) sourceAt() int      { return ipfamily.Per[int]{12, 8}[w.family] }
func (w *walker) destinationAt() int { return w.sourceAt() + w.family.AddrLen() }

func (w *walker) setDestination(m *machine, to netip.AddrPort) {
	copy(m.network[w.destinationAt():], to.Addr().AsSlice())
	binary.BigEndian.PutUint16(m.transport[2:], to.Port())
}

func (w *walker) destination(m *machine) netip.AddrPort {
	a, _ := netip.AddrFromSlice(m.network[w.destinationAt():][:w.family.AddrLen()])
	return netip.AddrPortFrom(a, binary.BigEndian.Uint16(m.transport[2:]))
}

// enter goes to the first rule of the next base chain from m.base on. If there is none, m.base is beyond the last one.
func (w *walker) enter(m *machine) {
	chains := w.rules.hooks[w.family][m.hook]
	for ; m.base < len(chains); m.base++ {
		c := chains[m.base]
		if m.hook == hookIngress && !slices.Contains(c.devices, m.iif) {
			continue
		}
		if (!c.nat || !m.natDone && !m.looped && !m.untracked) && (w.only == nil || w.only(c)) {
			m.stack[0], m.depth, m.op = frame{chain: c}, 0, 0
			return
		}
	}
}

// nextHook moves to the next hook on the packet's way; false at its end.
func (w *walker) nextHook(m *machine) bool {
	if w.only != nil {
		return false
	}
	if m.hook == hookIngress {
		m.hook, m.base = hookPrerouting, 0
		return true
	}
	local := w.rules.host.local(w.destination(m).Addr())
	switch m.hook {
	case hookPrerouting:
		if m.hook = hookForward; local {
			m.hook = hookInput
		} else if w.family == ipfamily.IPv4 && !w.bridged(m) {
			m.prio = 0 // IPv4 forwarding sets it by the type of service, which is 0 here; IPv6 leaves it
		}
	case hookForward, hookOutput:
		m.hook = hookPostrouting
	case hookPostrouting:
		if !local || w.packet.Interface != "" {
			return false
		}
		m.hook, m.iif, m.looped = hookPrerouting, loopback, true
	case hookInput:
		return false
	}
	m.base, m.natDone, m.later = 0, false, true
	return true
}

// run follows a machine to its end. Others that part from it at a lot are queued.
func (w *walker) run(m *machine) error {
	for {
		if m.base >= len(w.rules.hooks[w.family][m.hook]) {
			if !w.nextHook(m) {
				w.end(m, Ending{})
				return nil
			}
			w.enter(m)
			continue
		}
		ended, err := w.base(m)
		if ended || err != nil {
			return err
		}
		m.base++
		w.enter(m)
	}
}

// end records what happened to a packet.
func (w *walker) end(m *machine, e Ending) {
	if e.Verdict == Untouched {
		if m.translated {
			e.Verdict, e.To, e.Recalled = Sent, w.destination(m), m.recalled
			for _, u := range m.updates {
				if !u.ingress && !u.gone {
					e.Remembered = uint32((u.timeout + 500) / 1000)
				}
			}
		}
		e.Masqueraded = m.masquerade
	}
	o := Outcome{Ending: e, Chance: m.chance, Last: m.step}
	if len(m.updates) > 0 {
		o.Memory = m.updates
	}
	w.out.add(o)
}

// result is how the evaluation of a rule, or of an expression, goes on.
type result uint8

const (
	goOn     result = iota
	noMatch         // the rule does not match
	decided         // a verdict was carried out
	accepted        // the base chain is done
	ended           // the packet is at its end
)

// base runs a base chain from where the machine is, and reports whether the packet is at its end.
func (w *walker) base(m *machine) (bool, error) {
	for {
		f := &m.stack[m.depth]
		if err := f.chain.loaded(); err != nil {
			return true, fmt.Errorf("%s: %w", f.chain, err)
		}
		if f.rule >= len(f.chain.rules) {
			if m.depth == 0 {
				return w.policy(m), nil
			}
			m.depth--
			continue
		}
		if m.steps++; m.steps > maxSteps {
			return true, fmt.Errorf("%s: chains lead in a circle", f.chain)
		}
		chain, rule := f.chain, f.rule
		if w.trace != nil && m.op == 0 {
			m.step = &Step{Before: m.step, Chain: chain.name, Rule: rule, Later: m.later || m.translated}
		}
		res, err := w.rule(m, &chain.rules[rule])
		if err != nil {
			err = fmt.Errorf("%s, rule %d: %w", chain, chain.rules[rule].handle, err)
			if w.trace == nil || w.trace.failed != nil {
				return true, err
			}
			w.trace.unclear(err)
			res = noMatch
		}
		if m.step != nil {
			m.step.Matched = res != noMatch
		}
		switch res {
		case goOn, noMatch:
			f.rule++
		case accepted:
			if m.translated {
				w.by, w.handle = chain, chain.rules[rule].handle
			}
			return false, nil
		case ended:
			w.by, w.handle = chain, chain.rules[rule].handle
			return true, nil
		}
		m.op = 0
	}
}

// policy ends a base chain, and reports whether the packet is at its end by that.
func (w *walker) policy(m *machine) bool {
	c := w.rules.hooks[w.family][m.hook][m.base]
	if c.drops {
		w.by, w.handle = c, 0
		w.end(m, Ending{Verdict: Dropped})
	}
	return c.drops
}

// rule evaluates a rule from m.op on.
func (w *walker) rule(m *machine, r *nfRule) (result, error) {
	for m.op < len(r.ops) {
		op := &r.ops[m.op]
		m.op++
		res, err := w.evaluate(m, op)
		if res != goOn || err != nil {
			return res, err
		}
	}
	return goOn, nil
}

// match turns a condition into a result.
func match(ok bool) (result, error) {
	if ok {
		return goOn, nil
	}
	return noMatch, nil
}

func (w *walker) evaluate(m *machine, op *nfOp) (result, error) {
	switch op.kind {
	case opMeta:
		return w.meta(m, op)
	case opSetMeta:
		v := binary.NativeEndian.Uint32(m.regs[op.source:])
		if op.what == unix.NFT_META_MARK {
			m.mark = v
		} else {
			m.prio = v
		}
	case opPayload:
		return w.payload(m, op)
	case opCompare:
		w.askCompare(op)
		return match(compareHolds(op.what, bytes.Compare(m.regs[op.source:op.source+op.n], op.data)))
	case opRange:
		w.ask(op, op.data, op.high)
		v := m.regs[op.source : op.source+op.n]
		return match((bytes.Compare(v, op.data) >= 0 && bytes.Compare(v, op.high) <= 0) != op.inverted)
	case opBitwise:
		for i := range op.n {
			m.regs[op.dest+i] = m.regs[op.source+i]&op.data[i] ^ op.high[i]
		}
	case opByteorder:
		for i := 0; i+op.offset <= op.n; i += op.offset {
			slices.Reverse(m.regs[op.dest+i : op.dest+i+copy(m.regs[op.dest+i:op.dest+i+op.offset], m.regs[op.source+i:])])
		}
	case opImmediate:
		m.load(op.dest, op.data)
	case opVerdict:
		return w.verdict(m, op.code, op.chain)
	case opLookup:
		return w.lookup(m, op)
	case opForward:
		a, _ := netip.AddrFromSlice(m.regs[op.source : op.source+op.n])
		w.end(m, Ending{Verdict: Forwarded, To: netip.AddrPortFrom(a, 0)})
		return ended, nil
	default:
		return w.act(m, op)
	}
	return goOn, nil
}

// load puts bytes into registers, and zeroes behind them up to the register's end.
func (m *machine) load(at int, data []byte) {
	n := copy(m.regs[at:], data)
	for ; n%4 != 0 && at+n < registerBytes; n++ {
		m.regs[at+n] = 0
	}
}

// compareHolds evaluates an operator; order is -1, 0 or 1.
func compareHolds(operator uint8, order int) bool {
	switch operator {
	case unix.NFT_CMP_EQ:
		return order == 0
	case unix.NFT_CMP_NEQ:
		return order != 0
	case unix.NFT_CMP_LT:
		return order < 0
	case unix.NFT_CMP_LTE:
		return order <= 0
	case unix.NFT_CMP_GT:
		return order > 0
	}
	return order >= 0
}

func (w *walker) meta(m *machine, op *nfOp) (result, error) {
	switch op.what {
	case unix.NFT_META_PROTOCOL:
		m.load(op.dest, ipfamily.Per[[]byte]{{0x08, 0x00}, {0x86, 0xdd}}[w.family])
	case unix.NFT_META_NFPROTO:
		m.load(op.dest, []byte{w.family.NFProto()})
	case unix.NFT_META_L4PROTO:
		m.load(op.dest, []byte{byte(w.packet.Protocol)})
	case unix.NFT_META_PRIORITY:
		m.load(op.dest, native32(m.prio))
	case unix.NFT_META_MARK:
		m.load(op.dest, native32(m.mark))
	case unix.NFT_META_IIF, unix.NFT_META_IIFNAME, unix.NFT_META_OIF, unix.NFT_META_OIFNAME:
		return w.loadLink(m, op)
	case unix.NFT_META_PKTTYPE:
		if m.hook != hookIngress {
			return noMatch, errors.New("for whom the frame is, is not known")
		}
		m.load(op.dest, []byte{unix.PACKET_HOST})
	case unix.NFT_META_IIFTYPE:
		if m.hook != hookIngress {
			return noMatch, errors.New("the type of the interface is not known")
		}
		const ethernet = 1 // as the devices are for whose ingress there are rules
		m.load(op.dest, binary.NativeEndian.AppendUint16(nil, ethernet))
	}
	return goOn, nil
}

// nfLink is an interface; the zero nfLink stands for none. The name is empty if it is not known.
type nfLink struct {
	name  string
	index uint32
}

// links returns the interfaces by which the packet came in and leaves, as the hook has them.
func (w *walker) links(m *machine) (in, out nfLink) {
	lo := nfLink{loopback, 1}
	switch m.iif {
	case "":
	case loopback:
		in = lo
	default:
		in = nfLink{m.iif, cmp.Or(w.packet.Index, interfaceIndex)}
	}
	switch {
	case m.hook == hookIngress || m.hook == hookPrerouting || m.hook == hookInput:
		return in, nfLink{}
	case w.bridged(m) && m.hook == hookPostrouting:
		return nfLink{}, in
	case w.bridged(m):
		return in, in
	case w.rules.host.local(w.destination(m).Addr()):
		return in, lo
	}
	return in, nfLink{w.packet.Out, cmp.Or(w.packet.OutIndex, interfaceIndex)}
}

// bridged reports whether the packet stays on the bridge by which it came in.
func (w *walker) bridged(m *machine) bool {
	to := w.destination(m).Addr()
	by := w.rules.host.Bridged
	return by != nil && m.iif != "" && to != m.origDest && by(m.iif, to)
}

// loadLink loads the name or the index of an interface.
func (w *walker) loadLink(m *machine, op *nfOp) (result, error) {
	link, out := w.links(m)
	if op.what == unix.NFT_META_OIF || op.what == unix.NFT_META_OIFNAME {
		link = out
	}
	switch {
	case op.what == unix.NFT_META_IIF || op.what == unix.NFT_META_OIF:
		m.load(op.dest, native32(link.index))
	case link.name == "" && link.index != 0:
		return noMatch, errors.New("the interface that the packet leaves by is not known")
	default:
		m.load(op.dest, interfaceName(link.name))
	}
	return goOn, nil
}

// loopback is the name of the loopback interface, whose index is 1.
const loopback = "lo"

// interfaceIndex stands for the index of every interface: a rule that names an interface by its index means one that
// is not known here.
const interfaceIndex = 1<<31 - 1

func (w *walker) payload(m *machine, op *nfOp) (result, error) {
	switch op.what {
	case baseLink:
		if m.iif == "" { // a packet of this host has no link-layer header before it has left
			return noMatch, nil
		}
		sender := w.packet.MAC[:]
		if w.packet.MAC == [6]byte{} && m.iif != loopback {
			sender = []byte{2, 0, 0, 0, 0, 1}
		}
		m.load(op.dest, sender[op.offset-6:op.offset-6+op.n])
	case baseNetwork:
		m.load(op.dest, m.network[op.offset:op.offset+op.n])
	case baseTransport:
		if w.packet.Protocol != TCP && op.offset+op.n > 4 {
			return noMatch, errors.New("payload of a header that is not TCP's")
		}
		m.load(op.dest, m.transport[op.offset:op.offset+op.n])
	}
	return goOn, nil
}

// lookup looks a key up in a set or map.
func (w *walker) lookup(m *machine, op *nfOp) (result, error) {
	key := m.regs[op.source : op.source+op.n]
	if op.set.dynamic() {
		return w.remembered(m, op, key)
	}
	w.askSet(op, key)
	e, err := w.find(m, op, key)
	found := e != nil
	switch {
	case err != nil:
		return noMatch, err
	case found && e.odd == OverLimit:
		return noMatch, nil
	case found && e.odd != "":
		return noMatch, fmt.Errorf("what %s does is not known", e.odd)
	case found == op.inverted:
		return noMatch, nil
	case !found || !op.isMap:
		return goOn, nil
	case e.data != nil:
		m.load(op.dest, e.data)
		return goOn, nil
	}
	return w.verdict(m, e.code, e.chain)
}

// find looks a key up for an expression.
func (w *walker) find(m *machine, op *nfOp, key []byte) (e *nfElement, err error) {
	if op.set.read == nil {
		return op.set.find(key), nil
	}
	found, err := w.read(op.set, [][]byte{key})
	if err != nil || found[0] == nil {
		return nil, err
	}
	keys := m.alike
	if m.alike = nil; keys == nil {
		keys = [][]byte{bytes.Clone(key)}
	}
	if m.step != nil {
		m.step.Found = append(slices.Clip(m.step.Found), Found{op.set.name, keys})
	}
	return found[0], nil
}

// read reads elements of a set by their keys.
func (w *walker) read(s *nfSet, keys [][]byte) ([]*nfElement, error) {
	found, err := s.read(keys)
	if w.trace != nil {
		w.trace.failed = err
	}
	return found, err
}

// remembered looks into a dynamic set, which holds only what the client's earlier packets left, unless its elements are
// read.
func (w *walker) remembered(m *machine, op *nfOp, key []byte) (result, error) {
	for _, list := range [][]update{m.updates, w.memory} {
		for i := len(list) - 1; i >= 0; i-- {
			if u := &list[i]; u.set == op.set && u.key == string(key) {
				if u.gone {
					return match(op.inverted)
				}
				m.recalled = m.recalled || m.hook != hookIngress
				if op.isMap {
					m.load(op.dest, []byte(u.data))
				}
				return match(!op.inverted)
			}
		}
	}
	if op.set.read == nil {
		return match(op.inverted)
	}
	e, err := w.find(m, op, key)
	if err != nil {
		return noMatch, err
	}
	if e != nil && op.isMap {
		m.recalled = m.recalled || m.hook != hookIngress
		m.load(op.dest, e.data)
	}
	return match((e != nil) != op.inverted)
}

// verdict carries a verdict out.
func (w *walker) verdict(m *machine, code int32, chain *nfChain) (result, error) {
	switch code {
	case codeContinue:
		return goOn, nil
	case codeBreak:
		return noMatch, nil
	case codeAccept:
		return accepted, nil
	case codeDrop:
		w.end(m, Ending{Verdict: Dropped})
		return ended, nil
	case codeReturn:
		if m.depth == 0 {
			m.stack[0].rule = len(m.stack[0].chain.rules)
			return decided, nil
		}
		m.depth--
		return decided, nil
	case codeJump, codeGoto:
		m.stack[m.depth].rule++
		if code == codeJump {
			if m.depth++; m.depth == maxDepth {
				return noMatch, errors.New("chains call each other too deep")
			}
		}
		m.stack[m.depth] = frame{chain: chain}
		return decided, nil
	}
	return noMatch, fmt.Errorf("verdict %d", code)
}

// act carries out what chooses, translates or refuses.
func (w *walker) act(m *machine, op *nfOp) (result, error) {
	switch op.kind {
	case opLot:
		return w.lot(m, op)
	case opHash:
		// Of many clients, each value is as likely as another. One that is traced has its address, and any port.
		if op.isLot && (w.trace == nil || op.n > w.family.AddrLen()) {
			return w.lot(m, op)
		}
		m.load(op.dest, native32(uint32(op.offset)+hashSlot(m.regs[op.source:op.source+op.n], op.seed, op.modulus)))
	case opUpdate:
		m.update(op)
	case opNAT:
		a, _ := netip.AddrFromSlice(m.regs[op.source : op.source+w.family.AddrLen()])
		to := netip.AddrPortFrom(a, w.destination(m).Port())
		if op.port >= 0 {
			to = netip.AddrPortFrom(a, binary.BigEndian.Uint16(m.regs[op.port:]))
		}
		w.setDestination(m, to)
		m.translated, m.natDone = true, true
		return accepted, nil
	case opMasquerade:
		m.masquerade, m.natDone = true, true
		return accepted, nil
	case opReject:
		w.end(m, Ending{Verdict: Rejected, Reject: rejectName(w.family, op.what, op.n)})
		return ended, nil
	case opCT:
		return w.conntrack(m, op)
	case opAddressType:
		return w.addressType(m, op)
	case opLocalAddress:
		a := w.destination(m).Addr()
		if op.what == 1 {
			a = w.packet.Source.Addr()
		}
		return match(w.rules.host.local(a) != op.inverted)
	case opNoTrack:
		w.noTrack(m)
	case opMark, opSetMark, opState:
		return w.xtables(m, op)
	case opUnknown:
		if op.unknown == beyondSets {
			return noMatch, fmt.Errorf("%w: there is %s", ErrTooMany, beyondSets)
		}
		return noMatch, fmt.Errorf("what %s does is not known", op.unknown)
	}
	return goOn, nil
}

// update adds an element to a dynamic set, or takes it out.
func (m *machine) update(op *nfOp) {
	u := update{set: op.set, key: string(m.regs[op.source : op.source+op.n]), timeout: op.timeout,
		ingress: m.hook == hookIngress, gone: op.what == dynsetDelete}
	if op.dest >= 0 {
		u.data = string(m.regs[op.dest : op.dest+op.set.dataLen])
	}
	m.updates = append(slices.Clip(m.updates), u)
}

// noTrack keeps connection tracking from a packet that it has not seen.
func (w *walker) noTrack(m *machine) {
	if !w.before(m) || m.untracked {
		return
	}
	f := m.stack[m.depth]
	m.untracked, w.untracked = true, true
	w.by, w.handle = f.chain, f.chain.rules[f.rule].handle
}

// before reports whether connection tracking has not seen the packet yet.
func (w *walker) before(m *machine) bool {
	if m.hook == hookIngress {
		return true
	}
	first := (m.hook == hookPrerouting || m.hook == hookOutput) && !m.looped
	return first && w.rules.hooks[w.family][m.hook][m.base].at() < conntrackPriority
}

// xtables carries out what only iptables has.
func (w *walker) xtables(m *machine, op *nfOp) (result, error) {
	switch op.kind {
	case opMark:
		return match((m.mark&op.modulus == op.seed) != op.inverted)
	case opState:
		return match((w.states(m)&op.seed != 0) != op.inverted)
	}
	m.mark = m.mark&^op.modulus ^ op.seed
	return goOn, nil
}

// states returns the state of the packet's connection as iptables' match conntrack has it, by bits.
func (w *walker) states(m *machine) (bits uint32) {
	const invalid, isNew, sourceNAT, destinationNAT, untracked = 1, 1 << 3, 1 << 6, 1 << 7, 1 << 8
	switch {
	case m.untracked:
		return untracked
	case w.before(m):
		return invalid
	}
	bits = isNew
	if w.destination(m) != netip.AddrPortFrom(m.origDest, m.origPort) { // to what it was is no translation
		bits |= destinationNAT
	}
	if m.masquerade {
		bits |= sourceNAT
	}
	return bits
}

func (w *walker) conntrack(m *machine, op *nfOp) (result, error) {
	if w.before(m) || m.untracked {
		if op.what != unix.NFT_CT_STATE {
			return noMatch, nil
		}
		const invalid, untracked = 1, 64
		state := uint32(invalid)
		if m.untracked {
			state = untracked
		}
		m.load(op.dest, native32(state))
		return goOn, nil
	}
	const (
		isNew          = 8
		sourceNAT      = 16
		destinationNAT = 32
	)
	switch op.what {
	case unix.NFT_CT_STATE:
		m.load(op.dest, native32(isNew))
	case unix.NFT_CT_DIRECTION:
		m.load(op.dest, []byte{0})
	case unix.NFT_CT_STATUS:
		status := uint32(0)
		if w.destination(m) != netip.AddrPortFrom(m.origDest, m.origPort) { // to what it was is no translation
			status |= destinationNAT
		}
		if m.masquerade {
			status |= sourceNAT
		}
		m.load(op.dest, native32(status))
	case unix.NFT_CT_DST, unix.NFT_CT_DST_IP, unix.NFT_CT_DST_IP6:
		m.load(op.dest, m.origDest.AsSlice())
	case unix.NFT_CT_PROTO_DST:
		m.load(op.dest, binary.BigEndian.AppendUint16(nil, m.origPort))
	case unix.NFT_CT_SRC, unix.NFT_CT_SRC_IP, unix.NFT_CT_SRC_IP6:
		m.load(op.dest, w.packet.Source.Addr().AsSlice())
	case unix.NFT_CT_PROTO_SRC:
		m.load(op.dest, m.transport[0:2])
	}
	return goOn, nil
}

func (w *walker) addressType(m *machine, op *nfOp) (result, error) {
	a := w.destination(m).Addr()
	if op.inverted { // the source's
		a = w.packet.Source.Addr()
	}
	kind := uint32(unix.RTN_UNICAST)
	switch {
	case w.rules.host.local(a):
		kind = unix.RTN_LOCAL
	case a.IsMulticast() || a.IsUnspecified() || a == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return noMatch, fmt.Errorf("the type of the address %s is not known", a)
	}
	m.load(op.dest, native32(kind))
	return goOn, nil
}

// maxAskedAddrs bounds how large a set of single sources may be of which each is noted.
const maxAskedAddrs = 1024

// askSet notes the ranges of a set that a lookup compares with the source.
func (w *walker) askSet(op *nfOp, key []byte) {
	if w.asked == nil || op.sourceAt < 0 {
		return
	}
	if n := len(op.set.exact); op.set.keyLen == w.family.AddrLen() && n > 0 && n <= maxAskedAddrs {
		for key := range op.set.exact {
			w.addInterval([]byte(key), []byte(key))
		}
	}
	list := op.set.ranges
	if len(op.set.fields) > 1 {
		list = op.set.candidates(key)
	}
	for _, r := range list {
		w.addInterval(r.low[op.sourceAt:], r.high[op.sourceAt:])
	}
}

// askCompare notes a range that a comparison is about.
func (w *walker) askCompare(op *nfOp) {
	if w.asked == nil || op.sourceAt < 0 {
		return
	}
	low := make([]byte, w.family.AddrLen())
	copy(low, op.data)
	high := bytes.Clone(low)
	for bit := op.bits; bit < w.family.Bits(); bit++ {
		high[bit/8] |= 0x80 >> (bit % 8)
	}
	w.addInterval(low, high)
}

func (w *walker) ask(op *nfOp, low, high []byte) {
	if w.asked != nil && op.sourceAt >= 0 {
		w.addInterval(low, high)
	}
}

func (w *walker) addInterval(low, high []byte) {
	n := w.family.AddrLen()
	if len(low) < n || len(high) < n {
		return
	}
	first, _ := netip.AddrFromSlice(low[:n])
	last, _ := netip.AddrFromSlice(high[:n])
	w.asked.add(Interval{first, last})
}
