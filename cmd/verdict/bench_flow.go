package main

import (
	"context"
	"fmt"
	"os/exec"
	"slices"
	"strings"

	"github.com/spf13/cobra"
)

func newBenchFlow() *cobra.Command {
	var b flowBench
	cmd := &cobra.Command{
		Use:   "flow",
		Short: "A new flow that this node sends to a Service",
		Long: `Flow measures what the ruleset costs those who are served: the processor time of the thread that sends the
first packet of a UDP flow, one byte from the node itself to a Service by chance, from the system call until the packet
is out of the node's network namespace and thrown away. It holds connection tracking, routing and the device, which have
their price without any proxy; so the same is measured with the least that could be there:

  conntrack alone   a chain of nat with a rule that never matches: no packet is translated
  one dnat rule     the floor: each packet is translated by one rule, which looks nothing up

With Verdict's tables, in clusters of each of --sizes, where each Service has one UDP port:

  0 Services        packets to addresses that belong to no Service
  Services          written into an empty kernel, all at once; no packet is masqueraded
  grown             the same, but the tables began with 10 Services and grew in ten steps, each by the same factor

and, in the largest of the sizes up to 10,000:

  masqueraded       the node's address is not in the cluster CIDR
  sticky            with session affinity, of which the kernel has an entry already
  external Local    to load balancer addresses, with externalTrafficPolicy Local: they are masqueraded, too

Each of them is in a network namespace of its own, and they are measured by turns, a round after the other. A round
sends the same --flows packets, after connection tracking has forgotten those of the last one. A round that is not timed
goes first; connection tracking is asked after it whether all flows were translated as they should. Rulesets that are
not Verdict's take nft.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := b.prepare(); err != nil {
				return err
			}
			return b.run(cmd, func(ctx context.Context) (benchResult, error) { return b.flow(ctx) })
		},
	}
	f := cmd.Flags()
	f.IntSliceVar(&b.sizes, "sizes", []int{0, 1000, 10000, 100000}, "numbers of Services")
	f.IntVar(&b.endpoints, "endpoints", 10, "endpoints of each Service")
	f.IntVar(&b.flows, "flows", 8000, "flows of a round")
	f.IntVar(&b.rounds, "rounds", 11, "how often each is measured")
	f.BoolVar(&b.json, "json", false, "print one JSON object")
	return cmd
}

// flowBench is what is measured.
type flowBench struct {
	bench
	sizes         []int
	flows, rounds int
}

// maxFlows is how many connections the kernel tracks by default on small machines; on others it is more.
const maxFlows = 1 << 16

// prepare puts the sizes in order and refuses what cannot be measured.
func (b *flowBench) prepare() error {
	slices.Sort(b.sizes)
	b.sizes = slices.Compact(b.sizes)
	switch {
	case b.rounds < 1:
		return fmt.Errorf("--rounds: %d is not a positive number", b.rounds)
	case b.flows < 1 || b.flows > maxFlows:
		return fmt.Errorf("--flows: %d is not between 1 and %d", b.flows, maxFlows)
	}
	for _, n := range b.sizes {
		switch {
		case n < 0 || n > maxServices:
			return fmt.Errorf("--sizes: %d is not between 0 and %d", n, maxServices)
		case n > 0 && b.flows > n*flowSockets:
			return fmt.Errorf("--flows: %d is more than %d to each of %d Services", b.flows, flowSockets, n)
		}
		b.services = max(n, 1) // the most come last: there must be addresses for all their endpoints
	}
	return nil
}

const (
	// kindsSize is what the kinds of Services are measured at, or the largest size below it.
	kindsSize = 10000
	// growsFrom is how many Services tables begin with that grow.
	growsFrom, growsSteps = 10, 10
)

// variants gives everything there is to measure, in the order of the table.
func (b *flowBench) variants() []*flowVariant {
	var out []*flowVariant
	add := func(kind flowKind, services int) {
		out = append(out, &flowVariant{flowBench: b, flowFigures: flowFigures{Kind: kind, Services: services}})
	}
	if _, err := exec.LookPath("nft"); err == nil {
		add(conntrackAlone, 0)
		add(oneDNATRule, 0)
	}
	kindsAt := 0
	for _, n := range b.sizes {
		add(freshTables, n)
		if n > growsFrom {
			add(grownTables, n)
		}
		if kindsAt == 0 || n <= kindsSize {
			kindsAt = n
		}
	}
	if kindsAt > 0 {
		add(masqueradedFlows, kindsAt)
		add(stickyServices, kindsAt)
		add(externalLocal, kindsAt)
	}
	return out
}

// flowKind tells what a variant measures.
type flowKind string

// The kinds. The first two are no tables of Verdict's.
const (
	conntrackAlone   flowKind = "conntrack"
	oneDNATRule      flowKind = "dnat"
	freshTables      flowKind = "fresh"
	grownTables      flowKind = "grown"
	masqueradedFlows flowKind = "masqueraded"
	stickyServices   flowKind = "sticky"
	externalLocal    flowKind = "external-local"
)

// name is a variant's name for people.
func (f *flowFigures) name() string {
	of := thousands(f.Services) + " Services"
	switch f.Kind {
	case conntrackAlone:
		return "conntrack alone"
	case oneDNATRule:
		return "one dnat rule"
	case freshTables:
		return of
	}
	return of + ", " + strings.ReplaceAll(string(f.Kind), "-local", " Local")
}

// flowResult is what "bench flow" reports.
type flowResult struct {
	Endpoints int           `json:"endpoints"`
	Flows     int           `json:"flows"`
	Rounds    int           `json:"rounds"`
	Variants  []flowFigures `json:"variants"`
}

// flowFigures is what is reported of a variant. Times are those of one flow.
type flowFigures struct {
	Kind     flowKind `json:"kind"`
	Services int      `json:"services"`
	// Elements are those of Verdict's tables.
	Elements int     `json:"elements"`
	Median   float64 `json:"median_us"`
	Minimum  float64 `json:"minimum_us"`
	// AboveFloor is by how much the median is above that of one dnat rule; it is left out where there is no nft.
	AboveFloor *float64 `json:"above_floor_us,omitempty"`
	// Translated and Masqueraded count the flows of a round whose destination and whose source was changed.
	Translated  int `json:"translated"`
	Masqueraded int `json:"masqueraded"`
}

// flowReport makes a result of what was measured.
func (b *flowBench) flowReport(variants []*flowVariant) *flowResult {
	out := &flowResult{Endpoints: b.endpoints, Flows: b.flows, Rounds: b.rounds}
	var floor *float64
	for _, v := range variants {
		times := sorted(v.times)
		v.Median, v.Minimum = microseconds(percentile(times, 50)), microseconds(times[0])
		if v.Kind == oneDNATRule {
			floor = &v.Median
		}
	}
	for _, v := range variants {
		if floor != nil {
			above := v.Median - *floor
			v.AboveFloor = &above
		}
		out.Variants = append(out.Variants, v.flowFigures)
	}
	return out
}

func (r *flowResult) print(s *show) {
	title := fmt.Sprintf("Flow: a new UDP flow to Services with %s endpoints each, %s flows in each of %d rounds",
		thousands(r.Endpoints), thousands(r.Flows), r.Rounds)
	s.line("%s", s.paint(bold, title))
	s.line("")
	c := columns{36, 12, 12, 18, 12}
	s.line("  %s", s.paint(dim, c.row("", "median", "minimum", "above the floor", "elements")))
	floor := false
	for i := range r.Variants {
		v := &r.Variants[i]
		above, elements := "", ""
		if v.AboveFloor != nil && v.Kind != oneDNATRule {
			above, floor = flowTime(*v.AboveFloor), true
		}
		if v.Kind != conntrackAlone && v.Kind != oneDNATRule {
			elements = thousands(v.Elements)
		}
		s.line("  %s", c.row(v.name(), flowTime(v.Median), flowTime(v.Minimum), above, elements))
	}
	about := "  The floor is one dnat rule without a lookup. All is processor time of the thread that sends."
	if !floor {
		about = "  There is no floor beside it: nft, which writes its rule, is not installed."
	}
	s.line("\n%s", s.paint(dim, about))
}

// flowTime writes a time of some microseconds, given in microseconds.
func flowTime(us float64) string { return fmt.Sprintf("%.2f µs", us) }
