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

// blocksOf returns what a document of docs/ gives a shell to run.
func blocksOf(t *testing.T, name string) (blocks []string) {
	document, err := os.ReadFile(filepath.Join(repository, "docs", name))
	labtest.Check(t, err)
	for _, m := range shBlock.FindAllSubmatch(document, -1) {
		blocks = append(blocks, string(m[1]))
	}
	return blocks
}

// typed runs a script in namespaces of its own, as docs/QUICKSTART.md opens them, and returns what it prints.
func typed(t *testing.T, dir, script string) string {
	t.Helper()
	document, err := os.ReadFile(filepath.Join(repository, "docs", "QUICKSTART.md"))
	labtest.Check(t, err)
	shell := shellLine.FindSubmatch(document)
	if shell == nil {
		t.Fatal("no line of the document opens a shell in namespaces of its own")
	}
	bin := t.TempDir()
	self, err := os.Executable()
	labtest.Check(t, err)
	for name, as := range map[string]string{"verdict": beVerdict, "python3": bePython} {
		shim := "#!/bin/sh\n" + as + "=1 exec " + self + ` "$@"` + "\n"
		labtest.Check(t, os.WriteFile(filepath.Join(bin, name), []byte(shim), 0o755))
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	sh := exec.CommandContext(ctx, "unshare", append(strings.Fields(string(shell[1])), "-c", "set -e\n"+script)...)
	sh.Dir = dir
	sh.Env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"))
	sh.WaitDelay = 5 * time.Second
	out, err := sh.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return string(out)
}

// TestTrace types what docs/TROUBLESHOOTING.md says on how to have the kernel trace packets: the trace shows Verdict's
// rules.
func TestTrace(t *testing.T) {
	blocks := blocksOf(t, "TROUBLESHOOTING.md")
	if len(blocks) != 1 {
		t.Fatalf("the document has %d blocks", len(blocks))
	}
	out := typed(t, t.TempDir(), blocksOf(t, "QUICKSTART.md")[0]+blocks[0]+`
echo ==== trace
nft monitor trace > trace.log &
for try in $(seq 100); do
	curl -s --retry 9 --retry-connrefused http://10.96.0.80
	grep -q "ip verdict .* rule dnat" trace.log && break
	sleep 0.2
done
cat trace.log
nft delete table inet debug
`)
	_, trace, _ := strings.Cut(out, "==== trace")
	for _, want := range []string{"inet debug leaving", "ip verdict output packet", "ip daddr 10.96.0.80", " rule dnat "} {
		if !strings.Contains(trace, want) {
			t.Errorf("the trace has no %q:\n%s", want, trace)
		}
	}
}

// TestQuickstart types what docs/QUICKSTART.md says, in namespaces of its own: both servers answer, then one is taken
// out of the file, at the end the tables are gone, and no process outlives the shell.
func TestQuickstart(t *testing.T) {
	script, dir := "", t.TempDir()
	for i, block := range blocksOf(t, "QUICKSTART.md") {
		script += "echo ==== " + strconv.Itoa(i) + "\n" + block
	}
	out := typed(t, dir, script+"echo ==== end\nnft list tables\n")
	parts := strings.Split(out, "==== ")
	if len(parts) != 5 {
		t.Fatalf("the document has other blocks:\n%s", out)
	}
	sum := 0
	for _, m := range regexp.MustCompile(`(?m)^ *(\d+) pod [12]$`).FindAllStringSubmatch(parts[1], -1) {
		n, err := strconv.Atoi(m[1])
		if sum += n; err != nil || n < 25 { // one try in five million
			t.Errorf("a server answers %d times (%v)", n, err)
		}
	}
	if sum != 100 {
		t.Errorf("the servers do not answer 100 times:\n%s", parts[1])
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
