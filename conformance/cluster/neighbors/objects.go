package neighbors

import (
	"fmt"
	"strings"

	"github.com/verdict-proxy/verdict/conformance/cluster"
)

// Namespaces in which policies are tried: of servers that a policy guards, of clients that it allows, and of others.
const (
	guarded  = "guarded"
	friendly = "friendly"
	foreign  = "foreign"
)

// podClients are clients that are pods of the first node: their namespaces and names.
var podClients = map[string][2]string{
	"pod":                           {space, "client"},
	"server":                        {space, "server-1"},
	"pod, allowed":                  {guarded, "friend"},
	"pod, not allowed":              {guarded, "stranger"},
	"pod, namespace allowed":        {friendly, "client"},
	"pod of another namespace":      {foreign, "client"},
	"pod, may send to servers only": {guarded, "limited"},
}

// nodePorts of the Services.
const (
	portBoth, portLocal, portGuarded, portGuardedLocal = 30180, 30181, 30182, 30183
)

// objects are servers on the first two nodes of three, Services, and clients on the first.
func objects() string {
	var all strings.Builder
	for _, namespace := range []string{space, guarded, friendly, foreign} {
		fmt.Fprintf(&all, "apiVersion: v1\nkind: Namespace\nmetadata: {name: %[1]s, labels: {team: %[1]s}}\n---\n",
			namespace)
	}
	for i := 1; i <= 2; i++ {
		name := fmt.Sprintf("server-%d", i)
		for _, namespace := range []string{space, guarded} {
			all.WriteString(pod(namespace, name, i, fmt.Sprintf("app: server, place: node-%d", i), "serve", ":8080"))
		}
	}
	all.WriteString(strings.Replace(pod(space, "host-server", 2, "app: host-server", "serve", ":18081"),
		"spec:", "spec:\n  hostNetwork: true", 1))
	for name, in := range podClients {
		if name != "server" {
			all.WriteString(pod(in[0], in[1], 1, "app: "+in[1]))
		}
	}
	for _, s := range []struct{ namespace, name, spec string }{
		{space, "both", fmt.Sprintf(balanced, "app: server", portBoth, 80)},
		{space, "local", "externalTrafficPolicy: Local, " +
			fmt.Sprintf(balanced, "app: server, place: node-1", portLocal, 80)},
		{space, "near", fmt.Sprintf(internal, "app: server, place: node-1", 8080)},
		{space, "far", fmt.Sprintf(internal, "app: server, place: node-2", 8080)},
		{space, "inside", "internalTrafficPolicy: Local, " + fmt.Sprintf(internal, "app: server", 8080)},
		{space, "host", fmt.Sprintf(internal, "app: host-server", 18081)},
		{guarded, "near", fmt.Sprintf(balanced, "app: server, place: node-1", portGuarded, 80)},
		{guarded, "far", fmt.Sprintf(internal, "app: server, place: node-2", 8080)},
		{guarded, "local", "externalTrafficPolicy: Local, " +
			fmt.Sprintf(balanced, "app: server, place: node-1", portGuardedLocal, 80)},
	} {
		fmt.Fprintf(&all, "apiVersion: v1\nkind: Service\nmetadata: {namespace: %s, name: %s}\n"+
			"spec: {ipFamilyPolicy: PreferDualStack, %s}\n---\n", s.namespace, s.name, s.spec)
	}
	return all.String()
}

// balanced and internal are the rest of a Service's specification, with its selector: with a node port and a port for
// both protocols, and with a target port.
const (
	balanced = "type: LoadBalancer, selector: {%[1]s}, ports: [" +
		"{name: tcp, port: %[3]d, targetPort: 8080, nodePort: %[2]d}, " +
		"{name: udp, protocol: UDP, port: %[3]d, targetPort: 8080, nodePort: %[2]d}]"
	internal = "selector: {%[1]s}, ports: [{name: tcp, port: 80, targetPort: %[2]d}, " +
		"{name: udp, protocol: UDP, port: 80, targetPort: %[2]d}]"
)

// pod is a pod of a node. Without arguments it waits for commands.
func pod(namespace, name string, node int, labels string, args ...string) string {
	probe := ""
	if len(args) > 0 {
		port := strings.TrimPrefix(args[1], ":")
		probe = "\n    readinessProbe: {tcpSocket: {port: " + port + "}, periodSeconds: 2}"
	}
	return fmt.Sprintf(`apiVersion: v1
kind: Pod
metadata: {namespace: %s, name: %s, labels: {%s}}
spec:
  nodeName: node-%d
  terminationGracePeriodSeconds: 1
  containers:
  - name: workload
    image: %s
    args: [%s]%s
---
`, namespace, name, labels, node, cluster.WorkloadImage, quoted(args), probe)
}

func quoted(args []string) string {
	var all []string
	for _, a := range args {
		all = append(all, fmt.Sprintf("%q", a))
	}
	return strings.Join(all, ", ")
}

// policies guard the servers of their namespace: only pods, a namespace and an address that they name may connect; and
// one pod may send to these servers only.
const policies = `apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {namespace: guarded, name: servers}
spec:
  podSelector: {matchLabels: {app: server}}
  policyTypes: [Ingress]
  ingress:
  - from:
    - podSelector: {matchLabels: {app: friend}}
    - podSelector: {matchLabels: {app: limited}}
    - namespaceSelector: {matchLabels: {team: friendly}}
    - ipBlock: {cidr: %s/32}
    - ipBlock: {cidr: %s/128}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {namespace: guarded, name: limited}
spec:
  podSelector: {matchLabels: {app: limited}}
  policyTypes: [Egress]
  egress:
  - to: [{podSelector: {matchLabels: {app: server}}}]
    ports: [{port: 8080}, {port: 8080, protocol: UDP}]
`
