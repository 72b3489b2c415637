package health

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// envLimited has this test program run as a process with few descriptors.
const envLimited = "HEALTH_TEST_LIMITED"

// TestFewDescriptors is about a process that may have 128 descriptors, and 400 slow connections to each of its
// servers: each of them answers whoever asks properly, and there are descriptors left for the rest.
func TestFewDescriptors(t *testing.T) {
	if os.Getenv(envLimited) != "" {
		serveFew(t)
		return
	}
	cmd := exec.Command("/proc/self/exe", "-test.run=^TestFewDescriptors$", "-test.v")
	cmd.Env = append(os.Environ(), envLimited+"=1")
	in, err := cmd.StdinPipe()
	must(t, err)
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	defer cmd.Wait()
	defer in.Close()
	var addrs [3]string
	if _, err := fmt.Fscanf(skipTo(out, "at "), "%s %s %s", &addrs[0], &addrs[1], &addrs[2]); err != nil {
		t.Fatal(err)
	}
	for _, addr := range addrs {
		for i := range 400 {
			c, err := net.Dial("tcp", addr)
			must(t, err)
			defer c.Close()
			if i%2 == 0 {
				_, _ = c.Write([]byte("GET /livez HTTP/1.1\r\nHost: x\r\n"))
			}
		}
	}
	client := http.Client{Timeout: 20 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	for _, addr := range addrs {
		for range 5 {
			resp, err := client.Get("http://" + addr)
			if err != nil {
				t.Fatal(err)
			}
			body, _ := io.ReadAll(resp.Body)
			resp.Body.Close()
			if n, err := fmt.Sscanf(string(body), "left %d", new(int)); n != 1 || string(body) == "left 0" {
				t.Errorf("%s: %q, %v", addr, body, err)
			}
		}
	}
}

// skipTo reads until after a text.
func skipTo(r io.Reader, text string) io.Reader {
	b := make([]byte, 1)
	for seen := ""; !strings.HasSuffix(seen, text); seen += string(b) {
		if _, err := r.Read(b); err != nil {
			break
		}
	}
	return r
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// serveFew has three servers whose answers say how many descriptors are left. It ends with its standard input.
func serveFew(t *testing.T) {
	must(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: 128, Max: 128}))
	left := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		n := 0
		for ; n < 30; n++ {
			f, err := os.Open("/dev/null")
			if err != nil {
				break
			}
			defer f.Close()
		}
		fmt.Fprintf(w, "left %d", n)
	})
	addrs := make(chan string, 3)
	for range 3 {
		s := &Server{Name: "x", Addr: "127.0.0.1:0", Handler: left, Log: slog.New(slog.DiscardHandler),
			Listen: func(network, at string) (net.Listener, error) {
				l, err := net.Listen(network, at)
				if err == nil {
					addrs <- l.Addr().String()
				}
				return l, err
			}}
		go s.Run(t.Context())
	}
	fmt.Println("at", <-addrs, <-addrs, <-addrs)
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// TestRoom: whoever has most connections loses the oldest of them.
func TestRoom(t *testing.T) {
	r := newConnLimit(3)
	var closed atomic.Int32
	enter := func(host string) *trackedConn { return r.enter(&fakeConn{host: host, closed: &closed}) }
	patient := enter("10.0.0.1:1")
	first := enter("10.0.0.2:1")
	enter("10.0.0.2:2")
	for port := range 100 {
		enter(fmt.Sprintf("10.0.0.2:%d", 3+port))
	}
	if n := closed.Load(); n != 100 || len(r.open) != 3 || r.open[0] != patient {
		t.Errorf("%d are closed, %d are open", n, len(r.open))
	}
	// Who has his answer goes before who has not.
	waits, answered := r.open[1], r.open[2]
	recordState(answered, http.StateIdle)
	enter("10.0.0.2:200")
	if r.open[1] != waits || r.open[2] == answered {
		t.Error("a request is cut off")
	}
	first.Close() // again
	patient.Close()
	for _, g := range append([]*trackedConn{}, r.open...) {
		g.Close()
	}
	if len(r.open) != 0 || len(r.hosts) != 0 {
		t.Errorf("%v, %v are left", r.open, r.hosts)
	}
}

type fakeConn struct {
	net.Conn
	host   string
	closed *atomic.Int32
}

func (f *fakeConn) Close() error         { f.closed.Add(1); return nil }
func (f *fakeConn) RemoteAddr() net.Addr { return address(f.host) }

type address string

func (a address) Network() string { return "tcp" }
func (a address) String() string  { return string(a) }

// TestTooManyNodePorts: they take no more descriptors than they may. When there is room again, the others get it.
func TestTooManyNodePorts(t *testing.T) { synctest.Test(t, tooManyNodePorts) }

func tooManyNodePorts(t *testing.T) {
	var failed []error
	sockets := &fakeSockets{open: map[string]*fakeListener{}, taken: map[string]bool{}}
	n := &NodePorts{Healthy: func() bool { return true }, Listen: sockets.listen,
		Config: dataplane.Config{NodePortAddresses: []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0")}},
		Limits: Limits{Ports: 2, PortConnections: 4}, Report: func(e *ListenError) { failed = append(failed, e) }}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- n.Run(ctx) }()
	s := snapshot.New()
	var names []snapshot.Name
	for i := range 3 {
		name := snapshot.Name{Namespace: "shop", Name: fmt.Sprint("web-", i)}
		names = append(names, name)
		s.Services[name] = &snapshot.Service{Name: name, HealthCheckNodePort: uint16(30000 + i),
			ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 96, 0, byte(i)})}}
	}
	n.InSync(s, snapshot.Change{Globals: true, Services: names})
	open := strings.Split(sockets.list(), ", ")
	if len(failed) != 1 || !errors.Is(failed[0], errTooMany) || len(open) != 2 {
		t.Errorf("open are %q, failed %v", open, failed)
	}
	for _, name := range names {
		if strings.HasSuffix(open[0], fmt.Sprint(s.Services[name].HealthCheckNodePort)) {
			delete(s.Services, name)
		}
	}
	n.InSync(s, snapshot.Change{Services: names})
	time.Sleep(retryMost)
	if now := strings.Split(sockets.list(), ", "); len(now) != 2 || now[0] == open[0] {
		t.Errorf("open are %q, were %q", now, open)
	}
	cancel()
	must(t, <-ended)
}
