package benchmark

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/conformance/benchmark/results"
	"github.com/verdict-proxy/verdict/internal/lab"
)

const (
	// flows are sent in each round, and as many straight to endpoints; the first of flowRounds is not counted.
	flows      = 4096
	flowRounds = 8
	// flowTOS marks their packets. The server throws those away: an answer would be work of the same thread.
	flowTOS = 0x08
)

// flow measures what a new flow costs, one to a Service and one straight to an endpoint, or only the latter: the
// processor time of the thread that sends its SYN from the node itself, until the packet is out of the node. Both are
// measured by turns, so that what else goes on concerns both. The results are the medians of the rounds.
func (n *node) flow(ctx context.Context, onlyDirect bool, out *results.Data) error {
	undo, err := n.flowRoutes()
	if err != nil {
		return err
	}
	f := flowSender{random: rand.New(rand.NewPCG(uint64(n.size.Services), 7))}
	err = n.host.Do(func() (err error) { // packets from the address that the node has among pods are not masqueraded
		f.socket, err = rawSocket(flowSource)
		if err != nil {
			return err
		}
		f.connections, err = netlink.NewHandle(unix.NETLINK_NETFILTER)
		return err
	})
	defer f.close()
	took := map[bool][]float64{} // by whether it is direct
	for round := 0; round < flowRounds && err == nil && ctx.Err() == nil; round++ {
		err = f.round(n, round, onlyDirect, took)
	}
	if err = errors.Join(err, ctx.Err(), undo()); err != nil {
		return fmt.Errorf("new flows: %w", err)
	}
	out.DirectFlow = new(results.Median(took[true]))
	if !onlyDirect {
		out.ServiceFlow = new(results.Median(took[false]))
	}
	return nil
}

// round sends to the same Services in both ways, in an order that alternates, and adds what each flow took in
// microseconds. The first round is not counted.
func (f *flowSender) round(n *node, round int, onlyDirect bool, took map[bool][]float64) error {
	services := make([]int, flows)
	for i := range services {
		services[i] = f.random.IntN(n.size.Services)
	}
	for i := range 2 {
		direct := (i+round)%2 == 1
		if onlyDirect && !direct {
			continue
		}
		if err := f.connections.ConntrackTableFlush(netlink.ConntrackTable); err != nil {
			return err
		}
		all, err := f.send(n, services, direct)
		if err != nil {
			return err
		}
		if round > 0 {
			took[direct] = append(took[direct], float64(all.Nanoseconds())/1000/flows)
		}
	}
	return nil
}

// flowRoutes has the node send what it has for Services, as a default route would, and the server throw SYNs away.
func (n *node) flowRoutes() (undo func() error, err error) {
	run := func(h *lab.Host, args ...string) error {
		_, err := h.Run("ip", args...)
		return err
	}
	err = errors.Join(run(n.server, "rule", "add", "priority", "1", "tos", fmt.Sprintf("%#02x", flowTOS), "blackhole"),
		run(n.host, "route", "add", serviceRange.String(), "via", serverAddr.String()))
	return func() error {
		return errors.Join(run(n.server, "rule", "del", "priority", "1"), run(n.host, "route", "del", serviceRange.String()))
	}, err
}

// flowSource is an address of the node that is in the pods' range: see addPod.
var flowSource = gateway

// flowSender sends SYNs in the node's network namespace.
type flowSender struct {
	socket      int
	connections *netlink.Handle
	random      *rand.Rand
}

func (f *flowSender) close() {
	if f.connections != nil {
		f.connections.Close()
	}
	if f.socket > 0 {
		unix.Close(f.socket)
	}
}

// rawSocket gives a socket that sends TCP segments as they are, from an address.
func rawSocket(from netip.Addr) (int, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	if err != nil {
		return 0, err
	}
	err = errors.Join(unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_TOS, flowTOS),
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 0), unix.Bind(fd, &unix.SockaddrInet4{Addr: from.As4()}))
	if err != nil {
		return 0, errors.Join(err, unix.Close(fd))
	}
	return fd, nil
}

// send sends a SYN to each of some Services, or to one endpoint of each, and gives the processor time of all.
func (f *flowSender) send(n *node, services []int, direct bool) (time.Duration, error) {
	type packet struct {
		to      unix.SockaddrInet4
		segment [20]byte
	}
	packets := make([]packet, len(services))
	for i, service := range services {
		to := n.target(service, direct)
		packets[i].to.Addr = to.Addr().As4()
		packets[i].segment = syn(flowSource, to, uint16(10000+i))
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	began, err := lab.ThreadTime()
	if err != nil {
		return 0, err
	}
	for i := range packets {
		if err := unix.Sendto(f.socket, packets[i].segment[:], 0, &packets[i].to); err != nil {
			return 0, err
		}
	}
	ended, err := lab.ThreadTime()
	return ended - began, err
}

// syn makes a TCP segment that opens a connection.
func syn(from netip.Addr, to netip.AddrPort, port uint16) (s [20]byte) {
	binary.BigEndian.PutUint16(s[0:], port)
	binary.BigEndian.PutUint16(s[2:], to.Port())
	const dataOffset, synFlag, window = 5 << 4, 2, 65535
	s[12], s[13] = dataOffset, synFlag
	binary.BigEndian.PutUint16(s[14:], window)
	sum := uint32(unix.IPPROTO_TCP + len(s))
	source, destination := from.As4(), to.Addr().As4()
	for _, b := range [...][]byte{source[:], destination[:], s[:]} {
		for ; len(b) > 0; b = b[2:] {
			sum += uint32(binary.BigEndian.Uint16(b))
		}
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	binary.BigEndian.PutUint16(s[16:], ^uint16(sum))
	return s
}
