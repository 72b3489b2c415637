package kernel

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/nft"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// readBack compares the structure of our tables with the model. It returns nil if they do not exist, or if changing
// elements alone cannot correct them.
func (b *Backend) readBack() (*ipfamily.Per[nft.Found], error) {
	found := &ipfamily.Per[nft.Found]{}
	for i, f := range ipfamily.All {
		if t := &b.tables[i]; !t.exists || t.flags&tableDormant != 0 || b.options.Own && t.owner == 0 {
			return nil, nil
		}
		s, err := b.reader.structure(f, b.model.Structure(f), b.model.Layout(f))
		if err != nil {
			return nil, err
		}
		if !s.sets {
			return nil, nil
		}
		found[i] = s.Found
	}
	return found, nil
}

// takeOwnership looks for our tables, and takes those that nobody owns. A table that was made without ownership must be
// made again, because the kernel cannot change that.
func (b *Backend) takeOwnership() error {
	port, err := b.conn.Wire.Port()
	if err != nil {
		return err
	}
	b.owned.Store(false) // until all was seen
	for i, f := range ipfamily.All {
		if b.tables[i], err = b.reader.table(f); err != nil {
			return err
		}
		t := &b.tables[i]
		switch {
		case t.owner != 0 && t.owner != port:
			return &Owned{f, t.owner}
		case !b.options.Own || !t.exists || t.owner == port || t.flags&tablePersist == 0:
			continue
		}
		b.batch.restart()
		b.batch.claimTable(f, b.batch.tableFlags)
		b.batch.Finish()
		if err := b.send(b.batch.Bytes()); err != nil {
			return b.ownerError(err)
		}
		t.owner, t.flags = port, t.flags|b.batch.tableFlags
	}
	return b.claimIngress(port)
}

// dumpMost is how many slots are read by listing the whole map. The kernel walks the map again for each datagram of a
// list, so larger maps are read faster by their keys, which follow from the frontends.
const dumpMost = 32768

// readElements is Conn.readElements, and also finds slots that belong to no pool. If others left such slots, every
// Check would find them, and no correction would remove them.
func (b *Backend) readElements(found *ipfamily.Per[nft.Found], stale *nft.Stale) error {
	most := b.dumpMost
	for i := range found {
		if b.listAll || found[i].Revision == (nft.Revision{}) { // then nobody knows what there may be
			most = math.MaxInt
		}
	}
	if err := b.reader.readElements(found, stale, most); err != nil {
		return err
	}
	for i, f := range ipfamily.All {
		for _, slots := range [...]nft.SetID{nft.Endpoints, nft.UncountedEndpoints} {
			if !stale.All() || found[i].Counts[slots] <= len(found[i].Elements[slots]) {
				continue
			}
			found[i].Elements[slots] = nil
			if err := b.reader.readSet(f, slots, stale, &found[i]); err != nil {
				return err
			}
		}
	}
	return nil
}

// readElements reads the elements in stale buckets. If there are more slots than most, or if only some buckets are
// stale, it reads slots by their keys.
func (c *Conn) readElements(found *ipfamily.Per[nft.Found], stale *nft.Stale, most int) error {
	for i, f := range ipfamily.All {
		for set := range nft.NumSets {
			switch {
			case !set.IsContent(), set == nft.Endpoints, set == nft.UncountedEndpoints, set.IsShared() && !stale.Shared():
				continue
			}
			if err := c.readSet(f, set, stale, &found[i]); err != nil {
				return err
			}
		}
		all := found[i].SlotKeys()
		for _, slots := range [...]nft.SetID{nft.Endpoints, nft.UncountedEndpoints} { // always in one order
			keys := all[slots]
			if stale.All() && len(keys) <= most {
				if err := c.readSet(f, slots, stale, &found[i]); err != nil {
					return err
				}
				continue
			}
			// Slots that no pool leads to stay unseen here.
			err := c.get(f, slots, keys, func(e nft.Element) {
				found[i].Elements[slots] = append(found[i].Elements[slots], e)
			})
			if err != nil && !errors.Is(err, unix.ENOENT) {
				return err
			}
		}
	}
	return nil
}

// readSet lists the elements of a set in stale buckets.
func (c *Conn) readSet(f ipfamily.Family, set nft.SetID, stale *nft.Stale, found *nft.Found) error {
	if slices.Contains(found.Missing, set) {
		return nil
	}
	listed, err := c.Elements(f, set)
	for i := range listed {
		if e := &listed[i].Element; stale.Element(e) {
			found.Elements[set] = append(found.Elements[set], *e)
		}
	}
	return err
}

// checkBudget bounds how long a Check takes, because its caller may have a change to write. An inspection continues
// after a pause of restFactor times as long.
const (
	checkBudget = 5 * time.Millisecond
	restFactor  = 4
)

