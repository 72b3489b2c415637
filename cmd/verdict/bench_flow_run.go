package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net"
	"net/netip"
	"runtime/debug"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/config"
	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/nft/kernel"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// The node's address is above all endpoints': benchConfig's cluster CIDR holds it, the lower half of that does not. The
// gateway is somebody whom nobody asks.
const (
	flowNode    = benchEndpoints | 1<<22 | 1
	flowGateway = flowNode + 1
)

// What the flows come from and go to.
const (
	flowSockets    = 64
	flowSourcePort = 20000
	flowPort       = 80
)

// flow measures all variants by turns, so that what else goes on in the machine is the same for all.
func (b *flowBench) flow(ctx context.Context) (_ *flowResult, err error) {
	variants := b.variants()
	defer func() {
		for _, v := range variants {
			err = errors.Join(err, v.close())
		}
	}()
	for _, v := range variants {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		b.progress.show("filling the kernel: %s", v.name())
		if err := v.open(); err != nil {
			return nil, fmt.Errorf("%s: %w", v.name(), err)
		}
	}
	debug.FreeOSMemory() // what it took to fill them is garbage, which need not be collected while others are measured
	if err := settle(ctx); err != nil {
		return nil, err
	}
	for n := range b.rounds + 1 {
		b.progress.show("round %d of %d", n, b.rounds)
		for _, v := range variants {
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			if err := v.round(n == 0); err != nil {
				return nil, fmt.Errorf("%s: %w", v.name(), err)
			}
		}
	}
	return b.flowReport(variants), nil
}

// flowVariant is a node with a ruleset, and what is sent from it.
type flowVariant struct {
	*flowBench
	flowFigures
	*benchHost
	// connections is connection tracking inside the node.
	connections *netlink.Handle
	sends       []flowSend
	// times are those of one flow in each round.
	times []time.Duration
}

// flowSend is one packet: from which socket, and where to.
type flowSend struct {
	socket int
	to     unix.SockaddrInet4
}

// open makes the node, and writes its rules.
func (v *flowVariant) open() (err error) {
	if v.benchHost, err = newBenchHost(); err != nil {
		return err
	}
	err = v.host.Do(func() (err error) {
		v.connections, err = netlink.NewHandle(unix.NETLINK_NETFILTER)
		return err
	})
	if err != nil {
		return err
	}
	if err := v.wire(); err != nil {
		return err
	}
	v.plan()
	switch v.Kind {
	case conntrackAlone, oneDNATRule:
		_, err = v.host.RunInput(flowRules[v.Kind], "nft", "-f", "-")
		return err
	}
	return v.fill()
}

func (v *flowVariant) close() error {
	if v.connections != nil {
		v.connections.Close()
	}
	if v.benchHost == nil {
		return nil
	}
	return v.benchHost.close()
}

// wire gives the node a way out: to a neighbour whose address nobody has, so that the other end of the link throws away
// all it gets before it looks at it.
func (v *flowVariant) wire() error {
	sink, err := v.net.NewHost("sink")
	if err != nil {
		return err
	}
	here, there := lab.End{Host: v.host, Link: "eth0"}, lab.End{Host: sink, Link: "eth0"}
	if err := lab.Link(here, there, lab.LinkOptions{}); err != nil {
		return err
	}
	if err := v.host.AddAddr("eth0", netip.PrefixFrom(benchAddr(flowNode), 32)); err != nil {
		return err
	}
	gateway := benchAddr(flowGateway)
	everywhere := netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	if err := v.host.AddRoute(lab.Route{To: everywhere, Via: gateway, Link: "eth0"}); err != nil {
		return err
	}
	link, err := v.host.Netlink().LinkByName("eth0")
	if err != nil {
		return err
	}
	return v.host.Netlink().NeighSet(&netlink.Neigh{
		LinkIndex: link.Attrs().Index, Family: unix.AF_INET, State: netlink.NUD_PERMANENT, IP: gateway.AsSlice(),
		HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 1},
	})
}

// plan says what is sent: in each pass a packet to every Service in an order by chance, and from another socket than in
// the passes before, so that each packet is a flow of its own. It is the same in all rounds. Where there are no
// Services, each flow goes to an address of its own.
func (v *flowVariant) plan() {
	targets, first := v.Services, uint32(benchClusterIPs)
	if targets == 0 {
		targets = v.flows
	}
	if v.Services == 0 || v.Kind == externalLocal {
		first = benchNewcomers
	}
	random := rand.New(rand.NewPCG(1, 1))
	for pass := 0; len(v.sends) < v.flows; pass++ {
		order := random.Perm(targets)
		for _, i := range order[:min(targets, v.flows-len(v.sends))] {
			to := unix.SockaddrInet4{Addr: benchAddr(first + uint32(i)).As4(), Port: flowPort}
			v.sends = append(v.sends, flowSend{(i + pass) % flowSockets, to})
		}
	}
}

// flowRules are the rulesets that are not Verdict's. The endpoint of the second follows from where the packet goes to,
// as hashed by the kernel: if there were only one, connection tracking would have to find other source ports for most
// flows.
var flowRules = map[flowKind]string{
	conntrackAlone: fmt.Sprintf(`table ip bench {
	chain output { type nat hook output priority -100; ip daddr 255.255.255.255 udp dport 1 dnat to %s:8080; }
}`, benchAddr(benchEndpoints)),
	oneDNATRule: fmt.Sprintf(`table ip bench {
	chain output { type nat hook output priority -100; meta l4proto udp dnat to %s-%s:8080; }
}`, benchAddr(benchEndpoints), benchAddr(benchEndpoints+1<<16-1)),
}

