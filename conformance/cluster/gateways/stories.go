package gateways

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/conformance/cluster"
)

// thousands is how many connections are held, and how many are opened while weights change.
const thousands = 10_000

// weights holds connections, and changes the route's weights while others are opened.
func weights(ctx context.Context, b *Bed) (string, error) {
	first, held := b.send(ctx, thousands, true)
	defer func() {
		for _, a := range held {
			if a.conn != nil {
				a.conn.Close()
			}
		}
	}()
	x := chiSquare(first.by, map[string]float64{"db": 0.8, "db-next": 0.2})
	done := make(chan *tally)
	go func() {
		t, _ := b.send(ctx, thousands, false)
		done <- t
	}()
	took, others, err := b.changeUntil(ctx, done)
	broken := 0
	for _, a := range held {
		if a.conn == nil {
			continue // counted as failed
		}
		if pod, err := ask(a.conn); err != nil || pod != a.pod {
			broken++
		}
	}
	_, back := b.route(ctx, 80, 20)
	slices.Sort(took)
	text := fmt.Sprintf("80/20: %v, chi-square %.2f; %d others opened under %d changes to 1/0 and 0/1, %d failed; "+
		"a change accepted after %v, at most %v; of the held ones %d broke", first.by, x, others.all(), len(took),
		others.failed, round(took[len(took)/2]), round(took[len(took)-1]), broken)
	if x > 20 { // once in 100,000 times
		err = errors.Join(err, errors.New("the shares are not the weights"))
	}
	if broken > 0 {
		err = errors.Join(err, errors.New("held connections broke"))
	}
	return text, errors.Join(err, first.unharmed(), others.unharmed(), back)
}

// changeUntil gives all connections to one Service and to the other in turn until done has something, and returns it.
func (b *Bed) changeUntil(ctx context.Context, done <-chan *tally) (took []time.Duration, others *tally, err error) {
	for next := true; err == nil; next = !next {
		var d time.Duration
		d, err = b.only(ctx, next)
		took = append(took, d)
		select {
		case others := <-done:
			return took, others, err
		default:
		}
	}
	return took, <-done, err
}

// only gives one of the two Services all connections, and checks it with 200.
func (b *Bed) only(ctx context.Context, next bool) (time.Duration, error) {
	db, want := 1, "db"
	if next {
		db, want = 0, "db-next"
	}
	took, err := b.route(ctx, db, 1-db)
	if err != nil {
		return took, err
	}
	t, _ := b.send(ctx, 200, false)
	if t.by[want] != 200 {
		return took, fmt.Errorf("with weight 0 for the other, 200 connections go to %v, %d fail: %v", t.by, t.failed, t.errs)
	}
	return took, nil
}

func chiSquare(by map[string]int, shares map[string]float64) (x float64) {
	n := 0
	for _, k := range by {
		n += k
	}
	for name, share := range shares {
		d := float64(by[name]) - share*float64(n)
		x += d * d / (share * float64(n))
	}
	return x
}

func round(d time.Duration) time.Duration { return d.Round(time.Millisecond) }

const grant = `apiVersion: gateway.networking.k8s.io/v1
kind: ReferenceGrant
metadata: {name: edge, namespace: shop}
spec:
  from: [{group: gateway.networking.k8s.io, kind: TCPRoute, namespace: edge}]
  to: [{group: "", kind: Service}]
`

// otherNamespace routes to a Service of another namespace without a grant, with one, and without again.
func otherNamespace(ctx context.Context, b *Bed) (string, error) {
	_, err := b.patchRoute(ctx, `[{"name": "other", "namespace": "shop", "port": 80}]`, "ResolvedRefs", "False")
	if err != nil {
		return "", err
	}
	before, _ := b.send(ctx, 100, false)
	begin := time.Now()
	if err := b.Apply(ctx, grant); err != nil {
		return "", err
	}
	granted, err := b.routeSays(ctx, begin, "ResolvedRefs", "True")
	if err != nil {
		return "", err
	}
	during, _ := b.send(ctx, 100, false)
	begin = time.Now()
	if _, err := b.Kubectl(ctx, "-n", "shop", "delete", "referencegrant", "edge"); err != nil {
		return "", err
	}
	var took time.Duration
	err = cluster.Wait(ctx, time.Minute, "connections are refused", func() error {
		a, err := b.open(ctx)
		if err != nil {
			took = time.Since(begin)
			return nil
		}
		a.conn.Close()
		return errors.New("they are answered")
	})
	if err != nil {
		return "", err
	}
	after, _ := b.send(ctx, 100, false)
	_, back := b.route(ctx, 80, 20)
	text := fmt.Sprintf("of 100 connections %d answered without a grant, %d with it (%v after kubectl apply began), %d "+
		"after it was deleted (refused %v after kubectl delete began)", before.all(), during.by["other"], round(granted),
		after.all(), round(took))
	if before.all() > 0 || during.by["other"] != 100 || after.all() > 0 {
		err = errors.New("that is not right")
	}
	for _, e := range slices.Concat(before.errs, after.errs) {
		if !strings.Contains(e.Error(), "refused") {
			err = errors.Join(err, e)
		}
	}
	return text, errors.Join(err, back)
}

