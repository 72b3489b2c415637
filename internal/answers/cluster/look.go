package cluster

import (
	"fmt"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/internal/proxy/status"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
)

// Level says whether somebody should look at a node.
type Level int

const (
	// InOrder is a node that does what it should.
	InOrder Level = iota
	// Watch is one in order, of which there is something to say.
	Watch
	// Wrong is one that is not in order.
	Wrong
)

// Reason is one thing to say of a node.
type Reason struct {
	Level Level
	Text  string
}

// slow is the lag from which on a node is worth a look: changes of others settle in this time.
const slow = settle

// Look says for each node what there is to say of it, the worst first. A node whose level is not Wrong is in order,
// wherever nodes are shown or counted.
func (r *Report) Look() [][]Reason {
	differs := map[string]int{}
	for _, d := range r.Differences {
		for _, n := range d.Nodes {
			differs[n]++
		}
	}
	looks := make([][]Reason, len(r.Nodes))
	for i, n := range r.Nodes {
		if n.Status == nil {
			looks[i] = []Reason{{Wrong, n.Error}}
			continue
		}
		all := reasonsOf(n.Status)
		if d := differs[n.Node]; d > 0 {
			all = append(all, Reason{Wrong, "differs from the others in " + terminal.Plural(d, "Service")})
		}
		if lag := n.Status.Pending.LagSeconds; lag > slow.Seconds() && LevelOf(all) < Wrong {
			all = append(all, Reason{Watch, fmt.Sprintf("changes wait for %.1f s", lag)})
		}
		if e := n.Status.Ejected.Count; e > 0 {
			all = append(all, Reason{Watch, terminal.Plural(e, "endpoint") + " ejected"})
		}
		for level := Wrong; level >= Watch; level-- {
			for _, reason := range all {
				if reason.Level == level {
					looks[i] = append(looks[i], reason)
				}
			}
		}
	}
	return looks
}

// LevelOf returns the level of the worst of the reasons.
func LevelOf(reasons []Reason) (level Level) {
	for _, r := range reasons {
		level = max(level, r.Level)
	}
	return level
}

// reasonsOf lists what a node itself says of itself, but for what a number of a table says.
func reasonsOf(s *status.Status) (list []Reason) {
	say := func(level Level, format string, args ...any) {
		list = append(list, Reason{level, fmt.Sprintf(format, args...)})
	}
	if s.First == nil {
		say(Wrong, "has not programmed all Services yet")
	}
	if s.Failing != nil {
		say(Wrong, "transactions fail since %s: %s", timeOfDay(s.Failing.Since), s.Failing.Error)
	}
	if lag := s.Pending.LagSeconds; s.Failing == nil && lag >= status.Late.Seconds() {
		say(Wrong, "changes wait for %.0f s", lag)
	}
	for _, q := range s.Quarantined.Services {
		say(Wrong, "rejects %s since %s: %s", q.Service, timeOfDay(q.Since), q.Error)
	}
	if more := s.Quarantined.Count - len(s.Quarantined.Services); more > 0 {
		say(Wrong, "rejects %s that are not named here", terminal.Plural(more, "Service"))
	}
	d := &s.Drift
	if d.Error != "" {
		say(Wrong, "the check of the tables fails: %s", d.Error)
	}
	if d.FoundAt != nil && (d.Open() || s.Time.Sub(*d.FoundAt) < time.Minute) {
		level, state := Wrong, "not repaired yet"
		if !d.Open() {
			level, state = Watch, "repaired"
		}
		say(level, "another program changed the tables at %s (%s): %s", timeOfDay(*d.FoundAt), state,
			strings.Join(d.Last, "; "))
	}
	if s.Ledger != nil && s.Ledger.Missing > 0 {
		say(Watch, "its ledger misses %s", terminal.Plural(int(s.Ledger.Missing), "record"))
	}
	return list
}
