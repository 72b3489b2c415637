package watch

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Pod is what records say of a pod.
type Pod struct {
	// Addrs are its addresses; none of a pod in the node's network.
	Addrs []netip.Addr
	// Workload is "namespace/name" of what owns it: of the Deployment, if that owns the ReplicaSet; empty if nothing does.
	Workload string
}

// Pods is a source of the pods of one node. It needs the right to list and watch pods. Without it, it reports that
// once, and tries again from time to time.
type Pods struct {
	// Config says how to reach the server; see ClientConfig.
	Config *rest.Config
	// NodeName is the name of the node.
	NodeName string
	// Report is that of Kubernetes.
	Report func(error)
}

// Run calls put with changes of pods until ctx is done; a nil pod is gone. It fails only if Config is invalid.
func (p *Pods) Run(ctx context.Context, put func(map[snapshot.Name]*Pod)) error {
	client, err := (&Kubernetes{Config: p.Config}).client(corev1.SchemeGroupVersion)
	if err != nil {
		return fmt.Errorf("watch pods: %w", err)
	}
	report := serialized(p.Report)
	s := newStore(withoutLast(podOf), samePod, report, func() {})
	s.put = put
	res := resource{corev1.SchemeGroupVersion, "pods", &corev1.Pod{}, s, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector("spec.nodeName", p.NodeName).String(),
	}, func() {}, nil}
	ctx = klog.NewContext(ctx, klog.Logger{})
	(&lister{resource: res, client: client, report: report}).run(ctx)
	return nil
}

// podOf converts a pod; nil of one that has ended, whose address another may have.
func podOf(o *corev1.Pod) (*Pod, []*Problem) {
	if o.Status.Phase == corev1.PodSucceeded || o.Status.Phase == corev1.PodFailed {
		return nil, nil
	}
	p := &Pod{}
	if name := ownerOf(o); name != "" {
		p.Workload = snapshot.Name{Namespace: o.Namespace, Name: name}.String()
	}
	if o.Spec.HostNetwork {
		return p, nil
	}
	for _, ip := range o.Status.PodIPs {
		if a, err := netip.ParseAddr(ip.IP); err == nil {
			p.Addrs = append(p.Addrs, a.Unmap())
		}
	}
	return p, nil
}

// ownerOf returns the name of what owns a pod. The name of a Deployment's ReplicaSet is the Deployment's and the pods'
// label pod-template-hash.
func ownerOf(o *corev1.Pod) string {
	owner := metav1.GetControllerOf(o)
	if owner == nil {
		return ""
	}
	name := strings.Clone(owner.Name)
	if hash := o.Labels["pod-template-hash"]; owner.Kind == "ReplicaSet" && hash != "" {
		name = strings.TrimSuffix(name, "-"+hash)
	}
	return name
}

func samePod(a, b *Pod) bool {
	return a == b || a.Workload == b.Workload && slices.Equal(a.Addrs, b.Addrs)
}
