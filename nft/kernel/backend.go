package kernel

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/netlink"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Options configure a Backend. The zero value opens its own socket and does not own the tables.
type Options struct {
	// Socket, if not nil, is a socket from OpenSocket in this or another process, through which the tables are written.
	// The caller keeps it open and closes it.
	Socket *os.File
	// Own makes the Backend the tables' only writer, where the kernel supports that (Linux 6.9). While anybody holds
	// Socket open, others get EPERM, and "nft flush ruleset" skips the tables. Afterwards anybody can write them, until
	// the next Backend owns them.
	Own bool
	// Counters is how many elements may have counters; 0 means all. See nft.Counting.
	Counters int
	// Crowded, if not nil, is called when the affinity map becomes nearly full, and when another Service than before
	// holds most of it: see AffinityShares.
	Crowded func([]AffinityShare)
}

// Backend keeps our tables in one network namespace in line with a dataplane.State. It is not safe for concurrent use.
type Backend struct {
	// Sent, if not nil, is called with the batch of each transaction, for Conn.Replay and Replay. The bytes are valid
	// until the next call of the Backend.
	Sent func(batch []byte)

	// options are what was asked for, as far as the kernel supports it.
	options Options
	// dumpMost is the constant of the same name; tests change it.
	dumpMost int
	sockets
	// model is what the kernel holds, or will hold once it has committed what is planned.
	model nft.Model
	known
	unwritten
	batch batch
	upkeep
	published
}

// sockets are how a Backend reaches the kernel.
type sockets struct {
	netns *os.File
	// dial opens a socket in a network namespace. Tests replace it to inject faults.
	dial func(netns int) (*Conn, error)
	// conn writes, and owns the tables. reader only reads. sweeper also only reads; its dumps of the affinity maps
	// continue while reader is used.
	conn, reader, sweeper *Conn
}

// known is what a Backend knows of the kernel's tables, besides what its model says. The zero value knows nothing.
type known struct {
	syncState syncState
	// generation is the number of the namespace's last transaction, provided that all were ours; 0 if it is not known.
	generation uint32
	tables     ipfamily.Per[tableInfo]
	// unverified says that somebody else may have changed the tables in a way that digests do not tell, and that no
	// inspection has ended since. What is written meanwhile has no generation as its revision's number, so that a process
	// that starts before the inspection has ended inspects everything, too.
	unverified bool
	// listAll says that an element of somebody else was in the place of one of ours, and that not everything is written
	// yet. All elements of the tables are then listed.
	listAll bool
}

// unwritten is what a Backend has yet to write, and in which portions.
type unwritten struct {
	// pending is what the kernel lacks of past changes: a transaction failed, or had no room for it. The latest comes
	// first.
	pending dataplane.Change
	// filling says that new tables are not complete yet.
	filling bool
	// ahead says that the last transaction held only small changes that went ahead of large Services. The next one
	// continues with the large ones.
	ahead bool
	// maxElements is how many elements fit into a transaction if this process may send only so much in one datagram; 0
	// is no limit.
	maxElements int
	// device and deviceIndex are State.Device and DeviceIndex as of the last Apply: nft.Model.NoIngress holds as long as
	// they stay the same.
	device      string
	deviceIndex int
	// refusal is why Model.NoIngress is set.
	refusal error
}

// upkeep is what Check does, a little at a time.
type upkeep struct {
	sweep        affinitySweep
	affinityFill affinityFill
	inspection   inspection
}

// published is what may be read at any time.
type published struct {
	// owned is what Owned returns.
	owned atomic.Bool
	// fill is what Fill returns.
	fill atomic.Pointer[ipfamily.Per[nft.Fill]]
}

// syncState says how well the model matches what the kernel holds.
type syncState uint8

