package trial

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

const (
	// serverPort is where servers answer, and servicePort where Services do.
	serverPort, servicePort = 8080, 80
	// serverLabel selects servers.
	serverLabel = "verdict-test"
	containerOf = "probe"
)

// externalAddresses are of ranges for documentation: nobody has them.
var externalAddresses = map[corev1.IPFamily]string{corev1.IPv4Protocol: "192.0.2.53",
	corev1.IPv6Protocol: "2001:db8::53"}

func namespaceObject(name string) *corev1.Namespace {
	return &corev1.Namespace{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Namespace"},
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app.kubernetes.io/managed-by": "kubectl-verdict",
			"pod-security.kubernetes.io/enforce": "privileged"}}} // for pods with their node's network
}

// The pods of a node: one answers, one dials, and one dials from the node's network.
const (
	server = "server"
	inPod  = "pod"
	onNode = "node"
)

var roles = []string{server, inPod, onNode}

func podName(role string, place int) string { return fmt.Sprintf("%s-%d", role, place) }

// podObject returns a pod that is put on a node whatever its taints.
func podObject(role string, place int, node, image string) *corev1.Pod {
	no, yes, user, grace := false, true, int64(65532), int64(1)
	p := &corev1.Pod{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{Name: podName(role, place)},
		Spec: corev1.PodSpec{NodeName: node, HostNetwork: role == onNode, AutomountServiceAccountToken: &no,
			EnableServiceLinks: &no, TerminationGracePeriodSeconds: &grace,
			Tolerations: []corev1.Toleration{{Operator: corev1.TolerationOpExists}},
			Containers: []corev1.Container{{Name: containerOf, Image: image, ImagePullPolicy: corev1.PullIfNotPresent,
				Args: []string{"probe", "serve"},
				SecurityContext: &corev1.SecurityContext{RunAsNonRoot: &yes, RunAsUser: &user, AllowPrivilegeEscalation: &no,
					ReadOnlyRootFilesystem: &yes, Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
					SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault}}}}}}
	if role == server {
		p.Labels = map[string]string{serverLabel: server}
		c := &p.Spec.Containers[0]
		c.Args = append(c.Args, fmt.Sprintf("--port=%d", serverPort), "--name="+node)
		c.ReadinessProbe = &corev1.Probe{PeriodSeconds: 1, ProbeHandler: corev1.ProbeHandler{
			TCPSocket: &corev1.TCPSocketAction{Port: intstr.FromInt32(serverPort)}}}
	}
	return p
}

// The Services, by what of them is tried.
const (
	clusterIP    = "cluster-ip"
	nodePort     = "node-port"
	externalIP   = "external-ip"
	loadBalancer = "load-balancer"
	localNode    = "node-port-local"
	internal     = "internal-local"
	affinity     = "affinity"
	empty        = "no-endpoint"
)

// serviceObject returns one of the Services.
func serviceObject(kind string, families []corev1.IPFamily) *corev1.Service {
	policy := corev1.IPFamilyPolicyPreferDualStack
	s := &corev1.Service{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Service"},
		ObjectMeta: metav1.ObjectMeta{Name: kind},
		Spec: corev1.ServiceSpec{Selector: map[string]string{serverLabel: server}, IPFamilyPolicy: &policy,
			Type: corev1.ServiceTypeClusterIP}}
	for _, protocol := range []corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP} {
		s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: strings.ToLower(string(protocol)), Protocol: protocol,
			Port: servicePort, TargetPort: intstr.FromInt32(serverPort)})
	}
	local := corev1.ServiceInternalTrafficPolicyLocal
	switch kind {
	case nodePort:
		s.Spec.Type = corev1.ServiceTypeNodePort
	case localNode:
		s.Spec.Type, s.Spec.ExternalTrafficPolicy = corev1.ServiceTypeNodePort, corev1.ServiceExternalTrafficPolicyLocal
	case externalIP:
		for _, f := range families {
			s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, externalAddresses[f])
		}
	case loadBalancer:
		s.Spec.Type = corev1.ServiceTypeLoadBalancer
		s.Spec.Ports = s.Spec.Ports[:1] // not every cloud mixes protocols
	case internal:
		s.Spec.InternalTrafficPolicy = &local
	case affinity:
		s.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
	case empty:
		s.Spec.Selector = map[string]string{serverLabel: "none"}
	}
	return s
}
