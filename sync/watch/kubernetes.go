package watch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/wait"
	apiwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Kubernetes is a source that watches the Kubernetes API: Services, EndpointSlices, ServiceCIDRs and the Node with our
// name, with kube-proxy's selectors. It converts objects as they arrive and keeps only the result.
//
// If the API server is lost, nothing is withdrawn; changes follow once it is back. A deleted Node stays known, as one
// that is leaving: it usually comes back, and its addresses are those of this host in any case. If an API server does
// not have ServiceCIDRs, or forbids reading them, that is reported once and retried from time to time.
type Kubernetes struct {
	// Config says how to reach the server; see ClientConfig.
	Config *rest.Config
	// NodeName is the name of the Node to watch.
	NodeName string
	// PodNames reads the names of endpoints' pods.
	PodNames bool
	// Nodes, if not nil, gets the addresses of all other Nodes, by name, and again whenever they differ, once NodesWanted
	// is closed: all Nodes are much to read and to watch. The map is not changed afterwards.
	Nodes       func(map[string][]netip.Addr)
	NodesWanted <-chan struct{}
	// Report gets a *Problem of an object, or an error of the connection, which is reported once and then at most every
	// five minutes. Nil drops them. Calls do not overlap.
	Report func(error)
	// Requested, if not nil, is called after each HTTP request. Calls may overlap.
	Requested func(Request)

	mu     sync.Mutex
	listed map[string]bool
}

// apiResources are the watched resources, as in the URL.
var apiResources = []string{"services", "endpointslices", "nodes", "servicecidrs"}

// Missing returns the resources that are not synced yet. Safe for concurrent use.
func (k *Kubernetes) Missing() []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(apiResources), func(name string) bool { return k.listed[name] })
}

// markListed marks a resource as synced, or as one that will not be, and says whether it was the last one.
func (k *Kubernetes) markListed(name string) (all bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.listed == nil {
		k.listed = map[string]bool{}
	}
	k.listed[name] = true
	return len(k.listed) == len(apiResources)
}

// ClientConfig is Client.Config with kube-proxy's defaults for everything but the kubeconfig file.
func ClientConfig(kubeconfig string) (*rest.Config, error) {
	return Client{Kubeconfig: kubeconfig, QPS: 5, Burst: 10}.Config()
}

// Client says how to reach an API server. The fields are those of clientConnection in kube-proxy's configuration.
type Client struct {
	// Kubeconfig is a file, and Master the address of a server, which overrides the one in that file. If both are empty,
	// it is the server of the cluster that this process is a pod of.
	Kubeconfig, Master string
	// ContentType is the format of requests, by default protobuf; AcceptContentTypes are those of responses, by default
	// protobuf and then JSON.
	ContentType, AcceptContentTypes string
	// QPS limits the requests per second for each resource, and Burst those at once; a QPS below 0 means no limit.
	QPS   float32
	Burst int
}

// Config returns the configuration for a client. A pod's environment has the cluster IP of the API server, which is one
// of those that we are to program. On a node where no proxy serves it yet, set KUBERNETES_SERVICE_HOST and
// KUBERNETES_SERVICE_PORT to the server's own address.
func (c Client) Config() (*rest.Config, error) {
	var (
		out *rest.Config
		err error
	)
	if c.Kubeconfig == "" && c.Master == "" {
		out, err = rest.InClusterConfig()
	} else {
		out, err = clientcmd.BuildConfigFromFlags(c.Master, c.Kubeconfig)
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("client configuration: kubeconfig: %w; it is named by --kubeconfig or by "+
			"clientConnection.kubeconfig. Without a cluster, name manifests: --from PATH, or the field manifests "+
			"(docs/CONFIGURATION.md)", err)
	case err != nil:
		return nil, fmt.Errorf("client configuration: %w", err)
	}
	out.ContentType, out.AcceptContentTypes = cmp.Or(c.ContentType, runtime.ContentTypeProtobuf), c.AcceptContentTypes
	if c.AcceptContentTypes == "" && out.ContentType == runtime.ContentTypeProtobuf {
		out.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	}
	out.QPS, out.Burst = c.QPS, c.Burst
	return out, nil
}

