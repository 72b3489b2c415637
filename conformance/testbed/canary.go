package testbed

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// canary tells when a proxy has taken all that was written before. It is a Service whose port and whose
// EndpointSlices' port change each time. A proxy gets the objects of one kind in the order they were written, so once
// the new port leads to the new target, it has seen all older changes of Services and of EndpointSlices, and programs
// them no later; a proxy that may program them later says when it has (Kind.status).
type canary struct {
	mu         sync.Mutex
	generation int
	service    *v1.Service
	slices     []*discovery.EndpointSlice
	written    versions // of what writeCanary wrote last
	flying     *flight
	next       *flight
}

// flight is one round of the canary, which all wait for that asked before it began.
type flight struct {
	done chan struct{}
	err  error
}

const (
	canaryNamespace   = "canary"
	canaryName        = "canary"
	firstCanaryPort   = 20000
	firstCanaryTarget = 30000
	numCanaryTargets  = 8
	syncLimit         = 60 * time.Second // on an ordinary machine
)

func canaryTargets() (ports []uint16) {
	for i := range numCanaryTargets {
		ports = append(ports, firstCanaryTarget+uint16(i))
	}
	return ports
}

func (c *canary) port() int32   { return int32(firstCanaryPort + c.generation%10000) }
func (c *canary) target() int32 { return int32(firstCanaryTarget + c.generation%numCanaryTargets) }

func (tb *Testbed) createCanary(ctx context.Context) error {
	c := &tb.canary
	if err := tb.CreateNamespace(ctx, canaryNamespace); err != nil {
		return err
	}
	if err := tb.createZoneCanary(ctx); err != nil {
		return err
	}
	dual := v1.IPFamilyPolicyRequireDualStack
	service := &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: canaryName, Namespace: canaryNamespace},
		Spec:       v1.ServiceSpec{IPFamilyPolicy: &dual, Ports: []v1.ServicePort{c.servicePort()}},
	}
	var err error
	if c.service, err = tb.Client.CoreV1().Services(canaryNamespace).Create(ctx, service,
		metav1.CreateOptions{}); err != nil {
		return err
	}
	for _, f := range lab.Families() {
		slice := &discovery.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{
				Name: fmt.Sprintf("%s-%d", canaryName, f), Namespace: canaryNamespace,
				Labels: map[string]string{discovery.LabelServiceName: canaryName},
			},
			AddressType: addressType(f),
			Endpoints:   []discovery.Endpoint{{Addresses: []string{tb.Host("control").IP(f).String()}}},
			Ports:       c.slicePorts(),
		}
		if slice, err = tb.Client.DiscoveryV1().EndpointSlices(canaryNamespace).Create(ctx, slice,
			metav1.CreateOptions{}); err != nil {
			return err
		}
		c.slices = append(c.slices, slice)
	}
	return nil
}

func (c *canary) servicePort() v1.ServicePort {
	return v1.ServicePort{
		Name:       "canary",
		Port:       c.port(),
		Protocol:   v1.ProtocolTCP,
		TargetPort: intstr.FromString("canary"),
	}
}

func (c *canary) slicePorts() []discovery.EndpointPort {
	return []discovery.EndpointPort{{Name: new("canary"), Port: new(c.target()), Protocol: new(v1.ProtocolTCP)}}
}

func addressType(f ipfamily.Family) discovery.AddressType {
	if f == ipfamily.IPv4 {
		return discovery.AddressTypeIPv4
	}
	return discovery.AddressTypeIPv6
}

// Sync waits until the proxies on all nodes carry what was written to the API server before the call. Calls at the
// same time share a round.
func (tb *Testbed) Sync(ctx context.Context) error {
	c := &tb.canary
	c.mu.Lock()
	if c.next == nil {
		c.next = &flight{done: make(chan struct{})}
		if c.flying == nil {
			go tb.fly(ctx)
		}
	}
	mine := c.next
	if c.flying == nil {
		c.flying = mine // fly takes it over at once
	}
	c.mu.Unlock()
	select {
	case <-mine.done:
		return mine.err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// fly makes rounds as long as somebody waits for one.
func (tb *Testbed) fly(ctx context.Context) {
	c := &tb.canary
	for {
		c.mu.Lock()
		f := c.next
		c.next, c.flying = nil, f
		c.mu.Unlock()
		if f == nil {
			return
		}
		f.err = tb.round(context.WithoutCancel(ctx))
		close(f.done)
	}
}

// round changes the canary and waits until every node shows it in both families.
func (tb *Testbed) round(ctx context.Context) error {
	c := &tb.canary
	c.generation++
	// The API server may be about to come back.
	if err := until(ctx, tb.Slow.Times(syncLimit), func() error { return tb.writeCanary(ctx) }); err != nil {
		return fmt.Errorf("write the canary: %w", err)
	}
	errs := make(chan error)
	for _, node := range tb.Nodes() {
		go func() {
			err := tb.seen(ctx, node)
			if err == nil {
				err = tb.programmed(ctx, node, c.written)
			}
			errs <- err
		}()
	}
	var all []error
	for range tb.Nodes() {
		all = append(all, <-errs)
	}
	return errors.Join(all...)
}

// writeCanary writes without conditions: whatever became of an earlier try, this one counts.
func (tb *Testbed) writeCanary(ctx context.Context) error {
	c := &tb.canary
	for _, slice := range c.slices {
		slice.ResourceVersion, slice.Ports = "", c.slicePorts()
		now, err := tb.Client.DiscoveryV1().EndpointSlices(canaryNamespace).Update(ctx, slice, metav1.UpdateOptions{})
		if err != nil {
			return err
		}
		c.written.EndpointSlices = snapshot.Version(now.ResourceVersion) // the last one's is the newest
	}
	c.service.ResourceVersion, c.service.Spec.Ports[0] = "", c.servicePort()
	now, err := tb.Client.CoreV1().Services(canaryNamespace).Update(ctx, c.service, metav1.UpdateOptions{})
	if err != nil {
		return err
	}
	c.written.Services = snapshot.Version(now.ResourceVersion)
	return nil
}

// seen waits until a node shows the canary as it is now.
func (tb *Testbed) seen(ctx context.Context, node string) error {
	c := &tb.canary
	for _, ip := range c.service.Spec.ClusterIPs {
		to := netip.AddrPortFrom(netip.MustParseAddr(ip), uint16(c.port()))
		err := until(ctx, tb.Slow.Times(syncLimit), func() error {
			r := tb.Host(node).Dial(snapshot.TCP, to, lab.Options{Timeout: 200 * time.Millisecond})
			if r.Outcome != lab.Answered || int32(r.Destination.Port()) != c.target() {
				return fmt.Errorf("%s does not carry the canary %s to port %d: %s", node, to, c.target(), r)
			}
			return nil
		})
		if err != nil {
			if p := tb.Proxies[node]; p != nil {
				return fmt.Errorf("%w\n%s", err, p.Tail())
			}
			return err
		}
	}
	return nil
}
