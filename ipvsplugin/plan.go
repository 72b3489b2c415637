package ipvsplugin

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// verb is what is done to an object of IPVS.
type verb uint8

const (
	newService verb = iota
	setService
	delService
	newDest
	setDest
	delDest
)

var verbNames = [...]string{
	"add service", "change service", "delete service", "add destination", "change destination", "delete destination",
}

func (v verb) String() string { return verbNames[v] }

// op is one write.
type op struct {
	verb verb
	key  dataplane.Key
	// config is for new and changed services, dest for destinations.
	config Config
	dest   Destination
}

// String names the object as errors do.
func (o op) String() string {
	if o.verb < newDest {
		return o.verb.String() + " " + o.key.String()
	}
	return o.verb.String() + " " + o.dest.AddrPort.String() + " of " + o.key.String()
}

// String is for messages: "lc", "sh persistent 300 flags 0x18".
func (c Config) String() string {
	s := c.Scheduler
	if c.Flags&Persistent != 0 {
		s += fmt.Sprintf(" persistent %d", c.Timeout)
	}
	if f := c.Flags &^ Persistent; f != 0 {
		s += fmt.Sprintf(" flags %#x", f)
	}
	return s
}

// found is a virtual service of ours as the kernel holds it.
type found struct {
	Config
	dests map[netip.AddrPort]Destination
}

// contents are our virtual services as the kernel holds them, as far as known. addrs counts them by address.
type contents struct {
	services map[dataplane.Key]*found
	addrs    map[netip.Addr]int
}

func newContents() contents {
	return contents{services: map[dataplane.Key]*found{}, addrs: map[netip.Addr]int{}}
}

func (c *contents) put(k dataplane.Key, f *found) {
	if c.services[k] == nil {
		c.addrs[k.Addr]++
	}
	c.services[k] = f
}

// apply records a write that the kernel acknowledged.
func (c *contents) apply(o op) {
	switch o.verb {
	case newService:
		c.put(o.key, &found{Config: o.config, dests: map[netip.AddrPort]Destination{}})
	case setService:
		c.services[o.key].Config = o.config
	case delService:
		delete(c.services, o.key)
		count(c.addrs, o.key.Addr, -1)
	case newDest, setDest:
		c.services[o.key].dests[o.dest.AddrPort] = o.dest
	case delDest:
		delete(c.services[o.key].dests, o.dest.AddrPort)
	}
}

// count changes a number, and forgets it when it is 0.
func count(m map[netip.Addr]int, a netip.Addr, by int) {
	if m[a] += by; m[a] == 0 {
		delete(m, a)
	}
}

// planner decides which writes lead from what the kernel holds to what is wanted.
type planner struct {
	// until is the end of drains that begin now, in seconds since 1970.
	until uint32
	// idle says that a destination may be removed without waiting for its connections; nil means no destination.
	idle func(dataplane.Key, netip.AddrPort) bool
}

// drains says whether destinations can be kept without getting new connections.
//
// UDP has no end to wait for: the client's next packet goes to another destination. The schedulers dh and lblc choose
// by the packet's destination address, and dh still chooses a destination of weight 0, so its clients would not be
// served.
func drains(k dataplane.Key, c Config) bool { return k.Protocol != snapshot.UDP && c.Scheduler != "dh" }

// prepare returns the writes that must precede packets: virtual services, destinations, and their weights.
func (p *planner) prepare(k dataplane.Key, have *found, want *VirtualService) (ops []op) {
	if want == nil {
		return nil
	}
	if have == nil {
		ops = append(ops, op{verb: newService, key: k, config: want.Config})
		have = &found{Config: want.Config}
	} else if c := p.config(k, have, want); have.Config != c {
		ops = append(ops, op{verb: setService, key: k, config: c})
	}
	for _, d := range want.Destinations {
		is, there := have.dests[d.AddrPort]
		switch {
		case !there:
			ops = append(ops, op{verb: newDest, key: k, dest: d})
		case is != d:
			ops = append(ops, op{verb: setDest, key: k, dest: d})
		}
	}
	return ops
}

