package kernel

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/netlink"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// site is a host with a cluster's objects, and a backend that comes and goes.
type site struct {
	t       testing.TB
	host    *lab.Host
	backend *Backend
	random  *rand.Rand
	snap    *snapshot.Snapshot
	planner *dataplane.Planner
}

// newSite carries some Services.
func newSite(t testing.TB, services int, o Options) *site {
	t.Helper()
	h, _ := host(t)
	random := rand.New(rand.NewPCG(11, 4))
	s := &site{t: t, host: h, backend: open(t, h, o), random: random,
		snap: cluster(random, services, true), planner: dataplane.NewPlanner(configs["cluster CIDR"])}
	s.planner.Apply(s.snap, snapshot.Change{})
	s.apply(dataplane.Change{})
	return s
}

func (s *site) apply(c dataplane.Change) dataplane.Receipt {
	s.t.Helper()
	r, err := s.backend.ApplyAll(s.planner.State(), c)
	labtest.Check(s.t, err)
	if got, want := held(s.t, s.backend), wanted(s.planner.State()); got != want {
		s.t.Fatalf("%s", labtest.FirstDifference(got, want))
	}
	return r
}

// change lets the cluster change a Service.
func (s *site) change(i int) dataplane.Change {
	c, _ := s.planner.Apply(s.snap, s.snap.Apply(serviceDelta(s.random, i, true)))
	return c
}

// restart goes on with another backend, that knows nothing.
func (s *site) restart(o Options) {
	s.t.Helper()
	labtest.Check(s.t, s.backend.Close())
	s.backend = open(s.t, s.host, o)
}

func (s *site) generation() uint32 {
	s.t.Helper()
	g, err := s.backend.reader.Generation()
	labtest.Check(s.t, err)
	return g
}

func (s *site) list() string { return labtest.Nfts(s.t)[0].List(s.t, s.host) }

// TestRestartWritesNothing: a backend that finds what it wants leaves it alone, counters and affinity included, and
// then changes it as if it had been there all the time.
func TestRestartWritesNothing(t *testing.T) {
	s := newSite(t, 12, Options{})
	for i := range 20 { // so that slots are no longer sorted
		s.apply(s.change(i % 12))
	}
	before, generation := s.list(), s.generation()
	s.restart(Options{})
	if r := s.apply(dataplane.Change{}); !r.Adopted || r.Bytes != 0 {
		t.Fatalf("not adopted: %+v", r)
	}
	if s.generation() != generation || s.list() != before {
		t.Fatalf("something was written:\n%s", labtest.FirstDifference(s.list(), before))
	}
	quiet(t, s.backend)
	for i := range 12 {
		r := s.apply(s.change(i))
		if r.Full {
			t.Fatal("one change wrote everything anew")
		}
		quiet(t, s.backend)
	}
}

// TestRestartCorrects: what changed while nobody was there is what is written, and no more.
func TestRestartCorrects(t *testing.T) {
	s := newSite(t, 12, Options{})
	var alive nft.Model // of a backend that would have been there all the time
	alive.Plan(s.planner.State(), dataplane.Change{}, 0)
	for i := range 12 {
		change := s.change(i)
		added, _, removed := alive.Plan(s.planner.State(), change, 0).Counts()
		s.restart(Options{})
		if r := s.apply(dataplane.Change{}); r.Full || r.Adopted != change.Empty() || r.Added != added ||
			r.Removed != removed {
			t.Fatalf("change %d, %d added and %d removed: %+v", i, added, removed, r)
		}
		quiet(t, s.backend)
	}
}

