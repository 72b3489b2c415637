package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"
)

// router is the network namespace of a router on the nodes' link, with these addresses. It learns routes by BGP.
const (
	router  = "verdict-router"
	router4 = "192.168.98.2"
	router6 = "fd00:98::2"
)

// Ranges of addresses that clients outside reach by the router.
const (
	routed4 = "198.51.100.0/24"
	routed6 = "fd00:51::/64"
)

// routerPrograms are those of FRR that the router needs, in the order of their start.
var routerPrograms = []string{"zebra", "bgpd"}

// routerConfig is the router's. It divides connections between nodes that announce the same.
const routerConfig = `hostname router
router bgp 64513
 bgp router-id 192.168.98.2
 no bgp ebgp-requires-policy
 no bgp default ipv4-unicast
 neighbor nodes peer-group
 neighbor nodes remote-as 64512
 bgp listen range 192.168.98.0/24 peer-group nodes
 bgp listen range fd00:98::/64 peer-group nodes
 address-family ipv4 unicast
  neighbor nodes activate
 address-family ipv6 unicast
  neighbor nodes activate
  neighbor nodes route-map global in
route-map global permit 10
 set ipv6 next-hop prefer-global
`

// daemonOfRouter runs a program of FRR with the files in a directory, which it gets as /run.
const daemonOfRouter = `mount --bind "$2" "$1/run" && mount --bind /proc "$1/proc" &&
exec chroot "$1" "/usr/lib/frr/$3" -u root -g root -z /run/zserv.api -i "/run/$3.pid" --vty_socket /run -P 0 \
	-f "/run/$3.conf" --log stdout`

// StartRouter starts a router on the nodes' link, by which clients outside reach some ranges. Speakers of BGP on the
// nodes, of the autonomous system 64512, tell it what is where: its own is 64513. A second call does nothing.
func (c *Cluster) StartRouter(ctx context.Context) error {
	if c.running(routerPrograms[1]) {
		return nil
	}
	paths, err := c.Peers(ctx, "frr")
	if err != nil {
		return err
	}
	c.Log("starting a router")
	if err := errors.Join(c.StopRouter(), makeRouterNetwork()); err != nil {
		return err
	}
	dir := c.file("plane", "router")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for _, name := range routerPrograms {
		config := map[string]string{"bgpd": routerConfig}[name]
		if err := os.WriteFile(c.file("plane", "router", name+".conf"), []byte(config), 0o644); err != nil {
			return err
		}
		if err := c.start(name, exec.Command("nsenter", "--net="+netnsPath(router), "unshare", "--mount", "sh", "-ec",
			daemonOfRouter, "sh", paths[0], dir, name)); err != nil {
			return err
		}
		if err := Wait(ctx, time.Minute, name+" works", func() error {
			_, err := os.Stat(c.file("plane", "router", name+".vty"))
			return err
		}); err != nil {
			return fmt.Errorf("%w: see %s", err, c.logFile(name))
		}
	}
	return nil
}

// StopRouter ends the router. It succeeds if there is none.
func (c *Cluster) StopRouter() (err error) {
	for _, name := range routerPrograms {
		err = errors.Join(err, c.stop(name))
	}
	return errors.Join(err, removeNetns(router))
}

func makeRouterNetwork() error {
	if err := addNetns(router); err != nil {
		return err
	}
	if err := within(router, func() (err error) {
		for name, value := range map[string]string{"ipv4/fib_multipath_hash_policy": "1",
			"ipv6/fib_multipath_hash_policy": "1", "ipv4/conf/all/send_redirects": "0",
			"ipv4/conf/default/send_redirects": "0"} {
			err = errors.Join(err, os.WriteFile("/proc/sys/net/"+name, []byte(value), 0o644))
		}
		return err
	}); err != nil {
		return err
	}
	return errors.Join(
		inNet(outside, fmt.Sprintf(`
			link add router type veth peer name eth0 netns %s
			link set router master nodes up
			route replace %s via %s
			-6 route replace %s via %s`, router, routed4, router4, routed6, router6)),
		inNet(router, fmt.Sprintf(`
			addr add %s/24 dev eth0
			addr add %s/64 dev eth0 nodad
			link set eth0 up`, router4, router6)))
}

// NextHops returns the names of the nodes to which the router sends what goes to an address, in their order.
func (c *Cluster) NextHops(ctx context.Context, ip string) (nodes []string, err error) {
	family := "-4"
	if strings.Contains(ip, ":") {
		family = "-6"
	}
	out, err := run(ctx, "ip", "-n", router, family, "-j", "route", "show", "exact", ip)
	if err != nil {
		return nil, err
	}
	type hop struct{ Gateway string }
	var routes []struct {
		hop
		Nexthops []hop
	}
	if err := json.Unmarshal([]byte(out), &routes); err != nil {
		return nil, err
	}
	for _, r := range routes {
		for _, h := range append(r.Nexthops, r.hop) {
			for _, n := range c.Nodes {
				if h.Gateway == n.IP4 || h.Gateway == n.IP6 {
					nodes = append(nodes, n.Name)
				}
			}
		}
	}
	slices.Sort(nodes)
	return slices.Compact(nodes), nil
}
