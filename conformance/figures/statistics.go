package figures

import (
	"math"
	"slices"
)

// Percentile gives the value that a share p (0 to 1) of the values does not exceed, by nearest rank: always one that was measured.
// Of no values it is NaN.
func Percentile(values []float64, p float64) float64 {
	if len(values) == 0 {
		return math.NaN()
	}
	sorted := slices.Sorted(slices.Values(values))
	rank := int(math.Ceil(p*float64(len(sorted)))) - 1
	return sorted[min(max(rank, 0), len(sorted)-1)]
}

// Median gives the value in the middle, of an even number the mean of the two there; NaN of none.
func Median(values []float64) float64 {
	n := len(values)
	if n == 0 {
		return math.NaN()
	}
	sorted := slices.Sorted(slices.Values(values))
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

// Spread is what repeated measurements say of one thing.
type Spread struct {
	Median, Min, Max float64
	// N is how many there are; 0 means that the rest says nothing.
	N int
	// AtLeast says that the median is a limit that was hit: the true value is higher.
	AtLeast bool
}

// spreadOf gives the spread of values; those of limits hit count as the limit.
func spreadOf(values []float64, limits int) Spread {
	if len(values) == 0 {
		return Spread{}
	}
	// A limit is the largest value there can be, so the median is one as soon as it has half of them.
	return Spread{Median(values), slices.Min(values), slices.Max(values), len(values), 2*limits >= len(values) && limits > 0}
}

// Quantiles are the median and the 99th percentile of all spans of some cells, in milliseconds.
type Quantiles struct {
	P50, P99 Spread
}

// quantilesOf puts the spans of all repeats together.
func quantilesOf(all []Spans) Quantiles {
	var values []float64
	open := 0
	for _, s := range all {
		values = append(values, s.Milliseconds...)
		open += s.Open
	}
	quantile := func(p float64) Spread {
		s := Spread{Median: Percentile(values, p), N: len(values)}
		s.AtLeast = float64(len(values)-open) < p*float64(len(values))
		return s
	}
	if len(values) == 0 {
		return Quantiles{}
	}
	return Quantiles{quantile(0.5), quantile(0.99)}
}
