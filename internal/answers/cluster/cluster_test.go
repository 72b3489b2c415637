package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"slices"
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

	"github.com/verdict-proxy/verdict/internal/proxy/status"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// fake is a cluster whose nodes answer what the test says.
type fake struct {
	Objects // none
	nodes   []corev1.Node
	pods    []corev1.Pod
	svc     *corev1.Service
	slices  discoveryv1.EndpointSliceList
	// forbidden are requests that are refused, as "list nodes".
	forbidden []string
	// answer is called for a command on a node.
	answer func(ctx context.Context, node string, argv []string) (out string, code int, err error)

	mu             sync.Mutex
	running, peak  int
	commandsOfNode map[string][]string
	// input is what the last command with standard input read.
	input string
}

func (f *fake) may(verb, resource string) error {
	if slices.Contains(f.forbidden, verb+" "+resource) {
		return access{verb, resource, "kube-system"}.explain(apierrors.NewForbidden(schema.GroupResource{Resource: resource},
			"", errors.New("no")))
	}
	return nil
}

func (f *fake) Nodes(context.Context) ([]corev1.Node, error) {
	if err := f.may("list", "nodes"); err != nil {
		return nil, err
	}
	return f.nodes, nil
}

func (f *fake) Pods(_ context.Context, namespace, selector string) (pods []corev1.Pod, err error) {
	for _, p := range f.pods {
		if p.Namespace == namespace && selector == DefaultSelector {
			pods = append(pods, p)
		}
	}
	return pods, f.may("list", "pods")
}

func (f *fake) Pod(_ context.Context, namespace, name string) (*corev1.Pod, error) {
	for i := range f.pods {
		if f.pods[i].Namespace == namespace && f.pods[i].Name == name {
			return &f.pods[i], nil
		}
	}
	return nil, apierrors.NewNotFound(schema.GroupResource{Resource: "pods"}, name)
}

func (f *fake) Service(context.Context, string, string) (*corev1.Service, error) { return f.svc, nil }

func (f *fake) Slices(context.Context, string, string) (*discoveryv1.EndpointSliceList, error) {
	return &f.slices, nil
}

func (f *fake) Logs(_ context.Context, _, pod, _ string, lines int, previous bool) ([]byte, error) {
	if previous {
		return nil, errors.New("previous terminated container not found")
	}
	return fmt.Appendf(nil, "the last %d lines of %s\n", lines, pod), f.may("get", "pods/log")
}

func (f *fake) Exec(ctx context.Context, namespace, pod, container string, argv []string, stdin io.Reader,
	stdout, _ io.Writer) (int, error) {
	if err := f.may("create", "pods/exec"); err != nil {
		return 0, err
	}
	node := strings.TrimPrefix(pod, "verdict-")
	f.mu.Lock()
	f.running++
	f.peak = max(f.peak, f.running)
	if f.commandsOfNode == nil {
		f.commandsOfNode = map[string][]string{}
	}
	f.commandsOfNode[node] = append(f.commandsOfNode[node], strings.Join(argv, " "))
	if stdin != nil {
		text, err := io.ReadAll(stdin)
		if err != nil {
			return 0, err
		}
		f.input = string(text)
	}
	f.mu.Unlock()
	out, code, err := f.answer(ctx, node, argv)
	f.mu.Lock()
	f.running--
	f.mu.Unlock()
	io.WriteString(stdout, out)
	return code, err
}

func (f *fake) cluster() *Cluster {
	return &Cluster{API: f, Exec: f, Namespace: DefaultNamespace, Selector: DefaultSelector, Timeout: DefaultTimeout,
		Parallel: DefaultParallel}
}

// add adds nodes with a pod of Verdict.
func (f *fake) add(names ...string) {
	for _, n := range names {
		f.nodes = append(f.nodes, corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n}})
		f.pods = append(f.pods, proxyPod(n, "verdict-"+n, corev1.PodRunning))
	}
}

