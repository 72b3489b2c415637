package nft

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// Listing is one table as nft lists it: the structure with the elements of each set.
type Listing struct {
	Table    Table
	Elements [NumSets][]Listed
	// Left is how many elements of each set are left out.
	Left [NumSets]int
}

// Listed is an element with what the kernel adds to it.
type Listed struct {
	Element
	// Counted says that the element counts packets; in our tables these are connections.
	Counted        bool
	Packets, Bytes uint64
	// Timeout and Expires are set for the elements of dynamic maps.
	Timeout, Expires time.Duration
}

// List returns the tables for a state, as they are in the kernel after the first transaction.
func List(s *dataplane.State) ipfamily.Per[Listing] {
	var m Model
	var out ipfamily.Per[Listing]
	txn := m.Plan(s, dataplane.Change{}, 0)
	for i := range txn.Tables {
		tt := &txn.Tables[i]
		out[i].Table = *tt.Create
		out[i].Table.Chains = append(out[i].Table.Chains, tt.AddChains...)
		for set, elements := range tt.Add {
			if len(elements) == 0 {
				continue
			}
			out[i].Elements[set] = make([]Listed, len(elements))
			for n := range elements {
				out[i].Elements[set][n].Element = elements[n]
			}
		}
	}
	return out
}

// Structure returns the table of a family as the model has it, with every chain.
func (m *Model) Structure(f ipfamily.Family) Table {
	tm := &m.tables[f]
	ids := make([]ChainID, 0, len(tm.chains))
	for id := range tm.chains {
		ids = append(ids, id)
	}
	slices.SortFunc(ids, compareChains)
	return TableOf(f, tm.structure, ids)
}

// Layout returns the structure that the table of a family is made for.
func (m *Model) Layout(f ipfamily.Family) Structure { return m.tables[f].structure }

// Print writes a table as nft text, elements sorted by key. `nft -f` loads the text, and then lists the same as what
// the proxy itself writes.
func (l *Listing) Print(w io.Writer) error {
	b := bufio.NewWriter(w)
	t := &l.Table
	fmt.Fprintf(b, "table %s %s {\n\tcomment %q\n", t.Family.NFT(), TableName, t.Comment)
	l.printPart(b, false)
	if slices.ContainsFunc(t.Sets, func(s Set) bool { return s.ID.IsIngress() }) {
		fmt.Fprintf(b, "table netdev %s {\n\tcomment %q\n", IngressTable(t.Family), IngressComment)
		l.printPart(b, true)
	}
	return b.Flush()
}

// printPart prints what is in the family's table, or at the ingress.
func (l *Listing) printPart(b *bufio.Writer, ingress bool) {
	t := &l.Table
	for i := range t.Sets {
		if t.Sets[i].ID.IsIngress() == ingress {
			printSet(b, t.Family, &t.Sets[i], l.Elements[t.Sets[i].ID], l.Left[t.Sets[i].ID])
		}
	}
	for i := range t.Chains {
		if t.Chains[i].ID.Kind.IsIngress() == ingress {
			printChain(b, t.Family, &t.Chains[i])
		}
	}
	b.WriteString("}\n")
}

func printSet(w *bufio.Writer, f ipfamily.Family, s *Set, elements []Listed, left int) {
	kind, data := "set", ""
	switch {
	case s.Verdicts:
		kind, data = "map", " : verdict"
	case s.IsMap():
		kind, data = "map", " : "+fieldsText(f, s.Data)
	}
	fmt.Fprintf(w, "\n\t%s %s {\n\t\ttypeof %s%s\n", kind, s.Name(), fieldsText(f, s.Key), data)
	if s.Size > 0 {
		fmt.Fprintf(w, "\t\tsize %d\n", s.Size)
	}
	switch {
	case s.Interval:
		w.WriteString("\t\tflags interval\n")
	case s.Dynamic:
		w.WriteString("\t\tflags dynamic,timeout\n")
	}
	if s.Counter {
		w.WriteString("\t\tcounter\n")
	}
	if s.Limit {
		fmt.Fprintf(w, "\t\t%s\n", NoLimit)
	}
	fmt.Fprintf(w, "\t\tcomment %q\n", s.Comment)
	slices.SortFunc(elements, func(a, b Listed) int { return compareElements(f, s, &a.Element, &b.Element) })
	for i := range elements {
		if i == 0 {
			w.WriteString("\t\telements = { ")
		} else {
			w.WriteString(",\n\t\t             ")
		}
		w.WriteString(elements[i].Text(f, s))
	}
	if len(elements) > 0 {
		w.WriteString(" }\n")
	}
	if left > 0 {
		fmt.Fprintf(w, "\t\t# and %d elements more, which are left out here\n", left)
	}
	w.WriteString("\t}\n")
}

// Text gives the element as nft lists it.
func (l *Listed) Text(f ipfamily.Family, s *Set) string {
	extra := ""
	if l.Counted {
		extra = fmt.Sprintf(" counter packets %d bytes %d", l.Packets, l.Bytes)
	}
	if l.Timeout > 0 {
		extra += " timeout " + timeText(l.Timeout) + " expires " + timeText(l.Expires)
	}
	return l.text(f, s, extra)
}

// compareElements orders by key; slots and pool ids, which the kernel keeps in the host's byte order, by value.
func compareElements(f ipfamily.Family, s *Set, a, b *Element) int {
	off := 0
	for _, field := range s.Key {
		n := field.Len(f)
		x, y := a.key[off:off+n], b.key[off:off+n]
		if (field == RandomSlot || field == Priority || field == Mark) && !s.Interval {
			x, y = bigEndian(x), bigEndian(y)
		}
		if c := bytes.Compare(x, y); c != 0 {
			return c
		}
		off += (n + 3) &^ 3
	}
	return int(a.Bits) - int(b.Bits)
}

// noteIPv6Affinity precedes the one statement that an older nft lists but cannot load.
const noteIPv6Affinity = "# nft 1.0.6 aborts when it loads the next line (it lists it well): " +
	"load it with nft 1.1 or later"

func writesIPv6Affinity(s Statement) bool {
	u, ok := s.(Update)
	return ok && u.Map == Affinity
}

func printChain(w *bufio.Writer, f ipfamily.Family, c *Chain) {
	fmt.Fprintf(w, "\n\tchain %s {\n", c.ID.Name())
	if c.Comment != "" {
		fmt.Fprintf(w, "\t\tcomment %q\n", c.Comment)
	}
	if c.Hook != nil {
		device := ""
		if c.Device != "" {
			device = fmt.Sprintf(" device %q", c.Device)
		}
		fmt.Fprintf(w, "\t\ttype %s hook %s%s priority %d; policy accept;\n", c.Hook.Type, c.Hook.Name, device,
			c.Hook.Priority)
	}
	for _, r := range c.Rules {
		if f == ipfamily.IPv6 && slices.ContainsFunc(r, writesIPv6Affinity) {
			fmt.Fprintf(w, "\t\t%s\n", noteIPv6Affinity)
		}
		fmt.Fprintf(w, "\t\t%s\n", r.Text(f))
	}
	w.WriteString("\t}\n")
}
