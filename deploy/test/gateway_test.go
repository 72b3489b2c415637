package deploy

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"github.com/verdict-proxy/verdict/internal/system/testkit"
)

// classSpec is what the spec of a GatewayClass may have.
type classSpec struct {
	ControllerName string `json:"controllerName"`
	Description    string `json:"description"`
	ParametersRef  *struct {
		Group     string `json:"group"`
		Kind      string `json:"kind"`
		Namespace string `json:"namespace"`
		Name      string `json:"name"`
	} `json:"parametersRef"`
}

// TestGatewayClasses: both classes are the controller's, and the parameters of the one are there.
func TestGatewayClasses(t *testing.T) {
	o, err := decode(kustomize(t, "../../test/testdata/gateway"))
	check(t, err)
	for _, name := range []string{"verdict", "verdict-cluster"} {
		var spec classSpec
		text, err := yaml.Marshal(o["GatewayClass/"+name].(*unstructured.Unstructured).Object["spec"])
		check(t, err)
		check(t, yaml.UnmarshalStrict(text, &spec))
		if spec.ControllerName != "verdict-proxy.github.io/gateway" || len(spec.Description) > 64 {
			t.Errorf("%s: %+v", name, spec)
		}
		ref := spec.ParametersRef
		if (ref != nil) != (name == "verdict-cluster") {
			t.Errorf("%s has the parameters %+v", name, ref)
		}
		if ref == nil {
			continue
		}
		config, ok := o[ref.Kind+"/"+ref.Name].(*corev1.ConfigMap)
		if !ok || config.Namespace != ref.Namespace || config.Data["serviceType"] != "ClusterIP" {
			t.Errorf("%s: there is no %+v", name, ref)
		}
	}
}

// TestGatewayWithoutCRDs: where there are no GatewayClasses, the chart makes none, and all else.
func TestGatewayWithoutCRDs(t *testing.T) {
	const values = anImage + "gateway: {enabled: true}"
	all := map[string]objects{}
	for _, kinds := range [][]string{nil, {gatewayClass}} {
		text, err := template(t, filepath.Join(chartDir, "k3s.yaml"), values, kinds...)
		check(t, err)
		all[strings.Join(kinds, "")], err = decode(text)
		check(t, err)
	}
	delete(all[gatewayClass], "GatewayClass/verdict")
	delete(all[gatewayClass], "GatewayClass/verdict-cluster")
	delete(all[gatewayClass], "ConfigMap/verdict-cluster")
	if len(all[""]) != len(all[gatewayClass]) || all[""]["ClusterRole/verdict-gateway"] == nil {
		t.Errorf("without CRDs there are %d objects, with them %d others than classes", len(all[""]),
			len(all[gatewayClass]))
	}
}

// TestGatewayRights: the roles allow the controller of Gateways and the collector in it what they ask for, and no more.
func TestGatewayRights(t *testing.T) {
	o, err := decode(kustomize(t, "../../test/testdata/gateway"))
	check(t, err)
	allowed := collectorRights(o)
	api := newGatewayAPI(t)
	runCollector(t, "gateway", api, func() {
		ask(t, &api.collectorAPI)
		missing := func() string {
			asked := askedOfCollector(&api.collectorAPI)
			return strings.Join(slices.DeleteFunc(slices.Clone(allowed), func(a string) bool {
				return slices.Contains(asked, a)
			}), ", ")
		}
		testkit.Eventually(t, time.Minute, "it asks for all that is allowed", func() bool { return missing() == "" }, missing)
	})
	for _, a := range askedOfCollector(&api.collectorAPI) {
		if !slices.Contains(allowed, a) {
			t.Errorf("%s is asked for, and not allowed", a)
		}
	}
}

// gatewayAPI is a collectorAPI that has Gateway API: a Gateway without a Service, one whose Service is another than it
// should be, and one that must have none.
type gatewayAPI struct {
	collectorAPI
	// kept are the objects by resource and by namespace/name.
	kept map[string]map[string]any
	// version is the last resourceVersion.
	version int
}

// gatewayObjects are those of gatewayAPI, by resource.
const gatewayObjects = `
gatewayclasses:
- metadata: {name: verdict-cluster}
  spec: {controllerName: verdict-proxy.github.io/gateway,
    parametersRef: {group: "", kind: ConfigMap, namespace: kube-system, name: verdict-cluster}}
gateways:
- metadata: {namespace: edge, name: db}
  spec: {gatewayClassName: verdict-cluster, listeners: [{name: db, protocol: TCP, port: 5432}]}
- metadata: {namespace: edge, name: old}
  spec: {gatewayClassName: verdict-cluster, listeners: [{name: web, protocol: HTTP, port: 80}]}
- metadata: {namespace: edge, name: time}
  spec: {gatewayClassName: verdict-cluster, listeners: [{name: ntp, protocol: UDP, port: 123}]}
tcproutes:
- metadata: {namespace: edge, name: db}
  spec: {parentRefs: [{name: db}], rules: [{backendRefs: [{namespace: shop, name: cart, port: 80}]}]}
udproutes:
- metadata: {namespace: edge, name: dns}
  spec: {parentRefs: [{name: db}], rules: [{backendRefs: [{name: dns, port: 53}]}]}
referencegrants:
- metadata: {namespace: shop, name: edge}
  spec: {from: [{group: gateway.networking.k8s.io, kind: TCPRoute, namespace: edge}], to: [{group: "", kind: Service}]}
namespaces:
- metadata: {name: edge}
- metadata: {name: shop}
services:
- metadata: {namespace: shop, name: cart}
  spec: {clusterIP: 10.43.0.9, ports: [{port: 80}]}
- metadata: {namespace: edge, name: old-verdict, ownerReferences: [{apiVersion: gateway.networking.k8s.io/v1,
    kind: Gateway, name: old, uid: gateways-edge-old, controller: true}]}
  spec: {clusterIP: 10.43.0.8, ports: [{port: 80}]}
- metadata: {namespace: edge, name: time-verdict, ownerReferences: [{apiVersion: gateway.networking.k8s.io/v1,
    kind: Gateway, name: time, uid: gateways-edge-time, controller: true}]}
  spec: {clusterIP: 10.43.0.6, ports: [{port: 80}]}
configmaps:
- metadata: {namespace: kube-system, name: verdict-cluster}
  data: {serviceType: ClusterIP}
customresourcedefinitions: []
`

