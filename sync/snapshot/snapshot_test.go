package snapshot

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/internal/system/testkit"
)

func in(namespace, name string) Name { return Name{Namespace: namespace, Name: name} }

func named(n Name) *Service { return &Service{Name: n} }

func sliceFor(n Name, service string) *Slice { return &Slice{Name: n, Service: service} }

// sick is a Health with one endpoint.
func sick(endpoint string) *Health {
	return &Health{Unhealthy: []Unhealthy{{Endpoint: netip.MustParseAddrPort(endpoint), Cause: Refused}}}
}

func concerned(c Change) string {
	var words []string
	for _, n := range c.Services {
		words = append(words, n.String())
	}
	if c.Globals {
		words = append(words, "all")
	}
	return strings.Join(words, " ")
}

// checkIndex holds a snapshot to its own books: each slice is under exactly one Service, no empty map stays behind, and
// no Health outlives its Service.
func checkIndex(t *testing.T, s *Snapshot) {
	t.Helper()
	for n, h := range s.Health {
		if s.Services[n] == nil || h == nil || len(h.Unhealthy) == 0 {
			t.Fatalf("%v keeps the health %+v", n, h)
		}
	}
	refs := referrers{}
	for _, svc := range s.Services {
		refs.replace(nil, svc, map[Name]struct{}{})
	}
	if !reflect.DeepEqual(refs, s.referrers) {
		t.Fatalf("referrers %v, want %v", s.referrers, refs)
	}
	filed := 0
	for owner, of := range s.Slices {
		if len(of) == 0 {
			t.Fatalf("an empty map stayed behind for %v", owner)
		}
		for key, sl := range of {
			filed++
			if sl.Name.Name != key || (Name{sl.Name.Namespace, sl.Service}) != owner || s.sliceService[sl.Name] != owner {
				t.Fatalf("slice %v of %q is filed under %v, %q", sl.Name, sl.Service, owner, key)
			}
		}
	}
	if filed != len(s.sliceService) {
		t.Fatalf("%d slices filed, %d known", filed, len(s.sliceService))
	}
}

func TestApply(t *testing.T) {
	a, b := in("x", "a"), in("x", "b")
	s1 := in("x", "s1")
	addrs := func(list ...string) *[]netip.Addr {
		out := []netip.Addr{}
		for _, w := range list {
			out = append(out, netip.MustParseAddr(w))
		}
		return &out
	}
	cidrs := &[]netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")}
	steps := []struct {
		what string
		d    Delta
		want string
	}{
		{"nothing", Delta{}, ""},
		{"gone, and never there", Delta{Services: map[Name]*Service{a: nil}, Slices: map[Name]*Slice{s1: nil}}, ""},
		{"two Services, sorted",
			Delta{Services: map[Name]*Service{b: named(b), in("w", "z"): named(in("w", "z")), a: named(a)}},
			"w/z x/a x/b"},
		{"a slice", Delta{Slices: map[Name]*Slice{s1: sliceFor(s1, "a")}}, "x/a"},
		{"its new self", Delta{Slices: map[Name]*Slice{s1: sliceFor(s1, "a")}}, "x/a"},
		{"it moves", Delta{Slices: map[Name]*Slice{s1: sliceFor(s1, "b")}}, "x/a x/b"},
		{"its Service goes", Delta{Services: map[Name]*Service{b: nil}}, "x/b"},
		{"and so does it", Delta{Slices: map[Name]*Slice{s1: nil}}, "x/b"},
		{"once only", Delta{Slices: map[Name]*Slice{s1: nil}}, ""},
		{"a slice of an unknown Service", Delta{Slices: map[Name]*Slice{s1: sliceFor(s1, "later")}}, "x/later"},
		{"Service and slice at once", Delta{Services: map[Name]*Service{a: named(a)},
			Slices: map[Name]*Slice{s1: sliceFor(s1, "a")}}, "x/a x/later"},
		{"the node", Delta{Node: &Node{Name: "n", Zone: "z"}}, "all"},
		{"the same node", Delta{Node: &Node{Name: "n", Zone: "z"}}, ""},
		{"it is about to go", Delta{Node: &Node{Name: "n", Zone: "z", Leaving: "tired"}}, ""},
		{"its addresses", Delta{Node: &Node{Name: "n", Zone: "z", Addresses: *addrs("192.0.2.1")}}, "all"},
		{"its pod ranges", Delta{Node: &Node{Name: "n", Zone: "z", Addresses: *addrs("192.0.2.1"), PodCIDRs: *cidrs}}, "all"},
		{"the node goes", Delta{Node: &Node{}}, "all"},
		{"the service ranges", Delta{ServiceCIDRs: cidrs}, "all"},
		{"the same ranges", Delta{ServiceCIDRs: cidrs}, ""},
		{"the host's addresses", Delta{HostAddrs: addrs("127.0.0.1", "192.0.2.1")}, "all"},
		{"the same addresses", Delta{HostAddrs: addrs("127.0.0.1", "192.0.2.1")}, ""},
		{"health of an unknown Service", Delta{Health: map[Name]*Health{b: sick("10.0.0.1:80")}}, ""},
		{"health", Delta{Health: map[Name]*Health{a: sick("10.0.0.1:80")}}, "x/a"},
		{"a new version of the Service", Delta{Services: map[Name]*Service{a: named(a)}}, "x/a"},
		{"health, and the Service goes", Delta{Services: map[Name]*Service{a: nil},
			Health: map[Name]*Health{a: sick("10.0.0.1:80")}}, "x/a"},
		{"it comes back with its health", Delta{Services: map[Name]*Service{a: named(a)},
			Health: map[Name]*Health{a: sick("10.0.0.1:80")}}, "x/a"},
		{"no endpoint is unhealthy", Delta{Health: map[Name]*Health{a: {}}}, "x/a"},
		{"which is known", Delta{Health: map[Name]*Health{a: nil, b: nil}}, ""},
		{"health again", Delta{Health: map[Name]*Health{a: sick("10.0.0.1:80")}}, "x/a"},
		{"one less, and a Service", Delta{HostAddrs: addrs("127.0.0.1"), Services: map[Name]*Service{a: nil}}, "x/a all"},
	}
	s := New()
	for _, step := range steps {
		if got := concerned(s.Apply(step.d)); got != step.want {
			t.Errorf("%s: got %q, want %q", step.what, got, step.want)
		}
		checkIndex(t, s)
	}
	if len(s.Services) != 1 || len(s.Slices) != 1 || len(s.HostAddrs) != 1 || !reflect.DeepEqual(s.Node, Node{}) {
		t.Errorf("left: %+v", s)
	}
}

