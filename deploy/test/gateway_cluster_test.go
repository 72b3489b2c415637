//go:build peers

package deploy

import (
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	clientcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"

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
