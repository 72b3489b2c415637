package cluster

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/internal/system/terminal"
	"github.com/verdict-proxy/verdict/sync/watch"
)

const changed = "kind: Service\napiVersion: v1\nmetadata: {name: web, namespace: shop}\nspec: {}\n"

func changeFile(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "change.yaml")
	if err := os.WriteFile(path, []byte(changed), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// plans are what the nodes of TestPlan answer.
var plans = map[string]string{
	"a": `{"node": "a", "effects": {"cuts": 2, "opens": 1}, "writes": {"added": 3, "replaced": 1, "removed": 2},
		"services": [{"service": "shop/web", "flows": [{"fate": "cuts", "connections": 2}]}]}`,
	"b": `{"node": "b", "effects": {"cuts": 1, "stays": 4, "opens": 1}, "writes": {"added": 3},
		"services": [{"service": "shop/web", "flows": [{"fate": "cuts", "connections": 1},
			{"fate": "stays", "connections": 4}, {"fate": "returns", "connections": 9}]}]}`,
}

// TestPlan: the change goes to each node by standard input, what is deleted by its name, and what they say is added up.
func TestPlan(t *testing.T) {
	f := &fake{}
	f.add("a", "b", "c")
	f.answer = func(_ context.Context, node string, _ []string) (string, int, error) {
		if node == "c" {
			return "", 0, errors.New("it is down")
		}
		return plans[node], 1, nil
	}
	path := changeFile(t)
	files := watch.ChangeFiles{Apply: []string{path}, Delete: []string{path}, Gone: []string{"Service/a/b"}}
	r, err := f.cluster().Plan(context.Background(), files, []string{"--fail-on=any"})
	if err != nil {
		t.Fatal(err)
	}
	if f.input != changed+"\n---\n" {
		t.Errorf("a node read %q", f.input)
	}
	want := "verdict plan --in-cluster --hostname-override=a --config=/c --fail-on=any -o json -f - " +
		"--delete-object=Service/shop/web --delete-object=Service/a/b"
	if got := strings.Join(f.commandsOfNode["a"], "\n"); got != want {
		t.Errorf("a ran %s\nwant %s", got, want)
	}
	var out strings.Builder
	r.Print(terminal.NewPrinter(&out), false)
	wantText := `NODE  SERVICES  ELEMENTS  OPENS  CLOSES  CUTS  MOVES  DRAINS  STAYS  REFUSES
a     1         +3 ~1 -2  1      0       2     0      0       0      0
b     1         +3 ~0 -0  1      0       1     0      0       4      0
c     it is down
open connections:
  shop/web: cuts 3, stays 4
`
	if out.String() != wantText || r.Code() != codeTrouble || string(r.Nodes[0].Plan) != plans["a"] {
		t.Errorf("%d:\n%s\nwant\n%s", r.Code(), out.String(), wantText)
	}
}

// TestPlanOn: one node's own text is printed, with its status. What is wrong with the change is told before anybody is
// asked.
func TestPlanOn(t *testing.T) {
	f := &fake{}
	f.add("a")
	f.answer = func(context.Context, string, []string) (string, int, error) { return "all of it\n", 1, nil }
	var out strings.Builder
	p := terminal.NewPrinter(&out)
	files := watch.ChangeFiles{Apply: []string{changeFile(t)}}
	code, err := f.cluster().PlanOn(context.Background(), p, "a", files, nil)
	if err != nil || code != 1 || out.String() != "all of it\n" {
		t.Errorf("%d %v: %s", code, err, out.String())
	}
	if _, err := f.cluster().PlanOn(context.Background(), p, "z", files, nil); err == nil {
		t.Error("there is no node z")
	}
	f.commandsOfNode = nil
	for _, files := range []watch.ChangeFiles{{Apply: []string{"/nowhere"}}, {Delete: []string{"/nowhere"}},
		{Gone: make([]string, maxGone+1)}} {
		if _, err := f.cluster().Plan(context.Background(), files, nil); err == nil || f.commandsOfNode != nil {
			t.Errorf("%v: asked %v", err, f.commandsOfNode)
		}
	}
}
