package ipvsplugin

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipvshandle"
	"github.com/verdict-proxy/verdict/internal/system/sysctl"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Backend is a reconcile.Writer that programs IPVS, and leaves everything else to another Writer. Its methods may be
// called concurrently; all but Statistics and DestinationStatistics wait for each other.
type Backend struct {
	inner   reconcile.Writer
	options Options
	now     func() time.Time

	mu    sync.Mutex
	ipvs  client
	net   rtnetlink
	guard guard

	// want is what the last State asked for. services are the ranges of addresses that belong to Services only; nil if
	// they are not known.
	want     table
	services []netip.Prefix
	// shared are the parts of them that others use, too.
	shared []netip.Prefix
	// dirty says that the kernel may not hold want, so that all of it has to be compared.
	dirty bool
	// unacked is what inner was asked for since Apply last succeeded as a whole.
	unacked dataplane.Change
	// active says that IPVS is in use, or that something of ours is left in it. have, routes, guarded and devices are
	// then what the kernel holds, unless stale is set: then they are read again.
	active, stale bool
	have          contents
	routes        map[netip.Addr]netip.Addr // and their source
	guarded       map[netip.Addr]bool
	devices       []device
	// draining are the virtual services with destinations that wait for their connections to end.
	draining map[dataplane.Key]bool
	progress checkProgress
	// heard is when the kernel last answered.
	heard atomic.Pointer[time.Time]

	// statisticsConn is for Statistics.
	statisticsConn struct {
		sync.Mutex
		ipvs client
	}
}

var _ reconcile.Writer = (*Backend)(nil)

// New wraps a Writer. It opens its sockets in the network namespace of the calling thread. It neither reads nor changes
// IPVS or its parameters before a Service asks for it.
func New(inner reconcile.Writer, o Options) (*Backend, error) {
	b := &Backend{inner: inner, options: o, now: steadyClock(), want: newTable(), dirty: true, stale: true}
	if b.options.DrainLimit == 0 {
		b.options.DrainLimit = DefaultDrainLimit
	}
	var errs [4]error
	b.ipvs.socket, errs[0] = openSocket(unix.NETLINK_GENERIC)
	b.statisticsConn.ipvs.socket, errs[1] = openSocket(unix.NETLINK_GENERIC)
	b.net.socket, errs[2] = openSocket(unix.NETLINK_ROUTE)
	b.guard.socket, errs[3] = openSocket(unix.NETLINK_NETFILTER)
	if err := errors.Join(errs[:]...); err != nil {
		return nil, errors.Join(err, b.Close())
	}
	for _, s := range []*socket{b.ipvs.socket, b.net.socket, b.guard.socket} {
		s.heard = b.hear
	}
	return b, nil
}

func (b *Backend) hear() {
	now := time.Now()
	b.heard.Store(&now)
}

// Heard returns when the kernel last answered; zero if it never did. It is safe for concurrent use. IPVS has no bulk
// operations, so one Apply for a large cluster takes many messages, and may take minutes while all is well.
func (b *Backend) Heard() time.Time {
	if at := b.heard.Load(); at != nil {
		return *at
	}
	return time.Time{}
}

// Close closes the sockets, but not the wrapped Writer. What is in the kernel stays.
func (b *Backend) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.statisticsConn.Lock()
	defer b.statisticsConn.Unlock()
	return errors.Join(b.ipvs.close(), b.statisticsConn.ipvs.close(), b.net.close(), b.guard.close())
}

// Probe says whether this kernel has IPVS and the schedulers, which it makes the kernel load, and whether this process
// may set the required parameters that are not set yet. If modules are missing, the error is a *Missing that names
// them. It uses the network namespace of the calling thread.
func Probe(schedulers ...string) error {
	v := &client{}
	defer v.close()
	if err := v.probe(schedulers); err != nil {
		return err
	}
	return errors.Join(sysctl.Host{}.Check(sysctls)...)
}

