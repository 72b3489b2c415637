package benchmark

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/control"
)

// world is a control plane that holds a cluster. Nodes come and go beside it.
type world struct {
	*cluster
	net   *lab.Net
	host  *lab.Host
	plane *control.Plane
	store *store
	dir   string
	nodes int // that were made so far
	// agents says that the API server has what Cilium's agents need.
	agents bool
}

// The wire that nodes and control plane share.
var (
	controlAddr = netip.MustParsePrefix("192.0.2.5/24")
	nodeAddr    = netip.MustParsePrefix("192.0.2.10/24")
)

const wire = "br0"

// newWorld starts a control plane in an empty directory of its own and fills it. Whoever has it must close it.
func newWorld(ctx context.Context, c *cluster, p Programs, dir string, progress func(string)) (*world, error) {
	w := &world{cluster: c, net: lab.New(), dir: dir}
	if err := w.open(ctx, p, progress); err != nil {
		return nil, errors.Join(err, w.close())
	}
	return w, nil
}

func (w *world) open(ctx context.Context, p Programs, progress func(string)) error {
	err := w.lay()
	if err != nil {
		return err
	}
	w.store = newStore(w.host)
	fill := func(ctx context.Context) error {
		err := w.store.seed(
			ctx,
			w.cluster,
			func(done, of int) { progress(fmt.Sprintf("writing Services: %d of %d", done, of)) },
		)
		progress("starting the API server")
		return err
	}
	progress("starting etcd")
	w.plane, err = control.Start(ctx, control.Config{
		Host: w.host, Etcd: p["etcd"], APIServer: p["kube-apiserver"], Dir: w.dir,
		ServiceRanges: []netip.Prefix{serviceRange}, RequestTimeout: time.Minute, Fill: fill,
	})
	if err != nil {
		return err
	}
	node := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName, Labels: map[string]string{v1.LabelHostname: nodeName}}}
	if node, err = w.plane.Client.CoreV1().Nodes().Create(ctx, node, metav1.CreateOptions{}); err != nil {
		return err
	}
	node.Status.Addresses = []v1.NodeAddress{{Type: v1.NodeInternalIP, Address: nodeAddr.Addr().String()}}
	if _, err = w.plane.Client.CoreV1().Nodes().UpdateStatus(ctx, node, metav1.UpdateOptions{}); err != nil {
		return err
	}
	progress("listing all, so that the API server has it at hand")
	return w.list(ctx)
}

// lay makes the host of the control plane, and the wire.
func (w *world) lay() (err error) {
	if w.host, err = w.net.NewHost("control"); err != nil {
		return err
	}
	return errors.Join(w.host.PlainBridges(), w.host.AddBridge(wire), w.host.AddAddr(wire, controlAddr))
}

// list reads all objects as a proxy does. So the API server has had each in its hands before anything is measured,
// and it is sure that it has taken them in.
func (w *world) list(ctx context.Context) error {
	for _, path := range []string{"/api/v1/services", "/apis/discovery.k8s.io/v1/endpointslices"} {
		request := w.plane.Client.CoreV1().RESTClient().Get().AbsPath(path).
			SetHeader("Accept", "application/vnd.kubernetes.protobuf").Param("resourceVersion", "")
		if _, err := request.DoRaw(ctx); err != nil {
			return fmt.Errorf("GET %s: %w", path, err)
		}
	}
	return nil
}

func (w *world) close() error {
	var errs []error
	if w.store != nil {
		w.store.close()
	}
	if w.plane != nil {
		errs = append(errs, w.plane.Close())
	}
	return errors.Join(append(errs, w.net.Close())...)
}

// node is a node with nothing on it yet, a pod that asks and one that answers for all endpoints:
//
//	client 10.255.0.9 --- node 192.0.2.10 --- server 10.255.0.10, and everything in 10.128.0.0/10
//	                            |
//	                      control 192.0.2.5
//
// What the proxy has not translated ends at the node, which has no route for it, and the client hears of it at once.
type node struct {
	*world
	kind                 *Kind
	net                  *lab.Net
	host, client, server *lab.Host
	proxy                *control.Process
	listeners            []net.Listener
	log                  string
	usage                *usage
	agent                *agent // nil unless the proxy is Cilium
}

var (
	clientAddr = netip.MustParseAddr("10.255.0.9")
	serverAddr = netip.MustParseAddr("10.255.0.10")
	gateway    = netip.MustParseAddr("10.255.0.1")
)

// newNode makes a node. Whoever has it must close it.
func (w *world) newNode(k *Kind) (*node, error) {
	w.nodes++
	n := &node{world: w, kind: k, net: lab.New()}
	n.log = filepath.Join(w.dir, fmt.Sprintf("%s-%d.log", k.Name, w.nodes))
	if err := n.build(k); err != nil {
		return nil, errors.Join(err, n.close())
	}
	return n, nil
}

