package collector

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/http"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/verdict-proxy/verdict/internal/system/clock"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// elector has one process at a time lead, by a Lease, as Kubernetes' own controllers do. It is not client-go's elector:
// that one would link the clients of all of Kubernetes' types into the proxy, and nodes could see a leader before its
// annotations.
type elector struct {
	api      *api
	lease    snapshot.Name
	identity string
	// annotations are those of the Lease while this process leads.
	annotations map[string]string
	log         *slog.Logger

	// seen is the version of the Lease that was read last, and since when by this process's clock: other clocks do not
	// matter.
	seen      string
	seenSince time.Time
}

const (
	// leaseTerm is how long a leader that is gone is waited for. It renews its Lease every renewEvery, and stops to lead
	// if it could not for renewDeadline. Others look every pollEvery.
	leaseTerm     = 15 * time.Second
	renewEvery    = 5 * time.Second
	renewDeadline = 10 * time.Second
	retryEvery    = time.Second
	pollEvery     = 2 * time.Second
)

// run calls lead whenever this process leads, with a context that ends when it does not any more. It returns when ctx
// is done and lead has returned; then another process may lead at once.
func (e *elector) run(ctx context.Context, lead func(context.Context)) {
	told := ""
	for ctx.Err() == nil {
		asked := time.Now()
		l, err := e.acquire(ctx)
		if err != nil && ctx.Err() == nil && err.Error() != told {
			told = err.Error()
			e.log.Warn("failed to read or write the Lease; retrying", "lease", e.lease.String(), "err", err)
		}
		if l == nil {
			clock.Pause(ctx, pollEvery/2+rand.N(pollEvery))
			continue
		}
		told = ""
		e.log.Info("leading", "lease", e.lease.String())
		e.hold(ctx, l, asked, lead)
		e.log.Info("not leading any more", "lease", e.lease.String())
	}
}

// acquire takes the Lease, if it is free. It returns nil if it is not.
func (e *elector) acquire(ctx context.Context) (*coordinationv1.Lease, error) {
	l, err := e.api.lease(ctx, http.MethodGet, e.lease, nil)
	if isStatus(err, http.StatusNotFound) {
		fresh := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: e.lease.Namespace, Name: e.lease.Name}}
		e.fill(fresh)
		return kept(e.api.lease(ctx, http.MethodPost, e.lease, fresh))
	}
	if err != nil {
		return nil, err
	}
	if l.ResourceVersion != e.seen {
		e.seen, e.seenSince = l.ResourceVersion, time.Now()
	}
	if h := l.Spec.HolderIdentity; h != nil && *h != "" && !e.holds(l) {
		term := leaseTerm
		if s := l.Spec.LeaseDurationSeconds; s != nil {
			term = time.Duration(*s) * time.Second
		}
		if time.Since(e.seenSince) < term {
			return nil, nil
		}
	}
	e.fill(l)
	return kept(e.api.lease(ctx, http.MethodPut, e.lease, l))
}

// kept treats it as no error that somebody else was faster.
func kept(l *coordinationv1.Lease, err error) (*coordinationv1.Lease, error) {
	if isStatus(err, http.StatusConflict) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return l, nil
}

// fill makes a Lease this process's.
func (e *elector) fill(l *coordinationv1.Lease) {
	now := metav1.NowMicro()
	if !e.holds(l) {
		transitions := int32(0)
		if l.Spec.LeaseTransitions != nil {
			transitions = *l.Spec.LeaseTransitions + 1
		}
		l.Spec.LeaseTransitions, l.Spec.AcquireTime = &transitions, &now
	}
	term := int32(leaseTerm / time.Second)
	l.Spec.HolderIdentity, l.Spec.LeaseDurationSeconds, l.Spec.RenewTime = &e.identity, &term, &now
	if l.Annotations == nil {
		l.Annotations = map[string]string{}
	}
	maps.Copy(l.Annotations, e.annotations)
}

// hold renews the Lease while lead runs, and gives it back. A term begins before its request: answers may be read late.
func (e *elector) hold(ctx context.Context, l *coordinationv1.Lease, renewed time.Time, lead func(context.Context)) {
	leading, stop := context.WithCancel(ctx)
	defer stop()
	var led sync.WaitGroup
	led.Go(func() { lead(leading) })
	for {
		wait := renewEvery
		if time.Since(renewed) > renewEvery {
			wait = retryEvery
		}
		clock.Pause(leading, wait)
		if leading.Err() != nil {
			break
		}
		asked := time.Now()
		next, err := e.renew(leading, l, renewed.Add(renewDeadline))
		if err == nil {
			l, renewed = next, asked
			continue
		}
		if isStatus(err, http.StatusConflict) || time.Since(renewed) >= renewDeadline {
			e.log.Warn("lost the Lease", "lease", e.lease.String(), "err", err)
			break
		}
	}
	stop()
	led.Wait()
	e.release(l)
}

func (e *elector) renew(ctx context.Context, l *coordinationv1.Lease, deadline time.Time) (*coordinationv1.Lease,
	error) {
	ctx, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	next := l.DeepCopy()
	e.fill(next)
	got, err := e.api.lease(ctx, http.MethodPut, e.lease, next)
	if err != nil {
		return nil, err
	}
	if !e.holds(got) {
		return nil, fmt.Errorf("%s is another process's", e.lease)
	}
	return got, nil
}

// release lets another process lead at once. If that fails, others wait for the term.
func (e *elector) release(l *coordinationv1.Lease) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	err := e.free(ctx, l)
	if isStatus(err, http.StatusConflict) { // a renewal may have come through whose answer did not
		if l, err = e.api.lease(ctx, http.MethodGet, e.lease, nil); err == nil && e.holds(l) {
			err = e.free(ctx, l)
		}
	}
	if err != nil {
		e.log.Warn("failed to give the Lease back", "lease", e.lease.String(), "err", err)
	}
}

// free writes a Lease that nobody holds.
func (e *elector) free(ctx context.Context, l *coordinationv1.Lease) error {
	free := l.DeepCopy()
	nobody, second := "", int32(1)
	free.Spec.HolderIdentity, free.Spec.LeaseDurationSeconds = &nobody, &second
	for k := range e.annotations {
		delete(free.Annotations, k)
	}
	_, err := e.api.lease(ctx, http.MethodPut, e.lease, free)
	return err
}

func (e *elector) holds(l *coordinationv1.Lease) bool {
	return l.Spec.HolderIdentity != nil && *l.Spec.HolderIdentity == e.identity
}
