package kernel

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"net/netip"
	"slices"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Inspector answers from our tables.
type Inspector struct{ *Reader }

var _ reconcile.Inspector = (*Inspector)(nil)

// Inspect gives an inspector for the network namespace of the calling thread.
func Inspect() (*Inspector, error) {
	r, err := OpenReader()
	if err != nil {
		return nil, err
	}
	return &Inspector{r}, nil
}

// Name implements reconcile.Inspector.
func (i *Inspector) Name() string { return "nftables" }

// Present implements reconcile.Inspector.
func (i *Inspector) Present(context.Context) (bool, error) {
	revisions, err := i.Revisions()
	return err == nil && slices.ContainsFunc(revisions[:], func(r nft.Revision) bool { return r.Number != 0 }), err
}

// Settings implements reconcile.Inspector. Whether IPVS is in use, it does not know.
func (i *Inspector) Settings(context.Context) (*dataplane.Settings, error) { return settingsOf(i) }

// tables is where an inspector reads: a Reader or a Replay.
type tables interface {
	Tables
	Table(ipfamily.Family) (*TableFound, error)
	Sizes(ipfamily.Family) (n [nft.NumSets]int, known bool, err error)
}

func settingsOf(from tables) (*dataplane.Settings, error) {
	s := &dataplane.Settings{}
	for n, f := range ipfamily.All {
		t, err := from.Table(f)
		if err != nil {
			return nil, err
		}
		s.Pods[n] = t.Structure.Pods
		health, err := healthIn(from, f)
		if err != nil {
			return nil, err
		}
		s.Unhealthy = append(s.Unhealthy, health...)
		macs, _, err := from.List(f, nft.NodeMACs)
		if err != nil {
			return nil, err
		}
		for i := range macs {
			s.NodeMACs = append(s.NodeMACs, snapshot.MAC(macs[i].Key()))
		}
		if f == ipfamily.IPv4 {
			s.MasqueradeAll, s.LocalhostNodePorts = t.Structure.MasqueradeAll, t.Structure.GuardLoopback
		}
	}
	return s, configIn(from, s)
}

// configIn reads the settings in force. Both tables have them.
func configIn(from tables, s *dataplane.Settings) error {
	for _, f := range ipfamily.All {
		listed, _, err := from.List(f, nft.SettingsSet)
		if err != nil {
			return err
		}
		if lines := nft.SettingsOf(listed); lines != nil {
			c := dataplane.ConfigOf(lines)
			s.Config = &c
			return nil
		}
	}
	return nil
}

// healthIn reads which endpoints a table calls unhealthy.
func healthIn(from Tables, f ipfamily.Family) (out []dataplane.EndpointHealth, err error) {
	listed, _, err := from.List(f, nft.UnhealthyEndpoints)
	if err != nil || len(listed) == 0 {
		return nil, err
	}
	slots := map[uint32]*nft.Element{}
	for i := range listed {
		id := listed[i].ID()
		if listed[i].NamesBucket() && slots[id] == nil {
			for _, keys := range nft.FirstSlots(id) {
				found, err := from.Get(f, keys[0].Set, keys)
				if err != nil {
					return nil, err
				}
				if len(found) > 0 {
					slots[id] = &found[0].Element
				}
			}
		}
		if h, ok := listed[i].Health(slots[id]); ok {
			out = append(out, h)
		}
	}
	slices.SortFunc(out, func(a, b dataplane.EndpointHealth) int {
		return cmp.Or(a.Port.Compare(b.Port), cmp.Compare(a.Pool, b.Pool), a.Endpoint.Compare(b.Endpoint))
	})
	return out, nil
}

// traceTries is how often a packet is traced, in the hope that nobody writes meanwhile.
const traceTries = 3

// Trace implements reconcile.Inspector.
func (i *Inspector) Trace(_ context.Context, p dataplane.Packet, node dataplane.LocalNode) (*dataplane.Trace, error) {
	return trace(i, p, node)
}

func trace(from tables, p dataplane.Packet, node dataplane.LocalNode) (t *dataplane.Trace, err error) {
	f := ipfamily.Of(p.Destination)
	for range traceTries {
		var before, after ipfamily.Per[nft.Revision]
		if before, err = from.Revisions(); err != nil {
			return nil, err
		}
		if t, err = traceOnce(from, f, p, node); err != nil {
			return nil, err
		}
		t.Revision, t.Counted = before[f].Number, before[f].Counted
		if after, err = from.Revisions(); err != nil || before == after {
			return t, err
		}
	}
	return t, nil
}

func traceOnce(from tables, f ipfamily.Family, p dataplane.Packet, node dataplane.LocalNode) (*dataplane.Trace, error) {
	table, err := from.Table(f)
	if err != nil {
		return nil, err
	}
	w, unclear, err := table.walk(from, p, node)
	if err != nil {
		return nil, err
	}
	t := w.Trace(f)
	t.Unclear = slices.Concat(table.Wrong, unclear)
	switch {
	case !table.There:
		t.Notes = append(t.Notes, fmt.Sprintf("the table %s %s is not there: nobody carries Services on this node", f.NFT(),
			nft.TableName))
	case table.Dormant:
		t.Notes = append(t.Notes, fmt.Sprintf("the table %s %s is dormant: it does nothing", f.NFT(), nft.TableName))
	}
	_, pool, found := w.Frontend()
	if !found && t.Port.Service != (snapshot.Name{}) { // other nodes' share
		return t, nil
	}
	if !found {
		t.Near, err = near(from, f, p.Destination)
		return t, err
	}
	t.Unhealthy, err = healthIn(from, f)
	t.Unhealthy = slices.DeleteFunc(t.Unhealthy, func(h dataplane.EndpointHealth) bool { return h.Pool != pool.PoolID() })
	return t, err
}

