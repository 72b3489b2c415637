// Package units writes numbers, sizes and times for people.
package units

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Thousands writes a number with commas: 1,100,000.
func Thousands(n int) string {
	text := strconv.Itoa(n)
	for i := len(text) - 3; i > 0 && text[i-1] != '-'; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return text
}

// Bytes writes a number of bytes: 12.3 MB, or kB below a megabyte.
func Bytes(n int64) string {
	if n < 1e6 {
		return fmt.Sprintf("%.1f kB", float64(n)/1e3)
	}
	return fmt.Sprintf("%.1f MB", float64(n)/1e6)
}

// Brief writes a duration with the digits that matter: 143 µs, 2.4 ms, 6.1 s.
func Brief(d time.Duration) string {
	switch {
	case d < time.Millisecond:
		return fmt.Sprintf("%d µs", d.Microseconds())
	case d < time.Second:
		return fmt.Sprintf("%.1f ms", float64(d.Microseconds())/1000)
	}
	return fmt.Sprintf("%.1f s", d.Seconds())
}

// Span writes a duration in whole seconds: 10s, 1m30s, 30m, 1h, 1h0m5s.
func Span(d time.Duration) string {
	text := d.Truncate(time.Second).String()
	for _, zero := range [...]struct{ after, of string }{{"m", "0s"}, {"h", "0m"}} {
		if strings.HasSuffix(text, zero.after+zero.of) {
			text = strings.TrimSuffix(text, zero.of)
		}
	}
	return text
}
