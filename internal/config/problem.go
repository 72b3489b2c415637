package config

import (
	"strconv"
	"strings"
	"unicode/utf8"
)

// Problem is one thing to say about a configuration. It prints like
//
//	/var/lib/kube-proxy/config.conf:12: conntrack.min: -1 is below 0; the default is used, 131072
//
// and leaves out the parts that are unknown, which are zero.
type Problem struct {
	Severity Severity
	// File is empty for what a flag says.
	File string
	// Line counts from 1 in File.
	Line int
	// Field is the path in the document, with list indices in brackets, or a flag with its dashes.
	Field string
	// Text says what is wrong, and Then what is done about it, if that is not a part of it.
	Text, Then string
}

// Severity says how bad a Problem is.
type Severity uint8

// The severities.
const (
	// Note is what somebody who moves from kube-proxy should know: a setting without effect, or with another one.
	Note Severity = iota
	// Warning is about something that is passed over, such as an unknown field.
	Warning
	// Bad is a value that cannot be meant.
	Bad
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

// path names a field of a Document, step by step; the steps into a list are "[0]", "[1]".
type path []string

func (p path) key(k string) path { return append(p[:len(p):len(p)], k) }

func (p path) index(i int) path { return p.key("[" + strconv.Itoa(i) + "]") }

func (p path) String() string {
	var b strings.Builder
	for i, step := range p {
		if i > 0 && step[:min(1, len(step))] != "[" {
			b.WriteByte('.')
		}
		b.WriteString(step)
	}
	return clip(b.String())
}

// maxQuoted is how much of somebody's text a Problem repeats.
const maxQuoted = 64

// clip cuts a text for a Problem, and makes control characters visible.
func clip(s string) string {
	s = cut(s)
	for _, r := range s {
		if !strconv.IsPrint(r) || r == utf8.RuneError {
			return strconv.Quote(s)
		}
	}
	return s
}

// quote is clip with quotation marks around it always.
func quote(s string) string { return strconv.Quote(cut(s)) }

func cut(s string) string {
	if len(s) <= maxQuoted {
		return s
	}
	return strings.ToValidUTF8(s[:maxQuoted], "") + "..."
}
