package iptshim

import (
	"flag"
	"os"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
	"github.com/verdict-proxy/verdict/sync/watch"
)

var update = flag.Bool("update", false, "write the goldens anew")

// TestGoldens renders the examples, and has both variants' programs check the text without writing it.
func TestGoldens(t *testing.T) {
	snap, problems, err := watch.Load(t.Context(), "../../examples/cluster.yaml", "node-1")
	labtest.Check(t, err)
	if problems != nil {
		t.Fatal(problems)
	}
	addrs := append(snap.Node.Addresses, addr("127.0.0.1"))
	snap.Apply(snapshot.Delta{HostAddrs: &addrs})
	st, conflicts := dataplane.Compute(configs[0], snap)
	if conflicts != nil {
		t.Fatal(conflicts)
	}
	host := labtest.NewHost(t, labtest.NewNet(t), "node")
	for name, o := range map[string]Options{"tree": {}, "list": {Dispatch: List, MasqueradeMark: 1 << 15,
		KeepInvalid: true}} {
		model := New(o)
		model.Plan(st, dataplane.Change{})
		for _, f := range ipfamily.All {
			got, file := model.Full(f), "testdata/cluster-"+name+"."+strings.ToLower(f.String())
			if *update {
				labtest.Check(t, os.WriteFile(file, got, 0o644))
			}
			want, err := os.ReadFile(file)
			labtest.Check(t, err)
			if string(got) != string(want) {
				t.Errorf("%s: %s", file, firstDifference(string(got), string(want)))
			}
			for _, variant := range variants {
				restore(t, host, f, variant, want, "--test")
			}
		}
	}
}
