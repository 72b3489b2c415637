package deploy

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/yaml"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
)

// verdict is the program, as the product's own module builds it.
var verdict string

func TestMain(m *testing.M) {
	labtest.Main(withVerdict{m})
}

// withVerdict builds the program before the tests.
type withVerdict struct{ m *testing.M }

func (w withVerdict) Run() int {
	dir, err := os.MkdirTemp("", "verdict-deploy-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	verdict = filepath.Join(dir, "verdict")
	build := exec.Command("go", "build", "-o", verdict, "./cmd/verdict")
	build.Dir, build.Stderr = "../..", os.Stderr
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if err := build.Run(); err != nil {
		fmt.Fprintln(os.Stderr, "build verdict:", err)
		return 1
	}
	return w.m.Run()
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// objects are what a cluster gets, by kind and name.
type objects map[string]runtime.Object

func (o objects) daemonSet() *appsv1.DaemonSet { return o["DaemonSet/verdict"].(*appsv1.DaemonSet) }

// TestManifests: what kustomize and Helm print is decoded strictly, and fits the program.
func TestManifests(t *testing.T) {
	for how, text := range rendered(t) {
		var rights []corev1.Capability
		if how == withEveryValue { // iptables is a part of it
			rights = append(rights, "NET_RAW")
		}
		if err := examine(text, rights...); err != nil {
			t.Errorf("%s: %v", how, err)
		}
	}
}

// TestManifestsWrong: what is spelt wrong, missing or too much is found.
func TestManifestsWrong(t *testing.T) {
	good := kustomize(t, "k3s")
	for _, c := range []struct{ old, new, says string }{
		{"hostNetwork: true", "hostNetworks: true", `unknown field "spec.template.spec.hostNetworks"`},
		{"hostNetwork: true", "hostNetwork: yes please", "cannot unmarshal string"},
		{"--hostname-override", "--hostname-overide", "unknown flag: --hostname-overide"},
		{"- --init-only", "- --inly-once", "unknown flag: --inly-once"},
		{"--oom-score-adj=-997", "--oom-score-adj=low", "invalid argument"},
		{"- run\n        - --config", "- ruin\n        - --config", `has no command "ruin"`},
		{"    mode: nftables", "    modus: nftables", "modus: unknown field"},
		{"clusterCIDR: 10.42.0.0/16", "clusterCIDR: 10.42.0.0/64", "clusterCIDR"},
		{"    keeper: auto", "    keeper: nobody", "keeper"},
		{"  - watch\n- apiGroups:\n  - discovery.k8s.io", "- apiGroups:\n  - discovery.k8s.io", "watch nodes is missing"},
		{"  - create", "  - create\n  - patch", "patch events.events.k8s.io is too much"},
		{"  - servicecidrs", "  - servicecidr", "list servicecidrs.networking.k8s.io is missing"},
		{"  - services", "  - services\n  - secrets", "list secrets is too much"},
		{"serviceAccountName: verdict", "serviceAccountName: default", "ServiceAccount/default is missing"},
		{"kind: ClusterRole\n  name: verdict", "kind: ClusterRole\n  name: admin", "ClusterRole/admin is missing"},
		{"subjects:\n- kind: ServiceAccount\n  name: verdict", "subjects:\n- kind: ServiceAccount\n  name: default",
			"binds other subjects"},
		{"configMap:\n          name: verdict", "configMap:\n          name: config", "ConfigMap/config is missing"},
		{"matchLabels:\n      app.kubernetes.io/name: verdict", "matchLabels:\n      app.kubernetes.io/name: proxy",
			"selects no pod"},
		{"sleep:\n              seconds: 10", "exec: {}", "before the next one has taken over"},
		{"path: /readyz", "path: /ready", "/ready at port 10256 is not served"},
		{"port: 10256", "port: 10249", "at port 10249 is not served"},
		{"mountPath: /var/lib/kube-proxy", "mountPath: /etc/verdict", "config.conf is in no volume"},
		{"drop:\n            - ALL", "drop:\n            - NET_RAW", "capabilities"},
	} {
		bad := strings.Replace(good, c.old, c.new, 1)
		if bad == good {
			t.Errorf("there is no %q to replace", c.old)
			continue
		}
		if err := examine(bad); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%q in place of %q gives %v; want %q", c.new, c.old, err, c.says)
		}
	}
}

// examine gives the first thing that is wrong with YAML documents. Rights are those that they give besides NET_ADMIN.
func examine(text string, rights ...corev1.Capability) error {
	o, err := decode(text)
	if err != nil {
		return err
	}
	for _, check := range []func(objects) error{checkNames, checkArgs, checkConfig, checkRoles, checkRights(rights),
		checkProbes} {
		if err := check(o); err != nil {
			return err
		}
	}
	return nil
}

// checkNames follows the names by which objects refer to each other.
func checkNames(o objects) error {
	ds := o.daemonSet()
	pod := ds.Spec.Template.Spec
	for key, value := range ds.Spec.Selector.MatchLabels {
		if ds.Spec.Template.Labels[key] != value {
			return fmt.Errorf("%s=%s selects no pod", key, value)
		}
	}
	wanted := []string{"ServiceAccount/" + pod.ServiceAccountName}
	for _, v := range pod.Volumes {
		if v.ConfigMap != nil && v.ConfigMap.Name != "kube-proxy" { // that one is kubeadm's
			wanted = append(wanted, "ConfigMap/"+v.ConfigMap.Name)
		}
	}
	binding := o["ClusterRoleBinding/verdict"].(*rbacv1.ClusterRoleBinding)
	wanted = append(wanted, binding.RoleRef.Kind+"/"+binding.RoleRef.Name)
	for _, name := range wanted {
		if o[name] == nil {
			return fmt.Errorf("%s is missing", name)
		}
	}
	subject := rbacv1.Subject{Kind: "ServiceAccount", Name: pod.ServiceAccountName, Namespace: ds.Namespace}
	if !slices.Equal(binding.Subjects, []rbacv1.Subject{subject}) {
		return fmt.Errorf("the ClusterRoleBinding binds other subjects than the pod's: %v", binding.Subjects)
	}
	for name, object := range o {
		access, err := meta.Accessor(object)
		if err != nil {
			return err
		}
		cluster := slices.ContainsFunc([]string{"ClusterRole", "ValidatingAdmissionPolicy", "GatewayClass"},
			func(kind string) bool { return strings.HasPrefix(name, kind) })
		if cluster != (access.GetNamespace() == "") {
			return fmt.Errorf("%s: namespace %q", name, access.GetNamespace())
		}
	}
	return nil
}

// checkArgs has the program read its arguments.
func checkArgs(o objects) error {
	pod := o.daemonSet().Spec.Template.Spec
	containers := slices.Concat(pod.InitContainers, pod.Containers)
	if d, ok := o["Deployment/verdict-collector"].(*appsv1.Deployment); ok {
		containers = append(containers, d.Spec.Template.Spec.Containers...)
	}
	for _, c := range containers {
		args := append(slices.Clone(c.Args), "--help")
		if out, err := exec.Command(verdict, args...).CombinedOutput(); err != nil {
			return fmt.Errorf("container %s: verdict %s: %s", c.Name, strings.Join(c.Args, " "), out)
		}
		mounted := func(dir string) bool {
			return slices.ContainsFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool { return m.MountPath == dir })
		}
		for _, a := range c.Args {
			if path, ok := strings.CutPrefix(a, "--config="); ok && !mounted(filepath.Dir(path)) {
				return fmt.Errorf("container %s: %s is in no volume", c.Name, path)
			}
		}
	}
	return nil
}

