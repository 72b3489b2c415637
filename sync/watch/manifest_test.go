package watch

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

const serviceYAML = `apiVersion: v1
kind: Service
metadata:
  name: web
spec:
  clusterIP: 10.96.0.1
  ports:
  - port: 80
`

// manifestTests are what people write, what of it is used, and what they are told.
var manifestTests = []struct {
	name     string
	text     string
	objects  []string
	problems []string
	bad      bool
}{
	{name: "nothing", text: ""},
	{name: "comments alone", text: "# nothing here\n---\n\n--- # nor here\n...\n"},
	{name: "one service", text: serviceYAML, objects: []string{"Service default/web"}},
	{name: "documents", text: "%YAML 1.2\n---\n" + serviceYAML + "---\n" + strings.Replace(serviceYAML, "web", "api", 1) + "...\n# end\n",
		objects: []string{"Service default/web", "Service default/api"}},
	{name: "carriage returns and a byte order mark", text: "\uFEFF" + strings.ReplaceAll(serviceYAML+"---\n"+serviceYAML, "\n", "\r\n"),
		objects: []string{"Service default/web", "Service default/web"}},
	{name: "JSON", text: `{"apiVersion":"v1","kind":"Service","metadata":{"name":"web"},"spec":{"clusterIP":"10.96.0.1"}}`,
		objects: []string{"Service default/web"}},
	{name: "a document on the marker's line", text: `--- {apiVersion: v1, kind: Service, metadata: {name: web}, spec: {clusterIP: 10.96.0.1}}`,
		objects: []string{"Service default/web"}},
	{name: "other kinds", text: "apiVersion: v1\nkind: Pod\nspec: 7\n---\napiVersion: serving.knative.dev/v1\nkind: Service\n" +
		"---\napiVersion: v1\nkind: PodList\nitems: {}\n---\napiVersion: v1\nkind: Node\nmetadata: {name: another}\nspec: []\n"},
	{name: "our node and the ranges", text: "apiVersion: v1\nkind: Node\nmetadata: {name: n1}\nstatus: {capacity: {cpu: 2}}\n---\n" +
		"apiVersion: networking.k8s.io/v1\nkind: ServiceCIDR\nmetadata: {name: kubernetes}\nspec: {cidrs: [10.96.0.0/12]}\n",
		objects: []string{"Node n1", "ServiceCIDR kubernetes"}},
	{name: "anchors and merge keys", text: "x: &x\n  port: 80\nkind: Service\napiVersion: v1\nmetadata: &m {name: web}\n" +
		"spec:\n  clusterIP: 10.96.0.1\n  ports:\n  - <<: *x\n    nodePort: 30080\n  - {<<: *x, port: 81, name: b}\n",
		objects: []string{"Service default/web"}, problems: []string{"f.yaml:1: Service default/web: x: unknown field"}},
	{name: "a list", text: "apiVersion: v1\nkind: List\nitems:\n- apiVersion: v1\n  kind: Service\n  metadata:\n    name: web\n  spec:\n" +
		"    clusterIP: 10.96.0.1\n    externalIPs:\n    - 1.2.3\n",
		objects:  []string{"Service default/web"},
		problems: []string{`f.yaml:11: Service default/web: spec.externalIPs[0]: "1.2.3" is not an IP address`}},
	{name: "a ServiceList whose items name no kind", text: "kind: ServiceList\napiVersion: v1\nitems:\n  - metadata: {name: web}\n" +
		"    spec: {clusterIP: 10.96.0.1, clusterIp: x}\n  - metadata: {name: api, namespace: shop}\n    spec: {clusterIP: 10.96.0.2}\nmetadata: {}\n",
		objects:  []string{"Service default/web", "Service shop/api"},
		problems: []string{"f.yaml:5: Service default/web: spec.clusterIp: unknown field: did you mean clusterIP?"}},
	{name: "a JSON list whose kind comes last", text: "{\n\"apiVersion\": \"v1\",\n\"items\": [\n{\"metadata\": {\"name\": \"web\"},\n" +
		"\"spec\": {\"clusterIP\": \"10.96.0.1\",\n\"typ\\u0065x\": 1}},\n{\"metadata\": {\"name\": \"api\"}, \"spec\":\n{\"clusterIP\": \"x\"}}],\n\"kind\": \"ServiceList\"}\n",
		objects: []string{"Service default/web", "Service default/api"}, problems: []string{
			"f.yaml:6: Service default/web: spec.typex: unknown field",
			`f.yaml:8: Service default/api: spec.clusterIP: "x" is not an IP address`,
		}},
	{name: "a quoted text with a line that looks like an item", text: "kind: List\napiVersion: v1\nitems:\n- kind: Service\n  apiVersion: v1\n" +
		"  metadata:\n    name: web\n    annotations: {a: \"x\n- y\"}\n  spec: {clusterIP: 10.96.0.1}\n",
		objects: []string{"Service default/web"}},
	{name: "an anchor in another item", text: "kind: List\napiVersion: v1\nitems:\n- kind: Service\n  apiVersion: v1\n  metadata: {name: web}\n" +
		"  spec: &s {clusterIP: 10.96.0.1}\n- kind: Service\n  apiVersion: v1\n  metadata: {name: api}\n  spec: *s\n",
		objects: []string{"Service default/web", "Service default/api"}},
	{name: "lists in lists", text: "kind: List\napiVersion: v1\nitems: [{kind: List, items: [{kind: Service, apiVersion: v1, metadata: {name: web}, spec: {clusterIP: 10.0.0.1}}]}]",
		objects: []string{"Service default/web"}},

	{name: "wrong indentation", text: "# first\n---\n" + serviceYAML + "---\n" + strings.Replace(strings.Replace(serviceYAML, "web", "api", 1), "  ports", " ports", 1),
		objects:  []string{"Service default/web"},
		problems: []string{"f.yaml:18: Service default/api: this is no YAML: did not find expected key"}, bad: true},
	{name: "a tab", text: "kind: Service\nmetadata:\n\tname: web\n",
		problems: []string{"f.yaml:3: Service: this is no YAML: found character that cannot start any token"}, bad: true},
	{name: "an open quotation mark", text: strings.Replace(serviceYAML, "10.96.0.1", `"10.96.0.1`, 1),
		problems: []string{"f.yaml:6: Service default/web: this is no YAML: found unexpected end of stream"}, bad: true},
	{name: "an open bracket after one that is closed", text: strings.Replace(serviceYAML, "spec:\n", "spec:\n  externalIPs: [\n    1.2.3.4,\n    5.6.7.8 ]\n  ipFamilies: [\n    IPv4\n", 1),
		problems: []string{"f.yaml:9: Service default/web: this is no YAML: did not find expected ',' or ']'"}, bad: true},
	{name: "a template", text: "kind: Service\nmetadata:\n  name: web\n{{ if .x }}\nspec: {}\n{{ end }}\n",
		problems: []string{"f.yaml:4: Service default/web: this is no YAML: could not find expected ':'"}, bad: true},
	{name: "one bad item", text: "kind: List\napiVersion: v1\nitems:\n- kind: Service\n  apiVersion: v1\n  metadata: {name: web}\n  spec: {clusterIP: 10.96.0.1}\n" +
		"- kind: Service\n  apiVersion: v1\n  metadata:\n    namespace: shop\n    name: 'api'\n  spec: clusterIP: 10.96.0.2\n",
		objects:  []string{"Service default/web"},
		problems: []string{"f.yaml:13: Service shop/api: this is no YAML: mapping values are not allowed in this context"}, bad: true},
	{name: "JSON that ends too early", text: "{\"kind\": \"Service\", \"metadata\": {\"name\": \"web\"},\n\"spec\": {\n",
		problems: []string{"f.yaml:3: Service default/web: this is no JSON: it ends too early"}, bad: true},
	{name: "JSON without a comma", text: "{\n  \"kind\": \"Service\"\n  \"metadata\": {\n}}",
		problems: []string{"f.yaml:3: Service: this is no JSON: '\"' makes no sense here"}, bad: true},
	{name: "JSON with a bare word", text: "{\"kind\": \"Service\",\n\"metadata\": undefined]}",
		problems: []string{`f.yaml:2: Service: this is no JSON: "undefined" is no value`}, bad: true},
	{name: "not UTF-8", text: "kind: Service\nmetadata: {name: \xff\xfe}\n",
		problems: []string{"f.yaml:2: Service: this is no YAML: invalid leading UTF-8 octet"}, bad: true},
	{name: "a list at the top", text: "- kind: Service\n", problems: []string{"f.yaml:1: this is no Kubernetes object but a list"}, bad: true},
	{name: "just text", text: "\nhello\n", problems: []string{"f.yaml:2: this is no Kubernetes object but a single value"}, bad: true},
	{name: "no kind", text: "apiVersion: v1\nmetadata: {name: web}\n", problems: []string{"f.yaml:1: kind: missing: this is no Kubernetes object"}, bad: true},
	{name: "no apiVersion", text: "metadata: {name: web}\nkind: Service\n",
		problems: []string{"f.yaml:1: Service default/web: apiVersion: missing: write v1"}, bad: true},
	{name: "an old apiVersion", text: "metadata: {name: web}\nkind: EndpointSlice\napiVersion: discovery.k8s.io/v1beta1\n",
		problems: []string{`f.yaml:3: EndpointSlice default/web: apiVersion: "discovery.k8s.io/v1beta1" is not supported: write discovery.k8s.io/v1`}, bad: true},
	{name: "items that are none", text: "kind: List\napiVersion: v1\nitems: 7\n", problems: []string{"f.yaml:3: items: this is a single value: write a list"}, bad: true},
	{name: "text for a list", text: strings.Replace(serviceYAML, "spec:\n", "spec:\n  loadBalancerSourceRanges: 10.0.0.0/8\n", 1),
		problems: []string{"f.yaml:6: Service default/web: spec.loadBalancerSourceRanges: this is a single value: write a list"}, bad: true},
	{name: "text for a number", text: strings.Replace(serviceYAML, "port: 80", `port: http`, 1),
		problems: []string{`f.yaml:8: Service default/web: spec.ports[0].port: "http" is not a number`}, bad: true},
	{name: "a number too large", text: strings.Replace(serviceYAML, "port: 80", `port: 99999999999`, 1),
		problems: []string{`f.yaml:8: Service default/web: spec.ports[0].port: 99999999999 is too large`}, bad: true},
	{name: "a number for text", text: strings.Replace(serviceYAML, "name: web", "name: web\n  labels:\n    version: 1.20\n    debug: true", 1),
		problems: []string{
			"f.yaml:6: Service default/web: metadata.labels[version]: 1.20 is a number, not text: put it in quotation marks",
			"f.yaml:7: Service default/web: metadata.labels[debug]: true is true or false, not text: put it in quotation marks",
		}, bad: true},
	{name: "text for true or false", text: "kind: EndpointSlice\napiVersion: discovery.k8s.io/v1\nmetadata: {name: web-1}\nendpoints:\n- conditions:\n    ready: yes\n",
		problems: []string{`f.yaml:6: EndpointSlice default/web-1: endpoints[0].conditions.ready: "yes" is not true or false`}, bad: true},

	{name: "a port that is none", text: serviceYAML + "    nodePort: 70000\n", objects: []string{"Service default/web"},
		problems: []string{"f.yaml:9: Service default/web: spec.ports[0].nodePort: 70000 is not a port (1-65535)"}},
	{name: "a field in the wrong place", text: serviceYAML + "clusterIP: x\nname: y\n", objects: []string{"Service default/web"},
		problems: []string{"f.yaml:9: Service default/web: clusterIP: unknown field", "f.yaml:10: Service default/web: name: unknown field"}},
	{name: "a field twice", text: serviceYAML + "spec:\n  clusterIP: 10.96.0.9\n", objects: []string{"Service default/web"},
		problems: []string{"f.yaml:9: Service default/web: spec: there twice: the last one counts"}},
	{name: "no cluster IP", text: strings.Replace(serviceYAML, "clusterIP: 10.96.0.1", "type: NodePort", 1), objects: []string{"Service default/web"},
		problems: []string{
			"f.yaml:5: Service default/web: spec.clusterIP: no cluster IP: a manifest has nobody to allocate one, write an address or None",
			"f.yaml:8: Service default/web: spec.ports[0].nodePort: no node port: a manifest has nobody to allocate one, write a number",
		}},
	{name: "unknown type", text: strings.Replace(serviceYAML, "spec:", "spec:\n  type: Nodeport", 1), objects: []string{"Service default/web"},
		problems: []string{`f.yaml:6: Service default/web: spec.type: "Nodeport" is unknown: write ClusterIP, NodePort, LoadBalancer or ExternalName`}},
	{name: "no name", text: strings.Replace(serviceYAML, "name: web", "generateName: web", 1), objects: []string{"Service"},
		problems: []string{"f.yaml:3: Service: metadata.name: missing"}},
	{name: "a slice without address type", text: "kind: EndpointSlice\napiVersion: discovery.k8s.io/v1\nmetadata: {name: web-1}\nendpoints: []\n",
		objects: []string{"EndpointSlice default/web-1"}, problems: []string{"f.yaml:1: EndpointSlice default/web-1: addressType: missing: write IPv4 or IPv6"}},
}

