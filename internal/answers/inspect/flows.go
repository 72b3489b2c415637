package inspect

import (
	"context"
	"slices"
	"time"

	"github.com/verdict-proxy/verdict/internal/answers/records"
	"github.com/verdict-proxy/verdict/internal/proxy/flows"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
)

const (
	// maxFailures is how many failed connections explain names.
	maxFailures = 5
	// recordsTimeout limits how long the proxy may take to tell what it recorded.
	recordsTimeout = 2 * time.Second
)

// lastFailures returns the last connections to what was explained that failed, the newest first: those of the sender,
// if its address was given. Without records there are none.
func (e *explainRun) lastFailures(ctx context.Context, a *Answer) (last []flows.Record) {
	if !e.Records.IsValid() || e.Inspector == nil || !e.At.IsZero() || a.Kernel.Service == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, recordsTimeout)
	defer cancel()
	q := records.Question{Service: a.Kernel.Service.Name, Failed: true, Since: time.Hour}
	if e.q.Source.IsValid() {
		q.From = e.q.Source.String()
	}
	// Without an answer there is nothing to name.
	_, _ = records.Read(ctx, e.Records, &q, func(r *flows.Record) {
		if r.Port == a.Kernel.Service.Port {
			last = append(last[max(0, len(last)-maxFailures+1):], *r)
		}
	})
	slices.Reverse(last)
	return last
}

// printFailures names the last connections that failed.
func (a *Answer) printFailures(s *terminal.Printer) {
	for i := range a.Failures {
		r := &a.Failures[i]
		labelled(s, first(i, "Failed"), "%s  %s -> %s  %s", r.Time.Local().Format(time.TimeOnly),
			records.Peer(&r.Client), records.Peer(&r.Endpoint), records.End(s, r))
	}
}