// killed kills the controller that leads, and changes the route before another one does.
func killed(ctx context.Context, b *Bed) (string, error) {
	stop := b.always(ctx)
	l, err := b.leader(ctx)
	if err == nil {
		err = b.signal(ctx, l, "KILL")
	}
	var took time.Duration
	if err == nil {
		took, err = b.only(ctx, true)
	}
	t := stop()
	_, back := b.route(ctx, 80, 20)
	return fmt.Sprintf("a change made right afterwards accepted after %v; %d connections, %d failed", round(took), t.all(),
		t.failed), errors.Join(err, t.unharmed(), back)
}

// twice stops the controller that leads until another one does, and lets it go on: for a moment both may think that
// they lead. Nodes stay connected to the one that was stopped: its return is news, and a status may be written once.
func twice(ctx context.Context, b *Bed) (string, error) {
	stop := b.always(ctx)
	var wrote writes
	l, err := b.leader(ctx)
	if err == nil {
		err = b.signal(ctx, l, "STOP")
	}
	if err == nil {
		err = cluster.Wait(ctx, 2*time.Minute, "another controller leads", func() error {
			now, err := b.leader(ctx)
			if err == nil && now == l {
				err = errors.New("none does")
			}
			return err
		})
		if err == nil {
			_, err = b.only(ctx, true)
		}
		before, e := b.writes(ctx)
		err = errors.Join(err, e, b.signal(context.WithoutCancel(ctx), l, "CONT"))
		select {
		case <-ctx.Done():
		case <-time.After(20 * time.Second): // a time in which two would fight: there is nothing to wait for
		}
		after, e := b.writes(ctx)
		wrote = after.minus(before)
		if err = errors.Join(err, e); err == nil && (wrote.Gateways > 1 || wrote.Routes > 1) {
			err = errors.New("they write by turns")
		}
	}
	t := stop()
	_, back := b.route(ctx, 80, 20)
	return fmt.Sprintf("in the 20 s after the old one went on, statuses were written: %+v; %d connections, %d failed",
		wrote, t.all(), t.failed), errors.Join(err, t.unharmed(), back)
}

// serverGone stops the API server for a minute. Statuses are the same afterwards, and a change reaches packets.
func serverGone(ctx context.Context, b *Bed) (string, error) {
	stop := b.always(ctx)
	err := b.outage(ctx)
	begin := time.Now()
	var accepted, all time.Duration
	if err == nil {
		accepted, err = b.route(ctx, 0, 1)
	}
	if err == nil {
		// A route says that it is accepted after some seconds, even if nodes are not there: it has no condition for them.
		err = cluster.Wait(ctx, time.Minute, "all connections go where the route says", func() error {
			t, _ := b.send(ctx, 50, false)
			if all = time.Since(begin); t.by["db-next"] != 50 {
				return fmt.Errorf("they go to %v", t.by)
			}
			return nil
		})
	}
	t := stop()
	_, back := b.route(ctx, 80, 20)
	return fmt.Sprintf("the same statuses afterwards; a change made at once accepted after %v, in packets after %v; %d "+
		"connections, %d failed", round(accepted), round(all), t.all(), t.failed), errors.Join(err, t.unharmed(), back)
}

func (b *Bed) outage(ctx context.Context) error {
	before, err := b.statuses(ctx)
	if err != nil {
		return err
	}
	if err := b.StopServer(); err != nil {
		return err
	}
	select {
	case <-ctx.Done():
	case <-time.After(time.Minute):
	}
	if err := b.StartServer(ctx); err != nil {
		return err
	}
	after, err := b.statuses(ctx)
	if err == nil && after != before {
		err = fmt.Errorf("statuses were %s, and are %s", before, after)
	}
	return err
}
