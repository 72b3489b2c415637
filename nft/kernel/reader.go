package kernel

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/nft"
)

// Reader reads our tables beside whoever writes them, and changes nothing. It is not safe for concurrent use.
type Reader struct {
	conn *Conn
	// cidrs are the ServiceCIDRs of each family, which are listed once; nil means not yet.
	cidrs [len(nft.Families)][]nft.Listed
}

// OpenReader gives a reader for the network namespace of the calling thread.
func OpenReader() (*Reader, error) {
	conn, err := Dial(0)
	if err != nil {
		return nil, err
	}
	conn.tolerant = true
	return &Reader{conn: conn}, nil
}

// Close closes the reader's socket.
func (r *Reader) Close() error { return r.conn.Close() }

// rights says what a refusal to read means.
func rights(err error) error {
	if errors.Is(err, unix.EPERM) {
		return fmt.Errorf("nf_tables cannot be read: run as root, or with CAP_NET_ADMIN: %w", unix.EPERM)
	}
	return err
}

// Revisions gives the revision of each table; the zero Revision of one that is not there, or has none.
func (r *Reader) Revisions() (out [len(nft.Families)]nft.Revision, err error) {
	for i, f := range nft.Families {
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

// Get gives those of some elements of a set that are there, by their keys. In a set of ranges it takes one key, and gives the range
// that holds it.
func (r *Reader) Get(f nft.Family, set nft.SetID, keys []nft.Element) (out []nft.Listed, err error) {
	if set == nft.ServiceCIDRs {
		return r.cidr(f, keys)
	}
	err = r.conn.getListed(f, set, keys, func(l nft.Listed) { out = append(out, l) })
	return out, rights(err)
}

// cidr looks in the ServiceCIDRs, which the kernel keeps in a form that is not easily asked for by key.
func (r *Reader) cidr(f nft.Family, keys []nft.Element) ([]nft.Listed, error) {
	i := 0
	if f == nft.IPv6 {
		i = 1
	}
	if r.cidrs[i] == nil {
		listed, err := r.conn.Elements(f, nft.ServiceCIDRs)
		if err != nil {
			return nil, rights(err)
		}
		r.cidrs[i] = append([]nft.Listed{}, listed...)
	}
	if len(keys) == 1 {
		if l, ok := nft.Holding(f, r.cidrs[i], &keys[0]); ok {
			return []nft.Listed{l}, nil
		}
	}
	return nil, nil
}

// List gives all elements of a set, in the kernel's order. It walks the set, at a cost that grows faster than the set: beyond
// ListMost elements use Get. Whole is false if others wrote so often meanwhile that some may be missing.
func (r *Reader) List(f nft.Family, set nft.SetID) (elements []nft.Listed, whole bool, err error) {
	r.conn.torn = false
	elements, err = r.conn.Elements(f, set)
	return elements, !r.conn.torn, rights(err)
}

// ListMost is how many elements are read faster by listing them than by their keys.
const ListMost = dumpMost

// Sizes gives how many elements each set of a table has, where the kernel tells (Linux 6.16); else it is not known.
func (r *Reader) Sizes(f nft.Family) (n [nft.NumSets]int, known bool, err error) {
	err = r.conn.objects(f, unix.NFT_MSG_GETSET, func(attrs map[uint16][]byte) {
		for set := range nft.NumSets {
			if v := attrs[nftaSetCount]; len(v) == 4 && unix.ByteSliceToString(attrs[unix.NFTA_SET_NAME]) == set.String() {
				n[set], known = int(be32(v)), true
			}
		}
	})
	return n, known, rights(err)
}

// TableFound is one of our tables as it was found.
type TableFound struct {
	// There says that there is such a table; Owner is the netlink port that may write it, 0 if everybody may; Dormant says that it
	// is switched off.
	There   bool
	Owner   uint32
	Dormant bool
	// Structure is what its rules tell it was made for, and Table has the chains and rules that are there: a rule that is not
	// Verdict's is a nft.Foreign.
	Structure nft.Structure
	Table     nft.Table
	// Wrong says in words in what sets, chains and rules are not those of such a structure. Numbered chains count as right here,
	// whether anything leads to them or not.
	Wrong []string
}

// Table reads the structure of a table, without its elements.
func (r *Reader) Table(f nft.Family) (*TableFound, error) {
	t := &TableFound{Table: nft.Table{Family: f}}
	info, err := r.conn.table(f)
	if err != nil || !info.there {
		return t, rights(err)
	}
	t.There, t.Owner, t.Dormant = true, info.owner, info.flags&tableDormant != 0
	held, err := r.conn.heldRules(f)
	if err != nil {
		return nil, rights(err)
	}
	t.Structure = held.structure(f)
	var numbered []nft.ChainID
	for _, name := range held.chains {
		if id, ok := nft.NumberedChain(name); ok {
			numbered = append(numbered, id)
		}
	}
	wanted := nft.TableOf(f, t.Structure, numbered)
	t.Table = held.table(f, wanted)
	s, err := r.conn.structure(f, wanted)
	if err != nil {
		return nil, rights(err)
	}
	t.Wrong = s.wrong
	return t, nil
}

// Contents is all that both tables hold.
type Contents struct {
	Tables [len(nft.Families)]*TableFound
	Found  [len(nft.Families)]nft.Found
	// Wrong says in words what of their structure is not as it should be.
	Wrong []string
	// Quiet says that the tables were not written to while they were read. Otherwise what was read may never have been there at
	// one moment, and elements may be missing.
	Quiet bool
}

// quietTries is how often everything is read in the hope that nobody writes meanwhile.
const quietTries = 3

// Contents reads everything, at a cost that grows with the number of elements: half a second for 100,000. It is compared with
// the tables that wanted gives; nil stands for what the elements found ask for.
func (r *Reader) Contents(wanted *[len(nft.Families)]nft.Table) (c *Contents, err error) {
	for range quietTries {
		before, err := r.Revisions()
		if err != nil {
			return nil, err
		}
		if c, err = r.contents(wanted); err != nil {
			return nil, err
		}
		after, err := r.Revisions()
		if err != nil {
			return nil, err
		}
		if c.Quiet = c.Quiet && before == after; c.Quiet {
			break
		}
	}
	return c, nil
}

func (r *Reader) contents(wanted *[len(nft.Families)]nft.Table) (c *Contents, err error) {
	c = &Contents{}
	r.conn.torn = false
	for i, f := range nft.Families {
		if c.Tables[i], err = r.Table(f); err != nil {
			return nil, err
		}
	}
	if err := r.conn.readElements(&c.Found); err != nil {
		return nil, rights(err)
	}
	for i, f := range nft.Families {
		if !c.Tables[i].There {
			c.Wrong = append(c.Wrong, fmt.Sprintf("%s %s: the table is not there", f, nft.TableName))
			continue
		}
		if c.Tables[i].Dormant {
			c.Wrong = append(c.Wrong, fmt.Sprintf("%s %s: the table is dormant: it does nothing", f, nft.TableName))
		}
		want := nft.TableOf(f, c.Tables[i].Structure, nft.ChainsFor(&c.Found[i].Elements))
		if wanted != nil {
			want = wanted[i]
		}
		s, err := r.conn.structure(f, want)
		if err != nil {
			return nil, rights(err)
		}
		s.Elements = c.Found[i].Elements
		c.Found[i] = s.Found
		c.Wrong = append(c.Wrong, s.wrong...)
		c.Wrong = append(c.Wrong, s.miscounted(f, &c.Found[i].Elements)...)
	}
	c.Quiet = !r.conn.torn
	return c, nil
}

// miscounted says which sets have other elements besides those that were read, where the kernel counts them: slots that no frontend
// leads to are not seen if they are read by their keys.
func (s *structure) miscounted(f nft.Family, read *[nft.NumSets][]nft.Element) (out []string) {
	for set := range nft.NumSets {
		if !s.counted || set == nft.Affinity || set == nft.RevisionSet || nft.SetByID(set).Interval {
			continue
		}
		if n := s.counts[set] - len(read[set]); n > 0 {
			out = append(out, fmt.Sprintf("%s %s: %s holds %d elements more than the frontends lead to", f, nft.TableName, set, n))
		}
	}
	return out
}
