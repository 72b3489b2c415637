package reconcile

import (
	"strings"
	"time"
)

// CheckEvery is how often the loop has the backend look for what others changed, unless the backend asks for another time: so
// a change is noticed, and repaired, within a second, even if the loop is busy for as long again.
const CheckEvery = 500 * time.Millisecond

// maxFindings bounds the line in the log: when somebody flushes our tables, everything is a finding.
const maxFindings = 8

// check looks once for what others changed. What it finds, the next transaction repairs.
func (l *Loop) check() {
	found, again, err := l.Backend.Check()
	if again <= 0 {
		again = CheckEvery
	}
	l.checkAt = time.Now().Add(again)
	if err != nil && !l.blind {
		l.Log.Warn("what others change in our tables goes unnoticed for now", "err", err)
	}
	l.blind = err != nil
	if len(found) > 0 {
		l.foreign += len(found)
		l.Log.Warn("somebody else changed our tables; they are repaired", "changes", len(found),
			"first", strings.Join(found[:min(len(found), maxFindings)], "; "))
	}
}

// starved says that changes have come for so long, one right after another, that a Check is overdue by as long as it may wait.
// Then it has its turn in the rest after a transaction, when changes have to wait anyway.
func (l *Loop) starved() bool {
	return !l.behind && time.Since(l.checkAt) > CheckEvery
}
