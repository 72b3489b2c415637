package main

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/verdict-proxy/verdict/internal/answers/cluster"
	"github.com/verdict-proxy/verdict/internal/answers/cluster/clustertest"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/proxy/status"
)

// TestCompletion: a shell completes SRC, where Services answer, and names of Services, by the kernel or by manifests.
func TestCompletion(t *testing.T) {
	c := newCompared(t)
	for _, test := range []struct {
		args  []string
		wants []string
	}{
		{[]string{"explain", ""}, []string{"node\tthis node\n", "pod\t", "outside\t"}},
		{[]string{"explain", "p"}, []string{"pod\t"}},
		{[]string{"explain", "pod", "10.96.0."}, []string{"10.96.0.1:443\tdefault/kubernetes:https\n",
			"10.96.0.10:53/udp\tkube-system/kube-dns:dns\n"}},
		{[]string{"explain", "--from", "../../examples/cluster.yaml", "pod", "10.96.0.1:"},
			[]string{"10.96.0.1:443\tdefault/kubernetes:https\n"}},
		{[]string{"top", "--service", "kube"}, []string{"kube-system/kube-dns\n"}},
		{[]string{"status", "--service", "default/k"}, []string{"default/kubernetes\n"}},
		{[]string{"log", "--service", "default/k"}, []string{"default/kubernetes\n"}},
	} {
		out, _ := c.run(append([]string{"__complete"}, test.args...)...)
		for _, want := range test.wants {
			if !strings.Contains(out, want) {
				t.Errorf("%q completes as\n%s\nwant %q", test.args, out, want)
			}
		}
		if strings.Contains(test.args[0]+test.args[1], "explainp") && strings.Contains(out, "node\t") {
			t.Errorf("%q completes as\n%s", test.args, out)
		}
	}
}

// TestLeadingTo: explain --to says on a node which Services lead to an address, by manifests and by the kernel alike.
func TestLeadingTo(t *testing.T) {
	c := newCompared(t)
	services := func(args ...string) (names []string) {
		out, _ := c.run(append([]string{"explain", "--to"}, args...)...)
		labtest.Check(t, json.Unmarshal([]byte(func() string {
			text, _ := c.run(append([]string{"explain", "-o", "json", "--to"}, args...)...)
			return text
		}()), &[]cluster.Led{}))
		for line := range strings.Lines(out) {
			if f := strings.Fields(line); len(f) > 2 && f[1] == args[0] {
				names = append(names, f[0])
			}
		}
		return slices.Compact(names)
	}
	found := 0
	for _, slice := range c.objects.Snap.Slices {
		for _, s := range slice {
			for i := range s.Endpoints {
				e := &s.Endpoints[i]
				want := services(append([]string{e.Addr.String()}, c.flags...)...)
				got := services(e.Addr.String())
				for _, n := range got { // it has none that this node does not send to
					if found++; !slices.Contains(want, n) {
						t.Errorf("%s: the kernel says %q, the objects %q", e.Addr, got, want)
					}
				}
			}
		}
	}
	if found < 5 {
		t.Errorf("only %d Services were found", found)
	}
	if out, _ := c.run("explain", "--to", "192.0.2.1"); out != "no Service leads to 192.0.2.1\n" {
		t.Error(out)
	}
	for args, want := range map[string]string{"explain --to web": "names of pods need",
		"explain --to 10.0.0.1 pod 10.96.0.1:80":  "--to takes the pod",
		"explain --to 10.0.0.1 --live --at 14:00": "cannot be combined"} {
		if _, err := command(strings.Fields(args)...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", args, err)
		}
	}
}

// TestKubectlJSON: every command of the plugin that prints a result prints JSON, and completes names.
func TestKubectlJSON(t *testing.T) {
	f := &clustertest.Fake{Statuses: map[string]*status.Status{"node-1": {Node: "node-1"}, "node-2": nil},
		Explanation: `{"packet":{}}`, Answers: map[string]string{"verify": `{"same":true}`, "diff": `{"same":true}`,
			"compare": `{"result":{}}`, "log": `{"number":1}`,
			"services": `{"services":[{"service":"shop/cart","state":"refuses","usable":0}]}`}}
	run := func(args ...string) (string, error) {
		return commandOf(newKubectlWith(func(string, string) (cluster.API, cluster.Executor, string, error) {
			return f, f, "default", nil
		}), args...)
	}
	for _, args := range []string{"status", "services shop/cart",
		"explain web-0 shop/cart", "explain --to web-0", "verify", "diff",
		"compare",
		"top --interval 100ms", "wait shop/cart --timeout 1s", "log node-1", "version"} {
		out, _ := run(append(strings.Fields(args), "-o", "json")...)
		var v any
		if err := json.Unmarshal([]byte(out), &v); err != nil {
			t.Errorf("%s -o json: %v\n%s", args, err, out)
		}
	}
	out, err := run("verify", "-o", "json")
	if !strings.Contains(out, `"same": true`) || !strings.Contains(out, "no answer within 15s") || err == nil {
		t.Errorf("verify: %v\n%s", err, out)
	}
	if out, err := run("log", "node-1"); err != nil || out != `{"number":1}` {
		t.Errorf("log: %v, %q", err, out)
	}
	for args, want := range map[string]string{"explain v": "verdict-node-1\n",
		"explain kube-system/v": "kube-system/verdict-", "log node": "node-2\n", "wait ": "cart\n",
		"explain web-0 shop/": "shop/cart\n"} {
		words := strings.Split(args, " ")
		if out, err := run(append([]string{"__complete"}, words...)...); err != nil || !strings.Contains(out, want) {
			t.Errorf("%q completes as %v\n%s", args, err, out)
		}
	}
	if out, err := run("--version"); err != nil || !strings.HasPrefix(out, "kubectl verdict version ") {
		t.Errorf("--version: %v, %q", err, out)
	}
	if out, err := run("completion"); err != nil || !strings.HasPrefix(out, "#!/bin/sh\n") {
		t.Errorf("completion: %v, %q", err, out)
	}
}

// TestJSONEverywhere: every command that prints a result has -o json. Others print rules, or run until they are told to
// stop.
func TestJSONEverywhere(t *testing.T) {
	none := []string{"completion", "help", "run", "collect", "gateway", "demo", "render", "dashboard", "plan", "serve",
		"dial"}
	for _, root := range []*cobra.Command{newRoot(), newKubectl()} {
		var walk func(cmd *cobra.Command)
		walk = func(cmd *cobra.Command) {
			for _, c := range cmd.Commands() {
				walk(c)
			}
			if cmd.HasSubCommands() || slices.Contains(none, cmd.Name()) {
				return
			}
			if cmd.Flags().Lookup("output") == nil {
				t.Errorf("%s has no -o json", cmd.CommandPath())
			}
		}
		walk(root)
	}
}
