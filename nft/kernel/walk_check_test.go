package kernel

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/netlink"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// content is all that our tables hold.
type content ipfamily.Per[tableContent]

type tableContent struct {
	family ipfamily.Family
	bySet  [nft.NumSets][]nft.Element
	// chains are the bytes of each chain with its rules.
	chains  map[string]string
	handles map[string][]byte
}

// content reads the kernel, by another connection than the backend's.
func (w *walker) content() (c content) {
	w.t.Helper()
	for i, f := range ipfamily.All {
		t := &c[i]
		w.readElements(t, i)
		t.chains, t.handles = map[string]string{}, map[string][]byte{}
		w.must(w.eye.objects(f, unix.NFT_MSG_GETCHAIN, func(attrs netlink.Attributes) {
			t.handles[unix.ByteSliceToString(attrs[unix.NFTA_CHAIN_NAME])] = attrs[unix.NFTA_CHAIN_HANDLE]
			t.chains[unix.ByteSliceToString(attrs[unix.NFTA_CHAIN_NAME])] += string(attrs[unix.NFTA_CHAIN_HOOK]) + "\n"
		}))
		w.must(w.eye.objects(f, unix.NFT_MSG_GETRULE, func(attrs netlink.Attributes) {
			t.chains[unix.ByteSliceToString(attrs[unix.NFTA_RULE_CHAIN])] += string(attrs[unix.NFTA_RULE_EXPRESSIONS]) + "\n"
		}))
	}
	return c
}

func (w *walker) readElements(t *tableContent, i int) {
	w.t.Helper()
	t.family = ipfamily.All[i]
	count := w.setCounts(t.family)
	for set := range nft.NumSets {
		listed := w.listed(t.family, set, count)
		t.bySet[set] = make([]nft.Element, len(listed))
		for n := range listed {
			t.bySet[set][n] = listed[n].Element
		}
	}
}

// listed gives the elements of a set. Reading takes most of a walk's time, so the sets that are empty are not listed,
// and the others are not counted again.
func (w *walker) listed(f ipfamily.Family, set nft.SetID, count map[string]int) []nft.Listed {
	w.t.Helper()
	if n, told := count[set.String()]; told && !nft.SetByID(set).Interval {
		if n == 0 {
			return nil
		}
		list, twice, err := w.eye.list(f, set)
		if err == nil && !twice && len(list) == n {
			return list
		}
	}
	list, err := w.eye.Elements(f, set)
	w.must(err)
	return list
}

// setCounts gives how many elements each set has, if the kernel tells (Linux 6.16). A set of ranges counts one too few
// if one of them has no end.
func (w *walker) setCounts(f ipfamily.Family) map[string]int {
	w.t.Helper()
	count := map[string]int{}
	w.must(w.eye.objects(f, unix.NFT_MSG_GETSET, func(attrs netlink.Attributes) {
		if v := attrs[nftaSetCount]; len(v) == 4 {
			count[attrs[unix.NFTA_SET_NAME].Text()] = int(v.Big32())
		}
	}))
	return count
}

// elements gives those of all sets.
func (t *tableContent) elements() map[nft.Element]bool {
	all := map[nft.Element]bool{}
	for _, list := range t.bySet {
		for _, e := range list {
			all[e] = true
		}
	}
	return all
}

// difference names a few things that only one of two contents has.
func (c *content) difference(now *content) string {
	var out []string
	for i := range c {
		f, was, is := c[i].family, c[i].elements(), now[i].elements()
		for e := range was {
			if !is[e] {
				out = append(out, "gone: "+elementText(f, &e))
			}
		}
		for e := range is {
			if !was[e] {
				out = append(out, "new: "+elementText(f, &e))
			}
		}
		for name, rules := range c[i].chains {
			if now[i].chains[name] != rules {
				out = append(out, fmt.Sprintf("%s chain %s is gone or another one", f.NFT(), name))
			}
		}
		for name := range now[i].chains {
			if _, was := c[i].chains[name]; !was {
				out = append(out, fmt.Sprintf("%s chain %s is new", f.NFT(), name))
			}
		}
	}
	slices.Sort(out)
	return strings.Join(out[:min(len(out), 20)], "\n")
}

