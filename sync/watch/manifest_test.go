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
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/verdict-proxy/verdict/internal/system/yamltree"
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

// manifestTest is what people write, what of it is used, and what they are told.
type manifestTest struct {
	name, text        string
	objects, problems []string
	bad               bool
}

// manifestTests reads testdata/manifests.txt: after a line "==== name" the manifest, then what is expected of it in
// lines that begin with "==> ". A text file can't have those that stand here.
func manifestTests(t testing.TB) []manifestTest {
	tests := []manifestTest{
		{
			name:    "carriage returns and a byte order mark",
			text:    "\uFEFF" + strings.ReplaceAll(serviceYAML+"---\n"+serviceYAML, "\n", "\r\n"),
			objects: []string{"Service default/web", "Service default/web"},
		},
		{
			name:     "not UTF-8",
			text:     "kind: Service\nmetadata: {name: \xff\xfe}\n",
			problems: []string{"f.yaml:2: Service: not valid YAML: invalid leading UTF-8 octet"},
			bad:      true,
		},
		{
			name:     "a control character for a kind",
			text:     "kind: a\x00\n",
			problems: []string{`f.yaml:1: not valid YAML: control characters are not allowed`},
			bad:      true,
		},
	}
	data, err := os.ReadFile("testdata/manifests.txt")
	must(t, err)
	for _, block := range strings.Split("\n"+string(data), "\n==== ")[1:] {
		name, text, _ := strings.Cut(strings.TrimRight(block, "\n"), "\n")
		text, expected, _ := strings.Cut("\n"+text+"\n", "\n==> ")
		test := manifestTest{name: name, text: strings.TrimPrefix(text+"\n", "\n")}
		for _, line := range strings.Split(strings.TrimSpace(expected), "\n==> ") {
			switch what, rest, _ := strings.Cut(line, " "); what {
			case "object":
				test.objects = append(test.objects, rest)
			case "report":
				test.problems = append(test.problems, rest)
			case "bad":
				test.bad = true
			}
		}
		tests = append(tests, test)
	}
	return tests
}

