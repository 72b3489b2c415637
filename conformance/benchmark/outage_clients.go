package benchmark

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/conformance/benchmark/results"
	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/blackbox"
)

// outageClients open one connection after the other, wait for the first byte and close it.
type outageClients struct {
	// limit is how long each waits to be connected, and then for the first byte.
	limit time.Duration

	wait     sync.WaitGroup
	mu       sync.Mutex
	attempts []attempt
}

// attempt is what one connection became.
type attempt struct {
	at     time.Duration // when it began, from the beginning of the scene
	took   time.Duration // until it was connected, or had failed
	failed string        // the reason; empty if it had the first byte
}

// traffic opens connections from both client pods in turn, at a rate, until a time of the scene. All of them have ended
// when the clients' wait is over.
func (s *scene) traffic(rate float64, until time.Duration) {
	due := make(chan struct{}, 1)
	s.clients.wait.Go(func() {
		_ = pace(s.ctx, rate, s.began.Add(until), due)
		close(due)
	})
	s.clients.wait.Go(func() {
		turn := 0
		for range due {
			from := s.from[turn%len(s.from)]
			turn++
			s.clients.wait.Go(func() {
				began := time.Now()
				took, client, err := connectOnce(s.ctx, from, s.to, s.clients.limit)
				if err != nil && s.ctx.Err() == nil {
					s.failed(blackbox.Failure{From: from.Name, Client: client, Began: began}, err)
				}
				s.clients.mu.Lock()
				defer s.clients.mu.Unlock()
				s.clients.attempts = append(s.clients.attempts, attempt{began.Sub(s.began), took, reason(err)})
			})
		}
	})
}

// failed has a failure explained that happened just now.
func (s *scene) failed(f blackbox.Failure, err error) {
	f.Server, f.Failed, f.Err = s.to, time.Now(), err.Error()
	s.failures.Add(f)
}

// connectOnce gives the time that connect took, and the client's address; invalid if no socket was made. It leaves no
// connection behind.
func connectOnce(ctx context.Context, from *lab.Host, to netip.AddrPort, limit time.Duration) (
	took time.Duration, client netip.AddrPort, err error) {
	began := time.Now()
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	c, err := from.DialContext(ctx, "tcp4", to.String())
	took = time.Since(began)
	if err != nil {
		if op := (*net.OpError)(nil); errors.As(err, &op) {
			client = addrOf(op.Source)
		}
		return took, client, err
	}
	defer c.Close()
	client = addrOf(c.LocalAddr())
	if err := errors.Join(c.(*net.TCPConn).SetLinger(0), c.SetReadDeadline(time.Now().Add(limit))); err != nil {
		return took, client, err
	}
	if _, err = c.Read(make([]byte, 1)); errors.Is(err, os.ErrDeadlineExceeded) {
		err = errNoByte
	}
	return took, client, err
}

// addrOf converts an address of TCP; any other is invalid.
func addrOf(a net.Addr) netip.AddrPort {
	if tcp, is := a.(*net.TCPAddr); is {
		own := tcp.AddrPort()
		return netip.AddrPortFrom(own.Addr().Unmap(), own.Port())
	}
	return netip.AddrPort{}
}

// errNoByte says that a client was connected, and waited for the first byte in vain.
var errNoByte = errors.New("no first byte")

// reason names a failure; empty if there is none.
func reason(err error) string {
	switch {
	case err == nil:
		return ""
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, unix.ETIMEDOUT):
		return "timed out"
	case errors.Is(err, unix.ECONNREFUSED):
		return "refused"
	case errors.Is(err, unix.ECONNRESET), errors.Is(err, io.EOF), errors.Is(err, unix.EPIPE):
		return "reset"
	case errors.Is(err, unix.EHOSTUNREACH), errors.Is(err, unix.ENETUNREACH):
		return "unreachable"
	}
	return err.Error()
}

// timelineStep is how long a time one point of a timeline covers.
const timelineStep = 500 * time.Millisecond

// judge writes down what the clients saw; times are of those that began at a time of the scene or later.
func (c *outageClients) judge(cell *results.Outage, from time.Duration) {
	cell.Reasons = map[string]int{}
	var times []float64
	for _, a := range c.attempts {
		if a.failed == "" {
			cell.Opened++
		} else {
			cell.Failed++
			cell.Reasons[a.failed]++
		}
		ms := float64(a.took.Microseconds()) / 1000
		if a.at >= from {
			times = append(times, ms)
		}
		i := int(a.at / timelineStep)
		for len(cell.Timeline) <= i {
			at := (time.Duration(len(cell.Timeline)) * timelineStep).Seconds()
			cell.Timeline = append(cell.Timeline, results.OutagePoint{At: at})
		}
		p := &cell.Timeline[i]
		p.Longest = max(p.Longest, ms)
		if a.failed != "" {
			p.Failed++
		}
	}
	if len(times) > 0 {
		cell.P50, cell.P99 = results.Percentile(times, 0.5), results.Percentile(times, 0.99)
		cell.Longest = results.Percentile(times, 1)
	}
}

// heldConn is a connection that sends a byte each second and waits for it to come back.
type heldConn struct {
	net.Conn
	done   chan struct{}
	failed time.Time // when the client was told; zero while it was not
	err    error
}

// hold opens so many connections and keeps them.
func (s *scene) hold(from *lab.Host, count int) error {
	for range count {
		c, err := from.DialContext(s.ctx, "tcp4", s.to.String())
		if err != nil {
			return err
		}
		h := &heldConn{Conn: c, done: make(chan struct{})}
		s.held = append(s.held, h)
		began := time.Now()
		go func() {
			if h.use(); !errors.Is(h.err, net.ErrClosed) {
				s.failed(blackbox.Failure{From: from.Name, Client: addrOf(c.LocalAddr()), Began: began, Held: true}, h.err)
			}
			close(h.done)
		}()
	}
	return nil
}

// heldPause is how often a held connection is used.
const heldPause = time.Second

// use talks until the connection fails or is closed.
func (h *heldConn) use() {
	buffer := make([]byte, 64)
	for next := time.Now().Add(rand.N(heldPause)); ; next = next.Add(heldPause) {
		_ = h.SetReadDeadline(next)
		for {
			_, err := h.Read(buffer)
			if errors.Is(err, os.ErrDeadlineExceeded) {
				break
			}
			if err != nil {
				h.failed, h.err = time.Now(), err
				return
			}
		}
		if _, err := h.Write([]byte{'.'}); err != nil {
			h.failed, h.err = time.Now(), err
			return
		}
	}
}

func (h *heldConn) close() error {
	_ = h.Conn.(*net.TCPConn).SetLinger(0)
	err := ignoreClosed(h.Conn.Close())
	<-h.done
	return err
}

// told waits until every held connection has failed, or a time of the scene has come, and says how long after a
// moment that was.
func (s *scene) told(since time.Time, until time.Duration) {
	held := &results.OutageHeld{Connections: len(s.held), Limit: s.began.Add(until).Sub(since).Seconds()}
	timer := time.NewTimer(time.Until(s.began.Add(until)))
	defer timer.Stop()
	over := false
	for _, h := range s.held {
		if !over {
			select {
			case <-h.done:
			case <-timer.C:
				over = true
			case <-s.ctx.Done():
				return
			}
		}
		select {
		case <-h.done:
			held.Told = append(held.Told, h.failed.Sub(since).Seconds())
		default:
		}
	}
	s.cell.Held = held
}