// Server returns the address of the API server; the zero Addr if it has a name, or cannot be told.
func (c Client) Server() netip.Addr {
	config, err := c.Config()
	if err != nil {
		return netip.Addr{}
	}
	server, _, err := rest.DefaultServerUrlFor(config)
	if err != nil {
		return netip.Addr{}
	}
	a, _ := netip.ParseAddr(server.Hostname()) // the zero Addr of a name
	return a.Unmap()
}

// InCluster reports whether this process is a container of a pod, which knows its cluster's API server.
func InCluster() bool {
	_, err := rest.InClusterConfig()
	return !errors.Is(err, rest.ErrNotInCluster)
}

// apiTypes are the only types we decode. Registering whole API groups would link all their types into the binary.
var apiTypes = func() serializer.CodecFactory {
	s := runtime.NewScheme()
	s.AddKnownTypes(corev1.SchemeGroupVersion, &corev1.Service{}, &corev1.ServiceList{}, &corev1.Node{},
		&corev1.NodeList{}, &corev1.Pod{}, &corev1.PodList{})
	s.AddKnownTypes(discoveryv1.SchemeGroupVersion, &discoveryv1.EndpointSlice{}, &discoveryv1.EndpointSliceList{})
	s.AddKnownTypes(networkingv1.SchemeGroupVersion, &networkingv1.ServiceCIDR{}, &networkingv1.ServiceCIDRList{})
	for _, gv := range []schema.GroupVersion{
		corev1.SchemeGroupVersion, discoveryv1.SchemeGroupVersion, networkingv1.SchemeGroupVersion, {Version: "v1"},
	} {
		metav1.AddToGroupVersion(s, gv)
	}
	return serializer.NewCodecFactory(s)
}()

// QuietClientGo silences client-go, which would log what its users here are told anyway.
var QuietClientGo = sync.OnceFunc(func() { klog.SetLogger(klog.Logger{}) })

// Run puts the objects of the API into sink until ctx is done; then it returns nil. It fails only if Config is invalid:
// it waits for a server that does not answer.
func (k *Kubernetes) Run(ctx context.Context, sink Sink) error {
	report := serialized(k.Report)
	ctx = klog.NewContext(ctx, klog.Logger{})
	resources := k.resources(sink, report)
	if k.Nodes != nil {
		resources = append(resources, k.otherNodes(report))
	}
	var listers []*lister
	for _, res := range resources {
		client, err := k.client(res.gv)
		if err != nil {
			return fmt.Errorf("watch Kubernetes: %w", err)
		}
		listers = append(listers, &lister{resource: res, client: client, report: report})
	}
	var all sync.WaitGroup
	for _, l := range listers {
		all.Go(func() {
			if l.wanted != nil {
				select {
				case <-l.wanted:
				case <-ctx.Done():
					return
				}
			}
			l.run(ctx)
		})
	}
	all.Wait()
	return nil
}

// otherNodes returns what to watch for Nodes. It keeps their addresses.
func (k *Kubernetes) otherNodes(report func(error)) resource {
	c := &converter{}
	same := func(a, b *snapshot.Node) bool { return slices.Equal(a.Addresses, b.Addresses) }
	nodes := newStore(withoutLast(c.node), same, report, func() {})
	nodes.put = func(map[snapshot.Name]*snapshot.Node) {
		others := make(map[string][]netip.Addr, len(nodes.known))
		for name, n := range nodes.known {
			if name.Name != k.NodeName {
				others[name.Name] = n.Addresses
			}
		}
		k.Nodes(others)
	}
	return resource{gv: corev1.SchemeGroupVersion, name: "nodes", object: &corev1.Node{}, store: nodes,
		wanted: k.NodesWanted}
}

