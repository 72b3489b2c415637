// Package takeover removes what a kube-proxy left in a network namespace, of any of its modes, once somebody else carries the
// Services: its nftables tables, its chains of iptables (both variants), its virtual services of IPVS, its ipsets, and the device
// kube-ipvs0. It needs no programs for that, only the kernel.
//
// Looking creates nothing, and loads no module of the kernel. What others made stays, and what of kube-proxy's they use.
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

	"github.com/verdict-proxy/verdict/internal/ipfamily"
)

// Found is what there is of a kube-proxy in a network namespace.
type Found struct {
	own       Own
	processes []int
	tables    []ipfamily.Family
	plans     []*plan
	services  []service
	device    *device
	sets      []set
}

// Find looks for what there is of a kube-proxy in the network namespace of the calling thread, but for what the caller owns. After
// an error it gives what it did find.
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
		return f, fmt.Errorf("look for kube-proxy: %w", err)
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

// plan decides about tables of iptables.
func (f *Found) plan(tables []*table) error {
	for _, t := range tables {
		p, err := planOf(t, f.stay(t), f.own)
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

// stay gives the chains of a table that are needed for a while, and why.
func (f *Found) stay(t *table) map[string]string {
	if t.name != "filter" || !f.draining() {
		return nil
	}
	// Without it, what listens at any address of this host could be reached by every address on the device.
	return map[string]string{"KUBE-IPVS-FILTER": proxyDevice + " is still there, and it guards its addresses"}
}

func (f *Found) findIPVS() error {
	own := frontends{bound: map[netip.Addr]bool{}, ports: map[ipfamily.Family]map[member]bool{ipfamily.IPv4: {}, ipfamily.IPv6: {}}, addressed: map[member]bool{}}
	var err error
	if f.device, err = findDevice(); err != nil {
		return err
	}
	if f.device != nil {
		for _, a := range f.device.addrs {
			own.bound[a] = true
		}
	}
	if err := f.findSets(&own); err != nil {
		return err
	}
	if f.device == nil && len(f.sets) == 0 {
		return nil
	}
	if own.local, err = localAddrs(); err != nil {
		return err
	}
	return f.findServices(&own)
}

func (f *Found) findSets(own *frontends) error {
	s, ok, err := openIPSets()
	if err != nil || !ok {
		return err
	}
	defer s.Close()
	if f.sets, err = s.proxySets(); err != nil {
		return err
	}
	for _, set := range f.sets {
		if membersTell[set.base] {
			members, err := s.members(set.name)
			if err != nil {
				return err
			}
			own.take(set, members)
		}
	}
	return nil
}

func (f *Found) findServices(own *frontends) error {
	v, ok, err := openIPVS()
	if err != nil || !ok {
		return err
	}
	defer v.Close()
	all, err := v.services()
	if err != nil {
		return err
	}
	for i := range all {
		s := &all[i]
		if !own.made(s) {
			continue
		}
		if err := v.look(s); err != nil {
			return err
		}
		if own.made(s) { // its destinations, too
			f.services = append(f.services, *s)
		}
	}
	return nil
}

// Connections is how many connections IPVS still carries, or begin at an address that is on kube-ipvs0. Their virtual services
// and the device stay until they have ended.
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

// Made says whether there is a virtual service of IPVS at an address and port that kube-proxy made; the protocol is an IPPROTO.
func (f *Found) Made(at netip.AddrPort, protocol uint8) bool {
	return slices.ContainsFunc(f.services, func(s service) bool {
		return s.addr == at.Addr() && s.port == at.Port() && s.protocol == uint16(protocol)
	})
}

// draining says that something of IPVS has to stay for a while.
func (f *Found) draining() bool { return f.Connections() > 0 }

// Carries says whether there are rules by which a kube-proxy carries Services, and not only some that are left.
func (f *Found) Carries() bool {
	return len(f.tables) > 0 || slices.ContainsFunc(f.plans, (*plan).carries)
}

// Empty says whether there is nothing to remove, now or later. There may be something that stays because others need it.
func (f *Found) Empty() bool {
	return len(f.tables) == 0 && len(f.services) == 0 && f.device == nil && len(f.sets) == len(f.used()) && !f.chains()
}

// chains says whether there is something to remove of iptables.
func (f *Found) chains() bool {
	return slices.ContainsFunc(f.plans, func(p *plan) bool { return !p.empty() })
}

// used gives the names of sets that rules look into which stay.
func (f *Found) used() (names []string) {
	for _, s := range f.sets {
		if s.rules > 0 && !f.chains() { // else they may be kube-proxy's rules
			names = append(names, s.name)
		}
	}
	return names
}

// Running gives the processes of a kube-proxy at work here, as far as they can be seen.
func (f *Found) Running() []int { return f.processes }

// Summary says what there is, a line for each kind and family; none if there is nothing.
func (f *Found) Summary() []string {
	var list []string
	for _, family := range f.tables {
		list = append(list, fmt.Sprintf("nftables table %s (%s)", proxyTable, family))
	}
	list = append(list, summary(f.plans)...)
	if len(f.services) > 0 {
		list = append(list, count(len(f.services), "virtual service")+" of IPVS")
	}
	if n := len(f.sets) - len(f.used()); n > 0 {
		list = append(list, count(n, "ipset"))
	}
	if f.device != nil {
		list = append(list, fmt.Sprintf("the device %s with %s", proxyDevice, count(len(f.device.addrs), "address")))
	}
	return list
}

// Kept says what of kube-proxy's stays for good, and why, a line each.
func (f *Found) Kept() []string {
	var list []string
	for _, p := range f.plans {
		for _, name := range slices.Sorted(maps.Keys(p.kept)) {
			list = append(list, fmt.Sprintf("chain %s of table %s (%s, %s): %s", name, p.table, p.variant, p.family, p.kept[name]))
		}
	}
	if used := f.used(); len(used) > 0 {
		list = append(list, fmt.Sprintf("ipsets %s: rules that stay look into them", strings.Join(used, ", ")))
	}
	return list
}

// Remove removes what was found, looking again at each table of iptables. New connections must be somebody else's by now. It
// carries on after an error.
//
// Connections that are established live in connection tracking, which no removal of a rule touches. Those of IPVS do not: its
// virtual services, and the addresses they came to, stay as long as there are any, and so does the chain that guards these
// addresses. Sets go last, since rules refer to them and virtual services of node ports are known by them.
func (f *Found) Remove(ctx context.Context) error {
	var errs []error
	for _, remove := range []func(context.Context) error{f.removeTables, f.removeIPVS, f.removeNFT, f.removeLegacy, f.removeSets} {
		errs = append(errs, ctx.Err())
		if ctx.Err() == nil {
			errs = append(errs, remove(ctx))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("remove what is kube-proxy's: %w", err)
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

// removeIPVS removes the virtual services without connections, and the device if there are no others.
func (f *Found) removeIPVS(context.Context) error {
	var errs []error
	if f.device != nil {
		errs = append(errs, f.device.steer())
	}
	if len(f.services) > 0 {
		v, ok, err := openIPVS()
		if err != nil || !ok {
			return errors.Join(append(errs, err)...)
		}
		defer v.Close()
		for i := range f.services {
			if s := &f.services[i]; s.connections == 0 {
				errs = append(errs, v.remove(s))
			}
		}
	}
	if f.device != nil && !f.draining() {
		errs = append(errs, f.device.remove())
	}
	return errors.Join(errs...)
}

// attempts bounds how often a table of iptables-nft is read again because others changed it.
const attempts = 5

// removeNFT removes the chains of iptables-nft, of each family in one transaction.
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
		for range attempts {
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
		p, err := planOf(t, f.stay(t), f.own)
		if err != nil {
			return err
		}
		plans = append(plans, p)
	}
	return n.remove(plans)
}

// removeLegacy removes the chains of legacy iptables, each table at once.
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
				errs = append(errs, removeLegacy(p.family, name, func(t *table) (*plan, error) { return planOf(t, f.stay(t), f.own) }))
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
