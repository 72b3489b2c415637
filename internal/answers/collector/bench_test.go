package collector

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/proxy/everywhere"
	"github.com/verdict-proxy/verdict/internal/proxy/status"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// simVariable says that this process is that of the simulated nodes: "NODES ADDRESS FINGERPRINT".
const simVariable = "VERDICT_SIMULATED_NODES"

func TestMain(m *testing.M) {
	if text := os.Getenv(simVariable); text != "" {
		if err := simulate(strings.Fields(text)); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// simulate runs nodes that hold everything at once, but for the last one, which never holds Services named stuck-*. It
// prints the address at which they answer, as /N/everywhere, and ends with its input.
func simulate(args []string) error {
	if len(args) != 3 {
		return fmt.Errorf("%q is not NODES ADDRESS FINGERPRINT", args)
	}
	count, err := strconv.Atoi(args[0])
	if err != nil {
		return err
	}
	leader := map[string]string{everywhere.AddressAnnotation: args[1], everywhere.FingerprintAnnotation: args[2]}
	agents := make([]*everywhere.Agent, count)
	for i := range agents {
		dialer := &net.Dialer{KeepAliveConfig: everywhere.KeepAlive,
			LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 1, byte(i>>8), byte(i))}}
		agents[i] = everywhere.New(everywhere.Options{
			Node: nodeName(i), Dial: dialer.DialContext, Log: slog.New(slog.DiscardHandler),
			Leader: func(context.Context) (map[string]string, error) { return leader, nil },
			Token:  func() (string, error) { return token(nodeName(i), time.Now().Add(24*time.Hour)), nil },
			Holds: func(goals []status.Goal) []bool {
				out := make([]bool, len(goals))
				for j, g := range goals {
					out[j] = i < count-1 || !strings.HasPrefix(g.Service.Name, "stuck-")
				}
				return out
			},
		})
		go agents[i].Run(context.Background())
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		i, err := strconv.Atoi(strings.Split(r.URL.Path, "/")[1])
		if err != nil || i < 0 || i >= count {
			http.NotFound(w, r)
			return
		}
		agents[i].ServeHTTP(w, r)
	}))
	fmt.Println(server.URL)
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

func nodeName(i int) string { return fmt.Sprintf("n%d", i) }

// countingListener counts the bytes of its connections.
type countingListener struct {
	net.Listener
	read, written *atomic.Int64
}

func (l countingListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return countingConn{c, l}, nil
}

type countingConn struct {
	net.Conn
	of countingListener
}

func (c countingConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.of.read.Add(int64(n))
	return n, err
}

func (c countingConn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	c.of.written.Add(int64(n))
	return n, err
}

// simulation is a collector in this process, and its nodes in another one.
type simulation struct {
	api     *fakeAPI
	barrier *barrier
	url     string
	bytes   countingListener
}

func newSimulation(b *testing.B, nodes int) *simulation {
	b.Helper()
	names := make([]string, nodes)
	for i := range names {
		names[i] = nodeName(i)
	}
	s := &simulation{api: newFakeAPI(b, names...)}
	s.api.set(cart, endpoint(1, "n0", true))
	reads, err := newAPI(s.api.config(), 0)
	if err != nil {
		b.Fatal(err)
	}
	cert, fingerprint, err := newCertificate()
	if err != nil {
		b.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)
	s.barrier = newBarrier(newObjects(reads, theDaemonSet), nil)
	ctx, cancel := context.WithCancel(b.Context())
	l, err := listen(ctx, "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	s.bytes = countingListener{l, new(atomic.Int64), new(atomic.Int64)}
	h := newHub(cert, newReviewer(reads, snapshot.Name{Namespace: "kube-system", Name: "verdict"}), s.barrier, log)
	var running sync.WaitGroup
	running.Go(func() { s.barrier.run(ctx) })
	running.Go(func() { _ = h.serve(ctx, s.bytes) })
	b.Cleanup(func() { cancel(); running.Wait() })
	s.startNodes(b, fmt.Sprint(nodes, " ", l.Addr(), " ", fingerprint))
	testkit.Eventually(b, 5*time.Minute, "all nodes are connected", func() bool {
		return s.barrier.snapshot().Streams == nodes
	})
	return s
}

func (s *simulation) startNodes(b *testing.B, args string) {
	b.Helper()
	c := exec.Command(os.Args[0])
	c.Env, c.Stderr = append(os.Environ(), simVariable+"="+args), os.Stderr
	in, err := c.StdinPipe()
	if err != nil {
		b.Fatal(err)
	}
	out, err := c.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := c.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { in.Close(); _ = c.Wait() })
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		b.Fatal(err)
	}
	s.url = strings.TrimSpace(line)
}

