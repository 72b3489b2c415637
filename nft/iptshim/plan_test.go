package iptshim

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// fakeTables are what a strict kernel would hold: chains by table and name, each with its rules.
type fakeTables map[tableChain][]string

func newFakeTables() fakeTables {
	k := fakeTables{}
	for _, c := range []tableChain{{Filter, "INPUT"}, {Filter, "FORWARD"}, {Filter, "OUTPUT"}, {NAT, "PREROUTING"}, {NAT, "OUTPUT"}, {NAT, "POSTROUTING"}} {
		k[c] = nil
	}
	return k
}

// restore takes a text as iptables-restore --noflush does, and refuses what the kernel would.
func (k fakeTables) restore(text []byte) error {
	var table Table
	for n, line := range strings.Split(string(text), "\n") {
		verb, rest, _ := strings.Cut(line, " ")
		name, spec, _ := strings.Cut(rest, " ")
		c := tableChain{table, name}
		_, there := k[c]
		switch {
		case line == "":
		case line[0] == '*':
			table = Table(line[1:])
		case line[0] == ':':
			k[tableChain{table, verb[1:]}] = nil
		case line == "COMMIT":
			if err := k.resolve(); err != nil {
				return fmt.Errorf("line %d: %w", n+1, err)
			}
		case !there:
			return fmt.Errorf("line %d: there is no chain: %s", n+1, line)
		case verb == "-A":
			k[c] = append(k[c], spec)
		case verb == "-I":
			k[c] = slices.Insert(k[c], 0, spec)
		case verb == "-X" && len(k[c]) == 0:
			delete(k, c)
		default:
			return fmt.Errorf("line %d: %s", n+1, line)
		}
	}
	return nil
}

// resolve says whether all that rules lead to is there.
func (k fakeTables) resolve() error {
	for c, rules := range k {
		for _, r := range rules {
			_, target, _ := strings.Cut(r, "-j ")
			target, _, _ = strings.Cut(target, " ")
			if _, ok := k[tableChain{c.table, target}]; strings.HasPrefix(target, "KUBE-") && !ok {
				return fmt.Errorf("%s leads to %s, which is not there", c.chain, target)
			}
		}
	}
	return nil
}

// text gives all there is. KUBE-FIREWALL is left out: it stays where it was once needed.
func (k fakeTables) text() string {
	var b strings.Builder
	for _, c := range slices.SortedFunc(maps.Keys(k), func(a, b tableChain) int {
		return strings.Compare(string(a.table)+a.chain, string(b.table)+b.chain)
	}) {
		if c.chain == loopbackChain {
			continue
		}
		fmt.Fprintf(&b, "%s %s\n", c.table, c.chain)
		for _, r := range k[c] {
			if !strings.HasSuffix(r, "-j "+loopbackChain) {
				fmt.Fprintln(&b, "    "+r)
			}
		}
	}
	return b.String()
}

// FuzzPlanEqualsFull walks through random changes: the texts, one after the other, leave what one text for the last state alone
// would. Some are taken back and planned again, and now and then all is forgotten and adopted.
func FuzzPlanEqualsFull(f *testing.F) {
	for seed := range uint64(15) {
		f.Add(seed, uint8(20), uint8(1+seed))
	}
	f.Fuzz(func(t *testing.T, seed uint64, steps, services uint8) {
		w := newWorld(seed, int(services)+1)
		options := Options{Dispatch: Dispatch(seed % 2), Comments: true}
		snap, planner, model := snapshot.New(), dataplane.NewPlanner(configs[seed%uint64(len(configs))]), New(options)
		kernel := [len(Families)]fakeTables{newFakeTables(), newFakeTables()}
		delta := w.all()
		for step := range int(steps) {
			change, _ := planner.Apply(snap, snap.Apply(delta))
			txn := model.Plan(planner.State(), change)
			if w.IntN(4) == 0 {
				model.Revert(txn)
				again := model.Plan(planner.State(), change)
				for _, f := range Families {
					if a, b := string(txn.Text(f)), string(again.Text(f)); a != b {
						t.Fatalf("step %d: planned again: %s", step, firstDifference(a, b))
					}
				}
			}
			for _, f := range Families {
				if err := kernel[f].restore(txn.Text(f)); err != nil {
					t.Fatalf("step %d: %v\n%s", step, err, txn.Text(f))
				}
				want := newFakeTables()
				if err := want.restore(model.Full(f)); err != nil {
					t.Fatalf("step %d: full: %v", step, err)
				}
				if a, b := kernel[f].text(), want.text(); a != b {
					t.Fatalf("step %d %s: %s", step, f, firstDifference(a, b))
				}
			}
			if w.IntN(6) == 0 {
				model = restart(t, options, kernel, planner.State())
			}
			delta = w.step()
		}
	})
}

// restart adopts what is there, which must be all that a state wants.
func restart(t *testing.T, o Options, kernel [len(Families)]fakeTables, s *dataplane.State) *Model {
	m := New(o)
	for _, f := range Families {
		saved, err := Parse([]byte(kernel[f].saved()))
		if err != nil {
			t.Fatal(err)
		}
		m.Adopt(f, saved)
	}
	txn := m.Plan(s, dataplane.Change{Globals: true})
	for _, f := range Families {
		if text := txn.Text(f); text != nil {
			t.Fatalf("a restart writes:\n%s", text)
		}
	}
	return m
}

// saved gives the tables as iptables-save does.
func (k fakeTables) saved() string {
	var b strings.Builder
	for _, table := range Tables {
		fmt.Fprintf(&b, "*%s\n", table)
		for c := range k {
			if c.table == table {
				fmt.Fprintf(&b, ":%s - [0:0]\n", c.chain)
			}
		}
		for c, rules := range k {
			for _, r := range rules {
				if c.table == table {
					fmt.Fprintf(&b, "-A %s %s\n", c.chain, r)
				}
			}
		}
		b.WriteString("COMMIT\n")
	}
	return b.String()
}

func firstDifference(a, b string) string {
	x, y := strings.Split(a, "\n"), strings.Split(b, "\n")
	for i := range min(len(x), len(y)) {
		if x[i] != y[i] {
			return fmt.Sprintf("line %d:\n  %s\nis\n  %s\nbut should be\n  %s", i+1, x[max(i-1, 0)], x[i], y[i])
		}
	}
	return fmt.Sprintf("%d lines, not %d", len(x), len(y))
}
