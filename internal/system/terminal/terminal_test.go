package terminal

import (
	"strings"
	"testing"
)

// TestKeyNames splits what terminals send.
func TestKeyNames(t *testing.T) {
	for text, want := range map[string]string{
		"q": "q", "jj\x1b[Bk": "j j down k", "\x1bOA\x1b[5~\x1b[6~": "up pageup pagedown", "\r\n": "enter enter",
		"\x1b[1;5Cq": "q", "\x1b[200~q": "q", "\x1b": "esc", "\x1b[": "", "\x1b[9": "",
	} {
		if got := strings.Join(keyNames(text), " "); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}
