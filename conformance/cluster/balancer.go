package cluster

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/verdict-proxy/verdict/internal/lab"
)

// Ranges of load balancers' addresses, which are routed to the first node.
var (
	balancers4 = netip.MustParsePrefix("198.18.0.0/16")
	balancers6 = netip.MustParsePrefix("fd00:18::/112")
)

// Balance routes the addresses of load balancers to the first node. Until ctx ends, it gives each Service of type
// LoadBalancer one of each family; they end as the Service's cluster IPs do.
func (c *Cluster) Balance(ctx context.Context) error {
	client, err := c.Client()
	if err != nil {
		return err
	}
	n := c.Nodes[0]
	if err := inNet(outside, fmt.Sprintf("route replace %s via %s\n-6 route replace %s via %s", balancers4, n.IP4,
		balancers6, n.IP6)); err != nil {
		return err
	}
	factory := informers.NewSharedInformerFactory(client, 0)
	services := factory.Core().V1().Services().Informer()
	give := func(o any) {
		if err := balance(ctx, client, o.(*corev1.Service)); err != nil {
			c.Log("no address of a load balancer: %v", err)
		}
	}
	if _, err := services.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: give, UpdateFunc: func(_, o any) { give(o) }}); err != nil {
		return err
	}
	factory.StartWithContext(ctx)
	if !cache.WaitForCacheSync(ctx.Done(), services.HasSynced) {
		return errors.New("the list of Services did not come")
	}
	return nil
}

// balance gives a Service its addresses, unless it has some.
func balance(ctx context.Context, client kubernetes.Interface, svc *corev1.Service) error {
	if svc.Spec.Type != corev1.ServiceTypeLoadBalancer || len(svc.Status.LoadBalancer.Ingress) > 0 {
		return nil
	}
	svc = svc.DeepCopy()
	for _, ip := range svc.Spec.ClusterIPs {
		addr, err := netip.ParseAddr(ip)
		if err != nil {
			return err
		}
		prefix := balancers4
		if addr.Is6() {
			prefix = balancers6
		}
		b := addr.AsSlice()
		svc.Status.LoadBalancer.Ingress = append(svc.Status.LoadBalancer.Ingress,
			corev1.LoadBalancerIngress{IP: lab.Nth(prefix, int(b[len(b)-2])<<8+int(b[len(b)-1])).String()})
	}
	_, err := client.CoreV1().Services(svc.Namespace).UpdateStatus(ctx, svc, metav1.UpdateOptions{})
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return nil // what was written meanwhile comes here, too
	}
	return err
}
