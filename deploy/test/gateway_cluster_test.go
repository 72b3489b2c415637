//go:build peers

package deploy

import (
	"context"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	clientcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/verdict-proxy/verdict/internal/system/testkit"
)

// TestGatewayPolicy: at a real API server, the controller may write Services that a Gateway owns, and no others, even
// with all rights of RBAC.
func TestGatewayPolicy(t *testing.T) {
	plane, host := startPlane(t)
	o, err := decode(kustomize(t, "../../test/testdata/gateway"))
	check(t, err)
	check(t, apply(t, plane, o, metav1.CreateOptions{FieldValidation: metav1.FieldValidationStrict}))
	binding := o["ClusterRoleBinding/verdict-gateway"].(*rbacv1.ClusterRoleBinding).DeepCopy()
	binding.Name, binding.RoleRef.Name = "all", "cluster-admin"
	_, err = plane.Client.RbacV1().ClusterRoleBindings().Create(t.Context(), binding, metav1.CreateOptions{})
	check(t, err)
	admin := plane.Client.CoreV1().Services("default")
	owner := metav1.OwnerReference{APIVersion: "gateway.networking.k8s.io/v1", Kind: "Gateway", Name: "db", UID: "1",
		Controller: new(true)}
	for _, svc := range []*corev1.Service{gatewayService("theirs"), gatewayService("ours", owner)} {
		_, err := admin.Create(t.Context(), svc, metav1.CreateOptions{})
		check(t, err)
	}
	bearer, err := plane.Client.CoreV1().ServiceAccounts("kube-system").CreateToken(t.Context(), "verdict-collector",
		&authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	check(t, err)
	client, err := kubernetes.NewForConfig(as(t, plane, host, bearer.Status.Token))
	check(t, err)
	own := client.CoreV1().Services("default")
	testkit.Eventually(t, time.Minute, "the policy is in force", func() bool {
		_, err := own.Create(t.Context(), gatewayService("none"), metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		return deniedByPolicy(err)
	})
	checkDenied(t, own, owner)
	_, err = own.Create(t.Context(), gatewayService("new", owner), metav1.CreateOptions{})
	check(t, err)
	made, err := own.Get(t.Context(), "ours", metav1.GetOptions{})
	check(t, err)
	made.Annotations = map[string]string{"verdict-proxy.github.io/backends": "{}"}
	_, err = own.Update(t.Context(), made, metav1.UpdateOptions{})
	check(t, err)
	_, err = own.Patch(t.Context(), "ours", types.MergePatchType, []byte(`{"status":{"conditions":[{"type":"x.io/y",
		"status":"True","reason":"x","message":"","lastTransitionTime":"2026-11-27T12:00:00Z"}]}}`),
		metav1.PatchOptions{}, "status")
	check(t, err)
	check(t, own.Delete(t.Context(), "ours", metav1.DeleteOptions{}))
}

// TestGatewayCluster: with the rights that the manifests give, at a real API server with the definitions of Gateway
// API, examples/gateway.yaml gets its Service, and is programmed once it has an address and both nodes have it.
func TestGatewayCluster(t *testing.T) {
	c := newRealCluster(t, "gateway")
	list := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/gateway-api")
	list.Dir = "../.."
	dir, err := list.Output()
	check(t, err)
	definitions := strings.TrimSpace(string(dir)) + "/config/crd/standard/gateway.networking.k8s.io_"
	for _, resource := range []string{"gatewayclasses", "gateways", "tcproutes", "udproutes", "referencegrants"} {
		c.post(readFile(t, definitions+resource+".yaml"))
	}
	classes, _, _ := strings.Cut(readFile(t, "../kustomize/components/gateway/classes.yaml"), "\n---\napiVersion: v1\n")
	c.post(classes)
	for _, namespace := range []string{"edge", "names"} {
		c.post("apiVersion: v1\nkind: Namespace\nmetadata: {name: " + namespace + "}")
	}
	for _, port := range []string{"namespace: shop, name: db}\nspec: {ports: [{port: 5432}]}",
		"namespace: shop, name: db-next}\nspec: {ports: [{port: 5432}]}",
		"namespace: names, name: dns}\nspec: {ports: [{port: 53, protocol: UDP}]}"} {
		c.post("apiVersion: v1\nkind: Service\nmetadata: {" + port)
	}
	c.collect("one")
	for _, name := range []string{"a", "b"} {
		c.connect(name)
	}
	c.post(readFile(t, "../../examples/gateway.yaml"))
	services := c.plane.Client.CoreV1().Services("edge")
	var made *corev1.Service
	testkit.Eventually(t, time.Minute, "there is a Service", func() bool {
		made, err = services.Get(t.Context(), "db-verdict", metav1.GetOptions{})
		return err == nil
	})
	made.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "203.0.113.30"}}
	_, err = services.UpdateStatus(t.Context(), made, metav1.UpdateOptions{})
	check(t, err)
	for path, wants := range map[string][]string{
		"edge/gateways/db":   {`"type":"Programmed","status":"True"`, `"value":"203.0.113.30"`},
		"shop/tcproutes/db":  {`"type":"Accepted","status":"True"`, `"type":"ResolvedRefs","status":"True"`},
		"edge/udproutes/dns": {`"type":"Accepted","status":"True"`, `"type":"ResolvedRefs","status":"True"`},
	} {
		testkit.Eventually(t, time.Minute, path+" is programmed", func() bool {
			text := c.conditions(path)
			return !slices.ContainsFunc(wants, func(want string) bool { return !strings.Contains(text, want) })
		}, func() string { return c.conditions(path) })
	}
	if log := c.collectors["one"].Tail(); strings.Contains(log, "forbidden") {
		t.Error("a right is missing")
	}
}

