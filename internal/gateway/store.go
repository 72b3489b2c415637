package gateway

import (
	"fmt"
	"maps"
	"reflect"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"github.com/verdict-proxy/verdict/sync/snapshot"
	"github.com/verdict-proxy/verdict/sync/watch"
)

// object is an object of the API.
type object interface {
	metav1.Object
	runtime.Object
}

// nameOf returns an object's name, with its namespace if it has one.
func nameOf(o metav1.Object) types.NamespacedName {
	return types.NamespacedName{Namespace: o.GetNamespace(), Name: o.GetName()}
}

// store is the reflector's end of one resource: its objects, trimmed. They are not changed. The world's mu guards it.
type store[T object] struct {
	world *world
	known map[types.NamespacedName]T
	// trim drops what nobody reads.
	trim func(T)
	// complete says that all objects are known, or that there are none.
	complete bool
	// seen is the newest version of an event or a list.
	seen snapshot.Version
}

func newStore[T object](w *world, trim func(T)) *store[T] {
	return &store[T]{world: w, known: map[types.NamespacedName]T{}, trim: trim}
}

// Transformer makes the reflector trim the objects of a streamed list one by one.
func (s *store[T]) Transformer() cache.TransformFunc {
	return func(o any) (any, error) { return s.trimmed(o) }
}

func (s *store[T]) trimmed(o any) (T, error) {
	t, ok := o.(T)
	if !ok {
		return t, fmt.Errorf("unexpected object %T", o)
	}
	t.SetManagedFields(nil)
	if s.trim != nil {
		s.trim(t)
	}
	return t, nil
}

// put takes an object, unless it is older than the known one: what a write returned may be newer than an event. The
// caller has locked mu.
func (s *store[T]) put(t T) {
	n := nameOf(t)
	old, ok := s.known[n]
	if ok && old.GetUID() == t.GetUID() && old.GetResourceVersion() != "" &&
		snapshot.Version(old.GetResourceVersion()).Reached(snapshot.Version(t.GetResourceVersion())) {
		return
	}
	s.known[n] = t
	if !ok || !reflect.DeepEqual(old, t) {
		s.world.changed()
	}
}

// Add takes a new object.
func (s *store[T]) Add(o any) error { return s.Update(o) }

// Update takes a changed object.
func (s *store[T]) Update(o any) error { return s.take(o, true) }

// wrote takes what a write returned, unless events have told as much already: the object may be gone since.
func (s *store[T]) wrote(o T) error { return s.take(o, false) }

// take takes the object of an event, or what a write returned.
func (s *store[T]) take(o any, event bool) error {
	version := versionOf(o)
	t, err := s.trimmed(o)
	if err != nil {
		return err
	}
	s.world.mu.Lock()
	defer s.world.mu.Unlock()
	if event {
		s.saw(version)
	} else if s.seen.Reached(version) {
		return nil
	}
	s.put(t)
	return nil
}

// saw notes the version of an event. The caller has locked mu.
func (s *store[T]) saw(v snapshot.Version) {
	if !s.seen.Reached(v) {
		s.seen = v
	}
}

// versionOf returns an object's version, which trimmed ones may lack.
func versionOf(o any) snapshot.Version {
	if m, ok := o.(metav1.Object); ok {
		return snapshot.Version(m.GetResourceVersion())
	}
	return ""
}

// Delete takes an object that is gone.
func (s *store[T]) Delete(o any) error {
	version := versionOf(o)
	t, err := s.trimmed(o)
	if err != nil {
		return err
	}
	s.world.mu.Lock()
	defer s.world.mu.Unlock()
	s.saw(version)
	n := nameOf(t)
	if known, ok := s.known[n]; ok && known.GetUID() == t.GetUID() {
		delete(s.known, n)
		s.world.changed()
	}
	return nil
}

// Replace takes a complete list.
func (s *store[T]) Replace(list []any, version string) error {
	known := make(map[types.NamespacedName]T, len(list))
	for i, o := range list {
		t, err := s.trimmed(o)
		if err != nil {
			return err
		}
		known[nameOf(t)] = t
		list[i] = nil
	}
	s.world.mu.Lock()
	defer s.world.mu.Unlock()
	if !s.complete || !maps.EqualFunc(s.known, known, func(a, b T) bool { return reflect.DeepEqual(a, b) }) {
		s.world.changed()
	}
	s.known, s.complete, s.seen = known, true, snapshot.Version(version)
	return nil
}

// Resync does nothing.
func (s *store[T]) Resync() error { return nil }

// isComplete reports whether all objects are known. The caller has locked mu.
func (s *store[T]) isComplete() bool { return s.complete }

// forget forgets all objects, of which complete says that there are none. The caller has locked mu.
func (s *store[T]) forget(complete bool) {
	s.known, s.complete, s.seen = map[types.NamespacedName]T{}, complete, ""
	s.world.changed()
}

// trimService leaves Services of Gateways as they are, and of others what a backend is.
func trimService(s *corev1.Service) {
	if gatewayOf(s) != nil {
		return
	}
	refers := map[string]string{watch.AnnotationBackends: "{}"} // which is all that counts of it
	if !watch.HasBackends(s.Annotations) {
		refers = nil
	}
	maps.DeleteFunc(s.Labels, func(k, _ string) bool { return !strings.HasPrefix(k, "service.kubernetes.io/") })
	*s = corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: s.Namespace, Name: s.Name, UID: s.UID, Labels: s.Labels,
			Annotations: refers},
		Spec: corev1.ServiceSpec{Type: s.Spec.Type, ClusterIP: s.Spec.ClusterIP, ClusterIPs: s.Spec.ClusterIPs,
			Ports: s.Spec.Ports}}
	for i := range s.Spec.Ports {
		p := &s.Spec.Ports[i]
		*p = corev1.ServicePort{Name: p.Name, Port: p.Port, Protocol: p.Protocol}
	}
}

// trimNamespace leaves the labels.
func trimNamespace(n *corev1.Namespace) {
	*n = corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: n.Name, UID: n.UID, Labels: n.Labels}}
}

// trimObject drops what a client notes for itself.
func trimObject[T object](o T) { delete(o.GetAnnotations(), corev1.LastAppliedConfigAnnotation) }

// gatewayOf returns the Gateway whose Service this is, by whatever controller; nil if there is none.
func gatewayOf(s *corev1.Service) *metav1.OwnerReference {
	owner := metav1.GetControllerOfNoCopy(s)
	if owner == nil || owner.Kind != "Gateway" {
		return nil
	}
	return owner
}