func (v *client) probe(schedulers []string) error {
	if err := v.open(); err != nil {
		return err
	}
	var missing []string
	for _, name := range schedulers {
		there, err := v.try(name)
		if err != nil {
			return err
		}
		if !there {
			missing = append(missing, module(name))
		}
	}
	if missing != nil {
		return &Missing{Modules: missing}
	}
	return nil
}

func module(scheduler string) string { return "ip_vs_" + scheduler }

// Apply prepares IPVS before the other Writer sends it anything, and afterwards removes what is no longer wanted.
//
// If the kernel rejects what a Service asks of IPVS, or if somebody else has a virtual service at its address, the
// error wraps a *dataplane.Refused. What was written for other Services before that stays: no packets are sent there
// yet.
func (b *Backend) Apply(want *dataplane.State, change dataplane.Change) (dataplane.Receipt, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	var r dataplane.Receipt
	before := b.sent()
	start := time.Now()
	touched, err := b.update(want, change)
	if err == nil && b.active {
		err = b.prepare(touched, &r)
	}
	spent := time.Since(start)
	if err != nil {
		b.dirty = true
		return r, err
	}
	// It acknowledged what it wrote before an error, but the caller never heard of that.
	b.unacked = b.unacked.With(change)
	inner, err := b.inner.Apply(want, b.unacked)
	// Nothing may be removed from IPVS while packets are still sent there.
	for err == nil && len(inner.Left) > 0 && b.active {
		var r dataplane.Receipt
		r, err = b.inner.Apply(want, dataplane.Change{})
		inner = inner.Then(r)
	}
	if err != nil {
		b.dirty = true
		return inner, err
	}
	start = time.Now()
	if b.active {
		err = b.finish(touched, &r)
	}
	if b.dirty = err != nil; !b.dirty {
		b.unacked = dataplane.Change{}
	}
	after := b.sent()
	return sum(inner, r, dataplane.Receipt{
		Messages: after.Messages - before.Messages, Bytes: after.Bytes - before.Bytes, Commit: spent + time.Since(start),
	}), err
}

// sent counts what was sent so far.
func (b *Backend) sent() (r dataplane.Receipt) {
	for _, s := range []*socket{b.ipvs.socket, b.net.socket, b.guard.socket} {
		r.Messages += s.messages
		r.Bytes += s.bytes
	}
	return r
}

// sum adds up the receipts of both Writers.
func sum(inner, ours, cost dataplane.Receipt) dataplane.Receipt {
	inner.Adopted = inner.Adopted && ours.Added+ours.Replaced+ours.Removed == 0
	inner.Added += ours.Added
	inner.Replaced += ours.Replaced
	inner.Removed += ours.Removed
	inner.Messages += cost.Messages
	inner.Bytes += cost.Bytes
	inner.Commit += cost.Commit
	return inner
}

// update updates the wanted table and returns the keys that may have to be written. If necessary it starts to use IPVS
// and reads what the kernel holds.
func (b *Backend) update(want *dataplane.State, change dataplane.Change) (map[dataplane.Key]bool, error) {
	var touched map[dataplane.Key]bool
	b.services, b.shared = nil, want.SharedRanges
	if b.active && b.ipvs.handle.Closed() { // it waited too long
		b.stale = true
	}
	if len(want.ServiceCIDRs) > 0 {
		b.services = slices.Concat(want.ServiceCIDRs, want.IPVSAddresses)
	}
	if b.dirty || b.stale {
		touched = b.want.replace(want)
	} else {
		touched = b.want.update(want, change)
	}
	if !b.active && len(b.want.services) == 0 && (!b.stale || !Loaded()) {
		b.stale = false
		return nil, nil
	}
	if b.active && !b.stale {
		if b.dirty {
			b.touchAll(touched)
		}
		return touched, nil
	}
	if err := b.adoptOrStart(); err != nil {
		return nil, err
	}
	b.touchAll(touched)
	return touched, nil
}

func (b *Backend) touchAll(touched map[dataplane.Key]bool) {
	for k := range b.have.services {
		touched[k] = true
	}
}

