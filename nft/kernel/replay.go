package kernel

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/netlink"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
)

// Replay is what our tables hold after the batches that Backends sent. It does not hold the clients that rules
// remember, nor counters. The zero Replay holds no tables.
type Replay struct {
	held ipfamily.Per[replayed]
}

// replayed is one table.
type replayed struct {
	there bool
	heldRules
	elements [nft.NumSets]map[string]nft.Element
}

// ErrGap says that a batch cannot have followed the one before it.
var ErrGap = errors.New("the tables were written in between by something that is not recorded")

// Apply adds a batch. Whole says that it makes both tables anew, so that nothing before it matters. The error is ErrGap
// if the tables must have been written since the batch before; the batch is applied nevertheless. A batch that the
// Replay holds already, since Load had read it, changes nothing.
func (r *Replay) Apply(batch []byte) (whole bool, err error) {
	var told ipfamily.Per[revisionChange]
	if err := scanRevisions(batch, &told); err != nil {
		return false, err
	}
	whole = told[0].created && told[1].created
	for i := range told {
		now, is := r.held[i].revision().Number, &told[i]
		switch {
		case is.created || is.number == 0 || is.before == now:
		case is.number <= now:
			return false, nil
		default:
			err = ErrGap
		}
	}
	for m, merr := range netlink.Messages(batch) {
		if merr != nil {
			return false, fmt.Errorf("nft: replay: %w", merr)
		}
		switch f, ingress, attrs, ok := ofTables(&m); {
		case !ok:
		case ingress && m.Type&0xff == unix.NFT_MSG_DELTABLE:
			r.held[f].dropIngress()
		case !ingress || m.Type&0xff != unix.NFT_MSG_NEWTABLE:
			r.held[f].apply(f, m.Type&0xff, attrs)
		}
	}
	return whole, err
}

// ofTables returns the family and the attributes of a message about nf_tables, and whether it is about the table at the
// ingress.
func ofTables(m *netlink.Message) (f ipfamily.Family, ingress bool, attrs []byte, ok bool) {
	if m.Type>>8 != unix.NFNL_SUBSYS_NFTABLES || len(m.Body) < netlink.NetfilterLen {
		return 0, false, nil, false
	}
	attrs = m.Body[netlink.NetfilterLen:]
	for _, f := range ipfamily.All {
		for _, ingress := range [...]bool{false, true} {
			const nameOfTable = 1 // the attribute of all objects
			proto, name := tableAt(f, ingress)
			if m.Body[0] == proto && (!ingress || netlink.Find(attrs, nameOfTable).Text() == name) {
				return f, ingress, attrs, true
			}
		}
	}
	return 0, false, nil, false
}

// dropIngress takes out what was in the table at the ingress.
func (t *replayed) dropIngress() {
	for name := range t.chains {
		if isIngressChain(name) {
			delete(t.chains, name)
			delete(t.rules, name)
		}
	}
	for set := range t.elements {
		if nft.SetID(set).IsIngress() {
			t.elements[set] = nil
		}
	}
}

func isIngressChain(name string) bool {
	return slices.ContainsFunc(nft.IngressChains(""), func(c nft.Chain) bool { return c.ID.Name() == name })
}

// revisionChange is what a batch does to the revision of a table: the number before it, which it deletes, and its own.
// A number is 0 if it does neither.
type revisionChange struct {
	created        bool
	before, number uint32
}

// scanRevisions reads which revisions a batch replaces.
func scanRevisions(batch []byte, out *ipfamily.Per[revisionChange]) error {
	for m, err := range netlink.Messages(batch) {
		if err != nil {
			return fmt.Errorf("nft: replay: %w", err)
		}
		f, ingress, attrs, ok := ofTables(&m)
		if !ok || ingress {
			continue
		}
		to := &out[f]
		switch msg := m.Type & 0xff; msg {
		case unix.NFT_MSG_DELTABLE:
			to.created = true // a batch only deletes a table to make it anew
		case unix.NFT_MSG_NEWSETELEM, unix.NFT_MSG_DELSETELEM:
			if netlink.Find(attrs, unix.NFTA_SET_ELEM_LIST_SET).Text() != nft.RevisionSet.String() {
				continue
			}
			for _, elem := range netlink.Each(netlink.Find(attrs, unix.NFTA_SET_ELEM_LIST_ELEMENTS)) {
				e, ok := keyElement(nft.RevisionSet, f, parseElement(elem))
				switch {
				case !ok:
				case msg == unix.NFT_MSG_NEWSETELEM:
					to.number = e.ID()
				default:
					to.before = e.ID()
				}
			}
		}
	}
	return nil
}