// inspection compares all elements, a few at a time.
type inspection struct {
	// left are the Services still to be looked at; running says that there is an inspection.
	left    []snapshot.Name
	running bool
	// relists says how often sets were not what they should be when they were listed as a whole.
	relists int
}

// Check looks, for a few milliseconds, whether somebody else changed our tables. It returns one line for each finding;
// the next Apply repairs them. It also continues work that transactions left: removing affinity entries of removed
// endpoints, and counting. again is the delay until the next call; 0 means that nothing is left to do.
func (b *Backend) Check() (found []string, again time.Duration, err error) {
	if b.syncState != stateInSync { // the next Apply will look
		return nil, 0, nil
	}
	if err := b.openSockets(); err != nil {
		return nil, 0, err
	}
	start := time.Now()
	deadline := start.Add(checkBudget)
	err = b.checkAffinityFill(start)
	busy := false
	if err == nil {
		busy, err = b.sweepUntil(deadline)
	}
	if err == nil {
		found, err = b.checkTables()
	}
	recounting := false
	if err == nil && len(found) == 0 {
		recounting, err = b.recount()
	}
	for err == nil && len(found) == 0 && b.inspection.running && time.Now().Before(deadline) {
		found, err = b.inspect()
	}
	if len(found) > 0 {
		b.syncState, b.inspection = stateStale, inspection{}
	}
	switch {
	case busy: // clients are waiting to be sent elsewhere
		again = max(time.Since(start), time.Millisecond)
	case b.inspection.running, recounting:
		again = max(restFactor*time.Since(start), time.Millisecond)
	}
	return found, again, err
}

// How much one Check rewrites, at most, to correct which elements have counters.
const (
	recountServices = 64
	recountElements = 1024
)

// recount rewrites some Services whose elements lack counters or should have none, and says whether there are more.
func (b *Backend) recount() (more bool, err error) {
	names := b.model.Recounts(recountServices)
	if len(names) == 0 {
		return false, nil
	}
	if known, err := b.reader.learnSlots(&b.model, names); err != nil || !known {
		return false, err // others changed them, which an inspection will tell
	}
	if err := b.setGeneration(); err != nil {
		return false, err
	}
	txn := b.model.Recount(len(names), recountElements)
	if err := b.commit(txn, &dataplane.Receipt{}); err != nil {
		b.model.Rollback(txn)
		b.syncState = stateStale
		return false, fmt.Errorf("counters: %w", err)
	}
	b.publishFill()
	return len(b.model.Recounts(1)) > 0, nil
}

// checkTables reads the generation, which takes a few microseconds. If others have written since, it compares our
// tables and begins an inspection, unless nobody else could have written to them.
func (b *Backend) checkTables() ([]string, error) {
	generation, err := b.reader.Generation()
	if err != nil || generation == b.generation {
		return nil, err
	}
	var found []string
	tables, mine := b.tables, true
	for i, f := range ipfamily.All {
		info, err := b.reader.table(f)
		if err != nil {
			return nil, err
		}
		was := b.tables[i]
		if tables[i] = info; !was.exists { // it could not be read after the transaction
			was = info
		}
		switch {
		case !info.exists:
			found = append(found, fmt.Sprintf("%s %s: the table is gone", f.NFT(), nft.TableName))
		case info.handle != was.handle:
			found = append(found, fmt.Sprintf("%s %s: the table is another one", f.NFT(), nft.TableName))
		case info.owner != was.owner:
			found = append(
				found,
				fmt.Sprintf(
					"%s %s: the table's owner is netlink port %d, no longer %d",
					f.NFT(),
					nft.TableName,
					info.owner,
					was.owner,
				),
			)
		case info.flags != was.flags:
			found = append(
				found,
				fmt.Sprintf("%s %s: the table's flags are %#x, no longer %#x", f.NFT(), nft.TableName, info.flags, was.flags),
			)
		}
		mine = mine && info.owner != 0
	}
	if found == nil && !(mine && b.generation != 0) {
		if found, err = b.checkStructure(); err != nil {
			return nil, err
		}
		b.inspection, b.unverified = inspection{running: true, left: b.model.Names()}, true
	}
	b.tables, b.generation = tables, generation // not before all was seen: after an error all is to be looked at again
	b.noteOwner()
	return found, nil
}

