package dataplane

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestParsePortName: what String writes is read, and nothing else.
func TestParsePortName(t *testing.T) {
	for text, want := range map[string]PortName{
		"default/web":   {Service: name("web"), Protocol: snapshot.TCP},
		"default/web:a": {Service: name("web"), Port: "a", Protocol: snapshot.TCP},
		"":              {}, "web": {}, "/web": {}, "default/": {}, "a/b/c": {}, "default/web:a b": {},
	} {
		got, ok := ParsePortName(text, snapshot.TCP)
		if got != want || ok != (want != PortName{}) || ok && got.String() != text {
			t.Errorf("%q is read as %v, %v", text, got, ok)
		}
	}
}

// TestChains: a chain is named once for all of its rules in a row that matched.
func TestChains(t *testing.T) {
	trace := Trace{Steps: []TraceStep{{Chain: "a", Matched: true}, {Chain: "a", Matched: true}, {Chain: "b"},
		{Chain: "c", Matched: true}, {Chain: "d", Matched: true, Translated: true}, {Chain: "a", Matched: true}}}
	if got, want := trace.Chains(), []string{"a", "c", "a"}; !slices.Equal(got, want) {
		t.Errorf("chains are %v; want %v", got, want)
	}
}

// TestRefusedNamesSome: an error names the first Services, and how many more there are.
func TestRefusedNamesSome(t *testing.T) {
	for n, more := range map[int]string{1: "", maxRefused: "", maxRefused + 3: "... and 3 more Services"} {
		r := &Refused{Services: map[snapshot.Name]error{}}
		for i := range n {
			r.Services[name(fmt.Sprintf("s%02d", i))] = errors.New("no")
		}
		text := r.Error()
		if strings.Contains(text, "more Services") != (more != "") || !strings.HasSuffix(text, more) {
			t.Errorf("%d Services: %s", n, text)
		}
	}
}

// TestDrainIsTCP: only connections of TCP have a time to drain.
func TestDrainIsTCP(t *testing.T) {
	s := snapshot.New()
	svc := webService("a", "10.96.0.1")
	svc.Drain = 60e9
	svc.Ports = []snapshot.Port{{Name: "t", Protocol: snapshot.TCP, Port: 80},
		{Name: "u", Protocol: snapshot.UDP, Port: 80}}
	put(s, svc)
	st, _ := Compute(Config{}, s)
	for _, sp := range st.Services[name("a")].Ports {
		if drains := sp.Drain == svc.Drain; drains != (sp.Name.Protocol == snapshot.TCP) || !drains && sp.Drain != 0 {
			t.Errorf("%v drains for %v", sp.Name, sp.Drain)
		}
	}
}
