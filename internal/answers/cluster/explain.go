package cluster

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Asked is a packet by names, resolved: which node to ask, and the arguments of verdict explain there.
type Asked struct {
	Node, Source, Destination string
}

// ParseRef reads [KIND/][NAMESPACE/]NAME[:PORT]. Kind and port may be missing; the kind must be one of those given.
func ParseRef(text, namespace string, kinds ...string) (n snapshot.Name, port string, err error) {
	name, port, hasPort := strings.Cut(text, ":")
	parts := strings.Split(name, "/")
	if len(parts) > 1 && slices.Contains(kinds, parts[0]) {
		parts = parts[1:]
	}
	if len(parts) == 1 {
		parts = []string{namespace, parts[0]}
	}
	if len(parts) != 2 || parts[0] == "" || parts[1] == "" || hasPort && port == "" {
		return n, "", fmt.Errorf("%.100q is not [%s/][NAMESPACE/]NAME", text, kinds[0])
	}
	return snapshot.Name{Namespace: parts[0], Name: parts[1]}, port, nil
}

// Resolve finds the node of a pod, and the addresses of the pod and of a port of a Service, in the Service's first
// family that the pod has. An empty port means the Service's only one. A pod with its node's network is "node".
func (c *Cluster) Resolve(ctx context.Context, pod, service snapshot.Name, port string) (*Asked, error) {
	p, err := c.API.Pod(ctx, pod.Namespace, pod.Name)
	if err != nil {
		return nil, err
	}
	svc, err := c.API.Service(ctx, service.Namespace, service.Name)
	if err != nil {
		return nil, err
	}
	if p.Spec.NodeName == "" {
		return nil, fmt.Errorf("pod %s is on no node yet", pod)
	}
	sp, err := portOf(svc, port)
	if err != nil {
		return nil, err
	}
	for _, ip := range svc.Spec.ClusterIPs {
		to, err := netip.ParseAddr(ip)
		if err != nil {
			continue // headless, or an ExternalName
		}
		for _, own := range p.Status.PodIPs {
			from, err := netip.ParseAddr(own.IP)
			if err != nil || from.Is4() != to.Is4() {
				continue
			}
			a := &Asked{Node: p.Spec.NodeName, Source: from.String(), Destination: net.JoinHostPort(ip,
				strconv.Itoa(int(sp.Port))) + "/" + strings.ToLower(string(sp.Protocol))}
			if p.Spec.HostNetwork {
				a.Source = "node"
			}
			return a, nil
		}
	}
	return nil, fmt.Errorf("pod %s and Service %s have no address family in common (pod: %v, Service: %v)", pod, service,
		p.Status.PodIPs, svc.Spec.ClusterIPs)
}

// Explain asks the node what happens to the packet: of its kernel and the objects, or live of its kernel alone. An
// error says that the node has nobody to ask.
func (c *Cluster) Explain(ctx context.Context, a *Asked, live bool, options ...string) (Result, error) {
	t, err := c.TargetOn(ctx, a.Node)
	if err != nil {
		return Result{}, err
	}
	argv := []string{"explain", a.Source, a.Destination, "--live"}
	if !live {
		argv = append(append(argv, "--in-cluster", "--hostname-override="+t.Node), t.Flags...)
	}
	argv = append(argv, options...)
	return c.Each(ctx, []Target{t}, func(Target) []string { return argv })[0], nil
}

// portOf finds a port of a Service by name or number.
func portOf(svc *corev1.Service, port string) (*corev1.ServicePort, error) {
	var has []string
	for i := range svc.Spec.Ports {
		sp := &svc.Spec.Ports[i]
		if port == "" && len(svc.Spec.Ports) == 1 || port != "" && (port == sp.Name || port == strconv.Itoa(int(sp.Port))) {
			return sp, nil
		}
		has = append(has, strings.TrimPrefix(fmt.Sprintf("%s:%d", sp.Name, sp.Port), ":"))
	}
	what := "has several ports: name one"
	if port != "" {
		what = fmt.Sprintf("has no port %.100q", port)
	}
	return nil, fmt.Errorf("Service %s/%s %s (%s)", svc.Namespace, svc.Name, what, strings.Join(has, ", "))
}

