package xtables

import (
	"fmt"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/nft/iptshim"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// What others change is looked for by reading all tables, which takes a second and more where there are many rules. So that
// is done beside the loop: at once if the watch says that there may be something, else every now and then, and never for more than a
// part of the time.
const (
	// inspectEvery is the time between two looks if the watch saw nothing.
	inspectEvery = time.Minute
	// inspectRest is how many times as long as a look took there is no other one.
	inspectRest = 10
	// inspectAgain is how soon Check wants to be called while a look is under way.
	inspectAgain = 20 * time.Millisecond
)

// inspection is the reading of all tables, beside the loop.
type inspection struct {
	// result is where a look under way will put what it found; nil if there is none.
	result chan inspected
	// stale says that something was written since the look began.
	stale bool
	// suspect says that others have written, and it was not looked at yet what.
	suspect bool
	// next is when there may be another look, and due when there is to be one.
	next, due time.Time
}

// inspected is what a look found.
type inspected struct {
	saved [len(iptshim.Families)]*iptshim.Saved
	took  time.Duration
	err   error
}

// rest puts off the next look after one that took so long.
func (i *inspection) rest(took time.Duration) {
	now := time.Now()
	i.next, i.due = now.Add(inspectRest*took), now.Add(max(inspectEvery, inspectRest*took))
}

// wait waits for a look under way.
func (i *inspection) wait() {
	if i.result != nil {
		<-i.result
	}
}

// Check looks whether somebody else changed our rules, and says in words what it found: the next Apply repairs it. It does not wait for
// what takes long, but asks to be called again.
func (b *Backend) Check() (found []string, again time.Duration, err error) {
	if b.trust != certain { // the next Apply will look
		return nil, 0, nil
	}
	i := &b.inspection
	if i.result != nil {
		select {
		case r := <-i.result:
			i.result = nil
			if found, err = b.inspected(&r); err != nil || len(found) > 0 {
				return found, 0, err
			}
		default:
			return nil, inspectAgain, nil
		}
	}
	seen, err := b.watch.look(b.served())
	if err != nil {
		return nil, 0, err
	}
	i.suspect = i.suspect || seen != b.seen
	b.seen = seen
	if now := time.Now(); now.Before(i.next) || !i.suspect && now.Before(i.due) {
		return nil, 0, nil
	}
	b.inspect()
	return nil, inspectAgain, nil
}

// inspect begins a look.
func (b *Backend) inspect() {
	result := make(chan inspected, 1)
	b.inspection.result, b.inspection.stale, b.inspection.suspect = result, false, false
	go func() {
		start := time.Now()
		r := inspected{}
		for _, f := range iptshim.Families {
			if r.err == nil && b.programs.Serves(f) {
				r.saved[f], r.err = b.programs.SaveAll(b.ctx, f)
			}
		}
		r.took = time.Since(start)
		result <- r
	}()
}

// inspected compares what a look found with what should be there.
func (b *Backend) inspected(r *inspected) (found []string, err error) {
	b.inspection.rest(r.took)
	if r.err != nil || b.inspection.stale { // nothing is known of what others did
		b.inspection.suspect = true
		return nil, r.err
	}
	model := iptshim.New(b.options.Model)
	for _, f := range iptshim.Families {
		if r.saved[f] != nil {
			model.Adopt(f, r.saved[f])
		}
	}
	if txn := model.Plan(b.want, dataplane.Change{}); !txn.Empty() {
		for _, f := range iptshim.Families {
			if r.saved[f] != nil {
				found = append(found, wrong(f, txn.Text(f))...)
			}
		}
	}
	giveBack(b.want)
	if len(found) > 0 {
		b.trust = doubtful
	}
	return found, nil
}

// wrong says in words what a text would repair.
func wrong(f iptshim.Family, text []byte) (found []string) {
	table := ""
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		word, rest, _ := strings.Cut(line, " ")
		switch {
		case strings.HasPrefix(line, "*"):
			table = line[1:]
		case strings.HasPrefix(line, ":"):
			found = append(found, fmt.Sprintf("%s %s: chain %s is not as it was written", f, table, word[1:]))
		case word == "-I":
			found = append(found, fmt.Sprintf("%s %s: the rule %q is gone", f, table, rest))
		}
	}
	return found
}
