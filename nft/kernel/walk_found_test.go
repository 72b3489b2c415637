package kernel

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/netlink"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// What walks have found, each by itself.

// nft runs nft on a host.
func (s *site) nft(script string) {
	s.t.Helper()
	labtest.Run(s.t, s.host, script, "nft", "-f", "-")
}

// sick puts a faulty wire into a connection.
func sick(c *Conn, send, recv []error) { c.Wire = &faulty{Wire: c.Wire, sendErr: send, recvErr: recv} }

// TestErrorsLeaveNothingBehind: what an error left unread in a socket is not taken for the answer to the next question.
func TestErrorsLeaveNothingBehind(t *testing.T) {
	s := newSite(t, 8, Options{})
	r := s.backend.reader
	want, err := r.table(ipfamily.IPv4)
	labtest.Check(t, err)
	for _, recv := range [][]error{{unix.ENOBUFS}, {unix.ENOMEM}, {nil, unix.ENOMEM}} {
		sick(r, nil, recv)
		if _, err := r.Elements(ipfamily.IPv4, nft.Services); err == nil {
			t.Errorf("%v: no error", recv)
		}
		if got, err := r.table(ipfamily.IPv4); got != want || err != nil {
			t.Errorf("%v: the next answer is %+v, %v; want %+v", recv, got, err, want)
		}
	}
}

// TestSocketsAreReplaced: whatever sockets are lost, and however many fresh ones cannot be had at first, work goes on
// in the end.
func TestSocketsAreReplaced(t *testing.T) {
	s := newSite(t, 4, Options{})
	for fails := range 5 {
		for lost := range 8 {
			b := s.backend
			left := fails
			b.dial = func(netns int) (*Conn, error) {
				if left--; left >= 0 {
					return nil, unix.EMFILE
				}
				return Dial(netns)
			}
			for i, c := range []*Conn{b.conn, b.reader, b.sweeper} {
				if lost>>i&1 == 1 {
					labtest.Check(t, c.Close())
				}
			}
			change := s.change(lost % 4)
			for try, well := 0, 0; well < 2; try++ { // each of the three may be missed at another time
				_, err := b.ApplyAll(s.planner.State(), change)
				if err == nil {
					b.sweep.schedule(0, 1, time.Now())
					_, _, err = b.Check()
				}
				if well++; err != nil {
					well = 0
				}
				if try > fails+5 {
					t.Fatalf("%d dials fail, %b is lost: %v", fails, lost, err)
				}
			}
			check(t, b)
			s.apply(dataplane.Change{})
			quiet(t, b)
		}
	}
}

// TestSweepFails: an error in asking for the affinity map is an error, and no reason to wait for the answer. A refusal
// of the kernel, whatever its number, is no end of the list. The map is swept once more.
func TestSweepFails(t *testing.T) {
	s := newSite(t, 4, Options{})
	b := s.backend
	for name, plant := range map[string]func(){
		"sending": func() { sick(b.sweeper, []error{unix.ENOMEM}, nil) },
		"refused": func() {
			f := newFaults()
			f.armed, f.random = []*trouble{{verb: verbSweep, illness: refusedFalsely, errno: unix.EINTR}}, s.random
			b.sweeper.Wire = &walkWire{Wire: b.sweeper.Wire, f: f}
		},
	} {
		plant()
		b.sweep.schedule(0, 1, time.Now())
		for {
			_, again, err := b.Check()
			if err != nil {
				break
			}
			if again == 0 {
				t.Fatalf("%s: no error", name)
			}
		}
		if b.sweep.left[0] == 0 {
			t.Errorf("%s: nobody looks at the map once more", name)
		}
		quiet(t, b)
	}
}

