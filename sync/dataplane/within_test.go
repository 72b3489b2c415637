package dataplane

import (
	"reflect"
	"slices"
	"testing"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// answers computes one Service that is alone in its cluster.
func answers(objects ...any) *Service {
	s := snapshot.New()
	put(s, objects...)
	st, _ := Compute(Config{NodeName: "here"}, s)
	return st.Services[name("a")]
}

func keysOf(s *Service) (keys []string) {
	s.eachClaim(func(k Key, _ Claim) { keys = append(keys, k.String()) })
	return keys
}

func TestWithin(t *testing.T) {
	ends := sliceOf("a", "a-1", endpoint("10.244.9.1", "here"), endpoint("fd00:244::1", "x"))
	moved := sliceOf("a", "a-1", endpoint("10.244.9.7", "x"))
	base := snapshot.Service{
		Name: name("a"), ClusterIPs: addrs("10.96.0.1 fd00:96::1"), ExternalIPs: addrs("198.51.100.1"), ExternalLocal: true,
		Ports: []snapshot.Port{{Protocol: snapshot.TCP, Port: 80}, {Name: "alt", Protocol: snapshot.TCP, Port: 81}},
	}
	old := answers(&base, ends)
	all := keysOf(old)
	for what, c := range map[string]struct {
		change func(*snapshot.Service)
		gone   []string
	}{
		"same addresses": {func(*snapshot.Service) {}, nil},
		"more of them":   {func(s *snapshot.Service) { s.LoadBalancerIPs = addrs("198.51.100.2") }, nil},
		"another kind":   {func(s *snapshot.Service) { s.LoadBalancerIPs, s.ExternalIPs = s.ExternalIPs, nil }, nil},
		"other names":    {func(s *snapshot.Service) { s.Ports[0].Name, s.Ports[1].Name = "x", "y" }, nil},
		"an address less": {func(s *snapshot.Service) { s.ExternalIPs = nil },
			[]string{"198.51.100.1:80/tcp", "198.51.100.1:81/tcp"}},
		"a port less": {func(s *snapshot.Service) { s.Ports = s.Ports[:1] },
			[]string{"10.96.0.1:81/tcp", "198.51.100.1:81/tcp", "[fd00:96::1]:81/tcp"}},
		"a family less": {func(s *snapshot.Service) { s.ClusterIPs = addrs("10.96.0.1") },
			[]string{"[fd00:96::1]:80/tcp", "[fd00:96::1]:81/tcp"}},
		"another cluster IP": {func(s *snapshot.Service) { s.ClusterIPs = addrs("10.96.0.9 fd00:96::1") },
			[]string{"10.96.0.1:80/tcp", "10.96.0.1:81/tcp"}},
		"another protocol": {func(s *snapshot.Service) { s.Ports[1].Protocol = snapshot.UDP },
			[]string{"10.96.0.1:81/tcp", "198.51.100.1:81/tcp", "[fd00:96::1]:81/tcp"}},
	} {
		changed := base
		changed.Ports = slices.Clone(base.Ports)
		c.change(&changed)
		now, untouched := answers(&changed, moved), answers(&base, ends)
		left := old.Within(now)
		if !reflect.DeepEqual(old, untouched) {
			t.Fatalf("%s: it was changed", what)
		}
		want := slices.DeleteFunc(slices.Clone(all), func(k string) bool { return slices.Contains(c.gone, k) })
		if got := keysOf(left); !slices.Equal(got, want) {
			t.Errorf("%s: %v are left; want %v", what, got, want)
		}
		if (left == old) != (c.gone == nil) {
			t.Errorf("%s: left == old is %v", what, left == old)
		}
		for _, a := range left.ClusterIPs {
			if !slices.Contains(now.ClusterIPs, a) || !slices.Contains(old.ClusterIPs, a) {
				t.Errorf("%s: cluster IP %v", what, a)
			}
		}
		checkInvariants(t, &State{Services: map[snapshot.Name]*Service{left.Name: left}}) // routes to pools of its own
		if c := left.Ports[0].Cluster; c != old.Ports[0].Cluster {
			t.Errorf("%s: another pool", what)
		}
	}
}

func TestWithinNothing(t *testing.T) {
	here, there := answers(webService("a", "10.96.0.1")), answers(webService("a", "10.96.0.2"))
	for what, left := range map[string]*Service{
		"nothing of nothing":      (*Service)(nil).Within(nil),
		"nothing of something":    (*Service)(nil).Within(here),
		"something in nothing":    here.Within(nil),
		"all has another address": here.Within(there),
	} {
		if left != nil {
			t.Errorf("%s: %+v", what, left)
		}
	}
}
