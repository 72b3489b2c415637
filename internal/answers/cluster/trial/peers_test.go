//go:build peers

package trial

import (
	"net/netip"
	"os/exec"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/control"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
)

func TestMain(m *testing.M) { labtest.Main(m) }

// TestObjects: a real API server takes the objects, checking every field, and gives them what a trial counts on.
func TestObjects(t *testing.T) {
	build, err := exec.Command("../../../../conformance/peers/build", "etcd", "kube-apiserver").Output()
	labtest.Check(t, err)
	programs := strings.Fields(string(build))
	host := labtest.NewHost(t, labtest.NewNet(t), "node")
	labtest.Run(t, host, "", "ip", "addr", "add", "192.0.2.10/32", "dev", "lo")
	host.IP4 = netip.MustParseAddr("192.0.2.10")
	plane, err := control.Start(t.Context(), control.Config{Host: host, Etcd: programs[0], APIServer: programs[1],
		Dir: t.TempDir(), ServiceRanges: lab.ServiceRange[:]})
	labtest.Check(t, err)
	defer func() { labtest.Check(t, plane.Close()) }()
	api, strict := plane.Client.CoreV1(), metav1.CreateOptions{FieldValidation: metav1.FieldValidationStrict}
	const name = "verdict-test-x"
	_, err = api.Namespaces().Create(t.Context(), namespaceObject(name), strict)
	labtest.Check(t, err)
	for _, role := range roles {
		p, err := api.Pods(name).Create(t.Context(), podObject(role, 0, "node-1", "verdict:test"), strict)
		if err != nil || p.Spec.NodeName != "node-1" || p.Spec.HostNetwork != (role == onNode) {
			t.Errorf("%s: %v", role, err)
		}
	}
	families := []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}
	for _, kind := range []string{clusterIP, empty, affinity, internal, nodePort, localNode, externalIP, loadBalancer} {
		s, err := api.Services(name).Create(t.Context(), serviceObject(kind, families), strict)
		if err != nil || len(s.Spec.ClusterIPs) != 2 || (s.Spec.Type == corev1.ServiceTypeNodePort) !=
			(kind == nodePort || kind == localNode) || kind == externalIP && len(s.Spec.ExternalIPs) != 2 {
			t.Errorf("%s: %v %+v", kind, err, s)
		}
	}
}