const (
	// stateUnknown: nothing is known of the tables. An earlier process may have left them.
	stateUnknown syncState = iota
	// stateStale: others may have changed the tables. They are read back before the next transaction.
	stateStale
	// stateUnfixable: the tables as read back could not be corrected. They are rewritten completely.
	stateUnfixable
	// stateInSync: the tables are what the model says.
	stateInSync
)

// Open returns a Backend for the network namespace of the calling thread. It writes nothing before the first Apply.
func Open(o Options) (*Backend, error) {
	netns, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return nil, fmt.Errorf("nft: network namespace: %w", err)
	}
	b := &Backend{options: o, dumpMost: dumpMost, sockets: sockets{netns: netns, dial: Dial}}
	b.model.Counters = o.Counters
	if err = b.openSockets(); err == nil && o.Own {
		b.options.Own, err = b.conn.ownership()
	}
	if err != nil {
		return nil, errors.Join(err, b.Close())
	}
	if b.options.Own {
		b.batch.tableFlags = tableOwner | tablePersist
	}
	return b, nil
}

// openSockets opens the sockets that there are not, and replaces those that an error has made unusable.
func (b *Backend) openSockets() error {
	for _, c := range []struct {
		conn **Conn
		open func() (*Conn, error)
	}{{&b.reader, b.openReader}, {&b.sweeper, b.openReader}, {&b.conn, b.openWriter}} {
		if *c.conn != nil {
			if (*c.conn).Fresh() == nil {
				continue
			}
			(*c.conn).Close() // it may be closed already
		}
		if c.conn == &b.conn { // the last one may have owned the tables
			b.generation = 0
		}
		fresh, err := c.open()
		if err != nil {
			return err
		}
		*c.conn = fresh
	}
	return nil
}

// openWriter opens a connection to write by.
func (b *Backend) openWriter() (*Conn, error) {
	if b.options.Socket != nil {
		return inherit(b.options.Socket)
	}
	return b.openReader()
}

// openReader opens a connection to read by.
func (s *sockets) openReader() (*Conn, error) { return s.dial(int(s.netns.Fd())) }

// Owns says whether only this Backend can write the tables while it holds its socket.
func (b *Backend) Owns() bool { return b.options.Own }

// Owned says whether this Backend's socket owned both tables when it last looked, in a transaction or a Check. It may
// be called at any time.
func (b *Backend) Owned() bool { return b.owned.Load() }

// noteOwner is called whenever the tables were read. Somebody else's tables are an error before that.
func (b *Backend) noteOwner() { b.owned.Store(b.tables[0].owner != 0 && b.tables[1].owner != 0) }

// Close closes the sockets. The tables stay.
func (b *Backend) Close() error {
	errs := []error{b.netns.Close()}
	for _, c := range []*Conn{b.conn, b.reader, b.sweeper} {
		if c != nil {
			errs = append(errs, c.Close())
		}
	}
	return errors.Join(errs...)
}

// Probe asks the kernel whether it accepts our ruleset, without changing anything. It returns nil, ErrRights, an
// *Unsupported, or another error.
func (b *Backend) Probe() error { return b.conn.Probe() }

// maxAttempts bounds how many transactions one Apply tries: the planned one, one after reading back, one after listing
// everything, and a full rewrite. Each may be repeated once because the kernel asked for it or because it must be
// smaller.
const maxAttempts = 8

// The most elements of one transaction. The kernel takes about 3 us for each, and meanwhile a later change, other
// writers to nf_tables and signals have to wait.
const (
	writeAtOnce = 16384
	// fillAtOnce applies to new tables until they are complete.
	fillAtOnce = 65536
	// aheadSize is the size of the largest Service that goes ahead of those that take several transactions.
	aheadSize = 512
)

