package deploy

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	monitoringv1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/common/util"
	"helm.sh/helm/v4/pkg/chart/v2/lint"
	"helm.sh/helm/v4/pkg/chart/v2/lint/support"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	chartutil "helm.sh/helm/v4/pkg/chart/v2/util"
	"helm.sh/helm/v4/pkg/strvals"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/yaml"
)

// must are the values that nobody can leave out.
const must = anImage + "apiServer: {host: 192.0.2.1}\nclusterCIDR: 10.244.0.0/16\n"

// TestWrongValues: what is missing is asked for, and what cannot be meant is refused with its name.
func TestWrongValues(t *testing.T) {
	const place = "apiServer: {host: 192.0.2.1}\n"
	for _, c := range []struct{ values, says string }{
		{anImage + place, "clusterCIDR: say what addresses pods have"},
		{anImage + "clusterCIDR: 10.244.0.0/16", "apiServer.host: say where nodes reach the API server"},
		{place + "clusterCIDR: 10.244.0.0/16", "image.repository: no image is published yet"},
		{place + "clusterCIDR: 10.244.0.0/16\nimage: {repository: verdict}", "image.tag: this chart is of no release"},
		{must + "clusterCIDR: banana", `clusterCIDR: "banana" is not a range of addresses such as 10.244.0.0/16`},
		{must + "clusterCIDR: 10.244.0.0", `clusterCIDR: "10.244.0.0" is not a range`},
		{must + "clusterCIDR: 10.244.0.0/33", `"10.244.0.0/33" is not a range`},
		{must + "clusterCIDR: 'fd00::/129'", `"fd00::/129" is not a range`},
		{must + "clusterCIDR: [10.244.0.0/16, 10.0.0.0/8]", `"10.0.0.0/8" is a second range of IPv4`},
		{must + "clusterCIDR: [a, b, c]", "maxItems: got 3, want 2"},
		{must + "clusterCIDR: 5", "at '/clusterCIDR': got number, want string or array"},
		{must + "clusterCDIR: 10.244.0.0/16", "additional properties 'clusterCDIR' not allowed"},
		{must + "image: {name: verdict}", "at '/image': additional properties 'name' not allowed"},
		{must + "image: {digest: latest}", "at '/image/digest'"},
		{must + "image: {pullPolicy: Sometimes}", "at '/image/pullPolicy': value must be one of 'Always'"},
		{must + "config: {modus: nftables}", "at '/config': additional properties 'modus' not allowed"},
		{must + "config: {mode: iptabels}", "at '/config/mode': value must be one of 'iptables'"},
		{must + "config: {conntrack: {min: many}}", "at '/config/conntrack/min': got string, want integer"},
		{must + "config: {nftables: {masqueradeBit: 32}}", "at '/config/nftables/masqueradeBit': maximum: got 32, want 31"},
		{must + "config: {nftables: {syncPeriod: soon}}", "at '/config/nftables/syncPeriod'"},
		{must + "config: {nodePortAddresses: primary}", "at '/config/nodePortAddresses': got string, want array"},
		{must + "config: {featureGates: {A: perhaps}}", "at '/config/featureGates/A': got string, want boolean"},
		{must + "verdict: {keeper: dog}", "at '/verdict/keeper': value must be one of 'auto', 'process'"},
		{must + "verdict: {ownTable: true}", "additional properties 'ownTable' not allowed"},
		{must + "takeover: later", "at '/takeover'"},
		{must + "healthPort: 70000", "at '/healthPort': maximum: got 70,000, want 65,535"},
		{must + "tolerations: [{operator: Exist}]", "at '/tolerations/0/operator'"},
		{must + "resources: {request: {cpu: 1}}", "additional properties 'request' not allowed"},
		{must + "updateStrategy: {rollingUpdate: {maxSurges: 1}}", "additional properties 'maxSurges' not allowed"},
		{must + "monitoring: {podmonitor: true}", "additional properties 'podmonitor' not allowed"},
		{must + "extraArgs: --v=2", "at '/extraArgs': got string, want array"},
	} {
		// The later of two equal keys replaces the earlier one.
		values := valuesOf(t)
		for line := range strings.Lines(c.values) {
			values = util.CoalesceTables(valuesOf(t, line), values)
		}
		files, err := renderChart(t, chartDir, values, "v1.37.1")
		if err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%q gives %v and %d files; want %q", c.values, err, len(files), c.says)
		}
	}
}

