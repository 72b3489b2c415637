package plan

import (
	"context"
	"flag"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/answers/inspect"
	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/proxy/conntrack"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/nft/kernel"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/reconcile/reconciletest"
	"github.com/verdict-proxy/verdict/sync/snapshot"
	"github.com/verdict-proxy/verdict/sync/watch"
)

var (
	changes  = flag.Int("changes", 40, "how many random changes TestPredictions plans, applies and compares")
	planSeed = flag.Uint64("plan-seed", 0, "where TestPredictions begins; 0 means anywhere")
)

func TestMain(m *testing.M) { labtest.Main(m) }

// bed is a cluster with a proxy in its node, a planner beside it, and clients with open connections.
type bed struct {
	*lab.Cluster
	t    *testing.T
	rand *rand.Rand
	cfg  dataplane.Config
	// snap and planner are the proxy's.
	snap      *snapshot.Snapshot
	planner   *dataplane.Planner
	loop      *reconciletest.Loop
	reader    *kernel.Reader
	inspector *kernel.Inspector
	flows     *conntrack.Conn
	mu        sync.Mutex
	// removed is how many flows the Cleaner has deleted, and predicted how many it was predicted to delete.
	removed, predicted int
	// unanswered counts the datagrams that were not answered so far.
	unanswered int
	conns      []*open
	tally      map[string]int
}

// open is an open connection of a client.
type open struct {
	host     *lab.Host
	conn     *lab.Conn
	frontend dataplane.Key
	// server is who answers.
	server string
	// left is when its endpoint left a port, drain the deadline, 0 if there is none, and late how long after that it is
	// reset.
	left        time.Time
	drain, late time.Duration
	port        dataplane.PortName
	// raced says that it may have been reset at its deadline, just before a change that took the deadline away.
	raced bool
}

// judged is what was predicted of a flow.
type judged struct {
	conntrack.OpenFlow
	next dataplane.Cause
}

type flowKey struct {
	client   netip.AddrPort
	frontend dataplane.Key
}

func newBed(t *testing.T, seed uint64) *bed {
	b := &bed{t: t, rand: rand.New(rand.NewPCG(seed, 1)), snap: snapshot.New(), tally: map[string]int{},
		Cluster: labtest.NewCluster(t, lab.Config{LocalPods: 2, RemotePods: 2}),
		cfg: dataplane.Config{NodeName: "node", SecondChance: snapshot.SecondChanceOn,
			DetectLocal: dataplane.DetectLocal{ClusterCIDRs: lab.PodRange}}}
	for _, pod := range b.pods() {
		for _, p := range []snapshot.Protocol{snapshot.TCP, snapshot.UDP} {
			_, err := pod.Serve(p, 5353)
			labtest.Check(t, err)
		}
	}
	var backend *kernel.Backend
	var walks *conntrack.Conn
	labtest.Check(t, b.Node.Do(func() (err error) {
		for _, c := range []**conntrack.Conn{&walks, &b.flows} {
			if *c, err = conntrack.Dial(0); err != nil {
				return err
			}
		}
		if b.reader, err = kernel.OpenReader(); err != nil {
			return err
		}
		if b.inspector, err = kernel.Inspect(); err != nil {
			return err
		}
		backend, err = kernel.Open(kernel.Options{})
		return err
	}))
	labtest.Check(t, b.Node.Sysctl("net/netfilter/nf_conntrack_udp_timeout", "3600"))
	labtest.Check(t, b.Node.Sysctl("net/netfilter/nf_conntrack_udp_timeout_stream", "3600"))
	walker := conntrack.NewWalker(walks)
	cleaner := conntrack.NewCleaner(walker, func(r conntrack.SweepResult) {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.removed += r.Flows[0].Removed + r.Flows[1].Removed
		if r.Err != nil {
			t.Error(r.Err)
		}
	})
	releaser := conntrack.NewReleaser(walker, conntrack.ReleaserOptions{})
	cleaner.SetTCP(releaser)
	b.loop = &reconciletest.Loop{Writer: backend,
		Listeners: []reconcile.Listener{cleaner.Listener(), releaser.Listener()}}
	ctx, cancel := context.WithCancel(context.Background())
	var done sync.WaitGroup
	done.Go(func() { walker.Run(ctx) })
	t.Cleanup(func() {
		cancel()
		done.Wait()
		backend.Close()
		for _, c := range []*conntrack.Conn{walks, b.flows} {
			c.Close()
		}
		b.reader.Close()
		b.inspector.Close()
	})
	b.planner = dataplane.NewPlanner(b.cfg)
	addrs := []netip.Addr{b.Node.IP4, b.Node.IP6}
	cidrs := slices.Clone(lab.ServiceRange)
	b.apply(snapshot.Delta{HostAddrs: &addrs, ServiceCIDRs: &cidrs,
		Node: &snapshot.Node{Name: "node", Zone: "a", Addresses: addrs, PodCIDRs: lab.NodePodRange}})
	return b
}

func (b *bed) pods() []*lab.Host { return slices.Concat(b.Pods, b.RemotePods) }

