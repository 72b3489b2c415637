package testbed

import (
	"slices"
	"testing"
)

// What the cases say of the newest kube-proxy counts for older ones, too, and not the other way round.
func TestOlderReleases(t *testing.T) {
	for _, mode := range []string{"nftables", "iptables", "ipvs"} {
		newest, err := FindKind("kube-proxy-" + mode)
		if err != nil {
			t.Fatal(err)
		}
		older, err := FindKind("kube-proxy-1.36-" + mode)
		if err != nil {
			t.Fatal(err)
		}
		if !older.Knows([]string{newest.Name}) || newest.Knows([]string{older.Name}) || !older.Knows([]string{older.Name}) {
			t.Errorf("%s: %+v, %+v", mode, newest, older)
		}
		if older.mode != mode || !older.Adjustable() || older.Witness != newest.Witness || !older.forgetsZone {
			t.Errorf("%s: %+v, %+v", mode, newest, older)
		}
	}
	names := KindNames()
	if slices.Sort(names); len(slices.Compact(names)) != len(kinds) {
		t.Errorf("a name is there twice: %v", names)
	}
}
