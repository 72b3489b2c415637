package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/answers/records"
	"github.com/verdict-proxy/verdict/internal/proxy/flows"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
)

// line is a line of a node.
func line(v any) string {
	text, _ := json.Marshal(v)
	return string(text) + "\n"
}

// ended is a record of a connection from a client, some seconds after the minute.
func ended(client string, second int) flows.Record {
	return flows.Record{Time: time.Date(2030, 1, 2, 3, 4, second, 0, time.UTC), Service: "shop/cart", End: flows.Closed,
		Weight: 1, Client: flows.Peer{Pod: client}}
}

// TestFlows: the records of all nodes are merged by time, each with its node; nodes without an answer are named, and
// what each node lost is said.
func TestFlows(t *testing.T) {
	f := &fake{}
	f.add("node-a", "node-b", "node-c")
	answer := flows.Answer{Started: time.Now(), Losses: flows.Losses{Events: 7}}
	f.answer = func(_ context.Context, node string, argv []string) (string, int, error) {
		if got := strings.Join(argv, " "); got != "verdict flows -o json --config=/c --since=10m0s -- shop/cart" {
			t.Errorf("asked %q", got)
		}
		switch node {
		case "node-a":
			return line(answer) + line(ended("shop/1", 1)) + line(ended("shop/3", 3)), 0, nil
		case "node-b":
			return line(answer) + line(ended("shop/2", 2)), 0, nil
		}
		return "", 1, nil
	}
	var text strings.Builder
	to := &Flows{Printer: terminal.NewPrinter(&text)}
	q := &records.Question{Service: "shop/cart", Since: 10 * time.Minute}
	if err := f.cluster().Flows(t.Context(), q, to); err != nil || to.Code() != codeTrouble {
		t.Errorf("%v, exit status %d", err, to.Code())
	}
	at := 0
	for _, want := range []string{"node-a          shop/1", "node-b          shop/2", "node-a          shop/3",
		"node-a, recorded since", "missing: 7 ends", "node-b, recorded since", "node-c: exit status 1"} {
		i := strings.Index(text.String()[at:], want)
		if i < 0 {
			t.Fatalf("%q does not follow in\n%s", want, text.String())
		}
		at += i
	}
	text.Reset()
	if err := f.cluster().Flows(t.Context(), q, &Flows{JSON: json.NewEncoder(&text)}); err != nil ||
		strings.Count(text.String(), "\n") != 6 || !strings.Contains(text.String(), `{"node":"node-b","time":`) {
		t.Errorf("%v:\n%s", err, text.String())
	}
}

// endless is an executor whose commands print, and end when their input does.
type endless struct {
	mu    sync.Mutex
	ended int
}

func (e *endless) Exec(_ context.Context, _, pod, _ string, argv []string, stdin io.Reader, stdout, _ io.Writer,
) (int, error) {
	second := int(pod[len(pod)-1] - 'a')
	text := line(flows.Answer{Started: time.Now()}) + line(ended(fmt.Sprint("shop/", 9-second), 9-second))
	for _, part := range []string{text[:10], text[10:]} {
		if _, err := io.WriteString(stdout, part); err != nil {
			return 1, err
		}
	}
	_, err := io.Copy(io.Discard, stdin)
	e.mu.Lock()
	defer e.mu.Unlock()
	if slices.Contains(argv, "--until-eof") {
		e.ended++
	}
	return 0, err
}

// TestFollowFlows: the records of all nodes come in the order of time, and when the reader leaves, the commands on the
// nodes end, too.
func TestFollowFlows(t *testing.T) {
	f, exec := &fake{}, &endless{}
	f.add("node-a", "node-b")
	c := f.cluster()
	c.Exec = exec
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	out, in := io.Pipe()
	done := make(chan error, 1)
	to := &Flows{JSON: json.NewEncoder(in)}
	go func() { done <- c.FollowFlows(ctx, &records.Question{Follow: true}, to) }()
	d := json.NewDecoder(out)
	var got []string
	for len(got) < 2 {
		var r NodeRecord
		if err := d.Decode(&r); err != nil {
			t.Fatal(err)
		}
		if r.End != "" {
			got = append(got, r.Node+" "+r.Client.Pod)
		}
	}
	if !slices.Equal(got, []string{"node-b shop/8", "node-a shop/9"}) {
		t.Errorf("%q", got)
	}
	cancel()
	go io.Copy(io.Discard, out)
	if err := <-done; err != nil || exec.ended != 2 {
		t.Errorf("%v; %d commands ended with their input", err, exec.ended)
	}
}
