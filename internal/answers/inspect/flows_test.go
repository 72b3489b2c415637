package inspect

import (
	"bytes"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/proxy/flows"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
	"github.com/verdict-proxy/verdict/nft"
)

// serveFlows answers as a metrics server does.
func serveFlows(t *testing.T, h http.Handler) netip.AddrPort {
	t.Helper()
	mux := http.NewServeMux()
	mux.Handle("GET /flows", h)
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	return server.Listener.Addr().(*net.TCPAddr).AddrPort()
}

// ended is a connection to a port of a Service.
func ended(service string, end flows.End, client string, bytes uint64) flows.Record {
	return flows.Record{Service: service, Port: "http", Protocol: "TCP", End: end,
		Client: flows.Peer{Addr: netip.MustParseAddrPort(client), Pod: "shop/web-0"},
		Sent:   flows.Traffic{Packets: 1, Bytes: bytes}, Received: flows.Traffic{Packets: 1, Bytes: 10 * bytes}}
}

// TestTopTraffic: with records on, top has the bytes of the last whole minute, its average, and else no such columns.
func TestTopTraffic(t *testing.T) {
	f, s, clock := newFakeSampler(2)
	book := flows.NewBook(flows.Options{Now: clock.now})
	s.Records = serveFlows(t, book)
	take := func() (*Sample, string) {
		labtest.Check(t, s.Sample(t.Context(), nil, []string{"team/web-1:http"}, time.Second, true))
		sample := s.Detailed(ByName, time.Second, map[string]bool{"team/web-1:http": true})
		var text bytes.Buffer
		sample.Print(terminal.NewPrinter(&text), len(sample.Ports))
		return sample, text.String()
	}
	if sample, text := take(); sample.Ports[0].Traffic != nil || strings.Contains(text, "SENT") {
		t.Errorf("in the first minute there is traffic:\n%s", text)
	}
	clock.Time = clock.Add(time.Minute + 10*time.Second)
	f.count(nft.Services, "web-1", 4)
	for range 60 {
		book.Add(ended("team/web-1", flows.Closed, "10.0.0.1:1000", 2000))
	}
	clock.Time = clock.Add(time.Minute)
	sample, text := take()
	for _, want := range []string{
		"CONN/S         TOTAL  ENDPOINTS     SENT/S     RECV/S  SERVICE\n",
		"0             0          2        0 B        0 B  team/web-0:http\n",
		"4          2     2.0 kB    20.0 kB  team/web-1:http\n",
		"0             0                                       10.128.0.2:8080\n",
		"the average of the minute from " + clock.Add(-70*time.Second).Local().Format("15:04"),
	} {
		if !strings.Contains(text, want) {
			t.Errorf("top has no\n%q\n%s", want, text)
		}
	}
	if p := sample.Ports[1]; p.Traffic == nil || *p.Traffic != (Traffic{2000, 20000}) {
		t.Errorf("%+v", p.Traffic)
	}
	v := NewTopView("node-1", ByName, time.Second)
	v.Width, v.Height = 80, 8
	v.Show(sample, nil)
	lines := strings.Join(v.Render(terminal.NewPrinter(&bytes.Buffer{})), "\n")
	if !strings.Contains(lines, "CONN/S  ENDPOINTS     SENT/S     RECV/S  SERVICE\n") {
		t.Errorf("80 columns show\n%s", lines)
	}
	s.Records = serveFlows(t, http.HandlerFunc(flows.Off))
	clock.Time = clock.Add(time.Minute)
	if sample, text := take(); sample.Ports[0].Traffic != nil || strings.Contains(text, "SENT") {
		t.Errorf("without records there is traffic:\n%s", text)
	}
}

