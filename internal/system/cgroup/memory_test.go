package cgroup

import (
	"os"
	"strings"
	"testing"
	"testing/fstest"
)

func TestRead(t *testing.T) {
	const none = "9223372036854771712\n"
	for name, test := range map[string]struct {
		files map[string]string
		want  Memory
		err   string
	}{
		"no control groups": {},
		"version 1": {files: map[string]string{
			"proc/self/cgroup":                                   "9:name=systemd:/\n4:memory:/pod/a\n0::/other\n",
			"sys/fs/cgroup/memory/memory.limit_in_bytes":         none,
			"sys/fs/cgroup/memory/pod/memory.limit_in_bytes":     "2000\n",
			"sys/fs/cgroup/memory/pod/a/memory.limit_in_bytes":   none,
			"sys/fs/cgroup/memory/pod/a/memory.oom_control":      "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
			"sys/fs/cgroup/memory/memory.oom_control":            "oom_kill 99\n",
			"sys/fs/cgroup/other/memory.max":                     "5\n",
			"sys/fs/cgroup/memory/pod/a/memory.usage_in_bytes":   "1\n",
			"sys/fs/cgroup/memory/pod/a/b/memory.limit_in_bytes": "7\n",
		}, want: Memory{2000, 3}},
		"version 1, in a container": {files: map[string]string{
			"proc/self/cgroup":                           "4:memory:/kubepods/pod/a\n",
			"sys/fs/cgroup/memory/memory.limit_in_bytes": "3000\n",
			"sys/fs/cgroup/memory/memory.oom_control":    "oom_kill 1\n",
		}, want: Memory{3000, 1}},
		"version 2": {files: map[string]string{
			"proc/self/cgroup":                   "0::/pod/a\n",
			"sys/fs/cgroup/pod/memory.max":       "max\n",
			"sys/fs/cgroup/pod/a/memory.max":     "1000\n",
			"sys/fs/cgroup/pod/a/memory.events":  "low 0\nhigh 0\nmax 12\noom 2\noom_kill 2\noom_group_kill 0\n",
			"sys/fs/cgroup/pod/a/memory.current": "1\n",
		}, want: Memory{1000, 2}},
		"version 2, in a container": {files: map[string]string{
			"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.events": "oom_kill 0\n",
		}},
		"no limit at all": {files: map[string]string{"proc/self/cgroup": "0::/\n"}},
		"another word": {files: map[string]string{"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "much\n"},
			err: `memory limit: /sys/fs/cgroup/memory.max: strconv.ParseInt: parsing "much"`},
		"odd lines": {files: map[string]string{"proc/self/cgroup": "\n1\na:b\n"}},
	} {
		host := fstest.MapFS{}
		for name, text := range test.files {
			host[name] = &fstest.MapFile{Data: []byte(text)}
		}
		got, err := Read(host)
		if got != test.want || (err == nil) != (test.err == "") || err != nil && !strings.Contains(err.Error(), test.err) {
			t.Errorf("%s: %+v, %v; want %+v %s", name, got, err, test.want, test.err)
		}
	}
}

// TestReadHere: whatever this machine has can be read.
func TestReadHere(t *testing.T) {
	if m, err := Read(os.DirFS("/")); err != nil || m.Limit < 0 {
		t.Errorf("%+v, %v", m, err)
	}
}
