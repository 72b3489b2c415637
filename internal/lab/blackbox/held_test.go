package blackbox

import (
	"bufio"
	"fmt"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
)

// TestBeganBefore has connections that were held before the recorder began, those of the node itself among them, which
// no packet shows before they are translated. It finds in connection tracking where they lead.
func TestBeganBefore(t *testing.T) {
	for _, c := range []struct {
		name, cause string
		own         bool // the node is the client
		words       []string
		end         func(*rig, *echo)
	}{
		{"the server is silent", "server was silent", true, []string{":8080, which is ready"}, func(r *rig, s *echo) {
			r.watch()
			s.silent.Store(true)
		}},
		{"the server closes", "server closed", true, []string{":8080, which is ready"}, func(r *rig, s *echo) {
			r.watch()
			s.closes.Store(true)
		}},
		{"the question is lost", "lost on the way", true, []string{"the last question left node by link veth1"},
			func(r *rig, _ *echo) {
				r.watch(r.Node) // what the pod gets is not known
				r.rules(r.pod, chain("input", "tcp dport 8080 drop"))
			}},
		{"the answer is lost", "lost on the way", false, []string{"the answer came to node by link veth1", "dropped there"},
			func(r *rig, _ *echo) {
				r.watch()
				r.rules(r.Node, r.translate(r.pod), chain("forward", "tcp sport 8080 drop"))
			}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t)
			r.service(r.pod)
			s := r.echo()
			r.rules(r.Node, r.translate(r.pod))
			if c.own {
				r.client = r.Node
				r.rules(r.Node, fmt.Sprintf("chain own { type nat hook output priority -100; ip daddr %v tcp dport %d "+
					"dnat to %v:%d; }", r.vip.Addr(), servicePort, r.pod.IP4, podPort))
			}
			f := r.hold(func() { c.end(r, s) })
			f.Began = f.Began.Add(-time.Hour)
			r.expect(f, c.cause, c.words...)
		})
	}
}

// TestBlindBefore has a connection whose first packets were sent before the recorder began: the server, which it has
// not seen, is not blamed.
func TestBlindBefore(t *testing.T) {
	r := newRig(t)
	r.service(r.pod)
	s := r.echo()
	s.silent.Store(true)
	r.rules(r.Node, r.translate(r.pod))
	began := time.Now()
	conn, err := r.client.DialContext(t.Context(), "tcp4", r.vip.String())
	labtest.Check(t, err)
	defer conn.Close()
	time.Sleep(2 * slack)
	r.watch()
	labtest.Check(t, conn.SetDeadline(time.Now().Add(short)))
	_, err = conn.Read(make([]byte, 1))
	client, _ := conn.LocalAddr().(*net.TCPAddr)
	r.expect(Failure{From: "outside", Client: client.AddrPort(), Server: r.vip, Began: began, Failed: time.Now(),
		Err: err.Error()}, Unexplained, "it began before the recorder: in outside packets are recorded since")
}

// TestLeft: of many failures whose clients were told the same, some are examined and the others counted; rare ones are
// examined, however many others came before.
func TestLeft(t *testing.T) {
	box := New(Config{})
	defer func() { labtest.Check(t, box.Close()) }()
	for i := range maxFailures + 100 {
		box.Failed(Failure{Err: fmt.Sprintf("dial tcp 10.96.0.80:%d: connect: connection refused", i)})
	}
	for i := range maxRare + 3 {
		box.Failed(Failure{Err: fmt.Sprintf("dial tcp 10.96.0.80:%d: connect: no route to host", i)})
	}
	for i := range 2 * maxTold {
		box.Failed(Failure{Err: fmt.Sprintf("error %d", i)})
	}
	box.Left("not kept by the client", 7)
	all, left := box.Explanations()
	seen := map[string]int{}
	for i := range all {
		_, told, _ := strings.Cut(all[i].Err, "connect: ")
		seen[told]++
	}
	if seen["connection refused"] != maxFailures || seen["no route to host"] != maxRare {
		t.Errorf("examined are %v", seen)
	}
	if left["connection refused"] != 100 || left["no route to host"] != 3 || left["not kept by the client"] != 7 ||
		len(left) > maxTold+2 {
		t.Errorf("left are %v", left)
	}
	if _, left = box.Explanations(); len(left) != 0 {
		t.Errorf("left are %v the second time", left)
	}
}

// echo is a server that may fall silent, or close connections, while they are open.
type echo struct{ silent, closes atomic.Bool }

// echo serves the pod's port until the test ends.
func (r *rig) echo() *echo {
	r.t.Helper()
	s := &echo{}
	l, err := r.pod.Listen("tcp4", fmt.Sprintf(":%d", podPort))
	labtest.Check(r.t, err)
	r.t.Cleanup(func() { labtest.Check(r.t, l.Close()) })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go s.answer(r.pod.Name, c)
		}
	}()
	return s
}

// answer greets as servers of the lab do, and sends back what comes.
func (s *echo) answer(name string, c net.Conn) {
	defer c.Close()
	if s.silent.Load() {
		_, _ = bufio.NewReader(c).ReadByte() // until the client is gone
		return
	}
	fmt.Fprintf(c, "%s %v %v\n", name, c.RemoteAddr(), c.LocalAddr())
	for lines := bufio.NewReader(c); !s.closes.Load(); {
		line, err := lines.ReadString('\n')
		if err != nil {
			return
		}
		if !s.silent.Load() {
			fmt.Fprint(c, line)
		}
	}
}
