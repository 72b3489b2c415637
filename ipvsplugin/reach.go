package ipvsplugin

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// needsRoute says whether the host must accept packets to an address: a Service is there, or connections of a former
// Service continue.
func (b *Backend) needsRoute(a netip.Addr) bool {
	if b.want.addrs[a] > 0 {
		return true
	}
	_, routed := b.routes[a]
	return routed && b.have.addrs[a] > 0
}

// mustRelease says whether the host accepts packets to an address that no longer belongs to Services only. It must
// release the address at once, even if clients are still connected.
func (b *Backend) mustRelease(a netip.Addr) bool {
	_, routed := b.routes[a]
	holds := func(p netip.Prefix) bool { return p.Contains(a) }
	return routed && b.want.addrs[a] == 0 &&
		(slices.ContainsFunc(b.shared, holds) || b.services != nil && !slices.ContainsFunc(b.services, holds))
}

// readDevices reads the addresses of this host.
func (b *Backend) readDevices() (err error) {
	b.devices, err = b.net.addresses()
	return err
}

// onDevice says whether an address is on a device of this host.
func (b *Backend) onDevice(a netip.Addr) bool {
	return slices.ContainsFunc(b.devices, func(d device) bool { return d.Addr == a })
}

// source gives the address that connections of the node have in the family of an address; invalid if there is none.
func (b *Backend) source(of netip.Addr) netip.Addr {
	if b.options.NodeAddrs != nil {
		for _, a := range b.options.NodeAddrs() {
			if a.Is4() == of.Is4() && b.onDevice(a) {
				return a
			}
		}
	}
	for _, d := range b.devices {
		if d.Is4() == of.Is4() && d.global && !d.own && b.want.addrs[d.Addr] == 0 {
			return d.Addr
		}
	}
	return netip.Addr{}
}

// addRoutes makes sure that packets to the addresses of keys reach IPVS, and nothing else on this host. It sets up the
// guard first.
func (b *Backend) addRoutes(keys map[dataplane.Key]bool, r *dataplane.Receipt) error {
	var missing []route
	seen := map[netip.Addr]bool{}
	for k := range keys {
		if a := k.Addr; !seen[a] && b.want.addrs[a] > 0 {
			if _, there := b.routes[a]; !there {
				missing = append(missing, route{to: a})
			}
			seen[a] = true
		}
	}
	if len(missing) > 0 {
		if err := b.readDevices(); err != nil {
			return err
		}
	}
	if b.guarded == nil {
		missing = append(missing, b.wrongSources()...)
	} else if len(missing) == 0 {
		return nil
	}
	for i := range missing {
		missing[i].source = b.source(missing[i].to)
	}
	missing, failed, err := b.withoutGateways(missing)
	if err != nil {
		return err
	}
	if err := b.protect(missing, r); err != nil {
		return err
	}
	slices.SortFunc(missing, func(a, b route) int { return a.to.Compare(b.to) })
	refused, err := b.net.add(missing)
	if err != nil {
		b.stale = true
		return err
	}
	maps.Copy(failed, refused)
	for _, m := range missing {
		if failed[m.to] == nil {
			b.routes[m.to] = m.source
			r.Added++
		}
	}
	if len(failed) > 0 {
		return b.refuseAt(failed)
	}
	return nil
}

// errGateway is the reason why an address gets no route.
var errGateway = errors.New("this node routes traffic through that address")

// withoutGateways leaves out routes to addresses that the host uses as gateways. Those often belong to other nodes.
func (b *Backend) withoutGateways(routes []route) (left []route, spared map[netip.Addr]error, err error) {
	spared = map[netip.Addr]error{}
	if len(routes) == 0 {
		return nil, spared, nil
	}
	gateways, err := b.net.gateways()
	if err != nil {
		return nil, nil, err
	}
	for _, r := range routes {
		if gateways[r.to] {
			spared[r.to] = errGateway
		} else {
			left = append(left, r)
		}
	}
	return left, spared, nil
}

// refuseAt returns the error for addresses that cannot have a route, such as multicast addresses.
func (b *Backend) refuseAt(failed map[netip.Addr]error) error {
	rejected := &dataplane.Refused{Services: map[snapshot.Name]error{}, Scheduling: true}
	for k, vs := range b.want.services {
		if why := failed[k.Addr]; why != nil {
			rejected.Services[vs.Service.Service] = fmt.Errorf("%s: %w", vs.Service, why)
		}
	}
	return rejected
}

// wrongSources returns the routes whose source is no longer the node's address.
func (b *Backend) wrongSources() (routes []route) {
	sources := map[bool]netip.Addr{}
	for a, source := range b.routes {
		want, known := sources[a.Is4()]
		if !known {
			want = b.source(a)
			sources[a.Is4()] = want
		}
		if want != source {
			routes = append(routes, route{to: a})
		}
	}
	return routes
}

// protect makes the guard cover the existing routes and the coming ones, except addresses that are on a device. A guard
// that has not been read yet is compared first.
func (b *Backend) protect(coming []route, r *dataplane.Receipt) error {
	want := map[netip.Addr]bool{}
	for a := range b.routes {
		want[a] = true
	}
	for _, m := range coming {
		want[m.to] = true
	}
	for _, d := range b.devices {
		delete(want, d.Addr)
	}
	if b.guarded == nil {
		same, err := b.guard.holds(want)
		if err == nil && !same {
			err = b.guard.replace(slices.SortedFunc(maps.Keys(want), netip.Addr.Compare))
			r.Added += len(want)
		}
		if err == nil {
			b.guarded = want
		}
		return err
	}
	add, remove := difference(want, b.guarded), difference(b.guarded, want)
	if err := b.guard.change(add, remove); err != nil {
		b.guarded = nil // it is read the next time
		return err
	}
	b.guarded = want
	r.Added += len(add)
	r.Removed += len(remove)
	return nil
}

// difference gives what is in a and not in b, sorted.
func difference(a, b map[netip.Addr]bool) (list []netip.Addr) {
	for addr := range a {
		if !b[addr] {
			list = append(list, addr)
		}
	}
	slices.SortFunc(list, netip.Addr.Compare)
	return list
}

// removeRoutes removes the routes to the addresses of keys that are no longer needed. The first time after routes were
// read, it checks all routes.
func (b *Backend) removeRoutes(keys map[dataplane.Key]bool, r *dataplane.Receipt) error {
	gone := map[netip.Addr]netip.Addr{}
	for k := range keys {
		if source, there := b.routes[k.Addr]; there && !b.needsRoute(k.Addr) {
			gone[k.Addr] = source
		}
	}
	if b.progress.strayRoutes { // routes of an earlier process that no virtual service is at
		for a, source := range b.routes {
			if !b.needsRoute(a) {
				gone[a] = source
			}
		}
		b.progress.strayRoutes = false
	}
	if len(gone) == 0 {
		return nil
	}
	if err := b.net.remove(routesTo(gone)); err != nil {
		b.stale = true
		return err
	}
	for a := range gone {
		delete(b.routes, a)
		r.Removed++
	}
	return b.protect(nil, r)
}

func routesTo(routes map[netip.Addr]netip.Addr) (list []route) {
	for a, source := range routes {
		list = append(list, route{a, source})
	}
	slices.SortFunc(list, func(a, b route) int { return a.to.Compare(b.to) })
	return list
}
