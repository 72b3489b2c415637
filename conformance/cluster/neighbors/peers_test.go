//go:build peers

package neighbors

import (
	"testing"

	"github.com/verdict-proxy/verdict/conformance/cluster"
	"github.com/verdict-proxy/verdict/conformance/testbed"
)

// TestManifests adapts each neighbor's own manifest, from its module.
func TestManifests(t *testing.T) {
	root, err := testbed.Sources("")
	if err != nil {
		t.Fatal(err)
	}
	c := cluster.New(t.TempDir(), root, t.Logf)
	for i := range All {
		n := &All[i]
		t.Run(n.Name, func(t *testing.T) {
			paths := map[string]string{}
			for _, p := range n.programs {
				paths[p.peer] = "/cache/" + p.peer
			}
			text, err := n.text(t.Context(), c, paths)
			if err != nil {
				t.Fatal(err)
			}
			if len(n.workloads) == 0 || len(text) == 0 {
				t.Error("nothing is installed")
			}
			t.Log(text)
		})
	}
}
