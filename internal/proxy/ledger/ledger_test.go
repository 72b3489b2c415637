package ledger

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// fakeState stands in for tables: a batch is lines of KEY=VALUE, after "new" if it makes everything, and the last line
// is the revision before it and its own.
type fakeState struct {
	values   map[string]string
	revision string
}

func (s *fakeState) Apply(batch []byte) (whole bool, err error) {
	lines := strings.Split(string(batch), "\n")
	if lines[0] == "new" {
		s.values, whole, lines = map[string]string{}, true, lines[1:]
	}
	before, after, _ := strings.Cut(lines[len(lines)-1], ">")
	var was, is, now int
	fmt.Sscan(before, &was)
	fmt.Sscan(after, &is)
	fmt.Sscan(s.revision, &now)
	switch {
	case whole:
	case was != now && is <= now:
		return false, nil
	case was != now:
		err = errors.New("a gap")
	}
	for _, line := range lines[:len(lines)-1] {
		key, value, _ := strings.Cut(line, "=")
		s.values[key] = value
	}
	s.revision = after
	return whole, err
}

func (s *fakeState) Batch() ([]byte, error) {
	text := "new\n"
	for _, key := range slices.Sorted(maps.Keys(s.values)) {
		text += key + "=" + s.values[key] + "\n"
	}
	return []byte(text + "0>" + s.revision), nil
}

func (s *fakeState) Revision() string { return s.revision }
func (s *fakeState) Consistent() bool { return true }

func newFake() State { return &fakeState{values: map[string]string{}} }

// node is a kernel and who writes to it, with a ledger.
type node struct {
	*Writer
	t      *testing.T
	dir    string
	most   int64
	mu     sync.Mutex
	kernel fakeState
	number int
	// Unread says that the kernel cannot be read.
	unread bool
	stop   func()
	log    bytes.Buffer
	// at maps times to what the kernel held then.
	times []time.Time
	held  []string
}

func newNode(t *testing.T, most int64) *node {
	return &node{t: t, dir: filepath.Join(t.TempDir(), "ledger"), most: most,
		kernel: fakeState{values: map[string]string{}}}
}

// run starts a process.
func (n *node) run() {
	n.Writer = New(Options{Dir: n.dir, MaxBytes: n.most, Log: slog.New(slog.NewTextHandler(&n.log, nil)), Source: Source{
		New: newFake,
		Read: func() ([]byte, error) {
			n.mu.Lock()
			defer n.mu.Unlock()
			if n.unread {
				return nil, errors.New("busy")
			}
			if n.kernel.revision == "" {
				return nil, nil
			}
			return n.kernel.Batch()
		},
		Revision: func() (string, error) {
			n.mu.Lock()
			defer n.mu.Unlock()
			return n.kernel.revision, nil
		}}})
	ctx, cancel := context.WithCancel(n.t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		n.Run(ctx)
	}()
	synctest.Wait()
	n.stop = func() {
		cancel()
		<-done
	}
}

// commit writes a value, and tells the ledger unless it is silent.
func (n *node) commit(key, value string, silent bool) {
	n.mu.Lock()
	text := fmt.Sprintf("%s=%s\n%d>%d", key, value, n.number, n.number+1)
	full := n.kernel.revision == ""
	if full {
		text = "new\n" + text
	}
	n.number++
	_, err := n.kernel.Apply([]byte(text))
	n.mu.Unlock()
	if err != nil {
		n.t.Error(err)
	}
	if silent {
		return
	}
	n.Sent([]byte(text))
	name := snapshot.Name{Namespace: "shop", Name: key}
	n.committed(reconcile.Commit{
		First: full, Before: []*dataplane.Service{nil}, After: []*dataplane.Service{{Name: name}},
		Receipt: dataplane.Receipt{Added: 1, Full: full, Commit: 3 * time.Millisecond, Plan: time.Millisecond},
		Cause: &reconcile.Cause{Since: time.Now().Add(-20 * time.Millisecond), Began: time.Now(), Delta: snapshot.Delta{
			Slices: map[snapshot.Name]*snapshot.Slice{
				{Namespace: "shop", Name: key + "-x"}: {Name: snapshot.Name{Namespace: "shop", Name: key + "-x"}, Service: key,
					Version: "7"}}}}})
	n.times, n.held = append(n.times, time.Now()), append(n.held, n.text())
}

