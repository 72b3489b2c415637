// Package deploy holds what is in deploy/ against the program: what kustomize and Helm make of it is decoded strictly
// and compared, and run with the rights that it gives. It is a module of its own, so that Helm's and kustomize's
// dependencies are not the program's.
package deploy

import (
	"bufio"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	monitoringv1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/common/util"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"helm.sh/helm/v4/pkg/engine"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"
)

// strict decodes the kinds we use, and refuses a field that there is not, or that is there twice.
var strict = func() runtime.Decoder {
	s := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{admissionv1.AddToScheme, appsv1.AddToScheme, corev1.AddToScheme,
		rbacv1.AddToScheme, monitoringv1.AddToScheme} {
		if err := add(s); err != nil {
			panic(err)
		}
	}
	// Its module is not one of ours: TestGatewayClasses looks at its fields.
	s.AddKnownTypeWithName(schema.FromAPIVersionAndKind("gateway.networking.k8s.io/v1", "GatewayClass"),
		&unstructured.Unstructured{})
	return serializer.NewCodecFactory(s, serializer.EnableStrict).UniversalDeserializer()
}()

// decode gives the objects of YAML documents by kind and name, such as DaemonSet/verdict.
func decode(text string) (map[string]runtime.Object, error) {
	objects := map[string]runtime.Object{}
	for docs := utilyaml.NewYAMLReader(bufio.NewReader(strings.NewReader(text))); ; {
		doc, err := docs.Read()
		if err == io.EOF {
			return objects, nil
		}
		if err != nil {
			return nil, err
		}
		var content any
		if err := yaml.Unmarshal(doc, &content); err != nil {
			return nil, err
		}
		if content == nil { // comments only
			continue
		}
		o, kind, err := strict.Decode(doc, nil, nil)
		if err != nil {
			return nil, err
		}
		access, err := meta.Accessor(o)
		if err != nil {
			return nil, err
		}
		name := kind.Kind + "/" + access.GetName()
		if objects[name] != nil {
			return nil, fmt.Errorf("%s is there twice", name)
		}
		objects[name] = o
	}
}

// kustomize gives what "kubectl kustomize" prints of an overlay.
func kustomize(t *testing.T, cluster string) string {
	t.Helper()
	text, err := buildOverlay(cluster)
	check(t, err)
	return text
}

func buildOverlay(cluster string) (string, error) {
	return buildDir("../kustomize/overlays/" + cluster)
}

func buildDir(dir string) (string, error) {
	built, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), dir)
	if err != nil {
		return "", err
	}
	text, err := built.AsYaml()
	return string(text), err
}

// buildNodeOverlay gives what "kubectl kustomize" prints of an overlay with the component that writes the Node.
func buildNodeOverlay(cluster string) (string, error) { return buildWith(cluster, "node-object") }

// buildWith gives what "kubectl kustomize" prints of an overlay with a component.
func buildWith(cluster, component string) (string, error) {
	dir, err := os.MkdirTemp("", "verdict-overlay-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(dir)
	base, err := filepath.Abs("../kustomize")
	if err != nil {
		return "", err
	}
	if base, err = filepath.Rel(dir, base); err != nil {
		return "", err
	}
	text := fmt.Sprintf("resources: [%s/overlays/%s]\ncomponents: [%[1]s/components/%[3]s]\n", base, cluster, component)
	if err := os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte(text), 0o600); err != nil {
		return "", err
	}
	return buildDir(dir)
}

func decodeNodeOverlay(cluster string) (objects, error) {
	text, err := buildNodeOverlay(cluster)
	if err != nil {
		return nil, err
	}
	return decode(text)
}

func decodeOverlay(cluster string) (objects, error) {
	text, err := buildOverlay(cluster)
	if err != nil {
		return nil, err
	}
	return decode(text)
}

const chartDir = "../helm/verdict"

// gatewayClass is what a cluster with the CRDs of Gateway API has, in Helm's words.
const gatewayClass = "gateway.networking.k8s.io/v1/GatewayClass"

// anImage is what everybody must say: no image is published, and the repository's chart is of no release.
const anImage = "image: {repository: verdict, tag: dev}\n"

// template gives what "helm template verdict deploy/helm/verdict -n kube-system" prints with a file of values, if it is
// not "", and more of them, as YAML, for a cluster that has kinds beside Kubernetes' own.
func template(t *testing.T, file, more string, kinds ...string) (string, error) {
	t.Helper()
	files, err := renderChart(t, chartDir, valuesOf(t, readFile(t, file), more), "v1.37.1", kinds...)
	return manifests(files), err
}