// resources returns what to watch. The selectors are kube-proxy's.
func (k *Kubernetes) resources(sink Sink, report func(error)) []resource {
	c := &converter{pods: k.PodNames}
	complete := func(name string) func() {
		return func() {
			if k.markListed(name) {
				sink.Synced()
			}
		}
	}
	services := newStore(c.service, sameService, report, complete("services"))
	services.put = func(m map[snapshot.Name]*snapshot.Service) {
		sink.Put(snapshot.Delta{Services: m, Versions: snapshot.Versions{Services: services.version}})
	}
	endpointSlices := newStore(c.slice, sameSlice, report, complete("endpointslices"))
	endpointSlices.put = func(m map[snapshot.Name]*snapshot.Slice) {
		sink.Put(snapshot.Delta{Slices: m, Versions: snapshot.Versions{Slices: endpointSlices.version}})
	}
	services.versioned, endpointSlices.versioned = true, true
	nodes := newStore(withoutLast(c.node), sameNode, report, complete("nodes"))
	nodes.put = k.putNode(sink)
	cidrs := newStore(withoutLast(c.serviceCIDR), samePrefixes, report, complete("servicecidrs"))
	cidrs.put = func(map[snapshot.Name]*[]netip.Prefix) {
		all := mergePrefixes(slices.Collect(maps.Values(cidrs.known)))
		sink.Put(snapshot.Delta{ServiceCIDRs: &all})
	}
	resources := []resource{
		{corev1.SchemeGroupVersion, "services", &corev1.Service{}, services, metav1.ListOptions{
			LabelSelector: "!" + labelProxyName, FieldSelector: "spec.clusterIP!=" + corev1.ClusterIPNone,
		}, nil, nil},
		{discoveryv1.SchemeGroupVersion, "endpointslices", &discoveryv1.EndpointSlice{}, endpointSlices, metav1.ListOptions{
			LabelSelector: "!" + labelHeadless,
		}, nil, nil},
		{corev1.SchemeGroupVersion, "nodes", &corev1.Node{}, nodes, metav1.ListOptions{
			FieldSelector: fields.OneTermEqualSelector(metav1.ObjectNameField, k.NodeName).String(),
		}, nil, nil},
		{networkingv1.SchemeGroupVersion, "servicecidrs", &networkingv1.ServiceCIDR{}, cidrs, metav1.ListOptions{},
			cidrs.complete, nil},
	}
	return resources
}

// putNode passes our Node on. A deleted Node stays as it was, and is marked as leaving.
func (k *Kubernetes) putNode(sink Sink) func(map[snapshot.Name]*snapshot.Node) {
	var last snapshot.Node
	return func(m map[snapshot.Name]*snapshot.Node) {
		n, found := m[snapshot.Name{Name: k.NodeName}]
		switch {
		case !found:
			return
		case n == nil:
			last.Leaving = "the Node is deleted"
		default:
			last = *n
		}
		node := last
		sink.Put(snapshot.Delta{Node: &node})
	}
}

// apiStore is a store of any type.
type apiStore interface {
	cache.TransformingStore
	convertMessage([]byte) (runtime.Object, error)
}

// resource is what one reflector watches.
type resource struct {
	gv        schema.GroupVersion
	name      string // as in the URL
	object    runtime.Object
	store     apiStore
	selectors metav1.ListOptions
	// onRefused is called when the server refuses the resource for good; nil means that the resource is required.
	onRefused func()
	// wanted has it watched only once it is closed; nil means at once.
	wanted <-chan struct{}
}

func samePrefixes(a, b *[]netip.Prefix) bool { return slices.Equal(*a, *b) }

