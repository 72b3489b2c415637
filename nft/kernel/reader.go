package kernel

import (
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/netlink"
	"github.com/verdict-proxy/verdict/nft"
)

// Reader reads our tables beside the process that writes them. It changes nothing and is not safe for concurrent use.
type Reader struct {
	conn *Conn
	// trees are what the trees of ranges hold in each family, which are listed once.
	trees map[treeOf][]nft.Listed
}

// treeOf is a set of ranges in a family's table.
type treeOf struct {
	family ipfamily.Family
	set    nft.SetID
}

// OpenReader gives a reader for the network namespace of the calling thread.
func OpenReader() (*Reader, error) {
	conn, err := Dial(0)
	if err != nil {
		return nil, err
	}
	conn.tolerant = true
	return &Reader{conn: conn, trees: map[treeOf][]nft.Listed{}}, nil
}

// Close closes the reader's socket.
func (r *Reader) Close() error { return r.conn.Close() }

// unreadable is ErrRights for those who only read, which takes the same right.
type unreadable struct{}

func (unreadable) Error() string {
	return "nf_tables cannot be read: run as root, or with CAP_NET_ADMIN"
}

func (unreadable) Is(target error) bool { return target == ErrRights }

// rights says what a refusal to read means.
func rights(err error) error {
	if errors.Is(err, unix.EPERM) {
		return unreadable{}
	}
	return err
}

// Revisions returns the revision of each table; the zero Revision if the table does not exist or has none.
func (r *Reader) Revisions() (out ipfamily.Per[nft.Revision], err error) {
	for i, f := range ipfamily.All {
		listed, err := r.conn.Elements(f, nft.RevisionSet)
		if err != nil {
			return out, rights(err)
		}
		elements := make([]nft.Element, len(listed))
		for n := range listed {
			elements[n] = listed[n].Element
		}
		out[i] = nft.RevisionOf(elements)
	}
	return out, nil
}

// Get gives those of some elements of a set that are there, by their keys. In a set of ranges it takes one key, and
// gives the range that holds it.
func (r *Reader) Get(f ipfamily.Family, set nft.SetID, keys []nft.Element) (out []nft.Listed, err error) {
	if set.IsTree() {
		return r.holding(treeOf{f, set}, keys)
	}
	err = r.conn.getListed(f, set, keys, func(l nft.Listed) { out = append(out, l) })
	return out, rights(err)
}

// holding looks in a tree, which the kernel keeps in a form that is not easily asked for by key.
func (r *Reader) holding(t treeOf, keys []nft.Element) ([]nft.Listed, error) {
	listed, read := r.trees[t]
	if !read {
		var err error
		if listed, err = r.conn.Elements(t.family, t.set); err != nil {
			return nil, rights(err)
		}
		r.trees[t] = listed
	}
	if len(keys) == 1 {
		if l, ok := nft.Holding(t.family, listed, &keys[0]); ok {
			return []nft.Listed{l}, nil
		}
	}
	return nil, nil
}

// List returns all elements of a set, in the kernel's order. Its cost grows faster than the set: beyond ListMost
// elements use Get. whole is false if others wrote so often meanwhile that elements may be missing.
func (r *Reader) List(f ipfamily.Family, set nft.SetID) (elements []nft.Listed, whole bool, err error) {
	r.conn.torn = false
	elements, err = r.conn.Elements(f, set)
	return elements, !r.conn.torn, rights(err)
}

// ListMost is the number of elements up to which listing is faster than reading by key.
const ListMost = dumpMost

// Sizes returns the number of elements of each set of a table. known is false where the kernel cannot tell (before
// Linux 6.16).
func (r *Reader) Sizes(f ipfamily.Family) (n [nft.NumSets]int, known bool, err error) {
	err = r.conn.objects(f, unix.NFT_MSG_GETSET, func(attrs netlink.Attributes) {
		for set := range nft.NumSets {
			if v := attrs[nftaSetCount]; len(v) == 4 && attrs[unix.NFTA_SET_NAME].Text() == set.String() {
				n[set], known = int(v.Big32()), true
			}
		}
	})
	return n, known, rights(err)
}

