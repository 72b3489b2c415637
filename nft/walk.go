package nft

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Packet is the first packet of a connection.
type Packet = dataplane.Packet

// Elements is where a trace looks elements up.
type Elements interface {
	// Get returns those of some elements of a set that are there; it only uses the keys of its argument. In a set of
	// ranges it returns the range that holds the key.
	Get(f ipfamily.Family, set SetID, keys []Element) ([]Listed, error)
}

// Walk is the way of a packet through a table.
type Walk struct {
	// Steps are the rules that looked at the packet before it had a destination, in their order.
	Steps []Step
	// Endings are what can become of it; their chances add up to 1.
	Endings []Ending
	// Unclear says of rules and elements that the packet met what they do is not known, since others wrote them. They
	// are taken for rules that do not match.
	Unclear []string
}

// Step is one rule on a packet's way.
type Step struct {
	Chain ChainID
	Rule  Rule
	// Found are the elements that it found.
	Found []Listed
	// Matched says that all of the rule was carried out.
	Matched bool
}

// Ending is something that can become of a packet.
type Ending struct {
	dataplane.Ending
	// Element is what sent the packet to the Endpoint: one of Endpoints, UncountedEndpoints or Affinity.
	Element Listed
	// priority is the packet's when it was translated.
	priority uint32
	// Steps are the rules that looked at the packet after it was translated.
	Steps []Step
}

// Foreign stands for a rule that Verdict did not write.
type Foreign struct{ What string }

func (s Foreign) text(ipfamily.Family) string { return s.What }

// Host is what a walk has to know of the node.
type Host = dataplane.LocalNode

// WalkTable follows a packet through a table as the kernel would.
func WalkTable(t *Table, e Elements, p Packet, h Host) (*Walk, error) {
	w := tracer{table: t, elements: e, host: h, walk: &Walk{}}
	s := &packetState{Packet: p, input: p.Interface, share: 1, of: 1, steps: &w.walk.Steps}
	hook := "prerouting"
	if p.Interface == "" {
		hook = "output"
	}
	done, err := w.hook(hook, s)
	if err != nil {
		return nil, err
	}
	if !done {
		w.addEnding(s, Ending{Ending: dataplane.Ending{Outcome: dataplane.Untouched}})
	}
	for i := range w.walk.Endings {
		if end := &w.walk.Endings[i]; end.Outcome == dataplane.Sent {
			if err := w.afterDNAT(p, end); err != nil {
				return nil, err
			}
		}
	}
	return w.walk, nil
}

// tracer holds what does not change during a trace.
type tracer struct {
	table    *Table
	elements Elements
	host     Host
	walk     *Walk
	// depth guards against rules of others that form a loop.
	depth int
	// cache holds earlier answers: the ways to the endpoints of a Service differ in little.
	cache map[cacheKey][]Listed
}

// packetState is the packet at one point of its trace.
type packetState struct {
	Packet
	// to is where it was translated to; invalid before that.
	to netip.AddrPort
	// share of of is what is left of the packet's chance: where a slot is missing, the remaining rules see that part.
	share, of int
	priority  uint32
	// input is the incoming interface that the kernel reports; empty if none.
	input string
	// bridged says that it stays on the bridge by which it came in.
	bridged bool
	steps   *[]Step
	// end is the ending of a packet that was translated; nil before that.
	end *Ending
}

// hook traces a packet through the base chains of a hook, in their order. done says that its outcome is decided.
func (w *tracer) hook(name string, s *packetState) (done bool, err error) {
	var chains []*Chain
	for i := range w.table.Chains {
		if h := w.table.Chains[i].Hook; h != nil && h.Name == name {
			chains = append(chains, &w.table.Chains[i])
		}
	}
	slices.SortStableFunc(chains, func(a, b *Chain) int { return int(a.Hook.Priority) - int(b.Hook.Priority) })
	for _, c := range chains {
		if done, err := w.chain(c, s); done || err != nil {
			return done, err
		}
	}
	return false, nil
}

// afterDNAT traces a packet that was translated.
func (w *tracer) afterDNAT(p Packet, end *Ending) error {
	s := &packetState{Packet: p, to: end.Endpoint, input: p.Interface, priority: end.priority, steps: &end.Steps, end: end}
	to := end.Endpoint.Addr()
	hook := "postrouting"
	switch {
	case p.Interface == "":
	case w.host.Local != nil && w.host.Local(to):
		hook = "input"
	case w.host.Bridged != nil && w.host.Bridged(p.Interface, to):
		s.bridged, s.input = true, ""
	case to.Is4():
		s.priority = 0 // IPv4 forwarding sets it by the packet's type of service; IPv6 leaves it
	}
	_, err := w.hook(hook, s)
	return err
}

