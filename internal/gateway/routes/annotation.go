package routes

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/verdict-proxy/verdict/sync/watch"
)

const (
	// mostAnnotations is how many bytes the API server lets all annotations of an object have, keys and values; this
	// much less is taken, so that others can add some.
	mostAnnotations = 256<<10 - 16<<10
	// mostGranted is how many bytes the message of a condition may have.
	mostGranted = 32 << 10
)

// routeReasonTooLarge is a reason of the condition ResolvedRefs of a route whose backends do not fit into the Service.
const routeReasonTooLarge gatewayv1.RouteConditionReason = "TooManyBackends"

// The annotation's form: see docs/decisions/0036-gateway.md.
type (
	backendsText struct {
		For   string         `json:"for"`
		Ports []portBackends `json:"ports,omitempty"`
	}
	portBackends struct {
		Port     string        `json:"port"`
		Listener string        `json:"listener"`
		Route    string        `json:"route"`
		To       []backendText `json:"to,omitempty"`
	}
	backendText struct {
		Service string `json:"service,omitempty"`
		Port    int32  `json:"port,omitempty"`
		Weight  int32  `json:"weight"`
		Refused string `json:"refused,omitempty"`
	}
)

// backends writes the annotation, given how many bytes it may have, and sets what the Gateway needs and is granted. The
// routes whose backends do not fit are left out: their ports refuse all connections.
func (g *gateway) backends(most int) string {
	needs := map[types.NamespacedName]bool{g.serviceName: true}
	granted, grantedSize := map[string]bool{}, 0
	text := backendsText{For: "Gateway " + g.obj.Key().String()}
	most -= len(mustJSON(text)) + len(`,"ports":[]`)
	for i := range g.listeners {
		l := &g.listeners[i]
		if l.first == nil {
			continue
		}
		entry := portBackends{Port: l.portName(), Listener: string(l.Name), Route: l.first.name()}
		names, namesSize := map[string]bool{}, 0
		for _, b := range l.first.backends {
			entry.To = append(entry.To, b.text(g.obj.Namespace))
			if name := b.service.String(); b.refused == "" && b.service.Namespace != g.obj.Namespace && !granted[name] &&
				!names[name] {
				names[name] = true
				namesSize += len(name) + 1
			}
		}
		size := len(mustJSON(entry)) + 1
		if size > most || grantedSize+namesSize > mostGranted {
			g.leftOut[l.first] = fmt.Sprintf("listener %s: the backends do not fit into the Service %s, beside those of "+
				"other listeners: all connections are refused", l.Name, g.serviceName)
			continue
		}
		most, grantedSize = most-size, grantedSize+namesSize
		maps.Copy(granted, names)
		text.Ports = append(text.Ports, entry)
		for _, b := range l.first.backends {
			if b.refused == "" && b.weight > 0 {
				needs[b.service] = true
			}
		}
	}
	g.needs = slices.SortedFunc(maps.Keys(needs), func(a, b types.NamespacedName) int {
		return strings.Compare(a.String(), b.String())
	})
	g.granted = grantedCondition(slices.Sorted(maps.Keys(granted)))
	return mustJSON(text)
}

// text is a backend in the annotation of a Service in a namespace.
func (b *backend) text(namespace string) backendText {
	t := backendText{Weight: b.weight, Refused: b.refused}
	if b.refused == "" {
		t.Port, t.Service = b.port, b.service.Name
		if b.service.Namespace != namespace {
			t.Service = b.service.String()
		}
	}
	return t
}

func grantedCondition(names []string) metav1.Condition {
	c := condition(watch.ConditionGranted, len(names) > 0, "RoutesRefer", "", 0)
	c.Message = strings.Join(names, " ")
	return c
}

// mustJSON writes strings and numbers, which cannot fail.
func mustJSON(v any) string {
	text, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return string(text)
}
