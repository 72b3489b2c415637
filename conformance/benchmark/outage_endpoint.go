package benchmark

import (
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/conformance/testbed"
	"github.com/verdict-proxy/verdict/internal/lab"
)

// endpoint is a server in a pod. It says one byte to whom it accepts, and sends back what it is told.
type endpoint struct {
	host *lab.Host
	node string
	port uint16

	mu       sync.Mutex
	listener net.Listener
	conns    map[net.Conn]struct{}
	delay    time.Duration // before each first byte
	crowded  bool          // accepts one connection per delay, and its queue is short
}

// endpointAt starts a server in a pod of the testbed, or in another one of a node.
func (s *scene) endpointAt(host *lab.Host, node string) (*endpoint, error) {
	e := &endpoint{host: host, node: node, port: s.port, conns: make(map[net.Conn]struct{})}
	s.atEnd(e.kill)
	return e, e.listen()
}

// endpoints starts servers in these pods, all of which are ready.
func (s *scene) endpoints(names ...string) (all []*endpoint, err error) {
	for _, name := range names {
		e, err := s.endpointAt(s.Host(name), testbed.NodeOf(name))
		if err != nil {
			return nil, err
		}
		all = append(all, e)
	}
	s.set(ready, all...)
	return all, nil
}

// listen begins to take connections.
func (e *endpoint) listen() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	l, err := e.host.Listen("tcp4", fmt.Sprintf(":%d", e.port))
	if err != nil {
		return err
	}
	e.listener = l
	if e.crowded {
		if err := shorten(l.(*net.TCPListener)); err != nil {
			return err
		}
	}
	go e.accept(l)
	return nil
}

// shorten makes the queue of a listener as short as it gets.
func shorten(l *net.TCPListener) error {
	raw, err := l.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Control(func(fd uintptr) { failed = unix.Listen(int(fd), 1) })
	return errors.Join(err, failed)
}

func (e *endpoint) accept(l net.Listener) {
	for {
		c, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // out of descriptors, for instance
			time.Sleep(time.Millisecond)
			continue
		}
		e.mu.Lock()
		e.conns[c] = struct{}{}
		delay, crowded := e.delay, e.crowded
		e.mu.Unlock()
		if crowded {
			time.Sleep(delay)
			delay = 0
		}
		go e.serve(c, delay)
	}
}

func (e *endpoint) serve(c net.Conn, delay time.Duration) {
	defer func() {
		e.mu.Lock()
		delete(e.conns, c)
		e.mu.Unlock()
		c.Close()
	}()
	time.Sleep(delay)
	if _, err := c.Write([]byte{'.'}); err == nil {
		_, _ = io.CopyBuffer(writerOnly{c}, readerOnly{c}, make([]byte, 64))
	}
}

// readerOnly hides that a connection would splice, which keeps pipes.
type readerOnly struct{ io.Reader }

// refuse closes the listener: the kernel refuses new connections, those that are open go on.
func (e *endpoint) refuse() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.listener == nil {
		return nil
	}
	l := e.listener
	e.listener = nil
	return l.Close()
}

// slow has a server answer late. A crowded one takes connections late, too, and so has no room for more.
func (e *endpoint) slow(delay time.Duration, crowded bool) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.delay, e.crowded = delay, crowded
	if !crowded {
		return nil
	}
	return shorten(e.listener.(*net.TCPListener))
}

// kill ends the server with all its connections.
func (e *endpoint) kill() error {
	err := e.refuse()
	e.mu.Lock()
	defer e.mu.Unlock()
	for c := range e.conns {
		err = errors.Join(err, ignoreClosed(c.Close()))
	}
	return err
}

func ignoreClosed(err error) error {
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// rules adds chains to a table of nftables in a host, which is gone at the end of the scene.
func (s *scene) rules(host *lab.Host, family, chains string) error {
	name := fmt.Sprintf("%s outage-%d", family, s.port)
	if _, err := host.RunInput(fmt.Sprintf("table %s {\n%s\n}\n", name, chains), "nft", "-f", "-"); err != nil {
		return err
	}
	s.atEnd(func() error {
		// Adding a table that is there changes nothing, so that deleting it never fails.
		_, err := host.RunInput("add table "+name+"\ndelete table "+name+"\n", "nft", "-f", "-")
		return err
	})
	return nil
}

// blackhole has an endpoint's host lose all packets for it, without a word.
func (s *scene) blackhole(e *endpoint) error {
	return s.rules(e.host, "inet", fmt.Sprintf(
		"chain input { type filter hook input priority 0; tcp dport %d drop; }", e.port))
}

// lossy has an endpoint's link lose a share of its packets in both directions, in percent.
func (s *scene) lossy(e *endpoint, percent int) error {
	rule := "chain %s { type filter hook ingress device %s priority 0; tcp %s %d numgen random mod 100 < %d drop; }"
	link := "veth-" + e.host.Name
	return errors.Join(
		s.rules(e.host, "netdev", fmt.Sprintf(rule, "to", "eth0", "dport", e.port, percent)),
		s.rules(s.Host(e.node), "netdev", fmt.Sprintf(rule, "from-"+e.host.Name, link, "sport", e.port, percent)),
	)
}

// vanish takes a pod's link down: nobody answers for its address any more.
func (e *endpoint) vanish() error {
	_, err := e.host.Run("ip", "link", "set", "eth0", "down")
	return err
}

// cut takes down a node's link to the others until the end of the scene.
func (s *scene) cut(node string) error {
	set := func(to string) error {
		_, err := s.Host("switch").Run("ip", "link", "set", node, to)
		return err
	}
	s.atEnd(func() error { return set("up") })
	return set("down")
}
