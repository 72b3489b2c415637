package lab

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// kernelSCTP reports whether the kernel answers SCTP packets itself, which spoils what a raw socket says. That is so
// from the moment somebody on the machine has made an SCTP socket. Then the kernel's sockets are used, just like TCP's.
func (h *Host) kernelSCTP() bool {
	answers := false
	_ = h.onThread(func() {
		_, err := os.Stat("/proc/thread-self/net/sctp")
		answers = err == nil
	})
	return answers
}

// listenKernelSCTP serves a port with the kernel's sockets, one an address: one for all addresses would offer each
// client all of them to talk to, and answer from whichever the kernel likes best.
func (s *Server) listenKernelSCTP(f ipfamily.Family, port uint16) error {
	family := map[ipfamily.Family]int{ipfamily.IPv4: netlink.FAMILY_V4, ipfamily.IPv6: netlink.FAMILY_V6}[f]
	addrs, err := s.host.nl.AddrList(nil, family)
	if err != nil {
		return err
	}
	served := make(map[netip.Addr]bool) // a gateway has the same address on many links
	for _, a := range addrs {
		addr, _ := netip.AddrFromSlice(a.IP)
		addr = addr.Unmap()
		if addr.IsLinkLocalUnicast() || served[addr] {
			continue
		}
		served[addr] = true
		if err := s.listenStream(s.host.listenKernelSCTP(netip.AddrPortFrom(addr, port))); err != nil {
			return err
		}
	}
	return nil
}

// listenKernelSCTP announces like net.Listen, which does not know SCTP.
func (h *Host) listenKernelSCTP(at netip.AddrPort) (net.Listener, error) {
	fd, err := h.socket(snapshot.SCTP, ipfamily.Of(at.Addr()))
	if err != nil {
		return nil, err
	}
	socket := os.NewFile(uintptr(fd), "socket")
	defer socket.Close() // FileListener has its own
	if err := unix.Bind(fd, sockaddr(at)); err != nil {
		return nil, os.NewSyscallError("bind", err)
	}
	if err := unix.Listen(fd, 4096); err != nil {
		return nil, os.NewSyscallError("listen", err)
	}
	return net.FileListener(socket)
}

// sctpStack is a host's share of SCTP: one raw socket a family for all its servers and clients, told apart by port. A
// raw socket sees all packets and all ICMP errors of its host, so a socket a client would cost the square of the
// clients.
type sctpStack struct {
	name  string
	conns map[ipfamily.Family]*net.IPConn
	wg    sync.WaitGroup

	mu     sync.Mutex
	served map[uint16]struct{}
	dials  map[uint16]*sctpDial
}

// sctpDial is a client that waits.
type sctpDial struct {
	to    netip.AddrPort
	tag   uint32
	reply chan Result // takes one without waiting
}

// sctpStack gives the host's stack; the first call makes it.
func (h *Host) sctpStack() (*sctpStack, error) {
	h.sctpOnce.Do(func() {
		s := &sctpStack{
			name:   h.Name,
			conns:  make(map[ipfamily.Family]*net.IPConn),
			served: make(map[uint16]struct{}),
			dials:  make(map[uint16]*sctpDial),
		}
		if h.sctpErr = s.open(h); h.sctpErr == nil && !h.open.add(s) {
			h.sctpErr = ErrClosed
		}
		if h.sctpErr != nil {
			h.sctpErr = errors.Join(h.sctpErr, s.Close())
		}
		h.stack = s
	})
	return h.stack, h.sctpErr
}

func (s *sctpStack) open(h *Host) error {
	for _, f := range Families() {
		pc, err := h.ListenPacket(fmt.Sprintf("ip%d:%d", f.Version(), snapshot.SCTP), "")
		if err != nil {
			return err
		}
		c := pc.(*net.IPConn)
		s.conns[f] = c
		level, option := recvErr(f)
		if err := errors.Join(setOption(c, level, option, 1), receiveDestinations(c, f)); err != nil {
			return err
		}
		// Room for some thousand packets, while the reader waits for a processor. Beyond the machine's limit it takes a right
		// that a user namespace does not give.
		if setOption(c, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 4<<20) != nil {
			_ = c.SetReadBuffer(4 << 20)
		}
		s.wg.Go(func() { s.read(f, c) })
	}
	return nil
}

