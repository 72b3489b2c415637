package results

import (
	"math"
	"slices"
)

// Percentile gives the value that a share p (0 to 1) of the values does not exceed, by nearest rank: always one that
// was measured. Of no values it is NaN.
func Percentile(values []float64, p float64) float64 {
	if len(values) == 0 {
		return math.NaN()
	}
	return slices.Sorted(slices.Values(values))[rank(p, len(values))]
}

// rank is the index in n sorted values of the one that a share p of them does not exceed.
func rank(p float64, n int) int { return min(max(int(math.Ceil(p*float64(n)))-1, 0), n-1) }

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
	// AtLeast says that the median is a limit that was hit: the true value is higher. MaxAtLeast says the same of the
	// largest.
	AtLeast, MaxAtLeast bool
}

// spreadOf gives the spread of values; those of limits hit count as the limit.
func spreadOf(values []float64, limits int) Spread {
	if len(values) == 0 {
		return Spread{}
	}
	// A limit is the largest value there can be, so the median is one as soon as it has half of them.
	return Spread{
		Median(values),
		slices.Min(values),
		slices.Max(values),
		len(values),
		2*limits >= len(values) && limits > 0,
		limits > 0,
	}
}

// Quantiles are the median and the 99th percentile of all spans of some cells, in milliseconds.
type Quantiles struct {
	P50, P99 Spread
}

// quantilesOf puts the spans of all repeats together. What was not done by its limit takes longer than that, so with
// the limit in its place a quantile is never too high; if there is one up to where it lies, it may be too low.
func quantilesOf(all []Spans) Quantiles {
	var values, open []float64
	for _, s := range all {
		values = append(values, s.Milliseconds...)
		open = append(open, s.Milliseconds[len(s.Milliseconds)-s.Open:]...)
	}
	if len(values) == 0 {
		return Quantiles{}
	}
	slices.Sort(values)
	quantile := func(p float64) Spread {
		v := values[rank(p, len(values))]
		return Spread{Median: v, N: len(values), AtLeast: len(open) > 0 && slices.Min(open) <= v}
	}
	return Quantiles{quantile(0.5), quantile(0.99)}
}
