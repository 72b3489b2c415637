package ipvsplugin

import (
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/sysctl"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// dice reads decisions from data.
type dice struct{ data []byte }

func (d *dice) n(n int) int {
	if len(d.data) == 0 {
		return 0
	}
	b := d.data[0]
	d.data = d.data[1:]
	return int(b) % n
}

// delta replaces or removes a Service and its slice. Two of them may claim the same addresses.
func (d *dice) delta() snapshot.Delta {
	i := d.n(3)
	name := snapshot.Name{Namespace: "fuzz", Name: fmt.Sprint("s", i)}
	out := snapshot.Delta{
		Services: map[snapshot.Name]*snapshot.Service{name: nil},
		Slices:   map[snapshot.Name]*snapshot.Slice{},
	}
	if d.n(6) == 0 {
		return out
	}
	svc := &snapshot.Service{Name: name, InternalLocal: d.n(4) == 0, ExternalLocal: d.n(2) == 0,
		ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 96, 0, byte(1 + i)}),
			netip.MustParseAddr(fmt.Sprintf("fd00:96::%d", 1+i))},
		LoadBalancerIPs: []netip.Addr{netip.AddrFrom4([4]byte{203, 0, 113, byte(d.n(2))})}}
	if d.n(4) > 0 {
		svc.Scheduling = &snapshot.Scheduling{
			Scheduler: []string{"rr", "mh", "sh", "dh"}[d.n(4)],
			Port:      d.n(2) == 0,
			Fallback:  d.n(3) == 0,
		}
	}
	if d.n(3) == 0 {
		svc.Affinity = time.Duration(1+d.n(2)) * time.Hour
	}
	sl := &snapshot.Slice{Name: name, Service: name.Name}
	for p := range 1 + d.n(2) {
		port := snapshot.Port{
			Name:     fmt.Sprint(p),
			Protocol: protocols[d.n(3)],
			Port:     uint16(80 + p),
			NodePort: uint16(30000 + 2*i + p),
		}
		svc.Ports = append(svc.Ports, port)
		sl.Ports = append(sl.Ports, snapshot.SlicePort{Name: port.Name, Protocol: port.Protocol, Port: 8080})
	}
	for range d.n(4) {
		n := d.n(5)
		e := snapshot.Endpoint{
			Addr:    netip.AddrFrom4([4]byte{10, 244, byte(n % 2), byte(n)}),
			Node:    []string{"node-1", "node-2"}[n%2],
			Ready:   d.n(4) > 0,
			Serving: true,
			Weight:  snapshot.Weight{Given: true, Parts: snapshot.PartsOf(uint16(1 + d.n(2)))},
		}
		if d.n(3) == 0 {
			e.Addr = netip.MustParseAddr(fmt.Sprintf("fd00:244::%d", n))
		}
		sl.Endpoints = append(sl.Endpoints, e)
	}
	out.Services[name], out.Slices[name] = svc, sl
	return out
}

// FuzzIncrementalEqualsFull follows random changes. The table that is updated is the one that is made anew; and what
// the planner writes takes a strict kernel there, without ever taking from a packet what it needs.
func FuzzIncrementalEqualsFull(f *testing.F) {
	f.Add([]byte("some services that come and go, and their endpoints with them"))
	f.Add(
		[]byte{
			0,
			1,
			1,
			1,
			0,
			1,
			2,
			1,
			1,
			1,
			1,
			1,
			1,
			1,
			3,
			1,
			1,
			1,
			1,
			2,
			2,
			1,
			1,
			0,
			1,
			1,
			1,
			1,
			1,
			1,
			0,
			1,
			1,
			1,
			1,
			1,
			1,
			1,
			2,
		},
	)
	f.Fuzz(func(t *testing.T, data []byte) {
		d := &dice{data[:min(len(data), 600)]}
		addrs := []netip.Addr{netip.MustParseAddr("192.0.2.1")}
		snap := snapshot.New()
		planner := dataplane.NewPlanner(dataplane.Config{NodeName: "node-1", IPVS: dataplane.IPVS{Mode: dataplane.IPVSAuto}})
		snap.Apply(snapshot.Delta{HostAddrs: &addrs, Node: &snapshot.Node{Name: "node-1", Addresses: addrs}})
		k := &strictKernel{t: t, contents: newContents()}
		inc := newTable()
		inc.replace(planner.State())
		for len(d.data) > 0 {
			change, _ := planner.Apply(snap, snap.Apply(d.delta()))
			touched := inc.update(planner.State(), change)
			full := newTable()
			full.replace(planner.State())
			if !reflect.DeepEqual(inc, full) {
				t.Fatalf("by change\n%v, in full\n%v", inc, full)
			}
			k.step(touched, &inc, d.n(2) == 0)
		}
		k.settle(&inc)
	})
}

// strictKernel takes writes as IPVS does: what is there cannot be added, what is not cannot be changed.
type strictKernel struct {
	t *testing.T
	contents
}