func proxyPod(node, name string, phase corev1.PodPhase) corev1.Pod {
	p := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: DefaultNamespace, Name: name},
		Spec: corev1.PodSpec{NodeName: node, Containers: []corev1.Container{
			{Name: container, Args: []string{"run", "--config=/c", "--oom-score-adj=1"}}}},
		Status: corev1.PodStatus{Phase: phase, ContainerStatuses: []corev1.ContainerStatus{{Name: container}}}}
	if phase == corev1.PodRunning {
		p.Status.ContainerStatuses[0].State.Running = &corev1.ContainerStateRunning{}
	}
	return p
}

var moment = time.Date(2026, 11, 22, 14, 10, 0, 0, time.Local)

// nodeStatus is a status with digests of Services, that are added up to the one of all.
func nodeStatus(version string, digests ...status.ServiceDigest) *status.Status {
	begin := moment.Add(-time.Hour)
	s := &status.Status{Schema: status.Schema, Time: moment, Version: "v1", Backend: "nftables", First: &begin,
		Services: len(digests), Programmed: status.Versions{Services: "7", EndpointSlices: snapshot.Version(version)}}
	s.Drift.Checked = &moment
	for i, d := range digests {
		s.Digest += d.Digest * status.Digest(i+3)
		s.Digests = append(s.Digests, d)
	}
	return s
}

func digest(name string, d status.Digest, age time.Duration) status.ServiceDigest {
	return status.ServiceDigest{Service: name, Digest: d, Since: moment.Add(-age)}
}

func (f *fake) statuses(of map[string]*status.Status) {
	f.answer = func(_ context.Context, node string, argv []string) (string, int, error) {
		f.mu.Lock()
		s := *of[node]
		f.mu.Unlock()
		s.Node = node
		if !slices.Contains(argv, "--digests") && !slices.Contains(argv, "--service") {
			s.Digests = nil
		}
		text, err := json.Marshal(s)
		return string(text), 0, err
	}
}

// TestStatus: of three nodes the one that differs is named, with the Service and the time; so are a node without a pod,
// and what a node says is wrong.
func TestStatus(t *testing.T) {
	f := &fake{}
	f.add("node-1", "node-2", "node-3")
	web := digest("shop/web", 5, time.Hour)
	of := map[string]*status.Status{
		"node-1": nodeStatus("90", web, digest("shop/cart", 1, 8*time.Minute)),
		"node-2": nodeStatus("90", web, digest("shop/cart", 1, 8*time.Minute)),
		"node-3": nodeStatus("90", web, digest("shop/cart", 2, time.Hour)),
	}
	f.statuses(of)
	c := f.cluster()
	c.Now = func() time.Time { return moment }
	print := func() (string, int) {
		t.Helper()
		r, err := c.Status(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		var b strings.Builder
		p := terminal.NewPrinter(&b)
		r.Print(p)
		return b.String(), r.Code()
	}
	expect := func(what string, code int, want ...string) {
		t.Helper()
		text, got := print()
		if got != code {
			t.Errorf("%s: exit status %d; want %d", what, got, code)
		}
		for _, w := range want {
			if !strings.Contains(text, w) {
				t.Errorf("%s: there is no %q in\n%s", what, w, text)
			}
		}
	}
	expect("differs", 1, "1 of 3 nodes differs:\n  shop/cart, since 14:02: node-3\n")
	if got := f.commandsOfNode["node-2"]; len(got) != 1 || got[0] != "verdict status -o json --config=/c" {
		t.Errorf("node-2 was asked %q; only one node of a group should be asked for all digests", got)
	}
	of["node-3"].Programmed.EndpointSlices = "80"
	expect("behind", 1, "shop/cart, since 14:02: node-3 (behind the others)\n")
	of["node-1"].Digests[1].Since = moment.Add(-time.Second)
	expect("just changed", 0, "3 nodes have programmed the same, but for 1 Service that changed a moment ago\n")
	of["node-3"] = nodeStatus("90", web, digest("shop/cart", 1, time.Hour))
	expect("same", 0, "3 nodes have programmed the same\n", "node-1  v1       nftables  2         0.0s")
	at := moment.Add(-time.Second)
	of["node-2"].Drift.FoundAt, of["node-2"].Drift.Last = &at, []string{"ip verdict: an element is gone"}
	of["node-3"].Quarantined = status.Quarantined{Count: 1,
		Services: []status.QuarantinedService{{Service: "shop/q", Since: at, Error: "no room"}}}
	expect("trouble", 1, "node-2: another program changed the tables at 14:09 (not repaired yet): "+
		"ip verdict: an element is gone\n",
		"node-3: rejects shop/q since 14:09: no room\n")
	f.nodes = append(f.nodes, corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-4"}},
		corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "win", Labels: map[string]string{corev1.LabelOSStable: "windows"}}})
	f.pods = append(f.pods, proxyPod("node-5", "verdict-node-5", corev1.PodPending))
	of["node-1"].Schema = 99
	expect("not all", 2, "node-4  no pod of Verdict is on this node\n",
		"node-5  pod verdict-node-5 does not run (Pending)\n",
		"node-1  its status has schema 99, and this program knows 1\n")
}

