package ledger

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/clip"
)

// Bounds of what waits to be written. What does not fit is dropped and counted: nobody waits for the disk.
const (
	maxQueued = 1024
	// maxQueuedBytes bounds the batches that wait, and maxBatch one of them: a node with 30,000 Services of 10 endpoints
	// is filled anew by one of 40 MB.
	maxQueuedBytes = 64 << 20
	maxBatch       = 48 << 20
)

// How long to wait after the ledger could not be written, or after what the kernel holds could not be read.
const (
	diskPause = 5 * time.Second
	// basePause is that before a checkpoint is read from the kernel once more; it doubles with each, up to maxBasePause,
	// so that another program that keeps changing the tables does not fill the ledger with checkpoints.
	basePause    = 10 * time.Second
	maxBasePause = 10 * time.Minute
	// lastWrites bounds how long the end of a process waits for the disk.
	lastWrites = 2 * time.Second
)

// Options configure a Writer.
type Options struct {
	// Dir is where the files are; it is made if it is missing. MaxBytes bounds them all together.
	Dir      string
	MaxBytes int64
	// Source tells what the kernel holds. The zero Source is of a backend whose records have no batch.
	Source Source
	// Version and Backend are noted in the record of the start.
	Version, Backend string
	Log              *slog.Logger
}

// Source tells what the kernel holds. It is asked in the Writer's goroutine, beside the backend that writes.
type Source struct {
	// New returns a State of nothing; nil if the backend's records have no batch.
	New func() State
	// Read returns a batch that makes all that the kernel holds now; empty if it holds no tables.
	Read func() ([]byte, error)
	// Revision identifies what the kernel holds now, as State.Revision does; empty if it holds nothing.
	Revision func() (string, error)
}

// State is what the kernel holds after some batches.
type State interface {
	// Apply adds a batch. Whole says that the batch alone says what the kernel holds then, whatever it held before. The
	// error says why the batch cannot have followed the batches before it; it is applied nevertheless, as far as it can.
	Apply(batch []byte) (whole bool, err error)
	// Batch returns a batch that makes this state, whatever there is.
	Batch() ([]byte, error)
	// Revision identifies the state.
	Revision() string
	// Consistent reports whether the state is what its own digests say. It may not be after a repair.
	Consistent() bool
}

// Stats are what a Writer counts. Records are those written, Missing those that are missing in the files, Errors the
// failures of the disk, and Bytes the size of the files.
type Stats struct {
	Records, Missing, Errors uint64
	Bytes                    int64
	// Dir is where the files are. Error says why they cannot be written now; empty if they can.
	Dir, Error string
	// Number and Sum are those of the last record.
	Number uint64
	Sum    string
}

// Writer writes a ledger. Its listener only puts copies into a queue; Run writes them. Make one with New.
type Writer struct {
	o     Options
	queue chan entry
	// queuedBytes are the batches in the queue.
	queuedBytes atomic.Int64
	stats       struct {
		records, missing, errors atomic.Uint64
		bytes                    atomic.Int64
		last                     atomic.Pointer[lastRecord]
		err                      atomic.Pointer[string]
	}

	// The fields up to here are used by both sides, these by the loop's goroutine alone: the batches that were sent since
	// the last event, and how many records were dropped since the last one that found room.
	sent    [][]byte
	tooLong int
	dropped uint64

	// And these by Run. began is when the Writer was made, before any record, and lastAt the time of the last record.
	began   time.Time
	lastAt  time.Time
	files   files
	packer  packer
	retryAt time.Time
	failing bool
	// baseKnown says that the records add up to what the kernel holds. Otherwise the next attempt to find out what that
	// is is due at baseAt, and the one after it basePause later. repaired says that the records may add up nevertheless.
	baseKnown, repaired bool
	baseAt              time.Time
	basePause           time.Duration
}

// lastRecord identifies a record.
type lastRecord struct {
	number uint64
	sum    string
}

// entry is a record that waits, with what still has to be done for it.
type entry struct {
	Record
	batches [][]byte
	bytes   int
	// dropped is how many records are missing before this one.
	dropped uint64
	// whole says that the batch makes everything anew, and repairs that it follows changes by others.
	whole, repairs bool
}

// New returns a Writer.
func New(o Options) *Writer {
	w := &Writer{o: o, queue: make(chan entry, maxQueued), began: time.Now(), basePause: basePause}
	w.files = files{dir: o.Dir, most: o.MaxBytes}
	return w
}

// Stats returns what was counted so far. It is safe for concurrent use.
func (w *Writer) Stats() Stats {
	s := Stats{Records: w.stats.records.Load(), Missing: w.stats.missing.Load(), Errors: w.stats.errors.Load(),
		Bytes: w.stats.bytes.Load(), Dir: w.o.Dir}
	if err := w.stats.err.Load(); err != nil {
		s.Error = *err
	}
	if last := w.stats.last.Load(); last != nil {
		s.Number, s.Sum = last.number, last.sum
	}
	return s
}

