package config

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	logsapi "k8s.io/component-base/logs/api/v1"

	"github.com/verdict-proxy/verdict/internal/system/clip"
	"github.com/verdict-proxy/verdict/internal/system/nearest"
	"github.com/verdict-proxy/verdict/internal/system/yamltree"
)

// decoder decodes a document into a Go value, field by field. The decoders of encoding/json and Kubernetes stop at the
// first invalid value and know no lines. This one reports each invalid value, leaves its field unset, and decodes the
// rest.
type decoder struct {
	file     string
	at       *position
	problems []*Problem
	// fieldErrors are the values that do not fit their types; rejected has the paths of these fields and entries of lists.
	fieldErrors []fieldError
	rejected    map[string]bool
	// unknown counts the unknown fields.
	unknown int
}

// maxUnknown bounds how many unknown fields are reported.
const maxUnknown = 20

func (d *decoder) reportHere(p yamltree.Path, text string) {
	d.problems = append(d.problems,
		&Problem{Severity: Warning, File: d.file, Line: d.at.line(trimKind(p)), Field: visible(p.String()), Text: text})
}

// trimKind returns the path within its own document.
func trimKind(p yamltree.Path) yamltree.Path {
	if len(p) > 0 && p[0] == verdictKind {
		return p[1:]
	}
	return p
}

// decodeDocument decodes a whole document into out, a pointer to a struct. p is the path of the document.
func (d *decoder) decodeDocument(p yamltree.Path, fields map[string]any, out any) {
	if d.at.tree != nil {
		for _, twice := range duplicateKeys(d.at.tree, p) {
			d.reportHere(twice, "it is set twice; the last value applies")
		}
	}
	d.decodeValue(p, fields, reflect.ValueOf(out).Elem())
}

// decodeValue decodes one value. If it does not fit the type, out stays as it is.
func (d *decoder) decodeValue(p yamltree.Path, in any, out reflect.Value) {
	switch {
	case in == nil && !decodesItself(out): // as kube-proxy's decoder has it, that is as good as nothing; but no duration
	case out.Kind() == reflect.Pointer:
		v := reflect.New(out.Type().Elem())
		before := len(d.rejected)
		if d.decodeValue(p, in, v.Elem()); len(d.rejected) == before {
			out.Set(v)
		}
	case decodesItself(out):
		d.decodeScalar(p, in, out)
	case out.Kind() == reflect.Struct:
		d.decodeStruct(p, in, out)
	case out.Kind() == reflect.Slice:
		d.decodeList(p, in, out)
	case out.Kind() == reflect.Map:
		d.decodeMap(p, in, out)
	default:
		d.decodeScalar(p, in, out)
	}
}

func decodesItself(v reflect.Value) bool {
	_, ok := v.Addr().Interface().(json.Unmarshaler)
	return ok
}

func (d *decoder) decodeStruct(p yamltree.Path, in any, out reflect.Value) {
	fields, ok := in.(map[string]any)
	if !ok {
		d.rejectValue(p, describe(in)+", but fields are expected")
		return
	}
	known := yamltree.Fields(out.Type())
	for _, name := range slices.Sorted(maps.Keys(fields)) {
		if index, ok := known[name]; ok {
			d.decodeValue(p.Key(name), fields[name], out.FieldByIndex(index))
			continue
		}
		if d.unknown++; d.unknown > maxUnknown {
			continue // it is quite another file
		}
		text := "unknown field, ignored"
		if like := nearest.Of(name, slices.Sorted(maps.Keys(known))); like != "" {
			text += " (did you mean " + like + "?)"
		}
		d.reportHere(p.Key(name), text)
	}
}

// decodeList keeps an empty entry for each invalid one, so that the others keep their indices.
func (d *decoder) decodeList(p yamltree.Path, in any, out reflect.Value) {
	entries, ok := in.([]any)
	if !ok {
		d.rejectValue(p, describe(in)+" is not a list")
		return
	}
	v := reflect.MakeSlice(out.Type(), len(entries), len(entries))
	for i, e := range entries {
		d.decodeValue(p.Index(i), e, v.Index(i))
	}
	out.Set(v)
}

func (d *decoder) decodeMap(p yamltree.Path, in any, out reflect.Value) {
	entries, ok := in.(map[string]any)
	if !ok {
		d.rejectValue(p, describe(in)+", but names with values are expected")
		return
	}
	out.Set(reflect.MakeMap(out.Type()))
	for _, name := range slices.Sorted(maps.Keys(entries)) {
		v := reflect.New(out.Type().Elem()).Elem()
		before := len(d.rejected)
		if d.decodeValue(p.Key(name), entries[name], v); len(d.rejected) == before {
			out.SetMapIndex(reflect.ValueOf(name), v)
		}
	}
}

// decodeScalar lets encoding/json decode a single value.
func (d *decoder) decodeScalar(p yamltree.Path, in any, out reflect.Value) {
	text, err := json.Marshal(in)
	v := reflect.New(out.Type())
	if err == nil {
		err = json.Unmarshal(text, v.Interface())
	}
	if err != nil {
		d.rejectValue(p, mismatch(in, out.Type()))
		return
	}
	out.Set(v.Elem())
}

// rejectValue records that a value does not fit its type. It is replaced when everything is read.
func (d *decoder) rejectValue(p yamltree.Path, text string) {
	d.rejected[p.String()] = true
	c := fieldError{at: p, entry: -1, text: text, decoded: true}
	if i, ok := entryOf(p); ok {
		c.at, c.entry = p[:len(p)-1], i
	}
	d.fieldErrors = append(d.fieldErrors, c)
}

// entryOf returns the index of a path that ends in a list.
func entryOf(p yamltree.Path) (int, bool) {
	step := p[max(0, len(p)-1):]
	if len(step) == 0 || !strings.HasPrefix(step[0], "[") {
		return 0, false
	}
	i, err := strconv.Atoi(strings.Trim(step[0], "[]"))
	return i, err == nil
}

var (
	typeDuration     = reflect.TypeFor[metav1.Duration]()
	typeLogDuration  = reflect.TypeFor[logsapi.TimeOrMetaDuration]()
	typeQuantity     = reflect.TypeFor[resource.QuantityValue]()
	exampleDurations = "not a duration such as 30s or 1h30m"
)

// mismatch explains why a value does not fit a type.
func mismatch(in any, t reflect.Type) string {
	number, _ := in.(json.Number)
	switch {
	case t == typeDuration || t == typeLogDuration:
		return describe(in) + " is " + exampleDurations
	case t == typeQuantity:
		return describe(in) + " is not a size such as 512 or 10Ki"
	case t.Kind() == reflect.Bool:
		return describe(in) + " is neither true nor false"
	case t.Kind() == reflect.String && number != "":
		return describe(in) + " is a number: put it in quotes"
	case t.Kind() == reflect.String:
		return describe(in) + " is not text"
	case t.Kind() == reflect.Float32:
		return describe(in) + " is not a number"
	}
	if _, err := strconv.ParseFloat(string(number), 64); err == nil && !strings.ContainsAny(string(number), ".eE") {
		if t.Kind() == reflect.Uint32 {
			return describe(in) + " is out of range: 0 to 4294967295"
		}
		return describe(in) + " is out of range: -2147483648 to 2147483647"
	}
	return describe(in) + " is not a whole number"
}

// describe formats a value for a Problem.
func describe(in any) string {
	switch v := in.(type) {
	case nil:
		return "null"
	case string:
		return clip.Quote(v)
	case []any:
		return "a list"
	case map[string]any:
		return "a mapping"
	case time.Duration:
		return v.String()
	}
	return visible(fmt.Sprint(in))
}
