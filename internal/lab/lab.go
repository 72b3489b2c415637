// Package lab builds test hosts: network namespaces of our own, joined by veth links, with servers and clients in them
// that tell who answered whom. Nothing on the machine itself changes, no external tool is needed, and Close leaves
// nothing behind.
//
// It works as root and, after Enter, for an unprivileged user in a user namespace. Every piece of work inside a
// namespace runs on an operating system thread that was moved there and is thrown away afterwards; a socket made there
// stays there and may be used from any goroutine.
//
//	c, err := lab.NewCluster(lab.Config{LocalPods: 2, RemotePods: 1})
//	...
//	defer c.Close()
//	_, err = c.Pods[0].Serve(snapshot.TCP, 8080)
//	...
//	err = c.Node.Do(openProxy) // its netlink sockets stay in the node
//	...
//	r := c.Outside.Dial(snapshot.TCP, netip.MustParseAddrPort("203.0.113.1:80"), lab.Options{})
//	fmt.Println(r) // answered by pod-1 at 10.244.1.10:8080, which saw 198.51.100.7:41234
//
// Tests find it wrapped in package labtest.
package lab

import (
	"errors"
	"io"
	"os"
	"slices"
	"sync"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
)

// ErrClosed is what a closed Net or Host answers with.
var ErrClosed = errors.New("lab: closed")

// Families gives the families this kernel speaks: IPv4, and IPv6 unless the machine was started without it. A Host has
// no IPv6 address where the kernel has none; adding one is then silently left out.
func Families() []ipfamily.Family {
	if hasIPv6() {
		return []ipfamily.Family{ipfamily.IPv4, ipfamily.IPv6}
	}
	return []ipfamily.Family{ipfamily.IPv4}
}

var hasIPv6 = sync.OnceValue(func() bool {
	_, err := os.Stat("/proc/sys/net/ipv6")
	return err == nil
})

// Net is a set of hosts and the wires between them. Call New.
type Net struct {
	mu     sync.Mutex
	hosts  []*Host
	closed bool
}

// New gives a net without hosts. The process needs the rights that Enter looks for.
func New() *Net { return &Net{} }

// Hosts gives the hosts in the order they were made.
func (n *Net) Hosts() []*Host {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.hosts)
}

// Close removes all hosts with their links, servers and connections. What the caller made himself inside a host (a
// socket, a process, a function that still runs in Do) keeps that namespace alive until it ends.
func (n *Net) Close() error {
	n.mu.Lock()
	hosts := n.hosts
	n.hosts, n.closed = nil, true
	n.mu.Unlock()
	var errs []error
	for _, h := range hosts {
		errs = append(errs, h.close())
	}
	return errors.Join(errs...)
}

// closers is what has to be closed with its host.
type closers struct {
	mu     sync.Mutex
	all    map[io.Closer]struct{}
	closed bool
}

// add reports whether c is now held; after closeAll it is not, and the caller closes it.
func (s *closers) add(c io.Closer) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	if s.all == nil {
		s.all = make(map[io.Closer]struct{})
	}
	s.all[c] = struct{}{}
	return true
}

func (s *closers) remove(c io.Closer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.all, c)
}

// closeAll closes everything outside the lock, since closing may call remove.
func (s *closers) closeAll() error {
	s.mu.Lock()
	all := s.all
	s.all, s.closed = nil, true
	s.mu.Unlock()
	var errs []error
	for c := range all {
		errs = append(errs, c.Close())
	}
	return errors.Join(errs...)
}
