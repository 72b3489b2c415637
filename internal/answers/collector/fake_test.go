package collector

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/verdict-proxy/verdict/internal/proxy/everywhere"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// fakeAPI is an API server with what a collector asks for.
type fakeAPI struct {
	*httptest.Server
	mu       sync.Mutex
	version  int
	services map[snapshot.Name]*corev1.Service
	slices   map[snapshot.Name][]discoveryv1.EndpointSlice
	pods     []corev1.Pod
	leases   map[string]*coordinationv1.Lease // by namespace/name
	// revoked are tokens that are not valid, whatever they say. down has every request fail.
	revoked map[string]bool
	down    bool
	// asked counts requests by method and resource, as "GET services".
	asked map[string]int
}

var (
	theDaemonSet = snapshot.Name{Namespace: "kube-system", Name: "verdict"}
	theLease     = snapshot.Name{Namespace: "kube-system", Name: "verdict-collector"}
	cart         = snapshot.Name{Namespace: "shop", Name: "cart"}
)

func newFakeAPI(t testing.TB, nodes ...string) *fakeAPI {
	f := &fakeAPI{version: 100, services: map[snapshot.Name]*corev1.Service{},
		slices: map[snapshot.Name][]discoveryv1.EndpointSlice{}, leases: map[string]*coordinationv1.Lease{},
		revoked: map[string]bool{}, asked: map[string]int{}}
	for _, n := range nodes {
		f.addNode(n)
	}
	f.Server = httptest.NewServer(f)
	t.Cleanup(f.Close)
	return f
}

// addNode adds a node with its Lease and its pod of the DaemonSet.
func (f *fakeAPI) addNode(name string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	p := corev1.Pod{Spec: corev1.PodSpec{NodeName: name}}
	p.Namespace, p.Name, p.Labels = theDaemonSet.Namespace, "verdict-"+name, map[string]string{"app": "verdict"}
	p.OwnerReferences = []metav1.OwnerReference{{UID: "ds"}}
	f.pods = append(f.pods, p)
	f.beat("kube-node-lease/"+name, time.Now())
	f.version++
}

// beat renews a node's Lease. The caller has locked mu.
func (f *fakeAPI) beat(name string, at time.Time) {
	term, when := int32(40), metav1.NewMicroTime(at)
	l := &coordinationv1.Lease{Spec: coordinationv1.LeaseSpec{LeaseDurationSeconds: &term, RenewTime: &when}}
	l.Name = strings.TrimPrefix(name, "kube-node-lease/")
	f.leases[name] = l
}

func (f *fakeAPI) count(what string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.asked[what]
}

// set replaces the slices of a Service, with an endpoint for each of ready, which is named by its pod and node.
func (f *fakeAPI) set(n snapshot.Name, endpoints ...discoveryv1.Endpoint) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.version++
	if f.services[n] == nil {
		svc := &corev1.Service{Spec: corev1.ServiceSpec{ClusterIP: "10.96.0.1", ClusterIPs: []string{"10.96.0.1"},
			Selector: map[string]string{"app": n.Name}, Ports: []corev1.ServicePort{{Port: 80, Protocol: "TCP"}}}}
		svc.Namespace, svc.Name, svc.ResourceVersion = n.Namespace, n.Name, strconv.Itoa(f.version)
		f.services[n] = svc
	}
	port, tcp, unnamed := int32(8080), corev1.ProtocolTCP, ""
	sl := discoveryv1.EndpointSlice{AddressType: discoveryv1.AddressTypeIPv4, Endpoints: endpoints,
		Ports: []discoveryv1.EndpointPort{{Name: &unnamed, Port: &port, Protocol: &tcp}}}
	sl.Namespace, sl.Name, sl.ResourceVersion = n.Namespace, n.Name+"-1", strconv.Itoa(f.version)
	sl.Labels = map[string]string{discoveryv1.LabelServiceName: n.Name}
	f.slices[n] = []discoveryv1.EndpointSlice{sl}
}

// endpoint is a pod on a node.
func endpoint(i int, node string, ready bool) discoveryv1.Endpoint {
	uid := types.UID(fmt.Sprintf("pod-%d", i))
	return discoveryv1.Endpoint{Addresses: []string{fmt.Sprintf("10.244.0.%d", i)}, NodeName: &node,
		Conditions: discoveryv1.EndpointConditions{Ready: &ready}, TargetRef: &corev1.ObjectReference{UID: uid}}
}

// addPod adds the pod of an endpoint.
func (f *fakeAPI) addPod(n snapshot.Name, i int, node string, deleting bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	p := corev1.Pod{Spec: corev1.PodSpec{NodeName: node}}
	p.Namespace, p.Name, p.Labels = n.Namespace, fmt.Sprintf("%s-%d", n.Name, i), map[string]string{"app": n.Name}
	p.UID = types.UID(fmt.Sprintf("pod-%d", i))
	if deleting {
		now := metav1.Now()
		p.DeletionTimestamp = &now
	}
	f.pods = append(f.pods, p)
}

