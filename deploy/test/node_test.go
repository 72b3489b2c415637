//go:build peers

package deploy

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/control"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
	"github.com/verdict-proxy/verdict/sync/watch"
)

const startTaint = "verdict-proxy.github.io/not-programmed"

// createNodes makes two Nodes as kubelets make them, with the taint and others beside it.
func createNodes(t *testing.T, plane *control.Plane) {
	t.Helper()
	for _, name := range []string{"node", "other"} {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"a": "b"}},
			Spec: corev1.NodeSpec{PodCIDR: "10.42.0.0/24", Taints: []corev1.Taint{
				{Key: "first", Effect: corev1.TaintEffectNoSchedule}, {Key: startTaint, Effect: corev1.TaintEffectNoSchedule},
				{Key: startTaint, Effect: corev1.TaintEffectNoExecute}, {Key: "last", Effect: corev1.TaintEffectNoExecute}}}}
		made, err := plane.Client.CoreV1().Nodes().Create(t.Context(), n, metav1.CreateOptions{})
		check(t, err)
		made.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "x"}}
		made.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.0.2.10"}}
		_, err = plane.Client.CoreV1().Nodes().UpdateStatus(t.Context(), made, metav1.UpdateOptions{})
		check(t, err)
	}
}

// createPod makes a pod of the DaemonSet that runs on a Node.
func createPod(t *testing.T, plane *control.Plane, node string) *corev1.Pod {
	t.Helper()
	pod, err := plane.Client.CoreV1().Pods("kube-system").Create(t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "verdict-" + node},
		Spec: corev1.PodSpec{NodeName: node, ServiceAccountName: "verdict",
			Containers: []corev1.Container{{Name: "verdict", Image: "verdict"}}}}, metav1.CreateOptions{})
	check(t, err)
	return pod
}

// as gives the configuration of a client with a token.
func as(t *testing.T, plane *control.Plane, host *lab.Host, token string) *rest.Config {
	t.Helper()
	config, err := clientcmd.BuildConfigFromFlags("", plane.Kubeconfig())
	check(t, err)
	config.BearerToken, config.Dial, config.QPS = token, host.DialContext, -1
	return config
}

// TestNodePolicy: a pod's proxy may write the condition of its own Node, and remove the taint there. It may change no
// other Node, and nothing else; without a pod, nothing at all.
func TestNodePolicy(t *testing.T) {
	plane, host := startPlane(t)
	o, err := decodeNodeOverlay("k3s")
	check(t, err)
	check(t, apply(t, plane, o, metav1.CreateOptions{FieldValidation: metav1.FieldValidationStrict}))
	createNodes(t, plane)
	config := as(t, plane, host, token(t, plane, createPod(t, plane, "node")))
	waitForPolicy(t, config)

	client, err := kubernetes.NewForConfig(config)
	check(t, err)
	nodes := client.CoreV1().Nodes()
	const merge, strategic, jsonPatch = types.MergePatchType, types.StrategicMergePatchType, types.JSONPatchType
	condition := func(kind string) string {
		return fmt.Sprintf(`{"status":{"conditions":[{"type":%q,"status":"False","reason":"x"}]}}`, kind)
	}
	for _, c := range []struct {
		what, node string
		how        types.PatchType
		patch      string
		part       []string
	}{
		{"another Node's condition", "other", strategic, condition("ServicesProgrammed"), []string{"status"}},
		{"another Node's taint", "other", jsonPatch, `[{"op":"remove","path":"/spec/taints/1"}]`, nil},
		{"another condition", "node", strategic, condition("Ready"), []string{"status"}},
		{"a new condition", "node", strategic, condition("Else"), []string{"status"}},
		{"all conditions", "node", merge, `{"status":{"conditions":null}}`, []string{"status"}},
		{"an address", "node", merge, `{"status":{"addresses":null}}`, []string{"status"}},
		{"capacity", "node", merge, `{"status":{"capacity":{"x.com/y":"1"}}}`, []string{"status"}},
		{"a label by the status", "node", merge, `{"metadata":{"labels":{"a":"c"}}}`, []string{"status"}},
		{"a label", "node", merge, `{"metadata":{"labels":{"x":"y"}}}`, nil},
		{"no label", "node", merge, `{"metadata":{"labels":null}}`, nil},
		{"an annotation", "node", merge, `{"metadata":{"annotations":{"x":"y"}}}`, nil},
		{"a finalizer", "node", merge, `{"metadata":{"finalizers":["x.com/y"]}}`, nil},
		{"unschedulable", "node", merge, `{"spec":{"unschedulable":true}}`, nil},
		{"providerID", "node", merge, `{"spec":{"providerID":"x"}}`, nil},
		{"another taint", "node", jsonPatch, `[{"op":"remove","path":"/spec/taints/0"}]`, nil},
		{"all taints", "node", merge, `{"spec":{"taints":null}}`, nil},
		{"a new taint", "node", jsonPatch,
			`[{"op":"add","path":"/spec/taints/-","value":{"key":"x","effect":"NoExecute"}}]`, nil},
		{"a taint with another effect", "node", jsonPatch,
			`[{"op":"replace","path":"/spec/taints/1/effect","value":"NoExecute"},{"op":"remove","path":"/spec/taints/2"},
			{"op":"add","path":"/spec/taints/-","value":{"key":"` + startTaint + `","effect":"PreferNoSchedule"}}]`, nil},
	} {
		_, err := nodes.Patch(t.Context(), c.node, c.how, []byte(c.patch), metav1.PatchOptions{}, c.part...)
		if err == nil || !strings.Contains(err.Error(), "ValidatingAdmissionPolicy 'verdict-node'") {
			t.Errorf("%s: %v", c.what, err)
		}
	}
	for _, denied := range []error{
		nodes.Delete(t.Context(), "node", metav1.DeleteOptions{}), create(t.Context(), nodes.Create),
	} {
		if denied == nil || !strings.Contains(denied.Error(), "forbidden") {
			t.Errorf("it may delete or create Nodes: %v", denied)
		}
	}
	checkAdmitted(t, plane, config)
	unbound, err := watch.NewNodeWriter(as(t, plane, host, token(t, plane, nil)), "other")
	check(t, err)
	_, err = unbound.Apply(t.Context(), watch.NodeWish{WithoutTaint: startTaint})
	if err == nil || !strings.Contains(err.Error(), "changes only the Node of its own pod") {
		t.Errorf("with a token of no pod: %v", err)
	}
}

