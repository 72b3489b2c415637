package everywhere

import (
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/proxy/status"
)

// TestStream: messages come as they were sent, whatever their length, up to a bound.
func TestStream(t *testing.T) {
	a, b := net.Pipe()
	defer b.Close()
	goal := status.Goal{Service: cart, Digest: 1<<64 - 1, Versions: status.Versions{Services: "1", EndpointSlices: "2"}}
	sent := []FromNode{{Have: []uint64{1, 1 << 63}}, {Hello: &Hello{1, strings.Repeat("t", 8000)}},
		{Wait: &Wait{7, "shop/cart", 10}}}
	go func() {
		s := NewStream(a)
		for _, m := range sent {
			_ = s.Send(m, time.Minute)
		}
		_ = s.Send(FromCollector{Ask: AskOf(5, goal)}, time.Minute)
		_ = s.SendLine([]byte(strings.Repeat("x", maxLine+1000)), time.Minute)
	}()
	s := NewStream(b)
	for i := range sent {
		var got FromNode
		if err := s.Receive(&got, time.Time{}); err != nil {
			t.Fatal(err)
		}
		switch i {
		case 0:
			if got.Have[1] != 1<<63 {
				t.Error(got)
			}
		case 1:
			if len(got.Hello.Token) != 8000 {
				t.Error(len(got.Hello.Token))
			}
		case 2:
			if *got.Wait != *sent[2].Wait {
				t.Error(got.Wait)
			}
		}
	}
	var asked FromCollector
	if err := s.Receive(&asked, time.Time{}); err != nil {
		t.Fatal(err)
	}
	if g, err := asked.Ask.goal(); err != nil || g != goal || asked.Ask.ID != 5 {
		t.Errorf("%+v %v", g, err)
	}
	if err := s.Receive(&asked, time.Time{}); !errors.Is(err, errLong) {
		t.Errorf("a line without end: %v", err)
	}
}

// TestStreamTimes: a peer that does not read loses the connection, and one that sends nothing can be waited for.
func TestStreamTimes(t *testing.T) {
	a, b := net.Pipe()
	s := NewStream(a)
	if err := s.Send(FromNode{Cancel: 1}, 10*time.Millisecond); err == nil {
		t.Error("nobody reads")
	}
	if _, err := b.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("the connection is open: %v", err)
	}
	c, d := net.Pipe()
	defer d.Close()
	var none FromCollector
	if err := NewStream(c).Receive(&none, time.Now().Add(10*time.Millisecond)); err == nil {
		t.Error("nobody sends")
	}
}
