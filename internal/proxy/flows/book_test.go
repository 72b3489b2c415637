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
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/testkit"
)

// fakeClock is a book's clock.
type fakeClock struct{ at time.Time }

func (c *fakeClock) now() time.Time { return c.at }

func newClock() *fakeClock { return &fakeClock{time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)} }

// fromPod is a record of a connection of a workload to a Service.
func fromPod(client, service string, n uint64) Record {
	namespace, _, _ := strings.Cut(client, "/")
	return Record{Time: newClock().at, Service: service, Port: "http", Protocol: "TCP", End: Closed, Weight: 1,
		Frontend: netip.MustParseAddrPort("10.96.0.1:80"), Seconds: 1.5,
		Client: Peer{Addr: netip.AddrPortFrom(netip.MustParseAddr("10.244.1.7"), uint16(n)), Pod: namespace + "/pod",
			Workload: client, Node: "node-1", Zone: "a"},
		Endpoint: Peer{Addr: netip.MustParseAddrPort("10.244.2.9:8080"), Pod: "shop/cart-0", Node: "node-2", Zone: "b"},
		Sent:     Traffic{Packets: 5, Bytes: 500 + n}, Received: Traffic{Packets: 6, Bytes: 6000}}
}

// fromOutside is one of a client outside the cluster.
func fromOutside(service string, n uint32) Record {
	r := fromPod("", service, uint64(n%100))
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
	failed := fromPod("shop/web", "shop/cart", 1)
	failed.End, failed.Time = Refused, c.at.Add(-time.Hour)
	dns := fromOutside("kube-system/dns", 9)
	dns.Protocol, dns.End = "UDP", Unanswered
	open := fromPod("shop/web", "shop/cart", 3)
	open.End = Open
	for _, r := range []Record{failed, fromPod("shop/web", "shop/cart", 2), dns, open} {
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
	if _, list := ask[Record](t, b, ""); list[1] != fromPod("shop/web", "shop/cart", 2) {
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
	server := httptest.NewUnstartedServer(b)
	const timeout = beat - beat/10 // losses are told later
	server.Config.ReadTimeout, server.Config.WriteTimeout = timeout, timeout
	server.Start()
	defer server.Close()
	defer end()
	b.Add(fromPod("shop/web", "shop/cart", 1))

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
	b.Add(fromPod("shop/web", "shop/other", 2))
	open := fromPod("shop/web", "shop/cart", 3)
	open.End = Open
	b.Add(open)
	next(`"bytes":503`)
	unread := 0
	for n := uint64(0); unread == 0; n++ { // nobody reads
		b.Add(fromPod("shop/web", "shop/cart", n))
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

// TestReadersAreBounded: more than some readers are told to come back.
func TestReadersAreBounded(t *testing.T) {
	b := NewBook(Options{})
	for range maxReaders {
		r, _ := b.join(query{})
		defer b.leave(r)
	}
	w := httptest.NewRecorder()
	b.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/flows?follow=1", nil))
	if w.Code != http.StatusServiceUnavailable || w.Body.String() != "16 readers follow already\n" {
		t.Errorf("%d %s", w.Code, w.Body)
	}
}

// TestClientPrefix: only a prefix is kept of clients outside the cluster, in records and in sums.
func TestClientPrefix(t *testing.T) {
	b := NewBook(Options{ClientBits: [2]int{24, 48}})
	six, node := fromOutside("shop/cart", 1), fromOutside("shop/cart", 2)
	six.Client.Addr = netip.MustParseAddrPort("[2001:db8:1:2::7]:40000")
	node.Client.Node = "node-1"
	for _, r := range []Record{fromOutside("shop/cart", 9), six, node, fromPod("shop/web", "shop/cart", 3)} {
		b.Add(r)
	}
	_, list := ask[Record](t, b, "")
	var got []string
	for _, r := range list {
		got = append(got, fmt.Sprint(r.Client.Prefix, " ", r.Client.Addr))
	}
	want := []string{"11.0.0.0/24 invalid AddrPort", "2001:db8:1::/48 invalid AddrPort",
		"invalid Prefix 11.0.0.2:40000", "invalid Prefix 10.244.1.7:3"}
	if !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	if _, list := ask[Record](t, b, "from=11.0.0.0/24"); len(list) != 1 {
		t.Errorf("of the prefix there are %+v", list)
	}
	_, all := ask[Sum](t, b, "sums=1")
	clients := map[string]bool{}
	for _, s := range all {
		clients[s.Client] = true
	}
	if len(clients) != 4 || !clients["11.0.0.0/24"] || !clients["2001:db8:1::/48"] || !clients["shop/web"] {
		t.Errorf("the clients are %v", clients)
	}
}

// look is a look that shows open connections.
func look(b *Book, open ...Record) {
	b.BeginLook()
	for _, r := range open {
		r.End = Open
		b.AddOpen(r)
	}
}

// unsummed is how many bytes from the client sums do not have yet.
func (r *Record) unsummed() uint64 {
	sent, _ := r.fresh()
	return sent.Bytes
}

// TestOpenTraffic: sums get the traffic of an open connection as it flows, and nothing of it twice. A flood takes no
// places.
func TestOpenTraffic(t *testing.T) {
	c := newClock()
	b := NewBook(Options{Now: c.now})
	var open openFlows
	k, r := flowKey{id: 1}, fromPod("shop/web", "shop/cart", 1)
	for minute, bytes := range []uint64{100, 250, 250, 900} {
		r.Sent, r.counted = Traffic{uint64(minute), bytes}, [2]Traffic{}
		if open.looks++; !open.see(k, &r, true) || open.see(k, &Record{}, true) {
			t.Error("a look counts a connection once")
		}
		look(b, r)
		open.looked()
		c.at = c.at.Add(time.Minute)
	}
	r.Sent, r.counted = Traffic{9, 1000}, [2]Traffic{}
	open.ended(k, &r)
	b.Add(r)
	_, all := ask[Sum](t, b, "sums=1")
	var got []uint64
	for _, s := range all {
		got = append(got, s.Sent.Bytes)
	}
	if !slices.Equal(got, []uint64{100, 150, 0, 650, 100}) {
		t.Errorf("by the minute: %d", got)
	}
	if _, list := ask[Record](t, b, ""); len(list) != 1 || list[0].Sent.Bytes != 1000 {
		t.Errorf("the list has %+v", list)
	}
	for id := range uint32(maxOpen + 1) {
		flood := Record{Sent: Traffic{fewPackets - 1, 1000}}
		if !open.see(flowKey{id: id}, &flood, false) || flood.unsummed() != 0 {
			t.Fatalf("a connection of a flood counts before it ends: %+v", flood)
		}
	}
	if len(open.flows) > 0 {
		t.Errorf("%d are known still", len(open.flows))
	}
	stream := Record{Sent: Traffic{fewPackets, 1000}}
	if open.see(flowKey{}, &stream, false); stream.unsummed() != 1000 {
		t.Errorf("what nobody answers counts %d bytes of 1000", stream.unsummed())
	}
}

// TestLook: sums have the open connections of the last look of their minute, and lists have none.
func TestLook(t *testing.T) {
	c := newClock()
	b := NewBook(Options{Now: c.now})
	web, job := fromPod("shop/web", "shop/cart", 1), fromPod("shop/job", "shop/cart", 2)
	look(b, web, web, job)
	look(b, web)
	c.at = c.at.Add(time.Minute)
	look(b, job, job)
	_, all := ask[Sum](t, b, "sums=1")
	open := map[string]uint64{}
	for _, s := range all {
		open[s.Minute.Format("15:04 ")+s.Client] += s.Open
	}
	if len(open) != 3 || open["03:04 shop/web"] != 1 || open["03:04 shop/job"] != 0 || open["03:05 shop/job"] != 2 {
		t.Errorf("open are %v", open)
	}
	if _, list := ask[Record](t, b, ""); len(list) > 0 {
		t.Errorf("the list has %+v", list)
	}
	b = NewBook(Options{Memory: 1 << 20, Now: c.now}) // which has too few rows for so many
	for range 3 {
		b.BeginLook()
		for n := range uint64(1000) {
			look := fromPod(fmt.Sprint("shop/", n), "shop/cart", n)
			look.End = Open
			b.AddOpen(look)
		}
	}
	_, all = ask[Sum](t, b, "sums=1")
	sum := uint64(0)
	for _, s := range all {
		sum += s.Open
	}
	if sum != 1000 || len(all) > 200 {
		t.Errorf("%d connections are open in %d rows", sum, len(all))
	}
}

// TestConcurrent: many may add, look and ask at once, and nothing is missing.
func TestConcurrent(t *testing.T) {
	b, all := NewBook(Options{}), sync.WaitGroup{}
	const each, adders = 2000, 4
	for range adders {
		all.Go(func() {
			for n := range uint64(each) {
				b.Add(fromPod("shop/web", "shop/cart", n))
			}
		})
	}
	all.Go(func() {
		for range 20 {
			look(b, fromPod("shop/web", "shop/cart", 1))
			ask[Record](t, b, "")
			ask[Sum](t, b, "sums=1")
			b.Stats()
		}
	})
	all.Wait()
	if _, list := ask[Record](t, b, ""); len(list) != each*adders {
		t.Errorf("there are %d records of %d", len(list), each*adders)
	}
}

// TestListIsBounded: the list drops the oldest records, and takes no more bytes than it may.
func TestListIsBounded(t *testing.T) {
	l := newList(1 << 20)
	r := fromPod("shop/web", "shop/cart", 0)
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
			r := fromOutside("shop/cart", uint32(added%5000))
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
		b.Add(fromOutside("shop/cart", n))
		if n%500 == 0 { // as small as the others, but again and again
			b.Add(fromOutside("shop/cart", 3_000_000))
		}
		if n%1000 == 0 {
			c.at = c.at.Add(3 * time.Second)
			b.Add(fromPod(fmt.Sprintf("team-%d/web", n/1000%50), "shop/cart", 1))
			for heavy := range uint32(100) {
				r := fromOutside("shop/cart", 2_000_000+heavy)
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
	named, heavy, steady := map[string]uint64{}, uint64(0), uint64(0)
	for s := range wanted(b.sums.snapshot(c.at), (&query{}).wantsSum) {
		connections += s.Connections
		if strings.HasPrefix(s.Client, "team-") {
			named[s.Client] += s.Connections
		}
		if strings.HasPrefix(s.Client, "11.30.132.") {
			heavy += s.Connections
		}
		if s.Client == "11.45.198.192" {
			steady += s.Connections
		}
	}
	if len(named) != 50 || named["team-7/web"] != 20 {
		t.Errorf("of the workloads there are %v", named)
	}
	if heavy != 100*1000 || steady < 1900 {
		t.Errorf("the heavy clients count %d connections, the steady one %d", heavy, steady)
	}
	const all = 1_000_000 + 1000 + 100*1000 + 2000
	if connections != all {
		t.Errorf("the sums of the hour count %d connections of %d", connections, all)
	}
	if totals := b.Stats().Totals; len(totals) != 2 ||
		totals[0].Connections+totals[1].Connections != all {
		t.Errorf("the totals are %+v", totals)
	}
	runtime.KeepAlive(b)
}

// TestNamespacesShare: however many clients a namespace's Services have, named or not, those of another one stay.
func TestNamespacesShare(t *testing.T) {
	c := newClock()
	b := NewBook(Options{Memory: 2 << 20, Now: c.now})
	for n := range uint32(10) {
		b.Add(fromPod(fmt.Sprint("small/", n), "small/api", 0))
		b.Add(fromOutside("small/api", n))
	}
	for n := range uint32(20_000) {
		b.Add(fromPod(fmt.Sprint("large/", n), "large/api", uint64(n)))
		b.Add(fromOutside("large/api", n))
	}
	_, all := ask[Sum](t, b, "sums=1")
	rows, connections := map[string]int{}, map[string]uint64{}
	for _, s := range all {
		connections[s.Service] += s.Connections
		if rows[s.Service]++; s.Client == Others && s.Service == "small/api" {
			t.Errorf("%d connections of small/api lost their clients", s.Connections)
		}
	}
	if rows["small/api"] != 20 || connections["small/api"] != 20 || connections["large/api"] != 40_000 ||
		rows["large/api"] < 250 || rows["large/api"] > 400 {
		t.Errorf("rows %v, connections %v", rows, connections)
	}
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
		r := fromPod(fmt.Sprintf("team-%d/%s-%d", n%7, strings.Repeat("w", 150), n), "shop/cart", n)
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

// BenchmarkAdd measures what a record costs, of a workload, and of clients outside that never came before.
func BenchmarkAdd(b *testing.B) {
	workload, stranger := fromPod("shop/web", "shop/cart", 1), fromOutside("shop/cart", 1)
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
