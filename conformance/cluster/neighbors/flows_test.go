package neighbors

import (
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/verdict-proxy/verdict/conformance/cluster"
)

func TestResultAdd(t *testing.T) {
	for _, test := range []struct {
		name          string
		flow          flow
		probe         cluster.Probe
		failed, wrong int
	}{
		{"answered", flow{}, cluster.Probe{Asked: 3, Answers: map[string]int{"server-1 10.0.0.9": 3}}, 0, 0},
		{"some not", flow{}, cluster.Probe{Asked: 3, Failed: 2, Answers: map[string]int{"server-1 10.0.0.9": 1}}, 2, 0},
		{"refused", flow{refused: true}, cluster.Probe{Asked: 3, Failed: 3}, 0, 0},
		{"refused, but one was answered", flow{refused: true},
			cluster.Probe{Asked: 3, Failed: 2, Answers: map[string]int{"server-1 10.0.0.9": 1}}, 1, 0},
		{"the address is kept", flow{kept: true},
			cluster.Probe{Asked: 2, Answers: map[string]int{"server-1 fd00::2": 2}}, 0, 0},
		{"the address is lost", flow{kept: true},
			cluster.Probe{Asked: 3, Answers: map[string]int{"server-1 10.0.0.2": 1, "server-2 10.0.0.9": 2}}, 0, 2},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := &Result{}
			r.add(&test.flow, &test.probe, []string{"10.0.0.2", "fd00::2"})
			if r.Failed != test.failed || r.WrongSource != test.wrong || r.Connections != test.probe.Asked {
				t.Errorf("got %+v", r)
			}
			if wrong := test.failed+test.wrong > 0; wrong != (len(r.Wrong) == 1) {
				t.Errorf("it says %q", r.Wrong)
			}
		})
	}
}

// TestObjects reads what is applied: each document is YAML, and no object is there twice.
func TestObjects(t *testing.T) {
	var names []string
	for document := range strings.SplitSeq(strings.TrimSuffix(objects(), "---\n"), "---\n") {
		var o struct {
			Kind     string
			Metadata struct {
				Namespace, Name string
				Labels          map[string]string
			}
		}
		if err := yaml.Unmarshal([]byte(document), &o); err != nil {
			t.Fatalf("%v in\n%s", err, document)
		}
		names = append(names, strings.Join([]string{o.Kind, o.Metadata.Namespace, o.Metadata.Name}, "/"))
	}
	slices.Sort(names)
	if all := len(names); len(slices.Compact(names)) != all {
		t.Errorf("some objects are there twice: %v", names)
	}
	for _, want := range []string{"Pod/neighbors/server-2", "Pod/guarded/stranger", "Service/guarded/local",
		"Namespace//foreign"} {
		if !slices.Contains(names, want) {
			t.Errorf("no %s in %v", want, names)
		}
	}
}

func TestTable(t *testing.T) {
	decision := func(answered int) []Decision {
		return []Decision{{From: "pod", To: "cluster IP", Want: true, Asked: 5, Answered: answered,
			Sources: []string{"10.0.0.2"}}}
	}
	got := Table([]*Result{
		{Neighbors: "router v1", Proxy: "verdict", Flows: 2, Connections: 40, Notes: []string{"it moved"},
			Decisions: decision(5)},
		{Neighbors: "router v1", Proxy: "kube-proxy", Flows: 2, Connections: 40, Failed: 20,
			Wrong: []string{"pod to x: failed"}, Decisions: decision(2)},
	})
	for _, want := range []string{
		"| router v1 | kube-proxy | 2 | 40 | 20 | 0 |\n", "\nverdict: it moved\n", "\nkube-proxy: pod to x: failed\n",
		"| pod | cluster IP | allowed | allowed | 10.0.0.2 | 2 of 5 allowed | 10.0.0.2 |\n",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, got)
		}
	}
}