// token is one of a node, as far as the fake server cares.
func token(node string, until time.Time) string {
	c, _ := json.Marshal(map[string]any{"sub": "system:serviceaccount:kube-system:verdict", "exp": until.Unix(),
		"node": node})
	return "e30." + base64.RawURLEncoding.EncodeToString(c) + ".c2ln"
}

func (f *fakeAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	parts := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	if parts[0] == "api" {
		parts = parts[2:]
	} else {
		parts = parts[3:]
	}
	namespace := ""
	if parts[0] == "namespaces" {
		namespace, parts = parts[1], parts[2:]
	}
	name := strings.Join(parts[1:], "/")
	f.asked[r.Method+" "+parts[0]]++
	if f.down {
		http.Error(w, "down", http.StatusServiceUnavailable)
		return
	}
	full := snapshot.Name{Namespace: namespace, Name: name}
	q := r.URL.Query()
	switch parts[0] {
	case "services":
		if svc := f.services[full]; svc != nil {
			writeObject(w, svc)
			return
		}
	case "endpointslices":
		of := strings.TrimPrefix(q.Get("labelSelector"), discoveryv1.LabelServiceName+"=")
		list := &discoveryv1.EndpointSliceList{Items: f.slices[snapshot.Name{Namespace: namespace, Name: of}]}
		list.ResourceVersion = strconv.Itoa(f.version)
		writeObject(w, list)
		return
	case "pods":
		f.listPods(w, namespace, q.Get("labelSelector"), strings.TrimPrefix(q.Get("fieldSelector"), "spec.nodeName="))
		return
	case "daemonsets":
		fmt.Fprintf(w, `{"metadata":{"namespace":%q,"name":%q,"uid":"ds","resourceVersion":"%d"},
			"spec":{"selector":{"matchLabels":{"app":"verdict"}}}}`, namespace, name, len(f.pods))
		return
	case "tokenreviews":
		f.review(w, r)
		return
	case "leases":
		f.serveLease(w, r, namespace, name)
		return
	}
	http.Error(w, `{"message":"there is none"}`, http.StatusNotFound)
}

func writeObject(w http.ResponseWriter, o any) { _ = json.NewEncoder(w).Encode(o) }

func (f *fakeAPI) listPods(w http.ResponseWriter, namespace, labels, node string) {
	list := corev1.PodList{}
	for _, p := range f.pods {
		if p.Namespace == namespace && "app="+p.Labels["app"] == labels && (node == "" || p.Spec.NodeName == node) {
			list.Items = append(list.Items, p)
		}
	}
	writeObject(w, list)
}

func (f *fakeAPI) review(w http.ResponseWriter, r *http.Request) {
	var asked authenticationv1.TokenReview
	_ = json.NewDecoder(r.Body).Decode(&asked)
	c, err := claimsOf(asked.Spec.Token)
	var more struct {
		Node string `json:"node"`
	}
	text, _ := base64.RawURLEncoding.DecodeString(strings.Split(asked.Spec.Token+"..", ".")[1])
	_ = json.Unmarshal(text, &more)
	if err == nil && !f.revoked[asked.Spec.Token] && strings.HasSuffix(asked.Spec.Token, ".c2ln") {
		asked.Status.Authenticated, asked.Status.Audiences = true, []string{everywhere.Audience}
		asked.Status.User.Username = c.Subject
		if more.Node != "" {
			asked.Status.User.Extra = map[string]authenticationv1.ExtraValue{nodeNameKey: {more.Node}}
		}
	}
	w.WriteHeader(http.StatusCreated)
	writeObject(w, asked)
}

func (f *fakeAPI) serveLease(w http.ResponseWriter, r *http.Request, namespace, name string) {
	var sent coordinationv1.Lease
	if r.Method != http.MethodGet {
		_ = json.NewDecoder(r.Body).Decode(&sent)
	}
	if r.Method == http.MethodPost {
		name = sent.Name
	}
	have := f.leases[namespace+"/"+name]
	switch {
	case r.Method == http.MethodGet && name == "":
		list := coordinationv1.LeaseList{}
		for n, l := range f.leases {
			if strings.HasPrefix(n, namespace+"/") {
				list.Items = append(list.Items, *l)
			}
		}
		writeObject(w, list)
		return
	case r.Method == http.MethodPost && have != nil, r.Method == http.MethodPut && have != nil &&
		have.ResourceVersion != sent.ResourceVersion:
		http.Error(w, `{"message":"somebody else was faster"}`, http.StatusConflict)
		return
	case r.Method != http.MethodPost && have == nil:
		http.Error(w, `{"message":"there is none"}`, http.StatusNotFound)
		return
	case r.Method != http.MethodGet:
		f.version++
		sent.ResourceVersion = strconv.Itoa(f.version)
		f.leases[namespace+"/"+name] = &sent
	}
	writeObject(w, f.leases[namespace+"/"+name])
}

func (f *fakeAPI) config() *rest.Config { return &rest.Config{Host: f.URL} }
