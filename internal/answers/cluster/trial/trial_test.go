package trial

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/verdict-proxy/verdict/internal/answers/cluster"
	"github.com/verdict-proxy/verdict/internal/answers/probe"
	"github.com/verdict-proxy/verdict/internal/proxy/status"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
)

// fake is a cluster in which pods start at once, and a network in which Services do as they should. Its nodes are
// node-0 and up, with addresses 192.168.0.N and fd01::N; the pods of role R of the Nth trial's node have 10.R.0.N and
// fd00:R::N.
type fake struct {
	cluster.API // what is not asked for
	nodes       int
	// stuck is a pod that does not start, forbidden is a Service that may not be made, and there are namespaces that are
	// not ours.
	stuck, forbidden string
	there            []string
	// breaks, if not nil, changes what came of a dial from a pod of a node.
	breaks func(node, role string, d probe.Dial, a *probe.Answer)
	// created, if not nil, is called after each object.
	created func(path string)

	mu sync.Mutex
	// accounts counts pods; the first come before there is a ServiceAccount.
	accounts int
	// tries counts removals, of which the first fails.
	tries    int
	spaces   map[string]*corev1.Namespace
	pods     []corev1.Pod
	services []corev1.Service
	removed  []string
}

func (f *fake) Nodes(context.Context) (list []corev1.Node, err error) {
	for i := range f.nodes {
		n := corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-" + strconv.Itoa(i)}}
		for _, a := range []string{fmt.Sprintf("192.168.0.%d", i+1), fmt.Sprintf("fd01::%d", i+1)} {
			n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a})
		}
		list = append(list, n)
	}
	return list, nil
}

// proxy is Verdict's pod of a node.
func proxy(node string) corev1.Pod {
	return corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "verdict-" + node},
		Spec: corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "verdict", Image: "verdict:test"}}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, ContainerStatuses: []corev1.ContainerStatus{{Name: "verdict",
			State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}}}}
}

func (f *fake) Pods(_ context.Context, namespace, _ string) (list []corev1.Pod, err error) {
	if namespace == cluster.DefaultNamespace {
		for i := range f.nodes {
			list = append(list, proxy("node-"+strconv.Itoa(i)))
		}
		return list, nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.pods), nil
}

func (f *fake) Pod(_ context.Context, _, name string) (*corev1.Pod, error) {
	p := proxy(strings.TrimPrefix(name, "verdict-"))
	return &p, nil
}

func (f *fake) Create(_ context.Context, path string, object any) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch o := object.(type) {
	case *corev1.Namespace:
		if slices.Contains(f.there, o.Name) {
			return apierrors.NewAlreadyExists(schema.GroupResource{Resource: "namespaces"}, o.Name)
		}
		f.spaces[o.Name] = o
	case *corev1.Pod:
		if f.accounts++; f.accounts < 3 {
			return apierrors.NewForbidden(schema.GroupResource{Resource: "pods"}, o.Name,
				errors.New("error looking up service account: serviceaccount \"default\" not found"))
		}
		role, place, _ := strings.Cut(o.Name, "-")
		n, _ := strconv.Atoi(place)
		r := slices.Index(roles, role)
		o.Status.PodIPs = []corev1.PodIP{{IP: fmt.Sprintf("10.%d.0.%d", r, n+1)}, {IP: fmt.Sprintf("fd00:%d::%d", r, n+1)}}
		o.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
		if o.Name == f.stuck {
			o.Status.Conditions = nil
			o.Status.ContainerStatuses = []corev1.ContainerStatus{{State: corev1.ContainerState{
				Waiting: &corev1.ContainerStateWaiting{Reason: "ErrImagePull", Message: "no such image"}}}}
		}
		f.pods = append(f.pods, *o)
	case *corev1.Service:
		if o.Name == f.forbidden {
			return apierrors.NewForbidden(schema.GroupResource{Resource: "services"}, o.Name, errors.New("denied"))
		}
		n := len(f.services) + 1
		o.Namespace, o.ResourceVersion = strings.Split(path, "/")[4], strconv.Itoa(n)
		o.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}
		o.Spec.ClusterIPs = []string{fmt.Sprintf("10.96.0.%d", n), fmt.Sprintf("fd96::%d", n)}
		o.Spec.ClusterIP = o.Spec.ClusterIPs[0]
		if o.Spec.Type != corev1.ServiceTypeClusterIP {
			for i := range o.Spec.Ports {
				o.Spec.Ports[i].NodePort = int32(30000 + n)
			}
		}
		if o.Spec.Type == corev1.ServiceTypeLoadBalancer {
			o.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "198.51.100.1"}}
		}
		f.services = append(f.services, *o)
	}
	if f.created != nil {
		f.created(path)
	}
	return nil
}

