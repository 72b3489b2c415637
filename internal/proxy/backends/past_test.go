package backends

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/proxy/ledger"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/nft/kernel"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
	"github.com/verdict-proxy/verdict/sync/snapshot/snapshottest"
)

func TestMain(m *testing.M) { labtest.Main(m) }

// proxy is a loop that writes to a host's kernel, with a ledger.
type proxy struct {
	t       *testing.T
	host    *lab.Host
	dir     string
	tables  *kernel.Backend
	queue   *snapshot.Queue
	ledger  *ledger.Writer
	repairs chan int
	stop    func()
}

// start starts a process, with what the cluster has.
func (p *proxy) start(d snapshot.Delta) {
	labtest.Check(p.t, p.host.Do(func() (err error) {
		p.tables, err = kernel.Open(kernel.Options{})
		return err
	}))
	log := slog.New(slog.DiscardHandler)
	p.ledger = ledger.New(ledger.Options{Dir: p.dir, MaxBytes: 1 << 20, Source: ledgerSource(p.tables), Log: log,
		Backend: "nftables"})
	p.tables.Sent = p.ledger.Sent
	p.queue = snapshot.NewQueue(1)
	planner := dataplane.NewPlanner(dataplane.Config{NodeName: "node-1"})
	loop := &reconcile.Loop{Queue: p.queue, Planner: planner, Writer: p.tables, Log: log,
		Listeners: []reconcile.Listener{p.ledger.Listener(), {
			Written: func(t reconcile.Transaction) {
				if t.Foreign > 0 {
					p.repairs <- t.Foreign
				}
			}}}}
	ctx, cancel := context.WithCancel(p.t.Context())
	var running sync.WaitGroup
	running.Go(func() { p.ledger.Run(ctx) })
	running.Go(func() { _ = loop.Run(ctx) })
	p.stop = func() {
		cancel()
		running.Wait()
		labtest.Check(p.t, p.tables.Close())
	}
	p.queue.Put(d)
	p.queue.Synced()
	p.settle()
}

// settle waits until all that was put is in the kernel, also what waits for its namespace's turn.
func (p *proxy) settle() {
	p.t.Helper()
	testkit.Eventually(p.t, 30*time.Second, "everything is programmed", func() bool {
		return p.queue.Progress().Since.IsZero()
	})
}

// held is what the kernel holds, as text.
func (p *proxy) held() string {
	r, err := p.tables.Load()
	labtest.Check(p.t, err)
	return textOf(p.t, r)
}

// textOf lists what a Replay holds, as nft does.
func textOf(t *testing.T, r *kernel.Replay) string {
	t.Helper()
	var text strings.Builder
	for _, f := range ipfamily.All {
		table, err := r.Table(f)
		labtest.Check(t, err)
		l := nft.Listing{Table: table.Table}
		for set := range nft.NumSets {
			l.Elements[set], _, _ = r.List(f, set)
		}
		labtest.Check(t, l.Print(&text))
	}
	return text.String()
}

// moment is what the kernel held at a time.
type moment struct {
	at   time.Time
	held string
}

// disturb changes the tables as another program might, and waits for the repair.
func (p *proxy) disturb(n labtest.Nft, how int) {
	what := "flush chain ip verdict split"
	if how == 1 {
		r, err := p.tables.Load()
		labtest.Check(p.t, err)
		ips, _, _ := r.List(ipfamily.IPv4, nft.Addresses)
		set := nft.SetByID(nft.Addresses)
		what = "delete element ip verdict addresses { " + ips[0].Element.Text(ipfamily.IPv4, &set) + " }"
	}
	labtest.Run(p.t, p.host, what+"\n", n.Path, "-f", "-")
	<-p.repairs
}

// TestPast: a proxy writes random changes, is started again, and repairs what others did. Then its ledger knows what
// the kernel held after each change, and what it wrote into an empty namespace is what the kernel holds.
func TestPast(t *testing.T) {
	net := labtest.NewNet(t)
	nfts := labtest.Nfts(t)[0]
	p := &proxy{t: t, host: labtest.NewHost(t, net, "node"), dir: t.TempDir() + "/ledger",
		repairs: make(chan int, 1000)}
	world := snapshottest.Cluster{Rand: rand.New(rand.NewPCG(4, 1)),
		Options: snapshottest.Options{Services: 12, Endpoints: 6, NodePorts: 40, Weights: true}}
	all := world.All()
	var moments []moment
	for process := range 3 {
		p.start(all)
		for step := range 20 {
			d := world.Step()
			all.Merge(d)
			p.queue.Put(d)
			p.settle()
			if step == 8 || step == 14 {
				p.disturb(nfts, (process+step/8)%2)
			}
			moments = append(moments, moment{time.Now(), p.held()})
		}
		p.stop()
		if s := p.ledger.Stats(); s.Missing+s.Errors > 0 {
			t.Errorf("%+v", s)
		}
	}
	unknown := 0
	for i, m := range moments {
		past, err := OpenPast(p.dir, m.at)
		if gap := (*ledger.Unknown)(nil); errors.As(err, &gap) {
			unknown++
			continue
		}
		labtest.Check(t, err)
		if got := textOf(t, past.Inspector.(kernel.Replayed).Replay); got != m.held {
			t.Fatalf("moment %d, after record %d: %s", i, past.Last.Number, labtest.FirstDifference(got, m.held))
		}
	}
	if unknown > len(moments)/5 {
		t.Errorf("the ledger does not know of %d of %d moments", unknown, len(moments))
	}
	past, err := OpenPast(p.dir, time.Now())
	labtest.Check(t, err)
	empty := labtest.NewHost(t, net, "empty")
	labtest.Check(t, empty.Do(func() error { _, err := past.Write(); return err }))
	if got, want := sortedLines(nfts.List(t, empty)), sortedLines(nfts.List(t, p.host)); got != want {
		t.Errorf("after the replay, an empty namespace holds something else: %s", labtest.FirstDifference(got, want))
	}
}

// sortedLines sorts a listing: chains and elements are listed in the order in which they came.
func sortedLines(text string) string {
	lines := strings.FieldsFunc(text, func(r rune) bool { return r == '\n' || r == ',' })
	for i := range lines {
		lines[i] = strings.Trim(strings.TrimSpace(strings.TrimPrefix(strings.TrimSpace(lines[i]), "elements = {")), "} ")
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}
