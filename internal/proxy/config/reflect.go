package config

import (
	"encoding/json"
	"reflect"
	"strings"
	"sync"
)

// fieldCache maps types to the indices of their fields by name: map[reflect.Type]map[string][]int.
var fieldCache sync.Map

// fieldIndices returns the indices of a struct's fields by their names in a document.
func fieldIndices(t reflect.Type) map[string][]int {
	if m, ok := fieldCache.Load(t); ok {
		return m.(map[string][]int)
	}
	m := map[string][]int{}
	for f := range t.Fields() {
		tag, options, _ := strings.Cut(f.Tag.Get("json"), ",")
		switch {
		case options == "inline" || f.Anonymous && tag == "": // encoding/json inlines an embedded struct without a name
			for name, index := range fieldIndices(f.Type) {
				m[name] = append([]int{f.Index[0]}, index...)
			}
		case tag != "" && tag != "-":
			m[tag] = f.Index
		}
	}
	fieldCache.Store(t, m)
	return m
}

// at returns a field of a document, to read and to set.
func (d *Document) at(p path) reflect.Value {
	v := reflect.ValueOf(d).Elem()
	for _, step := range p {
		v = v.FieldByIndex(fieldIndices(v.Type())[step])
	}
	return v
}

// value returns a field's value. For a pointer it returns the target, or nil.
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

// text formats a field's value on one line, as it would be written in a file.
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

// equal reports whether a field means the same in another document. A size, or a missing list, can be held in more than
// one way.
func (d *Document) equal(p path, o *Document) bool {
	a, b := d.value(p), o.value(p)
	switch reflect.TypeOf(a).Kind() {
	case reflect.Bool, reflect.Int32, reflect.Uint32, reflect.Float32, reflect.String:
		return a == b
	}
	return d.text(p) == o.text(p)
}

// copyField copies a field from another document.
func (d *Document) copyField(p path, from *Document) { d.at(p).Set(from.at(p)) }
