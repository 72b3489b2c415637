package dataplane

import (
	"maps"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// dice makes choices from bytes, so that a fuzzer can steer them; when they run out every choice is the first.
type dice struct{ data []byte }

func (d *dice) n(sides int) int {
	if len(d.data) == 0 {
		return 0
	}
	b := d.data[0]
	d.data = d.data[1:]
	return int(b) % sides
}

func (d *dice) yes() bool { return d.n(2) == 1 }

func pick[T any](d *dice, of ...T) T { return of[d.n(len(of))] }

func some[T any](d *dice, of ...T) (out []T) {
	mask := d.n(256)
	for i, v := range of {
		if mask>>i&1 == 1 {
			out = append(out, v)
		}
	}
	return out
}

// The universe of the walk is small, so that names, addresses and ports collide all the time.
var (
	walkNames    = []snapshot.Name{name("a"), name("b"), name("c"), {Namespace: "other", Name: "a"}}
	walkHosts    = addrs("127.0.0.1 192.168.0.1 192.168.0.2 198.51.100.1 fd00:192::1 fe80::1")
	walkVIPs     = addrs("198.51.100.1 198.51.100.2 192.168.0.1 2001:db8:1::1 10.96.0.1")
	walkEnds     = addrs("10.244.9.1 10.244.9.2 10.244.9.3 fd00:244::1")
	walkSources  = prefixes("192.168.0.0/24 192.168.0.0/16 0.0.0.0/0 fd00::/8 198.51.100.0/24")
	walkPortName = []string{"", "web"}
	walkPorts    = []uint16{80, 81}
	walkProtocol = []snapshot.Protocol{snapshot.TCP, snapshot.TCP, snapshot.TCP, snapshot.UDP}
)

func (d *dice) config() Config {
	return Config{
		NodeName: "here",
		DetectLocal: DetectLocal{
			Mode:         pick(d, DetectClusterCIDR, DetectNodeCIDR, DetectBridgeInterface, DetectInterfaceNamePrefix),
			ClusterCIDRs: some(d, prefixes("10.244.0.0/16 fd00:244::/32")...),
			Interface:    "cni",
		},
		MasqueradeAll:      d.yes(),
		NodePortAddresses:  some(d, prefixes("192.168.0.0/24 127.0.0.0/8 ::/0 fe80::/10")...),
		NodePortPrimary:    d.yes(),
		LocalhostNodePorts: d.yes(),
		SecondChance:       d.secondChance(),
		LastResort:         d.yes(),
		PingServices:       d.yes(),
		RejectUnusedPorts:  d.yes(),
		IPVS: IPVS{Mode: pick(d, IPVSNever, IPVSAuto, IPVSAlways), Default: Scheduling{Scheduler: pick(d, "rr", "lc")},
			// Below 8 nothing stays out that would get in now, so that increments add up to what is computed anew.
			Addresses:     some(d, prefixes("198.51.100.0/31 192.168.0.0/16 2001:db8::/32")...),
			MaxPerService: pick(d, 0, 0, 3, 7), MaxPerNamespace: pick(d, 0, 4, 7)},
	}
}

// otherConfig changes one thing of a Config.
func (d *dice) otherConfig(c Config) Config {
	other := d.config()
	switch d.n(12) {
	case 0:
		c.NodeName = pick(d, "here", "there")
	case 1:
		c.DetectLocal = other.DetectLocal
	case 2:
		c.MasqueradeAll = !c.MasqueradeAll
	case 3:
		c.NodePortAddresses = append(other.NodePortAddresses, some(d, netip.Prefix{})...)
	case 4:
		c.LocalhostNodePorts = !c.LocalhostNodePorts
	case 5:
		c.NoExternalIPs = !c.NoExternalIPs
	case 6:
		c.NodeIP = pick(d, append(walkHosts, netip.Addr{})...)
	case 7:
		c.IPVS = other.IPVS
	case 8:
		c.NodePortPrimary = !c.NodePortPrimary
	case 9:
		c.SecondChance = other.SecondChance
	case 10:
		c.LastResort = !c.LastResort
	case 11: // the same once more
	}
	return c
}

func (d *dice) limits() snapshot.Limits {
	rate, client := snapshot.RateLimit{Rate: 7, Burst: 9}, snapshot.RateLimit{Rate: 5, Burst: 50}
	return pick(d, snapshot.Limits{}, snapshot.Limits{}, snapshot.Limits{Rate: rate, Drop: true},
		snapshot.Limits{Client: client, Open: 9, ClientOpen: 3})
}

func (d *dice) secondChance() snapshot.SecondChance {
	const on = snapshot.SecondChanceOn
	return pick(d, on, snapshot.SecondChanceDefault, on, snapshot.SecondChanceObserve, on, snapshot.SecondChanceOff, on)
}

// health is what a node may have found out about the few endpoints there are.
func (d *dice) health() *snapshot.Health {
	if d.n(4) == 0 {
		return nil
	}
	h := &snapshot.Health{}
	for _, a := range walkEnds {
		for _, port := range []uint16{8080, 9090} {
			if d.n(3) > 0 {
				h.Unhealthy = append(h.Unhealthy, snapshot.Unhealthy{Endpoint: netip.AddrPortFrom(a, port),
					Cause: pick(d, snapshot.Unanswered, snapshot.Refused, snapshot.Resort), Since: time.Unix(int64(d.n(3)), 0)})
			}
		}
	}
	return h
}

// someFull has every TCP port of a family full, and a client of each; nil if full is not set.
func someFull(full bool) *snapshot.Full {
	if !full {
		return nil
	}
	f := &snapshot.Full{Clients: map[snapshot.FullPort][]netip.Addr{}}
	for _, name := range walkPortName {
		p := snapshot.FullPort{Port: name, Protocol: snapshot.TCP, Family: ipfamily.IPv4}
		f.Ports, f.Clients[p] = append(f.Ports, p), addrs("192.0.2.7")
	}
	return f
}

// starting is how some of the few endpoints may start.
func (d *dice) starting() *snapshot.Starting {
	st := &snapshot.Starting{}
	for _, a := range walkEnds {
		if d.yes() {
			st.Endpoints = append(st.Endpoints, snapshot.StartingEndpoint{Endpoint: netip.AddrPortFrom(a, 0),
				Tenths: uint8(1 + d.n(9))})
		}
	}
	return st
}

func (d *dice) service(n snapshot.Name) *snapshot.Service {
	svc := &snapshot.Service{
		Name: n,
		Age:  snapshot.Age{Created: int64(d.n(3)), UID: pick(d, "", "u1", "u2")},
		ClusterIPs: pick(d, addrs("10.96.0.1"), addrs("10.96.0.2"), addrs("10.96.0.1 fd00:96::1"),
			addrs("fd00:96::2 10.96.0.2"),
			addrs("fd00:96::1"), nil),
		LoadBalancerIPs:     some(d, walkVIPs...),
		ExternalIPs:         some(d, walkVIPs...),
		HealthCheckNodePort: pick[uint16](d, 0, 0, 80, 81),
		SourceRanges:        some(d, walkSources...),
		InternalLocal:       d.yes(),
		ExternalLocal:       d.yes(),
		ExternalFailover:    snapshot.ExternalFailover(d.n(4)),
		Affinity:            time.Duration(d.n(2)) * time.Hour,
		SecondChance:        d.secondChance(),
		LastResort:          snapshot.LastResort(d.n(3)),
		Probe:               pick(d, snapshot.Probe{}, snapshot.Probe{Asked: true}),
		Local:               pick(d, "", "", "", "a", "b", "nobody"),
		Limits:              d.limits(),
		Scheduling: pick(d, nil, &snapshot.Scheduling{Scheduler: snapshot.NFTables}, &snapshot.Scheduling{Scheduler: "mh",
			Port: true},
			&snapshot.Scheduling{Scheduler: snapshot.Hash},
			&snapshot.Scheduling{Weights: map[string]uint16{"here": 3, "there": 0}},
			&snapshot.Scheduling{PreferNear: true, ZoneDemand: map[string]uint16{"a": 3}},
			&snapshot.Scheduling{PreferNear: true, Weights: map[string]uint16{"here": 2}}),
	}
	for range d.n(4) {
		svc.Ports = append(svc.Ports, snapshot.Port{
			Name: pick(d, walkPortName...), Protocol: pick(d, walkProtocol...), Port: pick(d, walkPorts...),
			NodePort: pick[uint16](d, 0, 80, 30080),
		})
	}
	if d.n(4) == 1 {
		svc.Backends = d.backends()
	}
	return svc
}

// backends refer to Services that there may be.
func (d *dice) backends() *snapshot.Backends {
	b := &snapshot.Backends{}
	for _, port := range walkPortName[d.n(4)/3:] {
		p := snapshot.PortBackends{Port: port}
		for range 1 + d.n(3) {
			p.To = append(p.To, snapshot.Backend{Service: pick(d, walkNames...), Port: pick(d, walkPorts...),
				Weight: pick[uint32](d, 1, 1, 3, 80, 0, snapshot.MaxBackendWeight), Refused: pick(d, "", "", "", "x")})
		}
		b.Ports = append(b.Ports, p)
	}
	return b
}

// refer makes a Service refer to others that have a port for it, of which one has endpoints.
func (d *dice) refer(delta *snapshot.Delta) {
	port := snapshot.Port{Name: "web", Protocol: snapshot.TCP, Port: 80}
	for _, n := range []snapshot.Name{name("b"), name("c"), name("a")} {
		svc := d.service(n)
		svc.Ports, svc.Backends = []snapshot.Port{port}, nil
		delta.Services[n] = svc
		if n == name("a") {
			svc.ClusterIPs, svc.Backends = addrs("10.96.0.1 fd00:96::1"), d.backends()
		}
	}
	sl := d.slice(name("s1"))
	sl.Service = "b"
	sl.Ports = append(sl.Ports, snapshot.SlicePort{Name: "web", Protocol: snapshot.TCP, Port: 8080})
	delta.Slices[sl.Name] = sl
}

// referAtMost bounds how many endpoints a namespace refers to, for one test: see referLimits.
func referAtMost(most int) (undo func()) {
	usual := referLimits
	referLimits.MaxPerService, referLimits.MaxPerNamespace = most, most
	return func() { referLimits = usual }
}

func (d *dice) slice(n snapshot.Name) *snapshot.Slice {
	sl := &snapshot.Slice{Name: n, Service: pick(d, "a", "b", "c", "nobody")}
	for range 1 + d.n(4) {
		sl.Ports = append(sl.Ports, snapshot.SlicePort{
			Name: pick(d, walkPortName...), Protocol: pick(d, walkProtocol...), Port: pick[uint16](d, 8080, 9090),
		})
	}
	for range d.n(7) {
		sl.Endpoints = append(sl.Endpoints, snapshot.Endpoint{
			Addr: pick(d, walkEnds...), Node: pick(d, "here", "there", ""), Zone: pick(d, "a", "b", ""),
			ForZones: some(d, "a", "b"), ForNodes: some(d, "here", "there"),
			Ready: d.yes(), Serving: d.yes(), Terminating: d.yes(), Weight: pick(d, walkWeights...),
		})
	}
	return sl
}

// delta changes a few things at once.
func (d *dice) delta() snapshot.Delta {
	delta := snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{}, Slices: map[snapshot.Name]*snapshot.Slice{}}
	for range 1 + d.n(4) {
		switch d.n(18) {
		case 0, 1, 2, 3:
			n := pick(d, walkNames...)
			delta.Services[n] = d.service(n)
		case 4:
			delta.Services[pick(d, walkNames...)] = nil
		case 5, 6, 7:
			n := pick(d, name("s1"), name("s2"), name("s3"), snapshot.Name{Namespace: "other", Name: "s1"})
			delta.Slices[n] = d.slice(n)
		case 8:
			delta.Slices[pick(d, name("s1"), name("s2"), name("s3"))] = nil
		case 9:
			delta.Node = &snapshot.Node{Name: "here", Zone: pick(d, "", "a", "b"), Addresses: some(d, walkHosts...),
				PodCIDRs: some(d, prefixes("10.244.1.0/24 10.244.2.0/24 fd00:244:1::/48")...)}
		case 10:
			list := some(d, walkHosts...)
			delta.HostAddrs = &list
		case 11:
			list := some(d, prefixes("10.96.0.0/16 198.51.100.0/24 fd00:96::/32")...)
			delta.ServiceCIDRs = &list
		case 12, 13:
			if delta.Health == nil {
				delta.Health = map[snapshot.Name]*snapshot.Health{}
			}
			n := pick(d, walkNames...)
			delta.Health[n] = d.health()
			snapshot.Put(&delta.Full, n, someFull(delta.Health[n] != nil && len(delta.Health[n].Unhealthy)%2 == 0))
		case 14:
			if delta.Starting == nil {
				delta.Starting = map[snapshot.Name]*snapshot.Starting{}
			}
			delta.Starting[pick(d, walkNames...)] = d.starting()
		case 15:
			delta.HostNetworks = &snapshot.HostNetworks{Own: some(d, prefixes("192.168.0.0/24 10.0.0.0/8")...),
				Routes: some(d, prefixes("10.96.0.0/24 10.96.0.0/16 198.51.100.0/25 fd00:96::/48")...), TooMany: d.n(16) == 1}
		case 16:
			sl := d.slice(KubernetesService)
			sl.Service = KubernetesService.Name
			sl.Endpoints = append(sl.Endpoints, endpoint(pick(d, "10.96.0.9", "192.168.0.9", "fd00:96::1"), "there"))
			delta.Slices[KubernetesService] = sl
		case 17:
			d.refer(&delta)
		}
	}
	return delta
}