func create(ctx context.Context,
	f func(context.Context, *corev1.Node, metav1.CreateOptions) (*corev1.Node, error)) error {
	_, err := f(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "third"}}, metav1.CreateOptions{})
	return err
}

// waitForPolicy waits until the API server has compiled the policy, which takes it a moment.
func waitForPolicy(t *testing.T, config *rest.Config) {
	t.Helper()
	other, err := watch.NewNodeWriter(config, "other")
	check(t, err)
	testkit.Eventually(t, time.Minute, "the policy is in force", func() bool {
		// As long as it is not, this is admitted, and writes the same again.
		_, err := other.Apply(t.Context(), watch.NodeWish{Condition: watch.NodeCondition{Type: "ServicesProgrammed",
			Status: "True", Reason: time.Now().String()}})
		return err != nil && strings.Contains(err.Error(), "changes only the Node of its own pod")
	})
}

// checkAdmitted writes all that the program writes.
func checkAdmitted(t *testing.T, plane *control.Plane, config *rest.Config) {
	t.Helper()
	own, err := watch.NewNodeWriter(config, "node")
	check(t, err)
	for _, status := range []string{"True", "False", "Unknown"} {
		wish := watch.NodeWish{WithoutTaint: startTaint, Condition: watch.NodeCondition{Type: "ServicesProgrammed",
			Status: status, Reason: "Test", Message: "a test"}}
		done, err := own.Apply(t.Context(), wish)
		if err != nil || !done.Condition || done.Taint != (status == "True") {
			t.Errorf("%s: %+v %v", status, done, err)
		}
		n, err := plane.Client.CoreV1().Nodes().Get(t.Context(), "node", metav1.GetOptions{})
		check(t, err)
		if got := conditionOf(n); got != status {
			t.Errorf("the condition is %q; want %q", got, status)
		}
		if keys := taintKeys(n); !slices.Equal(keys, []string{"first", "last"}) || len(n.Status.Conditions) != 2 {
			t.Errorf("taints %v, conditions %v", keys, n.Status.Conditions)
		}
	}
}

func conditionOf(n *corev1.Node) string {
	for _, c := range n.Status.Conditions {
		if c.Type == "ServicesProgrammed" {
			return string(c.Status)
		}
	}
	return ""
}

// taintKeys gives the keys of a Node's taints, but for those that Kubernetes adds.
func taintKeys(n *corev1.Node) (keys []string) {
	for _, t := range n.Spec.Taints {
		if !strings.HasPrefix(t.Key, "node.kubernetes.io/") {
			keys = append(keys, t.Key)
		}
	}
	return keys
}