func (f *fake) Read(_ context.Context, path string, into any) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	name := path[strings.LastIndexByte(path, '/')+1:]
	n := f.spaces[name]
	if slices.Contains(f.there, name) {
		n = &corev1.Namespace{}
	}
	if n == nil {
		return apierrors.NewNotFound(schema.GroupResource{Resource: "namespaces"}, name)
	}
	*into.(*corev1.Namespace) = *n
	return nil
}

func (f *fake) Remove(_ context.Context, path string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.tries++; f.tries == 1 {
		return apierrors.NewInternalError(errors.New("etcd has no leader"))
	}
	f.removed = append(f.removed, path)
	delete(f.spaces, path[strings.LastIndexByte(path, '/')+1:])
	return nil
}

func (f *fake) Service(_ context.Context, _, name string) (*corev1.Service, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	at := slices.IndexFunc(f.services, func(s corev1.Service) bool { return s.Name == name })
	return &f.services[at], nil
}

func (f *fake) Slices(context.Context, string, string) (*discoveryv1.EndpointSliceList, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	ready, list := true, &discoveryv1.EndpointSliceList{}
	list.ResourceVersion = "9"
	for _, svc := range f.services {
		sl := discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{
			Labels: map[string]string{discoveryv1.LabelServiceName: svc.Name}}}
		for _, p := range f.pods {
			for _, ip := range p.Status.PodIPs {
				sl.Endpoints = append(sl.Endpoints, discoveryv1.Endpoint{Addresses: []string{ip.IP},
					Conditions: discoveryv1.EndpointConditions{Ready: &ready}})
			}
		}
		list.Items = append(list.Items, sl)
	}
	return list, nil
}

func (f *fake) Exec(_ context.Context, _, pod, _ string, argv []string, stdin io.Reader, stdout, _ io.Writer,
) (int, error) {
	switch argv[1] {
	case "status":
		return 0, json.NewEncoder(stdout).Encode(status.Status{Schema: status.Schema,
			Programmed: status.Versions{Services: "99", EndpointSlices: "99"}})
	case "explain":
		_, err := fmt.Fprintf(stdout, `{"kernel":{"outcome":"drop","why":"because of %s to %s"},
			"preflight":[{"what":"no forwarding","advice":"forward"}]}`, argv[2], argv[3])
		return 0, err
	}
	var dials []probe.Dial
	if err := json.NewDecoder(stdin).Decode(&dials); err != nil {
		return 0, err
	}
	role, place, _ := strings.Cut(pod, "-")
	answers := make([]probe.Answer, len(dials))
	for i, d := range dials {
		answers[i] = f.answer("node-"+place, d)
		if f.breaks != nil {
			f.breaks("node-"+place, role, d, &answers[i])
		}
	}
	return 0, json.NewEncoder(stdout).Encode(answers)
}

// kindOf returns the Service that answers at an address; empty if it is a pod's.
func (f *fake) kindOf(at netip.AddrPort) string {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, s := range f.services {
		ips := slices.Concat(s.Spec.ClusterIPs, s.Spec.ExternalIPs)
		for _, in := range s.Status.LoadBalancer.Ingress {
			ips = append(ips, in.IP)
		}
		if slices.Contains(ips, at.Addr().String()) || s.Spec.Ports[0].NodePort == int32(at.Port()) {
			return s.Name
		}
	}
	return ""
}