// apply has the proxy write a change, wholly.
func (b *bed) apply(d snapshot.Delta) dataplane.Receipt {
	b.t.Helper()
	change, _ := b.planner.Apply(b.snap, b.snap.Apply(d))
	all, err := b.loop.Apply(b.planner.State(), change)
	for err == nil && len(all.Left) > 0 {
		var r dataplane.Receipt
		r, err = b.loop.Apply(b.planner.State(), dataplane.Change{})
		all = all.Then(r)
	}
	labtest.Check(b.t, err)
	b.forget()
	return all
}

// forget has the proxy do what it does at once after a transaction: clients forget endpoints that are gone.
func (b *bed) forget() {
	b.t.Helper()
	for {
		found, again, err := b.loop.Check()
		labtest.Check(b.t, err)
		if len(found) > 0 {
			b.t.Fatalf("the tables are not what was written: %v", found)
		}
		if again == 0 {
			return
		}
		time.Sleep(again)
	}
}

// clone copies the snapshot, as if it was listed anew.
func (b *bed) clone() *snapshot.Snapshot {
	d := snapshot.Delta{Services: maps.Clone(b.snap.Services), Slices: map[snapshot.Name]*snapshot.Slice{},
		Node: &b.snap.Node, ServiceCIDRs: &b.snap.ServiceCIDRs, HostAddrs: &b.snap.HostAddrs}
	for owner, list := range b.snap.Slices {
		for n, s := range list {
			d.Slices[snapshot.Name{Namespace: owner.Namespace, Name: n}] = s
		}
	}
	s := snapshot.New()
	s.Apply(d)
	return s
}

// plan plans a change, and gives what was predicted of each flow.
func (b *bed) plan(d snapshot.Delta) (*Plan, map[flowKey]judged) {
	b.t.Helper()
	flows := map[flowKey]judged{}
	p, err := Make(context.Background(), Input{
		Objects: &inspect.Objects{Source: "test", Config: b.cfg, Snap: b.clone()}, Kernel: b.reader, Flows: b.flows,
		Change: &watch.ObjectChange{Delta: d},
		EachFlow: func(f conntrack.OpenFlow, next dataplane.Cause) {
			flows[flowKey{f.Client, f.Frontend}] = judged{f, next}
		}})
	labtest.Check(b.t, err)
	return p, flows
}

// TestPredictions plans random changes and applies them: the transactions are those predicted, and open connections,
// with real packets, fare as predicted.
func TestPredictions(t *testing.T) {
	seed := *planSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("-plan-seed %d", seed)
	b := newBed(t, seed)
	n := 0
	defer func() { t.Logf("%d changes: %v", n, b.tally) }()
	for ; n < *changes; n++ {
		if t.Failed() {
			t.FailNow()
		}
		if end, ok := t.Deadline(); ok && time.Until(end) < 20*time.Second {
			t.Fatal("there was no time for more changes")
		}
		b.connect()
		d := b.randomDelta()
		p, flows := b.plan(d)
		if p.Base != "kernel" {
			t.Fatalf("change %d: the base is %s: %v", n, p.Base, p.Notes)
		}
		before := time.Now()
		r := b.apply(d)
		w := &p.Writes
		if w.Added != r.Added || w.Replaced != r.Replaced || w.Removed != r.Removed {
			t.Errorf("change %d: predicted +%d ~%d -%d, written +%d ~%d -%d", n, w.Added, w.Replaced, w.Removed, r.Added,
				r.Replaced, r.Removed)
		}
		b.checkDigests(n, w)
		b.tally["elements"] += r.Added + r.Replaced + r.Removed
		b.awaitCleaner(n, flows)
		b.checkConns(n, flows, before)
	}
}

// checkDigests compares what the tables hold now with what was predicted: each element of them, by their digests.
func (b *bed) checkDigests(n int, w *Writes) {
	b.t.Helper()
	d, err := b.inspector.Differences(context.Background(), nil)
	labtest.Check(b.t, err)
	for i, f := range ipfamily.All {
		if t := &d.Tables[i]; t.Found != w.Digests[f.NFT()] || t.Digest != t.Found {
			b.t.Errorf("change %d: %s: the digest is %s, predicted %s", n, f, t.Found, w.Digests[f.NFT()])
		}
	}
}

// awaitCleaner waits until the Cleaner has deleted as many flows as predicted.
func (b *bed) awaitCleaner(n int, flows map[flowKey]judged) {
	b.t.Helper()
	for _, f := range flows {
		b.tally["flows"]++
		if f.Fate == conntrack.Deleted {
			b.predicted++
		}
	}
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		b.mu.Lock()
		removed := b.removed
		b.mu.Unlock()
		if over := removed - b.predicted; over > 0 && over <= b.unanswered {
			// On a busy machine, a datagram that was not answered may have been on its way when the flows were listed.
			b.unanswered -= over
			b.predicted = removed
			b.tally["datagrams on their way"] += over
		}
		if removed == b.predicted {
			return
		}
		if removed > b.predicted || time.Now().After(deadline) {
			b.t.Errorf("change %d: flows deleted: %d, predicted %d", n, removed, b.predicted)
			return
		}
	}
}
