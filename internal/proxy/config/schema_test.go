package config

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/internal/system/yamltree"
)

const schemaFile = "../../../deploy/helm/verdict/values.schema.json"

// schema is a part of a JSON schema.
type schema = map[string]any

// TestSchema compares the chart's schema with the fields: it has each of them and no other, with the type, the words
// and the bounds that loading a file accepts.
func TestSchema(t *testing.T) {
	text, err := os.ReadFile(schemaFile)
	if err != nil {
		t.Fatal(err)
	}
	var all schema
	if err := json.Unmarshal(text, &all); err != nil {
		t.Fatal(err)
	}
	document := reflect.TypeFor[Document]()
	kubeProxy, _ := document.FieldByName("KubeProxy")
	own, _ := document.FieldByName("Verdict")
	all["$defs"] = schema{
		kubeProxyKind: documentSchema(t, kubeProxy.Type, nil, kubeProxyVersion, kubeProxyKind),
		verdictKind:   documentSchema(t, own.Type, yamltree.Path{verdictKind}, verdictVersion, verdictKind),
	}
	var want strings.Builder
	e := json.NewEncoder(&want)
	e.SetEscapeHTML(false)
	e.SetIndent("", " ")
	if err := e.Encode(all); err != nil {
		t.Fatal(err)
	}
	if string(text) == want.String() {
		return
	}
	if !*update {
		t.Fatalf("%s differs from the fields (go test -update writes it anew)", schemaFile)
	}
	if err := os.WriteFile(schemaFile, []byte(want.String()), 0o644); err != nil {
		t.Fatal(err)
	}
}

// documentSchema gives the schema of one of the two documents.
func documentSchema(t *testing.T, v reflect.Type, p yamltree.Path, version, kind string) schema {
	s := structSchema(t, v, p)
	properties := s["properties"].(schema)
	properties["apiVersion"], properties["kind"] = schema{"const": version}, schema{"const": kind}
	return s
}

// structSchema gives the schema of a struct, which is closed.
func structSchema(t *testing.T, v reflect.Type, p yamltree.Path) schema {
	properties := schema{}
	for name, index := range yamltree.Fields(v) {
		if f := v.FieldByIndex(index); name != "apiVersion" && name != "kind" {
			properties[name] = valueSchema(t, f.Type, p.Key(name))
		}
	}
	return schema{"type": "object", "additionalProperties": false, "properties": properties}
}

// valueSchema gives the schema of a field, or of a struct of fields.
func valueSchema(t *testing.T, v reflect.Type, p yamltree.Path) schema {
	for v.Kind() == reflect.Pointer {
		v = v.Elem()
	}
	if v.Kind() == reflect.Struct && !isUnmarshaler(reflect.New(v).Interface()) {
		return structSchema(t, v, p)
	}
	s := typeSchema(t, v, p.String())
	for i := range fields {
		if f := &fields[i]; f.name == p.String() {
			s["description"] = description(f)
		}
	}
	return s
}

var (
	markdownLink = regexp.MustCompile(`\[([^\]]*)\]\([^)]*\)`)
	typeSwitch   = reflect.TypeFor[Switch]()
)

func description(f *field) string {
	text := strings.ReplaceAll(markdownLink.ReplaceAllString(f.does, "$1"), "`", "")
	if f.effect == Never {
		return "has no effect: " + text
	}
	return text
}

func typeSchema(t *testing.T, v reflect.Type, name string) schema {
	switch v {
	case typeDuration, typeLogDuration:
		return durationSchema(t, v, name)
	case typeQuantity:
		return schema{"type": []string{"string", "integer"}}
	case typeSwitch:
		return schema{"enum": append(words(t, name), any(true), any(false))}
	}
	switch v.Kind() {
	case reflect.Bool:
		return schema{"type": "boolean"}
	case reflect.Float32:
		return schema{"type": "number"}
	case reflect.Int32, reflect.Uint32:
		least, most := bounds(t, name)
		return schema{"type": "integer", "minimum": least, "maximum": most}
	case reflect.Map:
		return schema{"type": "object", "additionalProperties": schema{"type": "boolean"}}
	case reflect.Slice:
		if v.Elem().Kind() == reflect.Struct {
			return schema{"type": "array", "items": vmoduleSchema(v.Elem())}
		}
		return schema{"type": "array", "items": schema{"type": "string"}}
	case reflect.String:
		if known := words(t, name); known != nil {
			return schema{"type": "string", "enum": known}
		}
		return schema{"type": "string"}
	}
	t.Fatalf("%s: no schema for a %s", name, v)
	return nil
}

// vmoduleSchema is that of logging.vmodule, whose items are the only structs in a list.
func vmoduleSchema(v reflect.Type) schema {
	properties := schema{}
	for name, index := range yamltree.Fields(v) {
		kind := "string"
		if v.FieldByIndex(index).Type.Kind() != reflect.String {
			kind = "integer"
		}
		properties[name] = schema{"type": kind}
	}
	return schema{"type": "object", "additionalProperties": false, "properties": properties}
}

// durationSchema gives the pattern of a duration, which no field allows to be negative.
func durationSchema(t *testing.T, v reflect.Type, name string) schema {
	if accepts(name, "-1h") || !accepts(name, "1.5s") {
		t.Errorf("%s: the schema's pattern of durations does not fit", name)
	}
	s := schema{"type": "string", "pattern": `^(0|([0-9]+(\.[0-9]*)?(ns|us|µs|ms|s|m|h))+)$`}
	if v == typeLogDuration { // nanoseconds, or a text
		s["type"] = []string{"string", "integer"}
	}
	return s
}

// accepts reports whether loading a file with this value of a field finds nothing wrong.
func accepts(name, value string) bool {
	_, problems, err := load("f", []byte(document(name, value)), nil, nil)
	for _, p := range problems {
		if p.Severity != Note && p.Field == name {
			return false
		}
	}
	return err == nil
}

// words gives the words that a field accepts, the empty one included; nil if it accepts any text.
func words(t *testing.T, name string) (known []any) {
	const nonsense, says = "no-such-word", " is not one of "
	_, problems := loadText(t, document(name, nonsense))
	for _, p := range problems {
		_, list, found := strings.Cut(p, `"`+nonsense+`"`+says)
		if !found {
			continue
		}
		list, _, _ = strings.Cut(list, ";")
		for word := range strings.SplitSeq(list, ", ") {
			if _, said := loadText(t, document(name, word)); strings.Contains(strings.Join(said, "\n"), says) {
				t.Errorf("%s: %q is named and not accepted: %s", name, word, said)
			}
			known = append(known, word)
		}
		if accepts(name, `""`) {
			known = append(known, "")
		}
	}
	return known
}

// bounds gives the least and the greatest number that a field accepts, by halving.
func bounds(t *testing.T, name string) (least, most int64) {
	good := int64(20) // within the bounds of each
	if !accepts(name, fmt.Sprint(good)) {
		t.Fatalf("%s: %d is not accepted", name, good)
	}
	edge := func(bad int64) int64 {
		if accepts(name, fmt.Sprint(bad)) {
			return bad
		}
		inside := good
		for bad-inside > 1 || inside-bad > 1 {
			if middle := (bad + inside) / 2; accepts(name, fmt.Sprint(middle)) {
				inside = middle
			} else {
				bad = middle
			}
		}
		return inside
	}
	return edge(math.MinInt32), edge(math.MaxInt32)
}