func (k *Kubernetes) client(gv schema.GroupVersion) (*rest.RESTClient, error) {
	QuietClientGo() // before the first request of anybody
	if k.Config == nil {
		return nil, errors.New("there is no client configuration")
	}
	c := rest.CopyConfig(k.Config)
	c.GroupVersion, c.APIPath = &gv, "/apis"
	if gv.Group == "" {
		c.APIPath = "/api"
	}
	c.NegotiatedSerializer = apiTypes.WithoutConversion()
	c.WarningHandler = rest.NoWarnings{}
	if c.UserAgent == "" {
		c.UserAgent = rest.DefaultKubernetesUserAgent()
	}
	if k.Requested != nil {
		c.Wrap(func(next http.RoundTripper) http.RoundTripper { return requestObserver{next, k.Requested} })
	}
	return rest.RESTClientFor(c)
}

// store is the reflector's end of one resource. It converts objects, keeps the values that it has passed on, and passes
// on what differs. Only the reflector's goroutine calls it.
type store[In, Out any] struct {
	// convert also gets the value that it returned last; nil if there is none.
	convert func(o *In, last *Out) (*Out, []*Problem)
	same    func(a, b *Out) bool
	put     func(map[snapshot.Name]*Out)
	report  func(error)
	// complete is called when the first list is complete, or when there will be none; calls after the first do nothing.
	complete func()

	known map[snapshot.Name]*Out
	// version is the newest that was read. If versioned is set, put is called for a new version, too, though no object
	// differs.
	version   snapshot.Version
	versioned bool
	// problems are the problems last reported of each object that has any.
	problems map[snapshot.Name]string
}

// withoutLast is for objects that nothing is kept of.
func withoutLast[In, Out any](convert func(*In) (*Out, []*Problem)) func(*In, *Out) (*Out, []*Problem) {
	return func(o *In, _ *Out) (*Out, []*Problem) { return convert(o) }
}

func newStore[In, Out any](convert func(*In, *Out) (*Out, []*Problem), same func(a, b *Out) bool, report func(error),
	complete func(),
) *store[In, Out] {
	return &store[In, Out]{
		convert: convert, same: same, report: report, complete: sync.OnceFunc(complete),
		known: map[snapshot.Name]*Out{}, problems: map[snapshot.Name]string{},
	}
}

// converted is a converted object on its way through a reflector, which collects a list before it hands it over.
type converted[Out any] struct {
	name  snapshot.Name
	value *Out
}

// Transformer makes the reflector convert the objects of a streamed list one by one, so that they never exist all at
// once. The server applies the selectors, so hardly any objects of a list convert to nothing.
func (s *store[In, Out]) Transformer() cache.TransformFunc {
	return func(o any) (any, error) { return s.convertObject(o) }
}

// convertMessage is convertObject for an object that is still encoded.
func (s *store[In, Out]) convertMessage(message []byte) (runtime.Object, error) {
	var o any = new(In)
	if err := o.(interface{ Unmarshal([]byte) error }).Unmarshal(message); err != nil {
		return nil, err
	}
	return s.convertObject(o)
}

// convertObject converts an object, unless it is converted already, and reports new problems.
func (s *store[In, Out]) convertObject(o any) (*converted[Out], error) {
	if c, done := o.(*converted[Out]); done {
		return c, nil
	}
	in, ok := o.(*In)
	if !ok {
		return nil, fmt.Errorf("watch: unexpected object %T", o)
	}
	name := nameOf(o.(metav1.Object))
	value, problems := s.convert(in, s.known[name])
	text := ""
	if err := joinProblems(problems); err != nil {
		text = err.Error()
	}
	if text != s.problems[name] {
		for _, p := range problems {
			s.report(p)
		}
		s.problems[name] = text
	}
	if text == "" {
		delete(s.problems, name)
	}
	return &converted[Out]{name, value}, nil
}

