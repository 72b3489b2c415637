package plan

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/nft/kernel"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Writes is what Verdict would write.
type Writes struct {
	Transactions int `json:"transactions"`
	// Added, Replaced and Removed count elements, Chains the chains that come, go or get other rules, and Sets the sets
	// that come or go.
	Added    int `json:"added"`
	Replaced int `json:"replaced"`
	Removed  int `json:"removed"`
	Chains   int `json:"chains"`
	Sets     int `json:"sets"`
	// Services counts by Service, the largest first, the first maxServices. The name is empty for elements that belong to
	// no Service alone.
	Services []ServiceWrites `json:"services,omitempty"`
	// Lines are what is written as nft writes it, with + or -, the first maxLines; MoreLines counts the others.
	Lines     []string `json:"lines,omitempty"`
	MoreLines int      `json:"moreLines,omitempty"`
	// Digests are those of the tables afterwards, by family, if they are known.
	Digests map[string]string `json:"digests,omitempty"`
}

// ServiceWrites counts the elements of a Service that are added and removed. A replaced element is both.
type ServiceWrites struct {
	Service string `json:"service"`
	Added   int    `json:"added"`
	Removed int    `json:"removed"`
}

// maxLines bounds the lines of Writes.
const maxLines = 10000

// base reads what the kernel holds, which should be what the objects ask for now.
func (m *maker) base() (*kernel.Base, error) {
	if m.Kernel == nil {
		b := &kernel.Base{Model: &nft.Model{Counters: m.Counters}}
		b.Model.Load(m.planner.State())
		return b, nil
	}
	b, err := m.Kernel.Base(m.planner.State(), m.Counters)
	if err != nil {
		return nil, err
	}
	switch {
	case !b.There:
		m.note("Verdict has no tables on this node: what is written is counted from what the objects ask for now")
	case b.Stale.All():
		m.note("the kernel does not hold what the objects ask for now (see verdict diff): what is written is counted " +
			"from the objects")
	default:
		m.out.Base = "kernel"
		if b.Stale.Any() {
			m.note("the kernel does not hold all that the objects ask for now (see verdict diff): what is written of that " +
				"is counted from the objects")
		}
	}
	return b, nil
}

// writes plans the transactions.
func (m *maker) writes(b *kernel.Base) error {
	if m.Kernel != nil {
		ok, err := m.Kernel.LearnSlots(b, m.change.Services)
		if err != nil {
			return err
		}
		if !ok {
			m.out.Base = "objects"
			m.note("the kernel's tables changed while they were read: which endpoint has which slot is not known")
			b.Model = &nft.Model{Counters: m.Counters}
			b.Model.Load(m.stateBefore())
		}
	}
	var have ipfamily.Per[nft.Table]
	for i, f := range ipfamily.All {
		have[i] = b.Model.Structure(f)
	}
	remembered, err := m.remembered(b)
	if err != nil {
		return err
	}
	txns := b.Plan(m.planner.State(), m.change)
	m.forget(b, remembered)
	w := &m.out.Writes
	for _, txn := range txns {
		if w.Transactions++; txn.InTwo() {
			w.Transactions++
		}
		added, replaced, removed := txn.Counts()
		w.Added, w.Replaced, w.Removed = w.Added+added, w.Replaced+replaced, w.Removed+removed
		for i := range txn.Tables {
			tt := &txn.Tables[i]
			w.Chains += len(tt.AddChains) + len(tt.DelChains) + len(tt.Rewrite)
			w.Sets += len(tt.AddSets) + len(tt.DelSets)
		}
	}
	m.out.differences = nft.Differences(txns, &have)
	m.countWrites()
	if m.out.Base == "kernel" {
		w.Digests = map[string]string{}
		for _, f := range ipfamily.All {
			digests := b.Model.Digests(f)
			w.Digests[f.NFT()] = digests.Total().String()
		}
	}
	return nil
}

// client is an element of the map of remembered clients, and the Service that it belongs to.
type client struct {
	element nft.Element
	service snapshot.Name
}

// remembered lists the clients that are remembered now, unless there are too many to list.
func (m *maker) remembered(b *kernel.Base) (list ipfamily.Per[[]client], err error) {
	m.forgets = map[snapshot.Name]int{}
	if m.out.Base != "kernel" {
		return list, nil
	}
	for i, f := range ipfamily.All {
		if !b.Model.Sticky(f) {
			continue
		}
		sizes, known, err := m.Kernel.Sizes(f)
		if err != nil {
			return list, err
		}
		if !known || sizes[nft.Affinity] > kernel.ListMost {
			m.note("%s: how many clients lose their session affinity is not known: there are too many to list, or the "+
				"kernel does not count them", f)
			continue
		}
		listed, _, err := m.Kernel.List(f, nft.Affinity)
		if err != nil {
			return list, err
		}
		for n := range listed {
			if b.Model.Remembers(f, &listed[n].Element) {
				name, _ := b.Model.ServiceOf(listed[n].ID())
				list[i] = append(list[i], client{listed[n].Element, name})
			}
		}
	}
	return list, nil
}

// forget counts the clients that are forgotten, by Service.
func (m *maker) forget(b *kernel.Base, remembered ipfamily.Per[[]client]) {
	for i, f := range ipfamily.All {
		for n := range remembered[i] {
			if e := &remembered[i][n].element; !b.Model.Remembers(f, e) {
				m.forgets[remembered[i][n].service]++
				m.out.Effects.Forgets++
			}
		}
	}
}

// stateBefore returns what the objects asked for before the change.
func (m *maker) stateBefore() *dataplane.State {
	s := m.was
	s.Services = maps.Clone(m.planner.State().Services)
	for i, n := range m.change.Services {
		if s.Services[n] = m.before[i]; m.before[i] == nil {
			delete(s.Services, n)
		}
	}
	return &s
}

// countWrites counts by Service, and writes lines.
func (m *maker) countWrites() {
	w, by := &m.out.Writes, map[string]*ServiceWrites{}
	for i := range m.out.differences {
		d := &m.out.differences[i]
		if len(w.Lines) < maxLines {
			w.Lines = append(w.Lines, d.String())
		} else {
			w.MoreLines++
		}
		if d.Set == nft.NumSets {
			continue
		}
		s := by[d.Service()]
		if s == nil {
			s = &ServiceWrites{Service: d.Service()}
			by[d.Service()] = s
		}
		if d.Wanted {
			s.Added++
		} else {
			s.Removed++
		}
	}
	for _, s := range by {
		w.Services = append(w.Services, *s)
	}
	slices.SortFunc(w.Services, func(a, b ServiceWrites) int {
		return cmp.Or(cmp.Compare(b.Added+b.Removed, a.Added+a.Removed), strings.Compare(a.Service, b.Service))
	})
	w.Services = w.Services[:min(len(w.Services), maxServices)]
}
