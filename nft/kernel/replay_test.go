package kernel

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestReplay: the batches of a fill and of changes take another kernel to the same content; what is refused is an
// error.
func TestReplay(t *testing.T) {
	_, b := host(t)
	_, other := host(t)
	b.Sent = func(batch []byte) { labtest.Check(t, other.conn.Replay(batch)) }
	random := rand.New(rand.NewPCG(1, 2))
	snap, planner := cluster(random, 20, false), dataplane.NewPlanner(configs["cluster CIDR"])
	change, _ := planner.Apply(snap, snapshot.Change{})
	for i := range 10 {
		_, err := b.ApplyAll(planner.State(), change)
		labtest.Check(t, err)
		change, _ = planner.Apply(snap, snap.Apply(serviceDelta(random, i, false)))
	}
	other.model = b.model // which says what the structure is
	if got, want := held(t, other), held(t, b); got != want {
		t.Errorf("after the replay, the kernel holds\n%s\nnot\n%s", got, want)
	}

	var last []byte
	b.Sent = func(batch []byte) { last = slices.Clone(batch) }
	change, _ = planner.Apply(snap, snap.Apply(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{
		{Namespace: "default", Name: "s7"}: nil}}))
	_, err := b.ApplyAll(planner.State(), change)
	labtest.Check(t, err)
	if err := b.conn.Replay(last); !errors.Is(err, unix.ENOENT) {
		t.Errorf("what is gone was taken away once more: %v", err)
	}
}

// TestReplayInMemory: what a Replay makes of the batches of a random history, with changes by others and another
// process between them, is what the kernel holds, and so is what it writes into an empty namespace. Each batch but
// those after a change by others follows the one before it. After those, the Replay knows if it is not what the kernel
// holds.
func TestReplayInMemory(t *testing.T) {
	for _, name := range []string{"cluster CIDR", "evidence"} {
		t.Run(name, func(t *testing.T) {
			h, b := host(t)
			replay, repairs := &Replay{}, false
			listen := func(b *Backend) {
				b.Sent = func(batch []byte) {
					if _, err := replay.Apply(batch); (err != nil) && !repairs {
						t.Errorf("a batch does not follow: %v", err)
					}
				}
			}
			listen(b)
			random := rand.New(rand.NewPCG(3, 1))
			snap, planner := cluster(random, 20, true), dataplane.NewPlanner(configs[name])
			change, _ := planner.Apply(snap, snapshot.Change{})
			for i := range 60 {
				_, err := b.ApplyAll(planner.State(), change)
				labtest.Check(t, err)
				check(t, b)
				if repairs && !replay.Consistent() {
					replay = loadedFrom(t, b)
				}
				sameAsHeld(t, i, replay, b)
				switch i % 20 {
				case 7: // others delete elements of one set, and add some to another
					disturb(t, b)
					if check(t, b) == nil {
						t.Error("the change by others was not found")
					}
					repairs = true
				case 13: // the next process reads what is there
					labtest.Check(t, b.Close())
					b = open(t, h, Options{})
					listen(b)
				default:
					repairs = false
				}
				change, _ = planner.Apply(snap, snap.Apply(serviceDelta(random, random.IntN(25), true)))
			}
			empty := labtest.NewHost(t, labtest.NewNet(t), "empty")
			labtest.Check(t, empty.Do(written(replay)))
			other := open(t, empty, Options{})
			other.model = b.model
			if got, want := held(t, other), held(t, b); got != want {
				t.Errorf("after the replay, an empty namespace holds\n%s\nnot\n%s", got, want)
			}
			if err := empty.Do(written(replay)); err == nil {
				t.Error("wrote into a namespace that held tables")
			}
			loaded := loadedFrom(t, b)
			if loaded.Revision() != replay.Revision() {
				t.Errorf("loaded revision %s; want %s", loaded.Revision(), replay.Revision())
			}
			sameAsHeld(t, -1, loaded, b)
		})
	}
}

// loadedFrom reads what a Backend's tables hold.
func loadedFrom(t *testing.T, b *Backend) *Replay {
	t.Helper()
	r, err := b.Load()
	labtest.Check(t, err)
	return r
}

// disturb deletes an endpoint's slot, and adds an address, as others might.
func disturb(t *testing.T, b *Backend) {
	t.Helper()
	l, err := b.List()
	labtest.Check(t, err)
	other, err := Dial(int(b.netns.Fd()))
	labtest.Check(t, err)
	defer other.Close()
	var txn nft.Txn
	txn.Tables[0].Del[nft.Endpoints] = []nft.Element{l[0].Elements[nft.Endpoints][0].Element}
	foreign, _ := nft.ElementFrom(ipfamily.IPv4, nft.Addresses, []byte{10, 96, 99, 99}, nil, make([]byte, 4), "", "")
	txn.Tables[0].Add[nft.Addresses] = []nft.Element{foreign}
	var w batch
	labtest.Check(t, other.Replay(w.encode(&txn)))
}

