package watch

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/verdict-proxy/verdict/internal/system/clip"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// Problem is one error in the input. It prints like
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
	// Err says what is wrong and, if that is not obvious, what to do.
	Err error
	// Warning says that all else in the object counts, also where another invalid value would keep its last good version
	// in force.
	Warning bool
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

// Unwrap returns Err.
func (p *Problem) Unwrap() error { return p.Err }

// problemList collects the problems of one object.
type problemList struct {
	object string
	list   []*Problem
	// warnings have a list of their own, so that they leave no invalid value out.
	warnings []*Problem
	// omitted is how many there are beyond those in the lists.
	omitted int
}

// maxObjectProblems is how many problems of one object are reported, and how many warnings. An object may have as many
// invalid entries as the API server accepts, which is more than a hundred thousand.
const maxObjectProblems = 8

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

// add adds a problem. The arguments must be bounded in length: see quote.
func (f *problemList) add(field, format string, args ...any) {
	if len(f.list) == maxObjectProblems {
		f.omitted++
		return
	}
	f.list = append(f.list, &Problem{Object: f.object, Field: field, Err: fmt.Errorf(format, args...)})
}

// warn is add for a Warning.
func (f *problemList) warn(field, format string, args ...any) {
	if len(f.warnings) == maxObjectProblems {
		f.omitted++
		return
	}
	p := &Problem{Object: f.object, Field: field, Err: fmt.Errorf(format, args...), Warning: true}
	f.warnings = append(f.warnings, p)
}

// problems returns the problems; the last one says how many were omitted.
func (f *problemList) problems() []*Problem {
	all := slices.Concat(f.list, f.warnings)
	if f.omitted > 0 {
		all = append(all, &Problem{Object: f.object, Err: fmt.Errorf("... and %d more problems", f.omitted),
			Warning: len(f.list) == 0})
	}
	return all
}

// invalid reports whether one of the problems is more than a Warning.
func invalid(problems []*Problem) bool {
	return slices.ContainsFunc(problems, func(p *Problem) bool { return !p.Warning })
}

// joinProblems joins the problems into one error, for comparing with what was reported before; nil if there are none.
func joinProblems(problems []*Problem) error {
	errs := make([]error, len(problems))
	for i, p := range problems {
		errs[i] = p
	}
	return errors.Join(errs...)
}

// short truncates s for a message and escapes control characters.
func short(s string) string { return clip.Visible(s, clip.Quoted) }

// quote is short, but always with quotation marks.
func quote(s string) string { return clip.Quote(s) }