// TestTaintRace: while others add and remove taints all the time, exactly the one with the key goes.
func TestTaintRace(t *testing.T) {
	plane, host := startPlane(t)
	o, err := decodeNodeOverlay("k3s")
	check(t, err)
	check(t, apply(t, plane, o, metav1.CreateOptions{}))
	createNodes(t, plane)
	config := as(t, plane, host, token(t, plane, createPod(t, plane, "node")))
	own, err := watch.NewNodeWriter(config, "node")
	check(t, err)
	nodes := plane.Client.CoreV1().Nodes()
	stop, done := make(chan struct{}), make(chan []string, 1)
	go func() {
		var failed []string
		defer func() { done <- failed }()
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			// In front of the others, so that all change their places.
			taint, _ := json.Marshal(corev1.Taint{Key: fmt.Sprintf("new-%d", i), Effect: corev1.TaintEffectNoSchedule})
			op := fmt.Sprintf(`[{"op":"add","path":"/spec/taints/0","value":%s}]`, taint)
			if i%2 == 1 {
				op = fmt.Sprintf(`[{"op":"test","path":"/spec/taints/0/key","value":"new-%d"},
					{"op":"remove","path":"/spec/taints/0"}]`, i-1)
			}
			if _, err := nodes.Patch(context.Background(), "node", types.JSONPatchType, []byte(op),
				metav1.PatchOptions{}); err != nil {
				failed = append(failed, err.Error())
			}
		}
	}()
	conflicts := 0
	for range 50 {
		add := fmt.Sprintf(`[{"op":"add","path":"/spec/taints/-","value":{"key":%q,"effect":"NoSchedule"}}]`, startTaint)
		_, err := nodes.Patch(t.Context(), "node", types.JSONPatchType, []byte(add), metav1.PatchOptions{})
		if err != nil && !strings.Contains(err.Error(), "uplicate") {
			t.Fatal(err)
		}
		for {
			if _, err = own.Apply(t.Context(), watch.NodeWish{WithoutTaint: startTaint}); err == nil {
				break
			}
			conflicts++
		}
		n, err := nodes.Get(t.Context(), "node", metav1.GetOptions{})
		check(t, err)
		keys := slices.DeleteFunc(taintKeys(n), func(k string) bool { return strings.HasPrefix(k, "new-") })
		if !slices.Equal(keys, []string{"first", "last"}) {
			t.Fatalf("taints %v", keys)
		}
	}
	close(stop)
	if failed := <-done; len(failed) > 0 {
		t.Errorf("the other one failed %d times: %s", len(failed), failed[0])
	}
	t.Logf("%d attempts were given up for too many conflicts", conflicts)
}

// TestNodeObject runs the program as its pod's ServiceAccount: the taint goes, the condition comes, and is Unknown when
// it has stopped. Without a rule, and with a token of no pod, the log says in one line what is missing.
func TestNodeObject(t *testing.T) {
	plane, host := startPlane(t)
	o, err := decodeNodeOverlay("k3s")
	check(t, err)
	check(t, apply(t, plane, o, metav1.CreateOptions{}))
	createNodes(t, plane)
	waitForPolicy(t, as(t, plane, host, token(t, plane, createPod(t, plane, "node"))))
	const failed = "failed to write the Node"
	run := func(bearer, until string) (*corev1.Node, string) {
		dir := t.TempDir()
		writeFiles(t, plane, dir, o["ConfigMap/verdict"].(*corev1.ConfigMap), bearer)
		p, err := runIn(t, plane, host, dir, o, until)
		check(t, err)
		n, err := plane.Client.CoreV1().Nodes().Get(t.Context(), "node", metav1.GetOptions{})
		check(t, err)
		t.Logf("log:\n%s", p.log)
		return n, p.log
	}
	n, log := run(token(t, plane, nil), failed)
	if conditionOf(n) != "" || !slices.Contains(taintKeys(n), startTaint) ||
		strings.Count(log, failed) != 1 || !strings.Contains(log, "the Node of its own pod") ||
		strings.Contains(log, "needs the rule") {
		t.Errorf("with a token of no pod: condition %q, taints %v", conditionOf(n), taintKeys(n))
	}
	role := o["ClusterRole/verdict"].(*rbacv1.ClusterRole).DeepCopy()
	role.Rules = role.Rules[:len(role.Rules)-2]
	_, err = plane.Client.RbacV1().ClusterRoles().Update(t.Context(), role, metav1.UpdateOptions{})
	check(t, err)
	pod, err := plane.Client.CoreV1().Pods("kube-system").Get(t.Context(), "verdict-node", metav1.GetOptions{})
	check(t, err)
	if _, log = run(token(t, plane, pod), failed); !strings.Contains(log, "resources: [nodes/status], verbs: [patch]") ||
		!strings.Contains(log, "resources: [nodes], verbs: [patch]") || strings.Count(log, failed) != 1 {
		t.Error("without the rules, the log does not name them once")
	}
	_, err = plane.Client.RbacV1().ClusterRoles().Update(t.Context(), o["ClusterRole/verdict"].(*rbacv1.ClusterRole),
		metav1.UpdateOptions{})
	check(t, err)
	n, log = run(token(t, plane, pod), "status=True")
	if conditionOf(n) != "Unknown" || !slices.Equal(taintKeys(n), []string{"first", "last"}) ||
		!strings.Contains(log, "status=True reason=Programmed") || !strings.Contains(log, "status=Unknown reason=Stopped") {
		t.Errorf("condition %q, taints %v", conditionOf(n), taintKeys(n))
	}
}
