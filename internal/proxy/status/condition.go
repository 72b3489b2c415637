package status

import "time"

// ConditionType is the type of the condition that a node's proxy gives its Node object.
const ConditionType = "ServicesProgrammed"

// Statuses of a Condition.
const (
	True    = "True"
	False   = "False"
	Unknown = "Unknown"
)

// Condition says whether the node's Services are programmed. The zero Condition says nothing.
type Condition struct {
	// Status is True, False or Unknown; Reason is a word, Message a sentence without anything that tenants write.
	Status, Reason, Message string
}

// Stopped is the Condition of a node whose proxy ends and has no successor.
var Stopped = Condition{Unknown, "Stopped", "the proxy of this node has stopped; changes are not programmed"}

// Facts are what a Judge looks at. Zero times mean: not yet, or not at all.
type Facts struct {
	// Started is when the proxy started, and First when all Services were programmed first.
	Started, First time.Time
	// Waiting is since when the oldest change waits. Changes of a namespace that waits for its turn do not count: no
	// tenant is to change what the node says of itself. Failing is since when transactions fail.
	Waiting, Failing time.Time
}

const (
	// Late is how long changes wait, or transactions fail, before the node's Services do not count as programmed.
	Late = 30 * time.Second
	// calm is the longest wait of a change on a node that is well, and steady how long it must be well before its Services
	// count as programmed again. So the Condition changes twice a minute at most.
	calm   = 10 * time.Second
	steady = 30 * time.Second
)

// Judge decides what the Condition of a node is. It changes only with its Status: a reason lasts as long as that. The
// zero Judge has seen nothing.
type Judge struct {
	last Condition
	// well is since when the node is well; zero if it is not.
	well time.Time
}

// Look returns the Condition; the zero Condition as long as a proxy starts as it should.
func (j *Judge) Look(now time.Time, f Facts) Condition {
	next := f.trouble(now)
	switch {
	case next.Status != "":
		j.well = time.Time{}
	case f.First.IsZero() || !f.Failing.IsZero() || age(now, f.Waiting) >= calm:
		j.well = time.Time{}
		return j.last
	default:
		if j.well.IsZero() {
			j.well = now
		}
		if j.last.Status == False && now.Sub(j.well) < steady {
			return j.last
		}
		next = Condition{True, "Programmed", "every change that the API server has sent is programmed"}
	}
	if next.Status != j.last.Status {
		j.last = next
	}
	return j.last
}

// trouble returns the Condition of a node that is in trouble for long enough, and else the zero Condition.
func (f Facts) trouble(now time.Time) Condition {
	const form = "2006-01-02T15:04:05Z"
	switch {
	case age(now, f.Failing) >= Late:
		return Condition{False, "TransactionsFail",
			"transactions fail since " + f.Failing.UTC().Format(form) + "; the log of the proxy says why"}
	case age(now, f.Waiting) >= Late:
		return Condition{False, "Behind", "changes wait since " + f.Waiting.UTC().Format(form) + " to be programmed"}
	case f.First.IsZero() && f.Waiting.IsZero() && now.Sub(f.Started) >= Late:
		return Condition{Unknown, "NotListed", "the proxy has not read all objects of the API yet; its log says why"}
	}
	return Condition{}
}

// age returns how long something lasts; 0 if it does not.
func age(now, since time.Time) time.Duration {
	if since.IsZero() {
		return 0
	}
	return now.Sub(since)
}
