package conntrack

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/netlink"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

func TestMain(m *testing.M) { labtest.Main(m) }

// open opens a Conn that asks for as little as it can, even if there are few flows.
func open(t testing.TB, h *lab.Host) *Conn {
	t.Helper()
	var c *Conn
	labtest.Check(t, h.Do(func() (err error) {
		c, err = Dial(0)
		return err
	}))
	t.Cleanup(func() { c.Close() })
	c.few = 0
	return c
}

func emptyHost(t testing.TB) *Conn {
	t.Helper()
	return open(t, labtest.NewHost(t, labtest.NewNet(t), "node"))
}

// entry is a flow to be put into the table.
type entry struct {
	client   netip.AddrPort
	frontend dataplane.Key
	endpoint netip.AddrPort
	zone     uint16
	answered bool
	// masquerade, if it is valid, takes the client's place.
	masquerade netip.AddrPort
	// nat has the kernel translate, which sets the status bit.
	nat bool
}

// clientOf gives the nth of many clients.
func clientOf(n int, v6 bool) netip.AddrPort {
	if v6 {
		a := netip.MustParseAddr("fd00:c::").As16()
		a[15], a[14] = byte(n>>15), byte(n>>23)
		return netip.AddrPortFrom(netip.AddrFrom16(a), uint16(n&0x7fff+1024))
	}
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{100, byte(n >> 23), byte(n >> 15), 1}), uint16(n&0x7fff+1024))
}

// insert puts flows into the table, as conntrackd would.
func insert(t testing.TB, c *Conn, entries ...entry) {
	t.Helper()
	var w netlink.Buffer
	for chunk := range slices.Chunk(entries, 200) {
		w.Reset()
		for _, e := range chunk {
			writeInsert(&w, e)
		}
		refused, err := c.deletes.Commit(w.Bytes())
		if err != nil || len(refused) > 0 {
			t.Fatal(refused, err)
		}
	}
}

func writeInsert(w *netlink.Buffer, e entry) {
	frontend := netip.AddrPortFrom(e.frontend.Addr, e.frontend.Port)
	m := w.Netfilter(
		unix.NFNL_SUBSYS_CTNETLINK<<8,
		unix.NLM_F_CREATE|unix.NLM_F_EXCL,
		ipfamily.Of(e.frontend.Addr).NFProto(),
	)
	tuple := func(typ uint16, src, dst netip.AddrPort) { writeTuple(w, typ, e.frontend.Protocol, src, dst) }
	tuple(ctaTupleOrig, e.client, frontend)
	if !e.masquerade.IsValid() {
		e.masquerade = e.client
	}
	if e.nat {
		tuple(ctaTupleReply, frontend, e.client)
		const ctaNATDst = 13
		writeNAT(w, ctaNATDst, e.endpoint)
	} else {
		tuple(ctaTupleReply, e.endpoint, e.masquerade)
	}
	w.Big32(ctaTimeout, 3600)
	if e.zone != 0 {
		w.Big16(ctaZone, e.zone)
	}
	if e.answered {
		const assured, confirmed = 1 << 2, 1 << 3
		w.Big32(ctaStatus, statusSeenReply|assured|confirmed)
	}
	if e.frontend.Protocol == snapshot.TCP {
		info, tcp := w.Nest(ctaProtoInfo), w.Nest(ctaProtoInfoTCP)
		w.Attr(ctaProtoInfoTCPState, tcpEstablished)
		w.Close(tcp)
		w.Close(info)
	}
	w.End(m)
}

// listAll gives all flows by what tells them apart, with their ids.
func listAll(t testing.TB, c *Conn) map[string]string {
	t.Helper()
	out := map[string]string{}
	for _, family := range ipfamily.All {
		labtest.Check(t, c.list(query{family: family}, func(flows []flow) error {
			for i := range flows {
				f := &flows[i]
				out[fmt.Sprintf("%v -> %v zone %x %x", f.frontend, f.endpoint, f.zone, f.reply)] = fmt.Sprintf("%x", f.id)
			}
			return nil
		}))
	}
	return out
}