// put hands a record to Run, or drops it.
func (w *Writer) put(e entry) {
	e.batches, w.sent = w.sent, nil
	if w.tooLong > 0 {
		e.Error, e.Bytes = cmp.Or(e.Error, fmt.Sprintf("the batch of %d bytes is too long to keep", w.tooLong)), w.tooLong
		e.batches, w.tooLong = nil, 0
	}
	for _, b := range e.batches {
		e.bytes += len(b)
	}
	e.dropped = w.dropped
	if w.queuedBytes.Load()+int64(e.bytes) <= maxQueuedBytes {
		w.queuedBytes.Add(int64(e.bytes)) // before Run can take it off
		select {
		case w.queue <- e:
			w.dropped = 0
			return
		default:
			w.queuedBytes.Add(-int64(e.bytes))
		}
	}
	w.dropped++
	w.stats.missing.Add(1)
}

// Run writes the ledger until ctx is done. It does not wait for a disk that does not answer then.
func (w *Writer) Run(ctx context.Context) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		w.run(ctx)
	}()
	<-ctx.Done()
	select {
	case <-done:
	case <-time.After(2 * lastWrites):
	}
}

func (w *Writer) run(ctx context.Context) {
	revision := w.revision() // before the loop writes anything
	w.start(revision)
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			w.finish()
			return
		case e := <-w.queue:
			w.take(&e)
		case <-tick.C:
			w.refind()
			w.ensureBase()
		}
	}
}

// finish writes what still waits, unless the disk takes too long.
func (w *Writer) finish() {
	deadline := time.Now().Add(lastWrites)
	for time.Now().Before(deadline) {
		select {
		case e := <-w.queue:
			w.take(&e)
			continue
		default:
		}
		break
	}
	w.write(&Record{At: time.Now(), Kind: Stop})
	if err := w.files.close(); err != nil {
		w.failed(err)
	}
}

// revision asks what the kernel holds at the start; empty if that is not known.
func (w *Writer) revision() string {
	if w.o.Source.Revision == nil {
		return ""
	}
	revision, err := w.o.Source.Revision()
	if err != nil {
		w.o.Log.Warn("ledger: failed to read what the kernel holds", "err", err)
	}
	return revision
}

// start opens the files and notes the start. If the kernel still holds what the last record left there, the records
// go on from there.
func (w *Writer) start(revision string) {
	if err := w.files.open(); err != nil {
		w.failed(err)
		w.missing()
		return
	}
	if file, mode := w.files.exposed(); file != "" {
		w.o.Log.Warn("others than the owner may read or write records of the ledger: chmod go=",
			"file", file, "mode", fmt.Sprintf("%04o", mode))
	}
	state := w.replay()
	w.baseKnown = state != nil && revision != "" && state.Revision() == revision
	w.write(&Record{At: w.began, Kind: Start, Continues: w.baseKnown, Version: w.o.Version, Backend: w.o.Backend})
	w.ensureBase()
}

// replay returns the state that the records of the current segment add up to; nil if that is not known.
func (w *Writer) replay() State {
	if w.o.Source.New == nil || w.files.path == "" {
		return nil
	}
	p := NewReplay(w.o.Source.New)
	r := &Reader{}
	if err := r.open(w.files.path); err != nil {
		return nil
	}
	defer r.Close()
	for {
		record, err := r.Next()
		if err != nil || len(r.Breaks()) > 0 {
			break
		}
		p.Add(record)
	}
	if !p.Known() || len(r.Breaks()) > 0 {
		return nil
	}
	return p.State()
}

// ensureBase writes a checkpoint of what the kernel holds, if the records do not add up to it.
func (w *Writer) ensureBase() {
	if w.baseKnown || w.o.Source.Read == nil || w.failing || time.Now().Before(w.baseAt) {
		return
	}
	w.baseAt = time.Now().Add(w.basePause)
	if w.repaired {
		w.repaired = false
		if w.baseKnown = w.replay() != nil; w.baseKnown {
			return
		}
	}
	batch, err := w.o.Source.Read()
	if err != nil {
		w.o.Log.Debug("ledger: failed to read what the kernel holds; retrying", "err", err)
		return
	}
	if len(batch) > 0 { // otherwise the first transaction makes everything
		w.checkpoint(batch, time.Now())
		w.basePause = min(2*w.basePause, maxBasePause)
		w.baseAt = time.Now().Add(w.basePause)
	}
}