func (n *node) build(k *Kind) error {
	for name, h := range map[string]**lab.Host{"node": &n.host, "client": &n.client, "server": &n.server} {
		var err error
		if *h, err = n.net.NewHost(name); err != nil {
			return err
		}
	}
	port := fmt.Sprintf("node%d", n.nodes)
	err := errors.Join(
		lab.Link(lab.End{Host: n.host, Link: "eth0"}, lab.End{Host: n.world.host, Link: port}, lab.LinkOptions{}),
		n.world.host.AddPort(wire, port), n.host.AddAddr("eth0", nodeAddr), n.host.Forward(),
		n.addPod(n.client, clientAddr), n.addPod(n.server, serverAddr),
		n.host.AddRoute(lab.Route{To: endpointRange, Via: serverAddr, Link: "server"}),
		n.answerForAll(),
	)
	for _, h := range []*lab.Host{n.host, n.client, n.server, n.world.host} {
		err = errors.Join(err, h.WaitReady())
	}
	if err != nil {
		return err
	}
	if k.program == "" {
		return nil
	}
	return n.prepare(k)
}

func (n *node) addPod(pod *lab.Host, a netip.Addr) error {
	return pod.Attach(n.host, lab.Attachment{Link: pod.Name, Addrs: []netip.Addr{a}, Gateways: []netip.Addr{gateway}})
}

// answerForAll has the server's host take every address of endpoints for its own.
func (n *node) answerForAll() error {
	return errors.Join(n.ownAddresses(endpointRange), n.serve(serverPort, greet), n.serve(sinkPort, swallow))
}

// ownAddresses makes all addresses of a range the server's own.
func (n *node) ownAddresses(all netip.Prefix) error {
	nl := n.server.Netlink()
	lo, err := nl.LinkByName("lo")
	if err != nil {
		return err
	}
	err = nl.RouteAdd(&netlink.Route{
		LinkIndex: lo.Attrs().Index, Dst: &net.IPNet{IP: all.Addr().AsSlice(), Mask: net.CIDRMask(all.Bits(), 32)},
		Type: unix.RTN_LOCAL, Table: unix.RT_TABLE_LOCAL, Scope: netlink.SCOPE_HOST,
	})
	if err != nil {
		return fmt.Errorf("server: local route %s: %w", all, err)
	}
	return nil
}

// config is the file with the proxy's configuration.
func (n *node) config() string { return n.log + ".conf" }

// prepare makes all that the proxy needs for its start.
func (n *node) prepare(k *Kind) error {
	config := n.config()
	if err := os.WriteFile(config, []byte(k.config(n.plane.Kubeconfig())), 0o600); err != nil {
		return err
	}
	path, err := k.path(n.dir)
	if err != nil {
		return err
	}
	// The lock of legacy iptables is one for the whole machine, and others may hold it.
	args := []string{"PATH=" + path, "XTABLES_LOCKFILE=" + n.log + ".lock", "K8S_NODE_NAME=" + nodeName}
	if k.program == ciliumAgent {
		if n.agent, err = newAgent(n.log + ".files"); err != nil {
			return err
		}
		args = append(args, n.agentCommand(k)...)
	} else {
		args = append(args, k.Binary)
		for _, a := range k.args {
			args = append(args, strings.ReplaceAll(a, "{config}", config))
		}
	}
	if n.usage, err = newUsage(); err != nil {
		return err
	}
	args = n.usage.command("/usr/bin/env", args...)
	n.proxy = control.NewProcess(n.host, n.log, args[0], args[1:]...)
	return errors.Join(k.warm(), n.hint(k))
}

// hint makes the chain by which a kubelet says which variant of iptables is the host's.
func (n *node) hint(k *Kind) error {
	if k.tables == "" {
		return nil
	}
	_, err := n.host.Run(k.multi(), "iptables", "-w", "5", "-t", "mangle", "-N", "KUBE-IPTABLES-HINT")
	return err
}

// wrote is an error if the rules of a proxy by iptables are not in the variant that it was to write to.
func (n *node) wrote(k *Kind) error {
	if k.tables == "" || k.ipvs {
		return nil
	}
	_, err := n.host.Run(k.multi(), "iptables", "-w", "5", "-t", "nat", "-S", "KUBE-SERVICES", "1")
	return err
}

// start starts the proxy.
func (n *node) start() error {
	if err := n.proxy.Start(); err != nil {
		return err
	}
	n.usage.follow(n.proxy.PID())
	return nil
}

// ended is an error if the proxy runs no more.
func (n *node) ended() error {
	if n.proxy.Ended() {
		return fmt.Errorf("the proxy has ended:\n%s", n.proxy.Tail())
	}
	return nil
}

func (n *node) close() error {
	var errs []error
	for _, l := range n.listeners {
		errs = append(errs, l.Close())
	}
	if n.proxy != nil {
		errs = append(errs, n.proxy.Kill())
	}
	if n.usage != nil {
		errs = append(errs, n.usage.close())
	}
	if n.agent != nil {
		errs = append(errs, n.agent.close())
	}
	return errors.Join(append(errs, n.net.Close())...)
}
