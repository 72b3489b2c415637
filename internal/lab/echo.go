package lab

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
)

// Echo sends one ICMP or ICMPv6 echo request ("ping") from the host and waits for the reply that long; 0 means one
// second. Answered is a reply from the address with the same content; who sent it is unknown, so Result.Endpoint is
// empty. Refused is an ICMP error. Each request has its own identifier, so conntrack takes it for a new flow. Echo is
// safe for concurrent use.
func (h *Host) Echo(to netip.Addr, timeout time.Duration) Result {
	to = to.Unmap()
	start := time.Now()
	r := Result{Outcome: Answered}
	if err := h.echo(to, start.Add(Options{Timeout: timeout}.timeout())); err != nil {
		r = failedResult(fmt.Errorf("ping %s: %w", to, err))
	}
	r.Latency = time.Since(start)
	return r
}

// What pings a family: the protocol, and the types of its messages.
var (
	echoNetwork = ipfamily.Per[string]{ipfamily.IPv4: "ip4:icmp", ipfamily.IPv6: "ip6:ipv6-icmp"}
	echoRequest = ipfamily.Per[byte]{ipfamily.IPv4: 8, ipfamily.IPv6: 128}
	echoReply   = ipfamily.Per[byte]{ipfamily.IPv4: 0, ipfamily.IPv6: 129}
)

func (h *Host) echo(to netip.Addr, deadline time.Time) error {
	f := ipfamily.Of(to)
	var dialed net.Conn
	err := h.Do(func() (err error) {
		dialed, err = net.Dial(echoNetwork[f], to.String())
		return err
	})
	if err != nil {
		return err
	}
	defer dialed.Close()
	conn := dialed.(*net.IPConn)
	level, option := recvErr(f)
	if err := errors.Join(setOption(conn, level, option, 1), conn.SetDeadline(deadline)); err != nil {
		return err
	}
	request := echoMessage(f, h.ports.next())
	// As for UDP: what a firewall of this very host rejects shows in reading.
	if _, err := conn.Write(request); err != nil && !errors.Is(err, unix.EPERM) {
		return err
	}
	const header = 4 // type, code and checksum
	for buffer := make([]byte, 1500); ; {
		n, _, err := conn.ReadFrom(buffer)
		if err != nil {
			return err
		}
		if n > header && buffer[0] == echoReply[f] && bytes.Equal(buffer[header:n], request[header:]) {
			return nil
		}
	}
}

// echoMessage makes an echo request. The kernel fills in the checksum of ICMPv6.
func echoMessage(f ipfamily.Family, id uint16) []byte {
	m := []byte{echoRequest[f], 0, 0, 0}
	m = binary.BigEndian.AppendUint16(m, id)
	m = append(m, 0, 1, 'p', 'i', 'n', 'g')
	if f == ipfamily.IPv4 {
		var sum uint32
		for i := 0; i < len(m); i += 2 {
			sum += uint32(binary.BigEndian.Uint16(m[i:]))
		}
		binary.BigEndian.PutUint16(m[2:], ^uint16(sum+sum>>16))
	}
	return m
}
