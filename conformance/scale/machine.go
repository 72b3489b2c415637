package scale

import (
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/conformance/figures"
)

// ThisMachine says where this runs.
func ThisMachine() (figures.Machine, error) {
	m := figures.Machine{Cores: runtime.NumCPU(), CPU: runtime.GOARCH}
	cpu, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return m, err
	}
	if name := field(string(cpu), "model name"); name != "" {
		m.CPU = name
	}
	memory, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return m, err
	}
	kilobytes, err := strconv.ParseUint(strings.TrimSuffix(field(string(memory), "MemTotal"), " kB"), 10, 64)
	if err != nil {
		return m, fmt.Errorf("/proc/meminfo: MemTotal: %w", err)
	}
	m.Memory = kilobytes << 10
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return m, err
	}
	m.Kernel = unix.ByteSliceToString(name.Release[:])
	return m, nil
}

// field gives what stands behind a name and a colon, in the first line that begins with it.
func field(text, name string) string {
	for line := range strings.Lines(text) {
		if key, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(key) == name {
			return strings.TrimSpace(value)
		}
	}
	return ""
}
