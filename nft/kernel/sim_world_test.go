package kernel

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// poisonPort is the port of Services that the simulated kernel refuses, while it refuses anything.
const poisonPort = 666

// simTastes says which of the costly things the tenants of a simulation like: few do, or it would take too long.
type simTastes struct {
	// large Services, and hashes, whose tables have thousands of slots.
	large, hashes bool
}

// simChange changes one thing of the cluster, as walkWorld does, and now and then makes it hostile.
func simChange(r *rand.Rand, w *walkWorld, like simTastes) snapshot.Delta {
	_, d := w.change(r)
	for n, s := range d.Services {
		if s != nil {
			c := *s
			simAsk(r, &c, like.hashes)
			if like.large && r.IntN(8) == 0 {
				simOversize(r, &c)
			}
			d.Services[n] = &c
		}
	}
	for n, s := range d.Slices {
		if s == nil {
			continue
		}
		c := *s
		c.Endpoints = slices.Clone(c.Endpoints)
		for i := range c.Endpoints {
			simEndpoint(r, &c.Endpoints[i])
		}
		if like.large && r.IntN(8) == 0 {
			simCrowd(r, &c)
		}
		d.Slices[n] = &c
	}
	return w.apply(d)
}

// simAsk has a Service ask for what annotations can ask for.
func simAsk(r *rand.Rand, s *snapshot.Service, hashes bool) {
	s.Age = snapshot.Age{Created: int64(r.IntN(3)), UID: oneOf(r, "", "a", "b")}
	s.Counters = oneOf(r, snapshot.CountersByBudget, snapshot.CountersFirst, snapshot.CountersNever)
	s.SecondChance = snapshot.SecondChance(r.IntN(4))
	if r.IntN(4) == 0 {
		s.SlowStart = time.Duration(1+r.IntN(40)) * time.Second
	}
	if r.IntN(6) == 0 {
		s.Drain = time.Minute
	}
	switch n := r.IntN(6); {
	case n == 0 && hashes:
		s.Scheduling = &snapshot.Scheduling{Scheduler: snapshot.Hash, Port: r.IntN(2) == 0}
	case n == 1:
		s.Scheduling = &snapshot.Scheduling{Weights: map[string]uint16{"node-1": uint16(r.IntN(3)), "node-2": 2}}
	case n == 2:
		s.Scheduling = &snapshot.Scheduling{PreferNear: true}
		if r.IntN(2) == 0 {
			s.Scheduling.ZoneDemand = map[string]uint16{"a": uint16(r.IntN(4)), "b": 2}
		}
	}
	if r.IntN(10) == 0 {
		s.Ports = append(slices.Clip(s.Ports), snapshot.Port{Name: "a", Protocol: snapshot.TCP, Port: poisonPort})
	}
}

// simOversize gives a Service more addresses and ports than anybody needs.
func simOversize(r *rand.Rand, s *snapshot.Service) {
	for i := range r.IntN(120) {
		s.ExternalIPs = append(s.ExternalIPs, lab.Nth(lab.ExternalRange[0], 100+i))
	}
	for i := range r.IntN(12) {
		s.Ports = append(slices.Clip(s.Ports), snapshot.Port{Name: "a", Protocol: snapshot.TCP, Port: uint16(2000 + i)})
	}
	for i := range r.IntN(60) {
		s.SourceRanges = append(s.SourceRanges, netip.PrefixFrom(lab.Nth(lab.ExternalRange[0], i), 32))
	}
}

// simCrowd gives a slice many endpoints.
func simCrowd(r *rand.Rand, s *snapshot.Slice) {
	for i := range r.IntN(150) {
		s.Endpoints = append(s.Endpoints, snapshot.Endpoint{Addr: lab.Nth(lab.NodePodRange[0], 300+i), Ready: true,
			Serving: true})
	}
}

func simEndpoint(r *rand.Rand, e *snapshot.Endpoint) {
	e.Zone = oneOf(r, "", "a", "b")
	if r.IntN(4) == 0 {
		e.Weight = snapshot.Weight{Given: true, Parts: snapshot.PartsOf(uint16(r.IntN(20)))}
	}
}

