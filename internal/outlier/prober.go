package outlier

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"
)

// A probe is a series of attempts to connect, each of which may get lost. It must end early enough that a client whose
// first packet was sent again after a second is saved before the next one, after two: evidence is up to readEvery old.
const (
	attempts     = 16
	attemptEvery = 15 * time.Millisecond
	// lastWait is how long the last attempt has.
	lastWait = 150 * time.Millisecond
)

// TCP probes endpoints by TCP connections, on which it sends nothing, and which it resets.
type TCP struct {
	// Dial, if not nil, is used instead of a net.Dialer.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)
}

// Probe connects to an endpoint up to 16 times within 0.25 s. It ends with the first connection, or after 0.4 s.
func (p *TCP) Probe(ctx context.Context, endpoint netip.AddrPort) Outcome {
	ctx, cancel := context.WithTimeout(ctx, (attempts-1)*attemptEvery+lastWait)
	results := make(chan Outcome, attempts)
	var all sync.WaitGroup
	defer all.Wait()
	defer cancel()
	tick := time.NewTicker(attemptEvery)
	defer tick.Stop()
	var seen [len(outcomeNames)]int
	begin := func() { all.Go(func() { results <- p.attempt(ctx, endpoint) }) }
	begin()
	for begun, ended := 1, 0; ended < attempts; {
		next := tick.C
		if begun == attempts {
			next = nil
		}
		select {
		case <-next:
			begun++
			begin()
		case o := <-results:
			if o == Accepted {
				return Accepted
			}
			seen[o]++
			ended++
		}
	}
	switch {
	case seen[Rejected] > 0:
		return Rejected
	case seen[Silent] > 0:
		return Silent
	}
	return Failed
}

// attempt tries to connect once.
func (p *TCP) attempt(ctx context.Context, endpoint netip.AddrPort) Outcome {
	dial := p.Dial
	if dial == nil {
		dial = (&net.Dialer{KeepAlive: -1}).DialContext
	}
	conn, err := dial(ctx, "tcp", endpoint.String())
	if err == nil {
		if tcp, ok := conn.(*net.TCPConn); ok {
			_ = tcp.SetLinger(0) // reset it, which leaves nothing behind on either side
		}
		_ = conn.Close()
		return Accepted
	}
	var timeout net.Error
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return Rejected
	case errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH), errors.Is(err, syscall.ETIMEDOUT):
		return Silent
	case errors.As(err, &timeout) && timeout.Timeout(): // of the dialer, whose timer may run before that of ctx
		return Silent
	}
	return Failed
}