// TestForeignHands does to our tables what others may do. Each is noticed, said, and repaired by what is needed for it.
func TestForeignHands(t *testing.T) {
	s := newSite(t, 8, Options{})
	l, err := s.backend.List()
	labtest.Check(t, err)
	element := func(set nft.SetID) string {
		def := nft.SetByID(set)
		return l[0].Elements[set][0].Element.Text(ipfamily.IPv4, &def)
	}
	key := func(set nft.SetID) string {
		k, _, _ := strings.Cut(element(set), " : ")
		k, _, _ = strings.Cut(k, " comment")
		return k
	}
	for _, c := range []struct {
		nft, found string
		full       bool
	}{
		{"flush ruleset", "the table is gone", true},
		{"delete table ip6 verdict", "ip6 verdict: the table is gone", true},
		{"flush chain ip verdict prerouting", "the rules of chain prerouting are others", false},
		{"insert rule ip verdict services accept", "", false},
		{"insert rule ip verdict postrouting accept", "the rules of chain postrouting are others", false},
		{"add chain ip verdict mine", "chain mine is not ours", false},
		{"add chain ip verdict mine; add rule ip verdict mine accept; insert rule ip verdict output goto mine",
			"chain mine is not ours", false},
		{"add set ip verdict mine { type ipv4_addr; }", "set mine is not ours", true},
		{"flush map ip verdict services", "services", false},
		{"delete element ip verdict services { " + key(nft.Services) + " }", "services", false},
		{"delete element ip verdict endpoints { " + key(nft.Endpoints) + " }", "endpoints", false},
		{"delete element ip verdict endpoints { " + key(nft.Endpoints) +
			" }; add element ip verdict endpoints { " + key(nft.Endpoints) +
			" : 192.0.2.66 . 666 }", "is now { ", false},
		{"add element ip verdict addresses { 192.0.2.99 : 0:1 }", "addresses has ", false},
		{"flush set ip verdict service-cidrs", "service-cidrs has 0 elements", false},
		{"delete element ip verdict service-cidrs { 10.96.0.0/16 }; add element ip verdict service-cidrs { 10.98.0.0/16 }",
			"10.96.0.0/16 } is gone", false},
		{"flush set ip verdict source-ranges", "source-ranges has 0", false},
		{"flush set ip verdict revision", "the revision is not the one", false},
		{"add table ip verdict { flags dormant; }", "flags are 0x1", true},
	} {
		if c.found == "" {
			continue
		}
		labtest.Run(t, s.host, strings.ReplaceAll(c.nft, "; add", "\nadd")+"\n", "nft", "-f", "-")
		found := check(t, s.backend)
		if !strings.Contains(strings.Join(found, "\n"), c.found) {
			t.Errorf("%s: found %q; want %q", c.nft, found, c.found)
		}
		r := s.apply(dataplane.Change{})
		if r.Full != c.full || r.Adopted || r.Messages == 0 {
			t.Errorf("%s: repaired by %+v", c.nft, r)
		}
		quiet(t, s.backend)
	}
	labtest.Run(t, s.host, "", "nft", "add", "table", "ip", "other")
	quiet(t, s.backend)
}

// owning skips where the kernel has no ownership, after a look at its version.
func owning(t *testing.T, b *Backend) {
	t.Helper()
	if old := linuxBefore(t, 6, 9); old == b.Owns() {
		t.Fatalf("before Linux 6.9: %v; owns: %v", old, b.Owns())
	} else if old {
		t.Skip("this kernel's tables cannot be owned and stay")
	}
}

// nftFails runs nft, which must not be allowed to do something.
func nftFails(t *testing.T, h *lab.Host, args ...string) {
	t.Helper()
	var out []byte
	err := h.Do(func() (err error) {
		out, err = exec.Command("nft", args...).CombinedOutput()
		return err
	})
	if err == nil || !strings.Contains(string(out), "Operation not permitted") {
		t.Errorf("nft %v: %v: %s", args, err, out)
	}
}