// Loaded says whether the kernel has loaded IPVS. A request to IPVS itself would load it.
func Loaded() bool { return ipvshandle.Loaded() }

// adoptOrStart sets IPVS up, and reads what an earlier process left.
func (b *Backend) adoptOrStart() error {
	b.active = false
	if err := b.ipvs.open(); err != nil {
		return b.refuseAll(err)
	}
	have, err := b.readContents()
	if err != nil {
		return err
	}
	routes, err := b.net.list()
	if err != nil {
		return err
	}
	if len(have.services)+len(routes)+len(b.want.services) == 0 { // IPVS is somebody else's
		b.stale, b.active = false, false
		return nil
	}
	if err := b.setParameters(); err != nil {
		return b.refuseAll(err)
	}
	b.have, b.routes, b.guarded = have, routes, nil
	b.draining = map[dataplane.Key]bool{}
	b.progress = checkProgress{strayRoutes: true}
	b.active, b.stale = true, false
	return b.readDevices()
}

// readContents reads everything of ours, without what we yield to others.
func (b *Backend) readContents() (contents, error) {
	have, err := readContents(bulk{&b.ipvs}, b.have)
	for k, f := range have.services {
		if f.Config == (Config{}) && b.options.Yield != nil && b.options.Yield(k) {
			have.apply(op{verb: delService, key: k})
		}
	}
	return have, err
}

// refuseAll returns the error for a kernel that cannot schedule at all; nil if no Service asks for it.
func (b *Backend) refuseAll(why error) error {
	r := &dataplane.Refused{Services: map[snapshot.Name]error{}, Scheduling: true}
	for n := range b.want.byService {
		r.Services[n] = why
	}
	if len(r.Services) == 0 {
		return nil
	}
	return r
}

// maxReads bounds how often one Apply reads what the kernel holds because others change it meanwhile.
const maxReads = 3

// prepare writes what must exist before packets arrive: addresses, virtual services, destinations.
func (b *Backend) prepare(touched map[dataplane.Key]bool, r *dataplane.Receipt) error {
	if err := b.addRoutes(touched, r); err != nil {
		return err
	}
	p := b.planner()
	for range maxReads {
		var ops []op
		for _, k := range sorted(touched) {
			ops = append(ops, p.prepare(k, b.have.services[k], b.want.services[k])...)
		}
		stale, err := b.write(ops, r)
		if err != nil {
			return err
		}
		if !stale {
			return b.verify(ops)
		}
		if b.have, err = b.readContents(); err != nil {
			return err
		}
		b.touchAll(touched)
	}
	return fmt.Errorf("ipvs: another program keeps changing the virtual services")
}

// finish drains or removes what is not wanted.
func (b *Backend) finish(touched map[dataplane.Key]bool, r *dataplane.Receipt) error {
	p := b.planner()
	p.idle = func(k dataplane.Key, _ netip.AddrPort) bool { return b.mustRelease(k.Addr) }
	var ops []op
	for _, k := range sorted(touched) {
		ops = append(ops, p.remove(k, b.have.services[k], b.want.services[k])...)
	}
	if err := b.writeRemovals(ops, r); err != nil {
		return err
	}
	for k := range touched {
		b.updateDraining(k)
	}
	return b.removeRoutes(touched, r)
}

// writeRemovals writes removals. If an object is already gone, the rest is read again.
func (b *Backend) writeRemovals(ops []op, r *dataplane.Receipt) error {
	stale, err := b.write(ops, r)
	if err != nil {
		return err
	}
	if stale {
		b.stale, b.dirty = true, true
		return errors.New("ipvs: another program changed the virtual services meanwhile")
	}
	return b.verify(ops)
}

func (b *Backend) updateDraining(k dataplane.Key) {
	if have := b.have.services[k]; have != nil && (b.want.services[k] == nil || have.draining(b.want.services[k])) {
		b.draining[k] = true
	} else {
		delete(b.draining, k)
	}
}