// Replace takes a complete list: objects that are not in it are gone.
func (s *store[In, Out]) Replace(list []any, version string) error {
	changed := map[snapshot.Name]*Out{}
	there := make(map[snapshot.Name]bool, len(list))
	for i, o := range list {
		c, err := s.convertObject(o)
		if err != nil {
			return err
		}
		list[i] = nil // an object in JSON is garbage once it is converted
		there[c.name] = true
		s.record(changed, c)
	}
	for n := range s.known {
		if !there[n] {
			s.record(changed, &converted[Out]{name: n})
		}
	}
	maps.DeleteFunc(s.problems, func(n snapshot.Name, _ string) bool { return !there[n] })
	s.version = snapshot.Version(version)
	s.send(changed)
	s.complete()
	return nil
}

// send passes on what differs, and the version if it is of interest.
func (s *store[In, Out]) send(changed map[snapshot.Name]*Out) {
	if len(changed) > 0 || s.versioned {
		s.put(changed)
	}
}

// read notes the version of an event. Events come in the order of their versions.
func (s *store[In, Out]) read(version string) {
	if v := snapshot.Version(version); !s.version.Reached(v) {
		s.version = v
	}
}

// Bookmark takes the version up to which there was nothing new. The server sends one about every minute.
func (s *store[In, Out]) Bookmark(version string) error {
	s.read(version)
	s.send(nil)
	return nil
}

// record updates known with one object and adds it to changed if it differs.
func (s *store[In, Out]) record(changed map[snapshot.Name]*Out, c *converted[Out]) {
	old := s.known[c.name]
	switch {
	case c.value == nil && old == nil:
		return
	case c.value == nil:
		delete(s.known, c.name)
	case old != nil && s.same(old, c.value):
		return
	default:
		s.known[c.name] = c.value
	}
	changed[c.name] = c.value
}

// Update takes a new or changed object.
func (s *store[In, Out]) Update(o any) error {
	c, err := s.convertObject(o)
	if err != nil {
		return err
	}
	return s.passOn(o, c)
}

// Add is Update.
func (s *store[In, Out]) Add(o any) error { return s.Update(o) }

// Delete takes an object that is gone.
func (s *store[In, Out]) Delete(o any) error {
	object, ok := o.(metav1.Object)
	if !ok {
		return fmt.Errorf("watch: unexpected object %T", o)
	}
	delete(s.problems, nameOf(object))
	return s.passOn(o, &converted[Out]{name: nameOf(object)})
}

// passOn passes on what an event says of an object, if it differs.
func (s *store[In, Out]) passOn(o any, c *converted[Out]) error {
	changed := map[snapshot.Name]*Out{}
	s.record(changed, c)
	if object, ok := o.(metav1.Object); ok {
		s.read(object.GetResourceVersion())
	}
	s.send(changed)
	return nil
}

// Resync does nothing: every value was passed on.
func (s *store[In, Out]) Resync() error { return nil }

// Errors that persist are reported again after repeatInterval. If the server refuses an optional resource, it is asked
// again after minRefusedDelay, then after twice as long each time up to maxRefusedDelay: an API server that has just
// started refuses everything until it has read its roles.
const (
	repeatInterval  = 5 * time.Minute
	minRefusedDelay = time.Second
	maxRefusedDelay = 10 * time.Minute
)

// After a failed request the next one follows within retryFirst to twice that. Each further failure doubles both times,
// up to retryMost. client-go's own delays grow to 30 to 60 s. The nodes of a large cluster draw their delays at random,
// so that they do not come at once when the server is back.
const (
	retryFirst = 800 * time.Millisecond
	retryMost  = 5 * time.Second
	// retryForget is how long nothing must fail until the delays are short again.
	retryForget = 2 * time.Minute
)

var retry = wait.Backoff{Duration: retryFirst, Cap: retryMost, Steps: 10, Factor: 2, Jitter: 1}

// lister requests one resource from the API, and reports errors.
type lister struct {
	resource
	client *rest.RESTClient
	report func(error)

	mu         sync.Mutex
	cause      string
	reportedAt time.Time
	// refusedDelay is how long the last refusal delayed the next request; 0 if the last answer was not a refusal.
	refusedDelay time.Duration
}