// answer is what a network does in which all is well.
func (f *fake) answer(node string, d probe.Dial) (a probe.Answer) {
	at := netip.MustParseAddrPort(d.Address)
	last := at.Addr().AsSlice()[len(at.Addr().AsSlice())-1]
	name := "node-0"
	switch f.kindOf(at) {
	case "", localNode:
		name = fmt.Sprintf("node-%d", last-1)
	case internal:
		name = node
	case empty:
		return probe.Answer{Errors: slices.Repeat([]string{"refused"}, d.Times), Refused: d.Times}
	}
	return probe.Answer{Names: slices.Repeat([]string{name}, d.Times)}
}

// run runs a trial.
func (f *fake) run(ctx context.Context, o Options) (*Report, error) {
	f.spaces = map[string]*corev1.Namespace{}
	o.Timeout, o.Dial, o.Nodes = time.Minute, time.Second, max(o.Nodes, 2)
	return Run(ctx, &cluster.Cluster{API: f, Exec: f, Namespace: cluster.DefaultNamespace,
		Selector: cluster.DefaultSelector, Timeout: time.Minute, Parallel: 4}, o)
}

func said(r *Report) string {
	var b strings.Builder
	r.Print(terminal.NewPrinter(&b))
	return b.String()
}

// TestTrial: where all is well, every kind of frontend is tried from pods and nodes, in both families, and nothing is
// left.
func TestTrial(t *testing.T) { synctest.Test(t, testTrial) }

func testTrial(t *testing.T) {
	f := &fake{nodes: 3}
	r, err := f.run(t.Context(), Options{LoadBalancer: true})
	if err != nil || r.Code() != 0 || len(r.Nodes) != 2 || len(r.Skipped) != 1 {
		t.Fatalf("%v\n%s", err, said(r))
	}
	tried := map[string]bool{}
	for _, x := range r.Results {
		tried[strings.Join([]string{x.Case, x.Network, x.Family, x.From, x.Node}, " ")] = true
	}
	for _, kind := range []string{direct, clusterIP, nodePort, externalIP, loadBalancer, localNode, internal, affinity,
		empty} {
		for _, network := range []string{"tcp", "udp"} {
			for _, family := range []string{"IPv4", "IPv6"} {
				for _, from := range []string{"pod node-0", "node node-0", "pod node-1", "node node-1"} {
					want := network == "tcp" || kind != direct && kind != loadBalancer
					want = want && (kind != loadBalancer || family == "IPv4")
					if key := strings.Join([]string{kind, network, family, from}, " "); tried[key] != want {
						t.Errorf("%s was tried: %v", key, tried[key])
					}
				}
			}
		}
	}
	if len(f.spaces) != 0 || len(f.removed) != 1 || len(f.pods) != 6 ||
		f.pods[0].Spec.Containers[0].Image != "verdict:test" {
		t.Errorf("left %v, removed %v, %d pods", f.spaces, f.removed, len(f.pods))
	}
	for _, want := range []string{"cluster-ip       tcp       IPv4    pod   8            ok\n",
		"not tried: node node-2 and those after it: --nodes is 2\n"} {
		if !strings.Contains(said(r), want) {
			t.Errorf("%q is not in\n%s", want, said(r))
		}
	}
}

// TestTrialFailures: what goes wrong is told with what explain says on that node.
func TestTrialFailures(t *testing.T) { synctest.Test(t, testTrialFailures) }

func testTrialFailures(t *testing.T) {
	silent := probe.Answer{Errors: []string{"no answer within 1s"}}
	f := &fake{nodes: 2, forbidden: externalIP}
	f.breaks = func(node, role string, d probe.Dial, a *probe.Answer) {
		switch at := netip.MustParseAddrPort(d.Address); {
		case node != "node-1" || role != inPod || at.Addr().Is6():
		case d.Network == "udp" && f.kindOf(at) == clusterIP, f.kindOf(at) == empty, f.kindOf(at) == "":
			*a = silent
		case f.kindOf(at) == internal:
			a.Names[1] = "node-0"
		case f.kindOf(at) == affinity && d.Network == "tcp":
			a.Names[3], a.Names[5] = "node-1", "node-1"
		}
	}
	r, err := f.run(t.Context(), Options{})
	if err != nil || r.Code() != 1 {
		t.Fatalf("%v\n%s", err, said(r))
	}
	const direct = "; from there pods do not answer without a Service either: look at the pod network first\n"
	for _, want := range []string{
		"cluster-ip, from pod node-1 to 10.96.0.1:80/udp: 1 of 4: no answer within 1s\n" +
			"  verdict explain on node node-1: because of 10.1.0.2 to 10.96.0.1:80/udp; no forwarding (forward)" + direct,
		"no-endpoint, from pod node-1 to 10.96.0.2:80/tcp: 1 of 1: no answer within 1s\n",
		"internal-local, from pod node-1 to 10.96.0.4:80/tcp: 1 of 2: the server of node node-0 answers, not that of node " +
			"node-1\n",
		"affinity, from pod node-1 to 10.96.0.3:80/tcp: 2 of 6: the server of node node-1 answers after that of node " +
			"node-0\n",
		"pod, from pod node-1 to 10.0.0.1:8080/tcp: 1 of 1: no answer within 1s\n",
		"not tried: external-ip: ",
	} {
		if !strings.Contains(said(r), want) {
			t.Errorf("%q is not in\n%s", want, said(r))
		}
	}
}

