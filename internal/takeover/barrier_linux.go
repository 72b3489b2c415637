package takeover

import (
	"context"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// membarrierGlobal is MEMBARRIER_CMD_GLOBAL of linux/membarrier.h.
	membarrierGlobal = 1 << 0
	// barrierTimeout is how long to wait instead where the kernel refuses the command.
	barrierTimeout = 100 * time.Millisecond
)

// AwaitPackets waits until every packet that the kernel is working on now has left the hooks of netfilter, in most
// cases some milliseconds. Call it after the new proxy's rules are programmed, and before another proxy's are removed.
//
// A packet may have passed the new proxy's hook a moment before the rules were there, and its processor was then
// interrupted. If the other proxy's rules are gone when it goes on, nobody translates it, and what listens at the
// node's own port, or nothing, answers it.
func AwaitPackets(ctx context.Context) {
	if gracePeriod() == nil {
		return
	}
	select {
	case <-ctx.Done():
	case <-time.After(barrierTimeout):
	}
}

// gracePeriod waits for a grace period of RCU: the kernel runs the hooks for a packet in one RCU read-side critical
// section (nf_hook). membarrier(2) waits for one, except where only one processor is online. With processors in full
// dynticks mode (nohz_full) the kernel refuses the command.
func gracePeriod() error {
	if _, _, errno := unix.Syscall(unix.SYS_MEMBARRIER, membarrierGlobal, 0, 0); errno != 0 {
		return errno
	}
	return nil
}