// checkConfig looks at the configuration.
func checkConfig(o objects) error {
	config, ok := o["ConfigMap/verdict"].(*corev1.ConfigMap)
	if !ok {
		return nil // it is kubeadm's: TestKubeadmConfig
	}
	return acceptConfig(config)
}

// acceptConfig has the program read config.conf, and say what is wrong with it.
func acceptConfig(config *corev1.ConfigMap) error {
	dir, err := os.MkdirTemp("", "verdict-config-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	file, written := filepath.Join(dir, "config.conf"), filepath.Join(dir, "out")
	if err := os.WriteFile(file, []byte(config.Data["config.conf"]), 0o600); err != nil {
		return err
	}
	out, err := exec.Command(verdict, "run", "--config", file, "--write-config-to", written).CombinedOutput()
	if err != nil || strings.Contains(string(out), "unknown field") {
		return fmt.Errorf("config.conf: %w: %s", err, out)
	}
	return nil
}

// TestKubeadmConfig: what kubeadm has made for kube-proxy is of use as it is.
func TestKubeadmConfig(t *testing.T) {
	o, err := decode(readFile(t, "testdata/kubeadm.yaml"))
	check(t, err)
	check(t, acceptConfig(o["ConfigMap/kube-proxy"].(*corev1.ConfigMap)))
}

// checkRoles compares what the role allows with what the program asks for.
func checkRoles(o objects) error {
	var allowed []string
	for _, rule := range o["ClusterRole/verdict"].(*rbacv1.ClusterRole).Rules {
		for _, group := range rule.APIGroups {
			for _, resource := range rule.Resources {
				for _, verb := range rule.Verbs {
					allowed = append(allowed, request(verb, group, resource))
				}
			}
		}
	}
	asked, err := requests(o)
	if err != nil {
		return err
	}
	for _, a := range asked {
		if !slices.Contains(allowed, a) {
			return fmt.Errorf("ClusterRole: %s is missing", a)
		}
	}
	for _, a := range allowed {
		if !slices.Contains(asked, a) {
			return fmt.Errorf("ClusterRole: %s is too much", a)
		}
	}
	return nil
}

func request(verb, group, resource string) string {
	return strings.TrimSuffix(verb+" "+resource+"."+group, ".")
}

// checkRights: the container that stays has no right but to change the network, and those that are named.
func checkRights(more []corev1.Capability) func(objects) error {
	return func(o objects) error { return checkRightsOf(o, append([]corev1.Capability{"NET_ADMIN"}, more...)) }
}

func checkRightsOf(o objects, rights []corev1.Capability) error {
	pod := o.daemonSet().Spec.Template.Spec
	if !pod.HostNetwork || len(pod.Containers) != 1 {
		return fmt.Errorf("want one container in the host's network")
	}
	s := pod.Containers[0].SecurityContext
	want := &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}, Add: rights}
	if !reflect.DeepEqual(s.Capabilities, want) {
		return fmt.Errorf("capabilities %v; want %v", s.Capabilities, want)
	}
	if s.Privileged != nil || s.AllowPrivilegeEscalation == nil || *s.AllowPrivilegeEscalation ||
		!*s.ReadOnlyRootFilesystem {
		return fmt.Errorf("the container has more rights than it needs")
	}
	return nil
}

