package nft

import "testing"

// TestSum: what is not known of one element is not known of all from which a step chooses.
func TestSum(t *testing.T) {
	counted := func(set SetID, n uint64) Listed { return Listed{Element: Element{Set: set}, Counted: true, Packets: n} }
	for _, c := range []struct {
		found []Listed
		want  uint64 // 0 is unknown
	}{
		{[]Listed{counted(Services, 9), counted(Endpoints, 2), counted(Endpoints, 3)}, 5},
		{[]Listed{counted(Endpoints, 2), {Element: Element{Set: Endpoints}}}, 0},
	} {
		step := Step{Found: c.found}
		if got := step.Connections(); (got == nil) != (c.want == 0) || got != nil && *got != c.want {
			t.Errorf("%+v: %v; want %d", c.found, got, c.want)
		}
	}
}
