package netlink

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestGracePeriod: where the kernel has the command, it is the one that is asked for, so nobody waits for the timeout.
func TestGracePeriod(t *testing.T) {
	const query = 0 // MEMBARRIER_CMD_QUERY: a mask of the commands that this kernel has
	has, _, errno := unix.Syscall(unix.SYS_MEMBARRIER, query, 0, 0)
	switch err := gracePeriod(); {
	case errno != 0 || has&membarrierGlobal == 0:
		if err == nil {
			t.Errorf("the kernel has no such command (%#x, %v), and it succeeds", has, errno)
		}
	case err != nil:
		t.Errorf("the kernel has the command (%#x): %v", has, err)
	}
}

// TestOneProcessor: membarrier waits for nothing where one processor is online.
func TestOneProcessor(t *testing.T) {
	for _, online := range []string{"0\n", "3", ""} {
		begin := time.Now()
		if awaitPackets(online); time.Since(begin) < barrierTimeout {
			t.Errorf("online %q: nobody waits for packets", online)
		}
	}
}