// post creates the objects of YAML documents, as an administrator.
func (c *realCluster) post(text string) {
	c.t.Helper()
	for document := range strings.SplitSeq(text, "\n---\n") {
		var o struct {
			APIVersion, Kind string
			Metadata         struct{ Namespace string }
		}
		check(c.t, yaml.Unmarshal([]byte(document), &o))
		prefix := map[bool]string{false: "/api/", true: "/apis/"}[strings.Contains(o.APIVersion, "/")]
		resource := strings.Replace(strings.ToLower(o.Kind)+"s", "classs", "classes", 1)
		testkit.Eventually(c.t, time.Minute, "the API server takes a "+o.Kind, func() bool {
			err := c.plane.Client.CoreV1().RESTClient().Post().AbsPath(prefix+o.APIVersion).Resource(resource).
				NamespaceIfScoped(o.Metadata.Namespace, o.Metadata.Namespace != "").
				SetHeader("Content-Type", "application/yaml").Body([]byte(document)).Do(c.t.Context()).Error()
			if err != nil && !apierrors.IsNotFound(err) { // a definition takes a moment to be served
				c.t.Fatal(err)
			}
			return err == nil
		})
	}
}

// conditions are the status of NAMESPACE/RESOURCE/NAME of Gateway API, each condition's type and status first.
func (c *realCluster) conditions(path string) string {
	raw, err := c.plane.Client.CoreV1().RESTClient().Get().AbsPath("/apis/gateway.networking.k8s.io/v1/namespaces/" +
		path).DoRaw(context.Background())
	if err != nil {
		return err.Error()
	}
	return regexp.MustCompile(`"status":"(\w+)","type":"(\w+)"`).ReplaceAllString(string(raw), `"type":"$2","status":"$1"`)
}

// checkDenied: a Service without the owner cannot be changed, gain one, lose one, or go.
func checkDenied(t *testing.T, own clientcorev1.ServiceInterface, owner metav1.OwnerReference) {
	t.Helper()
	owner.Controller = nil
	_, notOwned := own.Create(t.Context(), gatewayService("some", owner), metav1.CreateOptions{})
	patch := func(name, text string, part ...string) error {
		_, err := own.Patch(t.Context(), name, types.MergePatchType, []byte(text), metav1.PatchOptions{}, part...)
		return err
	}
	for what, err := range map[string]error{
		"a Service that a Gateway does not control": notOwned,
		"another's Service":                         patch("theirs", `{"spec":{"selector":{"a":"b"}}}`),
		"another's status":                          patch("theirs", `{"status":{"loadBalancer":{}}}`, "status"),
		"to take another's": patch("theirs", `{"metadata":{"ownerReferences":[{"apiVersion":
			"gateway.networking.k8s.io/v1","kind":"Gateway","name":"db","uid":"1","controller":true}]}}`),
		"to give one away":  patch("ours", `{"metadata":{"ownerReferences":null}}`),
		"to delete another": own.Delete(t.Context(), "theirs", metav1.DeleteOptions{}),
	} {
		if !deniedByPolicy(err) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func deniedByPolicy(err error) bool {
	return err != nil && strings.Contains(err.Error(), "ValidatingAdmissionPolicy 'verdict-gateway'")
}

// gatewayService is a Service of a port.
func gatewayService(name string, owners ...metav1.OwnerReference) *corev1.Service {
	return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name, OwnerReferences: owners},
		Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 5432}}}}
}
