package run

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/conformance/cases"
	"github.com/verdict-proxy/verdict/conformance/report"
	"github.com/verdict-proxy/verdict/internal/lab"
)

// stray sends segments of connections that are known nowhere, and looks whether resets come back.
func (t *teller) stray(s *cases.Step) error {
	c := s.Stray
	all, err := t.targets(c.From, c.To, nil, c.Frontends, nil)
	if err != nil {
		return err
	}
	errs := make([]error, len(all))
	var wait sync.WaitGroup
	for i, a := range all {
		wait.Go(func() { errs[i] = t.strayOne(s, a) })
	}
	wait.Wait()
	return errors.Join(errs...)
}

func (t *teller) strayOne(s *cases.Step, to target) error {
	d := t.differs(s)
	want := cases.Want{Outcome: s.Stray.Answer.Outcome}
	words := want.String()
	if d != nil {
		want = d.Wants(want)
	}
	got := cases.Dropped
	for range lossTries { // a busy machine loses packets
		reset, err := acknowledge(t.testbed.Host(to.from), to.to, uint16(firstFlowPort+t.nextNumber()))
		if err != nil {
			return err
		}
		if reset {
			got = cases.Refused
			break
		}
	}
	l := report.Look{Step: s.Step, From: to.from, To: to.words(), Count: 1, Want: words, Got: string(got)}
	l.OK = got == want.Outcome
	t.look(l, d)
	return nil
}

// acknowledge sends an ACK from a port of a host, and says whether a reset came back.
func acknowledge(from *lab.Host, to netip.AddrPort, port uint16) (reset bool, err error) {
	domain, own := unix.AF_INET, from.IP4
	var peer unix.Sockaddr
	if to.Addr().Is4() {
		peer = &unix.SockaddrInet4{Addr: to.Addr().As4()}
	} else {
		domain, own, peer = unix.AF_INET6, from.IP6, &unix.SockaddrInet6{Addr: to.Addr().As16()}
	}
	var fd int
	err = from.Do(func() (err error) {
		fd, err = unix.Socket(domain, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
		return os.NewSyscallError("socket", err)
	})
	if err != nil {
		return false, err
	}
	defer unix.Close(fd)
	segment := ackSegment(netip.AddrPortFrom(own, port), to)
	if err := unix.Sendto(fd, segment, 0, peer); err != nil {
		return false, fmt.Errorf("send to %s: %w", to, err)
	}
	return awaitReset(fd, to, port)
}

// awaitReset reads all TCP segments that the host gets, until one resets the connection or it was silent for too long.
func awaitReset(fd int, peer netip.AddrPort, port uint16) (bool, error) {
	buffer := make([]byte, 2048)
	for end := time.Now().Add(silence); ; {
		left := time.Until(end)
		if left <= 0 {
			return false, nil
		}
		timeout := unix.NsecToTimeval(left.Nanoseconds())
		if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout); err != nil {
			return false, err
		}
		n, _, err := unix.Recvfrom(fd, buffer, 0)
		if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return false, err
		}
		if resets(buffer[:n], peer, port) {
			return true, nil
		}
	}
}

// resets says whether a packet, which begins with its IPv4 header but without one of IPv6, is a reset from a peer to a
// port.
func resets(packet []byte, peer netip.AddrPort, port uint16) bool {
	if peer.Addr().Is4() && len(packet) > 0 {
		packet = packet[min(len(packet), int(packet[0]&15)*4):]
	}
	const flags, rst = 13, 4
	return len(packet) > flags && binary.BigEndian.Uint16(packet) == peer.Port() &&
		binary.BigEndian.Uint16(packet[2:]) == port && packet[flags]&rst != 0
}

// ackSegment makes a TCP segment with nothing but an acknowledgement.
func ackSegment(from, to netip.AddrPort) []byte {
	s := make([]byte, 20)
	binary.BigEndian.PutUint16(s[0:], from.Port())
	binary.BigEndian.PutUint16(s[2:], to.Port())
	const number, dataOffset, ack, window = 123456789, 5 << 4, 16, 65535
	binary.BigEndian.PutUint32(s[4:], number)
	binary.BigEndian.PutUint32(s[8:], number)
	s[12], s[13] = dataOffset, ack
	binary.BigEndian.PutUint16(s[14:], window)
	sum := uint32(unix.IPPROTO_TCP + len(s))
	for _, b := range [][]byte{from.Addr().AsSlice(), to.Addr().AsSlice(), s} {
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