// withoutChains returns the content without the chains that were not there before.
func (c *content) withoutChains(before *content) content {
	out := *c
	for i := range out {
		out[i].chains = maps.Clone(c[i].chains)
		maps.DeleteFunc(out[i].chains, func(name, _ string) bool {
			_, was := before[i].chains[name]
			return !was
		})
		for set := range out[i].bySet { // what leads to them
			if nft.SetByID(nft.SetID(set)).Verdicts {
				out[i].bySet[set] = slices.DeleteFunc(slices.Clone(out[i].bySet[set]), func(e nft.Element) bool {
					_, stays := out[i].chains[e.Chain.Name()]
					return !stays
				})
			}
		}
	}
	return out
}

func elementText(f ipfamily.Family, e *nft.Element) string {
	set := nft.SetByID(e.Set)
	return fmt.Sprintf("%s %s { %s }", f.NFT(), set.Name(), e.Text(f, &set))
}

// incomplete names a frontend or a pool that leads to something that is not there.
func (c *content) incomplete() string {
	var found ipfamily.Per[nft.Found]
	for i := range c {
		found[i].Elements = c[i].bySet
		sets := nft.FrontendSets()
		for _, set := range append(sets[:], nft.Pools) {
			for _, e := range c[i].bySet[set] {
				if _, ok := c[i].chains[e.Leads().Name()]; !ok {
					return elementText(c[i].family, &e) + " leads nowhere"
				}
			}
		}
	}
	for _, d := range nft.Inconsistencies(&found) {
		return d.Text
	}
	return ""
}

// fact is what the kernel must hold whatever happened before: an element, or of a slot that it is there and, for
// itself, which endpoint there is.
type fact struct {
	element    nft.Element
	slot, data string
}

func factsOf(e nft.Element) []fact {
	switch e.Set {
	case nft.Endpoints, nft.UncountedEndpoints:
		key := string(e.Key())
		set := string(rune('0' + e.Set))
		return []fact{{slot: set + key}, {slot: set + key[:len(key)-4], data: string(e.Data())}}
	}
	return []fact{{element: e}}
}

// lacking compares a content with what it should be.
func lacking(c *content, list ipfamily.Per[nft.Listing]) string {
	for i := range list {
		count := make(map[fact]int, 1024)
		for set := range nft.NumSets {
			if set == nft.Affinity || set == nft.RevisionSet { // its number may be any
				continue
			}
			for _, e := range c[i].bySet[set] {
				for _, x := range factsOf(e) {
					count[x]++
				}
			}
			for _, l := range list[i].Elements[set] {
				for _, x := range factsOf(l.Element) {
					count[x]--
				}
			}
		}
		for _, n := range count {
			if n != 0 {
				return differencesOf(c, list)
			}
		}
		revisions, written := c[i].bySet[nft.RevisionSet], list[i].Elements[nft.RevisionSet]
		if len(revisions) != 1 || revisions[0].Comment != written[0].Comment {
			return fmt.Sprintf("%s: the revisions are %v; want %v", c[i].family.NFT(), revisions, written)
		}
	}
	return ""
}

