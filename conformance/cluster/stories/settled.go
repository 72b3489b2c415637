package stories

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/verdict-proxy/verdict/conformance/cluster"
)

const (
	settleLimit = 4 * time.Minute
	// graceful is how long kube-controller-manager waits for news of a node before it takes it for dead. A watch of
	// Leases that has not come back after the API server was away shows within that time.
	graceful = 50 * time.Second
)

// settled waits until the next story inherits nothing: nodes are Ready and have no taints, all pods are those that
// their owners want, controllers follow changes, EndpointSlices have what runs, and no connection fails.
func (b *Bed) settled(ctx context.Context) error {
	begin := time.Now()
	for _, step := range []struct {
		what string
		done func() error
	}{
		{"the nodes are well", func() error { return b.nodesWell(ctx) }},
		{"all pods are as wanted", func() error { return b.asWanted(ctx) }},
		{"EndpointSlices have the servers", func() error { return b.slicesHaveServers(ctx) }},
	} {
		if err := cluster.Wait(ctx, settleLimit, step.what, step.done); err != nil {
			return err
		}
	}
	err := errors.Join(b.nodesFollow(ctx), b.slicesFollow(ctx))
	if err == nil {
		err = b.calm(ctx)
	}
	b.changes.note("settled after %v: %v", time.Since(begin).Round(time.Millisecond), err)
	return err
}

// nodesWell says which node is not Ready or has taints. After the API server was away it waits for as long as the
// controllers may take a node for dead without news.
func (b *Bed) nodesWell(ctx context.Context) error {
	if left := time.Until(b.served.Add(graceful)); left > 0 {
		return fmt.Errorf("the API server is back for less than %v", graceful)
	}
	nodes, err := b.client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	for _, n := range nodes.Items {
		if n.Spec.Unschedulable || len(n.Spec.Taints) > 0 {
			return fmt.Errorf("%s has taints %v", n.Name, n.Spec.Taints)
		}
		if !slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
			return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
		}) {
			return fmt.Errorf("%s is not Ready", n.Name)
		}
	}
	return nil
}

// asWanted says which Deployment or DaemonSet has not what it wants, or which pod is ending.
func (b *Bed) asWanted(ctx context.Context) error {
	deployments, err := b.client.AppsV1().Deployments("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	for _, d := range deployments.Items {
		s := d.Status
		if s.ObservedGeneration < d.Generation || s.UpdatedReplicas != *d.Spec.Replicas ||
			s.AvailableReplicas != *d.Spec.Replicas || s.Replicas != *d.Spec.Replicas {
			return fmt.Errorf("only %d of %d replicas of Deployment %s are available", s.AvailableReplicas, *d.Spec.Replicas,
				d.Name)
		}
	}
	daemons, err := b.client.AppsV1().DaemonSets("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	for _, d := range daemons.Items {
		s := d.Status
		if s.ObservedGeneration < d.Generation || s.UpdatedNumberScheduled != s.DesiredNumberScheduled ||
			s.NumberAvailable != s.DesiredNumberScheduled || s.NumberMisscheduled > 0 {
			return fmt.Errorf("only %d of %d pods of DaemonSet %s are available", s.NumberAvailable, s.DesiredNumberScheduled,
				d.Name)
		}
	}
	pods, err := b.client.CoreV1().Pods("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	for _, p := range pods.Items {
		if p.DeletionTimestamp != nil {
			return fmt.Errorf("pod %s ends", p.Name)
		}
	}
	return nil
}

// slicesHaveServers says how the EndpointSlices of the servers' Service differ from the pods that run.
func (b *Bed) slicesHaveServers(ctx context.Context) error {
	pods, err := b.client.CoreV1().Pods("default").List(ctx, metav1.ListOptions{LabelSelector: "app=echo"})
	if err != nil {
		return err
	}
	want := map[string]bool{}
	for _, p := range pods.Items {
		for _, ip := range p.Status.PodIPs {
			want[ip.IP] = true
		}
	}
	got, err := b.inSlices(ctx, "echo")
	if err == nil && !maps.Equal(got, want) {
		err = fmt.Errorf("the slices have %v, by whether they are ready; want %v", got, want)
	}
	return err
}

// inSlices returns the addresses in the EndpointSlices of a Service, and whether they are ready.
func (b *Bed) inSlices(ctx context.Context, service string) (map[string]bool, error) {
	list, err := b.client.DiscoveryV1().EndpointSlices("default").List(ctx, metav1.ListOptions{
		LabelSelector: discoveryv1.LabelServiceName + "=" + service})
	if err != nil {
		return nil, err
	}
	all := map[string]bool{}
	for _, s := range list.Items {
		for _, e := range s.Endpoints {
			all[e.Addresses[0]] = e.Conditions.Ready != nil && *e.Conditions.Ready
		}
	}
	return all, nil
}

// copied is a label that the controller of nodes' life gives a node anew, from another label.
const copied = "beta.kubernetes.io/os"

// nodesFollow removes a label of each node, and waits until the controller that tells which nodes are dead has put it
// back: it hears of nodes again.
func (b *Bed) nodesFollow(ctx context.Context) error {
	for _, n := range b.Nodes {
		if _, err := b.Kubectl(ctx, "label", "node", n.Name, copied+"-"); err != nil {
			return err
		}
		err := cluster.Wait(ctx, settleLimit, "the controller of nodes has labelled "+n.Name, func() error {
			node, err := b.client.CoreV1().Nodes().Get(ctx, n.Name, metav1.GetOptions{})
			if err == nil && node.Labels[copied] == "" {
				err = errors.New("it has no label " + copied)
			}
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// marker is a Service without traffic, whose slices show that the controller of EndpointSlices hears of Services and of
// pods. It is also the label that it selects by.
const marker = "marker"

// slicesFollow gives a pod the label of a new Service, and takes it away again: the Service's slices follow both.
func (b *Bed) slicesFollow(ctx context.Context) (err error) {
	pods, err := b.client.CoreV1().Pods("default").List(ctx, metav1.ListOptions{LabelSelector: "app=client"})
	if err != nil || len(pods.Items) == 0 {
		return errors.Join(err, errors.New("there is no client"))
	}
	pod := pods.Items[0].Name
	services := b.client.CoreV1().Services("default")
	_, err = services.Create(ctx, &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: marker}, Spec: corev1.ServiceSpec{
		ClusterIP: corev1.ClusterIPNone, Selector: map[string]string{marker: "on"},
		Ports: []corev1.ServicePort{{Port: 1, TargetPort: intstr.FromInt32(1)}}}}, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, services.Delete(ctx, marker, metav1.DeleteOptions{})) }()
	for _, step := range []struct {
		label string
		has   int
	}{{marker + "=on", 1}, {marker + "-", 0}} {
		if _, err := b.Kubectl(ctx, "label", "pod", pod, step.label); err != nil {
			return err
		}
		err := cluster.Wait(ctx, settleLimit, "EndpointSlices follow the label "+step.label, func() error {
			got, err := b.inSlices(ctx, marker)
			if err == nil && len(got) != step.has {
				err = fmt.Errorf("they have %v", got)
			}
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}