// Close ends the stack.
func (s *sctpStack) Close() error {
	var errs []error
	for _, c := range s.conns {
		errs = append(errs, c.Close())
	}
	s.wg.Wait()
	return errors.Join(errs...)
}

// read takes packets and ICMP errors until the socket is closed. Any wake-up may mean either: a send in another
// goroutine may have taken the sign of a new error, but never the error itself.
func (s *sctpStack) read(f ipfamily.Family, c *net.IPConn) {
	raw, err := c.SyscallConn()
	if err != nil {
		return
	}
	buf, oob := make([]byte, 2048), make([]byte, 512)
	_ = raw.Read(func(fd uintptr) bool {
		for {
			n, oobn, _, _, err := unix.Recvmsg(int(fd), buf, oob, unix.MSG_ERRQUEUE)
			if err != nil {
				break
			}
			s.receiveError(buf[:n], oob[:oobn])
		}
		for {
			n, oobn, _, from, err := unix.Recvmsg(int(fd), buf, oob, 0)
			if err == unix.EAGAIN {
				return false
			}
			if err == nil {
				s.receive(f, buf[:n], destination(oob[:oobn]), from)
			}
		}
	})
}

// receive takes one packet. IPv4 raw sockets give it with its header.
func (s *sctpStack) receive(f ipfamily.Family, b []byte, to netip.Addr, sender unix.Sockaddr) {
	var from netip.Addr
	switch a := sender.(type) {
	case *unix.SockaddrInet4:
		from = netip.AddrFrom4(a.Addr)
	case *unix.SockaddrInet6:
		from = netip.AddrFrom16(a.Addr)
	}
	if f == ipfamily.IPv4 {
		if len(b) == 0 || len(b) < int(b[0]&15)*4 {
			return
		}
		b = b[int(b[0]&15)*4:]
	}
	p, err := decodeSCTP(b)
	if err != nil {
		return
	}
	if p.Chunk == chunkInit {
		s.answer(p, netip.AddrPortFrom(from, p.Source), netip.AddrPortFrom(to, p.Dest))
		return
	}
	s.finish(p.Dest, func(d *sctpDial) (Result, bool) {
		switch {
		case d.tag != p.Tag || d.to != netip.AddrPortFrom(from, p.Source):
			return Result{}, false
		case p.Chunk == chunkAbort:
			return failedResult(unix.ECONNREFUSED), true
		}
		return parseGreeting(p.Cookie), p.Chunk == chunkInitAck
	})
}

// answer answers an INIT: with an INIT ACK if the port is served, else with an ABORT.
func (s *sctpStack) answer(init sctpPacket, from, to netip.AddrPort) {
	s.mu.Lock()
	_, served := s.served[init.Dest]
	s.mu.Unlock()
	p := sctpPacket{Source: init.Dest, Dest: init.Source, Tag: init.InitTag, Chunk: chunkAbort}
	if served {
		p.Chunk, p.InitTag, p.Cookie = chunkInitAck, newTag(), greeting(s.name, from, to)
	}
	_ = s.send(p, to.Addr(), from.Addr()) // an answer that can't be sent is one that got lost
}

// receiveError takes an ICMP error: b begins with the ports of the packet that caused it.
func (s *sctpStack) receiveError(b, oob []byte) {
	if len(b) < 4 {
		return
	}
	source, dest := binary.BigEndian.Uint16(b), binary.BigEndian.Uint16(b[2:])
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return
	}
	for _, m := range messages {
		v4 := m.Header.Level == unix.SOL_IP && m.Header.Type == unix.IP_RECVERR
		v6 := m.Header.Level == unix.SOL_IPV6 && m.Header.Type == unix.IPV6_RECVERR
		if !v4 && !v6 || len(m.Data) < 4 {
			continue
		}
		errno := unix.Errno(binary.NativeEndian.Uint32(m.Data)) // the first field of sock_extended_err
		s.finish(source, func(d *sctpDial) (Result, bool) {
			return failedResult(errno), d.to.Port() == dest && d.to.Addr().Is4() == v4
		})
	}
}

