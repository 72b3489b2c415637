package testbed

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// InMemory makes a directory in memory whose name begins with a prefix, has do use it, and removes it. The mount
// vanishes with this process however it ends.
func InMemory(prefix string, do func(dir string) error) (err error) {
	dir, err := os.MkdirTemp("", prefix)
	if err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "mode=0700"); err != nil {
		return errors.Join(fmt.Errorf("mount %s: %w", dir, err), os.Remove(dir))
	}
	defer func() { err = errors.Join(err, unix.Unmount(dir, unix.MNT_DETACH), os.Remove(dir)) }()
	return do(dir)
}

// OnDisk makes a directory whose name begins with a prefix, says where it is, and has do use it. The directory stays.
func OnDisk(prefix string, do func(dir string) error) error {
	dir, err := os.MkdirTemp("", prefix)
	if err != nil {
		return err
	}
	fmt.Fprintln(os.Stderr, "logs and configuration are in", dir)
	return do(dir)
}
