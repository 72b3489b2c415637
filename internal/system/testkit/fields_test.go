package testkit

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

type inner struct {
	A int
	//lint:ignore U1000 only reflection looks at it
	b int
}

type outer struct {
	Name  string
	Inner *inner
	List  []inner
	Map   map[string]int
	At    time.Time
	Two   [2]uint8
}

// recorder keeps what a test that uses this package would report.
type recorder struct {
	testing.TB
	said []string
}

func (r *recorder) Helper() {}

func (r *recorder) Errorf(format string, args ...any) {
	r.said = append(r.said, fmt.Sprintf(format, args...))
}

func TestEachField(t *testing.T) {
	var got []string
	EachField(func(field string, a, b *outer) { got = append(got, field) })
	const want = "Name Inner.A Inner.b List List[].A List[].b Map At Two[] Two[]"
	if s := strings.Join(got, " "); s != want {
		t.Errorf("%s; want %s", s, want)
	}
}

// TestCompares: a field that is forgotten, one that is compared though it is an exception, and a wrong exception are
// told.
func TestCompares(t *testing.T) {
	r := &recorder{TB: t}
	Compares(r, func(a, b *inner) bool { return a.A == b.A }, "A", "gone")
	want := "[testkit.inner: A is compared, but named as an exception testkit.inner: a change of b makes no difference" +
		" gone is named as an exception, and is no field]"
	if fmt.Sprint(r.said) != want {
		t.Errorf("%v; want %s", r.said, want)
	}
	Compares(t, func(a, b *inner) bool { return a.A == b.A }, "b")
}