func (k *strictKernel) write(ops []op) {
	for _, o := range ops {
		f := k.services[o.key]
		bad := (f == nil) != (o.verb == newService)
		if !bad && o.verb >= newDest {
			_, there := f.dests[o.dest.AddrPort]
			bad = there == (o.verb == newDest)
		}
		if o.verb == delService {
			bad = bad || len(f.dests) > 0
		}
		if bad {
			k.t.Fatalf("the kernel refuses to %s", o)
		}
		k.apply(o)
	}
}

// step follows a change. busy has connections on every destination.
func (k *strictKernel) step(touched map[dataplane.Key]bool, want *table, busy bool) {
	p := &planner{until: 1000, idle: func(dataplane.Key, netip.AddrPort) bool { return !busy }}
	for _, key := range sorted(touched) {
		before := map[netip.AddrPort]Destination{}
		if f := k.services[key]; f != nil {
			before = maps.Clone(f.dests)
		}
		k.write(p.prepare(key, k.services[key], want.services[key]))
		for a, d := range before {
			if now := k.services[key].dests[a]; !wants(want.services[key], a) && now != d {
				k.t.Fatalf("%s of %s changed to %v before the others were told", a, key, now)
			}
		}
		k.serves(key, want.services[key])
		k.write(p.remove(key, k.services[key], want.services[key]))
		k.serves(key, want.services[key])
		if f := k.services[key]; f != nil || want.services[key] != nil {
			if lines := differenceAt(key, want.services[key], f); lines != nil {
				k.t.Fatalf("after the change %q", lines)
			}
		}
	}
}

// serves says that new connections get what is wanted, and no other destination has a weight.
func (k *strictKernel) serves(key dataplane.Key, want *VirtualService) {
	if want == nil {
		return
	}
	f := k.services[key]
	for _, d := range want.Destinations {
		if f == nil || f.dests[d.AddrPort] != d {
			k.t.Fatalf("%s lacks %v: %v", key, d, f)
		}
	}
	if len(f.dests) > len(want.Destinations) && hashes(f.Scheduler) && f.Flags&SchedFallback == 0 &&
		key.Protocol != snapshot.UDP {
		k.t.Fatalf("%s hashes to destinations that drain", key)
	}
}

// settle ends all connections, after which exactly what is wanted is left.
func (k *strictKernel) settle(want *table) {
	all := map[dataplane.Key]bool{}
	for key := range k.services {
		all[key] = true
	}
	k.step(all, want, false)
	if len(k.services) != len(want.services) {
		k.t.Fatalf("left are %v, want %v", k.services, want.services)
	}
	for key, f := range k.services {
		vs := want.services[key]
		if vs == nil || f.Config != vs.Config || len(f.dests) != len(vs.Destinations) || k.addrs[key.Addr] == 0 {
			k.t.Fatalf("%s is %v, want %v", key, f, vs)
		}
		k.serves(key, vs)
	}
}

// TestDraining says what begins to drain and what goes at once.
func TestDraining(t *testing.T) {
	at, other := netip.MustParseAddrPort("10.244.0.1:80"), netip.MustParseAddrPort("10.244.0.2:80")
	for _, c := range []struct {
		protocol  snapshot.Protocol
		scheduler string
		want      string
	}{
		{snapshot.TCP, "rr", "change destination 10.244.0.1:80 of 10.96.0.1:80/tcp to weight 0 until 7"},
		{snapshot.SCTP, "mh", "change service 10.96.0.1:80/sctp to mh flags 0x8; " +
			"change destination 10.244.0.1:80 of 10.96.0.1:80/sctp to weight 0 until 7"},
		{snapshot.TCP, "sh", "change service 10.96.0.1:80/tcp to sh flags 0x8; " +
			"change destination 10.244.0.1:80 of 10.96.0.1:80/tcp to weight 0 until 7"},
		{snapshot.UDP, "rr", "delete destination 10.244.0.1:80 of 10.96.0.1:80/udp"},
		{snapshot.UDP, "sh", "delete destination 10.244.0.1:80 of 10.96.0.1:80/udp"},
		{snapshot.TCP, "dh", "delete destination 10.244.0.1:80 of 10.96.0.1:80/tcp"},
	} {
		k := dataplane.Key{Addr: netip.MustParseAddr("10.96.0.1"), Protocol: c.protocol, Port: 80}
		have := newContents()
		have.put(k,
			&found{Config{Scheduler: c.scheduler}, map[netip.AddrPort]Destination{at: {at, 1, 0}, other: {other, 1, 0}}})
		want := &VirtualService{Key: k, Config: Config{Scheduler: c.scheduler}, Destinations: []Destination{{other, 1, 0}}}
		p := &planner{until: 7}
		var got []string
		for _, f := range []func(dataplane.Key, *found, *VirtualService) []op{p.prepare, p.remove} {
			for _, o := range f(k, have.services[k], want) {
				have.apply(o)
				s := o.String()
				switch o.verb {
				case setService:
					s += " to " + o.config.String()
				case setDest:
					s += fmt.Sprintf(" to weight %d until %d", o.dest.Weight, o.dest.Until)
				}
				got = append(got, s)
			}
		}
		if s := strings.Join(got, "; "); s != c.want {
			t.Errorf("%s, %s: %s; want %s", c.protocol, c.scheduler, s, c.want)
		}
	}
}

