package blackbox

import (
	"os"
	"os/exec"
	"slices"
	"testing"
	"time"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/internal/system/testkit"
)

// TestProcesses has a namespace of a process end and another one begin, which gets the number of the former one: both
// are known, and that the first is gone.
func TestProcesses(t *testing.T) {
	box := New(Config{})
	t.Cleanup(func() { labtest.Check(t, box.Close()) })
	box.WatchProcesses(func(string) string { return "machine" })
	start := func(name string) *exec.Cmd {
		cmd := exec.Command("unshare", "--net", "sh", "-c",
			"ip addr add 192.0.2.1/32 dev lo; ip link set lo up; exec sleep 300")
		cmd.Env = append(os.Environ(), "HOSTNAME="+name)
		labtest.Check(t, cmd.Start())
		t.Cleanup(func() { _, _ = cmd.Process.Kill(), cmd.Wait() })
		return cmd
	}
	is := func(name string, gone bool) func() bool {
		return func() bool {
			box.mu.Lock()
			defer box.mu.Unlock()
			return slices.ContainsFunc(box.spaces, func(s *space) bool {
				s.mu.Lock()
				defer s.mu.Unlock()
				return s.name == "machine/"+name && s.gone.IsZero() != gone
			})
		}
	}
	first := start("first")
	testkit.Eventually(t, time.Minute, "the first namespace is known", is("first", false))
	labtest.Check(t, first.Process.Kill())
	testkit.Eventually(t, time.Minute, "the first namespace is gone", is("first", true))
	start("second")
	testkit.Eventually(t, time.Minute, "the second namespace is known", is("second", false))
}