func newGatewayAPI(t *testing.T) *gatewayAPI {
	t.Helper()
	a := &gatewayAPI{kept: map[string]map[string]any{}}
	var lists map[string][]map[string]any
	check(t, yaml.Unmarshal([]byte(gatewayObjects), &lists))
	for resource, list := range lists {
		a.kept[resource] = map[string]any{}
		for _, o := range list {
			a.put(resource, o)
		}
	}
	return a
}

// put keeps an object as an API server does.
func (a *gatewayAPI) put(resource string, o map[string]any) {
	meta := o["metadata"].(map[string]any)
	namespace, _ := meta["namespace"].(string)
	name, _ := meta["name"].(string)
	a.version++
	meta["uid"], meta["resourceVersion"] = strings.Trim(resource+"-"+namespace+"-"+name, "-"), fmt.Sprint(a.version)
	meta["generation"] = 1
	if spec, ok := o["spec"].(map[string]any); ok && resource == "services" && spec["clusterIP"] == nil {
		spec["clusterIP"], spec["clusterIPs"] = "10.43.0.7", []any{"10.43.0.7"}
	}
	a.kept[resource][namespace+"/"+name] = o
}

func (a *gatewayAPI) ServeHTTP(w http.ResponseWriter, q *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	if version, found := strings.CutPrefix(q.URL.Path, "/apis/gateway.networking.k8s.io/"); found &&
		!strings.Contains(version, "/") {
		a.discover(w, version)
		return
	}
	verb, _, rest := a.note(q)
	kept, known := a.kept[rest[0]]
	switch {
	case !known:
		a.collectorAPI.ServeHTTP(w, q)
	case verb == "watch" && q.URL.Query().Get("sendInitialEvents") != "":
		w.WriteHeader(http.StatusUnprocessableEntity) // as a server that cannot stream lists, so that it is asked for them
		fmt.Fprint(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Invalid","code":422}`)
	case verb == "watch":
		w.(http.Flusher).Flush()
		<-q.Context().Done()
	case verb == "list":
		a.mu.Lock()
		defer a.mu.Unlock()
		kind, version := gatewayKinds[rest[0]], "v1"
		if strings.HasPrefix(q.URL.Path, "/apis/") {
			version = "gateway.networking.k8s.io/v1"
		}
		writeJSON(w, map[string]any{"kind": kind + "List", "apiVersion": version,
			"metadata": map[string]any{"resourceVersion": fmt.Sprint(a.version)},
			"items":    slices.Collect(maps.Values(kept))})
	default:
		a.one(w, q, verb, rest)
	}
}

// gatewayKinds are the kinds of the resources that are listed.
var gatewayKinds = map[string]string{"gatewayclasses": "GatewayClass", "gateways": "Gateway", "tcproutes": "TCPRoute",
	"udproutes": "UDPRoute", "referencegrants": "ReferenceGrant", "services": "Service", "namespaces": "Namespace"}

// discover says which resources a version has.
func (a *gatewayAPI) discover(w http.ResponseWriter, version string) {
	resources := []any{}
	if version == "v1" {
		for _, name := range []string{"gatewayclasses", "gateways", "tcproutes", "udproutes", "referencegrants"} {
			resources = append(resources, map[string]any{"name": name, "kind": gatewayKinds[name]})
		}
	}
	writeJSON(w, map[string]any{"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version,
		"resources": resources})
}

// one answers a request about one object.
func (a *gatewayAPI) one(w http.ResponseWriter, q *http.Request, verb string, rest []string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	var body map[string]any
	_ = json.NewDecoder(q.Body).Decode(&body)
	path := strings.Split(q.URL.Path, "/")
	name := "/" + strings.Join(rest[1:min(len(rest), 2)], "")
	if i := slices.Index(path, "namespaces"); i >= 0 && rest[0] != "namespaces" {
		name = path[i+1] + name
	}
	o, exists := a.kept[rest[0]][name].(map[string]any)
	switch {
	case verb == "create":
		w.WriteHeader(http.StatusCreated)
		a.put(rest[0], body)
		o = body
	case !exists && rest[0] == "customresourcedefinitions":
		o = map[string]any{"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": map[string]any{
			"annotations": map[string]any{"gateway.networking.k8s.io/bundle-version": "v1.7.0"}}}
	case !exists:
		http.NotFound(w, q)
		return
	case verb == "patch":
		o = merged(o, body)
		a.put(rest[0], o)
	case verb == "delete":
		delete(a.kept[rest[0]], name)
	}
	writeJSON(w, o)
}

// merged is a JSON merge patch applied.
func merged(o, patch map[string]any) map[string]any {
	o = maps.Clone(o)
	for k, v := range patch {
		inner, both := v.(map[string]any)
		of, isMap := o[k].(map[string]any)
		switch {
		case v == nil:
			delete(o, k)
		case both && isMap:
			o[k] = merged(of, inner)
		default:
			o[k] = v
		}
	}
	return o
}

func writeJSON(w http.ResponseWriter, v any) { _ = json.NewEncoder(w).Encode(v) } // whoever asked may have left
