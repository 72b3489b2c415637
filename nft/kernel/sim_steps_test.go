package kernel

import (
	"encoding/binary"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// take takes one step.
func (s *sim) take() {
	switch n := s.IntN(64); {
	case n < 26:
		s.Note("the cluster changes")
		for range 1 + s.IntN(3) {
			s.watch.happened(simChange(s.Rand, s.world, s.tastes))
		}
		if s.IntN(3) > 0 {
			s.watch.deliver(s.Rand, false)
		}
	case n < 40:
		s.Note("events come")
		s.watch.deliver(s.Rand, s.IntN(4) == 0)
	case n < 42:
		s.Note("events come twice")
		s.watch.again(s.Rand)
	case n < 44:
		s.connectionBreaks()
	case n < 50:
		s.armFault()
	case n < 51:
		s.f.left = s.IntN(30)
		s.Note("the process dies after %d more calls", s.f.left)
	case n < 52:
		s.Note("the process is started anew")
		s.restart()
	case n < 54:
		s.Note("clients are remembered")
		s.remember()
	case n < 56:
		s.Note("endpoints are found unhealthy")
		s.watch.put(simHealth(s.Rand, s.watch.told, time.Now()))
	case n < 57:
		s.Note("another configuration")
		s.cfg = simConfig(s.Rand)
		s.proc.loop.Planner.SetConfig(s.cfg)
		s.proc.queue.Notify()
	case n < 58:
		s.Note("others write to nf_tables")
		s.k.noise()
	case n < 59:
		s.Note("all comes to rest")
		s.rest()
		return
	}
	s.turns.wait()
	if s.IntN(4) > 0 {
		s.pass(1 + time.Duration(s.Int64N(int64(2*time.Second)))>>s.IntN(20))
	}
}

func (s *sim) connectionBreaks() {
	if s.watch.broken {
		s.Note("a new list comes")
		s.watch.relist(s.Rand)
		return
	}
	s.Count["breaks"]++
	s.Note("the watch breaks")
	s.watch.broken, s.watch.pending = true, nil
}

// armFault arms what may go wrong with a datagram.
func (s *sim) armFault() {
	switch s.IntN(8) {
	case 0:
		s.k.torn += 1 + s.IntN(12)
		s.Note("%d lists are interrupted", s.k.torn)
		s.f.harm++
	case 1:
		s.f.dials = 1 + s.IntN(3)
		s.Note("%d sockets cannot be opened", s.f.dials)
		s.f.armed = append(s.f.armed, &trouble{verb: verbGeneration, illness: closedBefore})
	case 2:
		t := &trouble{verb: verbBatch, illness: refusedFalsely, skip: s.IntN(2),
			errno: oneOf(s.Rand, unix.ENOSPC, unix.EINVAL, unix.ENFILE, unix.ENOENT)}
		s.Note("a message is refused: %v", t.errno)
		s.f.armed = append(s.f.armed, t)
	default:
		s.Note("%s", s.f.arm(s.Rand, false))
	}
}

// remember adds affinity entries as packets of clients do.
func (s *sim) remember() {
	for _, f := range ipfamily.All {
		t := s.k.tables[f.NFProto()]
		if t == nil {
			continue
		}
		set, of := t.sets[nft.Affinity.String()], map[string]*simElement{}
		for _, members := range []nft.SetID{nft.StickyEndpoints, nft.UncountedStickyEndpoints} {
			maps.Copy(of, t.sets[members.String()].held)
		}
		for _, key := range slices.Sorted(maps.Keys(of)) {
			if s.IntN(3) > 0 {
				continue
			}
			s.clients++
			s.Count["clients"]++
			e, raw := simClient(f, of[key].ID(), uint32(s.clients), of[key].Member())
			t.put(set, string(e.Key()), &simElement{Element: e, raw: raw})
		}
	}
}

// simClient is an entry for a client of an endpoint.
func simClient(f ipfamily.Family, pool, bucket uint32, ep netip.AddrPort) (nft.Element, []byte) {
	key := binary.NativeEndian.AppendUint32(binary.NativeEndian.AppendUint32(nil, pool), bucket)
	data := binary.BigEndian.AppendUint16(ep.Addr().AsSlice(), ep.Port())
	e, _ := nft.ElementFrom(f, nft.Affinity, key, nil, append(data, 0, 0), "", "")
	var b batch
	start := b.Len()
	b.value(unix.NFTA_SET_ELEM_KEY, e.Key())
	b.value(unix.NFTA_SET_ELEM_DATA, e.Data())
	return e, slices.Clone(b.Bytes()[start:])
}

// maxRest is how long it may take until the kernel holds all that it can be brought to take: a quarantined Service is
// tried again after five minutes at most.
const maxRest = 12 * time.Minute

// rest ends all trouble, tells the process everything, and waits until nothing is left to do.
func (s *sim) rest() {
	s.f.disarm()
	s.k.torn = 0
	if s.watch.broken {
		s.watch.relist(s.Rand)
	}
	s.watch.deliver(s.Rand, true)
	tolerant := s.IntN(3) == 0
	if tolerant {
		s.k.refuse = nil
	}
	begin := time.Now()
	for s.pass(time.Second + 1); !s.atRest(); s.pass(10*time.Second + 1) {
		if s.Failure != "" {
			return
		}
		if time.Since(begin) > maxRest {
			s.Fail("no rest after %v: %+v, quarantined %v", maxRest, s.proc.queue.Progress(), s.proc.loop.Quarantined())
			return
		}
	}
	s.pass(3 * time.Second) // the second sweep
	s.checkRest()
	if s.Failure == "" && s.IntN(2) == 0 {
		s.adopt()
	}
	if s.k.refuse == nil && tolerant {
		s.k.refuse = s.refuse
		if s.poisoned(s.proc.loop.Planner.State()) > 0 { // who took it before will not say so of what stays
			s.cleanse()
		}
	}
}

// atRest says whether all that the kernel takes is in, and nobody waits.
func (s *sim) atRest() bool {
	l := s.proc.loop
	if p := s.proc.queue.Progress(); p.Services+p.Slices > 0 || !p.Since.IsZero() || len(l.Starting()) > 0 {
		return false
	}
	want := 0
	if s.k.refuse != nil {
		want = s.poisoned(l.Planner.State())
	}
	return len(l.Quarantined()) == want
}

// poisoned counts the Services that the kernel refuses.
func (s *sim) poisoned(st *dataplane.State) (n int) {
	for _, svc := range st.Services {
		if simPoisoned(svc) {
			n++
		}
	}
	return n
}

func simPoisoned(svc *dataplane.Service) bool {
	return slices.ContainsFunc(svc.Ports, func(sp *dataplane.ServicePort) bool {
		return slices.ContainsFunc(sp.Frontends, func(f dataplane.Frontend) bool { return f.Key.Port == poisonPort })
	})
}

// cleanse takes the Services that the kernel begins to refuse again out of the cluster.
func (s *sim) cleanse() {
	d := snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{}}
	for n, svc := range s.world.services {
		if slices.ContainsFunc(svc.Ports, func(p snapshot.Port) bool { return p.Port == poisonPort }) {
			d.Services[n] = nil
		}
	}
	s.watch.put(s.world.apply(d))
	s.pass(5 * time.Second)
}

