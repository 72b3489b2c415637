package snapshot

import (
	"cmp"
	"iter"
	"slices"
)

// referrers are the Services that take endpoints of another one, by that one, the oldest first. None of them need
// exist.
type referrers map[reference][]referrer

// reference is a Service and what it is to those that refer to it: their Local, or one of their Backends.
type reference struct {
	to    Name
	local bool
}

type referrer struct {
	name Name
	age  Age
}

func (r referrer) compare(o referrer) int {
	return cmp.Or(r.age.Compare(o.age), r.name.Compare(o.name))
}

// maxLocal is how many Services may have the same Local, the oldest ones: a change of it is a change of them all, in
// one turn.
const maxLocal = 16

// refers returns what a Service refers to, some perhaps twice. The Service may be nil.
func (s *Service) refers() iter.Seq[reference] {
	return func(yield func(reference) bool) {
		if s == nil || s.Local != "" && !yield(reference{s.LocalName(), true}) {
			return
		}
		for b := range s.Backends.Each() {
			if b.Refused == "" && !yield(reference{to: b.Service}) {
				return
			}
		}
	}
}

// replace replaces one version of a Service by another; either may be nil. It adds those that are concerned, since they
// become one of the oldest, or no longer are.
func (r referrers) replace(before, after *Service, touched map[Name]struct{}) {
	for ref := range before.refers() {
		r.set(ref, referrer{before.Name, before.Age}, false, touched)
	}
	for ref := range after.refers() {
		r.set(ref, referrer{after.Name, after.Age}, true, touched)
	}
}

func (r referrers) set(ref reference, by referrer, refers bool, touched map[Name]struct{}) {
	list := r[ref]
	at, found := slices.BinarySearchFunc(list, by, referrer.compare)
	switch {
	case found == refers:
		return
	case refers:
		list = slices.Insert(list, at, by)
	default:
		list = slices.Delete(list, at, at+1)
	}
	r[ref] = list
	if len(list) == 0 {
		delete(r, ref)
	}
	for i := maxLocal - 1; ref.local && i <= maxLocal && i < len(list); i++ {
		touched[list[i].name] = struct{}{}
	}
}

// to ranges over the names of the Services that a change of one concerns, too, the oldest of each kind first. Nobody
// follows a reference further: what a Service refers to counts with its own slices alone.
func (r referrers) to(n Name) iter.Seq[Name] {
	return func(yield func(Name) bool) {
		local := r[reference{n, true}]
		for _, list := range [...][]referrer{local[:min(len(local), maxLocal)], r[reference{to: n}]} {
			for _, by := range list {
				if !yield(by.name) {
					return
				}
			}
		}
	}
}

// addTo adds those that refer to touched Services to these.
func (r referrers) addTo(touched map[Name]struct{}) {
	if len(r) == 0 {
		return
	}
	var more []Name
	for n := range touched {
		more = slices.AppendSeq(more, r.to(n))
	}
	for _, n := range more {
		touched[n] = struct{}{}
	}
}

// Referrers ranges over the names of the Services that are concerned by a change of one, since it is their Local or one
// of their Backends.
func (s *Snapshot) Referrers(n Name) iter.Seq[Name] { return s.referrers.to(n) }

// LocalOf returns the slices of a Service's Local; nil if it has none. It is not ok if others, older ones, have the
// same Local, as many as may have it.
func (s *Snapshot) LocalOf(svc *Service) (of map[string]*Slice, ok bool) {
	if svc.Local == "" {
		return nil, true
	}
	ref := reference{svc.LocalName(), true}
	at, found := slices.BinarySearchFunc(s.referrers[ref], referrer{svc.Name, svc.Age}, referrer.compare)
	if !found || at >= maxLocal {
		return nil, false
	}
	return s.Slices[ref.to], true
}
