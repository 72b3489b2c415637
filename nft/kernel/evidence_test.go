package kernel

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// retryAll has refused connections tried again at every TCP port with two endpoints, if the state gathers evidence.
func retryAll(st *dataplane.State) { retry(st, true) }

func retry(st *dataplane.State, yes bool) {
	for _, svc := range st.Services {
		for _, sp := range svc.Ports {
			if !st.Evidence || sp.Name.Protocol != snapshot.TCP {
				continue
			}
			sp.SecondChance = snapshot.SecondChanceOn
			for _, p := range []*dataplane.Pool{sp.Cluster, sp.Local} {
				if len(p.Endpoints) > 1 { // those without endpoints are everybody's
					p.RetryRefused = yes
				}
			}
		}
	}
}

// evidenceLab is a cluster of which every pod serves but the second remote one, and a Service.
type evidenceLab struct {
	*lab.Cluster
	backend *Backend
	service flowService
	servers map[*lab.Host]*lab.Server
	reader  *EvidenceReader
}

func newEvidenceLab(t *testing.T, state endpointState) *evidenceLab {
	t.Helper()
	l := &evidenceLab{Cluster: labtest.NewCluster(t, lab.Config{LocalPods: 3, RemotePods: 3}),
		service: flowService{number: 1, state: state}, servers: map[*lab.Host]*lab.Server{}}
	for _, pod := range []*lab.Host{l.Pods[0], l.Pods[1], l.RemotePods[0]} {
		server, err := pod.Serve(snapshot.TCP, targetPort)
		labtest.Check(t, err)
		l.servers[pod] = server
		_, err = pod.Serve(snapshot.UDP, targetPort)
		labtest.Check(t, err)
	}
	l.backend = open(t, l.Node, Options{})
	labtest.Check(t, l.Node.Do(func() (err error) {
		l.reader, err = OpenEvidence()
		return err
	}))
	t.Cleanup(func() { labtest.Check(t, l.reader.Close()) })
	return l
}

// state gives what is to be applied, with more endpoints than the Service's state names.
func (l *evidenceLab) state(more ...*lab.Host) *dataplane.State {
	d := l.service.delta(l.Cluster)
	for name, slice := range d.Slices {
		f := ipfamily.IPv4
		if strings.HasSuffix(name.Name, "-1") {
			f = ipfamily.IPv6
		}
		for _, h := range more {
			slice.Endpoints = append(slice.Endpoints, snapshot.Endpoint{Addr: h.IP(f), Node: h.Name, Ready: true,
				Serving: true})
		}
	}
	snap := snapshot.New()
	snap.Apply(facts(l.Cluster))
	snap.Apply(d)
	st, _ := dataplane.Compute(dataplane.Config{NodeName: "node", DetectLocal: clusterCIDR,
		SecondChance: snapshot.SecondChanceOn}, snap)
	return st
}

func (l *evidenceLab) read(t *testing.T) map[netip.AddrPort]dataplane.Evidence {
	t.Helper()
	list, err := l.reader.Read()
	labtest.Check(t, err)
	out := map[netip.AddrPort]dataplane.Evidence{}
	for _, e := range list { // of all frontends
		was := out[e.Endpoint]
		e.Unanswered, e.Refused = e.Unanswered+was.Unanswered, e.Refused+was.Refused
		out[e.Endpoint] = e
	}
	return out
}

func at(h *lab.Host, f ipfamily.Family) netip.AddrPort {
	return netip.AddrPortFrom(h.IP(f), targetPort)
}

