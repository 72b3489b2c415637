package blackbox

import (
	"fmt"
	"os"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// lookAgain is how often a path is looked at: so long at most the recorder keeps a namespace alive that was removed.
const lookAgain = 100 * time.Millisecond

// WatchPath records in the network namespace that a file such as /run/netns/NAME stands for, while it is there: if it
// is removed, recording ends, and if another one comes, that goes on.
func (b *Box) WatchPath(name, path string) error {
	enter := func(f func() error) error { return inside(path, f) }
	a, err := b.attach(name, enter)
	if err != nil {
		return err
	}
	last := inode(path)
	b.wait.Go(func() {
		tick := time.NewTicker(lookAgain)
		defer tick.Stop()
		for {
			select {
			case <-b.closed:
				if a != nil {
					a.Close()
				}
				return
			case <-tick.C:
			}
			now := inode(path)
			if a != nil && now != last {
				a.Close()
				a = nil
			}
			if a == nil && now != 0 {
				a, _ = b.attach(name, enter) // one that is just made or removed is tried again
			}
			last = now
		}
	})
	return nil
}

// inode returns the number of a namespace's file; 0 if there is none.
func inode(path string) uint64 {
	var s unix.Stat_t
	if unix.Stat(path, &s) != nil {
		return 0
	}
	return s.Ino
}

// inside runs f on a thread of its own in a network namespace.
func inside(path string, f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with this goroutine
		done <- func() error {
			ns, err := os.Open(path)
			if err != nil {
				return err
			}
			defer ns.Close()
			if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
				return fmt.Errorf("enter %s: %w", path, err)
			}
			return f()
		}()
	}()
	return <-done
}
