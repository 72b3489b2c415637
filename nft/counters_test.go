package nft

import (
	"bytes"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// randomState gives what a planner makes of a random cluster.
func randomState(seed uint64) *dataplane.State {
	w := newCluster(rand.New(rand.NewPCG(seed, 5)))
	s := snapshot.New()
	s.Apply(w.Host())
	for range 60 {
		d := w.Step()
		for _, svc := range d.Services {
			if svc != nil { // all are counted
				svc.Counters = snapshot.CountersByBudget
			}
		}
		s.Apply(d)
	}
	st, _ := dataplane.Compute(testConfig, s)
	return st
}

// TestCountsOfElements: what is read from elements is what the state says of each frontend, and the keys lead back to
// them.
func TestCountsOfElements(t *testing.T) {
	frontends, endpoints, sticky, refused := 0, 0, 0, 0
	for seed := range uint64(20) {
		st := randomState(seed)
		listings := List(st)
		for _, svc := range st.Services {
			for _, sp := range svc.Ports {
				for i := range sp.Frontends {
					fe := &sp.Frontends[i]
					l := &listings[ipfamily.Of(fe.Key.Addr)]
					inside, outside := fe.Route(dataplane.Node).Pool, fe.Route(dataplane.Anyone).Pool
					c := checkCount(t, l, dataplane.Counted{Key: fe.Key}, inside, sp)
					frontends++
					endpoints += c.Endpoints
					if c.Sticky {
						sticky++
					}
					if c.Endpoints == 0 {
						refused++
					}
					if scheduled := sp.Scheduled(fe); poolOf(sp, inside, scheduled) != poolOf(sp, outside, scheduled) {
						checkCount(t, l, dataplane.Counted{Key: fe.Key, Outside: true}, outside, sp)
					}
				}
			}
		}
	}
	if frontends == 0 || endpoints == 0 || sticky == 0 || refused == 0 {
		t.Errorf("%d frontends, %d endpoints, %d sticky, %d refused: some of it was not tested", frontends, endpoints,
			sticky, refused)
	}
}

func find(elements []Listed, key Element) *Listed {
	i := slices.IndexFunc(elements, func(e Listed) bool { return e.Set == key.Set && bytes.Equal(e.Key(), key.Key()) })
	if i < 0 {
		return nil
	}
	e := elements[i]
	e.Packets = 7
	return &e
}

// checkCount compares what is listed of a frontend with the pool it should lead to.
func checkCount(t *testing.T, l *Listing, at dataplane.Counted, pool *dataplane.Pool,
	sp *dataplane.ServicePort) dataplane.FrontendCount {
	t.Helper()
	var e, led *Listed
	for _, key := range FrontendKeys(at) {
		found := find(l.Elements[key.Set], key)
		if found == nil {
			continue
		}
		pool := found
		if found.InPools() {
			if pool = find(l.Elements[Pools], PoolKey(found.PoolID())); pool == nil {
				t.Fatalf("%+v has no pool", at)
			}
		}
		if !pool.IsIndirect() {
			e, led = found, pool
		}
	}
	if e == nil {
		t.Fatalf("%+v is not listed", at)
	}
	c, ok := e.FrontendCount(&led.Element)
	want := dataplane.FrontendCount{Counted: at, Endpoints: len(pool.Endpoints), Packets: 7, Pool: e.PoolID(),
		Uncounted: true}
	switch {
	case len(pool.Endpoints) == 0:
		want.Empty = pool.Empty
	case pool == scheduledAt(sp, at.Key):
		want.Endpoints, want.Scheduled = 0, true
		pool = &dataplane.Pool{}
	default:
		want.Sticky = sp.Affinity > 0
	}
	want.Indirect = e.Set == InsideServices || e.Set == OutsideServices
	if len(pool.Endpoints) > 0 && c.Endpoints >= len(pool.Endpoints) {
		want.Endpoints = c.Endpoints // an endpoint may have several slots
	}
	want.AtMost = want.Endpoints > exactSizes && sp.Hash == dataplane.NoHash
	if !ok || c != want {
		t.Fatalf("counted %+v, %v; want %+v", c, ok, want)
	}
	var got []netip.AddrPort
	for i, key := range led.SlotKeys(sp.Name.Protocol) {
		slot := find(l.Elements[key.Set], key)
		if n := led.Leads().N; slot == nil && n > exactSizes && uint32(i) > sizeOfClass(sizeClass(n)-1) {
			break // it has fewer than the chain has room for
		}
		if slot == nil {
			t.Fatalf("slot %d of %+v is not listed", i, at)
		}
		ec := slot.SlotCount()
		if ec.Place != (dataplane.Place{Pool: c.Pool, Slot: uint32(i)}) || ec.Packets != 7 {
			t.Fatalf("slot %d of %+v: %+v", i, at, ec)
		}
		got = append(got, ec.Endpoint)
	}
	var members []netip.AddrPort
	for _, ep := range pool.Endpoints {
		members = append(members, ep.AddrPort)
	}
	slices.SortFunc(got, netip.AddrPort.Compare)
	if !slices.Equal(slices.Compact(got), members) {
		t.Fatalf("slots of %+v: %v; want %v", at, got, members)
	}
	if c.Sticky {
		checkMembers(t, l, c.Pool, members)
	}
	return c
}

func checkMembers(t *testing.T, l *Listing, pool uint32, members []netip.AddrPort) {
	t.Helper()
	for _, ep := range members {
		key := MemberKey(pool, ep)
		m := find(l.Elements[key.Set], key)
		if m == nil {
			t.Fatalf("%v is no member of its pool", ep)
		}
		want := dataplane.EndpointCount{Endpoint: ep, Place: dataplane.Place{Pool: pool, Sticky: true}, Packets: 7}
		if got := m.MemberCount(); got != want {
			t.Fatalf("counted %+v; want %+v", got, want)
		}
	}
}

// TestFill: it is what the tables of the same state hold.
func TestFill(t *testing.T) {
	st := randomState(3)
	var m Model
	m.Plan(st, dataplane.Change{}, 0)
	listings := List(st)
	for i, fill := range m.Fill() {
		for set, f := range fill {
			want := len(listings[i].Elements[set])
			if !SetID(set).IsContent() { // nobody counts it
				continue
			}
			if f.Elements != want || f.Size != 0 && f.Size < want {
				t.Errorf("%s %s: %+v; want %d elements", ipfamily.All[i].NFT(), SetID(set), f, want)
			}
		}
	}
}

// TestRefuses: of every rule that counts, its chain or the set that it looks at says why.
func TestRefuses(t *testing.T) {
	counting := 0
	for _, c := range ProbeTable(ipfamily.IPv4, Structure{Evidence: true}).Chains {
		for _, r := range c.Rules {
			if !slices.ContainsFunc(r, func(s Statement) bool { _, ok := s.(Counter); return ok }) {
				continue
			}
			counting++
			set := ""
			switch s := firstLookup(r); s {
			case RetryServices:
				continue // it drops an answer, and refuses nothing
			case NumSets:
			default:
				set = s.String()
			}
			refusal, known := Refuses(c.ID.Kind, set)
			_, drops := r[len(r)-1].(Drop)
			_, resets := r[len(r)-1].(Reset)
			if !known || !resets && drops != (refusal.Verdict() == dataplane.Drop) {
				t.Errorf("%s: %q refuses for %v, %v", c.ID.Name(), r.Text(ipfamily.IPv4), refusal, known)
			}
		}
	}
	if counting == 0 {
		t.Error("no rule counts")
	}
}

// firstLookup returns the first set or map that a rule looks up; NumSets if there is none.
func firstLookup(r Rule) SetID {
	for _, s := range r {
		switch s := s.(type) {
		case SetLookup:
			return s.Set
		case SetPriority:
			return s.Map
		}
	}
	return NumSets
}

func scheduledAt(sp *dataplane.ServicePort, k dataplane.Key) *dataplane.Pool {
	for i := range sp.Frontends {
		if sp.Frontends[i].Key == k {
			return sp.Scheduled(&sp.Frontends[i])
		}
	}
	return nil
}

// TestCountAtMost: beyond sixteen slots, the kernel tells only a bound of how many a pool has; all of them are read.
func TestCountAtMost(t *testing.T) {
	for n, most := range map[int]int{16: 16, 17: 20, 20: 20, 101: 112} {
		l := List(stateOf(webService(), numbers(n)...))[0]
		e := &l.Elements[Services][0]
		c, ok := e.FrontendCount(&e.Element)
		if !ok || c.Endpoints != most || c.AtMost != (n > 16) {
			t.Errorf("%d endpoints: %+v, %v; want %d", n, c, ok, most)
		}
		found := 0
		for _, key := range CountedSlots(c.Pool, e.FrontendKey().Protocol, c.Endpoints) {
			if find(l.Elements[key.Set], key) != nil {
				found++
			}
		}
		if found != n {
			t.Errorf("%d of %d slots are asked for", found, n)
		}
	}
}

func numbers(n int) []int {
	list := make([]int, n)
	for i := range list {
		list[i] = i + 1
	}
	return list
}