// TestUnanswered has clients wait for an endpoint that takes every packet and answers none. It is evidence once a
// client sends its first packet again, and not before; healthy endpoints and UDP are none.
func TestUnanswered(t *testing.T) {
	l := newEvidenceLab(t, endpointState{"there", nil, []condition{ready}})
	dead := l.RemotePods[1]
	st := l.state(dead)
	apply(t, l.backend, st)
	const drop = "table inet dead {\n chain c { type filter hook prerouting priority -400; drop\n }\n }\n"
	labtest.Run(t, dead, drop, labtest.Nfts(t)[0].Path, "-f", "-")
	var wg sync.WaitGroup
	start := time.Now()
	for _, f := range ipfamily.All {
		to := l.service.frontendOf(l.Cluster, dataplane.ClusterIP, f)
		for range 16 {
			wg.Go(func() { l.Pods[2].Dial(snapshot.TCP, to, lab.Options{Timeout: 1700 * time.Millisecond}) })
		}
	}
	udp := l.service.frontendOf(l.Cluster, dataplane.NodePort, ipfamily.IPv4)
	for i := range uint16(16) {
		from := netip.AddrPortFrom(l.Outside.IP(ipfamily.IPv4), 40000+i)
		wg.Go(func() {
			for range 3 {
				l.Outside.Dial(snapshot.UDP, udp, lab.Options{Timeout: 400 * time.Millisecond, From: from})
			}
		})
	}
	time.Sleep(time.Until(start.Add(700 * time.Millisecond)))
	if got := l.read(t); len(got) > 0 {
		t.Errorf("evidence before anything was sent again: %v", got)
	}
	wg.Wait()
	got := l.read(t)
	for _, f := range ipfamily.All {
		if e := got[at(dead, f)]; e.Unanswered == 0 || e.Refused != 0 {
			t.Errorf("%s: %+v", f, e)
		}
		delete(got, at(dead, f))
	}
	if len(got) > 0 {
		t.Errorf("evidence of healthy endpoints: %v", got)
	}
	for _, n := range labtest.Nfts(t) {
		if text := n.List(t, l.Node); !strings.Contains(text, "update @unanswered-by { ct original ip6 daddr . ") {
			t.Errorf("%s lists no chain unanswered:\n%s", n.Path, text)
		}
	}
	quiet(t, l.backend)
	next := open(t, l.Node, Options{})
	if r, err := next.Apply(st, dataplane.Change{}); err != nil || r.Full || r.Added+r.Replaced+r.Removed > 0 {
		t.Errorf("evidence made the tables other ones: %+v, %v", r, err)
	}
	quiet(t, next)
	if got := l.read(t); len(got) != 2 {
		t.Errorf("a restart made evidence disappear: %v", got)
	}
}

// TestRefusedAtOnce: where a refusal is not retried, the client has it at once, and it is counted. A reset of a running
// connection is not.
func TestRefusedAtOnce(t *testing.T) {
	l := newEvidenceLab(t, endpointState{"none", nil, nil})
	st := l.state(l.RemotePods[1], l.Node)
	retry(st, false)
	apply(t, l.backend, st)
	want := map[netip.AddrPort]uint64{}
	for _, f := range ipfamily.All {
		for _, from := range []*lab.Host{l.Pods[2], l.Outside, l.Node} {
			to := l.service.frontendOf(l.Cluster, dataplane.LoadBalancerIP, f)
			for range 12 {
				r := from.Dial(snapshot.TCP, to, lab.Options{Timeout: 5 * time.Second})
				if !errors.Is(r.Err, unix.ECONNREFUSED) || r.Latency > 500*time.Millisecond {
					t.Fatalf("%s: %v after %v; want refused at once", from.Name, r, r.Latency)
				}
				want[at(l.Node, f)]++
			}
		}
	}
	got, total, expected := l.read(t), uint64(0), uint64(0)
	for _, n := range want {
		expected += n
	}
	for ep, e := range got {
		if ep.Addr() != l.Node.IP(ipfamily.Of(ep.Addr())) && ep.Addr() != l.RemotePods[1].IP(ipfamily.Of(ep.Addr())) {
			t.Errorf("evidence of somebody else: %+v", e)
		}
		if e.Refused == 0 || e.Unanswered > 0 {
			t.Errorf("%+v", e)
		}
		total += e.Refused
	}
	if len(got) != 4 || total != expected {
		t.Errorf("%d refusals were counted at %d endpoints; want %d at 4: %v", total, len(got), expected, got)
	}
}

