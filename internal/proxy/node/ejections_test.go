package node

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

var soaked = flag.Int64("ejections.connections", 0,
	"how many connections TestWrongEjections opens in a world; 0: a thousand, in the worlds that differ most")

// world is what happens to packets while all endpoints answer those whom they may answer.
type world struct {
	name string
	// rules are those of the first endpoints, own those of the client that knocks.
	rules []string
	at    int
	own   string
	// knocks says that the client, and Outside, which seems to be the node, connect all the time, whether they are allowed
	// or not; known, that they were allowed before.
	knocks, known bool
	// dialers connect from a client that is allowed, without a pause. flood says that SYNs come from addresses that nobody
	// has.
	dialers int
	flood   bool
	// soak leaves it to make ejections.
	soak bool
}

// pauses are those between the connections of clients that come rarely, on average. The Services of each are rareEach.
var pauses = []time.Duration{300 * time.Millisecond, time.Second, 4 * time.Second}

const (
	rareEach      = 8
	firstRarePort = 8081
	worldPorts    = "8080-8104"
)

// worlds returns those of TestWrongEjections.
func (n *shopNode) worlds() []world {
	forbidden := fmt.Sprintf("ip saddr { %v, %v, 10.244.1.1 } tcp dport %s ", n.Pods[1].IP(ipfamily.IPv4),
		n.Node.IP(ipfamily.IPv4), worldPorts)
	loss := func(percent int) string {
		return fmt.Sprintf("tcp dport %s numgen random mod 100 < %d drop", worldPorts, percent)
	}
	client := fmt.Sprintf("ip saddr %v drop", n.Pods[1].IP(ipfamily.IPv4))
	var at1, at3 []world
	for i, verdict := range []string{"drop", "reject with tcp reset", "reject"} {
		// Those whom one endpoint forbids it must not have accepted before: docs/decisions/0017-second-chance.md.
		at1 = append(at1, world{name: "policy at one: " + verdict, rules: []string{forbidden + verdict}, at: 1,
			knocks: true, dialers: 64, soak: i > 0})
		at3 = append(at3,
			world{name: "policy at all: " + verdict, rules: []string{forbidden + verdict}, at: 3, knocks: true, known: true,
				dialers: 64, soak: i > 0},
			world{name: "policy at all, and lossy links: " + verdict, rules: []string{forbidden + verdict, loss(5)}, at: 3,
				knocks: true, known: true, dialers: 300, flood: i == 0, soak: i > 0})
	}
	return slices.Concat(at1, []world{
		{name: "policy drops one client", rules: []string{client}, at: 3, knocks: true, known: true, dialers: 64,
			soak: true},
		{name: "flood of a client that never answers", own: "tcp sport 80 drop", knocks: true, known: true, dialers: 64,
			soak: true},
		{name: "flood of SYNs", flood: true, dialers: 64},
		{name: "lossy links", rules: []string{loss(20)}, at: 3, dialers: 1000, soak: true},
		{name: "lossy links and a flood of SYNs", rules: []string{loss(5)}, at: 3, flood: true, dialers: 300},
	}, at3)
}

// TestWrongEjections lists what must not eject an endpoint that answers others. make ejections opens a million
// connections.
func TestWrongEjections(t *testing.T) {
	var all atomic.Int64
	t.Cleanup(func() { t.Logf("%d connections in all worlds", all.Load()) })
	settings := []string{"on", "off"}
	if *soaked == 0 {
		settings = settings[:1]
	}
	for _, records := range settings {
		t.Run("records "+records, func(t *testing.T) {
			t.Parallel()
			n := newShopNode(t, 3, "on", "--records="+records)
			n.addRare()
			for _, w := range n.worlds() {
				if w.soak && *soaked == 0 {
					continue
				}
				t.Run(w.name, func(t *testing.T) { all.Add(n.live(t, w)) })
			}
		})
	}
}

// rare returns where a Service is reached whose clients come rarely.
func (n *shopNode) rare(i int) netip.AddrPort {
	return netip.AddrPortFrom(lab.Nth(lab.ServiceRange[ipfamily.IPv4], 10+i), 80)
}