// TestOwnership: owned tables are ours alone, for as long as somebody holds the socket; then they stay, and the next
// may have them.
func TestOwnership(t *testing.T) {
	h, _ := host(t)
	var socket *os.File
	labtest.Check(t, h.Do(func() (err error) {
		socket, err = OpenSocket()
		return err
	}))
	s := &site{t: t, host: h, random: rand.New(rand.NewPCG(1, 1)), planner: dataplane.NewPlanner(configs["cluster CIDR"])}
	s.snap = cluster(s.random, 5, true)
	s.planner.Apply(s.snap, snapshot.Change{})
	s.backend = open(t, h, Options{Own: true, Socket: socket})
	owning(t, s.backend)
	owned := func(b *Backend, want bool, when string) {
		t.Helper()
		if b.Owned() != want {
			t.Errorf("%s: owned: %v", when, !want)
		}
	}
	owned(s.backend, false, "before the first transaction")
	s.apply(dataplane.Change{})
	owned(s.backend, true, "after the first transaction")
	full := s.list()
	mustStay := func() {
		t.Helper()
		labtest.Run(t, h, "", "nft", "flush", "ruleset")
		nftFails(t, h, "delete", "table", "ip", "verdict")
		nftFails(t, h, "flush", "chain", "ip6", "verdict", "prerouting")
		if got := s.list(); got != full {
			t.Fatalf("changed by others:\n%s", labtest.FirstDifference(got, full))
		}
	}
	for _, n := range labtest.Nfts(t) {
		if got := n.List(t, h); !strings.Contains(got, "map services") {
			t.Errorf("%s lists no map services:\n%s", n.Path, got)
		}
	}
	mustStay()
	quiet(t, s.backend)
	other := open(t, h, Options{Own: true})
	var theirs *Owned
	if _, err := other.ApplyAll(s.planner.State(), dataplane.Change{}); !errors.As(err, &theirs) || theirs.Port == 0 {
		t.Fatalf("another backend got %v", err)
	}
	owned(other, false, "with tables of another backend")
	if err := other.Remove(); !errors.As(err, &theirs) {
		t.Fatalf("another backend removed them: %v", err)
	}
	labtest.Check(t, other.Probe())

	owned(s.backend, true, "with an attempt of another backend")

	// The backend goes; the socket is held.
	labtest.Check(t, s.backend.Close())
	mustStay()
	generation := s.generationOf(other)
	s.backend = open(t, h, Options{Own: true, Socket: socket})
	if r := s.apply(dataplane.Change{}); !r.Adopted || s.generation() != generation {
		t.Fatalf("not adopted: %+v", r)
	}
	quiet(t, s.backend)
	s.apply(s.change(1))
	full = s.list()
	mustStay()

	// Nobody holds it; then another one takes them over.
	labtest.Check(t, s.backend.Close())
	labtest.Check(t, socket.Close())
	labtest.Run(t, h, "", "nft", "flush", "chain", "ip6", "verdict", "prerouting")
	s.backend = open(t, h, Options{Own: true})
	if r := s.apply(dataplane.Change{}); r.Full || r.Adopted {
		t.Fatalf("a damaged table of nobody: %+v", r)
	}
	full = s.list()
	mustStay()
	quiet(t, s.backend)
	owned(s.backend, true, "after a repair")
	labtest.Check(t, s.backend.Remove())
	owned(s.backend, false, "after the removal")
	if got := s.list(); got != "" {
		t.Fatalf("left behind:\n%s", got)
	}
}

func (s *site) generationOf(b *Backend) uint32 {
	s.t.Helper()
	g, err := b.reader.Generation()
	labtest.Check(s.t, err)
	return g
}

// TestRefusedServices: the kernel refuses what overlapping source ranges ask for. The Services are named, nothing
// else of the transaction is in, and without them the rest goes in.
func TestRefusedServices(t *testing.T) {
	s := newSite(t, 6, Options{})
	bad := map[snapshot.Name]bool{}
	state := *s.planner.State()
	poisoned := func() *dataplane.State {
		st := state
		st.Services = map[snapshot.Name]*dataplane.Service{}
		for n, svc := range state.Services {
			if bad[n] {
				svc = poison(svc)
			}
			st.Services[n] = svc
		}
		return &st
	}
	before := s.list()
	var names []snapshot.Name
	for n, svc := range state.Services {
		if len(names) < 2 && leads(svc) {
			names = append(names, n)
		}
	}
	bad[names[0]], bad[names[1]] = true, true
	var refused *dataplane.Refused
	for range 2 {
		_, err := s.backend.ApplyAll(poisoned(), dataplane.Change{Services: names})
		if !errors.As(err, &refused) || len(refused.Services) != 2 || refused.Services[names[0]] == nil {
			t.Fatalf("got %v", err)
		}
		if !strings.Contains(err.Error(), "source-ranges { ") && !strings.Contains(err.Error(), "services { ") {
			t.Errorf("the element is not named: %v", err)
		}
		if got := s.list(); got != before {
			t.Fatalf("something is in:\n%s", labtest.FirstDifference(got, before))
		}
	}
	// From nothing, too.
	s.restart(Options{})
	labtest.Check(t, s.backend.Remove())
	if _, err := s.backend.ApplyAll(poisoned(), dataplane.Change{}); !errors.As(err, &refused) ||
		len(refused.Services) != 2 {
		t.Fatalf("got %v", err)
	}
	clear(bad)
	_, err := s.backend.ApplyAll(poisoned(), dataplane.Change{Services: names})
	labtest.Check(t, err)
	if got, want := held(t, s.backend), wanted(&state); got != want {
		t.Fatal(labtest.FirstDifference(got, want))
	}
	quiet(t, s.backend)
}

