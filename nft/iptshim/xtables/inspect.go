package xtables

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/internal/ipfamily"
	"github.com/verdict-proxy/verdict/nft/iptshim"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// What others change is looked for by reading all tables, which takes a second and more where there are many rules. So
// that is done beside the loop: at once if the watch says that there may be something, else every now and then, and
// never for more than a part of the time.
const (
	// inspectEvery is the time between two looks if the watch saw nothing.
	inspectEvery = time.Minute
	// inspectRest is how many times as long as a look took there is no other one.
	inspectRest = 10
	// inspectAgain is how soon Check wants to be called while a look is under way.
	inspectAgain = 20 * time.Millisecond
	// staleMost is how many looks in a row may come to nothing because we wrote meanwhile. After that many, a transaction
	// waits until all is read.
	staleMost = 10
)

// inspection is the reading of all tables, beside the loop.
type inspection struct {
	// result is where a look under way will put what it found, and end ends it before; nil if there is none.
	result chan inspected
	end    context.CancelFunc
	// stale says that we wrote since the look began, and empty how many looks in a row came to nothing for that.
	stale bool
	empty int
	// suspect says that others have written, and it was not looked at yet what; suspected that the look under way began
	// for that.
	suspect, suspected bool
	// whole is how long it took to read all tables last. Next is when there may be another look, and due when there is to
	// be one.
	whole     time.Duration
	next, due time.Time
}

// inspected is what a look found: a model that believes it.
type inspected struct {
	model *iptshim.Model
	took  time.Duration
	err   error
}

// read takes note that all tables were read, and how long it took.
func (i *inspection) read(took time.Duration) {
	i.whole, i.empty = took, 0
	i.rest()
	i.due = time.Now().Add(max(inspectEvery, inspectRest*took))
}

// rest puts off the next look.
func (i *inspection) rest() { i.next = time.Now().Add(inspectRest * i.whole) }

// overtake ends a look under way: what it finds would be neither what there was nor what we write now.
func (i *inspection) overtake() {
	if i.stale = true; i.end != nil {
		i.end()
	}
}

// wait waits for a look under way.
func (i *inspection) wait() {
	if i.result != nil {
		<-i.result
	}
}

// Check looks whether somebody else changed our rules, and says in words what it found: the next Apply repairs it. It
// does not wait for what takes long, but asks to be called again.
func (b *Backend) Check() (found []string, again time.Duration, err error) {
	if b.trust != certain { // the next Apply will look
		return nil, 0, nil
	}
	i := &b.inspection
	if i.result != nil {
		select {
		case r := <-i.result:
			i.end()
			i.result, i.end = nil, nil
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
	i := &b.inspection
	result := make(chan inspected, 1)
	ctx, cancel := context.WithCancel(b.ctx)
	i.result, i.end, i.stale, i.suspect, i.suspected = result, cancel, false, false, i.suspect
	go func() {
		start := time.Now()
		r := inspected{model: iptshim.New(b.options.Model)}
		for _, f := range ipfamily.All {
			if r.err == nil && b.programs.Serves(f) {
				var saved *iptshim.Saved
				if saved, r.err = b.programs.SaveAll(ctx, f); r.err == nil && ctx.Err() == nil {
					r.model.Adopt(f, saved)
				}
			}
		}
		r.took = time.Since(start)
		result <- r
	}()
}

// inspected compares what a look found with what should be there.
func (b *Backend) inspected(r *inspected) (found []string, err error) {
	i := &b.inspection
	switch {
	case i.stale: // nothing is known of what others did
		i.empty++
		i.suspect = i.suspect || i.suspected || i.empty > staleMost
		i.rest()
		i.due = i.next
		return nil, nil
	case r.err != nil:
		i.suspect = true
		i.rest()
		return nil, r.err
	}
	i.read(r.took)
	if txn := r.model.Plan(b.want, dataplane.Change{}); !txn.Empty() {
		for _, f := range ipfamily.All {
			if b.programs.Serves(f) {
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
func wrong(f ipfamily.Family, text []byte) (found []string) {
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
