package nft

import "github.com/verdict-proxy/verdict/sync/dataplane"

// Counting says what is counted: a counter costs CounterBytes for each processor that there could be, so that what is little on
// two is gigabytes on many.
type Counting uint8

// The levels of counting.
const (
	// CountNothing counts only what rules refuse.
	CountNothing Counting = iota
	// CountFrontends counts connections at the addresses of Services.
	CountFrontends
	// CountEndpoints counts them at each endpoint, too.
	CountEndpoints
	numCountings
)

var countingNames = [numCountings]string{dataplane.CountedNothing, dataplane.CountedFrontends, dataplane.CountedEndpoints}

// String gives the name that receipts, metrics and the revision have for it.
func (c Counting) String() string { return countingNames[c] }

func (c Counting) frontends() bool { return c >= CountFrontends }
func (c Counting) endpoints() bool { return c >= CountEndpoints }

// CounterBytes is what a counter takes for each possible processor.
const CounterBytes = 16

// within gives the highest level for which a budget of counters is enough. Less than the present one is taken at once, more only
// when it would use half of the budget: so it does not go to and fro.
func (c Counting) within(budget, frontends, endpoints int) Counting {
	need := [numCountings]int{CountFrontends: frontends, CountEndpoints: frontends + endpoints}
	level := CountEndpoints
	for level > CountNothing && (need[level] > budget || level > c && 2*need[level] > budget) {
		level--
	}
	return level
}
