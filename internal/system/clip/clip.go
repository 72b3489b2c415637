// Package clip bounds how much of a text that others wrote a message repeats.
package clip

import (
	"strconv"
	"strings"
	"unicode/utf8"
)

// Quoted is how many bytes of a user's value a message repeats.
const Quoted = 64

// Cut shortens a text to n bytes of valid UTF-8, followed by "...". A text of up to n bytes stays as it is.
func Cut(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return strings.ToValidUTF8(s[:n], "") + "..."
}

// Visible is Cut, and quotes a text that has control characters.
func Visible(s string, n int) string {
	s = Cut(s, n)
	for _, r := range s {
		if !strconv.IsPrint(r) || r == utf8.RuneError {
			return strconv.Quote(s)
		}
	}
	return s
}

// Quote is Cut at Quoted bytes, between quotation marks.
func Quote(s string) string { return strconv.Quote(Cut(s, Quoted)) }
