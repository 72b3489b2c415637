package benchmark

import (
	"cmp"
	"fmt"
	"os/exec"
	"slices"
	"strings"

	"github.com/verdict-proxy/verdict/internal/system/units"
)

// FlowOptions say what Flow measures. Services of Options is not used.
type FlowOptions struct {
	Options
	// Sizes are numbers of Services, Flows those of one round, Rounds how often each variant is measured.
	Sizes         []int
	Flows, Rounds int
	// KubeProxy is the program of a kube-proxy, whose rules are measured beside Verdict's. Empty stands for the one in the
	// PATH, if there is one.
	KubeProxy string
}

// maxFlows is how many connections the kernel tracks by default on small machines; on others it is more.
const maxFlows = 1 << 16

// Prepare sorts the sizes and refuses what cannot be measured. An error begins with the field's name in lower case.
func (o *FlowOptions) Prepare() error {
	slices.Sort(o.Sizes)
	o.Sizes = slices.Compact(o.Sizes)
	switch {
	case o.Rounds < 1:
		return fmt.Errorf("rounds: %d is not a positive number", o.Rounds)
	case o.Flows < 1 || o.Flows > maxFlows:
		return fmt.Errorf("flows: %d is not between 1 and %d", o.Flows, maxFlows)
	}
	for _, n := range o.Sizes {
		switch {
		case n < 0 || n > MaxServices:
			return fmt.Errorf("sizes: %d is not between 0 and %d", n, MaxServices)
		case n > 0 && o.Flows > n*flowSockets:
			return fmt.Errorf("flows: %d is more than %d to each of %d Services", o.Flows, flowSockets, n)
		}
		o.Services = max(n, 1) // the most come last: there must be addresses for all their endpoints
	}
	found, err := exec.LookPath(cmp.Or(o.KubeProxy, "kube-proxy"))
	if err != nil && o.KubeProxy != "" {
		return fmt.Errorf("kube-proxy: %w", err)
	}
	o.KubeProxy = found
	return nil
}

const (
	// kindsSize is what the kinds of Services are measured at, or the largest size below it. Of more Services, kube-proxy
	// would need minutes to write the rules.
	kindsSize = 10000
	// growsFrom is how many Services tables begin with that grow.
	growsFrom, growsSteps = 10, 10
)

// variants gives everything there is to measure, in the order of the table.
func (o *FlowOptions) variants() []*flowVariant {
	var out []*flowVariant
	add := func(kind FlowKind, services int) {
		out = append(out, &flowVariant{FlowOptions: o, FlowFigures: FlowFigures{Kind: kind, Services: services}})
	}
	if _, err := exec.LookPath("nft"); err == nil {
		add(conntrackAlone, 0)
		add(oneDNATRule, 0)
	}
	kindsAt := 0
	for _, n := range o.Sizes {
		add(freshTables, n)
		if n > growsFrom {
			add(grownTables, n)
		}
		if o.KubeProxy != "" && n > 0 && n <= kindsSize {
			add(kubeProxyTables, n)
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

// FlowKind says what a variant measures.
type FlowKind string

// The kinds. The first two are no tables of Verdict's.
const (
	conntrackAlone   FlowKind = "conntrack"
	oneDNATRule      FlowKind = "dnat"
	freshTables      FlowKind = "fresh"
	grownTables      FlowKind = "grown"
	kubeProxyTables  FlowKind = "kube-proxy"
	masqueradedFlows FlowKind = "masqueraded"
	stickyServices   FlowKind = "sticky"
	externalLocal    FlowKind = "external-local"
)

// ours says whether the tables are Verdict's.
func (k FlowKind) ours() bool { return k != conntrackAlone && k != oneDNATRule && k != kubeProxyTables }

// FlowPath is where packets come from and where they go to.
type FlowPath string

// The paths: from the node itself, or from a client whose packets it forwards; to Services, or straight to endpoints;
// and packets of a flow from the client to a Service that both sides know already.
const (
	nodeToService     FlowPath = "node_to_service"
	nodeToEndpoint    FlowPath = "node_to_endpoint"
	clientToService   FlowPath = "client_to_service"
	clientToEndpoint  FlowPath = "client_to_endpoint"
	establishedPacket FlowPath = "established_packet"
)

var flowPaths = [...]FlowPath{nodeToService, nodeToEndpoint, clientToService, clientToEndpoint, establishedPacket}

// FlowTime is what one flow, or one packet of an established flow, takes.
type FlowTime struct {
	Median  float64 `json:"median_us"`
	Minimum float64 `json:"minimum_us"`
}

// Name is a variant's name for people.
func (f *FlowFigures) Name() string {
	of := units.Thousands(f.Services) + " Services"
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

// FlowResult is what Flow measured.
type FlowResult struct {
	Endpoints int           `json:"endpoints"`
	Flows     int           `json:"flows"`
	Rounds    int           `json:"rounds"`
	Variants  []FlowFigures `json:"variants"`
}

// FlowFigures is what is reported of a variant. Times are those of one flow.
type FlowFigures struct {
	Kind     FlowKind `json:"kind"`
	Services int      `json:"services"`
	// Elements are those of Verdict's tables.
	Elements int `json:"elements"`
	// Paths are the times of each path.
	Paths map[FlowPath]FlowTime `json:"paths"`
	// Translated and Masqueraded count the flows of a round from the node to Services whose destination and whose source
	// was changed.
	Translated  int `json:"translated"`
	Masqueraded int `json:"masqueraded"`
}

// report makes a result of what was measured.
func (o *FlowOptions) report(variants []*flowVariant) *FlowResult {
	out := &FlowResult{Endpoints: o.Endpoints, Flows: o.Flows, Rounds: o.Rounds}
	for _, v := range variants {
		v.Paths = map[FlowPath]FlowTime{}
		for path, times := range v.times {
			times = sorted(times)
			v.Paths[path] = FlowTime{microseconds(percentile(times, 50)), microseconds(times[0])}
		}
		out.Variants = append(out.Variants, v.FlowFigures)
	}
	return out
}
