//go:build peers

package deploy

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/control"
	"github.com/verdict-proxy/verdict/internal/proxy/everywhere"
	"github.com/verdict-proxy/verdict/internal/proxy/status"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/sync/snapshot"
	"github.com/verdict-proxy/verdict/sync/watch"
)

// realCluster is a real API server with the collector's objects, two collectors and two nodes.
type realCluster struct {
	t     *testing.T
	plane *control.Plane
	host  *lab.Host
	url   string
	ca    []byte
	ds    *appsv1.DaemonSet
	// command is what the collector's pods run.
	command string
	// collectors run by their identity, and agents by their node.
	collectors map[string]*control.Process
	agents     map[string]*everywhere.Agent
	stops      map[string]func()
}

// TestCollectorCluster: with the rights that the manifests give, by a real API server's tokens and Leases: a barrier
// waits for a slice that does not know of a terminating pod, a leader that is killed is replaced, a node that is gone
// holds nobody, and a token ends with its pod.
func TestCollectorCluster(t *testing.T) {
	c := newRealCluster(t, "collector")
	c.makeCart()
	for _, name := range []string{"one", "two"} {
		c.collect(name)
	}
	for _, name := range []string{"a", "b"} {
		c.connect(name)
	}
	if got := c.ask("a", time.Second); got.Everywhere || !strings.Contains(got.Why, "terminating") {
		t.Errorf("while the slice says that the pod is ready: %+v", got)
	}
	var ready time.Time
	time.AfterFunc(500*time.Millisecond, func() {
		c.setReady(false)
		ready = time.Now()
	})
	got := c.ask("a", 20*time.Second)
	if !got.Everywhere || got.Nodes != 2 || ready.IsZero() {
		t.Errorf("after the slice: %+v", got)
	}
	t.Logf("%v after the slice changed: %+v", time.Since(ready), got)

	leader := c.leader()
	check(t, c.collectors[leader].Kill())
	testkit.Eventually(t, time.Minute, "another one leads", func() bool { return c.leader() != leader })
	testkit.Eventually(t, time.Minute, "the nodes are connected again", func() bool {
		return c.agents["a"].Stats().Connected && c.agents["b"].Stats().Connected
	})
	if got := c.ask("b", 20*time.Second); !got.Everywhere {
		t.Errorf("with another leader: %+v", got)
	}

	c.stops["b"]()
	if got := c.ask("a", 2*time.Second); got.Everywhere || !slices.Equal(got.MissingNodes, []string{"b"}) {
		t.Errorf("without b: %+v", got)
	}
	c.beat("b", time.Now().Add(-time.Minute))
	testkit.Eventually(t, 30*time.Second, "b is gone", func() bool {
		got = c.ask("a", 4*time.Second)
		return got.Everywhere && slices.Equal(got.GoneNodes, []string{"b"})
	})
	c.revoked()
}

// newRealCluster starts a cluster with the objects of an overlay of testdata.
func newRealCluster(t *testing.T, overlay string) *realCluster {
	t.Helper()
	plane, host := startPlane(t)
	c := &realCluster{t: t, plane: plane, host: host, url: "https://" + host.IP4.String() + ":6443",
		collectors: map[string]*control.Process{}, agents: map[string]*everywhere.Agent{}, stops: map[string]func(){}}
	c.ca = []byte(readFile(t, filepath.Join(filepath.Dir(plane.Kubeconfig()), "ca.crt")))
	o, err := decode(kustomize(t, "../../test/testdata/"+overlay))
	check(t, err)
	check(t, apply(t, plane, o, metav1.CreateOptions{FieldValidation: metav1.FieldValidationStrict}))
	c.ds, err = plane.Client.AppsV1().DaemonSets("kube-system").Get(t.Context(), "verdict", metav1.GetOptions{})
	check(t, err)
	c.command = o["Deployment/verdict-collector"].(*appsv1.Deployment).Spec.Template.Spec.Containers[0].Args[0]
	_, err = plane.Client.CoreV1().Namespaces().Create(t.Context(),
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop"}}, metav1.CreateOptions{})
	check(t, err)
	for _, name := range []string{"a", "b"} {
		_, err := plane.Client.CoreV1().Nodes().Create(t.Context(),
			&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
		check(t, err)
		c.beat(name, time.Now().Add(time.Hour))
		c.pod("kube-system", "verdict-"+name, name, c.ds.Spec.Selector.MatchLabels, metav1.OwnerReference{
			APIVersion: "apps/v1", Kind: "DaemonSet", Name: c.ds.Name, UID: c.ds.UID})
	}
	return c
}

// pod makes a pod that is bound to a node.
func (c *realCluster) pod(namespace, name, node string, labels map[string]string, owners ...metav1.OwnerReference,
) *corev1.Pod {
	c.t.Helper()
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels, OwnerReferences: owners},
		Spec: corev1.PodSpec{NodeName: node, ServiceAccountName: "verdict",
			Containers: []corev1.Container{{Name: "verdict", Image: "verdict"}}}}
	p, err := c.plane.Client.CoreV1().Pods(namespace).Create(c.t.Context(), p, metav1.CreateOptions{})
	check(c.t, err)
	return p
}

