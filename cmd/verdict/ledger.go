package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/verdict-proxy/verdict/internal/answers/inspect"
	"github.com/verdict-proxy/verdict/internal/proxy/backends"
	"github.com/verdict-proxy/verdict/internal/proxy/config"
	"github.com/verdict-proxy/verdict/internal/proxy/ledger"
	"github.com/verdict-proxy/verdict/internal/system/clock"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
)

// defaultLedger is where a ledger is looked for if nobody says where it is.
const defaultLedger = "/var/lib/verdict/ledger"

// ledgerPlace finds a ledger.
type ledgerPlace struct{ dir, config string }

func (l *ledgerPlace) addFlags(f *pflag.FlagSet) {
	f.StringVar(&l.dir, "ledger", "", "the directory of the ledger (default: that of --config, else of the proxy on this "+
		"node, else "+defaultLedger+")")
}

// path returns the directory of the ledger.
func (l *ledgerPlace) path(ctx context.Context) (string, error) {
	if l.dir != "" {
		return l.dir, nil
	}
	settings, _, err := config.Load(l.config, nil, nil)
	if err != nil || settings.Ledger != "" {
		return cmp.Or(settings, &config.Settings{}).Ledger, err
	}
	why := "no proxy answers on this node"
	if settings.Healthz.IsValid() {
		if s, err := inspect.LoadStatus(ctx, settings.Healthz, nil, false); err == nil {
			if s.Ledger != nil && s.Ledger.Dir != "" {
				return s.Ledger.Dir, nil
			}
			why = "the proxy on this node keeps none"
		}
	}
	if _, err := os.Stat(defaultLedger); err != nil {
		return "", fmt.Errorf("there is no ledger in %s, and %s: verdict run --ledger keeps one (docs/LEDGER.md), and "+
			"--ledger says here where it is", defaultLedger, why)
	}
	return defaultLedger, nil
}

// logOptions are what the command line of log says.
type logOptions struct {
	place                                   ledgerPlace
	services                                []string
	since, at                               string
	json, follow, check, replay, elementsOf bool
}

func newLedgerLog() *cobra.Command {
	var o logOptions
	cmd := &cobra.Command{
		Use:   "log",
		Short: "List what was written on this node, when and why",
		Long: `Log reads the ledger that verdict run --ledger keeps (docs/LEDGER.md): each transaction with the
objects that caused it, the elements that it added (+), replaced (~) and removed (-), how long it
took, and how long the oldest change waited for it. Log asks the proxy on this node for the ledger's
place. With --ledger it reads files alone, on any machine, without a running proxy.

With --check, log verifies that no record was changed or removed; otherwise it prints the place, and
exits with status 1. With --replay, log writes what the kernel held at the end, or at --at, into the
network namespace that it runs in, which must not have Verdict's tables. This needs CAP_NET_ADMIN. Tables
at the ingress of a device are written if there is a device of that name.`,
		Example: `  verdict log --since 10m
  verdict log --service shop/cart --elements -f
  verdict log --check --ledger /tmp/copy-of-ledger
  ip netns exec empty verdict log --replay --at 14:03:07`,
		Args: noArgs(""),
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd.Context(), cmd.OutOrStdout()) },
	}
	f := cmd.Flags()
	defer completeServices(cmd, "service")
	addJSON(f, &o.json, "print a line of JSON for each record (docs/LEDGER.md)")
	o.place.addFlags(f)
	f.StringVar(&o.place.config, "config", "", "the proxy's configuration file, which says where the ledger is")
	f.StringSliceVar(&o.services, "service", nil, "only what concerns this Service, NAMESPACE/NAME; may be repeated")
	f.StringVar(&o.since, "since", "", "only what is not older: a duration such as 10m, or a time as for --at")
	f.StringVar(&o.at, "at", "", "with --replay, a time: 14:03:07, 2006-01-02 14:03:07 or RFC 3339 (default: the end)")
	f.BoolVar(&o.elementsOf, "elements", false, "list the elements that were written")
	f.BoolVarP(&o.follow, "follow", "f", false, "wait for more")
	f.BoolVar(&o.check, "check", false, "verify the chain of records; exit with status 1 if it is broken")
	f.BoolVar(&o.replay, "replay", false, "write what the kernel held into this network namespace")
	cmd.MarkFlagsMutuallyExclusive("check", "replay", "follow")
	return cmd
}