// sameAsHeld compares a Replay with what the kernel holds.
func sameAsHeld(t *testing.T, step int, r *Replay, b *Backend) {
	t.Helper()
	var got [2]nft.Listing
	for i, f := range ipfamily.All {
		got[i].Table = r.held[i].found(f).Table
		for set := range nft.NumSets {
			got[i].Elements[set], _, _ = r.List(f, set)
		}
		for _, c := range got[i].Table.Chains {
			for _, rule := range c.Rules {
				if _, foreign := rule[0].(nft.Foreign); foreign {
					t.Errorf("step %d: chain %s has a rule that is not recognized: %v", step, c.ID.Name(), rule)
				}
			}
		}
	}
	l, err := b.List()
	labtest.Check(t, err)
	for i := range l {
		for _, set := range [...]nft.SetID{nft.Affinity, nft.Unanswered, nft.Refused} {
			l[i].Elements[set] = nil
		}
	}
	if got, want := lines(got[:]), lines(l[:]); got != want {
		t.Fatalf("step %d: the replay holds besides\n%s\nand lacks\n%s", step, besides(got, want), besides(want, got))
	}
	held, written := r.Digests()
	if held != written {
		t.Errorf("step %d: the replay has digests %v, and says %v", step, held, written)
	}
}

// besides returns the lines of a that are not in b.
func besides(a, b string) string {
	others := strings.Split(b, "\n")
	return strings.Join(slices.DeleteFunc(strings.Split(a, "\n"), func(line string) bool {
		return slices.Contains(others, line)
	}), "\n")
}

// TestReplayGap: a batch that is missing is noticed at the next one of the same table; a batch that was loaded already
// changes nothing.
func TestReplayGap(t *testing.T) {
	_, b := host(t)
	var batches [][]byte
	b.Sent = func(batch []byte) { batches = append(batches, slices.Clone(batch)) }
	random := rand.New(rand.NewPCG(5, 1))
	snap, planner := cluster(random, 5, false), dataplane.NewPlanner(configs["cluster CIDR"])
	change, _ := planner.Apply(snap, snapshot.Change{})
	for i := range 4 {
		_, err := b.ApplyAll(planner.State(), change)
		labtest.Check(t, err)
		change, _ = planner.Apply(snap, snap.Apply(serviceDelta(random, i, false)))
	}
	var r Replay
	if whole, err := r.Apply(batches[0]); !whole || err != nil {
		t.Errorf("the first batch: whole %v, error %v", whole, err)
	}
	if whole, err := r.Apply(batches[2]); whole || !errors.Is(err, ErrGap) {
		t.Errorf("a batch after a gap: whole %v, error %v", whole, err)
	}
	loaded := loadedFrom(t, b)
	for _, batch := range batches[1:] {
		if whole, err := loaded.Apply(batch); whole || err != nil {
			t.Errorf("a batch that was loaded: whole %v, error %v", whole, err)
		}
	}
	sameAsHeld(t, -1, loaded, b)
	if _, err := r.Apply(batches[1][:len(batches[1])/2]); err == nil {
		t.Error("took a batch that was cut short")
	}
}

// TestReplayOfAnotherVersion: rules that another version wrote are replayed, until this one replaces them, but
// no batch is made of them.
func TestReplayOfAnotherVersion(t *testing.T) {
	_, b := host(t)
	var first []byte
	b.Sent = func(batch []byte) { first = slices.Clone(batch) }
	apply(t, b, &dataplane.State{})
	var r Replay
	if whole, err := r.Apply(first); !whole || err != nil {
		t.Fatalf("whole %v, error %v", whole, err)
	}
	if _, err := r.Batch(); err != nil {
		t.Error(err)
	}
	chain := nft.ChainID{Kind: nft.Prerouting}.Name()
	r.held[0].rules[chain] = append(r.held[0].rules[chain], r.held[0].rules[nft.ChainID{Kind: nft.Postrouting}.Name()]...)
	if batch, err := r.Batch(); err == nil || !strings.Contains(err.Error(), "chain "+chain) {
		t.Errorf("a batch of %d bytes, error %v", len(batch), err)
	}
}

// written writes what a Replay holds.
func written(r *Replay) func() error {
	return func() error {
		_, err := r.Write()
		return err
	}
}

