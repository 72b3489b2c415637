package results

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/verdict-proxy/verdict/internal/lab/blackbox"
)

// Explained is why connections of a run failed.
type Explained struct {
	// Causes counts failures by their causes; nil if there were none, or nobody asked.
	Causes map[string]int `json:"causes,omitempty"`
}

func (e *Explained) explained() map[string]int { return e.Causes }

// words lists the causes, as the end of a line.
func (e *Explained) words() string {
	var b strings.Builder
	for _, cause := range slices.Sorted(maps.Keys(e.Causes)) {
		fmt.Fprintf(&b, ", %d %s", e.Causes[cause], cause)
	}
	return b.String()
}

// Unexplained is an error if any cell has failures that nothing explains. Their records are in dir.
func Unexplained[C interface{ explained() map[string]int }](cells []C, dir string) error {
	n := 0
	for _, c := range cells {
		n += c.explained()[blackbox.Unexplained]
	}
	if n == 0 {
		return nil
	}
	return fmt.Errorf("%d failures are unexplained: see %s", n, dir)
}
