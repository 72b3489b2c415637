package gateways

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/verdict-proxy/verdict/conformance/cluster"
)

// limit is how long a connection has to be answered. The first packet is sent again after 1 and after 3 s.
const limit = 5 * time.Second

// answer is a connection that was answered, and by which pod.
type answer struct {
	conn net.Conn
	pod  string
}

// open opens a connection from outside to the Gateway, and asks who answers.
func (b *Bed) open(ctx context.Context) (answer, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	conn, err := cluster.DialFrom(b.Outside())(ctx, "tcp", b.address)
	if err != nil {
		return answer{}, err
	}
	// A connection that is reset leaves the port free at once, for the thousands that follow.
	if err := conn.(*net.TCPConn).SetLinger(0); err != nil {
		return answer{}, err
	}
	pod, err := ask(conn)
	if err != nil {
		conn.Close()
	}
	return answer{conn, pod}, err
}

func ask(conn net.Conn) (string, error) {
	if err := conn.SetDeadline(time.Now().Add(limit)); err != nil {
		return "", err
	}
	if _, err := conn.Write([]byte("who\n")); err != nil {
		return "", err
	}
	line, err := bufio.NewReader(conn).ReadString('\n')
	return strings.TrimSpace(line), err
}

// service is the name of the Service of a pod: its Deployment's.
func service(pod string) string {
	parts := strings.Split(pod, "-")
	return strings.Join(parts[:max(0, len(parts)-2)], "-")
}

// tally counts connections by the Service that answered them.
type tally struct {
	mu     sync.Mutex
	by     map[string]int
	failed int
	errs   []error
}

func (t *tally) count(a answer, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err == nil {
		t.by[service(a.pod)]++
		return
	}
	t.failed++
	if len(t.errs) < 10 {
		t.errs = append(t.errs, fmt.Errorf("%s: %w", time.Now().Format("15:04:05.000"), err))
	}
}

func (t *tally) all() (n int) {
	for _, k := range t.by {
		n += k
	}
	return n
}

// send opens n connections, 20 at a time, and returns them open if they are to be held.
func (b *Bed) send(ctx context.Context, n int, hold bool) (*tally, []answer) {
	t, held := &tally{by: map[string]int{}}, make([]answer, n)
	var wait sync.WaitGroup
	for w := range 20 {
		wait.Go(func() {
			for i := w; i < n; i += 20 {
				a, err := b.open(ctx)
				t.count(a, err)
				if held[i] = a; err == nil && !hold {
					a.conn.Close()
				}
			}
		})
	}
	wait.Wait()
	return t, held
}

// always opens 100 connections a second until the function that it returns is called, which says what became of them.
func (b *Bed) always(ctx context.Context) (stop func() *tally) {
	t, done := &tally{by: map[string]int{}}, make(chan struct{})
	var wait sync.WaitGroup
	wait.Go(func() {
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-done:
				return
			case <-tick.C:
			}
			wait.Go(func() {
				a, err := b.open(ctx)
				t.count(a, err)
				if err == nil {
					a.conn.Close()
				}
			})
		}
	})
	return func() *tally {
		close(done)
		wait.Wait()
		return t
	}
}

// unharmed is an error if connections failed.
func (t *tally) unharmed() error {
	if t.failed > 0 {
		return fmt.Errorf("%d of %d connections failed: %v", t.failed, t.failed+t.all(), t.errs)
	}
	return nil
}