// removed checks that what is left of a table is untouched, by id, and gives what is not left.
func removed(t testing.TB, before, after map[string]string) []string {
	t.Helper()
	var out []string
	for f, id := range before {
		switch now, ok := after[f]; {
		case !ok:
			out = append(out, f)
		case now != id:
			t.Errorf("%s is another flow now", f)
		}
	}
	slices.Sort(out)
	return out
}

// noBackend takes everything.
type noBackend struct{ full bool }

func (b *noBackend) Apply(*dataplane.State, dataplane.Change) (dataplane.Receipt, error) {
	return dataplane.Receipt{Full: b.full}, nil
}
func (b *noBackend) Check() ([]string, time.Duration, error) { return nil, 0, nil }
func (b *noBackend) Remove() error                           { return nil }

// lookNow looks at all that is due, and ends the turns.
func lookNow(t testing.TB, c *Cleaner) SweepResult {
	t.Helper()
	l := c.takeDue().run(context.Background())
	labtest.Check(t, l.Err)
	return l
}

var endpoints = [2][2]netip.AddrPort{
	{netip.MustParseAddrPort("10.244.1.10:53"), netip.MustParseAddrPort("10.244.1.11:53")},
	{netip.MustParseAddrPort("[fd00:10:244::a]:53"), netip.MustParseAddrPort("[fd00:10:244::b]:53")},
}

// mixed gives flows of all kinds, and the two frontends of each family and protocol.
func mixed() (entries []entry, fronts []dataplane.Key) {
	add := func(k dataplane.Key, e netip.AddrPort, zone uint16) {
		client := clientOf(len(entries), k.Addr.Is6())
		entries = append(entries, entry{client: client, frontend: k, endpoint: e, zone: zone})
	}
	for v6, ends := range endpoints {
		for n := range 2 {
			for _, p := range []snapshot.Protocol{snapshot.TCP, snapshot.UDP, snapshot.SCTP} {
				k := dataplane.Key{Addr: lab.Nth(lab.ServiceRange[v6], 1), Protocol: p, Port: uint16(53 + n)}
				fronts = append(fronts, k)
				for _, zone := range []uint16{0, 7} {
					add(k, netip.AddrPortFrom(k.Addr, k.Port), zone)
					add(k, ends[0], zone)
					add(k, ends[1], zone)
				}
				other := k
				other.Addr = lab.Nth(lab.ServiceRange[v6], 2)
				add(other, ends[1], 0)
			}
		}
	}
	return entries, fronts
}

// TestExactFlows removes one endpoint of one frontend among flows that differ in one field each. It runs with filters
// for each frontend, for a protocol, and without filters, because the kernel has none or because there are few flows.
func TestExactFlows(t *testing.T) {
	entries, fronts := mixed()
	for _, k := range fronts {
		if k.Port != 53 {
			continue
		}
		for _, how := range []string{"filters", "no filters", "few flows", "everything"} {
			t.Run(k.String()+"/"+how, func(t *testing.T) {
				v6 := 0
				if k.Addr.Is6() {
					v6 = 1
				}
				conn := emptyHost(t)
				insert(t, conn, entries...)
				c, full := newCleaner(conn, nil), &noBackend{true}
				b := behind(c, full)
				port := fmt.Sprintf("%v>%v,%v", k, endpoints[v6][0], endpoints[v6][1])
				_, err := b.Apply(state(service("dns", port)), dataplane.Change{})
				labtest.Check(t, err)
				c.all, full.full = pendingSweep{}, how == "everything"
				conn.unfiltered = how == "no filters"
				if how == "few flows" {
					conn.few = uint32(len(entries))
				}
				before := listAll(t, conn)
				_, err = b.Apply(state(service("dns", fmt.Sprintf("%v>%v", k, endpoints[v6][0]))),
					dataplane.Change{Services: []snapshot.Name{name("dns")}})
				labtest.Check(t, err)
				l := lookNow(t, c)
				got := removed(t, before, listAll(t, conn))
				want := 3 // to the other endpoint, in both zones, and untranslated in the default one
				switch {
				case k.Protocol == snapshot.TCP && how == "everything":
					want = 1 // untranslated, in the default zone
				case k.Protocol == snapshot.TCP:
					want = 0
				}
				if len(got) != want || l.Flows[0].Removed+l.Flows[1].Removed != want {
					t.Errorf("removed %d: %q, look %+v", len(got), got, l)
				}
				for _, f := range got {
					if f[:len(k.String())] != k.String() {
						t.Errorf("removed %s", f)
					}
				}
				if conn.unfiltered != (how == "no filters") {
					t.Errorf("the kernel filters: %v", !conn.unfiltered)
				}
			})
		}
	}
}