// TestRunningConnectionReset cuts connections from the endpoint's side: nothing was refused.
func TestRunningConnectionReset(t *testing.T) {
	l := newEvidenceLab(t, endpointState{"here", []condition{ready}, nil})
	st := l.state()
	apply(t, l.backend, st)
	for _, f := range ipfamily.All {
		c, r := l.Outside.Open(snapshot.TCP, l.service.frontendOf(l.Cluster, dataplane.LoadBalancerIP, f), lab.Options{})
		if c == nil {
			t.Fatal(r)
		}
		defer c.Close()
	}
	labtest.Check(t, l.servers[l.Pods[0]].Close())
	time.Sleep(100 * time.Millisecond) // what must not come has no moment at which to look
	if got := l.read(t); len(got) > 0 {
		t.Errorf("resets of running connections are evidence: %v", got)
	}
}

// TestRefusedRetry: of four endpoints one refuses. Clients are answered, by one of their next packets.
func TestRefusedRetry(t *testing.T) {
	for name, refuser := range map[string]func(*evidenceLab) *lab.Host{
		"remote pod":     func(l *evidenceLab) *lab.Host { return l.RemotePods[1] },
		"local pod":      func(l *evidenceLab) *lab.Host { return l.Pods[2] },
		"node's network": func(l *evidenceLab) *lab.Host { return l.Node },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newEvidenceLab(t, endpointState{"both", []condition{ready, ready}, []condition{ready}})
			at := refuser(l)
			st := l.state(at)
			retry(st, true)
			apply(t, l.backend, st)
			stalls, start := labtest.WatchStalls(t), time.Now()
			var wg sync.WaitGroup
			for _, f := range ipfamily.All {
				to := l.service.frontendOf(l.Cluster, dataplane.ClusterIP, f)
				for _, from := range []*lab.Host{l.RemotePods[2], l.Node} {
					for range 32 { // of a family's 64, none chooses the one that refuses with a chance of 10^-8
						wg.Go(func() {
							r := from.Dial(snapshot.TCP, to, lab.Options{Timeout: 40 * time.Second})
							// The same endpoint may be chosen each time.
							if again := r.Outcome == lab.Refused && r.Latency > 3900*time.Millisecond; r.Outcome != lab.Answered && !again {
								t.Errorf("%s to %v: %v after %v", from.Name, to, r, r.Latency)
							}
						})
					}
				}
			}
			var got map[netip.AddrPort]dataplane.Evidence
			testkit.Eventually(t, 20*time.Second, "refusals of both families", func() bool {
				got = l.read(t)
				return got[netip.AddrPortFrom(at.IP4, targetPort)].Refused > 0 &&
					got[netip.AddrPortFrom(at.IP6, targetPort)].Refused > 0
			}, func() string { return fmt.Sprint(got) })
			wg.Wait()
			for e, seen := range got {
				// Who answers after a second has not answered a packet.
				late := seen.Refused == 0 && stalls.Since(start)
				if e != netip.AddrPortFrom(at.IP(ipfamily.Of(e.Addr())), targetPort) && !late {
					t.Errorf("evidence of another: %v", seen)
				}
			}
		})
	}
}

// TestRefusedByAll: a client that every endpoint refuses, as by a policy, is told so by its first SYN after 4.5 s.
func TestRefusedByAll(t *testing.T) {
	l := newEvidenceLab(t, endpointState{"none", nil, nil})
	st := l.state(l.RemotePods[1], l.RemotePods[2])
	retry(st, true)
	apply(t, l.backend, st)
	var wg sync.WaitGroup
	for _, f := range ipfamily.All {
		for _, from := range []*lab.Host{l.Pods[2], l.Outside, l.Node} {
			to := l.service.frontendOf(l.Cluster, dataplane.LoadBalancerIP, f)
			for range 12 {
				wg.Go(func() {
					r := from.Dial(snapshot.TCP, to, lab.Options{Timeout: 14 * time.Second})
					if !errors.Is(r.Err, unix.ECONNREFUSED) || r.Latency < 4500*time.Millisecond {
						t.Errorf("%s: %v after %v; want refused after 5 or 7 s", from.Name, r, r.Latency)
					}
				})
			}
		}
	}
	wg.Wait()
	labtest.Check(t, l.reader.each(func(e *nft.Listed) {
		if from := e.Sender(); e.Set == nft.Retried && !slices.Contains(l.addrs(), from.Addr()) {
			t.Errorf("%v is no client", from)
		}
	}, nft.Retried))
}

