package config

import (
	"encoding/json"
	"reflect"
	"strings"
	"sync"
)

// known are the fields of types, by the names they have in a document; values are map[string][]int.
var known sync.Map

// indicesOf gives where the fields of a struct are, by the names they have in a document.
func indicesOf(t reflect.Type) map[string][]int {
	if m, ok := known.Load(t); ok {
		return m.(map[string][]int)
	}
	m := map[string][]int{}
	for f := range t.Fields() {
		tag, options, _ := strings.Cut(f.Tag.Get("json"), ",")
		switch {
		case options == "inline" || f.Anonymous && tag == "": // encoding/json inlines an embedded struct without a name
			for name, index := range indicesOf(f.Type) {
				m[name] = append([]int{f.Index[0]}, index...)
			}
		case tag != "" && tag != "-":
			m[tag] = f.Index
		}
	}
	known.Store(t, m)
	return m
}

// at gives a field of a document, to read and to set.
func (d *Document) at(p path) reflect.Value {
	v := reflect.ValueOf(d).Elem()
	for _, step := range p {
		v = v.FieldByIndex(indicesOf(v.Type())[step])
	}
	return v
}

// value gives a field's value; of one that is a pointer, what it points to, or nil.
func (d *Document) value(p path) any {
	v := d.at(p)
	if v.Kind() == reflect.Pointer {
		if v.IsNil() {
			return nil
		}
		v = v.Elem()
	}
	return v.Interface()
}

// text gives a field's value as it would be written, on one line.
func (d *Document) text(p path) string {
	b, err := json.Marshal(d.value(p))
	if err != nil {
		return "?"
	}
	if s := ""; json.Unmarshal(b, &s) == nil && s != "" {
		return s
	}
	return string(b)
}

// same says whether a field says the same in another document. There is more than one way to hold the same size, or no
// list.
func (d *Document) same(p path, o *Document) bool {
	a, b := d.value(p), o.value(p)
	switch reflect.TypeOf(a).Kind() {
	case reflect.Bool, reflect.Int32, reflect.Uint32, reflect.Float32, reflect.String:
		return a == b
	}
	return d.text(p) == o.text(p)
}

// take sets a field to what it is in another document.
func (d *Document) take(p path, from *Document) { d.at(p).Set(from.at(p)) }