// steadyClock returns a clock that setting the machine's clock does not affect, so that drains end in time.
func steadyClock() func() time.Time {
	began := time.Now()
	return func() time.Time { return began.Add(time.Since(began)) }
}

func (b *Backend) planner() *planner {
	return &planner{until: uint32(b.now().Add(b.options.DrainLimit).Unix())}
}

func sorted(keys map[dataplane.Key]bool) []dataplane.Key {
	return slices.SortedFunc(maps.Keys(keys), dataplane.Key.Compare)
}

// write commits ops. stale says that the kernel holds something other than expected. An error says that the kernel
// rejects something, or that its content is not known.
func (b *Backend) write(ops []op, r *dataplane.Receipt) (stale bool, err error) {
	if stale, err := b.ownershipLost(ops); stale || err != nil {
		return stale, err
	}
	failed, err := b.ipvs.commitOps(ops, &b.have)
	if err != nil {
		b.stale = true
		return false, fmt.Errorf("ipvs: %w", err)
	}
	refused := map[op]bool{}
	rejected := &dataplane.Refused{Services: map[snapshot.Name]error{}, Scheduling: true}
	for _, f := range failed {
		refused[f.op] = true
		why, fatal := b.explain(f.op, f.errno)
		vs := b.want.services[f.key]
		switch {
		case why == nil:
			stale = true
		case vs == nil || fatal:
			return false, why
		default:
			rejected.Services[vs.Service.Service] = fmt.Errorf("%s: %w", vs.Service, why)
		}
	}
	for _, o := range ops {
		if !refused[o] {
			countOp(o.verb, r)
		}
	}
	if len(rejected.Services) > 0 {
		b.stale = b.stale || stale
		return false, rejected
	}
	return stale, nil
}

// ownershipLost says whether a virtual service that is about to be changed is no longer ours. IPVS has no transactions,
// so a replacement by somebody else right after this check goes unnoticed.
func (b *Backend) ownershipLost(ops []op) (bool, error) {
	var last dataplane.Key
	for _, o := range ops {
		have := b.have.services[o.key]
		if o.key == last || have == nil || have.Config == (Config{}) { // that one is about to get our mark
			continue
		}
		last = o.key
		if l, there, err := b.ipvs.service(o.key); err != nil || !there || !l.ours {
			return err == nil, err
		}
	}
	return false, nil
}

func countOp(v verb, r *dataplane.Receipt) {
	switch v {
	case newService, newDest:
		r.Added++
	case setService, setDest:
		r.Replaced++
	default:
		r.Removed++
	}
}

// explain says why the kernel rejects a write. why is nil if the kernel only holds something other than expected. fatal
// says that the cause is not what the Service asked for.
func (b *Backend) explain(o op, errno unix.Errno) (why error, fatal bool) {
	switch {
	case o.verb == newService && errno == unix.EEXIST:
		l, there, err := b.ipvs.service(o.key)
		if err != nil {
			return err, true
		}
		if there && !l.ours {
			adopted, err := b.adopt(l)
			if adopted || err != nil {
				return err, true // if it was, the only reason is gone
			}
			return fmt.Errorf("ipvs: the virtual service %s belongs to another program", o.key), false
		}
		return nil, false
	case (o.verb == newService || o.verb == setService) && errno == unix.ENOENT:
		return &Missing{Modules: []string{module(o.config.Scheduler)}}, false
	case errno == unix.EEXIST || errno == unix.ENOENT || errno == unix.ESRCH:
		return nil, false
	}
	return fmt.Errorf("ipvs: %s: %w", o, errno), false
}

// adopt makes a virtual service ours if Options.Adopt agrees. The next write marks it.
func (b *Backend) adopt(l listed) (bool, error) {
	if b.options.Adopt == nil {
		return false, nil
	}
	f, err := fill(&b.ipvs, l)
	if err != nil {
		return false, err
	}
	vs := VirtualService{Key: l.key, Config: l.Config, Destinations: slices.SortedFunc(maps.Values(f.dests),
		func(a, b Destination) int { return a.Compare(b.AddrPort) })}
	if !b.options.Adopt(vs) {
		return false, nil
	}
	b.have.put(l.key, f)
	return true, nil
}