// Apply brings the kernel to a state, or closer to it, in one transaction. The transaction has a limited number of
// elements, unless it corrects what was found or replaces tables. Receipt.Left names the Services that are not
// complete. The next Apply continues with them after what its own change names.
//
// Tables of an earlier process are adopted if they match, corrected if they nearly match, and replaced otherwise. After
// an error the kernel holds what it held before, and perhaps chains to which nothing leads (see nft.Txn.Split), which
// the next Apply removes. The error is a *dataplane.Refused if the kernel accepts everything except what some Services
// ask for.
func (b *Backend) Apply(want *dataplane.State, change dataplane.Change) (r dataplane.Receipt, err error) {
	defer b.batch.trim()
	if b.pending.Empty() {
		b.listAll = false
	}
	b.pending = mergeChange(change, b.pending)
	b.forgetRefusal(want)
	for range maxAttempts {
		if err := b.openSockets(); err != nil {
			return r, err
		}
		start := time.Now()
		txn, err := b.plan(want)
		r.Plan += time.Since(start)
		if err != nil {
			return r, err
		}
		if err = b.commit(txn, &r); err == nil {
			b.committed(txn, &r)
			return r, nil
		}
		if err = b.failed(txn, err); err != nil {
			return r, err
		}
	}
	return r, fmt.Errorf("nft: %d transactions failed, each for another reason", maxAttempts)
}

// committed takes note of a committed transaction, and does what follows from it. Whatever fails here does not undo it,
// and is done again by a Check.
func (b *Backend) committed(txn *nft.Txn, r *dataplane.Receipt) {
	switch {
	case txn.Tables[0].Create != nil:
		b.unverified = false
	case b.unverified && b.syncState != stateInSync:
		b.generation = 0 // the next Check begins an inspection
	}
	r.Adopted = txn.Empty() && b.syncState == stateUnknown
	r.Repaired = !txn.Empty() && (b.syncState == stateStale || b.syncState == stateUnfixable)
	r.Left, r.Counted = txn.Left.Services, b.model.Counting().String()
	if b.model.NoIngress {
		r.Refused = &dataplane.DeviceRefused{Device: b.device, Index: b.deviceIndex, Err: b.refusal}
	}
	b.syncState, b.pending, b.filling = stateInSync, txn.Left, b.fillsAfter(txn)
	b.publishFill()
	b.sweepAfter(txn)
	b.rememberTables()
}

// fillsAfter says whether new tables are not complete after a transaction.
func (b *Backend) fillsAfter(txn *nft.Txn) bool {
	return (b.filling || txn.Tables[0].Create != nil) && len(txn.Left.Services) > 0
}

func (b *Backend) publishFill() {
	fill := b.model.Fill()
	b.fill.Store(&fill)
}

// ApplyAll calls Apply until nothing is left.
func (b *Backend) ApplyAll(want *dataplane.State, change dataplane.Change) (dataplane.Receipt, error) {
	all, err := b.Apply(want, change)
	for err == nil && len(all.Left) > 0 {
		var r dataplane.Receipt
		r, err = b.Apply(want, dataplane.Change{})
		all = all.Then(r)
	}
	return all, err
}

// mergeChange puts a change before the one that is waiting. A Service that already waits keeps its place if it changes
// again.
func mergeChange(change, waiting dataplane.Change) dataplane.Change {
	if len(change.Services) == 0 { // much may wait, for many transactions
		return dataplane.Change{Globals: change.Globals || waiting.Globals, Services: waiting.Services}
	}
	waits := make(map[snapshot.Name]bool, len(waiting.Services))
	for _, name := range waiting.Services {
		waits[name] = true
	}
	out := dataplane.Change{
		Globals:  change.Globals || waiting.Globals,
		Services: make([]snapshot.Name, 0, len(change.Services)+len(waits)),
	}
	for _, name := range change.Services {
		if !waits[name] {
			out.Services = append(out.Services, name)
		}
	}
	out.Services = append(out.Services, waiting.Services...)
	return out
}

// limit returns how many elements a transaction may have.
func (b *Backend) limit(most int) int {
	if b.maxElements > 0 {
		return min(b.maxElements, most)
	}
	return most
}

