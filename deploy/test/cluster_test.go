//go:build peers

package deploy

import (
	"fmt"
	"maps"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	monitoringv1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/control"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
)

// TestCluster: a real API server takes what kustomize and Helm print, checking every field, and the ServiceAccount
// may do what the program does, and no more.
func TestCluster(t *testing.T) {
	plane, host := startPlane(t)
	for how, text := range rendered(t) {
		o, err := decode(text)
		check(t, err)
		if err := apply(t, plane, o,
			metav1.CreateOptions{FieldValidation: metav1.FieldValidationStrict,
				DryRun: []string{metav1.DryRunAll}}); err != nil {
			t.Errorf("%s: %v", how, err)
		}
	}
	o, err := decodeOverlay("k3s")
	check(t, err)
	check(t, apply(t, plane, o, metav1.CreateOptions{FieldValidation: metav1.FieldValidationStrict}))
	_, err = plane.Client.CoreV1().
		Nodes().
		Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node"}}, metav1.CreateOptions{})
	check(t, err)
	p, err := runOn(t, plane, host, o)
	check(t, err)
	t.Logf("log:\n%s", p.log)
	if strings.Contains(p.log, "forbidden") {
		t.Error("the role is not enough")
	}
	// Less is not enough, and is seen.
	role := o["ClusterRole/verdict"].(*rbacv1.ClusterRole).DeepCopy()
	role.Rules = append(role.Rules[:2:2], role.Rules[3:]...)
	_, err = plane.Client.RbacV1().ClusterRoles().Update(t.Context(), role, metav1.UpdateOptions{})
	check(t, err)
	if p, err = runOn(t, plane, host, o); err != nil ||
		!strings.Contains(p.log, `servicecidrs.networking.k8s.io is forbidden`) {
		t.Errorf("without the rule for ServiceCIDRs: %v, log:\n%s", err, p.log)
	}
}

// peers builds programs of Kubernetes, and gives where they are.
func peers(t *testing.T, names ...string) []string {
	t.Helper()
	build, err := exec.Command("../../conformance/peers/build", names...).Output()
	check(t, err)
	return strings.Fields(string(build))
}

// startPlane starts a control plane on a host of its own, which is the node, too.
func startPlane(t *testing.T) (*control.Plane, *lab.Host) {
	t.Helper()
	programs := peers(t, "etcd", "kube-apiserver")
	host := labtest.NewHost(t, labtest.NewNet(t), "node")
	_, err := host.Run("ip", "addr", "add", "192.0.2.10/32", "dev", "lo")
	check(t, err)
	host.IP4 = netip.MustParseAddr("192.0.2.10")
	// Privileged containers are refused by default. kubeadm and k3s allow them, as CNI plugins and kube-proxy have some.
	server := filepath.Join(t.TempDir(), "kube-apiserver")
	check(t, os.WriteFile(server, []byte("#!/bin/sh\nexec "+programs[1]+" --allow-privileged=true \"$@\"\n"), 0o700))
	plane, err := control.Start(t.Context(), control.Config{
		Host: host, Etcd: programs[0], APIServer: server, Dir: t.TempDir(),
		ServiceRanges: []netip.Prefix{netip.MustParsePrefix("10.43.0.0/16")},
	})
	check(t, err)
	t.Cleanup(func() { labtest.Check(t, plane.Close()) })
	return plane, host
}

