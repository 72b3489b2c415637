package kernel

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// limitTo has all pools of a state have limits.
func limitTo(text string) func(*snapshot.Service) {
	return func(s *snapshot.Service) {
		var err error
		if s.Limits, err = snapshot.ParseLimits(text); err != nil {
			panic(err)
		}
	}
}

// sending is a time span in which a packet was sent.
type sending struct{ before, after time.Time }

// admits gives how many of the packets a limit lets pass, at least and at most.
func admits(l snapshot.RateLimit, sent []sending) (least, most int) {
	count := func(at func(sending) time.Time) (n int) {
		tokens, last := float64(l.Burst), at(sent[0])
		for _, s := range sent {
			tokens = min(float64(l.Burst), tokens+at(s).Sub(last).Seconds()*float64(l.Rate))
			if last = at(s); tokens >= 1 {
				tokens--
				n++
			}
		}
		return n
	}
	a, b := count(func(s sending) time.Time { return s.before }), count(func(s sending) time.Time { return s.after })
	off := 2 + max(a, b)/100 + int(l.Rate)/20 // packets wait in queues of a busy host, for 50 ms or so
	return min(a, b) - off, max(a, b) + off
}

// flood sends datagrams from as many ports of a host, as fast as it can.
func flood(t *testing.T, from *lab.Host, to netip.AddrPort, n int) (sent []sending) {
	t.Helper()
	labtest.Check(t, from.Do(func() error {
		for i := range n {
			fd, sa, err := socketFor(netip.AddrPortFrom(from.IP(ipfamily.Of(to.Addr())), uint16(10000+i)), to)
			if err != nil {
				return err
			}
			s := sending{before: time.Now()}
			err = unix.Sendto(fd, []byte("hello\n"), 0, sa)
			s.after = time.Now()
			unix.Close(fd)
			if err != nil && err != unix.EPERM { // which is what this host's own rules say when they drop it
				return err
			}
			sent = append(sent, s)
		}
		return nil
	}))
	return sent
}

func socketFor(from, to netip.AddrPort) (int, unix.Sockaddr, error) {
	at := func(a netip.AddrPort) unix.Sockaddr {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	domain := unix.AF_INET
	if to.Addr().Is6() {
		domain = unix.AF_INET6
		at = func(a netip.AddrPort) unix.Sockaddr {
			return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
		}
	}
	fd, err := unix.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, nil, err
	}
	return fd, at(to), unix.Bind(fd, at(from))
}

// TestRates: as many connections pass as a limit admits, at low rates and high ones, whoever chooses the endpoints; the
// others are refused, or dropped, and counted.
func TestRates(t *testing.T) {
	c, b := proxied(t, lab.Config{LocalPods: 3, RemotePods: 3})
	counters := openCounters(t, c.Node)
	for i, test := range sharesCases {
		for n, text := range []string{"rate=1 burst=1", "rate=100 burst=20 over=drop", "rate=10000 burst=500",
			"client-rate=100 client-burst=500", "client-rate=5000 over=drop"} {
			if i > 0 && n != i%5 { // all rates once, and all choices
				continue
			}
			s := flowService{number: test.number, state: both}
			st := oneState(c, s, func(o *snapshot.Service) { test.change(o); limitTo(text)(o) })
			applyOnlyState(t, b, st)
			from := c.Pods[2]
			if test.kind != dataplane.ClusterIP {
				from = c.Outside
			}
			for _, f := range ipfamily.All {
				l := st.Services[s.name()].Ports[0].Limits
				what := fmt.Sprintf("%s, %s, %v", test.name, text, f)
				checkRate(t, c, counters, st, from, s.frontendOf(c, test.kind, f), l, what)
			}
		}
	}
	quiet(t, b)
	checkOverLimit(t, openReader(t, c.Node))
}

// checkOverLimit says that what was over limits is the same for whoever lists all frontends and whoever asks for them.
func checkOverLimit(t *testing.T, from Tables) {
	t.Helper()
	all, err := ReadCounters(from, dataplane.CountersAsked{All: true})
	labtest.Check(t, err)
	over, ask := map[dataplane.Counted]uint64{}, dataplane.CountersAsked{}
	for _, c := range all.Frontends {
		if ask.Frontends = append(ask.Frontends, c.FrontendCount); c.OverLimit > 0 {
			over[c.Counted] = c.OverLimit
		}
	}
	some, err := ReadCounters(from, ask)
	labtest.Check(t, err)
	for _, c := range some.Frontends {
		if c.OverLimit != over[c.Counted] {
			t.Errorf("%v: %d, not %d were over limits", c.Counted, c.OverLimit, over[c.Counted])
		}
	}
	if len(over) == 0 || len(some.Frontends) != len(all.Frontends) {
		t.Errorf("%v were over limits, of %d and %d frontends", over, len(all.Frontends), len(some.Frontends))
	}
}