// addRare adds Services of their own for clients that come rarely.
func (n *shopNode) addRare() {
	n.t.Helper()
	text, err := os.ReadFile(n.manifest)
	labtest.Check(n.t, err)
	text, _, _ = bytes.Cut(text, []byte("namespace: aaa"))
	for i := range rareEach * len(pauses) {
		port := uint16(firstRarePort + i)
		for _, pod := range n.RemotePods {
			_, err := pod.Serve(snapshot.TCP, port)
			labtest.Check(n.t, err)
		}
		more := strings.NewReplacer("namespace: shop", fmt.Sprint("namespace: rare-", i), "10.96.0.1",
			n.rare(i).Addr().String(), "96::1", fmt.Sprint("96::1", i), "8080", fmt.Sprint(port)).Replace(string(text))
		labtest.Check(n.t, os.WriteFile(filepath.Join(filepath.Dir(n.manifest), fmt.Sprintf("rare-%d.yaml", i)),
			[]byte(more), 0o644))
	}
	for i := range rareEach * len(pauses) {
		testkit.Eventually(n.t, 30*time.Second, "Services with few clients", func() bool {
			return n.Pods[2].Dial(snapshot.TCP, n.rare(i), lab.Options{}).Outcome == lab.Answered
		}, n.log.String)
	}
}

// live opens connections in a world, expects no ejection, and returns how many there were.
func (n *shopNode) live(t *testing.T, w world) int64 {
	before, said := n.metric("verdict_ejections_total"), len(n.log.String())
	for _, pod := range n.RemotePods {
		n.firewall(pod)
	}
	n.firewall(n.Pods[1])
	services := []netip.AddrPort{n.web(ipfamily.IPv4)}
	for i := range rareEach * len(pauses) {
		services = append(services, n.rare(i))
	}
	traffic := labtest.Traffic{Patience: 30 * time.Second, Target: func(*rand.Rand) (snapshot.Protocol, netip.AddrPort) {
		return snapshot.TCP, services[0]
	}}
	var knocked, flooded atomic.Int64
	if w.known {
		// A policy that ends and begins again within seconds may eject: docs/decisions/0017-second-chance.md.
		time.Sleep(evidenceLasts)
		n.meet(services)
	}
	for _, pod := range n.RemotePods[:w.at] {
		n.firewall(pod, w.rules...)
	}
	n.firewall(n.Pods[1], w.own)
	start := time.Now()
	if w.knocks {
		for i := range 20 {
			n.knock(&traffic, []*lab.Host{n.Pods[1], n.Outside}[i%2], services, &knocked)
		}
	}
	if w.flood {
		traffic.Beside(func(stop <-chan struct{}) { n.flood(t, services, stop, &flooded) })
	}
	for i, to := range services[1:] {
		n.comeRarely(&traffic, to, pauses[i%len(pauses)])
	}
	for seed := range w.dialers {
		traffic.Open(n.Pods[0], uint64(seed))
	}
	time.Sleep(8 * time.Second) // as long as it takes to believe in evidence
	most := cmp.Or(*soaked, 1000)
	testkit.Eventually(t, time.Minute+time.Duration(most)*20*time.Millisecond, "the connections", func() bool {
		return traffic.Dials.Load() >= most
	}, n.log.String)
	traffic.Stop()
	t.Logf("%v in %v; %d knocks, %d SYNs of a flood; so far %v probes, %v flows deleted", &traffic,
		time.Since(start).Round(time.Second), knocked.Load(), flooded.Load(), n.metric("verdict_probes_total"),
		n.metric("verdict_unanswered_flows_deleted_total"))
	sum, failed := n.metric("verdict_ejections_total")-before, int64(traffic.Failures())
	if sum > 0 || failed > traffic.Dials.Load()/100 {
		lines := regexp.MustCompile(`(?m)^.*an endpoint.*$`).FindAllString(n.log.String()[said:], -1)
		t.Errorf("%v wrong ejections, %v\n%s", sum, &traffic, strings.Join(lines, "\n"))
		traffic.Check(t)
	}
	return traffic.Dials.Load()
}