// addEnding records what happens to the packet, or to what is left of its chance.
func (w *tracer) addEnding(s *packetState, e Ending) {
	if s.end != nil { // what is found out after the translation changes nothing about where it goes
		return
	}
	e.Share, e.Of = s.share, s.of
	w.walk.Endings = append(w.walk.Endings, e)
}

const maxDepth = 64

// chain traces a packet through a chain. done says that its outcome is decided.
func (w *tracer) chain(c *Chain, s *packetState) (done bool, err error) {
	if w.depth++; w.depth > maxDepth {
		return false, fmt.Errorf("nft: the chains of table %s lead round in a circle", TableName)
	}
	defer func() { w.depth-- }()
	for _, r := range c.Rules {
		*s.steps = append(*s.steps, Step{Chain: c.ID, Rule: r})
		at := len(*s.steps) - 1
		next, err := w.rule(r, s, at)
		if err != nil {
			return false, err
		}
		switch next.code {
		case verdictBreak:
			continue
		case verdictDone:
			(*s.steps)[at].Matched = true
			return true, nil
		}
		(*s.steps)[at].Matched = true
		if next.code == verdictContinue {
			continue
		}
		target := w.chainByID(next.chain)
		if target == nil {
			w.addUnclear("%s leads to chain %s, which is not there", c.ID.Name(), next.chain.Name())
			continue
		}
		if done, err = w.chain(target, s); done || err != nil || next.code == verdictGoto {
			return done, err
		}
	}
	return false, nil
}

func (w *tracer) chainByID(id ChainID) *Chain {
	if i := slices.IndexFunc(w.table.Chains, func(c Chain) bool { return c.ID == id }); i >= 0 {
		return &w.table.Chains[i]
	}
	return nil
}

func (w *tracer) addUnclear(format string, args ...any) {
	if text := fmt.Sprintf(format, args...); !slices.Contains(w.walk.Unclear, text) {
		w.walk.Unclear = append(w.walk.Unclear, text)
	}
}

// verdict is how a packet continues after a statement, or a rule.
type verdict struct {
	code  uint8
	chain ChainID
}

// The verdicts, in nft's words.
const (
	verdictContinue uint8 = iota // with the next statement, or rule
	verdictBreak                 // with the next rule: this one does not match
	verdictJump                  // in another chain, and then here
	verdictGoto                  // in another chain
	verdictDone                  // it is said what becomes of it
)

// rule evaluates a rule.
func (w *tracer) rule(r Rule, s *packetState, at int) (verdict, error) {
	for _, st := range r {
		next, err := w.statement(st, s, at)
		if err != nil || next.code != verdictContinue {
			return next, err
		}
	}
	return verdict{}, nil
}

func matchVerdict(ok bool) verdict {
	if ok {
		return verdict{}
	}
	return verdict{code: verdictBreak}
}

// match evaluates a statement that only matches and looks nothing up.
func (w *tracer) match(st Statement, s *packetState) (ok, isMatch bool) {
	switch st := st.(type) {
	case ProtocolIs:
		return s.Protocol == st.Protocol, true
	case FromPods:
		return s.fromPods(st.Pods) != st.Not, true
	case NoInput:
		return (s.input == "") != st.Not, true
	case Bridged:
		return s.bridged && (!st.Pods.ByInterface() || st.Pods.HasInterface(s.Interface)), true
	case OffLoopback:
		return s.input != "lo" && s.addr(st.Field).IsLoopback(), true
	case PriorityIs:
		return (s.priority == st.Value) != st.Not, true
	case Translated:
		return s.to.IsValid(), true
	case StatusIs:
		return s.status()&st.Of == st.Are, true
	case NewConnection:
		return true, true
	case EchoRequest:
		return s.Protocol.IsPing(), true
	case NotLocal:
		return w.host.Local == nil || !w.host.Local(s.addr(DestAddr)), true
	case Reply, TCPSequence: // it is the first packet of a client, whose sequence number is random
		return false, true
	case OtherInterface:
		return s.input != st.Than, true
	case TCPFlags:
		return s.Protocol == snapshot.TCP && (FlagSYN&st.Of == st.Are) != st.Not, true
	}
	return false, false
}

