// Package watch is where a proxy's knowledge comes from: the Kubernetes API, manifest files, and this host's own
// addresses. Each source runs by itself, turns what it sees into snapshot values at once, and tells a Sink only what
// differs from what it said before. Nothing outside this package knows a Kubernetes type.
//
// Sources never log. What is wrong with their input goes to their Report callback, as a *Problem where an object is at
// fault; whatever is right about the input is used all the same.
package watch

import (
	"slices"
	"sync"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Sink takes what sources see; *snapshot.Queue is one. Both methods must be safe for concurrent use.
type Sink interface {
	// Put takes what changed. The sink owns the delta; the objects in it are never changed again.
	Put(snapshot.Delta)
	// Synced is called once, after the Put that makes the source's first complete list.
	Synced()
}

// quietly gives a report function that can be called from several goroutines, one call at a time, even if report is
// nil.
func quietly(report func(error)) func(error) {
	if report == nil {
		return func(error) {}
	}
	var mu sync.Mutex
	return func(err error) {
		mu.Lock()
		defer mu.Unlock()
		report(err)
	}
}

// maxShared bounds the table of strings: node names come and go for as long as the process lives. Starting again costs
// only some sharing.
const maxShared = 1 << 14

// shared gives equal strings the same memory: ten thousand endpoints name a few hundred nodes and zones. The unique
// package can't do that here, since it forgets a value once no handle is left, and a handle is what we don't keep.
type shared struct {
	mu      sync.Mutex
	strings map[string]string
	lists   map[string][]string
}

// text gives a string equal to s that keeps nothing else alive: s may be part of a file of many megabytes.
func (t *shared) text(s string) string {
	if s == "" {
		return ""
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.textLocked(s)
}

func (t *shared) textLocked(s string) string {
	if have, ok := t.strings[s]; ok {
		return have
	}
	if t.strings == nil || len(t.strings) >= maxShared {
		t.strings, t.lists = map[string]string{}, map[string][]string{}
	}
	s = string([]byte(s))
	t.strings[s] = s
	return s
}

// list is text for hints, nearly all of which name a single zone or node.
func (t *shared) list(names []string) []string {
	if len(names) == 0 {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(names) > 1 {
		names = slices.Clone(names)
		for i := range names {
			names[i] = t.textLocked(names[i])
		}
		return names
	}
	if have, ok := t.lists[names[0]]; ok {
		return have
	}
	one := t.textLocked(names[0])
	t.lists[one] = []string{one}
	return t.lists[one]
}
