package flows

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	logs "go.opentelemetry.io/proto/otlp/logs/v1"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/verdict-proxy/verdict/internal/system/testkit"
)

// receiver is an OTLP receiver, which answers as it is told.
type receiver struct {
	t       *testing.T
	mu      sync.Mutex
	answers []func(w http.ResponseWriter) bool // the next ones; true takes the records
	records []*logs.LogRecord
	node    string
}

func (r *receiver) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	zip, err := gzip.NewReader(req.Body)
	if err != nil || req.URL.Path != "/v1/logs" || req.Header.Get("Content-Type") != "application/x-protobuf" {
		r.t.Errorf("%s %s: %v", req.URL, req.Header, err)
		return
	}
	body, err := io.ReadAll(zip)
	var data logs.LogsData
	if err != nil || proto.Unmarshal(body, &data) != nil {
		r.t.Errorf("the request cannot be read: %v", err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.answers) > 0 {
		answer := r.answers[0]
		if r.answers = r.answers[1:]; !answer(w) {
			return
		}
	}
	for _, of := range data.ResourceLogs {
		for _, a := range of.Resource.Attributes {
			if a.Key == "k8s.node.name" {
				r.node = a.Value.GetStringValue()
			}
		}
		for _, s := range of.ScopeLogs {
			r.records = append(r.records, s.LogRecords...)
		}
	}
}

// sum sums up an attribute of all records that were received.
func (r *receiver) sum(key string) (n int, sum int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, record := range r.records {
		for _, a := range record.Attributes {
			if a.Key == key {
				sum += a.Value.GetIntValue()
			}
		}
	}
	return len(r.records), sum
}

// running returns a book that runs until its test ends.
func running(t *testing.T, o Options) *Book {
	o.Log, o.Node = slog.New(slog.DiscardHandler), "node-1"
	b := NewBook(o)
	for _, e := range b.exports {
		if c, ok := e.writer.(*collector); ok {
			c.pause = time.Millisecond
		}
	}
	ctx, stop := context.WithCancel(t.Context())
	go b.Run(ctx)
	t.Cleanup(func() {
		stop()
		<-b.done
	})
	return b
}

// TestOTLP: a collector gets each record once, with the right numbers, also after it could not take one for a while.
// What it rejects, and what comes while it is gone, is counted.
func TestOTLP(t *testing.T) {
	r := &receiver{t: t}
	server := httptest.NewServer(r)
	defer server.Close()
	b := running(t, Options{OTLP: server.URL})
	r.answers = []func(http.ResponseWriter) bool{func(w http.ResponseWriter) bool {
		w.WriteHeader(http.StatusServiceUnavailable)
		return false
	}}
	exports := func() ExportStats { return b.Stats().Exports[0] }
	done := func(of uint64) {
		t.Helper()
		testkit.Eventually(t, 30*time.Second, "all records are written or lost",
			func() bool { return exports().Written+exports().Lost == of })
	}
	const n = 3000
	want := int64(0)
	for i := range uint64(n) {
		b.Add(connection("shop/web", "shop/cart", i))
		want += int64(500 + i)
	}
	done(n)
	if got, sum := r.sum("verdict.flow.sent.bytes"); got != n || sum != want || exports().Lost != 0 {
		t.Errorf("the collector has %d records of %d bytes, want %d of %d; %+v", got, sum, n, want, exports())
	}
	text, err := protojson.Marshal(r.records[0])
	for _, want := range []string{`"source.k8s.pod.name"`, `"destination.address"`, `"network.transport"`, "10.244.2.9",
		`"k8s.service.name"`, "SEVERITY_NUMBER_INFO"} {
		if !strings.Contains(string(text), want) || err != nil || r.node != "node-1" {
			t.Errorf("a record of node %q is %s, %v; want %s", r.node, text, err, want)
		}
	}
	r.mu.Lock()
	r.answers = []func(http.ResponseWriter) bool{func(w http.ResponseWriter) bool {
		partial := protowire.AppendVarint(protowire.AppendTag(nil, 1, protowire.VarintType), 2)
		_, _ = w.Write(protowire.AppendBytes(protowire.AppendTag(nil, 1, protowire.BytesType), partial))
		return false
	}}
	r.mu.Unlock()
	for i := range uint64(5) {
		b.Add(connection("shop/web", "shop/cart", i))
	}
	done(n + 5)
	if exports().Lost != 2 {
		t.Errorf("the collector rejected 2 records, and %d are lost", exports().Lost)
	}
	server.Close()
	for i := range uint64(10) {
		b.Add(connection("shop/web", "shop/cart", i))
	}
	done(n + 15)
	if exports().Lost != 12 {
		t.Errorf("%d records are lost of 12", exports().Lost)
	}
}

// TestFile: the file has each record as a line, and is rotated; when the proxy ends, the last records are written.
func TestFile(t *testing.T) {
	name := filepath.Join(t.TempDir(), "flows.jsonl")
	b := NewBook(Options{File: name, Log: slog.New(slog.DiscardHandler)})
	b.exports[0].writer = newFile(name, 1)
	ctx, stop := context.WithCancel(t.Context())
	go b.Run(ctx)
	const n = 9000 // some four megabytes
	for i := range uint64(n) {
		for len(b.exports[0].records) == maxWaiting {
			time.Sleep(time.Millisecond)
		}
		b.Add(connection("shop/web", "shop/cart", i))
	}
	stop()
	<-b.done
	if got := b.Stats().Exports[0]; got != (ExportStats{To: "file", Written: n}) {
		t.Errorf("%+v", got)
	}
	var files []string
	testkit.Eventually(t, 10*time.Second, "the oldest files are removed", func() bool {
		files, _ = filepath.Glob(filepath.Join(filepath.Dir(name), "*"))
		return len(files) == keptFiles+1
	})
	lines := 0
	for _, f := range files {
		text, err := os.ReadFile(f)
		var last Record
		all := bytes.Split(bytes.TrimSpace(text), []byte("\n"))
		if err != nil || json.Unmarshal(all[len(all)-1], &last) != nil || last.Service != "shop/cart" || len(text) > 1<<20 {
			t.Errorf("%s: %v, %d bytes, %+v", f, err, len(text), last)
		}
		lines += len(all)
	}
	if lines < 3*n/5 || lines >= n {
		t.Errorf("the last %d files have %d lines of %d", len(files), lines, n)
	}
}

// TestSlowCollector: a collector that hangs delays nobody, and what it does not take is counted.
func TestSlowCollector(t *testing.T) {
	hang, called := make(chan struct{}), make(chan struct{}, 1)
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		called <- struct{}{}
		<-hang
	}))
	defer server.Close()
	defer close(hang)
	b := running(t, Options{OTLP: server.URL})
	for i := range uint64(batchSize) {
		b.Add(connection("shop/web", "shop/cart", i))
	}
	<-called
	for i := range uint64(2 * maxWaiting) {
		b.Add(connection("shop/web", "shop/cart", i))
	}
	if lost := b.Stats().Exports[0].Lost; lost != maxWaiting {
		t.Errorf("%d records are lost of %d", lost, maxWaiting)
	}
}
