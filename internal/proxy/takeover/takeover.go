// Package takeover removes what a kube-proxy, in any of its modes, left in a network namespace, once another proxy has
// programmed the Services: its nftables tables, its iptables chains (both variants), its IPVS virtual services, its
// ipsets, and the device kube-ipvs0. It needs no programs for that, only the kernel.
//
// Finding creates nothing and loads no kernel module. Objects of others stay, and so do kube-proxy's objects that
// others use.
package takeover

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/netlink"
)

// Found holds the objects of a kube-proxy in a network namespace.
type Found struct {
	own       Own
	processes []int
	tables    []ipfamily.Family
	plans     []*plan
	services  []service
	device    *device
	sets      []set
}

// Find finds the objects of a kube-proxy in the network namespace of the calling thread, except those that the caller
// owns. After an error it returns what it did find.
func Find(ctx context.Context, own Own) (*Found, error) {
	f := &Found{own: own, processes: proxyProcesses()}
	var errs []error
	for _, find := range []func() error{f.findIPVS, f.findNFTables, f.findLegacy} {
		errs = append(errs, ctx.Err())
		if ctx.Err() == nil {
			errs = append(errs, find())
		}
	}
	if err := errors.Join(errs...); err != nil {
		return f, fmt.Errorf("find kube-proxy's rules: %w", err)
	}
	return f, nil
}

func (f *Found) findNFTables() (err error) {
	n, err := openNFTables()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	f.tables, err = n.proxyTables()
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) { // this kernel has no nf_tables
		return nil
	}
	if err != nil {
		return err
	}
	tables, err := n.tables()
	if err != nil {
		return err
	}
	return f.plan(tables)
}

func (f *Found) findLegacy() error {
	tables, err := legacyTables()
	return errors.Join(err, f.plan(tables))
}

// plan plans the removal for tables of iptables.
func (f *Found) plan(tables []*table) error {
	for _, t := range tables {
		p, err := newPlan(t, f.guardChains(t), f.own)
		if err != nil {
			return err
		}
		f.plans = append(f.plans, p)
	}
	slices.SortStableFunc(f.plans, func(a, b *plan) int {
		return cmp.Compare(slices.Index(tableNames, a.table), slices.Index(tableNames, b.table))
	})
	return nil
}

// guardChains returns the chains of a table that are needed for a while, and why.
func (f *Found) guardChains(t *table) map[string]string {
	if t.name != "filter" || !f.draining() {
		return nil
	}
	// Without this chain, every address on the device would reach what listens at any address of this host.
	return map[string]string{"KUBE-IPVS-FILTER": proxyDevice + " still exists, and the chain guards its addresses"}
}

func (f *Found) findIPVS() error {
	own := proxyState{dummyAddrs: map[netip.Addr]bool{},
		nodePorts: map[ipfamily.Family]map[member]bool{ipfamily.IPv4: {}, ipfamily.IPv6: {}}, addrPorts: map[member]bool{}}
	var err error
	if f.device, err = findDevice(); err != nil {
		return err
	}
	if f.device != nil {
		for _, a := range f.device.addrs {
			own.dummyAddrs[a] = true
		}
	}
	if err := f.findSets(&own); err != nil {
		return err
	}
	if f.device == nil && len(f.sets) == 0 {
		return nil
	}
	if own.hostAddrs, err = localAddrs(); err != nil {
		return err
	}
	return f.findServices(&own)
}

func (f *Found) findSets(own *proxyState) error {
	s, ok, err := openIPSets()
	if err != nil || !ok {
		return err
	}
	defer s.Close()
	if f.sets, err = s.proxySets(); err != nil {
		return err
	}
	for _, set := range f.sets {
		if serviceSets[set.base] {
			members, err := s.members(set.name)
			if err != nil {
				return err
			}
			own.addMembers(set, members)
		}
	}
	return nil
}

func (f *Found) findServices(own *proxyState) error {
	h, err := openIPVS()
	if err != nil || h == nil {
		return err
	}
	defer h.Close()
	all, err := h.Services()
	if err != nil {
		return err
	}
	for i := range all {
		s := &service{Service: all[i]}
		if !own.isProxyService(s) {
			continue
		}
		if err := readDestinations(h, s); err != nil {
			return err
		}
		if own.isProxyService(s) { // its destinations, too
			f.services = append(f.services, *s)
		}
	}
	return nil
}

// Connections counts the connections that IPVS still forwards, and those from an address on kube-ipvs0. Their virtual
// services and the device stay until they have ended.
func (f *Found) Connections() int {
	n := 0
	for i := range f.services {
		n += f.services[i].connections
	}
	if f.device != nil {
		n += f.device.sockets
	}
	return n
}

// IsProxyService says whether kube-proxy made the IPVS virtual service at an address and port; the protocol is an
// IPPROTO.
func (f *Found) IsProxyService(at netip.AddrPort, protocol uint8) bool {
	return slices.ContainsFunc(f.services, func(s service) bool {
		return s.at() == at && s.Protocol == uint16(protocol)
	})
}

// draining says that IPVS objects have to stay for a while.
func (f *Found) draining() bool { return f.Connections() > 0 }

// HasServices says whether there are rules by which a kube-proxy serves Services, and not only leftovers.
func (f *Found) HasServices() bool {
	return len(f.tables) > 0 || slices.ContainsFunc(f.plans, (*plan).hasServices)
}

// Empty says whether there is nothing to remove, now or later. Objects may stay because others need them.
func (f *Found) Empty() bool {
	return len(f.tables) == 0 && len(f.services) == 0 && f.device == nil && len(f.sets) == len(f.usedSets()) &&
		!f.hasChains()
}