// TestSchemaKnowsValues: the schema describes each value that values.yaml has, and no other.
func TestSchemaKnowsValues(t *testing.T) {
	var schema map[string]any
	check(t, json.Unmarshal([]byte(readFile(t, chartDir+"/values.schema.json")), &schema))
	values := valuesOf(t, readFile(t, chartDir+"/values.yaml"))
	known := schema["properties"].(map[string]any)
	delete(known, "global") // Helm's
	compare := func(at string, known, values map[string]any) {
		if a, b := slices.Sorted(maps.Keys(known)), slices.Sorted(maps.Keys(values)); !slices.Equal(a, b) {
			t.Errorf("%s: the schema has %q, values.yaml %q", at, a, b)
		}
	}
	compare("/", known, values)
	for _, name := range []string{"image", "apiServer", "collector", "gateway", "monitoring"} {
		compare(name, known[name].(map[string]any)["properties"].(map[string]any), values[name].(map[string]any))
	}
}

// configOf gives the chart's KubeProxyConfiguration.
func configOf(t *testing.T, text string) (config map[string]any) {
	t.Helper()
	o, err := decode(text)
	check(t, err)
	document, _, _ := strings.Cut(o["ConfigMap/verdict"].(*corev1.ConfigMap).Data["config.conf"], "\n---\n")
	check(t, yaml.Unmarshal([]byte(document), &config))
	return config
}

// TestRanges: the pods' ranges reach the configuration as kube-proxy writes them, however they are given.
func TestRanges(t *testing.T) {
	const both = "10.244.0.0/16,fd00:10:244::/48"
	for _, c := range []struct{ set, want string }{
		{`clusterCIDR={10.244.0.0/16,fd00:10:244::/48}`, both},
		{`clusterCIDR={10.244.0.0/16}`, "10.244.0.0/16"},
		{`clusterCIDR=10.244.0.0/16\,fd00:10:244::/48`, both},
		{`clusterCIDR=fd00:10:244::/48`, "fd00:10:244::/48"},
		{`clusterCIDR=,config.clusterCIDR=10.244.0.0/16\, fd00:10:244::/48`, both},
		{`clusterCIDR=10.0.0.0/8,config.clusterCIDR=192.0.2.0/24`, "10.0.0.0/8"},
		{`clusterCIDR=,config.detectLocalMode=NodeCIDR`, ""},
	} {
		values := valuesOf(t, must)
		check(t, strvals.ParseInto(c.set, values))
		files, err := renderChart(t, chartDir, values, "v1.37.1")
		check(t, err)
		text := manifests(files)
		if got, _ := configOf(t, text)["clusterCIDR"].(string); got != c.want {
			t.Errorf("--set '%s' gives %q; want %q", c.set, got, c.want)
		}
		check(t, examine(text))
	}
}

