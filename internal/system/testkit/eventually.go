// Package testkit holds what tests of several packages need, and nothing but tests.
package testkit

import (
	"testing"
	"time"
)

// Eventually polls until holds is true. After the limit it ends the test with what it waited for, and with what the
// functions in state say then.
func Eventually(t testing.TB, limit time.Duration, what string, holds func() bool, state ...func() string) {
	t.Helper()
	const first, last = time.Millisecond, 50 * time.Millisecond
	pause := first
	for deadline := time.Now().Add(limit); !holds(); pause = min(2*pause, last) {
		if time.Now().After(deadline) {
			said := ""
			for _, s := range state {
				said += "\n" + s()
			}
			t.Fatalf("after %v not yet: %s%s", limit, what, said)
		}
		time.Sleep(pause)
	}
}
