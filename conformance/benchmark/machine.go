package benchmark

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verdict-proxy/verdict/conformance/benchmark/results"
)

// ThisMachine says where this runs.
func ThisMachine() (results.Machine, error) {
	m := results.Machine{Cores: runtime.NumCPU(), CPU: runtime.GOARCH}
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
	m.Tools = tools()
	return m, nil
}

// tools gives the versions of the programs that proxies call, of those that are there.
func tools() (versions []string) {
	for _, name := range []string{"nft", "xtables-legacy-multi iptables"} {
		words := strings.Fields(name)
		out, err := exec.Command(words[0], append(words[1:], "--version")...).Output()
		if err == nil {
			versions = append(versions, strings.TrimSpace(string(out)))
		}
	}
	return versions
}

// Load is the machine's load average over a minute; 0 if it does not say.
func Load() float64 {
	b, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return 0
	}
	first, _, _ := strings.Cut(string(b), " ")
	n, _ := strconv.ParseFloat(first, 64)
	return n
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

// The machine is at rest when all processors together were busy for less than a part of a second in a second.
const (
	idleMost  = 150 * time.Millisecond
	idleLimit = time.Minute
)

// idle waits until the machine is at rest, so that what came before is over: a control plane that takes in what it
// was filled with, the kernel that clears a node away. On a machine that has other work it gives up after a minute.
func idle(ctx context.Context) error {
	for end := time.Now().Add(idleLimit); ; {
		before, err := busy()
		if err := errors.Join(err, sleep(ctx, time.Second)); err != nil {
			return err
		}
		after, err := busy()
		if err != nil || after-before < idleMost || time.Now().After(end) {
			return err
		}
	}
}

// busy is the time that all processors have worked since the machine was started.
func busy() (time.Duration, error) {
	b, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, err
	}
	// "cpu  user nice system idle iowait irq softirq steal ..."
	line, _, _ := strings.Cut(string(b), "\n")
	fields := strings.Fields(line)
	if len(fields) < 8 || fields[0] != "cpu" {
		return 0, fmt.Errorf("/proc/stat: %q", line)
	}
	var sum time.Duration
	for i, text := range fields[1:8] {
		n, err := strconv.Atoi(text)
		if err != nil {
			return 0, fmt.Errorf("/proc/stat: %w", err)
		}
		if i != 3 && i != 4 {
			sum += time.Duration(n) * tick
		}
	}
	return sum, nil
}
