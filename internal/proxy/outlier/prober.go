package outlier

import (
	"context"
	"net/netip"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/clock"
)

// A probe is a series of attempts to connect, each of which may get lost. It must end early enough that a client whose
// first packet was sent again after a second is saved before the next one, after two: evidence is up to readEvery old.
//
// Time is counted in ticks. One that comes late counts once, however late it is: a prober or an endpoint that is short
// of processor time has more time to send and to answer.
const (
	attempts = 16
	gently   = 3
	tick     = 20 * time.Millisecond
	// lastTicks is how long the last attempt has.
	lastTicks = 10
)

// TCP probes endpoints by TCP connections, on which it sends nothing, and which it resets; or by HTTP.
type TCP struct {
	// connect, if not nil, is used instead of connect.
	connect func(netip.AddrPort) attempt
}

// attempt is a connection that is being opened.
type attempt interface {
	// result asks the kernel what came of it. It never blocks. Until ended is true, the outcome means nothing.
	result() (o Outcome, ended bool)
	// close ends it, and leaves nothing behind.
	close()
}

// Probe connects to an endpoint up to 16 times within 0.3 s. It ends with the first connection, or after 0.5 s, or
// later if its timers are late. What has arrived by then counts. Gently, it connects three times.
// With a path, it asks for that instead, for 2 s.
func (p *TCP) Probe(ctx context.Context, endpoint netip.AddrPort, how Manner) Outcome {
	if how.Path != "" {
		return get(ctx, endpoint, how.Path)
	}
	most := attempts
	if how.Gently {
		most = gently
	}
	begin := p.connect
	if begin == nil {
		begin = connect
	}
	var open []attempt
	defer func() {
		for _, a := range open {
			a.close()
		}
	}()
	var seen [len(outcomeNames)]int
	for n := 0; ; n++ {
		left := open[:0]
		for _, a := range open {
			o, ended := a.result()
			if !ended {
				left = append(left, a)
				continue
			}
			a.close()
			seen[o]++
		}
		open = left
		switch {
		case seen[Accepted] > 0:
			return Accepted
		case n < most:
			open = append(open, begin(endpoint))
		case len(open) == 0 || n == attempts-1+lastTicks:
			seen[Silent] += len(open)
			return outcomeOf(seen)
		}
		if clock.Pause(ctx, tick); ctx.Err() != nil {
			return Failed
		}
	}
}

// outcomeOf sums up attempts of which none was accepted.
func outcomeOf(seen [len(outcomeNames)]int) Outcome {
	switch {
	case seen[Rejected] > 0:
		return Rejected
	case seen[Silent] > 0:
		return Silent
	}
	return Failed
}
