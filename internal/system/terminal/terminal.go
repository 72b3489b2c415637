package terminal

import (
	"fmt"
	"os"
	"strings"

	"golang.org/x/term"
)

// Screen is a screen with keys. What was on it before comes back when it is closed.
type Screen struct {
	in, out *os.File
	before  *term.State
}

// OpenScreen makes the terminal raw, so keys come at once and are not echoed, and opens a screen of its own.
// ^C is a key, too: nothing sends a signal.
func OpenScreen(in, out *os.File) (*Screen, error) {
	before, err := term.MakeRaw(int(in.Fd()))
	if err != nil {
		return nil, fmt.Errorf("terminal: %w", err)
	}
	s := &Screen{in: in, out: out, before: before}
	_, err = fmt.Fprint(out, "\x1b[?1049h\x1b[?25l\x1b[?7l") // another screen, no cursor, no wrapping
	return s, err
}

// Close gives the terminal back.
func (s *Screen) Close() error {
	fmt.Fprint(s.out, "\x1b[?7h\x1b[?25h\x1b[?1049l")
	return term.Restore(int(s.in.Fd()), s.before)
}

// Size gives columns and rows; 80 by 24 if the terminal does not tell.
func (s *Screen) Size() (width, height int) {
	width, height, err := term.GetSize(int(s.out.Fd()))
	if err != nil || width == 0 || height == 0 {
		return DefaultWidth, 24
	}
	return width, height
}

// Draw replaces what is on the screen, without a moment at which it is empty.
func (s *Screen) Draw(lines []string) error {
	var b strings.Builder
	b.WriteString("\x1b[H")
	for i, l := range lines {
		if i > 0 {
			b.WriteString("\r\n")
		}
		b.WriteString(clean(l, ""))
		b.WriteString("\x1b[K")
	}
	b.WriteString("\x1b[J")
	_, err := s.out.WriteString(b.String())
	return err
}

// Keys sends the names of the keys that are pressed; the channel is closed at the end of the input. It goes on until
// then.
func (s *Screen) Keys() <-chan string {
	out := make(chan string)
	go func() {
		defer close(out)
		buffer := make([]byte, 64)
		for {
			n, err := s.in.Read(buffer)
			if n == 0 || err != nil {
				return
			}
			for _, k := range keyNames(string(buffer[:n])) {
				out <- k
			}
		}
	}()
	return out
}

var keySequences = map[string]string{
	"\x1b[A": "up", "\x1b[B": "down", "\x1bOA": "up", "\x1bOB": "down", "\x1b[5~": "pageup", "\x1b[6~": "pagedown",
	"\x1b[H": "home", "\x1b[F": "end", "\x1b[1~": "home", "\x1b[4~": "end", "\r": "enter", "\n": "enter",
}

// keyNames splits what the terminal sent into keys. Sequences that are not known are passed over.
func keyNames(text string) (keys []string) {
	for text != "" {
		name, n := "", 1
		for seq, key := range keySequences {
			if strings.HasPrefix(text, seq) {
				name, n = key, len(seq)
			}
		}
		switch {
		case name != "":
			keys = append(keys, name)
		case text == "\x1b":
			keys = append(keys, "esc")
		case len(text) > 1 && text[0] == '\x1b' && (text[1] == '[' || text[1] == 'O'):
			n = len(text)
			if end := strings.IndexFunc(text[2:], func(r rune) bool { return r >= '@' && r <= '~' }); end >= 0 {
				n = 2 + end + 1
			}
		case text[0] != '\x1b':
			keys = append(keys, text[:1])
		}
		text = text[min(n, len(text)):]
	}
	return keys
}