func TestManifest(t *testing.T) {
	for _, test := range manifestTests {
		t.Run(test.name, func(t *testing.T) {
			m, problems, bad := newReader("n1").manifest("f.yaml", test.text, nil)
			var objects []string
			for _, o := range m.objects {
				objects = append(objects, objectName(o.key.kind, o.key.name))
			}
			if !slices.Equal(objects, test.objects) {
				t.Errorf("objects %q, want %q", objects, test.objects)
			}
			if !slices.Equal(lines(problems), test.problems) {
				t.Errorf("problems:\n%s\nwant:\n%s", strings.Join(lines(problems), "\n"), strings.Join(test.problems, "\n"))
			}
			if bad != test.bad {
				t.Errorf("bad is %v", bad)
			}
		})
	}
}

// What a person writes must come out as what the API server makes of it.
func TestManifestDefaults(t *testing.T) {
	text := serviceYAML + `  - {name: dns, port: 53, protocol: UDP}
---
kind: EndpointSlice
apiVersion: discovery.k8s.io/v1
metadata: {name: web-1, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{port: 8080}]
endpoints: [{addresses: [10.1.0.1]}]
`
	m, problems, _ := newReader("").manifest("f.yaml", text, nil)
	service := webService()
	service.Ports = []snapshot.Port{{Protocol: snapshot.TCP, Port: 80}, {Name: "dns", Protocol: snapshot.UDP, Port: 53}}
	slice := webSlice()
	slice.Name.Name, slice.Ports[0].Name = "web-1", ""
	if want := []any{service, slice}; !reflect.DeepEqual([]any{m.objects[0].value, m.objects[1].value}, want) || len(problems) > 0 {
		t.Errorf("got %+v %+v %q", m.objects[0].value, m.objects[1].value, problems)
	}
}

