package flows

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/testkit"
)

// clock is a book's clock.
type clock struct{ at time.Time }

func (c *clock) now() time.Time { return c.at }

func newClock() *clock { return &clock{time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)} }

// connection is a record of a connection of a workload to a Service.
func connection(client, service string, n uint64) Record {
	namespace, _, _ := strings.Cut(client, "/")
	return Record{Time: newClock().at, Service: service, Port: "http", Protocol: "TCP", End: Closed, Weight: 1,
		Frontend: netip.MustParseAddrPort("10.96.0.1:80"), Seconds: 1.5,
		Client: Peer{Addr: netip.AddrPortFrom(netip.MustParseAddr("10.244.1.7"), uint16(n)), Pod: namespace + "/pod",
			Workload: client, Node: "node-1", Zone: "a"},
		Endpoint: Peer{Addr: netip.MustParseAddrPort("10.244.2.9:8080"), Pod: "shop/cart-0", Node: "node-2", Zone: "b"},
		Sent:     Traffic{Packets: 5, Bytes: 500 + n}, Received: Traffic{Packets: 6, Bytes: 6000}}
}

// outside is one of a client outside the cluster.
func outside(service string, n uint32) Record {
	r := connection("", service, uint64(n))
	var a [4]byte
	binary.BigEndian.PutUint32(a[:], 11<<24+n)
	r.Client = Peer{Addr: netip.AddrPortFrom(netip.AddrFrom4(a), 40000)}
	return r
}

// ask asks a book, and returns the first line and the others.
func ask[T any](t testing.TB, b *Book, query string) (a Answer, list []T) {
	t.Helper()
	w := httptest.NewRecorder()
	b.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/flows?"+query, nil))
	if w.Code != http.StatusOK {
		t.Fatalf("/flows?%s: status %d: %s", query, w.Code, w.Body)
	}
	d := json.NewDecoder(w.Body)
	if err := d.Decode(&a); err != nil {
		t.Fatal(err)
	}
	for d.More() {
		var line T
		if err := d.Decode(&line); err != nil {
			t.Fatal(err)
		}
		list = append(list, line)
	}
	return a, list
}

// TestAnswers: each parameter selects its records, the oldest first, and wrong ones are refused.
func TestAnswers(t *testing.T) {
	c := newClock()
	b := NewBook(Options{Node: "node-1", Now: c.now})
	failed := connection("shop/web", "shop/cart", 1)
	failed.End, failed.Time = Refused, c.at.Add(-time.Hour)
	dns := outside("kube-system/dns", 9)
	dns.Protocol, dns.End = "UDP", Unanswered
	open := connection("shop/web", "shop/cart", 3)
	open.End = Open
	for _, r := range []Record{failed, connection("shop/web", "shop/cart", 2), dns, open} {
		b.Add(r)
	}
	for query, want := range map[string][]uint64{
		"": {501, 502, 509}, "service=shop/cart": {501, 502}, "since=1m": {502, 509}, "failed=1": {501},
		"from=shop/pod": {501, 502}, "from=shop/web": {501, 502}, "from=11.0.0.9": {509}, "from=shop/p": nil,
		"service=shop/cart&since=1m&failed=0": {502},
	} {
		a, list := ask[Record](t, b, query)
		var got []uint64
		for _, r := range list {
			got = append(got, r.Sent.Bytes)
		}
		if !slices.Equal(got, want) || a.Node != "node-1" || !a.Started.Equal(c.at) || a.Losses != (Losses{}) {
			t.Errorf("%q: %+v, %v; want %v", query, a, got, want)
		}
	}
	if _, list := ask[Record](t, b, ""); list[1] != connection("shop/web", "shop/cart", 2) {
		t.Errorf("the record is %+v", list[1])
	}
	if _, list := ask[Sum](t, b, "sums=1&service=shop/cart"); len(list) != 1 || list[0] != (Sum{
		Minute: c.at.Truncate(time.Minute), Client: "shop/web", ClientZone: "a", Service: "shop/cart", Port: "http",
		Endpoint: "shop/cart-0", EndpointZone: "b", Connections: 2, Failures: 1, Sent: Traffic{10, 1003},
		Received: Traffic{12, 12000}}) {
		t.Errorf("the sums are %+v", list)
	}
	if _, list := ask[Sum](t, b, "sums=1&zones=1"); len(list) != 2 || list[0].Client+list[1].Client != "" ||
		list[0].Connections+list[1].Connections != 3 {
		t.Errorf("the sums by zones are %+v", list)
	}
	if a, list := ask[Record](t, b, "limit=2"); len(list) != 2 || list[1].Protocol != "UDP" || a.Left != 1 {
		t.Errorf("the last two records are %+v of %+v", list, a)
	}
	for query, want := range map[string]string{"limit=0": `limit: "0" is not a number from 1 to 50000`,
		"since=x": `since: "x" is not a duration such as 10m`, "follow=yes": `follow: "yes" is neither 0 nor 1`,
		"to=shop": `"to" is not one of service,`, "sums=1&follow=1": "exclude each other",
	} {
		w := httptest.NewRecorder()
		b.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/flows?"+query, nil))
		if w.Code != http.StatusBadRequest || !strings.Contains(w.Body.String(), want) {
			t.Errorf("%q: %d %s, want %s", query, w.Code, w.Body, want)
		}
	}
}

