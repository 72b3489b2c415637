package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// VerdictImage is the image of the sources as they are.
const VerdictImage = "localhost/verdict:dev"

// InstallVerdict applies the overlay for kubeadm with an image, as docs/INSTALL.md says, with additions to the
// DaemonSet.
func (c *Cluster) InstallVerdict(ctx context.Context, image string, more ...Addition) error {
	return c.applyOverlay(ctx, "overlays/kubeadm", "", image, more)
}

// UseVerdict is InstallVerdict, and waits until Verdict is ready on all nodes that it is for. A kube-proxy that the
// cluster has goes meanwhile: while it runs, it holds the port at which kubelets ask whether Verdict is ready.
func (c *Cluster) UseVerdict(ctx context.Context, image string, more ...Addition) error {
	if err := c.InstallVerdict(ctx, image, more...); err != nil {
		return err
	}
	if _, err := c.Kubectl(ctx, "-n", "kube-system", "delete", "daemonset", "kube-proxy", "--ignore-not-found",
		"--wait=true", "--cascade=foreground"); err != nil {
		return err
	}
	if _, err := c.Kubectl(ctx, "label", "nodes", "--all", "kube-proxy-"); err != nil {
		return err
	}
	_, err := c.Kubectl(ctx, "-n", "kube-system", "rollout", "status", "daemonset/verdict", "--timeout=3m")
	return err
}

// InstallNodeVerdict is InstallVerdict with the component that writes the Nodes.
func (c *Cluster) InstallNodeVerdict(ctx context.Context, image string, more ...Addition) error {
	return c.applyOverlay(ctx, "overlays/kubeadm", "components/node-object", image, more)
}

// InstallEverywhere is InstallVerdict with the collector, which knows whether all nodes have got it.
func (c *Cluster) InstallEverywhere(ctx context.Context, image string, more ...Addition) error {
	return c.applyOverlay(ctx, "overlays/kubeadm", "components/collector", image, more)
}

// Addition is a field of a pod's specification in a DaemonSet, with a JSON pointer as its path.
type Addition struct {
	Path, Value string
}

// applyOverlay applies a directory of deploy/kustomize with an image, and a component if there is one.
func (c *Cluster) applyOverlay(ctx context.Context, name, component, image string, more []Addition) error {
	dir := c.file("overlay")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	root, err := filepath.Rel(dir, filepath.Join(c.from.Root, "deploy", "kustomize"))
	if err != nil {
		return err
	}
	repository, tag, _ := strings.Cut(image, ":")
	text := fmt.Sprintf("resources: [%q]\nimages: [{name: verdict, newName: %q, newTag: %q}]\n",
		filepath.Join(root, name), repository, tag)
	if component != "" {
		text += fmt.Sprintf("components: [%q]\n", filepath.Join(root, component))
	}
	if len(more) > 0 {
		text += "patches:\n- target: {kind: DaemonSet}\n  patch: |-\n"
	}
	for _, a := range more {
		text += fmt.Sprintf("    - {op: add, path: %q, value: %q}\n", "/spec/template/spec/"+a.Path, a.Value)
	}
	if err := os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte(text), 0o644); err != nil {
		return err
	}
	_, err = c.Kubectl(ctx, "apply", "-k", dir)
	return err
}

// InstallCleanup applies the DaemonSet that removes what Verdict wrote.
func (c *Cluster) InstallCleanup(ctx context.Context, image string, more ...Addition) error {
	return c.applyOverlay(ctx, "cleanup", "", image, more)
}

// DeleteOverlay deletes what InstallVerdict or InstallCleanup has applied last. The nodes' tables stay.
func (c *Cluster) DeleteOverlay(ctx context.Context) error {
	_, err := c.Kubectl(ctx, "delete", "-k", c.file("overlay"))
	return err
}

// Helm runs helm as the administrator.
func (c *Cluster) Helm(ctx context.Context, args ...string) (string, error) {
	helm, err := c.from.Peers(ctx, "helm")
	if err != nil {
		return "", err
	}
	return run(ctx, "nsenter", append([]string{"--net=" + netnsPath(outside), helm[0], "--kubeconfig", c.Kubeconfig()},
		args...)...)
}

// ApplyKubeProxyConfig creates the ConfigMap that kubeadm makes for kube-proxy, with the rights that it needs.
func (c *Cluster) ApplyKubeProxyConfig(ctx context.Context, mode string) error {
	return c.Apply(ctx, fmt.Sprintf(kubeProxyConfig, podRanges, mode, server))
}

