// Package cgroup reads the memory limit of this process's control group: in a container, the container's limit. The
// kernel also charges the elements of nftables sets to it.
package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strconv"
	"strings"
)

// Memory is the state of a memory control group, of version 1 or 2.
type Memory struct {
	// Limit is in bytes: the smallest limit of the group and of its visible parents. 0 means no limit.
	Limit int64
	// Killed is how many processes of the group the kernel has killed for lack of memory since the group was created.
	Killed int
}

// unlimited is above any limit: version 1 shows a huge number if there is none.
const unlimited = 1 << 60

// files are the paths of the two versions.
var files = map[bool]struct{ root, limit, events string }{
	false: {"sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.oom_control"},
	true:  {"sys/fs/cgroup", "memory.max", "memory.events"},
}

// Read reads /proc/self/cgroup and the group's files; host is the root directory. It returns the zero value on a host
// without memory control groups.
func Read(host fs.FS) (Memory, error) {
	text, err := fs.ReadFile(host, "proc/self/cgroup")
	if errors.Is(err, fs.ErrNotExist) {
		return Memory{}, nil
	}
	if err != nil {
		return Memory{}, fmt.Errorf("control group: %w", err)
	}
	group, v2, ok := memoryGroup(string(text))
	if !ok {
		return Memory{}, nil
	}
	f, m := files[v2], Memory{}
	dir := path.Join(f.root, group)
	if _, err := fs.Stat(host, path.Join(dir, f.limit)); err != nil {
		dir = f.root // in a container the path may be the host's, while the container's own group is mounted
	}
	if events, err := fs.ReadFile(host, path.Join(dir, f.events)); err == nil {
		m.Killed = oomKills(string(events))
	}
	for ; strings.HasPrefix(dir, f.root); dir = path.Dir(dir) {
		n, err := limit(host, path.Join(dir, f.limit))
		if err != nil {
			return m, err
		}
		if n > 0 && (m.Limit == 0 || n < m.Limit) {
			m.Limit = n
		}
	}
	return m, nil
}

// memoryGroup finds the memory group in lines such as "4:memory:/pod/a" and "0::/pod/a", which is version 2.
func memoryGroup(text string) (group string, v2, ok bool) {
	for line := range strings.Lines(text) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		switch {
		case len(parts) != 3:
		case parts[1] == "memory":
			return parts[2], false, true
		case parts[0] == "0" && parts[1] == "":
			group, v2, ok = parts[2], true, true
		}
	}
	return group, v2, ok
}

// limit reads a number of bytes. The root group of version 2 has no such file.
func limit(host fs.FS, name string) (int64, error) {
	b, err := fs.ReadFile(host, name)
	text := strings.TrimSpace(string(b))
	if errors.Is(err, fs.ErrNotExist) || text == "max" {
		return 0, nil
	}
	n := int64(0)
	if err == nil {
		n, err = strconv.ParseInt(text, 10, 64)
	}
	switch {
	case err != nil:
		return 0, fmt.Errorf("memory limit: /%s: %w", name, err)
	case n >= unlimited:
		return 0, nil
	}
	return n, nil
}

// oomKills finds the line "oom_kill 3".
func oomKills(text string) int {
	for line := range strings.Lines(text) {
		if value, ok := strings.CutPrefix(strings.TrimSpace(line), "oom_kill "); ok {
			n, _ := strconv.Atoi(value)
			return n
		}
	}
	return 0
}