// TableFound is one of our tables as it was found.
type TableFound struct {
	// There says that there is such a table; Owner is the netlink port that may write it, 0 if everybody may; Dormant
	// says that it is switched off.
	There   bool
	Owner   uint32
	Dormant bool
	// Structure is what its rules tell it was made for, and Table has the chains and rules that are there: a rule that
	// is not Verdict's is a nft.Foreign.
	Structure nft.Structure
	Table     nft.Table
	// Wrong says in words in what sets, chains and rules are not those of such a structure. Numbered chains count as
	// right here, whether anything leads to them or not.
	Wrong []string
	// held is the same as it is on the wire, with chains of others.
	held *heldRules
}

// Table reads the structure of a table, without its elements. While a proxy adds and removes chains, chains and the
// maps that lead to them are seen at different moments: Wrong is what was seen at a moment when nobody wrote, or each
// of pieceTries times.
func (r *Reader) Table(f ipfamily.Family) (t *TableFound, err error) {
	var wrong []string
	for n := range pieceTries {
		quiet, err := r.quietly(func() (err error) {
			t, err = r.table(f)
			return err
		})
		if err != nil || quiet {
			return t, err
		}
		if n > 0 {
			t.Wrong = slices.DeleteFunc(t.Wrong, func(w string) bool { return !slices.Contains(wrong, w) })
		}
		if wrong = t.Wrong; len(wrong) == 0 {
			return t, nil
		}
	}
	return t, nil
}

// table is Table at whatever moment.
func (r *Reader) table(f ipfamily.Family) (*TableFound, error) {
	t := &TableFound{Table: nft.Table{Family: f}, held: &heldRules{}}
	info, err := r.conn.table(f)
	if err != nil || !info.exists {
		return t, rights(err)
	}
	t.There, t.Owner, t.Dormant = true, info.owner, info.flags&tableDormant != 0
	held, err := r.conn.heldRules(f)
	if err != nil {
		return nil, rights(err)
	}
	settings, err := r.conn.Elements(f, nft.SettingsSet)
	if err != nil {
		return nil, rights(err)
	}
	wanted := t.read(f, held, settings)
	s, err := r.conn.structure(f, wanted, t.Structure)
	if err != nil {
		return nil, rights(err)
	}
	t.Wrong = s.differences
	return t, nil
}

// Contents is all that both tables hold.
type Contents struct {
	Tables ipfamily.Per[*TableFound]
	Found  ipfamily.Per[nft.Found]
	// Wrong says in words what of their structure is not as it should be.
	Wrong []string
	// Contradictions are elements that do not fit together.
	Contradictions []nft.Difference
	// Quiet says that the tables were not written to while they were read. Otherwise what was found may never have been
	// there at one moment, and elements may be missing. What is Wrong, and the Contradictions, were then looked for
	// piece by piece, each at a moment when nobody wrote, and without Unchecked frontends for which there was none.
	Quiet     bool
	Unchecked int
}

// quietTries is how often everything is read, until nobody writes meanwhile.
const quietTries = 3

// Contents reads everything and compares it with the tables of a model, or with what the found elements themselves
// require if wanted is nil. The cost grows with the number of elements: half a second for 100,000.
func (r *Reader) Contents(wanted *nft.Model) (c *Contents, err error) {
	for range quietTries {
		quiet, err := r.quietly(func() (err error) {
			c, err = r.contents(wanted)
			return err
		})
		if err != nil {
			return nil, err
		}
		if c.Quiet = c.Quiet && quiet; c.Quiet {
			c.Contradictions = nft.Inconsistencies(&c.Found)
			return c, nil
		}
	}
	return c, r.piecemeal(c)
}

// quietly calls read, and says whether nobody wrote to our tables meanwhile.
func (r *Reader) quietly(read func() error) (quiet bool, err error) {
	before, err := r.Revisions()
	if err != nil {
		return false, err
	}
	if err := read(); err != nil {
		return false, err
	}
	after, err := r.Revisions()
	return before == after, err
}

// A piece is so small that it is read between two transactions of a busy proxy; it is tried pieceTries times.
const (
	pieceFrontends = 64
	pieceTries     = 30
)

