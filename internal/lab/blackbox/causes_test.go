package blackbox

import (
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

const short = 400 * time.Millisecond

// causes make a connection fail, each for one reason, with real packets.
var causes = []struct {
	name string
	do   func(r *rig)
}{
	{"no route from the client", func(r *rig) {
		labtest.Check(r.t, r.client.DelRoute(lab.Route{To: netip.MustParsePrefix("0.0.0.0/0"), Via: r.Node.IP4,
			Link: "eth0"}))
		r.expect(r.fail(short), "no way out", "route to 0.0.0.0/0", "is gone since")
	}},
	{"no route to the endpoint", func(r *rig) {
		r.service(r.pod)
		r.rules(r.Node, r.translate(r.pod))
		labtest.Run(r.t, r.Node, "", "ip", "route", "replace", "unreachable", r.pod.IP4.String())
		r.expect(r.fail(short), "no way to the endpoint", "node", "one of 1: "+r.pod.IP4.String()+" (ready)")
	}},
	{"an earlier connection from the same port", func(r *rig) {
		r.service(r.pod, r.Pods[1])
		r.serve(r.Pods[1])
		r.rules(r.pod, chain("input", "tcp dport 8080 drop"))
		r.rules(r.Node, r.translate(r.pod))
		dial := func() lab.Result {
			return r.client.Dial(snapshot.TCP, r.vip, lab.Options{Timeout: short, From: netip.AddrPortFrom(r.client.IP4, 40000)})
		}
		dial()
		r.slice(r.Pods[1])
		r.rules(r.Node, r.translate(r.Pods[1]))
		time.Sleep(2 * slack)
		began := time.Now()
		got := dial()
		r.expect(Failure{From: r.client.Name, Client: got.Client, Server: r.vip, Began: began, Failed: time.Now(),
			Err: got.Err.Error()}, "an earlier connection's entry", "node had the entry", "sent it to "+r.pod.IP4.String(),
			"which left its EndpointSlice")
	}},
	{"the endpoint's neighbour does not answer", func(r *rig) {
		r.service(r.pod)
		r.rules(r.Node, r.translate(r.pod))
		labtest.Run(r.t, r.pod, "", "ip", "link", "set", "eth0", "arp", "off", "down")
		r.slice()
		r.expect(r.fail(5*time.Second), "no way to the endpoint", "which left its EndpointSlice", "does not answer")
	}},
	{"rejected without endpoints", func(r *rig) {
		r.service()
		r.rules(r.Node, r.translate(r.pod), chain("forward", "reject with tcp reset"))
		r.rules(r.Node, chain("forward", "ct state new meta l4proto tcp reject with tcp reset"))
		r.expect(r.fail(short), "no ready endpoint", "rejected by node", "0 ready endpoints")
	}},
	{"rejected by ICMP without endpoints", func(r *rig) {
		r.service(r.pod)
		r.slice()
		r.rules(r.Node, chain("prerouting", "ct state new ip daddr 10.96.0.0/16 reject"))
		r.expect(r.fail(short), "no ready endpoint", "rejected by node", "port unreachable")
	}},
	{"rejected since the proxy lags", func(r *rig) {
		r.service()
		r.rules(r.Node, chain("prerouting", "ct state new ip daddr 10.96.0.0/16 reject"))
		r.slice(r.pod)
		r.expect(r.fail(short), "not programmed yet", "1 ready endpoints of 1")
	}},
	{"no Service has the address", func(r *rig) {
		r.service(r.pod)
		r.vip = netip.AddrPortFrom(r.vip.Addr().Next(), servicePort)
		r.rules(r.Node, chain("prerouting", "ct state new ip daddr 10.96.0.0/16 reject"))
		r.expect(r.fail(short), "no such Service", "10.96.0.11:80")
	}},
	{"rejected while the table changed", tableChanges},
	{"nothing listens on the endpoint", func(r *rig) {
		r.service(r.pod)
		r.rules(r.Node, r.translate(r.pod))
		r.slice()
		r.expect(r.fail(short), "nothing listened", "endpoint itself", r.pod.IP4.String()+":8080",
			"which left its EndpointSlice")
	}},
	{"nothing listens, and the source is translated", func(r *rig) {
		r.service(r.pod)
		r.rules(r.Node, r.translate(r.pod), "chain post { type nat hook postrouting priority srcnat; masquerade random; }")
		r.expect(r.fail(short), "nothing listened", "endpoint itself", "which is ready")
	}},
	{"nothing listens on the node's port", func(r *rig) {
		r.service(r.pod)
		r.rules(r.Node, r.translate(r.pod))
		r.expect(r.failTo(netip.AddrPortFrom(r.Node.IP4, 30080), short), "nothing listened", "no rule translated it")
	}},
	{"the endpoint's firewall rejects", func(r *rig) {
		r.service(r.pod)
		r.rules(r.Node, r.translate(r.pod))
		r.rules(r.pod, chain("input", "tcp dport 8080 reject with icmp admin-prohibited"))
		r.expect(r.fail(short), "endpoint prohibits it", "prohibited", "which is ready")
	}},
	{"released", func(r *rig) {
		r.service(r.pod)
		r.serve(r.pod)
		r.rules(r.Node, r.translate(r.pod))
		r.expect(r.hold(func() {
			r.slice()
			r.rules(r.Node, r.translate(r.pod),
				chain("forward", "ct state established meta l4proto tcp reject with tcp reset"))
		}), "released", "reset by node", "which left its EndpointSlice")
	}},
	{"the entry is deleted", entryDeletes},
	{"the server closes", func(r *rig) {
		r.service(r.pod)
		s := r.serve(r.pod)
		r.rules(r.Node, r.translate(r.pod))
		r.expect(r.hold(func() { labtest.Check(r.t, s.Close()) }), "server closed", "reset the connection")
	}},
	{"the server accepts and closes", func(r *rig) {
		r.service(r.pod)
		r.rules(r.Node, r.translate(r.pod))
		l, err := r.pod.Listen("tcp4", ":8080")
		labtest.Check(r.t, err)
		defer l.Close()
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				c.Close()
			}
		}()
		r.expect(r.fail(short), "server closed", "closed the connection")
	}},
	{"the accept queue overflows", overflows},
	{"not translated", func(r *rig) {
		r.service(r.pod)
		r.rules(r.Node, chain("prerouting", "ct state new counter"))
		r.client = r.pod
		r.expect(r.fail(short), "not translated", "no rule in node", r.vip.String())
	}},
	{"the server is silent", func(r *rig) {
		r.service(r.pod)
		r.rules(r.Node, r.translate(r.pod))
		l, err := r.pod.Listen("tcp4", ":8080")
		labtest.Check(r.t, err)
		defer l.Close()
		r.expect(r.fail(short), "server was silent", "accepted the connection", "which is ready")
	}},
	{"the endpoint's route is gone", func(r *rig) {
		r.service(r.pod)
		r.serve(r.pod)
		r.rules(r.Node, r.translate(r.pod))
		labtest.Run(r.t, r.Node, "", "ip", "link", "set", "veth1", "down")
		r.expect(r.fail(short), "endpoint was gone", "route to "+r.pod.IP4.String(), "is gone since")
	}},
	{"the endpoint drops", func(r *rig) {
		r.service(r.pod)
		r.rules(r.Node, r.translate(r.pod))
		r.rules(r.pod, chain("input", "tcp dport 8080 drop"))
		r.expect(r.fail(short), "endpoint was silent", "came to "+r.pod.IP4.String(), "of pod-1")
	}},
	{"lost between client and node", func(r *rig) {
		r.service(r.pod)
		labtest.Run(r.t, r.Hosts()[0], "table bridge b { chain f { type filter hook forward priority 0; "+
			"ip daddr 10.96.0.0/16 drop; }; }", "nft", "-f", "-") // the switch, which is not watched
		r.expect(r.fail(short), "lost on the way", "left outside by link eth0", "came nowhere")
	}},
	{"dropped on the node", func(r *rig) {
		r.service(r.pod)
		r.rules(r.Node, r.translate(r.pod), chain("forward", "tcp dport 8080 drop"))
		r.expect(r.fail(short), "lost on the way", "came to node by link eth0", "dropped there")
	}},
	{"the answer is lost", func(r *rig) {
		r.service(r.pod)
		r.serve(r.pod)
		r.rules(r.Node, r.translate(r.pod), chain("forward", "tcp sport 8080 drop"))
		r.expect(r.fail(short), "lost on the way", "the answer came to node by link veth1", "dropped there")
	}},
	{"dropped by the client's host", func(r *rig) {
		r.service(r.pod)
		r.rules(r.client, chain("output", "tcp dport 80 drop"))
		r.expect(r.fail(short), "dropped by the client's host", "no packet left outside")
	}},
}