// statement evaluates a statement.
func (w *tracer) statement(st Statement, s *packetState, at int) (verdict, error) {
	if ok, isMatch := w.match(st, s); isMatch {
		return matchVerdict(ok), nil
	}
	switch st := st.(type) {
	case Counter, Log:
		return verdict{}, nil
	case ClearPriority:
		s.priority = 0
		return verdict{}, nil
	case StripClass:
		s.priority &= PoolMask
		return verdict{}, nil
	case Jump:
		return verdict{verdictJump, st.Chain}, nil
	case Goto:
		return verdict{verdictGoto, st.Chain}, nil
	case Masquerade:
		if s.end != nil {
			s.end.Masquerade, s.end.Hairpin = true, s.Source == s.to.Addr()
		}
		return verdict{code: verdictDone}, nil
	case Reset:
		if s.Protocol != snapshot.TCP {
			return verdict{code: verdictBreak}, nil
		}
		w.addEnding(s, Ending{Ending: dataplane.Ending{Outcome: dataplane.Rejected}})
		return verdict{code: verdictDone}, nil
	case Reject:
		w.addEnding(s, Ending{Ending: dataplane.Ending{Outcome: dataplane.Rejected}})
		return verdict{code: verdictDone}, nil
	case Accept:
		outcome := dataplane.Untouched
		if (*s.steps)[at].Chain == LeftToIPVS.id() {
			outcome = dataplane.Scheduled
		}
		w.addEnding(s, Ending{Ending: dataplane.Ending{Outcome: outcome}})
		return verdict{code: verdictDone}, nil
	case Drop:
		w.addEnding(s, Ending{Ending: dataplane.Ending{Outcome: dataplane.Dropped}})
		return verdict{code: verdictDone}, nil
	case DNATTo: // the ping is this node's now
		w.addEnding(s, Ending{Ending: dataplane.Ending{Outcome: dataplane.Answered}})
		return verdict{code: verdictDone}, nil
	case Foreign:
		w.addUnclear("chain %s holds a rule that is not Verdict's: %s", (*s.steps)[at].Chain.Name(), st.What)
		return verdict{code: verdictBreak}, nil
	}
	return w.lookupStatement(st, s, at)
}

// lookupStatement evaluates the statements that look up a set or map.
func (w *tracer) lookupStatement(st Statement, s *packetState, at int) (verdict, error) {
	switch st := st.(type) {
	case SetLookup:
		found, err := w.lookupKey(st.Set, st.Key, s, at)
		return matchVerdict((len(found) > 0) != st.Not), err
	case VerdictMap:
		found, err := w.lookupKey(st.Map, st.Key, s, at)
		if err != nil || len(found) == 0 {
			return verdict{code: verdictBreak}, err
		}
		if found[0].Chain.Kind == NoChain {
			set := SetByID(st.Map)
			w.addUnclear("%s { %s } has a verdict that is not Verdict's", set.Name(),
				found[0].Element.Text(ipfamily.Of(s.Destination), &set))
			return verdict{code: verdictBreak}, nil
		}
		return verdict{verdictGoto, found[0].Chain}, nil
	case SetPriority:
		found, err := w.lookupKey(st.Map, st.Key, s, at)
		if err != nil || len(found) == 0 {
			return verdict{code: verdictBreak}, err
		}
		s.priority = found[0].Number()
		return verdict{}, nil
	case Update:
		if s.end != nil && st.Map == Affinity {
			s.end.Remember = st.Timeout
		}
		return verdict{}, nil
	case DNAT:
		found, err := w.lookupKey(st.Map, st.Key, s, at)
		if err != nil || len(found) == 0 {
			return verdict{code: verdictBreak}, err
		}
		slots := st.Key.slots()
		if st.Again > 0 { // whoever finds nothing tries again, until all have what was found
			slots = len(found)
		}
		return w.translate(s, found, slots), nil
	}
	panic(fmt.Sprintf("nft: no way through %T", st))
}

// slots is the number of elements from which one is chosen by what is not known of the packet: at random, or by a hash
// that has the sender's port in it.
func (c Concat) slots() int {
	if slices.Contains(c.Fields, RandomSlot) || slices.Contains(c.Fields, SourcePortBucket) {
		return int(c.Mod)
	}
	return 1
}

