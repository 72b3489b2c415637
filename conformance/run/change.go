package run

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	networking "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/verdict-proxy/verdict/conformance/cases"
	"github.com/verdict-proxy/verdict/conformance/testbed"
	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// change does a step that changes something.
func (t *teller) change(ctx context.Context, s *cases.Step) error {
	switch {
	case s.Service != nil:
		return t.writeService(ctx, s.Service)
	case s.Endpoints != nil:
		return t.writeEndpoints(ctx, s.Endpoints)
	case s.Delete != nil:
		return t.delete(ctx, s.Delete)
	case s.Pods != nil:
		return t.pods(ctx, s.Pods)
	case s.Mirrored != nil:
		return t.mirrored(ctx, s.Mirrored)
	case s.Node != nil:
		return t.node(ctx, s.Node)
	case s.ServiceCIDR != nil:
		return t.serviceCIDR(ctx, s.ServiceCIDR)
	case s.Serve != nil:
		return t.serve(s.Serve)
	case s.Close != nil:
		return t.close(s.Close)
	case s.Blackhole != nil:
		return t.blackhole(s.Blackhole)
	case s.Heal != nil:
		return t.heal(s.Heal)
	case s.Proxy != nil:
		return t.proxy(ctx, s.Proxy)
	case s.API != "":
		return t.api(ctx, s.API)
	case s.Route != nil:
		return t.route(s.Route)
	case s.Run != nil:
		return t.run(s)
	}
	return errors.New("a step without a kind")
}

func ignoreMissing(err error) error {
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

func (t *teller) writeService(ctx context.Context, s *cases.ServiceStep) error {
	o := &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: s.Name, Namespace: t.namespace, Labels: s.Labels, Annotations: s.Annotations},
		Spec:       *s.Parsed.DeepCopy(),
	}
	if o.Spec.IPFamilyPolicy == nil && o.Spec.Type != v1.ServiceTypeExternalName {
		o.Spec.IPFamilyPolicy = new(v1.IPFamilyPolicyRequireDualStack)
	}
	for i, p := range o.Spec.Ports {
		if p.Protocol == "" {
			o.Spec.Ports[i].Protocol = v1.ProtocolTCP
		}
	}
	if t.numbers[s.Name] == 0 {
		t.numbers[s.Name] = t.nextNumber()
	}
	if s.External {
		o.Spec.ExternalIPs = externalIPs(t.numbers[s.Name])
	}
	if s.Balancer {
		o.Status.LoadBalancer.Ingress = ingress(t.numbers[s.Name], "")
	}
	for _, host := range s.BalancerOf {
		for _, a := range []netip.Addr{t.testbed.Host(host).IP4, t.testbed.Host(host).IP6} {
			o.Status.LoadBalancer.Ingress = append(o.Status.LoadBalancer.Ingress, v1.LoadBalancerIngress{IP: a.String()})
		}
	}
	made, err := writeService(ctx, t.testbed, o)
	if s.Rejected != "" {
		if err == nil || !strings.Contains(err.Error(), s.Rejected) {
			return fmt.Errorf("service %s: it should be rejected with %q, and is not: %v", s.Name, s.Rejected, err)
		}
		return nil
	}
	if err != nil {
		return err
	}
	t.services[s.Name], t.dirty = made, true
	return nil
}

func (t *teller) writeEndpoints(ctx context.Context, e *cases.EndpointsStep) error {
	s := t.services[e.Of]
	if s == nil {
		return fmt.Errorf("endpoints: there is no Service %s", e.Of)
	}
	families := e.Families
	if len(families) == 0 {
		families = cases.Families
	}
	ports := slicePorts(s.Spec.Ports, e.Ports, e.Only)
	for _, slice := range endpointSlices(t.testbed.Topology, t.namespace, e.Of, sliceName(e.Of, e.Slice), e.Set, ports,
		families) {
		maps.Copy(slice.Labels, e.Labels)
		slice.Annotations = maps.Clone(e.Annotations)
		if err := writeSlice(ctx, t.testbed, slice); err != nil {
			return err
		}
	}
	t.dirty = true
	return nil
}

func sliceName(service, slice string) string {
	if slice == "" {
		return service
	}
	return service + "-" + slice
}

func (t *teller) delete(ctx context.Context, d *cases.DeleteStep) error {
	t.dirty = true
	if d.Service != "" {
		return t.testbed.Client.CoreV1().Services(t.namespace).Delete(ctx, d.Service, metav1.DeleteOptions{})
	}
	for _, f := range cases.Families {
		name := fmt.Sprintf("%s-%s", sliceName(d.Endpoints, d.Slice), f)
		if err := t.testbed.Client.DiscoveryV1().EndpointSlices(t.namespace).Delete(ctx, name,
			metav1.DeleteOptions{}); err != nil {
			return err
		}
	}
	return nil
}

