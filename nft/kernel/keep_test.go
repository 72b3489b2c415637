package kernel

import (
	"context"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestClientAddressListed: nft lists what the backend writes at the ingress as render prints it, and a backend that
// comes later adopts it, finds nothing, repairs what others change, and removes it.
func TestClientAddressListed(t *testing.T) {
	s := newSegment(t)
	s.learn(s.service(nil, 1, 2))
	a := s.nodes[0]
	if got, want := held(t, a.backend), wanted(a.planner.State()); got != want {
		t.Fatalf("%s", labtest.FirstDifference(got, want))
	}
	quiet(t, a.backend)
	for _, n := range labtest.Nfts(t) {
		for table, f := range map[string]ipfamily.Family{"verdict": ipfamily.IPv4, "verdict6": ipfamily.IPv6} {
			listed := labtest.Run(t, a.Host, "", n.Path, "list", "table", "netdev", table)
			var text strings.Builder
			l := nft.List(a.planner.State())[f]
			labtest.Check(t, l.Print(&text))
			for _, c := range nft.IngressChains("eth0") {
				for _, r := range c.Rules {
					if !strings.Contains(text.String(), r.Text(f)) || !strings.Contains(plainList(listed), plainList(r.Text(f))) {
						t.Errorf("%s does not list: %s\n%s", n.Path, r.Text(f), listed)
					}
				}
			}
		}
	}
	for _, n := range labtest.Nfts(t) { // what it lists, it loads, and then lists the same
		listed := labtest.Run(t, a.Host, "", n.Path, "list", "table", "netdev", "verdict6")
		labtest.Run(t, s.Outside, listed, n.Path, "-f", "-")
		got := labtest.Run(t, s.Outside, "", n.Path, "list", "table", "netdev", "verdict6")
		if plainFlows(got) != plainFlows(listed) {
			t.Errorf("%s: %s", n.Path, labtest.FirstDifference(got, listed))
		}
		labtest.Run(t, s.Outside, "", n.Path, "flush", "ruleset")
	}
	labtest.Check(t, a.backend.Close())
	a.backend = open(t, a.Host, Options{})
	if r := a.apply(t, snapshot.Delta{}); !r.Adopted || r.Bytes != 0 {
		t.Errorf("not adopted: %+v", r)
	}
	quiet(t, a.backend)
	labtest.Run(t, a.Host, "", "nft", "flush", "map", "netdev", "verdict", "kept-slots")
	if found := check(t, a.backend); len(found) == 0 {
		t.Error("nobody sees that the slots are gone")
	}
	a.apply(t, snapshot.Delta{})
	quiet(t, a.backend)
	s.dial(snapshot.TCP, ipfamily.IPv4, 20, true)
	a.apply(t, snapshot.Delta{Link: &snapshot.Link{}})
	if out := labtest.Run(t, a.Host, "", "nft", "list", "tables", "netdev"); out != "" {
		t.Errorf("without a device there is %s", out)
	}
	s.dial(snapshot.TCP, ipfamily.IPv4, 20, false)
	a.apply(t, snapshot.Delta{Link: s.link(a)})
	s.dial(snapshot.TCP, ipfamily.IPv4, 20, true)
	labtest.Check(t, a.backend.Remove())
	if out := labtest.Run(t, a.Host, "", "nft", "list", "tables"); out != "" {
		t.Errorf("there remains %s", out)
	}
}

// plainFlows takes out what rules have added.
func plainFlows(s string) string {
	return regexp.MustCompile(`expires [0-9a-z]+`).ReplaceAllString(s, "")
}

// plainList takes out what versions of nft write in different ways.
func plainList(s string) string {
	return strings.NewReplacer("8192 != 0", "0x2000 != 0x0", "8191 != 0", "0x1fff != 0x0",
		"tcp flags syn / syn,ack", "tcp flags & (syn | ack) == syn").Replace(s)
}

// TestClientAddressFragments: datagrams in fragments arrive, and so do ICMP errors about what a pod has sent.
func TestClientAddressFragments(t *testing.T) {
	s := newSegment(t)
	s.learn(s.service(nil, 1, 2))
	for _, f := range ipfamily.All {
		for range 20 {
			s.datagram(f, 4096)
		}
		s.tooBig(f)
	}
	s.tracksNone(0)
}

// datagram sends a long one, and expects it back.
func (s *segment) datagram(f ipfamily.Family, size int) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	c, err := s.Outside.DialContext(ctx, "udp", s.web(f).String())
	labtest.Check(s.t, err)
	defer c.Close()
	labtest.Check(s.t, c.SetDeadline(time.Now().Add(2*time.Second)))
	sent := strings.Repeat("x", size)
	_, err = c.Write([]byte(sent))
	labtest.Check(s.t, err)
	got := make([]byte, 1<<16)
	n, err := c.Read(got)
	if err != nil {
		s.t.Fatalf("%s: %d bytes: %v", f, size, err)
	}
	if text := string(got[:n]); !strings.HasSuffix(text, sent) || !strings.Contains(text, s.Outside.IP(f).String()) {
		s.t.Errorf("%s: %.100q came back", f, text)
	}
}

