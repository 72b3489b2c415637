package gateway

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"github.com/verdict-proxy/verdict/internal/proxy/everywhere"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// fakeAPI is an API server that stores any objects, with versions and generations, and streams their changes.
type fakeAPI struct {
	*httptest.Server
	mu      sync.Mutex
	version int
	objects map[string]map[string]any // by resource/namespace/name
	events  []fakeEvent
	news    chan struct{}
	// served are the resources of Gateway API by version.
	served map[string][]string
	// fail, if not nil, returns a status other than 0 for requests that fail.
	fail func(method, path string) int
	// writes are those that were made, as "PATCH gateways/edge/db/status", and requests counts all.
	writes   []string
	requests int
	watches  map[string]int
	// late is how long after its event a patch is answered.
	late time.Duration
}

type fakeEvent struct {
	version  int
	resource string
	kind     string
	object   []byte
}

var kinds = map[string]string{classes: "GatewayClass", gateways: "Gateway", tcpRoutes: "TCPRoute",
	udpRoutes: "UDPRoute", "referencegrants": "ReferenceGrant", "namespaces": "Namespace", services: "Service",
	"configmaps": "ConfigMap", endpointSlices: "EndpointSlice"}

func newFakeAPI(t testing.TB) *fakeAPI {
	f := &fakeAPI{version: 100, objects: map[string]map[string]any{}, news: make(chan struct{}),
		served:  map[string][]string{"v1": {classes, gateways, tcpRoutes, udpRoutes, "referencegrants"}},
		watches: map[string]int{}}
	f.Server = httptest.NewServer(f)
	t.Cleanup(func() {
		f.CloseClientConnections()
		f.Close()
	})
	return f
}

func refuse(w http.ResponseWriter, code int, reason metav1.StatusReason) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"},
		Status: "Failure", Code: int32(code), Reason: reason, Message: "refused: " + string(reason)})
}

var reasons = map[int]metav1.StatusReason{404: metav1.StatusReasonNotFound, 409: metav1.StatusReasonConflict,
	422: metav1.StatusReasonInvalid, 403: metav1.StatusReasonForbidden, 503: metav1.StatusReasonServiceUnavailable}