// kubectlList is n Services with a slice of ten endpoints each, and one Pod, as `kubectl get -o yaml` or `-o json` prints it.
func kubectlList(t testing.TB, n int, format string) string {
	var b strings.Builder
	write := func(o any) {
		var (
			data []byte
			err  error
		)
		indent := "  "
		if format == "json" {
			data, err = json.MarshalIndent(o, "        ", "    ")
			indent = ""
			if b.Len() > 0 {
				b.WriteString(",\n")
			}
			b.WriteString("        ")
		} else {
			data, err = yaml.Marshal(o)
			b.WriteString("- ")
		}
		if err != nil {
			t.Fatal(err)
		}
		b.WriteString(strings.ReplaceAll(strings.TrimSpace(string(data)), "\n", "\n"+indent))
		if format != "json" {
			b.WriteByte('\n')
		}
	}
	write(&corev1.Pod{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}, ObjectMeta: metav1.ObjectMeta{Name: "p"}})
	for i := range n {
		s, e := dumped(i)
		write(s)
		write(e)
	}
	if format == "json" {
		return "{\n    \"apiVersion\": \"v1\",\n    \"items\": [\n" + b.String() +
			"\n    ],\n    \"kind\": \"List\",\n    \"metadata\": {\n        \"resourceVersion\": \"\"\n    }\n}\n"
	}
	return "apiVersion: v1\nitems:\n" + b.String() + "kind: List\nmetadata:\n  resourceVersion: \"\"\n"
}