// config returns how a virtual service schedules while some of its destinations drain. sh and mh still choose those,
// and then reject the client unless they may fall back on other destinations.
func (p *planner) config(k dataplane.Key, have *found, want *VirtualService) Config {
	c := want.Config
	if hashes(c.Scheduler) && drains(k, c) && !p.allWanted(have, want) {
		c.Flags |= SchedFallback
	}
	return c
}

func hashes(scheduler string) bool { return scheduler == "sh" || scheduler == "mh" }

// allWanted says whether every existing destination is wanted.
func (p *planner) allWanted(have *found, want *VirtualService) bool {
	for a := range have.dests {
		if !wants(want, a) {
			return false
		}
	}
	return true
}

func wants(vs *VirtualService, a netip.AddrPort) bool {
	if vs == nil {
		return false
	}
	_, there := slices.BinarySearchFunc(vs.Destinations, a,
		func(d Destination, a netip.AddrPort) int { return d.Compare(a) })
	return there
}

// remove returns the removals, and the drains to begin, once no packets are sent there. have is the content after
// prepare.
func (p *planner) remove(k dataplane.Key, have *found, want *VirtualService) (ops []op) {
	if have == nil {
		return nil
	}
	gone := 0
	for a, d := range have.dests {
		switch {
		case wants(want, a):
		case !drains(k, have.Config) || p.idle != nil && p.idle(k, a):
			ops = append(ops, op{verb: delDest, key: k, dest: d})
			gone++
		case d.Weight != 0 || d.Until == 0 || d.Until > p.until: // the last: the clock was set back while nobody looked
			ops = append(ops, op{verb: setDest, key: k, dest: Destination{AddrPort: a, Until: p.until}})
		}
	}
	ops, more := p.limitDraining(k, have, want, ops)
	gone += more
	slices.SortFunc(ops, func(a, b op) int { return a.dest.Compare(b.dest.AddrPort) })
	switch left := len(have.dests) - gone; {
	case want == nil && left == 0:
		ops = append(ops, op{verb: delService, key: k})
	case want != nil && left == len(want.Destinations) && have.Config != want.Config: // nothing drains any more
		ops = append(ops, op{verb: setService, key: k, config: want.Config})
	}
	return ops
}

// maxDraining bounds the draining destinations of one virtual service. All of them are checked every two seconds.
const maxDraining = 1024

// limitDraining removes the destinations that have drained longest if there are too many. It returns the ops with these
// removals, and their number.
func (p *planner) limitDraining(k dataplane.Key, have *found, want *VirtualService, ops []op) (all []op, gone int) {
	if len(have.dests) <= maxDraining {
		return ops, 0
	}
	deleted := map[netip.AddrPort]bool{}
	for _, o := range ops {
		deleted[o.dest.AddrPort] = o.verb == delDest
	}
	var left []Destination
	for a, d := range have.dests {
		if !wants(want, a) && !deleted[a] {
			d.Until = cmp.Or(d.Until, p.until)
			left = append(left, d)
		}
	}
	if len(left) <= maxDraining {
		return ops, 0
	}
	slices.SortFunc(left, func(a, b Destination) int {
		return cmp.Or(cmp.Compare(a.Until, b.Until), a.Compare(b.AddrPort))
	})
	left = left[:len(left)-maxDraining]
	for _, d := range left {
		deleted[d.AddrPort] = true
	}
	ops = slices.DeleteFunc(ops, func(o op) bool { return o.verb != delDest && deleted[o.dest.AddrPort] })
	for _, d := range left {
		ops = append(ops, op{verb: delDest, key: k, dest: d})
	}
	return ops, len(left)
}

// draining says whether a virtual service has destinations that wait for their connections to end.
func (f *found) draining(want *VirtualService) bool {
	for a := range f.dests {
		if !wants(want, a) {
			return true
		}
	}
	return false
}