func checkRate(t *testing.T, c *lab.Cluster, counters *Counters, st *dataplane.State, from *lab.Host,
	at netip.AddrPort, limits snapshot.Limits, what string,
) {
	t.Helper()
	forgetFlows(t, c.Node)
	refusal := dataplane.RefusedOverLimit
	if limits.Drop {
		refusal = dataplane.DroppedOverLimit
	}
	read := func() int { return int(countAll(t, counters, st).refused[refusal]) }
	before, translated := read(), countTranslated(t, c.Node, ipfamily.Of(at.Addr()))
	arrived := countArrivals(t, c.Node, at)
	sent := flood(t, from, at, 20_000)
	var served, refused, lost int
	testkit.Eventually(t, 20*time.Second, what+": all packets served or refused", func() bool {
		served, refused, lost = translated(), read()-before, len(sent)-arrived() // in the sender's own queues
		return served+refused+lost == len(sent)
	})
	limit := limits.Rate
	if limit.Rate == 0 {
		limit = limits.Client
	}
	least, most := admits(limit, sent)
	span := sent[len(sent)-1].after.Sub(sent[0].before)
	t.Logf("%s: %d sent in %v, %d lost, %d served, of %d to %d; %d refused", what, len(sent), span, lost, served, least,
		most, refused)
	if served < least-lost || served > most {
		t.Errorf("%s: %d are served, not %d to %d", what, served, least, most)
	}
}

// TestLimitedTCP: a client over the limit gets a reset at once, or no answer if the Service asks for that.
func TestLimitedTCP(t *testing.T) {
	c, b := proxied(t, lab.Config{LocalPods: 3, RemotePods: 3})
	s := flowService{number: 1, state: both}
	for text, over := range map[string]lab.Outcome{"rate=1 burst=9": lab.Refused, "rate=1 burst=9 over=drop": lab.TimedOut,
		"client-rate=1 client-burst=10": lab.Refused} {
		st := oneState(c, s, limitTo(text))
		for _, f := range ipfamily.All {
			applyOnlyState(t, b, oneState(c, s, asIs)) // so that the limits begin anew
			applyOnlyState(t, b, st)
			l := st.Services[s.name()].Ports[0].Limits
			sent, outcomes := []sending(nil), map[lab.Outcome]int{}
			for range 30 {
				at := sending{before: time.Now()}
				r := c.Pods[f].Dial(snapshot.TCP, s.frontendOf(c, dataplane.ClusterIP, f),
					lab.Options{Timeout: 300 * time.Millisecond})
				at.after = time.Now()
				sent, outcomes[r.Outcome] = append(sent, at), outcomes[r.Outcome]+1
			}
			limit := l.Rate
			if limit.Rate == 0 {
				limit = l.Client
			}
			least, most := admits(limit, sent)
			if n := outcomes[lab.Answered]; n < least || n > most || n+outcomes[over] != len(sent) {
				t.Errorf("%s, %v: %v, want %d to %d answered", text, f, outcomes, least, most)
			}
		}
	}
	quiet(t, b)
}

// TestClientsAreLimitedAlone: of very many clients, each has its own limit, and what they do concerns no other
// Service's clients.
func TestClientsAreLimitedAlone(t *testing.T) {
	const clients = 100_000
	c, b := proxied(t, lab.Config{LocalPods: 3, RemotePods: 3})
	counters := openCounters(t, c.Node)
	labtest.Check(t, c.Node.Sysctl("net/netfilter/nf_conntrack_udp_timeout", "1"))
	s := flowService{number: 1, state: both}
	st := oneState(c, s, limitTo("client-rate=1 client-burst=1"))
	applyOnlyState(t, b, st)
	for _, f := range ipfamily.All {
		at := s.frontendOf(c, dataplane.ClusterIP, f)
		refused := -int(countAll(t, counters, st).refused[dataplane.RefusedOverLimit])
		begun := time.Now()
		spoof(t, c.Node, at, clients, 2)
		refused += int(countAll(t, counters, st).refused[dataplane.RefusedOverLimit])
		t.Logf("%v: %d of 2 packets each of %d clients are refused, in %v", f, refused, clients, time.Since(begun))
		// Each client sends one packet right after the other. Those for which there is no room share limits, and some of
		// their first packets are refused, too.
		if refused < clients || refused > 2*clients-65_000 {
			t.Errorf("%v: %d are refused", f, refused)
		}
	}
	quiet(t, b)
}