// TestFewFlows: how many flows there are decides whether frontends of all protocols and families take a list each, or
// one together.
func TestFewFlows(t *testing.T) {
	conn := emptyHost(t)
	entries, fronts := mixed()
	insert(t, conn, entries...)
	if n, err := conn.count(); err != nil || int(n) != len(entries) {
		t.Fatalf("%d flows; want %d, %v", n, len(entries), err)
	}
	var ports []string
	for _, k := range fronts {
		ports = append(ports, fmt.Sprintf("%v>%v", k, endpoints[ipfamily.Of(k.Addr)][0]))
	}
	for few, want := range map[uint32]int{uint32(len(entries)): 1, 0: 8} {
		conn.few = few
		c := newCleaner(conn, nil)
		_, err := behind(c, &noBackend{true}).Apply(state(service("dns", ports...)), dataplane.Change{})
		labtest.Check(t, err)
		if l := lookNow(t, c); l.Lists != want || l.Err != nil {
			t.Errorf("up to %d flows are few: %+v; want %d lists", few, l, want)
		}
	}
}

// TestKernelWithoutFilters: a kernel before 5.8 ignores filters and lists everything. The Conn notices.
func TestKernelWithoutFilters(t *testing.T) {
	conn := emptyHost(t)
	entries, _ := mixed()
	insert(t, conn, entries...)
	k := key("10.96.0.1:53/udp")
	c := newCleaner(conn, nil)
	// What take would have seen of such a kernel.
	labtest.Check(t, conn.list(query{family: ipfamily.IPv4}, func(flows []flow) error {
		for i := range flows {
			q := queryFor(k)
			conn.unfiltered = conn.unfiltered || !q.matches(&flows[i])
		}
		return nil
	}))
	if conn.filters() {
		t.Fatal("nobody noticed")
	}
	before := listAll(t, conn)
	_, err := behind(c, &noBackend{true}).Apply(state(service("dns", k.String()+">10.244.1.10:53")), dataplane.Change{})
	labtest.Check(t, err)
	l := lookNow(t, c)
	if got := removed(t, before, listAll(t, conn)); len(got) != 3 || l.Lists != 1 {
		t.Errorf("removed %q, look %+v", got, l)
	}
}

// TestFind looks flows up by their clients and frontends.
func TestFind(t *testing.T) {
	conn := emptyHost(t)
	four := entry{client: clientOf(1, false), frontend: key("10.96.0.1:53/udp"), endpoint: endpoints[0][0]}
	six := entry{client: clientOf(1, true), frontend: key("[fd00:96::1]:80/tcp"), endpoint: endpoints[1][0]}
	insert(t, conn, four, six)
	for _, e := range []entry{four, six} {
		f, ok, err := conn.Find(e.frontend.Protocol, e.client, netip.AddrPortFrom(e.frontend.Addr, e.frontend.Port))
		if err != nil || !ok || f.Client != e.client || f.Frontend != e.frontend || f.Endpoint != e.endpoint {
			t.Errorf("%v to %v: %+v, %t, %v", e.client, e.frontend, f, ok, err)
		}
	}
	_, ok, err := conn.Find(snapshot.UDP, clientOf(2, false), netip.AddrPortFrom(four.frontend.Addr, 53))
	if ok || err != nil {
		t.Errorf("another client has a flow: %t, %v", ok, err)
	}
}