// plan returns the transaction that brings the kernel to a state, or closer to it.
func (b *Backend) plan(want *dataplane.State) (*nft.Txn, error) {
	if b.syncState == stateInSync {
		if err := b.setGeneration(); err != nil {
			return nil, err
		}
		ok, err := b.reader.learnSlots(&b.model, b.pending.Services)
		if err != nil {
			return nil, err
		}
		if ok {
			most := writeAtOnce
			if b.filling {
				most = fillAtOnce
			}
			if txn := b.planAhead(want); txn != nil {
				return txn, nil
			}
			return b.model.Plan(want, b.pending, b.limit(most)), nil
		}
		b.syncState = stateStale
	}
	return b.planFrom(want)
}

// planAhead returns a transaction for small changes that need not wait for a part of a large Service. It returns nil if
// there are none, and every other time, so that the large Services make progress.
func (b *Backend) planAhead(want *dataplane.State) *nft.Txn {
	if b.filling || b.maxElements > 0 {
		b.ahead = false
		return nil
	}
	txn := planAhead(&b.model, want, b.pending, b.ahead)
	b.ahead = txn != nil
	return txn
}

func planAhead(m *nft.Model, want *dataplane.State, pending dataplane.Change, ahead bool) *nft.Txn {
	all := pending.Services
	if ahead || pending.Globals || len(all) < 2 || m.Fits(want, all, writeAtOnce) {
		return nil
	}
	return m.PlanAhead(want, all, aheadSize)
}

// setGeneration gives the next transaction the generation number that the kernel will assign to it; none if the tables
// are unverified.
func (b *Backend) setGeneration() error {
	if b.unverified {
		b.model.Generation = 0
		return nil
	}
	generation := b.generation
	if generation == 0 {
		var err error
		if generation, err = b.reader.Generation(); err != nil {
			return err
		}
	}
	b.model.Generation = nextGeneration(generation)
	return nil
}

// begin reads the generation, which later writes of others change, and takes ownership. othersFirst says that somebody
// wrote in between, perhaps to our tables right before we owned them.
func (b *Backend) begin() (generation uint32, othersFirst bool, err error) {
	if generation, err = b.reader.Generation(); err != nil {
		return 0, false, err
	}
	b.generation = generation
	if err = b.takeOwnership(); err != nil {
		return 0, false, err
	}
	now, err := b.reader.Generation()
	return generation, now != b.generation, err
}

// planFrom plans for a kernel that may hold anything.
func (b *Backend) planFrom(want *dataplane.State) (txn *nft.Txn, err error) {
	generation, othersFirst, err := b.begin()
	if err != nil {
		return nil, err
	}
	if err := b.setGeneration(); err != nil {
		return nil, err
	}
	if !b.tables[0].exists && !b.tables[1].exists {
		return b.planFirst(want)
	}
	planned := b.planContent(want)
	defer func() {
		if err != nil { // the model must not hold what was never sent
			b.model.Rollback(planned)
		}
	}()
	var found *ipfamily.Per[nft.Found]
	if b.syncState != stateUnfixable {
		if found, err = b.readBack(); err != nil {
			return nil, err
		}
	}
	if found == nil {
		return b.planFull(want, planned)
	}
	stale := nft.AllStale()
	if b.syncState == stateUnknown {
		stale = b.adopt(found)
		last := max(found[0].Revision.Number, found[1].Revision.Number)
		if !stale.All() && (othersFirst || last != generation) {
			b.unverified, b.model.Generation = true, 0
		}
		if !stale.Any() { // the earlier process may have ended before its sweep
			planned.Tables[0].Sweep, planned.Tables[1].Sweep = true, true
			return planned, nil
		}
	}
	if err := b.readElements(found, stale); err != nil {
		return nil, err
	}
	txn = b.model.Correct(found, stale)
	txn.Follow(planned)
	return txn, nil
}

