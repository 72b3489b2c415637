package iptshim

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// fakeTables are what a strict kernel would hold.
type fakeTables struct {
	// chains are by table and name, each with its rules.
	chains map[tableChain][]string
	// led counts the rules that lead to a chain, be it there or not.
	led map[tableChain]int
}

func newFakeTables() *fakeTables {
	k := &fakeTables{chains: map[tableChain][]string{}, led: map[tableChain]int{}}
	for _, c := range []tableChain{{Filter, "INPUT"}, {Filter, "FORWARD"}, {Filter, "OUTPUT"}, {NAT, "PREROUTING"},
		{NAT, "OUTPUT"}, {NAT, "POSTROUTING"}} {
		k.chains[c] = nil
	}
	return k
}

// restore takes a text as iptables-restore --noflush does, and refuses what the kernel would.
func (k *fakeTables) restore(text []byte) error {
	var table Table
	n := 0
	for line := range strings.Lines(string(text)) {
		n++
		line = strings.TrimSuffix(line, "\n")
		var err error
		switch {
		case line == "":
		case line[0] == '*':
			table = Table(line[1:])
		case line == "COMMIT":
			err = k.resolve()
		default:
			err = k.command(table, line)
		}
		if err != nil {
			return fmt.Errorf("line %d: %w", n, err)
		}
	}
	return nil
}

// command takes a line about a chain or a rule.
func (k *fakeTables) command(table Table, line string) error {
	verb, rest, _ := strings.Cut(line, " ")
	name, spec, _ := strings.Cut(rest, " ")
	c := tableChain{table, name}
	_, there := k.chains[c]
	switch {
	case line[0] == ':':
		c.chain = verb[1:]
		for _, r := range k.chains[c] {
			k.lead(table, r, -1)
		}
		k.chains[c] = nil
	case !there:
		return fmt.Errorf("there is no chain: %s", line)
	case verb == "-A":
		k.lead(table, spec, 1)
		k.chains[c] = append(k.chains[c], spec)
	case verb == "-I":
		k.lead(table, spec, 1)
		k.chains[c] = slices.Insert(k.chains[c], 0, spec)
	case verb == "-X" && len(k.chains[c]) == 0 && k.led[c] == 0: // the kernel refuses to delete what rules lead to
		delete(k.chains, c)
	default:
		return errors.New(line)
	}
	return nil
}

// lead counts what a rule leads to, or no longer does.
func (k *fakeTables) lead(table Table, rule string, by int) {
	_, target, _ := strings.Cut(rule, "-j ")
	target, _, _ = strings.Cut(target, " ")
	c := tableChain{table, target}
	if k.led[c] += by; k.led[c] == 0 {
		delete(k.led, c)
	}
}

// resolve says whether all that rules lead to is there.
func (k *fakeTables) resolve() error {
	for c := range k.led {
		if _, ok := k.chains[c]; strings.HasPrefix(c.chain, "KUBE-") && !ok {
			return fmt.Errorf("rules lead to %s, which is not there", c.chain)
		}
	}
	return nil
}

// text gives all there is. KUBE-FIREWALL is left out: it stays where it was once needed.
func (k *fakeTables) text() string {
	var b strings.Builder
	for _, c := range slices.SortedFunc(maps.Keys(k.chains), func(a, b tableChain) int {
		return strings.Compare(string(a.table)+a.chain, string(b.table)+b.chain)
	}) {
		if c.chain == loopbackChain {
			continue
		}
		fmt.Fprintf(&b, "%s %s\n", c.table, c.chain)
		for _, r := range k.chains[c] {
			if !strings.HasSuffix(r, "-j "+loopbackChain) {
				fmt.Fprintln(&b, "    "+r)
			}
		}
	}
	return b.String()
}

// The most that one input of FuzzPlanEqualsFull asks for.
const (
	maxFuzzServices = 12
	maxFuzzSteps    = 12
)

