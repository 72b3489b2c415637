package gateway

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	apiwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/verdict-proxy/verdict/internal/gateway/routes"
	"github.com/verdict-proxy/verdict/internal/system/clock"
	"github.com/verdict-proxy/verdict/internal/system/wake"
	"github.com/verdict-proxy/verdict/sync/watch"
)

// world holds what the API has of everything that a Gateway depends on. It watches Gateway API as far as the cluster
// has it, and nothing else in a cluster without Gateways' definitions.
type world struct {
	api *api
	log *slog.Logger
	// dirty has a token if something has changed, and again if something must be read before the next look.
	dirty, again chan struct{}

	// mu guards the stores and what follows.
	mu         sync.RWMutex
	classes    *store[*gatewayv1.GatewayClass]
	gateways   *store[*routes.Gateway]
	tcp        *store[*gatewayv1.TCPRoute]
	udp        *store[*gatewayv1.UDPRoute]
	grants     *store[*gatewayv1.ReferenceGrant]
	namespaces *store[*corev1.Namespace]
	services   *store[*corev1.Service]
	slices     *store[*discoveryv1.EndpointSlice]
	resources  []*resource
	bundles    []routes.Bundle
	// served names the resources of Gateway API that are watched; "?" before it is known.
	served string
	// configs are the ConfigMaps that classes name, as they were read last.
	configs map[types.NamespacedName]config

	// telling guards told, the errors that were logged last by what they are about.
	telling sync.Mutex
	told    map[string]told
}

// config is a ConfigMap, if it exists.
type config struct {
	data   map[string]string
	exists bool
}

type told struct {
	cause string
	at    time.Time
}

// resource is what a reflector watches, if anybody does.
type resource struct {
	name string
	// selector selects the objects by their labels; empty for all.
	selector string
	// version is that of the running reflector; empty while there is none. The world's mu guards it.
	version string
	example runtime.Object
	store   interface {
		cache.TransformingStore
		forget(complete bool)
		isComplete() bool
	}
	// missing is since when the server does not have the resource, though it is watched.
	missing time.Time
	stop    func()
}

const (
	// lookEvery is how often it is looked which resources the server has, and bundlesEvery after how many looks, at the
	// latest, of which release they are. After an error, it is looked again after lookAgain.
	lookEvery, lookAgain = 30 * time.Second, 2 * time.Second
	bundlesEvery         = 10
	// missingFor is how long a resource must be missing before it is believed: a server that has just started may not
	// know its definitions yet.
	missingFor = 20 * time.Second
	// retryMost is how long a reflector pauses after an error, at most: client-go's half a minute is long for somebody
	// who waits for a Gateway.
	retryMost = 3 * time.Second
	// toldAgain is when an error that persists is logged again.
	toldAgain = 5 * time.Minute
	// core and discovery are the versions of resources that every cluster has.
	core, discovery = "core", discoveryv1.GroupName
)

// These are the names of resources that are written, too.
const (
	classes   = "gatewayclasses"
	gateways  = "gateways"
	tcpRoutes = "tcproutes"
	udpRoutes = "udproutes"
	services  = "services"

	endpointSlices = "endpointslices"
)

func newWorld(a *api, log *slog.Logger) *world {
	w := &world{api: a, log: log, dirty: make(chan struct{}, 1), again: make(chan struct{}, 1),
		served: "?", configs: map[types.NamespacedName]config{}, told: map[string]told{}}
	w.classes = newStore(w, trimObject[*gatewayv1.GatewayClass])
	w.gateways = newStore(w, trimObject[*routes.Gateway])
	w.tcp = newStore(w, trimObject[*gatewayv1.TCPRoute])
	w.udp = newStore(w, trimObject[*gatewayv1.UDPRoute])
	w.grants = newStore(w, trimObject[*gatewayv1.ReferenceGrant])
	w.namespaces, w.services = newStore(w, trimNamespace), newStore(w, trimService)
	w.slices = newStore(w, trimObject[*discoveryv1.EndpointSlice])
	w.resources = []*resource{
		{name: classes, example: &gatewayv1.GatewayClass{}, store: w.classes},
		{name: gateways, example: &routes.Gateway{}, store: w.gateways},
		{name: tcpRoutes, example: &gatewayv1.TCPRoute{}, store: w.tcp},
		{name: udpRoutes, example: &gatewayv1.UDPRoute{}, store: w.udp},
		{name: "referencegrants", example: &gatewayv1.ReferenceGrant{}, store: w.grants},
		{name: "namespaces", example: &corev1.Namespace{}, store: w.namespaces},
		{name: services, example: &corev1.Service{}, store: w.services},
		{name: endpointSlices, example: &discoveryv1.EndpointSlice{}, store: w.slices,
			selector: discoveryv1.LabelManagedBy + "=" + routes.ManagedBy},
	}
	return w
}