// TestRights: whoever lacks a right is told which, and nodes count as far as they are known.
func TestRights(t *testing.T) {
	f := &fake{}
	f.add("a", "b")
	f.statuses(map[string]*status.Status{"a": nodeStatus("1"), "b": nodeStatus("1")})
	f.forbidden = []string{"list nodes"}
	r, err := f.cluster().Status(t.Context())
	if err != nil || r.Code() != 0 || len(r.Notes) != 1 ||
		!strings.Contains(r.Notes[0], "you lack the right to list nodes") {
		t.Errorf("without nodes: %+v %v", r, err)
	}
	f.forbidden = []string{"create pods/exec"}
	r, err = f.cluster().Status(t.Context())
	if err != nil || r.Code() != 2 ||
		!strings.Contains(r.Nodes[0].Error, "you lack the right to create pods/exec in namespace kube-system") {
		t.Errorf("without exec: %+v %v", r, err)
	}
	f.forbidden = []string{"list pods"}
	if _, err = f.cluster().Status(t.Context()); err == nil || !strings.Contains(err.Error(), "list pods in namespace") {
		t.Errorf("without pods: %v", err)
	}
	f.forbidden, f.pods = nil, nil
	if _, err = f.cluster().Status(t.Context()); err == nil || !strings.Contains(err.Error(), "has the label") {
		t.Errorf("no pods: %v", err)
	}
}

// TestEach: no more nodes than allowed are asked at a time, one that hangs costs its timeout alone, and each answer
// stands with its node.
func TestEach(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fake{}
		for i := range 50 {
			f.add(fmt.Sprintf("n%02d", i))
		}
		f.answer = func(ctx context.Context, node string, _ []string) (string, int, error) {
			if node == "n07" {
				<-ctx.Done()
				return "", 0, ctx.Err()
			}
			time.Sleep(time.Second)
			return node, 3, nil
		}
		c, last := f.cluster(), 0
		c.Progress = func(done, _ int) { last = done }
		targets, _, err := c.Targets(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		begin := time.Now()
		results := c.Each(t.Context(), targets, func(Target) []string { return []string{"x"} })
		if took := time.Since(begin); took != DefaultTimeout || f.peak != DefaultParallel || last != 50 {
			t.Errorf("took %v, %d at a time, progress %d", took, f.peak, last)
		}
		for i, r := range results {
			err := r.failure(0)
			if want := fmt.Sprintf("n%02d", i); i != 7 && (string(r.Stdout) != want || err == nil) ||
				i == 7 && (err == nil || err.Error() != "no answer within 15s") {
				t.Errorf("%s: %q %v", r.Node, r.Stdout, err)
			}
		}
	})
}

func cart() *corev1.Service {
	return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "cart", ResourceVersion: "40"},
		Spec: corev1.ServiceSpec{ClusterIP: "10.96.0.7", ClusterIPs: []string{"10.96.0.7", "fd00::7"},
			IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}, Ports: []corev1.ServicePort{
				{Name: "grpc", Port: 9000, Protocol: corev1.ProtocolTCP}, {Name: "dns", Port: 53, Protocol: corev1.ProtocolUDP}}}}
}

