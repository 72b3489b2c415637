package health

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// lockedBuffer is a log that a test reads.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

var hello = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "hello") })

// TestServerWaitsForItsAddress: the proxy before may still be there. What is said is said once.
func TestServerWaitsForItsAddress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		host := &fakeSockets{open: map[string]*fakeListener{}, taken: map[string]bool{"tcp 0.0.0.0:10256": true}}
		log := &lockedBuffer{}
		failures := 0
		s := &Server{Name: "health checks", Addr: "0.0.0.0:10256", Handler: hello, Listen: host.listen,
			InUse: "the pod is not Ready", Log: slog.New(slog.NewTextHandler(log, nil)), Failed: func(error) { failures++ }}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- s.Run(ctx) }()
		time.Sleep(time.Minute)
		synctest.Wait()
		if n := strings.Count(log.String(), "level=ERROR"); n != 1 || failures != 1 ||
			!strings.Contains(log.String(), `listen tcp: address already in use" until_then="the pod is not Ready"`) {
			t.Errorf("%d errors:\n%s", n, log)
		}
		if host.tries < 12 || host.tries > 20 {
			t.Errorf("tried %d times in a minute", host.tries)
		}
		host.set(func() { clear(host.taken) })
		time.Sleep(listenMost)
		if got := host.list(); got != "tcp 0.0.0.0:10256" || !strings.Contains(log.String(), "now listening") {
			t.Errorf("open are %q\n%s", got, log)
		}
		// A socket that breaks is opened again.
		time.Sleep(time.Minute)
		host.set(func() { host.open["tcp 0.0.0.0:10256"].broken <- errors.New("gone") })
		time.Sleep(listenFirst)
		if got := host.list(); got != "tcp 0.0.0.0:10256" || strings.Count(log.String(), "level=ERROR") != 2 ||
			strings.Count(log.String(), "not Ready") != 1 {
			t.Errorf("after it broke open are %q\n%s", got, log)
		}
		cancel()
		if err := <-ended; err != nil || host.list() != "" {
			t.Errorf("the end: %v, open are %q", err, host.list())
		}
	})
}

// TestServerHardFail: kube-proxy's bindAddressHardFail.
func TestServerHardFail(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	s := &Server{
		Name:     "metrics",
		Addr:     l.Addr().String(),
		Handler:  hello,
		HardFail: true,
		Log:      slog.New(slog.DiscardHandler),
	}
	if err := s.Run(t.Context()); !errors.Is(err, syscall.EADDRINUSE) || !strings.HasPrefix(err.Error(), "metrics: ") {
		t.Errorf("%v; want the address to be in use", err)
	}
}

// TestServerBind: who is told to fail fails before anything is served, and serves by what was bound otherwise.
func TestServerBind(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	told := 0
	s := &Server{Name: "metrics", Addr: taken.Addr().String(), Handler: hello, Log: slog.New(slog.DiscardHandler),
		Failed: func(error) { told++ }}
	if err := s.Bind(); err != nil || told != 0 {
		t.Errorf("without HardFail: %v, told %d times", err, told)
	}
	s.HardFail = true
	if err := s.Bind(); !errors.Is(err, syscall.EADDRINUSE) || told != 1 {
		t.Errorf("%v, told %d times; want the address to be in use, told once", err, told)
	}
	listened := 0
	free := &Server{
		Name: "metrics", Addr: "127.0.0.1:0", Handler: hello, HardFail: true, Log: slog.New(slog.DiscardHandler),
		Listen: func(network, at string) (net.Listener, error) { listened++; return net.Listen(network, at) },
	}
	if err := free.Bind(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	at := free.bound.Addr().String()
	ended := make(chan error)
	go func() { ended <- free.Run(ctx) }()
	if answer, err := http.Get("http://" + at); err != nil {
		t.Error(err)
	} else {
		answer.Body.Close()
	}
	cancel()
	if err := <-ended; err != nil || listened != 1 {
		t.Errorf("the end: %v; it listened %d times", err, listened)
	}
}

// TestServerNowhere: no address, no server.
func TestServerNowhere(t *testing.T) {
	if err := (&Server{}).Run(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestServerAnswers over real HTTP, and gives up its address when told to end, while somebody keeps a connection.
func TestServerAnswers(t *testing.T) {
	var addr string
	listening := make(chan struct{})
	s := &Server{Name: "x", Addr: "127.0.0.1:0", Handler: hello, Log: slog.New(slog.DiscardHandler),
		Listen: func(network, at string) (net.Listener, error) {
			l, err := net.Listen(network, at)
			if err == nil {
				addr = l.Addr().String()
				close(listening)
			}
			return l, err
		}}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- s.Run(ctx) }()
	<-listening
	resp, err := http.Get("http://" + addr)
	if err != nil {
		t.Fatal(err)
	}
	body, _ := io.ReadAll(resp.Body)
	resp.Body.Close()
	if string(body) != "hello" {
		t.Errorf("%q", body)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatalf("the address is not free: %v", err)
	}
	l.Close()
}
