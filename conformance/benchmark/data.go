package benchmark

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/conformance/benchmark/results"
)

const (
	// dialed is how many Services connections go to, each triesOfEach times for the latency: chains of iptables are in
	// no order that is known, so no Service is the last for sure, but one of many is near the end.
	dialed      = 256
	triesOfEach = 12
	// clients is how many open connections at the same time where these are counted.
	clients = 4
)

// data measures what a client sees. Without a proxy it asks the endpoints themselves.
func (n *node) data(ctx context.Context, length time.Duration, direct bool) (*results.Data, error) {
	var to, straight []netip.AddrPort
	for _, i := range n.spread(dialed) {
		to = append(to, n.target(i, direct))
		if !direct {
			straight = append(straight, n.target(i, true))
		}
	}
	out := &results.Data{}
	err := n.client.Do(func() error { return latencies(ctx, to, straight, out) })
	if err != nil {
		return nil, err
	}
	if out.Connections, err = n.connections(ctx, to, length); err != nil {
		return nil, err
	}
	if out.Gigabits, err = n.throughput(ctx, n.target(n.sink(), direct), length); err != nil {
		return nil, err
	}
	return out, n.flow(ctx, direct || n.kind.reasons[results.TitleNewFlow] != "", out)
}

// target is where a Service is reached, or if that is asked for its first endpoint.
func (n *node) target(i int, direct bool) netip.AddrPort {
	if direct {
		return netip.AddrPortFrom(n.endpoints[i][0], uint16(n.targetPort(i)))
	}
	return n.frontend(i)
}

// latencies opens connections one after the other, by turns to each. After each to a Service follows one straight to an
// endpoint, if there are any: a busy machine changes its pace many times a second, and the two see the same of that.
// The first round is not counted.
func latencies(ctx context.Context, to, straight []netip.AddrPort, out *results.Data) error {
	of := make([][]float64, len(to))
	var beside []float64
	for round := range triesOfEach + 1 {
		for i, a := range to {
			took, err := dial(a, false)
			var other time.Duration
			if err == nil && straight != nil {
				other, err = dial(straight[i], false)
			}
			if err := errors.Join(err, ctx.Err()); err != nil {
				return err
			}
			if round > 0 {
				of[i] = append(of[i], float64(took.Nanoseconds())/1000)
				beside = append(beside, float64((took-other).Nanoseconds())/1000)
			}
		}
	}
	if straight != nil {
		median := results.Median(beside)
		out.Beside = &median
	}
	for _, values := range of {
		out.Slowest = max(out.Slowest, results.Median(values))
	}
	all := slices.Concat(of...)
	out.First = results.Percentile(all, 0.5)
	return nil
}

// dialLimit is how long a connection may take to be answered. A lost SYN takes a second.
const dialLimit = 500 * time.Millisecond

// dial opens a connection from the calling thread's namespace, with as little as possible around it, and cuts it by
// RST. It gives the time until the peer's kernel had answered. Before it cuts it may wait for the first byte of the
// server, which then has taken the connection: a long queue of such as are not taken yet would overflow, and the
// server's kernel would drop what comes.
func dial(to netip.AddrPort, wait bool) (time.Duration, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	err = errors.Join(
		unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &unix.Timeval{Sec: 10}),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 10}),
	)
	if err != nil {
		return 0, err
	}
	peer := &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())}
	began := time.Now()
	// A signal, as the runtime sends to move goroutines, interrupts nothing but the wait.
	for err = unix.EINTR; err == unix.EINTR || err == unix.EALREADY; {
		err = unix.Connect(fd, peer)
	}
	took := time.Since(began)
	if err != nil && err != unix.EISCONN {
		return 0, fmt.Errorf("connect to %s: %w", to, err)
	}
	for err = unix.EINTR; wait && err == unix.EINTR; {
		_, err = unix.Read(fd, make([]byte, 1))
	}
	if wait && err != nil {
		return 0, fmt.Errorf("read from %s: %w", to, err)
	}
	return took, nil
}

// connections counts how many connections a second can be opened, answered and cut.
func (n *node) connections(ctx context.Context, to []netip.AddrPort, length time.Duration) (float64, error) {
	var count atomic.Int64
	errs := make([]error, clients)
	var all sync.WaitGroup
	began := time.Now()
	for c := range clients {
		all.Go(func() {
			errs[c] = n.client.Do(func() error {
				for i := c; time.Since(began) < length && ctx.Err() == nil; i += clients {
					took, err := dial(to[i%len(to)], true)
					if err != nil {
						return err
					}
					if took > dialLimit {
						return fmt.Errorf("a connection to %s took %v: something was lost on the way", to[i%len(to)], took)
					}
					count.Add(1)
				}
				return ctx.Err()
			})
		})
	}
	all.Wait()
	return float64(count.Load()) / time.Since(began).Seconds(), errors.Join(errs...)
}

// throughput sends over one connection for a time and gives gigabits a second.
func (n *node) throughput(ctx context.Context, to netip.AddrPort, length time.Duration) (float64, error) {
	conn, err := n.client.DialContext(ctx, "tcp4", to.String())
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	block := make([]byte, 1<<18)
	bytes := 0
	began := time.Now()
	if err := conn.SetDeadline(began.Add(length + 10*time.Second)); err != nil {
		return 0, err
	}
	for time.Since(began) < length {
		sent, err := conn.Write(block)
		if err := errors.Join(err, ctx.Err()); err != nil {
			return 0, err
		}
		bytes += sent
	}
	return float64(bytes) * 8 / 1e9 / time.Since(began).Seconds(), nil
}