// TestRefusedInDoubt: while tables are in doubt, a Service is refused. Asked for what was acknowledged before, of
// which no change tells, the backend must not hold on to what was refused.
func TestRefusedInDoubt(t *testing.T) {
	s := newSite(t, 6, Options{})
	var bad snapshot.Name
	state := *s.planner.State()
	state.Services = map[snapshot.Name]*dataplane.Service{}
	for n, svc := range s.planner.State().Services {
		if state.Services[n] = svc; bad.Name == "" && leads(svc) {
			bad, state.Services[n] = n, poison(svc)
		}
	}
	s.nft("flush map ip verdict endpoints")
	var refused *dataplane.Refused
	if _, err := s.backend.ApplyAll(&state, dataplane.Change{Services: []snapshot.Name{bad}}); !errors.As(err, &refused) {
		t.Fatalf("got %v", err)
	}
	s.apply(dataplane.Change{})
	quiet(t, s.backend)
}

// TestSweepAfterCorrection: a process ends, and a sticky Service loses an endpoint that is on another node. The next
// process corrects what belongs to that Service alone, and sends its clients elsewhere.
func TestSweepAfterCorrection(t *testing.T) {
	delta := large(4, 3)
	h, b := host(t)
	for _, svc := range delta.Services {
		svc.Affinity = time.Hour
	}
	// So there are the chains for two endpoints, and for three, before and after.
	two := delta.Slices[snapshot.Name{Namespace: "default", Name: "service-1"}]
	two.Endpoints = two.Endpoints[:2]
	snap, planner := snapshot.New(), dataplane.NewPlanner(configs["cluster CIDR"])
	planner.Apply(snap, snap.Apply(delta))
	_, err := b.ApplyAll(planner.State(), dataplane.Change{})
	labtest.Check(t, err)
	clients := 0
	for of, id := range b.model.PoolIDs(ipfamily.IPv4) {
		if name, _ := b.model.ServiceOf(id); !of.Outside {
			remember(t, b, id, netip.AddrPortFrom(delta.Slices[name].Endpoints[0].Addr, 8080), 10)
			clients += 10
		}
	}
	labtest.Check(t, b.Close())

	gone := snapshot.Name{Namespace: "default", Name: "service-0"}
	slice := *delta.Slices[gone]
	slice.Endpoints = slice.Endpoints[1:]
	planner.Apply(snap, snap.Apply(snapshot.Delta{Slices: map[snapshot.Name]*snapshot.Slice{gone: &slice}}))
	b = open(t, h, Options{})
	r, err := b.ApplyAll(planner.State(), dataplane.Change{})
	labtest.Check(t, err)
	if r.Full || r.Removed == 0 {
		t.Errorf("that was no correction: %+v", r)
	}
	check(t, b)
	left, err := b.reader.Elements(ipfamily.IPv4, nft.Affinity)
	labtest.Check(t, err)
	stay := slices.DeleteFunc(left, func(l nft.Listed) bool {
		return l.Target().Addr() == delta.Slices[gone].Endpoints[0].Addr
	})
	if len(left) != clients-10 || len(stay) != len(left) {
		t.Errorf("%d clients are remembered, %d of them at endpoints that are there; want %d",
			len(left), len(stay), clients-10)
	}
}

// TestOrphansAreLookedAt: others change a table that nobody owns. A process takes it over and fails; that it owns it
// from then on does not say that all in it is right.
func TestOrphansAreLookedAt(t *testing.T) {
	s := newSite(t, 4, Options{Own: true})
	owning(t, s.backend)
	labtest.Check(t, s.backend.Close())
	s.nft("flush map ip verdict endpoints")
	s.backend = open(t, s.host, Options{Own: true})
	sick(s.backend.reader, nil, slices.Concat(make([]error, 4), []error{unix.ENOMEM}))
	if _, err := s.backend.ApplyAll(s.planner.State(), dataplane.Change{}); err == nil {
		t.Fatal("no error")
	}
	_, err := s.backend.ApplyAll(s.planner.State(), dataplane.Change{})
	labtest.Check(t, err)
	if found := check(t, s.backend); found == nil {
		t.Error("nothing was found")
	}
	s.apply(dataplane.Change{})
	quiet(t, s.backend)
}

