package stories

import (
	"context"
	"errors"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/verdict-proxy/verdict/conformance/cluster"
)

// stayNotReady is how long no endpoint is ready, once all controllers know it.
const stayNotReady = 20 * time.Second

// stopKubelets stops the kubelets of all nodes until the controllers take the nodes for dead and no endpoint for ready,
// as after an API server was away for longer than nodes' Leases last. All pods go on answering. The kubelets continue,
// even if the test is interrupted.
func stopKubelets(ctx context.Context, b *Bed) error {
	err := b.signalKubelets(ctx, "STOP")
	if err == nil {
		err = b.readyEndpoints(ctx, 3*time.Minute, false)
		select {
		case <-ctx.Done():
		case <-time.After(stayNotReady):
		}
	}
	if err = errors.Join(err, b.signalKubelets(context.WithoutCancel(ctx), "CONT")); err != nil {
		return err
	}
	return errors.Join(b.readyEndpoints(ctx, 3*time.Minute, true), b.calm(ctx))
}

// calm waits until no connection fails any more, so that the next story inherits nothing: kube-proxy's node ports
// refused connections of one node for 8 s after its endpoints were ready.
func (b *Bed) calm(ctx context.Context) error {
	failed := -1
	return cluster.Wait(ctx, time.Minute, "no connection fails", func() error {
		time.Sleep(settle)
		reports, err := b.reports(ctx)
		if err != nil {
			return err
		}
		before := failed
		failed = 0
		for _, r := range reports {
			failed += r.Failed
		}
		if failed != before {
			return fmt.Errorf("%d have failed, and %d before", failed, before)
		}
		return nil
	})
}

// stopKubeletsWith does so while Verdict has a further argument.
func stopKubeletsWith(argument string) func(context.Context, *Bed) error {
	return func(ctx context.Context, b *Bed) error {
		if err := b.verdict(ctx, cluster.VerdictImage, argument); err != nil {
			return err
		}
		return errors.Join(stopKubelets(ctx, b), b.verdict(ctx, cluster.VerdictImage, ""))
	}
}

func (b *Bed) signalKubelets(ctx context.Context, signal string) (err error) {
	for _, n := range b.Nodes {
		_, failed := n.Exec(ctx, "pkill", "-"+signal, "-x", "kubelet")
		err = errors.Join(err, failed)
	}
	return err
}

// readyEndpoints waits until all endpoints of the servers' Services are ready, or none is.
func (b *Bed) readyEndpoints(ctx context.Context, limit time.Duration, ready bool) error {
	return cluster.Wait(ctx, limit, fmt.Sprintf("the endpoints' condition ready is %t", ready), func() error {
		list, err := b.client.DiscoveryV1().EndpointSlices("default").List(ctx, metav1.ListOptions{
			LabelSelector: "kubernetes.io/service-name!=kubernetes"})
		if err != nil {
			return err
		}
		for i := range list.Items {
			for _, e := range list.Items[i].Endpoints {
				if is := e.Conditions.Ready; is != nil && *is != ready {
					return fmt.Errorf("%s of %s: ready is %t", e.Addresses, list.Items[i].Name, *is)
				}
			}
		}
		return nil
	})
}
