package node

import (
	"bytes"
	"fmt"
	"runtime/debug"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/verdict-proxy/verdict/internal/proxy/config"
)

// TestHeedMemory: the collector heeds four fifths of the limit, unless GOMEMLIMIT says otherwise; a process that was
// killed for lack of memory is told of by the next.
func TestHeedMemory(t *testing.T) {
	before := debug.SetMemoryLimit(-1)
	defer debug.SetMemoryLimit(before)
	host := func(limit string, killed int) fstest.MapFS {
		return fstest.MapFS{"proc/self/cgroup": {Data: []byte("0::/\n")}, "sys/fs/cgroup/memory.max": {Data: []byte(limit)},
			"sys/fs/cgroup/memory.events": {Data: fmt.Appendf(nil, "oom_kill %d\n", killed)}}
	}
	for _, test := range []struct {
		host     fstest.MapFS
		restarts int
		env      string
		heeds    int64
		says     string
	}{
		{host("max", 9), 3, "", before, ""},
		{host("1000000000", 0), 0, "", 800000000, `level=INFO msg="memory is limited" limit="953 MiB"`},
		{host("1000000000", 0), 0, "1GiB", before, ""},
		{host("1000000000", 2), 0, "", 800000000, "memory is limited"}, // it was somebody before this keeper
		{host("1000000000", 2), 1, "", 800000000, `level=ERROR msg="the kernel has killed processes of this container`},
		{host("much", 2), 1, "", before, "level=WARN"},
	} {
		t.Setenv("GOMEMLIMIT", test.env)
		debug.SetMemoryLimit(before)
		var said bytes.Buffer
		limitMemory(test.host, test.restarts, newLogger(&said, config.Log{}))
		if heeds := debug.SetMemoryLimit(-1); heeds != test.heeds || !strings.Contains(said.String(), test.says) ||
			test.says == "" && said.Len() > 0 {
			t.Errorf("%+v: %d, %s", test, heeds, &said)
		}
	}
}
