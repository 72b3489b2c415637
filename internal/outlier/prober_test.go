package outlier

import (
	"context"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

func TestMain(m *testing.M) { labtest.Main(m) }

// proberIn returns a Prober whose sockets are a host's.
func proberIn(h *lab.Host) *TCP {
	return &TCP{Dial: func(ctx context.Context, network, addr string) (conn net.Conn, err error) {
		derr := h.Do(func() error {
			conn, err = (&net.Dialer{KeepAlive: -1}).DialContext(ctx, network, addr)
			return nil
		})
		if derr != nil {
			return nil, derr
		}
		return conn, err
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
	p := proberIn(c.Node)
	for _, f := range lab.Families() {
		for _, test := range []struct {
			port  uint16
			times int
			want  Outcome
			least time.Duration
		}{{8080, 40, Accepted, 0}, {8081, 1, Silent, 350 * time.Millisecond}, {8082, 1, Silent, 0}, {8083, 1, Rejected, 0}} {
			for range test.times {
				start := time.Now()
				got := p.Probe(t.Context(), netip.AddrPortFrom(pod.IP(f), test.port))
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

// TestProbeEnds: a probe ends with its context, and says nothing of the endpoint then.
func TestProbeEnds(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	p := &TCP{Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	}}
	time.AfterFunc(50*time.Millisecond, cancel)
	start := time.Now()
	if o := p.Probe(ctx, endpoint(1)); o != Failed || time.Since(start) > 5*time.Second {
		t.Errorf("%v after %v", o, time.Since(start))
	}
}

// TestDialerTimeout: the dialer may run out of time a moment before the context says so.
func TestDialerTimeout(t *testing.T) {
	early := &TCP{Dial: func(context.Context, string, string) (net.Conn, error) {
		return nil, &net.OpError{Op: "dial", Net: "tcp", Err: os.ErrDeadlineExceeded}
	}}
	if o := early.Probe(t.Context(), netip.MustParseAddrPort("192.0.2.1:80")); o != Silent {
		t.Errorf("the endpoint is %v", o)
	}
}
