// Package watch holds the sources of a proxy's state: the Kubernetes API, manifest files, and this host's own
// addresses. Each source runs by itself, converts what it reads into snapshot values at once, and sends a Sink only
// what differs from what it sent before. Nothing outside this package knows a Kubernetes type.
//
// Sources never log. They report errors in their input to their Report callback, as a *Problem where an object is at
// fault. The valid rest of the input is used all the same.
package watch

import (
	"slices"
	"sync"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Sink receives what sources read; *snapshot.Queue is one. Both methods must be safe for concurrent use.
type Sink interface {
	// Put takes a delta and owns it. The objects in it are never changed again.
	Put(snapshot.Delta)
	// Synced is called once, after the Put that completes the source's first list.
	Synced()
}

// serialized wraps a report function, which may be nil, so that it can be called from several goroutines, one call at a
// time.
func serialized(report func(error)) func(error) {
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

// maxInterned bounds the table of strings: node names come and go for as long as the process lives. Clearing it only
// costs some sharing.
const maxInterned = 1 << 14

// interner stores equal strings once: ten thousand endpoints name a few hundred nodes and zones. The unique package
// does not fit here, since it drops a value once no handle is left, and handles are what we do not keep.
type interner struct {
	mu      sync.Mutex
	strings map[string]string
	lists   map[string][]string
}

// intern returns a string equal to s that keeps nothing else alive: s may be part of a file of many megabytes.
func (t *interner) intern(s string) string {
	if s == "" {
		return ""
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.internLocked(s)
}

func (t *interner) internLocked(s string) string {
	if have, ok := t.strings[s]; ok {
		return have
	}
	if t.strings == nil || len(t.strings) >= maxInterned {
		t.strings, t.lists = map[string]string{}, map[string][]string{}
	}
	s = string([]byte(s))
	t.strings[s] = s
	return s
}

// internList interns a list of hints. Nearly all of them name a single zone or node.
func (t *interner) internList(names []string) []string {
	if len(names) == 0 {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(names) > 1 {
		names = slices.Clone(names)
		for i := range names {
			names[i] = t.internLocked(names[i])
		}
		return names
	}
	if have, ok := t.lists[names[0]]; ok {
		return have
	}
	one := t.internLocked(names[0])
	t.lists[one] = []string{one}
	return t.lists[one]
}