// poison gives a Service that asks for what the kernel refuses: source ranges of which one lies in the other, which
// old kernels take, and a frontend that leads to endpoints and to none, if it has any that leads to endpoints.
func poison(svc *dataplane.Service) *dataplane.Service {
	s := *svc
	s.Ports = nil
	for _, sp := range svc.Ports {
		p := *sp
		p.Frontends = slices.Clone(sp.Frontends)
		for i := range p.Frontends {
			if p.Frontends[i].Key.Addr.Is4() {
				p.Frontends[i].Sources = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("10.1.0.0/16")}
			}
		}
		s.Ports = append(s.Ports, &p)
		again := *sp
		again.Name.Port += "-again"
		again.Cluster, again.Local, again.Frontends = &dataplane.Pool{}, &dataplane.Pool{}, slices.Clone(sp.Frontends)
		for i := range again.Frontends {
			// The kernel takes an element without data twice, and does not count a transaction in which nothing is new. No State
			// asks for one twice.
			again.Frontends[i].Sources = nil
			again.Frontends[i].Routes = []dataplane.Route{{Pool: again.Cluster}}
		}
		s.Ports = append(s.Ports, &again)
	}
	return &s
}

// leads says whether any port of a Service leads to endpoints.
func leads(svc *dataplane.Service) bool {
	return slices.ContainsFunc(svc.Ports, func(p *dataplane.ServicePort) bool { return len(p.Cluster.Endpoints) > 0 })
}

// faulty is a wire that breaks now and then.
type faulty struct {
	netlink.Wire
	// sendErr and recvErr are given instead of the next calls' answers; a nil among them lets one call through.
	sendErr, recvErr []error
	// most is the largest datagram it sends; 0 means any.
	most int
}

func (w *faulty) Send(b []byte) error {
	if len(w.sendErr) > 0 {
		err := w.sendErr[0]
		w.sendErr = w.sendErr[1:]
		if err != nil {
			return err
		}
	}
	if w.most > 0 && len(b) > w.most {
		return unix.EMSGSIZE
	}
	return w.Wire.Send(b)
}

func (w *faulty) Recv(b []byte, wait bool) (int, error) {
	if len(w.recvErr) > 0 {
		err := w.recvErr[0]
		w.recvErr = w.recvErr[1:]
		if err != nil {
			return 0, err
		}
	}
	return w.Wire.Recv(b, wait)
}

func (w *faulty) Room(n int) (int, error) {
	if w.most > 0 {
		return (w.most + netlink.SendMargin) / 2, nil
	}
	return w.Wire.Room(n)
}

// TestFaults breaks the wire in every way it can break, in the middle of changes. After at most one error the kernel
// holds what it should, and what was in is not written twice.
func TestFaults(t *testing.T) {
	closed := os.ErrClosed
	for _, c := range []struct {
		name       string
		send, recv []error
		fails      bool
	}{
		{name: "interrupted sends", send: []error{unix.EINTR, unix.EINTR}},
		{name: "interrupted receives", recv: []error{unix.EINTR, nil, unix.EINTR}},
		{name: "lost answers, but it is in", recv: []error{unix.ENOBUFS}},
		{name: "not sent: no memory", send: []error{unix.ENOMEM}, fails: true},
		{name: "not sent: no buffers", send: []error{unix.ENOBUFS}, fails: true},
		{name: "socket lost before", send: []error{closed}, fails: true},
		{name: "socket lost after", recv: []error{unix.EBADF}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newSite(t, 6, Options{})
			for i := range 4 {
				change := s.change(i)
				if change.Empty() {
					continue
				}
				s.backend.conn.Wire = &faulty{Wire: s.backend.conn.Wire, sendErr: c.send, recvErr: c.recv}
				_, err := s.backend.ApplyAll(s.planner.State(), change)
				if (err != nil) != c.fails {
					t.Fatalf("got %v", err)
				}
				if err != nil {
					_, err = s.backend.ApplyAll(s.planner.State(), dataplane.Change{})
					labtest.Check(t, err)
				}
				if got, want := held(t, s.backend), wanted(s.planner.State()); got != want {
					t.Fatal(labtest.FirstDifference(got, want))
				}
				quiet(t, s.backend)
			}
		})
	}
}