// simHealth is what a node may have found out about the endpoints of a Service.
func simHealth(r *rand.Rand, held *snapshot.Snapshot, now time.Time) snapshot.Delta {
	n := worldName(r.IntN(worldServices))
	if held.Services[n] == nil { // nobody probes what is not there
		return snapshot.Delta{}
	}
	h := &snapshot.Health{}
	for _, name := range simSliceNames(held, n) {
		for _, e := range held.Slices[n][name].Endpoints {
			if r.IntN(3) == 0 {
				h.Unhealthy = append(h.Unhealthy, snapshot.Unhealthy{Endpoint: netip.AddrPortFrom(e.Addr, 8080),
					Cause: oneOf(r, snapshot.Unanswered, snapshot.Refused), Since: now})
			}
		}
	}
	slices.SortFunc(h.Unhealthy, func(a, b snapshot.Unhealthy) int { return a.Endpoint.Compare(b.Endpoint) })
	h.Unhealthy = slices.CompactFunc(h.Unhealthy, func(a, b snapshot.Unhealthy) bool { return a.Endpoint == b.Endpoint })
	return snapshot.Delta{Health: map[snapshot.Name]*snapshot.Health{n: h}}
}

func simSliceNames(held *snapshot.Snapshot, owner snapshot.Name) (names []string) {
	for name := range held.Slices[owner] {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// simConfig is what an operator may have decided.
func simConfig(r *rand.Rand) dataplane.Config {
	c := dataplane.Config{
		NodeName: "node-1",
		DetectLocal: oneOf(r,
			dataplane.DetectLocal{ClusterCIDRs: []netip.Prefix{lab.PodRange[0], lab.PodRange[1]}},
			dataplane.DetectLocal{Mode: dataplane.DetectNodeCIDR},
			dataplane.DetectLocal{Mode: dataplane.DetectBridgeInterface, Interface: "cni0"}),
		MasqueradeAll:      r.IntN(8) == 0,
		LocalhostNodePorts: r.IntN(2) == 0,
		PingServices:       r.IntN(2) == 0,
		RejectUnusedPorts:  r.IntN(2) == 0,
		NoExternalIPs:      r.IntN(8) == 0,
		AsKubeProxy:        r.IntN(4) == 0,
		SecondChance:       oneOf(r, snapshot.SecondChanceDefault, snapshot.SecondChanceOn, snapshot.SecondChanceObserve),
	}
	c.Records = c.PingServices != c.RejectUnusedPorts // of no more lots, so that older seeds mean the same
	return c
}

// simObject is one object of the cluster; the watch tells its versions in order.
type simObject struct {
	kind string
	name snapshot.Name
}

// simEvent is a version of one object, or that it is gone.
type simEvent struct {
	of simObject
	d  snapshot.Delta
}

// eventsOf takes a delta apart, in a fixed order.
func eventsOf(d snapshot.Delta) (out []simEvent) {
	for _, n := range sortedKeys(d.Services) {
		out = append(out, simEvent{simObject{"service", n},
			snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{n: d.Services[n]}}})
	}
	for _, n := range sortedKeys(d.Slices) {
		out = append(out, simEvent{simObject{"slice", n},
			snapshot.Delta{Slices: map[snapshot.Name]*snapshot.Slice{n: d.Slices[n]}}})
	}
	if d.Node != nil {
		out = append(out, simEvent{simObject{kind: "node"}, snapshot.Delta{Node: d.Node}})
	}
	if d.ServiceCIDRs != nil {
		out = append(out, simEvent{simObject{kind: "cidrs"}, snapshot.Delta{ServiceCIDRs: d.ServiceCIDRs}})
	}
	if d.HostAddrs != nil {
		out = append(out, simEvent{simObject{kind: "addrs"}, snapshot.Delta{HostAddrs: d.HostAddrs}})
	}
	return out
}

// simWatch tells a process what changes in the cluster, as watches do: late, merged, twice, in any order but that of
// each object, and after a break by a new list.
type simWatch struct {
	world *walkWorld
	queue *snapshot.Queue
	// told is what the process was told of.
	turns   *simTurns
	told    *snapshot.Snapshot
	pending []simEvent
	broken  bool
	// version counts deltas, and versions says with which each object was told last.
	version  int
	versions map[simObject]int
	// lose, if not nil, says that an event is to be lost: a planted fault.
	lose func(simEvent) bool
}

func (w *simWatch) put(d snapshot.Delta) {
	w.version++
	v := snapshot.Version(strconv.Itoa(w.version))
	d.Versions = snapshot.Versions{Services: v, Slices: v}
	d.Node, d.ServiceCIDRs, d.HostAddrs = simCopy(d.Node), simCopy(d.ServiceCIDRs), simCopy(d.HostAddrs)
	for _, e := range eventsOf(d) {
		w.versions[e.of] = w.version
	}
	w.told.Apply(d)
	w.queue.Put(d)
	w.turns.wait() // who runs beside the loop does not always meet it at the same place
}

// simCopy copies what the world may change while it waits in the queue.
func simCopy[T any](p *T) *T {
	if p == nil {
		return nil
	}
	v := *p
	return &v
}

// happened notes a change of the cluster.
func (w *simWatch) happened(d snapshot.Delta) {
	if !w.broken {
		w.pending = append(w.pending, eventsOf(d)...)
	}
}

// deliver tells some of what is pending, or all of it.
func (w *simWatch) deliver(r *rand.Rand, all bool) {
	most := len(w.pending)
	if !all {
		most = min(1+r.IntN(4), most)
	}
	var d snapshot.Delta
	for range most {
		i := r.IntN(len(w.pending))
		if first := slices.IndexFunc(w.pending, func(e simEvent) bool { return e.of == w.pending[i].of }); first >= 0 {
			i = first
		}
		e := w.pending[i]
		w.pending = slices.Delete(w.pending, i, i+1)
		if w.lose != nil && w.lose(e) {
			w.told.Apply(e.d)
			continue
		}
		if d.Merge(e.d); r.IntN(2) == 0 {
			w.put(d)
			d = snapshot.Delta{}
		}
	}
	if !d.Empty() {
		w.put(d)
	}
}

// again tells something that was told already.
func (w *simWatch) again(r *rand.Rand) {
	if names := sortedKeys(w.told.Services); len(names) > 0 {
		s := *w.told.Services[oneOf(r, names...)]
		w.put(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{s.Name: &s}})
	}
	if owners := sortedKeys(w.told.Slices); len(owners) > 0 {
		n := oneOf(r, owners...)
		s := *w.told.Slices[n][oneOf(r, simSliceNames(w.told, n)...)]
		w.put(snapshot.Delta{Slices: map[snapshot.Name]*snapshot.Slice{s.Name: &s}})
	}
}

