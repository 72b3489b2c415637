package yamltree

import (
	"reflect"
	"strings"
	"sync"
)

var fieldsOf sync.Map // reflect.Type to map[string][]int

// Fields returns where a struct holds each field, by its name in a document, for reflect.Value.FieldByIndex. As in
// encoding/json, the fields of an embedded struct without a name, or of one that is inline, are the struct's own.
func Fields(t reflect.Type) map[string][]int {
	if known, ok := fieldsOf.Load(t); ok {
		return known.(map[string][]int)
	}
	fields := map[string][]int{}
	for f := range t.Fields() {
		switch name, options, _ := strings.Cut(f.Tag.Get("json"), ","); {
		case options == "inline" || f.Anonymous && name == "":
			for name, index := range Fields(f.Type) {
				fields[name] = append([]int{f.Index[0]}, index...)
			}
		case name != "" && name != "-":
			fields[name] = f.Index
		}
	}
	fieldsOf.Store(t, fields)
	return fields
}