// TestPrint prints one of everything.
func TestPrint(t *testing.T) {
	addr := netip.MustParseAddr
	ends := &dataplane.Pool{Endpoints: []dataplane.Endpoint{
		{
			AddrPort: netip.MustParseAddrPort("10.244.0.1:8080"),
			Weight:   1,
		}, {AddrPort: netip.MustParseAddrPort("10.244.0.2:8080"), Weight: 65535}}}
	ends6 := &dataplane.Pool{
		Endpoints: []dataplane.Endpoint{{AddrPort: netip.MustParseAddrPort("[fd00:244::1]:8080"), Weight: 3}},
	}
	none := &dataplane.Pool{}
	port := func(p snapshot.Protocol, a string, pool *dataplane.Pool, affinity time.Duration, s dataplane.Scheduling,
	) *dataplane.ServicePort {
		return &dataplane.ServicePort{
			Cluster:    pool,
			Local:      none,
			Affinity:   affinity,
			Scheduling: &s,
			Frontends: []dataplane.Frontend{
				{Key: dataplane.Key{Addr: addr(a), Protocol: p, Port: 80}, Routes: []dataplane.Route{{Pool: pool}}}},
		}
	}
	name := snapshot.Name{Namespace: "a", Name: "b"}
	st := &dataplane.State{
		Services: map[snapshot.Name]*dataplane.Service{name: {Name: name, Ports: []*dataplane.ServicePort{
			port(snapshot.SCTP, "10.96.0.2", ends, 0, dataplane.Scheduling{Scheduler: "sh", Port: true, Fallback: true}),
			port(snapshot.TCP, "10.96.0.1", ends, 3*time.Hour, dataplane.Scheduling{Scheduler: "wlc"}),
			port(snapshot.UDP, "fd00:96::1", ends6, time.Minute, dataplane.Scheduling{Scheduler: "mh", Port: true}),
			port(snapshot.TCP, "10.96.0.3", none, 0, dataplane.Scheduling{Scheduler: "rr"}),
			port(snapshot.TCP, "127.0.0.1", ends, 0, dataplane.Scheduling{Scheduler: "rr"}),
		}}},
	}
	var b strings.Builder
	if err := Print(&b, st); err != nil {
		t.Fatal(err)
	}
	want := `-A -t 10.96.0.1:80 -s wlc -p 10800
-a -t 10.96.0.1:80 -r 10.244.0.1:8080 -m -w 1
-a -t 10.96.0.1:80 -r 10.244.0.2:8080 -m -w 65535
-A --sctp-service 10.96.0.2:80 -s sh -b sh-fallback,sh-port
-a --sctp-service 10.96.0.2:80 -r 10.244.0.1:8080 -m -w 1
-a --sctp-service 10.96.0.2:80 -r 10.244.0.2:8080 -m -w 65535
-A -u [fd00:96::1]:80 -s mh -p 60 -b mh-port
-a -u [fd00:96::1]:80 -r [fd00:244::1]:8080 -m -w 3
`
	if b.String() != want {
		t.Errorf("%s\nwant\n%s", b.String(), want)
	}
}

func TestNotes(t *testing.T) {
	for _, c := range []struct {
		note, name string
		before     int
		ok         bool
	}{
		{"was-0-net.ipv4.vs.conntrack", "net.ipv4.vs.conntrack", 0, true},
		{"was-900-ipvs.timeout.tcp", timeoutTCP, 900, true},
		{"was-x-net.ipv4", "", 0, false}, {"was-3", "", 0, false},
	} {
		name, before, ok := sysctl.Noted(c.note)
		if ok != c.ok || ok && (name != c.name || before != c.before || sysctl.NoteOf(name, before) != c.note) {
			t.Errorf("%s: %s, %d, %v", c.note, name, before, ok)
		}
	}
}

// TestDrainingAfterClockWasSetBack: what a process before this one gave an end that is further away than any may be
// by the clock of now gets a new one, once.
func TestDrainingAfterClockWasSetBack(t *testing.T) {
	soon, late := netip.MustParseAddrPort("10.244.0.1:80"), netip.MustParseAddrPort("10.244.0.2:80")
	other := netip.MustParseAddrPort("10.244.0.3:80")
	k := dataplane.Key{Addr: netip.MustParseAddr("10.96.0.1"), Protocol: snapshot.TCP, Port: 80}
	have := newContents()
	have.put(k, &found{Config{Scheduler: "rr"},
		map[netip.AddrPort]Destination{soon: {soon, 0, 900}, late: {late, 0, 4000}, other: {other, 1, 0}}})
	want := &VirtualService{Key: k, Config: Config{Scheduler: "rr"}, Destinations: []Destination{{other, 1, 0}}}
	p := &planner{until: 1000}
	for round, most := range []int{1, 0} {
		ops := p.remove(k, have.services[k], want)
		if len(ops) != most {
			t.Errorf("round %d: %v", round, ops)
		}
		for _, o := range ops {
			if o.dest != (Destination{late, 0, 1000}) {
				t.Errorf("round %d: %s %v", round, o, o.dest)
			}
			have.apply(o)
		}
	}
}