func (w *world) changed() { wake.Up(w.dirty) }

// run watches until ctx is done.
func (w *world) run(ctx context.Context) {
	ctx = klog.NewContext(ctx, klog.Logger{})
	var all sync.WaitGroup
	defer all.Wait()
	for looks := 0; ctx.Err() == nil; looks++ {
		pause := lookEvery
		err := w.look(ctx, &all, &looks)
		if w.tell(ctx, "read what the cluster has of Gateway API", err); err != nil {
			pause = lookAgain
		}
		select {
		case <-ctx.Done():
		case <-w.again:
			clock.Pause(ctx, 100*time.Millisecond) // somebody may ask often
		case <-time.After(pause):
		}
	}
}

// look has what the server has watched, and reads what is not watched.
func (w *world) look(ctx context.Context, all *sync.WaitGroup, looks *int) error {
	inTime, cancel := context.WithTimeout(ctx, lookEvery)
	defer cancel()
	served, err := w.api.serves(inTime)
	if err != nil {
		return err
	}
	if w.follow(ctx, all, served) {
		*looks = 0
	}
	if *looks%bundlesEvery == 0 {
		w.readBundles(inTime)
	}
	return w.readConfigs(inTime)
}

// follow watches what the server has, and reports whether that has changed.
func (w *world) follow(ctx context.Context, all *sync.WaitGroup, served map[string]string) (changed bool) {
	if served[classes] != "" && served[gateways] != "" {
		served["namespaces"], served[services], served[endpointSlices] = core, core, discovery
	}
	now := time.Now()
	for _, r := range w.resources {
		version := served[r.name]
		if version == "" && r.version != "" {
			if r.missing.IsZero() {
				r.missing = now
			}
			if now.Sub(r.missing) < missingFor {
				continue
			}
		}
		r.missing = time.Time{}
		changed = w.watch(ctx, all, r, version) || changed
	}
	w.tellServed()
	return changed
}

// tellServed logs what the cluster has of Gateway API, when that has changed.
func (w *world) tellServed() {
	var has []string
	for _, r := range w.resources {
		if r.ofGateways() {
			has = append(has, r.name+" "+r.version)
		}
	}
	switch text := strings.Join(has, ", "); {
	case text == w.served:
	case w.resources[1].version == "":
		w.served = text
		w.log.Info("the cluster has no Gateways: Gateway API is not installed; waiting for it")
	default:
		w.served = text
		w.log.Info("the cluster has Gateway API", "resources", text)
	}
}

// watch has a resource watched in a version, or not at all, and reports whether that is new.
func (w *world) watch(ctx context.Context, all *sync.WaitGroup, r *resource, version string) bool {
	w.mu.Lock()
	was := r.version
	if r.version = version; was == "" && (version != "" || !r.store.isComplete()) || was != "" && version == "" {
		r.store.forget(version == "")
	}
	w.mu.Unlock()
	if was == version {
		return false
	}
	if r.stop != nil {
		r.stop()
		r.stop = nil
	}
	if version != "" {
		inner, cancel := context.WithCancel(ctx)
		reflector, done := w.reflector(r, w.client(version)), make(chan struct{})
		all.Go(func() {
			defer close(done)
			reflector.RunWithContext(inner)
		})
		r.stop = func() { cancel(); <-done }
	}
	return true
}

// ofGateways says whether a resource of Gateway API is watched.
func (r *resource) ofGateways() bool { return slices.Contains(versions, r.version) }

// client returns the client for a version of Gateway API, or for resources that every cluster has.
func (w *world) client(version string) *rest.RESTClient {
	switch version {
	case core:
		return w.api.core
	case discovery:
		return w.api.discovery
	}
	return w.api.gateway[version]
}

// clientOf returns the client for a resource that is watched. The caller has locked mu.
func (w *world) clientOf(name string) *rest.RESTClient {
	i := slices.IndexFunc(w.resources, func(r *resource) bool { return r.name == name })
	return w.client(w.resources[i].version)
}

// reflector lists and watches a resource for its store.
func (w *world) reflector(r *resource, client *rest.RESTClient) *cache.Reflector {
	request := func(o *metav1.ListOptions) *rest.Request {
		o.LabelSelector = r.selector
		return client.Get().Resource(r.name).VersionedParams(o, metav1.ParameterCodec)
	}
	lw := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			list, err := request(&o).Do(ctx).Get()
			w.watched(ctx, "list "+r.name, err)
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (apiwatch.Interface, error) {
			o.Watch = true
			got, err := request(&o).Watch(ctx)
			if o.SendInitialEvents == nil || !apierrors.IsInvalid(err) && !apierrors.IsBadRequest(err) {
				w.watched(ctx, "watch "+r.name, err) // many servers before 1.34 cannot stream lists
			}
			return got, err
		},
	}
	retry := wait.Backoff{Duration: time.Second / 2, Cap: retryMost, Steps: 5, Factor: 2, Jitter: 0.5}
	return cache.NewReflectorWithOptions(lw, r.example, r.store,
		cache.ReflectorOptions{Name: r.name, Logger: &klog.Logger{}, Backoff: &retry})
}