// randomDelta names a few of very few objects. Health is only of Services that are known once the delta is applied.
func randomDelta(r *rand.Rand, known map[Name]*Service) Delta {
	var d Delta
	names := []Name{in("x", "a"), in("x", "b"), in("y", "a")}
	for range r.IntN(3) {
		n := names[r.IntN(3)]
		if d.Services == nil {
			d.Services = map[Name]*Service{}
		}
		d.Services[n] = nil
		if r.IntN(2) == 0 {
			d.Services[n] = &Service{Name: n, HealthCheckNodePort: uint16(r.IntN(9)), Local: []string{"", "a", "b"}[r.IntN(3)]}
		}
	}
	for range r.IntN(3) {
		n := names[r.IntN(3)]
		if d.Slices == nil {
			d.Slices = map[Name]*Slice{}
		}
		d.Slices[n] = nil
		if r.IntN(3) > 0 {
			d.Slices[n] = sliceFor(n, []string{"a", "b"}[r.IntN(2)])
		}
	}
	for range r.IntN(3) {
		n := names[r.IntN(3)]
		svc, named := d.Services[n]
		if !named {
			svc = known[n]
		}
		if d.Health == nil {
			d.Health = map[Name]*Health{}
		}
		d.Health[n] = nil
		if svc != nil && r.IntN(3) > 0 {
			d.Health[n] = sick(fmt.Sprintf("10.0.0.%d:80", r.IntN(9)))
		}
	}
	if r.IntN(4) == 0 {
		d.Node = &Node{Zone: []string{"a", "b"}[r.IntN(2)]}
	}
	if r.IntN(4) == 0 {
		d.ServiceCIDRs = &[]netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{10}), 8+r.IntN(2))}
	}
	if r.IntN(4) == 0 {
		d.HostAddrs = &[]netip.Addr{netip.AddrFrom4([4]byte{10, 0, 0, byte(r.IntN(2))})}
	}
	return d
}

// TestMergeIsApplyInOrder: deltas merged and applied once lead where the same deltas lead one after the other, and
// concern no Service the single steps did not.
func TestMergeIsApplyInOrder(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	merged, single := New(), New()
	for range 3000 {
		var all Delta
		touched := map[Name]bool{}
		for range 1 + r.IntN(4) {
			d := randomDelta(r, single.Services)
			all.Merge(d)
			for _, n := range single.Apply(d).Services {
				touched[n] = true
			}
		}
		before, health := maps.Clone(merged.Services), maps.Clone(merged.Health)
		c := merged.Apply(all)
		if !reflect.DeepEqual(merged, single) {
			t.Fatalf("merged\n%+v\none by one\n%+v", merged, single)
		}
		checkIndex(t, merged)
		for _, n := range c.Services {
			if !touched[n] {
				t.Fatalf("%v is concerned by %+v, but by no part of it", n, all)
			}
		}
		for n := range touched {
			changed := before[n] != merged.Services[n] || health[n] != merged.Health[n]
			if changed && !slices.Contains(c.Services, n) {
				t.Fatalf("%v changed and is not named", n)
			}
		}
	}
}

