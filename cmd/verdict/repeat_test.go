package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/answers/cluster"
	"github.com/verdict-proxy/verdict/internal/answers/cluster/clustertest"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/proxy/status"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
)

// stepping answers as the proxy of a node does that gets on by a step with each question, and stays at the last one.
type stepping struct {
	mu    sync.Mutex
	asked int
	steps []status.Status
}

// ServeHTTP implements http.Handler. A step without a node does not answer.
func (p *stepping) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.steps[min(p.asked, len(p.steps)-1)]
	p.asked++
	if s.Node == "" {
		http.Error(w, "not yet", http.StatusServiceUnavailable)
		return
	}
	s.Time = time.Now()
	_ = json.NewEncoder(w).Encode(s)
}

var (
	began   = time.Now()
	behind  = status.Status{Node: "node-1", First: &began, Pending: status.Pending{Services: 1}}
	reached = status.Status{Node: "node-1", First: &began, Services: 7}
)

// TestStatusWait: status --wait asks until everything is programmed, and says why it is not.
func TestStatusWait(t *testing.T) {
	p := &stepping{steps: []status.Status{{}, behind, reached}}
	server := httptest.NewServer(p)
	defer server.Close()
	at := "--healthz-bind-address=" + strings.TrimPrefix(server.URL, "http://")
	out, err := command("status", "--wait", at)
	if err != nil || p.asked != 3 || strings.Contains(out, "pending") || !strings.Contains(out, "7 Services") {
		t.Errorf("%v after %d questions:\n%s", err, p.asked, out)
	}
	for last, want := range map[*status.Status]string{&behind: "not synced within 1s: 1 changes of Services and 0",
		{}: "not synced within 1s: "} {
		p.mu.Lock()
		p.steps = []status.Status{*last}
		p.mu.Unlock()
		if out, err := command("status", "--wait", "--timeout=1s", "-o", "json", at); err == nil ||
			!strings.HasPrefix(err.Error(), want) || (last.Node != "") != strings.Contains(out, `"node": "node-1"`) {
			t.Errorf("%v; want %q:\n%s", err, want, out)
		}
	}
	if _, err := command("status", "--wait", "--watch", at); err == nil {
		t.Error("--wait and --watch go together")
	}
}

// locked is a buffer for a command at work.
type locked struct {
	mu sync.Mutex
	b  bytes.Buffer
}

// Write implements io.Writer.
func (l *locked) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *locked) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// TestStatusWatch: status --watch prints an answer again only when it differs, and ends without an error.
func TestStatusWatch(t *testing.T) {
	p := &stepping{steps: []status.Status{behind, behind, {}, {}, reached, reached, reached}}
	server := httptest.NewServer(p)
	defer server.Close()
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	cmd, out, errs := newRoot(), &locked{}, &locked{}
	cmd.SetOut(out)
	cmd.SetErr(errs)
	cmd.SetArgs([]string{"status", "--watch", "--healthz-bind-address", strings.TrimPrefix(server.URL, "http://")})
	ended := make(chan error, 1)
	go func() { ended <- cmd.ExecuteContext(ctx) }()
	asked := func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.asked > len(p.steps)
	}
	testkit.Eventually(t, time.Minute, "all steps are asked for", asked, out.String)
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if text := out.String(); strings.Count(text, "node-1") != 2 || strings.Count(text, "7 Services") != 1 ||
		!strings.Contains(text, "\n\n") {
		t.Errorf("it printed\n%s", text)
	}
	if text := errs.String(); strings.Count(text, "status 503") != 1 {
		t.Errorf("it said\n%s", text)
	}
}

// TestKubectlStatusWait: kubectl verdict status --wait ends with 1 if a node is not synced, with 2 if one does not
// answer, and names it.
func TestKubectlStatusWait(t *testing.T) {
	for _, test := range []struct {
		last *status.Status
		code int
		want string
	}{
		{&reached, exitSame, ""},
		{&behind, exitDiffers, "within 10ms: node-2: 1 changes of Services"},
		{nil, exitTrouble, "within 10ms: node-2: no answer within 15s"},
	} {
		first := reached
		first.Schema = status.Schema
		last := test.last
		if last != nil {
			with := *last
			with.Schema = status.Schema
			last = &with
		}
		f := &clustertest.Fake{Statuses: map[string]*status.Status{"node-1": &first, "node-2": last}}
		cmd := newKubectlWith(func(string, string) (cluster.API, cluster.Executor, string, error) {
			return f, f, "default", nil
		})
		var said strings.Builder
		cmd.SetErr(&said)
		timeout := "--timeout=10ms"
		if test.want == "" {
			timeout = "--timeout=1m"
		}
		out, err := commandOf(cmd, "status", "--wait", timeout)
		var code exitStatus
		if err != nil && !errors.As(err, &code) {
			labtest.Check(t, err)
		}
		if int(code) != test.code || !strings.Contains(said.String(), test.want) || !strings.Contains(out, "node-2") {
			t.Errorf("%v, %q; want %s:\n%s", err, said.String(), fmt.Sprint(test.code, " ", test.want), out)
		}
	}
}
