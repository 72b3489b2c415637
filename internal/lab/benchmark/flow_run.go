package benchmark

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net"
	"net/netip"
	"runtime/debug"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// The addresses of the node and its client are above all endpoints': NodeConfig's cluster CIDR holds them, the lower
// half of that does not. The gateway is somebody whom nobody asks.
const (
	flowNode    = firstEndpoint | 1<<22 | 1
	flowGateway = flowNode + 1
	flowClient  = flowNode + 2
)

// What the flows come from and go to.
const (
	flowSockets    = 64
	flowSourcePort = 20000
	flowPort       = 80
	endpointPort   = 8080
)

// Flow measures what a new UDP flow takes the kernel that this node opens or forwards, in processor time of the thread
// that sends it, and what a packet of an established one takes. It measures all variants by turns, so that other work
// on the machine affects all alike. Prepare comes first.
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
		if err := v.open(ctx); err != nil {
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
	node         *host
	client, sink *lab.Host
	// connections is connection tracking inside the node.
	connections *netlink.Handle
	// sends are to Services, direct are straight to endpoints.
	sends, direct []flowSend
	// times are those of one flow in each round.
	times map[FlowPath][]time.Duration
}

// flowSend is one packet: from which socket, and where to.
type flowSend struct {
	socket int
	to     unix.SockaddrInet4
}

// open makes the node, and writes its rules.
func (v *flowVariant) open(ctx context.Context) (err error) {
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
	case kubeProxyTables:
		return v.fillByKubeProxy(ctx)
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
// all it gets before it looks at it. Whatever the client sends goes through the node.
func (v *flowVariant) wire() (err error) {
	if v.sink, err = v.node.net.NewHost("sink"); err != nil {
		return err
	}
	if v.client, err = v.node.net.NewHost("client"); err != nil {
		return err
	}
	node, everywhere := v.node.host, netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	out, in := lab.End{Host: node, Link: "eth0"}, lab.End{Host: node, Link: "eth1"}
	sink, client := lab.End{Host: v.sink, Link: "eth0"}, lab.End{Host: v.client, Link: "eth0"}
	host := func(a uint32) netip.Prefix { return netip.PrefixFrom(addr(a), 32) }
	return errors.Join(
		lab.Link(out, sink, lab.LinkOptions{}), lab.Link(in, client, lab.LinkOptions{}), node.Forward(),
		node.AddAddr("eth0", host(flowNode)), v.client.AddAddr("eth0", host(flowClient)),
		route(out, everywhere, flowGateway, lab.End{}), route(client, everywhere, flowNode, in),
		route(in, host(flowClient), flowClient, client), route(sink, everywhere, flowNode, out))
}

// route leads packets to a neighbour, whose link is known, or is nobody's.
func route(from lab.End, to netip.Prefix, via uint32, at lab.End) error {
	if err := from.Host.AddRoute(lab.Route{To: to, Via: addr(via), Link: from.Link}); err != nil {
		return err
	}
	link, err := from.Host.Netlink().LinkByName(from.Link)
	if err != nil {
		return err
	}
	hardware := net.HardwareAddr{2, 0, 0, 0, 0, 1}
	if at.Host != nil {
		there, err := at.Host.Netlink().LinkByName(at.Link)
		if err != nil {
			return err
		}
		hardware = there.Attrs().HardwareAddr
	}
	return from.Host.Netlink().NeighSet(&netlink.Neigh{LinkIndex: link.Attrs().Index, Family: unix.AF_INET,
		State: netlink.NUD_PERMANENT, IP: addr(via).AsSlice(), HardwareAddr: hardware})
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
			socket := (i + pass) % flowSockets
			to := unix.SockaddrInet4{Addr: addr(first + uint32(i)).As4(), Port: flowPort}
			v.sends = append(v.sends, flowSend{socket, to})
			to = unix.SockaddrInet4{Addr: EndpointAddr(i).As4(), Port: endpointPort}
			v.direct = append(v.direct, flowSend{socket, to})
		}
	}
}

// flowRules are the rulesets that are not Verdict's. The endpoint of the second follows from where the packet goes to,
// as hashed by the kernel: if there were only one, connection tracking would have to find other source ports for most
// flows.
var flowRules = map[FlowKind]string{
	conntrackAlone: natRules("ip daddr 255.255.255.255 udp dport 1 dnat to %s:%d", addr(firstEndpoint), endpointPort),
	oneDNATRule: natRules("udp dport 80 dnat to %s-%s:%d", addr(firstEndpoint), addr(firstEndpoint+1<<16-1),
		endpointPort),
}

// natRules gives a ruleset with one rule, for packets from the node and for others.
func natRules(format string, args ...any) string {
	rule := fmt.Sprintf(format, args...)
	return "table ip bench {\n chain output { type nat hook output priority -100; " + rule + "; }\n" +
		" chain prerouting { type nat hook prerouting priority -100; " + rule + "; }\n}"
}

