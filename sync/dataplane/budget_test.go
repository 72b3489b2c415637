package dataplane

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// asking gives a Service that asks for IPVS, with one endpoint less than its cost.
func asking(n string, created int64, cost int) snapshot.Delta {
	svc := webService(n, fmt.Sprintf("10.96.%d.1", n[0]))
	svc.Age, svc.Scheduling = snapshot.Age{Created: created, UID: n}, &snapshot.Scheduling{Scheduler: "lc"}
	sl := sliceOf(n, n+"-1")
	for i := range cost - 1 {
		e := endpoint("10.0.0.1", "x")
		e.Addr = netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)})
		sl.Endpoints = append(sl.Endpoints, e)
	}
	return snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{svc.Name: svc},
		Slices: map[snapshot.Name]*snapshot.Slice{sl.Name: sl}}
}

// books is a Planner with its snapshot.
type books struct {
	*Planner
	t *testing.T
	s *snapshot.Snapshot
}

func newBooks(t *testing.T, i IPVS) *books {
	i.Default = Scheduling{Scheduler: "rr"}
	return &books{NewPlanner(Config{IPVS: i}), t, snapshot.New()}
}

func (b *books) apply(deltas ...snapshot.Delta) Change {
	var all snapshot.Delta
	for _, d := range deltas {
		all.Merge(d)
	}
	c, _ := b.Apply(b.s, b.s.Apply(all))
	return c
}

// want says which Services are scheduled, by their names: "a b". Explain has to say the same.
func (b *books) want(scheduled string) {
	b.t.Helper()
	var is []string
	for n, svc := range b.State().Services {
		if svc.Ports[0].Scheduling != nil {
			is = append(is, n.Name)
		}
		if !svc.NotScheduled().WholeService() != (svc.Ports[0].Scheduling != nil) {
			b.t.Errorf("%v: %d", n, svc.NotScheduled())
		}
	}
	slices.Sort(is)
	if got := strings.Join(is, " "); got != scheduled {
		b.t.Errorf("scheduled are %q, want %q", got, scheduled)
	}
}

// fresh says that whoever begins anew has the same answer, and so does Explain.
func (b *books) fresh() {
	b.t.Helper()
	st, _ := Compute(b.Config(), b.s)
	for n, svc := range st.Services {
		if now := b.State().Services[n]; !now.equal(svc) {
			b.t.Errorf("%v: %+v, computed anew %+v", n, now.Ports[0], svc.Ports[0])
		}
		f := svc.Ports[0].Frontends[0]
		if x := Explain(b.Config(), b.s, Question{Source: addrs("192.0.2.1")[0],
			Key: f.Key}); x.Frontend.NotScheduled != f.NotScheduled {
			b.t.Errorf("%v: explained as %d, is %d", n, x.Frontend.NotScheduled, f.NotScheduled)
		}
	}
}

// TestBudgetOfService: a Service that is too large stays with nftables, however it is meant to be scheduled, and does
// not go to and fro.
func TestBudgetOfService(t *testing.T) {
	for _, mode := range []IPVSMode{IPVSAuto, IPVSAlways} {
		b := newBooks(t, IPVS{Mode: mode, MaxPerService: 80})
		for _, step := range []struct {
			cost int
			want string
		}{{80, "a"}, {81, ""}, {80, ""}, {71, ""}, {81, ""}, {70, "a"}, {80, "a"}, {81, ""}} {
			c := b.apply(asking("a", 1, step.cost))
			if b.want(step.want); len(c.Services) != 1 {
				t.Errorf("%d: changed %v", step.cost, c.Services)
			}
		}
		if why := b.State().Services[name("a")].NotScheduled(); why != ServiceTooLarge {
			t.Error(why)
		}
		b.fresh()
	}
}

// TestBudgetDefault: three hundred addresses with fifty ports of a hundred endpoints are 1.5 million destinations,
// which nobody gets.
func TestBudgetDefault(t *testing.T) {
	var ips []netip.Addr
	for i := range 300 {
		ips = append(ips, netip.AddrFrom4([4]byte{203, 0, byte(i >> 8), byte(i)}))
	}
	b := newBooks(t, IPVS{Mode: IPVSAuto, Addresses: prefixes("203.0.0.0/16")})
	d := asking("a", 1, 101)
	for _, svc := range d.Services {
		svc.LoadBalancerIPs, svc.Ports = ips, nil
		for _, sl := range d.Slices {
			sl.Ports = nil
			for i := range 50 {
				n := fmt.Sprint("p", i)
				svc.Ports = append(svc.Ports, snapshot.Port{Name: n, Protocol: snapshot.TCP, Port: uint16(1 + i)})
				sl.Ports = append(sl.Ports, snapshot.SlicePort{Name: n, Protocol: snapshot.TCP, Port: 80})
			}
		}
	}
	b.apply(d, asking("b", 2, 1000))
	b.want("b")
}

