package keeper

import (
	"bytes"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"
)

// Unit returns the systemd service whose main process the peer is, or is a child of; "" if there is none. systemd may
// start such a service again as soon as it has ended.
func (p Peer) Unit() string {
	if p.PID == 0 {
		return ""
	}
	return unitOf("/proc", p.PID)
}

// unitOf reads a process's unit below a mounted proc. A shell of a service that has its control group is not the
// service, so the variable must name the process itself or its keeper.
func unitOf(proc string, pid int) string {
	read := func(name string) []byte {
		text, _ := os.ReadFile(filepath.Join(proc, fmt.Sprint(pid), name)) // without the right to read it, it is unknown
		return text
	}
	// The name stands in parentheses, and may have some itself.
	stat, parent := string(read("stat")), 0
	if f := strings.Fields(stat[strings.LastIndex(stat, ")")+1:]); len(f) > 1 {
		fmt.Sscan(f[1], &parent)
	}
	started := 0
	for _, v := range bytes.Split(read("environ"), []byte{0}) {
		if value, ok := bytes.CutPrefix(v, []byte("SYSTEMD_EXEC_PID=")); ok {
			fmt.Sscan(string(value), &started)
		}
	}
	if started == 0 || started != pid && started != parent {
		return ""
	}
	for line := range strings.Lines(string(read("cgroup"))) {
		if unit := path.Base(strings.TrimSpace(line)); strings.HasSuffix(unit, ".service") {
			return unit
		}
	}
	return ""
}