// TestPortsFollowTheConfiguration: probes, Service, monitors and notes name the ports, and hosts, where health and
// metrics are served.
func TestPortsFollowTheConfiguration(t *testing.T) {
	const all = "monitoring: {serviceMonitor: true, podMonitor: true}\n"
	for _, c := range []struct {
		values          string
		health, metrics int
		host            string
	}{
		{must, 10256, 10249, ""},
		{must + `config: {healthzBindAddress: "0.0.0.0:10356", metricsBindAddress: "0.0.0.0:10349"}`, 10356, 10349, ""},
		{must + `config: {healthzBindAddress: "[::]:10357", metricsBindAddress: "[::]:10350"}`, 10357, 10350, ""},
		{must + `config: {healthzBindAddress: "[fd00::1]:10357", metricsBindAddress: "[fd00::1]:1"}`, 10357, 1, "fd00::1"},
		{must + `config: {healthzBindAddress: "fd00::1", metricsBindAddress: "fd00::1"}`, 10256, 10249, "fd00::1"},
		{must + `config: {healthzBindAddress: "::", metricsBindAddress: "::1"}`, 10256, 10249, ""},
		{must + `config: {healthzBindAddress: "192.0.2.9", metricsBindAddress: "192.0.2.9"}`, 10256, 10249, "192.0.2.9"},
		{must + `config: {healthzBindAddress: "127.0.0.1:80", metricsBindAddress: ":90"}`, 80, 90, "127.0.0.1"},
		{anImage + "existingConfigMap: kube-proxy\nhealthPort: 10358\nmetricsPort: 10351", 10358, 10351, ""},
		{anImage + "existingConfigMap: kube-proxy\nconfig: {healthzBindAddress: '192.0.2.9:1'}", 10256, 10249, ""},
		{must + "healthPort: 10359\nmetricsPort: 10352\nconfig: {healthzBindAddress: '0.0.0.0:10356'}", 10359, 10352, ""},
	} {
		files, err := renderChart(t, chartDir, valuesOf(t, all+c.values), "v1.37.1")
		check(t, err)
		o, err := decode(manifests(files))
		check(t, err)
		container := objects(o).daemonSet().Spec.Template.Spec.Containers[0]
		for _, p := range []*corev1.Probe{container.ReadinessProbe, container.LivenessProbe} {
			if p.HTTPGet.Port != intstr.FromInt(c.health) || p.HTTPGet.Host != c.host {
				t.Errorf("with %q, a probe asks at %q, port %s", c.values, p.HTTPGet.Host, p.HTTPGet.Port.String())
			}
		}
		if port := o["Service/verdict"].(*corev1.Service).Spec.Ports[0].Port; int(port) != c.metrics {
			t.Errorf("with %q, the Service has port %d; want %d", c.values, port, c.metrics)
		}
		endpoint := o["PodMonitor/verdict"].(*monitoringv1.PodMonitor).Spec.PodMetricsEndpoints[0]
		address := endpoint.RelabelConfigs[1]
		if address.TargetLabel != "__address__" || *address.Replacement != fmt.Sprintf("${1}:%d", c.metrics) {
			t.Errorf("with %q, the PodMonitor asks at %q", c.values, *address.Replacement)
		}
		notes := files["verdict/templates/NOTES.txt"]
		if !strings.Contains(notes, fmt.Sprintf("\n%d for load balancers", c.health)) {
			t.Errorf("with %q, the notes name another port of health than %d:\n%s", c.values, c.health, notes)
		}
	}
}

// TestMonitoring: the chart holds the alerts once, in each form that it gives them, and its monitors select what it
// makes. The strict decoder of TestManifests has the types of the Prometheus operator.
func TestMonitoring(t *testing.T) {
	text, err := template(t, "", everyValue)
	check(t, err)
	o, err := decode(text)
	check(t, err)
	for name, file := range map[string]string{"rules": "prometheus-rules.yaml", "dashboard": "grafana-dashboard.json"} {
		got := o["ConfigMap/verdict-"+name].(*corev1.ConfigMap).Data[file]
		if got == "" || got != readFile(t, chartDir+"/monitoring/"+file) {
			t.Errorf("%s has %d bytes", name, len(got))
		}
	}
	var want monitoringv1.PrometheusRuleSpec
	check(t, yaml.UnmarshalStrict([]byte(readFile(t, alertsFile)), &want))
	rule := o["PrometheusRule/verdict"].(*monitoringv1.PrometheusRule)
	if len(want.Groups) == 0 || !reflect.DeepEqual(rule.Spec, want) {
		t.Errorf("the PrometheusRule has\n%+v\nwant\n%+v", rule.Spec, want)
	}
	service, monitor := o["Service/verdict"].(*corev1.Service), o["ServiceMonitor/verdict"].(*monitoringv1.ServiceMonitor)
	for key, value := range monitor.Spec.Selector.MatchLabels {
		if service.Labels[key] != value {
			t.Errorf("the ServiceMonitor wants %s=%s, which the Service has not", key, value)
		}
	}
	if monitor.Spec.Endpoints[0].Port != service.Spec.Ports[0].Name {
		t.Errorf("the ServiceMonitor wants port %q", monitor.Spec.Endpoints[0].Port)
	}
	template := objects(o).daemonSet().Spec.Template
	pods := o["PodMonitor/verdict"].(*monitoringv1.PodMonitor)
	for key, value := range pods.Spec.Selector.MatchLabels {
		if template.Labels[key] != value {
			t.Errorf("the PodMonitor wants %s=%s, which the pods have not", key, value)
		}
	}
	// Without a declared port, a monitor that names one finds no target.
	if e := pods.Spec.PodMetricsEndpoints[0]; e.Port != nil || e.PortNumber != nil ||
		e.RelabelConfigs[0].Regex != template.Spec.Containers[0].Name {
		t.Errorf("the PodMonitor finds no target: %+v", e)
	}
	for _, labels := range []map[string]string{rule.Labels, monitor.Labels, pods.Labels} {
		if labels["release"] != "prometheus" {
			t.Errorf("labels %v", labels)
		}
	}
}