// FuzzPlanEqualsFull walks through random changes: the texts, one after the other, leave what one text for the last
// state alone would. Some are taken back and planned again, and now and then all is forgotten and adopted. Each input
// is small: the fuzzer gives up on one that takes seconds, and what many Services do, some do too.
func FuzzPlanEqualsFull(f *testing.F) {
	for seed := range uint64(15) {
		f.Add(seed, uint8(maxFuzzSteps-1), uint8(seed))
	}
	f.Fuzz(func(t *testing.T, seed uint64, steps, services uint8) {
		w := newWorld(seed, int(services%maxFuzzServices)+1)
		options := Options{Dispatch: Dispatch(seed % 2), Comments: true, Step: int(seed%3) * 20}
		snap, planner, model := snapshot.New(), dataplane.NewPlanner(configs[seed%uint64(len(configs))]), New(options)
		kernel := ipfamily.Per[*fakeTables]{newFakeTables(), newFakeTables()}
		delta := w.All()
		for step := range int(steps % maxFuzzSteps) {
			change, _ := planner.Apply(snap, snap.Apply(delta))
			w.refuseSome(planner.State(), change)
			txn := model.Plan(planner.State(), change)
			if w.IntN(4) == 0 {
				model.Revert(txn)
				again := model.Plan(planner.State(), change)
				for _, f := range ipfamily.All {
					if a, b := string(txn.Text(f)), string(again.Text(f)); a != b {
						t.Fatalf("step %d: planned again: %s", step, firstDifference(a, b))
					}
				}
			}
			for _, f := range ipfamily.All {
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
			delta = w.Step()
		}
	})
}

// restart adopts what is there, which must be all that a state wants.
func restart(t *testing.T, o Options, kernel ipfamily.Per[*fakeTables], s *dataplane.State) *Model {
	m := New(o)
	for _, f := range ipfamily.All {
		saved, err := Parse([]byte(kernel[f].saved()))
		if err != nil {
			t.Fatal(err)
		}
		m.Adopt(f, saved)
	}
	txn := m.Plan(s, dataplane.Change{Globals: true})
	for _, f := range ipfamily.All {
		if text := txn.Text(f); text != nil {
			t.Fatalf("a restart writes:\n%s", text)
		}
	}
	return m
}

// saved gives the tables as iptables-save does.
func (k *fakeTables) saved() string {
	var b strings.Builder
	for _, table := range Tables {
		fmt.Fprintf(&b, "*%s\n", table)
		for c := range k.chains {
			if c.table == table {
				fmt.Fprintf(&b, ":%s - [0:0]\n", c.chain)
			}
		}
		for c, rules := range k.chains {
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

// TestManyEndpoints says that the chains of service ports have no comments in a large cluster, and that it makes no
// difference to a restart whether they have.
func TestManyEndpoints(t *testing.T) {
	st, _ := dataplane.Compute(configs[0], large(101, 10))
	brief, wordy := New(Options{}), New(Options{Comments: true})
	for _, m := range []*Model{brief, wordy} {
		m.Plan(st, dataplane.Change{})
	}
	short, long := string(brief.Full(ipfamily.IPv4)), string(wordy.Full(ipfamily.IPv4))
	if !strings.Contains(long, `--comment "ns7/svc7:p80 -> `) || strings.Contains(short, `--comment "ns7/svc7:p80 -> `) ||
		!strings.Contains(short, `--comment "ns7/svc7:p80 cluster IP"`) {
		t.Errorf("comments: %.2000s", short)
	}
	saved, err := Parse([]byte(long))
	if err != nil {
		t.Fatal(err)
	}
	again := New(Options{})
	again.Adopt(ipfamily.IPv4, saved)
	if text := again.Plan(st, dataplane.Change{}).Text(ipfamily.IPv4); text != nil {
		t.Errorf("comments alone are written again:\n%.2000s", text)
	}
	if d := again.Differences(ipfamily.IPv4, saved); d != nil {
		t.Errorf("%d differences, the first is %s", len(d), d[0])
	}
}

// TestBlame says of every line whose it is.
func TestBlame(t *testing.T) {
	for _, step := range []int{0, 50} {
		st, _ := dataplane.Compute(configs[0], large(30, 2))
		txn := New(Options{Step: step}).Plan(st, dataplane.Change{})
		blamed := map[snapshot.Name]bool{}
		for i, line := range strings.Split(string(txn.Text(ipfamily.IPv4)), "\n") {
			names := txn.OwnersOfLine(ipfamily.IPv4, i+1)
			if _, rest, ok := strings.Cut(line, `--comment "ns`); ok {
				want := "ns" + rest[:strings.IndexAny(rest, ": ")]
				if len(names) != 1 || names[0].String() != want {
					t.Fatalf("line %d belongs to %v: %s", i+1, names, line)
				}
				blamed[names[0]] = true
			} else if len(names) > 0 && !strings.HasPrefix(line, ":KUBE-S") {
				t.Fatalf("line %d belongs to %v: %s", i+1, names, line)
			}
		}
		if len(blamed) != 30 {
			t.Errorf("%d Services are named", len(blamed))
		}
		if names := txn.OwnersOfLine(ipfamily.IPv4, 0); names != nil {
			t.Errorf("line 0 belongs to %v", names)
		}
	}
}

// TestUnchangedChainsStay says that the text of a change holds what changed, and not more.
func TestUnchangedChainsStay(t *testing.T) {
	snap, planner, model := large(2000, 3), dataplane.NewPlanner(configs[0]), New(Options{})
	change, _ := planner.Apply(snap, snapshot.Change{Globals: true})
	model.Plan(planner.State(), change)
	change, _ = planner.Apply(snap, snap.Apply(largeService(7, 3, 1)))
	if chains, deleted, rules := model.Plan(planner.State(), change).Counts(); chains != 2 || deleted != 1 || rules != 6 {
		t.Errorf("one endpoint is another one: %d chains written, %d deleted, %d rules", chains, deleted, rules)
	}
	change, _ = planner.Apply(snap, snap.Apply(largeService(2000, 3, 0)))
	txn := model.Plan(planner.State(), change)
	if text := txn.Text(ipfamily.IPv4); strings.Count(string(text), "\n") > 80 ||
		!strings.Contains(string(text), "svc2000") {
		t.Errorf("one more Service takes\n%s", text)
	}
	change, _ = planner.Apply(snap, snap.Apply(snapshot.Delta{}))
	if txn := model.Plan(planner.State(), change); !txn.Empty() || txn.Text(ipfamily.IPv4) != nil {
		t.Errorf("nothing takes\n%s", txn.Text(ipfamily.IPv4))
	}
}

// TestTreeIsShallow counts the rules that a packet to each of many Services passes.
func TestTreeIsShallow(t *testing.T) {
	const services = 10000
	st, _ := dataplane.Compute(configs[0], large(services, 1))
	for dispatch, most := range map[Dispatch]int{Tree: 60, List: services} {
		model := New(Options{Dispatch: dispatch})
		model.Plan(st, dataplane.Change{})
		chains, longest := parsed(t, ipfamily.IPv4, savedText(model, ipfamily.IPv4), nil), 0
		for i := 0; i < services; i += 500 {
			to := largeService(i, 1, 0).Services
			for _, s := range to {
				got := traced(t, chains, dataplane.Packet{Source: addr("10.244.1.1"), Destination: s.ClusterIPs[0],
					Protocol: snapshot.TCP, Port: 80, Interface: "eth0"}, nil)
				if got.Outcome() != "endpoint" {
					t.Fatalf("%s: %s", s.Name, got.Outcome())
				}
				longest = max(longest, len(got.Steps))
			}
		}
		t.Logf("dispatch %d: at most %d rules", dispatch, longest)
		if longest > most {
			t.Errorf("dispatch %d: a packet passes %d rules", dispatch, longest)
		}
	}
}

// TestEveryKindHasRows compiles a frontend of each kind there is.
func TestEveryKindHasRows(t *testing.T) {
	for _, k := range kinds() {
		pool := &dataplane.Pool{Endpoints: []dataplane.Endpoint{{AddrPort: netip.MustParseAddrPort("10.244.1.2:8080")}}}
		name := snapshot.Name{Namespace: "default", Name: "web"}
		model := New(Options{})
		model.Plan(&dataplane.State{Services: map[snapshot.Name]*dataplane.Service{name: {
			Ports: []*dataplane.ServicePort{{Name: dataplane.PortName{Service: name, Protocol: snapshot.TCP}, Cluster: pool,
				Frontends: []dataplane.Frontend{{Kind: k, Routes: []dataplane.Route{{Pool: pool}},
					Key: dataplane.Key{Addr: addr("192.0.2.1"), Protocol: snapshot.TCP, Port: 30777}}}}}}}},
			dataplane.Change{})
		if text := string(model.Full(ipfamily.IPv4)); !strings.Contains(text, "--dport 30777 ") {
			t.Errorf("no rule for the frontend of the kind %s:\n%s", k, text)
		}
	}
}

// kinds are all kinds of frontends: String panics behind the last one.
func kinds() (list []dataplane.Kind) {
	defer func() { recover() }()
	for k := dataplane.ClusterIP; k.String() != ""; k++ {
		list = append(list, k)
	}
	return list
}
