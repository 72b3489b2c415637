package benchmark

import (
	"slices"
	"time"
)

// percentile gives the smallest of sorted samples that p percent of them do not exceed.
func percentile(sorted []time.Duration, p int) time.Duration {
	return sorted[max((len(sorted)*p+99)/100, 1)-1]
}

// sorted gives the samples in order.
func sorted(samples []time.Duration) []time.Duration {
	out := slices.Clone(samples)
	slices.Sort(out)
	return out
}

func microseconds(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }
func milliseconds(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e6 }
