package reconcile

import (
	"strings"
	"time"
)

// CheckEvery is how often the loop checks for foreign changes, besides once after each transaction. The Writer may ask
// for another interval. A foreign change is noticed and repaired within a second, even if the loop is busy for as long
// as CheckEvery.
const CheckEvery = 500 * time.Millisecond

// checkRoom is longer than a Check takes.
const checkRoom = 20 * time.Millisecond

// maxFindings bounds the line in the log. If somebody flushes our tables, everything is a finding.
const maxFindings = 8

// check looks once for foreign changes. The next transaction repairs what it finds.
func (l *Loop) check() {
	begin := time.Now()
	l.busy.Store(&begin)
	found, again, err := l.Writer.Check()
	l.busy.Store(nil)
	if again <= 0 {
		again = CheckEvery
	}
	l.checkAt = time.Now().Add(again)
	notify(l, func(h *Listener) func(Check) { return h.Checked }, Check{found, err})
	if err != nil && !l.checkFailed {
		l.Log.Warn("failed to check the tables for changes by other programs", "err", err)
	}
	l.checkFailed = err != nil
	if len(found) > 0 {
		l.foreign += len(found)
		l.Log.Warn("another program changed Verdict's tables; repairing", "changes", len(found),
			"first", strings.Join(found[:min(len(found), maxFindings)], "; "))
	}
}

// checkNow says whether to check although there is something to write. It does so if the check is due and the rest
// after the last transaction is long enough for it, since changes wait during that rest anyway. If the rests are always
// short, it does so once the check is overdue by CheckEvery.
func (l *Loop) checkNow(rested time.Time) bool {
	now := time.Now()
	if l.dirty || now.Before(l.checkAt) {
		return false
	}
	return rested.Sub(now) >= checkRoom || now.Sub(l.checkAt) > CheckEvery
}