// spoof sends some packets each from very many addresses of a host, which it does not have.
func spoof(t *testing.T, h *lab.Host, to netip.AddrPort, clients, each int) {
	t.Helper()
	labtest.Check(t, h.Do(func() error {
		domain, sa := unix.AF_INET, unix.Sockaddr(nil)
		if to.Addr().Is6() {
			domain, sa = unix.AF_INET6, &unix.SockaddrInet6{Addr: to.Addr().As16()}
		} else {
			sa = &unix.SockaddrInet4{Addr: to.Addr().As4()}
		}
		fd, err := unix.Socket(domain, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		for i := range clients {
			for n := range each {
				err := unix.Sendto(fd, spoofed(uint32(i), uint16(10000+n), to), 0, sa)
				if err != nil && err != unix.EPERM {
					return err
				}
			}
		}
		return nil
	}))
}

// spoofed is a datagram of a client, with its headers and without data.
func spoofed(client uint32, port uint16, to netip.AddrPort) []byte {
	udp := binary.BigEndian.AppendUint16(nil, port)
	udp = binary.BigEndian.AppendUint16(udp, to.Port())
	udp = append(udp, 0, 8, 0, 0)
	if to.Addr().Is4() {
		ip := []byte{0x45, 0, 0, 28, 0, 0, 0, 0, 64, unix.IPPROTO_UDP, 0, 0}
		ip = binary.BigEndian.AppendUint32(ip, 172<<24|16<<16+client)
		return append(append(ip, to.Addr().AsSlice()...), udp...)
	}
	sum := uint32(0)
	ip := make([]byte, 24, 48)
	ip[0], ip[5], ip[6], ip[7], ip[8], ip[9] = 0x60, 8, unix.IPPROTO_UDP, 64, 0xfd, 0x77
	binary.BigEndian.PutUint32(ip[20:], client)
	ip = append(ip, to.Addr().AsSlice()...)
	for _, part := range [][]byte{ip[8:], udp, {0, 8, 0, unix.IPPROTO_UDP}} {
		for i := 0; i < len(part); i += 2 {
			sum += uint32(binary.BigEndian.Uint16(part[i:]))
		}
	}
	for sum > 0xffff {
		sum = sum&0xffff + sum>>16
	}
	binary.BigEndian.PutUint16(udp[6:], ^uint16(sum))
	return append(ip, udp...)
}

// TestFullClientsAreRefused: whoever chooses the endpoints, a client that is full is refused, or dropped, in its family
// alone, another is served, and a full one is served again when it has room.
func TestFullClientsAreRefused(t *testing.T) {
	c, b := proxied(t, lab.Config{LocalPods: 3, RemotePods: 3})
	for i, test := range sharesCases {
		limits, over := "client-open=7 client-rate=10000", lab.Refused
		if i%2 > 0 {
			limits, over = "client-open=7 over=drop", lab.TimedOut
		}
		full := c.Pods[2]
		if test.kind != dataplane.ClusterIP {
			full = c.Outside
		}
		s := flowService{number: test.number, state: both}
		st := oneState(c, s, func(o *snapshot.Service) { test.change(o); limitTo(limits)(o) })
		family := ipfamily.All[i/2%2]
		for _, want := range []lab.Outcome{over, lab.Answered} {
			for _, sp := range st.Services[s.name()].Ports {
				if sp.FullClients = nil; want == over && sp.Family() == family {
					sp.FullClients = []netip.Addr{full.IP(family)}
				}
			}
			applyOnlyState(t, b, st)
			for _, f := range ipfamily.All {
				dial := func(from *lab.Host) lab.Outcome {
					return from.Dial(snapshot.TCP, s.frontendOf(c, test.kind, f),
						lab.Options{Timeout: time.Second}).Outcome
				}
				if f == family && dial(full) != want || f != family && dial(full) != lab.Answered {
					t.Errorf("%s, %s, %v: the client gets %v, want %v in %v", test.name, limits, f, dial(full), want, family)
				}
				if got := dial(c.Pods[1]); got != lab.Answered {
					t.Errorf("%s, %s, %v: another client gets %v", test.name, limits, f, got)
				}
			}
		}
	}
	quiet(t, b)
}