// FuzzIncrementalEqualsFull walks at random through snapshots. After every step the Planner must hold what Compute
// makes of the snapshot, and must have said truly what changed.
func FuzzIncrementalEqualsFull(f *testing.F) {
	r := rand.New(rand.NewPCG(3, 4))
	for i := range 300 {
		data := make([]byte, 20+i*5)
		for j := range data {
			data[j] = byte(r.Uint32())
		}
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		d := &dice{data}
		cfg := d.config()
		defer referAtMost(pick(d, maxEndpoints, 3, 7))() // of which the small ones keep nothing out, as those of IPVS
		p, s := NewPlanner(cfg), snapshot.New()
		p.Apply(s, snapshot.Change{})
		known, old := map[Conflict]bool{}, map[snapshot.Name]*Service{}
		for len(d.data) > 0 {
			before, globals := maps.Clone(p.State().Services), *p.State()
			if d.n(4) == 0 {
				old = before
			}
			if d.n(5) == 0 {
				cfg = d.otherConfig(cfg)
				p.SetConfig(cfg)
			}
			change, found := p.Apply(s, s.Apply(d.delta()))

			want, conflicts := Compute(cfg, s)
			if !reflect.DeepEqual(p.State(), want) {
				t.Fatalf("the Planner has\n%s\nCompute has\n%s", dump(p.State()), dump(want))
			}
			checkInvariants(t, want)
			checkChange(t, before, p.State().Services, change.Services)
			checkBefore(t, p, before, change.Services)
			checkWithin(t, old, want)
			globals.Services = want.Services
			if same := reflect.DeepEqual(&globals, want); same == change.Globals {
				t.Fatalf("Globals is %v", change.Globals)
			}
			checkConflicts(t, p, known, conflicts, found)
			checkClaims(t, p)
		}
	})
}