// beat writes a node's Lease.
func (c *realCluster) beat(node string, at time.Time) {
	c.t.Helper()
	leases := c.plane.Client.CoordinationV1().Leases(corev1.NamespaceNodeLease)
	term, when := int32(40), metav1.NewMicroTime(at)
	l := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: node}, Spec: coordinationv1.LeaseSpec{
		HolderIdentity: &node, LeaseDurationSeconds: &term, RenewTime: &when}}
	if _, err := leases.Create(c.t.Context(), l, metav1.CreateOptions{}); err == nil {
		return
	}
	have, err := leases.Get(c.t.Context(), node, metav1.GetOptions{})
	check(c.t, err)
	have.Spec = l.Spec
	_, err = leases.Update(c.t.Context(), have, metav1.UpdateOptions{})
	check(c.t, err)
}

// makeCart makes a Service with a pod on node a that is being deleted, and a slice that does not know of that.
func (c *realCluster) makeCart() {
	c.t.Helper()
	labels := map[string]string{"app": "cart"}
	_, err := c.plane.Client.CoreV1().Services("shop").Create(c.t.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "cart"},
		Spec:       corev1.ServiceSpec{Selector: labels, Ports: []corev1.ServicePort{{Port: 80}}}}, metav1.CreateOptions{})
	check(c.t, err)
	p := c.pod("shop", "cart-0", "a", labels)
	yes, node := true, "a"
	slice := &discoveryv1.EndpointSlice{AddressType: discoveryv1.AddressTypeIPv4,
		ObjectMeta: metav1.ObjectMeta{Name: "cart-1", Labels: map[string]string{discoveryv1.LabelServiceName: "cart"}},
		Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.42.0.9"}, NodeName: &node,
			Conditions: discoveryv1.EndpointConditions{Ready: &yes},
			TargetRef:  &corev1.ObjectReference{Kind: "Pod", Namespace: "shop", Name: p.Name, UID: p.UID}}}}
	_, err = c.plane.Client.DiscoveryV1().EndpointSlices("shop").Create(c.t.Context(), slice, metav1.CreateOptions{})
	check(c.t, err)
	grace := int64(600)
	check(c.t, c.plane.Client.CoreV1().Pods("shop").Delete(c.t.Context(), p.Name,
		metav1.DeleteOptions{GracePeriodSeconds: &grace}))
}

func (c *realCluster) setReady(ready bool) {
	slices := c.plane.Client.DiscoveryV1().EndpointSlices("shop")
	s, err := slices.Get(c.t.Context(), "cart-1", metav1.GetOptions{})
	if err == nil {
		s.Endpoints[0].Conditions.Ready = &ready
		_, err = slices.Update(c.t.Context(), s, metav1.UpdateOptions{})
	}
	if err != nil {
		c.t.Error(err)
	}
}

// token requests a token as the kubelet does for a pod.
func (c *realCluster) token(account, audience, pod string) string {
	c.t.Helper()
	r := &authenticationv1.TokenRequest{}
	if audience != "" {
		p, err := c.plane.Client.CoreV1().Pods("kube-system").Get(c.t.Context(), pod, metav1.GetOptions{})
		check(c.t, err)
		r.Spec = authenticationv1.TokenRequestSpec{Audiences: []string{audience},
			BoundObjectRef: &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: pod, UID: p.UID}}
	}
	got, err := c.plane.Client.CoreV1().ServiceAccounts("kube-system").CreateToken(c.t.Context(), account, r,
		metav1.CreateOptions{})
	check(c.t, err)
	return got.Status.Token
}

