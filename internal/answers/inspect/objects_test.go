package inspect

import (
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
)

// TestMissingNode: a Node that is not among the objects is named, and one that is there is not.
func TestMissingNode(t *testing.T) {
	for node, missing := range map[string]bool{"node-1": false, "elsewhere": true} {
		snap, _, err := LoadManifests(t.Context(), "../../../examples/cluster.yaml", node)
		labtest.Check(t, err)
		why := MissingNode(node, snap)
		if (why != nil) != missing || missing && !strings.Contains(why.Error(), `no Node "elsewhere"`) {
			t.Errorf("%s: %v", node, why)
		}
	}
}
