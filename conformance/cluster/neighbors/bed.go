package neighbors

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/verdict-proxy/verdict/conformance/cluster"
)

// Bed is a cluster with servers, Services and clients, which stay while proxies change.
type Bed struct {
	*cluster.Cluster
	// Neighbors are those that run on it.
	Neighbors []*Neighbor

	api     *kubernetes.Clientset
	clients map[string]*client
}

// space is the namespace of servers and clients that no policy concerns.
const space = "neighbors"

// client is where connections begin.
type client struct {
	// ips are its own addresses, IPv4 first.
	ips []string
	run func(ctx context.Context, args ...string) (string, error)
}

// NewBed starts servers and clients on the cluster with the neighbors that it has.
func NewBed(ctx context.Context, c *cluster.Cluster) (*Bed, error) {
	names, err := c.Neighbors()
	if err != nil {
		return nil, err
	}
	b := &Bed{Cluster: c, clients: map[string]*client{}}
	if b.Neighbors, err = Find(names); err != nil {
		return nil, err
	}
	if b.api, err = c.Client(); err != nil {
		return nil, err
	}
	if !b.has(func(n *Neighbor) bool { return n.Balancer }) {
		if err := c.Balance(ctx); err != nil {
			return nil, err
		}
	}
	b.Log("starting servers and clients")
	if err := c.Apply(ctx, objects()); err != nil {
		return nil, err
	}
	// A run that was interrupted has left some.
	if _, err := c.Kubectl(ctx, "-n", guarded, "delete", "networkpolicy", "--all"); err != nil {
		return nil, err
	}
	for _, namespace := range []string{space, guarded, friendly, foreign} {
		if _, err := c.Kubectl(ctx, "-n", namespace, "wait", "pod", "--all", "--for=condition=Ready",
			"--timeout=2m"); err != nil {
			return nil, err
		}
	}
	return b, b.findClients(ctx)
}

// Versions are the neighbors' names with their versions; without any, the bridge's.
func (b *Bed) Versions(ctx context.Context) (string, error) {
	var all []string
	for _, n := range b.Neighbors {
		version, err := n.Build(ctx, b.Cluster)
		if err != nil {
			return "", err
		}
		all = append(all, n.Name+" "+version)
	}
	if !b.has(func(n *Neighbor) bool { return n.Network }) {
		all = append(all, "bridge")
	}
	return strings.Join(all, ", "), nil
}

func (b *Bed) has(what func(*Neighbor) bool) bool {
	for _, n := range b.Neighbors {
		if what(n) {
			return true
		}
	}
	return false
}

// second is an address of the host outside that policies do not allow, of each family.
var second = [2]string{"192.168.98.9", "fd00:98::9"}

func (b *Bed) findClients(ctx context.Context) error {
	n := b.Nodes[0]
	b.clients["node"] = &client{[]string{n.IP4, n.IP6}, func(ctx context.Context, args ...string) (string, error) {
		return n.Exec(ctx, b.Workload(), args...)
	}}
	outside := func(ctx context.Context, args ...string) (string, error) {
		out, err := exec.CommandContext(ctx, "nsenter", append([]string{"--net=" + cluster.NetnsPath(b.Outside()),
			b.Workload()}, args...)...).Output()
		return string(out), err
	}
	first4, first6 := cluster.Gateway()
	b.clients["outside"] = &client{[]string{first4, first6}, outside}
	b.clients["outside, another address"] = &client{second[:], outside}
	if err := b.AddOutside(second[0], second[1]); err != nil {
		return err
	}
	for name, in := range podClients {
		pod, err := b.api.CoreV1().Pods(in[0]).Get(ctx, in[1], metav1.GetOptions{})
		if err != nil {
			return err
		}
		b.clients[name] = &client{podIPs(pod), func(ctx context.Context, args ...string) (string, error) {
			return b.Kubectl(ctx, append([]string{"-n", in[0], "exec", in[1], "--", "/workload"}, args...)...)
		}}
	}
	return nil
}

func podIPs(pod *corev1.Pod) (ips []string) {
	for _, ip := range pod.Status.PodIPs {
		ips = append(ips, ip.IP)
	}
	return ips
}

// probe has a client open connections to each target, and returns what came of each, in the targets' order.
func (b *Bed) probe(ctx context.Context, name, from string, connections int, targets []string) ([]cluster.Probe,
	error) {
	args := append([]string{"probe", from, fmt.Sprint(connections)}, targets...)
	out, err := b.clients[name].run(ctx, args...)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	probes := make([]cluster.Probe, len(targets))
	decoder := json.NewDecoder(strings.NewReader(out))
	for i := range probes {
		if err := decoder.Decode(&probes[i]); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	return probes, nil
}

// service returns the addresses of a Service: its cluster IPs and those of its load balancer, by family, for which it
// waits.
func (b *Bed) service(ctx context.Context, namespace, name string) (ips, balancer []string, err error) {
	err = cluster.Wait(ctx, time.Minute, "the Service "+name+" has its addresses", func() error {
		svc, err := b.api.CoreV1().Services(namespace).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		ips, balancer = svc.Spec.ClusterIPs, nil
		for _, in := range svc.Status.LoadBalancer.Ingress {
			balancer = append(balancer, in.IP)
		}
		want := len(ips)
		if b.has(func(n *Neighbor) bool { return n.oneFamily }) {
			want = 1
		}
		if svc.Spec.Type == corev1.ServiceTypeLoadBalancer && len(balancer) < want {
			return errors.New("it has no address of a load balancer")
		}
		return nil
	})
	if len(balancer) > 1 && strings.Contains(balancer[0], ":") {
		balancer[0], balancer[1] = balancer[1], balancer[0]
	}
	return ips, balancer, err
}