// lossy is a source that has lost something.
type lossy struct {
	losses Losses
	open   atomic.Bool
}

func (r *lossy) Losses() Losses { return r.losses }

func (r *lossy) SetOpen(wanted bool) error {
	r.open.Store(wanted)
	return nil
}

// TestFollow: a reader gets what there is and then each record. One that is too slow loses records, is told how many,
// and delays nobody. The recorder is told who wants open connections. When the book ends, so do its readers.
func TestFollow(t *testing.T) {
	b := NewBook(Options{Now: newClock().now})
	from := &lossy{losses: Losses{Events: 7}}
	b.SetRecorder(from)
	ctx, end := context.WithCancel(t.Context())
	go b.Run(ctx)
	server := httptest.NewServer(b)
	defer server.Close()
	defer end()
	b.Add(connection("shop/web", "shop/cart", 1))

	resp, err := http.Get(server.URL + "/flows?follow=1&open=1&service=shop/cart")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	next := func(what string) string {
		t.Helper()
		if !lines.Scan() {
			t.Fatalf("the answer ended before %s: %v", what, lines.Err())
		}
		if !strings.Contains(lines.Text(), what) {
			t.Fatalf("%s, want %s", lines.Text(), what)
		}
		return lines.Text()
	}
	next(`"events":7`)
	next(`"bytes":501`)
	if !from.open.Load() {
		t.Error("the recorder was not told that a reader wants open connections")
	}
	b.Add(connection("shop/web", "shop/other", 2))
	open := connection("shop/web", "shop/cart", 3)
	open.End = Open
	b.Add(open)
	next(`"bytes":503`)
	unread := 0
	for n := uint64(0); unread == 0; n++ { // nobody reads
		b.Add(connection("shop/web", "shop/cart", n))
		unread = int(b.Stats().Losses.Unread)
	}
	for said := false; !said; {
		var line struct{ Losses *Losses }
		if !lines.Scan() || json.Unmarshal(lines.Bytes(), &line) != nil {
			t.Fatal("the answer ended before the reader was told", lines.Err())
		}
		said = line.Losses != nil && line.Losses.Unread > 0
	}
	end()
	for lines.Scan() {
	}
	testkit.Eventually(t, 10*time.Second, "the reader left", func() bool { return !from.open.Load() })
	if got := b.Stats().Losses; int(got.Unread) < unread || got.Events != 7 {
		t.Errorf("the losses are %+v, and %d records were not read", got, unread)
	}
}

// TestListIsBounded: the list drops the oldest records, and takes no more bytes than it may.
func TestListIsBounded(t *testing.T) {
	l := newList(1 << 20)
	r := connection("shop/web", "shop/cart", 0)
	for n := range uint64(100_000) {
		r.Sent.Packets = n
		l.add(&r)
		if held := l.bytes + cap(l.last.data); held > l.most {
			t.Fatalf("the list holds %d bytes of %d", held, l.most)
		}
	}
	blocks, next, n := l.snapshot(), uint64(0), 0
	for _, block := range blocks {
		for r := range block.each {
			if n > 0 && r.Sent.Packets != next {
				t.Fatalf("record %d follows %d", r.Sent.Packets, next-1)
			}
			next = r.Sent.Packets + 1
			n++
		}
	}
	if n != l.all || next != 100_000 || n < 5000 {
		t.Errorf("%d records, %d counted; the last is %d", n, l.all, next-1)
	}
	t.Logf("%d bytes a record", l.most/n)
}

// TestSampling: under load the full list leaves records out, all of a connection alike, failures last; what is left
// stands for all. The sums miss nothing.
func TestSampling(t *testing.T) {
	c := newClock()
	b := NewBook(Options{Memory: 1 << 20, Now: c.now})
	const failures = 500 // one record in so many
	added, sums := 0, uint64(0)
	add := func() {
		for range 10_000 {
			r := outside("shop/cart", uint32(added%5000))
			if r.Time = c.at; added%5000%failures == 0 {
				r.End = Refused
			}
			b.Add(r)
			added++
			c.at = c.at.Add(time.Second / 200)
		}
	}
	for b.Stats().Losses.Sampled == 0 {
		add()
	}
	for range 20 { // until no older record is left, and the rates are settled
		add()
	}
	before := b.Stats().Losses.Sampled
	last := c.at
	add()
	weights, kept := [2]uint64{}, map[netip.AddrPort]int{}
	a, list := ask[Record](t, b, "")
	for _, r := range list {
		if !r.Time.Before(last) {
			class := 1
			if r.Failure() {
				class = 0
			}
			weights[class] += uint64(r.Weight)
			kept[r.Client.Addr]++
		}
	}
	for client, n := range kept {
		if n != 2 { // of 5,000 clients, each with two connections of the same addresses
			t.Errorf("%v has %d records", client, n)
		}
	}
	if left := a.Losses.Sampled - before; left < 5000 || float64(weights[1]) < 7000 || float64(weights[1]) > 13000 {
		t.Errorf("%d records were left out, and those that were kept stand for %d", left, weights)
	}
	if weights[0] != 10_000/failures {
		t.Errorf("%d failures were kept of %d", weights[0], 10_000/failures)
	}
	_, all := ask[Sum](t, b, "sums=1")
	for _, s := range all {
		sums += s.Connections
	}
	if sums != uint64(added) {
		t.Errorf("the sums count %d connections of %d", sums, added)
	}
}