// apply creates the objects.
func apply(t *testing.T, plane *control.Plane, all objects, how metav1.CreateOptions) error {
	t.Helper()
	c, ctx := plane.Client, t.Context()
	for _, o := range all {
		var err error
		switch o := o.(type) {
		case *corev1.ServiceAccount:
			_, err = c.CoreV1().ServiceAccounts(o.Namespace).Create(ctx, o, how)
		case *corev1.ConfigMap:
			_, err = c.CoreV1().ConfigMaps(o.Namespace).Create(ctx, o, how)
		case *corev1.Service:
			_, err = c.CoreV1().Services(o.Namespace).Create(ctx, o, how)
		case *appsv1.DaemonSet:
			_, err = c.AppsV1().DaemonSets(o.Namespace).Create(ctx, o, how)
		case *appsv1.Deployment:
			_, err = c.AppsV1().Deployments(o.Namespace).Create(ctx, o, how)
		case *rbacv1.Role:
			_, err = c.RbacV1().Roles(o.Namespace).Create(ctx, o, how)
		case *rbacv1.RoleBinding:
			_, err = c.RbacV1().RoleBindings(o.Namespace).Create(ctx, o, how)
		case *rbacv1.ClusterRole:
			_, err = c.RbacV1().ClusterRoles().Create(ctx, o, how)
		case *rbacv1.ClusterRoleBinding:
			_, err = c.RbacV1().ClusterRoleBindings().Create(ctx, o, how)
		case *admissionv1.ValidatingAdmissionPolicy:
			_, err = c.AdmissionregistrationV1().ValidatingAdmissionPolicies().Create(ctx, o, how)
		case *admissionv1.ValidatingAdmissionPolicyBinding:
			_, err = c.AdmissionregistrationV1().ValidatingAdmissionPolicyBindings().Create(ctx, o, how)
		case *unstructured.Unstructured, *monitoringv1.PodMonitor, *monitoringv1.ServiceMonitor,
			*monitoringv1.PrometheusRule: // the cluster has no CRDs
		default:
			err = fmt.Errorf("%T is not applied", o)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// runOn runs the container that stays, as its ServiceAccount, until it is ready and its event has arrived.
func runOn(t *testing.T, plane *control.Plane, host *lab.Host, o objects) (*ran, error) {
	t.Helper()
	dir := t.TempDir()
	writeFiles(t, plane, dir, o["ConfigMap/verdict"].(*corev1.ConfigMap), token(t, plane, nil))
	return runIn(t, plane, host, dir, o, "")
}

// runIn is runOn with files that are written. It also waits until the log has a text.
func runIn(t *testing.T, plane *control.Plane, host *lab.Host, dir string, o objects, text string) (*ran, error) {
	t.Helper()
	c := o.daemonSet().Spec.Template.Spec.Containers[0]
	c.Env = []corev1.EnvVar{
		{Name: "KUBERNETES_SERVICE_HOST", Value: host.IP4.String()},
		{Name: "KUBERNETES_SERVICE_PORT", Value: strconv.Itoa(6443)},
	}
	events := plane.Client.EventsV1().Events(metav1.NamespaceDefault)
	before, err := events.List(t.Context(), metav1.ListOptions{})
	check(t, err)
	p := &ran{}
	err = p.carry(host, container(host, dir, c), func() bool {
		now, err := events.List(t.Context(), metav1.ListOptions{})
		return err == nil && len(now.Items) > len(before.Items) && strings.Contains(p.out.String(), text)
	})
	if p.status["10256/readyz"] != 200 {
		t.Errorf("it is not ready: %v", p.status)
	}
	now, listErr := events.List(t.Context(), metav1.ListOptions{})
	check(t, listErr)
	if len(now.Items) <= len(before.Items) {
		t.Error("no event has arrived")
	}
	for _, e := range now.Items[len(before.Items):] {
		t.Logf("event: %s %s %s by %s", e.Reason, e.Regarding.Kind, e.Regarding.Name, e.ReportingController)
	}
	return p, err
}

// token gives a token of the ServiceAccount, as a pod has it if there is one.
func token(t *testing.T, plane *control.Plane, pod *corev1.Pod) string {
	t.Helper()
	request := &authenticationv1.TokenRequest{}
	if pod != nil {
		request.Spec.BoundObjectRef = &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: pod.Name,
			UID: pod.UID}
	}
	accounts := plane.Client.CoreV1().ServiceAccounts("kube-system")
	made, err := accounts.CreateToken(t.Context(), "verdict", request, metav1.CreateOptions{})
	check(t, err)
	return made.Status.Token
}

// writeFiles writes what a pod of the ServiceAccount finds: its token, and the files of a ConfigMap.
func writeFiles(t *testing.T, plane *control.Plane, dir string, config *corev1.ConfigMap, token string) {
	t.Helper()
	files := map[string]string{
		"token":  token,
		"ca.crt": readFile(t, filepath.Join(filepath.Dir(plane.Kubeconfig()), "ca.crt")),
	}
	maps.Copy(files, config.Data)
	for name, content := range files {
		check(t, os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600))
	}
}

// TestFromKubeProxy follows docs/INSTALL.md on a node that kubeadm has made, with a real kube-proxy.
func TestFromKubeProxy(t *testing.T) {
	plane, host := startPlane(t)
	config := prepare(t, plane, host)
	proxy := startKubeProxy(t, plane, host, config)
	testkit.Eventually(t, 30*time.Second, "kube-proxy programs the node", func() bool {
		return strings.Contains(natRules(t, host), "KUBE-SVC-") && ready(host) == http.StatusNotFound
	})
	t.Logf("1. verdict takeover --dry-run:\n%s", labtest.Run(t, host, "", verdict, "takeover", "--dry-run"))

	said := startVerdict(t, plane, host, config)
	testkit.Eventually(
		t,
		30*time.Second,
		"it carries the Services",
		func() bool { return strings.Contains(said(), "all Services are programmed") },
	)
	testkit.Eventually(t, 30*time.Second, "it removes kube-proxy's rules, or sees it", func() bool {
		return strings.Contains(said(), "removed kube-proxy's rules") ||
			strings.Contains(said(), "kube-proxy is running on this node")
	})
	if s := ready(host); s != http.StatusNotFound {
		t.Errorf("beside kube-proxy, /readyz answers %d", s)
	}
	t.Logf("3. verdict verify:\n%s", labtest.Run(t, host, "", verdict, "verify"))

	check(t, proxy.Stop(t.Context()))
	testkit.Eventually(
		t,
		30*time.Second,
		"it is ready once kube-proxy has ended",
		func() bool { return ready(host) == http.StatusOK },
	)
	t.Logf("5. verdict takeover:\n%s", labtest.Run(t, host, "", verdict, "takeover"))
	if r := natRules(t, host); strings.Contains(r, "KUBE-SVC-") {
		t.Errorf("there are still rules of kube-proxy:\n%s", r)
	}
	t.Logf("log:\n%s", said())
}

// prepare makes the Node and what the overlay for kubeadm brings, and gives kubeadm's ConfigMap.
func prepare(t *testing.T, plane *control.Plane, host *lab.Host) *corev1.ConfigMap {
	t.Helper()
	nodes := plane.Client.CoreV1().Nodes()
	node, err := nodes.Create(
		t.Context(),
		&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node"}},
		metav1.CreateOptions{},
	)
	check(t, err)
	node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: host.IP4.String()}}
	_, err = nodes.UpdateStatus(t.Context(), node, metav1.UpdateOptions{})
	check(t, err)
	o, err := decodeOverlay("kubeadm")
	check(t, err)
	check(t, apply(t, plane, o, metav1.CreateOptions{}))
	made, err := decode(strings.ReplaceAll(readFile(t, "testdata/kubeadm.yaml"), "<server>", host.IP4.String()+":6443"))
	check(t, err)
	return made["ConfigMap/kube-proxy"].(*corev1.ConfigMap)
}

