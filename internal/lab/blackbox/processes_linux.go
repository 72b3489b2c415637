package blackbox

import (
	"bytes"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
)

const (
	// lookForProcesses is how often new processes are looked for, maxProcessSpaces how many namespaces are known of them.
	lookForProcesses = time.Second
	maxProcessSpaces = 256
	// keptOfProcess is how many counts are kept of each, and keptGone of how many that are gone.
	keptOfProcess = 64
	keptGone      = 1024
)

// processSpace is a network namespace that is known by a process in it, and sampled without keeping it alive.
type processSpace struct {
	*space
	pid      string
	counters counters
}

// WatchProcesses samples the counters of the network namespaces of processes that containers of a machine run: of those
// for whose control groups belongs returns the name of a machine. It opens no socket there, so that a namespace ends
// when its processes do.
func (b *Box) WatchProcesses(belongs func(groups string) (machine string)) {
	b.wait.Go(func() {
		known := map[string]*processSpace{}
		var looked time.Time
		tick := time.NewTicker(pollIdle)
		defer tick.Stop()
		for {
			select {
			case <-b.closed:
				return
			case <-tick.C:
			}
			if time.Since(looked) >= lookForProcesses && len(known) < maxProcessSpaces {
				looked = time.Now()
				b.findProcesses(belongs, known)
			}
			for ns, p := range known {
				if !p.sample(ns) {
					delete(known, ns)
				}
			}
		}
	})
}

// findProcesses adds the namespaces of processes that are new. The kernel gives the number of one that is gone to
// another.
func (b *Box) findProcesses(belongs func(string) string, known map[string]*processSpace) {
	own, _ := os.Readlink("/proc/self/ns/net")
	dir, err := os.Open("/proc")
	if err != nil {
		return
	}
	defer dir.Close()
	pids, _ := dir.Readdirnames(0)
	for _, pid := range pids {
		if _, err := strconv.Atoi(pid); err != nil {
			continue
		}
		ns, err := os.Readlink("/proc/" + pid + "/ns/net")
		if err != nil || ns == own || known[ns] != nil {
			continue
		}
		groups, _ := os.ReadFile("/proc/" + pid + "/cgroup")
		machine := belongs(string(groups))
		host := environment(pid, "HOSTNAME")
		if machine == "" || host == "" {
			continue
		}
		addresses := addressesOf(pid)
		if len(addresses) == 0 {
			continue // it is not wired yet
		}
		known[ns] = &processSpace{space: b.processSpace(machine+"/"+host, addresses), pid: pid,
			counters: counters{text: make([]byte, countersLen)}}
	}
}

// processSpace returns the space of a name: the one that there was if only the process is another one.
func (b *Box) processSpace(name string, addresses map[netip.Addr]string) *space {
	b.mu.Lock()
	defer b.mu.Unlock()
	i := slices.IndexFunc(b.spaces, func(s *space) bool { return s.name == name })
	if i < 0 {
		i = len(b.spaces)
		if i > keptGone {
			b.forgetOldest()
			i = len(b.spaces)
		}
		// gather reads the former ones.
		b.spaces = append(slices.Clone(b.spaces), newSpace(name, sizes{1, 1, 1, 1, keptOfProcess}))
	}
	s := b.spaces[i]
	s.mu.Lock()
	defer s.mu.Unlock()
	s.network, s.gone = &network{links: map[int32]string{}, addresses: addresses}, time.Time{}
	return s
}

// forgetOldest forgets the namespace of a process that is gone for longest.
func (b *Box) forgetOldest() {
	i := slices.IndexFunc(b.spaces, func(s *space) bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.counts.values) == keptOfProcess && !s.gone.IsZero()
	})
	if i >= 0 {
		b.spaces = slices.Delete(slices.Clone(b.spaces), i, i+1)
	}
}

// sample returns false when the namespace is gone, or its process.
func (p *processSpace) sample(ns string) bool {
	now := time.Now()
	files, err := openCounters("/proc/" + p.pid + "/net")
	if at, _ := os.Readlink("/proc/" + p.pid + "/ns/net"); err != nil || at != ns {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.gone = now
		return false
	}
	p.counters.files = files.files
	p.counters.sample(now.UnixNano(), p.counts.add)
	return files.Close() == nil
}

func environment(pid, name string) string {
	text, _ := os.ReadFile("/proc/" + pid + "/environ")
	for v := range bytes.SplitSeq(text, []byte{0}) {
		if value, found := strings.CutPrefix(string(v), name+"="); found {
			return value
		}
	}
	return ""
}

// addressesOf reads the addresses of a process's network namespace, but for those of the loopback.
func addressesOf(pid string) map[netip.Addr]string {
	all := map[netip.Addr]string{}
	v4, _ := os.ReadFile("/proc/" + pid + "/net/fib_trie")
	var last string
	for line := range strings.Lines(string(v4)) {
		fields := strings.Fields(line)
		if len(fields) >= 2 && fields[0] == "|--" {
			last = fields[1]
		}
		a, err := netip.ParseAddr(last)
		if err == nil && strings.Contains(line, "/32 host LOCAL") && !a.IsLoopback() {
			all[a] = "eth0"
		}
	}
	v6, _ := os.ReadFile("/proc/" + pid + "/net/if_inet6")
	for line := range strings.Lines(string(v6)) {
		var b []byte
		fields := strings.Fields(line)
		if len(fields) < 6 {
			continue
		}
		if _, err := fmt.Sscanf(fields[0], "%x", &b); err != nil {
			continue
		}
		if a := addrOf(b); a.IsValid() && !a.IsLoopback() && !a.IsLinkLocalUnicast() {
			all[a] = fields[5]
		}
	}
	return all
}