// InstallKubeProxy applies a DaemonSet like kubeadm's.
func (c *Cluster) InstallKubeProxy(ctx context.Context) error {
	program, err := c.from.Peers(ctx, "kube-proxy")
	if err != nil {
		return err
	}
	return c.Apply(ctx, fmt.Sprintf(kubeProxyDaemonSet, WorkloadImage, program[0]))
}

// Apply applies YAML documents.
func (c *Cluster) Apply(ctx context.Context, text string) error {
	file, err := os.CreateTemp("", "verdict-apply-")
	if err != nil {
		return err
	}
	defer os.Remove(file.Name())
	_, err = file.WriteString(text)
	if err := errors.Join(err, file.Close()); err != nil {
		return err
	}
	_, err = c.Kubectl(ctx, "apply", "-f", file.Name())
	return err
}

const kubeProxyConfig = `apiVersion: v1
kind: ServiceAccount
metadata: {name: kube-proxy, namespace: kube-system}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: kubeadm:node-proxier}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: system:node-proxier}
subjects: [{kind: ServiceAccount, name: kube-proxy, namespace: kube-system}]
---
apiVersion: v1
kind: ConfigMap
metadata:
  name: kube-proxy
  namespace: kube-system
  labels: {app: kube-proxy}
data:
  config.conf: |
    apiVersion: kubeproxy.config.k8s.io/v1alpha1
    kind: KubeProxyConfiguration
    bindAddress: 0.0.0.0
    clientConnection: {kubeconfig: /var/lib/kube-proxy/kubeconfig.conf}
    clusterCIDR: %s
    # A network namespace cannot change the size of the table.
    conntrack: {maxPerCore: 0}
    mode: %q
  kubeconfig.conf: |
    apiVersion: v1
    kind: Config
    clusters:
    - name: default
      cluster:
        certificate-authority: /var/run/secrets/kubernetes.io/serviceaccount/ca.crt
        server: %s
    contexts: [{name: default, context: {cluster: default, namespace: default, user: default}}]
    current-context: default
    users: [{name: default, user: {tokenFile: /var/run/secrets/kubernetes.io/serviceaccount/token}}]
`

// kube-proxy needs nft, iptables and their libraries: the pod sees those of the machine, in place of an image that has
// them.
const kubeProxyDaemonSet = `apiVersion: apps/v1
kind: DaemonSet
metadata:
  name: kube-proxy
  namespace: kube-system
  labels: {k8s-app: kube-proxy}
spec:
  selector: {matchLabels: {k8s-app: kube-proxy}}
  template:
    metadata: {labels: {k8s-app: kube-proxy}}
    spec:
      serviceAccountName: kube-proxy
      hostNetwork: true
      priorityClassName: system-node-critical
      nodeSelector: {kube-proxy: wanted}
      tolerations: [{operator: Exists}]
      containers:
      - name: kube-proxy
        image: %s
        command: [/program/kube-proxy]
        args: [--config=/var/lib/kube-proxy/config.conf, --hostname-override=$(NODE_NAME)]
        env:
        - {name: PATH, value: "/usr/sbin:/usr/bin:/sbin:/bin"}
        - {name: NODE_NAME, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
        securityContext: {privileged: true}
        volumeMounts:
        - {name: config, mountPath: /var/lib/kube-proxy}
        - {name: xtables-lock, mountPath: /run/xtables.lock}
        - {name: program, mountPath: /program/kube-proxy, readOnly: true}
        - {name: usr, mountPath: /usr, readOnly: true}
        - {name: etc, mountPath: /etc/alternatives, readOnly: true}
        - {name: lib, mountPath: /lib, readOnly: true}
        - {name: lib64, mountPath: /lib64, readOnly: true}
        - {name: sbin, mountPath: /sbin, readOnly: true}
        - {name: bin, mountPath: /bin, readOnly: true}
      volumes:
      - {name: config, configMap: {name: kube-proxy}}
      - {name: xtables-lock, hostPath: {path: /run/xtables.lock, type: FileOrCreate}}
      - {name: program, hostPath: {path: %s}}
      - {name: usr, hostPath: {path: /usr}}
      - {name: etc, hostPath: {path: /etc/alternatives}}
      - {name: lib, hostPath: {path: /lib}}
      - {name: lib64, hostPath: {path: /lib64}}
      - {name: sbin, hostPath: {path: /sbin}}
      - {name: bin, hostPath: {path: /bin}}
`