// TestFailedLookIsRepeated: others change something, and the look at it fails. The next look must find it.
func TestFailedLookIsRepeated(t *testing.T) {
	s := newSite(t, 3, Options{})
	edits := []string{"flush chain ip verdict no-endpoints", "flush map ip6 verdict endpoints",
		"flush set ip verdict service-cidrs",
		"add table ip6 verdict { flags dormant; }", "delete table ip verdict"}
	for n := range 60 {
		s.nft(edits[n%len(edits)])
		sick(s.backend.reader, nil, append(make([]error, n), unix.ENOMEM))
		found, again, err := s.backend.Check()
		for found == nil && (err != nil || again > 0) {
			found, again, err = s.backend.Check()
		}
		if found == nil {
			t.Errorf("%s: nothing was found after the error at answer %d", edits[n%len(edits)], n)
		}
		s.backend.reader.Wire.(*faulty).recvErr = nil
		s.apply(dataplane.Change{})
		quiet(t, s.backend)
	}
}

// TestHardToSee: what others may do that leaves nearly everything as it was. What is too much in a large map is found
// at once where the kernel counts elements (Linux 6.16), else when one of ours has to go there.
func TestHardToSee(t *testing.T) {
	s := newSite(t, 8, Options{})
	s.backend.dumpMost = 1
	l, err := s.backend.List()
	labtest.Check(t, err)
	text := func(set nft.SetID) string {
		def := nft.SetByID(set)
		return l[0].Elements[set][0].Element.Text(ipfamily.IPv4, &def)
	}
	pick, _, _ := strings.Cut(text(nft.Picks), " :")
	sources, _, _ := strings.Cut(text(nft.SourceRanges), " comment")
	const slot = "9:9 . tcp . 7"
	const stray = "a slot nobody leads to"
	model := &s.backend.model
	structure, err := s.backend.reader.structure(ipfamily.IPv4, model.Structure(ipfamily.IPv4),
		model.Layout(ipfamily.IPv4))
	labtest.Check(t, err)
	for name, c := range map[string]struct{ nft, found string }{
		"a jump": {"delete element ip verdict picks { " + pick + " }\nadd element ip verdict picks { " +
			strings.Replace(text(nft.Picks), "goto", "jump", 1) + " }", "the elements of picks are others"},
		"a comment": {"delete element ip verdict source-ranges { " + sources + " }\nadd element ip verdict source-ranges { " +
			sources + " comment \"x\" }", "is gone"},
		stray: {"add element ip verdict endpoints { " + slot + " : 192.0.2.1 . 1 }", "endpoints has "},
	} {
		s.nft(c.nft)
		found := strings.Join(check(t, s.backend), "\n")
		if !strings.Contains(found, c.found) && (structure.counted || name != stray) {
			t.Errorf("%s: found %q", name, found)
		}
		if name == stray && !structure.counted {
			s.nft("delete element ip verdict endpoints { " + slot + " }")
			continue
		}
		s.apply(dataplane.Change{})
		quiet(t, s.backend)
	}
}

// TestNearlyOurs: others make a map of clients with room for a few, and a chain that is as ours would be, if we
// needed it.
func TestNearlyOurs(t *testing.T) {
	s := newSite(t, 4, Options{})
	other := open(t, s.host, Options{})
	set := nft.SetByID(nft.Affinity)
	set.Size = 10
	chain, _ := nft.ChainNamed(nft.ProbeTable(ipfamily.IPv4, nft.Structure{}), nft.Structure{}, "pick-77")
	for want, edit := range map[string]func(b *batch){
		"set affinity is another one": func(b *batch) {
			b.End(b.object(ipfamily.IPv4, unix.NFT_MSG_DELRULE, 0, ""))
			m := b.object(ipfamily.IPv4, unix.NFT_MSG_DELSET, 0, "")
			b.Text(unix.NFTA_SET_NAME, set.Name())
			b.End(m)
			b.newSet(ipfamily.IPv4, &set)
		},
		"nothing needs chain pick-77": func(b *batch) {
			b.newChain(ipfamily.IPv4, &chain)
			b.rules(ipfamily.IPv4, &chain)
		},
	} {
		var b batch
		b.Reset()
		b.Begin()
		edit(&b)
		b.Finish()
		if refused, err := other.conn.Commit(b.Bytes()); err != nil || len(refused) > 0 {
			t.Fatal(err, refused)
		}
		if found := check(t, s.backend); !strings.Contains(strings.Join(found, "\n"), want) {
			t.Errorf("found %q; want %q", found, want)
		}
		s.apply(dataplane.Change{})
		quiet(t, s.backend)
	}
}

