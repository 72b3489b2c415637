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
)

// decoder puts a document into a Go value, field by field. The decoders of encoding/json and of Kubernetes stop at the
// first value that does not fit, and know no lines; here such a value is reported and is as if it had not been written,
// and all others count.
type decoder struct {
	file  string
	at    *position
	found []*Problem
	// complaints are about what does not fit; bad are the fields and the entries of lists among them.
	complaints []complaint
	bad        map[string]bool
	// unknown counts the fields there are none of.
	unknown int
}

// maxUnknown is how many unknown fields are named.
const maxUnknown = 20

func (d *decoder) say(s Severity, p path, text string) {
	d.found = append(
		d.found,
		&Problem{Severity: s, File: d.file, Line: d.at.line(trimKind(p)), Field: p.String(), Text: text},
	)
}

// trimKind gives the path in its own document.
func trimKind(p path) path {
	if len(p) > 0 && p[0] == verdictKind {
		return p[1:]
	}
	return p
}

// fill puts a whole document into out, a pointer to a struct. The path is that of the document.
func (d *decoder) fill(p path, fields map[string]any, out any) {
	for _, twice := range d.at.repeated() {
		d.say(Warning, append(p[:len(p):len(p)], twice...), "it is there twice; the last one counts")
	}
	d.into(p, fields, reflect.ValueOf(out).Elem())
}

// into puts a value where it belongs. What does not fit stays as it is.
func (d *decoder) into(p path, in any, out reflect.Value) {
	switch {
	case in == nil && !decodesItself(out): // as kube-proxy's decoder has it, that is as good as nothing; but no duration
	case out.Kind() == reflect.Pointer:
		v := reflect.New(out.Type().Elem())
		before := len(d.bad)
		if d.into(p, in, v.Elem()); len(d.bad) == before {
			out.Set(v)
		}
	case decodesItself(out):
		d.leaf(p, in, out)
	case out.Kind() == reflect.Struct:
		d.mapping(p, in, out)
	case out.Kind() == reflect.Slice:
		d.list(p, in, out)
	case out.Kind() == reflect.Map:
		d.dictionary(p, in, out)
	default:
		d.leaf(p, in, out)
	}
}

func decodesItself(v reflect.Value) bool {
	_, ok := v.Addr().Interface().(json.Unmarshaler)
	return ok
}

func (d *decoder) mapping(p path, in any, out reflect.Value) {
	fields, ok := in.(map[string]any)
	if !ok {
		d.wrong(p, show(in)+", where fields are expected")
		return
	}
	known := indicesOf(out.Type())
	for _, name := range slices.Sorted(maps.Keys(fields)) {
		if index, ok := known[name]; ok {
			d.into(p.key(name), fields[name], out.FieldByIndex(index))
			continue
		}
		if d.unknown++; d.unknown > maxUnknown {
			continue // it is quite another file
		}
		text := "there is no such field; it is passed over"
		if like := nearest(name, slices.Sorted(maps.Keys(known))); like != "" {
			text += " (is it " + like + "?)"
		}
		d.say(Warning, p.key(name), text)
	}
}

// list keeps an empty entry for each that does not fit, so that the others keep their indices.
func (d *decoder) list(p path, in any, out reflect.Value) {
	entries, ok := in.([]any)
	if !ok {
		d.wrong(p, show(in)+" is no list")
		return
	}
	v := reflect.MakeSlice(out.Type(), len(entries), len(entries))
	for i, e := range entries {
		d.into(p.index(i), e, v.Index(i))
	}
	out.Set(v)
}

func (d *decoder) dictionary(p path, in any, out reflect.Value) {
	entries, ok := in.(map[string]any)
	if !ok {
		d.wrong(p, show(in)+", where names with values are expected")
		return
	}
	out.Set(reflect.MakeMap(out.Type()))
	for _, name := range slices.Sorted(maps.Keys(entries)) {
		v := reflect.New(out.Type().Elem()).Elem()
		before := len(d.bad)
		if d.into(p.key(name), entries[name], v); len(d.bad) == before {
			out.SetMapIndex(reflect.ValueOf(name), v)
		}
	}
}

// leaf has encoding/json read a single value.
func (d *decoder) leaf(p path, in any, out reflect.Value) {
	text, err := json.Marshal(in)
	v := reflect.New(out.Type())
	if err == nil {
		err = json.Unmarshal(text, v.Interface())
	}
	if err != nil {
		d.wrong(p, misfit(in, out.Type()))
		return
	}
	out.Set(v.Elem())
}

// wrong notes that a value does not fit. What is done about it is decided when everything is read.
func (d *decoder) wrong(p path, text string) {
	d.bad[p.String()] = true
	c := complaint{at: p, entry: -1, text: text, decoded: true}
	if i, ok := entryOf(p); ok {
		c.at, c.entry = p[:len(p)-1], i
	}
	d.complaints = append(d.complaints, c)
}

// entryOf gives the index of a path that ends in a list.
func entryOf(p path) (int, bool) {
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
	exampleDurations = "no duration such as 30s or 1h30m"
)

// misfit says why a value does not fit a type.
func misfit(in any, t reflect.Type) string {
	number, _ := in.(json.Number)
	switch {
	case t == typeDuration || t == typeLogDuration:
		return show(in) + " is " + exampleDurations
	case t == typeQuantity:
		return show(in) + " is no size such as 512 or 10Ki"
	case t.Kind() == reflect.Bool:
		return show(in) + " is neither true nor false"
	case t.Kind() == reflect.String && number != "":
		return show(in) + " is a number: put it in quotes"
	case t.Kind() == reflect.String:
		return show(in) + " is no text"
	case t.Kind() == reflect.Float32:
		return show(in) + " is no number"
	}
	if _, err := strconv.ParseFloat(string(number), 64); err == nil && !strings.ContainsAny(string(number), ".eE") {
		if t.Kind() == reflect.Uint32 {
			return show(in) + " is out of range: 0 to 4294967295"
		}
		return show(in) + " is out of range: -2147483648 to 2147483647"
	}
	return show(in) + " is no whole number"
}

// show gives a value for a Problem.
func show(in any) string {
	switch v := in.(type) {
	case nil:
		return "null"
	case string:
		return quote(v)
	case []any:
		return "a list"
	case map[string]any:
		return "a mapping"
	case time.Duration:
		return v.String()
	}
	return clip(fmt.Sprint(in))
}

// nearest gives the name that somebody may have meant, or "".
func nearest(name string, names []string) string {
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

// distance is the number of letters to add, leave out or replace that make one name the other (Levenshtein).
func distance(a, b string) int {
	if len(a) > maxQuoted || len(b) > maxQuoted {
		return maxQuoted
	}
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := 1
			if a[i] == b[j] {
				cost = 0
			}
			diagonal, row[j+1] = row[j+1], min(row[j+1]+1, row[j]+1, diagonal+cost)
		}
	}
	return row[len(b)]
}