// TestGoneMeanwhile deletes flows that are already gone, or that have been replaced by others.
func TestGoneMeanwhile(t *testing.T) {
	conn := emptyHost(t)
	e := entry{client: clientOf(1, false), frontend: key("10.96.0.1:53/udp"), endpoint: endpoints[0][0]}
	insert(t, conn, e)
	var seen []flow
	labtest.Check(t, conn.list(query{family: ipfamily.IPv4}, func(flows []flow) error {
		for _, f := range flows {
			seen = append(seen, flow{frontend: f.frontend, reply: slices.Clone(f.reply), id: slices.Clone(f.id)})
		}
		return nil
	}))
	for _, want := range []int{1, 0} {
		if n, err := conn.remove(seen); err != nil || n != want {
			t.Fatalf("removed %d, %v; want %d", n, err, want)
		}
	}
	// The client sends again, and gets another endpoint: the same original tuple, maybe even the same id.
	e.endpoint = endpoints[0][1]
	insert(t, conn, e)
	if n, err := conn.remove(seen); err != nil || n != 0 || len(listAll(t, conn)) != 1 {
		t.Fatalf("removed %d, %v: a flow that began anew", n, err)
	}
	many := slices.Repeat(seen, 5000)
	if n, err := conn.remove(many); err != nil || n != 0 {
		t.Fatalf("removed %d, %v", n, err)
	}
}

// TestAmongMany has 50,000 flows of others and 10,000 right ones in the table, and 10,000 wrong ones.
func TestAmongMany(t *testing.T) {
	conn := emptyHost(t)
	k := key("10.96.0.1:53/udp")
	var entries []entry
	for i := range 50000 {
		e := entry{
			client:   clientOf(i, false),
			frontend: key("198.51.100.1:443/tcp"),
			endpoint: netip.MustParseAddrPort("198.51.100.1:443"),
		}
		if i%2 == 0 {
			e.frontend, e.endpoint = key("198.51.100.1:53/udp"), netip.MustParseAddrPort("198.51.100.1:53")
		}
		entries = append(entries, e)
	}
	for i := range 20000 {
		entries = append(entries, entry{client: clientOf(i, false), frontend: k, endpoint: endpoints[0][i%2]})
	}
	insert(t, conn, entries...)
	before := listAll(t, conn)
	if len(before) != len(entries) {
		t.Fatalf("%d flows in the table; want %d", len(before), len(entries))
	}
	c := newCleaner(conn, nil)
	b := behind(c, &noBackend{})
	_, err := b.Apply(state(service("dns", k.String()+">10.244.1.10:53")), dataplane.Change{})
	labtest.Check(t, err)
	l := lookNow(t, c)
	t.Logf("%+v", l)
	if got := removed(t, before, listAll(t, conn)); len(got) != 10000 || l.Flows[0].Removed != 10000 ||
		l.Flows[0].Judged < 20000 {
		t.Errorf("removed %d, look %+v", len(got), l)
	}
	// A restart: all is right.
	again := newCleaner(conn, nil)
	before = listAll(t, conn)
	_, err = behind(again, &noBackend{true}).Apply(state(service("dns", k.String()+">10.244.1.10:53")), dataplane.Change{})
	labtest.Check(t, err)
	l = lookNow(t, again)
	if after := listAll(t, conn); l.Flows[0].Removed != 0 || !maps.Equal(before, after) {
		t.Errorf("look %+v", l)
	}
}