// fill writes Verdict's tables.
func (v *flowVariant) fill() error {
	config := benchConfig
	if v.Kind == masqueradedFlows {
		config.DetectLocal.ClusterCIDRs = []netip.Prefix{netip.PrefixFrom(benchAddr(benchEndpoints), 10)}
	}
	l := &benchLine{v.benchHost, snapshot.New(), dataplane.NewPlanner(config)}
	cluster := newBenchCluster(v.Services, v.endpoints)
	delta := newBenchCluster(0, v.endpoints).all() // the node and the Services' range
	from := 0
	for _, to := range v.steps() {
		delta.Merge(v.services(cluster, from, to))
		_, r, err := l.step(delta)
		if err != nil {
			return err
		}
		v.Elements += r.Added - r.Removed
		from, delta = to, snapshot.Delta{}
	}
	return v.forget()
}

// forget has a backend that knows nothing of the tables take the place of the one that filled them. All the tables at
// once are much to hold in memory, and much to look through for the garbage collector.
func (v *flowVariant) forget() error {
	return v.host.Do(func() error {
		other, err := openWithin(kernel.Options{}, config.DefaultCounterMemoryMiB)
		if err != nil {
			return err
		}
		old := v.backend
		v.backend = other
		return old.Close()
	})
}

// steps gives how many Services there are after each change.
func (v *flowVariant) steps() []int {
	if v.Kind != grownTables {
		return []int{v.Services}
	}
	steps := []int{growsFrom}
	for n := range growsSteps {
		factor := math.Pow(float64(v.Services)/growsFrom, float64(n+1)/growsSteps)
		steps = append(steps, int(math.Round(growsFrom*factor)))
	}
	return steps
}

// services gives some of a cluster's Services, as this kind has them.
func (v *flowVariant) services(c *benchCluster, from, to int) snapshot.Delta {
	d := snapshot.Delta{
		Services: make(map[snapshot.Name]*snapshot.Service, to-from),
		Slices:   make(map[snapshot.Name]*snapshot.Slice, to-from),
	}
	for i := from; i < to; i++ {
		svc, slice := c.service(i), c.slice(i)
		svc.Ports[0].Protocol, slice.Ports[0].Protocol = snapshot.UDP, snapshot.UDP
		switch v.Kind {
		case stickyServices:
			svc.Affinity = 3 * time.Hour
		case externalLocal:
			svc.LoadBalancerIPs, svc.ExternalLocal = []netip.Addr{benchAddr(benchNewcomers + uint32(i))}, true
		}
		d.Services[svc.Name], d.Slices[slice.Name] = svc, slice
	}
	return d
}

// round sends all flows once. The first round is not timed, but looked at.
func (v *flowVariant) round(first bool) error {
	if err := v.connections.ConntrackTableFlush(netlink.ConntrackTable); err != nil {
		return fmt.Errorf("forget connections: %w", err)
	}
	took, err := v.send()
	if err != nil {
		return err
	}
	if first {
		return v.look()
	}
	v.times = append(v.times, took)
	return nil
}

// look asks connection tracking what became of the flows.
func (v *flowVariant) look() error {
	held, err := v.connections.ConntrackTableList(netlink.ConntrackTable, unix.AF_INET)
	if err != nil {
		return fmt.Errorf("list connections: %w", err)
	}
	for _, f := range held {
		if !f.Forward.DstIP.Equal(f.Reverse.SrcIP) {
			v.Translated++
		}
		if f.Forward.SrcPort != f.Reverse.DstPort {
			v.Masqueraded++
		}
	}
	want := v.flows
	if v.Services == 0 && v.Kind != oneDNATRule {
		want = 0
	}
	if len(held) != v.flows || v.Translated != want {
		return fmt.Errorf("of %d flows, %d are tracked and %d translated, not %d: this measures something else",
			v.flows, len(held), v.Translated, want)
	}
	return nil
}

// send sends a packet of each flow, and gives the processor time that one takes.
func (v *flowVariant) send() (took time.Duration, err error) {
	err = v.host.Do(func() (err error) {
		var sockets [flowSockets]int
		for n := range sockets {
			if sockets[n], err = flowSocket(flowSourcePort + n); err != nil {
				return err
			}
			defer unix.Close(sockets[n])
		}
		start, err := threadTime()
		if err != nil {
			return err
		}
		packet := []byte{0}
		for i := range v.sends {
			s := &v.sends[i]
			if err := unix.Sendto(sockets[s.socket], packet, 0, &s.to); err != nil {
				return fmt.Errorf("send: %w", err)
			}
		}
		end, err := threadTime()
		took = (end - start) / time.Duration(v.flows)
		return err
	})
	return took, err
}

// flowSocket gives a UDP socket with a port, in the namespace of the calling thread.
func flowSocket(port int) (int, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("socket: %w", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrInet4{Port: port}); err != nil {
		return 0, errors.Join(fmt.Errorf("bind: %w", err), unix.Close(fd))
	}
	return fd, nil
}

// threadTime is the processor time of the calling thread so far. What the kernel does for a packet counts: the thread
// that sends it does that by itself, to the other end of the link.
func threadTime() (time.Duration, error) {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
		return 0, fmt.Errorf("clock_gettime: %w", err)
	}
	return time.Duration(t.Nano()), nil
}