// kubeconfig writes a file for a ServiceAccount.
func (c *realCluster) kubeconfig(account string) string {
	c.t.Helper()
	file := filepath.Join(c.t.TempDir(), "kubeconfig")
	check(c.t, os.WriteFile(file, []byte(control.Kubeconfig(c.url, c.ca, c.token(account, "", ""))), 0o600))
	return file
}

// collect starts a collector, by the command of the Deployment.
func (c *realCluster) collect(name string) {
	c.t.Helper()
	port := map[string]string{"one": "10266", "two": "10268"}[name]
	p := control.NewProcess(c.host, filepath.Join(c.t.TempDir(), "log"), verdict, c.command, "--identity="+name,
		"--kubeconfig="+c.kubeconfig("verdict-collector"), "--advertise-address="+c.host.IP4.String(),
		"--bind-address=:"+port, "--metrics-bind-address=")
	check(c.t, p.Start())
	c.collectors[name] = p
	c.t.Cleanup(func() { _ = p.Kill(); c.t.Logf("collector %s:\n%s", name, p.Tail()) })
}

// connect starts a node's agent, which holds everything.
func (c *realCluster) connect(node string) {
	c.t.Helper()
	client, err := watch.ClientConfig(c.kubeconfig("verdict"))
	check(c.t, err)
	client.Dial = c.host.DialContext
	leader, err := watch.LeaseAnnotations(client, snapshot.Name{Namespace: "kube-system", Name: "verdict-collector"})
	check(c.t, err)
	token := c.token("verdict", everywhere.Audience, "verdict-"+node)
	a := everywhere.New(everywhere.Options{Node: node, Leader: leader, Dial: c.host.DialContext,
		Log:   slog.New(slog.NewTextHandler(c.t.Output(), nil)),
		Token: func() (string, error) { return token, nil },
		Holds: func(goals []status.Goal) []bool { return slices.Repeat([]bool{true}, len(goals)) }})
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { a.Run(ctx) })
	c.stops[node] = sync.OnceFunc(func() { cancel(); running.Wait() })
	c.t.Cleanup(c.stops[node])
	c.agents[node] = a
	testkit.Eventually(c.t, time.Minute, node+" is connected", func() bool { return a.Stats().Connected })
}

func (c *realCluster) ask(node string, timeout time.Duration) (a everywhere.Answer) {
	c.t.Helper()
	q := httptest.NewRequest(http.MethodGet, fmt.Sprintf("/everywhere?service=shop/cart&timeout=%v", timeout), nil)
	q.RemoteAddr = "127.0.0.1:1"
	w := httptest.NewRecorder()
	c.agents[node].ServeHTTP(w, q)
	if err := json.Unmarshal(w.Body.Bytes(), &a); err != nil {
		c.t.Errorf("%d %s", w.Code, w.Body.String())
	}
	return a
}

func (c *realCluster) leader() string {
	c.t.Helper()
	l, err := c.plane.Client.CoordinationV1().Leases("kube-system").Get(c.t.Context(), "verdict-collector",
		metav1.GetOptions{})
	check(c.t, err)
	return *l.Spec.HolderIdentity
}

// revoked: when the pod of a token is gone, the token is worth nothing.
func (c *realCluster) revoked() {
	c.t.Helper()
	none := int64(0)
	check(c.t, c.plane.Client.CoreV1().Pods("kube-system").Delete(c.t.Context(), "verdict-a",
		metav1.DeleteOptions{GracePeriodSeconds: &none}))
	time.Sleep(11 * time.Second) // the API server believes in what it has reviewed for 10 seconds
	leader := c.leader()
	check(c.t, c.collectors[leader].Stop(c.t.Context()))
	c.collect(leader)
	testkit.Eventually(c.t, time.Minute, "it leads", func() bool { return c.leader() == leader })
	time.Sleep(5 * time.Second)
	if c.agents["a"].Stats().Connected {
		c.t.Error("a node whose pod is gone is connected")
	}
}
