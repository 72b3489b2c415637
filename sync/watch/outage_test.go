package watch

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/client-go/rest"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// memory carries requests to a server without sockets, so that time can be a test's own.
type memory struct {
	server http.Handler

	mu     sync.Mutex
	closed bool
	open   map[*answer]bool
}

// answer is a response while it is written.
type answer struct {
	header http.Header
	body   *io.PipeWriter
	status int
	begun  chan struct{}
	once   sync.Once
	stop   context.CancelFunc
}

func (a *answer) Header() http.Header { return a.header }
func (a *answer) Flush()              { a.WriteHeader(http.StatusOK) }

func (a *answer) WriteHeader(status int) {
	a.once.Do(func() {
		a.status = status
		close(a.begun)
	})
}

func (a *answer) Write(b []byte) (int, error) {
	a.WriteHeader(http.StatusOK)
	return a.body.Write(b)
}

// RoundTrip refuses the connection while the server is away.
func (m *memory) RoundTrip(r *http.Request) (*http.Response, error) {
	ctx, stop := context.WithCancel(r.Context())
	body, w := io.Pipe()
	a := &answer{header: http.Header{}, body: w, begun: make(chan struct{}), stop: stop}
	m.mu.Lock()
	closed := m.closed
	m.open[a] = !closed
	m.mu.Unlock()
	if closed {
		stop()
		return nil, &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}
	}
	context.AfterFunc(ctx, func() { w.CloseWithError(io.EOF) })
	go func() {
		m.server.ServeHTTP(a, r.WithContext(ctx))
		a.WriteHeader(http.StatusOK)
		stop()
		m.mu.Lock()
		delete(m.open, a)
		m.mu.Unlock()
	}()
	<-a.begun
	return &http.Response{StatusCode: a.status, Header: a.header, Body: body, Request: r, ProtoMajor: 1}, nil
}

// away ends all connections, and refuses new ones until it is called with false.
func (m *memory) away(is bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed = is; !is {
		return
	}
	for a := range m.open {
		a.stop()
	}
	clear(m.open)
}

// newsAt notes when a node learns of a Service.
type newsAt struct {
	mu     sync.Mutex
	synced bool
	at     map[string]time.Time
}

func (n *newsAt) Synced() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.synced = true
}

func (n *newsAt) Put(d snapshot.Delta) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for name := range d.Services {
		if n.at[name.Name].IsZero() {
			n.at[name.Name] = time.Now()
		}
	}
}

// TestNewsAfterAnOutage: however long the API server was away, and although it cannot continue any watch, every node
// has the news within some seconds after it is back. The nodes do not come at once.
func TestNewsAfterAnOutage(t *testing.T) {
	for _, away := range []time.Duration{10 * time.Second, time.Minute, 5 * time.Minute} {
		t.Run(away.String(), func(t *testing.T) {
			s := newAPIServer(t, false)
			synctest.Test(t, func(t *testing.T) { newsAfter(t, s, away) })
		})
	}
}

const (
	newsNodes = 200
	// newsLimit is when the last node must have the news, and newsShare how many nodes may learn of them in one second.
	newsLimit = 2*retryMost + 2*retryFirst + time.Second
	newsShare = newsNodes * 2 / 5
)

func newsAfter(t *testing.T, s *apiServer, away time.Duration) {
	m := &memory{server: s, open: map[*answer]bool{}}
	config := &rest.Config{Host: "http://api", Transport: m, QPS: -1}
	config.ContentType = s.media
	s.set(named("old", "10.96.0.1"), apiSlice(), apiNode("a"), apiCIDR("kubernetes", "10.96.0.0/12"))
	ctx, stop := context.WithCancel(t.Context())
	var nodes []*newsAt
	var wait sync.WaitGroup
	for range newsNodes {
		n := &newsAt{at: map[string]time.Time{}}
		nodes = append(nodes, n)
		wait.Go(func() {
			if err := (&Kubernetes{Config: config, NodeName: "n1"}).Run(ctx, n); err != nil {
				t.Error(err)
			}
		})
	}
	time.Sleep(time.Minute)
	m.away(true)
	s.set(named("new", "10.96.0.2"))
	s.forget()
	time.Sleep(away)
	back := time.Now()
	m.away(false)
	time.Sleep(10 * time.Minute)
	stop()
	wait.Wait()
	var late []time.Duration
	seconds := map[int]int{}
	for i, n := range nodes {
		at := n.at["new"]
		if !n.synced || at.IsZero() {
			t.Fatalf("node %d: synced %v, news at %v", i, n.synced, at)
		}
		late = append(late, at.Sub(back))
		seconds[int(at.Sub(back)/time.Second)]++
	}
	slices.Sort(late)
	text := fmt.Sprintf("half of the nodes after %v, the last one after %v; by second %v", late[len(late)/2],
		late[len(late)-1], seconds)
	t.Log(text)
	for _, n := range seconds {
		if n > newsShare {
			t.Errorf("%d nodes of %d came in one second: %s", n, newsNodes, text)
		}
	}
	if late[len(late)-1] > newsLimit {
		t.Errorf("late: %s", text)
	}
}
