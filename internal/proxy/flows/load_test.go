package flows

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// sizes are how much one side sends in one connection, without headers, and in how many datagrams.
type sizes struct{ sent, received, datagrams int }

// connection identifies one of many.
type connection struct {
	client   netip.AddrPort
	protocol string
}

// manyConnections are so many of each protocol and family.
const manyConnections = 2500

// TestKnownSizes: each of 10,000 connections has one record, whose bytes are those that were sent, headers included.
// All together they are what a counter has counted.
func TestKnownSizes(t *testing.T) {
	r := newRig(t, "tcp_timeout_time_wait=3", "tcp_timeout_close=3", "tcp_timeout_last_ack=3", "udp_timeout=5",
		"udp_timeout_stream=5")
	r.serveSizes()
	labtest.Run(t, r.Node, fmt.Sprintf(`table inet check {
		chain forward { type filter hook forward priority 0
			th dport %[1]d counter
			th sport %[1]d counter
		}
	}`, target+sizePort), "nft", "-f", "-")
	made := map[connection]sizes{}
	var mu sync.Mutex
	var all sync.WaitGroup
	for _, f := range lab.Families() {
		for _, p := range []snapshot.Protocol{snapshot.TCP, snapshot.UDP} {
			places := make(chan struct{}, 8)
			for i := range manyConnections {
				places <- struct{}{}
				all.Go(func() {
					defer func() { <-places }()
					client, size, err := r.exchange(r.Pods[i%2], p, f, i)
					if err != nil {
						t.Error(err)
						return
					}
					mu.Lock()
					defer mu.Unlock()
					made[connection{client, strings.ToUpper(p.String())}] = size
				})
			}
		}
	}
	all.Wait()
	found := r.collect(len(made))
	r.compareSizes(found, made)
	if l := r.recorder.Losses(); l != (Losses{}) {
		t.Errorf("lost %+v", l)
	}
}

// serveSizes has the endpoint answer what it gets twice, and close: of TCP once the client has closed its side.
func (r *rig) serveSizes() {
	l, err := r.server.Listen("tcp", fmt.Sprintf(":%d", target+sizePort))
	labtest.Check(r.t, err)
	u, err := r.server.ListenPacket("udp", fmt.Sprintf(":%d", target+sizePort))
	labtest.Check(r.t, err)
	r.t.Cleanup(func() { l.Close(); u.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				b, err := io.ReadAll(c)
				if err == nil {
					_, _ = c.Write(append(b, b...))
				}
			}()
		}
	}()
	go func() {
		b := make([]byte, 2048)
		for {
			n, from, err := u.ReadFrom(b)
			if err != nil {
				return
			}
			_, _ = u.WriteTo(append(b[:n:n], b[:n]...), from)
		}
	}()
}

// exchange makes the nth connection, and says what was sent.
func (r *rig) exchange(from *lab.Host, p snapshot.Protocol, f ipfamily.Family, n int) (netip.AddrPort, sizes, error) {
	c, err := from.DialContext(r.t.Context(), p.String(), web(f, sizePort).String())
	if err != nil {
		return netip.AddrPort{}, sizes{}, err
	}
	defer c.Close()
	client := netip.MustParseAddrPort(c.LocalAddr().String())
	if p == snapshot.TCP {
		sent := n * 7 % 20000
		_, err = c.Write(make([]byte, sent))
		err = errors.Join(err, c.(*net.TCPConn).CloseWrite())
		b, rerr := io.ReadAll(c)
		return client, sizes{sent, len(b), 0}, errors.Join(err, rerr)
	}
	s := sizes{datagrams: n%3 + 1}
	for range s.datagrams {
		b := make([]byte, 2048)
		_, err = c.Write(b[:n%600+1])
		_ = c.SetReadDeadline(time.Now().Add(10 * time.Second))
		answer, rerr := c.Read(b)
		if err = errors.Join(err, rerr); err != nil {
			break
		}
		s.sent, s.received = s.sent+n%600+1, s.received+answer
	}
	return client, s, err
}

// collect waits for so many records, as the losses leave.
func (r *rig) collect(n int) []Record {
	r.t.Helper()
	count := func() int {
		r.mu.Lock()
		defer r.mu.Unlock()
		return len(r.records)
	}
	testkit.Eventually(r.t, 2*time.Minute, "a record of each connection", func() bool {
		r.expire()
		return count()+int(r.recorder.Losses().Events) >= n
	}, func() string { return fmt.Sprint(count(), " records, losses ", r.recorder.Losses(), ", want ", n) })
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.records
}