// checkStructure compares sets, chains, rules and, where the kernel counts them, the numbers of elements.
func (b *Backend) checkStructure() (found []string, err error) {
	for _, f := range ipfamily.All {
		s, err := b.reader.structure(f, b.model.Structure(f), b.model.Layout(f))
		if err != nil {
			return nil, err
		}
		found = append(found, s.differences...)
		if s.Revision != b.model.Revision(f) {
			found = append(found, fmt.Sprintf("%s %s: the revision is not the one that was written", f.NFT(), nft.TableName))
		}
		if s.Digests.With(s.Revision.Digest) != b.model.Digests(f) {
			found = append(found, fmt.Sprintf("%s %s: the digests are not those that were written", f.NFT(), nft.TableName))
		}
		for set := range nft.NumSets {
			if !s.counted || !set.IsContent() || nft.SetByID(set).Interval {
				continue
			}
			if got, want := s.counts[set], b.model.Count(f, set); got != want {
				found = append(found, fmt.Sprintf("%s %s: %s has %d elements, not %d", f.NFT(), nft.TableName, set, got, want))
			}
		}
	}
	return found, nil
}

// maxRelists is how often a set is listed again before an inspection concludes that others have changed it.
const maxRelists = 2

// inspectAtOnce is how many Services are compared in one step, some hundreds of elements.
const inspectAtOnce = 16

// inspect continues an inspection.
func (b *Backend) inspect() (found []string, err error) {
	in := &b.inspection
	if len(in.left) == 0 {
		found, err = b.inspectWhole()
		if len(found) > 0 && in.relists < maxRelists { // the kernel may be moving elements to new buckets
			in.relists++
			return nil, nil
		}
		in.running = err != nil
		b.unverified = in.running || len(found) > 0
		return found, err
	}
	names := in.left[:min(inspectAtOnce, len(in.left))]
	known, err := b.reader.learnSlots(&b.model, names)
	if err != nil {
		return nil, err
	}
	if !known {
		return []string{fmt.Sprintf("the endpoints of %s, or of a Service after it, are others", names[0])}, nil
	}
	for i, sets := range b.model.ElementsOf(names) {
		for set, want := range sets {
			if len(want) == 0 || nft.SetByID(nft.SetID(set)).Interval {
				continue
			}
			got := map[string]nft.Element{}
			err := b.reader.get(ipfamily.All[i], nft.SetID(set), want, func(e nft.Element) { got[string(e.Key())] = e })
			if err != nil && !errors.Is(err, unix.ENOENT) {
				return nil, err
			}
			found = append(found, differences(ipfamily.All[i], want, got)...)
		}
	}
	in.left = in.left[len(names):]
	return found, nil
}

// differences describes the elements that are not as they should be.
func differences(f ipfamily.Family, want []nft.Element, got map[string]nft.Element) (found []string) {
	for i := range want {
		set := nft.SetByID(want[i].Set)
		text := fmt.Sprintf("%s %s: %s { %s }", f.NFT(), nft.TableName, set.Name(), want[i].Text(f, &set))
		switch e, there := got[string(want[i].Key())]; {
		case !there:
			found = append(found, text+" is gone")
		case e.Text(f, &set) != want[i].Text(f, &set):
			found = append(found, text+" is now { "+e.Text(f, &set)+" }")
		}
	}
	return found
}

// inspectWhole compares the sets that are listed as a whole, and the numbers of elements of others that
// are small enough for that.
func (b *Backend) inspectWhole() (found []string, err error) {
	for i, f := range ipfamily.All {
		for set := range nft.NumSets {
			s := nft.SetByID(set)
			if !set.IsContent() || !s.Interval && b.model.Count(f, set) > b.dumpMost/8 {
				continue
			}
			listed, err := b.reader.Elements(f, set)
			if err != nil {
				return nil, err
			}
			if got, want := len(listed), b.model.Count(f, set); got != want {
				found = append(found, fmt.Sprintf("%s %s: %s has %d elements, not %d", f.NFT(), nft.TableName, set, got, want))
			} else if set.IsWhole() {
				found = append(found, sameElements(f, &s, listed, b.model.Whole(set)[i])...)
			}
		}
	}
	return found, nil
}

// sameElements compares as many elements as there should be.
func sameElements(f ipfamily.Family, s *nft.Set, listed []nft.Listed, want []nft.Element) (found []string) {
	type element struct {
		key, comment string
		data         string
		bits         uint8
		chain        nft.ChainID
	}
	there := make(map[element]bool, len(listed))
	for i := range listed {
		l := &listed[i]
		there[element{string(l.Key()), l.Comment, string(l.Data()), l.Bits, l.Chain}] = true
	}
	for i := range want {
		if w := &want[i]; !there[element{string(w.Key()), w.Comment, string(w.Data()), w.Bits, w.Chain}] {
			found = append(found, fmt.Sprintf("%s %s: %s { %s } is gone", f.NFT(), nft.TableName, s.Name(), w.Text(f, s)))
		}
	}
	return found
}