// full fills a table: half TCP, half UDP, of which a hundred flows are to one frontend.
func full(b *testing.B, n int) (*Conn, dataplane.Key) {
	b.Helper()
	conn, k := emptyHost(b), key("10.96.0.1:53/udp")
	entries := make([]entry, n)
	for i := range entries {
		e := &entries[i]
		*e = entry{
			client:   clientOf(i, false),
			frontend: key("198.51.100.1:443/tcp"),
			endpoint: netip.MustParseAddrPort("198.51.100.1:443"),
		}
		switch {
		case i < 100:
			e.frontend, e.endpoint = k, endpoints[0][0]
		case i%2 == 0:
			e.frontend, e.endpoint = key("198.51.100.1:53/udp"), netip.MustParseAddrPort("198.51.100.1:53")
		}
	}
	insert(b, conn, entries...)
	return conn, k
}

// BenchmarkList asks for one frontend's flows, for a protocol's, and for all.
func BenchmarkList(b *testing.B) {
	conn, k := full(b, 100000)
	none := emptyHost(b)
	b.Run("empty", func(b *testing.B) {
		for b.Loop() {
			labtest.Check(b, none.list(queryFor(k), func([]flow) error { return nil }))
		}
	})
	for _, q := range []struct {
		name string
		query
	}{
		{"frontend", queryFor(k)},
		{"protocol", query{family: ipfamily.IPv4, protocol: snapshot.UDP}},
		{"family", query{family: ipfamily.IPv4}},
	} {
		b.Run(q.name, func(b *testing.B) {
			b.ReportAllocs()
			n := 0
			for b.Loop() {
				n = 0
				labtest.Check(b, conn.list(q.query, func(flows []flow) error { n += len(flows); return nil }))
			}
			b.ReportMetric(float64(n), "flows")
		})
	}
}

// BenchmarkRemove deletes a thousand flows.
func BenchmarkRemove(b *testing.B) {
	conn := emptyHost(b)
	entries := make([]entry, 1000)
	for i := range entries {
		entries[i] = entry{client: clientOf(i, false), frontend: key("10.96.0.1:53/udp"), endpoint: endpoints[0][0]}
	}
	for b.Loop() {
		b.StopTimer()
		insert(b, conn, entries...)
		var all []flow
		labtest.Check(b, conn.list(query{family: ipfamily.IPv4}, func(flows []flow) error {
			for _, f := range flows {
				f.reply, f.id = slices.Clone(f.reply), slices.Clone(f.id)
				all = append(all, f)
			}
			return nil
		}))
		b.StartTimer()
		n, err := conn.remove(all)
		if err != nil || n != 1000 {
			b.Fatal(n, err)
		}
	}
}

// BenchmarkFollow is what the sync path pays for a change of one Service of 10,000.
func BenchmarkFollow(b *testing.B) {
	fs, all := frontends{}, []*dataplane.Service{}
	for i := range 10000 {
		all = append(all, service(fmt.Sprint(i), fmt.Sprintf("10.96.%d.%d:53/udp>10.0.0.1:53,10.0.0.2:53", i>>8, i&255)))
	}
	fs.replace(nil, all)
	two := [2]*dataplane.Service{
		service("17", "10.96.0.17:53/udp>10.0.0.1:53"), service("17", "10.96.0.17:53/udp>10.0.0.1:53,10.0.0.2:53"),
	}
	fs.replace(all[17:18], two[1:])
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		fs.replace(two[1-i%2:][:1], two[i%2:][:1])
	}
}