// translate records endings for the slots, of n, that were found. The packet continues with the chance of the others.
func (w *tracer) translate(s *packetState, found []Listed, n int) verdict {
	share, of := s.share, s.of*n
	first := len(w.walk.Endings)
	at := map[netip.AddrPort]int{} // an endpoint may have several slots, and take what those that are missing would have
	for i := range w.walk.Endings {
		if end := &w.walk.Endings[i]; end.Of == of && end.Element.Set == found[0].Set {
			at[end.Endpoint] = i
		}
	}
	for i := range found {
		e := &found[i]
		if n, ok := at[e.Target()]; ok && s.end == nil {
			end := &w.walk.Endings[n]
			end.Share += share
			if n >= first {
				end.Connections = sum(end.Connections, e.connections())
			}
			continue
		}
		at[e.Target()] = len(w.walk.Endings)
		s.share, s.of = share, of
		end := Ending{Element: *e, priority: s.priority,
			Ending: dataplane.Ending{Outcome: dataplane.Sent, Endpoint: e.Target(), Connections: e.connections()}}
		if e.Set == Affinity {
			end.Remembered, end.Left = true, e.Expires
		}
		w.addEnding(s, end)
	}
	if len(found) == n {
		return verdict{code: verdictDone}
	}
	s.share, s.of = share*(n-len(found)), of
	return verdict{code: verdictBreak}
}

// sum adds two counts, of which either may be unknown.
func sum(a, b *uint64) *uint64 {
	if a == nil || b == nil {
		return nil
	}
	n := *a + *b
	return &n
}

// status returns the flags of the packet's connection: a first packet is confirmed after the last hook.
func (s *packetState) status() ConnectionStatus {
	if s.to.IsValid() {
		return StatusDNAT
	}
	return 0
}

// fromPods reports whether the packet comes from a pod.
func (s *packetState) fromPods(p dataplane.Pods) bool {
	return p.CIDR.IsValid() && p.CIDR.Contains(s.Source) || s.input != "" && p.HasInterface(s.input)
}

// addr returns an address that the packet has at this point.
func (s *packetState) addr(field Field) netip.Addr {
	switch {
	case field == SourceAddr:
		return s.Source
	case field == DestAddr && s.to.IsValid():
		return s.to.Addr()
	}
	return s.Destination
}

// lookupKey looks up the packet's fields that make up a key.
func (w *tracer) lookupKey(set SetID, key Concat, s *packetState, at int) ([]Listed, error) {
	e := Element{Set: set}
	slots := 0
	for _, field := range key.Fields {
		switch field {
		case SourceAddr, DestAddr, OriginalDestAddr:
			e.addKeyAddr(s.addr(field))
		case L4Proto:
			e.key[e.KeyLen] = byte(s.Protocol)
			e.KeyLen += 4
		case DestPort:
			port := s.Port
			if s.to.IsValid() {
				port = s.to.Port()
			}
			e.addKeyPort(port)
		case OriginalDestPort:
			e.addKeyPort(s.Port)
		case Priority, PoolNumber, PoolClass:
			in, mask := SetByID(set), map[Field]uint32{Priority: ^uint32(0), PoolNumber: PoolMask, PoolClass: ^uint32(PoolMask)}
			in.order().PutUint32(e.key[e.KeyLen:], s.priority&mask[field])
			e.KeyLen += 4
		case SourceBucket:
			e.addKeyWord(bucketOf(s.Source, key.Mod))
		case RandomSlot, SourcePortBucket:
			slots = int(key.Mod)
		}
	}
	if SetByID(set).Interval {
		e.Bits = uint8(8 * ipfamily.Of(s.Destination).AddrLen())
	}
	keys := []Element{e}
	if slots > 0 {
		keys = make([]Element, slots)
		for n := range keys {
			keys[n] = e
			keys[n].addKeyWord(uint32(n))
		}
	}
	found, err := w.lookupElements(set, keys, slots > 0)
	(*s.steps)[at].Found = append((*s.steps)[at].Found, found...)
	return found, err
}

// lookupElements looks up elements, and caches the answer if it is a single one.
func (w *tracer) lookupElements(set SetID, keys []Element, slots bool) ([]Listed, error) {
	f := w.table.Family
	if slots {
		return w.elements.Get(f, set, keys)
	}
	id := cacheKey{set, keys[0].identity()}
	if found, ok := w.cache[id]; ok {
		return found, nil
	}
	found, err := w.elements.Get(f, set, keys)
	if w.cache == nil {
		w.cache = map[cacheKey][]Listed{}
	}
	w.cache[id] = found
	return found, err
}

type cacheKey struct {
	set SetID
	key elementKey
}

