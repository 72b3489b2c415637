package stories

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/verdict-proxy/verdict/conformance/cluster"
	"github.com/verdict-proxy/verdict/internal/lab/blackbox"
)

// Story is one event.
type Story struct {
	// Name is what the table calls it.
	Name string
	// NeedsOld says that the nodes must have the older image.
	NeedsOld bool
	// UnderKubeProxy says that kube-proxy has the nodes meanwhile; Moves, that the story leads there, or back.
	UnderKubeProxy, Moves bool
	// Refused says that connections fail, since no endpoint is ready for a time: how many is what the story tells.
	Refused bool
	// Do makes it happen, and returns when it is over. Afterwards the cluster is as it was.
	Do func(context.Context, *Bed) error
}

// Row is what came of a story.
type Row struct {
	Name string
	// Report is the sum of all clients' reports.
	cluster.Report
	// OfCluster is how many of those that failed did so while no endpoint was ready by the EndpointSlices: failures of
	// the cluster, and not of the proxy. WithoutEndpoints says when that was.
	OfCluster        int
	WithoutEndpoints []string
	// Took is how long the story lasted.
	Took time.Duration
	// Unowned is the longest time in which tables of a node had no owner.
	Unowned time.Duration
	// Causes are how many connections failed for which cause, and Explained why the first of each failed.
	Causes    map[string]int
	Explained []string
	// Err says why the story could not be told to its end.
	Err error
}

// settle is how long clients go on after a story: so late may a connection fail that began in it.
const settle = 6 * time.Second

// Run tells a story and counts what clients see meanwhile.
func (b *Bed) Run(ctx context.Context, s Story) Row {
	row := Row{Name: s.Name}
	if row.Err = b.settled(ctx); row.Err != nil {
		row.Err = fmt.Errorf("the cluster did not settle before: %w", row.Err)
		return row
	}
	before, err := b.reports(ctx)
	if err != nil {
		row.Err = err
		return row
	}
	b.changes.note("begin: %s", s.Name)
	stop := make(chan struct{})
	unowned := b.watchOwners(stop)
	b.watch.explain() // what failed before is no part of this story
	b.watch.box.Note("story: %s", s.Name)
	start := time.Now()
	row.Err = s.Do(ctx, b)
	row.Took = time.Since(start)
	select {
	case <-ctx.Done():
	case <-time.After(settle):
	}
	close(stop)
	row.Unowned = unowned()
	after, err := b.reports(ctx)
	if row.Err == nil {
		row.Err = err
	}
	for name, r := range after {
		row.add(name, before[name], r)
	}
	row.Causes, row.Explained = b.watch.explain()
	b.away = nil
	row.judge(b.changes, b.watch.box.WithoutEndpoints("default/echo", start))
	return row
}

// judge tells the cluster's failures, while the servers' Service had no endpoint, from others, and writes all to the
// record.
func (r *Row) judge(rec *record, without []blackbox.Span) {
	r.OfCluster = r.ofCluster(without)
	for _, s := range without {
		text := "from " + s.From.Format("15:04:05.000")
		if !s.To.IsZero() {
			text += " to " + s.To.Format("15:04:05.000")
		}
		r.WithoutEndpoints = append(r.WithoutEndpoints, text)
	}
	for i := range r.Failures {
		rec.note("%v", &r.Failures[i])
	}
	rec.note("end: %s: %d connections, %d failed, %d of them without a ready endpoint, %d broke, %v", r.Name,
		r.Connections, r.Failed, r.OfCluster, r.Broken, r.Err)
}

// ofCluster counts the connections that failed within one of the times, or so shortly after that proxies need not know
// yet.
func (r *Row) ofCluster(without []blackbox.Span) (n int) {
	for i := range r.Failures {
		f := &r.Failures[i]
		if !f.Held && slices.ContainsFunc(without, func(s blackbox.Span) bool {
			return !f.Failed.Before(s.From) && (s.To.IsZero() || f.Failed.Before(s.To.Add(settle)))
		}) {
			n++
		}
	}
	return n
}

func (r *Row) add(name string, before, after cluster.Report) {
	if before.Started != after.Started {
		// A client that has started again has nothing in common with the one before. It began on a node without a proxy.
		return
	}
	r.Connections += after.Connections - before.Connections
	r.Failed += after.Failed - before.Failed
	r.Broken += after.Broken - before.Broken
	for _, f := range after.Failures[max(0, len(after.Failures)-(after.Noted-before.Noted)):] {
		f.From = name
		r.Failures = append(r.Failures, f)
	}
}

// opened lists the failures of connections that were opened, without those that were held.
func (r *Row) opened() (all []string) {
	for _, f := range r.Failures {
		if !f.Held {
			all = append(all, f.String())
		}
	}
	return all
}

// watchOwners watches all nodes but the one that is away; the function it returns waits and returns the longest time.
func (b *Bed) watchOwners(stop <-chan struct{}) func() time.Duration {
	var wait sync.WaitGroup
	times := make([]time.Duration, len(b.Nodes))
	for i, n := range b.Nodes {
		wait.Go(func() {
			longest, err := n.WatchOwner(stop)
			if err != nil {
				b.Log("%s: %v", n.Name, err)
			}
			times[i] = longest
		})
	}
	return func() (longest time.Duration) {
		wait.Wait()
		for _, t := range times {
			longest = max(longest, t)
		}
		return longest
	}
}

// Table prints rows as Markdown.
func Table(rows []Row) string {
	var b strings.Builder
	b.WriteString("| event | took | connections | failed | without a ready endpoint | held connections that broke | " +
		"causes | tables without an owner |\n")
	b.WriteString("|---|---|---|---|---|---|---|---|\n")
	for _, r := range rows {
		owner := "-"
		if r.Unowned > 0 {
			owner = fmt.Sprintf("%.2f s", r.Unowned.Seconds())
		}
		fmt.Fprintf(&b, "| %s | %.0f s | %d | %d | %d | %d | %s | %s |\n", r.Name, r.Took.Seconds(), r.Connections,
			r.Failed, r.OfCluster, r.Broken, causeWords(r.Causes), owner)
		if r.Err != nil {
			fmt.Fprintf(&b, "\n%s was not told to its end: %v\n\n", r.Name, r.Err)
		}
	}
	return b.String()
}
