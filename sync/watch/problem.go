package watch

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Problem is one thing that is wrong with the input. It prints like
//
//	services.yaml:12: Service default/web: spec.ports[0].nodePort: 70000 is not a port (1-65535)
//
// and leaves out the parts that are unknown, which are zero.
type Problem struct {
	// File is the manifest's path as the source was given it; empty for objects of the Kubernetes API.
	File string
	// Line counts from 1 in File.
	Line int
	// Object is the kind and name: "Service default/web", "Node worker-1".
	Object string
	// Field is the path in the object, with list indices and map keys in brackets.
	Field string
	// Err says what is wrong and, where that isn't plain from it, what to do.
	Err error
}

func (p *Problem) Error() string {
	var b strings.Builder
	if p.File != "" {
		b.WriteString(p.File)
		if p.Line > 0 {
			b.WriteString(":" + strconv.Itoa(p.Line))
		}
		b.WriteString(": ")
	}
	for _, part := range []string{p.Object, p.Field} {
		if part != "" {
			b.WriteString(part + ": ")
		}
	}
	b.WriteString(p.Err.Error())
	return b.String()
}

// Unwrap gives Err.
func (p *Problem) Unwrap() error { return p.Err }

// findings gathers the problems of one object.
type findings struct {
	object string
	list   []*Problem
	// more is how many there are beyond those in the list.
	more int
}

// maxFindings is how many problems of one object are reported. Whoever writes objects may write as many wrong entries
// as the API server takes, which is a hundred thousand and more.
const maxFindings = 8

func objectName(kind string, n snapshot.Name) string {
	kind = short(kind)
	switch {
	case kind == "":
		return ""
	case n.Name == "":
		return kind
	case n.Namespace == "":
		return kind + " " + short(n.Name)
	}
	return kind + " " + short(n.Namespace) + "/" + short(n.Name)
}

// add notes a problem. The arguments must be bounded in length: see quote.
func (f *findings) add(field, format string, args ...any) {
	if len(f.list) == maxFindings {
		f.more++
		return
	}
	f.list = append(f.list, &Problem{Object: f.object, Field: field, Err: fmt.Errorf(format, args...)})
}

// all gives the problems, the last of which says how many more there are.
func (f *findings) all() []*Problem {
	if f.more == 0 {
		return f.list
	}
	return append(slices.Clip(f.list), &Problem{Object: f.object, Err: fmt.Errorf("... and %d more problems", f.more)})
}

// texts is the problems as one error, for comparing with what was said before; nil if there are none.
func texts(problems []*Problem) error {
	errs := make([]error, len(problems))
	for i, p := range problems {
		errs[i] = p
	}
	return errors.Join(errs...)
}

// maxQuoted is how much of a bad value an error repeats, and maxReason how much of another package's error. Values are
// whatever somebody wrote into a manifest.
const (
	maxQuoted = 64
	maxReason = 200
)

// short cuts s for a message and makes control characters visible.
func short(s string) string { return clip(s, maxQuoted) }

func clip(s string, n int) string {
	s = cut(s, n)
	for _, r := range s {
		if !strconv.IsPrint(r) || r == utf8.RuneError {
			return strconv.Quote(s)
		}
	}
	return s
}

// quote is short in quotation marks always.
func quote(s string) string {
	return strconv.Quote(cut(s, maxQuoted))
}

func cut(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return strings.ToValidUTF8(s[:n], "") + "..."
}
