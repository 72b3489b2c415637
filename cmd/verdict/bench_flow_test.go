package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/nft/kernel"
	"github.com/verdict-proxy/verdict/sync/dataplane"
)

// flowJSON runs a small measurement, and reads its one object.
func flowJSON(t *testing.T, args ...string) (r flowResult) {
	t.Helper()
	small := []string{"flow", "--endpoints", "3", "--flows", "200", "--rounds", "2", "--json"}
	out := benchOutput(t, append(small, args...)...)
	d := json.NewDecoder(strings.NewReader(out))
	d.DisallowUnknownFields()
	labtest.Check(t, d.Decode(&r))
	if d.More() {
		t.Errorf("more than one object: %s", out)
	}
	if r.Endpoints != 3 || r.Flows != 200 || r.Rounds != 2 {
		t.Errorf("%+v", r)
	}
	for _, v := range r.Variants {
		if v.Minimum <= 0 || v.Median < v.Minimum || v.Median > 1e6 {
			t.Errorf("%s: median %v, minimum %v", v.name(), v.Median, v.Minimum)
		}
	}
	return r
}

// shownFlows gives what people get to see of a result.
func shownFlows(t *testing.T, r *flowResult) string {
	t.Helper()
	var out bytes.Buffer
	labtest.Check(t, (&bench{}).report(&out, r))
	return out.String()
}

func TestBenchFlow(t *testing.T) {
	r := flowJSON(t, "--sizes", "20,0,20")
	// Of each Service the frontend, the pool, the cluster IP and 3 slots; all endpoints are on this node, and may reach
	// themselves; the range.
	const all = 20*(3+3) + 60 + 1
	want := []struct {
		name                              string
		elements, translated, masqueraded int
	}{
		{"conntrack alone", 0, 0, 0},
		{"one dnat rule", 0, 200, 0},
		{"0 Services", 1, 0, 0},
		{"20 Services", all, 200, 0},
		{"20 Services, grown", all, 200, 0},
		{"20 Services, masqueraded", all, 200, 200},
		// How clients are remembered, the pool of those who are, and its members.
		{"20 Services, sticky", all + 20*(1+1+3), 200, 0},
		// A frontend, its other pool for clients from outside, and what is masqueraded; both pools have endpoints here.
		{"20 Services, external Local", all + 20*(3+1+3), 200, 200},
	}
	if len(r.Variants) != len(want) {
		t.Fatalf("%+v, want %d variants", r.Variants, len(want))
	}
	shown := shownFlows(t, &r)
	for i, w := range want {
		v := &r.Variants[i]
		if v.name() != w.name || v.Elements != w.elements || v.Translated != w.translated {
			t.Errorf("%s: %+v, want %+v", v.name(), v, w)
		}
		// A random port may be the one that the packet had. The floor may lead two flows of one port to one endpoint.
		if v.Masqueraded > w.masqueraded+2 || v.Masqueraded < w.masqueraded-2 {
			t.Errorf("%s: %d flows are masqueraded, want %d", w.name, v.Masqueraded, w.masqueraded)
		}
		if v.AboveFloor == nil || math.Abs(*v.AboveFloor-(v.Median-r.Variants[1].Median)) > 1e-6 {
			t.Errorf("%s: %v above the floor", w.name, v.AboveFloor)
		}
		for _, text := range []string{w.name + "  ", flowTime(v.Median), flowTime(v.Minimum)} {
			if !strings.Contains(shown, text) {
				t.Errorf("%q is not in what is printed:\n%s", text, shown)
			}
		}
	}
	title, above := "3 endpoints each, 200 flows in each of 2 rounds", flowTime(*r.Variants[3].AboveFloor)
	for _, text := range []string{title, above, " 181\n"} {
		if !strings.Contains(shown, text) {
			t.Errorf("%q is not in what is printed:\n%s", text, shown)
		}
	}
}

// Without nft there is no floor, and nothing above it.
func TestBenchFlowWithoutNft(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	r := flowJSON(t, "--sizes", "0")
	if len(r.Variants) != 1 || r.Variants[0].name() != "0 Services" || r.Variants[0].AboveFloor != nil {
		t.Errorf("%+v", r)
	}
	if shown := shownFlows(t, &r); !strings.Contains(shown, "nft, which writes its rule, is not installed") {
		t.Error(shown)
	}
}

// Each packet of each round is the first of a flow: Verdict's counters have them all. Clients of sticky Services go
// where they went before.
func TestBenchFlowCounts(t *testing.T) {
	for _, kind := range []flowKind{freshTables, grownTables, masqueradedFlows, stickyServices, externalLocal} {
		t.Run(string(kind), func(t *testing.T) {
			t.Cleanup(func() { nothingLeft(t) })
			b := &flowBench{bench: bench{endpoints: 3}, flows: 200}
			v := &flowVariant{flowBench: b, flowFigures: flowFigures{Kind: kind, Services: 20}}
			defer func() { labtest.Check(t, v.close()) }()
			labtest.Check(t, v.open())
			endpoints := map[string][]string{}
			for n := range 3 {
				labtest.Check(t, v.round(n == 0))
				held, err := v.connections.ConntrackTableList(netlink.ConntrackTable, unix.AF_INET)
				labtest.Check(t, err)
				for _, f := range held {
					service := fmt.Sprint(f.Forward.DstIP)
					endpoints[service] = append(endpoints[service], fmt.Sprint(f.Reverse.SrcIP))
				}
			}
			if packets := countedFlows(t, v); packets != 3*200 || len(v.times) != 2 || len(endpoints) != 20 {
				t.Errorf("%d packets counted, %d rounds timed, %d Services used", packets, len(v.times), len(endpoints))
			}
			for service, all := range endpoints {
				slices.Sort(all)
				used := len(slices.Compact(slices.Clone(all)))
				if len(all) != 3*200/20 || (used == 1) != (kind == stickyServices) {
					t.Errorf("%s: %d flows to %d endpoints", service, len(all), used)
				}
			}
		})
	}
}

