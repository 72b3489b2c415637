package main

import (
	"bufio"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/verdict-proxy/verdict/internal/lab"
	"github.com/verdict-proxy/verdict/internal/lab/labtest"
	"github.com/verdict-proxy/verdict/nft/kernel"
	"github.com/verdict-proxy/verdict/sync/dataplane"
	"github.com/verdict-proxy/verdict/sync/snapshot"
)

// TestCleanupStays: in a DaemonSet, cleanup says what it has removed and waits for SIGTERM, after which its status
// is 0.
func TestCleanupStays(t *testing.T) {
	h := labtest.NewHost(t, labtest.NewNet(t), "node")
	writeTables(t, h)
	for _, want := range []string{"verdict: removed the tables of nftables", "verdict: there is nothing to remove"} {
		self, err := os.Executable()
		labtest.Check(t, err)
		cmd := h.Command(self, "cleanup", "--stay")
		cmd.Env = append(os.Environ(), beVerdict+"=1")
		out, err := cmd.StderrPipe()
		labtest.Check(t, err)
		labtest.Check(t, cmd.Start())
		said := ""
		for lines := bufio.NewScanner(out); !strings.Contains(said, "waiting to be stopped") && lines.Scan(); {
			said += lines.Text() + "\n"
		}
		labtest.Check(t, cmd.Process.Signal(syscall.SIGTERM))
		if err := cmd.Wait(); err != nil || !strings.Contains(said, want) {
			t.Errorf("%v, it says %q; want %q", err, said, want)
		}
	}
}

// writeTables programs a host on which there are no Services.
func writeTables(t *testing.T, h *lab.Host) {
	t.Helper()
	var backend *kernel.Backend
	labtest.Check(t, h.Do(func() (err error) { backend, err = kernel.Open(kernel.Options{}); return err }))
	defer backend.Close()
	st, _ := dataplane.Compute(dataplane.Config{NodeName: "node"}, snapshot.New())
	_, err := backend.Apply(st, dataplane.Change{})
	labtest.Check(t, err)
}
