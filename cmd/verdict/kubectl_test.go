package main

import (
	"errors"
	"strings"
	"testing"

	"github.com/verdict-proxy/verdict/internal/answers/cluster"
)

// TestKubectlName: by the name of a plugin the program is the plugin, by any other it is verdict.
func TestKubectlName(t *testing.T) {
	for program, want := range map[string]string{"/usr/local/bin/kubectl-verdict": "kubectl verdict",
		"kubectl-verdict.exe": "kubectl verdict", "verdict": "verdict", "/usr/local/bin/verdict": "verdict", "": "verdict"} {
		if got := rootFor(program).CommandPath(); got != want {
			t.Errorf("%q is %q; want %q", program, got, want)
		}
		found, _, err := rootFor(program).Find([]string{"wait", "x"})
		if err != nil || (found.Name() == "wait") != (want == "kubectl verdict") {
			t.Errorf("%q has wait: %v, %v", program, found.Name(), err)
		}
	}
}

// TestKubectlTrouble: whatever goes wrong, the commands that compare end with 2, and no command panics without a
// cluster.
func TestKubectlTrouble(t *testing.T) {
	no := func(string, string) (cluster.API, cluster.Executor, string, error) {
		return nil, nil, "", errors.New("no cluster")
	}
	for args, want := range map[string]string{
		"status": "exit status 2", "verify": "exit status 2", "diff --all": "exit status 2", "top": "exit status 2",
		"bundle":   "exit status 2",
		"wait a/b": "exit status 2", "plan --delete-object Service/a/b": "exit status 2",
		"explain a b": "no cluster", "explain --to a": "no cluster",
		"explain a": "accepts 2 arg(s), received 1", "wait": "accepts 1 arg(s), received 0",
	} {
		cmd := newKubectlWith(no)
		var said strings.Builder
		cmd.SetErr(&said)
		cmd.SetArgs(strings.Fields(args))
		if err := cmd.Execute(); err == nil || err.Error() != want ||
			want == "exit status 2" && said.String() != "verdict: no cluster\n" {
			t.Errorf("%s: %v, %q; want %q", args, err, said.String(), want)
		}
	}
}

// TestStatusErrors: without a proxy, and with wrong flags, status says what is wrong.
func TestStatusErrors(t *testing.T) {
	for args, want := range map[string]string{
		"status --healthz-bind-address 127.0.0.1:1": "no proxy answers at 127.0.0.1:1 (connection refused)",
		"status --healthz-bind-address x":           "--healthz-bind-address: \"x\" is not an address",
		"status -o yaml":                            "\"-o, --output\" flag: \"yaml\" is neither text nor json",
	} {
		cmd := newRoot()
		cmd.SetArgs(strings.Fields(args))
		if err := cmd.Execute(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v; want %q", args, err, want)
		}
	}
}