// fill writes Verdict's tables.
func (v *flowVariant) fill() error {
	config := NodeConfig
	if v.Kind == masqueradedFlows {
		config.DetectLocal.ClusterCIDRs = []netip.Prefix{netip.PrefixFrom(addr(firstEndpoint), 10)}
	}
	l := &line{v.node, snapshot.New(), dataplane.NewPlanner(config)}
	cluster := NewCluster(v.Services, v.Endpoints)
	delta := NewCluster(0, v.Endpoints).All() // the node and the range of Services
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

// round sends all flows once on each path. The first round is not timed, but looked at.
func (v *flowVariant) round(first bool) error {
	for _, path := range flowPaths {
		if err := v.connections.ConntrackTableFlush(netlink.ConntrackTable); err != nil {
			return fmt.Errorf("forget connections: %w", err)
		}
		took, err := v.walk(path)
		if err == nil && first && path != establishedPacket {
			err = v.look(path)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		if !first {
			if v.times == nil {
				v.times = map[FlowPath][]time.Duration{}
			}
			v.times[path] = append(v.times[path], took)
		}
	}
	return nil
}

// walk sends what takes a path.
func (v *flowVariant) walk(path FlowPath) (time.Duration, error) {
	switch path {
	case nodeToService:
		return send(v.node.host, v.sends)
	case nodeToEndpoint:
		return send(v.node.host, v.direct)
	case clientToService:
		return send(v.client, v.sends)
	case clientToEndpoint:
		return send(v.client, v.direct)
	}
	flow := v.sends[0]
	if err := v.establish(flow); err != nil {
		return 0, err
	}
	return send(v.client, slices.Repeat([]flowSend{flow}, v.Flows))
}

// look asks connection tracking what became of the flows.
func (v *flowVariant) look(path FlowPath) error {
	held, err := v.connections.ConntrackTableList(netlink.ConntrackTable, unix.AF_INET)
	if err != nil {
		return fmt.Errorf("list connections: %w", err)
	}
	translated, masqueraded := 0, 0
	for _, f := range held {
		if !f.Forward.DstIP.Equal(f.Reverse.SrcIP) {
			translated++
		}
		if f.Forward.SrcPort != f.Reverse.DstPort {
			masqueraded++
		}
	}
	want := v.Flows
	switch {
	case path == nodeToEndpoint, path == clientToEndpoint, v.Services == 0 && v.Kind != oneDNATRule:
		want = 0
	case path == nodeToService:
		v.Translated, v.Masqueraded = translated, masqueraded
	}
	if len(held) != v.Flows || translated != want {
		return fmt.Errorf("of %d flows, %d are tracked and %d translated, not %d: this measures something else",
			v.Flows, len(held), translated, want)
	}
	return nil
}

// send sends a packet of each flow from a host, and gives the processor time that one takes.
func send(from *lab.Host, sends []flowSend) (took time.Duration, err error) {
	err = from.Do(func() (err error) {
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
		for i := range sends {
			s := &sends[i]
			if err := unix.Sendto(sockets[s.socket], packet, 0, &s.to); err != nil {
				return fmt.Errorf("send: %w", err)
			}
		}
		end, err := lab.ThreadTime()
		took = (end - start) / time.Duration(len(sends))
		return err
	})
	return took, err
}

// establish has the client open a flow, and the endpoint that it leads to answer, so that it is established.
func (v *flowVariant) establish(flow flowSend) error {
	return v.client.Do(func() error {
		fd, err := flowSocket(flowSourcePort + flow.socket)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		if err := unix.Sendto(fd, []byte{0}, 0, &flow.to); err != nil {
			return fmt.Errorf("send: %w", err)
		}
		held, err := v.connections.ConntrackTableList(netlink.ConntrackTable, unix.AF_INET)
		if err != nil || len(held) != 1 {
			return errors.Join(fmt.Errorf("%d flows are tracked, not one", len(held)), err)
		}
		if err := v.answer(held[0].Reverse); err != nil {
			return fmt.Errorf("answer: %w", err)
		}
		wait := unix.Timeval{Sec: 5}
		if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait); err != nil {
			return err
		}
		if _, _, err := unix.Recvfrom(fd, make([]byte, 8), 0); err != nil {
			return fmt.Errorf("the client got no answer: %w", err)
		}
		return nil
	})
}

// answer sends a packet of one byte from the sink, as the endpoint would, which the sink is not.
func (v *flowVariant) answer(t netlink.IPTuple) error {
	const header, datagram = 20, 9
	packet := make([]byte, header+datagram)
	packet[0], packet[8], packet[9] = 4<<4|header/4, 64, unix.IPPROTO_UDP // the kernel adds length and checksum
	copy(packet[12:], t.SrcIP.To4())
	copy(packet[16:], t.DstIP.To4())
	binary.BigEndian.PutUint16(packet[header:], t.SrcPort)
	binary.BigEndian.PutUint16(packet[header+2:], t.DstPort)
	binary.BigEndian.PutUint16(packet[header+4:], datagram) // and without a checksum
	return v.sink.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		if err != nil {
			return err
		}
		return errors.Join(unix.Sendto(fd, packet, 0, &unix.SockaddrInet4{Addr: [4]byte(t.DstIP.To4())}), unix.Close(fd))
	})
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