// run lists and watches the objects for the store until ctx is done. A server that has started again cannot continue a
// watch, and says so; the list that replaces it follows at once, spread over 2*retryFirst. A reflector that runs by
// itself would delay it as it does after a failure.
func (l *lister) run(ctx context.Context) {
	o := cache.ReflectorOptions{Name: l.name, Logger: &klog.Logger{}, Backoff: &retry}
	lw := &cache.ListWatch{ListWithContextFunc: l.list, WatchFuncWithContext: l.watch}
	r := cache.NewReflectorWithOptions(lw, l.object, l.store, o)
	delay := retry.DelayWithReset(clock.RealClock{}, retryForget)
	var resumed time.Time
	for ctx.Err() == nil {
		err := r.ListAndWatchWithContext(ctx)
		pause := delay()
		if ended := err == nil || apierrors.IsResourceExpired(err) || apierrors.IsGone(err); ended &&
			time.Since(resumed) > 2*retryMost {
			resumed, pause = time.Now(), rand.N(2*retryFirst)
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
}

// list lists the objects.
func (l *lister) list(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
	list, err := decodeList(l.request(&o).Do(ctx), l.store.convertMessage)
	l.result(ctx, "list", err)
	return list, err
}

// watch starts a watch, which begins with a list if asked so.
func (l *lister) watch(ctx context.Context, o metav1.ListOptions) (apiwatch.Interface, error) {
	o.Watch = true
	w, err := l.request(&o).Watch(ctx)
	if o.SendInitialEvents != nil && (apierrors.IsInvalid(err) || apierrors.IsBadRequest(err)) {
		return w, err // many servers before 1.34 cannot stream lists; the reflector then falls back to a plain list
	}
	l.result(ctx, "watch", err)
	return w, err
}

func (l *lister) request(o *metav1.ListOptions) *rest.Request {
	o.LabelSelector, o.FieldSelector = l.selectors.LabelSelector, l.selectors.FieldSelector
	return l.client.Get().Resource(l.name).VersionedParams(o, metav1.ParameterCodec)
}

// result reports the error of a request, unless the last one had the same cause not long ago. It delays the next
// request for a refused resource.
func (l *lister) result(ctx context.Context, verb string, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err == nil || ctx.Err() != nil || apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
		l.cause, l.refusedDelay = "", 0
		return
	}
	refused := l.onRefused != nil &&
		(apierrors.IsNotFound(err) || apierrors.IsForbidden(err) || apierrors.IsMethodNotSupported(err))
	if cause := RootCause(err); cause != l.cause || time.Since(l.reportedAt) >= repeatInterval && !refused {
		l.cause, l.reportedAt = cause, time.Now()
		if u := (*url.Error)(nil); errors.As(err, &u) {
			err = u.Err // the URL has a random timeout in it and says nothing new
		}
		l.report(fmt.Errorf("%s %s: %w", verb, l.name, err))
	}
	if refused {
		l.onRefused()
		l.refusedDelay = min(max(2*l.refusedDelay, minRefusedDelay), maxRefusedDelay)
		select {
		case <-ctx.Done():
		case <-time.After(l.refusedDelay):
		}
	}
}

// RootCause returns the text of the innermost error, which unlike those around it has no local port in it.
func RootCause(err error) string {
	for {
		inner := errors.Unwrap(err)
		if inner == nil {
			return err.Error()
		}
		err = inner
	}
}

// Objects converts a Service and its slices as every proxy does; a nil Service is one that Verdict does not serve.
func Objects(svc *corev1.Service, list []discoveryv1.EndpointSlice) (*snapshot.Service, map[string]*snapshot.Slice) {
	c := &converter{}
	out, _ := c.service(svc, nil)
	of := map[string]*snapshot.Slice{}
	for i := range list {
		if sl, _ := c.slice(&list[i], nil); sl != nil && sl.Service == svc.Name {
			of[list[i].Name] = sl
		}
	}
	return out, of
}
