package node

import (
	"fmt"
	"io/fs"
	"os"
	"runtime/debug"

	"github.com/verdict-proxy/verdict/internal/system/cgroup"
)

// limitMemory sets the garbage collector's limit to four fifths of the container's memory limit, unless GOMEMLIMIT is
// set. The rest is for the keeper, and for what the kernel charges to the container. restarts is how many processes of
// this keeper ran before.
func limitMemory(host fs.FS, restarts int, log *logger) {
	m, err := cgroup.Read(host)
	if err != nil {
		log.Warn(err.Error())
	}
	if m.Limit == 0 {
		return
	}
	size := fmt.Sprintf("%d MiB", m.Limit>>20)
	if restarts > 0 && m.Killed > 0 {
		log.Error("the kernel has killed processes of this container, since its memory limit is too low for the cluster; "+
			"the programmed Services stay in force, but changes are not applied. docs/INSTALL.md has the memory requirements",
			"limit", size, "killed", m.Killed)
	}
	if os.Getenv("GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(m.Limit / 5 * 4)
		log.Info("memory is limited", "limit", size)
	}
}