func (n *node) text() string {
	b, _ := n.kernel.Batch()
	return string(b)
}

// read returns all records, and where the chain is broken.
func read(t *testing.T, dir string) (list []*Record, r *Reader) {
	t.Helper()
	r, err := Open(dir, time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	for {
		record, err := r.Next()
		if errors.Is(err, io.EOF) {
			return list, r
		}
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, record)
	}
}

// TestRecord: a record says what changed, what was written and how long it took.
func TestRecord(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, 1<<20)
		n.run()
		n.commit("cart", "10.0.0.1", false)
		n.Sent([]byte("lost=1\n1>2"))
		n.transactionFailed(reconcile.Failure{Err: errors.New("no room"), Took: time.Second,
			Cause: &reconcile.Cause{Retry: true}})
		n.checked(reconcile.Check{Found: []string{"a set is gone"}})
		n.checked(reconcile.Check{})
		n.stop()
		list, r := read(t, n.dir)
		var text []string
		for _, record := range list {
			batch, err := record.Unpack()
			if err != nil {
				t.Error(err)
			}
			text = append(text, fmt.Sprintf("%s %v %v %v +%d %q %v %q %s", record.Kind, record.Why, record.Objects,
				record.Services, record.Added, record.Error, record.Findings, batch, tookText(record.Took)))
		}
		want := []string{
			`start [] [] [] +0 "" [] "" `,
			`change [first state] [{EndpointSlice shop/cart-x shop/cart 7 false}] [shop/cart] +1 "" [] ` +
				`"new\ncart=10.0.0.1\n0>1" 20000 1000 3000`,
			`failed [retry] [] [] +0 "no room" [] "lost=1\n1>2" 0 0 1000000`,
			`found [] [] [] +0 "" [a set is gone] "" `,
			`stop [] [] [] +0 "" [] "" `,
		}
		if !slices.Equal(text, want) || len(r.Breaks()) > 0 {
			t.Errorf("got\n%s\nwant\n%s\nbreaks %v", strings.Join(text, "\n"), strings.Join(want, "\n"), r.Breaks())
		}
		for path, want := range map[string]os.FileMode{n.dir: 0o700, r.file: 0o600} {
			if info, err := os.Stat(path); err != nil || info.Mode().Perm() != want {
				t.Errorf("%s: mode %v, error %v; want %v", path, info.Mode(), err, want)
			}
		}
	})
}

// TestModes: a directory that others may write to gets no record until that is mended, and says so; segments that
// others may read are reported; and the last segment is no way to another file.
func TestModes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, 1<<20)
		victim := filepath.Join(t.TempDir(), "victim")
		check := func(err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
		}
		check(os.WriteFile(victim, []byte("precious"), 0o600))
		check(os.Mkdir(n.dir, 0o700))
		for _, mode := range []os.FileMode{0o777, 0o720, 0o702} {
			check(os.Chmod(n.dir, mode))
			n.run()
			time.Sleep(2 * diskPause)
			n.stop()
			want := fmt.Sprintf("%s, mode %04o", n.dir, mode)
			if list, _ := segments(n.dir); len(list) > 0 || strings.Count(n.log.String(), want) != 1 {
				t.Errorf("mode %v: %d segments, and the log says %s", mode, len(list), n.log.String())
			}
		}
		n.run()
		check(os.Chmod(n.dir, 0o755)) // the files are for their owner alone
		time.Sleep(2 * diskPause)
		n.commit("a", "1", false)
		n.stop()
		list, err := segments(n.dir)
		if err != nil || len(list) != 1 || n.Stats().Records == 0 {
			t.Fatalf("mended, there are %d segments with %d records, error %v", len(list), n.Stats().Records, err)
		}
		for _, mode := range []os.FileMode{0o600, 0o640, 0o602} {
			check(os.Chmod(list[0], mode))
			n.log.Reset()
			n.run()
			n.stop()
			told := strings.Contains(n.log.String(), fmt.Sprintf("file=%s mode=%04o", list[0], mode))
			if told != (mode != 0o600) {
				t.Errorf("a file with mode %v: told %v", mode, told)
			}
		}
		check(os.Symlink(victim, filepath.Join(n.dir, "ledger-999999999999.jsonl")))
		n.run()
		n.stop()
		if text, err := os.ReadFile(victim); err != nil || string(text) != "precious" {
			t.Errorf("wrote to another file: %q, error %v", text, err)
		}
	})
}