// TestCauses: each connection fails for one reason, and the recorder names it.
func TestCauses(t *testing.T) {
	for _, c := range causes {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t)
			r.watch()
			c.do(r)
		})
	}
}

// tableChanges flushes and refills a map between two transactions, under clients.
func tableChanges(r *rig) {
	r.service(r.pod)
	r.serve(r.pod)
	filled := []string{
		fmt.Sprintf("map services { type inet_service : verdict; elements = { %d : accept }; }", servicePort),
		"chain guard { type filter hook prerouting priority -150; ct state new tcp dport vmap @services; " +
			"ct state new ip daddr 10.96.0.0/16 reject with tcp reset; }",
		r.translate(r.pod),
	}
	r.rules(r.Node, filled...)
	time.Sleep(2 * pollIdle) // until the recorder reads often
	var f Failure
	for range 50 {
		labtest.Run(r.t, r.Node, "", "nft", "flush", "map", "ip", "blackbox", "services")
		began := time.Now()
		got := r.client.Dial(snapshot.TCP, r.vip, lab.Options{})
		labtest.Run(r.t, r.Node, "", "nft", "add", "element", "ip", "blackbox", "services", "{", "80", ":", "accept", "}")
		if got.Outcome != lab.Answered && time.Since(began) < 5*near {
			f = Failure{From: "outside", Client: got.Client, Server: r.vip, Began: began, Failed: time.Now(),
				Err: got.Err.Error()}
			break
		}
	}
	r.expect(f, "rejected while the table changed", "although Service default/web has 1 ready", "nf_tables' transaction")
}

