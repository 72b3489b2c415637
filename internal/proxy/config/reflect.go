package config

import (
	"encoding/json"
	"reflect"

	"github.com/verdict-proxy/verdict/internal/system/yamltree"
)

// at returns a field of a document, to read and to set.
func (d *Document) at(p yamltree.Path) reflect.Value {
	v := reflect.ValueOf(d).Elem()
	for _, step := range p {
		v = v.FieldByIndex(yamltree.Fields(v.Type())[step])
	}
	return v
}

// value returns a field's value. For a pointer it returns the target, or nil.
func (d *Document) value(p yamltree.Path) any {
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
func (d *Document) text(p yamltree.Path) string {
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
func (d *Document) equal(p yamltree.Path, o *Document) bool {
	a, b := d.value(p), o.value(p)
	switch reflect.TypeOf(a).Kind() {
	case reflect.Bool, reflect.Int32, reflect.Uint32, reflect.Float32, reflect.String:
		return a == b
	}
	return d.text(p) == o.text(p)
}

// copyField copies a field from another document.
func (d *Document) copyField(p yamltree.Path, from *Document) { d.at(p).Set(from.at(p)) }
