package benchmark

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"time"

	"golang.org/x/sync/errgroup"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/verdict-proxy/verdict/conformance/benchmark/results"
	"github.com/verdict-proxy/verdict/internal/lab"
)

// The giant is a Service of 8 KB of JSON, its EndpointSlice has 21 KB. Any tenant may write it.
const (
	giantAddresses = 300 // externalIPs
	giantPorts     = 50
	giantEndpoints = 100
	giantFirstPort = 1000
	// giantMost is how many Services a cluster may have for the giant to be measured in it.
	giantMost = 1000
	// giantSample is how many of its frontends are looked at.
	giantSample = 64
)

// The addresses of the giant are nobody else's. Newcomers stay far below its endpoints.
var (
	giantRange         = netip.MustParsePrefix("198.18.0.0/15")
	firstGiantAddress  = number(netip.MustParseAddr("198.18.1.0"))
	firstGiantEndpoint = number(netip.MustParseAddr("10.191.0.0"))
)

// giantService gives the Service. It takes the cluster IP after all others.
func (c *cluster) giantService() *v1.Service {
	s := c.service(c.sink() + 1)
	s.Name = "giant"
	for i := range giantAddresses {
		s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, address(firstGiantAddress+uint32(i)).String())
	}
	s.Spec.Ports = nil
	for i := range giantPorts {
		s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{
			Name: fmt.Sprintf("port-%d", i), Port: int32(giantFirstPort + i), Protocol: v1.ProtocolTCP,
			TargetPort: intstr.FromInt32(serverPort),
		})
	}
	return s
}

// giantSlice gives the EndpointSlice: every port leads to the server's.
func (c *cluster) giantSlice() *discovery.EndpointSlice {
	var endpoints []netip.Addr
	for i := range giantEndpoints {
		endpoints = append(endpoints, address(firstGiantEndpoint+uint32(i)))
	}
	s := c.sliceOf(c.sink()+1, endpoints)
	s.Name, s.Labels[discovery.LabelServiceName], s.Ports = "giant-0", "giant", nil
	for i := range giantPorts {
		s.Ports = append(s.Ports, discovery.EndpointPort{
			Name: new(fmt.Sprintf("port-%d", i)), Port: new(int32(serverPort)), Protocol: new(v1.ProtocolTCP),
		})
	}
	return s
}

// giantFrontends gives the last frontend, the first, and others chosen by chance.
func giantFrontends() (sample []netip.AddrPort) {
	frontend := func(externalIP, port int) netip.AddrPort {
		return netip.AddrPortFrom(address(firstGiantAddress+uint32(externalIP)), uint16(giantFirstPort+port))
	}
	sample = append(sample, frontend(giantAddresses-1, giantPorts-1), frontend(0, 0))
	for len(sample) < giantSample {
		sample = append(sample, frontend(rand.IntN(giantAddresses), rand.IntN(giantPorts)))
	}
	return sample
}

// createGiant writes the Service and then the EndpointSlice, as the controllers of a cluster do.
func (w *world) createGiant(ctx context.Context) error {
	service, slice := w.giantService(), w.giantSlice()
	_, err := w.plane.Client.CoreV1().Services(service.Namespace).Create(ctx, service, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("create Service %s/%s: %w", service.Namespace, service.Name, err)
	}
	_, err = w.plane.Client.DiscoveryV1().EndpointSlices(slice.Namespace).Create(ctx, slice, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("create EndpointSlice %s/%s: %w", slice.Namespace, slice.Name, err)
	}
	return nil
}

// deleteGiant deletes both.
func (w *world) deleteGiant(ctx context.Context) error {
	service, slice := w.giantService(), w.giantSlice()
	return errors.Join(
		w.plane.Client.CoreV1().Services(service.Namespace).Delete(ctx, service.Name, metav1.DeleteOptions{}),
		w.plane.Client.DiscoveryV1().EndpointSlices(slice.Namespace).Delete(ctx, slice.Name, metav1.DeleteOptions{}),
	)
}

// giantRoutes has the client hear at once that a frontend does not answer. What the proxy does not translate goes to
// the server, which resets it, and what the proxy rejects is always answered: the kernel would limit the rate of both
// ICMP messages.
func (n *node) giantRoutes() error {
	return errors.Join(n.ownAddresses(giantRange), n.host.Sysctl("net/ipv4/icmp_ratemask", "0"),
		n.host.AddRoute(lab.Route{To: giantRange, Via: serverAddr, Link: "server"}))
}

// giant creates the giant in a proxy at rest, and deletes it as soon as the proxy is at rest again. Whatever happens,
// it is not there for the next proxy.
func (n *node) giant(ctx context.Context, limit time.Duration) (*results.Giant, error) {
	if err := n.giantRoutes(); err != nil {
		return nil, err
	}
	resident, kernel := n.usage.resident(), n.usage.kernel()
	grown := func(s *results.GiantStep) {
		s.Resident, s.Peak = int64(n.usage.resident()-resident), int64(n.usage.highest()-resident)
		if kernel != 0 {
			s.Kernel = int64(n.usage.kernel() - kernel)
		}
	}
	created, err := n.giantStep(ctx, limit, n.createGiant, true)
	if err != nil {
		return nil, errors.Join(err, n.deleteGiant(ctx))
	}
	grown(created)
	deleted, err := n.giantStep(ctx, limit, n.deleteGiant, false)
	if err != nil {
		return nil, err
	}
	grown(deleted)
	return &results.Giant{Created: *created, Deleted: *deleted}, nil
}

// giantStep writes, and waits until the giant's frontends answer, or until none does. Meanwhile one endpoint after the
// other of the probes changes. In the end the proxy is at rest, or the limit has passed.
func (n *node) giantStep(
	ctx context.Context, limit time.Duration, write func(context.Context) error, answers bool,
) (*results.GiantStep, error) {
	n.usage.forgetHighest()
	busy := n.usage.processor()
	began := time.Now()
	if err := write(ctx); err != nil {
		return nil, err
	}
	var w *results.Wait
	s := &samples{}
	done := make(chan struct{})
	group, inner := errgroup.WithContext(ctx)
	group.Go(func() (err error) {
		defer close(done)
		w, err = n.untilGiant(inner, began, limit, answers)
		return err
	})
	group.Go(func() error { return n.changesUntil(inner, s, done, limit) })
	if err := group.Wait(); err != nil {
		return nil, err
	}
	w.Processor -= busy.Seconds()
	_, err := n.calm(ctx, time.Now(), limit)
	return &results.GiantStep{Wait: *w, Others: s.spans()}, err
}

// untilGiant waits for all frontends of the sample. None counts as gone that was silent only once: on a busy machine
// one look may come too late.
func (n *node) untilGiant(
	ctx context.Context, began time.Time, limit time.Duration, answers bool,
) (*results.Wait, error) {
	var took time.Duration
	for _, to := range giantFrontends() {
		var err error
		took, err = await(ctx, began, limit, n.ended, func() bool {
			if answers {
				return n.reaches(to).IsValid()
			}
			for range 2 {
				if n.reaches(to).IsValid() {
					return false
				}
			}
			return true
		})
		if err != nil {
			return n.wait(took, err)
		}
	}
	return n.wait(took, nil)
}

// changesUntil changes one probe after the other until done is closed, at least one.
func (n *node) changesUntil(ctx context.Context, s *samples, done <-chan struct{}, limit time.Duration) error {
	for i := 0; ; i++ {
		if err := n.span(ctx, s, i%probes, limit); err != nil {
			return err
		}
		select {
		case <-done:
			return nil
		default:
		}
	}
}
