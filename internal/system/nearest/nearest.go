// Package nearest guesses which of some names was meant by one that is none of them.
package nearest

import "strings"

// maxName bounds in bytes what is compared: whoever writes a name may write it at any length.
const maxName = 64

// Of returns the name that was probably meant; "" if none is near.
func Of(name string, names []string) string {
	best, least := "", 3
	for _, n := range names {
		if strings.EqualFold(n, name) {
			return n
		}
		if d := distance(name, n); d < least && d < len(name)/2 {
			best, least = n, d
		}
	}
	return best
}

// distance is the number of letters to add, leave out, replace or swap with the next one that make one name the other.
func distance(a, b string) int {
	if len(a) > maxName || len(b) > maxName {
		return maxName
	}
	before, last, row := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		before, last, row = last, row, before
		row[0] = i + 1
		for j := range len(b) {
			cost := 1
			if a[i] == b[j] {
				cost = 0
			}
			row[j+1] = min(last[j+1]+1, row[j]+1, last[j]+cost)
			if i > 0 && j > 0 && a[i] == b[j-1] && a[i-1] == b[j] {
				row[j+1] = min(row[j+1], before[j-1]+1)
			}
		}
	}
	return row[len(b)]
}
