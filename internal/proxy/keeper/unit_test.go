package keeper

import (
	"os"
	"path/filepath"
	"testing"
)

// TestUnit: only what systemd itself has started, and its child, are a unit. A shell inherits variables and the control
// group.
func TestUnit(t *testing.T) {
	const unified, hybrid = "0::/system.slice/verdict.service\n", "1:name=systemd:/system.slice/verdict.service\n0::/\n"
	for _, c := range []struct{ what, stat, environ, cgroup, want string }{
		{"the main process", "7 (verdict) S 1 7", "A=1\x00SYSTEMD_EXEC_PID=7\x00", unified, "verdict.service"},
		{"with the old hierarchy", "7 (verdict) S 1 7", "SYSTEMD_EXEC_PID=7\x00", hybrid, "verdict.service"},
		{"its child, with an odd name", "7 (a ) b) S 6 7", "SYSTEMD_EXEC_PID=6\x00", unified, "verdict.service"},
		{"its child", "7 (verdict) S 6 7", "SYSTEMD_EXEC_PID=6\x00", unified, "verdict.service"},
		{"started from a shell of a service", "7 (verdict) S 6 7", "SYSTEMD_EXEC_PID=5\x00", unified, ""},
		{"without systemd", "7 (verdict) S 6 7", "A=1\x00", unified, ""},
		{"in a session", "7 (verdict) S 6 7", "SYSTEMD_EXEC_PID=6\x00", "0::/user.slice/session-1.scope\n", ""},
		{"unreadable", "", "", "", ""},
	} {
		proc := t.TempDir()
		if err := os.Mkdir(filepath.Join(proc, "7"), 0o755); err != nil {
			t.Fatal(err)
		}
		for name, text := range map[string]string{"stat": c.stat, "environ": c.environ, "cgroup": c.cgroup} {
			if err := os.WriteFile(filepath.Join(proc, "7", name), []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if got := unitOf(proc, 7); got != c.want {
			t.Errorf("%s: unit %q, want %q", c.what, got, c.want)
		}
	}
	if unit := (Peer{}).Unit(); unit != "" {
		t.Errorf("a process of another container is the unit %q", unit)
	}
}