// TestTopFor: top names what asked for a Service's backends, as the proxy says once a minute, and what it said last if
// it does not answer.
func TestTopFor(t *testing.T) {
	_, s, clock := newFakeSampler(2)
	asked := 0
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if asked++; r.URL.Path != "/services" || r.URL.Query().Get("for") != "true" || asked > 1 {
			http.Error(w, "no", http.StatusNotFound)
			return
		}
		fmt.Fprint(w, `{"services":[{"service":"team/web-1","for":"Gateway edge/web"}]}`)
	}))
	defer server.Close()
	s.Health = server.Listener.Addr().(*net.TCPAddr).AddrPort()
	for i, want := range []int{1, 1, 2} {
		labtest.Check(t, s.Sample(t.Context(), nil, nil, time.Second, true))
		sample := s.Result(ByName, time.Second)
		var text bytes.Buffer
		sample.Print(terminal.NewPrinter(&text), len(sample.Ports))
		if asked != want || !strings.Contains(text.String(), "  team/web-0:http\n") ||
			!strings.Contains(text.String(), "  team/web-1:http (Gateway edge/web)\n") {
			t.Errorf("sample %d, asked %d times:\n%s", i, asked, text.String())
		}
		clock.Time = clock.Add(31 * time.Second)
	}
}

// TestExplainFailures: explain names the last connections to the port that failed, those of its sender if that is an
// address; none of other ports, none without records, and none of the past.
func TestExplainFailures(t *testing.T) {
	book := flows.NewBook(flows.Options{})
	at := time.Date(2026, 1, 1, 12, 0, 0, 0, time.Local)
	add := func(r flows.Record) {
		r.Time = time.Now()
		book.Add(r)
	}
	for i := range 9 {
		add(ended("shop/cart", flows.Refused, fmt.Sprintf("10.0.0.1:%d", i+1), 0))
	}
	add(ended("shop/cart", flows.Closed, "10.0.0.1:100", 0))
	other := ended("shop/cart", flows.Refused, "10.0.0.1:200", 0)
	other.Port = "metrics"
	add(other)
	rejected := ended("shop/cart", flows.Rejected, "10.0.0.2:300", 0)
	rejected.Reason = "no-endpoints"
	add(rejected)
	x := Explainer{Inspector: &fakeCounters{}, Records: serveFlows(t, book)}
	ask := func(source string) (ports []uint16) {
		e := explainRun{Explainer: &x}
		e.q.Source, _ = netip.ParseAddr(source)
		a := &Answer{Kernel: &View{Service: &Service{Name: "shop/cart", Port: "http"}}}
		for _, r := range e.lastFailures(t.Context(), a) {
			ports = append(ports, r.Client.Addr.Port())
		}
		return ports
	}
	for source, want := range map[string][]uint16{
		"pod": {300, 9, 8, 7, 6}, "10.0.0.1": {9, 8, 7, 6, 5}, "10.0.0.2": {300}, "10.0.0.3": nil,
	} {
		if got := ask(source); !slices.Equal(got, want) {
			t.Errorf("from %s: the connections from %d; want %d", source, got, want)
		}
	}
	rejected.Time = at
	refused := ended("shop/cart", flows.Refused, "10.0.0.1:9", 0)
	refused.Time, refused.Endpoint = at, flows.Peer{Addr: netip.MustParseAddrPort("10.0.1.1:8080")}
	var text bytes.Buffer
	(&Answer{Failures: []flows.Record{rejected, refused}}).printFailures(terminal.NewPrinter(&text))
	want := "Failed     12:00:00  shop/web-0 -> -  rejected (no-endpoints)\n" +
		"           12:00:00  shop/web-0 -> 10.0.1.1:8080  refused by endpoint\n"
	if text.String() != want {
		t.Errorf("explain prints\n%swant\n%s", &text, want)
	}
	x.At = at
	if got := ask("pod"); len(got) > 0 {
		t.Errorf("in the past %d failed", got)
	}
	x.At, x.Records = time.Time{}, serveFlows(t, http.HandlerFunc(flows.Off))
	if got := ask("pod"); len(got) > 0 {
		t.Errorf("without records %d failed", got)
	}
}