// TestMillionClients: however many clients connect from outside, and however many Services a tenant has, no workload is
// pushed out, the heaviest clients are found, totals are exact, and memory is bounded.
func TestMillionClients(t *testing.T) {
	c := newClock()
	before := heapBytes()
	b := NewBook(Options{Now: c.now})
	for n := range uint32(1_000_000) {
		b.Add(outside("shop/cart", n))
		if n%1000 == 0 {
			c.at = c.at.Add(3 * time.Second)
			b.Add(connection(fmt.Sprintf("team-%d/web", n/1000%50), "shop/cart", 1))
			for heavy := range uint32(100) {
				r := outside("shop/cart", 2_000_000+heavy)
				r.Sent.Bytes = 1 << 24
				b.Add(r)
			}
		}
	}
	if held := heapBytes() - before; held > 64<<20 {
		t.Errorf("the book holds %d MiB", held>>20)
	} else {
		t.Logf("the book holds %d MiB", held>>20)
	}
	var connections uint64
	named, heavy := map[string]uint64{}, uint64(0)
	for s := range sumsOf(b.sums.snapshot(c.at), &query{}) {
		connections += s.Connections
		if strings.HasPrefix(s.Client, "team-") {
			named[s.Client] += s.Connections
		}
		if strings.HasPrefix(s.Client, "11.30.132.") {
			heavy += s.Connections
		}
	}
	if len(named) != 50 || named["team-7/web"] != 20 {
		t.Errorf("of the workloads there are %v", named)
	}
	if heavy != 100*1000 {
		t.Errorf("the heavy clients count %d connections", heavy)
	}
	const all = 1_000_000 + 1000 + 100*1000
	if connections != all {
		t.Errorf("the sums of the hour count %d connections of %d", connections, all)
	}
	if totals := b.Stats().Totals; len(totals) != 2 ||
		totals[0].Connections+totals[1].Connections != all {
		t.Errorf("the totals are %+v", totals)
	}
	runtime.KeepAlive(b)
}

// TestManyNames: rows of long names that nothing shares take no more memory than they may. Then older minutes lose
// their rows, but no connection.
func TestManyNames(t *testing.T) {
	c := newClock()
	b := NewBook(Options{Memory: 2 << 20, Now: c.now})
	before, added := heapBytes(), uint64(0)
	for n := range uint64(60 * 600) {
		if n%600 == 0 {
			c.at = c.at.Add(time.Minute)
		}
		r := connection(fmt.Sprintf("team-%d/%s-%d", n%7, strings.Repeat("w", 150), n), "shop/cart", n)
		r.Endpoint.Pod = fmt.Sprintf("shop/%s-%d", strings.Repeat("p", 150), n)
		b.Add(r)
		added++
	}
	if held := heapBytes() - before; b.sums.bytes > 2<<20 || held > 5<<20 {
		t.Errorf("the sums take %d KiB packed, and the book %d KiB", b.sums.bytes>>10, held>>10)
	}
	_, all := ask[Sum](t, b, "sums=1")
	counted, minutes, rows := uint64(0), map[time.Time]bool{}, map[bool]int{}
	for _, s := range all {
		counted += s.Connections
		minutes[s.Minute] = true
		rows[s.Client == Others]++
	}
	if counted != added || len(minutes) != 60 || rows[false] < 1000 || rows[true] < 20 {
		t.Errorf("%d connections of %d in %d minutes; %d rows with a name, %d without", counted, added, len(minutes),
			rows[false], rows[true])
	}
	runtime.KeepAlive(b)
}

// heapBytes is how many bytes are in use.
func heapBytes() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// BenchmarkAdd measures what a record costs, of workloads, of a million clients outside, and while the list samples.
func BenchmarkAdd(b *testing.B) {
	workload, stranger := connection("shop/web", "shop/cart", 1), outside("shop/cart", 1)
	b.Run("workload", func(b *testing.B) {
		book := NewBook(Options{})
		b.ReportAllocs()
		for b.Loop() {
			book.Add(workload)
		}
	})
	b.Run("outside", func(b *testing.B) {
		book, n := NewBook(Options{}), uint32(0)
		b.ReportAllocs()
		for b.Loop() {
			n++
			r := stranger
			r.Client.Addr = netip.AddrPortFrom(netip.AddrFrom4([4]byte{11, byte(n >> 16), byte(n >> 8), byte(n)}), 40000)
			book.Add(r)
		}
	})
}
