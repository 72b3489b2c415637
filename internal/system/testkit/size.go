package testkit

import "testing"

// Size returns what a benchmark works on: full, or with -short a little, which shows that the benchmark still runs.
func Size[T any](full, short T) T {
	if testing.Short() {
		return short
	}
	return full
}
