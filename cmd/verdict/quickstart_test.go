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
	"syscall"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
)

// shBlock is a block of code that a document gives a shell to run.
var shBlock = regexp.MustCompile("(?ms)^```sh\n(.*?)^```")

// bePython makes the test program what docs/QUICKSTART.md starts python3 for: a server of one page.
const bePython = "VERDICT_TEST_BE_PYTHON"

// TestQuickstart types what docs/QUICKSTART.md says, in a network namespace: both servers answer, then one is taken out
// of the file, and at the end the tables are gone.
func TestQuickstart(t *testing.T) {
	document, err := os.ReadFile(filepath.Join(repository, "docs", "QUICKSTART.md"))
	labtest.Check(t, err)
	script := "set -e\n"
	for i, m := range shBlock.FindAllSubmatch(document, -1) {
		script += "echo ==== " + strconv.Itoa(i) + "\n" + string(m[1])
	}
	script += "echo ==== end\nnft list tables\nkill $(jobs -p) 2> /dev/null || true\n"

	dir, bin := t.TempDir(), t.TempDir()
	self, err := os.Executable()
	labtest.Check(t, err)
	for name, as := range map[string]string{"verdict": beVerdict, "python3": bePython} {
		shim := "#!/bin/sh\n" + as + "=1 exec " + self + ` "$@"` + "\n"
		labtest.Check(t, os.WriteFile(filepath.Join(bin, name), []byte(shim), 0o755))
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	sh := exec.CommandContext(ctx, "bash", "-c", script)
	sh.Dir = dir
	sh.Env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"))
	sh.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Setpgid: true}
	sh.Cancel = func() error { return syscall.Kill(-sh.Process.Pid, syscall.SIGKILL) }
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
}

// servePage does what "python3 -m http.server --directory DIR --bind ADDRESS PORT" does, by the same arguments.
func servePage(args []string) error {
	return http.ListenAndServe(args[5]+":"+args[6], http.FileServer(http.Dir(args[3])))
}