// checkProbes: they ask for what the program serves by default. The container waits for the one that takes over, and
// does not hinder it.
func checkProbes(o objects) error {
	c := o.daemonSet().Spec.Template.Spec.Containers[0]
	for _, p := range []*corev1.Probe{c.ReadinessProbe, c.LivenessProbe} {
		if at := p.HTTPGet; !slices.Contains(served, at.Port.String()+at.Path) {
			return fmt.Errorf("%s at port %s is not served", at.Path, at.Port.String())
		}
	}
	if c.Lifecycle == nil || c.Lifecycle.PreStop == nil || c.Lifecycle.PreStop.Sleep == nil {
		return fmt.Errorf("a pod that is deleted ends before the next one has taken over")
	}
	if len(c.Ports) > 0 {
		return fmt.Errorf("a port that is named keeps the new pod from starting beside the old one")
	}
	return nil
}

// served is what TestPod finds to be served.
var served = []string{"10256/readyz", "10256/livez"}

// TestOneSource: Helm and kustomize make the same objects, but for labels.
func TestOneSource(t *testing.T) {
	all := rendered(t)
	for _, cluster := range []string{"kubeadm", "k3s", "kubeadm" + withNode, "k3s" + withNode, "collector", "gateway"} {
		byKustomize, byHelm := all["kustomize "+cluster], all["helm "+cluster]
		if d := differences(t, byKustomize, byHelm); len(d) > 0 {
			t.Errorf("%s: %s", cluster, strings.Join(d, "\n"))
		}
		for _, c := range []struct{ old, new string }{
			{"maxSurge: 1", "maxSurge: 2"}, {"- list\n", "- get\n"}, {"path: /livez", "path: /healthz"},
		} {
			if changed := strings.Replace(byKustomize, c.old, c.new, 1); len(differences(t, changed, byHelm)) == 0 {
				t.Errorf("%s: %q in place of %q makes no difference", cluster, c.new, c.old)
			}
		}
	}
}

