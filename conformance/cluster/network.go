package cluster

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// outside is the network namespace with the bridge that joins the nodes. The machine's own network does not change.
const outside = "verdict-outside"

const (
	gateway4 = "192.168.98.1"
	gateway6 = "fd00:98::1"
)

// NetnsPath is the file of a network namespace that "ip netns" names so.
func NetnsPath(name string) string { return netnsPath(name) }

func netnsPath(name string) string { return filepath.Join("/run/netns", name) }

// inNet runs lines of ip's batch format in a network namespace.
func inNet(netns, lines string) error {
	for line := range strings.Lines(lines) {
		if args := strings.Fields(line); len(args) > 0 {
			if _, err := run(context.Background(), "ip", append([]string{"-n", netns}, args...)...); err != nil {
				return err
			}
		}
	}
	return nil
}

func addNetns(name string) error {
	_, err := run(context.Background(), "ip", "netns", "add", name)
	if err != nil {
		return err
	}
	return errors.Join(inNet(name, "link set lo up"), setSysctls(name))
}

// sysctls are those of a node's network namespace: it forwards, learns nothing from routers, uses addresses at once,
// and bridges call netfilter, as nodes have it.
var sysctls = []string{
	"net/ipv4/ip_forward=1", "net/ipv6/conf/all/forwarding=1", "net/ipv6/conf/all/accept_dad=0",
	"net/ipv6/conf/default/accept_dad=0", "net/ipv6/conf/default/accept_ra=0", "net/ipv4/conf/all/rp_filter=0",
	"net/ipv4/conf/default/rp_filter=0", "net/bridge/bridge-nf-call-iptables=1", "net/bridge/bridge-nf-call-ip6tables=1",
}

func setSysctls(netns string) error {
	return within(netns, func() error {
		for _, s := range sysctls {
			name, value, _ := strings.Cut(s, "=")
			if err := os.WriteFile("/proc/sys/"+name, []byte(value), 0o644); err != nil {
				return fmt.Errorf("%w (is br_netfilter loaded?)", err)
			}
		}
		return nil
	})
}

func (c *Cluster) makeNetwork() error {
	if err := addNetns(outside); err != nil {
		return err
	}
	return inNet(outside, fmt.Sprintf(`
		link add nodes type bridge
		addr add %s/24 dev nodes
		addr add %s/64 dev nodes nodad
		link set nodes up`, gateway4, gateway6))
}

func (c *Cluster) removeNetwork() error { return removeNetns(outside) }

func removeNetns(name string) error {
	if _, err := os.Stat(netnsPath(name)); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	_, err := run(context.Background(), "ip", "netns", "delete", name)
	return err
}

// attach makes the node's namespace and joins it to the bridge. With routes, it adds routes to the pods of other nodes.
func (n *Node) attach(routes bool) error {
	if err := addNetns(n.netns); err != nil {
		return err
	}
	port := fmt.Sprintf("node-%d", n.index)
	// The kernel removes a former namespace's link some time after the namespace.
	if _, err := run(context.Background(), "ip", "-n", outside, "link", "show", port); err == nil {
		_ = inNet(outside, "link delete "+port) // gone meanwhile is as good
	}
	err := inNet(outside, fmt.Sprintf(`
		link add %[1]s type veth peer name eth0 netns %[2]s
		link set %[1]s master nodes up
		route replace %[3]s via %[4]s
		-6 route replace %[5]s via %[6]s`, port, n.netns, n.pods4(), n.IP4, n.pods6(), n.IP6))
	if err != nil {
		return err
	}
	err = inNet(n.netns, fmt.Sprintf(`
		addr add %s/24 dev eth0
		addr add %s/64 dev eth0 nodad
		link set eth0 up
		route add default via %s
		-6 route add default via %s`, n.IP4, n.IP6, gateway4, gateway6))
	for _, other := range n.cluster.Nodes {
		if routes && other != n && err == nil {
			err = inNet(n.netns, fmt.Sprintf(`
				route add %s via %s
				-6 route add %s via %s`, other.pods4(), other.IP4, other.pods6(), other.IP6))
		}
	}
	return err
}

// within runs f on a thread in the network namespace. Sockets that f opens stay there.
func within(netns string, f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with this goroutine
		ns, err := os.Open(netnsPath(netns))
		if err != nil {
			done <- err
			return
		}
		defer ns.Close()
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			done <- fmt.Errorf("enter %s: %w", netns, err)
			return
		}
		done <- f()
	}()
	return <-done
}

// DialFrom returns a dialer in a network namespace, for addresses without names.
func DialFrom(netns string) func(ctx context.Context, network, address string) (net.Conn, error) {
	return func(ctx context.Context, network, address string) (conn net.Conn, err error) {
		err = within(netns, func() (err error) {
			conn, err = (&net.Dialer{}).DialContext(ctx, network, address)
			return err
		})
		return conn, err
	}
}
