// Package logging keeps the log readable, and the disk free, whatever others have the proxy say: what objects of the
// cluster can provoke is limited in number, and what was left out is counted and told.
package logging

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// A bucket holds burst lines and gets one more each interval, up to burst. Each line takes one from the bucket of lines
// like it, and one from that of all lines of its severity: errors have their own, so that warnings, of which the
// authors of objects can provoke any number, leave room for them.
const (
	burst    = 100
	interval = time.Second
	// allBurst and allInterval are for all lines of a severity.
	allBurst    = 1000
	allInterval = 100 * time.Millisecond
	// maxKinds bounds how many buckets there are for lines that are alike; the others share one.
	maxKinds = 512
)

const (
	// sumEvery is how often it is told what was left out.
	sumEvery = 10 * time.Second
	// maxSummed bounds how many kinds of lines a summary names.
	maxSummed = 4
	// maxKind bounds what a kind is told by, and maxMessage how much of a message is written.
	maxKind    = 64
	maxMessage = 4096
)

// Limit is a slog.Handler before another one. It writes all lines below Info, which only the operator asks for, and of
// the others so many that one who provokes many crowds out neither others nor errors. Every ten seconds in which lines
// were left out it writes one that says how many, and of what kinds. Make one with NewLimit.
//
// Lines are alike if they have the same level and message, up to the first '/' or ':' of it: so all that is said of the
// objects of one namespace is alike.
type Limit struct {
	next slog.Handler
	*limits
}

// limits is what a Limit shares with those that WithAttrs and WithGroup make of it.
type limits struct {
	// root is what summaries are written by.
	root slog.Handler
	left atomic.Uint64

	mu sync.Mutex
	// all are the buckets of severities: errors, others. kinds are those of lines that are alike.
	all   [2]bucket
	kinds map[kind]*bucket
	// pruned is when full buckets were last dropped from kinds.
	pruned time.Time
	// skipped counts what was left out since the time since, and others that of kinds that have no room there.
	skipped map[kind]int
	others  int
	since   time.Time
}

type kind struct {
	level slog.Level
	text  string
}

// NewLimit gives a Limit before a Handler.
func NewLimit(next slog.Handler) *Limit {
	return &Limit{next, &limits{root: next, kinds: map[kind]*bucket{}}}
}

// LeftOut counts the lines that were left out since the start. Safe for concurrent use.
func (l *Limit) LeftOut() uint64 { return l.left.Load() }

// Enabled is the next Handler's.
func (l *Limit) Enabled(ctx context.Context, level slog.Level) bool {
	return l.next.Enabled(ctx, level)
}

// WithAttrs gives a Limit that counts together with this one.
func (l *Limit) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &Limit{l.next.WithAttrs(attrs), l.limits}
}

// WithGroup gives a Limit that counts together with this one.
func (l *Limit) WithGroup(name string) slog.Handler { return &Limit{l.next.WithGroup(name), l.limits} }

// Handle writes a line, or counts it.
func (l *Limit) Handle(ctx context.Context, r slog.Record) error {
	if r.Level >= slog.LevelInfo && !l.admit(kindOf(r), time.Now()) {
		l.left.Add(1)
		return nil
	}
	if len(r.Message) > maxMessage {
		cut := slog.NewRecord(r.Time, r.Level, strings.ToValidUTF8(r.Message[:maxMessage], "")+"...", r.PC)
		r.Attrs(func(a slog.Attr) bool { cut.AddAttrs(a); return true })
		r = cut
	}
	return l.next.Handle(ctx, r)
}

func kindOf(r slog.Record) kind {
	text := r.Message
	if i := strings.IndexAny(text, "/:"); i >= 0 {
		text = text[:i]
	}
	return kind{r.Level, strings.ToValidUTF8(text[:min(len(text), maxKind)], "")}
}

// admit says whether a line may be written.
func (l *limits) admit(k kind, now time.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	all := &l.all[0]
	if k.level < slog.LevelError {
		all = &l.all[1]
	}
	own := l.bucket(k, now)
	if own.has(now, burst, interval) && all.has(now, allBurst, allInterval) {
		own.used++
		all.used++
		return true
	}
	l.skip(k, now)
	return false
}

// bucket gives the bucket of a kind. One that is full again is as good as none; no bucket gets full in less than an
// interval, and looking at all of them for each line of a flood would cost more than writing it.
func (l *limits) bucket(k kind, now time.Time) *bucket {
	if b := l.kinds[k]; b != nil {
		return b
	}
	if len(l.kinds) >= maxKinds && now.Sub(l.pruned) >= interval {
		l.pruned = now
		maps.DeleteFunc(l.kinds, func(_ kind, b *bucket) bool { return b.full(now, interval) })
	}
	if len(l.kinds) >= maxKinds {
		k = kind{level: k.level}
	}
	b := l.kinds[k]
	if b == nil {
		b = &bucket{}
		l.kinds[k] = b
	}
	return b
}

// skip counts a line that is left out, and sees to it that this will be told.
func (l *limits) skip(k kind, now time.Time) {
	if l.skipped == nil {
		l.skipped, l.since = map[kind]int{}, now
		time.AfterFunc(sumEvery, l.tell)
	}
	if _, known := l.skipped[k]; known || len(l.skipped) < maxKinds {
		l.skipped[k]++
	} else {
		l.others++
	}
}

// tell writes what was left out.
func (l *limits) tell() {
	l.mu.Lock()
	now := time.Now()
	text, span := l.summary(), now.Sub(l.since)
	l.skipped, l.others = nil, 0
	l.mu.Unlock()
	r := slog.NewRecord(now, slog.LevelWarn, fmt.Sprintf("left out %s", text), 0)
	r.AddAttrs(slog.Duration("within", span.Round(time.Second)))
	_ = l.root.Handle(context.Background(), r) // there is nowhere to say that the log cannot be written
}

// summary says how many lines were left out, and of what kinds most.
func (l *limits) summary() string {
	kinds := slices.SortedFunc(maps.Keys(l.skipped), func(a, b kind) int {
		if n := l.skipped[b] - l.skipped[a]; n != 0 {
			return n
		}
		return strings.Compare(a.text, b.text)
	})
	sum, named := l.others, 0
	for _, k := range kinds {
		sum += l.skipped[k]
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%d lines", sum)
	for i, k := range kinds[:min(len(kinds), maxSummed)] {
		sep := ", "
		if i == 0 {
			sep = ": "
		}
		fmt.Fprintf(&b, "%s%d of level %v like %q", sep, l.skipped[k], k.level, k.text)
		named += l.skipped[k]
	}
	if rest := sum - named; rest > 0 {
		fmt.Fprintf(&b, ", and %d of other kinds", rest)
	}
	return b.String()
}

// bucket is a token bucket that counts what was taken, so that its zero value is full.
type bucket struct {
	used int
	at   time.Time
}

// has says whether something is left in a bucket of some size that gets one more each interval.
func (b *bucket) has(now time.Time, size int, each time.Duration) bool {
	b.refill(now, each)
	return b.used < size
}

// full says whether nothing is missing.
func (b *bucket) full(now time.Time, each time.Duration) bool {
	b.refill(now, each)
	return b.used == 0
}

func (b *bucket) refill(now time.Time, each time.Duration) {
	if n := int(now.Sub(b.at) / each); b.used > 0 && n < b.used {
		b.used, b.at = b.used-n, b.at.Add(time.Duration(n)*each)
		return
	}
	b.used, b.at = 0, now
}