// piecemeal compares the tables piece by piece.
func (r *Reader) piecemeal(c *Contents) error {
	c.Wrong, c.Contradictions = nil, nil
	for i, f := range ipfamily.All {
		var err error
		if c.Tables[i], err = r.Table(f); err != nil {
			return err
		}
		c.Wrong = append(c.Wrong, c.Tables[i].structureDifferences(f)...)
		if c.Tables[i].There {
			c.Wrong = append(c.Wrong, c.Tables[i].Wrong...)
		}
		for _, set := range nft.FrontendSets() {
			frontends := c.Found[i].Elements[set]
			for len(frontends) > 0 {
				n := min(pieceFrontends, len(frontends))
				if err := r.piece(i, frontends[:n], c); err != nil {
					return err
				}
				frontends = frontends[n:]
			}
		}
	}
	return nil
}

// piece checks that everything that belongs to some frontends is consistent.
func (r *Reader) piece(family int, frontends []nft.Element, c *Contents) error {
	for range pieceTries {
		var found ipfamily.Per[nft.Found]
		quiet, err := r.quietly(func() error { return r.readPiece(ipfamily.All[family], frontends, &found[family]) })
		if err != nil {
			return err
		}
		if quiet {
			c.Contradictions = append(c.Contradictions, nft.Inconsistencies(&found)...)
			return nil
		}
	}
	c.Unchecked += len(frontends)
	return nil
}

// readPiece reads some frontends, with what split and restrict find for them, their pools, slots and members, by their
// keys.
func (r *Reader) readPiece(f ipfamily.Family, frontends []nft.Element, found *nft.Found) error {
	read := func(keys []nft.Element) error {
		if len(keys) == 0 {
			return nil
		}
		set := keys[0].Set
		return rights(r.conn.get(f, set, keys, func(e nft.Element) { found.Elements[set] = append(found.Elements[set], e) }))
	}
	if err := read(frontends); err != nil {
		return err
	}
	for _, keys := range found.InsideKeys() {
		if err := read(keys); err != nil {
			return err
		}
	}
	if err := read(found.PoolKeys()); err != nil {
		return err
	}
	for _, keys := range found.SlotKeys() {
		if err := read(keys); err != nil {
			return err
		}
	}
	for _, keys := range found.MemberKeys() {
		if err := read(keys); err != nil && !errors.Is(err, unix.ENOENT) {
			return err
		}
	}
	return nil
}

// structureDifferences describes what is wrong with a table's structure.
func (t *TableFound) structureDifferences(f ipfamily.Family) []string {
	switch {
	case !t.There:
		return []string{fmt.Sprintf("%s %s: the table is not there", f.NFT(), nft.TableName)}
	case t.Dormant:
		return []string{fmt.Sprintf("%s %s: the table is dormant: it does nothing", f.NFT(), nft.TableName)}
	}
	return nil
}

func (r *Reader) contents(wanted *nft.Model) (c *Contents, err error) {
	c = &Contents{}
	r.conn.torn = false
	for i, f := range ipfamily.All {
		if c.Tables[i], err = r.Table(f); err != nil {
			return nil, err
		}
	}
	if err := r.conn.readElements(&c.Found, nft.AllStale(), dumpMost); err != nil {
		return nil, rights(err)
	}
	for i, f := range ipfamily.All {
		if c.Wrong = append(c.Wrong, c.Tables[i].structureDifferences(f)...); !c.Tables[i].There {
			continue
		}
		layout := c.Tables[i].Structure
		want := nft.TableOf(f, layout, nft.ChainsFor(&c.Found[i].Elements))
		if wanted != nil {
			want, layout = wanted.Structure(f), wanted.Layout(f)
		}
		s, err := r.conn.structure(f, want, layout)
		if err != nil {
			return nil, rights(err)
		}
		s.Elements = c.Found[i].Elements
		c.Found[i] = s.Found
		c.Wrong = append(c.Wrong, s.differences...)
		c.Wrong = append(c.Wrong, s.miscounted(f, &c.Found[i].Elements)...)
	}
	c.Quiet = !r.conn.torn
	return c, nil
}

// miscounted says which sets have other elements besides those that were read, where the kernel counts them: slots
// that no pool leads to are not seen if they are read by their keys.
func (s *structure) miscounted(f ipfamily.Family, read *[nft.NumSets][]nft.Element) (out []string) {
	for set := range nft.NumSets {
		if !s.counted || !set.IsContent() || nft.SetByID(set).Interval {
			continue
		}
		if n := s.counts[set] - len(read[set]); n > 0 {
			out = append(
				out,
				fmt.Sprintf("%s %s: %s holds %d elements more than the pools lead to", f.NFT(), nft.TableName, set, n),
			)
		}
	}
	return out
}