// Led is a Service that leads to a pod, by one slice.
type Led struct {
	Service string   `json:"service"`
	Slice   string   `json:"slice"`
	Ports   []string `json:"ports"`
	Address string   `json:"address"`
	// State is what the slice says of the endpoint: ready, serving and terminating, terminating, or not ready.
	State string `json:"state"`
}

// LeadingTo returns the Services of a pod's namespace whose slices name the pod or one of its addresses.
func (c *Cluster) LeadingTo(ctx context.Context, pod snapshot.Name) ([]Led, error) {
	p, err := c.API.Pod(ctx, pod.Namespace, pod.Name)
	if apierrors.IsForbidden(err) { // slices name pods, too
		p, err = &corev1.Pod{}, nil
	}
	if err != nil {
		return nil, err
	}
	list, err := c.API.Slices(ctx, pod.Namespace, "")
	if err != nil {
		return nil, err
	}
	var own []string
	for _, ip := range p.Status.PodIPs {
		own = append(own, ip.IP)
	}
	var led []Led
	for i := range list.Items {
		sl := &list.Items[i]
		for _, e := range sl.Endpoints {
			at := slices.IndexFunc(e.Addresses, func(a string) bool { return slices.Contains(own, a) })
			named := e.TargetRef != nil && e.TargetRef.Kind == "Pod" && e.TargetRef.Name == pod.Name
			if at < 0 && (!named || len(e.Addresses) == 0) || e.TargetRef != nil && e.TargetRef.Kind == "Pod" && !named {
				continue // a pod with its node's network shares its address with others
			}
			led = append(led, Led{Service: sl.Namespace + "/" + sl.Labels[discoveryv1.LabelServiceName], Slice: sl.Name,
				Ports: portsOf(sl), Address: e.Addresses[max(at, 0)], State: stateOf(e.Conditions)})
		}
	}
	slices.SortFunc(led, func(a, b Led) int { return strings.Compare(a.Service+" "+a.Slice, b.Service+" "+b.Slice) })
	return led, nil
}

func portsOf(sl *discoveryv1.EndpointSlice) (ports []string) {
	for _, p := range sl.Ports {
		if p.Port == nil {
			continue
		}
		text := strconv.Itoa(int(*p.Port))
		if p.Name != nil && *p.Name != "" {
			text = *p.Name + ":" + text
		}
		if p.Protocol != nil && *p.Protocol != corev1.ProtocolTCP {
			text += "/" + strings.ToLower(string(*p.Protocol))
		}
		ports = append(ports, text)
	}
	return ports
}

// stateOf names the conditions, with the API's defaults.
func stateOf(c discoveryv1.EndpointConditions) string {
	ready := c.Ready == nil || *c.Ready
	serving := c.Serving != nil && *c.Serving || c.Serving == nil && ready
	return StateOf(ready, serving, c.Terminating != nil && *c.Terminating)
}

// StateOf names conditions.
func StateOf(ready, serving, terminating bool) string {
	switch {
	case ready && !terminating:
		return "ready"
	case serving && terminating:
		return "serving, terminating"
	case terminating:
		return "terminating"
	}
	return "not ready"
}

// ServiceNames returns the names of the Services of a namespace that have slices.
func (c *Cluster) ServiceNames(ctx context.Context, namespace string) (names []string, err error) {
	list, err := c.API.Slices(ctx, namespace, "")
	if err != nil {
		return nil, err
	}
	for i := range list.Items {
		if name := list.Items[i].Labels[discoveryv1.LabelServiceName]; name != "" && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names, nil
}