// pods writes Pod objects as the kubelet would, for the EndpointSlice controller.
func (t *teller) pods(ctx context.Context, p *cases.PodsStep) error {
	if err := t.testbed.Plane.StartControllers(); err != nil {
		return err
	}
	t.dirty = true
	client := t.testbed.Client.CoreV1().Pods(t.namespace)
	for _, host := range slices.Sorted(maps.Keys(p.Set)) {
		var err error
		switch state := p.Set[host]; state {
		case "deleted":
			err = client.Delete(ctx, host, metav1.DeleteOptions{GracePeriodSeconds: new(int64)})
		case "terminating":
			err = client.Delete(ctx, host, metav1.DeleteOptions{GracePeriodSeconds: new(int64(600))})
		case "ready", "unready":
			err = t.writePod(ctx, host, state == "ready", p)
		default:
			err = fmt.Errorf("pods: %s is none of ready, unready, terminating, deleted", state)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (t *teller) writePod(ctx context.Context, host string, ready bool, p *cases.PodsStep) error {
	client := t.testbed.Client.CoreV1().Pods(t.namespace)
	pod, err := client.Get(ctx, host, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		container := v1.Container{Name: "server", Image: "none"}
		for _, name := range slices.Sorted(maps.Keys(p.Ports)) {
			for _, protocol := range []v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP} {
				container.Ports = append(container.Ports, v1.ContainerPort{
					Name: portName(name, protocol), ContainerPort: p.Ports[name], Protocol: protocol})
			}
		}
		pod, err = client.Create(ctx, &v1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: host, Namespace: t.namespace, Labels: p.Labels},
			Spec: v1.PodSpec{
				NodeName:    testbed.NodeOf(host),
				Containers:  []v1.Container{container},
				HostNetwork: testbed.IsNode(host),
			},
		}, metav1.CreateOptions{})
	}
	if err != nil {
		return err
	}
	h := t.testbed.Host(host)
	status := v1.ConditionFalse
	if ready {
		status = v1.ConditionTrue
	}
	pod.Status = v1.PodStatus{
		Phase: v1.PodRunning, PodIP: h.IP4.String(), PodIPs: []v1.PodIP{{IP: h.IP4.String()}, {IP: h.IP6.String()}},
		HostIP:     t.testbed.Host(testbed.NodeOf(host)).IP4.String(),
		Conditions: []v1.PodCondition{{Type: v1.PodReady, Status: status}},
	}
	_, err = client.UpdateStatus(ctx, pod, metav1.UpdateOptions{})
	return err
}

// portName tells the protocols apart, which a pod's port names must.
func portName(name string, p v1.Protocol) string {
	if p == v1.ProtocolTCP {
		return name
	}
	return name + "-" + strings.ToLower(string(p))
}

func (t *teller) node(ctx context.Context, n *cases.NodeStep) error {
	client := t.testbed.Client.CoreV1().Nodes()
	node, err := client.Get(ctx, n.Name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	before := node.DeepCopy()
	t.undo = append(t.undo, func(ctx context.Context) error {
		before.ResourceVersion = ""
		_, err := client.Update(ctx, before, metav1.UpdateOptions{})
		return err
	})
	if n.Zone != "" {
		node.Labels[v1.LabelTopologyZone] = n.Zone
	}
	if n.Taints != nil {
		node.Spec.Taints = nil
		for _, key := range n.Taints {
			node.Spec.Taints = append(node.Spec.Taints, v1.Taint{Key: key, Effect: v1.TaintEffectNoSchedule})
		}
	}
	_, err = client.Update(ctx, node, metav1.UpdateOptions{})
	t.dirty = true
	return err
}

func (t *teller) serviceCIDR(ctx context.Context, c *cases.CIDRStep) error {
	client := t.testbed.Client.NetworkingV1().ServiceCIDRs()
	o := &networking.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: c.Name}}
	for _, r := range testbed.SecondServiceRange {
		o.Spec.CIDRs = append(o.Spec.CIDRs, r.String())
	}
	if err := t.testbed.Plane.StartControllers(); err != nil { // one of them says that the range is ready
		return err
	}
	if _, err := client.Create(ctx, o, metav1.CreateOptions{}); err != nil {
		return err
	}
	t.undo = append(t.undo, func(ctx context.Context) error { return client.Delete(ctx, c.Name, metav1.DeleteOptions{}) })
	ready := false
	t.within(ctx, cases.Duration(time.Minute), func() bool {
		made, err := client.Get(ctx, c.Name, metav1.GetOptions{})
		ready = err == nil && slices.ContainsFunc(made.Status.Conditions, func(c metav1.Condition) bool {
			return c.Type == networking.ServiceCIDRConditionReady && c.Status == metav1.ConditionTrue
		})
		return ready
	})
	if !ready {
		return fmt.Errorf("ServiceCIDR %s is not ready after a minute", c.Name)
	}
	t.dirty = true
	return nil
}

var allProtocols = []snapshot.Protocol{snapshot.TCP, snapshot.UDP, snapshot.SCTP}

func (t *teller) serve(s *cases.ServeStep) error {
	for _, host := range s.On {
		for _, p := range allProtocols {
			server, err := t.testbed.Host(host).Serve(p, s.Port)
			if err != nil {
				return err
			}
			server.Late(time.Duration(s.Late))
			t.servers[fmt.Sprintf("%s %s %d", host, p, s.Port)] = server
		}
	}
	return nil
}