// TestSmallBuffers uses very small receive buffers, as a host may be set up. Lists are still complete, and all flows
// are removed, even if the kernel cannot report every flow that was already gone. That is an error, so that the Cleaner
// sweeps again.
func TestSmallBuffers(t *testing.T) {
	conn := emptyHost(t)
	for _, c := range []*netlink.Conn{conn.lists, conn.deletes} {
		labtest.Check(t, c.Wire.(*netlink.Socket).SetReadBuffer(1))
	}
	const each = 500
	var entries []entry
	for i := range 2 * each {
		entries = append(
			entries,
			entry{client: clientOf(i, false), frontend: key("10.96.0.1:53/udp"), endpoint: endpoints[0][0]},
		)
	}
	insert(t, conn, entries...)
	var seen []flow
	labtest.Check(t, conn.list(query{family: ipfamily.IPv4}, func(flows []flow) error {
		for _, f := range flows {
			seen = append(seen, flow{frontend: f.frontend, reply: slices.Clone(f.reply), id: slices.Clone(f.id)})
		}
		return nil
	}))
	if len(seen) != 2*each {
		t.Fatalf("%d flows are listed", len(seen))
	}
	if n, err := conn.remove(seen[:each]); err != nil || n != each {
		t.Fatalf("removed %d, %v", n, err)
	}
	_, err := conn.remove(seen) // the first half is gone
	if !errors.Is(err, unix.ENOBUFS) {
		t.Errorf("removed, and the kernel had no room to say of %d that they are gone: %v", each, err)
	}
	if left := listAll(t, conn); len(left) > 0 {
		t.Errorf("%d flows are left", len(left))
	}
	if n, err := conn.remove(seen[:1]); err != nil || n != 0 {
		t.Errorf("after that: removed %d, %v", n, err)
	}
}

// TestLoad: the kernel is asked, so that its sysctls exist afterwards. Whoever must not ask gets an error.
func TestLoad(t *testing.T) {
	h := labtest.NewHost(t, labtest.NewNet(t), "node")
	labtest.Check(t, h.Do(Load))
	labtest.Check(t, h.Do(func() error {
		_, err := os.Stat("/proc/sys/net/netfilter/nf_conntrack_max")
		return err
	}))
	err := h.Do(func() error { // on a thread that nobody uses afterwards
		var none [2]unix.CapUserData
		if err := unix.Capset(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &none[0]); err != nil {
			t.Error(err)
		}
		return Load()
	})
	if !errors.Is(err, unix.EPERM) {
		t.Errorf("without capabilities: %v, want %v", err, unix.EPERM)
	}
}

// TestUnansweredAlone: a list of flows that nobody has answered leaves the others out.
func TestUnansweredAlone(t *testing.T) {
	conn := emptyHost(t)
	k := key("10.96.0.1:80/tcp")
	here := netip.AddrPortFrom(k.Addr, k.Port)
	for i := range 8 {
		insert(t, conn, entry{client: clientOf(i, false), frontend: k, endpoint: here, answered: i > 0})
	}
	var got []netip.AddrPort
	q := query{family: ipfamily.IPv4, protocol: snapshot.TCP, unanswered: true}
	labtest.Check(t, conn.list(q, func(flows []flow) error {
		for _, f := range flows {
			got = append(got, f.client)
		}
		return nil
	}))
	if !slices.Equal(got, []netip.AddrPort{clientOf(0, false)}) || !conn.filters() {
		t.Errorf("listed %v; the kernel filters: %v", got, conn.filters())
	}
}

// BenchmarkUnanswered lists the flows of TCP that nobody has answered, which are few, among many.
func BenchmarkUnanswered(b *testing.B) {
	conn := emptyHost(b)
	k := key("10.96.0.1:80/tcp")
	var many []entry
	for i := range 100_000 {
		many = append(many, entry{client: clientOf(i, false), frontend: k, endpoint: endpoints[0][0], answered: true})
	}
	insert(b, conn, many...)
	for _, unanswered := range []bool{true, false} {
		b.Run(fmt.Sprint(unanswered), func(b *testing.B) {
			for b.Loop() {
				q := query{family: ipfamily.IPv4, protocol: snapshot.TCP, unanswered: unanswered}
				labtest.Check(b, conn.list(q, func([]flow) error { return nil }))
			}
		})
	}
}