// TestReplayIngress: a batch of what is held holds the tables at the ingress, too. They are written where there is such
// a device, and left out elsewhere.
func TestReplayIngress(t *testing.T) {
	s := newSegment(t)
	s.learn(s.service(nil, 1, 2))
	a := s.nodes[0]
	r := replayOf(t, a.planner.State())
	batch, err := r.Batch()
	labtest.Check(t, err)
	var again Replay
	_, err = again.Apply(batch)
	labtest.Check(t, err)
	if held, _ := r.Digests(); !again.Consistent() || len(again.held[0].elements[nft.KeptSlots]) == 0 {
		t.Errorf("of the digests %v, a batch of it has %s", held, again.Revision())
	}
	for i, device := range []string{"", "eth0"} {
		h := labtest.NewHost(t, labtest.NewNet(t), fmt.Sprint("empty-", i))
		if device != "" {
			labtest.Run(t, h, "", "ip", "link", "add", device, "type", "veth")
		}
		var left string
		labtest.Check(t, h.Do(func() (err error) {
			left, err = r.Write()
			return err
		}))
		tables := labtest.Run(t, h, "", "nft", "list", "tables")
		if there := strings.Contains(tables, "netdev verdict6"); there != (device != "") || (left == "eth0") == there {
			t.Errorf("with device %q, %q is left out, and there are %s", device, left, tables)
		}
		if device == "" {
			continue
		}
		labtest.Check(t, h.Do(func() error {
			i, err := Inspect()
			labtest.Check(t, err)
			got, err := i.Trace(t.Context(), dataplane.Packet{Source: addr("198.51.100.7"), Destination: s.VIP[0], Port: 80,
				Protocol: snapshot.TCP, Interface: device}, dataplane.LocalNode{})
			if len(got.Endings) != 2 || got.Cause != dataplane.ForwardedToNode {
				t.Errorf("a packet meets %s", traceText(got))
			}
			return errors.Join(err, i.Close())
		}))
	}
}

// FuzzReplay: no batch, whatever somebody has made of it, ends the process: files of a ledger are read at each start.
func FuzzReplay(f *testing.F) {
	snap := cluster(rand.New(rand.NewPCG(5, 1)), 3, true)
	st, _ := dataplane.Compute(configs["evidence"], snap)
	var m nft.Model
	var w batch
	f.Add(w.encode(m.Plan(st, dataplane.Change{}, 0)), []byte{}, uint16(0))
	delete(st.Services, snapshot.Name{Namespace: "default", Name: "s1"})
	change := dataplane.Change{Services: []snapshot.Name{{Namespace: "default", Name: "s1"}}}
	made := slices.Clone(w.Bytes())
	f.Add(made, slices.Clone(w.encode(m.Plan(st, change, 0))), uint16(40))
	// It deletes an element whose key is too short for its set.
	f.Add([]byte{}, []byte("T\x00\x00\x00\x0e\n\x01\x00\a\x00\x00\x00\x00\x00\x00\x00\x02\x00\x00\x00"+
		"\f\x00\x01\x00verdict\x00\x16\x00\x02\x00external-services\x00\x00\x00"+
		"\x1c\x00\x03\x80\x18\x00\x01\x80\x14\x00\x01\x80"+
		"\x10\x00\x01\xa2\xb3\x00\xc0\x00\x02\x01\x06\x00\x00\x00u1"), uint16(97))
	f.Fuzz(func(t *testing.T, first, second []byte, at uint16) {
		var r Replay
		for _, batch := range [][]byte{first, second, made, second} {
			if int(at) < len(batch) {
				batch = slices.Clone(batch)
				batch[at] ^= 0x55
			}
			_, _ = r.Apply(batch)
			_, _ = Lines(batch)
			_ = ServicesIn(batch)
			_ = r.Consistent()
			if again, err := r.Batch(); err == nil {
				var other Replay
				if _, err := other.Apply(again); err != nil {
					t.Errorf("what a Replay makes cannot be applied: %v", err)
				}
			}
		}
	})
}

// TestLargeBatchIsLetGo: what only the first fill needs is not held for good.
func TestLargeBatchIsLetGo(t *testing.T) {
	_, b := host(t)
	var sent int
	b.Sent = func(batch []byte) { sent = len(batch) }
	snap := snapshot.New()
	snap.Apply(large(3000, 10))
	st, _ := dataplane.Compute(configs["cluster CIDR"], snap)
	apply(t, b, st)
	if sent <= keepBytes || cap(b.batch.Bytes()) > keepBytes || cap(b.batch.messages) > keepBytes {
		t.Errorf("%d bytes were sent, room for %d bytes and %d notes is left",
			sent, cap(b.batch.Bytes()), cap(b.batch.messages))
	}
}
