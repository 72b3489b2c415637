package lab

import (
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
)

// Host is a network namespace with a name. It is held by a descriptor and lives until its Net is closed.
type Host struct {
	Name string
	// IP4 and IP6 are the host's main addresses, the first that were added to it; invalid while there is none.
	IP4, IP6 netip.Addr

	ns   *os.File        // the namespace
	nl   *netlink.Handle // rtnetlink inside it
	work chan func()     // to the thread that lives inside it
	quit chan struct{}   // closed when that thread shall end

	open  closers     // servers and connections
	ports portCounter // for UDP and SCTP clients

	sctpOnce sync.Once
	stack    *sctpStack
	sctpErr  error
}

// NewHost creates a host with only a loopback device. The name is for people and for Serve.
func (n *Net) NewHost(name string) (*Host, error) {
	h := &Host{Name: name, work: make(chan func()), quit: make(chan struct{})}
	made := make(chan error)
	onThread(func() {
		err := h.createNamespace()
		made <- err
		for err == nil {
			select {
			case f := <-h.work:
				f()
			case <-h.quit:
				return
			}
		}
	})
	if err := <-made; err != nil {
		return nil, fmt.Errorf("lab: make host %s: %w", name, errors.Join(err, h.close()))
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return nil, errors.Join(ErrClosed, h.close())
	}
	n.hosts = append(n.hosts, h)
	return h, nil
}

// createNamespace moves the calling thread into a new namespace and sets that up.
func (h *Host) createNamespace() error {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("unshare network: %w", err)
	}
	var err error
	if h.ns, err = os.Open("/proc/thread-self/ns/net"); err != nil {
		return err
	}
	if h.nl, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
		return fmt.Errorf("open rtnetlink: %w", err)
	}
	for _, s := range hostSysctls {
		if err := writeSysctl(s.key, s.value); err != nil && !(s.optional && errors.Is(err, os.ErrNotExist)) {
			return err
		}
	}
	return h.up("lo")
}

// What decides whether a bridge shows netfilter the packets it carries, by family.
const (
	callIPv4 = "net/bridge/bridge-nf-call-iptables"
	callIPv6 = "net/bridge/bridge-nf-call-ip6tables"
)

// hostSysctls make namespaces alike on every machine: IPv4 settings are otherwise inherited from it.
var hostSysctls = []struct {
	key, value string
	optional   bool // the kernel may be too old, or built without
}{
	{"net/ipv4/ip_forward", "0", false},
	// Paths are asymmetric on purpose, and nobody shall learn a way around the node.
	{"net/ipv4/conf/all/rp_filter", "0", false},
	{"net/ipv4/conf/default/rp_filter", "0", false},
	{"net/ipv4/conf/all/send_redirects", "0", false},
	{"net/ipv4/conf/default/send_redirects", "0", false},
	{"net/ipv4/conf/all/accept_redirects", "0", false},
	{"net/ipv4/conf/default/accept_redirects", "0", false},
	{"net/ipv6/conf/all/accept_redirects", "0", true},
	{"net/ipv6/conf/default/accept_redirects", "0", true},
	// Addresses are usable at once: no duplicate address detection, no waiting for routers.
	{"net/ipv6/conf/all/accept_dad", "0", true},
	{"net/ipv6/conf/default/accept_dad", "0", true},
	{"net/ipv6/conf/default/accept_ra", "0", true},
	// Every refused packet gets its ICMP error. By default it is one a second and client, and 50 in all.
	{"net/ipv4/icmp_ratemask", "0", false},
	{"net/ipv6/icmp/ratelimit", "0", true},
	{"net/ipv6/icmp/ratemask", "128", true}, // since 5.1; echo requests are never errors
	// As on nodes of Kubernetes: bridges show netfilter what they carry, where br_netfilter is loaded.
	{callIPv4, "1", true},
	{callIPv6, "1", true},
}

// close ends the host's thread and lets go of the namespace.
func (h *Host) close() error {
	err := h.open.closeAll()
	close(h.quit)
	if h.nl != nil {
		h.nl.Close()
	}
	if h.ns != nil {
		err = errors.Join(err, h.ns.Close())
	}
	return err
}

// IP returns the host's main address of a family; invalid if it has none.
func (h *Host) IP(f ipfamily.Family) netip.Addr {
	if f == ipfamily.IPv4 {
		return h.IP4
	}
	return h.IP6
}