// TestStraySlots: slots that no pool leads to are in the way when a Service gets more endpoints. That is not the
// Service's fault, also where the kernel does not count elements and the map is too large to be listed.
func TestStraySlots(t *testing.T) {
	for _, endpoints := range []int{1, 3} {
		s := newSite(t, 0, Options{})
		s.backend.dumpMost = 1
		grow := func(endpoints int) dataplane.Change {
			change, _ := s.planner.Apply(s.snap, s.snap.Apply(large(4, endpoints)))
			return change
		}
		s.apply(grow(endpoints))
		for _, svc := range s.planner.State().Services {
			id := s.poolAt(dataplane.Key{Addr: svc.ClusterIPs[0], Protocol: snapshot.TCP, Port: 80})
			s.nft(fmt.Sprintf("add element ip verdict endpoints { %x:%x . tcp . %d : 192.0.2.1 . 1 }",
				id>>16, id&0xffff, endpoints))
		}
		check(t, s.backend) // perhaps nothing is found
		s.apply(grow(endpoints + 1))
		quiet(t, s.backend)
	}
}

// poolAt gives the pool of a frontend, as the kernel has it.
func (s *site) poolAt(k dataplane.Key) (id uint32) {
	s.t.Helper()
	key := nft.FrontendKeys(dataplane.Counted{Key: k})[0]
	labtest.Check(s.t, s.backend.reader.get(ipfamily.IPv4, key.Set, []nft.Element{key},
		func(e nft.Element) { id = e.PoolID() }))
	return id
}

// TestNobodyIsToBlame: Services are not refused for what is no fault of theirs.
func TestNobodyIsToBlame(t *testing.T) {
	s := newSite(t, 6, Options{})
	lie := func(errno unix.Errno) *trouble {
		return &trouble{verb: verbBatch, illness: refusedFalsely, errno: errno}
	}
	first := &trouble{verb: verbBatch, illness: othersFirst}
	for n, armed := range [][]*trouble{
		{lie(unix.ENOMEM)},
		{lie(unix.EINVAL), lie(unix.ENOMEM)}, // the second answers the question whom to blame
		{lie(unix.EINVAL), lie(unix.ENFILE)},
		{lie(unix.EINVAL), lie(unix.EPERM)},
		{lie(unix.EINVAL), lie(unix.EINTR)},
		{first, lie(unix.EINVAL)},
		{lie(unix.EINVAL), first},
	} {
		f := newFaults()
		f.armed, f.random = armed, s.random
		f.meddle = func() { s.nft("delete table ip verdict\nadd table ip verdict") }
		s.backend.conn.Wire = &walkWire{Wire: s.backend.conn.Wire, f: f}
		var change dataplane.Change
		for i := 0; change.Empty(); i++ {
			change = s.change(i % 6)
		}
		var refused *dataplane.Refused
		if _, err := s.backend.ApplyAll(s.planner.State(), change); errors.As(err, &refused) {
			t.Errorf("%d: %v", n, err)
		}
		f.disarm()
		s.apply(change)
		check(t, s.backend)
		s.apply(dataplane.Change{})
		quiet(t, s.backend)
	}
}