func tookText(t *Took) string {
	if t == nil {
		return ""
	}
	return fmt.Sprint(t.Wait, t.Plan, t.Kernel)
}

// TestBreaks: whatever is done to the files of a ledger is found where it was done, but for whole segments that are
// missing at the beginning and records at the end.
func TestBreaks(t *testing.T) {
	for name, c := range map[string]struct {
		do   func(lines [][]byte) [][]byte
		want []string
	}{
		"nothing": {func(l [][]byte) [][]byte { return l }, nil},
		"a record is edited": {func(l [][]byte) [][]byte {
			l[4] = bytes.Replace(l[4], []byte("shop/s4"), []byte("shop/s5"), 1)
			return l
		}, []string{"5: the line was changed: its sum is another"}},
		"a record is edited with its sum": {func(l [][]byte) [][]byte {
			r, _ := parseLine(bytes.TrimSuffix(l[4], []byte("\n")))
			r.Added = 99
			l[4], _ = r.line()
			return l
		}, []string{"6: record 6 does not follow the record 5 that stands before it"}},
		"a record is taken out": {func(l [][]byte) [][]byte { return slices.Delete(l, 4, 5) },
			[]string{"5: record 6 follows record 4"}},
		"two change places": {func(l [][]byte) [][]byte {
			l[4], l[5] = l[5], l[4]
			return l
		}, []string{"5: record 6 follows record 4", "6: record 5 follows record 6", "7: record 7 follows record 5"}},
		"a line is garbage": {func(l [][]byte) [][]byte {
			l[4] = []byte("garbage\n")
			return l
		}, []string{"5: no record: invalid character 'g' looking for beginning of value"}},
		"the last is cut":   {func(l [][]byte) [][]byte { return append(l[:6], l[6][:20]) }, nil},
		"the first is gone": {func(l [][]byte) [][]byte { return l[1:] }, nil},
	} {
		synctest.Test(t, func(t *testing.T) {
			n := newNode(t, 1<<20)
			n.run()
			for i := range 8 {
				n.commit(fmt.Sprintf("s%d", i+1), "1", false)
			}
			n.stop()
			list, err := segments(n.dir)
			if err != nil || len(list) != 1 {
				t.Fatalf("%v, error %v", list, err)
			}
			text, err := os.ReadFile(list[0])
			if err != nil {
				t.Fatal(err)
			}
			lines := c.do(bytes.SplitAfter(bytes.TrimSuffix(text, []byte("\n")), []byte("\n")))
			text = bytes.Join(lines, nil)
			if !bytes.HasSuffix(text, []byte("\n")) && name != "the last is cut" {
				text = append(text, '\n')
			}
			if err := os.WriteFile(list[0], text, 0o600); err != nil {
				t.Fatal(err)
			}
			_, r := read(t, n.dir)
			var got []string
			for _, b := range r.Breaks() {
				got = append(got, strings.TrimPrefix(b.String(), filepath.Base(list[0])+":"))
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("%s: got %q; want %q", name, got, c.want)
			}
			if torn := r.Torn() > 0; torn != (name == "the last is cut") {
				t.Errorf("%s: %d bytes are torn", name, r.Torn())
			}
		})
	}
}

// TestRotation: the files stay within their size, and from the first record that is left on the chain holds and the
// replay knows everything, across restarts of the process.
func TestRotation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const most = 64 << 10
		n := newNode(t, most)
		random := rand.New(rand.NewPCG(1, 1))
		for process := range 13 {
			n.run()
			for range 60 {
				n.commit(fmt.Sprintf("s%d", random.IntN(20)), fmt.Sprint(random.IntN(1000)), false)
				time.Sleep(10 * time.Millisecond)
			}
			if process%3 == 2 {
				n.crash()
			} else {
				n.stop()
			}
			if got := n.replayAll(); got < 20 {
				t.Errorf("the ledger knows of %d moments", got)
			}
		}
		list, r := read(t, n.dir)
		if len(r.Breaks()) > 0 || list[0].Number < 50 {
			t.Errorf("from record %d on: %v", list[0].Number, r.Breaks())
		}
		if list[0].Kind != Checkpoint {
			t.Errorf("the first segment begins with a %s", list[0].Kind)
		}
		files, _ := segments(n.dir)
		total := int64(0)
		for _, file := range files {
			info, err := os.Stat(file)
			if err != nil {
				t.Fatal(err)
			}
			total += info.Size()
		}
		if total > most || total < most/2 || total != n.Stats().Bytes {
			t.Errorf("%d files have %d bytes, the Writer says %d; there is room for %d", len(files), total, n.Stats().Bytes,
				most)
		}
	})
}

