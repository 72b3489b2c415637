package clip

import (
	"strings"
	"testing"
)

func TestClip(t *testing.T) {
	for got, want := range map[string]string{
		Cut("abc", 3):                  "abc",
		Cut("abcd", 3):                 "abc...",
		Cut("aäb", 2):                  "a...", // not half of a letter
		Visible("abc", 3):              "abc",
		Visible("a\nb", 3):             `"a\nb"`,
		Visible("a\xffb", 3):           `"a\xffb"`,
		Quote("a"):                     `"a"`,
		Quote(strings.Repeat("x", 65)): `"` + strings.Repeat("x", 64) + `..."`,
	} {
		if got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
}