func (o *logOptions) run(ctx context.Context, w io.Writer) error {
	if o.at != "" && !o.replay {
		return errors.New("--at says what to replay: it needs --replay")
	}
	dir, err := o.place.path(ctx)
	if err != nil {
		return err
	}
	switch {
	case o.check:
		return o.checkLedger(dir, w)
	case o.replay:
		return o.replayLedger(dir, w)
	}
	return o.list(ctx, dir, w)
}

// ledgerCheck is what log --check finds.
type ledgerCheck struct {
	// First and Last are the numbers of the records that are there, 0 if there is none, of these times.
	First  uint64     `json:"first"`
	Last   uint64     `json:"last"`
	Since  *time.Time `json:"since,omitempty"`
	Until  *time.Time `json:"until,omitempty"`
	Digest string     `json:"digest,omitempty"`
	// Breaks say where the chain is broken, Missing how many records were lost, and Torn how many bytes of an incomplete
	// record are at the end.
	Breaks  []string `json:"breaks,omitempty"`
	Missing uint64   `json:"missing,omitempty"`
	Torn    int64    `json:"torn,omitempty"`
}

// checkLedger verifies the chain.
func (o *logOptions) checkLedger(dir string, w io.Writer) error {
	found, err := readCheck(dir)
	if err != nil {
		return err
	}
	err = inspect.Show(w, o.json, found, found.print)
	if len(found.Breaks) > 0 {
		return errors.Join(err, exitStatus(exitDiffers))
	}
	return err
}

// readCheck reads all records.
func readCheck(dir string) (*ledgerCheck, error) {
	r, err := ledger.Open(dir, time.Time{})
	if err != nil {
		return nil, err
	}
	defer r.Close()
	found := &ledgerCheck{}
	for {
		record, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		if found.Since == nil {
			found.First, found.Since = record.Number, &record.At
		}
		found.Last, found.Until, found.Digest = record.Number, &record.At, fmt.Sprint(record.Sum)
		found.Missing += record.Missing
	}
	for _, b := range r.Breaks() {
		found.Breaks = append(found.Breaks, b.String())
	}
	found.Torn = int64(r.Torn())
	return found, nil
}

// print prints it as text.
func (c *ledgerCheck) print(p *terminal.Printer) {
	for _, b := range c.Breaks {
		p.Line("%s", p.Paint(terminal.Red, b))
	}
	if c.Until == nil {
		p.Line("no record")
	} else {
		p.Line("records %d to %d, %s to %s; the last has digest %s", c.First, c.Last,
			c.Since.Local().Format(ledger.TimeLayout), c.Until.Local().Format(ledger.TimeLayout), c.Digest)
	}
	if c.Missing > 0 {
		p.Line("lost, since they could not be written: %s", terminal.Plural(int(c.Missing), "record"))
	}
	if c.Torn > 0 {
		p.Line("incomplete record at the end: %s", terminal.Plural(int(c.Torn), "byte"))
	}
}

