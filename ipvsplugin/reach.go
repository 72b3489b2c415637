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

// needsRoute says whether the host has to take in what is sent to an address: because a Service is there, or because
// connections of one that was there go on.
func (b *Backend) needsRoute(a netip.Addr) bool {
	if b.want.addrs[a] > 0 {
		return true
	}
	_, routed := b.routes[a]
	return routed && b.have.addrs[a] > 0
}

// mustRelease says whether the host takes in an address that is not Services' alone any more: then it has to be given back
// at once, whoever is still connected.
func (b *Backend) mustRelease(a netip.Addr) bool {
	_, routed := b.routes[a]
	return routed && b.want.addrs[a] == 0 && b.services != nil &&
		!slices.ContainsFunc(b.services, func(p netip.Prefix) bool { return p.Contains(a) })
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

// addRoutes makes sure that packets to the addresses of keys get to IPVS, and to nobody else on this host. The guard is
// there first.
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

// errGateway is why there is no route of ours to an address.
var errGateway = errors.New("this node has routes by way of that address")

// withoutGateways leaves out the routes to addresses by way of which the host reaches others: those are of gateways, and often of
// other nodes.
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

// refuseAt is the error of addresses that no route can be had to, such as one that is for multicast.
func (b *Backend) refuseAt(failed map[netip.Addr]error) error {
	rejected := &dataplane.Refused{Services: map[snapshot.Name]error{}, Scheduling: true}
	for k, vs := range b.want.services {
		if why := failed[k.Addr]; why != nil {
			rejected.Services[vs.Service.Service] = fmt.Errorf("%s: %w", vs.Service, why)
		}
	}
	return rejected
}

// wrongSources gives the routes whose source is not the node's address any more.
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

// protect has the guard guard the routes there are and those to come, but not what is on a device. A guard that
// nobody has read yet is compared with what it should be.
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

// removeRoutes takes routes away that nobody needs any more: those to the addresses of keys. After they were read it looks
// at all.
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
