package lab_test

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
)

// A tied program ends with its host.
func TestStartTied(t *testing.T) {
	n := labtest.NewNet(t)
	c := labtest.NewHost(t, n, "host").Command("sleep", "3600")
	labtest.Check(t, c.StartTied())
	if pid := c.Process.Pid; !alive(pid) {
		t.Fatal("it does not run")
	}
	labtest.Check(t, n.Close())
	if err := c.Wait(); err == nil || err.Error() != "signal: killed" {
		t.Errorf("it ended with %v", err)
	}
}

func alive(pid int) bool { return unix.Kill(pid, 0) == nil }