// checkChange compares what an Apply said with what it did.
func checkChange(t *testing.T, before, after map[snapshot.Name]*Service, named []snapshot.Name) {
	t.Helper()
	if !slices.IsSortedFunc(named, snapshot.Name.Compare) || hasTwins(named, snapshot.Name.Compare) {
		t.Fatalf("not sorted and unique: %v", named)
	}
	for _, n := range slices.Concat(slices.Collect(maps.Keys(before)), slices.Collect(maps.Keys(after)), named) {
		if _, said := slices.BinarySearchFunc(named, n, snapshot.Name.Compare); !said && before[n] != after[n] {
			t.Fatalf("%v changed and is not named", n)
		} else if said && reflect.DeepEqual(before[n], after[n]) {
			t.Fatalf("%v is named and did not change", n)
		}
	}
}

// checkBefore compares what the Planner says of the Services before the last Apply with what they were.
func checkBefore(t *testing.T, p *Planner, before map[snapshot.Name]*Service, named []snapshot.Name) {
	t.Helper()
	list := p.Before()
	if len(list) != len(named) || len(p.Before()) > 0 {
		t.Fatalf("%d Services changed; it gives %d, and then %d", len(named), len(list), len(p.Before()))
	}
	for i, n := range named {
		if list[i] != before[n] {
			t.Fatalf("%v was %+v; it gives %+v", n, before[n], list[i])
		}
	}
}