// terse is a wire to a kernel like those before Linux 6.1: it does not say which element of a message it refuses.
type terse struct{ netlink.Wire }

func (w *terse) Recv(b []byte, wait bool) (int, error) {
	n, err := w.Wire.Recv(b, wait)
	for m := range netlink.Messages(b[:max(n, 0)]) {
		if m.Type == unix.NLMSG_ERROR && len(m.Body) > 20 {
			clear(m.Body[20:]) // the attributes after the header of what was refused
		}
	}
	return n, err
}

// TestRefusedInSteps: Services are named whatever this process may send at once: less than the transaction, less than
// the question whom to blame, or enough; and whatever the kernel says of the elements it refuses.
func TestRefusedInSteps(t *testing.T) {
	s := newSite(t, 6, Options{})
	var bad snapshot.Name
	for n, svc := range s.planner.State().Services {
		if leads(svc) {
			bad = n
		}
	}
	state := *s.planner.State()
	state.Services = map[snapshot.Name]*dataplane.Service{bad: poison(state.Services[bad])}
	f := &faulty{Wire: s.backend.conn.Wire}
	for _, wire := range []netlink.Wire{f, &terse{f}} {
		for most := 10000; most < 60000; most += 5000 {
			f.most, s.backend.conn.Conn = most, netlink.New(wire, false)
			var refused *dataplane.Refused
			_, err := s.backend.ApplyAll(&state, dataplane.Change{Services: sortedKeys(s.planner.State().Services)})
			if !errors.As(err, &refused) || len(refused.Services) != 1 || refused.Services[bad] == nil {
				t.Errorf("with %d bytes, %T: %v", most, wire, err)
			}
			f.most, s.backend.conn.Conn, s.backend.maxElements = 0, netlink.New(f, false), 0
			s.apply(dataplane.Change{Services: sortedKeys(s.planner.State().Services)})
			quiet(t, s.backend)
		}
	}
}

// TestLittleRoom replaces all addresses where a process may send little at once: it takes several transactions, after
// each of which every frontend is one that was or one that should be. So it does if the tables have to be looked at
// first, or made anew.
func TestLittleRoom(t *testing.T) {
	state := func(third byte) *dataplane.State {
		d := large(1000, 1)
		for _, svc := range d.Services {
			a := svc.ClusterIPs[0].As4()
			a[1] += third
			svc.ClusterIPs[0] = netip.AddrFrom4(a)
		}
		snap := snapshot.New()
		snap.Apply(d)
		st, _ := dataplane.Compute(configs["unknown"], snap)
		return st
	}
	for name, c := range map[string]struct {
		trust syncState
		full  bool
	}{"a change": {stateInSync, false}, "a correction": {stateStale, false}, "anew": {stateUnfixable, true}} {
		t.Run(name, func(t *testing.T) {
			_, b := host(t)
			apply(t, b, state(0))
			b.conn.Conn = netlink.New(&faulty{Wire: b.conn.Wire, most: 90 << 10}, false)
			b.syncState = c.trust
			st := state(1)
			may := map[string]bool{}
			for _, s := range []*dataplane.State{state(0), st} {
				for i, l := range nft.List(s) {
					for _, e := range l.Elements[nft.Services] {
						may[elementText(ipfamily.All[i], &e.Element)] = true
					}
				}
			}
			change, parts, full := dataplane.Change{Services: sortedKeys(st.Services)}, 0, false
			for left := true; left; parts++ {
				r, err := b.Apply(st, change)
				labtest.Check(t, err)
				full, left, change = full || r.Full, len(r.Left) > 0, dataplane.Change{}
				listed, err := b.List()
				labtest.Check(t, err)
				for i, l := range listed {
					for _, e := range l.Elements[nft.Services] {
						if text := elementText(ipfamily.All[i], &e.Element); !may[text] {
							t.Fatalf("part %d: %s", parts, text)
						}
					}
				}
			}
			if full != c.full || parts < 5 {
				t.Errorf("made anew: %v, in %d parts", full, parts)
			}
			if got, want := held(t, b), wanted(st); got != want {
				t.Fatal(labtest.FirstDifference(got, want))
			}
			quiet(t, b)
		})
	}
}