// Netlink gives rtnetlink inside the host, for what Link, AddAddr and AddRoute do not offer. The Net closes it.
func (h *Host) Netlink() *netlink.Handle { return h.nl }

// Keep has something closed with the host at the latest: a socket that stays open keeps the namespace alive. A host
// that is closed already closes it at once. The function that Keep returns ends that, and closes nothing.
func (h *Host) Keep(c io.Closer) (forget func()) {
	if !h.open.add(c) {
		c.Close()
	}
	return func() { h.open.remove(c) }
}

// Do runs f inside the host's namespace, on a thread of its own, and gives back f's error. Sockets and netlink
// connections that f opens belong to the namespace for good and can be used anywhere afterwards. Goroutines that f
// starts do not run in the namespace, and some of the standard library starts them (resolving names, http.Client): use
// DialContext there. f may call t.FailNow, which ends the calling goroutine as it should.
func (h *Host) Do(f func() error) error {
	var err error
	left := true // by runtime.Goexit
	done := make(chan struct{})
	onThread(func() {
		defer close(done)
		err = enterNetns(h.ns)
		if err == nil {
			err = f()
		}
		left = false
	})
	<-done
	if left {
		runtime.Goexit()
	}
	return err
}

// onThread runs f, which must be quick, on the host's own thread. That is ten times cheaper than Do.
func (h *Host) onThread(f func()) error {
	done := make(chan struct{})
	select {
	case h.work <- func() { defer close(done); f() }:
		<-done
		return nil
	case <-h.quit:
		return ErrClosed
	}
}

// Sysctl sets a kernel parameter inside the host: Sysctl("net/ipv4/ip_forward", "1"). A dot in the key is part of a
// name.
func (h *Host) Sysctl(key, value string) error {
	var err error
	if e := h.onThread(func() { err = writeSysctl(key, value) }); e != nil {
		return e
	}
	if err != nil {
		return fmt.Errorf("lab: %s: %w", h.Name, err)
	}
	return nil
}

// PlainBridges makes the host's bridges mere wires, as they are without br_netfilter: netfilter sees only what is
// routed.
func (h *Host) PlainBridges() error {
	for _, key := range []string{callIPv4, callIPv6} {
		if err := h.Sysctl(key, "0"); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}

// BridgesCallNetfilter reports whether this kernel has br_netfilter, so that bridges pass their packets to netfilter.
func BridgesCallNetfilter() bool {
	_, err := os.Stat("/proc/sys/" + callIPv4)
	return err == nil
}

// writeSysctl writes as seen by the calling thread: /proc/sys/net shows the namespace of the task that opens a file in
// it.
func writeSysctl(key, value string) error {
	f, err := os.OpenFile("/proc/sys/"+key, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(value)
	return errors.Join(err, f.Close())
}

// Cmd is an exec.Cmd that starts inside a host.
type Cmd struct {
	*exec.Cmd
	host *Host
}

// Command prepares a program that will run inside the host. It sees the host's network and the machine's files. It is
// the caller's to wait for: a process that still runs keeps the namespace alive.
func (h *Host) Command(name string, args ...string) *Cmd {
	return &Cmd{exec.Command(name, args...), h}
}

// Start starts the program: a child inherits the namespace of the thread that makes it.
func (c *Cmd) Start() error { return c.host.Do(c.Cmd.Start) }

// Run starts the program and waits for it.
func (c *Cmd) Run() error { return c.host.Do(c.Cmd.Run) }

// Output runs the program and gives what it wrote to standard output.
func (c *Cmd) Output() (out []byte, err error) {
	err = c.host.Do(func() error { out, err = c.Cmd.Output(); return err })
	return out, err
}

// CombinedOutput runs the program and gives all it wrote.
func (c *Cmd) CombinedOutput() (out []byte, err error) {
	err = c.host.Do(func() error { out, err = c.Cmd.CombinedOutput(); return err })
	return out, err
}

// Run runs a program inside the host and gives all it wrote. The error tells the command and what it said.
func (h *Host) Run(name string, args ...string) (string, error) {
	return h.RunInput("", name, args...)
}

// RunInput is Run with text on standard input.
func (h *Host) RunInput(input, name string, args ...string) (string, error) {
	c := h.Command(name, args...)
	c.Stdin = strings.NewReader(input)
	out, err := c.CombinedOutput()
	if err != nil {
		return string(out), fmt.Errorf("lab: %s: %s: %w\n%s", h.Name, strings.Join(c.Args, " "), err, out)
	}
	return string(out), nil
}
