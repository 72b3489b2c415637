package main

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/proxy/ledger"
	"github.com/verdict-proxy/verdict/internal/proxy/status"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// keptLedger writes a ledger of two changes and a failure, as the backend iptables does, and returns its directory.
func keptLedger(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "ledger")
	w := ledger.New(ledger.Options{Dir: dir, MaxBytes: 1 << 20, Version: "v1", Backend: "iptables",
		Log: slog.New(slog.DiscardHandler)})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		w.Run(ctx)
	}()
	h := w.Listener()
	for _, name := range []string{"cart", "catalog"} {
		slice := snapshot.Name{Namespace: "shop", Name: name + "-x"}
		h.Committed(reconcile.Commit{Before: []*dataplane.Service{nil},
			After:   []*dataplane.Service{{Name: snapshot.Name{Namespace: "shop", Name: name}}},
			Receipt: dataplane.Receipt{Added: 3, Removed: 1, Plan: time.Millisecond, Commit: 3 * time.Millisecond},
			Cause: &reconcile.Cause{Began: time.Now(), Since: time.Now().Add(-12 * time.Millisecond),
				Delta: snapshot.Delta{Slices: map[snapshot.Name]*snapshot.Slice{slice: {Service: name, Name: slice,
					Version: "42"}}}}})
	}
	h.Failed(reconcile.Failure{Err: errors.New("no room"), Cause: &reconcile.Cause{Retry: true}})
	testkit.Eventually(t, 30*time.Second, "the records are written", func() bool { return w.Stats().Records == 4 })
	cancel()
	<-done
	return dir
}

// TestLog: log lists the records, or those of a Service, as text or JSON, and --check finds an edit.
func TestLog(t *testing.T) {
	dir := keptLedger(t)
	text, err := command("log", "--ledger", dir)
	labtest.Check(t, err)
	for _, want := range []string{"verdict v1 started\n", "EndpointSlice shop/cart-x @42", "+3 -1", "4.0 ms, waited 1",
		"EndpointSlice shop/catalog-x @42", "failed: retry", "\n  no room\n", "verdict stopped\n"} {
		if !strings.Contains(text, want) {
			t.Errorf("log does not say %q:\n%s", want, text)
		}
	}
	text, err = command("log", "--ledger", dir, "--service", "shop/cart", "-o", "json", "--elements")
	labtest.Check(t, err)
	var r ledger.Record
	labtest.Check(t, json.Unmarshal([]byte(text), &r)) // it is one line
	if len(r.Services) != 1 || r.Services[0] != "shop/cart" || r.Took.Kernel != 3000 {
		t.Errorf("%+v", r)
	}
	if text, err = command("log", "--ledger", dir, "--since", "0s"); err != nil || strings.Count(text, "\n") != 1 {
		t.Errorf("since now there is\n%s\nerror %v", text, err)
	}
	text, err = command("log", "--ledger", dir, "--check")
	labtest.Check(t, err)
	if !strings.HasPrefix(text, "records 1 to 5, ") {
		t.Errorf("--check says %s", text)
	}
	files, _ := filepath.Glob(dir + "/*")
	content, err := os.ReadFile(files[0])
	labtest.Check(t, err)
	content = []byte(strings.Replace(string(content), `"version":"42"`, `"version":"43"`, 1))
	labtest.Check(t, os.WriteFile(files[0], content, 0o600))
	text, err = command("log", "--ledger", dir, "--check")
	var status exitStatus
	if !errors.As(err, &status) || status != 1 || !strings.HasPrefix(text, "ledger-000000000001.jsonl:2: the line was") {
		t.Errorf("--check of a ledger with an edit: error %v\n%s", err, text)
	}
}

