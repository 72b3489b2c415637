package cluster

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// lockFile is locked by who starts or ends the cluster. All clusters of a machine have the same namespaces, wherever
// their files are, so they share it.
var lockFile = "/run/verdict-cluster.lock"

// lock keeps others from starting or ending a cluster until unlock is called, or this process ends. If another process
// does so just now, the error names it.
func (c *Cluster) lock() (unlock func() error, err error) {
	f, err := os.OpenFile(lockFile, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return nil, fmt.Errorf("lock the cluster: %w", err)
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		who, _ := io.ReadAll(f)
		return nil, errors.Join(fmt.Errorf("%s starts or ends a cluster just now: wait until it is done (it has locked %s)",
			cmp.Or(string(who), "another process"), lockFile), f.Close())
	}
	if err == nil {
		err = f.Truncate(0)
	}
	if err == nil {
		_, err = fmt.Fprintf(f, "process %d, with its files in %s,", os.Getpid(), c.dir)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", lockFile, err), f.Close())
	}
	return f.Close, nil
}
