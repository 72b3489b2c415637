package watch

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// decoder fills an API object from a tree. The libraries for this lose either the lines or the time: they go through
// interface values and JSON.
type decoder struct {
	object string
	// path is where in the object we are; its parts are put together only when there is something to say.
	path []string
	// problems are all there are; the object can't be used if bad is set.
	problems []*Problem
	bad      bool
}

// at is a problem at the current path, or at a field below it.
func (d *decoder) at(line int, field, format string, args ...any) {
	path := strings.Join(d.path, "") + field
	d.problems = append(d.problems, &Problem{
		Line: line, Object: d.object, Field: strings.TrimPrefix(path, "."), Err: fmt.Errorf(format, args...),
	})
}

func (d *decoder) fail(line int, format string, args ...any) {
	d.bad = true
	d.at(line, "", format, args...)
}

// unmarshaler are types that read themselves: times, quantities, ports by number or name. Only the time at which an
// object was created matters to a proxy; all others keep their zero values.
var unmarshaler = reflect.TypeFor[json.Unmarshaler]()

func (d *decoder) decode(t *tree, v reflect.Value) {
	if t.null() {
		return
	}
	if reflect.PointerTo(v.Type()).Implements(unmarshaler) {
		if created, ok := v.Addr().Interface().(*metav1.Time); ok && d.path[len(d.path)-1] == ".creationTimestamp" {
			d.decodeTime(t, created)
		}
		return
	}
	switch v.Kind() {
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		d.decode(t, v.Elem())
	case reflect.Struct:
		if d.is(t, mapping) {
			d.decodeStruct(t, v)
		}
	case reflect.Map:
		if d.is(t, mapping) {
			d.decodeMap(t, v)
		}
	case reflect.Slice:
		if v.Type().Elem().Kind() != reflect.Uint8 && d.is(t, list) {
			v.Set(reflect.MakeSlice(v.Type(), len(t.parts), len(t.parts)))
			for i := range t.parts {
				d.below("["+strconv.Itoa(i)+"]", &t.parts[i], v.Index(i))
			}
		}
	case reflect.String, reflect.Bool, reflect.Int32, reflect.Int64:
		if d.is(t, scalar) {
			d.decodeScalar(t, v)
		}
	}
}

// is says whether t is of the kind its place asks for.
func (d *decoder) is(t *tree, want treeKind) bool {
	if t.kind != want {
		d.fail(t.line, "this is %s: write %s", kindWords[t.kind], kindWords[want])
		return false
	}
	return true
}

func (d *decoder) below(step string, t *tree, v reflect.Value) {
	d.path = append(d.path, step)
	d.decode(t, v)
	d.path = d.path[:len(d.path)-1]
}

func (d *decoder) decodeStruct(t *tree, v reflect.Value) {
	fields := fieldsOf(v.Type())
	var done uint64 // no struct we read has more than 64 fields
	for i := 0; i+1 < len(t.parts); i += 2 {
		key := &t.parts[i]
		f, ok := fields[key.text]
		if !ok {
			d.at(key.line, "."+short(key.text), "unknown field%s", guess(fields, key.text))
			continue
		}
		field := v.FieldByIndex(f.index)
		if bit := uint64(1) << f.number; done&bit != 0 {
			d.at(key.line, "."+key.text, "there twice: the last one counts")
			field.SetZero()
		} else {
			done |= bit
		}
		d.below(f.step, &t.parts[i+1], field)
	}
}

func (d *decoder) decodeMap(t *tree, v reflect.Value) {
	v.Set(reflect.MakeMapWithSize(v.Type(), len(t.parts)/2))
	for i := 0; i+1 < len(t.parts); i += 2 {
		value := reflect.New(v.Type().Elem()).Elem()
		d.below("["+short(t.parts[i].text)+"]", &t.parts[i+1], value)
		v.SetMapIndex(reflect.ValueOf(t.parts[i].text).Convert(v.Type().Key()), value)
	}
}

func (d *decoder) decodeScalar(t *tree, v reflect.Value) {
	switch v.Kind() {
	case reflect.String:
		if t.quoted || looksLike(t.text) == "" {
			v.SetString(t.text)
			return
		}
		d.fail(t.line, "%s is %s, not text: put it in quotation marks", short(t.text), looksLike(t.text))
	case reflect.Bool:
		if b, ok := boolean[t.text]; ok && !t.quoted {
			v.SetBool(b)
			return
		}
		d.fail(t.line, "%s is not true or false", quote(t.text))
	default:
		n, err := strconv.ParseInt(strings.ReplaceAll(t.text, "_", ""), 0, 64)
		switch {
		case t.quoted || errors.Is(err, strconv.ErrSyntax):
			d.fail(t.line, "%s is not a number", quote(t.text))
		case err != nil || v.OverflowInt(n):
			d.fail(t.line, "%s is too large", short(t.text))
		default:
			v.SetInt(n)
		}
	}
}

func (d *decoder) decodeTime(t *tree, to *metav1.Time) {
	at, err := time.Parse(time.RFC3339, t.text)
	if err != nil {
		d.at(t.line, "", "%s is no time such as 2006-01-02T15:04:05Z: the object counts as younger than all others",
			quote(t.text))
		return
	}
	*to = metav1.NewTime(at)
}

// boolean are the words of the YAML 1.2 core schema, those of JSON among them.
var boolean = map[string]bool{"true": true, "True": true, "TRUE": true, "false": false, "False": false, "FALSE": false}

// looksLike says what a scalar without quotation marks is if it isn't text.
func looksLike(s string) string {
	if s == "" {
		return ""
	}
	if _, ok := boolean[s]; ok {
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

// structField is where a field of the API's notation lies in the Go struct.
type structField struct {
	index  []int
	number int
	step   string // "." and the name
}

var structFields sync.Map // reflect.Type to map[string]structField

func fieldsOf(t reflect.Type) map[string]structField {
	if known, ok := structFields.Load(t); ok {
		return known.(map[string]structField)
	}
	fields := map[string]structField{}
	addFields(fields, t, nil)
	structFields.Store(t, fields)
	return fields
}

// addFields takes in embedded structs that have no name of their own in the API's notation: TypeMeta, not ObjectMeta.
func addFields(fields map[string]structField, t reflect.Type, outer []int) {
	for i := range t.NumField() {
		f := t.Field(i)
		index := append(slices.Clone(outer), i)
		switch name, _, _ := strings.Cut(f.Tag.Get("json"), ","); {
		case name != "" && name != "-":
			fields[name] = structField{index: index, number: len(fields), step: "." + name}
		case f.Anonymous && name == "":
			addFields(fields, f.Type, index)
		}
	}
}

// guess names the field that was probably meant.
func guess(fields map[string]structField, key string) string {
	for name := range fields {
		if strings.EqualFold(name, key) {
			return ": did you mean " + name + "?"
		}
	}
	return ""
}
