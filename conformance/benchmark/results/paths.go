package results

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"
)

// Paths are what packets cost on nodes that stand beside each other, one for each proxy, measured by turns.
type Paths struct {
	Size   Size      `json:"size"`
	Repeat int       `json:"repeat"` // counted from 1
	Began  time.Time `json:"began"`
	Took   float64   `json:"took_s"`
	// Load is the machine's load average over a minute, as it was before.
	Load float64 `json:"load"`
	// Turns has, for each proxy and for Baseline and Tracking, a figure of each round for each path. Figures of the same
	// round were measured one right after the other.
	Turns map[string]map[Path][]float64 `json:"turns"`
	// Missing says why a proxy has no turns.
	Missing map[string]string `json:"missing,omitempty"`
	// Error says why there are no turns at all; empty if there are.
	Error string `json:"error,omitempty"`
}

// Tracking is the name of a node without a proxy that tracks connections and translates none. One of Baseline does not
// track them.
const Tracking = "conntrack"

// Path is where packets come from and what is measured of them. Those without a Service go straight to endpoints; the
// node of Baseline and that of Tracking have only these, and stand for the others there.
type Path string

// The paths. Forwarded packets come from a client that is not in the node's control group, the others from processes of
// the node. Times are microseconds of a processor.
const (
	ForwardedService     Path = "forwarded_service_us"
	ForwardedEndpoint    Path = "forwarded_endpoint_us"
	NodeService          Path = "node_service_us"
	NodeEndpoint         Path = "node_endpoint_us"
	ForwardedPacket      Path = "forwarded_packet_us"
	NodePacket           Path = "node_packet_us"
	ForwardedConnections Path = "forwarded_connections"
	NodeConnections      Path = "node_connections"
	ForwardedGigabits    Path = "forwarded_gigabits"
	NodeGigabits         Path = "node_gigabits"
)

// AllPaths are all of them, in the order in which they are measured.
var AllPaths = []Path{
	ForwardedService, ForwardedEndpoint, NodeService, NodeEndpoint, ForwardedPacket, NodePacket,
	ForwardedConnections, NodeConnections, ForwardedGigabits, NodeGigabits,
}

// direct is the path that a node without a proxy has instead.
func (p Path) direct() Path {
	switch p {
	case ForwardedService:
		return ForwardedEndpoint
	case NodeService:
		return NodeEndpoint
	}
	return p
}

// rate says that more is better. Differences of such are shares.
func (p Path) rate() bool { return !strings.HasSuffix(string(p), "_us") }

// minTurns is how many turns it takes to say anything of a difference: of fewer than six, no interval holds the median
// with a probability of 95%.
const minTurns = 6

// Difference is how much one node's figures differ from another's in the same rounds: microseconds more, or a share
// less 1. Median is over all rounds of all repeats, Low and High are its spread: where the true median lies with a
// probability of 95%, and what the repeats have for theirs. N is the number of rounds.
type Difference struct {
	Median, Low, High float64
	N                 int
}

// differenceOf sums up the differences of each repeat's rounds.
func differenceOf(repeats [][]float64) Difference {
	all := slices.Sorted(slices.Values(slices.Concat(repeats...)))
	d := Difference{N: len(all)}
	if d.N == 0 {
		return d
	}
	outside := medianRank(d.N)
	d.Median, d.Low, d.High = Median(all), all[outside], all[d.N-1-outside]
	for _, r := range repeats {
		if len(r) > 0 {
			d.Low, d.High = min(d.Low, Median(r)), max(d.High, Median(r))
		}
	}
	return d
}

// medianRank gives how many of n sorted values may be left out at either end, so that the rest still spans the median
// of what they are a sample of with a probability of 95%: each lies above it or below it as a coin falls.
func medianRank(n int) (outside int) {
	probability := math.Pow(0.5, float64(n)) // that exactly `outside` of n lie below
	sum := probability
	for 2*sum <= 0.05 {
		outside++
		probability *= float64(n-outside+1) / float64(outside)
		sum += probability
	}
	return max(outside-1, 0)
}

// Noise says that the difference is smaller than its spread, or that there are too few turns: it says nothing.
func (d Difference) Noise() bool {
	return d.N < minTurns || math.Abs(d.Median) < d.High-d.Low
}

// text prints the difference and its spread, or that it is within the noise.
func (d Difference) text(unit func(float64) string) string {
	switch {
	case d.N == 0:
		return none
	case d.Noise():
		return noise
	}
	return fmt.Sprintf("%s (%s to %s)", unit(d.Median), unit(d.Low), unit(d.High))
}

// short prints the difference alone.
func (d Difference) short(unit func(float64) string) string {
	if d.N == 0 || d.Noise() {
		return d.text(unit)
	}
	return unit(d.Median)
}

const noise = "within the noise"

// PathRow is what all repeats say of a path: the Spread of all turns, and how much they are Above those of the node
// without a proxy.
type PathRow struct {
	Spread
	Above Difference
}

// paths sums up all paths of a proxy.
func (r *Results) paths(size Size, proxy string) map[Path]PathRow {
	rows := map[Path]PathRow{}
	for _, path := range AllPaths {
		rows[path] = r.path(size, proxy, path)
	}
	return rows
}

func (r *Results) path(size Size, proxy string, path Path) (row PathRow) {
	own := path
	if proxy == Baseline || proxy == Tracking {
		own = path.direct()
	}
	var all []float64
	for _, p := range r.Paths {
		if p.Size == size {
			all = append(all, p.Turns[proxy][own]...)
		}
	}
	row.Spread = spreadOf(all, 0)
	if proxy != Baseline {
		row.Above = r.difference(size, proxy, Baseline, own, path.direct())
	}
	return row
}

// difference compares a path of one proxy with one of another, round by round.
func (r *Results) difference(size Size, proxy, other string, path, ofOther Path) Difference {
	var repeats [][]float64
	for _, p := range r.Paths {
		if p.Size != size {
			continue
		}
		a, b := p.Turns[proxy][path], p.Turns[other][ofOther]
		var differences []float64
		for i := range min(len(a), len(b)) {
			if path.rate() {
				differences = append(differences, a[i]/b[i]-1)
			} else {
				differences = append(differences, a[i]-b[i])
			}
		}
		repeats = append(repeats, differences)
	}
	return differenceOf(repeats)
}

// FindPaths gives the turns of a size; nil if there are none.
func (r *Results) FindPaths(size Size, repeat int) *Paths {
	for _, p := range r.Paths {
		if p.Size == size && p.Repeat == repeat {
			return p
		}
	}
	return nil
}