func (f *fakeAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	f.requests++
	code := 0
	if f.fail != nil {
		code = f.fail(r.Method, r.URL.Path)
	}
	f.mu.Unlock()
	if code != 0 {
		refuse(w, code, reasons[code])
		return
	}
	parts := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	version := "core"
	if parts[0] == "api" {
		parts = parts[2:]
	} else if version = parts[2]; len(parts) == 3 {
		f.discover(w, version)
		return
	} else {
		if parts[1] == "discovery.k8s.io" {
			version = "core"
		}
		parts = parts[3:]
	}
	if parts[0] == "customresourcedefinitions" {
		fmt.Fprint(w, `{"metadata":{"annotations":{"gateway.networking.k8s.io/bundle-version":"v1.7.0"}}}`)
		return
	}
	namespace := ""
	if parts[0] == "namespaces" && len(parts) > 2 {
		namespace, parts = parts[1], parts[2:]
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if version != "core" && !slices.Contains(f.served[version], parts[0]) {
		refuse(w, 404, reasons[404])
		return
	}
	w.Header().Set("Content-Type", "application/json")
	f.serve(w, r, version, parts[0], namespace, parts[1:])
}

func (f *fakeAPI) discover(w http.ResponseWriter, version string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	list := metav1.APIResourceList{}
	for _, r := range f.served[version] {
		list.APIResources = append(list.APIResources, metav1.APIResource{Name: r}, metav1.APIResource{Name: r + "/status"})
	}
	if len(list.APIResources) == 0 {
		refuse(w, 404, reasons[404])
		return
	}
	_ = json.NewEncoder(w).Encode(list)
}

// serve answers a request for objects. The caller has locked mu.
func (f *fakeAPI) serve(w http.ResponseWriter, r *http.Request, version, resource, namespace string, rest []string) {
	q := r.URL.Query()
	key := resource + "/" + namespace + "/"
	var body map[string]any
	if r.Method != http.MethodGet {
		_ = json.NewDecoder(r.Body).Decode(&body)
	}
	switch {
	case r.Method == http.MethodGet && len(rest) == 0 && q.Get("sendInitialEvents") != "":
		refuse(w, 400, metav1.StatusReasonBadRequest)
	case r.Method == http.MethodGet && len(rest) == 0 && q.Get("watch") != "":
		f.watch(w, r, resource)
	case r.Method == http.MethodGet && len(rest) == 0:
		f.list(w, version, resource)
	case r.Method == http.MethodPost:
		name, _ := body["metadata"].(map[string]any)["name"].(string)
		f.create(w, key+name, body)
	case f.objects[key+rest[0]] == nil:
		refuse(w, 404, reasons[404])
	case r.Method == http.MethodGet:
		_ = json.NewEncoder(w).Encode(f.objects[key+rest[0]])
	case r.Method == http.MethodDelete:
		f.writes = append(f.writes, "DELETE "+key+rest[0])
		f.remove(key + rest[0])
		fmt.Fprint(w, `{"kind":"Status","apiVersion":"v1","status":"Success"}`)
	default:
		f.patch(w, key+rest[0], strings.Join(rest[1:], "/"), body)
	}
}

func (f *fakeAPI) list(w http.ResponseWriter, version, resource string) {
	items := []any{}
	for _, k := range slices.Sorted(maps.Keys(f.objects)) {
		if strings.HasPrefix(k, resource+"/") {
			items = append(items, f.objects[k])
		}
	}
	_ = json.NewEncoder(w).Encode(map[string]any{
		"kind": kinds[resource] + "List", "apiVersion": groupOf(resource, version),
		"metadata": map[string]any{"resourceVersion": strconv.Itoa(f.version)}, "items": items})
}

func groupOf(resource, version string) string {
	if resource == services || resource == "namespaces" || resource == "configmaps" {
		return "v1"
	}
	if resource == endpointSlices {
		return "discovery.k8s.io/v1"
	}
	if version == "" {
		version = "v1"
	}
	return "gateway.networking.k8s.io/" + version
}

// watch streams events until the client goes. The caller has locked mu, which it gives back meanwhile.
func (f *fakeAPI) watch(w http.ResponseWriter, r *http.Request, resource string) {
	f.watches[resource]++
	from, _ := strconv.Atoi(r.URL.Query().Get("resourceVersion"))
	w.(http.Flusher).Flush()
	for next := 0; ; {
		for ; next < len(f.events); next++ {
			if e := f.events[next]; e.resource == resource && e.version > from {
				fmt.Fprintf(w, "{\"type\":%q,\"object\":%s}\n", e.kind, e.object)
			}
		}
		w.(http.Flusher).Flush()
		news := f.news
		f.mu.Unlock()
		select {
		case <-r.Context().Done():
			f.mu.Lock()
			f.watches[resource]--
			return
		case <-news:
		}
		f.mu.Lock()
	}
}

// store writes an object's new value and tells those who watch. The caller has locked mu.
func (f *fakeAPI) store(key, kind string, o map[string]any) {
	f.version++
	o["metadata"].(map[string]any)["resourceVersion"] = strconv.Itoa(f.version)
	text, _ := json.Marshal(o)
	var clone map[string]any
	_ = json.Unmarshal(text, &clone)
	if f.objects[key] = clone; kind == "DELETED" {
		delete(f.objects, key)
	}
	f.events = append(f.events, fakeEvent{f.version, strings.Split(key, "/")[0], kind, text})
	close(f.news)
	f.news = make(chan struct{})
}

func (f *fakeAPI) create(w http.ResponseWriter, key string, o map[string]any) {
	if f.objects[key] != nil {
		refuse(w, 409, metav1.StatusReasonAlreadyExists)
		return
	}
	f.writes = append(f.writes, "POST "+key)
	f.add(key, o)
	w.WriteHeader(http.StatusCreated)
	_ = json.NewEncoder(w).Encode(f.objects[key])
}

// add gives an object what a server does, and stores it. The caller has locked mu.
func (f *fakeAPI) add(key string, o map[string]any) {
	meta := o["metadata"].(map[string]any)
	resource := strings.Split(key, "/")[0]
	o["kind"], o["apiVersion"] = kinds[resource], groupOf(resource, "")
	if old := f.objects[key]; old != nil {
		meta["uid"] = old["metadata"].(map[string]any)["uid"]
		meta["generation"] = old["metadata"].(map[string]any)["generation"].(float64) + 1
		o["status"] = old["status"]
		f.store(key, "MODIFIED", o)
		return
	}
	meta["uid"], meta["generation"] = fmt.Sprint("uid-", f.version), 1.0
	meta["creationTimestamp"] = time.Unix(1_700_000_000+int64(f.version), 0).UTC().Format(time.RFC3339)
	if spec, ok := o["spec"].(map[string]any); ok && resource == services && spec["clusterIP"] == nil {
		ip := fmt.Sprintf("10.96.%d.%d", f.version/250%250, f.version%250+1)
		spec["clusterIP"], spec["clusterIPs"] = ip, []any{ip}
	}
	f.store(key, "ADDED", o)
}

func (f *fakeAPI) patch(w http.ResponseWriter, key, sub string, body map[string]any) {
	has := f.objects[key]
	meta := has["metadata"].(map[string]any)
	sent, _ := body["metadata"].(map[string]any)
	if v, ok := sent["resourceVersion"]; ok && v != meta["resourceVersion"] {
		refuse(w, 409, metav1.StatusReasonConflict)
		return
	}
	text, _ := json.Marshal(has)
	var o map[string]any
	_ = json.Unmarshal(text, &o)
	if sub == "status" {
		body = map[string]any{"status": body["status"]}
	} else {
		delete(body, "status")
	}
	apply(o, body)
	f.writes = append(f.writes, strings.TrimSuffix("PATCH "+key+"/"+sub, "/"))
	if !reflect.DeepEqual(o["spec"], has["spec"]) {
		o["metadata"].(map[string]any)["generation"] = meta["generation"].(float64) + 1
	}
	f.store(key, "MODIFIED", o)
	text, _ = json.Marshal(f.objects[key])
	f.mu.Unlock()
	time.Sleep(f.late)
	f.mu.Lock()
	_, _ = w.Write(text)
}

// apply applies a merge patch.
func apply(to, patch map[string]any) {
	for k, v := range patch {
		inner, isMap := v.(map[string]any)
		has, both := to[k].(map[string]any)
		switch {
		case v == nil:
			delete(to, k)
		case isMap && both:
			apply(has, inner)
		default:
			to[k] = v
		}
	}
}

func (f *fakeAPI) remove(key string) {
	if o := f.objects[key]; o != nil {
		f.store(key, "DELETED", o)
	}
}

// put stores objects of YAML, separated by lines of ---.
func (f *fakeAPI) put(t testing.TB, text string) {
	t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, document := range strings.Split(text, "\n---\n") {
		var o map[string]any
		if err := yaml.Unmarshal([]byte(document), &o); err != nil {
			t.Fatal(err)
		}
		meta := o["metadata"].(map[string]any)
		for resource, kind := range kinds {
			if kind == o["kind"] {
				namespace, _ := meta["namespace"].(string)
				f.add(resource+"/"+namespace+"/"+meta["name"].(string), o)
			}
		}
	}
}

// drop deletes an object, as others do.
func (f *fakeAPI) drop(key string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.remove(key)
}

// get decodes an object, and says whether it is there.
func (f *fakeAPI) get(key string, into any) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	text, _ := json.Marshal(f.objects[key])
	return f.objects[key] != nil && json.Unmarshal(text, into) == nil
}

