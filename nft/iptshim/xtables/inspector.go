package xtables

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/internal/system/packets"
	"github.com/verdict-proxy/verdict/nft/iptshim"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/reconcile"
)

// Inspector answers from the rules of iptables.
type Inspector struct {
	programs *Programs
	options  iptshim.Options
	// present says that the programs' variant holds rules of ours.
	present bool
}

var _ reconcile.Inspector = (*Inspector)(nil)

// Inspect looks for the programs by which rules of ours are read: of the variant that holds some, or else of the one
// that this node would have them in. That there are no programs is an error. Options say how the rules are written.
func Inspect(ctx context.Context, o iptshim.Options) (*Inspector, error) {
	found, err := Find(ctx)
	if err != nil {
		return nil, err
	}
	o.KeepInvalid = o.KeepInvalid || Liberal()
	for _, v := range []Variant{found.Variant, found.Variant.Other()} {
		of, ok := found.OfVariant(ctx, v)
		if !ok {
			continue
		}
		for _, f := range ipfamily.All {
			if wrote, err := of.Wrote(ctx, f); err == nil && wrote {
				return &Inspector{of, o, true}, nil
			}
		}
	}
	return &Inspector{found, o, false}, nil
}

// Liberal says whether the kernel takes TCP packets outside of the window for valid: then none has to be dropped for
// that.
func Liberal() bool {
	text, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal")
	return err == nil && strings.TrimSpace(string(text)) != "0"
}

// Programs are those by which it reads.
func (i *Inspector) Programs() *Programs { return i.programs }

// Name implements reconcile.Inspector.
func (i *Inspector) Name() string { return "iptables" }

// Close implements reconcile.Inspector.
func (i *Inspector) Close() error { return i.programs.Close() }

// Present implements reconcile.Inspector.
func (i *Inspector) Present(context.Context) (bool, error) { return i.present, nil }

// read reads the rules of a family; nil if there are no programs for it.
func (i *Inspector) read(ctx context.Context, f ipfamily.Family) (*iptshim.Saved, error) {
	if !i.programs.Serves(f) {
		return nil, nil
	}
	return i.programs.SaveAll(ctx, f)
}

// Settings implements reconcile.Inspector.
func (i *Inspector) Settings(ctx context.Context) (*dataplane.Settings, error) {
	s := &dataplane.Settings{}
	for n, f := range ipfamily.All {
		saved, err := i.read(ctx, f)
		if err != nil || saved == nil {
			return s, err
		}
		of := saved.Settings()
		s.Pods[n] = of.Pods
		if f == ipfamily.IPv4 {
			s.MasqueradeAll, s.LocalhostNodePorts = of.MasqueradeAll, of.GuardLoopback
		}
	}
	return s, nil
}

// Trace implements reconcile.Inspector.
func (i *Inspector) Trace(ctx context.Context, p dataplane.Packet, node dataplane.LocalNode) (*dataplane.Trace, error) {
	f := ipfamily.Of(p.Destination)
	if !i.programs.Serves(f) {
		return nil, fmt.Errorf("failed to read the %s rules of iptables: %w", f, i.programs.Missing(f))
	}
	text, err := i.programs.SaveText(ctx, f)
	if err != nil {
		return nil, err
	}
	chains, err := packets.ParseTraced(f, text, &packets.Host{Addrs: node.Addrs, Bridged: node.Bridged})
	if err != nil {
		return nil, err
	}
	var left time.Duration // for which the sender is remembered
	t, err := iptshim.Trace(chains, p, func(list string, seconds uint32) bool {
		ago, ok := seenAgo(list, p.Source)
		within := time.Duration(seconds) * time.Second
		if ok = ok && ago < within; ok {
			left = within - ago
		}
		return ok
	})
	if err != nil {
		return nil, err
	}
	for n := range t.Endings {
		if t.Endings[n].Remembered {
			t.Endings[n].Left = left
		}
	}
	if len(t.Steps) == 0 {
		t.Notes = append(t.Notes, fmt.Sprintf("no rule of Verdict looks at %s: no Services are programmed on this node", f))
	}
	return t, nil
}

// Differences implements reconcile.Inspector. Rules of iptables do not say themselves what they should be: without a
// State it looks whether those are there that every Service needs.
func (i *Inspector) Differences(ctx context.Context, wanted *dataplane.State) (*dataplane.Differences, error) {
	d := &dataplane.Differences{Programs: i.programs.String(), Quiet: true}
	state := wanted
	if wanted == nil {
		settings, err := i.Settings(ctx)
		if err != nil {
			return nil, err
		}
		state = &dataplane.State{LocalhostNodePorts: settings.LocalhostNodePorts}
		d.Partial = true
		d.Notes = append(d.Notes,
			"iptables rules hold no digest of what was written: give the objects, to compare the rules of Services")
	}
	model := iptshim.New(i.options)
	model.Plan(state, dataplane.Change{})
	for _, f := range ipfamily.All {
		saved, err := i.read(ctx, f)
		if err != nil {
			return nil, err
		}
		t := dataplane.InspectedTable{Family: f.String(), Name: f.String(), Unit: "rule"}
		if saved == nil {
			d.Partial = true
			d.Notes = append(d.Notes, fmt.Sprintf("%s is skipped: %v", f, i.programs.Missing(f)))
			d.Tables = append(d.Tables, t)
			continue
		}
		t.Elements = saved.Rules()
		t.There = t.Elements > 0
		d.Tables = append(d.Tables, t)
		for _, is := range model.Differences(f, saved) {
			switch {
			case wanted != nil:
				d.Differences = append(d.Differences, plainDifference(is))
			case is.Wanted:
				d.Wrong = append(d.Wrong, "it is missing: "+strings.TrimPrefix(is.String(), "+ "))
			}
		}
	}
	return d, nil
}

func plainDifference(d iptshim.Difference) dataplane.Difference {
	line := d.String()[len("+ "):]
	return dataplane.Difference{Wanted: d.Wanted, Family: d.Family.String(), Object: line, Line: line,
		Port: dataplane.PortName{Service: d.Service}}
}

// errCounters says why there are no counters.
var errCounters = fmt.Errorf("iptables: counters of Services: %w: its rules count packets of all kinds, "+
	"and lose their counts whenever "+
	"a Service's rules are rewritten", reconcile.ErrUnsupported)

// Print implements reconcile.Inspector.
func (i *Inspector) Print(ctx context.Context, w io.Writer) error {
	for _, f := range ipfamily.All {
		if !i.programs.Serves(f) {
			continue
		}
		text, err := i.programs.SaveText(ctx, f)
		if err != nil {
			return err
		}
		if _, err := fmt.Fprintf(w, "# %s\n%s", f, text); err != nil {
			return err
		}
	}
	return nil
}

// Counters implements reconcile.Inspector: there are none.
func (i *Inspector) Counters(context.Context, dataplane.CountersAsked) (*dataplane.Counters, error) {
	return nil, errCounters
}
