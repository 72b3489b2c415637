package watch

import (
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

func manifestOf(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

const changeNow = `
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop, uid: u1, creationTimestamp: "2026-01-02T03:04:05Z"}
spec:
  type: LoadBalancer
  clusterIPs: [10.96.0.1, "fd00::1"]
  healthCheckNodePort: 32000
  externalTrafficPolicy: Local
  ports:
  - {name: http, port: 80, nodePort: 30080}
  - {name: dns, port: 53, protocol: UDP, nodePort: 30053}
status:
  loadBalancer: {ingress: [{ip: 203.0.113.1}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: http, port: 8080}]
endpoints: [{addresses: [10.244.1.1]}, {addresses: [10.244.1.2]}]
---
apiVersion: v1
kind: Node
metadata: {name: n, labels: {topology.kubernetes.io/zone: a}}
status: {addresses: [{type: InternalIP, address: 192.0.2.1}]}
---
apiVersion: networking.k8s.io/v1
kind: ServiceCIDR
metadata: {name: kubernetes}
spec: {cidrs: [10.96.0.0/16]}
`

func changeBase(t *testing.T) *snapshot.Snapshot {
	t.Helper()
	s, problems, err := Load(t.Context(), manifestOf(t, "now.yaml", changeNow), "n")
	if err != nil || len(problems) > 0 {
		t.Fatal(problems, err)
	}
	return s
}

// TestChangeInherits: what the API server allocates and keeps need not be in a manifest.
func TestChangeInherits(t *testing.T) {
	now := changeBase(t)
	c, err := LoadChange(t.Context(), ChangeFiles{NodeName: "n", Apply: []string{manifestOf(t, "c.yaml", `
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec:
  type: LoadBalancer
  externalTrafficPolicy: Local
  sessionAffinity: ClientIP
  ports:
  - {name: dns, port: 54, protocol: UDP}
  - {name: http, port: 80}
  - {name: other, port: 81, nodePort: 30081}
`)}}, now)
	if err != nil {
		t.Fatal(err)
	}
	name := snapshot.Name{Namespace: "shop", Name: "web"}
	got, was := c.Delta.Services[name], now.Services[name]
	want := *was
	want.Affinity = 3 * time.Hour
	want.Ports = []snapshot.Port{{Name: "dns", Protocol: snapshot.UDP, Port: 54, NodePort: 30053},
		{Name: "http", Protocol: snapshot.TCP, Port: 80, NodePort: 30080},
		{Name: "other", Protocol: snapshot.TCP, Port: 81, NodePort: 30081}}
	if got == nil || !sameService(got, &want) {
		t.Errorf("got %+v\nwant %+v", got, want)
	}
	if len(c.Objects) != 1 || c.Objects[0] != (ChangedObject{"Service shop/web", "changed"}) {
		t.Errorf("objects: %v", c.Objects)
	}
}

// TestChange: objects are created, replaced and deleted by name; those that stay what they are count as such.
func TestChange(t *testing.T) {
	now := changeBase(t)
	same := manifestOf(t, "same.yaml", changeNow)
	c, err := LoadChange(t.Context(), ChangeFiles{NodeName: "n", Apply: []string{same}}, now)
	if err != nil || !c.Delta.Empty() || c.Same != 4 || len(c.Objects) != 0 {
		t.Errorf("the same objects: %+v, %v", c, err)
	}
	// A manifest to delete needs no more than names, and may be wrong otherwise.
	gone := manifestOf(t, "gone.yaml", `
kind: Service
apiVersion: v1
metadata: {name: web, namespace: shop}
spec: {clusterIP: x}
---
kind: Service
apiVersion: v1
metadata: {name: never}
`)
	create := manifestOf(t, "create.yaml", `
kind: Service
apiVersion: v1
metadata: {name: new}
spec: {clusterIP: 10.96.0.9, ports: [{port: 1}]}
---
{kind: Deployment, apiVersion: apps/v1, metadata: {name: d}}
---
kind: Node
apiVersion: v1
metadata: {name: n, labels: {topology.kubernetes.io/zone: b}}
---
kind: Node
apiVersion: v1
metadata: {name: other}
---
kind: ServiceCIDR
apiVersion: networking.k8s.io/v1
metadata: {name: more}
spec: {cidrs: [10.97.0.0/16]}
`)
	c, err = LoadChange(t.Context(), ChangeFiles{NodeName: "n", Apply: []string{create}, Delete: []string{gone},
		Gone: []string{"EndpointSlice/shop/web-1"}}, now)
	if err != nil {
		t.Fatal(err)
	}
	var said []string
	for _, o := range c.Objects {
		said = append(said, o.Object+" "+o.Verb)
	}
	if want := []string{"EndpointSlice shop/web-1 deleted", "Node n changed", "Service default/new created",
		"Service shop/web deleted", "ServiceCIDR more created"}; !slices.Equal(said, want) || c.Others != 1 {
		t.Errorf("%q, others %d; want %q", said, c.Others, want)
	}
	if len(c.Notes) != 1 || !strings.Contains(c.Notes[0], "Service default/never is not there") {
		t.Errorf("notes: %q", c.Notes)
	}
	change := now.Apply(c.Delta)
	if !change.Globals || len(now.Services) != 1 || len(now.Slices) != 0 || now.Node.Zone != "b" ||
		!slices.Contains(now.ServiceCIDRs, netip.MustParsePrefix("10.97.0.0/16")) || len(now.ServiceCIDRs) != 2 {
		t.Errorf("%v: %v, %v, %v", change, slices.Collect(maps.Keys(now.Services)), now.Node, now.ServiceCIDRs)
	}
}

// TestChangeErrors: what is wrong is named by file, object and field, and nothing is planned.
func TestChangeErrors(t *testing.T) {
	web := "kind: Service\napiVersion: v1\nmetadata: {name: web, namespace: shop}\n"
	created := strings.Replace(web, "name: web, namespace: shop", "name: new", 1)
	for _, test := range [][2]string{
		{web + "spec: {ports: [{port: 70000}]}\n", "c.yaml:4: Service shop/web: spec.ports[0].port: 70000 is not a port"},
		{created + "spec: {ports: [{port: 1}]}\n", "Service default/new: spec.clusterIP: no cluster IP"},
		{web + "spec: {ports: []}\n---\n" + web, "c.yaml:6: Service shop/web: it is in this change twice, first in "},
		{"kind: TCPRoute\napiVersion: gateway.networking.k8s.io/v1\nmetadata: {name: db, namespace: shop}\n",
			"c.yaml:1: TCPRoute shop/db: kind: a proxy reads no TCPRoute: plan the Service of its Gateway"},
		{"a: [", "c.yaml:1: "},
		{"diff -u -N a b\n--- /tmp/LIVE-1/x\n+++ /tmp/MERGED-2/x\n@@", "this is a diff"},
		{"--- /tmp/LIVE-1/x\t2026\n+++ /tmp/MERGED-2/x\n", "kubectl apply --dry-run=server"},
	} {
		path := manifestOf(t, "c.yaml", test[0])
		if _, err := LoadChange(t.Context(), ChangeFiles{NodeName: "n", Apply: []string{path}}, changeBase(t)); err == nil ||
			!strings.Contains(err.Error(), test[1]) || !strings.Contains(err.Error(), path) {
			t.Errorf("%q: %v; want %q", test[0], err, test[1])
		}
	}
	for ref, want := range map[string]string{
		"Service/web": "write KIND/NAMESPACE/NAME", "Pod/a/b": `a proxy reads no "Pod"`, "Service//x": "is no object",
		"Node/a/b": "is no object", "ServiceCIDR//k": "is not known",
	} {
		if _, err := LoadChange(t.Context(), ChangeFiles{NodeName: "n", Gone: []string{ref}}, changeBase(t)); err == nil ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v; want %q", ref, err, want)
		}
	}
	many := strings.Repeat("kind: Service\napiVersion: v1\nmetadata: {name: a}\nspec: {type: x}\n---\n", 1000)
	files := ChangeFiles{Apply: []string{manifestOf(t, "m.yaml", many)}}
	if _, err := LoadChange(t.Context(), files, changeBase(t)); err == nil ||
		len(err.Error()) > 64<<10 {
		t.Errorf("the error of many problems has %d bytes", len(err.Error()))
	}
}

// TestGoneObjects: what manifests name can be said in a few words.
func TestGoneObjects(t *testing.T) {
	refs, err := GoneObjects(t.Context(), []string{manifestOf(t, "now.yaml", changeNow)})
	want := []string{"EndpointSlice/shop/web-1", "Node//n", "Service/shop/web", "ServiceCIDR//kubernetes"}
	if err == nil || !slices.Equal(refs, want) { // the ServiceCIDR cannot be planned
		t.Errorf("%q, %v; want %q", refs, err, want)
	}
}

// TestChangeEndpoints: an Endpoints object counts only where there are no EndpointSlices.
func TestChangeEndpoints(t *testing.T) {
	now := changeBase(t)
	of := func(service string) string {
		return manifestOf(t, "e.yaml", "kind: Endpoints\napiVersion: v1\nmetadata: {name: "+service+", namespace: shop}\n"+
			"subsets: [{addresses: [{ip: 10.244.9.9}], ports: [{name: http, port: 1}]}]\n")
	}
	c, err := LoadChange(t.Context(), ChangeFiles{Apply: []string{of("web")}}, now)
	if err != nil || !c.Delta.Empty() || len(c.Notes) != 1 {
		t.Errorf("%+v, %v", c, err)
	}
	c, err = LoadChange(t.Context(), ChangeFiles{Apply: []string{of("api")}}, now)
	if err != nil || len(c.Delta.Slices) != 1 || c.Objects[0].Verb != "created" {
		t.Errorf("%+v, %v", c, err)
	}
	now.Apply(c.Delta)
	c, err = LoadChange(t.Context(), ChangeFiles{Delete: []string{of("api")}}, now)
	if now.Apply(c.Delta); err != nil || c.Objects[0].Verb != "deleted" || len(now.Slices) != 1 {
		t.Errorf("%+v, %v", c, err)
	}
}

// TestChangeText: several files, of YAML and JSON, are one manifest with the same objects.
func TestChangeText(t *testing.T) {
	json := manifestOf(t, "a.json", `{"kind": "Service", "apiVersion": "v1", "metadata": {"name": "new"},
		"spec": {"clusterIP": "10.96.0.9", "ports": [{"port": 1}]}}`)
	text, err := ChangeText(t.Context(),
		[]string{json, manifestOf(t, "now.yaml", changeNow), json[:len(json)-len("/a.json")]})
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(text, "10.96.0.9"); n != 2 {
		t.Errorf("the file and its directory are there %d times", n)
	}
	if text, err = ChangeText(t.Context(), []string{json, manifestOf(t, "now.yaml", changeNow)}); err != nil {
		t.Fatal(err)
	}
	files := ChangeFiles{NodeName: "n", Apply: []string{manifestOf(t, "all.yaml", text)}}
	c, err := LoadChange(t.Context(), files, snapshot.New())
	if err != nil || len(c.Objects) != 5 {
		t.Errorf("%+v, %v", c, err)
	}
	large := manifestOf(t, "large.yaml", strings.Repeat("#", maxChangeText+1))
	for _, path := range []string{large, large + ".gone"} {
		if _, err := ChangeText(t.Context(), []string{path}); err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%v", err)
		}
	}
}
