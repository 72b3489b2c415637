package netlink

import (
	"os"
	"strings"
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
// cases some milliseconds. Call it after new rules are programmed, and before what older ones need is removed: a packet
// may have passed the new rules' hook a moment before they were there, or be in the middle of the older ones.
func AwaitPackets() {
	online, _ := os.ReadFile("/sys/devices/system/cpu/online")
	awaitPackets(string(online))
}

// awaitPackets knows which processors are online, as "0-3". With one, and if nobody knows, membarrier(2) may return at
// once, though a packet may be preempted, or wait in a queue.
func awaitPackets(online string) {
	if !strings.ContainsAny(online, "-,") || gracePeriod() != nil {
		time.Sleep(barrierTimeout)
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