// watched logs the outcome of a request, and has it looked whether the resource is gone.
func (w *world) watched(ctx context.Context, what string, err error) {
	if apierrors.IsNotFound(err) {
		wake.Up(w.again)
	}
	if !apierrors.IsResourceExpired(err) && !apierrors.IsGone(err) {
		w.tell(ctx, what, err)
	}
}

// tell logs an error, unless the last one about the same had the same cause not long ago. Without one, it forgets it.
func (w *world) tell(ctx context.Context, what string, err error) {
	if ctx.Err() != nil {
		return
	}
	w.telling.Lock()
	defer w.telling.Unlock()
	if err == nil {
		delete(w.told, what)
		return
	}
	cause, now := watch.RootCause(err), time.Now()
	if last := w.told[what]; cause == last.cause && now.Sub(last.at) < toldAgain {
		return
	}
	w.told[what] = told{cause, now}
	if u := (*url.Error)(nil); errors.As(err, &u) {
		err = u.Err // the URL says nothing new
	}
	w.log.Warn("failed to "+what+"; retrying", "err", err)
}

// readBundles reads of which releases of Gateway API the definitions are, as far as the server lets us.
func (w *world) readBundles(ctx context.Context) {
	var bundles []routes.Bundle
	for _, r := range w.resources {
		if !r.ofGateways() {
			continue
		}
		b, err := w.api.bundle(ctx, r.name)
		if w.tell(ctx, "read the definitions of Gateway API", err); err != nil {
			return
		}
		if !slices.Contains(bundles, b) {
			bundles = append(bundles, b)
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if !slices.Equal(bundles, w.bundles) {
		w.bundles = bundles
		w.changed()
	}
}

// wanted returns the ConfigMaps that our classes name. The caller has locked mu.
func (w *world) wanted() (names []types.NamespacedName) {
	for _, c := range w.classes.known {
		p := c.Spec.ParametersRef
		if c.Spec.ControllerName == routes.ControllerName && p != nil && p.Group == "" && p.Kind == "ConfigMap" &&
			p.Namespace != nil {
			names = append(names, types.NamespacedName{Namespace: string(*p.Namespace), Name: p.Name})
		}
	}
	return names
}

// readConfigs reads the ConfigMaps that classes name. One that may not be read is as good as none.
func (w *world) readConfigs(ctx context.Context) error {
	w.mu.RLock()
	names := w.wanted()
	w.mu.RUnlock()
	read := map[types.NamespacedName]config{}
	for _, n := range names {
		var m corev1.ConfigMap
		err := w.api.core.Get().Namespace(n.Namespace).Resource("configmaps").Name(n.Name).Do(ctx).Into(&m)
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsForbidden(err) {
			return fmt.Errorf("ConfigMap %v: %w", n, err)
		}
		read[n] = config{m.Data, err == nil}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if !maps.EqualFunc(read, w.configs, func(a, b config) bool {
		return a.exists == b.exists && maps.Equal(a.data, b.data)
	}) {
		w.configs = read
		w.changed()
	}
	return nil
}

// view returns the world for a computation; nil if not all of it is known. The caller has locked mu, and keeps it while
// the view is used.
func (w *world) view() *routes.World {
	for i, r := range w.resources {
		if i < 2 && r.version == "" || !r.store.isComplete() {
			return nil
		}
	}
	for _, n := range w.wanted() {
		if _, ok := w.configs[n]; !ok {
			wake.Up(w.again)
			return nil
		}
	}
	return &routes.World{
		Controller: routes.ControllerName, Bundles: w.bundles, Classes: sorted(w.classes), Gateways: sorted(w.gateways),
		TCPRoutes: sorted(w.tcp), UDPRoutes: sorted(w.udp), Grants: sorted(w.grants),
		Namespace: func(name string) (map[string]string, bool) {
			n, ok := w.namespaces.known[types.NamespacedName{Name: name}]
			if !ok {
				return nil, false
			}
			return n.Labels, true
		},
		Service: func(n types.NamespacedName) *corev1.Service { return w.services.known[n] },
		ConfigMap: func(n types.NamespacedName) (map[string]string, bool) {
			c := w.configs[n]
			return c.data, c.exists
		},
	}
}

// sorted returns a store's objects by name.
func sorted[T object](s *store[T]) []T {
	return slices.SortedFunc(maps.Values(s.known), func(a, b T) int {
		return cmp.Or(strings.Compare(a.GetNamespace(), b.GetNamespace()), strings.Compare(a.GetName(), b.GetName()))
	})
}
