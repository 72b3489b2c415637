package testkit

import (
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"
)

// Compares tests a function that compares two values field by field: it must find them the same when they are, and
// different as soon as one field differs, however deep it lies. The fields in except are those that the function leaves
// out on purpose, with all that is in them: "Triggered", "Ports[].Pool". A field that is compared must not be named
// there.
func Compares[T any](t testing.TB, same func(a, b *T) bool, except ...string) {
	t.Helper()
	if a, b := Filled[T](), Filled[T](); !same(a, b) {
		t.Fatalf("%T: equal values differ", *a)
	}
	found := map[string]bool{}
	EachField(func(field string, a, b *T) {
		n := slices.IndexFunc(except, func(e string) bool {
			return field == e || strings.HasPrefix(field, e+".") || strings.HasPrefix(field, e+"[")
		})
		if n >= 0 {
			found[except[n]] = true
		}
		switch equal := same(a, b); {
		case n < 0 && equal:
			t.Errorf("%T: a change of %s makes no difference", *a, field)
		case n >= 0 && !equal:
			t.Errorf("%T: %s is compared, but named as an exception", *a, field)
		}
	})
	for _, e := range except {
		if !found[e] {
			t.Errorf("%s is named as an exception, and is no field", e)
		}
	}
}

// EachField calls f once for every field of a T, with two filled values of which only that field differs. Fields of
// structs that are reached by pointers, slices and arrays are visited as well, as "Ports[].Name".
func EachField[T any](f func(field string, a, b *T)) {
	for n := 0; ; n++ {
		a, b := Filled[T](), Filled[T]()
		left := n
		field, found := change(reflect.ValueOf(b).Elem(), "", &left)
		if !found {
			return
		}
		f(field, a, b)
	}
}

// Filled gives a T in which no field is zero: slices and maps have one element, and pointers point to something. A type
// that holds itself has no end.
func Filled[T any]() *T {
	v := new(T)
	fill(reflect.ValueOf(v).Elem())
	return v
}

// leaves are types that count as one value, though they are structs, with two values each.
var leaves = map[reflect.Type][2]any{
	reflect.TypeFor[netip.Addr]():     {netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")},
	reflect.TypeFor[netip.AddrPort](): {netip.MustParseAddrPort("192.0.2.1:1"), netip.MustParseAddrPort("192.0.2.1:2")},
	reflect.TypeFor[netip.Prefix]():   {netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("10.0.0.0/9")},
	reflect.TypeFor[time.Time]():      {time.Unix(1, 0), time.Unix(2, 0)},
	reflect.TypeFor[error]():          {errors.New("x1"), errors.New("x2")},
}

// open lets an unexported field be set.
func open(v reflect.Value) reflect.Value {
	return reflect.NewAt(v.Type(), unsafe.Pointer(v.UnsafeAddr())).Elem()
}

func fill(v reflect.Value) {
	v = open(v)
	if two, ok := leaves[v.Type()]; ok {
		v.Set(reflect.ValueOf(two[0]))
		return
	}
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			fill(v.Field(i))
		}
	case reflect.Array:
		for i := range v.Len() {
			fill(v.Index(i))
		}
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(v.Index(0))
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem())
	case reflect.Map:
		key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		fill(key)
		fill(value)
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(key, value)
	default:
		scalar(v, 1)
	}
}

// scalar sets a value of a basic kind: n is 1 or 2.
func scalar(v reflect.Value, n int) {
	switch {
	case v.Kind() == reflect.Bool:
		v.SetBool(n == 1)
	case v.Kind() == reflect.String:
		v.SetString(fmt.Sprint("x", n))
	case v.CanInt():
		v.SetInt(int64(n))
	case v.CanUint():
		v.SetUint(uint64(n))
	case v.CanFloat():
		v.SetFloat(float64(n))
	default:
		panic(fmt.Sprintf("testkit cannot fill a %s", v.Type()))
	}
}

// change changes the field of a filled value that comes after *left others, and gives its name.
func change(v reflect.Value, name string, left *int) (field string, found bool) {
	v = open(v)
	if _, leaf := leaves[v.Type()]; leaf {
		return name, changeHere(left, func() { v.Set(reflect.ValueOf(leaves[v.Type()][1])) })
	}
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			inner := strings.TrimPrefix(name+"."+v.Type().Field(i).Name, ".")
			if field, found := change(v.Field(i), inner, left); found {
				return field, true
			}
		}
		return "", false
	case reflect.Array:
		for i := range v.Len() {
			if field, found := change(v.Index(i), name+"[]", left); found {
				return field, true
			}
		}
		return "", false
	case reflect.Slice:
		if changeHere(left, func() { v.SetZero() }) {
			return name, true
		}
		return change(v.Index(0), name+"[]", left)
	case reflect.Pointer:
		return change(v.Elem(), name, left)
	case reflect.Map:
		return name, changeHere(left, func() { v.SetZero() })
	}
	return name, changeHere(left, func() { scalar(v, 2) })
}

func changeHere(left *int, set func()) bool {
	if *left > 0 {
		*left--
		return false
	}
	set()
	return true
}