// checkWithin puts what is left of all Services of an older State in the place of those of a newer one.
func checkWithin(t *testing.T, old map[snapshot.Name]*Service, now *State) {
	t.Helper()
	mixed := State{Services: map[snapshot.Name]*Service{}, Evidence: true}
	for n, svc := range now.Services {
		left := old[n].Within(svc)
		if left == nil {
			continue
		}
		mixed.Services[n] = left
		if again := left.Within(svc); again != left {
			t.Fatalf("of what is left of %v, less is left: %+v", n, again)
		}
		if left.equal(old[n]) != (left == old[n]) {
			t.Fatalf("%v lost nothing, and is a copy", n)
		}
	}
	checkInvariants(t, &mixed)
}

// checkConflicts compares the Planner's conflicts with Compute's, and the new ones with those known before, which it
// updates.
func checkConflicts(t *testing.T, p *Planner, known map[Conflict]bool, all []Conflict, found []ConflictSummary) {
	t.Helper()
	if !slices.Equal(p.conflicts(), all) {
		t.Fatalf("the Planner has conflicts %v, Compute has %v", p.conflicts(), all)
	}
	var fresh []Conflict
	for _, c := range all {
		if !known[c] {
			fresh = append(fresh, c)
		}
	}
	if fresh := SummarizeConflicts(fresh); !slices.Equal(found, fresh) {
		t.Fatalf("reported %v, new are %v", found, fresh)
	}
	clear(known)
	for _, c := range all {
		known[c] = true
	}
}

