package watch

import (
	"bytes"
	"fmt"
	"maps"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer/streaming"
	apiwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// apiServer serves the four resources as the Kubernetes API does: lists, and streams of changes from a resource
// version.
type apiServer struct {
	t    testing.TB
	addr string
	http *http.Server
	// streams says that lists can be streamed, as servers do since 1.32.
	streams bool
	// media is the content type the server speaks, whatever it is asked for.
	media string
	// refuses is the status of resources that are not there for us.
	refuses map[string]int

	mu      sync.Mutex
	version int
	objects map[string]map[snapshot.Name]metav1.Object
	log     []change
	oldest  int // changes before this version are forgotten
	watches map[chan struct{}]bool
	// queries are the parameters each resource was first asked for with, and asked counts the requests.
	queries map[string]string
	asked   map[string]int
}

type change struct {
	version  int
	resource string
	kind     apiwatch.EventType
	object   metav1.Object
}

var apiLists = map[string]struct {
	gv   schema.GroupVersion
	list func() runtime.Object
	mark func() metav1.Object // an object for bookmarks
}{
	"services": {corev1.SchemeGroupVersion, func() runtime.Object { return &corev1.ServiceList{} },
		func() metav1.Object { return &corev1.Service{} }},
	"nodes": {corev1.SchemeGroupVersion, func() runtime.Object { return &corev1.NodeList{} },
		func() metav1.Object { return &corev1.Node{} }},
	"pods": {corev1.SchemeGroupVersion, func() runtime.Object { return &corev1.PodList{} },
		func() metav1.Object { return &corev1.Pod{} }},
	"endpointslices": {discoveryv1.SchemeGroupVersion, func() runtime.Object { return &discoveryv1.EndpointSliceList{} },
		func() metav1.Object { return &discoveryv1.EndpointSlice{} }},
	"servicecidrs": {networkingv1.SchemeGroupVersion, func() runtime.Object { return &networkingv1.ServiceCIDRList{} },
		func() metav1.Object { return &networkingv1.ServiceCIDR{} }},
}

func newAPIServer(t testing.TB, streams bool) *apiServer {
	s := &apiServer{
		t: t, streams: streams, media: runtime.ContentTypeProtobuf, refuses: map[string]int{}, version: 1,
		objects: map[string]map[snapshot.Name]metav1.Object{},
		watches: map[chan struct{}]bool{}, queries: map[string]string{}, asked: map[string]int{},
	}
	for resource := range apiLists {
		s.objects[resource] = map[snapshot.Name]metav1.Object{}
	}
	s.addr = "127.0.0.1:0"
	s.up()
	t.Cleanup(s.down)
	return s
}

func (s *apiServer) config() *rest.Config {
	c := &rest.Config{Host: "http://" + s.addr, QPS: -1}
	c.ContentType = runtime.ContentTypeProtobuf
	return c
}

// set creates or updates objects, and remove deletes them.
func (s *apiServer) set(objects ...metav1.Object) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, o := range objects {
		resource := resourceOf(o)
		kind := apiwatch.Added
		if s.objects[resource][nameOf(o)] != nil {
			kind = apiwatch.Modified
		}
		s.objects[resource][nameOf(o)] = o
		s.happen(kind, o)
	}
}

func (s *apiServer) remove(o metav1.Object) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.objects[resourceOf(o)], nameOf(o))
	s.happen(apiwatch.Deleted, o)
}

// send makes an event that may be wrong: a duplicate, or one of an object nobody knows.
func (s *apiServer) send(kind apiwatch.EventType, o metav1.Object) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.happen(kind, o)
}

func (s *apiServer) happen(kind apiwatch.EventType, o metav1.Object) {
	s.version++
	o.SetResourceVersion(strconv.Itoa(s.version))
	object := o.(runtime.Object).DeepCopyObject().(metav1.Object)
	s.log = append(s.log, change{s.version, resourceOf(o), kind, object})
	for w := range s.watches {
		select {
		case w <- struct{}{}:
		default:
		}
	}
}

// forget drops the log, so that streams can't go on from an earlier version.
func (s *apiServer) forget() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.log, s.oldest = nil, s.version
}

// up begins to listen, at the address of the last time if there was one.
func (s *apiServer) up() {
	l, err := net.Listen("tcp", s.addr)
	if err != nil {
		s.t.Fatal(err)
	}
	s.addr = l.Addr().String()
	s.http = &http.Server{Handler: s}
	go s.http.Serve(l)
}

// down ends all connections and refuses new ones.
func (s *apiServer) down() { s.http.Close() }

func (s *apiServer) requests(resource string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.asked[resource]
}

func resourceOf(o metav1.Object) string {
	switch o.(type) {
	case *corev1.Service:
		return "services"
	case *corev1.Node:
		return "nodes"
	case *corev1.Pod:
		return "pods"
	case *discoveryv1.EndpointSlice:
		return "endpointslices"
	}
	return "servicecidrs"
}

func (s *apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	resource := r.URL.Path[strings.LastIndexByte(r.URL.Path, '/')+1:]
	kind := apiLists[resource]
	path := "/api/v1/" + resource
	if kind.gv.Group != "" {
		path = "/apis/" + kind.gv.String() + "/" + resource
	}
	s.mu.Lock()
	s.asked[resource]++
	refused := s.refuses[resource]
	q := r.URL.Query()
	if s.queries[resource] == "" {
		s.queries[resource] = q.Get("labelSelector") + "|" + q.Get("fieldSelector")
	}
	s.mu.Unlock()
	switch {
	case r.URL.Path != path:
		http.NotFound(w, r)
	case refused != 0:
		s.status(w, refused, "Refused")
	case q.Get("watch") == "":
		s.list(w, resource)
	case q.Get("sendInitialEvents") != "" && !s.streams:
		s.status(w, http.StatusUnprocessableEntity, metav1.StatusReasonInvalid)
	default:
		from, _ := strconv.Atoi(q.Get("resourceVersion"))
		s.watch(w, r, resource, from, q.Get("sendInitialEvents") != "")
	}
}