// near gives the frontends at an address, as long as that is cheap.
func near(from tables, f ipfamily.Family, at netip.Addr) (near []dataplane.Neighbour, err error) {
	sizes, known, err := from.Sizes(f)
	if err != nil || !known || sizes[nft.Services] > ListMost {
		return nil, err
	}
	listed, _, err := from.List(f, nft.Services)
	if err != nil {
		return nil, err
	}
	for n := range listed {
		if k := listed[n].FrontendKey(); k.Addr == at {
			port, _ := listed[n].PortName(k.Protocol)
			near = append(near, dataplane.Neighbour{Key: k, Port: port})
		}
	}
	slices.SortFunc(near, func(a, b dataplane.Neighbour) int { return a.Key.Compare(b.Key) })
	return near, nil
}

// printMost bounds how many elements are printed of a set that rules write to: there may be hundreds of thousands, of
// clients that come and go.
const printMost = 1000

// Print implements reconcile.Inspector. What a proxy writes meanwhile may be there or not.
func (i *Inspector) Print(_ context.Context, w io.Writer) error {
	for _, f := range ipfamily.All {
		t, err := i.Table(f)
		if err != nil {
			return err
		}
		if !t.There {
			continue
		}
		l := nft.Listing{Table: t.Table}
		if err := i.conn.ruleCounters(f, l.Table.Chains); err != nil {
			return rights(err)
		}
		for n := range l.Table.Sets {
			set := l.Table.Sets[n].ID
			if set.IsDynamic() {
				l.Elements[set], l.Left[set], err = i.conn.some(f, set, printMost)
			} else {
				l.Elements[set], err = i.conn.Elements(f, set)
			}
			if err != nil {
				return rights(err)
			}
		}
		if err := l.Print(w); err != nil {
			return err
		}
	}
	return nil
}

// Differences implements reconcile.Inspector.
func (i *Inspector) Differences(_ context.Context, wanted *dataplane.State) (*dataplane.Differences, error) {
	var model *nft.Model
	if wanted != nil {
		model = &nft.Model{}
		model.Load(wanted)
	}
	contents, err := i.Contents(model)
	if err != nil {
		return nil, err
	}
	d := &dataplane.Differences{Wrong: contents.Wrong, Quiet: contents.Quiet,
		Contradictions: plainDifferences(contents.Contradictions)}
	if contents.Unchecked > 0 {
		d.Partial = true
		d.Notes = append(d.Notes, fmt.Sprintf("%d frontends were written to whenever one looked: they could not be checked",
			contents.Unchecked))
	}
	for n, f := range ipfamily.All {
		contents.addTo(n, f, d)
		for e := range contents.Found[n].Elements[nft.Scheduled] {
			d.Scheduled = append(d.Scheduled, contents.Found[n].Elements[nft.Scheduled][e].FrontendKey())
		}
	}
	if model != nil {
		have := ipfamily.Per[nft.Table]{contents.Tables[0].Table, contents.Tables[1].Table}
		d.Differences = plainDifferences(model.Differences(&contents.Found, &have))
	}
	return d, nil
}

// addTo compares a table with what it says of itself.
func (c *Contents) addTo(n int, f ipfamily.Family, d *dataplane.Differences) {
	t, found := c.Tables[n], &c.Found[n]
	name := f.NFT() + " " + nft.TableName
	out := dataplane.InspectedTable{Family: f.NFT(), Name: name, There: t.There, Owner: t.Owner,
		Revision: found.Revision.Number,
		Unit:     "element"}
	for set, elements := range found.Elements {
		if nft.SetID(set).IsContent() {
			out.Elements += len(elements)
		}
	}
	written, held := found.Digests.With(found.Revision.Digest), nft.DigestsOfElements(f, t.Structure, found)
	switch {
	case !t.There:
	case found.Revision == nft.Revision{}:
		d.Wrong = append(d.Wrong, name+": it has no revision: whoever wrote it was not done, or was not Verdict")
	case !c.Quiet:
		out.Digest = written.Total().String()
		d.Partial = true
		d.Notes = append(d.Notes, name+": it is written to all the time; its digest could not be checked")
	default:
		out.Digest, out.Found = written.Total().String(), held.Total().String()
		if held != written {
			d.Wrong = append(d.Wrong,
				fmt.Sprintf("%s: it does not hold what was last written: its digest should be %s and is %s",
					name, out.Digest, out.Found))
		}
	}
	d.Tables = append(d.Tables, out)
}

func plainDifferences(list []nft.Difference) (out []dataplane.Difference) {
	for i := range list {
		d := &list[i]
		p := dataplane.Difference{Wanted: d.Wanted, Family: d.Family.NFT(), Object: d.Text,
			Line: d.Family.NFT() + " " + d.Text}
		p.Port, _ = dataplane.ParsePortName(d.Port, 0)
		if d.Set != nft.NumSets {
			p.Set = d.Set.String()
			p.Place = p.Family + " " + p.Set + " " + string(d.Element.Key())
		}
		out = append(out, p)
	}
	return out
}