// planContent brings the model to a state, unless that would be too much for one transaction: then all of what is
// pending is left. Nothing of what it returns is written by itself.
func (b *Backend) planContent(want *dataplane.State) *nft.Txn {
	switch {
	case b.syncState == stateUnknown || !b.model.Filled():
		return b.model.Load(want)
	case b.model.Fits(want, b.pending.Services, b.limit(writeAtOnce)):
		return b.model.Plan(want, b.pending, 0)
	}
	return b.model.PlanNothing(b.pending)
}

// adopt takes over what an earlier process left of what the model wants, and returns where the tables hold anything
// else.
func (b *Backend) adopt(found *ipfamily.Per[nft.Found]) *nft.Stale {
	b.model.AdoptCounting(found)
	stale := nft.AllStale()
	if !b.listAll {
		stale = b.model.Stale(found)
	}
	b.model.Adopt(found, stale)
	return stale
}

// planFirst plans the first of the transactions that fill new tables.
func (b *Backend) planFirst(want *dataplane.State) (*nft.Txn, error) {
	b.model = nft.Model{Counters: b.options.Counters, Generation: b.model.Generation, NoIngress: b.model.NoIngress}
	return b.leaveIngress(b.model.Plan(want, dataplane.Change{}, b.limit(fillAtOnce)))
}

// planFull plans new tables that replace existing ones. It uses one transaction of any size, so that Services are never
// missing. If that is too much to send at once, the new tables are filled in several transactions.
func (b *Backend) planFull(want *dataplane.State, planned *nft.Txn) (*nft.Txn, error) {
	if b.maxElements > 0 {
		return b.planFirst(want)
	}
	affinity, err := b.rescue()
	if err != nil {
		return nil, err
	}
	txn := b.model.Recreate(&affinity)
	txn.Follow(planned)
	return b.leaveIngress(txn)
}

// commit writes a transaction, in two parts if it has two.
func (b *Backend) commit(txn *nft.Txn, r *dataplane.Receipt) error {
	r.Full = txn.Tables[0].Create != nil
	r.Added, r.Replaced, r.Removed = txn.Counts()
	r.Bytes, r.Messages = 0, 0
	if txn.Empty() {
		return nil
	}
	first, rest := txn.Split()
	if first == nil {
		return b.write(rest, r)
	}
	if err := b.write(first, r); err != nil {
		return err
	}
	err := b.write(rest, r)
	var large *netlink.TooLarge
	var refused *rejected
	if errors.As(err, &large) || errors.As(err, &refused) { // the kernel holds the first part alone
		if undo := b.write(first.Undoing(), &dataplane.Receipt{}); undo != nil {
			return &halfway{errors.Join(err, undo)}
		}
	}
	return err
}

// write writes one part of a transaction, and tells whoever listens.
func (b *Backend) write(txn *nft.Txn, r *dataplane.Receipt) error {
	start := time.Now()
	b.batch.counts = b.reader.countsToKeep(txn)
	bytes := b.batch.encode(txn)
	b.batch.counts = nil
	r.Encode += time.Since(start)
	r.Bytes, r.Messages = r.Bytes+len(bytes), r.Messages+b.batch.Count()
	start = time.Now()
	defer func() { r.Commit += time.Since(start) }()
	err := b.send(bytes)
	if err == nil && b.Sent != nil {
		b.Sent(bytes)
	}
	return err
}

// send sends a batch. If the kernel rejects it, the error names the objects.
func (b *Backend) send(bytes []byte) error {
	refused, err := b.conn.Commit(bytes)
	if len(refused) > 0 {
		return &rejected{errors.Join(err, b.refusals(refused)), refused}
	}
	if err != nil {
		return fmt.Errorf("nft: send transaction: %w", err)
	}
	b.generation = nextGeneration(b.generation)
	return nil
}

// nextGeneration returns the generation number after our transaction. The kernel skips 0, which here means "not known".
func nextGeneration(generation uint32) uint32 {
	if generation++; generation == 1 || generation == 0 {
		return 0
	}
	return generation
}