// TestPackage: a plain copy of the chart, packed, is complete. So the chart holds no link.
func TestPackage(t *testing.T) {
	check(t, filepath.WalkDir(chartDir, func(path string, entry fs.DirEntry, err error) error {
		if err == nil && !entry.IsDir() && !entry.Type().IsRegular() {
			t.Errorf("%s is no regular file", path)
		}
		return err
	}))
	dir := filepath.Join(t.TempDir(), "verdict")
	check(t, os.CopyFS(dir, os.DirFS(chartDir)))
	chart, err := loader.Load(dir)
	check(t, err)
	chart.Metadata.AppVersion = "v0.2.0" // as deploy/release does
	file, err := chartutil.Save(chart, t.TempDir())
	check(t, err)
	values := valuesOf(t, everyValue, "image: {tag: ''}")
	packed, err := renderChart(t, file, values, "v1.37.1")
	check(t, err)
	o, err := decode(manifests(packed))
	check(t, err)
	if image := objects(o).daemonSet().Spec.Template.Spec.Containers[0].Image; image != "registry.example/verdict:v0.2.0" {
		t.Errorf("a release's chart takes the image %s", image)
	}
	check(t, examine(manifests(packed), "NET_RAW"))
	if _, err := renderChart(t, file, valuesOf(t, must, "clusterCIDR: 5"), "v1.37.1"); err == nil {
		t.Error("the packed chart has no schema")
	}
}

// TestLint: "helm lint" has nothing to complain of, with and without values.
func TestLint(t *testing.T) {
	version, err := common.ParseKubeVersion("v1.37.1")
	check(t, err)
	for _, values := range []string{"", must, everyValue, anImage + readFile(t, chartDir+"/k3s.yaml"),
		anImage + readFile(t, chartDir+"/kubeadm.yaml"), must + "clusterCIDR: [10.244.0.0/16, 'fd00::/48']"} {
		result := lint.RunAll(chartDir, valuesOf(t, values), "kube-system", lint.WithKubeVersion(version))
		for _, m := range result.Messages {
			if m.Severity >= support.InfoSev {
				t.Errorf("with %q: %v", values, m)
			}
		}
	}
}

// TestNotes: what Helm prints says what to run next, and warns of choices that have a price, and only of those.
func TestNotes(t *testing.T) {
	for _, c := range []struct{ values, kubernetes, says string }{
		{must, "v1.37.1", ""},
		{must, "v1.29.0", "Kubernetes v1.29.0 has no sleep"},
		{must + "monitoring: {service: true}", "v1.37.1", "they are served at 127.0.0.1 alone"},
		{must + "monitoring: {podMonitor: true}\nconfig: {metricsBindAddress: '::1'}", "v1.37.1", "are served at ::1 alone"},
		{must + "monitoring: {podMonitor: true}\nconfig: {metricsBindAddress: 0.0.0.0}", "v1.37.1", ""},
		{anImage + "existingConfigMap: kube-proxy", "v1.37.1", "Keep that ConfigMap when you remove kube-proxy"},
		{must + "sysctls: false", "v1.37.1", "sysctls is false"},
		{must + "takeover: never", "v1.37.1", "takeover is never"},
		{must + "gateway: {enabled: true}", "v1.37.1", "the cluster has no Gateway API"},
		{must + "iptables: true", "v1.37.1", `must be the Dockerfile's "full"`},
		{must + "updateStrategy: {type: OnDelete}", "v1.37.1", "updateStrategy has no surge"},
		{must + "updateStrategy: {rollingUpdate: {maxSurge: 0, maxUnavailable: 1}}", "v1.37.1", "has no surge"},
	} {
		files, err := renderChart(t, chartDir, valuesOf(t, c.values), c.kubernetes)
		check(t, err)
		notes := files["verdict/templates/NOTES.txt"]
		for _, line := range []string{
			"kubectl verdict status\n", "rollout status daemonset verdict", "No image is published yet",
		} {
			if !strings.Contains(notes, line) {
				t.Errorf("with %q, the notes lack %q:\n%s", c.values, line, notes)
			}
		}
		warns := strings.Contains(notes, "WARNING") || strings.Contains(notes, "NOTE:")
		if !strings.Contains(notes, c.says) || warns != (c.says != "") {
			t.Errorf("with %q, the notes should warn of %q:\n%s", c.values, c.says, notes)
		}
	}
}