// differences compares two sets of objects.
func differences(t *testing.T, byKustomize, byHelm string) (d []string) {
	t.Helper()
	a, b := plain(t, byKustomize), plain(t, byHelm)
	all := maps.Clone(a)
	maps.Copy(all, b)
	for _, name := range slices.Sorted(maps.Keys(all)) {
		if a[name] != b[name] {
			d = append(d, fmt.Sprintf("%s of kustomize:\n%s\nof Helm:\n%s", name, a[name], b[name]))
		}
	}
	return d
}

// plain gives objects as text, without what may differ.
func plain(t *testing.T, text string) map[string]string {
	t.Helper()
	decoded, err := decode(text)
	check(t, err)
	out := map[string]string{}
	for name, o := range decoded {
		access, err := meta.Accessor(o)
		check(t, err)
		access.SetLabels(nil)
		switch o := o.(type) {
		case *appsv1.DaemonSet:
			plainPod(&o.Spec.Template)
		case *appsv1.Deployment:
			plainPod(&o.Spec.Template)
		case *corev1.ConfigMap:
			for key, text := range o.Data {
				o.Data[key] = canonical(t, text)
			}
		}
		b, err := yaml.Marshal(o)
		check(t, err)
		out[name] = string(b)
	}
	return out
}

func plainPod(t *corev1.PodTemplateSpec) {
	t.Labels = nil
	for i := range t.Spec.InitContainers {
		t.Spec.InitContainers[i].ImagePullPolicy = ""
	}
	for i := range t.Spec.Containers {
		c := &t.Spec.Containers[i]
		c.ImagePullPolicy = ""
		slices.SortFunc(c.Env, func(a, b corev1.EnvVar) int { return strings.Compare(a.Name, b.Name) })
	}
}

// canonical gives YAML documents without comments, in one order.
func canonical(t *testing.T, text string) string {
	t.Helper()
	var out []string
	for doc := range strings.SplitSeq(text, "\n---\n") {
		var content any
		check(t, yaml.Unmarshal([]byte(doc), &content))
		b, err := yaml.Marshal(content)
		check(t, err)
		out = append(out, string(b))
	}
	return strings.Join(out, "---\n")
}

// TestUnit: systemd's unit calls the program in a way that it understands.
func TestUnit(t *testing.T) {
	_, rest, ok := strings.Cut(readFile(t, "../systemd/verdict.service"), "\nExecStart=/usr/local/sbin/verdict ")
	if !ok {
		t.Fatal("it starts another program")
	}
	line, _, _ := strings.Cut(rest, "\n")
	if out, err := exec.Command(verdict, append(strings.Fields(line), "--help")...).CombinedOutput(); err != nil {
		t.Errorf("verdict %s: %s", line, out)
	}
}