// dumped is the i-th Service of a cluster and its slice, with all the fields a server adds.
func dumped(i int) (*corev1.Service, *discoveryv1.EndpointSlice) {
	const uid = "1f9a8f2e-7d5c-4a8e-9e0a-3f6b7c8d9e0f"
	s := apiService()
	s.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Service"}
	s.Name, s.Namespace, s.UID, s.ResourceVersion, s.CreationTimestamp = fmt.Sprintf("svc-%05d", i), fmt.Sprintf("ns-%d", i%50), uid, "12345", metav1.Now()
	s.Labels = map[string]string{"app": "x", "app.kubernetes.io/name": "y", "version": "1.20"}
	s.Annotations = map[string]string{"kubectl.kubernetes.io/last-applied-configuration": `{"apiVersion":"v1","kind":"Service",` +
		`"metadata":{"annotations":{},"labels":{"app":"x"},"name":"svc","namespace":"ns"},"spec":{"ports":[{"port":80}]}}` + "\n"}
	s.Spec.ClusterIP = fmt.Sprintf("10.%d.%d.%d", 96+i/60000, i/250%240, i%250+1)
	s.Spec.ClusterIPs = []string{s.Spec.ClusterIP}
	s.Spec.IPFamilies, s.Spec.IPFamilyPolicy = []corev1.IPFamily{"IPv4"}, ptr(corev1.IPFamilyPolicySingleStack)
	s.Spec.Selector = map[string]string{"app": "x"}
	e := apiSlice()
	e.TypeMeta = metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"}
	e.Name, e.Namespace, e.UID, e.ResourceVersion, e.CreationTimestamp = s.Name+"-abcde", s.Namespace, uid, "12345", metav1.Now()
	e.Labels = map[string]string{"kubernetes.io/service-name": s.Name, "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io"}
	e.Annotations = map[string]string{"endpoints.kubernetes.io/last-change-trigger-time": "2026-01-01T00:00:00Z"}
	e.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Service", Name: s.Name, UID: uid, Controller: ptr(true)}}
	e.Endpoints = nil
	for j := range 10 {
		e.Endpoints = append(e.Endpoints, discoveryv1.Endpoint{
			Addresses:  []string{fmt.Sprintf("10.%d.%d.%d", 1+i/6000, i/24%250, i%24*10+j+1)},
			Conditions: discoveryv1.EndpointConditions{Ready: ptr(true), Serving: ptr(true), Terminating: ptr(false)},
			NodeName:   ptr(fmt.Sprintf("node-%d", (i+j)%500)), Zone: ptr("zone-a"),
			TargetRef: &corev1.ObjectReference{Kind: "Pod", Name: "svc-55c4b5f7d4-abcde", Namespace: s.Namespace, UID: uid},
			Hints:     &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: "zone-a"}}},
		})
	}
	return s, e
}