// TestResolve: names become a node and addresses of one family, and what is missing is said.
func TestResolve(t *testing.T) {
	f := &fake{svc: cart()}
	f.pods = []corev1.Pod{
		{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"}, Spec: corev1.PodSpec{NodeName: "n1"},
			Status: corev1.PodStatus{PodIPs: []corev1.PodIP{{IP: "fd01::5"}, {IP: "10.244.0.5"}}}},
		{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "six"},
			Spec:   corev1.PodSpec{NodeName: "n2", HostNetwork: true},
			Status: corev1.PodStatus{PodIPs: []corev1.PodIP{{IP: "fd01::6"}}}},
		{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "new"}},
	}
	for _, c := range []struct{ pod, service, want, err string }{
		{"web", "svc/shop/cart:grpc", "n1 10.244.0.5 10.96.0.7:9000/tcp", ""},
		{"pod/shop/web", "cart:53", "n1 10.244.0.5 10.96.0.7:53/udp", ""},
		{"shop/six", "cart:dns", "n2 node [fd00::7]:53/udp", ""},
		{"web", "cart", "", "has several ports: name one (grpc:9000, dns:53)"},
		{"web", "cart:http", "", `has no port "http"`},
		{"new", "cart:grpc", "", "is on no node yet"},
		{"gone", "cart:grpc", "", "not found"},
		{"a/b/c", "cart", "", "is not [pod/][NAMESPACE/]NAME"},
		{"web", "cart:", "", "is not [svc/][NAMESPACE/]NAME"},
	} {
		pod, _, err := ParseRef(c.pod, "shop", "pod")
		service, port, perr := ParseRef(c.service, "shop", "svc")
		var a *Asked
		if err = errors.Join(err, perr); err == nil {
			a, err = f.cluster().Resolve(t.Context(), pod, service, port)
		}
		if c.err != "" {
			if err == nil || !strings.Contains(err.Error(), c.err) {
				t.Errorf("%s %s: %v; want %q", c.pod, c.service, err, c.err)
			}
		} else if err != nil || a.Node+" "+a.Source+" "+a.Destination != c.want {
			t.Errorf("%s %s: %+v %v; want %s", c.pod, c.service, a, err, c.want)
		}
	}
}

// cartSlices are slices with one endpoint, which is ready or not.
func cartSlices(version string, ready bool) discoveryv1.EndpointSliceList {
	name, port, proto := "grpc", int32(8080), corev1.ProtocolTCP
	return discoveryv1.EndpointSliceList{ListMeta: metav1.ListMeta{ResourceVersion: version},
		Items: []discoveryv1.EndpointSlice{{
			ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "cart-1", ResourceVersion: "50",
				Labels: map[string]string{discoveryv1.LabelServiceName: "cart"}},
			AddressType: discoveryv1.AddressTypeIPv4,
			Ports:       []discoveryv1.EndpointPort{{Name: &name, Port: &port, Protocol: &proto}},
			Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.244.0.5"},
				Conditions: discoveryv1.EndpointConditions{Ready: &ready}}},
		}}}
}

// TestLeadingTo: the Services that lead to a pod are found by its address.
func TestLeadingTo(t *testing.T) {
	f := &fake{slices: cartSlices("60", true)}
	f.pods = []corev1.Pod{{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"},
		Status: corev1.PodStatus{PodIPs: []corev1.PodIP{{IP: "10.244.0.5"}}}},
		{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "other"}}}
	led, err := f.cluster().LeadingTo(t.Context(), snapshot.Name{Namespace: "shop", Name: "web"})
	if err != nil || len(led) != 1 || fmt.Sprint(led[0]) != "{shop/cart cart-1 [grpc:8080] 10.244.0.5 ready}" {
		t.Errorf("%v %v", led, err)
	}
	if led, err = f.cluster().LeadingTo(t.Context(), snapshot.Name{Namespace: "shop", Name: "other"}); err != nil ||
		led != nil {
		t.Errorf("another pod: %v %v", led, err)
	}
}

