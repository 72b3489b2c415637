package stories

import (
	"regexp"
	"slices"
	"testing"
)

// TestChoose: whoever asks for a story under kube-proxy gets those that lead there and back.
func TestChoose(t *testing.T) {
	for run, want := range map[string][]string{
		"^node drained$": {"node drained"},
		"^node drained": {"back to kube-proxy, node by node", "node drained, under kube-proxy",
			"from kube-proxy, node by node", "node drained"},
		"^pod deleted": {"pod deleted", "pod deleted by force"},
	} {
		var got []string
		for _, s := range Choose(regexp.MustCompile(run)) {
			got = append(got, s.Name)
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: %q; want %q", run, got, want)
		}
	}
}
