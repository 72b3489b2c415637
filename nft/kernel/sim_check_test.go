package kernel

import (
	"fmt"
	"hash/maphash"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// maxWait is more than anybody waits for his turn while nothing is wrong: 30 s for a namespace that took long, as long
// until the next try after the last failure, and the rests in between.
const maxWait = 65 * time.Second

// checkAlways looks at what must hold after each step.
func (s *sim) checkAlways() {
	if s.f.risky() || s.k.torn > 0 {
		s.trouble = time.Now()
		return
	}
	p := s.proc.queue.Progress()
	if p.Since.IsZero() {
		return
	}
	since := p.Since
	if since.Before(s.trouble) {
		since = s.trouble
	}
	if waits := time.Since(since); waits > maxWait {
		s.Fail("%d Services and %d slices have waited for %v", p.Services, p.Slices, waits)
	}
}

// largestTable is how many slots the table of a hash has at most.
const largestTable = 16381

// committed looks at a transaction that was just acknowledged: its size, and that no endpoint is left of those that it
// took away.
func (s *sim) committed(c reconcile.Commit) {
	s.Note("committed %d added, %d replaced, %d removed, full %v, left %v", c.Added, c.Replaced, c.Removed, c.Full, c.Left)
	if s.f.dead { // whoever is dead hears nothing
		return
	}
	// A port that goes into other maps does so as a whole, and may be the last that there is room for: two tables of a
	// hash, removed and added.
	most := 2*writeAtOnce + 4*largestTable
	if c.Full || c.First || s.proc.filling {
		most = 2*fillAtOnce + 4*largestTable
	}
	s.proc.filling = (c.Full || s.proc.filling) && len(c.Left) > 0
	if n := c.Added + 2*c.Replaced + c.Removed; n > most {
		s.Fail("a transaction of %d elements", n)
	}
	var slots map[string]map[netip.AddrPort]bool
	for i, after := range c.After {
		gone := simGone(c.Before[i], after)
		if len(gone) == 0 {
			continue
		}
		if slots == nil {
			slots = s.k.endpoints()
		}
		name := c.Before[i].Name.String()
		for _, ep := range gone {
			if slots[name][ep] {
				s.Fail("%s: %v is gone, and in the kernel after the commit that said so", name, ep)
			}
		}
		s.Count["endpoints gone"] += len(gone)
	}
}

// simGone gives the endpoints that a Service had and has no longer.
func simGone(before, after *dataplane.Service) (out []netip.AddrPort) {
	if before == nil {
		return nil
	}
	now := map[netip.AddrPort]bool{}
	simEach(after, func(ep netip.AddrPort) { now[ep] = true })
	simEach(before, func(ep netip.AddrPort) {
		if !now[ep] {
			out = append(out, ep)
		}
	})
	return out
}

func simEach(svc *dataplane.Service, do func(netip.AddrPort)) {
	if svc == nil {
		return
	}
	for _, sp := range svc.Ports {
		for _, pool := range []*dataplane.Pool{sp.Cluster, sp.Local} {
			for _, e := range pool.Endpoints {
				do(e.AddrPort)
			}
		}
	}
}

// endpoints gives those that the kernel sends packets to, by Service.
func (k *simKernel) endpoints() map[string]map[netip.AddrPort]bool {
	out := map[string]map[netip.AddrPort]bool{}
	c := k.content()
	for i := range c {
		owner := simOwners(&c[i])
		for _, set := range []nft.SetID{nft.Endpoints, nft.UncountedEndpoints} {
			for _, e := range c[i].bySet[set] {
				name := owner[e.ID()]
				if out[name] == nil {
					out[name] = map[netip.AddrPort]bool{}
				}
				out[name][e.Target()] = true
			}
		}
	}
	return out
}

// simOwners says which Service a pool's id belongs to.
func simOwners(c *tableContent) map[uint32]string {
	owner := map[uint32]string{}
	for _, set := range nft.FrontendSets() {
		for _, e := range c.bySet[set] {
			owner[e.PoolID()] = e.Service()
		}
	}
	return owner
}

// inSync looks whether it is true: the kernel holds what a full computation of what was taken asks for, except for
// quarantined Services; and if nothing is held back, that is all that was told.
func (s *sim) inSync(in reconcile.InSync) {
	s.Count["in sync"]++
	if s.f.dead {
		return
	}
	p := s.proc.queue.Progress()
	if d := s.watch.missing(in.Snapshot, p.Programmed.Services); d != "" {
		s.Fail("said to be programmed: %s", d)
	}
	if p.Since.IsZero() {
		if d := s.watch.differs(in.Snapshot); d != "" {
			s.Fail("said to be in sync: %s", d)
		}
	}
	s.compare("said to be in sync", s.wanted(in.Snapshot), false)
}

// wanted gives what a snapshot asks for. If a namespace asks for nearly as many slots as it may have, who gets some
// depends on who had some before: then the process's own answer counts.
func (s *sim) wanted(of *snapshot.Snapshot) *dataplane.State {
	planner := s.proc.loop.Planner
	st, _ := dataplane.Compute(planner.Config(), of)
	for n := range s.slotsByHistory(st) {
		st.Services[n] = planner.State().Services[n]
		s.Count["slots by history"]++
	}
	return st
}

// slotsByHistory gives the Services that get slots from the process or from a computation without history, but not from
// both.
func (s *sim) slotsByHistory(st *dataplane.State) map[snapshot.Name]bool {
	out := map[snapshot.Name]bool{}
	for n, svc := range s.proc.loop.Planner.State().Services {
		other := st.Services[n]
		if other != nil && (svc.NotScheduled() == dataplane.SlotsFull) != (other.NotScheduled() == dataplane.SlotsFull) {
			out[n] = true
		}
	}
	return out
}

// compare compares the kernel with a state. If both are what they were when they were last found equal, there is
// nothing to do. Otherwise it compares the sums of what the sets hold; to be thorough, and if the sums differ, each
// element.
func (s *sim) compare(when string, st *dataplane.State, thorough bool) {
	s.Count["comparisons"]++
	holds, quarantined := s.k.sums(), map[string]bool{}
	for _, q := range s.proc.loop.Quarantined() {
		quarantined[q.Name.String()] = true
	}
	same := s.equal.holds == holds && maps.Equal(s.equal.but, quarantined) && reflect.DeepEqual(s.equal.to, st)
	if same && !thorough {
		s.Count["comparisons of the same"]++
		return
	}
	list := nft.List(st)
	wanted := sumsOf(&list)
	switch {
	case len(quarantined) > 0:
		s.compareBut(when, st, &list, quarantined)
	case thorough || holds != wanted:
		c := s.k.content()
		if d := lacking(&c, list); d != "" {
			s.Fail("%s, and the kernel does not hold what it should:\n%s", when, d)
		} else if holds != wanted {
			s.Fail("%s, and the sums differ, but no element: %v and %v", when, holds, wanted)
		}
	}
	s.equal.holds, s.equal.but, s.equal.to = holds, quarantined, st
}

// compareBut is compare for what belongs to one Service each, but for some Services.
func (s *sim) compareBut(when string, st *dataplane.State, list *ipfamily.Per[nft.Listing], but map[string]bool) {
	c := s.k.content()
	for i := range c {
		if d := lackingBut(&c[i], &list[i], but); d != "" {
			s.Fail("%s, and the kernel does not hold what it should of %s", when, d)
		}
		for _, set := range []nft.SetID{nft.Services, nft.UncountedServices} {
			for _, e := range c[i].bySet[set] {
				if svc := st.Services[simName(e.Service())]; svc == nil || !simHas(svc, e.FrontendKey()) {
					s.Fail("%s, and the kernel has what is nobody's or another's: %s", when, elementText(c[i].family, &e))
				}
			}
		}
	}
}

// contentSums stand for what lacking compares of all sets.
type contentSums ipfamily.Per[struct {
	bySet [nft.NumSets]uint64
	// revision is what the revision says besides its number.
	revision string
}]

var sumSeed = maphash.MakeSeed()

// sumOf stands for the facts that an element is: see factsOf. So the sum of a set stands for all of its facts; that of
// other facts is the same once in 2^64 times.
func sumOf(e *nft.Element) uint64 {
	if e.Set != nft.Endpoints && e.Set != nft.UncountedEndpoints {
		return maphash.Comparable(sumSeed, *e)
	}
	var room [64]byte
	slot := append(append(room[:0], byte(e.Set)), e.Key()...)
	sum := maphash.Bytes(sumSeed, slot)
	return sum + maphash.Bytes(sumSeed, append(slot[:len(slot)-4], e.Data()...))
}

// sums gives those of what the kernel holds.
func (k *simKernel) sums() (out contentSums) {
	for i, f := range ipfamily.All {
		t := k.tables[f.NFProto()]
		if t == nil {
			continue
		}
		for _, s := range t.sets {
			switch s.id {
			case nft.Affinity:
			case nft.ServiceCIDRs:
				for _, e := range t.cidrs(f) {
					out[i].bySet[s.id] += sumOf(&e)
				}
			case nft.RevisionSet:
				for _, e := range s.held {
					out[i].revision += e.Comment
				}
			default:
				out[i].bySet[s.id] = s.sum
			}
		}
	}
	return out
}

// sumsOf gives those of what the kernel should hold.
func sumsOf(list *ipfamily.Per[nft.Listing]) (out contentSums) {
	for i := range list {
		for set := range nft.NumSets {
			for n := range list[i].Elements[set] {
				switch e := &list[i].Elements[set][n].Element; set {
				case nft.Affinity:
				case nft.RevisionSet:
					out[i].revision += e.Comment
				default:
					out[i].bySet[set] += sumOf(e)
				}
			}
		}
	}
	return out
}

func simName(text string) (n snapshot.Name) {
	for i := range text {
		if text[i] == '/' {
			return snapshot.Name{Namespace: text[:i], Name: text[i+1:]}
		}
	}
	return n
}

func simHas(svc *dataplane.Service, k dataplane.Key) bool {
	return slices.ContainsFunc(svc.Ports, func(sp *dataplane.ServicePort) bool {
		return slices.ContainsFunc(sp.Frontends, func(f dataplane.Frontend) bool { return f.Key == k })
	})
}

// lackingBut compares what belongs to one Service each, but for some Services.
func lackingBut(c *tableContent, list *nft.Listing, but map[string]bool) string {
	want := tableContent{family: c.family}
	for set := range list.Elements {
		for _, l := range list.Elements[set] {
			want.bySet[set] = append(want.bySet[set], l.Element)
		}
	}
	var sums [2]uint64
	eachBut(c, but, func(e *nft.Element) { sums[0] += sumOf(e) })
	eachBut(&want, but, func(e *nft.Element) { sums[1] += sumOf(e) })
	if sums[0] == sums[1] {
		return ""
	}
	count := map[fact]int{}
	adds := func(n int) func(*nft.Element) {
		return func(e *nft.Element) {
			for _, x := range factsOf(*e) {
				count[x] += n
			}
		}
	}
	eachBut(c, but, adds(+1))
	eachBut(&want, but, adds(-1))
	for x, n := range count {
		if n != 0 {
			return fmt.Sprintf("%+d %s", n, describeFact(c.family, x))
		}
	}
	return "no element, but the sums differ"
}

// eachBut gives the elements that belong to one Service each, but for some Services.
func eachBut(c *tableContent, but map[string]bool, do func(*nft.Element)) {
	owner := simOwners(c)
	for set := range c.bySet {
		if id := nft.SetID(set); id.IsShared() || !id.IsContent() {
			continue
		}
		for n := range c.bySet[set] {
			e := &c.bySet[set][n]
			name := e.Service()
			if name == "" {
				name = owner[e.ID()]
			}
			if !but[name] {
				do(e)
			}
		}
	}
}

func describeFact(f ipfamily.Family, x fact) string {
	if x.slot == "" {
		return elementText(f, &x.element)
	}
	return fmt.Sprintf("slot %x, endpoint %x", x.slot, x.data)
}

// checkRest looks at what must hold when nothing is left to do.
func (s *sim) checkRest() {
	s.Count["seen at rest"]++
	s.compare("at rest", s.wanted(s.watch.told), true)
	c := s.k.content()
	if len(s.proc.loop.Quarantined()) == 0 {
		if bad := s.k.incomplete(&c); bad != "" {
			s.Fail("at rest: %s", bad)
		}
	}
	for i, f := range ipfamily.All {
		for _, e := range c[i].bySet[nft.Affinity] {
			if !s.proc.backend.model.Remembers(f, &e) {
				s.Fail("at rest: a client stays with %v, which is gone", e.Target())
			}
		}
	}
	if len(s.watch.told.Health) > 0 {
		return
	}
	told, _ := dataplane.Compute(s.cfg, s.watch.told)
	if want, _ := dataplane.Compute(s.cfg, s.world.snapshot(s.Rand)); !reflect.DeepEqual(told, want) {
		s.Fail("at rest, the process was not told everything")
	}
}

// incomplete names what leads nowhere.
func (k *simKernel) incomplete(c *content) string {
	var found ipfamily.Per[nft.Found]
	for i := range c {
		found[i].Elements = c[i].bySet
	}
	for _, d := range nft.Inconsistencies(&found) {
		return d.Text
	}
	return ""
}