// evidenceLasts is longer than what was seen in the last world counts.
const evidenceLasts = 12 * time.Second

// meet has the clients that knock accepted by all endpoints, as long as they may be.
func (n *shopNode) meet(services []netip.AddrPort) {
	for _, to := range services {
		for _, from := range []*lab.Host{n.Pods[1], n.Outside} {
			n.dialTo(from, to, 8)
		}
	}
}

// knock has a client connect to all Services, whatever it is told.
func (n *shopNode) knock(tr *labtest.Traffic, from *lab.Host, services []netip.AddrPort, count *atomic.Int64) {
	tr.Beside(func(stop <-chan struct{}) {
		for {
			select {
			case <-stop:
				return
			case <-time.After(20 * time.Millisecond):
			}
			from.Dial(snapshot.TCP, services[count.Add(1)%int64(len(services))], lab.Options{Timeout: 6 * time.Second})
		}
	})
}

// comeRarely has a client that is allowed connect with random pauses.
func (n *shopNode) comeRarely(tr *labtest.Traffic, to netip.AddrPort, pause time.Duration) {
	tr.Beside(func(stop <-chan struct{}) {
		for {
			select {
			case <-stop:
				return
			case <-time.After(time.Duration(rand.ExpFloat64() * float64(pause))):
			}
			if r := n.Pods[2].Dial(snapshot.TCP, to, lab.Options{Timeout: tr.Patience}); r.Outcome != lab.Answered {
				tr.Fail("%s to %s: %v", n.Pods[2].Name, to, r)
			}
			tr.Dials.Add(1)
		}
	})
}

// floodRest is between two bursts of floodBurst SYNs: fewer than fill the table of connections of the machine.
const (
	floodBurst = 20
	floodRest  = 20 * time.Millisecond
)

// flood sends SYNs from addresses that nobody has.
func (n *shopNode) flood(t *testing.T, services []netip.AddrPort, stop <-chan struct{}, count *atomic.Int64) {
	err := n.Pods[1].Do(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		for {
			select {
			case <-stop:
				return nil
			case <-time.After(floodRest):
			}
			for range floodBurst {
				to := services[rand.IntN(len(services))]
				err := unix.Sendto(fd, spoofedSYN(rand.Uint32(), to), 0, &unix.SockaddrInet4{Addr: to.Addr().As4()})
				if err != nil && err != unix.ENOBUFS {
					return err
				}
				count.Add(1)
			}
		}
	})
	if err != nil {
		t.Error(err)
	}
}

// spoofedSYN is a first packet from an address of 172.16.0.0/12.
func spoofedSYN(seed uint32, to netip.AddrPort) []byte {
	ip := []byte{0x45, 0, 0, 40, 0, 0, 0, 0, 64, unix.IPPROTO_TCP, 0, 0}
	ip = binary.BigEndian.AppendUint32(ip, 172<<24|16<<16|seed>>12)
	ip = append(ip, to.Addr().AsSlice()...)
	tcp := binary.BigEndian.AppendUint16(nil, uint16(seed)|1<<12)
	tcp = binary.BigEndian.AppendUint16(tcp, to.Port())
	tcp = binary.BigEndian.AppendUint32(tcp, seed)
	const syn = 2
	tcp = append(tcp, 0, 0, 0, 0, 5<<4, syn, 0xff, 0xff, 0, 0, 0, 0)
	sum := uint32(unix.IPPROTO_TCP + len(tcp))
	for _, part := range [][]byte{ip[12:], tcp} {
		for i := 0; i < len(part); i += 2 {
			sum += uint32(binary.BigEndian.Uint16(part[i:]))
		}
	}
	for sum > 0xffff {
		sum = sum&0xffff + sum>>16
	}
	binary.BigEndian.PutUint16(tcp[16:], ^uint16(sum))
	return append(ip, tcp...)
}