// adopt starts another process on what the kernel holds: if nothing is refused, it has nothing to write.
func (s *sim) adopt() {
	fresh, _ := dataplane.Compute(s.cfg, s.watch.told)
	if len(s.proc.loop.Quarantined())+len(s.watch.told.Health)+len(s.slotsByHistory(fresh)) > 0 {
		return // the next process does not know of that
	}
	before := s.Count["transactions"]
	s.restart()
	s.pass(10*time.Second + 1)
	for !s.atRest() && s.Failure == "" {
		s.pass(10*time.Second + 1)
	}
	if n := s.Count["transactions"] - before; n > 0 && s.Failure == "" {
		s.Fail("another process wrote %d transactions to what it should adopt", n)
	}
	s.Count["adopted"]++
	s.checkRest()
}

// listener hears what the loop says.
func (s *sim) listener() reconcile.Listener {
	return reconcile.Listener{
		Committed:   entering(&s.turns, s.committed),
		InSync:      entering(&s.turns, s.inSync),
		Failed:      entering(&s.turns, s.failed),
		Quarantined: entering(&s.turns, s.quarantined),
		Checked:     entering(&s.turns, s.checked),
	}
}

func (s *sim) failed(f reconcile.Failure) {
	s.Count["failed transactions"]++
	s.Note("failed: %v", f.Err)
}

func (s *sim) quarantined(r *dataplane.Refused) {
	s.Count["quarantined"] += len(r.Services)
	for _, n := range sortedKeys(r.Services) {
		s.Note("quarantined: %v", n)
		// A false refusal, when the backend asks for the reason of a true one, looks like a true one.
		if svc := s.proc.loop.Planner.State().Services[n]; s.f.lies == 0 && (svc == nil || !simPoisoned(svc)) {
			s.Fail("%v is quarantined, and has nothing that the kernel refuses", n)
		}
	}
}

func (s *sim) checked(c reconcile.Check) {
	if len(c.Found) > 0 && s.f.harm == 0 {
		s.Note("found: %v", c.Found)
	}
}

// sent hears of each batch.
func (s *sim) sent(b []byte, refused int, _ error) {
	s.Count["transactions"]++
	fmt.Fprintf(s.trace, "%d %d\n", time.Now().UnixNano(), refused)
	_, _ = s.trace.Write(b)
}
