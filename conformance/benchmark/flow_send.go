package benchmark

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/conformance/benchmark/results"
	"github.com/verdict-proxy/verdict/internal/lab"
)

const (
	// flows are opened in each turn, in batches, of which the tenth percentile counts: what takes longer than most was
	// disturbed by other work of the machine.
	flows     = 4096
	flowBatch = 64
	quiet     = 0.1
	// flowTOS marks their packets. The server throws those away: an answer would be work of the same thread.
	flowTOS = 0x08
)

// newFlows measures what a new TCP connection costs, in microseconds: the processor time of the thread that calls
// connect(), until the SYN is at the server. Sockets are made before and closed after.
func (t *turn) newFlows(from *lab.Host, to []netip.AddrPort) (figure float64, err error) {
	arrived, err := t.sentToServer()
	if err != nil {
		return 0, err
	}
	var took []float64
	err = from.Do(func() error {
		for batch := range slices.Chunk(to, flowBatch) {
			one, err := connectAll(batch)
			if err != nil {
				return err
			}
			took = append(took, one)
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	return results.Percentile(took, quiet), t.allSent(arrived, len(to))
}

// sentToServer is how many packets the node has sent to the server.
func (n *node) sentToServer() (uint64, error) {
	link, err := n.host.Netlink().LinkByName(n.server.Name)
	if err != nil {
		return 0, err
	}
	return link.Attrs().Statistics.TxPackets, nil
}

// allSent is an error unless packets have gone to the server: else something else was measured.
func (n *node) allSent(before uint64, packets int) error {
	after, err := n.sentToServer()
	if err == nil && after-before < uint64(packets) {
		err = fmt.Errorf("of %d packets, %d left the node", packets, after-before)
	}
	return err
}

// connectAll opens a connection to each, and gives the processor time of one in microseconds.
func connectAll(to []netip.AddrPort) (float64, error) {
	sockets := make([]int, 0, len(to))
	defer func() {
		for _, fd := range sockets {
			unix.Close(fd)
		}
	}()
	peers := make([]unix.SockaddrInet4, len(to))
	for i, a := range to {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return 0, err
		}
		sockets = append(sockets, fd)
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_TOS, flowTOS); err != nil {
			return 0, err
		}
		peers[i] = unix.SockaddrInet4{Addr: a.Addr().As4(), Port: int(a.Port())}
	}
	began, err := lab.ThreadTime()
	if err != nil {
		return 0, err
	}
	for i, fd := range sockets {
		if err := unix.Connect(fd, &peers[i]); err != unix.EINPROGRESS {
			return 0, fmt.Errorf("connect to %s: %w", to[i], err)
		}
	}
	ended, err := lab.ThreadTime()
	return float64((ended - began).Nanoseconds()) / 1000 / float64(len(to)), err
}

// established measures what one packet more of an open connection costs, in microseconds: a segment without data that
// the server throws away, so that no answer is counted.
func (t *turn) established(from *lab.Host, to netip.AddrPort) (figure float64, err error) {
	arrived, err := t.sentToServer()
	if err != nil {
		return 0, err
	}
	err = from.Do(func() (err error) {
		c, err := openFlow(from, to)
		if err != nil {
			return err
		}
		figure, err = c.repeat(flows)
		return errors.Join(err, c.close())
	})
	if err != nil {
		return 0, err
	}
	return figure, t.allSent(arrived, flows)
}

// openConn is an open connection, and a raw socket for more segments of it.
type openConn struct {
	socket, raw int
	from, to    netip.AddrPort
	sequence    uint32 // of what is sent next
	acknowledge uint32 // of what is received next
}

// openFlow opens a connection in the namespace of the calling thread. Where it leads to on the wire is not what was
// asked for if a program balances when sockets connect, and getpeername() may hide that; the kernel's list of sockets
// does not.
func openFlow(host *lab.Host, to netip.AddrPort) (_ *openConn, err error) {
	c := &openConn{socket: -1, raw: -1}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.close())
		}
	}()
	if c.socket, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err != nil {
		return nil, err
	}
	if _, err = connect(c.socket, to); err != nil {
		return nil, err
	}
	local, err := unix.Getsockname(c.socket)
	if err != nil {
		return nil, err
	}
	port := local.(*unix.SockaddrInet4).Port
	all, err := netlink.SocketDiagTCP(unix.AF_INET)
	if err != nil {
		return nil, err
	}
	for _, s := range all {
		if int(s.ID.SourcePort) == port && s.State == unix.BPF_TCP_ESTABLISHED {
			c.from, c.to = sockAddr(s.ID.Source, s.ID.SourcePort), sockAddr(s.ID.Destination, s.ID.DestinationPort)
		}
	}
	if !c.to.IsValid() {
		return nil, fmt.Errorf("%s: the connection from port %d to %s is not among %d sockets", host.Name, port, to, len(all))
	}
	if err = c.numbers(); err != nil {
		return nil, err
	}
	c.raw, err = rawSocket(c.from.Addr())
	return c, err
}

