package lab

import (
	"fmt"
	"os"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// onThread runs f on an operating system thread that no other goroutine will ever run on: f may move it to another
// namespace. It returns at once; the thread ends when f returns, because its goroutine ends without unlocking it.
func onThread(f func()) {
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() != unix.Getpid() {
			f()
			return
		}
		// The first thread of a process can't end: the runtime would park it for good in whatever namespace it was, and
		// /proc/self speaks for it. Hold it until somebody else has another thread.
		locked := make(chan struct{})
		go func() {
			runtime.LockOSThread()
			close(locked)
			f()
		}()
		<-locked
		runtime.UnlockOSThread()
	}()
}

// enterNetns moves the calling thread into a network namespace.
func enterNetns(ns *os.File) error {
	conn, err := ns.SyscallConn() // unlike Fd, it can't be fooled by a Close in between
	if err != nil {
		return ErrClosed
	}
	var moved error
	if err := conn.Control(func(fd uintptr) { moved = unix.Setns(int(fd), unix.CLONE_NEWNET) }); err != nil {
		return ErrClosed
	}
	if moved != nil {
		return fmt.Errorf("lab: enter network namespace: %w", moved)
	}
	return nil
}

// ThreadTime is the processor time that the calling thread has used so far. What the kernel does for a packet counts
// for the thread that sends it, up to the other end of the link. The caller must stay on its thread between two calls.
func ThreadTime() (time.Duration, error) {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
		return 0, fmt.Errorf("lab: clock_gettime: %w", err)
	}
	return time.Duration(t.Nano()), nil
}