// hasChains says whether there is something to remove from iptables.
func (f *Found) hasChains() bool {
	return slices.ContainsFunc(f.plans, func(p *plan) bool { return !p.empty() })
}

// usedSets returns the names of sets that rules use which stay.
func (f *Found) usedSets() (names []string) {
	for _, s := range f.sets {
		if s.rules > 0 && !f.hasChains() { // else they may be kube-proxy's rules
			names = append(names, s.name)
		}
	}
	return names
}

// Running returns the processes of a running kube-proxy, as far as they are visible.
func (f *Found) Running() []int { return f.processes }

// Summary describes what was found, a line for each kind and family; it is empty if there is nothing.
func (f *Found) Summary() []string {
	var list []string
	for _, family := range f.tables {
		list = append(list, fmt.Sprintf("nftables table %s (%s)", proxyTable, family))
	}
	list = append(list, summary(f.plans)...)
	if len(f.services) > 0 {
		list = append(list, count(len(f.services), "virtual service")+" of IPVS")
	}
	if n := len(f.sets) - len(f.usedSets()); n > 0 {
		list = append(list, count(n, "ipset"))
	}
	if f.device != nil {
		list = append(list, fmt.Sprintf("the device %s with %s", proxyDevice, count(len(f.device.addrs), "address")))
	}
	return list
}

// Kept describes which of kube-proxy's objects stay for good, and why, a line each.
func (f *Found) Kept() []string {
	var list []string
	for _, p := range f.plans {
		for _, name := range slices.Sorted(maps.Keys(p.kept)) {
			list = append(list,
				fmt.Sprintf("chain %s of table %s (%s, %s): %s", name, p.table, p.variant, p.family, p.kept[name]))
		}
	}
	if used := f.usedSets(); len(used) > 0 {
		list = append(list, fmt.Sprintf("ipsets %s: rules that stay use them", strings.Join(used, ", ")))
	}
	return list
}

// Remove removes what was found. It reads each table of iptables again first. Another proxy must serve new connections
// by now. Remove continues after an error.
//
// Established connections live in connection tracking, which no removal of a rule touches. Those of IPVS do not: its
// virtual services and their addresses stay as long as there are any, and so does the chain that guards these
// addresses. Sets go last, since rules refer to them and virtual services of node ports are found by them.
func (f *Found) Remove(ctx context.Context) error {
	netlink.AwaitPackets()
	var errs []error
	for _, remove := range []func(context.Context) error{f.removeTables, f.removeIPVS, f.removeNFT, f.removeLegacy,
		f.removeSets} {
		errs = append(errs, ctx.Err())
		if ctx.Err() == nil {
			errs = append(errs, remove(ctx))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("remove kube-proxy's rules: %w", err)
	}
	return nil
}

func (f *Found) removeTables(context.Context) error {
	if len(f.tables) == 0 {
		return nil
	}
	n, err := openNFTables()
	if err != nil {
		return err
	}
	defer n.Close()
	return n.deleteTables(f.tables)
}

// removeIPVS removes the virtual services without connections, and the device if no connections are left.
func (f *Found) removeIPVS(context.Context) error {
	var errs []error
	if f.device != nil {
		errs = append(errs, f.device.redirectSources())
	}
	if len(f.services) > 0 {
		h, err := openIPVS()
		if err != nil || h == nil {
			return errors.Join(append(errs, err)...)
		}
		defer h.Close()
		for i := range f.services {
			if s := &f.services[i]; s.connections == 0 {
				errs = append(errs, removeService(h, s))
			}
		}
	}
	if f.device != nil && !f.draining() {
		errs = append(errs, f.device.remove())
	}
	return errors.Join(errs...)
}

// maxAttempts bounds how often a table of iptables-nft is read again because others changed it.
const maxAttempts = 5

// removeNFT removes the chains of iptables-nft, in one transaction for each family.
func (f *Found) removeNFT(context.Context) error {
	if !slices.ContainsFunc(f.plans, func(p *plan) bool { return p.variant == nft && !p.empty() }) {
		return nil
	}
	n, err := openNFTables()
	if err != nil {
		return err
	}
	defer n.Close()
	var errs []error
	for _, family := range ipfamily.All {
		for range maxAttempts {
			if err = f.removeNFTOf(n, family); err == nil {
				break
			}
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func (f *Found) removeNFTOf(n nftables, of ipfamily.Family) error {
	tables, err := n.tables()
	if err != nil {
		return err
	}
	var plans []*plan
	for _, t := range tables {
		if t.family != of {
			continue
		}
		p, err := newPlan(t, f.guardChains(t), f.own)
		if err != nil {
			return err
		}
		plans = append(plans, p)
	}
	return n.remove(plans)
}

// removeLegacy removes the chains of legacy iptables, one table at a time.
func (f *Found) removeLegacy(ctx context.Context) error {
	if !slices.ContainsFunc(f.plans, func(p *plan) bool { return p.variant == legacy && !p.empty() }) {
		return nil
	}
	unlock, err := lockLegacy(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	var errs []error
	for _, name := range tableNames {
		for _, p := range f.plans {
			if p.variant == legacy && p.table == name && !p.empty() {
				errs = append(errs,
					removeLegacy(p.family, name, func(t *table) (*plan, error) { return newPlan(t, f.guardChains(t), f.own) }))
			}
		}
	}
	return errors.Join(errs...)
}

// removeSets removes the sets, once nothing needs them.
func (f *Found) removeSets(context.Context) error {
	if len(f.sets) == 0 || f.draining() {
		return nil
	}
	s, ok, err := openIPSets()
	if err != nil || !ok {
		return err
	}
	defer s.Close()
	return s.destroy(f.sets)
}
