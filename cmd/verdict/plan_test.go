package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/verdict-proxy/verdict/internal/answers/inspect"
	"github.com/verdict-proxy/verdict/internal/answers/plan"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/watch"
)

// plans are the goldens in testdata/plan, with the flags that make them.
var plans = map[string][]string{
	"policy":    {"-f", "testdata/plan/policy.yaml"},
	"endpoints": {"-f", "testdata/plan/endpoints.yaml", "--verbose"},
	"node":      {"-f", "testdata/plan/node.yaml"},
	"delete": {"--delete-object", "Service/shop/checkout", "--delete-object", "Service/shop/catalog",
		"--delete-object", "Service/shop/nobody", "--all"},
	"same":     {"-f", "../../examples/cluster.yaml"},
	"backends": {"-f", "testdata/plan/backends.yaml", "--verbose"},
	"kept":     {"-f", "testdata/plan/kept.yaml"},
}

// planArgs are those of a plan from objects alone.
func planArgs(name string) []string {
	from := map[string]string{"backends": "canary", "kept": "kept"}[name]
	return slices.Concat([]string{"plan", "--live=false"}, plans[name], explainFrom[cmp.Or(from, "cluster")])
}

// statusOfCommand runs a command and gives its exit status.
func statusOfCommand(t *testing.T, args ...string) (out string, status int) {
	t.Helper()
	out, err := command(args...)
	var s exitStatus
	switch {
	case errors.As(err, &s):
		return out, int(s)
	case err != nil:
		t.Fatal(err)
	}
	return out, exitOK
}

func golden(t *testing.T, file, got string) {
	t.Helper()
	if *update {
		labtest.Check(t, os.WriteFile(file, []byte(got), 0o644))
	}
	want, err := os.ReadFile(file)
	labtest.Check(t, err)
	if got != string(want) {
		t.Errorf("not as in %s (go test -update writes it anew):\n%s", file, labtest.FirstDifference(got, string(want)))
	}
}

// TestPlan compares plans from objects alone with the goldens, as text and as JSON. No line of text is wider than help.
func TestPlan(t *testing.T) {
	for name := range plans {
		args := planArgs(name)
		want := exitDiffers
		if name == "same" {
			want = exitSame
		}
		out, status := statusOfCommand(t, args...)
		if status != want {
			t.Errorf("%s: status %d", name, status)
		}
		golden(t, filepath.Join("testdata/plan", name+".txt"), out)
		for line := range strings.Lines(out) {
			nft := strings.HasPrefix(line, "+ ip") || strings.HasPrefix(line, "- ip")
			if n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); n > mostHelp && !nft {
				t.Errorf("%s: %d columns: %s", name, n, line)
			}
		}
		out, _ = statusOfCommand(t, append(args, "-o", "json")...)
		golden(t, filepath.Join("testdata/plan", name+".json"), out)
		var p plan.Plan
		d := json.NewDecoder(strings.NewReader(out))
		d.DisallowUnknownFields()
		labtest.Check(t, d.Decode(&p))
	}
}

// TestPlanFailOn: only the effects that are asked for make the status 1.
func TestPlanFailOn(t *testing.T) {
	for words, want := range map[string]int{"any": 1, "closes": 0, "opens": 1, "cuts,shuts-out": 1, "cuts": 0} {
		args := slices.Concat([]string{"plan", "--live=false", "--fail-on", words}, plans["policy"], explainFrom["cluster"])
		if _, status := statusOfCommand(t, args...); status != want {
			t.Errorf("--fail-on %s: status %d", words, status)
		}
	}
}

// TestPlanTrouble: whatever goes wrong is exit status 2.
func TestPlanTrouble(t *testing.T) {
	bad := filepath.Join(t.TempDir(), "bad.yaml")
	const text = "kind: Service\napiVersion: v1\nmetadata: {name: x}\nspec: {ports: 3}\n"
	labtest.Check(t, os.WriteFile(bad, []byte(text), 0o600))
	from := explainFrom["cluster"]
	for _, args := range [][]string{
		from, {"-f", bad}, append(from, "-f", bad), append(from, "-f", bad+".gone"), append(from, "-f", "-", "--delete", "-"),
		append(from, "-f", bad, "--fail-on", "nothing"), append(from, "--delete-object", "Service/x"),
		{"--from", "-", "-f", "-"}, append(from, "x"),
	} {
		if out, status := statusOfCommand(t, append([]string{"plan", "--live=false"}, args...)...); status != exitTrouble {
			t.Errorf("%v: %d\n%s", args, status, out)
		}
	}
}

// TestPlanLive plans beside a proxy: the plan begins with the kernel's tables, touches nothing, and says what a proxy
// then writes. What others changed is told.
func TestPlanLive(t *testing.T) {
	c := newCompared(t)
	args := slices.Concat([]string{"plan", "--all", "--json"}, plans["endpoints"], c.flags)
	out, status := c.run(args...)
	var p plan.Plan
	labtest.Check(t, json.Unmarshal([]byte(out), &p))
	if status != exitDiffers || p.Base != "kernel" || !p.FlowsRead || p.Writes.Added+p.Writes.Removed == 0 {
		t.Errorf("%d: %s", status, out)
	}
	if out, status := c.run("verify"); status != exitSame {
		t.Errorf("verify after a plan: %d\n%s", status, out)
	}
	files := watch.ChangeFiles{Apply: []string{"testdata/plan/endpoints.yaml"}}
	change, err := watch.LoadChange(t.Context(), files, c.objects.Snap)
	labtest.Check(t, err)
	concerned := c.objects.Snap.Apply(change.Delta)
	st, _ := dataplane.Compute(c.objects.Config, c.objects.Snap)
	r, err := c.backend.Apply(st, dataplane.Change{Services: concerned.Services})
	labtest.Check(t, err)
	if w := p.Writes; r.Added != w.Added || r.Replaced != w.Replaced || r.Removed != w.Removed {
		t.Errorf("written +%d ~%d -%d, planned %+v", r.Added, r.Replaced, r.Removed, w)
	}
	var found inspect.ComparisonJSON
	out, _ = c.run("verify", "--json")
	labtest.Check(t, json.Unmarshal([]byte(out), &found))
	for _, table := range found.Tables {
		if table.Digest != p.Writes.Digests[table.Family] {
			t.Errorf("%s: the digest is %s, planned %s", table.Family, table.Digest, p.Writes.Digests[table.Family])
		}
	}
	// Now the kernel is ahead of the manifest.
	out, status = c.run(slices.Concat([]string{"plan"}, plans["policy"], c.flags)...)
	if status != exitDiffers || !strings.Contains(out, "the kernel does not hold all that the objects ask for") {
		t.Errorf("%d: %s", status, out)
	}
	labtest.Check(t, c.backend.Remove())
	if out, _ = c.run(args...); !strings.Contains(out, "Verdict has programmed nothing here") {
		t.Errorf("without tables: %s", out)
	}
}