// differencesOf is lacking for people.
func differencesOf(c *content, list ipfamily.Per[nft.Listing]) string {
	count := map[string]int{}
	got := list
	for i := range list {
		for _, l := range strings.Split(lines(list[i:i+1]), "\n") {
			count[l]--
		}
		for set := range nft.NumSets {
			got[i].Elements[set] = nil
			for _, e := range c[i].bySet[set] {
				got[i].Elements[set] = append(got[i].Elements[set], nft.Listed{Element: e})
			}
		}
		for _, l := range strings.Split(lines(got[i:i+1]), "\n") {
			count[l]++
		}
	}
	var out []string
	for l, n := range count {
		if n > 0 && !strings.Contains(l, " affinity ") {
			out = append(out, "too much: "+l)
		} else if n < 0 {
			out = append(out, "missing:  "+l)
		}
	}
	slices.Sort(out)
	return strings.Join(out[:min(len(out), 20)], "\n")
}

// verify compares the kernel with what the objects ask for.
func (w *walker) verify() {
	w.t.Helper()
	st, conflicts := dataplane.Compute(w.cfg, w.world.snapshot(w.Rand))
	w.Count["contended keys"] += len(conflicts)
	list := nft.List(st)
	var c content
	for i := range c {
		w.readElements(&c[i], i)
	}
	if d := lacking(&c, list); d != "" {
		w.fail("the kernel does not hold what it should:\n%s", d)
	}
	if w.meddled || w.renewed || w.Step%4 == 0 {
		w.verifyStructure(st, list)
	}
	w.verifyAffinity(&c, list)
	w.verifyQuiet()
	w.watch.settled(st)
	w.meddled, w.renewed, w.adopted = false, false, false
}

// verifyStructure compares sets, chains and rules. A process that knows nothing must find all as it wants it.
func (w *walker) verifyStructure(st *dataplane.State, list ipfamily.Per[nft.Listing]) {
	w.t.Helper()
	var found ipfamily.Per[nft.Found]
	for i, f := range ipfamily.All {
		s, err := w.eye.structure(f, list[i].Table, w.backend.model.Layout(f))
		w.must(err)
		if !s.sets || len(s.differences) > 0 {
			again, _ := w.eye.structure(f, list[i].Table, w.backend.model.Layout(f))
			w.fail("%s\nread again: %q", strings.Join(s.differences, "\n"), again.differences)
		}
		for id := range s.Chains {
			if !slices.ContainsFunc(list[i].Table.Chains, func(c nft.Chain) bool { return c.ID == id }) {
				w.fail("%s: chain %s is too much", f.NFT(), id.Name())
			}
		}
		if s.Revision != w.backend.model.Revision(f) {
			w.fail("%s: revision %v; the model has %v", f.NFT(), s.Revision, w.backend.model.Revision(f))
		}
		for set, n := range s.counts {
			if n > 1024 && nft.SetID(set) != nft.Affinity {
				w.Count["large sets seen"]++
			}
		}
		found[i] = s.Found
	}
	var fresh nft.Model
	fresh.Load(st)
	if fresh.Stale(&found).Any() {
		w.fail("another process would not adopt what is there")
	}
}

// verifyQuiet says that there is nothing left to do, and that nothing is done.
func (w *walker) verifyQuiet() {
	w.t.Helper()
	before, err := w.eye.Generation()
	w.must(err)
	if got := w.backend.generation; got != before {
		w.fail("the backend knows of generation %d; it is %d", got, before)
	}
	if w.backend.syncState != stateInSync {
		w.fail("the backend does not trust itself: %d", w.backend.syncState)
	}
	r, err := w.backend.ApplyAll(w.planner.State(), w.change(w.planner.State()))
	w.must(err)
	if after, err := w.eye.Generation(); err != nil || after != before || r.Bytes > 0 {
		w.fail("there was nothing to write; generation %d became %d: %+v", before, after, r)
	}
	for i, f := range ipfamily.All {
		info, err := w.eye.table(f)
		w.must(err)
		if info.flags&tableDormant != 0 {
			w.fail("%s: the table sleeps", f.NFT())
		}
		if port, err := w.backend.conn.Wire.Port(); info.owner != 0 && (err != nil || info.owner != port) {
			w.fail("%s: the table belongs to %d, not to %d (%v)", f.NFT(), info.owner, port, err)
		}
		if w.backend.Owns() && info.owner == 0 && info.flags&tablePersist != 0 {
			w.fail("%s: the table belongs to nobody", f.NFT())
		}
		w.handle(i, info)
	}
}

