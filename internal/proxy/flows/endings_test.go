package flows

import (
	"net/netip"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// shortTimeouts are short for all but what a test holds open.
var shortTimeouts = []string{"tcp_timeout_time_wait=2", "tcp_timeout_close=2", "tcp_timeout_last_ack=2",
	"tcp_timeout_close_wait=2", "tcp_timeout_fin_wait=2", "tcp_timeout_syn_sent=2", "udp_timeout=2",
	"udp_timeout_stream=2"}

// ending is a way in which connections end.
type ending struct {
	name string
	// do makes a connection from a host and returns its address there.
	do       func(r *rig, from *lab.Host, f ipfamily.Family) netip.AddrPort
	protocol snapshot.Protocol
	want     string
}

// dial opens a connection to a port that answers.
func (r *rig) dial(from *lab.Host, p snapshot.Protocol, to netip.AddrPort) *lab.Conn {
	r.t.Helper()
	c, result := from.Open(p, to, lab.Options{Timeout: 10 * time.Second})
	if c == nil {
		r.t.Fatal(result)
	}
	return c
}

// try sends the first packet of a connection that nobody accepts, from a port of its own.
func (r *rig) try(from *lab.Host, p snapshot.Protocol, to netip.AddrPort) netip.AddrPort {
	r.t.Helper()
	client := netip.AddrPortFrom(from.IP(ipfamily.Of(to.Addr())), nextPort())
	if c, result := from.Open(p, to, lab.Options{From: client, Timeout: 300 * time.Millisecond}); c != nil {
		r.t.Fatal(result)
	}
	return client
}

var lastPort uint16 = 20000

func nextPort() uint16 {
	lastPort++
	return lastPort
}

var endings = []ending{
	{"closed", func(r *rig, from *lab.Host, f ipfamily.Family) netip.AddrPort {
		c := r.dial(from, snapshot.TCP, web(f, echoPort))
		defer c.Close()
		return c.Local()
	}, snapshot.TCP, "closed"},
	{"reset by client", func(r *rig, from *lab.Host, f ipfamily.Family) netip.AddrPort {
		client := netip.AddrPortFrom(from.IP(f), nextPort())
		if result := from.Dial(snapshot.TCP, web(f, echoPort), lab.Options{From: client}); result.Err != nil {
			r.t.Error(result)
		}
		return client
	}, snapshot.TCP, "reset by client"},
	{"reset by endpoint", func(r *rig, from *lab.Host, f ipfamily.Family) netip.AddrPort {
		c, err := from.DialContext(r.t.Context(), "tcp", web(f, resetPort).String())
		labtest.Check(r.t, err)
		defer c.Close()
		_, err = c.Write([]byte("x"))
		labtest.Check(r.t, err)
		if _, err = c.Read(make([]byte, 1)); err == nil {
			r.t.Error("not reset")
		}
		return netip.MustParseAddrPort(c.LocalAddr().String())
	}, snapshot.TCP, "reset by endpoint"},
	{"refused", func(r *rig, from *lab.Host, f ipfamily.Family) netip.AddrPort {
		return r.try(from, snapshot.TCP, web(f, refusedPort))
	}, snapshot.TCP, "refused by endpoint"},
	{"SYN lost", func(r *rig, from *lab.Host, f ipfamily.Family) netip.AddrPort {
		return r.try(from, snapshot.TCP, web(f, silentPort))
	}, snapshot.TCP, "unanswered"},
	{"rejected", func(r *rig, from *lab.Host, f ipfamily.Family) netip.AddrPort {
		return r.try(from, snapshot.TCP, netip.AddrPortFrom(lab.Nth(lab.ServiceRange[f], 2), 80))
	}, snapshot.TCP, "rejected no-endpoints"},
	{"unused port", func(r *rig, from *lab.Host, f ipfamily.Family) netip.AddrPort {
		return r.try(from, snapshot.TCP, web(f, 99))
	}, snapshot.TCP, "rejected silent-cluster-ip"},
	{"UDP answered", func(r *rig, from *lab.Host, f ipfamily.Family) netip.AddrPort {
		c := r.dial(from, snapshot.UDP, web(f, echoPort))
		defer c.Close()
		return c.Local()
	}, snapshot.UDP, "expired"},
	{"UDP unanswered", func(r *rig, from *lab.Host, f ipfamily.Family) netip.AddrPort {
		return r.try(from, snapshot.UDP, web(f, silentPort))
	}, snapshot.UDP, "unanswered"},
}

// TestEndings: each connection has one record, which says how it ended, with the names of both sides, wherever the
// endpoint runs.
func TestEndings(t *testing.T) {
	for name, server := range map[string]func(*lab.Cluster) *lab.Host{
		"remote pod": func(c *lab.Cluster) *lab.Host { return c.RemotePods[0] },
		"local pod":  func(c *lab.Cluster) *lab.Host { return c.Pods[1] },
		"node":       func(c *lab.Cluster) *lab.Host { return c.Node },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRigWith(t, server, shortTimeouts...)
			r.testEndings()
			r.testReleased()
			r.testTimedOut()
			r.testLeftOut()
			r.mu.Lock()
			defer r.mu.Unlock()
			if len(r.records) > 0 || r.recorder.Losses() != (Losses{}) {
				t.Errorf("more records: %+v; losses %+v", r.records, r.recorder.Losses())
			}
		})
	}
}

