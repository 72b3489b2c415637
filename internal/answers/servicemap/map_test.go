package servicemap

import (
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/proxy/flows"
)

// TestBounded: of many arrows the largest and those that fail stay, the others are folded by namespace, and no byte is
// lost, in whatever order they come.
func TestBounded(t *testing.T) {
	const most, clients = 100, 20_000
	for _, order := range []func(i int) int{
		func(i int) int { return i },
		func(i int) int { return clients - 1 - i },
	} {
		m := New(most)
		var sent, failures uint64
		for n := range clients {
			i := order(n)
			s := flows.Sum{Client: fmt.Sprintf("team-%d/web-%d", i%7, i), Service: fmt.Sprintf("shop/s-%d", i%1000),
				Sent: flows.Traffic{Bytes: uint64(i + 1)}, Connections: 3}
			if i%4000 == 0 { // the smallest among them
				s.Failures = 2
			}
			sent, failures = sent+s.Sent.Bytes, failures+s.Failures
			m.AddSum(&s)
			if len(m.arrows) > slack*most {
				t.Fatalf("%d arrows are held", len(m.arrows))
			}
		}
		got := m.Arrows()
		if len(got) > 2*most+1 {
			t.Errorf("%d arrows", len(got))
		}
		own, folded := 0, 0
		for i, a := range got {
			sent, failures = sent-a.Sent, failures-a.Failures
			if folded += a.Folded; a.Folded == 0 {
				own++
			}
			if fails := i < 5; fails != (a.Failures > 0 && a.Folded == 0) {
				t.Errorf("place %d: %+v", i, a)
			}
		}
		if sent != 0 || failures != 0 || own != most || own+folded < clients {
			t.Errorf("%d bytes and %d failures are missing; %d arrows of their own, %d folded", sent, failures, own, folded)
		}
		if largest := got[5]; largest.Client != fmt.Sprintf("team-%d/web-%d", (clients-1)%7, clients-1) {
			t.Errorf("the largest is %+v", largest)
		}
	}
}

// TestAddsUp: the same client, zone and Service make one arrow, and other zones another.
func TestAddsUp(t *testing.T) {
	m := New(10)
	for range 3 {
		m.AddSum(&flows.Sum{Client: "shop/web", ClientZone: "a", Service: "shop/cart", Port: "http", Connections: 2,
			Failures: 1, Sent: flows.Traffic{Bytes: 10}, Received: flows.Traffic{Bytes: 5}})
	}
	m.AddSum(&flows.Sum{Client: "shop/web", ClientZone: "b", Service: "shop/cart"})
	got := m.Arrows()
	want := Arrow{Client: "shop/web", Zone: "a", Service: "shop/cart", Sent: 30, Received: 15, Connections: 6, Failures: 3}
	if len(got) != 2 || got[0] != want {
		t.Errorf("%+v", got)
	}
}

func TestNamespace(t *testing.T) {
	for name, want := range map[string]string{"shop/web": "shop", "shop/": "shop", "/": "", "others": "", "10.0.0.0/8": "",
		"fd00::/64": "", "192.0.2.1": "", "2001:db8::1": ""} {
		if got := Namespace(name); got != want {
			t.Errorf("the namespace of %q is %q", name, got)
		}
	}
}

// TestRead: a node's part of the map is what its book recorded in the time that was asked for, by client and Service.
// A node without records says so.
func TestRead(t *testing.T) {
	now := time.Now()
	book := flows.NewBook(flows.Options{Node: "node-1", Now: func() time.Time { return now }})
	mux := http.NewServeMux()
	mux.Handle("GET /flows", book)
	server := httptest.NewServer(mux)
	defer server.Close()
	addr := server.Listener.Addr().(*net.TCPAddr).AddrPort()
	for _, end := range []flows.End{flows.Closed, flows.Refused} {
		book.Add(flows.Record{Time: now, Service: "shop/cart", Port: "http", Protocol: "TCP", End: end,
			Client: flows.Peer{Pod: "shop/web-0", Workload: "shop/web", Zone: "a"},
			Sent:   flows.Traffic{Packets: 2, Bytes: 100}, Received: flows.Traffic{Packets: 2, Bytes: 50}})
	}
	got, err := Read(t.Context(), addr, 5*time.Minute)
	want := Arrow{Client: "shop/web", Zone: "a", Service: "shop/cart", Sent: 200, Received: 100, Connections: 2,
		Failures: 1}
	if err != nil || got.Off || got.Node != "node-1" || len(got.Arrows) != 1 || got.Arrows[0] != want {
		t.Errorf("%+v, %v", got, err)
	}
	now = now.Add(10 * time.Minute)
	if got, err := Read(t.Context(), addr, 5*time.Minute); err != nil || got.Off || len(got.Arrows) != 0 {
		t.Errorf("ten minutes later: %+v, %v", got, err)
	}
	off := httptest.NewServer(http.HandlerFunc(flows.Off))
	defer off.Close()
	addr = off.Listener.Addr().(*net.TCPAddr).AddrPort()
	if got, err := Read(t.Context(), addr, 5*time.Minute); err != nil || !got.Off {
		t.Errorf("without records: %+v, %v", got, err)
	}
}
