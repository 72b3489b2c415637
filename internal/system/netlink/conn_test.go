package netlink_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/netlink"
)

// script is a wire whose kernel answers what it is told to.
type script struct {
	// sendErrs and recvErrs are the results of the next calls; after a nil the call does what it should.
	sendErrs, recvErrs []error
	// answers are the datagrams that are in the socket; after a request come those of replies.
	answers [][]byte
	replies [][][]byte
	sent    [][]byte
	room    int
	closed  bool
}

func take(errs *[]error) error {
	if len(*errs) == 0 {
		return nil
	}
	err := (*errs)[0]
	*errs = (*errs)[1:]
	return err
}

func (s *script) Send(b []byte) error {
	if err := take(&s.sendErrs); err != nil {
		return err
	}
	s.sent = append(s.sent, slices.Clone(b))
	if len(s.replies) > 0 {
		s.answers, s.replies = append(s.answers, s.replies[0]...), s.replies[1:]
	}
	return nil
}

func (s *script) Recv(b []byte, wait bool) (int, error) {
	if err := take(&s.recvErrs); err != nil {
		return 0, err
	}
	if len(s.answers) == 0 {
		return 0, unix.EAGAIN
	}
	a := s.answers[0]
	s.answers = s.answers[1:]
	copy(b, a)
	return len(a), nil
}

func (s *script) Room(n int) (int, error) {
	if s.room > 0 {
		return s.room, nil
	}
	return n, nil
}

func (s *script) Port() (uint32, error) { return 1, nil }
func (s *script) Close() error          { s.closed = true; return nil }

func message(typ, flags uint16, body ...byte) []byte {
	b := binary.NativeEndian.AppendUint32(nil, uint32(netlink.HeaderLen+len(body)))
	b = binary.NativeEndian.AppendUint16(b, typ)
	b = binary.NativeEndian.AppendUint16(b, flags)
	b = append(b, make([]byte, 8)...)
	b = append(b, body...)
	return append(b, make([]byte, -len(b)&3)...)
}

// refusal answers message seq with an error number, and attributes after the header of what is refused.
func refusal(seq uint32, errno int32, flags uint16, attrs []byte) []byte {
	body := binary.NativeEndian.AppendUint32(nil, uint32(errno))
	refused := make([]byte, netlink.HeaderLen)
	binary.NativeEndian.PutUint32(refused, netlink.HeaderLen)
	binary.NativeEndian.PutUint32(refused[8:], seq)
	return message(unix.NLMSG_ERROR, flags, append(append(body, refused...), attrs...)...)
}

var (
	done = message(unix.NLMSG_DONE, 0, 0, 0, 0, 0)
	ack  = refusal(1, 0, 0, nil)
)

const object = 100

func request(flags uint16) []byte {
	var w netlink.Buffer
	w.End(w.Message(object, flags))
	return w.Bytes()
}

// collect gives what a Dump sees in the end.
func collect(c *netlink.Conn) (bodies string, err error) {
	err = c.Dump(request(unix.NLM_F_DUMP), func() { bodies = "" }, func(b []byte) { bodies += string(b[:1]) })
	return bodies, err
}

