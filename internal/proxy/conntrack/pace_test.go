package conntrack

import (
	"context"
	"errors"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/reconcile/reconciletest"
)

// slowTable lists flow by flow, and each takes twice as long as may be worked without a pause.
type slowTable struct {
	fakeTable
	at []time.Time
}

func (t *slowTable) list(_ query, do func([]flow) error) error {
	for _, f := range t.left() {
		time.Sleep(2 * workAtOnce)
		t.at = append(t.at, time.Now())
		if err := do([]flow{f}); err != nil {
			return err
		}
	}
	return nil
}

// TestPauses: within a list of many flows, and not only behind it, there is a pause as long as the work before it.
func TestPauses(t *testing.T) {
	for _, c := range []struct {
		key  string
		made func(*Walker) reconcile.Listener
	}{
		{dnsKey, func(w *Walker) reconcile.Listener { return NewCleaner(w, nil).Listener() }},
		{webKey, func(w *Walker) reconcile.Listener { return NewReleaser(w, ReleaserOptions{}).Listener() }},
	} {
		synctest.Test(t, func(t *testing.T) {
			table := &slowTable{}
			for range 5 {
				table.add(c.key, "10.0.0.1:80")
			}
			ctx, cancel := context.WithCancel(t.Context())
			w := newWalker(table)
			loop := &reconciletest.Loop{Listeners: []reconcile.Listener{c.made(w)}, Writer: backendFunc(fine)}
			go w.Run(ctx)
			_, err := loop.Apply(state(service("web", c.key+">10.0.0.1:80")), dataplane.Change{})
			labtest.Check(t, err)
			rest(time.Minute)
			if len(table.at) < 5 {
				t.Fatalf("%s: %d flows were listed", c.key, len(table.at))
			}
			for i := range 4 {
				if gap := table.at[i+1].Sub(table.at[i]); gap != 4*workAtOnce {
					t.Errorf("%s: %v from flow %d to the next, want %v", c.key, gap, i, 4*workAtOnce)
				}
			}
			cancel()
			synctest.Wait()
		})
	}
}

// TestUnansweredOnce: each flow of a list that comes in parts is taken once.
func TestUnansweredOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := &slowTable{}
		for range 5 {
			table.add(webKey, "10.0.0.1:80")
		}
		flows, endpoints := 0, []netip.AddrPort{netip.MustParseAddrPort("10.0.0.1:80")}
		_, err := newUnanswered(t, table).Delete(t.Context(), endpoints, func(WaitingFlow) bool {
			flows++
			return false
		})
		labtest.Check(t, err)
		if flows != 5 {
			t.Errorf("took %d flows of 5", flows)
		}
	})
}

// TestNobodyWaitsForWriting: while a transaction takes long, others can set up a Cleaner, it looks what is due, and the
// end of the process ends a sweep that waits for the transaction. No flow is deleted meanwhile.
func TestNobodyWaitsForWriting(t *testing.T) {
	st := state(service("dns", dnsKey+">10.0.0.2:53"))
	table := &fakeTable{}
	c := newCleaner(table, nil)
	_, err := behind(c, backendFunc(fine)).Apply(st, dataplane.Change{})
	labtest.Check(t, err)
	table.add(dnsKey, "10.0.0.1:53")
	within := func(what string, do func()) {
		done := make(chan struct{})
		go func() { do(); close(done) }()
		select {
		case <-done:
		case <-time.After(5 * time.Second):
			t.Errorf("waits for the transaction: %s", what)
		}
	}
	_, err = behind(c, backendFunc(func(*dataplane.State) (dataplane.Receipt, error) {
		within("SetAsKubeProxy", func() { c.SetAsKubeProxy(false) })
		within("next", func() { c.next(time.Time{}, time.Time{}) })
		within("next of the Releaser", func() { c.tcp.next(time.Time{}, time.Time{}) })
		if t.Failed() {
			return dataplane.Receipt{}, nil
		}
		ctx, cancel := context.WithCancel(context.Background())
		s := c.takeDue()
		time.AfterFunc(50*time.Millisecond, cancel)
		within("a sweep", func() {
			if r := s.run(ctx); !errors.Is(r.Err, context.Canceled) || s.all == 0 {
				t.Errorf("a sweep during a transaction: %+v", r)
			}
		})
		if n := len(table.left()); n != 1 {
			t.Errorf("%d flows are left", n)
		}
		return dataplane.Receipt{}, nil
	})).Apply(st, dnsChange)
	labtest.Check(t, err)
}
