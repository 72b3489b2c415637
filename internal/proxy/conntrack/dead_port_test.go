package conntrack

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/nft/iptshim/xtables"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// keepsTracking is what another program has on the node, as the kubelet does: its rules ask for the state of a
// connection, so the kernel tracks connections whether or not there is a proxy.
const keepsTracking = `table inet other {
	chain in { type filter hook prerouting priority 0; ct state new counter; }
	chain out { type filter hook output priority 0; ct state new counter; }
}`

// useIPTables has the node's proxy write rules of iptables instead.
func (p *proxied) useIPTables() {
	p.t.Helper()
	labtest.Run(p.t, p.Node, "nft delete table ip verdict; nft delete table ip6 verdict", "sh")
	labtest.Check(p.t, p.Node.Do(func() error {
		programs, err := xtables.Find(context.Background())
		if err != nil {
			return err
		}
		chains, err := xtables.Open(programs, xtables.Options{Log: slog.New(slog.DiscardHandler)})
		p.t.Cleanup(func() { chains.Close() })
		p.cleaner = newCleaner(open(p.t, p.Node), nil)
		p.backend = behind(p.cleaner, chains)
		return err
	}))
}

// fullListener listens at the node port, and takes no connection: the kernel drops each SYN without an answer.
func (p *proxied) fullListener() (closeAll func()) {
	p.t.Helper()
	var fds []int
	labtest.Check(p.t, p.Node.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		fds = append(fds, fd)
		if err := unix.Bind(fd, &unix.SockaddrInet6{Port: nodePort}); err != nil {
			return err
		}
		if err := unix.Listen(fd, 0); err != nil {
			return err
		}
		client, err := unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		fds = append(fds, client)
		return unix.Connect(client, &unix.SockaddrInet6{Port: nodePort, Addr: netip.IPv6Loopback().As16()})
	}))
	return func() {
		for _, fd := range fds {
			unix.Close(fd)
		}
	}
}

// knock has every client try to connect from a port of its own, and returns the results.
func (p *proxied) knock(proto snapshot.Protocol, timeout time.Duration) map[string]lab.Result {
	out, clients := map[string]lab.Result{}, p.clients()
	for i := range ipfamily.All {
		balancer := netip.AddrPortFrom(lab.Nth(lab.ExternalRange[i], 2), port)
		clients = append(clients, client{"outside to load balancer", p.Outside, balancer})
	}
	for i, cl := range clients {
		from := netip.AddrPortFrom(netip.IPv4Unspecified(), uint16(20000+i))
		if cl.to.Addr().Is6() {
			from = netip.AddrPortFrom(netip.IPv6Unspecified(), from.Port())
		}
		if cl.to.Addr().IsLoopback() {
			continue
		}
		out[fmt.Sprintf("%s %v", cl.name, cl.to)] = cl.from.Dial(proto, cl.to, lab.Options{From: from, Timeout: timeout})
	}
	return out
}

// TestPortsLive: clients try to connect while no tables of ours are there, and time out. Once the tables are there,
// each is answered at its next try from the same port.
func TestPortsLive(t *testing.T) {
	t.Parallel()
	deleted := "nft delete table ip verdict && nft delete table ip6 verdict"
	emptied := "nft flush map ip verdict services && nft flush map ip6 verdict services"
	flushed := "for i in iptables ip6tables; do $i -t nat -F && $i -t nat -X; done"
	for _, test := range []struct {
		what, gone string
		iptables   bool
	}{
		{"start", "", false},
		{"tables deleted", deleted, false},
		{"elements deleted", emptied, false},
		{"iptables start", "", true},
		{"iptables flushed", flushed, true},
	} {
		for _, proto := range []snapshot.Protocol{snapshot.TCP, snapshot.UDP} {
			t.Run(test.what+"/"+proto.String(), func(t *testing.T) {
				t.Parallel() // most of it is waiting for silence
				p := newProxied(t)
				labtest.Run(t, p.Node, keepsTracking, "nft", "-f", "-")
				if test.iptables {
					p.useIPTables()
				}
				state := p.service(balanced, 5353, ready(p.Pods[0])...)
				if test.gone != "" {
					p.apply(state)
					p.look()
					state = snapshot.Delta{}
					labtest.Run(t, p.Node, test.gone, "sh")
				} else if !test.iptables {
					labtest.Run(t, p.Node, deleted, "sh")
					p.restart(nil)
				}
				p.diesAndLives(proto, state, test.gone != "")
			})
		}
	}
}

// balanced gives a Service a load balancer's addresses.
func balanced(s *snapshot.Service) {
	for i := range ipfamily.All {
		s.LoadBalancerIPs = append(s.LoadBalancerIPs, lab.Nth(lab.ExternalRange[i], 2))
	}
}

func (p *proxied) diesAndLives(proto snapshot.Protocol, programs snapshot.Delta, repaired bool) {
	t := p.t
	silent := func() {} // closes what is silent
	if proto == snapshot.TCP {
		silent = p.fullListener()
	}
	waits := map[string]bool{}
	for name, r := range p.knock(proto, 200*time.Millisecond) {
		if r.Outcome == lab.Answered {
			t.Fatalf("%s: %v without a proxy", name, r)
		}
		waits[name] = r.Outcome == lab.TimedOut
	}
	if repaired {
		for found := []string(nil); found == nil; {
			var err error
			found, _, err = p.backend.Check()
			labtest.Check(t, err)
		}
	}
	p.apply(programs)
	dead := 0
	for name, r := range p.knock(proto, 200*time.Millisecond) {
		if waits[name] && r.Outcome != lab.Answered {
			dead++
		}
	}
	silent() // not before: to close it resets what waits for it
	n := p.look()
	t.Logf("%d of %d clients are lost; removed %d flows", dead, len(waits), n)
	if dead == 0 {
		t.Error("no client had a flow left")
	}
	for name, r := range p.knock(proto, 20*time.Second) {
		if r.Endpoint != p.Pods[0].Name {
			t.Errorf("%s: %v after the look", name, r)
		}
	}
}
