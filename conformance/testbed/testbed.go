package testbed

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/blackbox"
	"github.com/verdict-proxy/verdict/internal/lab/control"
)

// Testbed is a cluster with a proxy under test on each node.
type Testbed struct {
	*Topology
	Plane *control.Plane
	Kind  *Kind
	// Client speaks to the API server.
	Client kubernetes.Interface
	// Proxies run on the nodes, by the nodes' names.
	Proxies map[string]*Proxy
	// Slow is how many times as long as on an ordinary machine a change may take.
	Slow Slow
	// Box records why connections fail; nil before Record.
	Box *blackbox.Box

	stopRecord context.CancelFunc

	dir    string
	canary canary
	zones  netip.AddrPort // of the canary of zones
}

// Slow is a factor of times; 1 is an ordinary machine.
type Slow float64

// Times gives a time multiplied.
func (s Slow) Times(d time.Duration) time.Duration { return time.Duration(float64(s) * float64(d)) }

// Peers are the programs of the control plane.
type Peers struct{ Etcd, APIServer, ControllerManager string }

// Open builds the testbed in an empty directory of its own, starts the control plane and the proxies, and waits until
// these carry Services. Whoever has it must Close it.
func Open(ctx context.Context, kind *Kind, binary string, peers Peers, slow Slow, dir string) (*Testbed, error) {
	tb := &Testbed{Kind: kind, Proxies: make(map[string]*Proxy), Slow: slow, dir: dir}
	if err := tb.open(ctx, binary, peers); err != nil {
		return nil, errors.Join(err, tb.Close())
	}
	return tb, nil
}

func (tb *Testbed) open(ctx context.Context, binary string, peers Peers) error {
	var err error
	if tb.Topology, err = NewTopology(); err != nil {
		return err
	}
	dir := filepath.Join(tb.dir, "control")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	tb.Plane, err = control.Start(ctx, control.Config{
		Host: tb.Host("control"), Etcd: peers.Etcd, APIServer: peers.APIServer, ControllerManager: peers.ControllerManager,
		Dir: dir, ServiceRanges: ServiceRange, RequestTimeout: tb.requestTimeout(),
	})
	if err != nil {
		return err
	}
	tb.Client = tb.Plane.Client
	for i, node := range tb.Nodes() {
		if err := tb.createNode(ctx, i, node); err != nil {
			return err
		}
	}
	if err := tb.createCanary(ctx); err != nil {
		return err
	}
	for _, node := range tb.Nodes() {
		p, err := tb.NewProxy(node, tb.Kind, binary)
		if err != nil {
			return err
		}
		tb.Proxies[node] = p
		if err := p.Start(); err != nil {
			return err
		}
	}
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	go tb.watchStart(ctx, stop)
	if err := tb.Sync(ctx); err != nil {
		return err
	}
	return tb.AwaitStart(ctx)
}

// requestTimeout is how long the API server may take for a request: on a slow machine longer than usual, but not as
// much longer, since it takes that long to end, too.
func (tb *Testbed) requestTimeout() time.Duration {
	return max(10*time.Second, tb.Slow.Times(5*time.Second))
}

// watchStart ends the wait for proxies if one of them ends itself, with what it said last.
func (tb *Testbed) watchStart(ctx context.Context, stop context.CancelCauseFunc) {
	for ctx.Err() == nil {
		for node, p := range tb.Proxies {
			if p.Ended() {
				stop(fmt.Errorf("the proxy of %s has ended:\n%s", node, p.Tail()))
				return
			}
		}
		time.Sleep(50 * time.Millisecond)
	}
}

func (tb *Testbed) createNode(ctx context.Context, i int, name string) error {
	h := tb.Host(name)
	node := &v1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{
			v1.LabelHostname: name, v1.LabelTopologyZone: Zones[name],
		}},
		Spec: v1.NodeSpec{
			PodCIDR:  podRange(i)[0].String(),
			PodCIDRs: []string{podRange(i)[0].String(), podRange(i)[1].String()},
		},
	}
	node, err := tb.Client.CoreV1().Nodes().Create(ctx, node, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	for _, f := range lab.Families() {
		node.Status.Addresses = append(
			node.Status.Addresses,
			v1.NodeAddress{Type: v1.NodeInternalIP, Address: h.IP(f).String()},
		)
	}
	node.Status.Conditions = []v1.NodeCondition{{Type: v1.NodeReady, Status: v1.ConditionTrue, Reason: "Lab"}}
	_, err = tb.Client.CoreV1().Nodes().UpdateStatus(ctx, node, metav1.UpdateOptions{})
	return err
}

// Close ends the proxies and the control plane, and removes all hosts.
func (tb *Testbed) Close() error {
	errs := []error{tb.closeRecord()}
	for _, p := range tb.Proxies {
		errs = append(errs, p.Kill())
	}
	if tb.Plane != nil {
		errs = append(errs, tb.Plane.Close())
	}
	if tb.Topology != nil {
		errs = append(errs, tb.Topology.Close())
	}
	return errors.Join(errs...)
}

// until asks again and again until done says so, or ctx or the time is over, with the last error.
func until(ctx context.Context, limit time.Duration, done func() error) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for {
		err := done()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w (waited %v)", err, limit)
		case <-time.After(5 * time.Millisecond):
		}
	}
}