// entryDeletes deletes the entry of a connection in the middle; its packets meet no translation afterwards.
func entryDeletes(r *rig) {
	r.service(r.pod)
	r.serve(r.pod)
	labtest.Check(r.t, r.Node.Sysctl("net/netfilter/nf_conntrack_tcp_loose", "0"))
	r.rules(r.Node, r.translate(r.pod))
	r.expect(r.hold(func() {
		labtest.Check(r.t, r.Node.Do(func() error {
			_, err := netlink.ConntrackDeleteFilters(netlink.ConntrackTable, unix.AF_INET, &netlink.ConntrackFilter{})
			if err != nil {
				return err
			}
			return netlink.ConntrackTableFlush(netlink.ConntrackTable)
		}))
	}), "entry deleted", "in node to "+r.pod.IP4.String(), "was deleted")
}

// overflows fills the queue of a listener that nobody accepts from.
func overflows(r *rig) {
	r.service(r.pod)
	r.rules(r.Node, r.translate(r.pod))
	var fd int
	labtest.Check(r.t, r.pod.Do(func() (err error) {
		if fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		if err := unix.Bind(fd, &unix.SockaddrInet4{Port: podPort}); err != nil {
			return err
		}
		return unix.Listen(fd, 0)
	}))
	defer unix.Close(fd)
	held, err := r.client.DialContext(r.t.Context(), "tcp4", r.vip.String()) // as many as a queue of 0 takes
	labtest.Check(r.t, err)
	defer held.Close()
	r.expect(r.fail(short), "accept queue overflowed", "in pod-1", "ListenOverflows", "which is ready")
}

// TestUnexplained: a node rejects a connection although its Service has an endpoint, and nothing says why. The records
// are in a file.
func TestUnexplained(t *testing.T) {
	r := newRig(t)
	r.watch()
	r.service(r.pod)
	r.rules(r.Node, chain("prerouting", "ct state new ip daddr 10.96.0.0/16 reject"))
	time.Sleep(3 * pollIdle) // so that the rules are none that have just changed
	f := r.fail(short)
	r.box.Failed(f)
	all, left := r.box.Explanations()
	if len(all) != 1 || len(left) != 0 || all[0].Cause != Unexplained {
		t.Fatalf("%d explanations, and more: %v: %v", len(all), left, all)
	}
	text, err := os.ReadFile(all[0].File)
	labtest.Check(t, err)
	for _, word := range []string{f.Client.String(), "SYN", "port unreachable", "1 ready endpoints"} {
		if !strings.Contains(string(text), word) {
			t.Errorf("the file lacks %q:\n%s", word, text)
		}
	}
}
