package snapshot

import (
	"slices"
	"testing"
)

func referring(n Name, to ...Name) *Service {
	b := &Backends{Ports: []PortBackends{{}}}
	for _, t := range to {
		b.Ports[0].To = append(b.Ports[0].To, Backend{Service: t, Port: 80, Weight: 1})
	}
	return &Service{Name: n, Backends: b}
}

// TestReferrersAreConcerned: whoever refers to a Service changes with it and with its slices, and with no Health.
func TestReferrersAreConcerned(t *testing.T) {
	edge, chain, db, near := in("edge", "gw"), in("edge", "chain"), in("shop", "db"), in("edge", "near")
	s := New()
	apply := func(d Delta, want string) {
		t.Helper()
		if got := concerned(s.Apply(d)); got != want {
			t.Errorf("concerns %q, want %q", got, want)
		}
	}
	service := func(svc *Service) Delta { return Delta{Services: map[Name]*Service{svc.Name: svc}} }
	apply(service(referring(edge, db, near, db)), "edge/gw")
	apply(service(&Service{Name: db}), "edge/gw shop/db")
	apply(service(referring(chain, edge)), "edge/chain")
	sl := in("shop", "s")
	apply(Delta{Slices: map[Name]*Slice{sl: {Name: sl, Service: "db"}}}, "edge/gw shop/db")
	apply(Delta{Health: map[Name]*Health{db: {Unhealthy: []Unhealthy{{}}}}}, "shop/db")
	apply(Delta{Slices: map[Name]*Slice{sl: {Name: sl, Service: "other"}}}, "edge/gw shop/db shop/other")
	apply(service(referring(edge, near)), "edge/chain edge/gw")
	apply(service(&Service{Name: db, Affinity: 1}), "shop/db")
	apply(Delta{Services: map[Name]*Service{edge: nil}}, "edge/chain edge/gw")
	apply(Delta{Services: map[Name]*Service{chain: nil, db: nil}}, "edge/chain shop/db")
	if len(s.referrers) > 0 {
		t.Errorf("left: %v", s.referrers)
	}
}

func TestPortOf(t *testing.T) {
	db := in("shop", "db")
	s := New()
	s.Apply(Delta{Services: map[Name]*Service{
		db: {Name: db, Ports: []Port{{Name: "a", Protocol: UDP, Port: 80}, {Name: "b", Protocol: TCP, Port: 80}}},
		{}: referring(Name{}, db),
	}})
	for i, test := range []struct {
		b     Backend
		p     Protocol
		name  string
		works bool
	}{
		{Backend{Service: db, Port: 80}, TCP, "b", true},
		{Backend{Service: db, Port: 80}, UDP, "a", true},
		{Backend{Service: db, Port: 80}, SCTP, "", false},
		{Backend{Service: db, Port: 81}, TCP, "", false},
		{Backend{Service: in("shop", "no"), Port: 80}, TCP, "", false},
		{Backend{Port: 80}, TCP, "", false}, // which has backends itself
		{Backend{Service: db, Port: 80, Refused: "x"}, TCP, "", false},
	} {
		if name, refused := s.PortOf(&test.b, test.p); name != test.name || (refused == "") != test.works {
			t.Errorf("%d: %q, %q", i, name, refused)
		}
	}
	if got := slices.Collect(s.Referrers(db)); len(got) != 1 {
		t.Errorf("%v", got)
	}
	sl := in("shop", "s")
	s.Apply(Delta{Slices: map[Name]*Slice{sl: {Name: sl, Service: "db"}, {}: {}},
		Services: map[Name]*Service{in("x", "twice"): referring(in("x", "twice"), db, db)}})
	for n, want := range map[Name]int{db: 1, {}: 1, in("x", "twice"): 1, in("x", "nobody"): 0} {
		if got := s.SlicesOf(n); len(got) != want || want > 0 && got[0].Name != sl {
			t.Errorf("%v: %v", n, got)
		}
	}
}