// tooBig narrows the way to the client after a connection is open, and has much come back.
func (s *segment) tooBig(f ipfamily.Family) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	c, err := s.Outside.DialContext(ctx, "tcp", s.web(f).String())
	labtest.Check(s.t, err)
	defer c.Close()
	narrow := func(mtu string) { // on both sides, as a link takes no more than its other end
		labtest.Run(s.t, s.Outside, "", "ip", "link", "set", "eth0", "mtu", mtu)
		labtest.Run(s.t, s.Router, "", "ip", "link", "set", "out", "mtu", mtu)
	}
	narrow("1300")
	labtest.Check(s.t, c.SetDeadline(time.Now().Add(5*time.Second)))
	const size = 64 << 10
	go c.Write(make([]byte, size))
	if n, err := io.ReadAtLeast(c, make([]byte, 2*size), size); err != nil {
		s.t.Fatalf("%s: %d bytes came back: %v", f, n, err)
	}
	narrow("1500")
}

// TestClientAddressPrinted: of flows that rules remember, a bounded number is printed, and how many there are beside.
// nft loads the text.
func TestClientAddressPrinted(t *testing.T) {
	s := newSegment(t)
	s.learn(s.service(nil, 1, 2))
	a := s.nodes[0]
	const flows = printMost + 1234
	text := "add element netdev verdict kept-flows {"
	for i := range flows {
		text += fmt.Sprintf(" %d . %[1]d timeout 300s : 4000:0010,", i)
	}
	labtest.Run(t, a.Host, text+"}\n", "nft", "-f", "-")
	var printed strings.Builder
	labtest.Check(t, a.Host.Do(func() error {
		i, err := Inspect()
		labtest.Check(t, err)
		return errors.Join(i.Print(t.Context(), &printed), i.Close())
	}))
	if n := strings.Count(printed.String(), "timeout 5m expires"); n != printMost ||
		!strings.Contains(printed.String(), fmt.Sprintf("# and %d elements more", flows-printMost)) {
		t.Errorf("%d of %d flows are printed", n, flows)
	}
	at := strings.Index(printed.String(), "table netdev verdict {")
	labtest.Run(t, s.Outside, printed.String()[at:], labtest.Nfts(t)[0].Path, "-f", "-")
}

// TestClientAddressRefused: while the kernel takes no rules at the ingress of the device, all else is written, the
// receipts say so, and why, and once a state has another device, clients keep their addresses.
func TestClientAddressRefused(t *testing.T) {
	s := newSegment(t)
	s.learn(s.service(nil, 1, 2))
	a := s.nodes[0]
	labtest.Run(t, a.Host, "", "ip", "link", "add", "eth1", "type", "veth")
	labtest.FillIngress(t, a.Host, "eth1")
	d := s.service(nil, 1)
	d.Link = s.link(a)
	d.Link.Device, d.Link.Index = "eth1", 9
	for _, news := range []snapshot.Delta{d, s.service(nil, 1, 2)} {
		if r := a.apply(t, news).Refused; r == nil || r.Device != "eth1" || r.Index != 9 || r.Err == nil {
			t.Errorf("that the kernel refuses the device is told as %+v", r)
		}
		s.dial(snapshot.TCP, ipfamily.IPv4, 10, false)
	}
	if r := a.apply(t, snapshot.Delta{Link: s.link(a)}).Refused; r != nil {
		t.Errorf("the kernel refuses eth0: %+v", r)
	}
	s.dial(snapshot.TCP, ipfamily.IPv4, 10, true)
	quiet(t, a.backend)
}

// TestClientAddressWithoutDevice: while the device is not there, all else is written, and once a state has one that is,
// clients keep their addresses.
func TestClientAddressWithoutDevice(t *testing.T) {
	s := newSegment(t)
	s.learn(s.service(nil, 1, 2))
	a := s.nodes[0]
	labtest.Check(t, a.backend.KeepSupported())
	d := s.service(nil, 1)
	d.Link = s.link(a)
	d.Link.Device = "eth9"
	a.apply(t, d)
	s.dial(snapshot.TCP, ipfamily.IPv4, 10, false)
	a.apply(t, s.service(nil, 1, 2))
	a.apply(t, snapshot.Delta{Link: s.link(a)})
	s.dial(snapshot.TCP, ipfamily.IPv4, 10, true)
	quiet(t, a.backend)
	b := open(t, a.Host, Options{})
	labtest.Check(t, a.backend.Close())
	a.backend = b
	a.planner.SetConfig(dataplane.Config{NodeName: "node-a", CannotKeep: true})
	a.apply(t, snapshot.Delta{})
	s.dial(snapshot.TCP, ipfamily.IPv4, 10, false)
}
