package main

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/ipvsplugin"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

var moves = flag.Int("moves", 8, "how often TestIPVSUnderLoad moves the Services to IPVS and back")

const (
	// loadServices is how many Services move.
	loadServices = 6
	// loadDials is how many connections clients open, at the least, between one event and the next.
	loadDials = 40
	// loadPatience is how long an answer may take in an emulated machine where proxies start.
	loadPatience = 10 * time.Second
	// carried is what a proxy says when it is at work.
	carried = "all Services are programmed"
	stamp   = "05.000"
)

// needIPVS ends a test where there is no IPVS, as those of ipvsplugin.
func needIPVS(t *testing.T) {
	t.Helper()
	_ = exec.Command("modprobe", "ip_vs").Run() // Linux 5.10 does not load it by itself
	missing := (*ipvsplugin.Missing)(nil)
	switch err := ipvsplugin.Probe("rr", "lc"); {
	case err == nil:
	case errors.As(err, &missing) && os.Getenv("VERDICT_IPVS") == "none":
		t.Skip(err)
	default:
		t.Fatalf("%v; VERDICT_IPVS=none if it is missing on purpose", err)
	}
}

// mover is a proxy whose Services go to IPVS and back.
type mover struct {
	*victim
	// patience is how long a client waits for an answer, limit how long a step may take.
	patience, limit time.Duration
	// events says when what was done, for failures.
	events *[]string
}

func (m mover) event(format string, args ...any) {
	*m.events = append(*m.events, time.Now().Format(stamp)+" "+fmt.Sprintf(format, args...))
}

// move writes all Services, with or without a scheduler, and waits until the kernel has it.
func (m mover) move(scheduler string) {
	m.t.Helper()
	var out strings.Builder
	for i := range loadServices {
		s := m.service(i)
		if scheduler != "" {
			s = strings.Replace(s, "namespace: default}",
				fmt.Sprintf("namespace: default, annotations: {verdict/scheduler: %s}}", scheduler), 1)
		}
		out.WriteString(s)
	}
	m.event("to %q", scheduler)
	m.write("services.yaml", out.String())
	m.until("the Services are scheduled by "+scheduler, func() bool {
		left, err := m.scheduled()
		if err != nil { // the proxy is about to start
			return false
		}
		if scheduler == "" || left == 0 {
			return scheduler == "" && left == 0
		}
		at := netip.AddrPortFrom(lab.Nth(lab.ServiceRange[0], loadServices), 80)
		return strings.Contains(labtest.Run(m.t, m.cluster.Node, "", "ipvsadm", "-Sn"),
			fmt.Sprintf("-A -t %s -s %s", at, scheduler))
	})
	m.event("they are")
}

// scheduled says how many ports of cluster IPs nftables leaves to IPVS. Without tables it is an error.
func (m mover) scheduled() (n int, err error) {
	text, err := m.cluster.Node.Run("nft", "list", "set", "ip", "verdict", "scheduled")
	for i := range loadServices {
		n += strings.Count(text, " "+lab.Nth(lab.ServiceRange[0], i+1).String()+" . ")
	}
	return n, err
}

func (m mover) until(what string, f func() bool, state ...func() string) {
	m.t.Helper()
	testkit.Eventually(m.t, m.limit, what, f, append(state, m.said)...)
}

// load waits until clients have opened some more connections.
func (m mover) load() {
	m.t.Helper()
	from := m.traffic.Dials.Load()
	m.until("clients go on", func() bool { return m.traffic.Dials.Load() >= from+loadDials })
}

// target chooses one of all kinds of targets.
func (m mover) target(random *rand.Rand) (snapshot.Protocol, netip.AddrPort) {
	i, n := random.IntN(loadServices), random.IntN(2)
	to := netip.AddrPortFrom(lab.Nth(lab.ServiceRange[n], i+1), 80)
	switch random.IntN(4) {
	case 0:
		to = netip.AddrPortFrom(m.cluster.Node.IP(ipfamily.All[n]), uint16(30000+i))
	case 1:
		to = netip.AddrPortFrom(lab.Nth(lab.ExternalRange[0], i+1), 80)
	case 2:
		return snapshot.UDP, netip.AddrPortFrom(to.Addr(), 53)
	}
	return snapshot.TCP, to
}

// hold keeps TCP connections, opened one after the other while Services move, and pings over all of them until it is
// stopped.
func (m mover) hold(from *lab.Host, stop <-chan struct{}) {
	var conns []*lab.Conn
	for n := 0; ; n++ {
		select {
		case <-stop:
			for _, c := range conns {
				c.Close()
			}
			return
		case <-time.After(50 * time.Millisecond):
		}
		if n%10 == 0 && len(conns) < 12 {
			at := netip.AddrPortFrom(lab.Nth(lab.ServiceRange[len(conns)%2], 1+len(conns)%loadServices), 80)
			c, r := from.Open(snapshot.TCP, at, lab.Options{Timeout: m.patience})
			if c == nil {
				m.traffic.Fail("%s to %s: %v", from.Name, at, r)
				continue
			}
			conns = append(conns, c)
		}
		c := conns[n%len(conns)]
		if r := c.Ping(m.patience); r.Outcome != lab.Answered {
			m.traffic.Fail("held connection %d of %s: %v", n%len(conns), from.Name, r)
			return
		}
		m.traffic.Pings.Add(1)
	}
}

