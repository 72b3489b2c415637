package conntrack

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestPressure reads from the kernel who fills its table: 60,000 masqueraded connections to one endpoint, and fewer to
// others and of others.
func TestPressure(t *testing.T) {
	conn := emptyHost(t)
	node := netip.MustParseAddr("192.0.2.1")
	var entries []entry
	add := func(n int, frontend, endpoint string, at netip.Addr, client netip.Addr) {
		for i := range n {
			e := entry{client: clientOf(len(entries), false), frontend: key(frontend),
				endpoint: netip.MustParseAddrPort(endpoint), answered: true}
			if client.IsValid() {
				e.client = netip.AddrPortFrom(client, uint16(2000+i))
			}
			if at.IsValid() {
				e.masquerade = netip.AddrPortFrom(at, uint16(1024+i))
			}
			entries = append(entries, e)
		}
	}
	add(60_000, webKey, "10.0.0.1:80", node, netip.Addr{})
	add(500, webKey, "10.0.0.2:80", node, netip.Addr{})
	add(700, dnsKey, "10.0.0.1:53", netip.Addr{}, netip.MustParseAddr("10.9.9.9"))
	add(900, "198.51.100.1:443/tcp", "198.51.100.1:443", netip.Addr{}, netip.MustParseAddr("10.9.9.8"))
	insert(t, conn, entries...)
	u := newUnanswered(t, conn)
	c := NewCleaner(u.walker, nil)
	_, err := behind(c, &noBackend{}).Apply(state(web(webBoth), service("dns", dnsBoth)), dataplane.Change{})
	labtest.Check(t, err)
	g := WatchPressure(u.walker, c)
	var p Pressure
	for deadline := time.Now().Add(time.Minute); p.At.IsZero() && time.Now().Before(deadline); p = g.Pressure() {
		time.Sleep(10 * time.Millisecond)
	}
	if want := []Share[snapshot.Name]{{name("web"), 60_500}, {name("dns"), 700}}; !slices.Equal(p.Services, want) {
		t.Errorf("Services %v, want %v", p.Services, want)
	}
	if s := p.Masquerade; s == nil || s.Address != node || s.Endpoint.String() != "10.0.0.1:80" ||
		s.Protocol != snapshot.TCP || fmt.Sprintf("%.1f", s.Percent()) != "93.0" {
		t.Errorf("masqueraded: %+v", p.Masquerade)
	}
	if got := p.Clients; len(got) != 4 || got[0].Flows+got[1].Flows != 60_500 ||
		got[2] != (Share[netip.Addr]{netip.MustParseAddr("10.9.9.8"), 900}) || got[3].Flows != 700 {
		t.Errorf("clients %v", got)
	}
}

// TestHeavy: the most frequent of a million keys are found, with bounded memory and error.
func TestHeavy(t *testing.T) {
	h, random := heavy[int]{}, rand.New(rand.NewPCG(1, 2))
	const all = 1 << 20
	for i := range all {
		switch k := random.IntN(100); {
		case k < 3:
			h.add(-1, pressureCounters)
		case k < 5:
			h.add(-2, pressureCounters)
		default:
			h.add(i, pressureCounters)
		}
	}
	got := most(h, 2, func(a, b int) int { return b - a })
	for i, part := range []int{3, 2} {
		want := all * part / 100
		if got[i].Of != -1-i || got[i].Flows > want*105/100 || got[i].Flows < want*95/100-all/pressureCounters {
			t.Errorf("%d: %+v, want some %d", i, got[i], want)
		}
	}
	if len(h) > pressureCounters {
		t.Errorf("%d counters", len(h))
	}
}

// BenchmarkPressure looks at a table of 250,000 flows of as many clients.
func BenchmarkPressure(b *testing.B) {
	conn := emptyHost(b)
	entries := make([]entry, 250_000)
	for i := range entries {
		client := netip.AddrPortFrom(netip.AddrFrom4([4]byte{100, byte(i >> 16), byte(i >> 8), byte(i)}), 1024)
		entries[i] = entry{client: client, frontend: key(webKey), endpoint: netip.MustParseAddrPort("10.0.0.1:80"),
			masquerade: netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, 2, byte(i >> 15)}), uint16(1024+i&32767))}
	}
	insert(b, conn, entries...)
	c := newCleaner(conn, nil)
	_, err := behind(c, &noBackend{}).Apply(state(web(webBoth)), dataplane.Change{})
	labtest.Check(b, err)
	g := &PressureGauge{service: c.service}
	g.reset()
	o := &watch{Watcher: Watcher{g.flow, g.done}}
	b.ReportAllocs()
	for b.Loop() {
		labtest.Check(b, conn.list(query{both: true}, func(flows []flow) error { return o.see(b.Context(), nil, flows) }))
		g.done(time.Now(), nil)
	}
	if s := g.Pressure().Services; len(s) != 1 || s[0].Flows != len(entries) {
		b.Error(s)
	}
}
