package main

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/proxy/flows"
)

// TestFlows: what a node recorded is printed as a table, as JSON lines, and by zones; a node without records says so.
func TestFlows(t *testing.T) {
	book := flows.NewBook(flows.Options{Node: "node-1"})
	mux := http.NewServeMux()
	mux.Handle("/flows", book)
	server := httptest.NewServer(mux)
	defer server.Close()
	record := flows.Record{Time: time.Now(), Service: "shop/cart", Port: "http", Protocol: "TCP", End: flows.Refused,
		Client:   flows.Peer{Addr: netip.MustParseAddrPort("10.244.1.7:40000"), Pod: "shop/web-0", Zone: "a"},
		Endpoint: flows.Peer{Pod: "shop/cart-1", Zone: "b"}, Sent: flows.Traffic{Bytes: 5e8},
		Received: flows.Traffic{Bytes: 15e8}}
	book.Add(record)
	earlier := record
	earlier.Time, earlier.Client.Pod = record.Time.Add(-time.Second), "shop/early-0"
	book.Add(earlier)
	run := func(args ...string) (string, error) {
		cmd := newRoot()
		var out strings.Builder
		cmd.SetOut(&out)
		cmd.SetIn(strings.NewReader(""))
		cmd.SetArgs(append([]string{"flows", "--metrics-bind-address", strings.TrimPrefix(server.URL, "http://")}, args...))
		err := cmd.ExecuteContext(t.Context())
		return out.String(), err
	}
	if got, err := run(); err != nil || !strings.Contains(got, "shop/web-0") ||
		strings.Index(got, "shop/early-0") > strings.Index(got, "shop/web-0") {
		t.Errorf("the records are not in the order of time: %v\n%s", err, got)
	}
	for args, want := range map[string]string{
		"shop/cart --failed": "refused by endpoint\nnode-1, recorded since",
		"shop/other":         "node-1, recorded since",
		"-o json":            `"end":"refused by endpoint"`,
		"--zones --price 0.5": "2.0000\n4000.0 MB crossed zones, 0.0 kB stayed within one, of 0.0 kB a zone is not known; " +
			"cost: 2.0000",
		"--follow --until-eof": "", // there is no input
		"--map": `{"client":"shop/web-0","zone":"a","service":"shop/cart","sent":500000000,"received":1500000000,` +
			`"connections":1,"failures":1}]`,
	} {
		if got, err := run(strings.Fields(args)...); err != nil || !strings.Contains(got, want) {
			t.Errorf("flows %s: %v\n%s\nwant %s", args, err, got, want)
		}
	}
	for args, want := range map[string]string{
		"cart": `"cart" is not NAMESPACE/NAME`, "--open": "--open needs --follow", "--price 1": "--price needs --zones",
		"--zones --failed": "--zones excludes", "--limit 0": "--limit: 0 is not within 1 to 50000",
		"--since -1s":              "--since: -1s is negative",
		"--metrics-bind-address x": `--metrics-bind-address: "x" is not an address`,
	} {
		if _, err := run(strings.Fields(args)...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("flows %s: %v, want %s", args, err, want)
		}
	}
	server.Config.Handler = http.HandlerFunc(flows.Off)
	if got, err := run("--map"); err != nil || !strings.Contains(got, `"off":true`) {
		t.Errorf("the map without records: %v, %s", err, got)
	}
	if _, err := run(); err == nil || err.Error() != "the setting records is off on this node (docs/FLOWS.md)" {
		t.Errorf("without records: %v", err)
	}
}

// TestFlowsFollow: with --follow, records are printed as connections end, until the command is told to end.
func TestFlowsFollow(t *testing.T) {
	book := flows.NewBook(flows.Options{Node: "node-1"})
	server := httptest.NewServer(book)
	defer server.Close()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	out, in := io.Pipe()
	cmd := newRoot()
	cmd.SetOut(in)
	cmd.SetArgs([]string{"flows", "-f", "--metrics-bind-address", strings.TrimPrefix(server.URL, "http://")})
	done := make(chan error, 1)
	go func() { done <- cmd.ExecuteContext(ctx) }()
	var got strings.Builder
	for !strings.Contains(got.String(), "shop/cart") {
		buffer := make([]byte, 4096)
		n, err := out.Read(buffer)
		if got.Write(buffer[:n]); err != nil {
			t.Fatal(err)
		}
		if strings.Contains(got.String(), "nothing is lost") {
			book.Add(flows.Record{Time: time.Now(), Service: "shop/cart", Protocol: "TCP", End: flows.Closed})
		}
	}
	cancel()
	go io.Copy(io.Discard, out)
	if err := <-done; err != nil {
		t.Error(err)
	}
}
