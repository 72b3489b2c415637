package main

import (
	"context"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
)

// shBlock is a block of code that a document gives a shell to run.
var shBlock = regexp.MustCompile("(?ms)^```sh\n(.*?)^```")

// shellLine is the line by which docs/QUICKSTART.md opens a shell in namespaces of its own.
var shellLine = regexp.MustCompile(`(?m)^    # unshare (.* sh)$`)

// bePython makes the test program what docs/QUICKSTART.md starts python3 for: a server of one page.
const bePython = "VERDICT_TEST_BE_PYTHON"

// TestQuickstart types what docs/QUICKSTART.md says, in namespaces of its own: both servers answer, then one is taken
// out of the file, at the end the tables are gone, and no process outlives the shell.
func TestQuickstart(t *testing.T) {
	document, err := os.ReadFile(filepath.Join(repository, "docs", "QUICKSTART.md"))
	labtest.Check(t, err)
	script := "set -e\n"
	for i, m := range shBlock.FindAllSubmatch(document, -1) {
		script += "echo ==== " + strconv.Itoa(i) + "\n" + string(m[1])
	}
	script += "echo ==== end\nnft list tables\n"
	shell := shellLine.FindSubmatch(document)
	if shell == nil {
		t.Fatal("no line of the document opens a shell in namespaces of its own")
	}

	dir, bin := t.TempDir(), t.TempDir()
	self, err := os.Executable()
	labtest.Check(t, err)
	for name, as := range map[string]string{"verdict": beVerdict, "python3": bePython} {
		shim := "#!/bin/sh\n" + as + "=1 exec " + self + ` "$@"` + "\n"
		labtest.Check(t, os.WriteFile(filepath.Join(bin, name), []byte(shim), 0o755))
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	sh := exec.CommandContext(ctx, "unshare", append(strings.Fields(string(shell[1])), "-c", script)...)
	sh.Dir = dir
	sh.Env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"))
	sh.WaitDelay = 5 * time.Second
	out, err := sh.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	parts := strings.Split(string(out), "==== ")
	if len(parts) != 5 {
		t.Fatalf("the document has other blocks:\n%s", out)
	}
	if !strings.Contains(parts[1], "pod 1") || !strings.Contains(parts[1], "pod 2") {
		t.Errorf("not both servers answer:\n%s", parts[1])
	}
	if !strings.Contains(parts[2], "default/web") || !strings.Contains(parts[2], "10.96.0.80 . tcp . 80") {
		t.Errorf("nobody says where the Service leads:\n%s", parts[2])
	}
	if strings.Count(parts[3], "pod 1") != 4 || strings.Contains(parts[3], "pod 2") {
		t.Errorf("the endpoint that left the file gets connections:\n%s", parts[3])
	}
	if strings.Contains(parts[4], "verdict") {
		t.Errorf("tables are left:\n%s", parts[4])
	}
	if left := processesIn(t, dir); len(left) > 0 {
		t.Errorf("processes outlive the shell: %q", left)
	}
}

// processesIn returns the command lines of all processes whose working directory is dir.
func processesIn(t *testing.T, dir string) (lines []string) {
	t.Helper()
	list, err := filepath.Glob("/proc/[0-9]*/cwd")
	labtest.Check(t, err)
	for _, link := range list {
		if at, err := os.Readlink(link); err == nil && at == dir {
			line, _ := os.ReadFile(filepath.Join(filepath.Dir(link), "cmdline"))
			lines = append(lines, string(line))
		}
	}
	return lines
}

// servePage does what "python3 -m http.server --directory DIR --bind ADDRESS PORT" does, by the same arguments.
func servePage(args []string) error {
	return http.ListenAndServe(args[5]+":"+args[6], http.FileServer(http.Dir(args[3])))
}