// keyElement makes an element of which only the key is known; ok is false if it is not ours.
func keyElement(set nft.SetID, f ipfamily.Family, p parsed) (e nft.Element, ok bool) {
	s := nft.SetByID(set)
	return nft.ElementFrom(f, set, p.key, p.keyEnd, make([]byte, nft.PaddedLen(f, s.Data)), "", p.comment)
}

// apply applies a message. One about a table that is not there changes nothing: what made it is missing.
func (t *replayed) apply(f ipfamily.Family, msg uint16, attrs []byte) {
	if msg == unix.NFT_MSG_NEWTABLE && !t.there {
		*t = replayed{there: true, heldRules: heldRules{map[string]netlink.Attributes{}, map[string][][]byte{}}}
	}
	if !t.there {
		return
	}
	switch msg {
	case unix.NFT_MSG_DELTABLE:
		*t = replayed{}
	case unix.NFT_MSG_NEWCHAIN:
		a := netlink.Decode(bytes.Clone(attrs))
		t.chains[a[unix.NFTA_CHAIN_NAME].Text()] = a
	case unix.NFT_MSG_DELCHAIN:
		name := netlink.Find(attrs, unix.NFTA_CHAIN_NAME).Text()
		delete(t.chains, name)
		delete(t.rules, name)
	case unix.NFT_MSG_NEWRULE:
		chain := netlink.Find(attrs, unix.NFTA_RULE_CHAIN).Text()
		t.rules[chain] = append(t.rules[chain], bytes.Clone(netlink.Find(attrs, unix.NFTA_RULE_EXPRESSIONS)))
	case unix.NFT_MSG_DELRULE: // of which we only send those that empty a chain
		delete(t.rules, netlink.Find(attrs, unix.NFTA_RULE_CHAIN).Text())
	case unix.NFT_MSG_DELSET:
		if set, ok := setByName(netlink.Find(attrs, unix.NFTA_SET_NAME).Text()); ok {
			t.elements[set] = nil
		}
	case unix.NFT_MSG_NEWSETELEM, unix.NFT_MSG_DELSETELEM:
		set, ok := setByName(netlink.Find(attrs, unix.NFTA_SET_ELEM_LIST_SET).Text())
		if ok && !set.IsDynamic() {
			t.applyElements(f, set, attrs, msg == unix.NFT_MSG_NEWSETELEM)
		}
	}
}

func setByName(name string) (nft.SetID, bool) {
	for set := range nft.NumSets {
		if set.String() == name {
			return set, true
		}
	}
	return 0, false
}

// applyElements adds or deletes the elements of a message.
func (t *replayed) applyElements(f ipfamily.Family, set nft.SetID, attrs []byte, add bool) {
	if t.elements[set] == nil {
		t.elements[set] = map[string]nft.Element{}
	}
	if add && !set.IsTree() { // without a list of them: a checkpoint has many
		eachElement(f, set, attrs, func(l nft.Listed) { t.elements[set][replayKey(&l.Element)] = l.Element })
		return
	}
	elements := elementsOf(f, set, attrs, add)
	for i := range elements {
		e := &elements[i].Element
		if add {
			t.elements[set][replayKey(e)] = *e
		} else {
			delete(t.elements[set], replayKey(e))
		}
	}
}

// elementsOf returns the elements of a message that adds or deletes some. Of those that it deletes only the keys are
// known.
func elementsOf(f ipfamily.Family, set nft.SetID, attrs []byte, add bool) (elements []nft.Listed) {
	if add {
		ends := eachElement(f, set, attrs, func(e nft.Listed) { elements = append(elements, e) })
		if set.IsTree() {
			closeRanges(f, elements, ends)
		}
		return elements
	}
	for _, elem := range netlink.Each(netlink.Find(attrs, unix.NFTA_SET_ELEM_LIST_ELEMENTS)) {
		p := parseElement(elem)
		if e, ok := keyElement(set, f, p); ok && !p.isEnd {
			elements = append(elements, nft.Listed{Element: e})
		}
	}
	return elements
}

// replayKey identifies an element within its set. Ranges of a tree do not overlap, so that their beginning does.
func replayKey(e *nft.Element) string {
	if e.Set.IsTree() {
		return string(e.Key())
	}
	return string(append(e.Key(), e.Bits))
}

// revision returns what a table says of itself.
func (t *replayed) revision() nft.Revision {
	return nft.RevisionOf(slices.Collect(maps.Values(t.elements[nft.RevisionSet])))
}