// checkClaims compares the Planner's books with its State.
func checkClaims(t *testing.T, p *Planner) {
	t.Helper()
	won, lost := 0, 0
	for n, svc := range p.State().Services {
		svc.eachClaim(func(k Key, c Claim) {
			won++
			if !p.claims.wins(k, c) || p.claims.winner(k) != n {
				t.Fatalf("%v has %v, the books say %v", c, k, p.claims.winner(k))
			}
		})
	}
	for k, list := range p.claims.contested {
		lost += len(list) - 1
		if _, twice := p.claims.only[k]; twice || len(list) < 2 {
			t.Fatalf("%v is contested by %v", k, list)
		}
	}
	if keys := len(p.claims.only) + len(p.claims.contested); keys != won {
		t.Fatalf("%d keys in the books, %d in the State", keys, won)
	}
	for _, keys := range p.claims.lost {
		lost -= len(keys)
	}
	if lost != 0 {
		t.Fatalf("lost keys are off by %d", lost)
	}
}

func dump(st *State) string {
	out := ""
	for _, n := range slices.SortedFunc(maps.Keys(st.Services), snapshot.Name.Compare) {
		out += frontendsText(st.Services[n])
		for _, sp := range st.Services[n].Ports {
			out += "  cluster " + sp.Cluster.text() + ", local " + sp.Local.text() + "\n"
		}
	}
	return out
}

// TestWalkMeetsConflicts: the fuzz test is worth its name only if its universe is crowded enough.
func TestWalkMeetsConflicts(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	conflicts, older, droppedPools, sources, noted := 0, 0, 0, 0, map[From]int{}
	ejected, retried, refused, shared := 0, 0, 0, 0
	for range 8000 {
		data := make([]byte, 400)
		for j := range data {
			data[j] = byte(r.Uint32())
		}
		d, s := &dice{data}, snapshot.New()
		cfg := d.config()
		for len(d.data) > 0 {
			s.Apply(d.delta())
		}
		st, found := Compute(cfg, s)
		conflicts += len(found)
		for _, c := range found {
			if c.Winner.Kind == c.Loser.Kind && c.Winner.Age != c.Loser.Age {
				older++
			}
		}
		for _, svc := range st.Services {
			for _, sp := range svc.Ports {
				if sp.Local.Empty == Drop {
					droppedPools++
				}
				for _, p := range []*Pool{sp.Cluster, sp.Local} {
					ejected += len(p.Ejected)
					if p.Refused > 0 {
						refused++
					}
					if len(p.Endpoints) > 1 && s.Services[svc.Name].Backends != nil {
						shared++
					}
					if p.RetryRefused {
						retried++
					}
				}
				for _, f := range sp.Frontends {
					sources += len(f.Sources)
					for _, r := range f.Routes {
						if len(r.Pool.Endpoints) > 0 {
							noted[r.From]++
						}
					}
				}
			}
		}
	}
	if conflicts < 100 || older < 50 || droppedPools < 20 || sources < 100 || len(noted) != 3 || ejected < 10 ||
		retried < 10 || refused < 20 || shared < 20 {
		t.Errorf("more rounds are needed: conflicts %d of 100, by age %d of 50, drops %d of 20, sources %d of 100, "+
			"routes %v, ejected %d of 10, retried %d of 10, with refused shares %d of 20, of backends %d of 20",
			conflicts, older, droppedPools, sources, noted, ejected, retried, refused, shared)
	}
}

var walkWeights = []snapshot.Weight{{}, {}, {Given: true}, {Given: true, Parts: 200}, {Given: true, Parts: 150}}