func TestManifest(t *testing.T) {
	for _, test := range manifestTests(t) {
		t.Run(test.name, func(t *testing.T) {
			m, problems, bad := newReader("n1").manifest("f.yaml", test.text, nil, nil)
			var objects []string
			for _, o := range m.objects {
				objects = append(objects, objectName(o.key.kind, o.key.name))
			}
			if !slices.Equal(objects, test.objects) {
				t.Errorf("objects %q, want %q", objects, test.objects)
			}
			if !slices.Equal(lines(problems), test.problems) {
				t.Errorf("reported:\n%s\nwant:\n%s", strings.Join(lines(problems), "\n"), strings.Join(test.problems, "\n"))
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
	m, problems, _ := newReader("").manifest("f.yaml", text, nil, nil)
	service := webService()
	service.Ports = []snapshot.Port{{Protocol: snapshot.TCP, Port: 80}, {Name: "dns", Protocol: snapshot.UDP, Port: 53}}
	slice := webSlice()
	slice.Name.Name, slice.Ports[0].Name = "web-1", ""
	if want := []any{service, slice}; !reflect.DeepEqual([]any{m.objects[0].value, m.objects[1].value},
		want) || len(problems) > 0 {
		t.Errorf("got %+v %+v %q", m.objects[0].value, m.objects[1].value, problems)
	}
}

// kubectlList is n Services with a slice of ten endpoints each, and one Pod, as kubectl prints it with -o yaml or -o
// json.
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
	s.Name, s.Namespace, s.UID, s.ResourceVersion, s.CreationTimestamp = fmt.Sprintf("svc-%05d", i), fmt.Sprintf("ns-%d",
		i%50), uid, "12345", metav1.Date(2026, 1, 1, 0, 0, i, 0, time.UTC)
	s.Labels = map[string]string{"app": "x", "app.kubernetes.io/name": "y", "version": "1.20"}
	s.Annotations = map[string]string{corev1.LastAppliedConfigAnnotation: `{"apiVersion":"v1","kind":"Service",` +
		`"metadata":{"annotations":{},"labels":{"app":"x"},"name":"svc","namespace":"ns"},"spec":{"ports":[{"port":80}]}}` +
		"\n"}
	s.Spec.ClusterIP = fmt.Sprintf("10.%d.%d.%d", 96+i/60000, i/250%240, i%250+1)
	s.Spec.ClusterIPs = []string{s.Spec.ClusterIP}
	s.Spec.IPFamilies, s.Spec.IPFamilyPolicy = []corev1.IPFamily{"IPv4"}, new(corev1.IPFamilyPolicySingleStack)
	s.Spec.Selector = map[string]string{"app": "x"}
	e := apiSlice()
	e.TypeMeta = metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"}
	e.Name, e.Namespace, e.UID, e.ResourceVersion, e.CreationTimestamp = s.Name+"-abcde", s.Namespace, uid, "12345",
		metav1.Date(2026, 1, 1, 0, 0, i, 0, time.UTC)
	e.Labels = map[string]string{"kubernetes.io/service-name": s.Name,
		"endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io"}
	e.Annotations = map[string]string{"endpoints.kubernetes.io/last-change-trigger-time": "2026-01-01T00:00:00Z"}
	e.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Service", Name: s.Name, UID: uid,
		Controller: new(true)}}
	e.Endpoints = nil
	for j := range 10 {
		e.Endpoints = append(e.Endpoints, discoveryv1.Endpoint{
			Addresses:  []string{fmt.Sprintf("10.%d.%d.%d", 1+i/6000, i/24%250, i%24*10+j+1)},
			Conditions: discoveryv1.EndpointConditions{Ready: new(true), Serving: new(true), Terminating: new(false)},
			NodeName:   new(fmt.Sprintf("node-%d", (i+j)%500)), Zone: new("zone-a"),
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
		docs := yamltree.Documents(text)
		if len(docs) != 1 {
			t.Fatalf("%s: %d documents", format, len(docs))
		}
		parts := docs[0].Items()
		if len(parts) != 41 {
			t.Fatalf("%s: %d items", format, len(parts))
		}
		for i, p := range parts {
			if start := strings.Split(text, "\n")[p.Line-1]; !strings.Contains(start, strings.SplitN(p.Text, "\n", 2)[0]) {
				t.Errorf("%s: item %d is not on line %d: %q", format, i, p.Line, start)
			}
		}
		r := newReader("")
		whole := r.chunk(&docs[0])
		m, problems, bad := r.manifest("f", text, nil, nil)
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
			service, _ := r.service(s, nil)
			slice, _ := r.slice(e, nil)
			if got := []any{m.objects[2*i].value, m.objects[2*i+1].value}; !reflect.DeepEqual(got, []any{service, slice}) {
				t.Errorf("%s: got %+v %+v, want %+v %+v", format, got[0], got[1], service, slice)
			}
		}
		again, _, _ := r.manifest("f", text, m, m.byKey())
		if again.objects[7].value != m.objects[7].value {
			t.Errorf("%s: unchanged items are read again", format)
		}
	}
}

func TestManyProblems(t *testing.T) {
	text := "kind: ServiceList\napiVersion: v1\nitems:\n" + strings.Repeat("- metadata: {name: a}\n  spec: {clusterIP: "+
		"None, brandNew: 1}\n", 1000)
	_, problems, bad := newReader("").manifest("f.yaml", text, nil, nil)
	if len(problems) != maxProblems+1 || bad {
		t.Fatalf("%d problems", len(problems))
	}
	if got, want := problems[maxProblems].Error(), "f.yaml: ... and 950 more problems"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// Texts made to use up memory or the stack cost no more than other texts.
func TestBombs(t *testing.T) {
	bomb := "kind: Service\napiVersion: v1\nmetadata: {name: web}\na0: &a0 [x,x,x,x,x,x,x,x,x,x]\n"
	for i := range 12 {
		bomb += fmt.Sprintf("a%d: &a%d [%s]\n", i+1, i+1,
			strings.TrimSuffix(strings.Repeat(fmt.Sprintf("*a%d,", i), 10), ","))
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
		m, problems, bad := newReader("").manifest("f.yaml", text, nil, nil)
		if !bad || len(problems) == 0 || len(m.objects) > 0 {
			t.Errorf("%s: %q", name, problems)
		}
	}
}

// FuzzManifest looks for texts that end the process, or that give other objects when they are read twice.
func FuzzManifest(f *testing.F) {
	for _, test := range manifestTests(f) {
		f.Add(test.text)
	}
	f.Add(kubectlList(f, 1, "yaml"))
	f.Add(kubectlList(f, 1, "json"))
	f.Add("kind: EndpointsList\napiVersion: v1\nitems:\n- metadata: {name: e}\n" +
		"  subsets: [{addresses: [{ip: 10.0.0.1}], ports: [{port: 1}]}]\n")
	path := filepath.Join(f.TempDir(), "f.yaml")
	f.Fuzz(func(t *testing.T, text string) {
		r := newReader("n1")
		m, problems, _ := r.manifest(path, text, nil, nil)
		for _, p := range problems {
			if strings.ContainsAny(p.Error(), "\n\x00\x1b") {
				t.Errorf("a report has control characters: %q", p)
			}
		}
		again, _, _ := r.manifest(path, text, m, m.byKey())
		if len(again.objects) != len(m.objects) {
			t.Errorf("%d objects, then %d", len(m.objects), len(again.objects))
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, _, err := Load(t.Context(), path, "n1"); err != nil {
			t.Error(err)
		}
	})
}
