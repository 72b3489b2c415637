package cases

import (
	"strings"
	"testing"
	"testing/fstest"
)

func TestEmbedded(t *testing.T) {
	s, err := Load()
	if err != nil {
		t.Fatal(err)
	}
	themes := make(map[string]bool)
	short := make(map[string]bool)
	for _, c := range s.Cases {
		themes[c.Theme] = true
		short[c.Theme] = short[c.Theme] || c.Slice
		if len(c.Looks) == 0 || c.Title == "" || c.Source == "" {
			t.Errorf("%s has no looks, no title or no source", c.Name)
		}
	}
	for _, story := range s.Stories {
		themes[story.Theme] = true
		short[story.Theme] = short[story.Theme] || story.Slice
		if story.Source == "" {
			t.Errorf("%s has no source", story.FullName())
		}
	}
	for _, theme := range s.Themes {
		if !themes[theme.Theme] {
			t.Errorf("%s has no case", theme.Theme)
		}
		if !short[theme.Theme] {
			t.Errorf("%s has no case in the short run", theme.Theme)
		}
	}
	if len(s.Cases) < 1500 || len(s.Stories) < 100 {
		t.Errorf("%d cases and %d stories: some are lost", len(s.Cases), len(s.Stories))
	}
}

// head begins a good file.
const head = "theme: x\nabout: x\n"

func TestErrors(t *testing.T) {
	for _, c := range []struct{ name, text, want string }{
		{"no YAML", "theme: [", "x.yaml: yaml: line 1"},
		{"another name", "theme: y", `x.yaml:1: theme: it is "y"`},
		{"unknown field", head + "storys: []", "line 3: field storys not found"},
		{"unknown step", head + "stories:\n- {name: s, title: t, steps: [{expct: {}}]}", "x.yaml:4: story: s: yaml"},
		{"two kinds", head + "stories:\n- name: s\n  title: t\n  steps:\n  - {api: stop, wait: 1s}",
			"x.yaml:7: story s: a step has one kind, this one has 2"},
		{"unknown host", head + "stories:\n- name: s\n  title: t\n  steps:\n  - expect: {from: [a9], to: x, answer: " +
			"refused}", "x.yaml:7: story s: expect: from: a9 is none of"},
		{"no answer", head + "stories:\n- name: s\n  title: t\n  steps:\n  - expect: {from: [a1], to: x}",
			"x.yaml:7: story s: expect: from, answer"},
		{"wrong answer", head + "stories:\n- name: s\n  title: t\n  steps:\n  - expect: {from: [a1], to: x, answer: " +
			"perhaps}", `"perhaps" is none of refused`},
		{"a ping answered by somebody", head + "stories:\n- name: s\n  title: t\n  steps:\n  - echo: {from: [a1], to: x, " +
			"answer: [a2]}", "x.yaml:7: story s: echo: from, to and answer are needed"},
		{"shares of nothing", head + "stories:\n- name: s\n  title: t\n  steps:\n  - shares: {from: [a1], to: x, times: 9}",
			"x.yaml:7: story s: shares: from, to, times and of are needed"},
		{"a route by a pod", head + "stories:\n- name: s\n  title: t\n  steps:\n  - route: {to: x, via: a1}",
			"x.yaml:7: story s: route: via: a1 is none of"},
		{"a frontend for stories", head + "matrix:\n- {title: t, states: [one], frontends: [unused-port@load-balancer], " +
			"senders: [a1]}", "frontends: unused-port@load-balancer is none of"},
		{"wrong condition", head + "stories:\n- name: s\n  title: t\n  steps:\n  - endpoints: {of: x, set: {a1: great}}",
			"great is none of ready"},
		{"wrong hint", head + "stories:\n- name: s\n  title: t\n  steps:\n  - endpoints: {of: x, set: {a1: ready for fun}}",
			"fun is no zone and no node"},
		{"wrong specification", head + "stories:\n- name: s\n  title: t\n  steps:\n  - service: {name: w, spec: {prts: []}}",
			`x.yaml:7: story s: service w: spec: json: unknown field "prts"`},
		{"difference without a reason", head + "stories:\n- name: s\n  title: t\n  differs: [{proxies: [verdict], want: " +
			"dropped}]\n  steps: [{api: stop}]", "right and why are needed"},
		{"difference at no step", head + "stories:\n- name: s\n  title: t\n  differs: [{proxies: [verdict], want: " +
			"dropped, right: either, why: w, step: z}]\n  steps: [{api: stop}]", "differs: step: z is none of"},
		{"difference for each of nothing", head + "stories:\n- name: s\n  title: t\n  differs: [{proxies: [verdict], each: " +
			"{z: [a]}}]\n  steps: [{api: stop}]", "differs: each: the story has no z"},
		{"twice", head + "stories:\n- {name: s, title: t, steps: [{api: stop}]}\n- {name: s, title: t, steps: [{api: " +
			"stop}]}", "two cases named x/s"},
		{"unknown state", head + "matrix:\n- {title: t, states: [gone], frontends: [cluster-ip], senders: [a1]}",
			"x.yaml:4: matrix : states: gone is not in states.yaml"},
		{"unknown policy", head + "matrix:\n- {title: t, states: [one], frontends: [cluster-ip], senders: [a1], vary: " +
			"[{name: v, internalTrafficPolicy: local}]}", "internalTrafficPolicy: local is none of"},
		{"difference of no variation", head + "matrix:\n- {title: t, states: [one], frontends: [cluster-ip], senders: " +
			"[a1], differs: [{proxies: [p], want: refused, right: r, why: w, when: {variations: [v]}}]}",
			"variations: v is none of"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := LoadFrom(fstest.MapFS{
				"states.yaml": {
					Data: []byte("states: {one: {title: one, endpoints: {a1: ready}}}"),
				}, "x.yaml": {Data: []byte(c.text)},
			})
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q", err, c.want)
			}
		})
	}
}

func TestEach(t *testing.T) {
	text := head + `stories:
- name: s
  title: t
  each: {protocol: [TCP, UDP], family: [ipv4, ipv6]}
  differs: [{proxies: [p], each: {protocol: [UDP]}, want: refused, right: either, why: w}]
  steps:
  - serve: {on: [a1], port: 901$(number)}
  - open: {as: c, from: a1, to: w, family: $(family), answer: refused}
`
	s, err := LoadFrom(fstest.MapFS{"states.yaml": {Data: []byte("states: {}")}, "x.yaml": {Data: []byte(text)}})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for i, story := range s.Stories {
		got = append(got, story.FullName())
		if port := story.Steps[0].Serve.Port; port != uint16(9011+i) {
			t.Errorf("%s serves port %d", story.Name, port)
		}
		if !strings.HasPrefix(story.Name, "s/"+string(story.Steps[1].Open.Family)) || story.Steps[1].Line != 10 {
			t.Errorf("%s opens %s, line %d", story.Name, story.Steps[1].Open.Family, story.Steps[1].Line)
		}
		if differs := len(story.Differs) == 1; differs != strings.HasSuffix(story.Name, "/udp") {
			t.Errorf("%s differs: %v", story.Name, differs)
		}
	}
	if want := "x/s/ipv4/tcp x/s/ipv4/udp x/s/ipv6/tcp x/s/ipv6/udp"; strings.Join(got, " ") != want {
		t.Errorf("got %v, want %s", got, want)
	}
}
