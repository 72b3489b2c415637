package snapshot

import (
	"cmp"
	"strings"
)

// Version is a resourceVersion: that of an object, of a list, or of a bookmark. Empty means unknown, as for objects of
// manifest files.
type Version string

// maxVersionDigits is how long a resourceVersion may be to compare: that of a number of 128 bits.
const maxVersionDigits = 39

// Compare compares two versions of one resource. They are decimal numbers without leading zeros (KEP-5504), so the
// longer one is the newer one. ok is false if either is unknown or no such number; then they have no order.
func (v Version) Compare(o Version) (order int, ok bool) {
	if !v.Ordered() || !o.Ordered() {
		return 0, false
	}
	return cmp.Or(cmp.Compare(len(v), len(o)), strings.Compare(string(v), string(o))), true
}

// Ordered reports whether the version is a number that can be compared with others.
func (v Version) Ordered() bool {
	if v == "" || len(v) > maxVersionDigits || v[0] == '0' && len(v) > 1 {
		return false
	}
	return strings.Trim(string(v), "0123456789") == ""
}

// Reached reports whether v is o or newer. An unknown o is reached by everything.
func (v Version) Reached(o Version) bool {
	order, ok := v.Compare(o)
	return o == "" || v == o || ok && order >= 0
}

// older returns the older version; empty if they have no order and differ.
func older(a, b Version) Version {
	order, ok := a.Compare(b)
	switch {
	case a == b, ok && order < 0:
		return a
	case ok:
		return b
	}
	return ""
}

// Versions are the versions of the two resources that Services are made of. The API server orders the versions of one
// resource only.
type Versions struct {
	Services, Slices Version
}

// Then returns what is known after a later delta: its versions, where it has any. A later version may be older, if the
// API server was restored from a backup.
func (v Versions) Then(later Versions) Versions {
	return Versions{cmp.Or(later.Services, v.Services), cmp.Or(later.Slices, v.Slices)}
}

// Reached reports whether both versions are those of o or newer.
func (v Versions) Reached(o Versions) bool {
	return v.Services.Reached(o.Services) && v.Slices.Reached(o.Slices)
}

// Older returns the older version of each resource; empty where they have no order.
func (v Versions) Older(o Versions) Versions {
	return Versions{older(v.Services, o.Services), older(v.Slices, o.Slices)}
}
