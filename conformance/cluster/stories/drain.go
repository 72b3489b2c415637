package stories

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiwatch "k8s.io/apimachinery/pkg/watch"

	"github.com/verdict-proxy/verdict/conformance/cluster"
)

// drain moves all servers off a node and lets it have them again. Held connections end with their server.
func drain(ctx context.Context, b *Bed) error {
	n := b.Nodes[2]
	if err := b.spread(ctx, n); err != nil {
		return err
	}
	seen, err := b.watchEvictions(ctx, n)
	if err != nil {
		return err
	}
	_, err = b.Kubectl(ctx, "drain", n.Name, "--ignore-daemonsets", "--timeout=2m")
	b.Log("%s", seen())
	if err != nil {
		return err
	}
	_, err = b.Kubectl(ctx, "uncordon", n.Name)
	return errors.Join(err, b.rolledOut(ctx, "default", "deployment/echo"))
}

// spread starts the servers anew if none is on a node, as after it was drained.
func (b *Bed) spread(ctx context.Context, n *cluster.Node) error {
	if _, err := b.podOf(ctx, "app=echo", n); err == nil {
		return nil
	}
	if _, err := b.Kubectl(ctx, "rollout", "restart", "deployment/echo"); err != nil {
		return err
	}
	if err := b.rolledOut(ctx, "default", "deployment/echo"); err != nil {
		return err
	}
	_, err := b.podOf(ctx, "app=echo", n)
	return err
}

// evictions is when servers of a node were asked to end, and what followed.
type evictions struct {
	asked, left, gone map[string]time.Time // by the server's IPv4 address
}

// watchEvictions watches what becomes of the servers of a node. The function that it returns ends that, and says how
// long it took until they had left the EndpointSlices, which no proxy can know sooner, and until they were gone.
func (b *Bed) watchEvictions(ctx context.Context, n *cluster.Node) (func() string, error) {
	ctx, cancel := context.WithCancel(ctx)
	pods, err := b.client.CoreV1().Pods("default").Watch(ctx, metav1.ListOptions{LabelSelector: "app=echo",
		FieldSelector: "spec.nodeName=" + n.Name})
	if err != nil {
		cancel()
		return nil, err
	}
	slices, err := b.client.DiscoveryV1().EndpointSlices("default").Watch(ctx, metav1.ListOptions{
		LabelSelector: discoveryv1.LabelServiceName + "=echo"})
	if err != nil {
		cancel()
		return nil, err
	}
	e := &evictions{map[string]time.Time{}, map[string]time.Time{}, map[string]time.Time{}}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for podEvents, sliceEvents := pods.ResultChan(), slices.ResultChan(); ; {
			select {
			case event, ok := <-podEvents:
				if !ok {
					return
				}
				e.pod(event)
			case event, ok := <-sliceEvents:
				if !ok {
					return
				}
				e.slice(event)
			}
		}
	}()
	return func() string {
		cancel()
		pods.Stop()
		slices.Stop()
		<-done
		return e.String()
	}, nil
}

func (e *evictions) pod(event apiwatch.Event) {
	p, ok := event.Object.(*corev1.Pod)
	if !ok || p.Status.PodIP == "" {
		return
	}
	if p.DeletionTimestamp != nil {
		note(e.asked, p.Status.PodIP)
	}
	if event.Type == apiwatch.Deleted {
		note(e.gone, p.Status.PodIP)
	}
}

func (e *evictions) slice(event apiwatch.Event) {
	sl, ok := event.Object.(*discoveryv1.EndpointSlice)
	if !ok {
		return
	}
	for _, endpoint := range sl.Endpoints {
		if c := endpoint.Conditions; c.Ready != nil && !*c.Ready && c.Terminating != nil && *c.Terminating {
			note(e.left, endpoint.Addresses[0])
		}
	}
}

// note keeps the first time.
func note(times map[string]time.Time, at string) {
	if times[at].IsZero() {
		times[at] = time.Now()
	}
}

func (e *evictions) String() string {
	var left, gone time.Duration
	for at, asked := range e.asked {
		left, gone = max(left, e.left[at].Sub(asked)), max(gone, e.gone[at].Sub(asked))
	}
	return fmt.Sprintf("%d servers were asked to end; %d have left the EndpointSlices, the slowest after %v, and %d are "+
		"gone, the slowest after %v", len(e.asked), len(e.left), left.Round(time.Millisecond), len(e.gone),
		gone.Round(time.Millisecond))
}