// TestBudgetWeighs: schedulers with tables of their own count for what these take.
func TestBudgetWeighs(t *testing.T) {
	for scheduler, most := range map[string]int{"rr": 4095, "lc": 4095, "sh": 4088, "dh": 4088, "lblc": 4064,
		"lblcr": 4064, "mh": 1008} {
		for _, more := range []int{0, 1} {
			d := asking("a", 1, 1+most+more)
			d.Services[name("a")].Scheduling = &snapshot.Scheduling{Scheduler: scheduler}
			b := newBooks(t, IPVS{Mode: IPVSAuto})
			b.apply(d)
			b.want([]string{"a", ""}[more])
		}
	}
}

// TestAffinityIsBounded: of a Service with session affinity IPVS would remember every client. It gets IPVS only if the
// operator wants that.
func TestAffinityIsBounded(t *testing.T) {
	b := newBooks(t, IPVS{Mode: IPVSAuto})
	d := asking("a", 1, 3)
	d.Services[name("a")].Affinity = time.Hour
	b.apply(d, asking("b", 1, 3))
	b.want("b")
	if why := b.State().Services[name("a")].NotScheduled(); why != WithAffinity || !why.WholeService() {
		t.Error(why)
	}
	b.fresh()
	cfg := b.Config()
	cfg.IPVS.Mode = IPVSAlways
	b.SetConfig(cfg)
	b.apply()
	b.want("a b")
}

// TestBudgetOfNamespace: the oldest Services of a namespace are served, newcomers take nothing from them, and other
// namespaces have their own.
func TestBudgetOfNamespace(t *testing.T) {
	b := newBooks(t, IPVS{Mode: IPVSAuto, MaxPerNamespace: 80})
	b.apply(asking("b", 20, 40), asking("c", 30, 40))
	b.want("b c")
	b.apply(asking("d", 40, 40)) // the youngest
	b.want("b c")
	b.apply(asking("e", 50, 2)) // there is no room at all
	b.want("b c")
	b.fresh()
	c := b.apply(asking("b", 20, 41)) // the older one grows
	if b.want("b e"); len(c.Services) != 3 {
		t.Errorf("changed %v", c.Services)
	}
	b.apply(asking("b", 20, 40)) // and shrinks: c would just fit, and come and go with every endpoint
	b.want("b e")
	b.apply(asking("b", 20, 30))
	b.want("b c e")
	b.fresh()
	b.apply(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{name("b"): nil}})
	b.want("c e")
	b.apply(asking("d", 40, 20))
	b.want("c d e")
	b.apply(asking("a", 60, 40)) // a name before all others is no claim
	b.want("c d e")
	b.fresh()

	cfg := b.Config()
	cfg.IPVS.MaxPerNamespace = 200
	b.SetConfig(cfg)
	b.apply()
	b.want("a c d e")
	cfg.IPVS.MaxPerNamespace, cfg.IPVS.Mode = 10, IPVSAlways // the operator wants all
	b.SetConfig(cfg)
	b.apply()
	b.want("a c d e")
	cfg.IPVS.Mode = IPVSNever
	b.SetConfig(cfg)
	b.apply()
	if len(b.build.budget.namespaces)+len(b.build.budget.tooLarge) > 0 {
		t.Errorf("%+v", b.build.budget)
	}
}

// TestBudgetApart: what one namespace asks for costs no other.
func TestBudgetApart(t *testing.T) {
	b := newBooks(t, IPVS{Mode: IPVSAuto, MaxPerNamespace: 80})
	var others snapshot.Delta
	for i := range 3 {
		d := asking("z", int64(1+i), 60)
		for n, svc := range d.Services {
			other := *svc
			other.Name = snapshot.Name{Namespace: "other", Name: fmt.Sprint(n.Name, i)}
			other.ClusterIPs = []netip.Addr{netip.AddrFrom4([4]byte{10, 96, 200, byte(i)})}
			others.Merge(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{other.Name: &other}})
			for _, sl := range d.Slices {
				s := *sl
				s.Name, s.Service = other.Name, other.Name.Name
				others.Merge(snapshot.Delta{Slices: map[snapshot.Name]*snapshot.Slice{s.Name: &s}})
			}
		}
	}
	b.apply(others)
	b.want("z0")
	b.apply(asking("a", 99, 80))
	b.want("a z0")
	if got := slices.Sorted(maps.Keys(b.build.budget.namespaces)); len(got) != 2 {
		t.Error(got)
	}
	b.fresh()
}

// TestBudgetForgetsAmongAll: a Service that goes while all are computed anew asks for nothing more.
func TestBudgetForgetsAmongAll(t *testing.T) {
	limits := IPVS{Mode: IPVSAuto, MaxPerNamespace: 6}
	b := newBooks(t, limits)
	b.apply(asking("a", 1, 5), asking("b", 2, 3))
	b.want("a")
	cfg := b.Config()
	cfg.MasqueradeAll = true
	b.SetConfig(cfg)
	b.apply(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{name("a"): nil}})
	b.want("b")
}
