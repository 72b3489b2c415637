package inspect

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/netip"
	"net/url"
	"os"
	"time"

	"github.com/verdict-proxy/verdict/internal/proxy/status"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// LoadStatus asks the proxy on this host for its sync status, with the digests of some Services (NAMESPACE/NAME), or of
// all. Addr is the address of its health server, as for LoadOutliers.
func LoadStatus(ctx context.Context, addr netip.AddrPort, services []string, all bool) (*status.Status, error) {
	query := url.Values{}
	if len(services) > 0 {
		query["service"] = services
	}
	if all {
		query.Set("digests", "all")
	}
	var first *status.Status
	for {
		var page status.Status
		err := AskProxy(ctx, addr, "/status?"+query.Encode(), func(r io.Reader) error {
			return json.NewDecoder(r).Decode(&page)
		})
		if err != nil {
			return nil, err
		}
		if first == nil {
			first = &page
		} else {
			first.Digests = append(first.Digests, page.Digests...)
		}
		next := page.Next
		if first.Next = ""; next == "" {
			return first, nil
		}
		query.Set("after", next)
	}
}

// NodeName returns the name of this node in the cluster, by the proxy whose health server is at an address. Without
// one it is the host's name, which may be another.
func NodeName(ctx context.Context, addr netip.AddrPort) string {
	if addr.IsValid() {
		if s, err := LoadStatus(ctx, addr, nil, false); err == nil && s.Node != "" {
			return s.Node
		}
	}
	host, _ := os.Hostname()
	return "host " + host
}

// PrintStatus prints the status of one node.
func PrintStatus(p *terminal.Printer, s *status.Status) {
	rows := terminal.Columns{14}
	row := func(name, format string, args ...any) { p.Line("%s", rows.Row(name, fmt.Sprintf(format, args...))) }
	row("node", "%s, %s, %s", s.Node, s.Version, s.Backend)
	if s.First == nil {
		row("programmed", "%s", p.Paint(terminal.Red, "not all Services yet, for "+age(s.Time, s.Started)))
	} else {
		row("programmed", "%s, digest %016x", terminal.Plural(s.Services, "Service"), uint64(s.Digest))
	}
	// Manifests have no versions.
	if s.Received != (status.Versions{}) || s.Programmed != (status.Versions{}) {
		row("versions", "services %s of %s, endpointslices %s of %s", orUnknown(s.Programmed.Services),
			orUnknown(s.Received.Services), orUnknown(s.Programmed.EndpointSlices), orUnknown(s.Received.EndpointSlices))
	}
	if w := s.Pending; w.Services+w.EndpointSlices > 0 || w.LagSeconds > 0 {
		row("pending", "%s and %s, the oldest for %v", terminal.Plural(w.Services, "Service"),
			terminal.Plural(w.EndpointSlices, "EndpointSlice"), seconds(w.LagSeconds))
	}
	if f := s.Failing; f != nil {
		row("failing", "%s", p.Paint(terminal.Red, "for "+age(s.Time, f.Since)+": "+f.Error))
	}
	if q := s.Quarantined; q.Count > 0 {
		row("quarantined", "%s", terminal.Plural(q.Count, "Service"))
		for _, n := range q.Services {
			p.Line("  %s for %s: %s", n.Service, age(s.Time, n.Since), n.Error)
		}
	}
	if e := s.Ejected; e.Count > 0 {
		row("ejected", "%s", terminal.Plural(e.Count, "endpoint"))
		for _, n := range e.Endpoints {
			p.Line("  %s of %s for %s: %s", n.Endpoint, n.Service, age(s.Time, n.Since), n.Cause)
		}
	}
	printClients(p, row, s.ClientAddresses)
	for _, u := range s.Unread {
		row("unread", "%s", p.Paint(terminal.Red, u.File+" for "+age(s.Time, u.Since)+": "+u.Error))
	}
	PrintPreflight(p, s.Preflight)
	printDrift(p, row, s)
	if l := s.Ledger; l != nil {
		printLedger(p, row, l)
	}
	for _, d := range s.Digests {
		p.Line("%016x %s for %s", uint64(d.Digest), d.Service, age(s.Time, d.Since))
	}
}

// PrintInForce prints what the kernel says is in force: settings, and endpoints that are ejected, or a last resort.
func PrintInForce(p *terminal.Printer, s *dataplane.Settings) {
	rows := terminal.Columns{14}
	if s.Config != nil {
		for i, line := range s.Config.Lines() {
			name := ""
			if i == 0 {
				name = "in force"
			}
			p.Line("%s", rows.Row(name, "--"+line))
		}
	}
	for i := range s.Unhealthy {
		if e := &s.Unhealthy[i]; stateOf(e) != "" {
			p.Line("%s", rows.Row(stateOf(e), e.Endpoint.String()+" of "+e.Port.String()+", "+unhealthyText(&e.Unhealthy)))
		}
	}
}

// PrintPreflight prints what was found on a host, each with what to do.
func PrintPreflight(p *terminal.Printer, found []status.Finding) {
	rows := terminal.Columns{14}
	for _, f := range found {
		p.Line("%s", rows.Row(f.Check, p.Paint(terminal.Red, f.What)))
		p.Line("%s", rows.Row("", f.Advice))
	}
}

// printClients prints how many Services keep their clients' addresses; c is nil if none is to.
func printClients(p *terminal.Printer, row func(name, format string, args ...any), c *status.ClientAddresses) {
	if c == nil {
		return
	}
	row("clients", "kept by %s, masqueraded by %d", terminal.Plural(c.Kept, "Service"), c.Masqueraded)
	for _, n := range c.Services {
		p.Line("  %s: %s", n.Service, n.Why)
	}
}

func printDrift(p *terminal.Printer, row func(name, format string, args ...any), s *status.Status) {
	d := &s.Drift
	switch {
	case d.Checked == nil:
		row("drift", "not checked yet")
	case d.Error != "":
		row("drift", "%s", p.Paint(terminal.Red, "the check failed: "+d.Error))
	case d.FoundAt == nil:
		row("drift", "none, checked %s ago", age(s.Time, *d.Checked))
	default:
		what := "repaired"
		if d.Open() {
			what = "not repaired yet"
		}
		row("drift", "%s by other programs, the last %s ago, %s", terminal.Plural(d.Found, "change"),
			age(s.Time, *d.FoundAt), what)
		for _, text := range d.Last {
			p.Line("  %s", text)
		}
	}
}

func printLedger(p *terminal.Printer, row func(name, format string, args ...any), l *status.Ledger) {
	text := "no record was written yet"
	if l.Record > 0 {
		text = fmt.Sprintf("record %d, digest %s", l.Record, l.Digest)
	}
	if l.Missing > 0 {
		text += p.Paint(terminal.Red, ", "+terminal.Plural(int(l.Missing), "record")+" missing")
	}
	row("ledger", "%s", text)
	if l.Error != "" {
		row("", "%s", p.Paint(terminal.Red, "it cannot be written: "+l.Error))
	}
}

// age says how long before a moment another one was.
func age(now, then time.Time) string { return seconds(now.Sub(then).Seconds()).String() }

func seconds(s float64) time.Duration {
	d := time.Duration(s * float64(time.Second))
	if d < 10*time.Second {
		return d.Round(time.Millisecond)
	}
	return d.Round(time.Second)
}

func orUnknown[T ~string](text T) string {
	if text == "" {
		return "unknown"
	}
	return string(text)
}