// Cause says why, as far as the rules tell.
func (w *Walk) Cause() dataplane.Cause {
	for _, e := range w.Endings {
		switch e.Outcome {
		case dataplane.Sent:
			return dataplane.FrontendFound
		case dataplane.Scheduled:
			return dataplane.FrontendScheduled
		case dataplane.Answered:
			return dataplane.PingAnswered
		}
	}
	for i := len(w.Steps) - 1; i >= 0; i-- {
		s := &w.Steps[i]
		if !s.Matched {
			continue
		}
		if s.Chain.Kind == PassOn {
			if i > 0 && w.Steps[i-1].Rule.looksUp(SharedRanges) {
				return dataplane.NotService
			}
			return dataplane.FailoverPassed
		}
		if w.Endings[0].Outcome == dataplane.Untouched {
			continue
		}
		switch s.Chain.Kind {
		case FirstEndpoint, UncountedFirstEndpoint: // its pool has no slots
			return dataplane.FrontendFound
		case GuardLoopback:
			return dataplane.FromOutsideToLoopback
		case NoEndpoints:
			return dataplane.NoEndpoints
		case NoLocalEndpoints:
			return dataplane.NoLocalEndpoints
		case Restrict:
			return dataplane.SourceRefused
		case Split, SharedPool: // a frontend of which the pool is gone
			return dataplane.FrontendFound
		case Unallocated:
			return dataplane.Unallocated
		}
		if slices.Contains(addressKinds[:], s.Chain.Kind) {
			if _, found := s.Rule[0].(SetPriority); found { // there is a frontend, of which the pool is gone
				return dataplane.FrontendFound
			}
			return dataplane.UnusedPort
		}
	}
	return dataplane.NotService
}

// looksUp says whether a rule matches the elements of a set.
func (r Rule) looksUp(set SetID) bool {
	return slices.ContainsFunc(r, func(st Statement) bool {
		l, ok := st.(SetLookup)
		return ok && l.Set == set
	})
}

// Frontend gives the element that led the packet to its pool, and the one that has the pool's class: the same, or that
// of Pools.
func (w *Walk) Frontend() (e, pool Listed, ok bool) {
	for _, s := range w.Steps {
		for _, l := range s.Found {
			if slices.Contains(frontendSets[:], l.Set) {
				e = l
			}
			if l.Set.hasClass() {
				pool, ok = l, ok || !l.InPools()
			}
		}
	}
	return e, pool, ok
}

// Get looks elements up in a listing.
func (l *Listing) Get(f ipfamily.Family, set SetID, keys []Element) ([]Listed, error) {
	var out []Listed
	if SetByID(set).Interval {
		for i := range l.Elements[set] {
			if l.Elements[set][i].holds(&keys[0], f) {
				return []Listed{l.Elements[set][i]}, nil
			}
		}
		return nil, nil
	}
	wanted := make(map[elementKey]bool, len(keys))
	for i := range keys {
		wanted[keys[i].identity()] = true
	}
	for _, e := range l.Elements[set] {
		if wanted[e.identity()] {
			out = append(out, e)
		}
	}
	return out, nil
}

// holds says whether an element of a set of ranges holds a key.
func (e *Element) holds(key *Element, f ipfamily.Family) bool {
	n := int(e.KeyLen) - f.AddrLen()
	if key.KeyLen != e.KeyLen || string(e.key[:n]) != string(key.key[:n]) {
		return false
	}
	from, _ := netip.AddrFromSlice(e.key[n:e.KeyLen])
	at, _ := netip.AddrFromSlice(key.key[n:key.KeyLen])
	return netip.PrefixFrom(from, int(e.Bits)).Contains(at)
}

// Holding gives the range of some that holds a key.
func Holding(f ipfamily.Family, ranges []Listed, key *Element) (Listed, bool) {
	i := slices.IndexFunc(ranges, func(l Listed) bool { return l.holds(key, f) })
	if i < 0 {
		return Listed{}, false
	}
	return ranges[i], true
}

// Line gives a step as a line: the chain, the rule, and the elements it found.
func (s *Step) Line(f ipfamily.Family) string {
	parts := make([]string, 0, 3)
	for i := range s.Found {
		if i == 3 && len(s.Found) > 4 {
			parts = append(parts, fmt.Sprintf("and %d more", len(s.Found)-i))
			break
		}
		set := SetByID(s.Found[i].Set)
		parts = append(parts, "{ "+s.Found[i].Text(f, &set)+" }")
	}
	return strings.TrimRight(s.Rule.Text(f)+"  "+strings.Join(parts, " "), " ")
}
