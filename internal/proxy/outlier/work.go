package outlier

import (
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// work calls f, and returns how long the processor was at work for it, in the kernel too. On a busy machine that is
// less than the time that passes: whoever rests by the latter rests longest when others need the processor, and finds
// endpoints that do not answer late.
func work(f func()) time.Duration {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	began := threadTime()
	f()
	return threadTime() - began
}

// threadTime is how long the calling thread has had a processor.
func threadTime() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
		panic(err) // every kernel has this clock
	}
	return time.Duration(t.Nano())
}
