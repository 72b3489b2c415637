package snapshot

import (
	"fmt"
	"slices"
	"testing"
)

func TestReferrers(t *testing.T) {
	dns, cache, other := in("x", "dns"), in("x", "cache"), in("y", "cache")
	s1 := in("x", "s1")
	local := func(to string) *Service { return &Service{Name: dns, Local: to} }
	s := New()
	for _, step := range []struct {
		what string
		d    Delta
		want string
	}{
		{"it names what is not there", Delta{Services: map[Name]*Service{dns: local("cache")}}, "x/dns"},
		{"a slice of that", Delta{Slices: map[Name]*Slice{s1: sliceFor(s1, "cache")}}, "x/cache x/dns"},
		{"that itself", Delta{Services: map[Name]*Service{cache: named(cache)}}, "x/cache x/dns"},
		{"its health", Delta{Health: map[Name]*Health{cache: sick("10.0.0.1:80")}}, "x/cache"},
		{"its own slice", Delta{Slices: map[Name]*Slice{in("x", "s2"): sliceFor(in("x", "s2"), "dns")}}, "x/dns"},
		{"a namesake", Delta{Services: map[Name]*Service{other: named(other)}}, "y/cache"},
		{"backends", Delta{Services: map[Name]*Service{other: {Name: other, Backends: &Backends{Ports: []PortBackends{
			{To: []Backend{{Service: dns}, {Service: dns}, {Service: cache, Refused: "no"}}}}}}}}, "y/cache"},
		{"nobody follows twice", Delta{Slices: map[Name]*Slice{s1: sliceFor(s1, "cache")}}, "x/cache x/dns"},
		{"the backend", Delta{Services: map[Name]*Service{dns: local("")}}, "x/dns y/cache"},
		{"no more", Delta{Slices: map[Name]*Slice{s1: nil}}, "x/cache"},
	} {
		if got := concerned(s.Apply(step.d)); got != step.want {
			t.Errorf("%s: got %q, want %q", step.what, got, step.want)
		}
		checkIndex(t, s)
	}
}

// TestOldestReferrers: a change of one Service is a change of a few others at most, and those are always the oldest.
func TestOldestReferrers(t *testing.T) {
	s := New()
	cache := in("x", "cache")
	s.Apply(Delta{Slices: map[Name]*Slice{in("x", "s"): sliceFor(in("x", "s"), "cache")}})
	service := func(i int) *Service {
		return &Service{Name: in("x", fmt.Sprintf("dns-%02d", i)), Local: "cache", Age: Age{Created: int64(100 - i)}}
	}
	counts := func() (list []string) {
		for n, svc := range s.Services {
			if of, ok := s.LocalOf(svc); ok && of != nil {
				list = append(list, n.Name)
			}
		}
		slices.Sort(list)
		return list
	}
	apply := func(what string, d Delta, touches int) {
		t.Helper()
		before := counts()
		c := s.Apply(d)
		if len(c.Services) > touches {
			t.Errorf("%s concerns %d Services", what, len(c.Services))
		}
		for _, n := range append(before, counts()...) {
			changed := slices.Contains(before, n) != slices.Contains(counts(), n)
			if changed && !slices.Contains(c.Services, in("x", n)) {
				t.Errorf("%s: %s changed and is not named by %v", what, n, c.Services)
			}
		}
		if n := len(counts()); n != min(len(s.Services), maxLocal) {
			t.Errorf("%s: %d count", what, n)
		}
		checkIndex(t, s)
	}
	for i := range 40 { // each one is older than all before
		apply("one more", Delta{Services: map[Name]*Service{service(i).Name: service(i)}}, 3)
	}
	apply("the slice", Delta{Slices: map[Name]*Slice{in("x", "s"): sliceFor(in("x", "s"), "cache")}}, maxLocal+1)
	for i := 39; i >= 0; i-- {
		apply("the oldest goes", Delta{Services: map[Name]*Service{service(i).Name: nil}}, 3)
	}
	if len(s.referrers) != 0 || s.Slices[cache] == nil {
		t.Errorf("left %v", s.referrers)
	}
}
