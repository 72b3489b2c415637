package labtest

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// Memory is a control group of memory that a test has to itself: what it says is about the processes in it, whatever
// else the machine does. What the kernel allocates for them, such as the elements of their tables, is charged to it.
type Memory struct {
	dir string
	v2  bool
}

// NewMemory makes a group, which is removed when the test ends; its processes must have left by then. It fails where
// control groups of memory are not mounted, or not writable, as in a user namespace.
func NewMemory(t testing.TB) (*Memory, error) {
	t.Helper()
	var problems []string
	for _, h := range []Memory{{"/sys/fs/cgroup/memory", false}, {"/sys/fs/cgroup", true}} {
		dir, err := os.MkdirTemp(h.dir, "verdict-test-")
		if err != nil {
			problems = append(problems, err.Error())
			continue
		}
		m := &Memory{dir, h.v2}
		if _, err := os.Stat(m.path("memory.stat")); err == nil {
			t.Cleanup(func() { m.remove(t) })
			return m, nil
		}
		problems = append(problems, h.dir+" has no controller of memory for its children")
		Check(t, os.Remove(dir))
	}
	return nil, fmt.Errorf("no control group of memory: %s", strings.Join(problems, "; "))
}

func (m *Memory) path(file string) string { return filepath.Join(m.dir, file) }

// remove waits for processes that were killed: they leave a moment after they were waited for.
func (m *Memory) remove(t testing.TB) {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	for {
		err := os.Remove(m.dir)
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Errorf("processes are left: %v", err)
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// Enter moves this process into the group until the test ends. What it already holds stays charged where it was.
func (m *Memory) Enter(t testing.TB) {
	t.Helper()
	before := groupOf(t, m.v2)
	Check(t, os.WriteFile(m.path("cgroup.procs"), []byte(strconv.Itoa(os.Getpid())), 0))
	t.Cleanup(func() {
		root := strings.TrimSuffix(m.dir, filepath.Base(m.dir))
		Check(t, os.WriteFile(filepath.Join(root, before, "cgroup.procs"), []byte(strconv.Itoa(os.Getpid())), 0))
	})
}

// groupOf gives the group that this process is in, as a path below where the groups are mounted.
func groupOf(t testing.TB, v2 bool) string {
	t.Helper()
	text, err := os.ReadFile("/proc/self/cgroup")
	Check(t, err)
	for line := range strings.Lines(string(text)) { // "4:memory:/a/b", and "0::/" for version 2
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(parts) == 3 && (v2 && parts[0] == "0" || !v2 && parts[1] == "memory") {
			return parts[2]
		}
	}
	t.Fatalf("this process is in no control group of memory: %q", text)
	return ""
}

// Command gives a command line that runs a program in the group. The name is a path, and not one that means the
// running program.
func (m *Memory) Command(name string, args ...string) []string {
	const script = `echo $$ > "$0" && exec "$@"`
	return append([]string{"/bin/sh", "-c", script, m.path("cgroup.procs"), name}, args...)
}

// Limit bounds what the processes, and the kernel for them, may take.
func (m *Memory) Limit(t testing.TB, bytes int64) {
	t.Helper()
	file := "memory.limit_in_bytes"
	if m.v2 {
		file = "memory.max"
	}
	Check(t, os.WriteFile(m.path(file), []byte(strconv.FormatInt(bytes, 10)), 0))
}

// Kernel gives the bytes that the kernel holds for the processes.
func (m *Memory) Kernel(t testing.TB) int64 {
	t.Helper()
	if m.v2 {
		return m.read(t, "memory.stat", "kernel")
	}
	return m.read(t, "memory.kmem.usage_in_bytes", "")
}

// Used gives the bytes that count against the limit.
func (m *Memory) Used(t testing.TB) int64 {
	t.Helper()
	if m.v2 {
		return m.read(t, "memory.current", "")
	}
	return m.read(t, "memory.usage_in_bytes", "")
}

// Killed says how many processes the kernel killed because the group was at its limit.
func (m *Memory) Killed(t testing.TB) int64 {
	t.Helper()
	if m.v2 {
		return m.read(t, "memory.events", "oom_kill")
	}
	return m.read(t, "memory.oom_control", "oom_kill")
}

// read gives the number in a file, or in the line of it that begins with a key.
func (m *Memory) read(t testing.TB, file, key string) int64 {
	t.Helper()
	b, err := os.ReadFile(m.path(file))
	Check(t, err)
	for line := range strings.Lines(string(b)) {
		word, value, found := strings.Cut(strings.TrimSpace(line), " ")
		if !found {
			word, value = "", word
		}
		if word != key {
			continue
		}
		n, err := strconv.ParseInt(value, 10, 64)
		Check(t, err)
		return n
	}
	t.Fatalf("%s has no %q: %s", m.path(file), key, b)
	return 0
}