// TestUnitOfOldSystemd: before version 254, systemd does not set $FDSTORE, without which the proxy would become the
// child of a keeper. The unit says the same as its FileDescriptorStoreMax=.
func TestUnitOfOldSystemd(t *testing.T) {
	unit := readFile(t, "../systemd/verdict.service")
	size := regexp.MustCompile(`(?m)^FileDescriptorStoreMax=(\d+)$`).FindStringSubmatch(unit)
	told := regexp.MustCompile(`(?m)^Environment=FDSTORE=(\d+)$`).FindStringSubmatch(unit)
	if size == nil || told == nil || size[1] != told[1] {
		t.Errorf("the unit's store is %q, and it tells the program %q", size, told)
	}
}

// TestUnitExamples: the configuration for a host without a cluster is valid, and its example of a manifest is a Service
// with an endpoint.
func TestUnitExamples(t *testing.T) {
	for _, example := range []string{"config.conf", "manifests.conf"} {
		if out, err := exec.Command(verdict, "run", "--config", "../systemd/"+example, "--write-config-to",
			filepath.Join(t.TempDir(), "out")).CombinedOutput(); err != nil {
			t.Errorf("%s: %v: %s", example, err, out)
		}
	}
	out, err := exec.Command(verdict, "render", "--from", "../systemd/services.yaml", "--hostname-override",
		"this-host").CombinedOutput()
	for _, want := range []string{"10.96.0.80 . tcp . 80 ", " : 192.0.2.10 . 8080"} {
		if err != nil || !strings.Contains(string(out), want) {
			t.Errorf("%v: there is no %q in\n%s", err, want, out)
		}
	}
}

// TestCleanup: what removes Verdict from the nodes has the rights of what wrote its tables, and the same image.
func TestCleanup(t *testing.T) {
	text, err := buildOverlay("../cleanup")
	check(t, err)
	o, err := decode(text)
	check(t, err)
	proxy, err := decodeOverlay("kubeadm")
	check(t, err)
	want := proxy.daemonSet().Spec.Template.Spec.Containers[0]
	pod := o["DaemonSet/verdict-cleanup"].(*appsv1.DaemonSet).Spec.Template.Spec
	c := pod.Containers[0]
	if !pod.HostNetwork || len(pod.Containers) != 1 || c.Image != want.Image ||
		!reflect.DeepEqual(c.SecurityContext, want.SecurityContext) {
		t.Errorf("want a container like %+v; got %+v", want, c)
	}
	if out, err := exec.Command(verdict, append(c.Args, "--help")...).CombinedOutput(); err != nil ||
		!strings.Contains(string(out), "Cleanup deletes") {
		t.Errorf("verdict %v: %v: %s", c.Args, err, out)
	}
}

// TestImage: whoever names the image once, where docs/INSTALL.md says, gets it in every overlay and in the clean-up.
func TestImage(t *testing.T) {
	dir := t.TempDir()
	check(t, os.CopyFS(dir, os.DirFS("../kustomize")))
	place := filepath.Join(dir, "image/kustomization.yaml")
	text, err := os.ReadFile(place)
	check(t, err)
	const set = "- {name: verdict, newName: registry.example/verdict, newTag: v9}"
	edited := strings.Replace(string(text), "- {name: verdict, newTag: dev}", set, 1)
	check(t, os.WriteFile(place, []byte(edited), 0o600))
	withCollector := filepath.Join(dir, "overlays/kubeadm/kustomization.yaml")
	text, err = os.ReadFile(withCollector)
	check(t, err)
	text = bytes.Replace(text, []byte("- ../../image\n"), []byte("- ../../image\n- ../../components/collector\n"), 1)
	check(t, os.WriteFile(withCollector, text, 0o600))
	for _, what := range []string{"overlays/kubeadm", "overlays/k3s", "cleanup"} {
		built, err := buildDir(filepath.Join(dir, what))
		check(t, err)
		images := regexp.MustCompile(`image: (.*)`).FindAllStringSubmatch(built, -1)
		if len(images) == 0 || what == "overlays/kubeadm" && len(images) < 3 {
			t.Errorf("%s has no image", what)
		}
		for _, image := range images {
			if image[1] != "registry.example/verdict:v9" {
				t.Errorf("%s has the image %s", what, image[1])
			}
		}
	}
}