// written returns the writes so far, and forgets them.
func (f *fakeAPI) written() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	w := f.writes
	f.writes = nil
	return w
}

// count counts all requests.
func (f *fakeAPI) count() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.requests
}

// nodes are those of a cluster, as a collector asks them.
type nodes struct {
	mu sync.Mutex
	// lag are Services that a node does not have; asked counts the questions.
	lag   map[string]bool
	asked map[string]int
}

func (n *nodes) set(service string, lags bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.lag[service] = lags
}

func (n *nodes) lags(service string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.lag[service]
}

func (n *nodes) ask(ctx context.Context, s snapshot.Name, timeout time.Duration) everywhere.Answer {
	n.mu.Lock()
	n.asked[s.String()]++
	n.mu.Unlock()
	for end := time.Now().Add(timeout); n.lags(s.String()); time.Sleep(5 * time.Millisecond) {
		if ctx.Err() != nil || time.Now().After(end) {
			return everywhere.Answer{Nodes: 3, Missing: 1, MissingNodes: []string{"node-2"}}
		}
	}
	return everywhere.Answer{Everywhere: true, Nodes: 3}
}

// rig is a controller with its cluster.
type rig struct {
	*fakeAPI
	nodes *nodes
	// stop ends the controller.
	stop       func()
	controller *Controller
}

func newRig(t testing.TB) *rig {
	r := &rig{fakeAPI: newFakeAPI(t), nodes: &nodes{lag: map[string]bool{}, asked: map[string]int{}}}
	r.put(t, world1)
	return r
}

// lead starts a controller, or another one.
func (r *rig) lead(t *testing.T) {
	t.Helper()
	r.leadWith(t, slog.New(slog.NewTextHandler(t.Output(), nil)))
}

// leadWith is lead with a log.
func (r *rig) leadWith(t testing.TB, log *slog.Logger) {
	t.Helper()
	c, err := New(&rest.Config{Host: r.URL}, log, nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { c.Lead(ctx, r.nodes.ask) })
	r.controller, r.stop = c, sync.OnceFunc(func() { cancel(); running.Wait() })
	t.Cleanup(r.stop)
}

// world1 has a class whose Gateways have cluster IPs, and two Services.
const world1 = `kind: Namespace
metadata: {name: edge}
---
kind: Namespace
metadata: {name: shop}
---
kind: GatewayClass
metadata: {name: verdict}
spec:
  controllerName: verdict-proxy.github.io/gateway
  parametersRef: {group: "", kind: ConfigMap, namespace: edge, name: verdict}
---
kind: ConfigMap
metadata: {namespace: edge, name: verdict}
data: {serviceType: ClusterIP}
---
kind: Service
metadata: {namespace: shop, name: db}
spec: {type: ClusterIP, ports: [{port: 5432, protocol: TCP}]}
---
kind: Service
metadata: {namespace: shop, name: db-next}
spec: {type: ClusterIP, ports: [{port: 5432, protocol: TCP}]}`
