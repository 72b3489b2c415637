package control

import (
	"context"
	"errors"
	"net/netip"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/verdict-proxy/verdict/internal/lab/blackbox"
)

// Record tells a recorder of all Services, EndpointSlices and Nodes, and of their changes until the context ends. It
// returns when the recorder knows those that there are. It calls see, unless that is nil, with each of these objects,
// and with pods, as they become, or as they were before they were deleted; calls may overlap.
func Record(ctx context.Context, client kubernetes.Interface, box *blackbox.Box, see func(o any, gone bool)) error {
	f := follower{ctx: ctx, see: see}
	core := client.CoreV1().RESTClient()
	f.follow(core, "services", &v1.Service{}, func(o any, deleted bool) {
		if s, is := o.(*v1.Service); is && !deleted {
			box.Service(ServiceOf(s))
		}
	})
	f.follow(client.DiscoveryV1().RESTClient(), "endpointslices", &discovery.EndpointSlice{}, func(o any, deleted bool) {
		if s, is := o.(*discovery.EndpointSlice); is {
			box.Slice(SliceOf(s, deleted))
		}
	})
	f.follow(core, "nodes", &v1.Node{}, func(o any, deleted bool) {
		if n, is := o.(*v1.Node); is {
			box.Node(n.Name, !deleted && nodeReady(n))
		}
	})
	if see != nil {
		f.follow(core, "pods", &v1.Pod{}, func(any, bool) {})
	}
	limit, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if !cache.WaitForCacheSync(limit.Done(), f.synced...) {
		return errors.Join(errors.New("the recorder of failures has got no Services, EndpointSlices and Nodes"),
			context.Cause(limit))
	}
	box.Listed()
	return nil
}

// follower watches resources until its context ends.
type follower struct {
	ctx    context.Context
	see    func(o any, gone bool)
	synced []cache.InformerSynced
}

// follow tells of the objects of a resource.
func (f *follower) follow(from cache.Getter, resource string, of runtime.Object, note func(o any, gone bool)) {
	tell := func(o any, gone bool) {
		if last, is := o.(cache.DeletedFinalStateUnknown); is {
			o = last.Obj
		}
		if note(o, gone); f.see != nil {
			f.see(o, gone)
		}
	}
	list := cache.NewListWatchFromClient(from, resource, metav1.NamespaceAll, fields.Everything())
	_, informer := cache.NewInformerWithOptions(cache.InformerOptions{ListerWatcher: list, ObjectType: of,
		Handler: cache.ResourceEventHandlerFuncs{AddFunc: func(o any) { tell(o, false) },
			UpdateFunc: func(_, o any) { tell(o, false) }, DeleteFunc: func(o any) { tell(o, true) }}})
	f.synced = append(f.synced, informer.HasSynced)
	go informer.Run(f.ctx.Done())
}

// ServiceOf returns what a recorder knows of a Service.
func ServiceOf(s *v1.Service) blackbox.Service {
	out := blackbox.Service{Name: s.Namespace + "/" + s.Name}
	all := append(append([]string{}, s.Spec.ClusterIPs...), s.Spec.ExternalIPs...)
	for _, i := range s.Status.LoadBalancer.Ingress {
		all = append(all, i.IP)
	}
	for _, text := range all {
		if a, err := netip.ParseAddr(text); err == nil {
			out.Addresses = append(out.Addresses, a)
		}
	}
	for _, p := range s.Spec.Ports {
		out.Ports = append(out.Ports, blackbox.ServicePort{Port: uint16(p.Port), NodePort: uint16(p.NodePort)})
	}
	return out
}

// SliceOf returns what a recorder knows of an EndpointSlice.
func SliceOf(s *discovery.EndpointSlice, deleted bool) blackbox.Slice {
	out := blackbox.Slice{Name: s.Namespace + "/" + s.Name,
		Service: s.Namespace + "/" + s.Labels[discovery.LabelServiceName]}
	if deleted {
		return out
	}
	var ports []uint16
	for _, p := range s.Ports {
		if p.Port != nil {
			ports = append(ports, uint16(*p.Port))
		}
	}
	is := func(b *bool, otherwise bool) bool {
		if b == nil {
			return otherwise
		}
		return *b
	}
	for _, e := range s.Endpoints {
		if len(e.Addresses) == 0 {
			continue
		}
		a, err := netip.ParseAddr(e.Addresses[0])
		if err != nil {
			continue
		}
		ready := is(e.Conditions.Ready, true)
		out.Endpoints = append(out.Endpoints, blackbox.Endpoint{Addr: a, Ports: ports, Ready: ready,
			Serving: is(e.Conditions.Serving, ready), Terminating: is(e.Conditions.Terminating, false)})
	}
	return out
}

func nodeReady(n *v1.Node) bool {
	for _, c := range n.Status.Conditions {
		if c.Type == v1.NodeReady {
			return c.Status == v1.ConditionTrue
		}
	}
	return false
}
