package lab

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Server answers clients with one line: its host's name, the client as it sees it, and what it was reached at.
//
//	pod-1 198.51.100.7:41234 10.244.1.10:8080
//
// TCP clients get the line when they connect, and then all they send is sent back. Each UDP datagram is answered with
// the line and the datagram. SCTP clients get it as the state cookie of the INIT ACK.
type Server struct {
	host *Host
	open closers
	wg   sync.WaitGroup
	late atomic.Int64 // a time.Duration
}

// Late has TCP clients wait so long for the line, after the kernel has accepted their connections.
func (s *Server) Late(d time.Duration) { s.late.Store(int64(d)) }

// Serve answers on ports of all addresses of the host, in both families. The server is closed with the host at the
// latest.
func (h *Host) Serve(p snapshot.Protocol, ports ...uint16) (*Server, error) {
	s := &Server{host: h}
	if !h.open.add(s) {
		return nil, ErrClosed
	}
	for _, port := range ports {
		if err := s.listen(p, port); err != nil {
			return nil, fmt.Errorf("lab: %s: serve %s port %d: %w", h.Name, p, port, errors.Join(err, s.Close()))
		}
	}
	return s, nil
}

// Close stops answering and cuts the connections that are open, by RST.
func (s *Server) Close() error {
	s.host.open.remove(s)
	err := s.open.closeAll()
	s.wg.Wait()
	return err
}

func (s *Server) listen(p snapshot.Protocol, port uint16) error {
	if p == snapshot.SCTP && !s.host.kernelSCTP() {
		return s.listenSCTP(port)
	}
	for _, f := range Families() {
		network := fmt.Sprintf("%s%d", p, f.Version()) // tcp4, udp6
		address := fmt.Sprintf(":%d", port)
		var err error
		switch p {
		case snapshot.TCP:
			err = s.listenStream(s.host.Listen(network, address))
		case snapshot.SCTP:
			err = s.listenKernelSCTP(f, port)
		case snapshot.UDP:
			err = s.listenUDP(f, network, address)
		default:
			err = errors.New("unknown protocol")
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (s *Server) listenStream(l net.Listener, err error) error {
	if err != nil {
		return err
	}
	if !s.open.add(l) {
		return errors.Join(ErrClosed, l.Close())
	}
	s.wg.Go(func() {
		for {
			c, err := l.Accept()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil { // out of descriptors, for instance
				time.Sleep(10 * time.Millisecond)
				continue
			}
			s.wg.Go(func() { s.serveStream(c.(*net.TCPConn)) })
		}
	})
	return nil
}

func (s *Server) serveStream(c *net.TCPConn) {
	cut := resetter{c}
	if !s.open.add(cut) {
		cut.Close()
		return
	}
	defer func() { s.open.remove(cut); c.Close() }()
	time.Sleep(time.Duration(s.late.Load()))
	line := greeting(s.host.Name, addrPort(c.RemoteAddr()), addrPort(c.LocalAddr())) + "\n"
	if _, err := c.Write([]byte(line)); err != nil {
		return
	}
	buf := make([]byte, 512) // io.Copy would splice, and keep pipes for later
	for {
		n, err := c.Read(buf)
		if err != nil {
			return
		}
		if _, err := c.Write(buf[:n]); err != nil {
			return
		}
	}
}

// resetter closes a connection by RST.
type resetter struct{ *net.TCPConn }

func (r resetter) Close() error {
	_ = r.SetLinger(0)
	if err := r.TCPConn.Close(); !errors.Is(err, net.ErrClosed) {
		return err
	}
	return nil
}

func (s *Server) listenUDP(f ipfamily.Family, network, address string) error {
	pc, err := s.host.ListenPacket(network, address)
	if err != nil {
		return err
	}
	c := pc.(*net.UDPConn)
	if !s.open.add(c) {
		return errors.Join(ErrClosed, c.Close())
	}
	if err := receiveDestinations(c, f); err != nil {
		return err
	}
	port := addrPort(c.LocalAddr()).Port()
	s.wg.Go(func() { s.serveUDP(c, port) })
	return nil
}

// serveUDP answers from the address it was asked at: on a host with many, the kernel would choose another.
func (s *Server) serveUDP(c *net.UDPConn, port uint16) {
	buf, oob := make([]byte, 1<<16), make([]byte, 128)
	for {
		n, oobn, _, from, err := c.ReadMsgUDPAddrPort(buf, oob)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue
		}
		if received, waiting := questions.Load(string(buf[:n])); waiting {
			received.(*atomic.Bool).Store(true)
		}
		to := destination(oob[:oobn])
		answer := greeting(s.host.Name, from, netip.AddrPortFrom(to, port)) + "\n" + string(buf[:n])
		// An answer that can't be sent is one that got lost: the client times out.
		_, _, _ = c.WriteMsgUDPAddrPort([]byte(answer), sourceMessage(to), from)
	}
}