// A list that is taken apart must give what it gives as a whole, and what the objects themselves give.
func TestListsAreTakenApart(t *testing.T) {
	for _, format := range []string{"yaml", "json"} {
		text := kubectlList(t, 20, format)
		docs := documents(text)
		if len(docs) != 1 {
			t.Fatalf("%s: %d documents", format, len(docs))
		}
		parts := items(&docs[0])
		if len(parts) != 41 {
			t.Fatalf("%s: %d items", format, len(parts))
		}
		for i, p := range parts {
			if start := strings.Split(text, "\n")[p.line-1]; !strings.Contains(start, strings.SplitN(p.text, "\n", 2)[0]) {
				t.Errorf("%s: item %d is not on line %d: %q", format, i, p.line, start)
			}
		}
		r := newReader("")
		whole := r.chunk(&docs[0])
		m, problems, bad := r.manifest("f", text, nil)
		if bad || len(problems) > 0 || len(whole.problems) > 0 {
			t.Fatalf("%s: %q %q", format, problems, whole.problems)
		}
		for i := range whole.objects {
			a, b := whole.objects[i], m.objects[i]
			if a.key != b.key || !reflect.DeepEqual(a.value, b.value) {
				t.Errorf("%s: item %d is %+v by itself and %+v in the list", format, i, b, a)
			}
		}
		for i := range 20 {
			s, e := dumped(i)
			service, _ := r.service(s)
			slice, _ := r.slice(e)
			if got := []any{m.objects[2*i].value, m.objects[2*i+1].value}; !reflect.DeepEqual(got, []any{service, slice}) {
				t.Errorf("%s: got %+v, want %+v %+v", format, got, service, slice)
			}
		}
		again, _, _ := r.manifest("f", text, m)
		if again.objects[7].value != m.objects[7].value {
			t.Errorf("%s: unchanged items are read again", format)
		}
	}
}

