package benchmark

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

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// The node's address is above all endpoints': NodeConfig's cluster CIDR holds it, the lower half of that does not. The
// gateway is somebody whom nobody asks.
const (
	flowNode    = firstEndpoint | 1<<22 | 1
	flowGateway = flowNode + 1
)

// What the flows come from and go to.
const (
	flowSockets    = 64
	flowSourcePort = 20000
	flowPort       = 80
)

// Flow measures what a new UDP flow of this node to a Service takes the kernel, in processor time of the thread that
// sends it. It measures all variants by turns, so that other work on the machine affects all alike. Prepare comes
// first.
func Flow(ctx context.Context, o *FlowOptions) (_ *FlowResult, err error) {
	variants := o.variants()
	defer func() {
		for _, v := range variants {
			err = errors.Join(err, v.close())
		}
	}()
	for _, v := range variants {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		o.show("filling the kernel: %s", v.Name())
		if err := v.open(); err != nil {
			return nil, fmt.Errorf("%s: %w", v.Name(), err)
		}
	}
	debug.FreeOSMemory() // what it took to fill them is garbage, which need not be collected while others are measured
	if err := settle(ctx); err != nil {
		return nil, err
	}
	for n := range o.Rounds + 1 {
		o.show("round %d of %d", n, o.Rounds)
		for _, v := range variants {
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			if err := v.round(n == 0); err != nil {
				return nil, fmt.Errorf("%s: %w", v.Name(), err)
			}
		}
	}
	return o.report(variants), nil
}

// flowVariant is a node with a ruleset, and what is sent from it.
type flowVariant struct {
	*FlowOptions
	FlowFigures
	node *host
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
	if v.node, err = newHost(v.Options); err != nil {
		return err
	}
	err = v.node.host.Do(func() (err error) {
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
		_, err = v.node.host.RunInput(flowRules[v.Kind], "nft", "-f", "-")
		return err
	}
	return v.fill()
}

func (v *flowVariant) close() error {
	if v.connections != nil {
		v.connections.Close()
	}
	if v.node == nil {
		return nil
	}
	return v.node.close()
}

// wire gives the node a way out: to a neighbour whose address nobody has, so that the other end of the link throws away
// all it gets before it looks at it.
func (v *flowVariant) wire() error {
	sink, err := v.node.net.NewHost("sink")
	if err != nil {
		return err
	}
	here, there := lab.End{Host: v.node.host, Link: "eth0"}, lab.End{Host: sink, Link: "eth0"}
	if err := lab.Link(here, there, lab.LinkOptions{}); err != nil {
		return err
	}
	if err := v.node.host.AddAddr("eth0", netip.PrefixFrom(addr(flowNode), 32)); err != nil {
		return err
	}
	gateway := addr(flowGateway)
	everywhere := netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	if err := v.node.host.AddRoute(lab.Route{To: everywhere, Via: gateway, Link: "eth0"}); err != nil {
		return err
	}
	link, err := v.node.host.Netlink().LinkByName("eth0")
	if err != nil {
		return err
	}
	return v.node.host.Netlink().NeighSet(&netlink.Neigh{
		LinkIndex: link.Attrs().Index, Family: unix.AF_INET, State: netlink.NUD_PERMANENT, IP: gateway.AsSlice(),
		HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 1},
	})
}

// plan says what is sent: in each pass a packet to every Service in an order by chance, and from another socket than in
// the passes before, so that each packet is a flow of its own. It is the same in all rounds. Where there are no
// Services, each flow goes to an address of its own.
func (v *flowVariant) plan() {
	targets, first := v.Services, uint32(firstClusterIP)
	if targets == 0 {
		targets = v.Flows
	}
	if v.Services == 0 || v.Kind == externalLocal {
		first = firstNewcomer
	}
	random := rand.New(rand.NewPCG(1, 1))
	for pass := 0; len(v.sends) < v.Flows; pass++ {
		order := random.Perm(targets)
		for _, i := range order[:min(targets, v.Flows-len(v.sends))] {
			to := unix.SockaddrInet4{Addr: addr(first + uint32(i)).As4(), Port: flowPort}
			v.sends = append(v.sends, flowSend{(i + pass) % flowSockets, to})
		}
	}
}

// flowRules are the rulesets that are not Verdict's. The endpoint of the second follows from where the packet goes to,
// as hashed by the kernel: if there were only one, connection tracking would have to find other source ports for most
// flows.
var flowRules = map[FlowKind]string{
	conntrackAlone: fmt.Sprintf(`table ip bench {
	chain output { type nat hook output priority -100; ip daddr 255.255.255.255 udp dport 1 dnat to %s:8080; }
}`, addr(firstEndpoint)),
	oneDNATRule: fmt.Sprintf(`table ip bench {
	chain output { type nat hook output priority -100; meta l4proto udp dnat to %s-%s:8080; }
}`, addr(firstEndpoint), addr(firstEndpoint+1<<16-1)),
}

// fill writes Verdict's tables.
func (v *flowVariant) fill() error {
	config := NodeConfig
	if v.Kind == masqueradedFlows {
		config.DetectLocal.ClusterCIDRs = []netip.Prefix{netip.PrefixFrom(addr(firstEndpoint), 10)}
	}
	l := &line{v.node, snapshot.New(), dataplane.NewPlanner(config)}
	cluster := NewCluster(v.Services, v.Endpoints)
	delta := NewCluster(0, v.Endpoints).All() // the node and the Services' range
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
	return v.node.reopen()
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
func (v *flowVariant) services(c *Cluster, from, to int) snapshot.Delta {
	d := snapshot.Delta{
		Services: make(map[snapshot.Name]*snapshot.Service, to-from),
		Slices:   make(map[snapshot.Name]*snapshot.Slice, to-from),
	}
	for i := from; i < to; i++ {
		svc, slice := c.Service(i), c.Slice(i)
		svc.Ports[0].Protocol, slice.Ports[0].Protocol = snapshot.UDP, snapshot.UDP
		switch v.Kind {
		case stickyServices:
			svc.Affinity = 3 * time.Hour
		case externalLocal:
			svc.LoadBalancerIPs, svc.ExternalLocal = []netip.Addr{addr(firstNewcomer + uint32(i))}, true
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
	want := v.Flows
	if v.Services == 0 && v.Kind != oneDNATRule {
		want = 0
	}
	if len(held) != v.Flows || v.Translated != want {
		return fmt.Errorf("of %d flows, %d are tracked and %d translated, not %d: this measures something else",
			v.Flows, len(held), v.Translated, want)
	}
	return nil
}

// send sends a packet of each flow, and gives the processor time that one takes.
func (v *flowVariant) send() (took time.Duration, err error) {
	err = v.node.host.Do(func() (err error) {
		var sockets [flowSockets]int
		for n := range sockets {
			if sockets[n], err = flowSocket(flowSourcePort + n); err != nil {
				return err
			}
			defer unix.Close(sockets[n])
		}
		start, err := lab.ThreadTime()
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
		end, err := lab.ThreadTime()
		took = (end - start) / time.Duration(v.Flows)
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