// sorted returns the elements of a set by their keys.
func (t *replayed) sorted(set nft.SetID) []nft.Element {
	elements := slices.AppendSeq(make([]nft.Element, 0, len(t.elements[set])), maps.Values(t.elements[set]))
	slices.SortFunc(elements, func(a, b nft.Element) int {
		return cmp.Or(bytes.Compare(a.Key(), b.Key()), cmp.Compare(a.Bits, b.Bits))
	})
	return elements
}

// found reads the structure as TableFound has it.
func (t *replayed) found(f ipfamily.Family) *TableFound {
	out := &TableFound{There: t.there, Table: nft.Table{Family: f}, held: &heldRules{}}
	if !t.there {
		return out
	}
	var settings []nft.Listed
	for _, e := range t.sorted(nft.SettingsSet) {
		settings = append(settings, nft.Listed{Element: e})
	}
	out.read(f, &t.heldRules, settings)
	return out
}

// Batch returns a batch that makes all tables as they are here, whatever there is. It cannot if a rule is not one of
// this version of Verdict.
func (r *Replay) Batch() ([]byte, error) { return r.batch(true) }

// batch is Batch, with or without the tables at the ingress.
func (r *Replay) batch(ingress bool) ([]byte, error) {
	var txn nft.Txn
	for i, f := range ipfamily.All {
		t := &r.held[i]
		if !t.there {
			return nil, fmt.Errorf("nft: replay: there is no table %s %s", f.NFT(), nft.TableName)
		}
		table := t.found(f).Table
		if !ingress {
			table.Sets = slices.DeleteFunc(slices.Clone(table.Sets), func(s nft.Set) bool { return s.ID.IsIngress() })
			table.Chains = slices.DeleteFunc(table.Chains, func(c nft.Chain) bool { return c.ID.Kind.IsIngress() })
		}
		if what := foreignRule(&table); what != "" {
			return nil, fmt.Errorf("nft: replay: table %s %s has a rule of another version: %s", f.NFT(), nft.TableName, what)
		}
		txn.Tables[i].Create = &table
		for set := range nft.NumSets {
			if ingress || !set.IsIngress() {
				txn.Tables[i].Add[set] = t.sorted(set)
			}
		}
	}
	var b batch
	return b.encode(&txn), nil
}

// foreignRule describes the first rule of a table that is not recognized; empty if there is none.
func foreignRule(t *nft.Table) string {
	for i := range t.Chains {
		for _, rule := range t.Chains[i].Rules {
			if foreign, ok := rule[0].(nft.Foreign); ok {
				return "chain " + t.Chains[i].ID.Name() + ": " + foreign.What
			}
		}
	}
	return ""
}

// Revision identifies what both tables hold; empty if there is none.
func (r *Replay) Revision() string {
	return revisionText(ipfamily.Per[nft.Revision]{r.held[0].revision(), r.held[1].revision()})
}

func revisionText(revisions ipfamily.Per[nft.Revision]) string {
	if revisions == (ipfamily.Per[nft.Revision]{}) {
		return ""
	}
	return fmt.Sprintf("%v", revisions)
}

// Digests returns of each table the digest that its elements have, and the one that it says it has.
func (r *Replay) Digests() (held, written ipfamily.Per[nft.Digest]) {
	for i, f := range ipfamily.All {
		var found nft.Found
		for set := range nft.NumSets {
			found.Elements[set] = r.held[i].sorted(set)
		}
		of := nft.DigestsOfElements(f, r.held[i].found(f).Structure, &found)
		held[i] = of.Total()
		digests, _ := nft.DigestsOf(found.Elements[nft.DigestSet])
		digests = digests.With(nft.RevisionOf(found.Elements[nft.RevisionSet]).Digest)
		written[i] = digests.Total()
	}
	return held, written
}

// Consistent reports whether the tables hold what they say they do. They may not after a batch that repaired what
// others had changed, since that is in no batch.
func (r *Replay) Consistent() bool {
	held, written := r.Digests()
	return held == written
}

// Summary has a line for each table: how many elements it holds, and their digest. The error says that this is not the
// digest that the table says it has.
func (r *Replay) Summary() (lines []string, err error) {
	held, written := r.Digests()
	for i, f := range ipfamily.All {
		n := 0
		for set, elements := range r.held[i].elements {
			if nft.SetID(set).IsContent() {
				n += len(elements)
			}
		}
		lines = append(lines, fmt.Sprintf("%s %s: %d elements, digest %s", f.NFT(), nft.TableName, n, held[i]))
		if held[i] != written[i] {
			err = errors.Join(err, fmt.Errorf("%s %s: the elements have digest %s, and the table says %s", f.NFT(),
				nft.TableName, held[i], written[i]))
		}
	}
	return lines, err
}

