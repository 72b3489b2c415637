package conntrack

import (
	"context"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestOpenPortIsFull: a port is full from its limit on, until there is some room again.
func TestOpenPortIsFull(t *testing.T) {
	for _, test := range []struct {
		most, from, n int
		full          bool
	}{
		{1, 0, 0, false}, {1, 0, 1, true}, {1, 1, 0, false}, {1, 1, 5, true},
		{8, 8, 7, false}, {8, 7, 7, false}, {8, 7, 8, true},
		{6400, 6400, 6399, true}, {6400, 6400, 6300, true}, {6400, 6400, 6299, false}, {6400, 6000, 6399, false},
	} {
		p := &openPort{most: test.most, openState: &openState{isFull: test.from >= test.most}}
		was := p.isFull
		if changed := p.judge(test.n, nil); p.isFull != test.full || changed != (was != test.full) {
			t.Errorf("%+v: full %v, changed %v", test, p.isFull, changed)
		}
	}
	p := &openPort{openState: &openState{isFull: true}}
	if !p.judge(9, nil) || p.isFull {
		t.Error("a port that limits only its clients is full")
	}
}

// openRig has Services limit the connections of each of their clients.
type openRig struct {
	*OpenLimits
	last map[snapshot.Name]*snapshot.Full
	told []netip.Addr
}

func newOpenRig(most uint32, names ...snapshot.Name) *openRig {
	r := &openRig{}
	r.OpenLimits = NewOpenLimits(newWalker(nil), func(d snapshot.Delta) { r.last = d.Full },
		func(_ dataplane.PortName, client netip.Addr) { r.told = append(r.told, client) })
	st := &dataplane.State{Services: map[snapshot.Name]*dataplane.Service{}}
	for i, n := range names {
		sp := &dataplane.ServicePort{Name: dataplane.PortName{Service: n, Protocol: snapshot.TCP},
			Limits: snapshot.Limits{ClientOpen: most}, Frontends: []dataplane.Frontend{{Key: openAt(i)}}}
		st.Services[n] = &dataplane.Service{Name: n, Ports: []*dataplane.ServicePort{sp}}
	}
	r.inSync(reconcile.InSync{State: st, Change: dataplane.Change{Services: names}})
	return r
}

func openAt(service int) dataplane.Key {
	return dataplane.Key{Addr: netip.AddrFrom4([4]byte{10, 96, byte(service >> 8), byte(service)}),
		Protocol: snapshot.TCP, Port: 80}
}

// openFrom are the clients by number.
func openFrom(n int) netip.Addr {
	return netip.AddrFrom4([4]byte{172, 16 + byte(n>>16), byte(n >> 8), byte(n)})
}

// look has a look see connections: how many each client has with each Service. They come in any order.
func (r *openRig) look(open ...map[int]int) {
	r.last = nil
	var flows []flow
	for service, clients := range open {
		for c, n := range clients {
			for range n {
				flows = append(flows, flow{frontend: openAt(service), client: netip.AddrPortFrom(openFrom(c), 1)})
			}
		}
	}
	rand.Shuffle(len(flows), func(i, j int) { flows[i], flows[j] = flows[j], flows[i] })
	l := r.start().(*openLook)
	for i := range flows {
		l.count(flows[i].frontend, flows[i].client.Addr())
	}
	l.done(context.Background(), Walked{}, 0)
}

// of are the clients of a Service that the last look put.
func (r *openRig) of(n snapshot.Name) (list []netip.Addr) {
	if r.last[n] != nil {
		for _, clients := range r.last[n].Clients {
			list = append(list, clients...)
		}
	}
	return list
}

// TestFullClients: a client is full from its limit on until it is below, and is told of once. Of many, those with most
// connections are refused, and the others are counted.
func TestFullClients(t *testing.T) {
	a, b := snapshot.Name{Namespace: "x", Name: "a"}, snapshot.Name{Namespace: "x", Name: "b"}
	r := newOpenRig(3, a, b)
	r.look(map[int]int{1: 3, 2: 2, 3: 9}, map[int]int{2: 1})
	if got := r.of(a); !slices.Equal(got, []netip.Addr{openFrom(1), openFrom(3)}) || len(r.last) != 1 {
		t.Errorf("full are %v of %v", got, r.last)
	}
	if r.look(map[int]int{1: 4, 2: 2, 3: 3}); r.last != nil {
		t.Errorf("nothing changed: %v", r.last)
	}
	r.look(map[int]int{1: 2})
	if r.last[a] == nil || len(r.of(a)) > 0 || !slices.Equal(r.told, []netip.Addr{openFrom(1)}) {
		t.Errorf("full are %v, told %v", r.last, r.told)
	}
	many := map[int]int{}
	for c := range clientsOfPort + 50 {
		many[c] = 3 + c%2
	}
	r.look(many)
	got := r.of(a)
	for c, n := range many {
		if _, full := slices.BinarySearchFunc(got, openFrom(c), netip.Addr.Compare); n == 4 && !full {
			t.Errorf("client %d has %d connections", c, n)
		}
	}
	if len(got) != clientsOfPort || r.LeftOut() != 50 {
		t.Errorf("%d are full, %d left out", len(got), r.LeftOut())
	}
}

// TestFullClientsOfNamespaces: what a namespace has in the kernel is bounded, and however many clients it has, those of
// others are counted exactly.
func TestFullClientsOfNamespaces(t *testing.T) {
	var names []snapshot.Name
	for i := range 20 {
		names = append(names, snapshot.Name{Namespace: "many", Name: string(rune('a' + i))})
	}
	other := snapshot.Name{Namespace: "other", Name: "a"}
	r := newOpenRig(2, append(names, other)...)
	open := make([]map[int]int, 21)
	for i := range names {
		open[i] = map[int]int{}
		for c := range clientsOfPort {
			open[i][c] = 2
		}
	}
	open[20] = map[int]int{1: 1, 2: 2}
	r.look(open...)
	n := 0
	for _, name := range names {
		n += len(r.of(name))
	}
	if left := 20*clientsOfPort - clientsOfNamespace; n != clientsOfNamespace || r.LeftOut() != left {
		t.Errorf("%d are full, %d left out of %d", n, r.LeftOut(), left)
	}
	for c := range 3 * openCounters { // as one who makes up addresses has them
		open[0][1000+c] = 1
	}
	open[20][3], open[0][0] = 2, 1000
	r.look(open...)
	if got := r.of(other); !slices.Equal(got, []netip.Addr{openFrom(2), openFrom(3)}) {
		t.Errorf("full are %v", got)
	}
	if !slices.Contains(r.of(names[0]), openFrom(0)) {
		t.Error("a client with very many connections is not full")
	}
}