// valuesOf merges layers of values, the later ones over the earlier ones.
func valuesOf(t *testing.T, layers ...string) map[string]any {
	t.Helper()
	values := map[string]any{}
	for _, source := range layers {
		var layer map[string]any
		check(t, yaml.Unmarshal([]byte(source), &layer))
		values = util.CoalesceTables(layer, values)
	}
	return values
}

// renderChart gives what Helm makes of a chart's templates, by their paths.
func renderChart(t *testing.T, dir string, values map[string]any, kubernetes string, kinds ...string,
) (map[string]string, error) {
	t.Helper()
	chart, err := loader.Load(dir)
	check(t, err)
	release := common.ReleaseOptions{Name: "verdict", Namespace: "kube-system", Revision: 1, IsInstall: true}
	capabilities := common.DefaultCapabilities.Copy()
	version, err := common.ParseKubeVersion(kubernetes)
	check(t, err)
	capabilities.KubeVersion = *version
	capabilities.APIVersions = append(capabilities.APIVersions, kinds...)
	all, err := util.ToRenderValues(chart, values, release, capabilities)
	if err != nil {
		return nil, err
	}
	return engine.Render(chart, all)
}

// manifests joins what goes to a cluster.
func manifests(files map[string]string) string {
	var text strings.Builder
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if strings.HasSuffix(name, ".yaml") {
			fmt.Fprintf(&text, "---\n%s\n", files[name])
		}
	}
	return text.String()
}

// rendered are all the ways to put Verdict on a cluster.
func rendered(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{}
	for _, cluster := range []string{"kubeadm", "k3s"} {
		all["kustomize "+cluster] = kustomize(t, cluster)
		text, err := template(t, filepath.Join(chartDir, cluster+".yaml"), anImage)
		check(t, err)
		all["helm "+cluster] = text
		if text, err = buildNodeOverlay(cluster); err == nil {
			all["kustomize "+cluster+withNode] = text
			text, err = template(t, filepath.Join(chartDir, cluster+".yaml"), nodeValues)
		}
		check(t, err)
		all["helm "+cluster+withNode] = text
	}
	all["kustomize collector"] = kustomize(t, "../../test/testdata/collector")
	text, err := template(t, filepath.Join(chartDir, "k3s.yaml"), anImage+"collector: {enabled: true}")
	check(t, err)
	all["helm collector"] = text
	text, err = template(t, filepath.Join(chartDir, "kubeadm.yaml"),
		anImage+"collector: {enabled: true, hostNetwork: false}")
	check(t, err)
	all["helm kubeadm with a collector"] = text
	all["kustomize gateway"] = kustomize(t, "../../test/testdata/gateway")
	text, err = template(t, filepath.Join(chartDir, "k3s.yaml"), anImage+"gateway: {enabled: true}", gatewayClass)
	check(t, err)
	all["helm gateway"] = text
	text, err = template(t, "", everyValue)
	check(t, err)
	all[withEveryValue] = text
	return all
}

// withNode is the part of a name in rendered for those that write the Node, with nodeValues.
const (
	withNode   = ", with the Node"
	nodeValues = anImage + "nodeCondition: true\nstartupTaint: verdict-proxy.github.io/not-programmed\n"
)

// withEveryValue is what rendered calls a chart with all of them.
const withEveryValue = "helm with every value"

// everyValue has something in every place that is empty by default.
const everyValue = `
image: {repository: registry.example/verdict, tag: v1, pullPolicy: Always}
imagePullSecrets: [{name: registry}]
apiServer: {host: 192.0.2.1, port: 6443}
clusterCIDR: 10.244.0.0/16,fd00:10:244::/48
config: {mode: ipvs, conntrack: {maxPerCore: 0}, metricsBindAddress: "0.0.0.0:10249"}
verdict: {keeper: process, ownTables: false, records: "on"}
takeover: never
iptables: true
hostPID: true
sysctls: false
podAnnotations: {a: b}
extraArgs: [--v=2]
extraEnv: [{name: GOMEMLIMIT, value: 200MiB}]
affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [
  {matchExpressions: [{key: kubernetes.io/arch, operator: In, values: [amd64, arm64]}]}]}}}
monitoring: {service: true, serviceMonitor: true, podMonitor: true, prometheusRule: true, rules: true, dashboard: true,
  labels: {release: prometheus}}
startupTaint: example.com/not-programmed
gateway: {enabled: true}
collector: {enabled: true, replicas: 3, resources: {limits: {memory: 1Gi}}}
`

func readFile(t *testing.T, path string) string {
	t.Helper()
	if path == "" {
		return ""
	}
	b, err := os.ReadFile(path)
	check(t, err)
	return string(b)
}
