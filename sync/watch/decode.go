package watch

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/verdict-proxy/verdict/internal/system/nearest"
	"github.com/verdict-proxy/verdict/internal/system/yamltree"
)

// decoder decodes a tree into an API object. The libraries for this lose either the line numbers or the time: they go
// through interface values and JSON.
type decoder struct {
	object string
	// path is the current position in the object.
	path yamltree.Path
	// problems are all that were found; bad means that the object cannot be used.
	problems []*Problem
	bad      bool
}

// report adds a problem at the current path, or at a field below it.
func (d *decoder) report(line int, field, format string, args ...any) {
	path := d.path
	if field != "" {
		path = path.Key(field)
	}
	d.problems = append(d.problems, &Problem{
		Line: line, Object: d.object, Field: path.String(), Err: fmt.Errorf(format, args...),
	})
}

func (d *decoder) fail(line int, format string, args ...any) {
	d.bad = true
	d.report(line, "", format, args...)
}

// unmarshaler is implemented by types that decode themselves: times, quantities, ports by number or name. Only the
// creation time of an object matters to a proxy; all others keep their zero values.
var unmarshaler = reflect.TypeFor[json.Unmarshaler]()

func (d *decoder) decode(t *yamltree.Tree, v reflect.Value) {
	if t.Null() {
		return
	}
	if d.inAnnotation() && (t.Kind != yamltree.Scalar || !t.Quoted && nonTextKind(t.Text) != "") {
		d.report(t.Line, "", "this is %s, not text: put it in quotation marks",
			cmp.Or(nonTextKind(t.Text), t.Kind.String()))
		d.problems[len(d.problems)-1].Warning = true
		v.SetString(t.Text)
		return
	}
	if reflect.PointerTo(v.Type()).Implements(unmarshaler) {
		if created, ok := v.Addr().Interface().(*metav1.Time); ok && d.path[len(d.path)-1] == "creationTimestamp" {
			d.decodeTime(t, created)
		}
		return
	}
	switch v.Kind() {
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		d.decode(t, v.Elem())
	case reflect.Struct:
		if d.expect(t, yamltree.Mapping) {
			d.decodeStruct(t, v)
		}
	case reflect.Map:
		if d.expect(t, yamltree.Mapping) {
			d.decodeMap(t, v)
		}
	case reflect.Slice:
		if v.Type().Elem().Kind() != reflect.Uint8 && d.expect(t, yamltree.List) {
			v.Set(reflect.MakeSlice(v.Type(), len(t.Parts), len(t.Parts)))
			for i := range t.Parts {
				d.descend("["+strconv.Itoa(i)+"]", &t.Parts[i], v.Index(i))
			}
		}
	case reflect.String, reflect.Bool, reflect.Int32, reflect.Int64:
		if d.expect(t, yamltree.Scalar) {
			d.decodeScalar(t, v)
		}
	}
}

// inAnnotation reports whether the current position is the value of an annotation. What is wrong there holds nothing
// else up.
func (d *decoder) inAnnotation() bool {
	return len(d.path) == 3 && d.path[0] == "metadata" && d.path[1] == "annotations"
}

// expect says whether t is of the kind that its field asks for, and reports it if not.
func (d *decoder) expect(t *yamltree.Tree, want yamltree.Kind) bool {
	if t.Kind != want {
		d.fail(t.Line, "this is %s: write %s", t.Kind, want)
		return false
	}
	return true
}

func (d *decoder) descend(step string, t *yamltree.Tree, v reflect.Value) {
	d.path = append(d.path, step)
	d.decode(t, v)
	d.path = d.path[:len(d.path)-1]
}

func (d *decoder) decodeStruct(t *yamltree.Tree, v reflect.Value) {
	fields := yamltree.Fields(v.Type())
	var few [16]string
	seen := few[:0] // fields, not keys: others may be as many as they like
	for i := 0; i+1 < len(t.Parts); i += 2 {
		key := &t.Parts[i]
		index, ok := fields[key.Text]
		if !ok {
			d.report(key.Line, short(key.Text), "unknown field%s", d.suggest(fields, key.Text))
			continue
		}
		field := v.FieldByIndex(index)
		if slices.Contains(seen, key.Text) {
			d.report(key.Line, key.Text, "there twice: the last one counts")
			field.SetZero()
		} else {
			seen = append(seen, key.Text)
		}
		d.descend(key.Text, &t.Parts[i+1], field)
	}
}

// suggest names the field that was probably meant, of the first few: looking for it takes time.
func (d *decoder) suggest(fields map[string][]int, key string) string {
	if len(d.problems) < maxObjectProblems {
		if like := nearest.Of(key, slices.Sorted(maps.Keys(fields))); like != "" {
			return ": did you mean " + like + "?"
		}
	}
	return ""
}

func (d *decoder) decodeMap(t *yamltree.Tree, v reflect.Value) {
	v.Set(reflect.MakeMapWithSize(v.Type(), len(t.Parts)/2))
	for i := 0; i+1 < len(t.Parts); i += 2 {
		value := reflect.New(v.Type().Elem()).Elem()
		d.descend("["+short(t.Parts[i].Text)+"]", &t.Parts[i+1], value)
		v.SetMapIndex(reflect.ValueOf(t.Parts[i].Text).Convert(v.Type().Key()), value)
	}
}

func (d *decoder) decodeScalar(t *yamltree.Tree, v reflect.Value) {
	switch v.Kind() {
	case reflect.String:
		if t.Quoted || nonTextKind(t.Text) == "" {
			v.SetString(t.Text)
			return
		}
		d.fail(t.Line, "%s is %s, not text: put it in quotation marks", short(t.Text), nonTextKind(t.Text))
	case reflect.Bool:
		if b, ok := booleans[t.Text]; ok && !t.Quoted {
			v.SetBool(b)
			return
		}
		d.fail(t.Line, "%s is not true or false", quote(t.Text))
	default:
		n, err := strconv.ParseInt(strings.ReplaceAll(t.Text, "_", ""), 0, 64)
		switch {
		case t.Quoted || errors.Is(err, strconv.ErrSyntax):
			d.fail(t.Line, "%s is not a number", quote(t.Text))
		case err != nil || v.OverflowInt(n):
			d.fail(t.Line, "%s is too large", short(t.Text))
		default:
			v.SetInt(n)
		}
	}
}

func (d *decoder) decodeTime(t *yamltree.Tree, to *metav1.Time) {
	at, err := time.Parse(time.RFC3339, t.Text)
	if err != nil {
		d.report(t.Line, "", "%s is not a time such as 2006-01-02T15:04:05Z: the object counts as younger than all others",
			quote(t.Text))
		return
	}
	*to = metav1.NewTime(at)
}

// booleans are the words of the YAML 1.2 core schema, including those of JSON.
var booleans = map[string]bool{"true": true, "True": true, "TRUE": true, "false": false, "False": false, "FALSE": false}

// nonTextKind says what an unquoted yamltree.Scalar is if it is not text.
func nonTextKind(s string) string {
	if s == "" {
		return ""
	}
	if _, ok := booleans[s]; ok {
		return "true or false"
	}
	if strings.IndexByte("+-.0123456789", s[0]) < 0 {
		return ""
	}
	_, err := strconv.ParseInt(strings.ReplaceAll(s, "_", ""), 0, 64)
	if err != nil && strings.Trim(s, "+-.eE0123456789") == "" {
		_, err = strconv.ParseFloat(s, 64)
	}
	if err == nil || errors.Is(err, strconv.ErrRange) {
		return "a number"
	}
	return ""
}