// TestSegmentWithoutRecord: if the writer ended before the first record of a segment was complete, or the disk lost it,
// the chain goes on from the segment before, and the files are in the order of their records.
func TestSegmentWithoutRecord(t *testing.T) {
	for _, c := range []struct {
		left   string
		breaks int
	}{{"", 0}, {`{"n":50,"at":`, 0}, {"garbage\n", 1}} {
		synctest.Test(t, func(t *testing.T) {
			n := newNode(t, 64<<10)
			fill := func() (files []string) {
				n.run()
				for i := range 60 {
					n.commit(fmt.Sprintf("s%d", i%20), fmt.Sprint(i), false)
					time.Sleep(10 * time.Millisecond)
				}
				time.Sleep(time.Second)
				n.stop()
				files, err := segments(n.dir)
				if err != nil || len(files) < 2 {
					t.Fatal(files, err)
				}
				return files
			}
			files := fill()
			if err := os.WriteFile(files[len(files)-1], []byte(c.left), 0o600); err != nil {
				t.Fatal(err)
			}
			before, _ := read(t, n.dir)
			fill()
			after, r := read(t, n.dir)
			if len(r.Breaks()) != c.breaks {
				t.Errorf("after %q: %v", c.left, r.Breaks())
			}
			for i, record := range after {
				if record.Number != before[0].Number+uint64(i) {
					t.Fatalf("after %q: record %d is number %d; before there were %d from %d on", c.left, i, record.Number,
						len(before), before[0].Number)
				}
			}
		})
	}
}

// crash ends a process in the middle of a line.
func (n *node) crash() {
	time.Sleep(time.Second)
	n.stop()
	list, _ := segments(n.dir)
	file := list[len(list)-1]
	text, err := os.ReadFile(file)
	if err != nil {
		n.t.Fatal(err)
	}
	text = text[:len(text)-10] // of the record of the stop
	if err := os.WriteFile(file, text, 0o600); err != nil {
		n.t.Fatal(err)
	}
}

// replayAll holds what the records say of each moment that they know of against what the kernel held, and returns how
// many moments they know.
func (n *node) replayAll() (known int) {
	n.t.Helper()
	list, _ := read(n.t, n.dir)
	p := NewReplay(newFake)
	for i, record := range list {
		p.Add(record)
		last := i+1 == len(list) || list[i+1].At.After(record.At)
		at, found := slices.BinarySearchFunc(n.times, record.At, time.Time.Compare)
		if !p.Known() || !last || record.Kind != Change || !found {
			continue
		}
		known++
		got, _ := p.State().Batch()
		if string(got) != n.held[at] {
			n.t.Errorf("record %d: the replay holds %q; the kernel %q", record.Number, got, n.held[at])
		}
	}
	return known
}

// TestGaps: what is written while no ledger is, what is dropped, and what the disk does not take is never part of an
// answer. The kernel is read once more, and then the ledger knows again.
func TestGaps(t *testing.T) {
	for name, gap := range map[string]func(n *node){
		"another process wrote": func(n *node) {
			n.stop()
			n.commit("x", "silent", true)
			n.run()
		},
		"the queue was full": func(n *node) {
			n.queuedBytes.Add(maxQueuedBytes)
			n.commit("x", "dropped", false)
			n.queuedBytes.Add(-maxQueuedBytes)
		},
		"the batch was too long": func(n *node) {
			n.commit("x", "long", true)
			n.Sent(make([]byte, maxBatch+1))
			n.committed(reconcile.Commit{Receipt: dataplane.Receipt{Added: 1}})
		},
		"the disk failed": func(n *node) {
			time.Sleep(time.Second)
			n.files.file.Close() // as good as a disk that fails
			n.commit("x", "1", false)
			time.Sleep(time.Second)
			n.commit("x", "2", false)
			time.Sleep(2 * diskPause)
		},
	} {
		synctest.Test(t, func(t *testing.T) {
			n := newNode(t, 1<<20)
			n.run()
			for i := range 5 {
				n.commit("a", fmt.Sprint(i), false)
				time.Sleep(time.Second)
			}
			n.unread = true
			gap(n)
			n.commit("b", "unknown", false)
			time.Sleep(time.Second)
			before := n.replayAll()
			n.mu.Lock()
			n.unread = false
			n.mu.Unlock()
			time.Sleep(2 * basePause)
			n.commit("c", "known", false)
			time.Sleep(time.Second)
			n.stop()
			if after := n.replayAll(); before != 5 || after != 6 {
				t.Errorf("%s: %d moments known before the kernel was read, %d after it; want 5 and 6", name, before, after)
			}
			list, r := read(t, n.dir)
			if len(r.Breaks()) > 0 {
				t.Errorf("%s: %v", name, r.Breaks())
			}
			i := slices.IndexFunc(list, func(r *Record) bool { return r.Kind == Lost })
			if want := name == "the queue was full" || name == "the disk failed"; (i >= 0) != want {
				t.Errorf("%s: record %d says that records are missing", name, i)
			}
		})
	}
}