// TestOthersOvertake changes one Service while another is so large that it takes many transactions: the small one is in
// with the next.
func TestOthersOvertake(t *testing.T) {
	s := newSite(t, 0, Options{})
	change, _ := s.planner.Apply(s.snap, s.snap.Apply(large(4, 3)))
	s.apply(change)
	giant := &snapshot.Service{Name: snapshot.Name{Namespace: "aaa", Name: "giant"},
		ClusterIPs: []netip.Addr{addr("10.96.9.9")}}
	for i := range 4000 {
		giant.ExternalIPs = append(giant.ExternalIPs, netip.AddrFrom4([4]byte{198, 18, byte(i >> 8), byte(i)}))
	}
	for p := range 10 {
		giant.Ports = append(giant.Ports, snapshot.Port{Name: fmt.Sprint(p), Protocol: snapshot.TCP, Port: uint16(1000 + p)})
	}
	change, _ = s.planner.Apply(s.snap, s.snap.Apply(
		snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{giant.Name: giant}}))
	r, err := s.backend.Apply(s.planner.State(), change)
	labtest.Check(t, err)
	if len(r.Left) != 1 || r.Added > 2*writeAtOnce {
		t.Fatalf("after the first transaction: %d elements, left %v", r.Added, r.Left)
	}
	small := large(4, 5)
	change, _ = s.planner.Apply(s.snap, s.snap.Apply(small))
	r, err = s.backend.Apply(s.planner.State(), change)
	labtest.Check(t, err)
	for n := range small.Services {
		if slices.Contains(r.Left, n) {
			t.Errorf("%s waits for %s", n, giant.Name)
		}
		k := dataplane.Key{Addr: small.Services[n].ClusterIPs[0], Protocol: snapshot.TCP, Port: 80}
		key := nft.FrontendKeys(dataplane.Counted{Key: k})[0]
		labtest.Check(t, s.backend.reader.get(ipfamily.IPv4, key.Set, []nft.Element{key}, func(e nft.Element) {
			if e.Leads().N != 5 {
				t.Errorf("%s leads to %s", n, e.Leads().Name())
			}
		}))
	}
	if len(r.Left) != 1 {
		t.Errorf("left %v", r.Left)
	}
	s.apply(dataplane.Change{})
	quiet(t, s.backend)
}

// TestChainsOfOneName: others give a chain the name of one that they add in the same transaction. The kernel has both
// then, and a name leads to only one of them.
func TestChainsOfOneName(t *testing.T) {
	s := newSite(t, 4, Options{})
	for _, name := range []string{"mine", "pick-77"} {
		handles := chainHandles(t, s.backend.reader)
		var b batch
		b.Reset()
		b.Begin()
		m := b.object(ipfamily.IPv4, unix.NFT_MSG_NEWCHAIN, 0, "")
		b.Attr(unix.NFTA_CHAIN_HANDLE, handles["input"]...)
		b.Text(unix.NFTA_CHAIN_NAME, name)
		b.End(m)
		b.chainNamed(ipfamily.IPv4, false, unix.NFT_MSG_NEWCHAIN, name, "")
		b.Finish()
		if refused, err := open(t, s.host, Options{}).conn.Commit(b.Bytes()); err != nil || len(refused) > 0 {
			t.Fatal(err, refused)
		}
		want := "there is more than one chain " + name
		if found := check(t, s.backend); !strings.Contains(strings.Join(found, "\n"), want) {
			t.Errorf("found %q; want %q", found, want)
		}
		s.apply(dataplane.Change{})
		quiet(t, s.backend)
		if left := chainHandles(t, s.backend.reader); left[name] != nil || left["input"] == nil {
			t.Errorf("after the repair there are %q", slices.Sorted(maps.Keys(left)))
		}
		s.restart(Options{})
		if r := s.apply(dataplane.Change{}); !r.Adopted {
			t.Errorf("another process finds something to do: %+v", r)
		}
	}
}

