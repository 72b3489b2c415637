package records

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/proxy/flows"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
)

func textOf(print func(p *terminal.Printer)) string {
	var b strings.Builder
	print(terminal.NewPrinter(&b))
	return b.String()
}

// TestTable: what a line has of a connection, with names or without, and below what is missing.
func TestTable(t *testing.T) {
	at := time.Date(2030, 1, 2, 3, 4, 5, 0, time.Local)
	named := flows.Record{Time: at, Service: "shop/cart", Port: "http", Protocol: "TCP", End: flows.Closed, Weight: 1,
		Client: flows.Peer{Pod: "shop/web-0", Workload: "shop/web"}, Endpoint: flows.Peer{Pod: "shop/cart-1"},
		Sent: flows.Traffic{Bytes: 1500}, Received: flows.Traffic{Bytes: 12_300_000}, Seconds: 1.5}
	bare := flows.Record{Time: at, Service: "kube-system/dns", Protocol: "UDP", End: flows.Rejected,
		Reason: "no-endpoints", Weight: 16, Since: at.Add(-time.Minute),
		Client: flows.Peer{Prefix: netip.MustParsePrefix("192.0.2.0/24")}}
	named.For = "Gateway edge/cart"
	got := textOf(func(p *terminal.Printer) {
		one := Table{Printer: p}
		one.Print("", &named)
		one.Print("", &bare)
		(&Table{Printer: p, Nodes: true}).Print("node-1", &named)
		PrintLosses(p, &flows.Answer{Node: "node-1", Started: at})
		PrintLosses(p, &flows.Answer{Node: "node-1", Started: at, Left: 9,
			Losses: flows.Losses{Events: 1000, Refusals: 2, Sampled: 3, Unread: 4}})
	})
	for _, want := range []string{
		"TIME            CLIENT                            SERVICE                     ENDPOINT",
		"01-02 03:04:05  shop/web-0                        shop/cart:http (Gateway edge/cart) shop/cart-1",
		"1.5 kB    12.3 MB   1.5 s    closed\n", "192.0.2.0/24                      kube-system/dns             -  ",
		"rejected (no-endpoints, UDP, counted since 01-02 03:03:05, stands for 16)\n",
		"TIME            NODE            CLIENT", "01-02 03:04:05  node-1          shop/web-0",
		"node-1, recorded since 01-02 03:04:05: nothing is lost\n",
		"missing: 1,000 ends of connections", "; 2 rejected", "; 3 records left out", "; 4 records that", "; 9 older",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("%q is not in\n%s", want, got)
		}
	}
}

// TestParse: the lines of an answer are told apart.
func TestParse(t *testing.T) {
	now := time.Now().UTC()
	for _, v := range []any{&flows.Answer{Node: "n", Started: now}, &flows.Record{Time: now, End: flows.Closed},
		&flows.Sum{Minute: now, Service: "a/b"}} {
		text, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		got, err := Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		back := map[bool]any{got.Answer != nil: got.Answer, got.Record != nil: got.Record, got.Sum != nil: got.Sum}[true]
		if fmt.Sprintf("%+v", v) != fmt.Sprintf("%+v", back) {
			t.Errorf("%s is read as %+v", text, back)
		}
	}
	for _, text := range []string{"{}", "no", `{"node":"x"}`} {
		if got, err := Parse([]byte(text)); err == nil {
			t.Errorf("%s is read as %+v", text, got)
		}
	}
}

// TestZones: what crossed zones is added up by Service and pair, of one node and of several, and costs its price.
func TestZones(t *testing.T) {
	sum := func(service, client, endpoint string, gb uint64) *flows.Sum {
		return &flows.Sum{Service: service, ClientZone: client, EndpointZone: endpoint, Connections: 1,
			Sent: flows.Traffic{Bytes: gb * 1e9}, Received: flows.Traffic{Bytes: gb * 3e9}}
	}
	node := NewZoneSum()
	node.AddNode(&flows.Answer{Node: "node-1", Losses: flows.Losses{Events: 5}})
	for _, s := range []*flows.Sum{sum("shop/cart", "a", "b", 1), sum("shop/cart", "a", "b", 2),
		sum("shop/cart", "b", "a", 4), sum("shop/web", "a", "a", 8), sum("shop/web", "", "a", 16),
		sum("shop/web", "a", "c", 1)} {
		node.AddSum(s)
	}
	both := NewZoneSum()
	both.Add(node.Zones(0))
	both.Add(node.Zones(0))
	z := both.Zones(0.02)
	want := []ZonePair{{"shop/cart", "b", "a", 2, 8e9, 24e9, 0.64}, {"shop/cart", "a", "b", 4, 6e9, 18e9, 0.48},
		{"shop/web", "a", "c", 2, 2e9, 6e9, 0.16}}
	if fmt.Sprint(z.Pairs) != fmt.Sprint(want) || z.Bytes != 64e9 || z.Within != 64e9 || z.Unknown != 128e9 ||
		fmt.Sprintf("%.4f", z.Cost) != "1.2800" {
		t.Errorf("%+v", z)
	}
	got := textOf(func(p *terminal.Printer) { z.Print(p, 0.02) })
	for _, want := range []string{"SERVICE", "COST", "shop/cart", "0.6400", "64000.0 MB crossed zones",
		"cost: 1.2800, at 0.02 for a GB (10^9 bytes)", "missing: 5 ends"} {
		if !strings.Contains(got, want) {
			t.Errorf("%q is not in\n%s", want, got)
		}
	}
	if got := textOf(func(p *terminal.Printer) { z.Print(p, 0) }); strings.Contains(got, "COST") {
		t.Errorf("without a price there is a cost:\n%s", got)
	}
}
