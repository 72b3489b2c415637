package kernel

import (
	"errors"
	"maps"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// simAlone returns a simulation without a loop, whose kernel never hears what a correct model does not ask for.
func simAlone(t *testing.T) *sim {
	s := &sim{Walk: testkit.NewWalk(1, nil), k: newSimKernel(), f: newFaults()}
	s.Begin(1)
	s.k.sent = func([]byte, int, error) {}
	s.k.strict = func(text string) { t.Error(text) }
	return s
}

// TestFailedReadLeavesTheModel: if the tables cannot be read back, the model stays what it was. Otherwise it would hold
// what the kernel never saw, and later take that for something that has to be written.
func TestFailedReadLeavesTheModel(t *testing.T) {
	s := simAlone(t)
	b := s.newBackend()
	world, planner := newWalkWorld(s.Rand), dataplane.NewPlanner(simConfig(s.Rand))
	snap := world.snapshot(s.Rand)
	change, _ := planner.Apply(snap, snapshot.Change{})
	if _, err := b.Apply(planner.State(), change); err != nil {
		t.Fatal(err)
	}
	before := b.model.Digests(0)
	for i := range worldServices {
		change, _ = planner.Apply(snap, snap.Apply(world.serviceChange(s.Rand, i)))
		if len(change.Services) > 0 {
			break
		}
	}
	for _, v := range []verb{verbSets, verbElements} {
		b.syncState = stateStale
		s.f.armed = []*trouble{{verb: v, illness: sendFails, errno: unix.ENOMEM}}
		if _, err := b.Apply(planner.State(), change); err == nil {
			t.Fatalf("%s: there was no error", verbNames[v])
		}
		if b.model.Digests(0) != before {
			t.Errorf("%s: the model holds what the kernel never saw", verbNames[v])
		}
	}
}

// TestRefusedAfterFailedRewrite: tables are to be rewritten in several transactions, and the first cannot be sent. The
// model holds nothing then, so that the next Apply loads all that is wanted. If the kernel refuses a Service of that,
// the Apply after it must write the others.
func TestRefusedAfterFailedRewrite(t *testing.T) {
	s := simAlone(t)
	b := s.newBackend()
	world, planner := newWalkWorld(s.Rand), dataplane.NewPlanner(simConfig(s.Rand))
	all, _ := planner.Apply(world.snapshot(s.Rand), snapshot.Change{})
	if _, err := b.Apply(planner.State(), all); err != nil {
		t.Fatal(err)
	}

	b.syncState, b.maxElements = stateUnfixable, 8
	s.f.armed = []*trouble{{verb: verbBatch, illness: sendFails, errno: unix.ENOBUFS}}
	if _, err := b.Apply(planner.State(), all); !errors.Is(err, unix.ENOBUFS) {
		t.Fatalf("error %v; want ENOBUFS", err)
	}

	bad := all.Services[0]
	s.k.refuse = func(e *nft.Element) unix.Errno {
		if e.Service() == bad.String() {
			return unix.EINVAL
		}
		return 0
	}
	table := s.k.tables[unix.NFPROTO_IPV4]
	for _, set := range table.sets { // so that the refused elements have to be written
		if set.id == nft.Services || set.id == nft.UncountedServices {
			for key, e := range set.held {
				table.remove(set, key, e)
			}
		}
	}
	_, err := b.Apply(planner.State(), dataplane.Change{})
	var refused *dataplane.Refused
	if !errors.As(err, &refused) || refused.Services[bad] == nil {
		t.Fatalf("error %v; want a refusal of %s", err, bad)
	}
	rest := *planner.State()
	rest.Services = maps.Clone(rest.Services)
	delete(rest.Services, bad)
	if _, err := b.ApplyAll(&rest, dataplane.Change{Services: []snapshot.Name{bad}}); err != nil {
		t.Fatalf("without %s: %v", bad, err)
	}
	c := s.k.content()
	if d := lacking(&c, nft.List(&rest)); d != "" {
		t.Error(d)
	}
}

// TestCommittedThoughTablesWereNotSeen: after a transaction the identity of new tables cannot be read. The kernel has
// committed it, so Apply must not fail: its caller would believe that the kernel holds what it held before. A Check
// reads it later, and does not take our own tables for others.
func TestCommittedThoughTablesWereNotSeen(t *testing.T) {
	s := simAlone(t)
	b := s.newBackend()
	planner := dataplane.NewPlanner(simConfig(s.Rand))
	change, _ := planner.Apply(newWalkWorld(s.Rand).snapshot(s.Rand), snapshot.Change{})
	// Before: both tables, and those at the ingress twice.
	s.f.armed = []*trouble{{verb: verbTable, illness: closedBefore, skip: 3 * len(ipfamily.All)}}
	if _, err := b.Apply(planner.State(), change); err != nil {
		t.Errorf("Apply: %v", err)
	}
	if len(s.f.armed) > 0 || b.tables[0].exists {
		t.Fatalf("the tables were seen: %+v", b.tables)
	}
	s.k.noise()
	if found, _, err := b.Check(); len(found) > 0 || err != nil {
		t.Errorf("Check found %q, %v", found, err)
	}
	if !b.tables[0].exists {
		t.Error("the Check did not see the tables")
	}
}