// addrs returns the addresses of all clients.
func (l *evidenceLab) addrs() (list []netip.Addr) {
	for _, h := range []*lab.Host{l.Pods[2], l.Outside, l.Node} {
		for _, f := range ipfamily.All {
			list = append(list, h.IP(f))
		}
	}
	return list
}

// TestRefusalsUnderLoad: 300 clients, 100 a second, are all refused at once, where ICMP errors would reach some dozen
// of them. It is no evidence against anybody.
func TestRefusalsUnderLoad(t *testing.T) {
	l := newEvidenceLab(t, endpointState{"none", nil, nil})
	apply(t, l.backend, l.state())
	// Hosts of the lab send as many errors as they like; these are the kernel's defaults.
	labtest.Check(t, l.Node.Sysctl("net/ipv4/icmp_ratemask", "6168"))
	labtest.Check(t, l.Node.Sysctl("net/ipv6/icmp/ratelimit", "1000"))
	var families sync.WaitGroup // whose errors the kernel counts apart
	for _, f := range ipfamily.All {
		families.Go(func() {
			for _, from := range []*lab.Host{l.Pods[2], l.Outside, l.Node} {
				at := l.service.frontendOf(l.Cluster, dataplane.ClusterIP, f)
				if from == l.Outside {
					at = l.service.frontendOf(l.Cluster, dataplane.NodePort, f)
				}
				refusedAtOnce(t, from, at)
				refusedAtOnce(t, from, netip.AddrPortFrom(l.service.frontendOf(l.Cluster, dataplane.ClusterIP, f).Addr(), 9))
			}
		})
	}
	families.Wait()
	if got := l.read(t); len(got) > 0 {
		t.Errorf("refusals without an endpoint are evidence: %v", got)
	}
}

// refusedAtOnce has 300 clients come, 100 a second.
func refusedAtOnce(t *testing.T, from *lab.Host, to netip.AddrPort) {
	var wg sync.WaitGroup
	for range 300 {
		wg.Go(func() {
			r := from.Dial(snapshot.TCP, to, lab.Options{Timeout: 5 * time.Second})
			if !errors.Is(r.Err, unix.ECONNREFUSED) || r.Latency > 900*time.Millisecond {
				t.Errorf("%s to %v: %v after %v", from.Name, to, r, r.Latency)
			}
		})
		time.Sleep(10 * time.Millisecond)
	}
	wg.Wait()
}

// TestAnswers: who accepts a connection is known with the time of the last one; who refuses or does not answer is not.
func TestAnswers(t *testing.T) {
	l := newEvidenceLab(t, endpointState{"both", []condition{ready}, []condition{ready}})
	apply(t, l.backend, l.state(l.RemotePods[1]))
	var wg sync.WaitGroup
	for _, f := range ipfamily.All {
		for _, from := range []*lab.Host{l.Pods[2], l.Outside, l.Node} {
			for range 12 {
				wg.Go(func() {
					from.Dial(snapshot.TCP, l.service.frontendOf(l.Cluster, dataplane.LoadBalancerIP, f),
						lab.Options{Timeout: time.Minute})
				})
			}
		}
	}
	wg.Wait()
	time.Sleep(100 * time.Millisecond) // so that the times that are told can be seen to be times
	list, err := l.reader.Answers()
	labtest.Check(t, err)
	got := map[netip.AddrPort]time.Duration{}
	for _, a := range list {
		got[a.Endpoint] = a.Ago
	}
	for _, f := range ipfamily.All {
		for _, h := range []*lab.Host{l.Pods[0], l.RemotePods[0]} {
			ago, ok := got[at(h, f)]
			if delete(got, at(h, f)); !ok || ago < 50*time.Millisecond || ago > time.Minute {
				t.Errorf("%v answered %v ago", at(h, f), ago)
			}
		}
	}
	if len(got) > 0 {
		t.Errorf("answers of others: %v", got)
	}
	accepted, err := l.reader.Accepted()
	labtest.Check(t, err)
	for _, p := range accepted {
		if !slices.Contains(l.addrs(), p.Client) || p.Ago > time.Minute ||
			!slices.ContainsFunc(list, func(a dataplane.Answer) bool { return a.Endpoint == p.Endpoint }) {
			t.Errorf("accepted is %+v", p)
		}
	}
	if len(accepted) < 10 {
		t.Errorf("only %d pairs of clients and endpoints are known: %v", len(accepted), accepted)
	}
}