// TestTrialUnroutable: where nobody has a route to an external IP, it is not tried.
func TestTrialUnroutable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fake{nodes: 1}
		f.breaks = func(_, _ string, d probe.Dial, a *probe.Answer) {
			if at := netip.MustParseAddrPort(d.Address); at.Addr().Is6() && f.kindOf(at) == externalIP {
				*a = probe.Answer{Errors: slices.Repeat([]string{"connect: network is unreachable"}, d.Times)}
			}
		}
		r, err := f.run(t.Context(), Options{})
		if err != nil || r.Code() != 0 || len(r.Skipped) != 1 ||
			!strings.HasPrefix(r.Skipped[0], "external-ip in IPv6: a pod or node has no route") {
			t.Errorf("%v\n%s", err, said(r))
		}
	})
}

// TestTrialStuck: a node whose pods do not start is named, and the others are tried.
func TestTrialStuck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fake{nodes: 2, stuck: "pod-1"}
		r, err := f.run(t.Context(), Options{})
		if err != nil || r.Code() != 2 || !slices.Equal(r.Nodes, []string{"node-0"}) || r.Failed() != 0 ||
			len(r.Results) == 0 || !slices.Equal(r.Errors, []string{"node node-1: pod pod-1: ErrImagePull: no such image"}) {
			t.Errorf("%v %q\n%s", err, r.Errors, said(r))
		}
		f = &fake{nodes: 1, stuck: "server-0"}
		if r, err = f.run(t.Context(), Options{}); err == nil || len(f.spaces) != 0 ||
			!strings.Contains(err.Error(), "no pod answers within 1m0s: node node-0: pod server-0: ErrImagePull") {
			t.Errorf("%v\n%s", err, said(r))
		}
	})
}

// TestTrialRemoves: whenever it is interrupted, the namespace is removed; one that it has not made stays, and so does
// its own with --keep.
func TestTrialRemoves(t *testing.T) { synctest.Test(t, testTrialRemoves) }

func testTrialRemoves(t *testing.T) {
	for _, at := range []string{"namespaces", "pods", "services"} {
		ctx, interrupt := context.WithCancel(t.Context())
		f := &fake{nodes: 2, stuck: "pod-0", created: func(path string) {
			if strings.HasSuffix(path, "/"+at) {
				interrupt()
			}
		}}
		r, err := f.run(ctx, Options{})
		if !errors.Is(err, context.Canceled) || len(f.spaces) != 0 || len(f.removed) != 1 || r.Left != "" {
			t.Errorf("interrupted at %s: %v, left %v", at, err, slices.Collect(maps.Keys(f.spaces)))
		}
	}
	f := &fake{nodes: 2, there: []string{"shop"}}
	if _, err := f.run(t.Context(), Options{Namespace: "shop"}); !apierrors.IsAlreadyExists(err) || f.removed != nil {
		t.Errorf("%v, removed %v", err, f.removed)
	}
	f = &fake{nodes: 2}
	if r, err := f.run(t.Context(), Options{Namespace: "mine", Keep: true}); err != nil || r.Left == "" || r.Code() != 0 ||
		f.removed != nil || f.spaces["mine"] == nil {
		t.Errorf("with --keep: %v %q, removed %v", err, r.Left, f.removed)
	}
}