// startKubeProxy starts kube-proxy with the same file, but for what is at another place here.
func startKubeProxy(t *testing.T, plane *control.Plane, host *lab.Host, config *corev1.ConfigMap) *control.Process {
	t.Helper()
	text := strings.ReplaceAll(config.Data["config.conf"], "/var/lib/kube-proxy/kubeconfig.conf", plane.Kubeconfig())
	file := filepath.Join(t.TempDir(), "config.conf")
	check(t, os.WriteFile(file, []byte(text), 0o600))
	program := peers(t, "kube-proxy")[0]
	p := control.NewProcess(host, filepath.Join(t.TempDir(), "log"), program, "--config="+file, "--hostname-override=node")
	check(t, p.Start())
	t.Cleanup(func() { _ = p.Kill() })
	return p
}

// startVerdict runs the pod of the overlay for kubeadm, and gives what tells its log so far.
func startVerdict(t *testing.T, plane *control.Plane, host *lab.Host, config *corev1.ConfigMap) (said func() string) {
	t.Helper()
	dir := t.TempDir()
	writeFiles(t, plane, dir, config, token(t, plane, nil))
	o, err := decodeOverlay("kubeadm")
	check(t, err)
	pod := o.daemonSet().Spec.Template.Spec
	if out, err := container(host, dir, pod.InitContainers[0]).CombinedOutput(); err != nil {
		t.Fatalf("init container: %v: %s", err, out)
	}
	log, err := os.Create(filepath.Join(t.TempDir(), "log"))
	check(t, err)
	defer log.Close()
	c := container(host, dir, pod.Containers[0])
	c.Stdout, c.Stderr = log, log
	check(t, c.Start())
	t.Cleanup(func() { _ = c.Process.Kill(); _ = c.Wait() })
	return func() string { return readFile(t, log.Name()) }
}

// ready gives what /readyz answers, whoever answers; 0 if nobody does.
func ready(host *lab.Host) int {
	client := &http.Client{Transport: &http.Transport{DialContext: host.DialContext, DisableKeepAlives: true}}
	answer, err := client.Get("http://127.0.0.1:10256/readyz")
	if err != nil {
		return 0
	}
	answer.Body.Close()
	return answer.StatusCode
}

func natRules(t *testing.T, host *lab.Host) string {
	t.Helper()
	return labtest.Run(t, host, "", "iptables-save", "-t", "nat")
}