// ask asks a node, and returns how long that took.
func (s *simulation) ask(node int, service string, timeout time.Duration) (a answer, took time.Duration, err error) {
	begin := time.Now()
	q := url.Values{"service": {service}, "timeout": {timeout.String()}}
	r, err := http.Get(fmt.Sprintf("%s/%d/everywhere?%s", s.url, node, q.Encode()))
	if err != nil {
		return a, 0, err
	}
	defer r.Body.Close()
	err = json.NewDecoder(r.Body).Decode(&a)
	return a, time.Since(begin), err
}

// usage is what this process has used.
type usage struct {
	cpu   time.Duration
	bytes int64
	heap  uint64
	rss   int
}

func (s *simulation) usage(b *testing.B) (u usage) {
	b.Helper()
	runtime.GC()
	debug.FreeOSMemory()
	var r syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &r); err != nil {
		b.Fatal(err)
	}
	u.cpu = time.Duration(r.Utime.Nano() + r.Stime.Nano())
	u.bytes = s.bytes.read.Load() + s.bytes.written.Load()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	u.heap = m.HeapInuse + m.StackInuse
	text, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		b.Fatal(err)
	}
	pages, _ := strconv.Atoi(strings.Fields(string(text))[1])
	u.rss = pages * os.Getpagesize()
	return u
}

// BenchmarkEverywhere measures barriers over nodes that have programmed everything already: what it says is what the
// barrier adds to the slowest node. Each node has a TLS connection of its own, from another process.
func BenchmarkEverywhere(b *testing.B) {
	for _, nodes := range []int{100, 1000, 5000} {
		b.Run(fmt.Sprint(nodes), func(b *testing.B) {
			s := newSimulation(b, nodes)
			if _, _, err := s.ask(0, "shop/cart", 10*time.Second); err != nil { // reads the list of nodes
				b.Fatal(err)
			}
			var all []time.Duration
			before := s.usage(b)
			b.ResetTimer()
			for i := range b.N {
				a, took, err := s.ask(i%nodes, "shop/cart", 10*time.Second)
				if err != nil || !a.Everywhere || a.Nodes != nodes {
					b.Fatal(a, err)
				}
				all = append(all, took)
			}
			b.StopTimer()
			after := s.usage(b)
			slices.Sort(all)
			b.ReportMetric(float64(all[len(all)/2].Microseconds())/1000, "p50-ms")
			b.ReportMetric(float64(all[len(all)*99/100].Microseconds())/1000, "p99-ms")
			b.ReportMetric(float64((after.cpu-before.cpu).Microseconds())/1000/float64(b.N), "cpu-ms/op")
			b.ReportMetric(float64(after.bytes-before.bytes)/float64(b.N)/float64(nodes), "bytes/node")
		})
	}
}

// BenchmarkCollectorMemory measures what a collector takes at rest, and while 100 requests wait, each for another
// Service, because one node does not answer.
func BenchmarkCollectorMemory(b *testing.B) {
	for _, nodes := range []int{100, 1000, 5000} {
		b.Run(fmt.Sprint(nodes), func(b *testing.B) { measureMemory(b, nodes) })
	}
}

func measureMemory(b *testing.B, nodes int) {
	const waiters, rest = 100, 10 * time.Second
	s := newSimulation(b, nodes)
	for i := range waiters {
		s.api.set(snapshot.Name{Namespace: "shop", Name: fmt.Sprint("stuck-", i)}, endpoint(1, "n0", true))
	}
	for range b.N {
		before := s.usage(b)
		time.Sleep(rest)
		after := s.usage(b)
		b.Logf("at rest: %+v", after)
		b.ReportMetric(float64(after.heap)/(1<<20), "rest-MiB")
		b.ReportMetric(float64(after.rss)/(1<<20), "rest-rss-MiB")
		b.ReportMetric(float64(after.bytes-before.bytes), "rest-bytes")
		b.ReportMetric((after.cpu-before.cpu).Seconds()/rest.Seconds()*1000, "rest-millicores")
		var group sync.WaitGroup
		for i := range waiters {
			group.Go(func() { _, _, _ = s.ask(i, fmt.Sprint("shop/stuck-", i), time.Minute) })
		}
		testkit.Eventually(b, time.Minute, "all wait", func() bool { return s.barrier.snapshot().Rounds == waiters })
		time.Sleep(5 * time.Second) // until the others have answered
		before = s.usage(b)
		time.Sleep(rest)
		after = s.usage(b)
		b.ReportMetric(float64(after.heap)/(1<<20), "waiting-MiB")
		b.ReportMetric(float64(after.rss)/(1<<20), "waiting-rss-MiB")
		b.ReportMetric(float64(after.bytes-before.bytes), "waiting-bytes")
		b.ReportMetric((after.cpu-before.cpu).Seconds()/rest.Seconds()*1000, "waiting-millicores")
		group.Wait()
	}
}
