package kernel

import (
	"encoding/binary"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestBridgeDropsNobody sends frames from a pod on a bridge. What tells a pod there from the node is that its frames
// have a source address: the bridge must let none by that has not, or a pod could have itself taken for the node.
func TestBridgeDropsNobody(t *testing.T) {
	c, b := proxied(t, lab.Config{LocalPods: 3, RemotePods: 1, PodBridge: "cni0"})
	s := flowService{number: 1, state: endpointState{"here", []condition{ready}, nil}, externalLocal: true}
	snap := snapshot.New()
	snap.Apply(facts(c))
	snap.Apply(s.delta(c))
	st, _ := dataplane.Compute(dataplane.Config{NodeName: "node", DetectLocal: clusterCIDR}, snap)
	apply(t, b, st)
	to := s.frontendOf(c, dataplane.LoadBalancerIP, ipfamily.IPv4)
	pod := c.Pods[2]
	link, err := pod.Netlink().LinkByName("eth0")
	labtest.Check(t, err)
	bridge, err := c.Node.Netlink().LinkByName("cni0")
	labtest.Check(t, err)
	send := func(from net.HardwareAddr, port uint16) {
		t.Helper()
		frame := datagram(bridge.Attrs().HardwareAddr, from, netip.AddrPortFrom(pod.IP(ipfamily.IPv4), port), to)
		labtest.Check(t, pod.Do(func() error { return sendFrame(link.Attrs().Index, frame) }))
	}
	send(make(net.HardwareAddr, 6), 30001)
	send(link.Attrs().HardwareAddr, 30002)
	// Frames of one link keep their order: once the second has been counted, the first would have been.
	testkit.Eventually(t, 10*time.Second, "a frame is counted", func() bool { return countedAt(t, b, to) > 0 })
	if n := countedAt(t, b, to); n != 1 {
		t.Errorf("%d of two frames were let by; want the one that has a source", n)
	}
}

// countedAt is what the element of a frontend of UDP counted.
func countedAt(t *testing.T, b *Backend, at netip.AddrPort) uint64 {
	t.Helper()
	listed, err := b.List()
	labtest.Check(t, err)
	for _, e := range listed[0].Elements[nft.Services] {
		if e.FrontendKey() == (dataplane.Key{Addr: at.Addr(), Protocol: snapshot.UDP, Port: at.Port()}) {
			return e.Packets
		}
	}
	t.Fatalf("no frontend %s", at)
	return 0
}

// datagram gives an Ethernet frame with an empty datagram of UDP over IPv4.
func datagram(dst, src net.HardwareAddr, from, to netip.AddrPort) []byte {
	frame := append(append([]byte{}, dst...), src...)
	frame = binary.BigEndian.AppendUint16(frame, unix.ETH_P_IP)
	ip := []byte{0x45, 0, 0, 28, 0, 0, 0, 0, 64, unix.IPPROTO_UDP, 0, 0}
	ip = append(append(ip, from.Addr().AsSlice()...), to.Addr().AsSlice()...)
	sum := uint32(0)
	for i := 0; i < len(ip); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(ip[i:]))
	}
	sum = sum>>16 + sum&0xffff
	binary.BigEndian.PutUint16(ip[10:], ^uint16(sum>>16+sum))
	frame = append(frame, ip...)
	frame = binary.BigEndian.AppendUint16(frame, from.Port())
	frame = binary.BigEndian.AppendUint16(frame, to.Port())
	return append(frame, 0, 8, 0, 0) // of eight bytes, without a checksum
}

func sendFrame(index int, frame []byte) error {
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return unix.Sendto(fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: index})
}