// replayLedger writes what the kernel held into this network namespace.
func (o *logOptions) replayLedger(dir string, w io.Writer) error {
	at := time.Now()
	if o.at != "" {
		var err error
		if at, err = parseMoment(o.at, at); err != nil {
			return fmt.Errorf("--at: %w", err)
		}
	}
	past, err := backends.OpenPast(dir, at)
	if err != nil {
		return err
	}
	without, err := past.Write()
	if err != nil {
		return err
	}
	if without != "" {
		terminal.Warn("the tables at the ingress of", without, "were not written: there is no such device here")
	}
	replayed := map[string]any{"record": past.Last.Number, "at": past.Last.At, "held": past.Held}
	return inspect.Show(w, o.json, replayed, func(p *terminal.Printer) {
		p.Line("replayed up to record %d of %s", past.Last.Number, past.Last.At.Local().Format(ledger.TimeLayout))
		for _, line := range past.Held {
			p.Line("%s", line)
		}
	})
}

// followEvery is how often log looks for more records.
const followEvery = 300 * time.Millisecond

// list prints records.
func (o *logOptions) list(ctx context.Context, dir string, w io.Writer) error {
	var since time.Time
	if o.since != "" {
		now := time.Now()
		if d, err := time.ParseDuration(o.since); err == nil {
			since = now.Add(-d)
		} else if since, err = parseMoment(o.since, now); err != nil {
			return fmt.Errorf("--since: %w", err)
		}
	}
	r, err := ledger.Open(dir, since)
	if err != nil {
		return err
	}
	defer r.Close()
	p := terminal.NewPrinter(w)
	if !o.json {
		ledger.PrintHead(p)
	}
	seen := 0
	for p.Err() == nil {
		record, err := r.Next()
		for ; seen < len(r.Breaks()) && !o.json; seen++ {
			p.Line("%s", p.Paint(terminal.Red, r.Breaks()[seen].String()))
		}
		switch {
		case errors.Is(err, io.EOF) && !o.follow:
			return p.Err()
		case errors.Is(err, io.EOF):
			if clock.Pause(ctx, followEvery); ctx.Err() != nil {
				return p.Err()
			}
		case err != nil:
			return err
		case !record.At.Before(since) && o.concerned(record):
			if err := o.print(p, w, record); err != nil {
				return err
			}
		}
	}
	return p.Err()
}

// concerned reports whether a record is about one of the Services that were asked for.
func (o *logOptions) concerned(r *ledger.Record) bool {
	for _, service := range o.services {
		if r.Concerns(service, backends.ServicesIn) {
			return true
		}
	}
	return len(o.services) == 0
}

// recordJSON is a record as log prints it: without the batch, and with the elements if they were asked for.
type recordJSON struct {
	*ledger.Record
	Batch    *struct{} `json:"batch,omitempty"`
	Elements []string  `json:"elements,omitempty"`
}

// print prints a record.
func (o *logOptions) print(p *terminal.Printer, w io.Writer, r *ledger.Record) (err error) {
	out := recordJSON{Record: r}
	if o.elementsOf {
		if out.Elements, err = backends.Written(r); err != nil {
			return err
		}
	}
	if o.json {
		return json.NewEncoder(p).Encode(out)
	}
	r.Print(p)
	for _, line := range out.Elements {
		p.Line("  %s", line)
	}
	return p.Err()
}

// momentLayouts are how a time may be written.
var momentLayouts = []string{time.RFC3339, time.DateTime, "2006-01-02T15:04:05", "2006-01-02 15:04", time.TimeOnly,
	"15:04"}

// parseMoment reads a time in the past. Without a date it is the last time that a clock showed that.
func parseMoment(text string, now time.Time) (time.Time, error) {
	for _, layout := range momentLayouts {
		t, err := time.ParseInLocation(layout, text, time.Local)
		if err != nil {
			continue
		}
		if !strings.HasPrefix(layout, "2006") {
			year, month, day := now.Date()
			t = time.Date(year, month, day, t.Hour(), t.Minute(), t.Second(), t.Nanosecond(), time.Local)
			if t.After(now) {
				t = t.AddDate(0, 0, -1)
			}
		}
		return t, nil
	}
	return time.Time{}, fmt.Errorf("%q is no time such as 14:03:07, 2006-01-02 14:03:07 or 2006-01-02T14:03:07Z", text)
}