// TestDump: a list comes in several datagrams, and starts over if it was interrupted, in whichever way the kernel
// says so, or if an object was larger than the buffer.
func TestDump(t *testing.T) {
	const torn = unix.NLM_F_DUMP_INTR
	a, b := message(object, 0, 'a'), message(object, 0, 'b')
	whole := [][]byte{append(slices.Clone(a), b...), done}
	large := message(object, 0, append([]byte{'c'}, make([]byte, 600<<10)...)...)
	for name, c := range map[string]struct {
		replies [][][]byte
		want    string
		err     error
	}{
		"whole":       {replies: [][][]byte{whole}, want: "ab"},
		"empty":       {replies: [][][]byte{{done}}},
		"flagged":     {replies: [][][]byte{{message(object, torn, 'x'), done}, whole}, want: "ab"},
		"at its end":  {replies: [][][]byte{{a, message(unix.NLMSG_DONE, torn, 0, 0, 0, 0)}, whole}, want: "ab"},
		"by an error": {replies: [][][]byte{{a, refusal(1, -int32(unix.EINTR), 0, nil)}, whole}, want: "ab"},
		"too large":   {replies: [][][]byte{{large, done}, {large, done}}, want: "c"},
		"for ever": {
			replies: slices.Repeat([][][]byte{{message(object, torn, 'x'), done}}, 20),
			want:    "x", err: unix.EINTR,
		},
		"refused": {replies: [][][]byte{{refusal(1, -int32(unix.ENOENT), 0, nil)}}, err: unix.ENOENT},
		"ends badly": {
			replies: [][][]byte{{a, message(unix.NLMSG_DONE, 0, 0xf4, 0xff, 0xff, 0xff)}},
			want:    "a", err: unix.ENOMEM,
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := &script{replies: c.replies, sendErrs: []error{unix.EINTR}, recvErrs: []error{unix.EINTR, nil, unix.EINTR}}
			got, err := collect(netlink.New(s, false))
			if got != c.want || !errors.Is(err, c.err) || (err != nil) != (c.err != nil) {
				t.Errorf("got %q, %v", got, err)
			}
			if len(s.sent) > 10 {
				t.Errorf("asked %d times", len(s.sent))
			}
		})
	}
}

// TestGet: a request that is no dump is made to be acknowledged, and the acknowledgement ends its answer.
func TestGet(t *testing.T) {
	s := &script{replies: [][][]byte{{message(object, 0, 'a'), ack}, {ack}, {refusal(1, -int32(unix.EPERM), 0, nil)}}}
	c := netlink.New(s, false)
	for _, want := range []struct {
		body string
		err  error
	}{{"a", nil}, {"", nil}, {"", unix.EPERM}} {
		body, err := c.Get(request(0))
		if string(body[:min(1, len(body))]) != want.body || !errors.Is(err, want.err) {
			t.Errorf("got %q, %v, not %v", body, err, want)
		}
	}
	for _, b := range s.sent {
		if flags := binary.NativeEndian.Uint16(b[6:]); flags != unix.NLM_F_REQUEST|unix.NLM_F_ACK {
			t.Errorf("sent with flags %x", flags)
		}
	}
}

// TestStale: what a failed or abandoned request left in the socket is no answer to the next.
func TestStale(t *testing.T) {
	old, good := message(object, 0, 'o'), [][]byte{message(object, 0, 'g'), done}
	t.Run("after an error", func(t *testing.T) {
		s := &script{replies: [][][]byte{{old, done}, good}, recvErrs: []error{unix.ENOBUFS}}
		c := netlink.New(s, false)
		if _, err := collect(c); !errors.Is(err, unix.ENOBUFS) {
			t.Errorf("got %v", err)
		}
		if got, err := collect(c); got != "g" || err != nil {
			t.Errorf("got %q, %v", got, err)
		}
	})
	t.Run("after a list that nobody read to its end", func(t *testing.T) {
		s := &script{replies: [][][]byte{{old, done}, good}}
		c := netlink.New(s, false)
		if err := c.Ask(request(unix.NLM_F_DUMP)); err != nil {
			t.Fatal(err)
		}
		if d, err := c.Next(func([]byte) {}); d || err != nil {
			t.Errorf("got %v, %v", d, err)
		}
		if got, err := collect(c); got != "g" || err != nil {
			t.Errorf("got %q, %v", got, err)
		}
	})
	t.Run("before the first", func(t *testing.T) {
		s := &script{answers: [][]byte{old, done}, recvErrs: []error{unix.ENOBUFS}, replies: [][][]byte{good}}
		if got, err := collect(netlink.New(s, true)); got != "g" || err != nil {
			t.Errorf("got %q, %v", got, err)
		}
	})
	t.Run("of no use", func(t *testing.T) {
		s := &script{recvErrs: []error{unix.EBADF}}
		if err := netlink.New(s, true).Fresh(); !errors.Is(err, unix.EBADF) || len(s.sent) > 0 {
			t.Errorf("got %v", err)
		}
	})
}