// finish tells the client at a port its result, if there is one that waits and verdict finds that it is meant.
func (s *sctpStack) finish(port uint16, verdict func(*sctpDial) (Result, bool)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	d := s.dials[port]
	if d == nil {
		return
	}
	if r, meant := verdict(d); meant {
		delete(s.dials, port)
		d.reply <- r
	}
}

// send sends a packet; an invalid source leaves the choice to the kernel. The socket is shared, so an ICMP error that
// is meant for somebody else may come back from here first: the kernel then has not sent, and has forgotten the error.
func (s *sctpStack) send(p sctpPacket, from, to netip.Addr) error {
	c := s.conns[ipfamily.Of(to)]
	if c == nil {
		return unix.EAFNOSUPPORT
	}
	var oob []byte
	if from.IsValid() {
		oob = sourceMessage(from)
	}
	var err error
	for range 100 {
		if _, _, err = c.WriteMsgIP(p.encode(), oob, &net.IPAddr{IP: to.AsSlice()}); failedResult(err).Outcome != Refused {
			break
		}
	}
	return err
}

// dialSCTP sends an INIT and waits.
func (h *Host) dialSCTP(to netip.AddrPort, o Options) Result {
	s, err := h.sctpStack()
	if err != nil {
		return Result{Err: err}
	}
	start := time.Now()
	d := &sctpDial{to: to, tag: newTag(), reply: make(chan Result, 1)}
	port, err := s.register(d, o.From.Port(), &h.ports)
	if err != nil {
		return Result{Err: err}
	}
	defer s.unregister(port, d)
	init := sctpPacket{Source: port, Dest: to.Port(), Chunk: chunkInit, InitTag: d.tag}
	err = s.send(init, o.From.Addr().Unmap(), to.Addr())
	var r Result
	if err != nil && !errors.Is(err, unix.EPERM) { // EPERM: as in Conn.ask
		r = failedResult(err)
	} else {
		timer := time.NewTimer(o.timeout())
		defer timer.Stop()
		select {
		case r = <-d.reply:
		case <-timer.C:
			r = failedResult(os.ErrDeadlineExceeded)
		}
	}
	r.Latency = time.Since(start)
	return r
}

// register makes a client known by a port, the next free one if it is 0.
func (s *sctpStack) register(d *sctpDial, port uint16, ports *portCounter) (uint16, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	tries := 1
	if port == 0 {
		port, tries = ports.next(), clientPorts
	}
	for range tries {
		if s.dials[port] == nil {
			s.dials[port] = d
			return port, nil
		}
		port = ports.next()
	}
	return 0, fmt.Errorf("lab: bind an SCTP client: %w", unix.EADDRINUSE)
}

func (s *sctpStack) unregister(port uint16, d *sctpDial) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.dials[port] == d {
		delete(s.dials, port)
	}
}

func (s *Server) listenSCTP(port uint16) error {
	stack, err := s.host.sctpStack()
	if err != nil {
		return err
	}
	stack.mu.Lock()
	defer stack.mu.Unlock()
	if _, taken := stack.served[port]; taken {
		return unix.EADDRINUSE
	}
	stack.served[port] = struct{}{}
	if !s.open.add(sctpPort{stack, port}) {
		delete(stack.served, port)
		return ErrClosed
	}
	return nil
}

// sctpPort is a port that is served until it is closed.
type sctpPort struct {
	stack *sctpStack
	port  uint16
}

func (p sctpPort) Close() error {
	p.stack.mu.Lock()
	defer p.stack.mu.Unlock()
	delete(p.stack.served, p.port)
	return nil
}

// newTag gives a tag for an association: anything but 0.
func newTag() uint32 { return 1 + rand.Uint32N(1<<32-1) }