// TestPlacement: what says where pods run, and with which arguments, reaches the DaemonSet.
func TestPlacement(t *testing.T) {
	text, err := template(t, "", everyValue)
	check(t, err)
	o, err := decode(text)
	check(t, err)
	pod := objects(o).daemonSet().Spec.Template.Spec
	c := pod.Containers[0]
	if !slices.Contains(c.Args, "--v=2") || pod.Affinity == nil || pod.Affinity.NodeAffinity == nil ||
		!slices.Contains(c.Env, corev1.EnvVar{Name: "GOMEMLIMIT", Value: "200MiB"}) {
		t.Errorf("the pod has %+v", pod)
	}
	files, err := renderChart(t, chartDir, valuesOf(t, must, "image: {digest: 'sha256:"+strings.Repeat("a", 64)+"'}",
		"nodeSelector: {kubernetes.io/os: null}\ntolerations: []\npriorityClassName: ''"), "v1.37.1")
	check(t, err)
	o, err = decode(manifests(files))
	check(t, err)
	pod = objects(o).daemonSet().Spec.Template.Spec
	if len(pod.NodeSelector)+len(pod.Tolerations)+len(pod.PriorityClassName) > 0 ||
		!strings.HasPrefix(pod.Containers[0].Image, "verdict@sha256:aaa") {
		t.Errorf("the pod has %+v", pod)
	}
}

// TestDirectories: the directories of the ledger and of the file of records are the node's.
func TestDirectories(t *testing.T) {
	files, err := renderChart(t, chartDir, valuesOf(t, must,
		"verdict: {ledger: /var/lib/verdict/ledger, recordsFile: /var/log/verdict/flows.jsonl}"), "v1.37.1")
	check(t, err)
	o, err := decode(manifests(files))
	check(t, err)
	pod := objects(o).daemonSet().Spec.Template.Spec
	for name, dir := range map[string]string{"ledger": "/var/lib/verdict/ledger", "records": "/var/log/verdict"} {
		if !slices.ContainsFunc(pod.Volumes, func(v corev1.Volume) bool {
			return v.Name == name && v.HostPath != nil && v.HostPath.Path == dir
		}) || !slices.ContainsFunc(pod.Containers[0].VolumeMounts, func(m corev1.VolumeMount) bool {
			return m.Name == name && m.MountPath == dir && !m.ReadOnly
		}) {
			t.Errorf("%s of the %s is not the node's: %+v", dir, name, pod)
		}
	}
}

// TestServiceAccount: whoever has an account for the pods already gets it in every place that names one.
func TestServiceAccount(t *testing.T) {
	const values = anImage + "nodeCondition: true\nstartupTaint: a.example/b\ncollector: {enabled: true}\n"
	with := func(more string) string {
		t.Helper()
		text, err := template(t, chartDir+"/kubeadm.yaml", values+more)
		check(t, err)
		return text
	}
	theirs := with("serviceAccount: {create: false, name: proxy-7}\n")
	if n := strings.Count(theirs, "proxy-7"); n != 5 { // pods, two bindings, the policy, the collector's flag
		t.Errorf("%d places name their account:\n%s", n, theirs)
	}
	o, err := decode(theirs)
	check(t, err)
	if o["ServiceAccount/verdict"] != nil || o["ServiceAccount/proxy-7"] != nil ||
		o["ServiceAccount/verdict-collector"] == nil {
		t.Error("an account is created that is somebody else's, or the collector's is not")
	}
	if renamed := with("serviceAccount: {name: proxy-7}\n"); strings.Count(renamed, "proxy-7") != 6 {
		t.Errorf("another name is not taken everywhere:\n%s", renamed)
	}
	if !strings.Contains(with("serviceAccount: {annotations: {a.example/role: r}}\n"), "a.example/role: r") {
		t.Error("the annotation is missing")
	}
}
