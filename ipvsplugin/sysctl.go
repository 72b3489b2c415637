package ipvsplugin

import (
	"errors"
	"io/fs"
	"slices"
	"strings"
	"time"

	"github.com/verdict-proxy/verdict/internal/system/sysctl"
)

// sysctls are what IPVS needs; docs/decisions/0011-ipvs.md says why. They belong to the network namespace.
var sysctls = []sysctl.Setting{
	{Path: "proc/sys/net/ipv4/vs/conntrack", Value: 1},
	{Path: "proc/sys/net/ipv4/vs/expire_nodest_conn", Value: 1},
	{Path: "proc/sys/net/ipv4/vs/expire_quiescent_template", Value: 1},
	{Path: "proc/sys/net/ipv4/vs/conn_reuse_mode", Value: 1},
}

// Sysctls gives what IPVS needs, for a process that may set it in place of one that may not. The parameters are there
// once IPVS is loaded.
func Sysctls() []sysctl.Setting { return slices.Clone(sysctls) }

// What was before is noted, as package sysctl has it, in the guard's table ip.

// The names that timeouts have in notes.
const (
	timeoutTCP    = "ipvs.timeout.tcp"
	timeoutTCPFin = "ipvs.timeout.tcpfin"
	timeoutUDP    = "ipvs.timeout.udp"
)

// setParameters sets sysctls and timeouts, and takes note of what was before, unless an earlier process has.
func (b *Backend) setParameters() error {
	notes, err := b.guard.readNotes()
	if err != nil {
		return err
	}
	known := map[string]bool{}
	for _, n := range notes {
		name, _, _ := sysctl.Noted(n)
		known[name] = true
	}
	note := func(name string, before int) {
		if !known[name] {
			known[name] = true
			notes = append(notes, sysctl.NoteOf(name, before))
		}
	}
	changed, errs := sysctl.Host{}.Apply(sysctls)
	for _, w := range changed {
		note(w.Name, w.Before)
	}
	if t := b.options.Timeouts; t != (Timeouts{}) {
		before, err := b.ipvs.timeouts()
		if err == nil && before != with(before, t) {
			note(timeoutTCP, int(before.TimeoutTCP/time.Second))
			note(timeoutTCPFin, int(before.TimeoutTCPFin/time.Second))
			note(timeoutUDP, int(before.TimeoutUDP/time.Second))
			err = b.ipvs.setTimeouts(t)
		}
		errs = append(errs, err)
	}
	slices.Sort(notes)
	b.guard.notes = notes
	return errors.Join(errs...)
}

// with returns timeouts with those of another that are not 0.
func with(t, o Timeouts) Timeouts {
	for _, f := range []struct {
		to   *time.Duration
		from time.Duration
	}{{&t.TimeoutTCP, o.TimeoutTCP}, {&t.TimeoutTCPFin, o.TimeoutTCPFin}, {&t.TimeoutUDP, o.TimeoutUDP}} {
		if s := f.from.Truncate(time.Second); s > 0 {
			*f.to = s
		}
	}
	return t
}

// restore gives parameters their values from before. One that is gone with its module is no error.
func (b *Backend) restore() error {
	notes, err := b.guard.readNotes()
	if err != nil {
		return err
	}
	var t Timeouts
	timeouts := map[string]*time.Duration{timeoutTCP: &t.TimeoutTCP, timeoutTCPFin: &t.TimeoutTCPFin,
		timeoutUDP: &t.TimeoutUDP}
	var errs []error
	for _, n := range notes {
		name, before, ok := sysctl.Noted(n)
		switch d := timeouts[name]; {
		case d != nil:
			*d = time.Duration(before) * time.Second
		case ok:
			path := "proc/sys/" + strings.ReplaceAll(name, ".", "/")
			_, failed := sysctl.Host{}.Apply([]sysctl.Setting{{Path: path, Value: before}})
			for _, err := range failed {
				if !errors.Is(err, fs.ErrNotExist) {
					errs = append(errs, err)
				}
			}
		}
	}
	if t != (Timeouts{}) && !b.ipvs.handle.Closed() {
		errs = append(errs, b.ipvs.setTimeouts(t))
	}
	return errors.Join(errs...)
}