func TestManyProblems(t *testing.T) {
	text := "kind: ServiceList\napiVersion: v1\nitems:\n" + strings.Repeat("- metadata: {name: a}\n  spec: {clusterIP: None, brandNew: 1}\n", 1000)
	_, problems, bad := newReader("").manifest("f.yaml", text, nil)
	if len(problems) != maxProblems+1 || bad {
		t.Fatalf("%d problems", len(problems))
	}
	if got, want := problems[maxProblems].Error(), "f.yaml: 950 problems more"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// Texts made to use up memory or the stack cost no more than other texts.
func TestBombs(t *testing.T) {
	bomb := "kind: Service\napiVersion: v1\nmetadata: {name: web}\na0: &a0 [x,x,x,x,x,x,x,x,x,x]\n"
	for i := range 12 {
		bomb += fmt.Sprintf("a%d: &a%d [%s]\n", i+1, i+1, strings.TrimSuffix(strings.Repeat(fmt.Sprintf("*a%d,", i), 10), ","))
	}
	texts := map[string]string{
		"aliases":     bomb,
		"a loop":      "kind: Service\nspec: &x\n  ports: *x\n",
		"deep YAML":   "kind: Service\nspec: " + strings.Repeat("[", 100000),
		"deep blocks": "kind: Service\nspec:" + strings.Repeat("\n- - - - - - - - - - - - - - - - - - - - - - - -", 50),
		"deep JSON":   `{"kind": "Service", "spec": ` + strings.Repeat("[", 1000000),
		"deep items":  `{"kind": "List", "items": ` + strings.Repeat(`[{"kind":"List","items":`, 100000),
	}
	for name, text := range texts {
		m, problems, bad := newReader("").manifest("f.yaml", text, nil)
		if !bad || len(problems) == 0 || len(m.objects) > 0 {
			t.Errorf("%s: %q", name, problems)
		}
	}
}

// FuzzManifest looks for texts that end the process, or that give other objects when they are read twice.
func FuzzManifest(f *testing.F) {
	for _, test := range manifestTests {
		f.Add(test.text)
	}
	f.Add(kubectlList(f, 1, "yaml"))
	f.Add(kubectlList(f, 1, "json"))
	f.Add("kind: EndpointsList\napiVersion: v1\nitems:\n- metadata: {name: e}\n  subsets: [{addresses: [{ip: 10.0.0.1}], ports: [{port: 1}]}]\n")
	path := filepath.Join(f.TempDir(), "f.yaml")
	f.Fuzz(func(t *testing.T, text string) {
		r := newReader("n1")
		m, problems, _ := r.manifest(path, text, nil)
		for _, p := range problems {
			if strings.ContainsAny(p.Error(), "\n\x00\x1b") {
				t.Errorf("a report has control characters: %q", p)
			}
		}
		again, _, _ := r.manifest(path, text, m)
		if len(again.objects) != len(m.objects) {
			t.Errorf("%d objects, then %d", len(m.objects), len(again.objects))
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, _, err := Load(path, "n1"); err != nil {
			t.Error(err)
		}
	})
}