// TestRemoved: a directory or a file that is removed, or moved away, while it is written takes no further record; the
// ones that it took are counted, and the ledger goes on in a new one.
func TestRemoved(t *testing.T) {
	for name, remove := range map[string]func(dir, file string) error{
		"the directory is removed": func(dir, _ string) error { return os.RemoveAll(dir) },
		"the directory is moved":   func(dir, _ string) error { return os.Rename(dir, dir+"-old") },
		"the file is removed":      func(_, file string) error { return os.Remove(file) },
		"the file is replaced": func(_, file string) error {
			return errors.Join(os.Remove(file), os.WriteFile(file, nil, 0o600))
		},
	} {
		synctest.Test(t, func(t *testing.T) {
			n := newNode(t, 1<<20)
			n.run()
			for i := range 5 {
				n.commit("a", fmt.Sprint(i), false)
			}
			time.Sleep(time.Second)
			before := n.Stats()
			if err := remove(n.dir, filepath.Join(n.dir, fmt.Sprintf(segmentFormat, 1))); err != nil {
				t.Fatal(err)
			}
			time.Sleep(2 * basePause) // it is noticed without a record
			if s := n.Stats(); s.Missing != before.Records || before.Records < 6 {
				t.Errorf("%s: %d records are missing; want %d", name, s.Missing, before.Records)
			}
			n.commit("b", "known", false)
			time.Sleep(time.Second)
			n.stop()
			list, r := read(t, n.dir)
			if len(r.Breaks()) > 0 || list[0].Kind != Lost || list[0].Missing != before.Records {
				t.Errorf("%s: it begins with %+v, %v", name, list[0], r.Breaks())
			}
			if known := n.replayAll(); known != 1 {
				t.Errorf("%s: %d moments are known after it", name, known)
			}
			if text := n.log.String(); strings.Count(text, "removed or replaced") != 1 || n.Stats().Error != "" {
				t.Errorf("%s: the log says %s, the status %q", name, text, n.Stats().Error)
			}
		})
	}
}

// TestPipe: what is no file is waited for by nobody, and the status says why nothing is written.
func TestPipe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, 1<<20)
		pipe := filepath.Join(n.dir, "ledger-000000000001.jsonl")
		if err := errors.Join(os.Mkdir(n.dir, 0o700), syscall.Mkfifo(pipe, 0o600)); err != nil {
			t.Fatal(err)
		}
		want := "ledger: " + pipe + ": not a regular file"
		n.run()
		n.commit("a", "1", false)
		time.Sleep(2 * diskPause)
		if s := n.Stats(); s.Missing != 2 || s.Error != want {
			t.Errorf("%d records are missing, since %q", s.Missing, s.Error)
		}
		if _, err := Open(n.dir, time.Time{}); err == nil || err.Error() != want {
			t.Errorf("%v", err)
		}
		if err := os.Remove(pipe); err != nil {
			t.Fatal(err)
		}
		n.commit("a", "2", false)
		time.Sleep(time.Second)
		n.stop()
		if list, _ := read(t, n.dir); len(list) < 3 || n.Stats().Error != "" {
			t.Errorf("%d records, error %q", len(list), n.Stats().Error)
		}
	})
}