func sockAddr(ip []byte, port uint16) netip.AddrPort {
	a, _ := netip.AddrFromSlice(ip)
	return netip.AddrPortFrom(a.Unmap(), port)
}

// numbers asks the kernel for the connection's sequence numbers, without which connection tracking would not take a
// segment for one of it.
func (c *openConn) numbers() error {
	const off = -1 // TCP_REPAIR_OFF_NO_WP: the kernel sends nothing then
	const receiveQueue, sendQueue = 1, 2
	if err := unix.SetsockoptInt(c.socket, unix.IPPROTO_TCP, unix.TCP_REPAIR, 1); err != nil {
		return fmt.Errorf("TCP_REPAIR: %w", err)
	}
	number := func(queue int) (uint32, error) {
		if err := unix.SetsockoptInt(c.socket, unix.IPPROTO_TCP, unix.TCP_REPAIR_QUEUE, queue); err != nil {
			return 0, err
		}
		n, err := unix.GetsockoptInt(c.socket, unix.IPPROTO_TCP, unix.TCP_QUEUE_SEQ)
		return uint32(n), err
	}
	var errs [3]error
	c.sequence, errs[0] = number(sendQueue)
	c.acknowledge, errs[1] = number(receiveQueue)
	errs[2] = unix.SetsockoptInt(c.socket, unix.IPPROTO_TCP, unix.TCP_REPAIR, off)
	return errors.Join(errs[:]...)
}

// repeat sends the same segment again and again, and gives the processor time of one in microseconds.
func (c *openConn) repeat(packets int) (float64, error) {
	segment := tcpSegment(c.from, c.to, ackFlag, c.sequence, c.acknowledge)
	peer := &unix.SockaddrInet4{Addr: c.to.Addr().As4()}
	var took []float64
	for range packets / flowBatch {
		began, err := lab.ThreadTime()
		if err != nil {
			return 0, err
		}
		for range flowBatch {
			if err := unix.Sendto(c.raw, segment[:], 0, peer); err != nil {
				return 0, err
			}
		}
		ended, err := lab.ThreadTime()
		if err != nil {
			return 0, err
		}
		took = append(took, float64((ended-began).Nanoseconds())/1000/flowBatch)
	}
	return results.Percentile(took, quiet), nil
}

func (c *openConn) close() error {
	var errs []error
	for _, fd := range []int{c.socket, c.raw} {
		if fd >= 0 {
			errs = append(errs, unix.Close(fd))
		}
	}
	return errors.Join(errs...)
}

// rawSocket gives a socket that sends TCP segments as they are, from an address, and receives nothing.
func rawSocket(from netip.Addr) (int, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	if err != nil {
		return -1, err
	}
	err = errors.Join(unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_TOS, flowTOS),
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 0), unix.Bind(fd, &unix.SockaddrInet4{Addr: from.As4()}))
	if err != nil {
		return -1, errors.Join(err, unix.Close(fd))
	}
	return fd, nil
}

// Flags of TCP.
const synFlag, ackFlag = 1 << 1, 1 << 4

// tcpSegment makes a segment without data.
func tcpSegment(from, to netip.AddrPort, flags byte, sequence, acknowledge uint32) (s [20]byte) {
	binary.BigEndian.PutUint16(s[0:], from.Port())
	binary.BigEndian.PutUint16(s[2:], to.Port())
	binary.BigEndian.PutUint32(s[4:], sequence)
	binary.BigEndian.PutUint32(s[8:], acknowledge)
	const dataOffset, window = 5 << 4, 500
	s[12], s[13] = dataOffset, flags
	binary.BigEndian.PutUint16(s[14:], window)
	sum := uint32(unix.IPPROTO_TCP + len(s))
	source, destination := from.Addr().As4(), to.Addr().As4()
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
