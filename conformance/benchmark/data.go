package benchmark

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab"
)

const (
	// dialed is how many Services connections go to: chains of iptables are in no order that is known.
	dialed = 256
	// clients is how many open connections at the same time where these are counted.
	clients = 4
)

// target is where a Service is reached, or if that is asked for its first endpoint.
func (n *node) target(i int, direct bool) netip.AddrPort {
	if direct {
		return netip.AddrPortFrom(n.endpoints[i][0], uint16(n.targetPort(i)))
	}
	return n.frontend(i)
}

// dialLimit is how long a connection may take to be answered. A lost SYN is sent again after a second.
const dialLimit = time.Second

// dial opens a connection from the calling thread's namespace, with as little as possible around it, waits for the
// first byte of the server, and cuts it by RST. Only then the server has taken the connection: a long queue of such as
// are not taken yet would overflow, and the server's kernel would drop what comes. It gives the time until the peer's
// kernel had answered.
func dial(to netip.AddrPort) (time.Duration, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	took, err := connect(fd, to)
	if err != nil {
		return 0, err
	}
	for err = unix.EINTR; err == unix.EINTR; {
		_, err = unix.Read(fd, make([]byte, 1))
	}
	if err != nil {
		return 0, fmt.Errorf("read from %s: %w", to, err)
	}
	return took, nil
}

// connect connects a socket that is cut by RST when it is closed.
func connect(fd int, to netip.AddrPort) (time.Duration, error) {
	err := errors.Join(
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
	return took, nil
}

// opened counts how many connections a second can be opened, answered and cut.
func (n *node) opened(ctx context.Context, from *lab.Host, to []netip.AddrPort, length time.Duration) (float64, error) {
	var count atomic.Int64
	errs := make([]error, clients)
	var all sync.WaitGroup
	began := time.Now()
	for c := range clients {
		all.Go(func() {
			errs[c] = from.Do(func() error {
				for i := c; time.Since(began) < length && ctx.Err() == nil; i += clients {
					took, err := dial(to[i%len(to)])
					if err != nil {
						return err
					}
					if took >= dialLimit {
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
func (n *node) throughput(
	ctx context.Context, from *lab.Host, to netip.AddrPort, length time.Duration,
) (float64, error) {
	conn, err := from.DialContext(ctx, "tcp4", to.String())
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