func (t *teller) close(s *cases.ServeStep) error {
	for _, host := range s.On {
		for _, p := range allProtocols {
			key := fmt.Sprintf("%s %s %d", host, p, s.Port)
			server := t.servers[key]
			if server == nil {
				return fmt.Errorf("close: %s does not serve port %d for this story", host, s.Port)
			}
			delete(t.servers, key)
			if err := server.Close(); err != nil {
				return err
			}
		}
	}
	return nil
}

func (t *teller) proxy(ctx context.Context, p *cases.ProxyStep) error {
	nodes := p.On
	if len(nodes) == 0 {
		nodes = t.testbed.Nodes()
	}
	changed := p.With != nil || p.Own != nil
	if len(t.undo) == 0 || changed {
		t.undo = append(t.undo, t.restoreProxies)
	}
	t.dirty = true
	for _, node := range nodes {
		proxy, err := t.proxyOn(ctx, node, p.As)
		if err != nil {
			return err
		}
		if changed {
			if err := proxy.Configure(p.With, p.Own); err != nil {
				return err
			}
		}
		if err := act(ctx, proxy, p.Do); err != nil {
			return err
		}
	}
	return nil
}

// proxyOn gives the proxy under test on a node, or the other one.
func (t *teller) proxyOn(ctx context.Context, node, as string) (*testbed.Proxy, error) {
	if as == "" {
		return t.testbed.Proxies[node], nil
	}
	if p := t.others[node]; p != nil && p.Kind.Name == as {
		return p, nil
	}
	kind, binary, err := t.obtain(ctx, as)
	if err != nil {
		return nil, err
	}
	p, err := t.testbed.NewProxy(node, kind, binary)
	t.others[node] = p
	return p, err
}

func act(ctx context.Context, p *testbed.Proxy, do string) error {
	switch do {
	case "stop":
		return p.End(ctx, false)
	case "kill":
		return p.End(ctx, true)
	case "start":
		return p.Start()
	case "restart":
		return p.Restart(ctx, false)
	}
	return p.Restart(ctx, true) // killAndStart
}

// restoreProxies has all proxies run as in the beginning.
func (t *teller) restoreProxies(ctx context.Context) error {
	var errs []error
	for _, p := range t.others {
		errs = append(errs, p.Kill())
	}
	for _, p := range t.testbed.Proxies {
		errs = append(errs, p.Configure(nil, nil), p.End(ctx, false), p.Start())
	}
	return errors.Join(append(errs, t.testbed.AwaitStart(ctx))...)
}

func (t *teller) api(ctx context.Context, do string) error {
	switch do {
	case "stop":
		t.apiDown = true
		return t.testbed.Plane.StopServer(ctx)
	case "kill":
		t.apiDown = true
		return t.testbed.Plane.KillServer()
	}
	t.apiDown, t.dirty, t.relisted = false, true, true
	return t.testbed.Plane.StartServer(ctx)
}

// route adds routes of single addresses, which therefore disturb no other story.
func (t *teller) route(s *cases.RouteStep) error {
	service := t.services[s.To]
	if service == nil {
		return fmt.Errorf("route: there is no Service %s", s.To)
	}
	router, via := t.testbed.Host("router"), t.testbed.Host(s.Via)
	for _, f := range cases.Families {
		a := balancerAddr(service, f)
		if !a.IsValid() {
			return fmt.Errorf("route: service %s has no %s address of a load balancer", s.To, f)
		}
		r := lab.Route{To: netip.PrefixFrom(a, a.BitLen()), Via: via.IP(labFamily(f)), Link: "eth0",
			Table: testbed.RoutesOf(s.From)}
		if err := router.AddRoute(r); err != nil {
			return err
		}
		t.routes = append(t.routes, r)
	}
	return nil
}

// run runs a program that does to a node what others may do.
func (t *teller) run(s *cases.Step) error {
	host, input := t.testbed.Host(s.Run.On), []byte(nil)
	t.undo = append(t.undo, t.restoreProxies)
	if s.Run.Undo != "" {
		t.undo = append(t.undo, func(context.Context) error {
			_, err := host.Run("sh", "-c", s.Run.Undo)
			return err
		})
	}
	if s.Run.Reads != "" {
		var err error
		if input, err = os.ReadFile(neighborFile(s.Run.Reads)); err != nil {
			return err
		}
	}
	out, err := host.RunInput(string(input), s.Run.Args[0], s.Run.Args[1:]...)
	if err == nil && !strings.Contains(out, s.Run.Says) {
		err = fmt.Errorf("%s on %s does not say %q: %s", strings.Join(s.Run.Args, " "), s.Run.On, s.Run.Says, out)
	}
	return err
}

// neighborFile returns the path of a file that "make neighbors" makes.
func neighborFile(name string) string {
	cache := os.Getenv("VERDICT_CACHE")
	if cache == "" {
		cache, _ = os.UserCacheDir()
		cache = filepath.Join(cache, "verdict")
	}
	return filepath.Join(cache, "neighbors", name)
}
