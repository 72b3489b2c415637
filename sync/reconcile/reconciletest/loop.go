// Package reconciletest helps to test what listens to a reconcile.Loop.
package reconciletest

import (
	"maps"
	"slices"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Loop is a Writer that writes by another one and tells listeners of it as a reconcile.Loop does. Unlike that, it
// does what it is told at once.
type Loop struct {
	reconcile.Writer
	Listeners []reconcile.Listener

	// held are the Services that are wholly written, left those that are not. Filled says that the first state is.
	held   map[snapshot.Name]*dataplane.Service
	left   []snapshot.Name
	filled bool
}

// Apply has the Writer write and tells what that changed, whatever the Change names.
func (l *Loop) Apply(want *dataplane.State, change dataplane.Change) (dataplane.Receipt, error) {
	for _, h := range l.Listeners {
		if h.Writing != nil {
			h.Writing()
		}
	}
	start := time.Now()
	r, err := l.Writer.Apply(want, change)
	if err != nil {
		for _, h := range l.Listeners {
			if h.Failed != nil {
				h.Failed(reconcile.Failure{Err: err, Took: time.Since(start)})
			}
		}
		return r, err
	}
	c := reconcile.Commit{Receipt: r, First: !l.filled}
	c.Before, c.After = l.committed(want, change, r.Left)
	l.filled = l.filled || len(r.Left) == 0
	for _, h := range l.Listeners {
		if h.Committed != nil {
			h.Committed(c)
		}
	}
	return r, nil
}

// committed takes over what was written, and gives it as it was and as it is.
func (l *Loop) committed(want *dataplane.State, change dataplane.Change, left []snapshot.Name,
) (before, after []*dataplane.Service) {
	names := map[snapshot.Name]bool{}
	for _, list := range [][]snapshot.Name{change.Services, l.left} {
		for _, n := range list {
			names[n] = true
		}
	}
	for _, services := range []map[snapshot.Name]*dataplane.Service{want.Services, l.held} {
		for n := range services {
			names[n] = names[n] || want.Services[n] != l.held[n]
		}
	}
	l.left = slices.Clone(left)
	for _, n := range left {
		names[n] = false
	}
	if l.held == nil {
		l.held = map[snapshot.Name]*dataplane.Service{}
	}
	for _, n := range slices.SortedFunc(maps.Keys(names), snapshot.Name.Compare) {
		if !names[n] {
			continue
		}
		before, after = append(before, l.held[n]), append(after, want.Services[n])
		if l.held[n] = want.Services[n]; l.held[n] == nil {
			delete(l.held, n)
		}
	}
	return before, after
}

// Filled says that the first state is wholly written.
func (l *Loop) Filled() bool { return l.filled }

// Held gives what is wholly written.
func (l *Loop) Held() map[snapshot.Name]*dataplane.Service { return l.held }

// Check looks, and tells what was found.
func (l *Loop) Check() (found []string, again time.Duration, err error) {
	found, again, err = l.Writer.Check()
	for _, h := range l.Listeners {
		if h.Checked != nil {
			h.Checked(reconcile.Check{Found: found, Err: err})
		}
	}
	return found, again, err
}