// Write writes the tables into the network namespace of the calling thread, which must hold none. Without is the device
// at whose ingress there are tables that are not written, since there is none of that name; empty if all are.
func (r *Replay) Write() (without string, err error) {
	if device := r.held[0].found(ipfamily.IPv4).Structure.Device; device != "" {
		if _, err := net.InterfaceByName(device); err != nil {
			without = device
		}
	}
	batch, err := r.batch(without == "")
	if err != nil {
		return "", err
	}
	c, err := Dial(0)
	if err != nil {
		return "", err
	}
	defer c.Close()
	for _, f := range ipfamily.All {
		for _, ingress := range [...]bool{false, true} {
			info, err := c.tableAt(f, ingress)
			if err != nil {
				return "", rights(err)
			}
			if info.exists {
				return "", fmt.Errorf("there is a table %s in this network namespace: replay into an empty one",
					tableText(f, ingress))
			}
		}
	}
	return without, rights(c.Replay(batch))
}

// Load returns what the tables hold now; nil if there are none. The error says so if somebody writes to them meanwhile,
// or if they are not as Verdict writes them. It may be called beside everything else.
func (b *Backend) Load() (*Replay, error) {
	reader, err := b.openTolerant()
	if err != nil {
		return nil, err
	}
	defer reader.Close()
	return reader.Load()
}

// LoadRevision is the Revision of Load. It may be called beside everything else.
func (b *Backend) LoadRevision() (string, error) {
	reader, err := b.openTolerant()
	if err != nil {
		return "", err
	}
	defer reader.Close()
	revisions, err := reader.Revisions()
	return revisionText(revisions), err
}

// openTolerant returns a Reader for the Backend's network namespace.
func (b *Backend) openTolerant() (*Reader, error) {
	conn, err := b.openReader()
	if err != nil {
		return nil, err
	}
	conn.tolerant = true
	return &Reader{conn: conn, trees: map[treeOf][]nft.Listed{}}, nil
}

// Load is that of Backend.
func (r *Reader) Load() (*Replay, error) {
	revisions, err := r.Revisions()
	if err != nil || revisionText(revisions) == "" {
		return nil, err
	}
	c, err := r.Contents(nil)
	if err != nil {
		return nil, err
	}
	if !c.Quiet || len(c.Wrong) > 0 {
		return nil, fmt.Errorf("nft: the tables cannot be read at one moment (%d findings)", len(c.Wrong))
	}
	var txn nft.Txn
	for i := range ipfamily.All {
		txn.Tables[i].Create, txn.Tables[i].Add = &c.Tables[i].Table, c.Found[i].Elements
		txn.Tables[i].Add[nft.RevisionSet] = c.Found[i].Revisions
		txn.Tables[i].Add[nft.DigestSet] = c.Found[i].DigestElements
	}
	var b batch
	out := &Replay{}
	_, err = out.Apply(b.encode(&txn))
	return out, err
}

// Revisions is that of Reader.
func (r *Replay) Revisions() (ipfamily.Per[nft.Revision], error) {
	return ipfamily.Per[nft.Revision]{r.held[0].revision(), r.held[1].revision()}, nil
}

// Table is that of Reader.
func (r *Replay) Table(f ipfamily.Family) (*TableFound, error) { return r.held[f].found(f), nil }

// Get is that of Reader.
func (r *Replay) Get(f ipfamily.Family, set nft.SetID, keys []nft.Element) (out []nft.Listed, err error) {
	if nft.SetByID(set).Interval {
		all, _, _ := r.List(f, set)
		for i := range keys {
			if l, ok := nft.Holding(f, all, &keys[i]); ok {
				out = append(out, l)
			}
		}
		return out, nil
	}
	for i := range keys {
		if e, ok := r.held[f].elements[set][replayKey(&keys[i])]; ok {
			out = append(out, nft.Listed{Element: e})
		}
	}
	return out, nil
}

// List is that of Reader; the elements are sorted by their keys.
func (r *Replay) List(f ipfamily.Family, set nft.SetID) (out []nft.Listed, whole bool, err error) {
	for _, e := range r.held[f].sorted(set) {
		out = append(out, nft.Listed{Element: e})
	}
	return out, true, nil
}

// Sizes is that of Reader.
func (r *Replay) Sizes(f ipfamily.Family) (n [nft.NumSets]int, known bool, err error) {
	for set := range n {
		n[set] = len(r.held[f].elements[set])
	}
	return n, true, nil
}

