package inspect

import (
	"cmp"
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
// if it was given and there are any, else of all clients. Without records there are none.
func (e *explainRun) lastFailures(ctx context.Context, a *Answer) (last []flows.Record) {
	if !e.Records.IsValid() || e.Inspector == nil || !e.At.IsZero() || a.Kernel.Service == nil {
		return nil
	}
	of, own := a.Kernel.Service, []flows.Record(nil)
	add := func(list []flows.Record, r *flows.Record) []flows.Record {
		return append(list[max(0, len(list)-maxFailures+1):], *r)
	}
	ctx, cancel := context.WithTimeout(ctx, recordsTimeout)
	defer cancel()
	q := records.Question{Service: of.Name, Failed: true, Since: time.Hour}
	// Without an answer there is nothing to name.
	_, _ = records.Read(ctx, e.Records, &q, func(r *flows.Record) {
		if r.Port != of.Port {
			return
		}
		if last = add(last, r); r.Client.Addr.Addr() == e.q.Source {
			own = add(own, r)
		}
	})
	if len(own) > 0 {
		last = own
	}
	slices.Reverse(last)
	return last
}

// printFailures names the last connections that failed.
func (a *Answer) printFailures(s *terminal.Printer) {
	for i := range a.Failures {
		r, label := &a.Failures[i], ""
		if i == 0 {
			label = "Failed"
		}
		reason := ""
		if r.Reason != "" {
			reason = " (" + r.Reason + ")"
		}
		labelled(s, label, "%s  %s -> %s  %s%s", r.Time.Local().Format(time.TimeOnly), peerText(&r.Client),
			peerText(&r.Endpoint), r.End, reason)
	}
}

// peerText names a side of a connection; "none" is the endpoint of one that was rejected or dropped.
func peerText(p *flows.Peer) string {
	at := "none"
	switch {
	case p.Addr.IsValid():
		at = p.Addr.String()
	case p.Prefix.IsValid():
		at = p.Prefix.String()
	}
	if name := cmp.Or(p.Pod, p.Workload); name != "" {
		return name + " (" + at + ")"
	}
	return at
}