// handle looks whether a table is still the same. One that was made anew without need has lost its affinity without
// need.
func (w *walker) handle(i int, info tableInfo) {
	w.t.Helper()
	if was := w.handles[i]; was != info.handle {
		if was != 0 && !w.renewed {
			w.fail("%s: the table was made anew", ipfamily.All[i].NFT())
		}
		w.handles[i] = info.handle
		clear(w.clients[i])
		w.Count["tables made anew"]++
	}
}

// member is an endpoint of a sticky pool.
type member struct {
	pool uint32
	ep   netip.AddrPort
}

// acknowledged notes who need not be remembered any more, after an Apply.
func (w *walker) acknowledged() {
	for i, f := range ipfamily.All {
		for e := range w.clients[i] {
			if !w.backend.model.Remembers(f, &e) {
				delete(w.clients[i], e)
			}
		}
	}
}

func (m member) compare(o member) int { return cmp.Or(cmp.Compare(m.pool, o.pool), m.ep.Compare(o.ep)) }

// verifyAffinity says that no client stays with an endpoint that is gone, and that all others do stay.
func (w *walker) verifyAffinity(c *content, list ipfamily.Per[nft.Listing]) {
	w.t.Helper()
	for i, f := range ipfamily.All {
		info, err := w.eye.table(f)
		w.must(err)
		w.handle(i, info)
		w.members[i] = map[member]bool{}
		for _, e := range list[i].Elements[nft.StickyEndpoints] {
			w.members[i][member{e.ID(), e.Member()}] = true
		}
		there := map[nft.Element]bool{}
		for _, e := range c[i].bySet[nft.Affinity] {
			there[e] = true
			if !w.members[i][member{e.ID(), e.Target()}] {
				w.fail("%s: a client stays with %v, which is gone", f.NFT(), e.Target())
			}
		}
		for e := range w.clients[i] {
			if !there[e] {
				w.fail("%s: a client was forgotten: %s", f.NFT(), elementText(f, &e))
			}
		}
		w.Count["clients seen"] += len(there)
	}
}

// remember adds affinity entries as packets would: nobody learns of a transaction.
func (w *walker) remember() {
	w.t.Helper()
	b := &w.backend.batch
	for i, f := range ipfamily.All {
		var entries []nft.Element
		for _, m := range slices.SortedFunc(maps.Keys(w.members[i]), member.compare) {
			if w.IntN(3) == 0 && len(w.clients[i]) < 100 {
				entries = append(entries, w.client(f, m))
			}
		}
		if len(entries) == 0 {
			continue
		}
		b.Reset()
		b.messages = b.messages[:0]
		b.Begin()
		b.elements(f, unix.NFT_MSG_NEWSETELEM, nft.Affinity, entries)
		b.Finish()
		refused, err := w.backend.conn.Commit(b.Bytes())
		if err != nil || len(refused) > 0 {
			w.fail("%v", errors.Join(err, w.backend.refusals(refused)))
		}
		w.backend.generation = nextGeneration(w.backend.generation)
		for _, e := range entries {
			w.clients[i][e] = true
		}
		w.Count["clients"] += len(entries)
	}
}

// client gives the entry of another client of an endpoint.
func (w *walker) client(f ipfamily.Family, m member) nft.Element {
	w.nextIP++
	key := binary.NativeEndian.AppendUint32(binary.NativeEndian.AppendUint32(nil, m.pool), uint32(w.nextIP))
	data := binary.BigEndian.AppendUint16(m.ep.Addr().AsSlice(), m.ep.Port())
	e, _ := nft.ElementFrom(f, nft.Affinity, key, nil, append(data, 0, 0), "", "")
	return e
}