// verify reads back what was written, because an acknowledged write may still not be in effect.
func (b *Backend) verify(ops []op) error {
	var last dataplane.Key
	for _, o := range ops {
		if o.key == last {
			continue
		}
		last = o.key
		wrong, err := b.compare(o.key)
		if err == nil && wrong != "" {
			err = fmt.Errorf("ipvs: the kernel acknowledged the changes, but %s", wrong)
		}
		if err != nil {
			b.stale = true
			return err
		}
	}
	return nil
}

// compare describes how one virtual service in the kernel differs from what is expected; "" if it does not.
func (b *Backend) compare(k dataplane.Key) (string, error) {
	have := b.have.services[k]
	l, there, err := b.ipvs.service(k)
	switch {
	case err != nil:
		return "", err
	case have == nil && !there:
		return "", nil
	case have == nil && !l.ours:
		return "", nil
	case have == nil:
		return fmt.Sprintf("the virtual service %s still exists", k), nil
	case !there:
		return fmt.Sprintf("the virtual service %s is gone", k), nil
	case !l.ours:
		return fmt.Sprintf("the virtual service %s is no longer marked as Verdict's", k), nil
	case l.Config != have.Config:
		return fmt.Sprintf("the virtual service %s has %s, not %s", k, l.Config.String(), have.Config.String()), nil
	}
	is, err := fill(&b.ipvs, l)
	if err != nil {
		return "", err
	}
	return differs(k, is, have), nil
}

// differs compares destinations.
func differs(k dataplane.Key, is, should *found) string {
	for _, a := range slices.SortedFunc(maps.Keys(should.dests), netip.AddrPort.Compare) {
		d, there := is.dests[a]
		switch want := should.dests[a]; {
		case !there:
			return fmt.Sprintf("the destination %s of %s is gone", a, k)
		case d.Weight != want.Weight:
			return fmt.Sprintf("the destination %s of %s has weight %d, not %d", a, k, d.Weight, want.Weight)
		case d != want:
			return fmt.Sprintf("the destination %s of %s has threshold %d, not %d", a, k, d.Until, want.Until)
		}
	}
	for _, a := range slices.SortedFunc(maps.Keys(is.dests), netip.AddrPort.Compare) {
		if _, there := should.dests[a]; !there {
			return fmt.Sprintf("the destination %s of %s is unexpected", a, k)
		}
	}
	return ""
}

// Remove takes everything of ours out of the kernel, connections included. It gives parameters their values from
// before, unless a program that we yield to has virtual services and needs them as they are.
func (b *Backend) Remove() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	errs := []error{b.inner.Remove()}
	b.dirty, b.stale, b.active = true, true, false
	shared := false
	if Loaded() {
		var err error
		shared, err = b.removeServices()
		errs = append(errs, err)
	}
	routes, err := b.net.list()
	errs = append(errs, err, b.net.remove(routesTo(routes)))
	if !shared {
		errs = append(errs, b.restore())
	}
	return errors.Join(append(errs, b.guard.remove())...)
}

// removeServices removes our virtual services. shared says that a program that we yield to has some.
func (b *Backend) removeServices() (shared bool, err error) {
	if err := b.ipvs.open(); err != nil {
		return false, err
	}
	list, err := b.ipvs.services()
	if err != nil {
		return false, err
	}
	have := newContents()
	var ops []op
	for _, l := range list {
		if l.ours {
			have.put(l.key, &found{})
			ops = append(ops, op{verb: delService, key: l.key})
		} else if b.options.Yield != nil && b.options.Yield(l.key) {
			shared = true
		}
	}
	failed, err := b.ipvs.commitOps(ops, &have)
	for _, f := range failed {
		if f.errno != unix.ESRCH && err == nil {
			err = fmt.Errorf("ipvs: %s: %w", f.op, f.errno)
		}
	}
	return shared, err
}