// Replayed answers from a Replay, as Inspector does from the kernel. It cannot count or compare.
type Replayed struct{ *Replay }

var _ reconcile.Inspector = Replayed{}

// Name implements reconcile.Inspector.
func (Replayed) Name() string { return "nftables" }

// Present implements reconcile.Inspector.
func (r Replayed) Present(context.Context) (bool, error) { return r.Revision() != "", nil }

// Settings implements reconcile.Inspector.
func (r Replayed) Settings(context.Context) (*dataplane.Settings, error) { return settingsOf(r) }

// Trace implements reconcile.Inspector.
func (r Replayed) Trace(_ context.Context, p dataplane.Packet, node dataplane.LocalNode) (*dataplane.Trace, error) {
	t, err := trace(r, p, node)
	if err == nil {
		t.Counted = "" // counters are not replayed
	}
	return t, err
}

// errReplayed is the answer to what only the kernel itself can tell.
var errReplayed = fmt.Errorf("%w of what was held in the past", reconcile.ErrUnsupported)

// Print implements reconcile.Inspector.
func (Replayed) Print(context.Context, io.Writer) error { return errReplayed }

// Differences implements reconcile.Inspector.
func (Replayed) Differences(context.Context, *dataplane.State) (*dataplane.Differences, error) {
	return nil, errReplayed
}

// Counters implements reconcile.Inspector.
func (Replayed) Counters(context.Context, dataplane.CountersAsked) (*dataplane.Counters, error) {
	return nil, errReplayed
}

// Close implements reconcile.Inspector.
func (Replayed) Close() error { return nil }

// Lines says what a batch writes: a line for each element that it deletes or adds, as nft has them, after "-" or "+",
// and for each table, set and chain.
func Lines(batch []byte) (lines []string, err error) {
	for m, err := range netlink.Messages(batch) {
		if err != nil {
			return lines, fmt.Errorf("nft: replay: %w", err)
		}
		f, ingress, attrs, ok := ofTables(&m)
		if !ok {
			continue
		}
		name := tableText(f, ingress)
		table := name + " "
		switch msg := m.Type & 0xff; msg {
		case unix.NFT_MSG_NEWTABLE, unix.NFT_MSG_DELTABLE:
			lines = append(lines, sign(msg == unix.NFT_MSG_NEWTABLE)+"table "+name)
		case unix.NFT_MSG_NEWCHAIN, unix.NFT_MSG_DELCHAIN:
			name := netlink.Find(attrs, unix.NFTA_CHAIN_NAME).Text()
			lines = append(lines, sign(msg == unix.NFT_MSG_NEWCHAIN)+"chain "+table+name)
		case unix.NFT_MSG_DELRULE:
			lines = append(lines, sign(false)+"rules of chain "+table+netlink.Find(attrs, unix.NFTA_RULE_CHAIN).Text())
		case unix.NFT_MSG_NEWSETELEM, unix.NFT_MSG_DELSETELEM:
			lines = append(lines, elementLines(f, attrs, msg == unix.NFT_MSG_NEWSETELEM)...)
		}
	}
	return lines, nil
}

func sign(add bool) string {
	if add {
		return "+ "
	}
	return "- "
}

// elementLines gives a line for each element of a message.
func elementLines(f ipfamily.Family, attrs []byte, add bool) (lines []string) {
	id, ok := setByName(netlink.Find(attrs, unix.NFTA_SET_ELEM_LIST_SET).Text())
	if !ok || !id.IsContent() {
		return nil
	}
	set := nft.SetByID(id)
	for _, e := range elementsOf(f, id, attrs, add) {
		text := e.Text(f, &set)
		if !add { // only the key is known
			text, _, _ = strings.Cut(text, " : ")
		}
		lines = append(lines, sign(add)+tableText(f, id.IsIngress())+" "+set.Name()+" { "+text+" }")
	}
	return lines
}

// ServicesIn returns the Services, NAMESPACE/NAME, that the elements of a batch name.
func ServicesIn(batch []byte) (names []string) {
	for m, err := range netlink.Messages(batch) {
		if err != nil {
			break
		}
		f, _, attrs, ok := ofTables(&m)
		if !ok || m.Type&0xff != unix.NFT_MSG_NEWSETELEM {
			continue
		}
		id, ok := setByName(netlink.Find(attrs, unix.NFTA_SET_ELEM_LIST_SET).Text())
		if !ok || !id.IsContent() {
			continue
		}
		for _, e := range elementsOf(f, id, attrs, true) {
			if name := e.Service(); name != "" && (len(names) == 0 || names[len(names)-1] != name) {
				names = append(names, name)
			}
		}
	}
	return names
}