// TestWait: it waits for the digest of what the API has, or for newer versions of both; a node that does not get there
// is named, with the reason.
func TestWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fake{svc: cart(), slices: cartSlices("60", false)}
		f.add("a", "b")
		g, err := GoalOf(f.svc, &f.slices)
		if err != nil {
			t.Fatal(err)
		}
		was := cartSlices("50", true)
		old, err := GoalOf(f.svc, &was)
		if err != nil || old.Digest == g.Digest {
			t.Fatal("a readiness makes no difference", err)
		}
		programmed := func(version string, d status.Digest) *status.Status {
			s := nodeStatus(version, digest("shop/cart", d, 0))
			s.Programmed.Services = "5000"
			return s
		}
		name := snapshot.Name{Namespace: "shop", Name: "cart"}
		of := map[string]*status.Status{"a": programmed("50", g.Digest), "b": programmed("59", old.Digest)}
		f.statuses(of)
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		nodes, left, err := f.cluster().Wait(ctx, name, time.Second)
		if !errors.Is(err, ErrBehind) || nodes != 2 || len(left) != 1 ||
			left[0] != (Waiting{"b", "endpointslices at version 59 of 60"}) {
			t.Errorf("%d %v %v", nodes, left, err)
		}
		if n := len(f.commandsOfNode["a"]); n != 1 {
			t.Errorf("a node that is done was asked %d times", n)
		}
		for what, then := range map[string]*status.Status{
			"the digest": programmed("59", g.Digest), "a newer version": programmed("61", 77)} {
			of["b"] = programmed("59", old.Digest)
			begin := time.Now()
			time.AfterFunc(1500*time.Millisecond, func() {
				f.mu.Lock()
				defer f.mu.Unlock()
				of["b"] = then
			})
			if _, left, err := f.cluster().Wait(t.Context(), name, time.Second); err != nil || left != nil ||
				time.Since(begin) != 2*time.Second {
				t.Errorf("%s: %v %v after %v", what, left, err, time.Since(begin))
			}
		}
		f.svc.Spec.ClusterIP, f.svc.Spec.ClusterIPs = "None", []string{"None"}
		if _, _, err := f.cluster().Wait(t.Context(), name, time.Second); err == nil ||
			!strings.Contains(err.Error(), "no node programs it") {
			t.Errorf("headless: %v", err)
		}
	})
}

// TestCompareAndTop: a node that differs is shown with its lines, one that fails with its error, and rates add up.
func TestCompareAndTop(t *testing.T) {
	f := &fake{}
	f.add("a", "b", "c")
	f.answer = func(_ context.Context, node string, argv []string) (string, int, error) {
		switch {
		case argv[1] == "top":
			by := map[string]string{"b": `"for":"Gateway shop/web",`}[node] // the others' proxies are older
			return `{"rate":1.5,"portCount":4000,"ports":[{` + by + `"service":"shop/web","port":"http","rate":1.5},` +
				`{"service":"x/` + node + `","rate":0}]}`, 0, nil
		case node == "b":
			return "- an element\n", 1, nil
		case node == "c":
			return "", 2, nil
		}
		return "same", 0, nil
	}
	var b strings.Builder
	code, err := f.cluster().Compare(t.Context(), terminal.NewPrinter(&b), "diff", false)
	want := "b differs:\n  - an element\nc: exit status 2: \n1 of 3 nodes in sync\n"
	if err != nil || code != 2 || b.String() != want {
		t.Errorf("exit status %d, %v:\n%s", code, err, b.String())
	}
	if got := f.commandsOfNode["a"][0]; got != "verdict diff --in-cluster --hostname-override=a --config=/c" {
		t.Errorf("asked %q", got)
	}
	top, err := f.cluster().Top(t.Context(), TopOptions{Interval: time.Second})
	want0 := TopPort{Service: "shop/web", Port: "http", For: "Gateway shop/web", Rate: 4.5, Nodes: 3}
	if err != nil || top.Code() != 0 || !reflect.DeepEqual(top.Ports[0], want0) || len(top.Ports) != 4 ||
		top.Rate != 4.5 || top.PortCount != 4000 {
		t.Errorf("%+v %v", top, err)
	}
	b.Reset()
	top.Print(terminal.NewPrinter(&b), false)
	if !strings.Contains(b.String(), "\nshop/web:http (Gateway shop/web)  4.5/s") {
		t.Errorf("the Gateway is not named:\n%s", b.String())
	}
	if got := f.commandsOfNode["a"][1]; got != "verdict top --json --interval=1s --limit=1000" {
		t.Errorf("asked %q", got)
	}
}