// countedFlows is how many packets were counted at all Services.
func countedFlows(t *testing.T, v *flowVariant) (packets uint64) {
	t.Helper()
	var counters *kernel.Counters
	labtest.Check(t, v.host.Do(func() (err error) { counters, err = kernel.OpenCounters(); return err }))
	defer counters.Close()
	labtest.Check(t, counters.AllFrontends(func(c dataplane.FrontendCount) { packets += c.Packets }))
	return packets
}

// All packets of a round are flows of their own, whatever the number of Services, and use them evenly.
func TestBenchFlowPlan(t *testing.T) {
	for services, flows := range map[int]int{0: 1000, 1: 64, 20: 1280, 63: 4000, 64: 4096, 1000: 8000} {
		v := &flowVariant{flowBench: &flowBench{flows: flows}, flowFigures: flowFigures{Services: services}}
		v.plan()
		seen, uses := map[string]bool{}, map[[4]byte]int{}
		for _, s := range v.sends {
			seen[fmt.Sprint(s.socket, s.to)] = true
			uses[s.to.Addr]++
			if a := netip.AddrFrom4(s.to.Addr); services > 0 && !netip.MustParsePrefix("10.0.0.0/10").Contains(a) {
				t.Errorf("%v is no Service", a)
			}
		}
		if len(seen) != flows || len(uses) != min(flows, max(services, flows*(1-min(services, 1)))) {
			t.Errorf("%d Services: %d flows of %d, to %d addresses", services, len(seen), flows, len(uses))
		}
	}
}

func TestBenchFlowSteps(t *testing.T) {
	for services, want := range map[int][]int{
		20:     {10, 11, 11, 12, 13, 14, 15, 16, 17, 19, 20},
		100000: {10, 25, 63, 158, 398, 1000, 2512, 6310, 15849, 39811, 100000},
	} {
		v := &flowVariant{flowFigures: flowFigures{Kind: grownTables, Services: services}}
		if got := v.steps(); !slices.Equal(got, want) {
			t.Errorf("%v, want %v", got, want)
		}
	}
}

// The kinds of Services are measured at 10,000, or what is next to it.
func TestBenchFlowVariants(t *testing.T) {
	for sizes, want := range map[string]int{
		"0,1000,10000,100000": 10000, "0,20": 20, "100,5000,50000": 5000, "20000,30000": 20000, "0": 0,
	} {
		b := &flowBench{rounds: 1, flows: 1}
		labtest.Check(t, json.Unmarshal([]byte("["+sizes+"]"), &b.sizes))
		labtest.Check(t, b.prepare())
		got := 0
		for _, v := range b.variants() {
			if v.Kind == stickyServices {
				got = v.Services
			}
		}
		if got != want {
			t.Errorf("--sizes %s: kinds of Services are measured at %d, want %d", sizes, got, want)
		}
	}
}

func TestBenchFlowFlags(t *testing.T) {
	for args, want := range map[string]string{
		"--sizes -1":                    "--sizes: -1 is not",
		"--sizes 3000000":               "--sizes: 3000000 is not",
		"--sizes 100000 --endpoints 42": "--endpoints: 42 is not between 1 and 41",
		"--rounds 0":                    "--rounds: 0 is not",
		"--flows 0":                     "--flows: 0 is not",
		"--sizes 0,100":                 "--flows: 8000 is more than 64 to each of 100 Services",
	} {
		root := newRoot()
		root.SetArgs(append([]string{"bench", "flow"}, strings.Fields(args)...))
		root.SetOut(t.Output())
		root.SetErr(t.Output())
		if err := root.ExecuteContext(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v; want %q", args, err, want)
		}
	}
}

// An interrupted measurement ends soon, prints nothing and leaves nothing.
func TestBenchFlowInterrupted(t *testing.T) {
	for _, after := range []time.Duration{10 * time.Millisecond, time.Second} {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		time.AfterFunc(after, cancel)
		var out bytes.Buffer
		root := newRoot()
		root.SetArgs([]string{"bench", "flow", "--sizes", "20", "--flows", "200", "--rounds", "1000000"})
		root.SetOut(&out)
		root.SetErr(t.Output())
		err := root.ExecuteContext(ctx)
		var status exitStatus
		if !errors.As(err, &status) || status != exitError || out.Len() > 0 {
			t.Errorf("interrupted after %v, it ended with %v and printed %q", after, err, &out)
		}
		nothingLeft(t)
	}
}
