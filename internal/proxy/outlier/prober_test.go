package outlier

import (
	"context"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

func TestMain(m *testing.M) { labtest.Main(m) }

// proberIn returns a Prober whose sockets are a host's.
func proberIn(t *testing.T, h *lab.Host) *TCP {
	return &TCP{connect: func(to netip.AddrPort) (a attempt) {
		labtest.Check(t, h.Do(func() error {
			a = connect(to)
			return nil
		}))
		return a
	}}
}

const lossy = `table inet filter { chain input { type filter hook input priority 0
	tcp dport 8080 numgen random mod 100 < 20 drop
	tcp dport 8081 drop
	tcp dport 8082 reject with icmpx type host-unreachable
}
chain output { type filter hook output priority 0
	tcp sport 8080 numgen random mod 100 < 20 drop
}
}`

// TestProbe probes real endpoints, and leaves no connection behind.
func TestProbe(t *testing.T) {
	c := labtest.NewCluster(t, lab.Config{LocalPods: 1})
	pod := c.Pods[0]
	_, err := pod.Serve(snapshot.TCP, 8080)
	labtest.Check(t, err)
	labtest.Run(t, pod, lossy, "nft", "-f", "-")
	p := proberIn(t, c.Node)
	for _, f := range lab.Families() {
		for _, test := range []struct {
			port  uint16
			times int
			want  Outcome
			least time.Duration
		}{{8080, 40, Accepted, 0}, {8081, 1, Silent, 450 * time.Millisecond}, {8082, 1, Silent, 0}, {8083, 1, Rejected, 0}} {
			for range test.times {
				start := time.Now()
				got := p.Probe(t.Context(), netip.AddrPortFrom(pod.IP(f), test.port), Manner{})
				if took := time.Since(start); got != test.want || took < test.least || took > 10*time.Second {
					t.Errorf("%v port %d: %v after %v, want %v", f, test.port, got, took, test.want)
				}
			}
		}
	}
	if left := labtest.Run(t, c.Node, "", "cat", "/proc/net/tcp"); len(left) > 200 {
		t.Errorf("connections are left:\n%s", left)
	}
}

// wire is a network with an endpoint that answers after delay, and a prober that is short of processor time.
type wire struct {
	// late is how much time passes before an attempt is sent, in addition to a tick.
	late  func(attempt int) time.Duration
	delay time.Duration
	// lost says which attempts get lost.
	lost        func(attempt int) bool
	begun, open int
}

// syn is an attempt on a wire.
type syn struct {
	w    *wire
	sent time.Time
	lost bool
}

func (w *wire) connect(netip.AddrPort) attempt {
	time.Sleep(w.late(w.begun))
	s := &syn{w, time.Now(), w.lost(w.begun)}
	w.begun++
	w.open++
	return s
}

func (s *syn) result() (Outcome, bool) { return Accepted, !s.lost && time.Since(s.sent) >= s.w.delay }
func (s *syn) close()                  { s.w.open-- }

// TestLateProbe: an endpoint that answers is not silent because the prober, or the endpoint, is short of processor
// time. One that is dead is found within 0.5 s if the prober is on time.
func TestLateProbe(t *testing.T) {
	onTime := func(int) time.Duration { return 0 }
	always := func(late time.Duration) func(int) time.Duration { return func(int) time.Duration { return late } }
	once := func(at int, late time.Duration) func(int) time.Duration {
		return func(n int) time.Duration {
			if n == at {
				return late
			}
			return 0
		}
	}
	none, all := func(int) bool { return false }, func(int) bool { return true }
	allBut := func(last int) func(int) bool { return func(n int) bool { return n != last } }
	const ms, s = time.Millisecond, time.Second
	for name, c := range map[string]struct {
		wire wire
		want Outcome
		most time.Duration
	}{
		"on time, answers late":          {wire{late: onTime, delay: 490 * ms, lost: none}, Accepted, 500 * ms},
		"on time, the last one arrives":  {wire{late: onTime, delay: 190 * ms, lost: allBut(15)}, Accepted, 500 * ms},
		"on time, dead":                  {wire{late: onTime, lost: all}, Silent, 500 * ms},
		"always late, answers late":      {wire{late: always(50 * ms), delay: s, lost: none}, Accepted, 2 * s},
		"always late, one arrives":       {wire{late: always(50 * ms), lost: allBut(12)}, Accepted, 2 * s},
		"always late, dead":              {wire{late: always(50 * ms), lost: all}, Silent, 2 * s},
		"stopped after the first, lossy": {wire{late: once(1, 5*s), lost: allBut(1)}, Accepted, 6 * s},
		"stopped before the last, lossy": {wire{late: once(15, s), delay: 150 * ms, lost: allBut(15)},
			Accepted, 2 * s},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				start := time.Now()
				o := (&TCP{connect: c.wire.connect}).Probe(t.Context(), endpoint(1), Manner{})
				if took := time.Since(start); o != c.want || took > c.most || c.wire.open != 0 {
					t.Errorf("%v after %v, %d attempts are open; want %v within %v", o, took, c.wire.open, c.want, c.most)
				}
			})
		})
	}
}

// TestProbeEnds: a probe ends with its context, and says nothing of the endpoint then.
func TestProbeEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		w := &wire{late: func(int) time.Duration { return 0 }, lost: func(int) bool { return true }}
		start := time.Now()
		o := (&TCP{connect: w.connect}).Probe(ctx, endpoint(1), Manner{})
		if o != Failed || time.Since(start) > 3*tick || w.open != 0 {
			t.Errorf("%v after %v, %d attempts are open", o, time.Since(start), w.open)
		}
	})
}