// TestForsaken: who was accepted before is known when the endpoint refuses, or does not answer. Others are not.
func TestForsaken(t *testing.T) {
	l := newEvidenceLab(t, endpointState{"both", []condition{ready}, nil})
	st := l.state()
	retry(st, false)
	apply(t, l.backend, st)
	pod := l.Pods[0]
	dial := func(from *lab.Host, f ipfamily.Family, want lab.Outcome) {
		t.Helper()
		to := l.service.frontendOf(l.Cluster, dataplane.ClusterIP, f)
		if r := from.Dial(snapshot.TCP, to, lab.Options{Timeout: 1500 * time.Millisecond}); r.Outcome != want {
			t.Errorf("%s: %v", from.Name, r)
		}
	}
	check := func(want ...netip.Addr) {
		t.Helper()
		got, err := l.reader.Forsaken()
		labtest.Check(t, err)
		var clients []netip.Addr
		for _, p := range got {
			if clients = append(clients, p.Client); p.Endpoint != at(pod, ipfamily.Of(p.Client)) || p.Ago > 5*time.Second {
				t.Errorf("%+v", p)
			}
		}
		slices.SortFunc(want, netip.Addr.Compare)
		slices.SortFunc(clients, netip.Addr.Compare)
		if !slices.Equal(clients, want) {
			t.Errorf("forsaken are %v, want %v", clients, want)
		}
	}
	known, unknown := l.Pods[2], l.Pods[1]
	dial(known, ipfamily.IPv4, lab.Answered)
	dial(known, ipfamily.IPv6, lab.Answered)
	labtest.Check(t, l.servers[pod].Close())
	for _, from := range []*lab.Host{known, unknown} {
		dial(from, ipfamily.IPv4, lab.Refused)
	}
	check(known.IP(ipfamily.IPv4))
	const drop = "table inet dead {\n chain c { type filter hook prerouting priority -400; drop\n }\n }\n"
	labtest.Run(t, pod, drop, labtest.Nfts(t)[0].Path, "-f", "-")
	for _, from := range []*lab.Host{known, unknown} {
		dial(from, ipfamily.IPv6, lab.TimedOut)
	}
	check(known.IP(ipfamily.IPv4), known.IP(ipfamily.IPv6))
}