// again has the proxy end, by SIGKILL to its child, to both, or in the ordinary way, and start again.
func (m mover) again(how int) {
	m.t.Helper()
	m.event("it ends, in way %d", how%3)
	before := strings.Count(m.said(), carried)
	child := m.child() // 0 where no keeper is needed
	switch {
	case how%3 == 0 && child != 0:
		labtest.Check(m.t, syscall.Kill(child, syscall.SIGKILL))
	case how%3 == 2:
		labtest.Check(m.t, m.keeper.Process.Signal(syscall.SIGTERM))
		labtest.Check(m.t, m.keeper.Wait())
		m.start()
	default:
		labtest.Check(m.t, m.keeper.Process.Kill())
		if child != 0 {
			_ = syscall.Kill(child, syscall.SIGKILL) // it may have ended by itself
		}
		_ = m.keeper.Wait()
		m.start()
	}
	m.until("the proxy is back", func() bool { return strings.Count(m.said(), carried) > before })
	m.event("it is back")
}

// clients starts clients that open connections and hold others, until stop is called: outside, the last pod of the
// node, which may be an endpoint itself, and the nodes.
func (m mover) clients() (stop func()) {
	m.traffic.Target, m.traffic.Patience = m.target, m.patience
	pod := m.cluster.Pods[len(m.cluster.Pods)-1]
	for n, from := range []*lab.Host{m.cluster.Outside, pod, m.cluster.Node, m.cluster.Node2} {
		m.traffic.Open(from, uint64(n))
		m.traffic.Beside(func(stop <-chan struct{}) { m.hold(from, stop) })
	}
	return m.traffic.Stop
}

// TestIPVSUnderLoad moves Services from nftables to IPVS and back, kills the proxy and restarts it, while clients
// open connections all the time and hold others. Not one fails.
func TestIPVSUnderLoad(t *testing.T) {
	m := newMover(t)
	stop := m.clients()
	start := time.Now()
	m.load()
	for n := range *moves {
		for _, scheduler := range []string{"lc", ""} {
			m.move(scheduler)
			m.load()
			m.again(n)
			m.load()
		}
	}
	stop()
	t.Logf("%d moves and as many kills and restarts in %v; %v", 2**moves, time.Since(start).Round(time.Second), &m.traffic)
	m.traffic.Check(t, *m.events...)
	labtest.Check(t, m.keeper.Process.Signal(syscall.SIGTERM))
	labtest.Check(t, m.keeper.Wait())
	if said := m.said(); strings.Contains(said, "another program changed") {
		t.Errorf("the proxy believes that others changed what it wrote:\n%s", said)
	}
}

// newMover starts a proxy whose Services are nftables'.
func newMover(t *testing.T) mover {
	t.Helper()
	m := newMoverWorld(t)
	m.start()
	m.move("")
	m.until("the proxy is at work", func() bool { return strings.Contains(m.said(), carried) })
	return m
}

// newMoverWorld has endpoints that serve and files with the Node and the EndpointSlices, and no proxy yet.
func newMoverWorld(t *testing.T) mover {
	t.Helper()
	needIPVS(t)
	m := mover{
		events: new([]string), patience: loadPatience, limit: patience,
		victim: &victim{t: t, cluster: labtest.NewCluster(t, lab.Config{LocalPods: 2, RemotePods: 2}), dir: t.TempDir(),
			random: rand.New(
				rand.NewPCG(1, 1),
			), flags: []string{"--cluster-cidr", fmt.Sprintf("%s,%s", lab.PodRange[0], lab.PodRange[1]),
				"--ipvs-addresses", fmt.Sprintf("%s,%s", lab.ExternalRange[0], lab.ExternalRange[1])}},
	}
	m.serve()
	m.write(
		"node.yaml",
		fmt.Sprintf(
			"apiVersion: v1\nkind: Node\nmetadata: {name: node}\nstatus: {addresses: [{type: InternalIP, address: %s}, "+
				"{type: InternalIP, address: \"%s\"}]}\n",
			m.cluster.Node.IP(ipfamily.IPv4),
			m.cluster.Node.IP(ipfamily.IPv6),
		),
	)
	for i := range loadServices {
		m.write(fmt.Sprintf("slice-%d.yaml", i), m.slice(i))
	}
	var err error
	m.log, err = os.Create(filepath.Join(t.TempDir(), "log"))
	labtest.Check(t, err)
	return m
}
