package neighbors

import (
	"context"
	"errors"
	"path/filepath"

	"github.com/verdict-proxy/verdict/conformance/cluster"
)

// cilium is Cilium as CNI plugin and engine of network policies, with native routing, and with its kube-proxy
// replacement off. It comes without its operator, of which nothing here needs more than the definitions of resources.
var cilium = Neighbor{
	Name: "cilium", Network: true, Policies: true,
	own: ciliumAgent,
	programs: []program{
		{peer: "cilium-agent", image: "/cilium", at: "/program/cilium-agent", tools: true},
		{peer: "cilium-agent", image: "/cilium", beside: "cilium", at: "/cilium"},
		{peer: "cilium-cni", image: "/cilium", at: "/program/cilium-cni"},
	},
	workloads: [][2]string{{"kube-system", "daemonset/cilium"}},
	prepare:   ciliumNodes,
}

// ciliumNodes defines Cilium's resources, and gives nodes its CNI plugin.
func ciliumNodes(ctx context.Context, c *cluster.Cluster) error {
	programs, err := c.Peers(ctx, "cilium-agent", "cilium-cni")
	if err != nil {
		return err
	}
	_, err = c.Kubectl(ctx, "apply", "--server-side", "-f", filepath.Join(filepath.Dir(programs[0]), "cilium", "crds"))
	for _, n := range c.Nodes {
		_, link := n.Exec(ctx, "ln", "-sf", programs[1], "/opt/cni/bin/cilium-cni")
		err = errors.Join(err, link)
	}
	return err
}

// ciliumAgent has the settings of Cilium's chart, without Envoy and Hubble. The agent would change a sysctl of the
// whole machine, and goes on where it cannot. Cilium has a pod that uses its own Service come from the loopback
// address. By default that is fe80::1, to which a server sends datagrams from its link-local address, in vain.
const ciliumAgent = `apiVersion: v1
kind: ServiceAccount
metadata: {name: cilium, namespace: kube-system}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: cilium}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: cluster-admin}
subjects: [{kind: ServiceAccount, name: cilium, namespace: kube-system}]
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: cilium, namespace: kube-system}
spec:
  selector: {matchLabels: {k8s-app: cilium}}
  template:
    metadata: {labels: {k8s-app: cilium}}
    spec:
      serviceAccountName: cilium
      hostNetwork: true
      priorityClassName: system-node-critical
      tolerations: [{operator: Exists}]
      initContainers:
      - name: mount-bpf-fs
        image: quay.io/cilium/cilium
        command: [/bin/sh, -ec, "mount | grep '/sys/fs/bpf type bpf' || mount -t bpf bpf /sys/fs/bpf"]
        securityContext: {privileged: true}
        volumeMounts: [{name: bpf-maps, mountPath: /sys/fs/bpf, mountPropagation: Bidirectional}]
      containers:
      - name: cilium-agent
        image: quay.io/cilium/cilium
        command: [/bin/sh, -ec]
        args:
        - |
          mount --bind /proc/sys/kernel /proc/sys/kernel
          mount -o remount,bind,ro /proc/sys/kernel
          mkdir /library
          cp -r /cilium/bpf /library/
          exec /program/cilium-agent "$@"
        - cilium-agent
        - --lib-dir=/library
        - --state-dir=/run/cilium
        - --socket-path=/run/cilium/cilium.sock
        - --write-cni-conf-when-ready=/host/cni/05-cilium.conflist
        - --cni-exclusive=true
        - --kube-proxy-replacement=false
        - --routing-mode=native
        - --auto-direct-node-routes=true
        - --enable-ipv6=true
        - --ipv4-native-routing-cidr=10.244.0.0/16
        - --ipv6-native-routing-cidr=fd00:10:244::/48
        - --ipv6-service-loopback-address=fd00:ffff::1
        - --ipam=kubernetes
        - --identity-allocation-mode=crd
        - --devices=eth0
        - --enable-bpf-masquerade=false
        - --bpf-map-dynamic-size-ratio=0.0025
        - --preallocate-bpf-maps=false
        - --enable-l7-proxy=false
        - --enable-envoy-config=false
        - --enable-hubble=false
        - --enable-health-checking=false
        - --enable-endpoint-health-checking=false
        env:
        - {name: PATH, value: "/cilium/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        - {name: K8S_NODE_NAME, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
        - {name: CILIUM_K8S_NAMESPACE, valueFrom: {fieldRef: {fieldPath: metadata.namespace}}}
        readinessProbe:
          httpGet: {host: 127.0.0.1, path: /healthz, port: 9879, httpHeaders: [{name: brief, value: "true"}]}
          periodSeconds: 5
        securityContext: {privileged: true}
        volumeMounts:
        - {name: run, mountPath: /run/cilium}
        - {name: cni, mountPath: /host/cni}
        - {name: xtables-lock, mountPath: /run/xtables.lock}
        - {name: bpf-maps, mountPath: /sys/fs/bpf, mountPropagation: HostToContainer}
      volumes:
      - {name: run, hostPath: {path: /run/cilium, type: DirectoryOrCreate}}
      - {name: cni, hostPath: {path: /etc/cni/net.d}}
      - {name: xtables-lock, hostPath: {path: /run/xtables.lock, type: FileOrCreate}}
      - {name: bpf-maps, hostPath: {path: /sys/fs/bpf, type: DirectoryOrCreate}}
`