// TestLostConnectionIsReset deletes the conntrack entry of an open connection whose Service has no endpoint any more,
// or is gone. The client's next packet is answered with a reset.
func TestLostConnectionIsReset(t *testing.T) {
	gone := func(l *evidenceLab) *dataplane.State {
		snap := snapshot.New()
		snap.Apply(facts(l.Cluster))
		st, _ := dataplane.Compute(dataplane.Config{NodeName: "node", DetectLocal: clusterCIDR}, snap)
		return st
	}
	empty := func(internalLocal bool, state endpointState) func(*evidenceLab) *dataplane.State {
		return func(l *evidenceLab) *dataplane.State {
			l.service.internalLocal, l.service.state = internalLocal, state
			return l.state()
		}
	}
	otherPort := func(l *evidenceLab) *dataplane.State {
		return oneState(l.Cluster, l.service, func(svc *snapshot.Service) {
			for i := range svc.Ports {
				svc.Ports[i].Port++
			}
		})
	}
	for name, after := range map[string]func(*evidenceLab) *dataplane.State{
		"no endpoint":       empty(false, endpointState{"none", nil, nil}),
		"no local endpoint": empty(true, endpointState{"there", nil, []condition{ready}}),
		"no such port":      otherPort,
		"no such Service":   gone,
	} {
		t.Run(name, func(t *testing.T) {
			l := newEvidenceLab(t, endpointState{"here", []condition{ready}, nil})
			apply(t, l.backend, l.state())
			var open []*lab.Conn
			for _, f := range ipfamily.All {
				for _, from := range []*lab.Host{l.Pods[2], l.Node} {
					c, r := from.Open(snapshot.TCP, l.service.frontendOf(l.Cluster, dataplane.ClusterIP, f), lab.Options{})
					if c == nil {
						t.Fatal(r)
					}
					open = append(open, c)
				}
			}
			_, err := l.backend.ApplyAll(after(l), dataplane.Change{Globals: true, Services: []snapshot.Name{l.service.name()}})
			labtest.Check(t, err)
			if r := open[0].Ping(time.Second); r.Outcome != lab.Answered {
				t.Errorf("an open connection: %v", r)
			}
			forgetConnections(t, l.Node)
			for i, c := range open {
				if r := c.Ping(2 * time.Second); !errors.Is(r.Err, unix.ECONNRESET) || r.Latency > 300*time.Millisecond {
					t.Errorf("connection %d: %v after %v; want a reset", i, r, r.Latency)
				}
			}
		})
	}
}

// forgetConnections empties a host's conntrack table.
func forgetConnections(t *testing.T, h *lab.Host) {
	t.Helper()
	labtest.Check(t, h.Do(func() error {
		handle, err := netlink.NewHandle(unix.NETLINK_NETFILTER)
		if err != nil {
			return err
		}
		defer handle.Close()
		return handle.ConntrackTableFlush(netlink.ConntrackTable)
	}))
}

// TestRetryServicesFollow: a frontend is in retry-services while both its pools may retry, the rule is there while the
// set has elements, and nothing of that counts as strange.
func TestRetryServicesFollow(t *testing.T) {
	l := newEvidenceLab(t, endpointState{"both", []condition{ready}, []condition{ready}})
	st := l.state()
	retry(st, true)
	apply(t, l.backend, st)
	change := dataplane.Change{Services: []snapshot.Name{l.service.name()}}
	for _, yes := range []bool{true, false, true} {
		retry(st, yes)
		_, err := l.backend.ApplyAll(st, change)
		labtest.Check(t, err)
		got := held(t, l.backend)
		if want := wanted(st); got != want {
			t.Errorf("retry %v: %s", yes, labtest.FirstDifference(got, want))
		}
		for _, line := range []string{
			"ip retry-services 10.96.0.1 . tcp . 80 ", "ip6 retry-services fd00:10:96::1 . tcp . 80 ",
		} {
			if strings.Contains(got, line) != yes {
				t.Errorf("retry %v: %q is there: %v", yes, line, !yes)
			}
		}
		if strings.Contains(got, "retry-services 10.96.0.1 . udp") {
			t.Error("UDP is retried")
		}
		rules := labtest.Run(t, l.Node, "", "nft", "list", "chain", "ip", "verdict", "refused")
		if strings.Contains(rules, "@retry-services") != yes {
			t.Errorf("retry %v:\n%s", yes, rules)
		}
		quiet(t, l.backend)
	}
	labtest.Check(t, l.Node.Do(func() error {
		i, err := Inspect()
		if err != nil {
			return err
		}
		defer i.Close()
		d, err := i.Differences(t.Context(), st)
		if err == nil && (len(d.Wrong) > 0 || len(d.Differences) > 0 || len(d.Contradictions) > 0) {
			t.Errorf("%+v", d)
		}
		return err
	}))
}