// checkpoint writes a batch that makes everything that the kernel held at a time.
func (w *Writer) checkpoint(batch []byte, at time.Time) {
	r := &Record{At: at, Kind: Checkpoint}
	r.Batch, r.Bytes = w.packer.pack(batch), len(batch)
	if packed := len(r.Batch); 2*packed*4/3 > int(w.files.segment()) {
		r.Batch = nil
		r.Error = fmt.Sprintf("a checkpoint takes %d bytes, too many for a ledger of %d", packed, w.o.MaxBytes)
		w.o.Log.Warn("the ledger is too small for a checkpoint, so explain --at cannot answer: raise ledgerMaxMiB",
			"checkpoint_bytes", packed, "max_bytes", w.o.MaxBytes)
		w.basePause = maxBasePause
	}
	w.baseKnown = w.write(r) && r.Error == ""
}

// take writes what was taken from the queue.
func (w *Writer) take(e *entry) {
	w.queuedBytes.Add(-int64(e.bytes))
	if e.dropped > 0 {
		w.baseKnown = false
		w.write(&Record{At: e.At, Kind: Lost, Missing: e.dropped})
	}
	for i, batch := range e.batches {
		if i < len(e.batches)-1 { // an Apply that wrote more than once
			w.write(w.packed(&Record{At: e.At, Kind: Change, Why: e.Why}, batch))
			continue
		}
		w.packed(&e.Record, batch)
	}
	written := w.write(&e.Record)
	switch {
	case e.Bytes > 0 && len(e.Batch) == 0: // there was no room for it
		w.baseKnown = false
	case e.repairs:
		w.repaired, w.baseKnown = w.baseKnown || w.repaired, false
	case e.whole && written:
		w.baseKnown = true
	}
}

func (w *Writer) packed(r *Record, batch []byte) *Record {
	r.Batch, r.Bytes = w.packer.pack(batch), len(batch)
	return r
}

// write writes a record, after one that says how many are missing since the last one that could be written.
func (w *Writer) write(r *Record) bool {
	w.refind()
	if w.failing && time.Now().Before(w.retryAt) {
		return w.missing()
	}
	if w.failing {
		if err := w.files.open(); err != nil {
			w.failed(err)
			return w.missing()
		}
	}
	if w.files.missing > 0 && !w.writeLost(r.At) {
		return w.missing()
	}
	if err := w.append(r); err != nil {
		w.failed(err)
		return w.missing()
	}
	return true
}

// writeLost writes a record that says how many are missing.
func (w *Writer) writeLost(at time.Time) bool {
	w.baseKnown, w.repaired = false, false
	if err := w.append(&Record{At: at, Kind: Lost, Missing: w.files.missing}); err != nil {
		w.failed(err)
		return false
	}
	w.files.missing = 0
	return true
}

// refind opens the files again, or makes new ones, if somebody has removed or replaced the last one.
func (w *Writer) refind() {
	n, gone := w.files.gone()
	if !gone {
		return
	}
	w.o.Log.Error("the last file of the ledger was removed or replaced; its records are missing, and another one begins",
		"file", w.files.path, "records", n)
	w.files.missing += n
	w.stats.missing.Add(n)
	w.baseKnown, w.repaired = false, false
	if err := w.files.open(); err != nil {
		w.failed(err)
		return
	}
	w.writeLost(time.Now())
}

// append writes a record, in a new segment if there is no room in the current one.
func (w *Writer) append(r *Record) error {
	err := w.files.append(r)
	if errors.Is(err, errSegmentFull) {
		err = w.rotate(r)
	}
	if err != nil {
		return err
	}
	if w.failing {
		w.failing = false
		w.stats.err.Store(nil)
		w.o.Log.Info("the ledger can be written again")
	}
	w.lastAt = r.At
	w.stats.records.Add(1)
	w.stats.bytes.Store(w.files.total)
	w.stats.last.Store(&lastRecord{w.files.number, w.files.sum})
	return nil
}

// missing counts a record that could not be written. It returns false.
func (w *Writer) missing() bool {
	w.files.missing++
	w.baseKnown, w.repaired = false, false
	w.stats.missing.Add(1)
	return false
}

// rotate begins a new segment with a checkpoint, and writes a record there.
func (w *Writer) rotate(r *Record) error {
	var state State
	if w.baseKnown {
		state = w.replay()
	}
	if err := w.files.next(); err != nil {
		return err
	}
	w.baseKnown, w.basePause = false, basePause
	if state != nil {
		if batch, err := state.Batch(); err == nil {
			kept := r.Batch // which the packer holds, too
			r.Batch = append([]byte(nil), kept...)
			w.checkpoint(batch, w.lastAt)
		}
	}
	return w.files.append(r)
}

// failed counts a failure of the disk, and reports the first of a series.
func (w *Writer) failed(err error) {
	w.stats.errors.Add(1)
	text := clip.Cut(err.Error(), maxText)
	w.stats.err.Store(&text)
	if !w.failing {
		w.o.Log.Error("failed to write the ledger; records will be missing", "err", err)
	}
	w.failing, w.retryAt = true, time.Now().Add(diskPause)
}