// chainHandles gives the handles of the chains of our table for IPv4, by name.
func chainHandles(t *testing.T, c *Conn) map[string][]byte {
	t.Helper()
	handles := map[string][]byte{}
	labtest.Check(t, c.objects(ipfamily.IPv4, unix.NFT_MSG_GETCHAIN, func(attrs netlink.Attributes) {
		handles[unix.ByteSliceToString(attrs[unix.NFTA_CHAIN_NAME])] = attrs[unix.NFTA_CHAIN_HANDLE]
	}))
	return handles
}

// TestUnseenStaysUnverified: somebody exchanges an element before a process starts, or while it runs. The process
// writes before it has inspected everything, and loses the answer or ends. What follows must not take it that nobody
// else has written since the last revision.
func TestUnseenStaysUnverified(t *testing.T) {
	exchange := func(s *site) {
		s.nft(fmt.Sprintf("delete element ip verdict services { %v . tcp . 80 }\n"+
			"add element ip verdict services { 192.0.2.77 . tcp . 80 : dead:beef }", lab.Nth(lab.ServiceRange[0], 1)))
	}
	write := func(s *site) error {
		var change dataplane.Change
		for i := 1; change.Empty(); i++ {
			change = s.change(1 + i%5) // not the Service whose element it was
		}
		_, err := s.backend.ApplyAll(s.planner.State(), change)
		return err
	}
	for name, strange := range map[string]func(s *site){
		"the answer is lost": func(s *site) {
			s.restart(Options{})
			exchange(s)
			f := newFaults()
			f.armed, f.random = []*trouble{{verb: verbBatch, illness: closedAfter}}, s.random
			s.backend.conn.Wire = &walkWire{Wire: s.backend.conn.Wire, f: f}
			dial := s.backend.dial
			s.backend.dial = func(int) (*Conn, error) { return nil, errors.New("no more sockets") }
			if err := write(s); err == nil {
				t.Error("no answer was lost")
			}
			s.backend.dial = dial
			_, err := s.backend.ApplyAll(s.planner.State(), dataplane.Change{})
			labtest.Check(t, err)
		},
		"it ends after a write": func(s *site) {
			s.restart(Options{})
			exchange(s)
			labtest.Check(t, write(s))
			s.restart(Options{})
			labtest.Check(t, write(s))
		},
		"it ends during an inspection": func(s *site) {
			exchange(s)
			_, err := s.backend.checkTables()
			labtest.Check(t, err)
			labtest.Check(t, write(s))
			s.restart(Options{})
			labtest.Check(t, write(s))
		},
		"before it owns the tables": func(s *site) {
			s.restart(Options{Own: true})
			s.apply(dataplane.Change{})
			quiet(t, s.backend)
			labtest.Check(t, write(s)) // so that the revision has the generation
			s.restart(Options{Own: true})
			f := newFaults()
			f.armed, f.random = []*trouble{{verb: verbBatch, illness: othersFirst}}, s.random
			f.meddle = func() { exchange(s) }
			s.backend.conn.Wire = &walkWire{Wire: s.backend.conn.Wire, f: f}
			_, err := s.backend.ApplyAll(s.planner.State(), dataplane.Change{})
			labtest.Check(t, err)
			if len(f.armed) > 0 { // nothing is written, and nothing owned: Linux before 6.9
				exchange(s)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSite(t, 6, Options{})
			strange(s)
			if check(t, s.backend) == nil {
				t.Error("nobody has seen it")
			}
			s.apply(dataplane.Change{})
			quiet(t, s.backend)
			if s.backend.unverified {
				t.Error("the tables stay unverified")
			}
		})
	}
}
