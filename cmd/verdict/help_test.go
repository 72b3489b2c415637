package main

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
)

// TestHelp: no help, of verdict and of the plugin, is wider than the terminal, and each has the common form.
func TestHelp(t *testing.T) {
	t.Setenv("COLUMNS", "")
	width := terminal.DefaultWidth
	var walk func(root func() *cobra.Command, cmd *cobra.Command, args []string)
	walk = func(root func() *cobra.Command, cmd *cobra.Command, args []string) {
		out, err := commandOf(root(), append(args, "--help")...)
		labtest.Check(t, err)
		if !strings.Contains(out, "\nFlags:\n") || strings.Contains(out, "Global Flags") {
			t.Errorf("%s: help has another form:\n%s", cmd.CommandPath(), out)
		}
		for line := range strings.Lines(out) {
			if n := len([]rune(strings.TrimSuffix(line, "\n"))); n > width {
				t.Errorf("%s: %d columns: %s", cmd.CommandPath(), n, line)
			}
		}
		for _, child := range cmd.Commands() {
			if child.IsAvailableCommand() && child.Name() != "completion" {
				walk(root, child, append(args[:len(args):len(args)], child.Name()))
			}
		}
	}
	walk(newRoot, newRoot(), nil)
	walk(newKubectl, newKubectl(), nil)
	t.Setenv("COLUMNS", "76")
	width = 76
	walk(newRoot, newRoot(), nil)
	walk(newKubectl, newKubectl(), nil)
	t.Setenv("COLUMNS", "")
	out, err := commandOf(newKubectl(), "status", "--help")
	labtest.Check(t, err)
	for _, want := range []string{"\nFlags of all commands:\n", "--verdict-namespace string", "-o, --output text|json"} {
		if strings.Count(out, want) != 1 {
			t.Errorf("kubectl verdict status --help has %q %d times", want, strings.Count(out, want))
		}
	}
	out, err = command("run", "--help")
	labtest.Check(t, err)
	for _, want := range []string{"\nFlags:\n", "\nServices and packets:\n", "\nLog:\n", "--cluster-cidr string"} {
		if strings.Count(out, want) != 1 {
			t.Errorf("run --help has %q %d times", want, strings.Count(out, want))
		}
	}
	if strings.Contains(out, "--vmodule") {
		t.Error("hidden flags are shown")
	}
}

// TestNoSuchCommand: a command that does not exist is an error, with a suggestion.
func TestNoSuchCommand(t *testing.T) {
	for _, test := range []struct{ args, want string }{
		{"bench foo", `has no command "foo"`},
		{"bench chrun", "did you mean churn"},
		{"bnch", "bench"},
		{"help runn", `"verdict" has no command "runn": did you mean run?`},
		{"help bench chrun", "did you mean churn"},
		{"render extra", `verdict render takes no arguments, but got "extra"`},
		{"top shop/cart", "(a Service is --service NAMESPACE/NAME)"},
		{"status --helthz-bind-address x", "unknown flag: --helthz-bind-address (did you mean --healthz-bind-address?)"},
		{"log --servce x", "did you mean --service?"},
		{"explain --unlike x", "explain --help lists those of this command"},
	} {
		if _, err := command(strings.Fields(test.args)...); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("verdict %s: %v", test.args, err)
		}
	}
}

// TestNarrow: on a terminal of 80 columns, no answer has longer lines, and wrapping changes no word.
func TestNarrow(t *testing.T) {
	narrow := func(args ...string) {
		t.Helper()
		t.Setenv("COLUMNS", "")
		wide, _ := command(args...)
		t.Setenv("COLUMNS", "80")
		out, _ := command(args...)
		if got, want := strings.Fields(out), strings.Fields(wide); !slices.Equal(got, want) || len(want) == 0 {
			t.Errorf("%q has other words when it is wrapped:\n%s", args, out)
		}
		for line := range strings.Lines(out) {
			if n := len([]rune(strings.TrimSuffix(line, "\n"))); n > 80 {
				t.Errorf("%q has %d columns: %s", args, n, line)
			}
		}
	}
	for _, q := range questions(t) {
		narrow(q.args...)
	}
	narrow("version")
	for name := range plans {
		narrow(planArgs(name)...)
	}
}

// TestOutputFlag: -o json is --json, and other formats are an error. Words are completed.
func TestOutputFlag(t *testing.T) {
	out, err := command("version", "-o", "json")
	labtest.Check(t, err)
	var got versionInfo
	labtest.Check(t, json.Unmarshal([]byte(out), &got))
	if got.Go == "" || got.Kernel.Release == "" || !got.Kernel.NFTables.Usable && got.Kernel.NFTables.Why == "" {
		t.Errorf("%+v", got)
	}
	if _, err := command("version", "-o", "yaml"); err == nil || !strings.Contains(err.Error(), "neither text nor json") {
		t.Errorf("-o yaml: %v", err)
	}
	out, err = command("__complete", "run", "--keeper", "")
	labtest.Check(t, err)
	if !strings.HasPrefix(out, "auto\nprocess\nsystemd\nnone\n") {
		t.Errorf("completion of --keeper: %q", out)
	}
}

// TestExitCodeNeedsBoth: --exit-code is refused where there is nothing to compare.
func TestExitCodeNeedsBoth(t *testing.T) {
	_, err := command("explain", "10.0.0.1", "10.96.0.1:80", "--exit-code", "--from", "../../examples/cluster.yaml")
	if err == nil || !strings.Contains(err.Error(), "it needs --live") {
		t.Errorf("--exit-code without --live: %v", err)
	}
}