// TestStatusKnowsTheEnd: the digest that a running proxy names is that of its last record, so that it shows that the
// end of the file was cut off, which the chain does not.
func TestStatusKnowsTheEnd(t *testing.T) {
	v := newVictim(t)
	s, dir := &shown{victim: v}, filepath.Join(t.TempDir(), "ledger")
	v.flags = append(v.flags, "--ledger", dir)
	v.start()
	v.wait("all Services are programmed", 1)
	var end status.Ledger
	var last *ledger.Record
	testkit.Eventually(t, patience, "the status names the last record, and nothing is written any more", func() bool {
		before := end
		end, last = s.ledgerEnd(), lastRecord(t, dir)
		return end.Record > 1 && last.Number == end.Record && end == before
	})
	if end.Digest != last.Sum || end.Missing > 0 {
		t.Errorf("the status says %+v; the last record is %d with digest %s", end, last.Number, last.Sum)
	}
	files, _ := filepath.Glob(dir + "/*")
	content, err := os.ReadFile(files[0])
	labtest.Check(t, err)
	cut := strings.LastIndexByte(strings.TrimSuffix(string(content), "\n"), '\n') + 1
	labtest.Check(t, os.Truncate(files[0], int64(cut)))
	_, err = command("log", "--ledger", dir, "--check")
	labtest.Check(t, err)
	if now := s.ledgerEnd(); now.Digest != end.Digest || lastRecord(t, dir).Sum == end.Digest {
		t.Errorf("after the last record was cut off, the status says %+v", now)
	}
	said := func(args ...string) (text string, err error) {
		labtest.Check(t, v.cluster.Node.Do(func() error {
			text, err = command(args...)
			return nil
		}))
		return text, err
	}
	if text, err := said("log", "--check"); err != nil || !strings.Contains(text, lastRecord(t, dir).Sum) {
		t.Errorf("log does not ask the proxy where the ledger is: %v\n%s", err, text)
	}
	labtest.Check(t, os.RemoveAll(dir))
	testkit.Eventually(t, patience, "the status says that the records are missing", func() bool {
		return s.ledgerEnd().Missing >= end.Record
	})
	testkit.Eventually(t, patience, "the log says so, too", func() bool {
		text, err := said("log")
		return err == nil && strings.Contains(text, "missing here")
	})
	labtest.Check(t, v.keeper.Process.Signal(syscall.SIGTERM))
	labtest.Check(t, v.keeper.Wait())
	if _, err := said("status"); err == nil || !strings.Contains(err.Error(), "is verdict run running?") {
		t.Errorf("status without a proxy: %v", err)
	}
	if _, err := said("log"); err == nil || !strings.Contains(err.Error(), "no proxy answers on this node") {
		t.Errorf("log without a proxy: %v", err)
	}
}

// ledgerEnd asks the proxy where its ledger ends.
func (s *shown) ledgerEnd() (end status.Ledger) {
	s.t.Helper()
	var answer status.Status
	code, _, body := s.get(s.cluster.Node, "http://127.0.0.1:10256/status")
	if err := json.Unmarshal([]byte(body), &answer); err != nil || code != 200 {
		s.t.Fatalf("status %d, error %v: %s", code, err, body)
	}
	if answer.Ledger != nil {
		end = *answer.Ledger
	}
	return end
}

// lastRecord returns the last record of a ledger.
func lastRecord(t *testing.T, dir string) *ledger.Record {
	t.Helper()
	r, err := ledger.Open(dir, time.Time{})
	labtest.Check(t, err)
	defer r.Close()
	var last *ledger.Record
	for {
		record, err := r.Next()
		if errors.Is(err, io.EOF) {
			return last
		}
		labtest.Check(t, err)
		last = record
	}
}

// TestExplainAtNeedsBatches: the ledger of another backend than nftables cannot say where packets went.
func TestExplainAtNeedsBatches(t *testing.T) {
	for _, test := range []struct{ args, want string }{
		{"--at 2100-01-01T00:00:00Z --ledger " + keptLedger(t), "only the backend nftables tells what it writes"},
		{"--at noon --ledger /", `--at: "noon" is no time`},
		{"--at 12:00 --live", "--at asks the ledger alone"},
		{"--at 12:00 --ledger /nowhere", "no such file"},
		{"--at 12:00 --ledger " + t.TempDir(), "holds no ledger"},
	} {
		args := append([]string{"explain", "10.0.0.1", "10.96.0.1:80"}, strings.Fields(test.args)...)
		if _, err := command(args...); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("explain %s: %v; want %q", test.args, err, test.want)
		}
	}
}

// TestParseMoment: a clock time is the last one, and all else is what it says.
func TestParseMoment(t *testing.T) {
	now := time.Date(2026, 3, 2, 9, 30, 0, 0, time.Local)
	for text, want := range map[string]time.Time{
		"09:29:59":             time.Date(2026, 3, 2, 9, 29, 59, 0, time.Local),
		"09:29:59.25":          time.Date(2026, 3, 2, 9, 29, 59, 25e7, time.Local),
		"09:30":                now,
		"23:00":                time.Date(2026, 3, 1, 23, 0, 0, 0, time.Local),
		"2026-02-28 10:00:00":  time.Date(2026, 2, 28, 10, 0, 0, 0, time.Local),
		"2026-02-28T10:00:00":  time.Date(2026, 2, 28, 10, 0, 0, 0, time.Local),
		"2026-02-28T10:00:00Z": time.Date(2026, 2, 28, 10, 0, 0, 0, time.UTC),
	} {
		if got, err := parseMoment(text, now); err != nil || !got.Equal(want) {
			t.Errorf("%s: %v, error %v; want %v", text, got, err, want)
		}
	}
}
