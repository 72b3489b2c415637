package labtest

import "math"

// Plausible reports whether k of n tries may succeed that each do with a chance: one correct test in 10^9 has fewer, or
// more.
func Plausible(k, n int, chance float64) bool {
	log := func(i int) float64 {
		all, _ := math.Lgamma(float64(n + 1))
		some, _ := math.Lgamma(float64(i + 1))
		others, _ := math.Lgamma(float64(n - i + 1))
		return all - some - others + float64(i)*math.Log(chance) + float64(n-i)*math.Log1p(-chance)
	}
	below, above := 0.0, 0.0
	for i := range n + 1 {
		if i <= k {
			below += math.Exp(log(i))
		}
		if i >= k {
			above += math.Exp(log(i))
		}
	}
	return min(below, above) > 0.5e-9
}
