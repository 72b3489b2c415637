package main

import (
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
)

// demoProcess runs the real command until it has shown a text, sends it a signal, and gives its exit status. The user
// is one without rights if that is possible; else this test already is that user, in a user namespace.
func demoProcess(t *testing.T, nobody bool, at string, signal os.Signal) (shown string, status int) {
	t.Helper()
	dir, err := os.MkdirTemp("", "verdict-test-")
	labtest.Check(t, err)
	defer os.RemoveAll(dir)
	labtest.Check(t, os.Chmod(dir, 0o777))
	cmd := exec.Command("/proc/self/exe", "demo")
	cmd.Env = append(os.Environ(), beVerdict+"=1", "TMPDIR="+dir)
	cmd.Stderr = t.Output()
	if nobody {
		cmd.Dir = "/"
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	}
	out, err := cmd.StdoutPipe()
	labtest.Check(t, err)
	labtest.Check(t, cmd.Start())
	buf := make([]byte, 4096)
	for err == nil {
		var n int
		n, err = out.Read(buf)
		shown += string(buf[:n])
		if at == "" || !strings.Contains(shown, at) {
			continue
		}
		at = ""
		if signal == syscall.SIGPIPE {
			labtest.Check(t, out.Close()) // the demo finds out by itself
		} else {
			labtest.Check(t, cmd.Process.Signal(signal))
		}
	}
	if err != io.EOF && signal != syscall.SIGPIPE {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil && cmd.ProcessState == nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("the demo left %v (%v)", left, err)
	}
	return shown, cmd.ProcessState.ExitCode()
}

// canBeNobody says whether this process may become a user without rights.
func canBeNobody(t *testing.T) bool {
	ids, err := os.ReadFile("/proc/self/uid_map")
	labtest.Check(t, err)
	return os.Geteuid() == 0 && slices.Equal(strings.Fields(string(ids)), []string{"0", "0", "4294967295"})
}

func TestDemoProcess(t *testing.T) {
	users := []bool{false}
	if canBeNobody(t) {
		users = append(users, true)
	}
	for _, nobody := range users {
		for _, s := range []os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGPIPE} {
			if shown, status := demoProcess(t, nobody, "Who answers", s); status != exitError {
				t.Errorf("as nobody %v, after %v, the demo ended with status %d:\n%s", nobody, s, status, shown)
			}
		}
	}
	if shown, status := demoProcess(t, users[len(users)-1], "", nil); status != exitOK {
		t.Errorf("the demo ended with status %d:\n%s", status, shown)
	}
}
