package dataplane

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

func addrs(list string) (out []netip.Addr) {
	for _, s := range strings.Fields(list) {
		out = append(out, addr(s))
	}
	return out
}

func prefixes(list string) (out []netip.Prefix) {
	for _, s := range strings.Fields(list) {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

func name(s string) snapshot.Name { return snapshot.Name{Namespace: "default", Name: s} }

// key reads "10.0.0.1:80" as a TCP key.
func key(s string) Key {
	ap := netip.MustParseAddrPort(s)
	return Key{Addr: ap.Addr(), Protocol: snapshot.TCP, Port: ap.Port()}
}

// endpoint is ready, serving and on the given node.
func endpoint(a, node string) snapshot.Endpoint {
	return snapshot.Endpoint{Addr: addr(a), Node: node, Ready: true, Serving: true}
}

// sliceOf makes a slice of a Service, with one unnamed TCP port 8080.
func sliceOf(svc, slice string, eps ...snapshot.Endpoint) *snapshot.Slice {
	return &snapshot.Slice{
		Name: name(slice), Service: svc, Endpoints: eps,
		Ports: []snapshot.SlicePort{{Protocol: snapshot.TCP, Port: 8080}},
	}
}

// tcp80 is the unnamed port 80 with a node port, which may be 0.
func tcp80(nodePort uint16) []snapshot.Port {
	return []snapshot.Port{{Protocol: snapshot.TCP, Port: 80, NodePort: nodePort}}
}

func put(s *snapshot.Snapshot, objects ...any) snapshot.Change {
	d := snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{}, Slices: map[snapshot.Name]*snapshot.Slice{}}
	for _, o := range objects {
		switch o := o.(type) {
		case *snapshot.Service:
			d.Services[o.Name] = o
		case *snapshot.Slice:
			d.Slices[o.Name] = o
		case snapshot.Node:
			d.Node = &o
		default:
			panic(fmt.Sprintf("put %T", o))
		}
	}
	return s.Apply(d)
}

// frontend finds the frontend with the key, and its port.
func (st *State) frontend(k Key) (*ServicePort, *Frontend) {
	for _, svc := range st.Services {
		for _, sp := range svc.Ports {
			for i := range sp.Frontends {
				if sp.Frontends[i].Key == k {
					return sp, &sp.Frontends[i]
				}
			}
		}
	}
	return nil, nil
}

// text gives "10.1.0.1:8080 10.1.0.2:8080", or the verdict of an empty pool.
func (p *Pool) text() string {
	if len(p.Endpoints) == 0 {
		return p.Empty.String()
	}
	var words []string
	for _, e := range p.Endpoints {
		words = append(words, e.String())
	}
	return strings.Join(words, " ")
}

// checkInvariants holds a State to what its types promise.
func checkInvariants(t *testing.T, st *State) {
	t.Helper()
	seen := map[Key]PortName{}
	for n, svc := range st.Services {
		if svc == nil || svc.Name != n || len(svc.Ports) == 0 {
			t.Fatalf("%v: %+v", n, svc)
		}
		for _, sp := range svc.Ports {
			if len(sp.Frontends) == 0 || sp.Cluster == nil || sp.Local == nil || sp.Name.Service != n {
				t.Fatalf("%v: %+v", sp.Name, sp)
			}
			for _, p := range []*Pool{sp.Cluster, sp.Local} {
				increasing := func(a, b Endpoint) int { return a.AddrPort.Compare(b.AddrPort) }
				if !slices.IsSortedFunc(p.Endpoints, increasing) || hasTwins(p.Endpoints, increasing) {
					t.Fatalf("%v: pool %v", sp.Name, p.Endpoints)
				}
				checkEjected(t, st, sp, p)
				if p.Refused >= RefusedOf || p.Refused > 0 && len(p.Endpoints) == 0 {
					t.Fatalf("%v: %d of %d connections are refused, of pool %v", sp.Name, p.Refused, RefusedOf, p.Endpoints)
				}
			}
			checkServing(t, sp)
			for i, f := range sp.Frontends {
				if other, taken := seen[f.Key]; taken {
					t.Fatalf("%v belongs to %v and %v", f.Key, other, sp.Name)
				}
				seen[f.Key] = sp.Name
				if i > 0 && sp.Frontends[i-1].Key.Compare(f.Key) >= 0 {
					t.Fatalf("%v: frontends out of order", sp.Name)
				}
				checkFrontend(t, sp, &f)
			}
		}
	}
}

// checkEjected: no pool becomes empty or loses more than half of the endpoints, and nobody is ejected unasked.
func checkEjected(t *testing.T, st *State, sp *ServicePort, p *Pool) {
	t.Helper()
	byAddr := func(a, b snapshot.Unhealthy) int { return a.Endpoint.Compare(b.Endpoint) }
	if len(p.Ejected) > len(sp.Serving)/2 || len(p.Ejected) > 0 && len(p.Endpoints) == 0 ||
		!slices.IsSortedFunc(p.Ejected, byAddr) || hasTwins(p.Ejected, byAddr) ||
		slices.ContainsFunc(p.Endpoints, func(e Endpoint) bool { return p.Ejects(e.AddrPort) }) {
		t.Fatalf("%v: %v are ejected, %v are left", sp.Name, p.Ejected, p.Endpoints)
	}
	on := sp.SecondChance == snapshot.SecondChanceOn
	if !on && (p.Ejected != nil || p.RetryRefused) || p.RetryRefused && len(p.Endpoints)+len(p.Ejected) < 2 {
		t.Fatalf("%v: second chance %v, yet %+v", sp.Name, sp.SecondChance, p)
	}
	if sp.SecondChance == snapshot.SecondChanceDefault ||
		sp.SecondChance != snapshot.SecondChanceOff && (!st.Evidence || sp.Name.Protocol != snapshot.TCP) {
		t.Fatalf("%v: second chance %v, evidence %v", sp.Name, sp.SecondChance, st.Evidence)
	}
	for _, u := range p.Ejected {
		if !slices.ContainsFunc(sp.Serving, func(e Endpoint) bool { return e.AddrPort == u.Endpoint }) {
			t.Fatalf("%v: connections to %v, which is ejected, are to end", sp.Name, u.Endpoint)
		}
	}
}

// checkServing: flows may stay with whatever new ones can get.
func checkServing(t *testing.T, sp *ServicePort) {
	t.Helper()
	byAddrPort := func(a, b Endpoint) int { return a.AddrPort.Compare(b.AddrPort) }
	if !slices.IsSortedFunc(sp.Serving, byAddrPort) || hasTwins(sp.Serving, byAddrPort) {
		t.Fatalf("%v: serving %v", sp.Name, sp.Serving)
	}
	for _, e := range slices.Concat(sp.Cluster.Endpoints, sp.Local.Endpoints) {
		if !slices.ContainsFunc(sp.Serving, func(o Endpoint) bool { return o.AddrPort == e.AddrPort && o.Local == e.Local }) {
			t.Fatalf("%v: %v is in a pool and not in serving %v", sp.Name, e, sp.Serving)
		}
	}
}

func checkFrontend(t *testing.T, sp *ServicePort, f *Frontend) {
	t.Helper()
	for i, r := range f.Routes {
		if (r.From == Anyone) != (i == len(f.Routes)-1) ||
			r.Pool != sp.Cluster && r.Pool != sp.Local && (len(r.Pool.Endpoints) > 0 || r.Pool.Empty == Drop) {
			t.Fatalf("%v %v: route %d of %+v", sp.Name, f.Key, i, f.Routes)
		}
		for _, e := range r.Pool.Endpoints {
			if e.Addr().Is4() != f.Key.Addr.Is4() {
				t.Fatalf("%v %v: endpoint %v of the other family", sp.Name, f.Key, e)
			}
		}
	}
	if len(f.Routes) == 0 || f.Sources != nil && (f.Kind != LoadBalancerIP || len(f.Sources) == 0) {
		t.Fatalf("%v: no routes, or sources that a %v cannot have: %+v", sp.Name, f.Kind, f)
	}
	for i, r := range f.Sources {
		for _, o := range f.Sources[i+1:] {
			if r.Overlaps(o) || r.Compare(o) >= 0 {
				t.Fatalf("%v: sources %v", sp.Name, f.Sources)
			}
		}
	}
}

func hasTwins[T any](s []T, compare func(a, b T) int) bool {
	for i := 1; i < len(s); i++ {
		if compare(s[i-1], s[i]) == 0 {
			return true
		}
	}
	return false
}