func (s *apiServer) status(w http.ResponseWriter, code int, reason metav1.StatusReason) {
	switch code {
	case http.StatusNotFound:
		reason = metav1.StatusReasonNotFound
	case http.StatusForbidden:
		reason = metav1.StatusReasonForbidden
	case http.StatusGone:
		reason = metav1.StatusReasonExpired
	}
	w.Header().Set("Content-Type", s.media)
	w.WriteHeader(code)
	w.Write(s.encode(&metav1.Status{Status: "Failure", Code: int32(code), Reason: reason, Message: "so it is"},
		schema.GroupVersion{Version: "v1"}))
}

func (s *apiServer) serializer() runtime.SerializerInfo {
	info, _ := runtime.SerializerInfoForMediaType(apiTypes.SupportedMediaTypes(), s.media)
	return info
}

func (s *apiServer) encode(o runtime.Object, gv schema.GroupVersion) []byte {
	var b bytes.Buffer
	// Encoding sets an object's kind, and two watches may have the same object.
	if err := apiTypes.EncoderForVersion(s.serializer().Serializer, gv).Encode(o.DeepCopyObject(), &b); err != nil {
		s.t.Errorf("encode %T: %v", o, err)
	}
	return b.Bytes()
}

func (s *apiServer) list(w http.ResponseWriter, resource string) {
	s.mu.Lock()
	list := apiLists[resource].list()
	var items []runtime.Object
	for _, n := range slices.SortedFunc(maps.Keys(s.objects[resource]), snapshot.Name.Compare) {
		items = append(items, s.objects[resource][n].(runtime.Object))
	}
	if err := meta.SetList(list, items); err != nil {
		s.t.Error(err)
	}
	list.(metav1.ListInterface).SetResourceVersion(strconv.Itoa(s.version))
	body := s.encode(list, apiLists[resource].gv)
	s.mu.Unlock()
	w.Header().Set("Content-Type", s.media)
	w.Write(body)
}

// watch streams what has changed since a version, after the objects there are if initial is set.
func (s *apiServer) watch(w http.ResponseWriter, r *http.Request, resource string, from int, initial bool) {
	s.mu.Lock()
	if from < s.oldest && !initial {
		s.mu.Unlock()
		s.status(w, http.StatusGone, metav1.StatusReasonExpired)
		return
	}
	var first []change
	if initial {
		for _, o := range s.objects[resource] {
			first = append(first, change{kind: apiwatch.Added, object: o.(runtime.Object).DeepCopyObject().(metav1.Object)})
		}
		mark := apiLists[resource].mark()
		mark.SetAnnotations(map[string]string{metav1.InitialEventsAnnotationKey: "true"})
		mark.SetResourceVersion(strconv.Itoa(s.version))
		first, from = append(first, change{kind: apiwatch.Bookmark, object: mark}), s.version
	}
	wake := make(chan struct{}, 1)
	wake <- struct{}{}
	s.watches[wake] = true
	s.mu.Unlock()

	w.Header().Set("Content-Type", s.media+";stream=watch")
	info, gv := s.serializer(), apiLists[resource].gv
	stream := streaming.NewEncoder(info.StreamSerializer.Framer.NewFrameWriter(w),
		apiTypes.EncoderForVersion(info.StreamSerializer.Serializer, gv))
	for {
		for _, c := range first {
			event := &metav1.WatchEvent{Type: string(c.kind),
				Object: runtime.RawExtension{Raw: s.encode(c.object.(runtime.Object),
					gv)}}
			if err := stream.Encode(event); err != nil {
				return
			}
		}
		w.(http.Flusher).Flush()
		select {
		case <-wake:
		case <-r.Context().Done():
			s.mu.Lock()
			delete(s.watches, wake)
			s.mu.Unlock()
			return
		}
		first = nil
		s.mu.Lock()
		for _, c := range s.log {
			if c.version > from && c.resource == resource {
				first = append(first, c)
			}
		}
		from = s.version
		s.mu.Unlock()
	}
}

func apiNode(zone string) *corev1.Node {
	n := &corev1.Node{}
	n.Name, n.Labels = "n1", map[string]string{"topology.kubernetes.io/zone": zone}
	return n
}

func apiCIDR(name string, cidrs ...string) *networkingv1.ServiceCIDR {
	c := &networkingv1.ServiceCIDR{Spec: networkingv1.ServiceCIDRSpec{CIDRs: cidrs}}
	c.Name = name
	return c
}

func named(name, ip string) *corev1.Service {
	s := apiService()
	s.Name, s.Spec.ClusterIP, s.Spec.ClusterIPs = name, ip, []string{ip}
	return s
}

// fill puts n Services with ten endpoints each into the server.
func (s *apiServer) fill(n int) {
	for i := range n {
		service, slice := dumped(i)
		service.TypeMeta, slice.TypeMeta = metav1.TypeMeta{}, metav1.TypeMeta{}
		s.set(service, slice)
	}
	s.set(apiNode("a"), apiCIDR("kubernetes", "10.96.0.0/12"))
	s.forget()
	if len(s.objects["services"]) != n {
		s.t.Fatal(fmt.Sprint(len(s.objects["services"]), " services"))
	}
}
