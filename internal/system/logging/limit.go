// Package logging limits the number of log lines that objects of the cluster can provoke, and reports how many lines
// were dropped. So the log stays readable and the disk free.
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

// A bucket holds burst lines and gets one more each interval, up to burst. Each line takes one from the bucket of
// similar lines, and one from that of all lines of its severity. Errors have their own bucket, so that warnings, of
// which the authors of objects can provoke any number, leave room for them.
const (
	burst    = 100
	interval = time.Second
	// allBurst and allInterval apply to all lines of a severity.
	allBurst    = 1000
	allInterval = 100 * time.Millisecond
	// maxKinds bounds the number of buckets for similar lines; further kinds share one.
	maxKinds = 512
)

const (
	// sumEvery is the interval of the summaries of dropped lines.
	sumEvery = 10 * time.Second
	// maxSummed bounds how many kinds of lines a summary names.
	maxSummed = 4
	// maxKind bounds the length of a kind's text, and maxMessage that of a message.
	maxKind    = 64
	maxMessage = 4096
)

// Limit is a slog.Handler that limits the lines that reach the next one. It passes all lines below Info, which only the
// operator asks for. It limits the others, so that one source of many lines crowds out neither others nor errors. After
// every ten seconds in which it dropped lines, it logs how many and of what kinds. Make one with NewLimit.
//
// Lines are similar if they have the same level and the same message up to its first '/' or ':': so all lines about the
// objects of one namespace are similar.
type Limit struct {
	next slog.Handler
	*limits
}

// limits is the state that a Limit shares with the Limits from its WithAttrs and WithGroup.
type limits struct {
	// root is the Handler that writes the summaries.
	root slog.Handler
	left atomic.Uint64

	mu sync.Mutex
	// all are the buckets of severities: errors, others. kinds are those of similar lines.
	all   [2]bucket
	kinds map[kind]*bucket
	// pruned is when full buckets were last removed from kinds.
	pruned time.Time
	// skipped counts the lines dropped since the time since, and others those of kinds that have no room there.
	skipped map[kind]int
	others  int
	since   time.Time
}

type kind struct {
	level slog.Level
	text  string
}

// NewLimit returns a Limit in front of a Handler.
func NewLimit(next slog.Handler) *Limit {
	return &Limit{next, &limits{root: next, kinds: map[kind]*bucket{}}}
}

// LeftOut returns the number of lines dropped since the start. Safe for concurrent use.
func (l *Limit) LeftOut() uint64 { return l.left.Load() }

// Enabled asks the next Handler.
func (l *Limit) Enabled(ctx context.Context, level slog.Level) bool {
	return l.next.Enabled(ctx, level)
}

// WithAttrs returns a Limit that shares this one's limits.
func (l *Limit) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &Limit{l.next.WithAttrs(attrs), l.limits}
}

// WithGroup returns a Limit that shares this one's limits.
func (l *Limit) WithGroup(name string) slog.Handler { return &Limit{l.next.WithGroup(name), l.limits} }

// Handle passes a line on, or drops and counts it.
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

// bucket returns the bucket of a kind. Full buckets are removed at most once an interval: none gets full sooner, and
// checking all of them for each line of a flood would cost more than writing the line.
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

// skip counts a dropped line, and schedules a summary.
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

// tell logs a summary of what was dropped.
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

// summary says how many lines were dropped, and of what kinds most.
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

// has says whether a bucket of some size, which gets one more each interval, has a token left.
func (b *bucket) has(now time.Time, size int, each time.Duration) bool {
	b.refill(now, each)
	return b.used < size
}

// full says whether no token is missing.
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