// relist ends a break.
func (w *simWatch) relist(r *rand.Rand) {
	w.pending, w.broken = nil, false
	w.put(w.world.relist(r, w.told))
}

// missing says what of a version that is said to be programmed is not in a snapshot; empty if nothing.
func (w *simWatch) missing(s *snapshot.Snapshot, programmed snapshot.Version) string {
	version, err := strconv.Atoi(string(programmed))
	if err != nil {
		return ""
	}
	for of, v := range w.versions {
		if of.kind == "service" && v <= version && s.Services[of.name] != w.told.Services[of.name] {
			return fmt.Sprintf("%v of version %d is not in; programmed is %d", of.name, v, version)
		}
	}
	return ""
}

// differs says what the process was told otherwise than it is; empty if nothing.
func (w *simWatch) differs(s *snapshot.Snapshot) string {
	if len(s.Services) != len(w.told.Services) || len(s.Slices) != len(w.told.Slices) {
		return fmt.Sprintf("%d Services and slices of %d; told were %d and %d", len(s.Services), len(s.Slices),
			len(w.told.Services), len(w.told.Slices))
	}
	for n, svc := range w.told.Services {
		if s.Services[n] != svc {
			return fmt.Sprintf("%v is another than was told", n)
		}
	}
	for n, of := range w.told.Slices {
		for name, sl := range of {
			if s.Slices[n][name] != sl {
				return fmt.Sprintf("slice %s of %v is another than was told", name, n)
			}
		}
	}
	if !slices.Equal(s.HostAddrs, w.told.HostAddrs) || !slices.Equal(s.ServiceCIDRs, w.told.ServiceCIDRs) {
		return "addresses or service ranges are others than were told"
	}
	return ""
}
