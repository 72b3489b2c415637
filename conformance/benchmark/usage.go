package benchmark

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"
)

// usage watches what a process and all it has started use.
type usage struct {
	// group is a control group of memory; empty if none can be made.
	group string
	file  string // in it, holds the bytes of the kernel
	key   string // the line of file that counts; empty means that all of it is the number

	mu   sync.Mutex
	root int
	peak uint64
	stop chan struct{}
	wait sync.WaitGroup
}

// sampleEvery is how often memory is looked at for its peak.
const sampleEvery = 250 * time.Millisecond

// hierarchies are where control groups of memory may be made, and where each says what the kernel has charged to it.
var hierarchies = []struct{ dir, file, key string }{
	{"/sys/fs/cgroup/memory", "memory.kmem.usage_in_bytes", ""},
	{"/sys/fs/cgroup", "memory.stat", "kernel"},
}

// newUsage makes the control group if it can.
func newUsage() (*usage, error) {
	u := &usage{}
	for _, h := range hierarchies {
		dir, err := os.MkdirTemp(h.dir, "service-proxy-")
		if err != nil {
			continue
		}
		if _, err := os.Stat(filepath.Join(dir, h.file)); err == nil {
			u.group, u.file, u.key = dir, h.file, h.key
			return u, nil
		}
		if err := os.Remove(dir); err != nil {
			return nil, err
		}
	}
	return u, nil
}

// command gives one that joins the control group and then becomes another, whose children are in the group, too.
func (u *usage) command(name string, args ...string) []string {
	if u.group == "" {
		return append([]string{name}, args...)
	}
	join := []string{"/bin/sh", "-c", `echo 0 > "$0" && exec "$@"`, filepath.Join(u.group, "cgroup.procs"), name}
	return append(join, args...)
}

// follow begins with a process, the only one from now on, and what it starts.
func (u *usage) follow(pid int) {
	u.mu.Lock()
	u.root = pid
	u.mu.Unlock()
	if u.stop != nil {
		return
	}
	u.stop = make(chan struct{})
	u.wait.Go(func() {
		tick := time.NewTicker(sampleEvery)
		defer tick.Stop()
		for {
			select {
			case <-u.stop:
				return
			case <-tick.C:
				now := u.resident()
				u.mu.Lock()
				u.peak = max(u.peak, now)
				u.mu.Unlock()
			}
		}
	})
}

// resident is the memory of all processes in bytes; what two of them share counts by halves.
func (u *usage) resident() (sum uint64) {
	for _, p := range u.processes() {
		sum += proportional(p.pid)
	}
	return sum
}

// proportional reads the line "Pss:   1234 kB". A process that has just ended has none.
func proportional(pid int) uint64 {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	for line := range bytes.Lines(b) {
		if value, ok := bytes.CutPrefix(line, []byte("Pss:")); ok {
			n, _ := strconv.ParseUint(strings.TrimSuffix(strings.TrimSpace(string(value)), " kB"), 10, 64)
			return n << 10
		}
	}
	return 0
}

// highest is the most that resident was so far.
func (u *usage) highest() uint64 {
	now := u.resident()
	u.mu.Lock()
	defer u.mu.Unlock()
	u.peak = max(u.peak, now)
	return u.peak
}

// forgetHighest has highest count from now on.
func (u *usage) forgetHighest() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.peak = 0
}

// kernel is what the kernel charged to the control group, in bytes; 0 if there is none.
func (u *usage) kernel() uint64 {
	if u.group == "" {
		return 0
	}
	b, err := os.ReadFile(filepath.Join(u.group, u.file))
	if err != nil {
		return 0
	}
	text := strings.TrimSpace(string(b))
	if u.key != "" {
		_, text, _ = strings.Cut("\n"+text, "\n"+u.key+" ")
		text, _, _ = strings.Cut(text, "\n")
	}
	n, _ := strconv.ParseUint(text, 10, 64)
	return n
}

// processor is the processor time of all processes, of those that have ended as soon as their parent knows.
func (u *usage) processor() (sum time.Duration) {
	for _, p := range u.processes() {
		sum += p.time
	}
	return sum
}

// process is a line of /proc/PID/stat.
type process struct {
	pid, parent int
	time        time.Duration // its own and that of children it has waited for
}

// tick is the unit of processor times in /proc, the same on all architectures.
const tick = 10 * time.Millisecond

// parseStat reads /proc/PID/stat: "12 (name) S 1 ...", with a name that may hold anything.
func parseStat(text string) (p process, ok bool) {
	head, tail, found := strings.Cut(text, " (")
	end := strings.LastIndex(tail, ") ")
	if !found || end < 0 {
		return p, false
	}
	fields := strings.Fields(tail[end+2:])
	if len(fields) < 15 {
		return p, false
	}
	var errs []error
	integer := func(s string) int {
		n, err := strconv.Atoi(s)
		errs = append(errs, err)
		return n
	}
	p.pid, p.parent = integer(head), integer(fields[1])
	for _, f := range fields[11:15] { // utime, stime, cutime, cstime
		p.time += time.Duration(integer(f)) * tick
	}
	return p, errors.Join(errs...) == nil
}

// processes gives the process that is followed and its descendants.
func (u *usage) processes() (all []process) {
	u.mu.Lock()
	root := u.root
	u.mu.Unlock()
	children := map[int][]process{}
	files, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, f := range files {
		b, _ := os.ReadFile(f)
		p, ok := parseStat(string(b))
		switch {
		case ok && p.pid == root:
			all = append(all, p)
		case ok:
			children[p.parent] = append(children[p.parent], p)
		}
	}
	for i := 0; i < len(all); i++ {
		all = append(all, children[all[i].pid]...)
	}
	return all
}

// close ends the watch and removes the control group, whose processes must have ended.
func (u *usage) close() error {
	if u.stop != nil {
		close(u.stop)
		u.wait.Wait()
	}
	if u.group == "" {
		return nil
	}
	// A process that was killed leaves its group a moment after it was waited for. A child of it that is in the middle
	// of a large table of iptables takes seconds.
	deadline := time.Now().Add(time.Minute)
	for {
		err := os.Remove(u.group)
		if err == nil || time.Now().After(deadline) {
			return err
		}
		time.Sleep(10 * time.Millisecond)
	}
}