// compareSizes compares records with what was sent. What the kernel sent again counts twice; on a busy host, some is.
func (r *rig) compareSizes(found []Record, made map[connection]sizes) {
	r.t.Helper()
	again, sum := 0, Traffic{}
	for _, got := range found {
		k := connection{got.Client.Addr, got.Protocol}
		want, ok := made[k]
		delete(made, k)
		if !ok {
			r.t.Errorf("nobody made this connection, or it has two records: %+v", got)
			continue
		}
		sum.Bytes += got.Sent.Bytes + got.Received.Bytes
		sum.Packets += got.Sent.Packets + got.Received.Packets
		exact := want.with(got.Sent, want.sent, k) && want.with(got.Received, want.received, k)
		if again++; exact {
			again--
		} else if k.protocol == "UDP" || got.Sent.Bytes < uint64(want.sent) || got.Received.Bytes < uint64(want.received) {
			r.t.Errorf("%+v; want %+v", got, want)
		}
	}
	for k := range made {
		r.t.Errorf("no record of %v", k)
	}
	if again > len(found)/100 {
		r.t.Errorf("%d of %d have other sizes", again, len(found))
	}
	var counted Traffic
	for line := range strings.Lines(labtest.Run(r.t, r.Node, "", "nft", "list", "table", "inet", "check")) {
		var port int
		var way string
		var t Traffic
		if n, _ := fmt.Sscanf(strings.TrimSpace(line), "th %s %d counter packets %d bytes %d", &way, &port, &t.Packets,
			&t.Bytes); n == 4 {
			counted.Packets, counted.Bytes = counted.Packets+t.Packets, counted.Bytes+t.Bytes
		}
	}
	if sum != counted {
		r.t.Errorf("the records have %+v, a rule counted %+v", sum, counted)
	}
	r.t.Logf("%d records, %+v in all, %d with repeated packets", len(found), sum, again)
}

// with says whether traffic is a payload with its headers: of TCP with timestamps, and more options in the first.
func (s *sizes) with(t Traffic, payload int, k connection) bool {
	ip, header, more := uint64(40), uint64(32), uint64(8)
	if k.client.Addr().Is4() {
		ip = 20
	}
	if k.protocol == "UDP" {
		header, more = 8, 0
		if t.Packets != uint64(s.datagrams) {
			return false
		}
	}
	return t.Bytes == uint64(payload)+t.Packets*(ip+header)+more
}

// TestStoppedReader: while nobody reads, connections end. Their events are lost and counted, the table is as empty as
// before, and the proxy programs a change. Then records go on.
func TestStoppedReader(t *testing.T) {
	r := newRig(t, "udp_timeout=1")
	base, err := r.sysctl("nf_conntrack_count")
	labtest.Check(t, err)
	gate := make(chan struct{})
	open := sync.OnceFunc(func() { close(gate) })
	t.Cleanup(open)
	n := 0
	r.mu.Lock()
	r.also = func(*Record) {
		<-gate
		n++
	}
	r.mu.Unlock()
	const many = 60000
	r.sendMany(many)
	testkit.Eventually(t, time.Minute, "an empty table", func() bool {
		r.expire()
		left, err := r.sysctl("nf_conntrack_count")
		labtest.Check(t, err)
		return left <= base
	})
	start := time.Now()
	r.apply(r.services(false))
	took := time.Since(start)
	r.apply(r.services(true))
	open()
	count := func() int {
		r.mu.Lock()
		defer r.mu.Unlock()
		return n
	}
	testkit.Eventually(t, time.Minute, "a record, or a loss, of each connection", func() bool {
		return count()+int(r.recorder.Losses().Events) == many
	}, func() string { return fmt.Sprint(count(), " records, losses ", r.recorder.Losses()) })
	r.mu.Lock()
	r.also = nil
	r.mu.Unlock()
	r.expect(r.try(r.Pods[0], snapshot.UDP, web(ipfamily.IPv4, silentPort)), snapshot.UDP, "unanswered")
	t.Logf("%d records, %+v; a change took %v meanwhile", count(), r.recorder.Losses(), took)
	if r.recorder.Losses().Events == 0 {
		t.Error("nothing was lost: the test has too few connections")
	}
}

// sendMany sends the first packet of so many connections that nobody answers.
func (r *rig) sendMany(n int) {
	r.t.Helper()
	for i := range n {
		from := r.Pods[i%2]
		f := lab.Families()[i/2%2]
		c, err := from.ListenPacket("udp", netip.AddrPortFrom(from.IP(f), uint16(10000+i/4)).String())
		labtest.Check(r.t, err)
		_, err = c.WriteTo([]byte("x"), net.UDPAddrFromAddrPort(web(f, silentPort)))
		labtest.Check(r.t, errors.Join(err, c.Close()))
	}
}
