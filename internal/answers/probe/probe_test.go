package probe

import (
	"context"
	"net"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
)

func TestMain(m *testing.M) { labtest.Main(m) }

// TestProbe: a server answers with its name over both protocols and families; a client says who answers, who refuses,
// and who is silent.
func TestProbe(t *testing.T) {
	h := labtest.NewHost(t, labtest.NewNet(t), "pod")
	ctx, stop := context.WithCancel(t.Context())
	const port = 8080
	labtest.Check(t, h.Do(func() error { // the sockets of goroutines that begin here are in it as well
		ended := make(chan error, 1)
		go func() { ended <- h.Do(func() error { return Serve(ctx, "one", port) }) }()
		t.Cleanup(func() {
			stop()
			if err := <-ended; err != nil {
				t.Error(err)
			}
		})
		return nil
	}))
	silent := func() net.PacketConn {
		var u net.PacketConn
		labtest.Check(t, h.Do(func() (err error) {
			u, err = net.ListenPacket("udp", "127.0.0.1:9")
			return err
		}))
		return u
	}()
	defer silent.Close()
	ask := func(timeout time.Duration, dials ...Dial) (answers []Answer) {
		for _, d := range dials { // one at a time: a socket is in the namespace of its thread
			labtest.Check(t, h.Do(func() error {
				a := Answer{}
				name, err := once(t.Context(), &d, timeout)
				if err == nil {
					a.Names = []string{name}
				} else if a.Errors = []string{plain(err, timeout)}; refused(err) {
					a.Refused = 1
				}
				answers = append(answers, a)
				return nil
			}))
		}
		return answers
	}
	own := func(host string) string { return net.JoinHostPort(host, strconv.Itoa(port)) }
	testkit.Eventually(t, time.Minute, "it serves", func() bool {
		return len(ask(time.Minute, Dial{Network: "tcp", Address: own("127.0.0.1")})[0].Names) == 1
	})
	for _, d := range []Dial{{"tcp", own("::1"), 1}, {"udp", own("127.0.0.1"), 1}, {"udp", own("::1"), 1}} {
		if a := ask(time.Minute, d)[0]; !slices.Equal(a.Names, []string{"one"}) {
			t.Errorf("%v: %+v", d, a)
		}
	}
	labtest.Run(t, h, "table inet t { chain c { type filter hook output priority 0; udp dport 10 reject; }; }",
		"nft", "-f", "-")
	for d, want := range map[Dial]string{{"tcp", "127.0.0.1:1", 1}: "refused", {"udp", "127.0.0.1:1", 1}: "refused",
		{"udp", "127.0.0.1:10", 1}: "not permitted", {"udp", "127.0.0.1:9", 1}: "no answer within 10ms"} {
		timeout, silent := time.Minute, strings.HasPrefix(want, "no answer")
		if silent {
			timeout = 10 * time.Millisecond
		}
		a := ask(timeout, d)[0]
		if len(a.Errors) != 1 || !strings.Contains(a.Errors[0], want) || silent == (a.Refused == 1) {
			t.Errorf("%v: %+v; want %q", d, a, want)
		}
	}
}

// TestAll: answers come in the order of what was dialed, as often as asked for.
func TestAll(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	labtest.Check(t, err)
	closed := l.Addr().String()
	labtest.Check(t, l.Close())
	dials := slices.Repeat([]Dial{{Network: "tcp", Address: closed, Times: 3}}, parallel+1)
	answers := All(t.Context(), dials, time.Minute)
	for _, a := range answers {
		if len(answers) != parallel+1 || len(a.Errors) != 3 || a.Refused != 3 {
			t.Fatalf("%+v", answers)
		}
	}
}
