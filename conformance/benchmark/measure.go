package benchmark

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/conformance/benchmark/results"
	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// errLimit says that something was not done in the time it had.
var errLimit = errors.New("not done in time")

// pause is how long to wait before the next look at something that has not come after so long: so looks are few where
// much is to do, and the error stays at two in a hundred.
func pause(waited time.Duration) time.Duration {
	return min(max(waited/50, 300*time.Microsecond), 50*time.Millisecond)
}

// await looks until there is what is waited for, and gives the time since began. The error is errLimit, that of
// check, or ctx's.
func await(
	ctx context.Context,
	began time.Time,
	limit time.Duration,
	check func() error,
	look func() bool,
) (time.Duration, error) {
	checked := began
	for {
		if look() {
			return time.Since(began), nil
		}
		waited := time.Since(began)
		if waited >= limit {
			return waited, errLimit
		}
		if time.Since(checked) > time.Second {
			checked = time.Now()
			if err := check(); err != nil {
				return waited, err
			}
		}
		if err := rest(ctx, pause(waited)); err != nil {
			return waited, err
		}
	}
}

// rest sleeps. The runtime's own timers may be late by a millisecond where nothing else goes on, so short rests are
// the kernel's.
func rest(ctx context.Context, d time.Duration) error {
	if d >= 5*time.Millisecond {
		return sleep(ctx, d)
	}
	t := unix.NsecToTimespec(d.Nanoseconds())
	_ = unix.Nanosleep(&t, nil) // a signal may cut it short
	return ctx.Err()
}

// lookTimeout is how long a look waits for an answer. A proxy may have dropped the first packet, and the client would
// send it again after a second.
const lookTimeout = 150 * time.Millisecond

// reaches says where a connection from the client ends just now; an invalid address means nowhere.
func (n *node) reaches(to netip.AddrPort) netip.Addr {
	r := n.client.Dial(snapshot.TCP, to, lab.Options{Timeout: lookTimeout})
	return r.Destination.Addr()
}

// wait makes a result of what await gave. That the limit was hit is a result and no error; after an error there is
// none.
func (n *node) wait(d time.Duration, err error) (*results.Wait, error) {
	w := &results.Wait{Seconds: d.Seconds(), Limit: errors.Is(err, errLimit), Processor: n.usage.processor().Seconds()}
	if err != nil && !w.Limit {
		return nil, err
	}
	return w, nil
}

// sampled is how many Services are looked at again and again before all are tried.
const sampled = 32

// untilAll waits until every Service answers. Those of the sample are waited for one after the other. Then each of
// the cluster is tried, and what does not answer was not there when the sample was, and is waited for.
func (n *node) untilAll(ctx context.Context, began time.Time, limit time.Duration) (*results.Wait, error) {
	var took time.Duration
	sample := n.spread(sampled)
	for i := range probes {
		sample = append(sample, n.probe(i))
	}
	for _, i := range sample {
		var err error
		answers := func() bool { return n.reaches(n.frontend(i)).IsValid() }
		if took, err = await(ctx, began, limit, n.ended, answers); err != nil {
			return n.wait(took, err)
		}
	}
	w, err := n.wait(took, nil)
	for _, i := range n.missing(ctx) {
		took, err = await(ctx, began, limit, n.ended, func() bool { return n.reaches(n.frontend(i)).IsValid() })
		if w, err = n.wait(took, err); err != nil || w.Limit {
			return w, err
		}
	}
	return w, errors.Join(err, ctx.Err())
}

// missing tries every Service and gives those that do not answer, twice: on a busy machine one look may come too late.
func (n *node) missing(ctx context.Context) (services []int) {
	for i := range n.size.Services {
		if ctx.Err() == nil && !n.reaches(n.frontend(i)).IsValid() && !n.reaches(n.frontend(i)).IsValid() {
			services = append(services, i)
		}
	}
	return services
}

// first starts the proxy and waits until it carries everything.
func (n *node) first(ctx context.Context, limit time.Duration) (*results.Wait, error) {
	began := time.Now()
	if err := n.start(); err != nil {
		return nil, err
	}
	if err := n.attach(ctx, began, limit); err != nil {
		return n.wait(time.Since(began), err)
	}
	return n.untilAll(ctx, began, limit)
}

func (n *node) stop(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	return n.proxy.Stop(ctx)
}

// A process is at rest when it and its children have used less than a part of a second of processor time in two
// seconds: kube-proxy lets one pass between the end of a sync and the next.
const (
	restTime = 2 * time.Second
	restMost = 100 * time.Millisecond
	restLook = 20 * time.Millisecond
)

// again restarts the proxy while nothing changes, and waits until it is at rest: there is nothing to see in packets,
// which go on all the time. The result is the time until the rest began.
func (n *node) again(ctx context.Context, limit time.Duration) (*results.Wait, error) {
	if err := n.stop(ctx); err != nil {
		return nil, err
	}
	began := time.Now()
	if err := n.start(); err != nil {
		return nil, err
	}
	if err := n.serving(ctx, began, limit); err != nil {
		return n.wait(time.Since(began), err)
	}
	return n.calm(ctx, began, limit)
}

