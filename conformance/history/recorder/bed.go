package recorder

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/verdict-proxy/verdict/conformance/history"
	"github.com/verdict-proxy/verdict/conformance/testbed"
	"github.com/verdict-proxy/verdict/internal/lab"
)

// pod is a host that serves or asks.
type pod struct {
	*lab.Host
	node string
}

// bed is a testbed in which histories are made.
type bed struct {
	*testbed.Testbed
	clients, pods []*pod
	// newer and older are two versions of the proxy's program; older may be empty.
	newer, older string
	number       atomic.Int32 // of the histories and their ports
}

const (
	// clientsOfNode and podsOfNode are how many pods of each node ask and serve.
	clientsOfNode = 3
	podsOfNode    = 4
)

// newBed adds pods to a testbed, and restarts the proxies with a minSyncPeriod.
func newBed(ctx context.Context, tb *testbed.Testbed, minSync time.Duration) (*bed, error) {
	b := &bed{Testbed: tb}
	for _, node := range tb.Nodes() {
		for i := range clientsOfNode + podsOfNode {
			host, err := tb.AddPod(node)
			if err != nil {
				return nil, err
			}
			if i < clientsOfNode {
				b.clients = append(b.clients, &pod{host, node})
			} else {
				b.pods = append(b.pods, &pod{host, node})
			}
		}
	}
	return b, tb.SetMinSyncPeriod(ctx, minSync)
}

// Settings say how histories are made.
type Settings struct {
	// Length is how long Services change.
	Length time.Duration
	// Rate is how many connections a second each client opens to each Service.
	Rate float64
	// Look is how long clients connect when everything is at rest.
	Look time.Duration
}

// firstPort is below the ports of all histories. Each has ports of its own, so that no proxy knows them from another.
const firstPort = 9500

// play makes a history, and has failures explained.
func (b *bed) play(ctx context.Context, s *scenario, settings Settings, header history.Header,
	failures *testbed.Failures) (h *history.History, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	number := int(b.number.Add(1))
	header.Format = history.Format
	r := &recording{
		bed: b, ctx: ctx, settings: settings, namespace: fmt.Sprintf("history-%d", number), began: time.Now(),
		history: &history.History{Header: header}, old: map[*testbed.Proxy]bool{}, failures: failures,
	}
	failures.Harm()
	r.atEnd(r.renew)
	defer func() { err = errors.Join(err, r.end()) }()
	if err := r.prepare(s, firstPort+number*maxServices, header.Seed); err != nil {
		return nil, err
	}
	if err := r.run(s, header.Seed); err != nil {
		return nil, err
	}
	return r.history, nil
}

// prepare makes the Services, with the endpoints that they begin with.
func (r *recording) prepare(s *scenario, port int, seed uint64) error {
	if err := r.CreateNamespace(r.ctx, r.namespace); err != nil {
		return err
	}
	r.atEnd(func() error {
		slices := r.Client.DiscoveryV1().EndpointSlices(r.namespace)
		return slices.DeleteCollection(context.WithoutCancel(r.ctx), deleteOptions, listOptions)
	})
	for i := range s.services {
		own := uint16(port)
		if !s.shared {
			own += uint16(i)
		}
		w, err := r.createService(fmt.Sprintf("%s-%d", s.name, i), own, s.affinity)
		if err != nil {
			return err
		}
		r.services = append(r.services, w)
	}
	rng := rand.New(rand.NewPCG(seed, 0))
	for i, w := range r.services {
		for n, p := range r.pods {
			if s.shared && n%s.services != i {
				continue
			}
			server, err := r.serve(p, w.port, w)
			if err != nil {
				return err
			}
			w.pool = append(w.pool, server)
		}
		w.fill(rng, fewest, most)
		if err := w.publish(); err != nil {
			return err
		}
	}
	return r.Sync(r.ctx)
}

// run changes the Services while clients connect and the fault happens, waits for rest, and looks once more.
func (r *recording) run(s *scenario, seed uint64) error {
	stop := make(chan struct{})
	group, ctx := errgroup.WithContext(r.ctx)
	r.ctx = ctx
	for _, w := range r.services {
		for _, from := range r.clients {
			group.Go(func() error { return w.connect(from, r.settings.Rate, stop) })
		}
	}
	group.Go(func() error {
		defer close(stop)
		end := time.Now().Add(r.settings.Length)
		scripts, _ := errgroup.WithContext(ctx)
		script := func(do func(*rand.Rand) error, n uint64) {
			scripts.Go(func() error {
				rng := rand.New(rand.NewPCG(seed, n+1))
				for time.Now().Before(end) && ctx.Err() == nil {
					if err := do(rng); err != nil {
						return err
					}
				}
				return nil
			})
		}
		if s.shared {
			script(func(rng *rand.Rand) error { return s.all(r, rng) }, 0)
		} else {
			for i, w := range r.services {
				script(func(rng *rand.Rand) error { return s.step(w, rng) }, uint64(i))
			}
		}
		if s.fault != nil {
			script(func(rng *rand.Rand) error { return s.fault(r, rng, end) }, 100)
		}
		if err := scripts.Wait(); err != nil {
			return err
		}
		return r.rest(rand.New(rand.NewPCG(seed, 200)))
	})
	return group.Wait()
}

// rest writes what shall be seen in the end, waits until the proxies have it by the suite's own sign, and looks.
func (r *recording) rest(rng *rand.Rand) error {
	for _, w := range r.services {
		w.fill(rng, 2, fewest+1)
		if err := w.publish(); err != nil {
			return err
		}
	}
	if err := r.Sync(r.ctx); err != nil {
		return err
	}
	if err := sleep(r.ctx, settle); err != nil {
		return err
	}
	r.note(func(h *history.History) { h.Rest = r.ceil() })
	return sleep(r.ctx, r.settings.Look)
}

// settle is between the sign that the proxies have everything, and the rest.
const settle = time.Second