// TestCommit: all refusals are read, each with its message, place and text; acknowledgements are none.
func TestCommit(t *testing.T) {
	var attrs netlink.Buffer
	attrs.Text(unix.NLMSGERR_ATTR_MSG, "no such chain")
	attrs.Native32(unix.NLMSGERR_ATTR_OFFS, 40)
	both := append(refusal(2, -int32(unix.ENOENT), unix.NLM_F_CAPPED, attrs.Bytes()), ack...)
	s := &script{replies: [][][]byte{{both, refusal(5, -int32(unix.EEXIST), 0, nil)}}, sendErrs: []error{unix.EINTR}}
	refused, err := netlink.New(s, false).Commit(request(0))
	want := []netlink.Error{
		{Errno: unix.ENOENT, Seq: 2, Offset: 40, Text: "no such chain"},
		{Errno: unix.EEXIST, Seq: 5},
	}
	if !slices.Equal(refused, want) || err != nil {
		t.Errorf("got %+v, %v", refused, err)
	}
	if e := error(&refused[0]); !errors.Is(e, unix.ENOENT) || e.Error() != "no such chain: no such file or directory" {
		t.Errorf("got %v", e)
	}
}

// TestCommitUncapped: a kernel that does not cap its answers repeats the refused message before the attributes, whose
// length is the kernel's to say and may be wrong.
func TestCommitUncapped(t *testing.T) {
	var attrs netlink.Buffer
	attrs.Native32(unix.NLMSGERR_ATTR_OFFS, 24)
	for length, offset := range map[uint32]int{16: 0, 24: 24, 23: 24, 1 << 31: 0, 0: 0} {
		b := refusal(1, -int32(unix.EINVAL), 0, append(bytes.Repeat([]byte{0xff}, 8), attrs.Bytes()...))
		binary.NativeEndian.PutUint32(b[netlink.HeaderLen+4:], length)
		refused, err := netlink.New(&script{replies: [][][]byte{{b}}}, false).Commit(request(0))
		if len(refused) != 1 || refused[0].Offset != offset || err != nil {
			t.Errorf("length %d: %+v, %v", length, refused, err)
		}
	}
}

// TestCommitLosesAnswers: if the socket had no room for all refusals, those that it had are read, and the next
// request is not mistaken.
func TestCommitLosesAnswers(t *testing.T) {
	s := &script{
		replies:  [][][]byte{{refusal(1, -1, 0, nil), refusal(2, -1, 0, nil)}, nil},
		recvErrs: []error{nil, unix.ENOBUFS},
	}
	c := netlink.New(s, false)
	if refused, err := c.Commit(request(0)); len(refused) != 2 || !errors.Is(err, unix.ENOBUFS) {
		t.Errorf("got %+v, %v", refused, err)
	}
	if refused, err := c.Commit(request(0)); len(refused) != 0 || err != nil {
		t.Errorf("got %+v, %v", refused, err)
	}
}

// TestTooLarge: what does not fit into one datagram is not sent, or the kernel refuses it as a whole.
func TestTooLarge(t *testing.T) {
	var large *netlink.TooLarge
	s := &script{room: netlink.SendMargin}
	if _, err := netlink.New(s, false).Commit(make([]byte, 1<<20)); !errors.As(err, &large) || large.Size != 1<<20 ||
		large.Room != netlink.SendMargin || len(s.sent) > 0 {
		t.Errorf("got %v, sent %d", err, len(s.sent))
	}
	s = &script{sendErrs: []error{unix.EMSGSIZE}}
	if _, err := netlink.New(s, false).Commit(request(0)); !errors.As(err, &large) || !errors.Is(err, unix.EMSGSIZE) {
		t.Errorf("got %v", err)
	}
}