// maxRefusals bounds the length of an error: if one object is rejected, often all are.
const maxRefusals = 8

func (b *Backend) refusals(refused []netlink.Error) error {
	var errs []error
	for i, r := range refused {
		if i == maxRefusals {
			errs = append(errs, fmt.Errorf("and %d more", len(refused)-i))
			break
		}
		errs = append(errs, b.batch.refusalError(r))
	}
	return errors.Join(errs...)
}

// sweepAfter sweeps affinity maps after a transaction, where it says so.
func (b *Backend) sweepAfter(txn *nft.Txn) {
	sweeps := false
	for i := range txn.Tables {
		tt := &txn.Tables[i]
		switch {
		case tt.Create != nil: // the affinity map is new, too
			b.sweep.left[i], b.tables[i] = 0, tableInfo{}
		case tt.Sweep:
			b.sweep.schedule(i, sweepsPerTransaction, time.Now())
			sweeps = true
		}
	}
	if sweeps {
		// Most maps are small, and clients wait to be sent elsewhere.
		_, _ = b.sweepUntil(time.Now().Add(checkBudget))
	}
}

// rememberTables records the identity of our tables, so that a later check can tell whether they are still the same.
func (b *Backend) rememberTables() {
	for i, f := range ipfamily.All {
		if b.tables[i].exists {
			continue
		}
		if info, err := b.reader.table(f); err == nil {
			b.tables[i] = info
		}
	}
	b.noteOwner()
}

// Replay sends a batch that another Backend made: see Conn.Replay.
func (b *Backend) Replay(batch []byte) error { return b.conn.Replay(batch) }

// Remove deletes our tables. It is no error if there are none.
//
// The rules go first. A packet in the middle of them still follows all of them, but it looks elements up as they are at
// that moment: if the whole table went at once, the elements of maps would be gone and those of sets would not
// (nft_map_deactivate), so it could find its Service gone and its address still known as a cluster IP, and be rejected.
func (b *Backend) Remove() error {
	if err := b.openSockets(); err != nil {
		return err
	}
	b.model, b.known, b.unwritten = nft.Model{Counters: b.options.Counters}, known{}, unwritten{}
	b.sweep, b.inspection = affinitySweep{}, inspection{}
	b.fill.Store(nil)
	b.noteOwner()
	there := false
	for _, f := range ipfamily.All {
		info, err := b.reader.table(f)
		if err != nil {
			return err
		}
		there = there || info.exists
	}
	if !there {
		return nil
	}
	if err := b.eachTable(b.batch.deleteRules); err != nil {
		return err
	}
	netlink.AwaitPackets()
	return errors.Join(b.eachTable(b.batch.deleteTable), b.removeIngress())
}

// eachTable commits a message about each table. It adds the tables first, so that the message succeeds whether they
// exist or not.
func (b *Backend) eachTable(message func(ipfamily.Family)) error {
	b.batch.restart()
	for _, f := range ipfamily.All {
		b.batch.End(b.batch.object(f, unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, "add table"))
		message(f)
	}
	b.batch.Finish()
	return b.ownerError(b.send(b.batch.Bytes()))
}

// List reads the elements and counters of our tables. The structure is taken from the model.
func (b *Backend) List() (ipfamily.Per[nft.Listing], error) {
	var out ipfamily.Per[nft.Listing]
	if err := b.openSockets(); err != nil {
		return out, err
	}
	for i, f := range ipfamily.All {
		out[i].Table = b.model.Structure(f)
		if err := b.reader.ruleCounters(f, out[i].Table.Chains); err != nil {
			return out, err
		}
		for set := range nft.NumSets {
			elements, err := b.reader.Elements(f, set)
			if err != nil {
				return out, err
			}
			out[i].Elements[set] = elements
		}
	}
	return out, nil
}
