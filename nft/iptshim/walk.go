package iptshim

import (
	"fmt"
	"math"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Packet is the first packet of a connection.
type Packet = dataplane.Packet

// Host is what a walk asks of the machine besides its rules.
type Host struct {
	// Here says which addresses are this node's own. Loopback addresses are in any case.
	Here func(netip.Addr) bool
	// Recent says whether a list of xt_recent, such as "KUBE-SEP-...", holds a sender who was seen within that time;
	// nil means that nobody is remembered.
	Recent func(list string, sender netip.Addr, within time.Duration) bool
}

// Walk is the way of a packet through the rules.
type Walk struct {
	// Steps are the rules that looked at the packet until it had a destination, or none, in their order. Where it is
	// left to chance which of several endpoints it has, those before the choice and all that are asked for one.
	Steps []Step
	// Endings are what can become of it; their chances add up to 1.
	Endings []Ending
	// Unclear says of rules that the packet met what they do is not known, since others wrote them. They are taken for
	// rules that do not match.
	Unclear []string

	protocol snapshot.Protocol
}

// Step is one rule on a packet's way.
type Step struct {
	Table Table
	// Chain and Rule are as iptables-save prints them: "-A Chain" and then Rule.
	Chain, Rule string
	// Matched says that the rule held for the packet.
	Matched bool
}

// String gives a line as iptables-save has it.
func (s Step) String() string { return string(s.Table) + " -A " + s.Chain + " " + s.Rule }

// Ending is something that can become of a packet.
type Ending struct {
	dataplane.Ending
	// List is the name under which xt_recent remembers the sender, if it will.
	List string
	// Rule is what decided, if the packet is rejected or dropped.
	Rule Step
}

// Walk follows a packet through the rules of its family as the kernel would: through table nat, and what is not
// translated there through table filter. Of the chains that are iptables' own only the jumps to ours count.
func (s *Saved) Walk(p Packet, h Host) (*Walk, error) {
	w := &tracer{saved: s, host: h, walk: &Walk{protocol: p.Protocol}, timeouts: map[string]time.Duration{}}
	hook := "PREROUTING"
	if p.Interface == "" {
		hook = "OUTPUT"
	}
	rest, err := w.chain(NAT, hook, packetState{Packet: p, share: 1, of: 1})
	if err != nil {
		return nil, err
	}
	for _, t := range rest {
		if err := w.traceFilter(t); err != nil {
			return nil, err
		}
	}
	return w.walk, nil
}

// tracer holds what does not change during a trace.
type tracer struct {
	saved *Saved
	host  Host
	walk  *Walk
	depth int
	// timeouts holds how long each list of xt_recent that was looked up remembers.
	timeouts map[string]time.Duration
}

// packetState is a packet at one point of its trace, or a part of its chance.
type packetState struct {
	Packet
	mark       uint32
	share, of  int
	list       string
	remembered bool
}

// traceFilter traces a packet that was not translated through table filter.
func (w *tracer) traceFilter(t packetState) error {
	var hooks []string
	here := w.isLocal(t.Destination)
	switch {
	case t.Interface == "" && here:
		hooks = []string{"OUTPUT", "INPUT"}
	case t.Interface == "":
		hooks = []string{"OUTPUT"}
	case here:
		hooks = []string{"INPUT"}
	default:
		hooks = []string{"FORWARD"}
	}
	rest := []packetState{t}
	for _, hook := range hooks {
		if len(rest) == 0 {
			return nil
		}
		var err error
		if rest, err = w.chain(Filter, hook, rest[0]); err != nil {
			return err
		}
	}
	for _, t := range rest {
		w.addEnding(t, Ending{Ending: dataplane.Ending{Outcome: dataplane.Untouched}})
	}
	return nil
}

func (w *tracer) isLocal(a netip.Addr) bool { return a.IsLoopback() || w.host.Here(a) }

func (w *tracer) addEnding(t packetState, e Ending) {
	e.Share, e.Of = t.share, t.of
	w.walk.Endings = append(w.walk.Endings, e)
}

// maxDepth guards against rules of others that lead round in a circle.
const maxDepth = 64

// chain traces a packet through a chain and returns what is left of it at the end: nothing, or parts of its chance.
func (w *tracer) chain(table Table, name string, t packetState) ([]packetState, error) {
	if w.depth++; w.depth > maxDepth {
		return nil, fmt.Errorf("iptables: the chains of table %s lead round in a circle", table)
	}
	defer func() { w.depth-- }()
	tables := w.saved.tables[table]
	if tables == nil {
		return []packetState{t}, nil
	}
	var returned []packetState
	here := []packetState{t}
	for i := range tables.chains[name] {
		r := &tables.chains[name][i]
		if _, builtin := tables.builtin[name]; (builtin || isBuiltin(name)) && !isOurs(table, r.target()) &&
			r.target() != loopbackChain {
			continue
		}
		var next []packetState
		for _, t := range here {
			on, back, err := w.rule(table, r, t)
			if err != nil {
				return nil, err
			}
			next, returned = append(next, on...), append(returned, back...)
		}
		here = next
	}
	return append(here, returned...), nil
}

// isBuiltin reports whether the kernel calls a chain: the text of a Model does not declare those.
func isBuiltin(name string) bool {
	return slices.Contains([]string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"}, name)
}

// rule traces a packet through one rule. on are the parts that continue behind it, back those that leave the chain.
func (w *tracer) rule(table Table, r *savedRule, t packetState) (on, back []packetState, err error) {
	step := Step{Table: table, Chain: r.chain, Rule: r.line}
	c, err := r.conditions()
	if err != nil {
		w.addUnclear("%s: %v", step, err)
		w.addStep(step)
		return []packetState{t}, nil, nil
	}
	if step.Matched = w.matchesRule(c, &t); !step.Matched {
		w.addStep(step)
		return []packetState{t}, nil, nil
	}
	w.addStep(step)
	if c.of > 0 {
		rest := t
		rest.share, rest.of = t.share*(c.of-c.chance), t.of*c.of
		rest.reduce()
		t.share, t.of = t.share*c.chance, t.of*c.of
		t.reduce()
		on = append(on, rest)
	}
	switch c.target {
	case "":
		return append(on, t), nil, nil
	case "RETURN":
		return on, []packetState{t}, nil
	case "ACCEPT":
		w.addEnding(t, Ending{Ending: dataplane.Ending{Outcome: dataplane.Untouched}, Rule: step})
		return on, nil, nil
	case "DROP":
		w.addEnding(t, Ending{Ending: dataplane.Ending{Outcome: dataplane.Dropped}, Rule: step})
		return on, nil, nil
	case "REJECT":
		w.addEnding(t, Ending{Ending: dataplane.Ending{Outcome: dataplane.Rejected}, Rule: step})
		return on, nil, nil
	case "MARK":
		t.mark = t.mark&^c.markMask ^ c.markValue
		return append(on, t), nil, nil
	case "DNAT":
		w.addDNATEnding(t, c)
		return on, nil, nil
	}
	if !w.saved.has(table, c.target) {
		w.addUnclear("%s leads to a chain that is not there", step)
		return append(on, t), nil, nil
	}
	rest, err := w.chain(table, c.target, t)
	return append(on, rest...), nil, err
}

func (w *tracer) addStep(s Step) { w.walk.Steps = append(w.walk.Steps, s) }

func (w *tracer) addUnclear(format string, args ...any) {
	if text := fmt.Sprintf(format, args...); !slices.Contains(w.walk.Unclear, text) {
		w.walk.Unclear = append(w.walk.Unclear, text)
	}
}

// reduce shortens the fraction of the chance, and rounds it if it would become too long for another factor.
func (t *packetState) reduce() {
	a, b := t.share, t.of
	for b != 0 {
		a, b = b, a%b
	}
	t.share, t.of = t.share/a, t.of/a
	for t.of > math.MaxInt32 {
		t.share, t.of = max(t.share/2, 1), t.of/2
	}
}

// fractionOf returns the shortest fraction that iptables-save prints as a probability, by its continued fraction.
func fractionOf(p float64) (share, of int) {
	const precision = 1.0 / (1 << 31)
	share, of = 1, 0
	lastShare, lastOf, rest := 0, 1, p
	for range 32 {
		whole := int(rest)
		share, lastShare = whole*share+lastShare, share
		of, lastOf = whole*of+lastOf, of
		if math.Abs(float64(share)/float64(of)-p) <= precision || rest == float64(whole) {
			break
		}
		rest = 1 / (rest - float64(whole))
	}
	return share, of
}

// addDNATEnding records that a packet is sent to an endpoint. It is masqueraded when it leaves, if it leaves.
func (w *tracer) addDNATEnding(t packetState, c *conditions) {
	e := Ending{Ending: dataplane.Ending{Outcome: dataplane.Sent, Endpoint: c.to, Remembered: t.remembered}}
	if t.list != "" {
		e.List, e.Remember = t.list, w.timeouts[t.list]
	}
	if t.Interface == "" || !w.isLocal(c.to.Addr()) {
		e.Masquerade = w.masquerades(t.mark)
		e.Hairpin = e.Masquerade && t.Source == c.to.Addr()
	}
	w.addEnding(t, e)
}

// masquerades asks KUBE-POSTROUTING about a mark.
func (w *tracer) masquerades(mark uint32) bool {
	t := w.saved.tables[NAT]
	if !slices.ContainsFunc(t.chains["POSTROUTING"], func(r savedRule) bool { return r.target() == postroutingChain }) {
		return false
	}
	for i := range t.chains[postroutingChain] {
		c, err := t.chains[postroutingChain][i].conditions()
		if err != nil || c.hasMark && (mark&c.ifMask == c.ifMark) == c.notMark {
			continue
		}
		switch c.target {
		case "RETURN":
			return false
		case "MASQUERADE":
			return true
		}
	}
	return false
}

// matchesRule reports whether a packet matches a rule's conditions, except chance.
func (w *tracer) matchesRule(c *conditions, t *packetState) bool {
	in := t.Interface
	ok := (!c.source.IsValid() || c.source.Contains(t.Source) != c.notSource) &&
		(!c.destination.IsValid() || c.destination.Contains(t.Destination) != c.notDestination) &&
		(c.in == "" || sameInterface(c.in, in) != c.notIn) &&
		(c.protocol == "" || c.protocol == t.Protocol.String()) &&
		(!c.hasPorts || c.low <= t.Port && t.Port <= c.high) &&
		(!c.fromNode || w.isLocal(t.Source)) && (!c.toNode || w.isLocal(t.Destination) != c.notToNode) &&
		(len(c.states) == 0 || slices.Contains(c.states, "NEW") != c.notState) &&
		(!c.hasMark || (t.mark&c.ifMask == c.ifMark) != c.notMark)
	if !ok {
		return false
	}
	switch c.recent {
	case "--rcheck":
		w.timeouts[c.list] = c.within
		if w.host.Recent == nil || !w.host.Recent(c.list, t.Source, c.within) {
			return false
		}
		t.remembered = true
	case "--set":
		t.list = c.list
	}
	return true
}

func sameInterface(pattern, name string) bool {
	if p, ok := strings.CutSuffix(pattern, "+"); ok {
		return name != "" && strings.HasPrefix(name, p)
	}
	return pattern == name
}

// conditions are a rule's matches and target, as far as rules of ours have such.
type conditions struct {
	source, destination       netip.Prefix
	notSource, notDestination bool
	in                        string
	notIn                     bool
	protocol                  string
	hasPorts                  bool
	low, high                 uint16
	fromNode                  bool
	toNode, notToNode         bool
	states                    []string
	notState                  bool
	hasMark, notMark          bool
	ifMark, ifMask            uint32
	// chance of that many packets match; 0 of 0 means all.
	chance, of int
	recent     string
	list       string
	within     time.Duration

	target              string
	markValue, markMask uint32
	to                  netip.AddrPort
}

// conditions reads a rule. The error says which of its words are not known.
func (r *savedRule) conditions() (*conditions, error) {
	c := &conditions{}
	for i := 0; i < len(r.words); i++ {
		not := r.words[i] == "!" && i+1 < len(r.words)
		if not {
			i++
		}
		word, next := r.words[i], ""
		if i+1 < len(r.words) {
			next = r.words[i+1]
		}
		used, err := c.word(word, next, not)
		if err != nil {
			return nil, fmt.Errorf("%s %s: %w", word, next, err)
		}
		i += used
	}
	return c, nil
}

// word reads a word with the one behind it, and says whether it used that.
func (c *conditions) word(word, next string, not bool) (used int, err error) {
	switch word {
	case "-m", "--comment", "--mode", "--mask", "--reject-with":
		return 1, nil
	case "--rsource", "--reap", "--random-fully":
		return 0, nil
	case "-s":
		c.source, err = readPrefix(next)
		c.notSource = not
	case "-d":
		c.destination, err = readPrefix(next)
		c.notDestination = not
	case "-i":
		c.in, c.notIn = next, not
	case "-p":
		c.protocol = next
	case "--dport":
		c.hasPorts = true
		c.low, c.high, err = readPorts(next)
	case "--src-type", "--dst-type":
		if next != "LOCAL" || not && word == "--src-type" {
			return 0, errUnknown
		}
		c.notToNode = c.notToNode || not
		c.fromNode, c.toNode = c.fromNode || word == "--src-type", c.toNode || word == "--dst-type"
	case "--ctstate":
		c.states, c.notState = strings.Split(next, ","), not
	case "--mark":
		c.hasMark, c.notMark = true, not
		c.ifMark, c.ifMask, err = readMark(next)
	case "--set-xmark":
		c.markValue, c.markMask, err = readMark(next)
	case "-j":
		c.target = next
	case "--to-destination":
		c.to, err = netip.ParseAddrPort(next)
	default:
		return c.chooses(word, next)
	}
	return 1, err
}

// chooses reads the words of statistic and recent.
func (c *conditions) chooses(word, next string) (used int, err error) {
	switch word {
	case "--probability":
		p, err := strconv.ParseFloat(next, 64)
		if err != nil || p <= 0 || p > 1 {
			return 0, errUnknown
		}
		c.chance, c.of = fractionOf(p)
	case "--rcheck", "--set":
		c.recent = word
		return 0, nil
	case "--name":
		c.list = next
	case "--seconds":
		n, err := strconv.Atoi(next)
		if err != nil {
			return 0, err
		}
		c.within = time.Duration(n) * time.Second
	default:
		return 0, errUnknown
	}
	return 1, nil
}

var errUnknown = fmt.Errorf("no rule of Verdict has that")

func readPrefix(s string) (netip.Prefix, error) {
	if a, err := netip.ParseAddr(s); err == nil {
		return netip.PrefixFrom(a, a.BitLen()), nil
	}
	return netip.ParsePrefix(s)
}

func readPorts(s string) (low, high uint16, err error) {
	first, last, ranged := strings.Cut(s, ":")
	if !ranged {
		last = first
	}
	a, err := strconv.ParseUint(first, 10, 16)
	if err != nil {
		return 0, 0, err
	}
	b, err := strconv.ParseUint(last, 10, 16)
	return uint16(a), uint16(b), err
}

// readMark reads "0x4000/0x4000"; without a mask it is all bits.
func readMark(s string) (value, mask uint32, err error) {
	first, last, masked := strings.Cut(s, "/")
	if !masked {
		last = "0xffffffff"
	}
	a, err := strconv.ParseUint(first, 0, 32)
	if err != nil {
		return 0, 0, err
	}
	b, err := strconv.ParseUint(last, 0, 32)
	return uint32(a), uint32(b), err
}

// Trace gives the walk as an Inspector answers it.
func (w *Walk) Trace() *dataplane.Trace {
	t := &dataplane.Trace{Cause: w.Cause(), Unclear: slices.Clone(w.Unclear), Port: w.port()}
	for i := range w.Endings {
		t.Endings = append(t.Endings, w.Endings[i].Ending)
	}
	for _, s := range w.Steps {
		t.Steps = append(t.Steps, dataplane.TraceStep{Chain: s.Chain, Rule: s.Rule, Matched: s.Matched})
	}
	return t
}

// portComment begins the comment of a rule that belongs to a service port.
var portComment = regexp.MustCompile(`--comment "([^ "/]+/[^ "]+?)(?: [^"]*)?"`)

// port finds the service port by the comments of the rules that the packet met; it has no name if there is none.
func (w *Walk) port() (n dataplane.PortName) {
	for _, s := range w.Steps {
		m := portComment.FindStringSubmatch(s.Rule)
		if !s.Matched || m == nil || strings.Contains(s.Rule, noSuchPort) {
			continue
		}
		if n, ok := dataplane.ParsePortName(m[1], w.protocol); ok {
			return n
		}
	}
	return n
}

// Cause says why, as far as the rules tell.
func (w *Walk) Cause() dataplane.Cause {
	for _, e := range w.Endings {
		switch {
		case e.Outcome == dataplane.Sent:
			return dataplane.FrontendFound
		case e.Outcome == dataplane.Untouched:
			continue
		case e.Rule.Chain == loopbackChain:
			return dataplane.FromOutsideToLoopback
		case e.Rule.Chain == firewallChain || strings.Contains(e.Rule.Rule, notOpen):
			return dataplane.SourceRefused
		case e.Rule.Chain == clusterIPsChain && e.Outcome == dataplane.Dropped:
			return dataplane.Unallocated
		case e.Rule.Chain == clusterIPsChain || strings.HasPrefix(e.Rule.Chain, clusterIPsPrefix):
			return dataplane.UnusedPort
		case e.Outcome == dataplane.Dropped:
			return dataplane.NoLocalEndpoints
		default:
			return dataplane.NoEndpoints
		}
	}
	return dataplane.NotService
}