// TestNeverBlocks: without anybody who writes, events cost a copy, and at most so many wait.
func TestNeverBlocks(t *testing.T) {
	n := newNode(t, 1<<20)
	n.Writer = New(Options{Dir: n.dir, MaxBytes: 1 << 20, Log: slog.New(slog.DiscardHandler)})
	for i := range 3 * maxQueued {
		n.commit("a", fmt.Sprint(i), false)
	}
	if s := n.Stats(); s.Missing != 2*maxQueued || len(n.queue) != maxQueued {
		t.Errorf("%d are missing, %d wait", s.Missing, len(n.queue))
	}
}

// TestBounds: objects by the thousand, with names as long as they may be, make a record of bounded length.
func TestBounds(t *testing.T) {
	n := newNode(t, 1<<20)
	n.Writer = New(Options{Dir: n.dir, MaxBytes: 1 << 20, Log: slog.New(slog.DiscardHandler)})
	d := snapshot.Delta{Slices: map[snapshot.Name]*snapshot.Slice{}}
	var after []*dataplane.Service
	for i := range 2000 {
		ns, name := strings.Repeat("n", 63), fmt.Sprintf("%0253d", i)
		d.Slices[snapshot.Name{Namespace: ns, Name: name}] = &snapshot.Slice{
			Name: snapshot.Name{Namespace: ns, Name: name}, Service: name[:63], Version: "123456789012345678901234567890"}
		after = append(after, &dataplane.Service{Name: snapshot.Name{Namespace: ns, Name: name[190:]}})
	}
	n.committed(reconcile.Commit{Before: make([]*dataplane.Service, len(after)), After: after,
		Cause: &reconcile.Cause{Delta: d}})
	n.transactionFailed(reconcile.Failure{Err: errors.New(strings.Repeat("x", 1<<20))})
	n.checked(reconcile.Check{Found: slices.Repeat([]string{strings.Repeat("y", 1<<20)}, 100)})
	for range 3 {
		e := <-n.queue
		line, err := e.line()
		if err != nil || len(line) > 40<<10 {
			t.Errorf("a record of %d bytes, error %v", len(line), err)
		}
		if e.Kind == Change && (e.MoreObjects != 2000-maxObjects || e.MoreServices != 2000-maxServices) {
			t.Errorf("%d more objects, %d more Services", e.MoreObjects, e.MoreServices)
		}
	}
}

// TestFirstObjects: a record names the first objects by kind and name, always the same ones, and says how many more
// there are.
func TestFirstObjects(t *testing.T) {
	names := func(n int) (out []snapshot.Name) {
		for i := range n {
			out = append(out, snapshot.Name{Namespace: fmt.Sprintf("ns%d", i%3), Name: fmt.Sprintf("s%04d", i)})
		}
		return out
	}
	for _, c := range []struct{ slices, health, services, want int }{
		{0, 0, 1, 1}, {2, 0, 0, 2}, {10, 3, 19, 32}, {10, 3, 20, 32}, {32, 0, 5, 32}, {33, 1, 0, 32}, {900, 900, 900, 32},
	} {
		cause := &reconcile.Cause{Delta: snapshot.Delta{Slices: map[snapshot.Name]*snapshot.Slice{},
			Health: map[snapshot.Name]*snapshot.Health{}, Services: map[snapshot.Name]*snapshot.Service{}}}
		var want []string
		for _, n := range names(c.slices) {
			cause.Delta.Slices[n] = &snapshot.Slice{Name: n}
			want = append(want, "EndpointSlice "+n.String())
		}
		for _, n := range names(c.health) {
			cause.Delta.Health[n] = &snapshot.Health{}
			want = append(want, "Health "+n.String())
		}
		for _, n := range names(c.services) {
			n.Name = "gone-" + n.Name
			cause.Delta.Merge(snapshot.Delta{Services: map[snapshot.Name]*snapshot.Service{n: nil}})
			want = append(want, "Service "+n.String()+" gone")
		}
		slices.Sort(want)
		for range 5 {
			var r Record
			r.explain(cause)
			var got []string
			for i := range r.Objects {
				got = append(got, r.Objects[i].String())
			}
			if !slices.Equal(got, want[:c.want]) || r.MoreObjects != len(want)-c.want {
				t.Fatalf("%+v: got %q and %d more", c, got, r.MoreObjects)
			}
		}
	}
}
