package config

import (
	"strconv"
	"strings"

	"github.com/verdict-proxy/verdict/internal/system/clip"
)

// Problem is one message about a configuration. It prints like
//
//	/var/lib/kube-proxy/config.conf:12: conntrack.min: -1 is below 0; the default is used, 131072
//
// and leaves out the parts that are unknown, which are zero.
type Problem struct {
	Severity Severity
	// File is empty if the problem is in a flag.
	File string
	// Line counts from 1 in File.
	Line int
	// Field is the path in the document, with list indices in brackets, or a flag with its dashes.
	Field string
	// Text describes the problem, and Then what Verdict does about it, if Text does not say so.
	Text, Then string
}

// Severity tells how serious a Problem is.
type Severity uint8

// The severities.
const (
	// Note informs users of kube-proxy: a setting has no effect, or another one.
	Note Severity = iota
	// Warning reports something that is ignored, such as an unknown field.
	Warning
	// Invalid reports an invalid value.
	Invalid
)

func (p *Problem) Error() string {
	var b strings.Builder
	if p.File != "" {
		b.WriteString(p.File)
		if p.Line > 0 {
			b.WriteString(":" + strconv.Itoa(p.Line))
		}
		b.WriteString(": ")
	}
	if p.Field != "" {
		b.WriteString(p.Field + ": ")
	}
	b.WriteString(p.Text)
	if p.Then != "" {
		b.WriteString("; " + p.Then)
	}
	return b.String()
}

// visible shortens a text for a Problem, and makes control characters visible.
func visible(s string) string { return clip.Visible(s, clip.Quoted) }
