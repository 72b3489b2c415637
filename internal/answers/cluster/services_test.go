package cluster

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/internal/answers/inspect"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
)

// TestServices: each Service is shown as it is on the node where it fares worst, and nodes tell only of those that are
// not in order, but for one.
func TestServices(t *testing.T) {
	of := func(states ...string) string {
		var list []string
		for _, s := range states {
			name, state, _ := strings.Cut(s, "=")
			list = append(list, fmt.Sprintf(`{"service":%q,"type":"ClusterIP","state":%q,"why":"no endpoint","usable":1,
				"endpoints":2,"clusterIPs":["10.96.0.1"],"ports":[{"port":80,"protocol":"tcp"}]}`, name, state))
		}
		return `{"services":[` + strings.Join(list, ",") + `]}`
	}
	trouble := map[string]string{"b": of("shop/a=refuses"), "c": of("shop/a=refuses", "shop/new=waiting"),
		"d": of("shop/a=ejects")}
	f := &fake{answer: func(_ context.Context, node string, argv []string) (string, int, error) {
		switch {
		case node == "a":
			return "", 0, errors.New("no answer")
		case slices.Contains(argv, "--trouble"):
			return trouble[node], 0, nil
		}
		return of("shop/a=refuses", "shop/b=programmed"), 0, nil
	}}
	f.add("a", "b", "c", "d")
	s, err := f.cluster().Services(t.Context(), inspect.ServicesAsked{Namespace: "shop"})
	if err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	s.Print(terminal.NewPrinter(&text), false)
	want := `SERVICE   TYPE       ADDRESSES  PORTS   ENDPOINTS  STATE
shop/new  ClusterIP  10.96.0.1  80/tcp  1/2        waiting: no endpoint     on c (1 of 4)
shop/a    ClusterIP  10.96.0.1  80/tcp  1/2        refuses: no endpoint     on b (2 of 4)
shop/b    ClusterIP  10.96.0.1  80/tcp  1/2        programmed: no endpoint
a: no answer
`
	if text.String() != want || s.Code() != codeTrouble {
		t.Errorf("status %d\n%s", s.Code(), text.String())
	}
	asked := f.commandsOfNode["b"]
	if len(asked) != 2 || asked[1] != "verdict services -o json --namespace=shop --config=/c" ||
		len(f.commandsOfNode["c"]) != 1 {
		t.Errorf("asked %q", f.commandsOfNode)
	}
}