// TestMergeKeepsItsOwnMaps: what a source handed over is not written to, and what it writes later is not seen.
func TestMergeKeepsItsOwnMaps(t *testing.T) {
	a, b := in("x", "a"), in("x", "b")
	first := Delta{Services: map[Name]*Service{a: named(a)}, Slices: map[Name]*Slice{a: nil}}
	var d Delta
	d.Merge(first)
	d.Merge(Delta{Services: map[Name]*Service{b: nil}, Slices: map[Name]*Slice{b: nil}})
	if len(first.Services) != 1 || len(first.Slices) != 1 {
		t.Errorf("Merge wrote to a delta it was given: %+v", first)
	}
	first.Services[a] = nil
	if d.Services[a] == nil {
		t.Error("Merge kept a map it was given")
	}
}

func TestEmpty(t *testing.T) {
	if d := (Delta{Services: map[Name]*Service{}}); !d.Empty() {
		t.Error("a delta without objects is empty")
	}
	for _, d := range []Delta{
		{Services: map[Name]*Service{{}: nil}}, {Slices: map[Name]*Slice{{}: nil}}, {Node: &Node{}},
		{Health: map[Name]*Health{{}: nil}},
		{ServiceCIDRs: new([]netip.Prefix)}, {HostAddrs: new([]netip.Addr)},
	} {
		if d.Empty() {
			t.Errorf("%+v is not empty", d)
		}
	}
}

func TestNames(t *testing.T) {
	sorted := []Name{in("a", "z"), in("b", "a"), in("b", "b")}
	for i, n := range sorted {
		for j, o := range sorted {
			if got := n.Compare(o); (got < 0) != (i < j) || (got > 0) != (i > j) {
				t.Errorf("%v compared with %v is %d", n, o, got)
			}
		}
	}
	for p, want := range map[Protocol]string{TCP: "tcp", UDP: "udp", SCTP: "sctp", 0: "unknown"} {
		if p.String() != want {
			t.Errorf("%d prints as %s", p, p)
		}
	}
}

// TestNodeLeaves: that concerns no Service, and is known.
func TestNodeLeaves(t *testing.T) {
	s := New()
	s.Apply(Delta{Node: &Node{Name: "n"}})
	for _, why := range []string{"tired", ""} {
		if c := s.Apply(Delta{Node: &Node{Name: "n", Leaving: why}}); c.Globals || s.Node.Leaving != why {
			t.Errorf("leaving because of %q: %+v, %+v", why, c, s.Node)
		}
	}
}

func TestChangesAddUp(t *testing.T) {
	a, b, c := in("x", "a"), in("x", "b"), in("y", "a")
	for _, test := range []struct {
		first, then Change
		want        string
	}{
		{Change{}, Change{}, ""},
		{Change{Services: []Name{a, c}}, Change{}, "x/a y/a"},
		{Change{Globals: true}, Change{Services: []Name{b}}, "x/b all"},
		{Change{Services: []Name{a, c}}, Change{Services: []Name{b, c}, Globals: true}, "x/a x/b y/a all"},
	} {
		if got := concerned(test.first.With(test.then)); got != test.want {
			t.Errorf("%v with %v: %q; want %q", test.first, test.then, got, test.want)
		}
	}
}

// TestEveryField: no field is forgotten when Nodes are compared, and when Deltas are merged or asked whether they are
// empty.
func TestEveryField(t *testing.T) {
	testkit.Compares(t, func(a, b *Node) bool { return a.equal(*b) }, "Leaving")
	full := testkit.Filled[Delta]()
	for field := range reflect.TypeFor[Delta]().Fields() {
		var one, merged Delta
		reflect.ValueOf(&one).Elem().FieldByIndex(field.Index).Set(reflect.ValueOf(full).Elem().FieldByIndex(field.Index))
		if one.Empty() != (field.Name == "Versions") {
			t.Errorf("%s: empty is %v", field.Name, one.Empty())
		}
		if merged.Merge(one); !reflect.DeepEqual(merged, one) {
			t.Errorf("%s is not merged: %+v", field.Name, merged)
		}
	}
}