// testEndings has connections end in all ways, from a pod and from the node.
func (r *rig) testEndings() {
	type made struct {
		ending
		from   *lab.Host
		client netip.AddrPort
	}
	var all []made
	for _, e := range endings {
		for _, f := range lab.Families() {
			for _, from := range []*lab.Host{r.Pods[0], r.Node} {
				if r.server == r.Node && e.want == "unanswered" {
					continue // the kernel keeps no entry of what it drops before it is delivered here
				}
				all = append(all, made{e, from, e.do(r, from, f)})
			}
		}
	}
	for _, m := range all {
		got := r.expect(m.client, m.protocol, m.want)
		named := got.Client.Pod == "shop/"+m.from.Name && got.Client.Workload == "shop/cart"
		if named != (m.from != r.Node) || got.Client.Node != "node" || got.Client.Zone != "a" {
			r.t.Errorf("%s from %s: the client is %+v", m.name, m.from.Name, got.Client)
		}
		if got.End != Rejected && (got.Endpoint.Pod != "shop/web-1" || got.Endpoint.Node != "node2" ||
			got.Endpoint.Zone != "b" || got.Received.Packets == 0 && got.End != Unanswered) {
			r.t.Errorf("%s from %s: the endpoint is %+v: %+v", m.name, m.from.Name, got.Endpoint, got)
		}
		if got.Service == "" || got.Sent.Packets == 0 || got.Seconds > 5 || !got.Since.IsZero() || got.Weight != 1 {
			r.t.Errorf("%s from %s: %+v", m.name, m.from.Name, got)
		}
	}
}

// testReleased: the proxy deletes a flow of UDP whose endpoint is gone.
func (r *rig) testReleased() {
	r.t.Helper()
	labtest.Check(r.t, r.Node.Sysctl("net/netfilter/nf_conntrack_udp_timeout", "600"))
	c := r.dial(r.Pods[0], snapshot.UDP, web(ipfamily.IPv4, echoPort))
	r.apply(r.services(false))
	r.expect(c.Local(), snapshot.UDP, "released")
	r.apply(r.services(true))
}

// testTimedOut: an established connection has been silent for too long.
func (r *rig) testTimedOut() {
	r.t.Helper()
	labtest.Check(r.t, r.Node.Sysctl("net/netfilter/nf_conntrack_tcp_timeout_established", "1"))
	c := r.dial(r.Pods[0], snapshot.TCP, web(ipfamily.IPv6, echoPort))
	r.expect(c.Local(), snapshot.TCP, "timed out")
}

// testLeftOut: a Service may keep its connections out of records. Those of another come after them.
func (r *rig) testLeftOut() {
	r.t.Helper()
	d := r.services(true)
	for name, svc := range d.Services {
		if svc.NoRecords = name.Name == "web"; !svc.NoRecords {
			svc.Backends = &snapshot.Backends{For: "Gateway x/y"}
		}
	}
	r.apply(d)
	r.try(r.Pods[0], snapshot.TCP, web(ipfamily.IPv4, refusedPort))
	r.try(r.Pods[0], snapshot.TCP, web(ipfamily.IPv6, 99))
	none := netip.AddrPortFrom(lab.Nth(lab.ServiceRange[0], 2), 80)
	got := r.expect(r.try(r.Pods[0], snapshot.TCP, none), snapshot.TCP, "rejected no-endpoints")
	if got.For != "Gateway x/y" {
		r.t.Errorf("it is for %q", got.For)
	}
}

// TestOpen: while somebody asks for it, a connection has a record when it begins, too.
func TestOpen(t *testing.T) {
	r := newRig(t, shortTimeouts...)
	for _, f := range lab.Families() {
		labtest.Check(t, r.recorder.SetOpen(true))
		c := r.dial(r.Pods[0], snapshot.TCP, web(f, echoPort))
		if got := r.expect(c.Local(), snapshot.TCP, "open"); got.Endpoint.Pod != "shop/web-1" || got.Failure() {
			t.Errorf("%+v", got)
		}
		labtest.Check(t, r.recorder.SetOpen(false))
		labtest.Check(t, c.Close())
		r.expect(c.Local(), snapshot.TCP, "closed")
	}
}
