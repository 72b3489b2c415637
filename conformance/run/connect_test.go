package run

import (
	"errors"
	"net/netip"
	"testing"

	"github.com/verdict-proxy/verdict/conformance/cases"
	"github.com/verdict-proxy/verdict/internal/lab"
)

func TestEnded(t *testing.T) {
	a1, a2 := lab.Result{Outcome: lab.Answered, Endpoint: "a1"}, lab.Result{Outcome: lab.Answered, Endpoint: "a2"}
	refused, silent := lab.Result{Outcome: lab.Refused}, lab.Result{Outcome: lab.TimedOut}
	both := cases.Want{Outcome: cases.Answered, Endpoints: []string{"a2", "a1"}}
	for _, c := range []struct {
		name    string
		want    cases.Want
		results []lab.Result
		ok      bool
	}{
		{"both answer", both, []lab.Result{a1, a2, a1}, true},
		{"one does not answer", both, []lab.Result{a1, a1}, false},
		{"somebody else answers", cases.Want{Endpoints: []string{"a1"}, Outcome: cases.Answered}, []lab.Result{a1, a2},
			false},
		{"anybody may answer", cases.Want{Outcome: cases.Answered}, []lab.Result{a1, a2}, true},
		{"one is refused", both, []lab.Result{a1, a2, refused}, false},
		{"one waits in vain", both, []lab.Result{a1, a2, silent}, false},
		{"refused, others answered", cases.Want{Outcome: cases.Refused}, []lab.Result{a1, refused}, true},
		{"refused, and silence", cases.Want{Outcome: cases.Refused}, []lab.Result{silent, refused}, false},
		{"nobody is refused", cases.Want{Outcome: cases.Refused}, []lab.Result{a1}, false},
		{"dropped", cases.Want{Outcome: cases.Dropped}, []lab.Result{a1, silent}, true},
		{"dropped, and refused", cases.Want{Outcome: cases.Dropped}, []lab.Result{refused, silent}, false},
		{"unanswered", cases.Want{Outcome: cases.Unanswered}, []lab.Result{refused, a1}, true},
		{"an error", cases.Want{Outcome: cases.Answered}, []lab.Result{a1, {Err: errors.New("no socket")}}, false},
	} {
		s := newSeen()
		for _, r := range c.results {
			s.note(r)
		}
		if got := s.ended(c.want); got != c.ok {
			t.Errorf("%s: %v", c.name, got)
		}
	}
}

func TestResets(t *testing.T) {
	peer, own := netip.MustParseAddrPort("10.96.0.1:80"), netip.MustParseAddrPort("10.244.1.9:4000")
	segment := ackSegment(peer, own)
	header := make([]byte, 24)
	header[0] = 4<<4 | 6 // with options
	packet := append(header, segment...)
	if resets(packet, peer, own.Port()) {
		t.Error("an acknowledgement is a reset")
	}
	packet[24+13] = 4 | 16
	if !resets(packet, peer, own.Port()) || resets(packet, peer, 4001) || resets(packet, own, own.Port()) {
		t.Error("a reset, and one of another connection")
	}
	segment[13] = 4
	if peer := netip.MustParseAddrPort("[fd00::1]:80"); !resets(segment, peer, own.Port()) {
		t.Error("a reset by IPv6")
	}
	for n := range packet {
		if n < 24+14 && resets(packet[:n], peer, own.Port()) {
			t.Errorf("%d bytes are a reset", n)
		}
	}
}
