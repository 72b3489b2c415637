package nft

// splitOrder is the order in which a transaction's elements go out when they cannot go together: what others lead to stands
// before what leads there. It ends with what turns packets away that no Service wants.
var splitOrder = [...]SetID{
	Endpoints, OutsideEndpoints, StickyEndpoints, SourceRanges, RestrictedServices, MasqueradeAlways, MasqueradeNode, Hairpin,
	Sticky, OutsideSticky, Remember, Scheduled, OutsideServices, Services, ClusterIPs, ServiceCIDRs,
}

// Split gives steps that together do what the transaction does, each with n elements at most, but for service ranges, which stay
// together. Every step leaves a frontend either as it was or as it is to be, and none that leads nowhere; a frontend that is
// new does nothing before it is complete. There is no revision between the first step and the last. Rollback takes back
// the whole, so it serves only if the first step fails.
func (t *Txn) Split(n int) []*Txn {
	s := splitter{most: n, steps: []*Txn{{undo: t.undo}}}
	for i := range t.Tables {
		tt, first := &t.Tables[i], &s.steps[0].Tables[i]
		first.Create, first.Keep, first.Rewrite = tt.Create, tt.Keep, tt.Rewrite
		first.AddChains, first.Resize = tt.AddChains, tt.Resize
		first.Del[RevisionSet] = tt.Del[RevisionSet]
	}
	for i := range t.Tables {
		tt := &t.Tables[i]
		goes := map[elementKey]Element{}
		for _, set := range splitOrder {
			s.set(i, tt, set, goes)
		}
	}
	last := &Txn{}
	for i := range t.Tables {
		tt, l := &t.Tables[i], &last.Tables[i]
		for at := len(splitOrder) - 1; at >= 0; at-- {
			set := splitOrder[at]
			for _, e := range tt.Del[set] {
				if !s.deleted[splitElement{i, set, e.identity()}] {
					s.del(i, e)
				}
			}
		}
		l.DelChains, l.DelForeign, l.Add[RevisionSet] = tt.DelChains, tt.DelForeign, tt.Add[RevisionSet]
	}
	return append(s.steps, last)
}

// splitter gathers steps.
type splitter struct {
	most  int
	steps []*Txn
	// used is how many elements the last step has.
	used    int
	deleted map[splitElement]bool
}

type splitElement struct {
	table int
	set   SetID
	key   elementKey
}

// set puts out what is added to a set, each element together with the one it replaces. Ranges may not overlap at any time: those
// that go, go first.
func (s *splitter) set(table int, tt *TableTxn, set SetID, goes map[elementKey]Element) {
	if s.deleted == nil {
		s.deleted = map[splitElement]bool{}
	}
	clear(goes)
	ranges := SetByID(set)
	for _, e := range tt.Del[set] {
		if ranges.Interval {
			s.mark(table, e)
			s.step(0).Tables[table].Del[set] = append(s.step(0).Tables[table].Del[set], e)
			continue
		}
		goes[e.identity()] = e
	}
	for _, e := range tt.Add[set] {
		old, replaces := goes[e.identity()]
		room := 1
		if set == ServiceCIDRs {
			room = 0
		}
		step := &s.step(room).Tables[table]
		if replaces {
			delete(goes, e.identity()) // nothing is replaced twice
			s.mark(table, old)
			step.Del[set] = append(step.Del[set], old)
			step.Replaced++
		}
		step.Add[set] = append(step.Add[set], e)
	}
}

func (s *splitter) mark(table int, e Element) {
	s.deleted[splitElement{table, e.Set, e.identity()}] = true
}

func (s *splitter) del(table int, e Element) {
	step := &s.step(1).Tables[table]
	step.Del[e.Set] = append(step.Del[e.Set], e)
}

// step gives the step that has room for some more elements. The first one is for the structure alone.
func (s *splitter) step(elements int) *Txn {
	if len(s.steps) == 1 || s.used+elements > s.most {
		s.steps, s.used = append(s.steps, &Txn{}), 0
	}
	s.used += elements
	return s.steps[len(s.steps)-1]
}
