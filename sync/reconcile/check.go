package reconcile

import (
	"strings"
	"time"
)

// CheckEvery is how often the loop has the Writer look for what others changed, besides once after each transaction,
// unless the Writer asks for another time: so a change is noticed, and repaired, within a second, even if the loop is
// busy for as long again.
const CheckEvery = 500 * time.Millisecond

// checkRoom is a rest that a Check does not exceed.
const checkRoom = 20 * time.Millisecond

// maxFindings bounds the line in the log: when somebody flushes our tables, everything is a finding.
const maxFindings = 8

// check looks once for what others changed. What it finds, the next transaction repairs.
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
		l.Log.Warn("what others change in our tables goes unnoticed for now", "err", err)
	}
	l.checkFailed = err != nil
	if len(found) > 0 {
		l.foreign += len(found)
		l.Log.Warn("somebody else changed our tables; they are repaired", "changes", len(found),
			"first", strings.Join(found[:min(len(found), maxFindings)], "; "))
	}
}

// checkNow says whether a Check should be made though there is something to write, where changes come one right after
// another. It should if it is due and the rest after a transaction, in which changes have to wait anyway, is long
// enough for it; and, so that short rests do not put it off for ever, if it is overdue by as long as it may wait.
func (l *Loop) checkNow(rested time.Time) bool {
	now := time.Now()
	if l.dirty || now.Before(l.checkAt) {
		return false
	}
	return rested.Sub(now) >= checkRoom || now.Sub(l.checkAt) > CheckEvery
}