// TestSmallDatagrams: with a small send buffer, as in a user namespace, the fill and large changes go out in steps.
func TestSmallDatagrams(t *testing.T) {
	h, b := host(t)
	s := &site{
		t:       t,
		host:    h,
		backend: b,
		random:  rand.New(rand.NewPCG(2, 2)),
		planner: dataplane.NewPlanner(configs["cluster CIDR"]),
	}
	s.snap = cluster(s.random, 250, false)
	s.planner.Apply(s.snap, snapshot.Change{})
	const most = 120 << 10
	b.conn.Wire = &faulty{Wire: b.conn.Wire, most: most}
	s.apply(dataplane.Change{})
	quiet(t, b)
	var all snapshot.Delta
	for i := range 250 {
		all.Merge(serviceDelta(s.random, i, false))
	}
	change, _ := s.planner.Apply(s.snap, s.snap.Apply(all))
	s.apply(change)
	quiet(t, b)
	if g := s.generation(); g < 6 {
		t.Errorf("%d transactions: nothing was split", g)
	}
}

// TestFullSets: a set that others filled, and sets that outgrow what they were made for.
func TestFullSets(t *testing.T) {
	s := newSite(t, 4, Options{})
	var fill strings.Builder
	for i := range 1020 {
		fmt.Fprintf(&fill, "add element ip verdict addresses { 192.168.%d.%d : 0:1 }\n", i>>8, i&255)
	}
	labtest.Run(t, s.host, fill.String(), "nft", "-f", "-")
	var more snapshot.Delta
	for i := 4; i < 20; i++ {
		more.Merge(serviceDelta(s.random, i, true))
	}
	change, _ := s.planner.Apply(s.snap, s.snap.Apply(more))
	_, err := s.backend.ApplyAll(s.planner.State(), change)
	labtest.Check(t, err)
	if found := check(t, s.backend); found == nil {
		t.Error("nobody sees what others filled the set with")
	}
	if r := s.apply(dataplane.Change{}); r.Full {
		t.Error("a set filled by others was no reason to write everything anew")
	}
	quiet(t, s.backend)

	snap := snapshot.New()
	s.snap, s.planner = snap, dataplane.NewPlanner(configs["cluster CIDR"])
	s.planner.Apply(snap, snap.Apply(large(100, 4)))
	s.backend = open(t, s.host, Options{})
	s.apply(dataplane.Change{})
	for _, n := range []int{1000, 1300, 2100, 5000} {
		change, _ := s.planner.Apply(snap, snap.Apply(large(n, 4)))
		r := s.apply(change)
		if r.Full {
			t.Errorf("%d Services: %+v", n, r)
		}
		quiet(t, s.backend)
	}
}

// TestAdoptedUnseen: a process that finds the tables as the last one left them, and knows by the number of the kernel's
// last transaction that nobody has written since, does not look at every element.
func TestAdoptedUnseen(t *testing.T) {
	s := newSite(t, 8, Options{})
	for _, others := range []bool{false, true} {
		if others {
			s.nft("add table ip others")
		}
		s.restart(Options{})
		if r := s.apply(dataplane.Change{}); !r.Adopted {
			t.Fatalf("not adopted: %+v", r)
		}
		_, _, err := s.backend.Check()
		labtest.Check(t, err)
		if looks := s.backend.inspection.running || s.backend.inspection.left != nil; looks != others {
			t.Errorf("others have written: %v, and every element is looked at: %v", others, looks)
		}
		quiet(t, s.backend)
	}
}

// TestLostAnswerOfAPart loses the kernel's answer to the first part of a fill that takes several: it is in, and what
// it had no room for has to follow.
func TestLostAnswerOfAPart(t *testing.T) {
	s := newSite(t, 30, Options{})
	labtest.Check(t, s.backend.Remove())
	s.backend.maxElements, s.backend.syncState = 16, stateUnfixable
	s.backend.conn.Wire = &faulty{Wire: s.backend.conn.Wire, recvErr: []error{unix.ENOBUFS}}
	_, err := s.backend.ApplyAll(s.planner.State(), dataplane.Change{})
	labtest.Check(t, err)
	if got, want := held(t, s.backend), wanted(s.planner.State()); got != want {
		t.Fatal(labtest.FirstDifference(got, want))
	}
}