// calm waits until the proxy is at rest, and gives the time from a beginning until that began.
func (n *node) calm(ctx context.Context, began time.Time, limit time.Duration) (*results.Wait, error) {
	r := resting{}
	for {
		waited := time.Since(began)
		quiet, busy, ok := r.look(waited, n.usage.processor())
		switch {
		case ok:
			return &results.Wait{Seconds: quiet.Seconds(), Processor: busy.Seconds()}, nil
		case waited > limit:
			return n.wait(waited, errLimit)
		}
		if err := errors.Join(n.ended(), sleep(ctx, restLook)); err != nil {
			return nil, err
		}
	}
}

// resting finds the first time of rest in a growing processor time.
type resting struct{ at, busy []time.Duration }

// look takes the processor time at a moment, and gives when rest began and what had been used by then, as soon as it
// has lasted.
func (r *resting) look(at, busy time.Duration) (quiet, used time.Duration, ok bool) {
	r.at, r.busy = append(r.at, at), append(r.busy, busy)
	for len(r.at) > 1 && busy-r.busy[0] >= restMost {
		r.at, r.busy = r.at[1:], r.busy[1:]
	}
	return r.at[0], r.busy[0], at-r.at[0] >= restTime && busy > 0
}

// away restarts the proxy, and changes an endpoint while it is away, which tells when it has caught up.
func (n *node) away(ctx context.Context, limit time.Duration) (*results.Wait, error) {
	if err := n.stop(ctx); err != nil {
		return nil, err
	}
	want, err := n.change(ctx, n.probe(0), 0)
	if err != nil {
		return nil, err
	}
	began := time.Now()
	if err := n.start(); err != nil {
		return nil, err
	}
	return n.wait(await(ctx, began, limit, n.ended, func() bool { return n.reaches(n.frontend(n.probe(0))) == want }))
}

// change replaces one endpoint by a newcomer, through the API server.
func (w *world) change(ctx context.Context, service, endpoint int) (newcomer netip.Addr, err error) {
	slice, newcomer := w.replace(service, endpoint)
	body, err := encodeSlice(slice)
	if err != nil {
		return newcomer, err
	}
	const protobuf = "application/vnd.kubernetes.protobuf"
	_, err = w.plane.Client.DiscoveryV1().
		RESTClient().
		Put().
		Namespace(slice.Namespace).
		Resource("endpointslices").
		Name(slice.Name).
		SetHeader("Content-Type", protobuf).
		SetHeader("Accept", protobuf).
		Body(body).
		DoRaw(ctx)
	if err != nil {
		return newcomer, fmt.Errorf("write EndpointSlice %s/%s: %w", slice.Namespace, slice.Name, err)
	}
	return newcomer, nil
}

// samples gathers spans of changes.
type samples struct {
	mu     sync.Mutex
	done   []float64
	open   []float64
	writes []float64
}

// span writes one change of a probe and waits for the kernel to have it, from before the request to the first
// connection that ends at the newcomer. A limit that was hit is counted, and no error.
func (n *node) span(ctx context.Context, s *samples, probe int, limit time.Duration) error {
	began := time.Now()
	want, err := n.change(ctx, n.probe(probe), 0)
	if err != nil {
		return err
	}
	written := milliseconds(time.Since(began))
	took, err := await(ctx, began, limit, n.ended, func() bool { return n.reaches(n.frontend(n.probe(probe))) == want })
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case err == nil:
		s.done = append(s.done, milliseconds(took))
	case errors.Is(err, errLimit):
		s.open = append(s.open, milliseconds(took))
	default:
		return err
	}
	s.writes = append(s.writes, written)
	return nil
}

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

func (s *samples) spans() results.Spans {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := results.Spans{Milliseconds: append(s.done, s.open...), Open: len(s.open)}
	if len(s.writes) > 0 {
		out.Write = results.Median(s.writes)
	}
	return out
}

// The pause between single changes is longer than the second that kube-proxy lets pass between two of its syncs, by
// default and at least, so that a change never waits for it.
const (
	quietLeast = 1500 * time.Millisecond
	quietMore  = 500 * time.Millisecond
)

// changes tries single changes, one after the other in a proxy that is at rest otherwise. After the limit none
// begins, and each has as long to arrive.
func (n *node) changes(ctx context.Context, count int, limit time.Duration) (*results.Spans, error) {
	s := &samples{}
	end := time.Now().Add(limit)
	for i := range count {
		if err := sleep(ctx, quietLeast+rand.N(quietMore)); err != nil {
			return nil, err
		}
		if !time.Now().Before(end) {
			break
		}
		if err := n.span(ctx, s, i%probes, limit); err != nil {
			return nil, err
		}
	}
	spans := s.spans()
	return &spans, nil
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(d):
		return nil
	}
}
